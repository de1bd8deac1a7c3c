"""Three well-known training scripts, each for `jax.jit` and for gshard.

`python -m examples.training` trains all six and prints the differences, the losses and the bytes.
"""
