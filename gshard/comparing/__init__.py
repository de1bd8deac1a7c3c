"""Training steps as their authors wrote them: XLA's program and gshard's, and what fits."""
