"""Tests in forks of one process, which has collected them all and has run none."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

_GRACE = 20  # a child that does not use its processor time either is ended after so many times
_OPTIONS = (
    *("-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # plugins were imported before the fork
)

Result = tuple[Any, list[dict[str, Any]], str, float]
Work = Callable[[Path], None]


def warm_up(root: Path) -> None:
    """Import what takes long and does not depend on gshard."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.insert(0, str(root))
    os.chdir(root)
    for name in ("jax.numpy", "jax.experimental.pallas", "hypothesis.stateful", "flax.nnx"):
        with contextlib.suppress(ImportError):
            __import__(name)
    assert not any(name.split(".")[0] == "gshard" for name in sys.modules)


def apart(function: Callable[[], None]) -> None:
    """Run a function in a process of its own, since it imports gshard; this one stays without."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in `Children`
        child = os.fork()
    if not child:
        status = 1
        try:
            function()
            status = 0
        except KeyboardInterrupt:
            status = 130
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise SystemExit(code)


class Children:
    """Functions that run in forks, a few at a time; what they write is read when they end."""

    def __init__(self, jobs: int, seconds: float):
        self._jobs, self._seconds = jobs, seconds
        self._running: dict[int, tuple[Any, Path, float]] = {}

    def map(self, work: Iterable[tuple[Any, Work]], folder: Path) -> Iterator[Result]:
        """For each: its key, the lines of JSON that it wrote, how it ended, processor seconds."""
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for number, (key, function) in enumerate(work):
                while len(self._running) >= self._jobs:
                    yield self._one()
                self._start(key, function, folder / f"{os.getpid()}-{number}.jsonl")
            while self._running:
                yield self._one()
        finally:
            for child in self._running:
                os.kill(child, signal.SIGKILL)

    def _start(self, key: Any, function: Work, out: Path) -> None:
        out.unlink(missing_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of forks: nothing has run on a device yet
            child = os.fork()
        if child:
            self._running[child] = (key, out, time.monotonic())
            return
        status = 1
        try:
            os.setpgid(0, 0)
            seconds = int(self._seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
            quiet = os.open(f"{out}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            function(out)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _one(self) -> Result:
        while True:
            child, status, used = os.wait4(-1, os.WNOHANG)
            if child in self._running:
                break
            now = time.monotonic()
            for each, (_, _, begun) in self._running.items():
                if now - begun > _GRACE * self._seconds:
                    os.kill(each, signal.SIGKILL)
            time.sleep(0.05)
        key, out, _ = self._running.pop(child)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what a test has started and not ended
        text = out.read_text() if out.exists() else ""
        lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        how = "ended"
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            how = "time" if number in (signal.SIGXCPU, signal.SIGKILL) else f"signal {number}"
        elif os.WEXITSTATUS(status):
            how = "failed"
        return key, lines, how, used.ru_utime + used.ru_stime


class Session:
    """A plugin of pytest: collects tests, and calls `then` in place of running them."""

    def __init__(self, then: Callable[[Session], None], examples: int):
        self._then, self._examples = then, examples
        self.items: dict[str, pytest.Item] = {}
        self._out: Path | None = None
        self._note: Callable[[], dict[str, Any]] = dict
        self._failed = ""

    def pytest_collection(self) -> None:
        """Examples that fail are not shrunk: that they fail is all there is to know."""
        quick, phases = settings.get_profile("quick"), [Phase.explicit, Phase.generate]
        few = min(self._examples, quick.max_examples)
        settings.register_profile("unshrunk", quick, phases=phases, max_examples=few)
        settings.load_profile("unshrunk")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """All tests are collected."""
        self.items = {item.nodeid: item for item in session.items}
        self._then(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The parts of a test: a failure of any is one of the test."""
        if report.failed:
            self._failed = report.nodeid

    def run(
        self,
        tests: Sequence[str],
        out: Path,
        note: Callable[[], dict[str, Any]] = dict,
        until: float = math.inf,
        stop: bool = True,
    ) -> str:
        """The first test that fails; ends there, or when processor time `until` is reached."""
        items = [self.items[test] for test in tests if test in self.items]
        for number, item in enumerate(items):
            note()
            begun = time.process_time()
            following = items[number + 1] if number + 1 < len(items) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            seconds = round(time.process_time() - begun, 3)
            line = {"test": item.nodeid, "seconds": seconds} | note()
            with out.open("a") as file:
                print(json.dumps(line), file=file)
            if (self._failed and stop) or time.process_time() > until:
                break
        return self._failed


def collect(files: Sequence[str], then: Callable[[Session], None], examples: int = 1000) -> bool:
    """Whether the tests of some files could be collected; `then` does something with them.

    Property tests draw as many examples as usual, or no more than `examples`.
    """
    return pytest.main([*_OPTIONS, *files], plugins=[Session(then, examples)]) in (0, 5)
