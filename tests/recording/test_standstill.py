"""Positions of processes: what marks keep, and what is made of them when nobody moves."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gshard
from gshard import recording
from gshard.recording import (
    BEHIND,
    ELSEWHERE,
    ENDED,
    FAILED,
    GONE,
    RUNNING,
    STOPPED,
    Position,
    Site,
    standstill,
)
from gshard.recording.files import Owner
from tests.oracle import assert_same

ROOT = Path(__file__).parents[2]


def sites(*numbers, program="step"):
    return [Site(program, n, "all_reduce", f"train.py:{10 + n}") for n in numbers]


def at(process, entered, state=RUNNING, failed_at=np.inf, error=""):
    newest = tuple(entered[-recording.KEPT :])
    place = process, "host", 100 + process
    return Position(*place, state, len(entered), 1.0, newest, failed_at, error)


def culprits(found):
    return [p.process for p in found.culprits]


def test_who_has_entered_fewer_is_behind():
    found = standstill([at(0, sites(0, 1, 2)), at(1, sites(0)), at(2, sites(0, 1, 2))])
    assert (culprits(found), found.how) == ([1], BEHIND)
    assert (found.where, found.instead) == (sites(2)[0], sites(0)[0])
    assert str(found) == (
        "process 0 (100 on host), process 2 (102 on host) waits at collective 2 of step "
        "(all_reduce, train.py:12); process 1 (101 on host) is behind: it entered collective 0 of "
        "step (all_reduce, train.py:10) last"
    )


def test_another_way_is_told_even_if_the_others_failed_for_it():
    other = sites(0) + sites(4, program="evaluate")
    found = standstill([at(0, sites(0, 1), GONE), at(1, other), at(2, sites(0, 1), GONE)])
    assert (culprits(found), found.how) == ([1], ELSEWHERE)
    assert (found.where, found.instead) == (sites(1)[0], other[1])


@pytest.mark.parametrize("state", [GONE, STOPPED])
def test_who_is_gone_or_stopped_is_named_wherever_it_is(state):
    found = standstill([at(0, sites(0, 1)), at(1, sites(0, 1), state)])
    assert (culprits(found), found.how) == ([1], state)
    assert found.where == sites(1)[0]


def test_the_first_to_go_is_named_where_the_others_failed_for_it():
    found = standstill([at(0, sites(0), GONE), at(1, sites(0, 1), GONE), at(2, sites(0, 1), GONE)])
    assert (culprits(found), found.how) == ([0], GONE)
    assert (found.where, found.instead) == (sites(1)[0], sites(0)[0])


def test_who_was_killed_is_named_where_the_others_failed_at_the_same_collective():
    here = sites(0, 1)
    found = standstill([at(0, here, FAILED, 2.0), at(1, here, GONE), at(2, here, FAILED, 3.0)])
    assert (culprits(found), found.how) == ([1], GONE)
    assert found.where == found.instead == here[1]


def test_the_first_to_fail_is_named_where_nobody_was_killed_or_is_behind():
    here, error = sites(0, 1), "ValueError: the batch is empty"
    positions = [at(0, here, FAILED, 3.0), at(1, here, FAILED, 2.0, error), at(2, here)]
    found = standstill(positions)
    assert (culprits(found), found.how) == ([1], FAILED)
    assert str(found).endswith(
        "process 1 (101 on host, failed) was the first to fail: it entered collective 1 of step "
        "(all_reduce, train.py:11) last; ValueError: the batch is empty"
    )
    found = standstill([*positions, at(3, sites(0))])  # for which the others failed
    assert (culprits(found), found.how) == ([3], BEHIND)


# Five processes enter a collective, and end one after the other, each in its own way.
ENDINGS = """
import os, pathlib, signal, sys
from gshard import recording

for index in range(5):
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    recorder = recording.Recorder(pathlib.Path(sys.argv[1]), index)
    recorder.enter(0, recorder.program("step", [{"kind": "all_reduce", "source": "a.py:1"}]), 0)
    if index == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if index == 1:
        os.abort()
    if index == 2:
        raise ValueError("the batch is empty")
    sys.exit()
