"""`gshard train` as users run it: killed, interrupted, on two hosts, with wrong input."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from gshard import cli
from gshard.mt.config import to_json
from gshard.mt.run import Run
from gshard.mt.training.checkpoint import Checkpoints
from gshard.mt.training.loading import load_model
from tests.mt.processes import alive, launched, until
from tests.mt.runs import run_config

GSHARD = [sys.executable, "-m", "gshard.cli"]
PATIENCE = 600  # seconds: machines that run tests are busy


@pytest.fixture(scope="module", autouse=True)
def _compiled_once(tmp_path_factory):
    """All runs here share their compiled programs."""
    patch = pytest.MonkeyPatch()
    patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("programs")))
    yield
    patch.undo()


def start(*arguments):
    return subprocess.Popen(
        [*GSHARD, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process, status=0):
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == status, output[-3000:]
    return output


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory):
    """A configuration whose vocabulary is made, so that runs differ in nothing but their fate."""
    folder = tmp_path_factory.mktemp("prepared")
    run = Run.create(folder / "run", run_config(corpus, steps=60, save_every=2, keep=3))
    run.make_vocabulary()
    nested = to_json(run.config)
    nested["data"]["vocabulary"] = str(run.folder / "vocabulary")
    config = folder / "config.json"
    config.write_text(json.dumps(nested))
    return config


@pytest.fixture(scope="module")
def whole(prepared, tmp_path_factory):
    """The run that was left alone, by one process with 8 devices."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(start("train", prepared, "--out", folder))
    return Run.open(folder)


def losses(run):
    return {(r["kind"], r["step"]): r["nll"] for r in run.metrics()}


def weights(run, which="last"):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(load_model(run, which)[0])]


def same_bits(a, b):
    assert losses(a) == losses(b)
    for x, y in zip(weights(a), weights(b), strict=True):
        np.testing.assert_array_equal(x, y)


def saving(folder):
    """Whether a checkpoint is being written at this moment."""
    return any((folder / "checkpoints").glob("*tmp*"))


def steps_logged(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count('"train"') if path.exists() else 0


def run_and_kill(command, folder, chance):
    """Start the run and kill it a few steps on, every other time in the middle of a save.

    True if it was killed, False if it was done before.
    """
    journal = folder / "metrics.jsonl"
    old = journal.stat().st_mtime_ns if journal.exists() else 0
    process, seen = start(*command), None
    more, in_a_save = chance.randrange(1, 5), chance.random() < 0.5
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        begun = journal.exists() and journal.stat().st_mtime_ns != old
        if begun and seen is None:  # a resumed run has cut its journal by now
            seen = steps_logged(folder)
        far_enough = seen is not None and steps_logged(folder) >= seen + more
        if far_enough and (not in_a_save or saving(folder)):
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            return True
        time.sleep(0.002)
    finish(process)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, 20])
