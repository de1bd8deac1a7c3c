"""`gshard report` and `gshard study`: a page of runs; a plan of runs, carried out and reported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gshard.commands import show
from gshard.commands.options import Runs
from gshard.errors import one_of

if TYPE_CHECKING:
    from gshard.mt.study.plan import Study

PlanFile = Annotated[Path, typer.Argument(help="the plan, a TOML file")]
Status = Annotated[bool, typer.Option("--status", help="only show what is done and what is next")]
Report = Annotated[bool, typer.Option("--report", help="only write the report of what is scored")]
Only = Annotated[
    str, typer.Option(help="names of runs, or `baselines`, separated by commas", show_default="all")
]
Until = Annotated[str, typer.Option(help="trained, translated or scored: the last stage to do")]
Minutes = Annotated[
    float,
    typer.Option(
        help="time budget: start no stage after it, and stop a running one (it can be resumed)"
    ),
]
Ahead = Annotated[
    int, typer.Option(help="processes that compile the programs of all runs beforehand", min=0)
]
Out = Annotated[
    Path | None, typer.Option(help="folder of the report", show_default="FOLDER/report")
]


def study(
    plan: PlanFile,
    status: Status = False,
    report: Report = False,
    only: Only = "",
    until: Until = "scored",
    minutes: Minutes = float("inf"),
    compile_ahead: Ahead = 0,
    out: Out = None,
) -> None:
    """Train, translate and score the runs of a plan. Run it again to continue."""
    from gshard.mt.study.plan import read_plan

    opened = read_plan(plan)
    if not (status or report):
        _work(opened, only, until, 60.0 * minutes, compile_ahead)
    if status or not report:
        _show(opened)
    if report or (until == "scored" and not status):
        _report(opened, out)


def _work(plan: Study, only: str, until: str, seconds: float, processes: int) -> None:
    from gshard.mt import hosts
    from gshard.mt.data.corpus import Corpus
    from gshard.mt.study.plan import STAGES
    from gshard.mt.study.queue import Shown, Wanted, work

    stage = one_of("stage", until, STAGES[2:])
    Corpus.open(plan.runs[0].config.data.corpus)
    hosts.start(plan.runs[0].config.devices.count)
    hosts.cache_programs()

    names = tuple(name for name in only.split(",") if name)
    shown = Shown(show.say, show.TrainDisplay, show.bars)
    try:
        done = work(plan, Wanted(stage, names, seconds, processes), shown)
    except KeyboardInterrupt:
        show.say("interrupted; run the same command again to continue")
        raise typer.Exit(130) from None
    if not done:
        _show(plan)
        raise typer.Exit(0 if seconds < float("inf") else 130)


def _show(plan: Study) -> None:
    from gshard.mt.study.plan import lines, overview_table

    show.console.print(overview_table(plan))
    for line in lines(plan):
        show.say(line)


def _report(plan: Study, out: Path | None) -> None:
    from gshard.mt.study.results import write_results

    for path in write_results(plan, out or plan.folder / "report"):
        show.say(f"written: {path}")


def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(help="the page", show_default="RUN/report.html; report.html for several"),
    ] = None,
) -> None:
    """Write one self-contained page: quality, losses, data, experts and translations of runs."""
    from gshard.mt.report import write_report

    path, shown = write_report(runs, out)
    for run in shown:
        for problem in run.problems:
            show.say(f"{run.name}: {problem}")
        if run.evaluation is None:
            show.say(f"{run.name}: not evaluated yet (`gshard evaluate {run.folder}`)")
    show.say(f"report: {path}")
