"""An explanation: what a program sends, why, and which annotation to change.

It prints as text, shows itself in a notebook, and writes a page.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence

from gshard.explanation.findings import EXPLAINED, QUICK, Findings
from gshard.explanation.page import page
from gshard.explanation.text import fix_lines, text
from gshard.forecast import Forecast
from gshard.forecast.report import per_second
from gshard.graph.readable import duration, size, table
from gshard.pages.template import have_pages


class Explanation(Findings):
    """What a program sends and why; `str` and `print` give all of it."""

    def __str__(self) -> str:
        lines = [*text(self), "", *fix_lines(self)] if self.subject.sent else text(self)
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<gshard.Explanation of {self.name}: {self.sentence} print() shows all>"

    def page(self, growth: Mapping[int, Forecast] | None = None) -> str:
        """All of it as one HTML file that needs nothing else.

        `growth` are forecasts of the same on other numbers of devices, for a plot of them.
        """
        return page(self, growth)

    def summary_html(self) -> str:
        """Five lines and a link to the page: how notebooks show a lowered program."""
        forecast = self.forecast
        room = "fits in" if forecast.fits else "does not fit in"
        held, has = size(forecast.memory_bytes), size(forecast.hardware.memory)
        lines = [
            f"<b>{html.escape(self.sentence)}</b>",
            html.escape(self.about),
            f"{duration(forecast.step_seconds)} per step, {per_second(forecast)} per second",
            f"{held} on each device, {room} {has}",
            self._link(),
        ]
        return "<br>".join(lines)

    def _link(self) -> str:
        """The page as a file to open: a link that holds it, where making it is quick."""
        written = "<code>.page()</code> returns it"
        if len(self.subject.equations) > QUICK or not have_pages():
            return written
        data = f"data:text/html;base64,{base64.b64encode(self.page().encode()).decode()}"
        name = html.escape(f"{self.name}.html", quote=True)
        return f'<a download="{name}" href="{data}">open the page</a> ({written})'

    def _repr_html_(self) -> str:
        """The sentence, and the costliest lines with their reasons: how notebooks show it."""
        rows: list[Sequence[str]] = [
            (cost.name, size(cost.sent), duration(cost.seconds), cost.kinds, self.why(cost))
            for cost in self.lines[:EXPLAINED]
        ]
        heading = f"<p><b>{html.escape(self.sentence)}</b><br>{html.escape(self.about)}</p>"
        return heading + (
            table(("line", "sent", "time", "collectives", "why"), rows) if rows else ""
        )
