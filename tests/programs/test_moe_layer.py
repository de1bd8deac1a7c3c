"""The paper's MoE layer: the collectives of section 3, and one program for any device count."""

import time

import jax
import numpy as np
import pytest

import gshard
from examples.moe_layer import D, moe_layer, moe_loss, shapes
from tests.oracle import assert_same, kinds, random_array, run, sent

GRADIENT = jax.value_and_grad(moe_loss, argnums=(0, 1, 2, 3))
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def arguments(**sizes):
    return [random_array(s.shape, seed=i) / 8 for i, s in enumerate(shapes(**sizes))]


def above_1kb(lowered):
    return sorted(c.kind for c in lowered.collectives if c.bytes > 1024)


def test_forward_is_two_all_to_all():
    lowered = gshard.jit(moe_layer).lower(*shapes())
    assert above_1kb(lowered) == ["all_to_all"] * 2
    x_GSM = shapes()[0]
    dispatched = 2 * x_GSM.size * x_GSM.dtype.itemsize // D  # each token twice: [E, G, C, M] / D
    assert sent(lowered, "all_to_all") == 2 * dispatched * (D - 1) // D


def test_gradient_is_four_all_to_all_and_the_gates_all_reduce():
    lowered = gshard.jit(GRADIENT).lower(*shapes())
    assert above_1kb(lowered) == ["all_reduce"] + ["all_to_all"] * 4
    (reduce,) = [c for c in lowered.collectives if c.kind == "all_reduce"]
    gate, loss = sorted((c.bytes for c in reduce.members), reverse=True)  # they travel together
    wg_ME = shapes()[1]
    assert gate == 2 * wg_ME.size * wg_ME.dtype.itemsize * (D - 1) // D
    assert loss == 2 * 4 * (D - 1) // D


@pytest.mark.slow
def test_far_below_xla():
    """The issue's bar: forward 5 times below XLA's bytes, gradient 3 times."""
    for fn, factor in [(moe_layer, 5), (GRADIENT, 3)]:
        ours = sent(gshard.jit(fn).lower(*shapes()))
        theirs = sent(gshard.jit(fn, partitioner="xla").lower(*shapes()))
        assert ours * factor < theirs


@pytest.mark.parametrize(
    "sizes",
    [pytest.param({}, marks=pytest.mark.slow), {"G": 16, "S": 32, "M": 16, "H": 24, "E": 16}],
)
def test_values(sizes):
    args = arguments(**sizes)
    for fn in (moe_layer, GRADIENT):
        assert_same(run(gshard.jit(fn), *args, **CLOSE), jax.jit(fn)(*args), **CLOSE)


@pytest.mark.slow
def test_uneven_groups_and_experts():
    """12 groups and 13 experts over 8 devices."""
    args = arguments(G=12, S=26, M=16, H=24, E=13)
    assert_same(run(gshard.jit(GRADIENT), *args, **CLOSE), jax.jit(GRADIENT)(*args), **CLOSE)


def lowered_for(devices: int) -> tuple[gshard.Lowered, float]:
    def gradient(*args):
        return jax.value_and_grad(lambda *a: moe_loss(*a, devices=devices), argnums=(0, 1, 2, 3))(
            *args
        )

    step = gshard.jit(gradient, devices=devices)
    start = time.process_time()
    lowered = step.lower(*shapes(G=devices, S=4096, M=128, H=512, E=devices))
    return lowered, time.process_time() - start


def test_one_program_for_8_to_2048_devices():
    """The model grows with the devices; values that are small on 8 of them travel together."""
    programs = [lowered_for(n)[0] for n in (8, 64, 512, 2048)]
    few, *more = [low.num_equations for low in programs]
    assert max(more) <= few
    assert len({str(kinds(low)) for low in programs}) == 1


@pytest.mark.slow
def test_2048_devices_take_no_longer_than_8():
    lowered_for(8)  # warms up what is cached for any device count
    times = [(lowered_for(8)[1], lowered_for(2048)[1]) for _ in range(8)]
    small, large = (min(column) for column in zip(*times, strict=True))
    assert large <= 1.3 * small, times


def test_abstract_devices_cannot_be_called():
    step = gshard.jit(moe_layer, devices=2048)
    with pytest.raises(RuntimeError, match="2048 abstract devices"):
        step(*[np.zeros(s.shape, s.dtype) for s in shapes()])
