"""Tables as data: typed cells, numbers as they are written, and the exact ones behind them.

The exact numbers are for sorting, and for whoever wants to read the page by machine. `table.html`
makes HTML of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gshard.mt.report.gathered import Gathered

COLOURS = 12  # of runs, in tokens.css
MISSING = "\N{EN DASH}"


def colour(place: int) -> str:
    """The colour of a run in charts and tables."""
    return f"var(--s{place % COLOURS})"


def cut(text: str, most: int) -> str:
    """`text`, shortened with a mark at its end if it has more than `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def whole(value: float) -> str:
    """12,345"""
    return f"{round(value):,}"


def short(value: float) -> str:
    """Three figures and a letter: 12.3M, 600B."""
    sizes = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    size, letter = next((each for each in sizes if abs(value) >= 0.9995 * each[0]), (1.0, ""))
    value /= size
    places = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    text = f"{value:.{places}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + letter


def fixed(value: float, places: int = 1) -> str:
    """A fixed number of decimals."""
    return f"{value:.{places}f}"


def signed(value: float, places: int = 1) -> str:
    """A fixed number of decimals and always a sign, with a true minus."""
    text = f"{abs(value):.{places}f}"
    return ("" if float(text) == 0 else "+" if value > 0 else "\u2212") + text


def share(value: float) -> str:
    """12.3%"""
    return f"{value:.1%}"


def duration(seconds: float) -> str:
    """45 s, 12 min, 3 h 20 min, 4 d 2 h."""
    if seconds < 99.5:
        return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    days, hours = divmod(round(minutes / 60), 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def day(seconds: float) -> str:
    """A moment, in the time of the machine that writes the report."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


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
class Grid:
    """A table; the first cell of a row is its head. Rows in `breaks` have a line above them."""

    name: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str
    sortable: bool = False
    breaks: Sequence[int] = ()


def figure(value: float | None, written: Callable[[float], str] = fixed, kind: str = "") -> Cell:
    """A number, or a sign that there is none."""
    return Cell(MISSING, None, "none") if value is None else Cell(written(value), value, kind)


def words(text: str, kind: str = "") -> Cell:
    """Plain text."""
    return Cell(text, text, kind)


def change(value: float | None) -> Cell:
    """A difference, coloured by its sign and with the sign written."""
    return figure(value, signed, "gain" if (value or 0) > 0 else "loss" if value else "")


def run_name(run: Gathered, runs: Sequence[Gathered]) -> Cell:
    """The name of a run beside its colour in the charts."""
    return Cell(run.name, run.name, colour=colour(runs.index(run)))
