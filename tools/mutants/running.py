"""Each mutant against the tests that execute what it changes, until one of them fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.mutants.blocks import load
from tools.mutants.mutations import Mutation
from tools.mutants.swapping import functions_of, swaps
from tools.mutants.touched import STARTING, Recorded
from tools.mutants.warm import Children, Session, Work, collect

_FILES = 12  # of tests that a mutant meets which is imported: to collect them takes long
_MET = "met"  # results of mutants that have met all tests but those of `STARTING`
Say = Callable[[str], None]

_LONGER = 90  # processor seconds beyond the limit after which a test hangs


class Runner:
    """Runs mutants, and keeps every result as soon as it is there."""

    def __init__(
        self,
        root: Path,
        folder: Path,
        recorded: Recorded | None,
        jobs: int,
        seconds: float,
        say: Say,
        tests: Sequence[str] = (),
    ):
        self._root, self._folder, self._recorded = root, folder, recorded
        self._jobs, self._seconds, self._say = jobs, seconds, say
        self._children = folder / "children"
        self._tests = list(tests)  # in place of those that are recorded

    def in_place(self, mutations: Sequence[Mutation]) -> None:
        """Those that can be put into functions, in forks of a process with all tests collected."""

        def run_all(session: Session) -> None:
            functions = functions_of(self._root)
            work = (
                (mutation, self._child(session, mutation, found))
                for mutation in mutations
                if (found := swaps(mutation, self._root, functions))
            )
            self._keep(work, len(mutations), in_place=True)

        wanted = {name.split("::")[0] for m in mutations for name in self._names(m)} - STARTING
        wanted = set(self._tests) or wanted
        if wanted and not collect(sorted(wanted), run_all):
            raise SystemExit("gshard: the tests cannot be collected")

    def imported(self, mutations: Sequence[Mutation]) -> None:
        """Those that change what a module does when it is imported: each process imports anew."""
        self._keep(((m, self._importing(m)) for m in mutations), len(mutations))

    def confirm(self, mutations: Sequence[Mutation]) -> list[str]:
        """The tests that fail without a mutation, too; what they killed has no result any more."""
        known = results(self._folder)
        mine = [known[m.key] for m in mutations if m.key in known]
        killers = {r["by"] for r in mine if r["by"] not in ("", "import")}
        wrong: list[str] = []

        def run_all(session: Session) -> None:
            def work(file: str) -> Work:
                own = sorted(k for k in killers if k.split("::")[0] == file)
                return lambda out: _append(out, {"failed": session.run(own, out)})

            files = sorted({killer.split("::")[0] for killer in killers} - STARTING)
            found = Children(self._jobs, 600).map(((f, work(f)) for f in files), self._children)
            for file, lines, _, _ in found:
                failed = [line["failed"] for line in lines if line.get("failed")]
                wrong.extend(failed)
                self._say(f"{file}: {failed[0] if failed else 'all pass'} without a mutation")

        if killers:
            collect(sorted({killer.split("::")[0] for killer in killers} - STARTING), run_all)
        forget(self._folder, [m for m in mutations if known.get(m.key, {}).get("by") in wrong])
        return wrong

    def _child(self, session: Session, mutation: Mutation, found: Sequence[Any]) -> Work:
        def child(out: Path) -> None:
            for function, code in found:
                function.__code__ = code
            self._test(session, mutation, out)

        return child

    def _importing(self, mutation: Mutation) -> Work:
        met = results(self._folder / _MET)

        def child(out: Path) -> None:
            path = self._root / mutation.file
            text = mutation.applied(path.read_text())
            assert text is not None
            load(self._root, {mutation.file: compile(text, str(path), "exec", dont_inherit=True)})
            files = list(dict.fromkeys(name.split("::")[0] for name in self._names(mutation)))
            if mutation.key in met:
                files = [file for file in files if file in STARTING]
            files = self._tests or files
            if not collect(files[:_FILES], lambda session: self._test(session, mutation, out)):
                _append(out, {"failed": "import"})

        return child

    def _test(self, session: Session, mutation: Mutation, out: Path) -> None:
        tests = list(session.items) if self._tests else self._names(mutation)
        until = time.process_time() + self._seconds
        if failed := session.run(tests, out, until=until):
            _append(out, {"failed": failed})

    def _more_tests(self, mutation: Mutation) -> bool:
        """Whether there are tests that can be run by `imported` alone."""
        return any(name.split("::")[0] in STARTING for name in self._names(mutation))

    def _names(self, mutation: Mutation) -> list[str]:
        """The recorded tests that execute what a mutation changes, the best first."""
        return [test.name for test in self._recorded.ranked(mutation)] if self._recorded else []

    def _keep(
        self, work: Iterable[tuple[Mutation, Work]], total: int, in_place: bool = False
    ) -> None:
        children = Children(self._jobs, self._seconds + _LONGER)
        killed = survived = 0
        for mutation, lines, how, used in children.map(work, self._children):
            result = _result(mutation, lines, how, used)
            if in_place and result["how"] == "survived" and self._more_tests(mutation):
                (self._folder / _MET).mkdir(exist_ok=True)
                _append(self._folder / _MET / "results.jsonl", result)
                continue
            _append(self._folder / "results.jsonl", result)
            survived += result["how"] == "survived"
            killed += result["how"] != "survived"
            self._say(
                f"{killed + survived}/{total} {mutation.name}: {result['how']} {result['by']} "
                f"({used:.0f} s); {killed} killed, {survived} survived"
            )


def _append(store: Path, line: dict[str, Any]) -> None:
    with store.open("a") as file:
        print(json.dumps(line), file=file)


def _result(
    mutation: Mutation, lines: Sequence[dict[str, Any]], how: str, used: float
) -> dict[str, Any]:
    failed = [line["failed"] for line in lines if "failed" in line]
    ran = sum("test" in line for line in lines)
    kinds = {"ended": "survived", "time": "hangs", "failed": "crashes"}
    what = "killed" if failed else kinds.get(how, "crashes")
    result = {"key": mutation.key, "name": mutation.name, "how": what}
    return result | {"by": failed[0] if failed else "", "tests": ran, "seconds": round(used, 1)}


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """The newest result of every mutation, by its key."""
    store = folder / "results.jsonl"
    lines = store.read_text().splitlines() if store.exists() else []
    return {line["key"]: line for line in map(json.loads, lines)}


def forget(folder: Path, mutations: Sequence[Mutation]) -> None:
    """Drop the results of some mutations."""
    keys = {mutation.key for mutation in mutations}
    (folder / _MET / "results.jsonl").unlink(missing_ok=True)
    kept = [line for key, line in results(folder).items() if key not in keys]
    (folder / "results.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in kept))
