"""`gshard auto`: a layout from the command line, by shapes or by a function that returns them."""

import json
import re

import pytest
from typer.testing import CliRunner

import gshard
from gshard.cli import app, main

PROGRAM = """
import jax
import jax.numpy as jnp

def layer(x, w):
    return jnp.tanh(x @ w)

def step(weights, x):
    loss = lambda w: jnp.mean((x @ w["a"] @ w["b"]) ** 2)
    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

def too_wide(x):
    return x @ jnp.ones((3, 3))

def no_shapes():
    raise RuntimeError("no shapes today")

number = 3

def arguments():
    weight = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    return {"a": weight, "b": weight}, jax.ShapeDtypeStruct((65536, 256), jnp.float32)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "program_of_a_user.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_layout_by_shapes(folder):
    words = ["auto", "program_of_a_user:layer", "f32[65536,256]", "f32[256,256]"]
    done = CliRunner().invoke(app, [*words, "--hardware", "h100", "--explain"])
    shown = done.stdout
    begun = re.findall(
        r"^(.*) \(phase (\d) of (\d), .* s of work done\)$", done.stderr, re.MULTILINE
    )
    assert [name for name, *_ in begun][:2] == ["first layouts", "solving"]
    assert begun[-1][0] == "removal"
    assert begun[-1][1] == begun[-1][2]
    assert shown.startswith("mesh a=8 on 8 x h100\nforecast: ")
    assert 'x: P("a", None) of 65536x256, saves ' in shown
    assert "considered:" in shown


def test_a_layout_of_trees_is_kept(folder):
    words = ["auto", "program_of_a_user:step", "--arguments", "program_of_a_user:arguments"]
    words += ["--hardware", "h100", "--out", "layout.json", "--json"]
    shown = CliRunner().invoke(app, words).stdout
    assert (folder / "layout.json").read_text() == shown
    assert json.loads(shown)["mesh"] == {"a": 8}
    layout = gshard.Layout.load("layout.json")
    assert any(a.path == "[1]" for a in layout.annotations)


NNX = """
import jax, jax.numpy as jnp, optax
from flax import nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(256, 4096, rngs=rngs)
        self.down = nnx.Linear(4096, 256, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))

@nnx.jit
def step(model, optimizer, x):
    optimizer.update(model, nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model))

def arguments():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    return model, optimizer, jax.ShapeDtypeStruct((64, 256), jnp.float32)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*nnx.*:DeprecationWarning")
def test_names_are_those_of_the_users_library(folder):
    """Of a step as NNX compiles it, which passes on a list of arrays."""
    (folder / "a_step_of_nnx.py").write_text(NNX)
    words = ["auto", "a_step_of_nnx:step", "--arguments", "a_step_of_nnx:arguments"]
    shown = CliRunner().invoke(app, [*words, "--hardware", "h100", "--budget", "1"]).stdout
    assert re.search(r"^  model\.(up|down)\.kernel: P\(", shown, re.MULTILINE), shown


@pytest.mark.slow
def test_the_frontier_as_a_plot(folder):
    pytest.importorskip("vl_convert")
    words = ["auto", "program_of_a_user:step", "--arguments", "program_of_a_user:arguments"]
    words += ["--hardware", "h100", "--memory", "1 GB", "--plots", "drawn"]
    assert CliRunner().invoke(app, words).exit_code == 0
    drawn = (folder / "drawn" / "frontier.svg").read_text()
    assert drawn.startswith("<svg")
    for text in ("Step time and memory", "limit 1 GB", "ms per step", "frontier", "chosen"):
        assert text in drawn


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x:y"], "give the shapes of the arguments, or --arguments module:function"),
        (["layer", "f32[8]"], "'layer' is not the name of a function; write module:function"),
        (["program_of_a_user:layer", "f32"], "'f32' is not a shape; write a dtype and sizes"),
        (["program_of_a_user:number", "f32[8]"], "'program_of_a_user:number' is 3, and not a"),
        (["program_of_a_user:too_wide", "f32[8,8]"], "program_of_a_user.py:13: dot_general requ"),
        (
            ["program_of_a_user:layer", "--arguments", "program_of_a_user:no_shapes"],
            "program_of_a_user.py:16: no shapes today",
        ),
        (
            ["program_of_a_user:layer", "f32[8,8]", "--out", "nowhere/layout.json"],
            "--out is nowhere/layout.json; there is no folder nowhere",
        ),
        (
            ["program_of_a_user:layer", "f32[8,8]", "f32[8,8]", "--hardware", "h1000"],
            "hardware is 'h1000'",
        ),
        (
            ["program_of_a_user:layer", "f32[8,8]", "f32[8,8]", "--memory", "2 apples"],
            "memory is '2 apples'; allowed are bytes, or text such as '16 GB'",
        ),
        (
            ["program_of_a_user:layer", "f32[512,8]", "f32[8,8]", "--memory", "1 B"],
            "no layout was found that holds at most 1 B on each of 8 devices; the smallest",
        ),
    ],
)
def test_errors_are_one_line(folder, capsys, words, message):
    with pytest.raises(SystemExit) as ended:
        main(["auto", *words])
    assert ended.value.code == 1
    *before, error = capsys.readouterr().err.splitlines()
    assert message in error
    progress = r"choosing annotations for 8 devices.*|.* \(phase \d of \d, .*\)"
    assert all(re.fullmatch(progress, line) for line in before)
