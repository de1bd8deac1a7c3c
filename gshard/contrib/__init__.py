"""Partner libraries: their own `jit`, with gshard's partitioner under it.

`gshard.contrib.equinox.filter_jit` replaces `equinox.filter_jit`, `gshard.contrib.nnx.jit` replaces
`flax.nnx.jit`. Libraries whose programs are functions of arrays (Haiku, Optax, Flax Linen, NumPyro)
need neither: `gshard.jit` takes them as `jax.jit` does.
"""
