"""The command as a whole: its help, what the shell completes, and what it needs."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys

import pytest
import typer.core
from rich.console import Console
from rich.text import Text
from typer.main import get_command
from typer.testing import CliRunner

import gshard
from gshard.cli import app, main
from gshard.commands import options
from gshard.commands.show import Lines, working
from gshard.forecast import hardware

# An option of several commands has one default, but for these.
DIFFERENT = {
    "--out": "what each command writes",
    "--devices": "the paper's number for its models, 8 for any program, all that there are to run",
    "--hardware": "the paper's for its models, what JAX reports for any program",
    "--processes": "how many to start, or how many there are",
    "--checkpoint": "the best to translate with, the newest to train on with",
    "--sentences": "to learn a vocabulary from, or to translate",
    "--to": "a language to translate into, or the layout of a release",
    "--workers": "processes that serve, or that read ahead",
    "--on": "the hardware to fit on, or the system that serves",
    "--steps": "to run and measure, to train, or batches to read",
    "--budget": "seconds for changes of annotations, or for the search of a layout",
}

WITHOUT_MT = """
import sys
MISSING = {"grain", "orbax", "pyarrow", "sacrebleu", "sentencepiece", "starlette", "matplotlib",
           "filelock", "lxml", "polib", "tensorboardX", "uvicorn", "absl"}

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from gshard.cli import main
main(sys.argv[1:])
"""


def run_without_mt(folder, *words):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_MT, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()},
    )


def test_help_shows_both_halves_and_h_is_help():
    for flag in ("-h", "--help"):
        shown = CliRunner().invoke(app, [flag]).output
        first, second = shown.index("Any JAX program"), shown.index("Translation")
        assert first < shown.index("explain  ") < shown.index("forecast  ") < second
        assert second < shown.index("train  ") < shown.index("translate  ")
    assert "--devices" in CliRunner().invoke(app, ["forecast", "-h"]).output
    assert "--tier" in CliRunner().invoke(app, ["data", "gather", "-h"]).output


def test_version():
    assert CliRunner().invoke(app, ["--version"]).output == f"gshard {gshard.__version__}\n"


def leaves(command, name="gshard"):
    if hasattr(command, "commands"):
        for sub, each in command.commands.items():
            yield from leaves(each, f"{name} {sub}")
    else:
        yield name, command


def test_one_name_for_one_option():
    found = {}
    for name, command in leaves(get_command(app)):
        for param in command.params:
            if param.param_type_name == "option":
                assert param.help, (name, param.opts)
                kind = repr(param.default)
                for option in (o for o in param.opts if o.startswith("--")):
                    found.setdefault(option, {}).setdefault(kind, []).append(name)
    assert {o for o, kinds in found.items() if len(kinds) > 1} == set(DIFFERENT), found
    assert not {"--plot", "--png", "--seconds"} & set(found)
    assert [*found["--from"].values()] == [["gshard translate"]]  # a language
    assert len(found["--plots"]) == len(found["--json"]) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["forecast", "moe_2048e_3"], ["moe_2048e_36l"]),
        (["interval", "tin"], ["tiny"]),
        (["forecast", "tiny", "--hardware", "tpu-v5"], ["tpu-v5e", "tpu-v5p"]),
        (["explain", "--hardware", "h"], ["h100", "h200"]),
        (["train", "ti"], ["tiny"]),
        (["train", "runs/m"], ["runs/mine"]),
        (["evaluate", "runs/"], ["runs/mine"]),
        (["report", "ru"], ["runs/mine"]),
        (["data", "gather", "--tier", "co"], ["core"]),
    ],
)
def test_the_shell_completes(words, expected, tmp_path, monkeypatch):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(
        app,
        [],
        env={
            "_GSHARD_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(["gshard", *words]),
            "COMP_CWORD": str(len(words)),
            "_TYPER_COMPLETE_TESTING": "True",
        },
        prog_name="gshard",
    )
    assert shown.output.split() == expected


def test_completions_offer_files_too(tmp_path, monkeypatch):
    (tmp_path / "mine.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert options.complete_hardware("min") == ["mine.toml"]
    assert options.complete_what_to_train("mi") == ["mine.toml"]
    assert options.complete_tiers("min") == ["mine.toml"]


LAYER = """
import gshard
import jax.numpy as jnp

