"""Rematerialization, chosen so that a training step fits into memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from gshard.nn.config import Remat


def choose_remat(remat: Remat | int, memory: Callable[[Remat], int]) -> Remat:
    """A config's `remat`, or for a budget in bytes the cheapest setting that fits in it.

    `memory` says how many bytes a step holds on each device under a setting, such as
    `gshard.jit(step).lower(...).forecast().memory_bytes` of a `train_step` with this `remat`.
    """
    if not isinstance(remat, int):
        return remat
    settings: tuple[Remat, ...] = get_args(Remat)  # the fastest first
    for setting in settings:
        if (needed := memory(setting)) <= remat:
            return setting
    raise ValueError(
        f"a step holds about {needed:,} bytes on each device even with rematerialization, but "
        f"remat={remat:,}: use more devices, a smaller batch or bfloat16"
    )
