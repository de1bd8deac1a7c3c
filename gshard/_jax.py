"""Everything gshard takes from JAX's private modules, so that a new release is adapted to here."""

from jax._src import source_info_util
from jax._src.ad_checkpoint import remat_p
from jax._src.core import Var
from jax._src.interpreters import ad, batching, mlir
from jax._src.interpreters.partial_eval import dce_jaxpr
from jax._src.lax.lax import optimization_barrier_p, split_p, stack_p, tile_p, unstack_p

__all__ = [
    "Var",
    "ad",
    "batching",
    "dce_jaxpr",
    "mlir",
    "optimization_barrier_p",
    "remat_p",
    "source_info_util",
    "split_p",
    "stack_p",
    "tile_p",
    "unstack_p",
]
