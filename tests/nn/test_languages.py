"""The example's claims: experts hold what a dense model cannot, and need the auxiliary loss."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "moe_languages.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("moe_languages", EXAMPLE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_experts_hold_what_a_dense_model_cannot(example):
    task = example.Task()
    models = example.models(task, dtype="float32")
    got = {name: example.train(config, task, 4000) for name, config in models.items()}
    assert got["moe"]["loss"] < 0.8 * got["dense"]["loss"]
    assert got["moe"]["loss"] < 0.8 * got["moe, no aux"]["loss"]
    assert got["moe"]["dead"] == 0
    assert got["moe"]["busiest"] < 2
    assert got["moe, no aux"]["dead"] >= 8
    assert got["moe, no aux"]["busiest"] > 2 * got["moe"]["busiest"]
    assert got["moe, no aux"]["overflow"] > 3 * got["moe"]["overflow"]


@pytest.mark.slow
def test_bfloat16_trains_like_float32(example):
    """1,000 steps each; two seeds in float32 say what noise is."""
    task = example.Task(languages=16, words=64)
    loss = {}
    for dtype, seed in (("float32", 0), ("float32", 1), ("bfloat16", 0)):
        config = example.models(task, experts=8, dtype=dtype)["moe"]
        result = example.train(config, task, 1000, seed=seed)
        assert result["not finite"] == 0
        loss[dtype, seed] = result["loss"]
    noise = abs(loss["float32", 0] - loss["float32", 1])
    assert loss["float32", 0] < 2.0  # of 4.16 at the start: it does learn
    assert abs(loss["bfloat16", 0] - loss["float32", 0]) < max(2 * noise, 0.1)
