"""Processes that compare what they run, and miss each other: with a store made up of threads."""

import os
import socket
import subprocess
import sys
import threading

import pytest

from gshard.errors import UserError
from gshard.mt.launch import company
from gshard.mt.launch.company import Company, MissingHostsError, absent, differences, fingerprint

TIMED_OUT = (
    "DEADLINE_EXCEEDED: Barrier timed out. Id: x::0. This usually happens because a task triggered "
    "the barrier too early or too slowly.\n# of tasks that reached the barrier: 1/3.\nThe first "
    "task at the barrier: 0. Some timed out task names:\n2\n1\n\n\nRPC: /xla.coordination"
)


class Store:
    """What JAX's coordination service does for its clients."""

    def __init__(self, count):
        self._count, self._values, self._here = count, {}, {}
        self._changed = threading.Condition()

    def key_value_set(self, key, value):
        with self._changed:
            if key in self._values:
                raise RuntimeError("ALREADY_EXISTS")
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, milliseconds / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
            return self._values[key]

    def key_value_dir_get(self, folder):
        with self._changed:
            return [(k, v) for k, v in self._values.items() if k.startswith(folder)]

    def wait_at_barrier(self, name, milliseconds):
        with self._changed:
            self._here[name] = self._here.get(name, 0) + 1
            self._changed.notify_all()
            limit = milliseconds / 1000
            if not self._changed.wait_for(lambda: self._here[name] >= self._count, limit):
                raise RuntimeError(TIMED_OUT)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(company, "_AGREEING", 5.0)
    monkeypatch.setattr(company, "_PARTING", 0.2)
    monkeypatch.setattr(company, "_LAST", 0.0)


def together(store, *works):
    """What each process of several returns or raises."""
    found = {}

    def run(index, work):
        try:
            found[index] = work(Company(store, index, len(works)))
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(len(works))]


def agreeing(*values):
    return together(Store(len(values)), *(lambda c, mine=mine: c.agree(mine) for mine in values))


def test_the_same_everywhere_is_agreed():
    assert agreeing({"a": "1"}, {"a": "1"}, {"a": "1"}) == [None] * 3


def test_a_difference_is_named_on_every_process():
    same = {"jax": "0.10.2", "model.experts": "8"}
    other = {"jax": "0.10.1", "model.experts": "8", "numpy": "2.0"}
    errors = agreeing(same, other, same)
    assert {type(error) for error in errors} == {UserError}
    (said,) = set(map(str, errors))
    me = f"({os.getpid()} on {socket.gethostname()})"
    assert said == (
        f"not all processes run the same as process 0: in process 1 {me} jax is '0.10.1' and not "
        "'0.10.2', numpy is '2.0' and not missing"
    )


def test_several_rounds_are_kept_apart():
    def twice(c):
        c.agree({"a": "1"})
        return c.agree({"b": str(c._index)})

    errors = together(Store(2), twice, twice)
    assert all("b is '1' and not '0'" in str(error) for error in errors)


def test_who_says_nothing_is_named(monkeypatch):
    monkeypatch.setattr(company, "_AGREEING", 0.2)
    (error, *_) = together(Store(3), lambda c: c.agree({}), lambda c: None, lambda c: None)
    assert isinstance(error, MissingHostsError)
    assert str(error).startswith("nothing was heard from process 1, process 2 within 0 s")


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        (TIMED_OUT, [1, 2]),
        (TIMED_OUT.replace("2\n1\n", "/job:jax_worker/replica:0/task:2\n"), [2]),
        ("UNAVAILABLE: ... unhealthy (stopped sending heartbeats):\n1\n12\nThe tasks", [1, 12]),
        ("task is set to ERROR: UNAVAILABLE: Task 1 heartbeat timeout. This", [1]),
        ("Failed to send RPC to coordination service. Either the leader task was", [0]),
        ("INTERNAL: something else with 1\n2\n3\n", []),
    ],
)
def test_who_is_gone_is_read_from_jax(text, gone):
    assert absent(text) == gone


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "ABORTED: 1 unexpectedly tried to connect with a different incarnation.",
            "two processes say that they are process 1, or it was started again alone",
        ),
        (
            "INVALID_ARGUMENT: Unexpected task registered with task=2\n\nRPC: /xla",
            "process 0 knows of no process 2: not all were told the same number of processes",
        ),
        (
            "Either the leader task was preempted/died",
            "process 0 is gone; this process cannot continue alone",
        ),
        ("Check failed: a == b", None),
    ],
)
def test_what_jax_says_before_it_ends_a_process_is_explained(text, said):
    assert company.explained(text) == said


