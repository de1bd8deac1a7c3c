"""Partial results that are to be added up over mesh axes."""

from __future__ import annotations

import dataclasses

from gshard.autosharding.specs import Spec


@dataclasses.dataclass(frozen=True)
class PartialSum:
    """What an operator leaves on each device of a tensor, to be added up over some mesh axes."""

    shape: tuple[int, ...]
    itemsize: int
    made: Spec  # how the partial results are sharded
    axes: tuple[int, ...]
    share: float = 1.0  # the part of it that is summed, at least
