"""The README's block of Llama: its code is the example's, and its table what both programs send."""

import ast
import importlib.util
import re

import pytest

from examples import llama_block
from gshard.comparing.comparison import compare
from gshard.comparing.step import Step
from gshard.graph.readable import duration, size
from tests.documents import ROOT, blocks

README = ROOT / "README.md"
SOURCE = (ROOT / "examples" / "llama_block.py").read_text()


def functions(text):
    found = (n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef))
    return {f.name: ast.dump(f) for f in found if f.name in ("norm", "block")}


def test_the_readme_shows_the_example():
    code = next(b.code for b in blocks(README) if b.kind == "python")
    assert functions(code) == functions(SOURCE)


@pytest.mark.slow
def test_the_table_is_what_both_programs_send_and_take(tmp_path):
    (tmp_path / "cured.py").write_text(SOURCE.replace("split(x, 2, 8)", "split(x, 0, 8)"))
    spec = importlib.util.spec_from_file_location("cured", tmp_path / "cured.py")
    cured = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cured)
    columns = []
    for module in (llama_block, cured):
        found = compare(Step(module.block, module.shapes()), "h100")
        columns.append([f"{size(p.sent)}, {duration(p.seconds)}" for p in found.programs])
    rows = re.findall(r"^\| `\w+\.jit`.*? \| (.+) \| (.+) \|$", README.read_text(), re.MULTILINE)
    assert [*map(list, zip(*columns, strict=True))] == [*map(list, rows)]
