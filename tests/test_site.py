"""The site: every public name in the reference, and pages that a browser can read and search."""

import ast
import functools
import http.server
import json
import re
import runpy
import shutil
import subprocess
import sys
import threading

import pytest

import gshard
from gshard import manual
from tests import documents
from tests.documents import ROOT
from tests.mt.browser import open_page

REFERENCE = ROOT / "docs" / "reference" / "python.md"
CONTRIB = ["contrib.equinox.filter_jit", "contrib.nnx.jit"]


def sections():
    """The text under the heading of each public name."""
    parts = re.split(r"^### ([\w.]+)$", REFERENCE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def public_names():
    of_gshard = set(gshard.__all__) - {"__version__", "extend", "forecast", "manual"}
    return {*of_gshard, *CONTRIB, *(f"manual.{n}" for n in manual.__all__ if n not in of_gshard)}


def test_the_reference_has_every_public_name():
    assert set(sections()) == public_names()


@pytest.mark.parametrize("name", sorted(public_names()))
def test_every_name_has_a_signature_errors_and_an_example(name):
    text = sections()[name]
    assert f":: gshard.{name}\n" in text
    if name in CONTRIB:  # in the docstring, and on the library's page
        docstring = sys.modules.get(f"gshard.{name.rpartition('.')[0]}") or __import__(
            f"gshard.{name.rpartition('.')[0]}", fromlist=["_"]
        )
        docstring = getattr(docstring, name.rpartition(".")[2]).__doc__
        assert "Raises:" in docstring
        assert "Example:" in docstring
        return
    assert "**Errors.** " in text
    examples = documents.FENCE.findall(text)
    tree = ast.parse("".join(code for kind, code in examples if kind == "python"))
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    objects = {"Jitted", "Lowered", "Compiled", "Collective", "Sharding", "UnevenArray"}
    objects |= {"Difference", "Replay", "Report"}
    assert name.rpartition(".")[2] in used or name in objects


def test_every_page_is_on_the_site():
    """The trees of contents on the first page name every page, by itself or with its folder."""
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs").with_suffix("")
        if str(path) not in ("index", "README"):
            assert f"\n{path.parent}/*\n" in index or f"\n{path}\n" in index, path


def test_the_list_of_versions_is_that_of_the_tags():
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    tags = ["v1.9.0", "nightly", "v1.10.0", "v2.0.0rc1", "v0.9.1"]
    found = conf["versions"](tags, "https://docs.example.org/")
    assert [version["name"] for version in found] == ["1.10.0", "1.9.0", "0.9.1", "dev"]
    assert found[0]["url"] == "https://docs.example.org/1.10.0/"
    assert [version.get("preferred") for version in found] == [True, None, None, None]
    assert conf["versions"]([], "https://docs.example.org") == [
        {
            "name": "dev",
            "version": "dev",
            "url": "https://docs.example.org/dev/",
            "preferred": True,
        }
    ]


def test_making_the_site_installs_no_tools_of_developers(tmp_path):
    command = ["make", "--dry-run", "site", f"VENV={tmp_path / 'env'}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert f"-m venv {tmp_path / 'env'}" in shown
    assert ".[docs]" in shown
    assert ".[dev]" not in shown


@pytest.mark.slow
def test_one_setting_links_pages_to_their_source_and_notebooks_to_colab(tmp_path):
    """An address of the repository, of which there is none yet."""
    pytest.importorskip("sphinx_book_theme")
    docs = tmp_path / "docs"
    docs.mkdir()
    project = (ROOT / "pyproject.toml").read_text()
    assert "\nRepository" not in project
    address = "https://github.com/owner/name"
    (tmp_path / "pyproject.toml").write_text(
        project.replace("[project.urls]", f'[project.urls]\nRepository = "{address}"')
    )
    (docs / "index.md").write_text("# Index\n\n```{toctree}\nfirst-model\n```\n")
    shutil.copy(ROOT / "docs" / "conf.py", docs)
    shutil.copytree(ROOT / "docs" / "_static", docs / "_static")
    shutil.copy(ROOT / "docs" / "tutorial" / "first-model.ipynb", docs)
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", docs, tmp_path / "html"]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    links = re.findall(r'href="(https://[^"]*)"', (tmp_path / "html/first-model.html").read_text())
    page = "main/docs/first-model.ipynb"
    colab = f"https://colab.research.google.com/github/owner/name/blob/{page}"
    assert {colab, address, f"{address}/blob/{page}?plain=1", f"{address}/edit/{page}"} <= {*links}


def test_pages_say_what_needs_a_checkout():
    """Commands of `benchmarks`, `tools`, `examples` and `studies` are not a part of the wheel."""
    outside = re.compile(r"python -m (benchmarks|tools)\b|\b(examples|studies)/")
    naming = [page for page in documents.PAGES if outside.search(page.read_text())]
    assert len(naming) > 20
    for page in naming:
        path = page.resolve().relative_to(ROOT)
        if path.parts[0] == "docs" and path.name != "README.md":
            assert "checkout" in page.read_text(), path


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make site` does."""
    pytest.importorskip("sphinx_book_theme")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, ROOT / "docs", folder / "html"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "html"


@pytest.fixture(scope="module")
def address(site):
    """The site, served: from files a browser would not let the search read pages."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Not in the output of tests."""


def opened(page, folder, size=(1300, 900)):
    """The document, after a check that the console has nothing but the theme's own notes."""
    document, console = open_page(page, folder, size)
    notes = ("[PST]", "Got invalid theme mode")
    assert [line for line in console if not any(note in line for note in notes)] == []
    return document


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1300, 900), (390, 800)], ids=["wide", "narrow"])
def test_a_browser_reads_the_site(address, tmp_path, size):
    """Every block of code can be copied, nothing fails in the console, dark can be chosen."""
    for page in ("reference/python", "tutorial/getting-started", "tutorial/first-model"):
        document = opened(f"{address}/{page}.html", tmp_path, size)
        blocks = len(re.findall(r'<div class="highlight"', document))
        assert blocks > 3
        assert len(re.findall(r'<button class="copybtn', document)) == blocks
        assert "theme-switch-button" in document


@pytest.mark.slow
def test_the_search_finds_split(address, tmp_path):
    document = opened(f"{address}/search.html?q=split", tmp_path)
    results = re.search(r'<ul[^>]*class="search".*?</ul>', document, re.DOTALL)
    assert "reference/python.html#gshard.split" in results[0]


@pytest.mark.slow
def test_the_inventory_has_the_public_names(site):
    """Other projects can link to them (objects.inv), and the search knows them."""
    index = (site / "searchindex.js").read_text()
    found = json.loads(re.search(r"Search.setIndex\((.*)\)", index, re.DOTALL)[1])
    titles = {name for entries in found["objects"].values() for *_, name in entries}
    known = {f"{prefix}.{e[-1]}" for prefix, entries in found["objects"].items() for e in entries}
    assert {f"gshard.{name}" for name in public_names()} <= known, titles
