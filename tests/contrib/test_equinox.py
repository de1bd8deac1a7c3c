"""`gshard.contrib.equinox.filter_jit` is `eqx.filter_jit`: values, static leaves, donation."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gshard
from gshard.contrib.equinox import filter_jit
from tests.oracle import compare, kinds, random_array, sent

KEY = jax.random.key(0)


def over_batch(model, x, key):
    """A module on every example of a batch that is split over the devices."""
    x = gshard.split(x, 0, 8)
    return jax.vmap(lambda a, k: model(a, key=k))(x, jax.random.split(key, x.shape[0]))


class Powers(eqx.Module):
    """Fields that a program branches on, loops over and computes shapes from."""

    count: int
    scale: float
    flag: bool
    name: str
    weight: jax.Array

    def __call__(self, x, key=None):
        total = jnp.zeros(self.count)
        for _ in range(self.count):
            total = total + jnp.sum(x * self.weight)
        return -total if self.flag and self.name == "powers" else total * self.scale


class Attention(eqx.Module):
    inner: eqx.nn.MultiheadAttention

    def __call__(self, x, key):
        return self.inner(x, x, x, key=key)


MODULES = {
    "dropout": (lambda: eqx.nn.Dropout(0.4), (4,)),
    "dropout for inference": (lambda: eqx.nn.Dropout(0.4, inference=True), (4,)),
    "average pooling": (lambda: eqx.nn.AvgPool2d(2, 2), (3, 4, 6)),
    "attention": (
        lambda: Attention(eqx.nn.MultiheadAttention(2, 6, dropout_p=0.3, key=KEY)),
        (5, 6),
    ),
    "fields": (lambda: Powers(3, 2.0, False, "powers", jnp.arange(4.0)), (4,)),
    "fields that branch": (lambda: Powers(3, 2.0, True, "powers", jnp.arange(4.0)), (4,)),
}


@pytest.mark.parametrize(("make", "shape"), MODULES.values(), ids=MODULES)
def test_modules_with_python_numbers(make, shape):
    module, x = make(), random_array((16, *shape))
    step = filter_jit(over_batch, strict=True)
    compare(step(module, x, KEY), eqx.filter_jit(over_batch)(module, x, KEY), exact=False)
    lowered = step.lower(module, x, KEY)
    assert isinstance(lowered, gshard.Lowered)
    assert lowered.collectives == []
    compare(lowered.compile()(module, x, KEY), step(module, x, KEY), exact=True)


def test_gshard_jit_says_which_one_to_use():
    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        gshard.jit(over_batch)(eqx.nn.Dropout(0.4), jnp.ones((8, 4)), KEY)
    (note,) = (each for each in raised.value.__notes__ if "equinox" in each)
    assert "gshard.contrib.equinox.filter_jit" in note
    assert "Dropout.p is the Python float 0.4" in note
    with pytest.raises(TypeError, match="concrete") as raised:
        gshard.jit(over_batch).lower(MODULES["fields"][0](), jnp.ones((8, 4)), KEY)
    assert sum("filter_jit" in note for note in raised.value.__notes__) == 1


def test_other_errors_say_nothing_of_equinox():
    with pytest.raises(TypeError) as raised:
        gshard.jit(lambda x: x @ x)(jnp.ones((2, 3)))
    assert not any("equinox" in note for note in getattr(raised.value, "__notes__", ()))


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.linear = eqx.nn.Linear(6, 8, key=key)
        self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(self.linear(x), state)


def test_training_with_state():
    """Module, optimizer's state and running statistics, three steps; sums alone move."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    x, y = random_array((16, 6)), random_array((16, 8), seed=1)

    def step(model, state, optimizer_state, x, y):
        x = gshard.split(x, 0, 8)

        def loss(model, state):
            forward = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            out, state = forward(x, state)
            return jnp.mean((out - y) ** 2), state

        (value, state), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model, state)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, model)
        return eqx.apply_updates(model, updates), state, optimizer_state, value

    def trained(jitted):
        model, state = eqx.nn.make_with_state(Normed)(KEY)
        rest = (state, optimizer.init(eqx.filter(model, eqx.is_inexact_array)))
        losses = []
        for _ in range(3):
            model, *rest, value = jitted(model, *rest, x, y)
            losses.append(value)
        return model, rest, losses

    partitioned = filter_jit(step, strict=True)
    got, wanted = trained(partitioned), trained(eqx.filter_jit(step))
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        compare(a, b, exact=False, rtol=1e-4) if eqx.is_array(a) else None
    model, state = eqx.nn.make_with_state(Normed)(KEY)
    lowered = partitioned.lower(
        model, state, optimizer.init(eqx.filter(model, eqx.is_inexact_array)), x, y
    )
    assert set(kinds(lowered)) == {"all_reduce"}
    assert sent(lowered) < 2 * 4 * (6 * 8 + 8 * 8)  # the gradients, the statistics and the loss


