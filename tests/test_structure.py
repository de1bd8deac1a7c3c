"""The house stays in order: imports point one way, files and functions are small."""

from pathlib import Path

import grimp
import pytest

from tools import budget, structure, walks
from tools.structure import part

ROOT = Path(__file__).parents[1]
# What translation may import.
PUBLIC = {
    "gshard",
    "gshard.errors",
    "gshard.nn",
    "gshard.pages",
    "gshard.recording",
    "gshard.untrusted",
}


@pytest.fixture(scope="module")
def arrows():
    return structure.arrows(ROOT)


def test_no_import_climbs_back(arrows):
    assert not structure.climbing(arrows)


def test_no_files_import_each_other_in_a_circle():
    assert not structure.climbing(structure.imports(ROOT))


def test_an_arrow_on_a_circle_climbs_back():
    """The check can fail: the circle that once was between rules, combine and strategy."""
    once = {"combine": {"rules"}, "rules": {"strategy"}, "strategy": {"combine"}, "jit": {"rules"}}
    assert structure.climbing(once) == [
        ("combine", "rules"),
        ("rules", "strategy"),
        ("strategy", "combine"),
    ]


def test_models_know_only_annotations_manual_regions_and_pipelines():
    found = structure.imports(ROOT)
    of_nn = [others for module, others in found.items() if part(module) == "nn"]
    outside = {other for others in of_nn for other in others if part(other) != "nn"}
    public = {"gshard.tensors.annotate", "gshard.manual", "gshard.pipelining.api"}
    assert outside <= {*public, "gshard._lazy"}


def test_translation_knows_the_public_face():
    graph = grimp.build_graph("gshard", cache_dir=None)
    modules = {"gshard.mt", *graph.find_descendants("gshard.mt")}
    imported = {i for m in modules for i in graph.find_modules_directly_imported_by(m)} - modules
    assert {".".join(name.split(".")[:2]) for name in imported} <= PUBLIC


def test_nothing_imports_the_command(arrows):
    assert [part for part, imported in arrows.items() if "cli" in imported] == ["__main__"]


def test_the_private_modules_of_jax_are_named_in_one_file_of_the_core_and_one_of_mt():
    named = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "gshard").rglob("*.py"))
        if "jax._src" in path.read_text()
    ]
    assert named == ["gshard/_jax.py", "gshard/mt/_jax.py"]


def test_parameters_that_a_release_renames_are_read_in_one_file():
    """A scan's since JAX 0.11: only `_jax.scan_counts` knows both names."""
    for path in sorted((ROOT / "gshard").rglob("*.py")):
        if path.name != "_jax.py":
            assert '"num_consts"' not in path.read_text(), path
            assert '"num_carry"' not in path.read_text(), path


@pytest.fixture
def small(tmp_path):
    """A package of three parts with its page."""
    for name, count in (("jit.py", 3), ("rules/sort.py", 2), ("rules/fft.py", 5), ("mt/run.py", 7)):
        path = tmp_path / "gshard" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("pass\n" * count)
    for name in ("test_jit.py", "rules/test_fft.py"):
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/design.md").write_text("\n".join(budget.table(tmp_path)))
    return tmp_path


def test_sizes(small):
    assert budget.sizes(small) == {
        "face": (3, 1, 0),
        "rules": (7, 2, 1),
        "mt": (7, 1, 1),
        "partitioner": (10, 3, 1),
        "all": (17, 4, 2),
    }


def test_a_budget_that_is_exceeded(small):
    assert not budget.excess(small)
    (small / "gshard/rules/sort.py").write_text("KNOWN: dict = {}\n\n\neqn.primitive.name == 'a'\n")
    (small / "gshard/nn.py").touch()
    assert budget.excess(small) == [
        "face: 2 files, budget 1",
        "face: 1 untested, budget 0",
        "rules: 9 lines, budget 7",
        "partitioner: 12 lines, budget 10",
        "partitioner: 4 files, budget 3",
        "partitioner: 2 untested, budget 1",
        "all: 19 lines, budget 17",
        "all: 5 files, budget 4",
        "all: 3 untested, budget 2",
        "comparisons with `primitive.name`: 1, budget 0",
        "module-level dictionaries that are written to, in `planning` and `rules`: 1, budget 0",
    ]


@pytest.fixture(scope="module")
def package():
    return walks.Package(ROOT)


@pytest.mark.parametrize("name", walks.WALKS)
def test_walks_are_short(name, package):
    start = walks.WALKS[name]
    found = walks.walk(package, start)
    assert found.stays <= start.stays, found.route
    assert found.returns <= start.returns, found.route


def test_a_walk_follows_what_calls_return(tmp_path):
    files = {
        "a.py": "from gshard.b import f\nfrom gshard.c import C\n\n\ndef start(x):\n"
        "    y = f(x)\n    c = C(y)\n    return c.close(x) if y else f(c)\n",
        "b.py": "def f(v):\n    return v + 1\n",
        "c.py": "class C:\n    def __init__(self, w):\n        self.w = w\n\n"
        "    def close(self, x):\n        return x\n",
    }
    for name, text in files.items():
        (tmp_path / "gshard").mkdir(exist_ok=True)
        (tmp_path / "gshard" / name).write_text(text)
    found = walks.walk(walks.Package(tmp_path), walks.Start("gshard.a", "start", "x", 0, 0))
    assert found.route == ["a.py", "b.py", "c.py"]


def test_long_files_and_functions_are_refused(small):
    """`make lint` refuses those of this repository."""
    (small / "gshard/jit.py").write_text("# Why.\n" * 401)
    (small / "gshard/mt/run.py").write_text("def run():\n" + "    pass\n" * 60)
    (small / "gshard/rules/fft.py").write_text("def run():\n" + "    pass\n" * 59)
    assert structure.excess(small)[-2:] == ["gshard/jit.py: 401", "gshard/mt/run.py:1 run: 61"]


def test_at_most_eight_files_at_the_top():
    """The public face; everything else is in the package of its stage."""
    files = {path.name for path in (ROOT / "gshard").glob("[!_]*.py")}
    assert len(files) <= 8, sorted(files)
