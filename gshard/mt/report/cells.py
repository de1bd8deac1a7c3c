"""A table as HTML: typed cells, and the exact number behind every rounded one.

The exact numbers are for sorting, and for whoever wants to read the page by machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gshard.mt.report.gathered import Run
from gshard.mt.report.wording import fixed, safe, signed

COLOURS = 12  # of runs, in page.css; page.js counts them too


@dataclass(frozen=True)
class Cell:
    """What a cell shows, as safe HTML, and the exact number or text behind it."""

    html: str
    value: float | str | None = None
    kind: str = ""  # a class of the style sheet


@dataclass(frozen=True)
class Column:
    """The head of a column: its title, and a sentence that explains it."""

    title: str
    hint: str = ""
    text: bool = False  # text stands left and sorts by letters


def figure(value: float | None, written: Callable[[float | None], str] = fixed) -> Cell:
    """A number."""
    return Cell(safe(written(value)), value, "none" if value is None else "")


def words(text: str, kind: str = "") -> Cell:
    """Plain text."""
    return Cell(safe(text), text, kind)


def change(value: float | None) -> Cell:
    """A difference, coloured by its sign and with the sign written."""
    kind = "none" if value is None else "gain" if value > 0 else "loss" if value < 0 else ""
    return Cell(safe(signed(value)), value, kind)


def run_name(run: Run, runs: Sequence[Run]) -> Cell:
    """The name of a run beside its colour in the charts."""
    place = runs.index(run)
    return Cell(f'<i class="key s{place % COLOURS}"></i>{safe(run.name)}', run.name)


def table(
    name: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    caption: str,
    sortable: bool = False,
    breaks: Sequence[int] = (),
) -> str:
    """An HTML table; the first cell of a row is its head. A rule stands above rows in `breaks`."""
    heads = []
    for column in columns:
        side = ' class="text"' if column.text else ""
        hint = f' title="{safe(column.hint)}"' if column.hint else ""
        title = safe(column.title)
        inner = f'<button type="button"{hint}>{title}</button>' if sortable else title
        heads.append(f'<th scope="col"{side}{"" if sortable else hint}>{inner}</th>')
    lines = []
    for place, row in enumerate(rows):
        cells: list[str] = []
        for column, cell in zip(columns, row, strict=True):
            kinds = " ".join(filter(None, ("text" if column.text else "", cell.kind)))
            attributes = f' class="{kinds}"' if kinds else ""
            if cell.value is not None:
                attributes += f' data-value="{safe(cell.value)}"'
            tag = "td" if cells else "th"
            scope = "" if cells else ' scope="row"'
            cells.append(f"<{tag}{scope}{attributes}>{cell.html}</{tag}>")
        rule = ' class="break"' if place in breaks else ""
        lines.append(f"<tr{rule}>{''.join(cells)}</tr>")
    kind = ' class="sortable"' if sortable else ""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{safe(caption)}">'
        f'<table id="{safe(name)}"{kind}><caption>{safe(caption)}</caption>'
        f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>\n{chr(10).join(lines)}\n</tbody>"
        "</table></div>"
    )
