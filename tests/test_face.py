"""What users see of gshard besides results: types, representations, tracebacks."""

import html
import re
import subprocess
import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard.autosharding.layout import Layout
from gshard.autosharding.layout.annotations import Annotated
from gshard.forecast import hardware
from gshard.forecast.report import by_function
from gshard.nn import segment_mask

PACKAGE = Path(gshard.__file__).parent

REVEALED = """
import jax
import gshard

def layer(x: jax.Array, scale: float = 1.0) -> tuple[jax.Array, int]:
    reveal_type(gshard.split(x, 0, 8))
    return x * scale, 1

reveal_type(gshard.jit(layer))
reveal_type(gshard.jit(devices=8)(layer))
"""


@pytest.mark.slow
def test_types_that_mypy_reveals(tmp_path):
    """A minute without mypy's cache; `tests/typed_face.py` has the same for `make lint`."""
    pytest.importorskip("mypy")
    file = tmp_path / "revealed.py"
    file.write_text(REVEALED)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", PACKAGE.parent / "pyproject.toml", file],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
    )
    found = re.findall(r'Revealed type is "(.*)"', done.stdout)
    found = [t.replace("jax._src.basearray.", "jax.").replace("builtins.", "") for t in found]
    jitted = "gshard.jit.Jitted[[x: jax.Array, scale: float =], tuple[jax.Array, int]]"
    assert found == ["jax.Array", jitted, jitted], done.stdout


def product(x, w):
    return gshard.split(x, 0, 8) @ w


SHAPES = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 8), (8, 4))]


def test_a_jitted_function_and_its_stages_say_what_they_are():
    jitted = gshard.jit(product, devices=8)
    assert repr(jitted) == "<gshard.jit of product>"
    lowered = gshard.jit(lambda x: jnp.sum(gshard.split(x, 0, 8)), devices=8).lower(SHAPES[0])
    assert re.fullmatch(
        r"<gshard.Lowered of <lambda> for 8 devices: \d+ equations, 1 collective, 7 B sent by each "
        r"device>",
        repr(lowered),
    )
    one = gshard.jit(jnp.matmul, devices=jax.devices()[:1]).lower(*SHAPES)
    assert "for 1 device: " in repr(one)
    assert repr(one.compile()) == "<gshard.Compiled of matmul for 1 device>"
    xla = gshard.jit(product, devices=jax.devices()[:8], partitioner="xla").lower(*SHAPES)
    assert repr(xla) == "<gshard.Lowered of product for 8 devices, to be partitioned by XLA>"


def test_a_forecast_says_what_it_is_in_a_line():
    made = gshard.jit(product, devices=8).lower(*SHAPES).forecast("h100")
    assert re.fullmatch(
        r"<gshard.forecast.Forecast on 8 x h100: step [\d.]+ ns, [\d.]+ B of 85.5 GB, "
        r"0 B sent by each device>",
        repr(made),
    )
    assert str(made).startswith("8 x h100, ")
    assert "h100" in repr(hardware("h100"))


def broken(x):
    return gshard.split(x, 0, 2) @ jnp.ones((3, 3))


@pytest.mark.parametrize(
    "call",
    [
        lambda: gshard.jit(broken)(jnp.ones((4, 4))),
        lambda: gshard.jit(broken, devices=2).lower(jnp.ones((4, 4))),
        lambda: jax.jit(gshard.jit(broken))(jnp.ones((4, 4))),
        lambda: gshard.jit(lambda x: gshard.split(x, 3, 2), devices=2).lower(jnp.ones((4, 4))),
        lambda: gshard.jit(product, devices=2).lower(*SHAPES),  # 8 partitions: when partitioned
        lambda: gshard.jit(lambda x: x)(object(), object()),
        lambda: gshard.jit(product, partitioner="none"),
        lambda: gshard.jit(lambda x: x).lower(jnp.ones(4)).compile()(jnp.ones(5)),
    ],
)
def test_tracebacks_hide_frames_of_gshard(call):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert not [f for f in frames if Path(f.filename).is_relative_to(PACKAGE)]
    assert frames[-1].filename == __file__ or "site-packages" in frames[-1].filename
    assert any("JAX_TRACEBACK_FILTERING=off" in note for note in caught.value.__notes__)


