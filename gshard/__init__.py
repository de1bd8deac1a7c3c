"""gshard: annotate a few tensors, partition the whole program.

Public are the names below, `gshard.manual`, `gshard.nn` and the command `gshard`: see
docs/reference/api.md. Every other module is private and may change from one release to the next.
"""

from importlib import metadata as _metadata

from gshard import manual
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

try:
    __version__ = _metadata.version("gshard")
except _metadata.PackageNotFoundError:  # the source tree on the path, nothing installed
    __version__ = "0+unknown"

__all__ = [
    "Collective",
    "Compiled",
    "Lowered",
    "Sharding",
    "UnevenArray",
    "__version__",
    "auto_to_manual_spmd_partition",
    "jit",
    "manual",
    "manual_to_auto_spmd_partition",
    "partition_id",
    "replicate",
    "shard",
    "split",
]


def __dir__() -> list[str]:
    return sorted(__all__)
