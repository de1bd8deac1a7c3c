"""gshard: annotate a few tensors, partition the whole program."""

from gshard.annotate import replicate, shard, split
from gshard.explain import Collective
from gshard.jit import Compiled, Lowered, jit
from gshard.manual import (
    auto_to_manual_spmd_partition,
    manual_to_auto_spmd_partition,
    partition_id,
)
from gshard.sharding import Sharding
from gshard.uneven import UnevenArray

__all__ = [
    "Collective",
    "Compiled",
    "Lowered",
    "Sharding",
    "UnevenArray",
    "auto_to_manual_spmd_partition",
    "jit",
    "manual_to_auto_spmd_partition",
    "partition_id",
    "replicate",
    "shard",
    "split",
]
