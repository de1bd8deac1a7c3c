"""`gshard train --check STEP`: a step of a real run, value by value."""

import dataclasses
import subprocess
import sys

import pytest

from gshard.errors import UserError
from gshard.mt.run import Run
from gshard.mt.training.prepare import check_step, prove_step
from tests.mt.runs import Notes, run_config, with_devices


@pytest.mark.slow
def test_a_step_after_a_checkpoint(whole):
    """Step 6, trained on from the checkpoint of step 4; nothing of the run is changed."""
    before = sorted(p.name for p in (whole.folder / "checkpoints").iterdir())
    report = check_step(whole, 6, Notes())
    assert report.ok, report
    assert report.compared > 1000
    assert sorted(p.name for p in (whole.folder / "checkpoints").iterdir()) == before


@pytest.mark.slow
def test_the_first_step(corpus, tmp_path):
    """A run without a checkpoint, on two devices."""
    config = with_devices(run_config(corpus), count=2)
    small = {"experts": 2, "groups": 2}
    model = dataclasses.replace(config.model, **small)
    run = Run.create(tmp_path / "run", dataclasses.replace(config, model=model))
    for report in (check_step(run, 1, Notes()), prove_step(run, Notes())):
        assert report.ok, report
        assert report.compared > 300
        assert report.covered.share > 0.99


def test_a_step_that_the_run_does_not_have(corpus, tmp_path):
    run = Run.create(tmp_path / "run", run_config(corpus))
    with pytest.raises(UserError, match="--check 13: the run has 12 steps"):
        check_step(run, 13, Notes())


@pytest.mark.slow
def test_a_proof_on_a_command_line(corpus, tmp_path):
    """`gshard train FOLDER --prove`, to its end: two experts on two devices."""
    config = with_devices(run_config(corpus), count=2)
    small = dataclasses.replace(config.model, experts=2, groups=2)
    run = Run.create(tmp_path / "run", dataclasses.replace(config, model=small))
    words = [sys.executable, "-m", "gshard.cli", "train", str(run.folder), "--prove"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all equal exactly" in " ".join((done.stdout + done.stderr).split())
