"""`gshard.check` passes right programs in every type, and names the line of what is wrong."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import gshard
from benchmarks.recipes import recipes
from examples.recipes.transformer import Size
from gshard.checking.audit import Logical
from gshard.moving import collectives
from gshard.moving.halo import Halo
from gshard.moving.steps import Slice
from gshard.rules import control
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import Tile
from tests.oracle import random_array
from tests.programs.test_random_programs import program, random_programs

D = 8


def line_of(fn, offset):
    return f"tests/checking/test_check.py:{fn.__code__.co_firstlineno + offset}"


# --------------------------------------------------------------- right programs


def model(x, w, v):
    x, w = gshard.split(x, 0, D), gshard.split(w, 1, D)
    hidden = jnp.tanh(x @ w)
    rolled = jnp.roll(hidden @ v, 1, axis=0)
    last, _ = lax.scan(
        lambda c, r: (jnp.tanh(c + r @ v.T[:, :4]), c), jnp.zeros(4, x.dtype), rolled
    )
    return jnp.sum(jax.nn.log_softmax(rolled)) + jnp.sum(last)


MODEL = (13, 6), (6, 20), (20, 5)


def test_an_argument_that_a_loop_returns_as_it_is(monkeypatch):
    """Devices have it from the beginning, and the user's program when the loop has ended: no other
    value waits for that."""

    def fn(ws, x):
        x = gshard.split(x, 0, D)
        for _ in range(30):
            x = jnp.sin(x)
        return lax.scan(lambda x, w: (jnp.tanh(x @ gshard.split(w, 1, 2)), None), x, ws)[0].sum()

    waiting, value = [], Logical.value
    monkeypatch.setattr(
        Logical, "value", lambda self, *of: (value(self, *of), waiting.append(len(self._known)))[0]
    )
    args = random_array((3, 4, 4), seed=1), random_array((16, 4))
    report = gshard.check(jax.grad(fn), *args, devices=D)
    assert report.exact, report
    assert 0 < max(waiting) < 15


@pytest.mark.slow
def test_a_model():
    args = [random_array(shape, jnp.bfloat16, seed) for seed, shape in enumerate(MODEL)]
    report = gshard.check(model, *args, devices=D)
    assert report.ok, report
    assert report.compared > 100
    assert report.first is None
    assert report.not_compared == {"rewritten as a part of other operators": 2}  # the roll's slices


def test_gradients_of_a_recurrence_under_the_users_mesh():
    """The mesh is of the machine's devices."""
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = jax.NamedSharding(mesh, jax.P(None, "d"))

    def loss(w, x):
        def run(carry, row):
            carry = jnp.tanh(jnp.concatenate([carry, row], -1) @ w)
            return carry, carry

        x = lax.with_sharding_constraint(x, rows)
        return (lax.scan(run, jnp.zeros((x.shape[1], w.shape[1])), x)[1] ** 2).mean()

    w, x = random_array((8, 5), jnp.float32, 0), random_array((4, 6, 3), jnp.float32, 1)
    report = gshard.check(jax.grad(loss), w, x, devices=D)
    assert report.ok, report
    assert report.table


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_its_gradient(dtype):
    args = [random_array(shape, dtype, seed) for seed, shape in enumerate(MODEL)]
    report = gshard.check(jax.grad(model, argnums=(1, 2)), *args, devices=D)
    assert report.ok, report
    assert set(report.not_compared) == {"rewritten as a part of other operators"}


def test_sums_of_16_bits_across_devices():
    """Partial sums are rounded to 16 bits: far from the exact sum, and still right."""

    def fn(x, w):
        return gshard.split(x, 1, D) @ w

    x, w = random_array((4, 4096), jnp.bfloat16), random_array((4096, 4), jnp.bfloat16, 1)
    report = gshard.check(fn, x, w, devices=D)
    assert report.ok, report
    assert report.exact


@pytest.mark.parametrize("stacked", [False, True])
def test_a_loop_whose_sums_cancel_across_devices(stacked):
    """Its result is reduced after the loop: the summands are large, and the sum is not."""

    def fn(x):
        def run(total, rows):
            part = rows.sum(0)
            return total + part, part * 0.5

        found = lax.scan(run, jnp.zeros(5), gshard.split(x, 1, D))
        return found[stacked]

    x = random_array((6, 24, 5)) * 1000
    x[:, 12:] = random_array((6, 12, 5), seed=1) - x[:, :12]
    report = gshard.check(fn, x, devices=D)
    assert report.ok, report


