"""`gshard fits`: what it prints, and its exit status for scripts."""

import json

from typer.testing import CliRunner

from gshard.cli import app
from tests.documents import ROOT, blocks

PROGRAM = """
import jax.numpy as jnp

def layer(w, x):
    return jnp.tanh(x @ w)
"""


def test_the_exit_status_and_a_wrong_machine(tmp_path, monkeypatch):
    (tmp_path / "layer_of_a_user.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    words = ["fits", "layer_of_a_user:layer", "f32[256,256]"]
    small = CliRunner().invoke(app, [*words, "f32[64,256]", "--on", "8xh100", "--json"])
    assert small.exit_code == 0
    figures = json.loads(small.stdout)
    assert figures["fits"]
    assert figures["batch"] == 64
    assert figures["largest"] > 10**6
    huge = ["f32[100000000,256]", "--on", "8 x h100", "--budget", "0"]
    large = CliRunner().invoke(app, [*words, *huge])
    assert large.exit_code == 3
    assert "layer does not fit on 8 x h100: " in large.stdout
    assert "gshard.split(batch, 0, 8) " in large.stdout
    wrong = CliRunner().invoke(app, [*words, "f32[64,256]", "--on", "h100"])
    assert "the devices are 'h100'; write a number and a name" in str(wrong.exception)


def test_the_page_s_command_prints_what_the_page_shows(tmp_path, monkeypatch):
    page = list(blocks(ROOT / "docs" / "howto" / "fits.md"))
    step, command, shown = (
        next(b.code for b in page if b.kind == kind) for kind in ("python", "console", "text")
    )
    (tmp_path / "train.py").write_text(step)
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, command.split()[1:]).stdout == shown