def layer(x, w):
    return jnp.tanh(gshard.split(x, 0, 8) @ gshard.split(w, 0, 8))
"""


WRAPPED = """
import equinox as eqx
import gshard
import jax
import jax.numpy as jnp
from flax import nnx

class Block(eqx.Module):
    up: eqx.nn.Linear

def loss(block, x):
    return jnp.mean(jax.vmap(block.up)(gshard.split(x, 0, 8)) ** 2)

of_equinox = eqx.filter_jit(eqx.filter_grad(loss))

def of_equinox_shapes():
    return Block(eqx.nn.Linear(16, 32, key=jax.random.key(0))), jax.ShapeDtypeStruct((64, 16), "f4")

@nnx.jit
def of_nnx(model, x):
    x = gshard.split(x, 0, 8)
    gradients = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
    nnx.update(model, jax.tree.map(lambda w, g: w - g, nnx.state(model), gradients))

def of_nnx_shapes():
    return nnx.Linear(16, 32, rngs=nnx.Rngs(0)), jax.ShapeDtypeStruct((64, 16), "f4")
"""
WRAPPED_IN_TORCH = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 32)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x)))

of_torch = Net()

def of_torch_shapes():
    return torch.ones(64, 16),
"""


@pytest.mark.parametrize("library", ["equinox", "flax", "torch"])
def test_explain_and_profile_take_a_step_as_its_library_compiles_it(library, tmp_path, monkeypatch):
    """Not the function inside: what NNX changes in place is a part of the step."""
    pytest.importorskip(library)
    text = WRAPPED_IN_TORCH if library == "torch" else WRAPPED
    (tmp_path / f"wrapped_{library}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    step = f"wrapped_{library}:of_{library.replace('flax', 'nnx')}"
    given = [step, "--arguments", f"{step}_shapes"]
    done = CliRunner().invoke(app, ["explain", *given, "--json"])
    sent = [c["bytes"] for c in json.loads(done.stdout)["collectives"]]
    weights = 17 * 32 * 4 + (32 * 32 * 4 if library == "torch" else 0)  # a bias of constants
    assert sum(sent) == 2 * weights * 7 // 8
    done = CliRunner().invoke(app, ["profile", *given, "--steps", "2"])
    assert f"wrapped_{library}.py:" in done.stdout
    assert "steps: " in done.stdout


def test_explain_says_for_which_hardware_and_leaves_out_the_step_around_it(tmp_path, monkeypatch):
    (tmp_path / "explained_layer.py").write_text(LAYER)
    monkeypatch.chdir(tmp_path)
    words = ["explain", "explained_layer:layer", "f32[64,32]", "f32[32,16]"]
    shown = CliRunner().invoke(app, words).stdout.splitlines()
    assert shown[0] == "hardware: cpu, as JAX reports; --hardware plans and times for another"
    assert shown[1].startswith(
        "layer on 8 x cpu (as JAX reports here, explain('h100') for a GPU): 1 collective, "
    )
    assert "what would remove it" in shown
    page = tmp_path / "page.html"
    shown = CliRunner().invoke(app, [*words, "--hardware", "tpu-v3", "--page", str(page)]).stdout
    assert "on 8 x tpu-v3" in shown.splitlines()[0]
    assert hardware("tpu-v3").efficiency.step_seconds > 0.01  # the constant that is left out
    assert "outside the program" not in page.read_text()
    said = json.loads(CliRunner().invoke(app, [*words, "--hardware", "h100", "--json"]).stdout)
    assert said["hardware"] == said["planned_for"] == "h100"
    assert [c["source"] for c in said["collectives"]] == ["explained_layer.py:6"]
    assert said["collectives"][0]["why"]["kind"] == "operand"
    CliRunner().invoke(app, [*words, "--dump", str(tmp_path / "stages")])
    assert "reshard[" in next((tmp_path / "stages").glob("*-plan.txt")).read_text()


@pytest.mark.slow
def test_what_steers_a_terminal_is_spelt_out(tmp_path, monkeypatch, capsys):
    """In the name of a function, of its file, and in its error."""
    renamed = LAYER.replace("def layer", "def clears")
    steers = "\nclears.__name__ = clears.__qualname__ = 'f\\x1b[2Jg'\n"
    file = f"\nexec(compile({LAYER!r}, 'f\\x1b[2Jg.py', 'exec'))\n"
    raises = "\ndef raises(*_):\n    raise ValueError('f\\x1b[2Jg')\n"
    (tmp_path / "steering.py").write_text(renamed + steers + file + raises)
    monkeypatch.chdir(tmp_path)
    for name in ("clears", "layer", "raises"):
        for command in (["explain", "--budget", "0"], ["auto", "--budget", "1"]):
            with contextlib.suppress(SystemExit):
                main([*command, f"steering:{name}", "f32[64,32]", "f32[32,16]"])
            shown = capsys.readouterr()
            assert "\x1b" not in shown.out + shown.err
            if command[0] == "explain" or name == "raises":
                assert "f\\x1b[2Jg" in shown.out + shown.err


@pytest.mark.slow
def test_the_core_of_the_command_needs_no_package_of_mt(tmp_path):
    (tmp_path / "layer.py").write_text(LAYER)
    done = run_without_mt(tmp_path, "explain", "layer:layer", "f32[64,32]", "f32[32,16]")
    assert done.returncode == 0, done.stderr
    assert "layer.py:6" in done.stdout
    done = run_without_mt(tmp_path, "--help")
    assert "Translation" in done.stdout
    done = run_without_mt(tmp_path, "data", "stats", "corpus")
    assert done.returncode == 1
    assert done.stderr == "gshard: this needs the package 'pyarrow': pip install 'gshard[mt]'\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["forecast", "tinny"], "the model is 'tinny'; known are"),
        (["forecast", "tiny", "--hardware", "h-100"], "did you mean 'h100'?"),
        (["interval", "tiny", "--hardware", "h-100"], "did you mean 'h100'?"),
    ],
)
def test_misspelt_names_are_one_line(words, said, capsys):
    with pytest.raises(SystemExit):
        main(words)
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.splitlines()) == 1


