"""The progress of a training: a live panel on a terminal, a line at intervals elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from gshard.commands.screen import screen
from gshard.commands.show import SECONDS, Lines, bar

if TYPE_CHECKING:
    from gshard.mt.progress import Advance

console = screen(hurried=True)  # never block the training on a slow terminal


class TrainDisplay:
    """Shows stages of preparation, then step, loss, speed, routing and the time left."""

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
        )
        self._live = Live(self._bars, console=console, refresh_per_second=4, transient=False)
        self._training: TaskID | None = None
        self._dev: dict[str, Any] = {}
        self._last_line = 0.0

    def __enter__(self) -> TrainDisplay:
        if console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if console.is_terminal:
            self._live.stop()

    def stage(self, name: str, total: int) -> Advance:
        """A bar for a stage of the preparation."""
        if not console.is_terminal:
            return Lines().stage(name, total)
        return bar(self._bars, name, total)

    def note(self, text: str) -> None:
        """A line of its own."""
        console.print(text, markup=False, soft_wrap=True)

    def update(self, record: dict[str, Any], steps: int, seconds_left: float) -> None:
        """The newest figures."""
        if record["kind"] == "dev":
            self._dev = record
            return
        if console.is_terminal:
            self._draw(record, steps, seconds_left)
        elif time.monotonic() - self._last_line > SECONDS or record["step"] == steps:
            self._last_line = time.monotonic()
            words = ", ".join(f"{name} {value}" for name, value in self._figures(record))
            left = f", {_clock(seconds_left)} left"
            console.print(f"step {record['step']:,} of {steps:,}: {words}{left}", soft_wrap=True)

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
