"""`gshard study` as users run it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gshard.cli import app
from gshard.mt.study.plan import read_plan
from tests.mt.study.test_plan import write
from tests.mt.study.test_queue import planned

ROOT = Path(__file__).parents[3]
BASELINES = """
[baselines]
of = "dense"
steps = 12
workers = 2
sizes = [{ name = "only", pairs = 0, dropout = 0.1, rows = 4, epochs = 2 }]
"""


def test_the_status_of_a_study_that_has_not_begun(tmp_path):
    result = CliRunner().invoke(app, ["study", str(write(tmp_path)), "--status"])
    assert result.exit_code == 0, result.output
    assert "0 of 3 runs are done" in result.output
    assert "next: dense, to be trained" in result.output
    assert "as long as moe" in " ".join(result.output.split())


def test_a_stage_that_there_is_not(tmp_path):
    result = CliRunner().invoke(app, ["study", str(write(tmp_path)), "--until", "score"])
    assert "unknown stage 'score'; did you mean 'scored'" in str(result.exception)


def test_the_plans_of_the_repository_can_be_read():
    figure, small = (read_plan(ROOT / "studies" / f"{name}.toml") for name in ("figure", "small"))
    assert {run.config.model.experts for run in figure.runs} == {0, 8, 32, 128}
    for plan in (figure, small):
        assert plan.baselines
        for run in plan.runs:  # equal arithmetic per token: two experts, or a layer twice as wide
            model = run.config.model
            width = model.expert_hidden_dim or model.hidden_dim
            assert width == (model.hidden_dim if model.experts else 2 * model.hidden_dim)


@pytest.mark.slow
def test_one_command_does_all_of_it(tmp_path, corpus):
    plan = planned(tmp_path, corpus, BASELINES)
    result = CliRunner().invoke(app, ["study", str(plan.path)])
    assert result.exit_code == 0, result.output
    assert "3 of 3 runs are done" in result.output
    report = plan.folder / "report"
    found = json.loads((report / "study.json").read_text())
    assert found["baselines"]["tasks"] == 3
    dense = found["models"][0]
    by_hand = [row["chrf"][0] - row["baseline_chrf"] for row in found["languages"]]
    assert dense["delta_chrf"] == pytest.approx(sum(by_hand) / 3)
    again = CliRunner().invoke(app, ["study", str(plan.path)])
    assert again.exit_code == 0
    assert "training" not in again.output
