"""Exit statuses: what a user has to mend is told from what may go away by itself."""

import contextlib
import errno
import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from gshard import cli
from gshard.errors import UserError
from gshard.mt.launch import local, supervisor
from gshard.mt.launch.company import MissingHostsError
from gshard.mt.launch.local import LocalChild
from gshard.mt.launch.status import ALONE, WAITING, Reporter, Status, read
from gshard.mt.launch.supervisor import Failure, Supervisor, Timeouts


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (UserError("no such corpus"), 1, "gshard: no such corpus"),
        (MissingHostsError("process 0 of 2 waited"), 75, "gshard: process 0 of 2 waited"),
        (RuntimeError("connection reset by peer"), 70, "RuntimeError: connection reset by peer"),
        (OSError(5000, "odd"), 70, "OSError"),
        (PermissionError(13, "Permission denied", "runs"), 1, "gshard: runs: Permission denied"),
    ],
)
def test_the_command_exits_with(monkeypatch, capsys, raised, status, said):
    def app(arguments, standalone_mode):
        raise raised

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train"])
    assert ended.value.code == status
    assert said in capsys.readouterr().err


class Made:
    """A process that has ended, or trains."""

    begun = 0.0

    def __init__(self, code, status=Status("host", 7, 12, "training")):  # noqa: B008  (frozen)
        self.code, self.state = code, status

    def poll(self):
        return self.code

    def status(self):
        return self.state

    def last_words(self):
        return ""


@pytest.mark.parametrize(
    ("codes", "named"),
    [
        ((70, -signal.SIGKILL), 1),  # the first fails because the second is gone
        ((1, 70, -signal.SIGKILL), 2),
        ((None, 70), 1),
        ((0, 1), 1),
        ((0, -(signal.SIGRTMIN + 1)), 1),  # a signal without a name
    ],
)
def test_who_was_killed_is_named_before_those_who_missed_it(codes, named):
    children = [Made(code) for code in codes]
    supervisor = Supervisor(None, [], len(codes), print, Timeouts())
    found = supervisor._failure(children, codes)
    assert isinstance(found, Failure)
    assert found.index == named
    assert found.status == codes[named]


def test_who_is_left_out_is_tried_again_only_when_a_machine_comes_back():
    room = [3]
    machines = SimpleNamespace(capacity=lambda wanted: min(wanted, room[0]))
    supervisor = Supervisor(machines, [], 3, print, Timeouts(joining=-1.0))
    supervisor._leave_out(1)

    def more():
        return supervisor._more(2, time.monotonic())

    assert more() is None  # else all would be started again without end
    assert more() is None
    room[0] = 2  # the cluster hears of its node's death
    assert more() is None
    room[0] = 3
    assert more() == "there is room for 3 processes: all save and start again"
    assert supervisor._left_out == 0


@pytest.mark.parametrize("stopped", [True, False])
def test_who_is_stopped_while_it_compiles_is_noticed_as_soon_as_in_a_step(stopped):
    silent = time.monotonic() - Timeouts().silent - 1
    state = Status("host", 7, 12, "compiling", silent, silent, stopped=stopped)
    supervisor = Supervisor(None, [], 1, print, Timeouts())
    found = supervisor._failure([Made(None, state)], [None])
    assert (found is not None) == stopped


def test_the_parent_knows_who_is_stopped(tmp_path):
    child = LocalChild(["sleep", "1000"], {}, tmp_path / "child", quiet=True)

    def becomes(stopped):
        while child.status().stopped != stopped:
            time.sleep(0.01)

    try:
        assert not child.status().stopped
        child.send(signal.SIGSTOP)
        becomes(True)
        assert child.poll() is None
        child.send(signal.SIGCONT)
        becomes(False)
    finally:
        child.end()
    assert not child.status().stopped


@pytest.mark.parametrize(
    ("doings", "named"),
    [
        ((WAITING, WAITING), None),  # for text that does not come
        ((ALONE, WAITING), None),  # a baseline takes its time
        (("translating", "translating"), 1),  # who is behind
        (("translating", WAITING), 1),  # who has not heard
    ],
)
def test_who_waits_or_works_alone_need_make_no_step(doings, named):
    states = {i: Status("host", i, 12 - i, doing) for i, doing in enumerate(doings)}
    supervisor = Supervisor(None, [], 2, print, Timeouts())
    supervisor._moved = (12, 0.0)
    found = supervisor._stuck(states, 10_000.0)
    assert (found and found.index) == named


def test_what_the_time_went_into_until_there_is_a_step_again():
    notes = []
    supervisor = Supervisor(None, [], 1, notes.append, Timeouts())
    supervisor._failed = 100.0
    spent = {"compiling": 5.25, "restoring": 1.0, "starting": 2.0, "training": 0.01}
    for step, now in ((6, 109.0), (7, 110.0), (8, 111.0)):
        supervisor._stuck({0: Status("host", 7, step, "training", spent=spent)}, now)
    assert notes == [
        "a step again after 10.0 s: loading Python 1.7, starting 2.0, compiling 5.2, restoring 1.0"
    ]


