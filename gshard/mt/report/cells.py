"""Tables as data: typed cells, and the exact number behind every rounded one.

The exact numbers are for sorting, and for whoever wants to read the page by machine. `table.html`
makes HTML of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gshard.mt.report.gathered import Run
from gshard.mt.report.wording import fixed, signed

COLOURS = 12  # of runs, in tokens.css


def colour(place: int) -> str:
    """The colour of a run in charts and tables."""
    return f"var(--s{place % COLOURS})"


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and the exact number or text behind it."""

    text: str
    value: float | str | None = None
    kind: str = ""  # a class of the style sheet
    colour: str = ""  # of a dot before the text
    detail: str = ""  # smaller, after the text
    language: str = ""  # a code that the script completes with the language's name
    mark: str = ""  # an abbreviation before the text, and what it means
    hint: str = ""


@dataclass(frozen=True)
class Column:
    """The head of a column: its title, and a sentence that explains it."""

    title: str
    hint: str = ""
    text: bool = False  # text is aligned left and sorts by letters


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row is its head. Rows in `breaks` have a line above them."""

    name: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str
    sortable: bool = False
    breaks: Sequence[int] = ()


def figure(value: float | None, written: Callable[[float | None], str] = fixed) -> Cell:
    """A number."""
    return Cell(written(value), value, "none" if value is None else "")


def words(text: str, kind: str = "") -> Cell:
    """Plain text."""
    return Cell(text, text, kind)


def change(value: float | None) -> Cell:
    """A difference, coloured by its sign and with the sign written."""
    kind = "none" if value is None else "gain" if value > 0 else "loss" if value < 0 else ""
    return Cell(signed(value), value, kind)


def run_name(run: Run, runs: Sequence[Run]) -> Cell:
    """The name of a run beside its colour in the charts."""
    return Cell(run.name, run.name, colour=colour(runs.index(run)))
