"""The lines of a layout's forecast beside those of its bound."""

import jax
import jax.numpy as jnp
import pytest

import gshard
from benchmarks.auto_differences import differences, table
from gshard.autosharding.budget import Clock
from gshard.autosharding.evaluate import Evaluator
from gshard.autosharding.layout.annotations import Annotated
from gshard.autosharding.traced import TracedProgram
from gshard.forecast.hardware import hardware

MACHINE = hardware("h100")


def step(weights, x):
    def loss(weights):
        y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights)
        return jnp.sum(y**2)

    return gshard.split(jax.grad(loss)(weights), 1, 8)


@pytest.fixture(scope="module")
def layout():
    """Rows are split, and gradients where they are summed."""
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 1024, 1024), (16_384, 1024))]
    subject = TracedProgram.of(step, tuple(args), 8)
    evaluator = Evaluator(subject, MACHINE, MACHINE.memory, {}, Clock(60.0))
    return evaluator.evaluate((8,), (Annotated("[1]", (16_384, 1024), (("a",), ())),))


def test_lines_add_up_to_the_forecast(layout):
    lines = differences(layout, MACHINE)
    assert sum(n.work + n.sent for n in lines.values()) == pytest.approx(layout.seconds)
    named = {name.rsplit("/", 1)[-1] for name in lines}
    assert sum("test_auto_differences.py:" in name for name in named) >= 2


def test_forecast_and_bound_count_the_same(layout):
    """Line by line, but for 1% of the step."""
    lines = differences(layout, MACHINE)
    assert all(abs(n.difference) < 0.01 * layout.seconds for n in lines.values())
    assert sum(n.sent for n in lines.values()) > 0.1 * layout.seconds
    assert table(lines).splitlines()[2].endswith("all lines")
