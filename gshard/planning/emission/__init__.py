"""From a plan to the per-device program: nodes become collectives; no decisions are made here."""

from gshard.planning.emission.emit import emit

__all__ = ["emit"]