def test_killed_at_random_moments_it_learns_the_same(prepared, whole, tmp_path, kills):
    folder, chance = tmp_path / "run", random.Random(kills)
    command = ["train", prepared, "--out", folder]
    killed, highest = 0, 0
    while killed < kills:
        if not run_and_kill(command, folder, chance):
            break
        killed += 1
        # The newest whole checkpoint is always usable, and no progress that was saved is lost.
        if (folder / "checkpoints").is_dir():
            steps = Checkpoints(folder, read_only=True).steps
            if steps:
                load_model(Run.open(folder), "last")
                assert steps[-1] >= highest
                highest = steps[-1]
    assert killed == kills, f"the run was done after {killed} kills"
    finish(start(*command))
    same_bits(Run.open(folder), whole)


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(prepared, whole, tmp_path):
    folder = tmp_path / "run"
    process = start("train", prepared, "--out", folder)
    while steps_logged(folder) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said = finish(process, status=130)
    assert f"stopped and saved; `gshard train {folder}` continues" in said
    stopped = Checkpoints(folder, read_only=True).steps[-1]
    assert stopped == max(step for _, step in losses(Run.open(folder)))
    finish(start("train", folder))
    resumed, alone = losses(Run.open(folder)), losses(whole)
    assert {k: v for k, v in resumed.items() if k in alone} == alone
    for x, y in zip(weights(Run.open(folder)), weights(whole), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("launch", [[], ["launch", "-n", 2]])
def test_a_terminal_that_is_closed_saves(prepared, tmp_path, launch):
    """SIGHUP comes, perhaps twice, and nothing can be written to the terminal any more."""
    folder = tmp_path / "run"
    command = [*launch, "train", prepared, "devices.count=2", "--out", folder]
    terminal, inside = os.openpty()
    process = subprocess.Popen(
        [*GSHARD, *map(str, command)], stdin=inside, stdout=inside, stderr=inside
    )
    os.close(inside)
    reader = threading.Thread(target=read_all, args=(terminal,))
    reader.start()
    until(lambda: steps_logged(folder) >= 3 or process.poll() is not None)
    assert process.poll() is None
    below = launched(process.pid)
    os.close(terminal)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    assert process.wait(PATIENCE) == 128 + signal.SIGHUP
    reader.join()
    assert not any(map(alive, below))
    stopped = Checkpoints(folder, read_only=True).steps[-1]
    assert stopped == max(step for _, step in losses(Run.open(folder)))


def read_all(terminal):
    with contextlib.suppress(OSError):
        while os.read(terminal, 1000):
            pass


@pytest.mark.slow
def test_a_reader_that_leaves_does_not_end_it(prepared, tmp_path):
    """As of `gshard train | head -1`."""
    process = start("train", prepared, "train.steps=4", "--out", tmp_path / "run")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(PATIENCE) == 0
    assert Checkpoints(tmp_path / "run", read_only=True).steps[-1] == 4


@pytest.mark.slow
def test_when_the_parent_is_killed_its_processes_save_and_end(prepared, tmp_path):
    folder = tmp_path / "run"
    command = ["launch", "-n", 2, "train", prepared, "devices.count=2", "train.steps=100000"]
    parent = start(*command, "train.save_every=100000", "data.workers=1", "--out", folder)
    until(lambda: steps_logged(folder) >= 3 or parent.poll() is not None)
    assert parent.poll() is None, parent.communicate()[0]
    group = [process for child in launched(parent.pid) for process in (child, *launched(child))]
    assert len(group) >= 4  # each with a worker
    parent.kill()
    parent.communicate()
    until(lambda: not any(map(alive, group)))
    finish(start("train", folder, "train.steps=1"))  # nobody holds the folder


@pytest.mark.slow
def test_two_processes_train_as_one(prepared, whole, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    folder = tmp_path / "run"
    command = ["train", prepared, "train.steps=8", "--out", folder, "--coordinator", address]
    processes = [start(*command, "--processes", 2, "--process", i) for i in range(2)]
    for process in processes:
        finish(process)
    together, alone = losses(Run.open(folder)), losses(whole)
    assert len(together) == 8 + 4
    for key, nll in together.items():
        assert nll == pytest.approx(alone[key], abs=1e-5), key
    # One checkpoint of both, in one process: here, and to go on with.
    for x, y in zip(weights(Run.open(folder), "8"), weights(Run.open(folder)), strict=True):
        np.testing.assert_array_equal(x, y)
    finish(start("train", folder, "train.steps=10"))
    assert losses(Run.open(folder))["train", 10] == pytest.approx(alone["train", 10], abs=1e-5)


@pytest.mark.slow
def test_a_second_training_in_the_folder_is_refused(prepared, tmp_path):
    folder = tmp_path / "run"
    first = start("train", prepared, "--out", folder)
    while not steps_logged(folder):
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.02)
    said = finish(start("train", prepared, "train.steps=3", "--out", folder), status=1)
    assert f"is being trained in by process {first.pid} on {socket.gethostname()}" in said
    assert Run.open(folder).config.train.steps == 60  # nothing was changed under the first one
    first.send_signal(signal.SIGTERM)
    assert "stopped and saved" in finish(first, status=143)


@pytest.mark.slow
def test_launched_processes_that_are_killed_learn_the_same(prepared, tmp_path):
    """Two processes of one device each: one is killed, one is stopped, all go on by themselves."""
    settings = ["train", prepared, "devices.count=2", "train.steps=14"]
    alone, hurt = tmp_path / "alone", tmp_path / "hurt"
    finish(start("launch", "-n", 2, *settings, "--out", alone))
    parent = start("launch", "-n", 2, *settings, "--out", hurt)
    for step, (victim, number) in ((4, (1, signal.SIGKILL)), (8, (0, signal.SIGSTOP))):
        while steps_logged(hurt) < step:
            assert parent.poll() is None, parent.communicate()[0]
            time.sleep(0.02)
        os.kill(launched(parent.pid)[victim], number)
    said = finish(parent)
    assert "process 1 (" in said
    assert "was ended by SIGKILL after step" in said
    assert "process 0 (" in said
    assert "has been silent for" in said
    same_bits(Run.open(hurt), Run.open(alone))


@pytest.mark.slow
def test_three_processes_go_on_with_a_run_of_two(prepared, tmp_path):
    """Eight rows and eight experts divide neither over three processes nor over their devices."""
    folder = tmp_path / "run"
    launch = ["launch", "-n"]
    finish(
        start(*launch, 2, "train", prepared, "devices.count=2", "train.steps=4", "--out", folder)
    )
    finish(start(*launch, 3, "train", folder, "devices.count=3", "train.steps=6"))
    alone = tmp_path / "alone"
    finish(start("train", prepared, "devices.count=2", "train.steps=6", "--out", alone))
    together, expected = losses(Run.open(folder)), losses(Run.open(alone))
    for step in range(1, 7):
        assert together["train", step] == pytest.approx(expected["train", step], abs=2e-4)


def test_a_number_of_devices_that_no_process_can_have(tmp_path):
    """In a process of its own, as a user sees it: one line, no traceback."""
    result = subprocess.run(
        [*GSHARD, "train", "tiny", "devices.count=99999999"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert result.returncode == 1, result
    assert "virtual devices are the most" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []  # nothing was left behind


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train"], "name what to train"),
        (["train", "tinny"], "did you mean 'tiny'?"),
        (["train", "tiny", "model.expert=8"], "did you mean 'model.experts'"),
        (["train", "tiny", "--corpus", "nowhere"], "no corpus in nowhere"),
    ],
)
def test_wrong_input_is_said_plainly(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 1
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []  # nothing was left behind


@pytest.mark.slow
def test_a_full_disk_loses_nothing(prepared, whole, tmp_path):
    """On a small disk of its own: the error says so, and after making room the run goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no permission to mount a small disk")
    try:
        said = finish(start("train", prepared, "--out", disk / "run"), status=1)
        assert "the disk is full" in said
        assert "Traceback" not in said
        subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
        finish(start("train", prepared, "--out", disk / "run"))
        same_bits(Run.open(disk / "run"), whole)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_settings_are_listed():
    result = subprocess.run([*GSHARD, "train", "--settings"], capture_output=True, text=True)
    assert "model.gating.top_k=2" in result.stdout.splitlines()


@pytest.mark.slow
def test_a_reproducible_run_has_the_same_bits_on_other_devices_and_processes(prepared, tmp_path):
    """And, to rounding, the losses of the usual program."""
    usual, one, two, processes = (tmp_path / name for name in ("usual", "1", "2", "processes"))
    settings = ["train", prepared, "train.steps=2", "devices.count=1"]
    finish(start(*settings, "--out", usual))
    settings += ["reproducible=true"]
    finish(start(*settings, "--out", one))
    finish(start(*settings, "devices.count=2", "--out", two))
    finish(start("launch", "-n", 2, *settings, "devices.count=2", "--out", processes))
    expected = Run.open(one)
    assert len(losses(expected)) > 2
    assert losses(expected) == pytest.approx(losses(Run.open(usual)), rel=1e-5)
    same_bits(Run.open(two), expected)
    same_bits(Run.open(processes), expected)
