"""From a plan to what each device runs: nodes become collectives, and nothing is decided."""

from gshard.emission.emit import emit

__all__ = ["emit"]
