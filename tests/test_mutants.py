"""The tool that puts mistakes into the partitioner, on a small package of its own."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

from tools.mutants import mutations, report, running
from tools.mutants.blocks import Blocks, load
from tools.mutants.mutations import Mutation
from tools.mutants.swapping import functions_of, swaps
from tools.mutants.touched import partitioner

ROOT = Path(__file__).parents[1]
SOURCE = '''"""A module."""

LIMIT = 3


def bounded(n):
    """At most the limit."""
    if n > LIMIT:
        return LIMIT
    return n


def adding(m):
    """Returns a function."""
    return lambda n: n + m


add_two = adding(2)


class Box:
    """With a method."""

    size = 2

    def rows(self, n):
        return [n + i for i in range(self.size)]
'''


def mutation(old, new, name="m"):
    return Mutation(name, "comparison", "mutated_package/part.py", old, new)


@pytest.fixture
def root(tmp_path, monkeypatch):
    folder = tmp_path / "mutated_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "part.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield tmp_path
    for name in ("mutated_package", "mutated_package.part"):
        sys.modules.pop(name, None)


def imported():
    return importlib.import_module("mutated_package.part")


def test_functions_that_are_there_are_changed_in_place(root):
    part = imported()
    bounded, rows, add_two = part.bounded, part.Box().rows, part.add_two
    functions = functions_of(root)
    changes = [("n > LIMIT", "n >= LIMIT + 2", 1), ("n + i", "n - i", 1), ("n + m", "n - m", 2)]
    for old, new, count in changes:
        found = swaps(mutation(old, new), root, functions)
        assert len(found) == count
        for function, code in found:
            function.__code__ = code
    assert bounded(4) == 4
    assert rows(5) == [5, 4]
    assert add_two(5) == part.adding(2)(5) == 3  # one that was made before, and one made since
    assert "n > LIMIT" in (root / "mutated_package" / "part.py").read_text()


@pytest.mark.parametrize(("old", "new"), [("LIMIT = 3", "LIMIT = 4"), ("size = 2", "size = 1")])
def test_what_an_import_does_cannot_be_changed_in_place(root, old, new):
    imported()
    assert swaps(mutation(old, new), root, functions_of(root)) is None


def test_a_mutated_file_is_imported_in_place_of_its_own(root):
    file = "mutated_package/part.py"
    text = mutation("LIMIT = 3", "LIMIT = 7").applied(SOURCE)
    load(root, {file: compile(text, str(root / file), "exec")})
    assert imported().bounded(9) == 7


def test_the_blocks_that_are_executed_are_known(root):
    blocks = Blocks(root, ["mutated_package/part.py"])
    load(root, blocks.codes, blocks.hit)
    part = imported()
    assert len(blocks.hit) == 1  # `adding`
    blocks.hit.clear()
    part.bounded(1)
    inner = [n for n, (_, first, _) in enumerate(blocks.spans) if "return LIMIT" in _line(first)]
    assert len(inner) == 1
    assert len(blocks.hit) == 1
    part.bounded(4)
    assert blocks.hit >= {*inner}


def _line(number):
    return SOURCE.splitlines()[number - 1]


def test_a_mutation_that_does_not_fit_is_stale():
    assert mutation("n", "m").applied(SOURCE) is None  # many times
    assert mutation("nowhere", "m").applied(SOURCE) is None
    assert mutation("n > LIMIT", "n < LIMIT").line(SOURCE) == 8


def test_the_mutations_are_of_the_partitioner_and_can_be_compiled():
    """At least 150 of them; those that a change of their file has made stale are left out."""
    files, count = set(partitioner(ROOT)), 0
    for each in mutations.load():
        assert each.file in files, each.name
        text = each.applied((ROOT / each.file).read_text())
        if text is not None:
            ast.parse(text)
            count += 1
    assert count >= 150


def test_results_are_kept_and_counted(tmp_path):
    one, two = mutation("a", "b", "one"), mutation("c", "d", "two")
    ended = [{"test": "x", "seconds": 0.1}, {"failed": "tests/test_a.py::test_b"}]
    for each, lines in ((one, ended), (two, ended[:1])):
        running._append(tmp_path / "results.jsonl", running._result(each, lines, "ended", 1.0))
    found = running.results(tmp_path)
    assert [found[m.key]["how"] for m in (one, two)] == ["killed", "survived"]
    assert report.counts([one, two], found) == (2, 1, 0)
    page = report.page([one, two], tmp_path)
    assert "- `two` in `mutated_package/part.py`" in page
    running.forget(tmp_path, [one])
    assert list(running.results(tmp_path)) == [two.key]


def test_every_mutation_fits_its_file():
    """What a change of the code makes stale is renewed with it: else nobody asks who kills it."""
    assert not [m.name for m in mutations.stale(mutations.load(), ROOT)]
