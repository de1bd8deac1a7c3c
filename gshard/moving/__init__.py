"""Communication: planners of reshards, halos and reductions, and their collectives."""
