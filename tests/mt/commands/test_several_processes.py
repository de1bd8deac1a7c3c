"""`gshard translate` and `gshard evaluate` as two processes: the same bytes as from one."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from gshard.mt.launch.local import free_port, member
from tests.mt.processes import launched
from tests.mt.runs import make_run
from tests.mt.samples import translated

pytestmark = pytest.mark.slow  # processes that compile

GSHARD = [sys.executable, "-m", "gshard.cli"]
PATIENCE = 1800  # seconds: machines that run tests are busy


@pytest.fixture(scope="module")
def run(tokenizer, corpus, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run", tokenizer, corpus.folder).folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("".join(f"{translated(n)}\n" for n in range(60)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def alone(run, text):
    """What one process makes of the text, on as many devices."""
    return gshard("translate", run, text, *SEARCH).stdout


SEARCH = ("--to", "en", "--devices", "2", "--rows", "8", "--beam", "2")


def gshard(*arguments, **options):
    command = [*GSHARD, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE, **options)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return done


def test_two_processes_translate_as_one(run, text, alone):
    launch = ["launch", "-n", "2", "translate", run]
    assert gshard(*launch, text, *SEARCH).stdout == alone
    assert len(alone.splitlines()) == 60
    with text.open("rb") as file:  # standard input is the first one's
        assert gshard(*launch, *SEARCH, stdin=file).stdout == alone


def test_killed_in_the_middle_they_go_on(run, text, alone, tmp_path):
    out = tmp_path / "out"
    command = ["launch", "-n", "2", "translate", run, text, *SEARCH, "--out", out]
    parent = subprocess.Popen([*GSHARD, *map(str, command)], stderr=subprocess.PIPE)
    while not out.with_name("out.part.json").exists():
        assert parent.poll() is None
        time.sleep(0.01)
    os.kill(launched(parent.pid)[1], signal.SIGKILL)
    said = parent.communicate(timeout=PATIENCE)[1].decode()
    assert parent.returncode == 0, said
    assert "was ended by SIGKILL" in said
    assert out.read_bytes() == alone


def test_without_a_file_a_failure_ends_it(run, text, tmp_path):
    """What was written cannot be taken back."""
    command = ["launch", "-n", "2", "translate", run, text, *SEARCH]
    with (tmp_path / "out").open("wb") as file:
        parent = subprocess.Popen(
            [*GSHARD, *map(str, command)], stdout=file, stderr=subprocess.PIPE
        )
    while not (tmp_path / "out").stat().st_size:
        assert parent.poll() is None
        time.sleep(0.01)
    os.kill(launched(parent.pid)[1], signal.SIGKILL)
    assert "given up" in parent.communicate(timeout=PATIENCE)[1].decode()
    assert parent.returncode == 1


def test_two_processes_measure_as_one(tokenizer, corpus, tmp_path):
    arguments = ["--devices", "2", "--languages", "de", "--sentences", "3", "--beam", "1"]
    arguments += ["--untrained", "--baselines", "--baseline-steps", "2"]
    found = []
    for name, launch in (("one", []), ("two", ["launch", "-n", "2"])):
        # Rows that the sentences fit: experts are counted on no others.
        run = make_run(tmp_path / name / "run", tokenizer, corpus.folder, length=24)
        gshard(*launch, "evaluate", run.folder, *arguments)
        results = [json.loads((run.folder / f).read_text()) for f in FILES]
        for result in results:
            result.pop("seconds")
        for task in results[1]["tasks"].values():
            task.pop("train_seconds")
            task["dev_nll"] = pytest.approx(task["dev_nll"], abs=1e-4)
        found.append(results)
    assert found[0] == found[1]
    assert len(found[0][0]["tasks"]) == 2
    assert found[0][0]["experts"]["encoder"]


FILES = ("evaluation.json", "baselines.json")

HELD = """
import os, sys, jax
from gshard.mt import hosts
from gshard.mt.config import DeviceConfig
from gshard.mt.launch.environment import find
from gshard.mt.run import Run
from gshard.mt.training.loading import load_model, model_like

hosts.start(2, find(os.environ))
run = Run.open(sys.argv[1])
like = model_like(run.model_config, hosts.strategy(DeviceConfig(2)))
model, _ = load_model(run, sys.argv[2], like)
experts, others = [0, 0], [0, 0]
for path, leaf in jax.tree_util.tree_leaves_with_path(model):
    place = experts if "experts" in str(path) else others
    place[0] += sum(shard.data.size for shard in leaf.addressable_shards)
    place[1] += leaf.size
print("held", *experts, *others)
"""


@pytest.mark.parametrize("which", ["last", "untrained"])
def test_a_process_holds_its_own_experts_only(run, which):
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HELD, str(run), which],
            env={**os.environ, **member(address, 2, index)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for process in processes:
        said, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        experts, all_experts, others, all_others = map(int, said.split("held")[1].split())
        assert 2 * experts == all_experts > 0
        assert others == all_others
