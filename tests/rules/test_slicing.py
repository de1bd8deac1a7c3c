"""Data formatting: every configuration under every split, and only the rows that must move do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from gshard.rules.painting import RowMap
from gshard.tensors.sharding import Sharding
from tests.oracle import (
    DEVICE_COUNTS,
    SIZES,
    assignments,
    check,
    check_grad,
    even_split,
    kinds,
    random_array,
    sent,
)

DTYPES = (np.float32, np.int32, np.bool_, jnp.bfloat16, np.complex64)
ROW = 4 * 4  # bytes of a row of four floats


@st.composite
def tensors(draw, rank=2, sizes=(*SIZES, 17, 0)):
    """A shape, a dtype, a device count, and annotations of one operand and one result."""
    shape = [draw(st.sampled_from(sizes)) for _ in range(rank)]
    devices = draw(st.sampled_from(DEVICE_COUNTS))
    how = {
        "devices": devices,
        "inputs": [draw(assignments(rank, devices))],
        "outputs": [draw(assignments(rank, devices))],
    }
    return random_array(shape, draw(st.sampled_from(DTYPES))), how


def both(fn, *xs, how, grad=(0,)):
    """Values bit for bit; for floats the gradient too."""
    check(fn, *xs, exact=True, **how)
    if xs[0].dtype == np.float32:
        check_grad(fn, *xs, argnums=grad, **how)


PROPERTIES = {}


def prop(*strategies):
    """A property, to be tested with few examples or with many."""

    def note(body):
        PROPERTIES[body.__name__] = (strategies, body)
        return body

    return note


@st.composite
def slices(draw):
    x, how = draw(tensors())
    where = []
    for n in x.shape:
        start = draw(st.integers(0, n))
        where.append((start, draw(st.integers(start, n)), draw(st.sampled_from((1, 1, 2, 3, 5)))))
    return x, how, [list(a) for a in zip(*where, strict=True)]


@prop(slices())
def any_slice(case):
    x, how, (starts, limits, strides) = case
    both(lambda x: lax.slice(x, starts, limits, strides), x, how=how)


@st.composite
def pads(draw):
    x, how = draw(tensors())
    config = []
    for n in x.shape:
        low, high = draw(st.integers(-4, 9)), draw(st.integers(-4, 9))
        interior = draw(st.sampled_from((0, 0, 1, 2)))
        total = low + high + n + max(0, n - 1) * interior
        config.append((low, high, interior) if total >= 0 else (0, 0, interior))
    return x, how, config


@prop(pads())
def any_pad(case):
    x, how, config = case
    both(lambda x: lax.pad(x, jnp.asarray(1, x.dtype), config), x, how=how)


@prop(tensors(), st.sampled_from([(0,), (1,), (0, 1)]))
def any_reverse(case, dims):
    x, how = case
    both(lambda x: lax.rev(x, dims), x, how=how)


@prop(tensors(), st.tuples(st.integers(0, 9), st.integers(0, 3)))
def any_tile(case, reps):
    x, how = case
    both(lambda x: jnp.tile(x, reps), x, how=how)


@prop(tensors(), st.integers(-9, 9), st.sampled_from([0, 1, None]), st.booleans())
def any_roll(case, by, dim, dynamic):
    x, how = case
    if dynamic:
        both(lambda x, by: jnp.roll(x, by, dim), x, jnp.asarray(by), how=how)
    else:
        both(lambda x: jnp.roll(x, by, dim), x, how=how)


SHIFTS = {
    "a padded slice": lambda x, a, b: jnp.pad(x[a:], ((0, b), (0, 0)), constant_values=1),
    "another": lambda x, a, b: jnp.pad(x[: max(len(x) - a, 0)], ((b, 2), (0, 0))),
    "a slice of padding": lambda x, a, b: jnp.pad(x, ((a, b), (0, 0)))[b : len(x) + a],
    "rows that make way": lambda x, a, b: jnp.concatenate([x[:b], x[: max(len(x) - a, 0)]]),
    "cut by padding": lambda x, a, b: lax.pad(
        lax.pad(x, jnp.zeros((), x.dtype), ((-min(a, len(x)), 0, 0), (0, 0, 0))),
        jnp.zeros((), x.dtype),
        ((0, b, 0), (0, 0, 0)),
    ),
}


@prop(tensors(), st.integers(0, 9), st.integers(0, 9), st.sampled_from(list(SHIFTS)))
def any_shift(case, by, more, name):
    x, how = case
    both(lambda x: SHIFTS[name](x, by, more), x, how=how)


@st.composite
def several(draw):
    """Operands of one concatenation, differently split."""
    x, how = draw(tensors())
    dim = draw(st.integers(0, 1))
    xs = [x]
    for seed in range(draw(st.integers(0, 2))):
        shape = list(x.shape)
        shape[dim] = draw(st.sampled_from((*SIZES, 0)))
        xs.append(random_array(shape, x.dtype, seed + 1))
        how["inputs"].append(draw(assignments(2, how["devices"])))
    return xs, how, dim


@prop(several())
def any_concatenate(case):
    xs, how, dim = case
    both(lambda *xs: lax.concatenate(xs, dim), *xs, how=how, grad=tuple(range(len(xs))))


@prop(tensors(), st.integers(0, 1), st.data())
def any_split(case, dim, data):
    x, how = case
    cuts = sorted(data.draw(st.lists(st.integers(0, x.shape[dim]), max_size=3)))
    both(lambda x: jnp.split(x, cuts, dim), x, how=how)


@prop(tensors(), st.integers(0, 1))
def any_stack_and_unstack(case, dim):
    x, how = case
    how["outputs"] = []
    both(lambda x: jnp.stack([x, jnp.cos(x) if x.dtype == np.float32 else x], dim), x, how=how)
    if x.shape[dim]:
        both(lambda x: jnp.unstack(x, axis=dim)[:2], x, how=how)


@st.composite
def boxes(draw):
    """A tensor, the size of a part of it, and where that begins, or would if it fitted."""
    x, how = draw(tensors())
    sizes = [draw(st.integers(0, n) | st.just(n)) for n in x.shape]
    starts = [draw(st.integers(-3, n + 3)) for n in x.shape]
    dtype = draw(st.sampled_from((np.int32, np.int8)))
    return x, how, sizes, [np.asarray(s, dtype) for s in starts]


@prop(boxes())
def any_dynamic_slice(case):
    x, how, sizes, starts = case
    both(lambda x, *s: lax.dynamic_slice(x, s, sizes), x, *starts, how=how)


@prop(boxes(), st.data())
def any_dynamic_update_slice(case, data):
    x, how, sizes, starts = case
    how["inputs"].append(data.draw(assignments(2, how["devices"])))
    update = random_array(sizes, x.dtype, seed=1)
    both(
        lambda x, u, *s: lax.dynamic_update_slice(x, u, s), x, update, *starts, how=how, grad=(0, 1)
    )


def test_pieces_of_one_row_that_have_different_sources():
    """Parts of a gathered tensor and of a replicated one are exchanged: one layout for all."""
    xs = [random_array((5, 5)), random_array((1, 5), seed=1), random_array((12, 5), seed=2)]
    inputs = [even_split(2, 0, 1), even_split(2, 0, 1), np.arange(8).reshape(4, 2)]
    outputs = [np.array([[0], [1], [2], [3], [4], [6], [5], [7]])]
    how = {"devices": 8, "inputs": inputs, "outputs": outputs}
    both(lambda *xs: lax.concatenate(xs, 0), *xs, how=how)


def hold(name, examples):
    """Check a property on as many examples."""
    strategies, body = PROPERTIES[name]
    settings(max_examples=examples)(given(*strategies)(body))()


@pytest.mark.parametrize("name", PROPERTIES)
def test_any(name):
    hold(name, 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROPERTIES)
def test_many(name):
    hold(name, 150)


def by_permutes(fn, *xs, rows, **how):
    """The program of `fn`, split 8 ways: permutes, of so many rows at most."""
    how = {"inputs": [even_split(2, 0, 8)], "outputs": [even_split(2, 0, 8)], **how}
    lowered = check(fn, *xs, exact=True, **how)
    assert set(kinds(lowered)) <= {"collective_permute"}, lowered.collectives
    assert sent(lowered) <= rows * ROW, lowered.collectives
    return lowered


def test_reverse_of_61_rows_over_8_devices_permutes_one_tile():
    by_permutes(lambda x: x[::-1], random_array((61, 4)), rows=8)
    by_permutes(lambda x: x[::-1], random_array((64, 4)), rows=8)


@pytest.mark.parametrize("size", [61, 64])
def test_slices_and_pads_shift_border_rows(size):
    x = random_array((size, 4))
    by_permutes(lambda x: x[1:], x, rows=1)
    by_permutes(lambda x: x[2:-3], x, rows=6)
    by_permutes(lambda x: jnp.pad(x, ((1, 0), (0, 0))), x, rows=8)  # of 62 rows as of 65
    by_permutes(lambda x: jnp.pad(x, ((2, 1), (0, 0)))[2:-1], x, rows=10)


@pytest.mark.parametrize("name", SHIFTS)
def test_a_row_of_every_tile_moves_one_tile_on(name):
    """The stages of a pipeline hand on what they have, and something new enters: one permute."""
    by_permutes(lambda x: SHIFTS[name](x, 1, 1), random_array((8, 4)), rows=2)


def test_a_stride_thins_out_before_anything_moves():
    x = random_array((64, 4))
    by_permutes(lambda x: x[::2], x, rows=0)
    by_permutes(lambda x: x[1::4], x, rows=0)
    by_permutes(lambda x: x[3::2], x, rows=3)
    by_permutes(lambda x: lax.pad(x, 0.0, ((0, 1, 1), (0, 0, 0))), x, rows=0)


@pytest.mark.parametrize("config", [(1, 2, 2), (-2, 3, 1), (5, -4, 3)])
def test_interior_padding_is_made_where_it_stays(config):
    x = random_array((29, 4))
    by_permutes(lambda x: lax.pad(x, 1.0, (config, (0, 0, 0))), x, rows=8)


def test_half_of_a_dim_sends_each_device_its_rows_only():
    by_permutes(lambda x: x[:32], random_array((64, 4)), rows=8)
    by_permutes(lambda x: x[32:], random_array((64, 4)), rows=8)


@pytest.mark.parametrize("size", [61, 64])
@pytest.mark.parametrize("by", [1, 3, -2])
def test_a_roll_permutes_the_rows_that_change_tiles(size, by):
    rows = abs(by) if size % 8 == 0 else 8
    lowered = by_permutes(lambda x: jnp.roll(x, by, 0), random_array((size, 4)), rows=rows)
    if size % 8 == 0:
        assert kinds(lowered) == {"collective_permute": 1}


def test_rows_set_from_their_neighbours():
    """jax issue 18434, on which XLA is silently wrong."""

    def shift(x, v):
        return x.at[:-1].set(x[1:]).at[-1].set(v)

    for size in (61, 64):
        args = random_array((size, 4)), random_array((4,))
        lowered = by_permutes(shift, *args, rows=1)
        assert kinds(lowered) == {"collective_permute": 1}
    for devices in (2, 4, 8):
        how = {"devices": devices, "inputs": [even_split(2, 0, devices)]}
        check(shift, *args, exact=True, **how)
        check_grad(shift, *args, argnums=(0, 1), **how)


@pytest.mark.parametrize(
    "where", [np.s_[3], np.s_[2:5], np.s_[:, 1], np.s_[-1:, :], np.s_[::2], 99]
)
def test_rows_set_at_known_places(where):
    x = random_array((13, 4))
    value = random_array(np.empty((13, 4))[where].shape if where != 99 else (4,), seed=1)
    for how in ({"inputs": [even_split(2, 0, 4)]}, {"inputs": [even_split(2, 1, 4)]}):
        check(lambda x, v: x.at[where].set(v), x, value, exact=True, **how)


def test_concatenation_along_the_split_dim():
    x, y = random_array((64, 4)), random_array((16, 4), seed=1)
    both_split = [even_split(2, 0, 8)] * 2
    by_permutes(lambda x, y: jnp.concatenate([x, y]), x, y, rows=20, inputs=both_split)
    row = random_array((1, 4), seed=2)
    by_permutes(lambda x, v: jnp.concatenate([v, x[:-1]]), x, row, rows=1)


def test_a_row_is_collected_from_its_owner():
    x = random_array((64, 4))
    lowered = check(lambda x: x[5], x, exact=True, inputs=[even_split(2, 0, 8)])
    assert kinds(lowered) == {"all_reduce": 1}
    assert sent(lowered) <= 2 * ROW
    lowered = check(lambda x, i: x[i], x, 63, exact=True, inputs=[even_split(2, 0, 8)])
    assert kinds(lowered) == {"all_reduce": 1}
    assert sent(lowered) <= 2 * ROW


def test_a_whole_operand_sends_nothing():
    x, s = random_array((61, 4)), [even_split(2, 0, 8)]
    for fn in (
        lambda x: x[3:50:2],
        lambda x: x[::-1],
        lambda x: jnp.pad(x, ((3, 0), (0, 0))),
        lambda x: jnp.tile(x, (3, 1)),
        lambda x: jnp.roll(x, 5, 0),
        lambda x: lax.dynamic_slice(x, (x.shape[0] - 40, 0), (30, 4)),
    ):
        whole = [np.arange(1).reshape(1, 1)]
        assert kinds(check(fn, x, exact=True, inputs=whole, outputs=s)) == {}


def test_a_run_time_slice_sends_its_rows_or_few_tiles():
    x, s = random_array((64, 4)), [even_split(2, 0, 8)]

    def cut(rows):
        return lambda x, i: lax.dynamic_slice(x, (i, 0), (rows, 4))

    lowered = check(cut(8), x, 13, exact=True, inputs=s, outputs=s)
    assert kinds(lowered) == {"reduce_scatter": 1}
    assert sent(lowered) == 7 * ROW
    by_permutes(cut(63), x, 1, rows=1)
    by_permutes(cut(48), x, 13, rows=2 * 8 + 8 + 12)


def test_an_update_is_written_by_its_owners():
    x, u, s = random_array((64, 4)), random_array((3, 4), seed=1), [even_split(2, 0, 8)]

    def put(x, u, i):
        return lax.dynamic_update_slice(x, u, (i, 0))

    assert kinds(check(put, x, u, 6, exact=True, inputs=s, outputs=s)) == {}
    assert kinds(check(put, x, u, 99, exact=True, inputs=s, outputs=s)) == {}
    by_permutes(put, x, random_array((63, 4), seed=1), 1, rows=1, inputs=s * 2)


def test_small_results_stay_whole_and_large_ones_split():
    s = [even_split(2, 0, 8)]
    lowered = check(lambda x: (x[:2], x[1:]), random_array((64, 4)), inputs=s)
    small, large = lowered.out_shardings
    assert small.is_replicated
    assert large.tiles == (8, 1)


def test_the_program_does_not_grow_with_the_devices():
    import gshard

    def fn(x):
        x = gshard.split(x, 0, devices)
        return x[7:2000], x[::-1], jnp.pad(x, ((9, 9), (0, 0))), x[: 512 // 2], jnp.roll(x, 3, 0)

    counts = []
    for devices in (8, 64):
        lowered = gshard.jit(fn, devices=devices).lower(random_array((2048, 4)))
        counts.append(lowered.num_equations)
    assert counts[1] <= counts[0] + 8


def test_all_copies_of_repeated_rows_arrive():
    s = [even_split(2, 0, 8)]
    lowered = check(
        lambda x: jnp.tile(x, (3, 1)), random_array((13, 3)), inputs=s, outputs=s, exact=True
    )
    assert sent(lowered) > 0


def test_dims_that_shrink_where_they_are_change_first():
    source = Sharding.of_assignment(even_split(3, 1, 4), 4)
    (eqn,) = jax.make_jaxpr(lambda x: x[:4, :4, :2])(np.zeros((8, 8, 8))).eqns
    assert RowMap(eqn).order(source, (8, 8, 8)) == [2, 0, 1]
