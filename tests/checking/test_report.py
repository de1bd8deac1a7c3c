"""What `gshard.check` says of a program, whatever its arguments and its partitioner."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.moving import collectives
from tests.oracle import random_array

D = 8


def test_reports_are_shown(plant):
    def fn(x, w):
        return gshard.split(x, 1, D) @ w

    args = random_array((4, 32)), random_array((32, 5), seed=1)
    report = gshard.check(fn, *args, devices=D)
    assert str(report).startswith("ok: ")
    assert "operators" not in str(report)
    plant(collectives, "all_reduce", lambda place, x, *_: x)
    report = gshard.check(lambda *a: fn(*a), *args, devices=D)
    assert "The first:" in str(report)
    assert "elements differ" in str(report.first)


def test_infinities_of_the_program_are_values_like_others():
    def fn(x, w):
        return gshard.split(x, 1, D) @ w

    x = random_array((4, 16))
    x[1, 3], x[2, 5], x[2, 9] = np.inf, np.inf, -np.inf  # an infinity, and a NaN of two
    report = gshard.check(fn, x, np.ones((16, 2), np.float32), devices=D)
    assert report.ok, report


def test_arguments_on_a_mesh_of_explicit_axes():
    """Equations that JAX makes of them keep the mesh, and run on one device here."""
    replicated = jax.NamedSharding(jax.make_mesh((D,), ("a",)), jax.P())
    bias = jax.device_put(random_array((5,)), replicated)

    def fn(bias, x):
        return jax.vmap(lambda row: bias * row.sum())(gshard.split(x, 0, D))

    report = gshard.check(fn, bias, random_array((16, 3)), devices=D)
    assert report.ok, report


def test_a_jitted_function_has_its_keywords_already():
    step = gshard.jit(lambda x: gshard.split(x, 0, D) + 1, devices=D)
    assert gshard.check(step, random_array((16, 3))).ok
    with pytest.raises(TypeError, match=r"given a function of gshard.jit and the keywords devices"):
        gshard.check(step, random_array((16, 3)), devices=4)


@pytest.mark.parametrize("wrong", [False, True])
def test_what_xla_partitions(wrong, monkeypatch):
    """Its results are beside those of the unpartitioned program, within rounding."""

    def fn(x, w):
        return jnp.tanh(gshard.split(x, 1, D) @ w), x.sum(0)

    lowered = gshard.jit(fn, devices=jax.devices()[:D], partitioner="xla").lower(
        *(args := (random_array((4, 16)), random_array((16, 5), seed=1)))
    )
    if wrong:
        compiled = lowered.compile()
        monkeypatch.setattr(lowered, "compile", lambda: lambda *a: (compiled(*a)[0], args[0][0]))
    report = lowered.check(*args)
    assert report.ok != wrong
    assert not report.exact
    assert not wrong or report.first.operator == "reduce_sum"
