"""Plans of studies: what they say, and what is refused before anything starts."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from gshard.errors import UserError
from gshard.mt.study.plan import ENDLESS, assignments, length_of, overview_table, read_plan
from gshard.nn.config import forward_flops

PLAN = """
corpus = "text"
folder = "there"
preset = "tiny"
compare = [["moe", "dense"]]

[settings.model]
model_dim = 64

[evaluate]
sentences = 12
languages = ["de", "fr"]

[baselines]
of = "dense"
steps = 50
workers = 3
sizes = [{ name = "one", pairs = 0, dropout = 0.2, rows = 8, epochs = 3 }]

[[runs]]
name = "dense"
steps = 30
settings.model = { experts = 0, expert_hidden_dim = 1024 }

[[runs]]
name = "moe"
tokens = 5_000
seed = 7
settings.batch.temperature = 3.5

[[runs]]
name = "longer"
seconds_of = "moe"
goes_on_from = "dense"
teacher = "moe"
settings.model = { experts = 0, expert_hidden_dim = 1024 }
"""


PLANS = sorted((Path(__file__).parents[3] / "studies").glob("*.toml"))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_runs_of_one_depth_have_the_same_arithmetic_for_a_token(path):
    """The plans of this repository compare what can be compared; a router's product is extra."""
    plan = read_plan(path)
    found = {}
    for run in plan.runs:
        model = run.config.model
        layers = (model.encoder_layers, model.decoder_layers)
        gates = [2 * n // 2 * model.model_dim * model.experts for n in layers]
        gates[1] *= model.experts_in == "both"
        flops = zip(forward_flops(model), gates, strict=True)
        found.setdefault(layers, set()).add(tuple(flop - gate for flop, gate in flops))
    assert all(len(arithmetic) == 1 for arithmetic in found.values()), found
    assert plan.compare or len(plan.runs) == 1


def write(folder, text=PLAN):
    path = folder / "plan.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_plan_says_what_each_run_is(tmp_path):
    plan = read_plan(write(tmp_path))
    dense, moe, longer = plan.runs
    assert plan.folder == tmp_path / "there"
    assert plan.place("moe") == tmp_path / "there" / "moe"
    assert {run.config.data.corpus for run in plan.runs} == {str(tmp_path / "text")}
    assert {run.config.model.model_dim for run in plan.runs} == {64}
    assert (dense.config.model.experts, moe.config.model.experts) == (0, 8)
    assert (dense.config.train.steps, moe.config.train.steps) == (30, ENDLESS)
    assert (moe.config.train.seed, moe.config.batch.temperature) == (7, 3.5)
    assert [length_of(run) for run in plan.runs] == ["30 steps", "5,000 tokens", "as long as moe"]
    assert (longer.goes_on_from, longer.teacher) == ("dense", "moe")
    assert plan.evaluate.languages == ("de", "fr")
    assert plan.compare == (("moe", "dense"),)
    assert plan.baselines
    assert (plan.baselines.config.steps, plan.baselines.config.workers) == (50, 3)
    assert plan.baselines.config.sizes[0].epochs == 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps = 30", "step = 30", "no setting 'step'; did you mean 'steps'"),
        ("steps = 30", "", "no length"),
        ("steps = 30", "steps = 30\nseconds = 4", "steps and seconds"),
        ("steps = 30", "steps = -3", "steps = -3"),
        ('name = "moe"', 'name = "dense"', "two runs are called 'dense'"),
        ('name = "moe"', 'name = "a/b"', "names its folder"),
        ('seconds_of = "moe"', 'seconds_of = "mow"', "no run 'mow'; did you mean 'moe'"),
        ('of = "dense"', 'of = "other"', "no run 'other'"),
        ('teacher = "moe"', 'teacher = "mow"', "no run 'mow'; did you mean 'moe'"),
        ('teacher = "moe"', 'teacher = "longer"', "needs 'longer', which comes after it"),
        ("model_dim = 64", "model_dims = 64", "did you mean 'model.model_dim'"),
        ("model_dim = 64", 'model_dim = "wide"', "not a whole number"),
        ("sentences = 12", "sentence = 12", "did you mean 'sentences'"),
        ("pairs = 0", "pairs = 5", "for 0 pairs"),
        ('[["moe", "dense"]]', '[["moe"]]', "not a list of 2, each text"),
        ('preset = "tiny"', 'preset = "tinny"', "did you mean 'tiny'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, old, new, message):
    assert old in PLAN
    with pytest.raises(UserError, match=message):
        read_plan(write(tmp_path, PLAN.replace(old, new, 1)))


def test_a_run_goes_on_only_from_an_earlier_one_with_its_settings(tmp_path):
    head, dense, moe, longer = PLAN.split("[[runs]]")
    backwards = "[[runs]]".join([head, longer, dense, moe])
    with pytest.raises(UserError, match="comes after it"):
        read_plan(write(tmp_path, backwards))
    other = longer.replace("expert_hidden_dim = 1024", "expert_hidden_dim = 512")
    with pytest.raises(UserError, match=r"model.expert_hidden_dim was 1024 and is now 512"):
        read_plan(write(tmp_path, "[[runs]]".join([head, dense, moe, other])))


def test_a_run_may_go_on_with_a_fall_that_begins_where_the_other_ended(tmp_path):
    fall = "settings.optimizer = { fall = 10, end = 40 }\n"
    longer = read_plan(write(tmp_path, PLAN + fall)).run("longer")
    assert (longer.config.optimizer.fall, longer.config.optimizer.end) == (10, 40)
    with pytest.raises(UserError, match=r"optimizer.fall was 0 and is now 11"):
        read_plan(write(tmp_path, PLAN + fall.replace("fall = 10", "fall = 11")))


def test_tables_become_the_settings_of_the_command_line():
    table = {"model": {"experts": 4, "gating": {"top_k": 1}}, "x": True, "y": ["a", "b"]}
    assert assignments(table) == ["model.experts=4", "model.gating.top_k=1", "x=true", "y=a,b"]


def test_the_status_is_readable_on_80_columns(tmp_path):
    """Names and stages are complete: a long name is folded, none is cut."""
    (tmp_path / "study.toml").write_text(PLAN.replace('"longer"', '"moe-128-experts-12-longer"'))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(overview_table(read_plan(tmp_path / "study.toml")))
    shown = console.export_text()
    assert "…" not in shown
    assert shown.count("waiting") == 4  # the stage of each run, and of the baselines
    assert all(name in shown for name in ("dense", "baselines", "5,000 tokens"))