def test_what_takes_long_says_what_it_does_at_once(capsys):
    """A line on standard error where there is no terminal, before the work begins."""
    with working() as tell:
        tell("partitioning f for [4] devices")
        assert capsys.readouterr() == ("", "partitioning f for [4] devices\n")


def test_a_terminal_shows_what_is_done_and_forgets_it(monkeypatch):
    terminal = io.StringIO()
    made = Console(file=terminal, force_terminal=True, width=80)
    monkeypatch.setattr("gshard.commands.show.screen", lambda **_: made)
    with working() as tell:
        tell("partitioning f for [4] devices")
    shown = terminal.getvalue()
    assert "partitioning f for [4] devices" in shown
    assert shown.endswith("\x1b[2K")  # the line is cleared


def test_help_shows_every_word_of_an_options_description():
    """Rich takes words in square brackets for markup and leaves them out."""
    for name, command in leaves(get_command(app)):
        for param in command.params:
            text = param.help or ""
            assert Text.from_markup(text).plain == text, (name, param.name)
    shown = CliRunner().invoke(app, ["forecast", "-h"], env={"COLUMNS": "200"}).output
    assert "the paper's" in shown


@pytest.mark.skipif(
    not hasattr(typer.core.TyperOption, "display_type"), reason="Typer before 0.29 has its own"
)
def test_types_in_help_are_nouns_and_flags_have_none():
    shown = CliRunner().invoke(app, ["explain", "-h"], env={"COLUMNS": "200"}).output
    assert not re.search(r"<\w+|\bbool\b|list\[", shown)
    rows = {line.split()[1]: line.split()[2] for line in shown.splitlines() if " --" in line}
    assert (rows["--page"], rows["--budget"], rows["--arguments"]) == ("PATH", "NUMBER", "TEXT")
    assert rows["--json"] == "print"  # the first word of its description


def test_stages_without_a_terminal_say_how_long_they_took(capsys):
    advance = Lines().stage("compile", 1)
    advance("8 devices")
    assert capsys.readouterr().out == "compile ...\ncompile: 1 of 1, 0 s 8 devices\n"
