"""What commands show on a terminal: lines, progress bars, a training, what was skipped.

If output for people can no longer be written, the work continues without it. A training has a live
panel on a terminal, and a line at intervals elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

if TYPE_CHECKING:
    from gshard.mt.data.fetch import Skipped
    from gshard.mt.progress import Advance

_GONE = (errno.EIO, errno.EPIPE)  # a terminal that was closed, a pipe without a reader


class _Screen:
    """The current standard output or error; text that cannot be written is dropped.

    If `hurried`, text that would block is dropped too: on a terminal stopped by Ctrl-S, or a pipe
    that is not read.
    """

    def __init__(self, name: str, hurried: bool):
        self._name, self._hurried = name, hurried

    @property
    def _stream(self) -> TextIO:
        stream = getattr(sys, self._name)
        # While Rich draws, it replaces the stream by its own object, which would write to this one.
        return cast(TextIO, getattr(stream, "rich_proxied_file", stream))

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._forgiven() as stream:
            if not self._waits(stream):
                stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._forgiven() as stream:
            if not self._waits(stream):
                stream.flush()

    def _waits(self, stream: TextIO) -> bool:
        try:
            return self._hurried and not select.select([], [stream.fileno()], [], 0)[1]
        except ValueError:  # not a file of the operating system, or closed
            return False

    @contextlib.contextmanager
    def _forgiven(self) -> Iterator[TextIO]:
        stream = self._stream
        try:
            yield stream
        except OSError as error:
            if error.errno in _GONE:  # Python's buffer would fail again at exit
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def screen(*, stderr: bool = False, hurried: bool = False) -> Console:
    """A console on standard output or error; `hurried` for output that may be dropped."""
    return Console(file=cast(TextIO, _Screen("stderr" if stderr else "stdout", hurried)))


@contextlib.contextmanager
def working() -> Iterator[Callable[[str], None]]:
    """The block gets a function that says on standard error what it does next.

    A terminal shows it, moving, until the block ends; anywhere else it is a line.
    """
    console = screen(stderr=True)
    if not console.is_terminal:
        yield functools.partial(say, on=console)
        return
    with console.status("starting") as status:
        yield lambda text: status.update(escape(text))


console = screen()


def say(text: str, on: Console = console) -> None:
    """A line as it is, however long."""
    on.print(text, markup=False, highlight=False, soft_wrap=True)


SECONDS = 5.0  # between lines where there is no terminal


@dataclass(frozen=True)
class Bars:
    """A bar for each stage, with the name of the last item."""

    progress: Progress

    def stage(self, name: str, total: int) -> Advance:
        """Begin a stage; the returned function advances its bar and shows a note."""
        task = self.progress.add_task(name, total=total, note="")

        def step(note: str = "", count: int = 1) -> None:
            self.progress.update(task, advance=count, note=note)

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
                say(text.rstrip())

        return step


@contextlib.contextmanager
def bars(
    on: Console = console, title: str = "{task.description:>15}", **how: Any
) -> Iterator[Bars | Lines]:
    """Progress bars while the block runs, or lines where there is no terminal."""
    if not on.is_terminal:
        yield Lines()
        return
    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=on, **how) as progress:
        yield Bars(progress)


def problems(found: Sequence[Skipped], most: int = 20) -> None:
    """Print what was skipped and why."""
    if not found:
        return
    console.print(f"[yellow]skipped {len(found)}:[/yellow]")
    for problem in found[:most]:
        say(f"  {problem.what}: {problem.why}")
    if len(found) > most:
        console.print(f"  and {len(found) - most} more; the manifest lists all")


_panel = screen(hurried=True)  # never block the training on a slow terminal


class TrainDisplay:
    """Shows stages of preparation, then step, loss, speed, routing and the time left."""

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=_panel,
        )
        self._live = Live(self._bars, console=_panel, refresh_per_second=4, transient=False)
        self._training: TaskID | None = None
        self._dev: dict[str, Any] = {}
        self._last_line = 0.0

    def __enter__(self) -> TrainDisplay:
        if _panel.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if _panel.is_terminal:
            self._live.stop()

    def stage(self, name: str, total: int) -> Advance:
        """A bar for a stage of the preparation."""
        shown = Bars(self._bars) if _panel.is_terminal else Lines()
        return shown.stage(name, total)

    def note(self, text: str) -> None:
        """A line of its own."""
        say(text, _panel)

    def update(self, record: dict[str, Any], steps: int, seconds_left: float) -> None:
        """The newest figures."""
        if record["kind"] == "dev":
            self._dev = record
            return
        if _panel.is_terminal:
            self._draw(record, steps, seconds_left)
        elif time.monotonic() - self._last_line > SECONDS or record["step"] == steps:
            self._last_line = time.monotonic()
            words = ", ".join(f"{name} {value}" for name, value in self._figures(record))
            left = f", {_clock(seconds_left)} left"
            _panel.print(f"step {record['step']:,} of {steps:,}: {words}{left}", soft_wrap=True)

    def _draw(self, record: dict[str, Any], steps: int, seconds_left: float) -> None:
        if self._training is None:
            self._training = self._bars.add_task("train", total=steps, note="")
        note = f"{_clock(seconds_left)} left"
        self._bars.update(self._training, completed=record["step"], note=note)
        table = Table.grid(padding=(0, 2))
        figures = self._figures(record)
        for _ in figures:
            table.add_column(justify="right")
        table.add_row(*(f"[dim]{name}[/dim]" for name, _ in figures))
        table.add_row(*(value for _, value in figures))
        self._live.update(Group(self._bars, table))

    def _figures(self, record: dict[str, Any]) -> list[tuple[str, str]]:
        figures = [
            ("loss", f"{record['nll']:.3f}" if record["nll"] is not None else "not finite"),
            *([("dev", f"{self._dev['nll']:.3f}")] if self._dev.get("nll") is not None else []),
            ("tokens/s", f"{record['tokens_per_second']:,.0f}"),
            ("of matmul", f"{record['share_of_matmul']:.0%}"),
        ]
        if "overflow" in record:
            figures.append(("overflow", f"{record['overflow']:.1%}"))
            figures.append(("balance", f"{record['balance']:.2f}"))
        figures.append(("padding", f"{record['padding']:.0%}"))
        figures.append(("waiting for data", f"{record['data_wait']:.1%}"))
        if record["skipped"]:
            figures.append(("skipped", f"{record['skipped']:,}"))
        return figures


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
