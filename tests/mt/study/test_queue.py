"""A small study from its plan to its report, interrupted at every stage."""

import contextlib
import json

import jax
import pytest

from benchmarks import studied
from gshard.errors import UserError
from gshard.mt.atomic import known_object
from gshard.mt.run import Run
from gshard.mt.study import queue
from gshard.mt.study.plan import TRAINED, entry, lines, read_plan
from gshard.mt.study.queue import Shown, Wanted, work
from gshard.mt.study.results import write_results
from tests.mt.runs import Notes, losses

PLAN = """
corpus = {corpus}
folder = "runs"
preset = "tiny"
compare = [["moe", "dense"]]

[settings]
devices.count = 1
vocabulary = {{ source_size = 500, target_size = 450 }}
optimizer = {{ warmup = 10, rise = 3, fused = true }}
train = {{ save_every = 2, log_every = 1, dev_batches = 1 }}
batch = {{ rows = 8, source_length = 48, target_length = 40 }}

[settings.model]
encoder_layers = 2
decoder_layers = 2
model_dim = 16
hidden_dim = 32
heads = 2
key_dim = 8
value_dim = 8
groups = 8

[evaluate]
sentences = 3
beam = 2
rows = 8
shortest = 48
{baselines}
[[runs]]
name = "dense"
steps = 6
settings.model = {{ experts = 0, expert_hidden_dim = 64 }}

[[runs]]
name = "moe"
tokens = {tokens}
settings.model.experts = 4

[[runs]]
name = "longer"
steps = 8
goes_on_from = "dense"
settings.model = {{ experts = 0, expert_hidden_dim = 64 }}
"""
TOKENS = 1_000


def planned(folder, corpus, baselines=""):
    path = folder / "plan.toml"
    where = json.dumps(str(corpus.folder))
    path.write_text(PLAN.format(corpus=where, tokens=TOKENS, baselines=baselines))
    return read_plan(path)


class Interrupted(Notes):
    """A display at which somebody presses Ctrl-C when a step is shown."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def update(self, record, steps, seconds_left):
        super().update(record, steps, seconds_left)
        if record["kind"] == "train" and record["step"] == self.at:
            raise KeyboardInterrupt


def shown(progress=None):
    progress = progress or Notes()
    said = []
    shows = Shown(
        said.append,
        lambda: contextlib.nullcontext(progress),
        lambda: contextlib.nullcontext(Notes()),
    )
    return shows, said


def all_stages(plan):
    return [entry(plan, run).stage for run in plan.runs]


@pytest.fixture(scope="module", autouse=True)
def _one_device():
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", 8)


@pytest.mark.slow
def test_a_training_goes_on_where_it_stopped(tmp_path, corpus):
    plan = planned(tmp_path, corpus)
    assert all_stages(plan) == ["waiting"] * 3
    assert work(plan, Wanted(seconds=0.0), shown()[0]) is False  # no time: nothing is begun
    assert all_stages(plan) == ["waiting"] * 3
    _interrupted_training(plan)


def _interrupted_training(plan):
    with pytest.raises(KeyboardInterrupt):
        work(plan, Wanted("trained", ("dense",)), shown(Interrupted(at=4))[0])
    assert all_stages(plan) == ["begun", "waiting", "waiting"]
    assert "next: dense, to be trained" in lines(plan)[1]

    again = Notes()
    assert work(plan, Wanted("trained", ("dense",)), shown(again)[0])
    assert any(note.startswith("resuming at step") for note in again.notes)
    run = Run.open(plan.place("dense"))
    assert sorted(losses(run)) == [1, 2, 3, 4, 5, 6]
    trained = known_object(plan.place("dense") / TRAINED)
    assert trained["step"] == 6
    assert trained["tokens"] == [r for r in run.metrics() if r["kind"] == "train"][-1]["tokens"]
    assert all_stages(plan) == ["trained", "waiting", "waiting"]


@pytest.mark.slow
def test_a_study_from_its_plan_to_its_report(tmp_path, corpus):
    plan = planned(tmp_path, corpus)
    _interrupted_training(plan)
    run = Run.open(plan.place("dense"))
    # The rest, with a second look at what is done: it is not trained again.
    silent = Notes()
    assert work(plan, Wanted("translated"), shown(silent)[0])
    assert all_stages(plan) == ["translated"] * 3
    assert {record["step"] for record in silent.records} >= {7, 8}
    longer = losses(Run.open(plan.place("longer")))
    assert {n: longer[n] for n in range(1, 7)} == losses(run)  # it began with these steps
    assert sorted(longer) == list(range(1, 9))

    moe = entry(plan, plan.run("moe"))
    assert 0.5 * TOKENS < moe.tokens < 2 * TOKENS

    _scored_without_weights(plan)


def _scored_without_weights(plan):
    """Scores and report need what was translated, and nothing else."""
    for run in plan.runs:
        checkpoints = plan.place(run.name) / "checkpoints"
        checkpoints.rename(checkpoints.with_name("elsewhere"))
    with pytest.raises(UserError, match=r"no run of .* is scored yet"):
        write_results(plan, plan.folder / "report")
    assert work(plan, Wanted(), shown()[0])
    assert all_stages(plan) == ["scored"] * 3
    written = write_results(plan, plan.folder / "report")
    assert {path.name for path in written} == {
        "study.json",
        "tables.md",
        "report.html",
    }
    results = json.loads((plan.folder / "report" / "study.json").read_text())
    assert [model["name"] for model in results["models"]] == ["dense", "moe", "longer"]
    assert set(studied.findings(plan)["recited"]) == {"dense", "moe", "longer"}
    (compared,) = results["comparisons"]
    assert compared["groups"]["all"]["chrf"]["languages"] == 3
    evaluation = known_object(plan.place("moe") / "evaluation.json")
    assert results["models"][1]["chrf"] == pytest.approx(evaluation["averages"]["all"]["chrf"])
    assert len(evaluation["experts"]["encoder"]["de-en"][0]) == 4


def test_what_is_missing_is_said(tmp_path, corpus):
    plan = planned(tmp_path, corpus)
    with pytest.raises(UserError, match="plans no run 'dens'; did you mean 'dense'"):
        work(plan, Wanted(only=("dens",)), shown()[0])
    with pytest.raises(UserError, match="dense is not trained yet, and longer continues it"):
        work(plan, Wanted(only=("longer",)), shown()[0])
    queue.prepare(plan, plan.run("dense"))
    with pytest.raises(UserError, match="has not been translated with yet"):
        queue.score(plan, plan.run("dense"), Notes())