GLOO = ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:1")


def test_who_is_gone_is_a_sentence_and_who_only_waits_for_it_is_not_named():
    """Processes 1 and 2 do not come; 2 is this process, and runs."""
    store = Store(3)

    def missed(c):
        c._names = {1: "999999999 on " + socket.gethostname(), 2: f"{os.getpid()} on "}
        c._names[2] += socket.gethostname()
        return c.missed(GLOO)

    said, *_ = together(store, missed, lambda c: None, lambda c: None)
    assert said.startswith("process 1 (999999999 on ")
    assert "process 2" not in said


def test_on_other_hosts_one_of_several_is_gone():
    def missed(c):
        c._names = {1: "7 on a", 2: "8 on b"}
        return c.missed(GLOO)

    said, *_ = together(Store(3), missed, lambda c: None, lambda c: None)
    assert said.startswith("process 1 (7 on a), process 2 (8 on b) do not answer, and one of them")


def test_the_words_of_who_has_ended_are_handed_on():
    words = "Traceback\ngshard: no such corpus"
    said, _ = together(Store(2), lambda c: c.missed(GLOO), lambda c: c.part(words))
    assert said == "process 1 has ended: gshard: no such corpus"


@pytest.mark.parametrize(
    "error", [ValueError("shapes (3,) and (4,)"), KeyError("gloo"), ZeroDivisionError("NCCL")]
)
def test_an_error_of_its_own_is_not_a_missing_process(error):
    assert Company(None, 0, 2).missed(error) is None


def test_a_fingerprint_has_versions_sources_switches_and_settings(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/here --xla_cpu_enable_fast_math=true")
    mine = fingerprint({"jax_enable_x64": False}, {"model.experts": 8})
    assert mine["model.experts"] == "8"
    assert mine["jax_enable_x64"] == "False"
    assert mine["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=true"  # where it dumps does not matter
    assert mine["jax"]
    sources = [name for name in mine if name.startswith("source of gshard/")]
    assert "source of gshard/mt/launch/company.py" in sources
    assert len(sources) > 100
    other = {**mine, **dict.fromkeys(sources[:5], "changed"), "model.experts": "9"}
    assert differences(other, mine) == (
        "model.experts is '9' and not '8', "
        + ", ".join(f"the {name} is another" for name in sorted(sources[:5])[:3])
        + ", so are those of 2 more files"
    )
    assert differences(mine, dict(mine)) == ""


# Without gshard's packages, which take seconds to load.
ABORTED = f"""
import os, runpy, sys, time
explain = runpy.run_path({company.__file__!r})["explain_aborts"]
explain(lambda text: "process 1 is gone" if "heartbeats" in text else None, 75)
print("for people", file=sys.stderr)
os.write(2, b"W1116 10:00:00 1 other.cc:1] a warning of C++\\n")
time.sleep(0.5)
os.write(2, sys.argv[1].encode())
time.sleep(0.5)
os.write(2, sys.argv[2].encode())
if sys.argv[3] == "abort":
    os.abort()
"""
POLLED = "E1116 14:04:10.8 1 coordination_service_agent.cc:289] Polled an error (heartbeats)\n"
FATAL = "F1116 14:04:10.8 1 client.h:80] Terminating process\n*** Check failure stack trace: ***\n"


def aborted(*arguments):
    done = subprocess.run([sys.executable, "-c", ABORTED, *arguments], stderr=subprocess.PIPE)
    said = done.stderr.decode().splitlines()
    assert "for people" in said
    assert "W1116 10:00:00 1 other.cc:1] a warning of C++" in said
    return done.returncode, said[2:]


def test_an_abort_for_a_missing_process_is_a_sentence():
    assert aborted(POLLED, FATAL, "abort") == (75, ["gshard: process 1 is gone"])


def test_another_abort_is_as_it_was():
    said = "F1116 14:04:10.8 1 other.cc:80] Check failed: a == b"
    assert aborted(said + "\n", "    @ 0x1\n", "abort") == (-6, [said, "    @ 0x1"])


def test_words_without_an_abort_are_not_lost():
    assert aborted(POLLED, "more\n", "") == (0, [POLLED.strip(), "more"])
