"""What `gshard.check` says of a program, whatever its arguments and its partitioner."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.moving import collectives
from gshard.runtime.compiled import Compiled
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
        right = Compiled.run
        monkeypatch.setattr(
            Compiled, "run", lambda self, leaves: ([right(self, leaves)[0][0], args[0][0]], None)
        )
    report = lowered.check(*args)
    assert report.ok != wrong
    assert not report.exact
    assert not wrong or report.first.operator == "reduce_sum"


def test_what_xla_computes_need_not_be_a_number():
    def fn(x):
        return jnp.log(gshard.split(x, 0, D)), jnp.sqrt(x).sum(0)

    jitted = gshard.jit(fn, devices=jax.devices()[:D], partitioner="xla")
    report = gshard.check(jitted, random_array((16, 3)))
    assert report.ok, report


def test_static_arguments():
    """They are no arrays of the program, wherever they are in a call."""

    def fn(x, times, key):
        for _ in range(times):
            x = jnp.tanh(gshard.split(x, 0, D))
        return x + jax.random.normal(key, x.shape)

    args = random_array((16, 3)), 2, jax.random.key(0)
    for find in (gshard.check, gshard.prove):
        assert find(fn, *args, devices=D, static_argnums=1).exact


def test_types_are_not_run():
    """A check needs values, a proof types: of all arguments, or of none."""
    given = jax.ShapeDtypeStruct((16, 3), jnp.float32)
    lowered = gshard.jit(lambda x: gshard.split(x, 0, D) + 1, devices=D).lower(given)
    with pytest.raises(TypeError, match=r"^float32\[16, 3\] is a type, .*: give arrays"):
        lowered.check(given)
    with pytest.raises(TypeError, match=r"of the types \(float32\[16, 3\]\), and was called"):
        lowered.prove(given, given)
    assert lowered.prove().exact
