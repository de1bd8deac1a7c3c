"""The README and the docs hold what they show: code runs, output is as printed, links lead."""

import doctest
import importlib.util
import re
import shlex

import pytest
from typer.main import get_command

import gshard
from gshard.cli import app
from tests import documents
from tests.documents import PAGES, ROOT, Block
from tools import api

COLUMNS = 100
TREE = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if ".venv" not in str(path)}


def running(page, slow=False):
    return [b for b in documents.blocks(page) if b.runs and (slow or not b.slow)]


def commands():
    """Each command of a console block, as words, with the page and line it stands on."""
    for page in PAGES:
        for block in documents.blocks(page):
            if block.kind == "console":
                for row in block.code.replace("\\\n", " ").splitlines():
                    words = shlex.split(row.removeprefix("$ "), comments=True)
                    if words:
                        yield pytest.param(words, id=f"{documents.name(page)}:{' '.join(words)}")


def check(page, found, folder):
    """Run the blocks and compare what they print with what the page shows.

    A library of the extra third-party that is not installed is a reason to skip its page.
    """
    if page.parent.name == "libraries":
        for library in re.findall(r"(?m)^(?:from|import) (\w+)", "".join(b.code for b in found)):
            pytest.importorskip(library)
    printed = documents.printed(found, folder)
    for block, got in zip(found, printed, strict=True):
        alike = doctest.OutputChecker().check_output(block.shown or "", got, doctest.ELLIPSIS)
        assert alike, f"line {block.line} of {documents.name(page)} prints\n{got}"


def _pages_that_run():
    """Pages with blocks that run; five of six are left to the slow tests."""
    for i, page in enumerate(p for p in PAGES if running(p)):
        marks = [pytest.mark.slow] if i % 6 else []
        yield pytest.param(page, id=documents.name(page), marks=marks)


@pytest.mark.parametrize("page", list(_pages_that_run()))
def test_python_blocks_run_and_print_what_the_page_shows(page, tmp_path):
    check(page, running(page), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.slow for b in documents.blocks(p))], ids=documents.name
)
def test_slow_python_blocks_do_too(page, tmp_path):
    check(page, running(page, slow=True), tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=documents.name)
def test_python_blocks_that_are_not_run_are_python_at_least(page):
    for block in documents.blocks(page):
        if block.kind == "python":
            compile(block.code, documents.name(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=documents.name)
def test_every_block_says_what_it_is(page):
    kinds = {block.kind for block in documents.blocks(page)}
    assert {k for k in kinds if not k.startswith("{")} <= {"python", "text", "console"}


@pytest.mark.parametrize("words", list(commands()))
def test_commands_exist_with_their_options(words):
    program, *rest = words
    if program == "gshard" and rest != ["--version"]:
        check_options(rest)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in rest)
    elif program == "python" and rest[0] == "-m":
        assert importlib.util.find_spec(rest[1]), rest[1]
    elif program in ("python", "pytest"):
        assert (ROOT / rest[0]).exists()
    else:
        assert program in ("pip", "git", "cd", "source") or words == ["gshard", "--version"]


def check_options(words):
    """The subcommand exists and knows every option among its words."""
    command = get_command(app)
    while hasattr(command, "commands"):
        word = words.pop(0)
        assert word in command.commands, f"there is no subcommand {word}"
        command = command.commands[word]
        if word == "launch":  # has a command of its own behind it
            command = get_command(app)
            words = words[min(words.index(each) for each in command.commands if each in words) :]
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("page", PAGES, ids=documents.name)
def test_lines_are_short(page):
    """A row of a table has to stand on one line."""
    lines = enumerate(page.read_text().splitlines(), 1)
    long = [(n, line) for n, line in lines if len(line) > COLUMNS and not line.startswith("|")]
    assert not long


@pytest.mark.parametrize("page", PAGES, ids=documents.name)
def test_links_lead_somewhere(page):
    links = documents.LINK.findall(page.read_text())
    missing = [
        link for link in links if "://" not in link and not (page.parent / link).resolve().exists()
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=documents.name)
def test_files_that_are_named_exist(page):
    """`moving/plan.py` in backticks is the end of some file's path."""
    prose = documents.FENCE.sub("", page.read_text())
    named = re.findall(r"`([\w/]+\.py)`", prose)
    own = set(re.findall(r"^```python\n# (\w+\.py)$", page.read_text(), re.MULTILINE))
    tree = TREE | own
    missing = [n for n in named if not any(f"/{path}".endswith(f"/{n}") for path in tree)]
    assert not missing


def test_every_page_is_in_the_index():
    index = ROOT / "docs" / "README.md"
    of_site = index.with_name("index.md")  # the first page of the site, where README.md is not
    linked = {(index.parent / link).resolve() for link in documents.LINK.findall(index.read_text())}
    assert {p for p in PAGES if "docs" in p.parts and p not in (index, of_site)} <= linked


def test_the_output_check_can_fail(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\n# a.py\nprint(1 + 1)\n```\n\n```text\n3\n```\n")
    (block, _) = documents.blocks(page)
    assert block == Block("python", "# a.py\nprint(1 + 1)\n", 2, "3\n")
    assert documents.printed([block], tmp_path) == ["2\n"]


def test_the_reference_is_made_from_the_code():
    page = (ROOT / api.PAGE).read_text()
    assert api.report() == page, "run python -m tools.api --update"


def test_the_reference_has_every_public_name():
    page = (ROOT / api.PAGE).read_text()
    told = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", page))))
    for module in (gshard, *map(importlib.import_module, api.MODULES)):
        assert {name for name in module.__all__ if name != "__version__"} <= told


def test_the_reference_has_every_command():
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    for name, command in get_command(app).commands.items():
        assert f"gshard {name}" in page
        assert all(f"{name} {sub}" in page or f"`{sub}`" in page for sub in subcommands(command))


def subcommands(command):
    return getattr(command, "commands", {})


def test_the_readme_is_two_screens_with_both_pictures_and_exact_claims():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 110
    for picture in ("docs/_static/explain.png", "docs/results/figure/longer_chrf_by_language.svg"):
        assert f"]({picture})" in readme
    results = re.search(r"^## Results\n(.*?)^## ", readme, re.MULTILINE | re.DOTALL)[1]
    rows = [line for line in results.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) >= 3
    assert all(re.search(r"\| `[^|]+` \|$", row) for row in rows), "a result has its command"
    for claim in ("no silent replication", "every operator of JAX"):
        assert claim not in readme.lower()


def test_questions_and_terms_are_many_and_answered():
    faq = (ROOT / "docs" / "explanation" / "faq.md").read_text()
    questions = re.findall(r"^\*\*([^*]+\?)\*\*(?: |\n)(.+)", faq, re.MULTILINE)
    assert len(questions) >= 25
    assert len({question for question, _ in questions}) == len(questions)
    glossary = (ROOT / "docs" / "explanation" / "glossary.md").read_text()
    terms = [line.split("|")[1].strip().lower() for line in glossary.splitlines()[6:] if line]
    assert len(terms) >= 30