def test_tracebacks_are_whole_where_jax_is_asked_for_them(monkeypatch):
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(TypeError) as caught:
            gshard.jit(broken)(jnp.ones((4, 4)))
    finally:
        jax.config.update("jax_traceback_filtering", before)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [f for f in frames if Path(f.filename).is_relative_to(PACKAGE)]


def test_frames_of_models_that_gshard_brings_are_shown():
    """`gshard.nn` is a model like any other."""
    with pytest.raises(TypeError) as caught:
        gshard.jit(segment_mask)(jnp.ones((4, 4)), jnp.ones((3, 4)))
    frames = traceback.extract_tb(caught.value.__traceback__)
    own = [Path(f.filename).relative_to(PACKAGE) for f in frames if str(PACKAGE) in f.filename]
    assert own
    assert {path.parts[0] for path in own} == {"nn"}


def test_lines_are_named_from_the_working_folder(tmp_path, monkeypatch):
    """In collectives, explanations, forecasts and errors alike; elsewhere by their whole path."""
    (tmp_path / "sub").mkdir()
    file = tmp_path / "sub" / "layer.py"
    file.write_text("import gshard\n\ndef f(x):\n    return gshard.split(x, 1, 8) @ x.T\n")
    namespace = {}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    for folder, shown in ((tmp_path, "sub/layer.py:4"), (PACKAGE, f"{file}:4")):
        monkeypatch.chdir(folder)
        lowered = gshard.jit(namespace["f"], devices=8).lower(SHAPES[0])
        assert {c.source for c in lowered.collectives} == {shown}
        assert f"# {shown}: dot_general" in lowered.as_text()
        assert f"  {shown}: all_reduce" in str(lowered.explain("h100"))
        assert f" {shown}\n" in str(lowered.forecast("h100"))
        assert f'"{shown}"' in lowered.page("h100")
        with pytest.raises(ValueError, match=f"^{re.escape(shown)}: split"):
            gshard.jit(namespace["f"], devices=2).lower(SHAPES[0])


def rows_of(shown):
    """The cells of the table in a piece of HTML, row by row."""
    text = shown[shown.index("<tbody>") :]
    rows = re.findall(r"<tr>(.*?)</tr>", text)
    return [[html.unescape(c) for c in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in rows]


def test_notebooks_show_tables():
    lowered = gshard.jit(lambda x: jnp.sum(gshard.split(x, 0, 8)), devices=8).lower(SHAPES[0])
    collectives = lowered.collectives
    shown = rows_of(collectives._repr_html_())
    assert len(shown) == 1
    assert [(r[0], r[1], r[4]) for r in shown] == [
        (c.kind, f"{c.bytes:,}", c.source) for c in collectives
    ]
    assert repr(collectives) == "\n".join(map(str, collectives))
    forecast = lowered.forecast("h100")
    assert [r[0] for r in rows_of(forecast._repr_html_())] == list(forecast.by(by_function))
    uneven = gshard.jit(lambda x: gshard.split(x, 0, 8))(jnp.ones((9, 4)))
    ((shape, local, dtype, sharding, _),) = rows_of(uneven._repr_html_())
    assert (shape, local, dtype) == ("9 x 4", "2 x 4", "float32")
    assert sharding == str(uneven.tiling)


def test_a_layout_is_one_line_in_a_terminal_and_a_table_in_a_notebook():
    annotated = Annotated("[0]['<w>']", (8, 16), (("a",), ()))
    layout = Layout({"a": 8}, (annotated,), "h100", 1e-3, 10**6, 1e-3)
    assert repr(layout) == (
        "<gshard.Layout: mesh a=8 on 8 x h100, forecast: 1 ms per step, 1 MB per device>"
    )
    assert rows_of(layout._repr_html_()) == [["[0]['<w>']", "8x16", "a", "-"]]
    assert "<w>" not in layout._repr_html_()
