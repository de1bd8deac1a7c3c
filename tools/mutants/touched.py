"""Which blocks of the partitioner each quick test executes, and the processor time it takes.

One run of all quick tests of the partitioner, each file in a process of its own: what one file has
left in a cache would hide from the next what it needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.mutants.blocks import Blocks, load
from tools.mutants.mutations import Mutation
from tools.mutants.warm import Children, Session, Work, collect

# What is no part of the partitioner.
_APART = (
    *("nn", "mt", "forecast", "explanation", "autosharding", "models", "commands", "contrib"),
    *("cli.py", "extend.py"),
)
_FOLDERS = (
    *("capture", "checking", "graph", "moving", "planning", "programs", "propagation", "rules"),
    *("runtime", "tensors"),
)
# Of the tests beside the folders these; pages, commands and other libraries are left out.
_FILES = (
    *("test_habits.py", "test_jit.py", "test_manual.py", "test_one_sum.py", "test_refusals.py"),
    *("test_repeated_calls.py", "test_three_axes.py", "test_transformations.py"),
)
# They start JAX's devices when they are imported, after which no fork is safe.
STARTING = {
    "tests/rules/test_harness.py",
}
_LONGEST = 180.0  # processor seconds for a file of tests


@dataclass(frozen=True)
class Test:
    """A test: its processor time and the blocks that it executes, one bit each."""

    name: str
    seconds: float
    blocks: int

    @property
    def file(self) -> str:
        """The file that it is in."""
        return self.name.split("::")[0]


def partitioner(root: Path) -> list[str]:
    """The files of the partitioner."""
    found = sorted((root / "gshard").rglob("*.py"))
    names = [path.relative_to(root) for path in found]
    return [str(name) for name in names if name.parts[1] not in _APART]


def test_files(root: Path) -> list[str]:
    """The files of quick tests of the partitioner."""
    folders = [root / "tests" / name for name in _FOLDERS]
    found = [path for folder in folders for path in sorted(folder.rglob("test_*.py"))]
    found += [root / "tests" / name for name in _FILES]
    return [str(path.relative_to(root)) for path in found]


def record(root: Path, folder: Path, jobs: int, say: Callable[[str], None]) -> None:
    """Run all tests once; a file of tests whose lines are there already is not run again.

    All are, if one is new and the partitioner has changed: its blocks have other numbers then.
    """
    store, kept = folder / "touched.jsonl", folder / "sources.json"
    done = {json.loads(line)["file"] for line in lines_of(store)}
    todo = [file for file in test_files(root) if file not in done]
    if not todo:
        return
    blocks = Blocks(root, partitioner(root))
    # The tests are recorded with these lines; the files may change before the next record.
    sources = {file: (root / file).read_text() for file in blocks.codes}
    if done and json.loads(kept.read_text())[1] != sources:
        store.unlink()
        todo = test_files(root)
    kept.write_text(json.dumps([blocks.spans, sources]))
    load(root, blocks.codes, blocks.hit)

    def run_all(session: Session) -> None:
        def work(file: str) -> Work:
            tests = [name for name in session.items if name.split("::")[0] == file]
            return lambda out: print(session.run(tests, out, blocks.note, stop=False))

        keep((file, work(file)) for file in todo if file not in STARTING)

    def apart(file: str) -> Work:
        def run_it(out: Path) -> None:
            def then(session: Session) -> None:
                session.run(list(session.items), out, blocks.note, stop=False)

            collect([file], then)

        return run_it

    def keep(work: Iterable[tuple[str, Work]]) -> None:
        found = Children(jobs, _LONGEST).map(work, folder / "children")
        for count, (file, lines, how, seconds) in enumerate(found, 1):
            with store.open("a") as out:
                print(json.dumps({"file": file, "how": how, "tests": lines}), file=out)
            say(f"{count}/{len(todo)} {file}: {len(lines)} tests, {seconds:.0f} s, {how}")

    keep((file, apart(file)) for file in todo if file in STARTING)
    if not collect([file for file in todo if file not in STARTING], run_all):
        raise SystemExit("gshard: the tests cannot be collected")


class Recorded:
    """The tests of the last `record`, and the blocks of the files as they were then."""

    def __init__(self, folder: Path):
        spans, self._sources = json.loads((folder / "sources.json").read_text())
        self._spans: list[tuple[str, int, int]] = [tuple(span) for span in spans]
        self.tests = [
            Test(test["test"], test["seconds"], int(test["blocks"], 16))
            for line in lines_of(folder / "touched.jsonl")
            for test in json.loads(line)["tests"]
        ]

    def ranked(self, mutation: Mutation) -> list[Test]:
        """The tests that execute the smallest block around a mutation, the best first.

        Quick ones come before slow ones; those that are named like the file count as ten times
        quicker. What is not in a function is executed by the tests that execute anything of its
        file.
        """
        wanted = sum(1 << number for number in self._blocks(mutation))
        found = [test for test in self.tests if test.blocks & wanted]
        words = {Path(mutation.file).stem, Path(mutation.file).parent.name}

        def rank(test: Test) -> float:
            own = words & {Path(test.file).stem.removeprefix("test_"), Path(test.file).parent.name}
            return test.seconds / 10 if own else test.seconds

        return sorted(found, key=rank)

    def _blocks(self, mutation: Mutation) -> list[int]:
        line = mutation.line(self._sources.get(mutation.file, ""))
        mine = [(n, a, b) for n, (file, a, b) in enumerate(self._spans) if file == mutation.file]
        around = [(b - a, n) for n, a, b in mine if line is not None and a <= line <= b]
        return [min(around)[1]] if around else [n for n, _, _ in mine]


def lines_of(store: Path) -> Sequence[str]:
    """The lines of a file, which need not be there yet."""
    return store.read_text().splitlines() if store.exists() else ()
