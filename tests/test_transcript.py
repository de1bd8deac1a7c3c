"""docs/tutorial/from-pip-install.md, executed from the wheel in an empty folder and environment.

The Python blocks alone are also run by tests/test_docs.py, quickly, from the checkout.
"""

import doctest
import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

from tests.documents import FENCE, ROOT
from tests.test_packaging import wheel  # noqa: F401  (a fixture)

PAGE = ROOT / "docs" / "tutorial" / "from-pip-install.md"
MARK = "--- end of block ---"


def transcript(text):
    """The page as a shell script that saves and runs its files, and the outputs that it shows."""
    script, shown = ["set -e"], []
    for kind, code in FENCE.findall(text):
        if kind == "text":
            shown[-1] = code
            continue
        if kind == "python":
            name = re.match(r"# (\w+\.py)\n", code)[1]
            code = f"printf %s {shlex.quote(code)} > {name}\npython {name}\n"
        script += [code, f"echo {shlex.quote(MARK)}"]
        shown.append("")
    return "\n".join(script), shown


def test_the_page_is_about_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    named = set(re.findall(r"gshard[- ](\d+\.\d+\.\d+)", PAGE.read_text()))
    assert named == {version}


def test_a_transcript_saves_files_and_expects_their_output():
    page = (
        "```console\necho hello\n```\n\n```text\nhello\n```\n\n```python\n# a.py\nprint(1)\n```\n"
    )
    script, shown = transcript(page)
    assert shown == ["hello\n", ""]
    assert "> a.py\npython a.py\n" in script


@pytest.mark.slow
def test_every_line_of_the_page_does_what_it_shows(wheel, tmp_path):  # noqa: F811
    with open(wheel.filename, "rb") as built:
        (tmp_path / os.path.basename(wheel.filename)).write_bytes(built.read())
    script, shown = transcript(PAGE.read_text())
    bin_folder = os.path.dirname(sys.executable)
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**kept, "PATH": f"{bin_folder}:{kept['PATH']}", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    printed = done.stdout.split(f"{MARK}\n")[:-1]
    for got, wanted in zip(printed, shown, strict=True):
        assert doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS), got
    for page in ("step.html", "layer.html"):
        assert "</html>" in (tmp_path / page).read_text()
    assert "site-packages/gshard" in next((tmp_path / "env").rglob("gshard/__init__.py")).as_posix()
