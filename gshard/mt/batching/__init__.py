"""From a corpus to batches, each a function of (seed, step)."""
