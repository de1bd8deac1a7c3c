"""What users install: the wheel's contents and metadata, and the small public face."""

import importlib.metadata
import json
import re
import resource
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import gshard
from tools import badges, extras, matrix, release

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources by setuptools alone, without a network."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("gshard", "tests", "tools"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (built,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel):
    ours = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "gshard").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == ours
    assert "gshard/py.typed" in packed
    kinds = {Path(name).suffix for name in packed}
    assert kinds == {".py", ".typed", ".toml", ".json", ".md", ".sh", ".html", ".css", ".js"}


def test_the_wheel_says_whose_it_is_and_what_it_needs(wheel):
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    told = Parser().parsestr(wheel.read(name).decode())
    assert told["Author"] == "The gshard authors"
    assert told["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in told.get_all("Classifier")
    # No address of a place that is not there yet: the paper's can be opened by anybody.
    assert told.get_all("Project-URL") == ["Paper, https://arxiv.org/abs/2006.16668"]
    core = [r for r in told.get_all("Requires-Dist") if "extra ==" not in r]
    assert sorted(r.split("<")[0].split(">")[0] for r in core) == ["jax", "numpy"]


def test_what_the_wheel_unpacks_to_works(wheel, tmp_path):
    """From another folder, nothing else of the repository on the path."""
    wheel.extractall(tmp_path)
    program = (
        "import gshard; from gshard.mt.data.tiers import load;"
        "print(gshard.__file__, gshard.__version__, load('tiny').name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "", "JAX_PLATFORMS": "cpu"},
        check=True,
        capture_output=True,
        text=True,
    )
    where, version, tier = done.stdout.split()
    assert where == str(tmp_path / "gshard" / "__init__.py")
    assert f"gshard-{version}.dist-info/METADATA" in wheel.namelist()
    assert tier == "tiny"


def test_dir_shows_what_users_call_and_nothing_else():
    assert dir(gshard) == sorted(gshard.__all__)
    assert all(hasattr(gshard, name) for name in gshard.__all__)
    everything = {name for name in vars(gshard) if not name.startswith("_")}
    hidden = everything - set(gshard.__all__)
    modules = {path.stem for path in (ROOT / "gshard").iterdir()}
    assert hidden <= modules, "a public name is missing from __all__"


def test_a_version_that_cannot_be_known_is_not_made_up(monkeypatch):
    def nothing_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(importlib.metadata, "version", nothing_installed)
            assert importlib.reload(gshard).__version__ == "0+unknown"
    finally:
        importlib.reload(gshard)


def test_the_citation_is_of_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {project['version']}\n" in citation
    assert f"\nlicense: {project['license']}\n" in citation
    assert project["authors"][0]["name"] in citation


def test_the_container_copies_what_an_installation_needs():
    """Every file that pyproject.toml names, and nothing that the context leaves out."""
    copied = " ".join(
        re.findall(r"^COPY (.*) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    )
    kept = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert set(copied.split()) == set(kept) == {"pyproject.toml", "README.md", "LICENSE", "gshard"}


def test_the_badges_are_made_from_the_project():
    made = badges.badges()
    assert made == {path.name: path.read_text() for path in badges.FOLDER.iterdir()}
    assert "0.10 to 0.12" in made["jax.svg"]
    readme = (ROOT / "README.md").read_text()
    assert all(f"badges/{name}" in readme for name in made)


def test_the_table_of_extras_is_in_the_docs():
    """Every extra that can be counted has a row; sizes differ between environments."""
    page = (ROOT / "docs" / "howto" / "install.md").read_text()
    table, _, exclusive = extras.table().partition("\n\n")
    rows = [line for line in table.splitlines() if "not counted" not in line]
    assert rows[0] in page
    assert len(rows) > 6
    for row in rows[2:]:
        assert f"\n{row.split('|')[1].join('||')}" in page
    assert exclusive == "`export` and `huggingface` exclude each other: transformers"
    assert "`export` and `huggingface` exclude each other" in page
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras.needed(project) < extras.needed(project, "mt") | extras.needed(project)


def contained(project, extra):
    """An extra, and those of gshard that it contains."""
    wanted = map(Requirement, project["optional-dependencies"][extra])
    inner = [
        e for requirement in wanted if requirement.name == "gshard" for e in requirement.extras
    ]
    return {extra}.union(*(contained(project, each) for each in inner))


def test_the_extra_all_has_every_feature():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    others = set(project["optional-dependencies"]) - contained(project, "all")
    assert others == {"export", "huggingface", "docs", "third-party", "slow", "dev"}


@pytest.mark.slow
@pytest.mark.parametrize("last", ["export", "huggingface"])  # which exclude each other
def test_all_extras_together_resolve_in_two_minutes(wheel, tmp_path, last):
    """Of processor time: an index may take long to answer."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {*project["optional-dependencies"], last} - ({"export", "huggingface"} - {last})
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "-q", "--ignore-installed"]
    command += ["--report", report, f"{wheel.filename}[{','.join(sorted(extras))}]"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if "connection" in done.stderr.lower():
        pytest.skip("there is no index to ask")
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 120
    found = json.loads(report.read_text())["install"]
    names = {canonicalize_name(each["metadata"]["name"]) for each in found}
    named = (Requirement(r) for e in extras for r in project["optional-dependencies"][e])
    assert {canonicalize_name(requirement.name) for requirement in named} <= names


def test_a_release_is_tested_on_the_oldest_and_newest_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    said = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)]
    tested = {".".join(map(str, version)) for version in release.PAIRS.values()}
    assert {said[0], said[-1]} <= tested
    (jax,) = (r for r in project["dependencies"] if r.startswith("jax"))
    assert jax == "jax>=0.10,<0.13"
    assert set(release.PAIRS) == {"0.10", "0.12"}
    assert list(matrix.RELEASES) == ["0.10", "0.11", "0.12"]
    assert all((ROOT / path).exists() for path in release.TESTS)


def test_no_address_leads_nowhere():
    """Addresses that every user can open; those of a repository that is not public are none."""
    for name in (
        "README.md",
        "CITATION.cff",
        "SECURITY.md",
        "CODE_OF_CONDUCT.md",
        "pyproject.toml",
    ):
        for host in re.findall(r"https?://([^/\s)\"']+)", (ROOT / name).read_text()):
            assert host in {"arxiv.org", "www.contributor-covenant.org"}, (name, host)
