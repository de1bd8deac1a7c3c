"""How long work says how far it is: one protocol for all of it, shown or silent.

Libraries below the commands know nothing of terminals. They begin stages and count steps on
whatever `Progress` they are given; `commands.show` has one that draws bars.
"""

from __future__ import annotations

from typing import Any, Protocol


class Advance(Protocol):
    """Moves a stage on by `count` units of its total, and shows a note."""

    def __call__(self, note: str = "", count: int = 1) -> None:
        """Count `count` units as done."""


class Progress(Protocol):
    """Shows how far each stage of some work is."""

    def stage(self, name: str, total: int) -> Advance:
        """Begin a stage of `total` units; call the result when some of them are done."""


class TrainingProgress(Progress, Protocol):
    """Shows the stages of preparing a training, and then its figures."""

    def note(self, text: str) -> None:
        """Show a line of its own."""

    def update(self, record: dict[str, Any], steps: int, seconds_left: float) -> None:
        """Show the newest record of a run of `steps` steps."""


class Silent:
    """Shows nothing."""

    def stage(self, name: str, total: int) -> Advance:
        """Begin a stage without a display."""
        return lambda note="", count=1: None


SILENT = Silent()