@pytest.mark.parametrize(
    ("doing", "longest", "limit"),
    [
        ("saving", {}, 600),  # the first one: nobody knows
        ("saving", {"saving": 1.0}, 15),
        ("saving", {"saving": 60.0, "writing": 500.0}, 180),
        ("writing", {"saving": 1.0, "writing": 20.0}, 60),
        ("restoring", {"restoring": 2.0}, 60),
        ("restoring", {"saving": 2.0}, 600),
        ("training", {"training": 100.0}, 15),
    ],
)
def test_a_hang_is_noticed_by_what_is_usual_for_what_is_done(doing, longest, limit):
    """They give signs of life, and stand still: as when one waits for ever for another's save."""
    supervisor = Supervisor(None, [], 2, print, Timeouts())
    supervisor._moved = (12, 1000.0)
    states = {i: Status("host", i, 12, doing, 1000.0, longest=longest) for i in range(2)}
    assert supervisor._stuck(states, 1000.0 + limit - 1) is None
    found = supervisor._stuck(states, 1000.0 + limit + 1)
    assert f"has made no step for {limit + 1} s after step 12, while {doing}" in str(found)


def test_what_was_taken_for_a_hang_may_take_longer_the_next_time():
    supervisor = Supervisor(None, [], 1, print, Timeouts())
    state = Status("host", 7, 12, "writing", 1000.0, longest={"writing": 8.0})
    limits = []
    for _ in range(5):
        supervisor._moved = (12, 1000.0)
        limit = next(n for n in range(2000) if supervisor._stuck({0: state}, 1000.0 + n))
        limits.append(limit)
    assert limits == [25, 76, 229, 601, 601]


def test_a_process_says_how_long_it_took(monkeypatch):
    clock = iter([100.0, 101.0, 103.0, 107.0, 108.0, 109.0, 110.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    reporter = Reporter()
    for step in range(3):
        reporter.tell("training", step)
        reporter.tell("saving", step)
    assert reporter._now.longest == {"starting": 1.0, "training": 2.0, "saving": 4.0}
    reporter.took("saving", 3.0)
    reporter.took("writing", 3.0)
    assert reporter._now.longest["saving"] == 4.0
    assert reporter._now.longest["writing"] == 3.0


@pytest.mark.parametrize("jump", [30.0, -30.0, 1e9])
def test_a_wall_clock_that_is_set_is_neither_silence_nor_a_hang(monkeypatch, tmp_path, jump):
    """Processes write their status, somebody sets the clock, and the parent looks."""
    supervisor = Supervisor(None, [], 1, print, Timeouts())
    reporter = Reporter(tmp_path / "status.json")
    supervisor._moved = (12, time.monotonic())
    reporter.tell("training", 12)
    reporter._write()
    now = time.time()  # noqa: TID251
    monkeypatch.setattr(time, "time", lambda: now + jump)
    child = Made(None, read(tmp_path / "status.json"))
    assert supervisor._failure([child], [None]) is None
    assert reporter._now.since <= time.monotonic()
    reporter.tell("saving", 12)
    reporter.close()
    assert 0 <= reporter._now.longest["training"] < 30
    assert supervisor._stuck({0: child.state}, time.monotonic()) is None


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{" * 100_000, '{"seen": [[]], "x": 1}', "", "[]", "null", "\0"]
)
def test_a_status_that_is_none_is_an_empty_one(tmp_path, text):
    (tmp_path / "status.json").write_text(text)
    assert read(tmp_path / "status.json") == Status()


def test_a_full_disk_does_not_silence_a_process(tmp_path):
    """Not where processes say what they do, either: all would be taken for dead."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=10", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount a small disk")
    try:
        child = LocalChild(["sleep", "1000"], {}, tmp_path / "child", quiet=True)
        with contextlib.suppress(OSError), (tmp_path / "full").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1024))
        reporter = Reporter(child._status)
        for step in range(3):
            reporter.tell("training", step)
            reporter._write()
            assert (child.status().doing, child.status().step) == ("training", step)
        child._status.write_bytes(b"half of")
        assert child.status().step == 2  # what it said before
        reporter.close()
        child.end()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_processes_that_cannot_be_started_end_those_that_are(tmp_path, monkeypatch):
    """As where a user may have no more processes."""
    made, before = [], local.LocalChild

    def start(*args):
        if len(made) == 2:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        made.append(before(*args))
        return made[-1]

    monkeypatch.setattr(local, "LocalChild", start)
    with pytest.raises(UserError, match="process 2 of 3 could not be started: Resource temporar"):
        local.ThisMachine().start(["sleep", "1000"], 3, tmp_path)
    assert [child.poll() for child in made] == [-signal.SIGKILL] * 2


def test_no_place_for_temporary_files_is_a_line(monkeypatch):
    def none(**_):
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(supervisor.tempfile, "TemporaryDirectory", none)
    with pytest.raises(UserError, match=r"no temporary folder: No usable .*; TMPDIR names a place"):
        Supervisor(local.ThisMachine(), ["true"], 1, print).run()
