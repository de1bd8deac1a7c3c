"""An explanation: what a program sends, why, and which annotation to change.

It prints as text, shows itself in a notebook, and writes a page.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Mapping, Sequence

from gshard.explanation.findings import EXPLAINED, LINES, QUICK, Findings, LineCost
from gshard.explanation.page import page
from gshard.forecast import Forecast
from gshard.forecast.report import per_second
from gshard.graph.readable import counted, duration, size, table
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


def text(findings: Findings) -> list[str]:
    """All but the changes of annotations, which take time to try."""
    subject = findings.subject
    lines = [findings.about, findings.bounds, findings.sentence]
    if findings.lines:
        lines += ["", "by kind", *_totals(findings.kinds)]
        lines += ["", "by line", *_totals(findings.lines, kinds=True)]
        lines += ["", "why", *_reasons(findings)]
    if subject.conflicts:
        lines += ["", "conflicting splits of the same tensors"]
        lines += [f"  {conflict}" for conflict in findings.conflicts]
    if findings.replicated:
        lines += ["", "large values that are replicated"]
        lines += [f"  {size(held):>9}  {what}" for what, held in findings.replicated]
    return lines


def fix_lines(findings: Findings) -> list[str]:
    """The changes of one annotation that send less, each tried."""
    found = findings.search()
    lines = ["what would remove it", *(f"  {fix}" for fix in found.fixes[:3])]
    if found.tried < found.candidates:
        left = counted(found.candidates - found.tried, "change")
        lines.append(f"  {left} not tried yet: explain(seconds=...) or --budget give time")
    if not found.fixes and found.tried:
        lines.append(f"  none of the {found.tried:,} changes of one annotation saves 1% of them")
    return lines


def _totals(costs: Sequence[LineCost], kinds: bool = False) -> Iterator[str]:
    for cost in costs[:LINES]:
        more = f"  {cost.kinds}" if kinds else ""
        yield (
            f"  {size(cost.sent):>9}  x {cost.runs:<5}  {cost.shown_seconds:>9}  {cost.name}{more}"
        )
    if len(costs) > LINES:
        yield f"  and {len(costs) - LINES} more"


def _reasons(findings: Findings) -> Iterator[str]:
    """For the costliest lines: which splits meet there, and who asked for them."""
    for cost in findings.lines[:EXPLAINED]:
        yield f"  {cost.name}: {cost.values[0].kind} of {size(cost.values[0].total_bytes)}"
        yield f"    {findings.why(cost)}"
    for name, links in findings.chains.items():
        shown = links if len(links) <= 5 else [*links[:2], "...", *links[-2:]]
        yield f"  {name}: {' -> '.join(shown)}"
