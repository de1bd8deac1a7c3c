"""Numbers with their nouns and units, and small tables for notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence


def counted(count: int, noun: str) -> str:
    """A number and its noun, in the plural unless it is one."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def size(count: float) -> str:
    """Bytes in a readable unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def duration(seconds: float) -> str:
    """Seconds in a readable unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A table of texts, as HTML in the notebook's own style; cells with a digit align right."""
    top = "".join(f'<th style="text-align:left">{html.escape(h)}</th>' for h in heads)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    title = f'<caption style="text-align:left">{html.escape(caption)}</caption>' if caption else ""
    return f"<table>{title}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    side = "right" if text[:1].isdigit() else "left"
    return f'<td style="text-align:{side}">{html.escape(text)}</td>'
