"""`gshard compare`: the page's command prints what the page shows, and writes a page."""

import json
import re

from typer.testing import CliRunner

from gshard.cli import app
from tests.documents import ROOT, blocks

KINDS = ("python", "console", "text")


def comparable(text):
    """Without what is XLA's, and differs from one release to the next: memory and operators."""
    text = re.sub(r"\d[.\d]* [KM]?B( +[.\d]+ us +[.\d]+ us)$", r"\1", text, flags=re.MULTILINE)
    return re.sub(r"XLA: all_gather for \w+;", "XLA: all_gather;", text).rstrip()


def test_the_page_s_command_prints_what_the_page_shows(tmp_path, monkeypatch):
    page = list(blocks(ROOT / "docs" / "howto" / "compare.md"))
    step, command, shown = (next(b.code for b in page if b.kind == k) for k in KINDS)
    (tmp_path / "step.py").write_text(step)
    monkeypatch.chdir(tmp_path)
    words = command.split()[1:]
    got = CliRunner().invoke(app, words).stdout
    assert comparable(got) == comparable(shown)
    assert len(got.splitlines()) <= 24
    written = (tmp_path / "compare.html").read_text()
    assert "<code>step.py:9</code>" in written
    assert "1.84 MB" in written
    figures = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert [p["sent"] for p in figures["programs"]] == [8192 * 64 * 4 * 7 // 8, 1792]
