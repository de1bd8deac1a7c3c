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
    from gshard import extend as extend
    from gshard import forecast as forecast
    from gshard import manual as manual
    from gshard.autosharding.auto import auto as auto
    from gshard.autosharding.layout import Layout as Layout
    from gshard.check import check as check
    from gshard.check import prove as prove
    from gshard.checking.replay import Replay as Replay
    from gshard.checking.report import Difference as Difference
    from gshard.checking.report import Report as Report
    from gshard.extend import Factors as Factors
    from gshard.extend import Rule as Rule
    from gshard.extend import Sharding as Sharding
    from gshard.extend import Tile as Tile
    from gshard.extend import register_rule as register_rule
    from gshard.jit import Jitted as Jitted
    from gshard.jit import jit as jit
    from gshard.manual import auto_to_manual_spmd_partition as auto_to_manual_spmd_partition
    from gshard.manual import manual_to_auto_spmd_partition as manual_to_auto_spmd_partition
    from gshard.manual import partition_id as partition_id
    from gshard.moving.inventory import Collective as Collective
    from gshard.pipelining.api import pipeline as pipeline
    from gshard.runtime.compiled import Compiled as Compiled
    from gshard.runtime.stages import Lowered as Lowered
    from gshard.tensors.annotate import replicate as replicate
    from gshard.tensors.annotate import shard as shard
    from gshard.tensors.annotate import split as split
    from gshard.tensors.presets import fsdp as fsdp
    from gshard.tensors.presets import tensor_parallel as tensor_parallel
    from gshard.tensors.uneven import UnevenArray as UnevenArray

try:
    __version__ = _metadata.version("gshard")
except _metadata.PackageNotFoundError:  # imported from a source tree, not installed
    __version__ = "0+unknown"

_names = _lazy.attach(
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
__all__ = sorted(["__version__", *_names])
