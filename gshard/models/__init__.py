"""Which model on which devices: forecasts of the family, what fits, and the paper's tables."""