def test_static_leaves_take_part_in_the_choice_of_the_program():
    traced = []

    @filter_jit
    def scaled(x, by, name):
        traced.append((by, name))
        return gshard.split(x, 0, 8) * by

    for by in (2, 3, 2):
        np.testing.assert_array_equal(scaled(jnp.arange(8), by, "a"), np.arange(8) * by)
    scaled(jnp.arange(8), 2, "b")
    scaled(jnp.arange(8), np.float32(2), "b")  # an array, of any value
    scaled(jnp.arange(8), np.float32(3), "b")
    assert [(by, name) for by, name in traced if isinstance(by, int)] == [
        (2, "a"),
        (3, "a"),
        (2, "b"),
    ]
    assert len(traced) == 4


@given(st.sampled_from(["all", "all-except-first", "warn", "warn-except-first", "none"]))
def test_donation_is_that_of_equinox(donate):
    def swapped(first, second):
        return jax.tree.map(lambda a, b: a + b, gshard.split(first, 0, 8), second), second * 2

    def after(jitted):
        first, second = (
            jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(mesh, jax.P("x"))) for _ in "ab"
        )
        jitted(first, second)
        return first.is_deleted(), second.is_deleted()

    mesh = jax.make_mesh((8,), ("x",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = after(filter_jit(swapped, donate=donate))
        assert got == after(eqx.filter_jit(swapped, donate=donate))


def test_results_that_do_not_divide_come_back_as_arguments():
    model = eqx.nn.MLP(3, 5, 7, 1, key=KEY)
    step = filter_jit(lambda model, x: (model, jax.vmap(model)(gshard.split(x, 0, 8))))
    again, y = step(model, random_array((13, 3)))
    assert isinstance(y, gshard.UnevenArray)
    assert again.activation is model.activation
    assert filter_jit(lambda y: y * 2).lower(y).collectives == []
    compare(y, jax.vmap(model)(random_array((13, 3))), exact=False)


def test_as_a_decorator_of_a_method():
    class Model(eqx.Module):
        weight: jax.Array
        power: int

        @filter_jit(devices=jax.devices()[:4])
        def __call__(self, x):
            return gshard.split(x, 0, 4) @ self.weight**self.power

    model = Model(jnp.full((3, 2), 2.0), 3)
    y = model(jnp.ones((8, 3)))
    np.testing.assert_array_equal(y, np.full((8, 2), 24.0))
    assert y.sharding.num_devices == 4


def test_errors_at_run_time_are_those_of_equinox():
    # On one device: where several fail, JAX's CPU client may end the process.
    @filter_jit(devices=jax.devices()[:1])
    def checked(x):
        return eqx.error_if(x, jnp.any(x > 5), "too large")

    with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
        checked(jnp.arange(8.0))


@pytest.mark.parametrize("keyword", ["static_argnums", "in_shardings"])
def test_keywords_that_equinox_refuses(keyword):
    with pytest.raises(ValueError, match=keyword):
        filter_jit(over_batch, **{keyword: 0})
    with pytest.raises(ValueError, match="donate"):
        filter_jit(over_batch, donate="some")


def test_partitioner_of_xla():
    x = random_array((16, 4))
    got = filter_jit(over_batch, partitioner="xla")(eqx.nn.Dropout(0.4), x, KEY)
    compare(got, eqx.filter_jit(over_batch)(eqx.nn.Dropout(0.4), x, KEY), exact=True)