"""


def test_a_process_says_how_it_ended_unless_it_was_killed(tmp_path):
    subprocess.run([sys.executable, "-c", ENDINGS, tmp_path], cwd=ROOT, stderr=subprocess.DEVNULL)
    every = recording.read(tmp_path)
    assert [p.state for p in every] == [GONE, FAILED, FAILED, ENDED, ENDED]
    assert [p.error for p in every[:3]] == [
        *("", "Fatal Python error: Aborted", "ValueError: the batch is empty"),
    ]
    assert every[1].failed_at <= every[2].failed_at < every[0].failed_at
    assert culprits(standstill(every)) == [0]
    # Who started them may know more: the first was ended by an error, the second by a signal.
    every = recording.read(tmp_path, {0: 3, 1: -6, 3: 0}.get)
    assert [p.state for p in every] == [FAILED, FAILED, FAILED, ENDED, ENDED]
    every = recording.read(tmp_path, {0: -9, 1: -6}.get)
    assert culprits(standstill(every)) == [0]


def test_a_process_that_aborts_while_positions_are_read_was_not_killed(monkeypatch, tmp_path):
    """Of two that lose each other one may end between a look at the other and a look at it."""
    ended = {1: -9}  # as the parent knows when it begins to read
    for index in range(2):
        recorder = recording.Recorder(tmp_path, index)
        recorder.enter(0, recorder.program("step", [{"kind": "all_reduce", "source": "a.py:1"}]), 0)

    def look(owner):
        ended[0] = -6
        return GONE

    monkeypatch.setattr(recording.files, "state", look)
    every = recording.read(tmp_path, ended.get)
    assert [p.state for p in every] == [FAILED, GONE]
    assert culprits(standstill(every)) == [1]


def test_nothing_is_left_of_processes_that_all_did_their_work(tmp_path):
    script = ENDINGS.replace("range(5)", "range(3, 5)")
    subprocess.run([sys.executable, "-c", script, tmp_path], cwd=ROOT, check=True)
    assert list(tmp_path.iterdir()) == []


def test_an_equal_line_that_sends_other_bytes_is_another_way():
    usual, other = (Site("step", 0, "all_reduce", "train.py:9", size) for size in (64, 32))
    found = standstill([at(0, [usual]), at(1, [usual]), at(2, [other])])
    assert (culprits(found), found.how) == ([2], ELSEWHERE)
    assert "all_reduce of 32 bytes" in str(found)


def test_nobody_is_behind_where_all_are_at_one_place():
    found = standstill([at(0, sites(0)), at(1, sites(0))])
    assert not found.culprits
    assert "none is behind" in str(found)
    assert standstill([at(0, []), at(1, [])]) is None
    assert standstill([]) is None


@given(st.data())
def test_any_process_that_is_behind_or_elsewhere_is_found(data):
    """Also where more was entered than a file keeps."""
    count = data.draw(st.integers(3, 6))
    length = data.draw(st.integers(1, 3 * recording.KEPT))
    usual = sites(*(i % 5 for i in range(length)))
    culprit = data.draw(st.integers(0, count - 1))
    place = data.draw(st.integers(max(0, length - recording.KEPT + 1), length - 1))
    elsewhere = data.draw(st.booleans())
    own = usual[:place] + (sites(9) if elsewhere else [])
    found = standstill([at(i, own if i == culprit else usual) for i in range(count)])
    assert culprits(found) == [culprit]
    assert found.how == (ELSEWHERE if elsewhere else BEHIND)
    assert found.where == usual[place if elsewhere else -1]


def step(w, x):
    x = gshard.split(x, 1, 4)

    def layer(h, w):
        h = jnp.tanh(h @ w)
        return h, h.sum()

    h, sums = jax.lax.scan(layer, x, w)
    nothing = jnp.sum(h[:0], axis=1)
    return h @ w[0], sums, jnp.argmax(h, axis=1), jnp.any(h > 0.5, axis=1), nothing


def test_marks_keep_every_collective_and_change_no_bit(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(3, 8, 8)).astype("f"), rng.normal(size=(6, 8)).astype("f")
    devices = jax.devices()[:4]
    plain = gshard.jit(step, devices=devices)
    wanted = plain(w, x)
    monkeypatch.setenv(recording.VARIABLE, str(tmp_path))
    monkeypatch.setattr(recording.writing, "_recorder", [])
    recorded = gshard.jit(lambda w, x: step(w, x), devices=devices)
    for _ in range(2):
        assert_same(recorded(w, x), wanted, exact=True)
    (position,) = recording.read(tmp_path)
    every = plain.lower(w, x).collectives
    assert position.entered == 2 * sum(c.count for c in every)
    assert (position.process, position.pid, position.state) == (0, os.getpid(), RUNNING)
    in_loop = [n for n, c in enumerate(every) if c.count == 3]
    once = [n for n, c in enumerate(every) if c.count == 1]
    numbers = [site.number for site in position.newest]
    assert len(in_loop) >= 2
    assert numbers == 2 * (3 * in_loop + once)
    assert [(s.kind, s.source) for s in position.newest[: len(in_loop)]] == [
        (every[n].kind, every[n].source) for n in in_loop
    ]


def test_a_program_with_marks_can_be_cached(monkeypatch, tmp_path):
    """A pointer to a function of this process would make it another program in every process."""
    monkeypatch.setenv(recording.VARIABLE, str(tmp_path))
    monkeypatch.setattr(recording.writing, "_recorder", [])
    x, devices = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.devices()[:4]
    texts = [
        gshard.jit(lambda x: gshard.split(x, 0, 4).sum(0), devices=devices).lower(x)
        .as_text("stablehlo")
        for _ in range(2)
    ]  # fmt: skip
    assert "gshard_mark" in texts[0]
    assert "python_cpu_callback" not in texts[0]
    assert texts[0] == texts[1]


def test_files_of_a_run_before_are_not_taken_for_processes(tmp_path):
    host = os.uname().nodename
    for index in (0, 7):  # which the new run need not have
        old = Owner("a", index, host, 2**22 + 1, 5)  # no process has this number
        for suffix in (".position", ".programs", ".ending"):
            (tmp_path / f"{old}{suffix}").write_bytes(b"")
    recorder = recording.Recorder(tmp_path, 0, "b")
    recorder.enter(3, recorder.program("step", [{"kind": "all_reduce", "source": "a.py:1"}]), 0)
    (position,) = recording.read(tmp_path)
    assert position.pid == os.getpid()
    assert position.newest == (Site("step", 0, "all_reduce", "a.py:1"),)


@pytest.mark.slow
def test_a_stopped_process_and_a_call_left_out_are_named():
    """Two processes, in which hangs are planted."""
    run = [sys.executable, "-m", "benchmarks.hangs", "--processes", "2"]
    done = subprocess.run(
        [*run, "--hangs", "2", "--kinds", "stop,skip"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 hangs named right" in done.stdout


@pytest.mark.slow
def test_a_missing_process_is_named_where_sizes_do_not_divide():
    """Arguments are placed without a collective, in which the others would wait unseen."""
    run = [sys.executable, "-m", "benchmarks.hangs", "--processes", "3"]
    done = subprocess.run(
        [*run, "--hangs", "1", "--kinds", "skip"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 hangs named right" in done.stdout


@pytest.mark.slow
def test_fifty_hangs_are_named():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.hangs"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "50 of 50 hangs named right" in done.stdout


@pytest.mark.slow
def test_hangs_of_a_training_are_named_by_its_supervisor():
    """One that is stopped, and one that leaves a step out; then the training ends as usual."""
    run = [sys.executable, "-m", "benchmarks.hangs_training", "--processes", "2"]
    done = subprocess.run([*run, "--kinds", "stop,skip"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 hangs of a training named right" in done.stdout
