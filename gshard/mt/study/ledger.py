"""The progress of a study, read from the folders of its runs: there is no other record.

A stage that ended leaves a small file in the run's folder (`trained.json`, `translated.json`,
`evaluation.json`), so that a study can be resumed after any interruption, also on another machine,
to which only these and the translations have to be copied for scoring.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gshard.mt import atomic
from gshard.mt.evaluation.baselines import BASELINES
from gshard.mt.evaluation.evaluate import EVALUATION
from gshard.mt.run import read_metrics
from gshard.mt.study.plan import PlannedRun, Study

if TYPE_CHECKING:
    from rich.table import Table

Stage = Literal["waiting", "begun", "trained", "translated", "scored"]
STAGES: tuple[Stage, ...] = ("waiting", "begun", "trained", "translated", "scored")
TRAINED, TRANSLATED = "trained.json", "translated.json"
BASELINES_TRANSLATED = "baselines-translated.json"


@dataclass(frozen=True)
class Entry:
    """What is known of one run of a study."""

    name: str
    label: str
    stage: Stage
    length: str  # as the plan has it
    step: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    dev_nll: float | None = None
    bleu: float | None = None
    chrf: float | None = None

    def reached(self, stage: Stage) -> bool:
        """Whether that stage is done."""
        return STAGES.index(self.stage) >= STAGES.index(stage)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None if there is none, or half of one."""
    try:
        return atomic.read_object(path)
    except (OSError, ValueError):
        return None


def entry(plan: Study, run: PlannedRun) -> Entry:
    """How far a run is."""
    place = plan.place(run.name)
    trained, translated = read_json(place / TRAINED), read_json(place / TRANSLATED)
    scores = read_json(place / EVALUATION)
    records = read_metrics(place)
    dev = [record for record in records if record.get("kind") == "dev"]
    last: dict[str, Any] = trained or (records[-1] if records else {})
    stage: Stage = "begun" if records else "waiting"
    if trained:
        stage = "trained"
        if translated and translated["step"] == trained["step"]:
            stage = "translated"
            if scores and scores.get("checkpoint") == translated["step"]:
                stage = "scored"
    means = scores["averages"]["all"] if scores and stage == "scored" else {}
    return Entry(
        run.name,
        run.label,
        stage,
        length_of(run),
        int(last.get("step", 0)),
        float(last.get("tokens", 0.0)),
        float(last.get("seconds", 0.0)),
        float(dev[-1]["nll"]) if dev and dev[-1].get("nll") is not None else None,
        means.get("bleu"),
        means.get("chrf"),
    )


def length_of(run: PlannedRun) -> str:
    """How long a run is planned, in words."""
    if run.seconds_of:
        return f"as long as {run.seconds_of}"
    if run.seconds:
        return f"{run.seconds:g} s"
    return f"{run.tokens:,} tokens" if run.tokens else f"{run.steps:,} steps"


def baselines_stage(plan: Study) -> Stage | None:
    """How far the baselines are; None if none are planned."""
    if plan.baselines is None:
        return None
    place = plan.place(plan.baselines.of)
    if (place / BASELINES).is_file():
        return "scored"
    if (place / BASELINES_TRANSLATED).is_file():
        return "translated"
    return "begun" if (place / "baselines").is_dir() else "waiting"


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
