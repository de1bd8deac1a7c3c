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
    from gshard.autosharding.auto import auto
    from gshard.autosharding.layout import Layout
    from gshard.check import check, prove
    from gshard.checking.replay import Replay
    from gshard.checking.report import Difference, Report
    from gshard.extend import Factors, Rule, Sharding, Tile, register_rule
    from gshard.jit import Jitted, jit
    from gshard.manual import (
        auto_to_manual_spmd_partition,
        manual_to_auto_spmd_partition,
        partition_id,
    )
    from gshard.moving.inventory import Collective
    from gshard.pipelining.api import pipeline
    from gshard.runtime.compiled import Compiled
    from gshard.runtime.stages import Lowered
    from gshard.tensors.annotate import replicate, shard, split
    from gshard.tensors.presets import fsdp, tensor_parallel
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
    "fsdp",
    "jit",
    "manual",
    "manual_to_auto_spmd_partition",
    "partition_id",
    "pipeline",
    "prove",
    "register_rule",
    "replicate",
    "shard",
    "split",
    "tensor_parallel",
]

_lazy.attach(
    "gshard",
    {
        "gshard": "extend forecast manual",
        "gshard.tensors.annotate": "replicate shard split",
        "gshard.autosharding.auto": "auto",
        "gshard.autosharding.layout": "Layout",
        "gshard.check": "check prove",
        "gshard.checking.report": "Difference Report",
        "gshard.extend": "Factors Rule Sharding Tile register_rule",
        "gshard.jit": "Jitted jit",
        "gshard.manual": (
            "auto_to_manual_spmd_partition manual_to_auto_spmd_partition partition_id"
        ),
        "gshard.moving.inventory": "Collective",
        "gshard.pipelining.api": "pipeline",
        "gshard.checking.replay": "Replay",
        "gshard.runtime.compiled": "Compiled",
        "gshard.runtime.stages": "Lowered",
        "gshard.tensors.presets": "fsdp tensor_parallel",
        "gshard.tensors.uneven": "UnevenArray",
    },
)
