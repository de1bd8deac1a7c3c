"""`gshard report`: one HTML page from the folders of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gshard.commands.options import Runs


def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(help="the page", show_default="RUN/report.html; report.html for several"),
    ] = None,
) -> None:
    """Write one self-contained page: quality, losses, data, experts and translations of runs."""
    from gshard.commands.show import console
    from gshard.mt.report import write_report

    path, shown = write_report(runs, out)
    for run in shown:
        for problem in run.problems:
            console.print(f"{run.name}: {problem}", markup=False, soft_wrap=True)
        if run.evaluation is None:
            line = f"{run.name}: not evaluated yet (`gshard evaluate {run.folder}`)"
            console.print(line, markup=False, soft_wrap=True)
    console.print(f"report: {path}", markup=False, soft_wrap=True)
