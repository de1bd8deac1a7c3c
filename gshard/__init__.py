"""gshard: annotate a few tensors, partition the whole program."""

from gshard.annotate import replicate, shard, split
from gshard.arrays import UnevenArray
from gshard.explain import Collective
from gshard.jit import Compiled, Lowered, jit
from gshard.sharding import Sharding

__all__ = [
    "Collective",
    "Compiled",
    "Lowered",
    "Sharding",
    "UnevenArray",
    "jit",
    "replicate",
    "shard",
    "split",
]