def test_products_that_cancel_before_they_are_reduced():
    """Their sum is reduced: what the devices add is large, and the sum is not."""

    def fn(x, v, w):
        x = gshard.split(x, 1, D)
        return x @ v - x @ w

    v = random_array((64, 8))
    args = random_array((4, 64)) * 1000, v, v + random_array((64, 8), seed=1) * 1e-6
    lowered = gshard.jit(fn, devices=D).lower(*args)
    assert sum(c.count for c in lowered.collectives) == 1
    report = lowered.check(*args)
    assert report.ok, report


def test_updates_of_one_row_that_end_in_zeros():
    """All updates of a row count, not the last one alone."""

    def fn(table, rows, updates):
        return table.at[gshard.split(rows, 0, D)].add(updates, mode="clip")

    rows = np.repeat(np.arange(4), 16).reshape(4, 16).T.ravel()  # each on all devices
    updates = np.concatenate([random_array((56, 3)), np.zeros((8, 3), np.float32)])
    report = gshard.check(fn, np.zeros((5, 3), np.float32), rows, updates, devices=D)
    assert report.ok, report
    assert report.exact


def test_empty_results_whose_other_dim_is_split():
    """XLA does not split empty arrays: the devices return all of them."""

    def fn(a, x):
        return a @ gshard.split(x, 0, D).T, gshard.split(x, 0, D).T @ a.T.reshape(16, 0)

    args = np.zeros((0, 6), np.float32), random_array((16, 6))
    report = gshard.check(fn, *args, devices=D)
    assert report.exact, report


def test_draws_by_keys_of_their_own():
    """Of a distribution that is drawn from until a number is accepted: each device its elements."""

    def fn(x):
        return jax.random.gamma(jax.random.key(3), jnp.exp(gshard.split(x, 0, D)))

    report = gshard.check(fn, random_array((13, 3)), devices=D)
    assert report.exact, report


def check_random(case, dtype):
    devices, shapes, inputs, steps = case

    def mark(x, assignment):
        return x if assignment is None else gshard.shard(x, assignment)

    fn = program(steps, inputs, mark)
    both = lambda *xs: (fn(*xs), jax.grad(lambda *a: fn(*a)[1], argnums=(0, 1))(*xs))  # noqa: E731
    args = [random_array(s, dtype, seed=i) for i, s in enumerate(shapes)]
    report = gshard.check(both, *args, devices=devices)
    assert report.ok, report


def test_one_array_that_is_the_tile_of_two_values():
    """A tile of one element is that of the reshaped tensor too."""
    steps = [("add", 0, 0, np.arange(4).reshape(2, 2)), ("flatten", 0, 0, None)]
    check_random((8, [(2, 1), (1, 1)], [None, None], steps), jnp.float32)


