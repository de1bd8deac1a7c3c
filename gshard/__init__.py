"""gshard: annotate a few tensors, partition the whole program.

The public names are those below, those of `gshard.manual` (collectives for regions that are
partitioned by hand), `gshard.forecast` (time and memory before a run), `gshard.extend` (rules for
operators), `gshard.contrib` (Equinox and Flax NNX) and `gshard.nn` (models), and the command
`gshard`. Every other module is private and may change from one release to the next.
"""

import typing as _typing
from importlib import metadata as _metadata

from gshard import _lazy

if _typing.TYPE_CHECKING:
    from gshard import extend, forecast, manual
    from gshard.annotate import replicate, shard, split
    from gshard.autosharding.auto import auto
    from gshard.autosharding.layout import Layout
    from gshard.check import check
    from gshard.checking.report import Difference, Report
    from gshard.jit import Jitted, jit
    from gshard.manual import (
        auto_to_manual_spmd_partition,
        manual_to_auto_spmd_partition,
        partition_id,
    )
    from gshard.moving.inventory import Collective
    from gshard.operators.register import register_rule
    from gshard.operators.rule import Rule
    from gshard.replaying.replay import Replay
    from gshard.runtime.compiled import Compiled
    from gshard.runtime.stages import Lowered
    from gshard.tensors.factors import Factors
    from gshard.tensors.sharding import Sharding
    from gshard.tensors.tile import Tile
    from gshard.tensors.uneven import UnevenArray

try:
    __version__ = _metadata.version("gshard")
except _metadata.PackageNotFoundError:  # imported from a source tree, not installed
    __version__ = "0+unknown"

__all__ = [
    "Collective",
    "Compiled",
    "Difference",
    "Factors",
    "Jitted",
    "Layout",
    "Lowered",
    "Replay",
    "Report",
    "Rule",
    "Sharding",
    "Tile",
    "UnevenArray",
    "__version__",
    "auto",
    "auto_to_manual_spmd_partition",
    "check",
    "extend",
    "forecast",
    "jit",
    "manual",
    "manual_to_auto_spmd_partition",
    "partition_id",
    "register_rule",
    "replicate",
    "shard",
    "split",
]

_lazy.attach(
    "gshard",
    {
        "gshard": "extend forecast manual",
        "gshard.annotate": "replicate shard split",
        "gshard.autosharding.auto": "auto",
        "gshard.autosharding.layout": "Layout",
        "gshard.check": "check",
        "gshard.checking.report": "Difference Report",
        "gshard.jit": "Jitted jit",
        "gshard.manual": (
            "auto_to_manual_spmd_partition manual_to_auto_spmd_partition partition_id"
        ),
        "gshard.moving.inventory": "Collective",
        "gshard.operators.register": "register_rule",
        "gshard.operators.rule": "Rule",
        "gshard.replaying.replay": "Replay",
        "gshard.runtime.compiled": "Compiled",
        "gshard.runtime.stages": "Lowered",
        "gshard.tensors.factors": "Factors",
        "gshard.tensors.sharding": "Sharding",
        "gshard.tensors.tile": "Tile",
        "gshard.tensors.uneven": "UnevenArray",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
