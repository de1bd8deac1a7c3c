"""`examples/training`: the losses of `jax.jit`, what moves, and the page that says so."""

import importlib

import pytest

from examples.training.__main__ import NAMES, difference, lowered, moved
from tests.documents import ROOT
from tests.oracle import kinds

PAGE = (ROOT / "docs" / "howto" / "training-scripts.md").read_text()

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def scripts(name):
    pytest.importorskip({"nnx": "flax", "equinox": "equinox", "haiku": "haiku"}[name.split("_")[1]])
    return (importlib.import_module(f"examples.training.{name}{end}") for end in ("_jax", ""))


@pytest.mark.slow
def test_mingpt_with_one_layer(monkeypatch):
    """Mutated modules, RNG streams and AdamW on a 2 x 4 mesh; only sums of partial results move."""
    jaxs, ours = scripts("mingpt_nnx")
    for script in (jaxs, ours):
        monkeypatch.setattr(script, "LAYERS", 1)
    got, wanted = ours.train(3), jaxs.train(3)
    assert got == pytest.approx(wanted, rel=1e-4)
    assert wanted[2] < wanted[0]
    assert set(kinds(lowered(ours))) == {"all_reduce"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_losses_and_bytes(name):
    jaxs, ours = scripts(name)
    assert ours.train(6) == pytest.approx(jaxs.train(6), rel=2e-3)
    for row in moved(name).splitlines():
        kind, figures = row.split(": ")
        assert figures.split(", ")[1].removesuffix(" bytes") in PAGE, row
        assert kind in PAGE


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_what_changes(name):
    lines = difference(name).splitlines()
    shown = [
        line for line in lines if not line.startswith(('-"""', '+"""', "+the ", "+each", "+b"))
    ]
    assert "\n".join(shown) in PAGE
