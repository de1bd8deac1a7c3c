"""What a terminal shows of a study: a row for each run, and what is next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gshard.mt.study.ledger import baselines_stage, entry
from gshard.mt.study.plan import Study

if TYPE_CHECKING:
    from rich.table import Table


def overview_table(plan: Study) -> Table:
    """A row for each run, in the order of the plan."""
    from rich import box
    from rich.table import Table

    table = Table(title=str(plan.path), box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("run", no_wrap=True)
    for column in ("stage", "planned"):
        table.add_column(column)
    for column in ("steps", "tokens", "minutes", "dev loss", "BLEU", "chrF++"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in plan.runs:
        found = entry(plan, run)
        begun = found.reached("begun")
        numbers = [
            f"{found.step:,}" if begun else "",
            f"{found.tokens / 1e6:.1f}M" if begun else "",
            f"{found.seconds / 60:.1f}" if begun else "",
            *(
                "" if value is None else f"{value:.{digits}f}"
                for value, digits in ((found.dev_nll, 3), (found.bleu, 1), (found.chrf, 1))
            ),
        ]
        table.add_row(run.name, found.stage, found.length, *numbers)
    if stage := baselines_stage(plan):
        table.add_row("baselines", stage, "", *[""] * 6)
    return table


def lines(plan: Study) -> list[str]:
    """What is done, and what comes next."""
    entries = [entry(plan, run) for run in plan.runs]
    done = sum(each.stage == "scored" for each in entries)
    found = [f"{done} of {len(entries)} runs are done"]
    following = [each for each in entries if each.stage != "scored"]
    if following:
        first = following[0]
        stages = {"trained": "to be translated with", "translated": "to be scored"}
        what = stages.get(first.stage, "to be trained")
        found.append(f"next: {first.name}, {what} (`gshard study {plan.path}` continues)")
    elif baselines_stage(plan) not in (None, "scored"):
        found.append(f"next: the baselines (`gshard study {plan.path}` continues)")
    return found
