"""Small tables for notebooks: plain HTML that takes the notebook's own style."""

from __future__ import annotations

import html
from collections.abc import Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A table of texts; cells that begin with a digit align right."""
    top = "".join(f'<th style="text-align:left">{html.escape(h)}</th>' for h in heads)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    title = f'<caption style="text-align:left">{html.escape(caption)}</caption>' if caption else ""
    return f"<table>{title}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    side = "right" if text[:1].isdigit() else "left"
    return f'<td style="text-align:{side}">{html.escape(text)}</td>'