@pytest.mark.slow
@settings(max_examples=25)
@given(random_programs(), st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_random_programs(case, dtype):
    check_random(case, dtype)


TINY = Size(L=2, B=64, S=8, M=32, F=64, V=72)


@pytest.mark.slow
@pytest.mark.parametrize("name", [r.name for r in recipes(TINY)])
def test_recipes(name):
    (recipe,) = [r for r in recipes(TINY) if r.name == name]
    rng = np.random.default_rng(0)

    def draw(x):
        if np.issubdtype(x.dtype, np.integer):
            return rng.integers(0, TINY.V, x.shape).astype(x.dtype)
        return (rng.normal(size=x.shape) / 8).astype(x.dtype)

    report = gshard.check(recipe.step, *jax.tree.map(draw, recipe.arguments), devices=D)
    assert report.ok, report


# --------------------------------------------------------------- planted faults


def first_of(fn, *args):
    report = gshard.check(fn, *args, devices=D)
    assert not report.ok
    return report.first


def test_a_halo_that_is_one_row_short(plant):
    def fn(x, w):
        x = gshard.split(x, 1, D) * 2
        y = lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return jnp.tanh(y)

    args = random_array((2, 24, 3)), random_array((3, 3, 4), seed=1)
    assert gshard.check(lambda *a: fn(*a), *args, devices=D).ok
    run = Halo.run

    def short(self, place, array):
        window = run(self, place, array)
        return window.at[(slice(None),) * self.dim + (-1,)].set(0)

    plant(Halo, "run", short)
    found = first_of(fn, *args)
    assert (found.operator, found.source) == ("conv_general_dilated", line_of(fn, 2))
    assert found.index[1] % 3 == 2  # the last row of a tile
    assert found.got != found.expected


def test_a_sum_left_out(plant):
    def fn(x, w):
        y = jnp.sin(gshard.split(x, 1, D))
        z = y @ w
        return jnp.tanh(z)

    args = random_array((4, 32)), random_array((32, 5), seed=1)
    assert gshard.check(lambda *a: fn(*a), *args, devices=D).ok
    plant(collectives, "all_reduce", lambda place, x, *_: x)
    found = first_of(fn, *args)
    assert (found.operator, found.source) == ("dot_general", line_of(fn, 2))


def test_a_wrong_group_of_devices(plant):
    def fn(x):
        y = jnp.cos(gshard.split(x, 0, D))
        z = gshard.replicate(y)
        return z * 2

    args = (random_array((16, 3)),)
    assert gshard.check(lambda x: fn(x), *args, devices=D).ok
    plant(collectives, "_covering", lambda *_, **__: (tuple(range(D))[::-1],))
    found = first_of(fn, *args)
    assert (found.operator, found.source) == ("reshard of cos", line_of(fn, 2))


def test_a_mask_left_out(plant):
    def fn(x):
        y = jnp.exp(gshard.split(x, 0, D))
        return jnp.sum(y, axis=0)

    assert gshard.check(lambda x: fn(x), random_array((13, 3)), devices=D).ok
    plant(Tile, "masked", lambda self, *_: self)
    found = first_of(fn, random_array((13, 3)))
    assert (found.operator, found.source) == ("reduce_sum", line_of(fn, 2))


def test_a_reshard_to_the_wrong_tile(plant):
    def fn(x, w):
        y = gshard.replicate(jnp.sort(gshard.replicate(x), axis=0))
        return gshard.split(y, 0, D) @ w

    args = random_array((16, 3)), random_array((3, 5), seed=1)
    assert gshard.check(lambda *a: fn(*a), *args, devices=D).ok
    right = Slice._run

    def wrong(step, place, tile, reason):
        splits = tuple(s and Split.of(np.roll(s.coords, 1)) for s in step.target.splits)
        rolled = dataclasses.replace(step, target=Sharding(splits, step.target.num_devices))
        made = right(rolled, place, tile, reason)
        return dataclasses.replace(made, sharding=step.target)

    plant(Slice, "_run", wrong)
    found = first_of(fn, *args)
    assert found.source == line_of(fn, 2)
    assert "split dim 0 by 8" in found.sharding


def test_one_fault_is_found_once(plant):
    """What follows from a wrong value is right: it is compared on that value."""

    def fn(x, w):
        z = gshard.split(x, 1, D) @ w
        return jnp.tanh(z) * 2 + jnp.sort(z, axis=0)

    plant(collectives, "all_reduce", lambda place, x, *_: x)
    report = gshard.check(fn, random_array((4, 32)), random_array((32, 5), seed=1), devices=D)
    assert {d.operator for d in report.differences} == {"dot_general"}


def test_a_fault_behind_another_is_found(plant):
    """It is compared on the right value, of which a padded tile keeps its padding."""

    def fn(x, w, v):
        z = gshard.split(x, 1, D) @ w
        z = jnp.tanh(gshard.split(z, 0, D))
        return gshard.split(z * 2, 1, D) @ v

    def own_part(place, x, dim, *_):
        rows = x.shape[dim] // D
        return lax.dynamic_slice_in_dim(x, place.device_id() * rows, rows, dim)

    plant(collectives, "all_reduce", lambda place, x, *_: x)
    plant(collectives, "reduce_scatter", own_part)
    for rows in (16, 13):
        args = random_array((rows, 32)), random_array((32, 24), seed=1), random_array((24, 5))
        report = gshard.check(fn, *args, devices=D)
        assert {d.source for d in report.differences} == {line_of(fn, 1), line_of(fn, 3)}


def test_a_fault_in_a_run_of_a_loop(plant):
    def fn(x, w):
        def step(carry, row):
            return jnp.tanh(carry + gshard.split(row, 0, D) @ w), None

        return lax.scan(step, jnp.zeros(5), x)[0]

    plant(collectives, "all_reduce", lambda place, x, *_: x)
    found = first_of(fn, random_array((3, 16)), random_array((16, 5), seed=1))
    assert (found.operator, found.runs) == ("dot_general", (0,))


def test_a_carried_value_that_is_not_what_the_loop_takes(plant):
    """A run begins with it: the line is the loop's."""

    def fn(x):
        x = gshard.split(x, 1, D)
        y = lax.scan(lambda c, row: (c + row.T @ row, None), jnp.ones((6, 6)), x)[0]
        return y * 3

    def not_moved(ctx, tile, wanted, reason):
        return dataclasses.replace(tile, sharding=wanted)

    assert gshard.check(lambda x: fn(x), random_array((3, 16, 6)), devices=D).exact
    plant(control, "moved_to", not_moved)
    found = first_of(fn, random_array((3, 16, 6)))
    assert (found.operator, found.source) == ("argument of scan", line_of(fn, 2))
    assert found.runs == (0,)
