"""Passes over a plan: less is sent, or the same in fewer collectives; values stay what they are."""

from __future__ import annotations

from collections.abc import Callable

from jax.extend.core import Jaxpr

from gshard.improve.drop_unused import drop_unused
from gshard.improve.share import share

Pass = Callable[[Jaxpr], Jaxpr]

PASSES: tuple[Pass, ...] = (share, drop_unused)
