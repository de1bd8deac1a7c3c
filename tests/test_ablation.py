"""The tool that lowers programs without one mechanism after the other."""

import importlib
import sys

import pytest

from tools import ablation
from tools.ablation import Mechanism
from tools.mutants.blocks import Blocks, load

SOURCE = '''"""A module."""

FEW = 3


def least(n):
    """At most a few."""
    if n > FEW:
        return FEW
    return n


class Box:
    """With a method."""

    @property
    def rows(self):
        """Many."""
        return 9
'''


@pytest.fixture
def root(tmp_path, monkeypatch):
    folder = tmp_path / "gshard"
    folder.mkdir()
    (folder / "part.py").write_text(SOURCE)
    monkeypatch.setattr(ablation, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("mechanism", ablation.mechanisms(), ids=lambda m: m.name)
def test_every_mechanism_fits_the_code(mechanism):
    assert mechanism.off or mechanism.edits
    assert mechanism.lines(ablation.ROOT) >= 0
    assert mechanism.places(ablation.ROOT)
    assert mechanism.codes(ablation.ROOT)


def test_a_mechanism_is_left_out_of_what_is_imported(root, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    off, edit = {"part.py:Box.rows": "return 0"}, ("part.py", "FEW = 3", "FEW = 1")
    load(root, Mechanism("m", "", [], off, [edit]).codes(root))
    spec = next(f for f in sys.meta_path if type(f).__name__ == "Loader").find_spec("gshard.part")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (module.least(5), module.Box().rows) == (1, 0)


def test_lines_and_the_programs_that_execute_them(root):
    assert Mechanism("m", "", ["part.py"]).lines(root) == len(SOURCE.splitlines())
    assert Mechanism("m", "", ["part.py:least"]).lines(root) == 5 + 2
    assert Mechanism("m", "", ["part.py:Box.rows"]).lines(root) == 4 + 1
    blocks = Blocks(root, ["gshard/part.py"])
    bits = {name: number for number, (_, name, _) in enumerate(blocks.spans)}
    inner = bits[SOURCE[: SOURCE.index("return FEW")].count("\n") + 1]
    before = {"few": {"blocks": "0"}, "many": {"blocks": hex(1 << inner)[2:]}}
    edit = ("part.py", "return FEW", "return 2")
    assert ablation.reached(Mechanism("m", "", [], {}, [edit]), blocks, before) == {"many"}


def test_what_sends_more_and_what_fails():
    def row(count, **more):
        return {"bytes": count, "equations": 10, "seconds": 1.0, **more}

    before = {"a": row(10), "b": row(10), "c": row(0), "d": row(10), "e": {"failed": "before"}}
    after = {"a": row(25), "b": row(10), "c": row(4), "d": {"failed": "now"}, "e": row(1)}
    found = ablation.compared(before, after)
    assert found["more"] == {"a": 2.5, "c": 4.0}
    assert found["failed"] == ["d"]
    assert not found["less"]
    assert found["equations"] == 1


def test_a_text_that_is_gone_is_an_error(root):
    with pytest.raises(ValueError, match="twice"):
        Mechanism("m", "", [], {}, [("part.py", "return", "pass")]).places(root)
    with pytest.raises(ValueError, match="no most"):
        Mechanism("m", "", [], {"part.py:most": "return 1"}).places(root)
