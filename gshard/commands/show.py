"""What commands show on a terminal: progress bars, and messages about what was skipped."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from gshard.commands.screen import screen

if TYPE_CHECKING:
    from gshard.mt.data.fetch import Skipped
    from gshard.mt.progress import Advance

console = screen()
SECONDS = 5.0  # between lines where there is no terminal


class Bars:
    """A bar for each stage, with the name of the last item."""

    def __init__(self, progress: Progress):
        self._progress = progress

    def stage(self, name: str, total: int) -> Advance:
        """Begin a stage; the returned function advances its bar and shows a note."""
        return bar(self._progress, name, total)


def bar(progress: Progress, name: str, total: int) -> Advance:
    """A new bar among those of `progress`, as the step of a stage."""
    task = progress.add_task(name, total=total, note="")

    def step(note: str = "", count: int = 1) -> None:
        progress.update(task, advance=count, note=note)

    return step


class Lines:
    """The same without a terminal: a line when a stage begins, ends, and at intervals."""

    def stage(self, name: str, total: int) -> Advance:
        """Begin a stage; the returned function counts, and prints at intervals."""
        done, begun = 0, time.monotonic()
        printed = begun
        console.print(f"{name}: {total:,} to do" if total > 1 else f"{name} ...", soft_wrap=True)

        def step(note: str = "", count: int = 1) -> None:
            nonlocal done, printed
            done += count
            if done == total or time.monotonic() - printed > SECONDS:
                printed = time.monotonic()
                text = f"{name}: {done:,} of {total:,}, {printed - begun:.0f} s {note}"
                console.print(text.rstrip(), markup=False, soft_wrap=True)

        return step


@contextlib.contextmanager
def bars() -> Iterator[Bars | Lines]:
    """Progress bars while the block runs, or lines where there is no terminal."""
    if not console.is_terminal:
        yield Lines()
        return
    columns = (
        TextColumn("{task.description:>15}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=console) as progress:
        yield Bars(progress)


def problems(found: Sequence[Skipped], most: int = 20) -> None:
    """Print what was skipped and why."""
    if not found:
        return
    console.print(f"[yellow]skipped {len(found)}:[/yellow]")
    for problem in found[:most]:
        console.print(f"  {problem.what}: {problem.why}", markup=False, soft_wrap=True)
    if len(found) > most:
        console.print(f"  and {len(found) - most} more; the manifest lists all")
