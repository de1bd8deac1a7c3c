"""`lowered.replay` runs what the devices run, one equation at a time, and shows each of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import gshard
from gshard.checking import on_host
from gshard.checking.exact.number import spread
from gshard.checking.lockstep import DivergedError, Lockstep, ended
from gshard.checking.replay import FLOATS, DeviceTile
from gshard.checking.tiles import Tiling
from gshard.tensors.sharding import Sharding
from tests.oracle import assert_same, assignments, even_split, random_array

D = 8


def layer(x, w, v):
    x, w = gshard.split(x, 0, D), gshard.split(w, 1, D)
    hidden = jnp.abs(x @ w)  # the line of the product
    return jnp.roll(hidden @ v, 1, axis=0), jnp.sum(hidden)


SHAPES = (13, 6), (6, 20), (20, 5)
LINE = layer.__code__.co_firstlineno + 2
# Integers: their products and sums are exact, however a processor's compiler orders them.
ARGS = [random_array(shape, jnp.int8, n).astype(np.float32) for n, shape in enumerate(SHAPES)]


def lowered_of(fn, *args, **keywords):
    return gshard.jit(fn, devices=jax.devices()[:D], **keywords).lower(*args)


def replayed(fn, *args, **how):
    """The results of a replay, which have to have the bits of the compiled run."""
    lowered = lowered_of(fn, *args)
    replay = lowered.replay(*args, **how)
    assert replay.run() is None
    assert_same(
        jax.tree.map(np.asarray, lowered.compile()(*args)),
        jax.tree.map(np.asarray, replay.results),
        exact=True,
    )
    return replay


# --------------------------------------------------------------- results


def test_it_gives_the_bits_of_the_compiled_run():
    assert "at its end after" in repr(replayed(layer, *ARGS))


def test_loops_and_branches():
    def fn(x, w):
        w = gshard.split(w, 1, D)

        def step(carry, row):
            carry = jnp.maximum(row + carry @ w, 0)
            return carry, carry[::-1]

        last, rows = lax.scan(step, x[0], x, reverse=True)
        count, grown = lax.while_loop(lambda c: c[1].max() < 1e6, lambda c: (c[0] + 1, c[1] * 2),
                                      (0, last + 1))  # fmt: skip
        return rows, count, lax.cond(count > 3, lambda y: y * 2, lambda y: -y, grown)

    x, w = np.round(random_array((3, 4, 16)) * 8), np.round(random_array((16, 16), seed=1) * 2)
    replayed(fn, x, w)
    steps = list(lowered_of(fn, x, w).replay(x, w))
    assert {s.runs for s in steps if s.operator == "rev"} == {(0,), (1,), (2,)}
    assert steps[-1].runs == ()  # a branch is no run of a loop


def test_it_needs_no_devices():
    lowered = gshard.jit(layer, devices=D).lower(*ARGS)
    replay = lowered.replay(*ARGS, device=5)
    replay.run()
    results = lowered_of(layer, *ARGS).compile()(*ARGS)
    assert_same(jax.tree.map(np.asarray, results), jax.tree.map(np.asarray, replay.results), True)


# --------------------------------------------------------------- steps


def test_tiles_have_their_place_in_the_whole():
    found, lowered = np.full((13, 20), np.nan), lowered_of(layer, *ARGS)
    for device in range(D):
        product = next(s for s in lowered.replay(*ARGS, device=device) if s.operator == "abs")
        (piece,) = product.results
        assert piece.shape == (13, 20)
        found[piece.place] = piece.real
    np.testing.assert_allclose(found, np.abs(ARGS[0] @ ARGS[1]), rtol=1e-5)


def test_what_is_sent_is_received():
    """In a roll every device sends its last row to the next one."""

    def steps_of(device):
        replay = lowered_of(layer, *ARGS).replay(*ARGS, device=device)
        return [s for s in replay if s.operator == "ppermute"]

    for one, other in zip(steps_of(2), steps_of(3), strict=True):
        assert list(one.sent) == [3]
        assert list(other.received) == [2]
        np.testing.assert_array_equal(one.sent[3], other.received[2])
        assert "rows of dim 0 to their tiles" in one.reason


def test_steps_of_a_loop_have_the_number_of_the_run():
    def fn(x):
        return lax.scan(lambda c, r: (jnp.sin(c) + r, c), gshard.split(x, 1, D)[0], x)[0]

    replay = lowered_of(fn, random_array((3, 16))).replay(random_array((3, 16)))
    assert [s.runs for s in replay if s.operator == "sin"] == [(0,), (1,), (2,)]


# --------------------------------------------------------------- until


def test_until_a_line():
    replay = lowered_of(layer, *ARGS).replay(*ARGS, until=f"test_replay.py:{LINE}")
    step = replay.run()
    assert step.source.endswith(f"tests/checking/test_replay.py:{LINE}")
    assert "not started" not in repr(replay)
    assert replay.results is None


def test_until_a_function_is_true():
    replay = lowered_of(layer, *ARGS).replay(*ARGS, until=lambda s: s.operator == "abs")
    assert replay.run().operator == "abs"


def test_until_nan_names_device_and_operands():
    """Padding holds NaN in these tests: only the element of the array counts."""

    def fn(x, w):
        x = gshard.split(x, 0, D)
        y = jnp.log(x)
        return (y @ w).sum()

    x = np.abs(random_array((13, 6))) + 0.1
    lowered = lowered_of(fn, x, random_array((6, 4)))
    assert lowered.replay(x, random_array((6, 4)), until="nan").run() is None
    x[7, 2] = -1
    step = lowered.replay(x, random_array((6, 4)), until="nan").run()
    assert (step.operator, step.device) == ("log", 3)
    assert step.source.endswith(f":{fn.__code__.co_firstlineno + 2}")
    assert np.isnan(step.results[0].real[1, 2])
    assert "the first NaN" in str(step)
    assert "argument" in step.history()


def test_until_nan_passes_infinities_that_the_program_wrote():
    def fn(x):
        masked = jnp.where(gshard.split(x, 0, D) > 0, x, -jnp.inf)
        return jax.nn.softmax(masked, axis=1)

    x = np.abs(random_array((13, 6)))
    x[:, 3] = -1
    assert lowered_of(fn, x).replay(x, until="nan").run() is None
    x[4] = -1
    step = lowered_of(fn, x).replay(x, until="nan").run()
    assert step.device == 2
    assert "the first NaN" in step.found


def test_an_argument_may_hold_the_first_nan():
    x = np.array(ARGS[0])
    x[12, 0] = np.nan
    step = lowered_of(layer, *ARGS).replay(x, *ARGS[1:], until="nan").run()
    assert (step.operator, step.device) == ("argument", 6)


# --------------------------------------------------------------- what people see


def test_a_step_and_a_replay_are_shown():
    replay = lowered_of(layer, *ARGS).replay(*ARGS, device=3)
    step = next(s for s in replay if s.operator == "dot_general")
    assert "float32[2, 6] = [6:8, 0:6] of [13, 6]" in str(step)


def test_refusals():
    lowered = lowered_of(layer, *ARGS)
    with pytest.raises(ValueError, match=r"device is 8; the program has devices 0 to 7"):
        lowered.replay(*ARGS, device=8)
    with pytest.raises(ValueError, match=r"until is 'model.py:12', and no operator of the program"):
        lowered.replay(*ARGS, until="model.py:12")
    with pytest.raises(TypeError, match=r"until is 12; allowed are a source line"):
        lowered.replay(*ARGS, until=12)
    with pytest.raises(TypeError, match="was called with"):
        lowered.replay(*ARGS[:2])
    with pytest.raises(ValueError, match="partitioner='xla' leaves the partitioning"):
        lowered_of(layer, *ARGS, partitioner="xla").replay(*ARGS)


def test_devices_that_would_wait_for_each_other_are_named():
    def fn(x):
        number = lax.axis_index("a")
        return lax.cond(number < 3, lambda x: lax.psum(x, "a"), lambda x: x, x)

    body = jax.make_jaxpr(fn, axis_env=[("a", 4)])(1.0)
    with pytest.raises(
        DivergedError, match=r"test_replay.py:\d+: devices \[0, 1, 2\] run psum, an"
    ):
        list(Lockstep({"a": 4}, FLOATS).run(body, [np.ones(1, np.float32)]))


# --------------------------------------------------------------- tiles and collectives


@given(st.data())
def test_tiles_are_parts_of_the_whole(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    assigned = data.draw(assignments(len(shape), D))
    alone = even_split(len(shape), 0, 1)
    sharding = Sharding.of_assignment(alone if assigned is None else assigned, D)
    value, tiling = random_array(shape), Tiling(sharding, shape)
    tiles = spread(tiling.cut(value[None]), D)
    np.testing.assert_array_equal(tiling.assembled(tiles)[0], value)
    for device, tile in enumerate(tiles):
        place = tiling.place(device)
        assert (place is None) == (sharding.tile_index[device] < 0)
        if place is not None:
            np.testing.assert_array_equal(
                DeviceTile(np.asarray(tile), shape, place).real, value[place]
            )


GROUPS = ([[0, 3, 5, 6], [7, 1, 2, 4]], None)


def test_collectives_do_what_the_compiled_ones_do():
    """All of them, over two axes, in groups and over all devices: to the bit."""

    def fn(x):
        found = []
        for groups in GROUPS:
            how = {"axis_index_groups": groups}
            found += [lax.psum(x, ("a", "b"), **how), lax.pmax(x, ("a", "b"), **how)]
            found += [lax.pmin(x, ("a", "b"), **how)]
            found += [lax.all_gather(x, ("a", "b"), axis=1, tiled=True, **how)]
            found += [lax.all_gather(x, ("a", "b"), **how)]
            found += [lax.psum_scatter(x, ("a", "b"), tiled=True, **how)]
            found += [lax.all_to_all(x, ("a", "b"), 0, 1, tiled=True, **how)]
        found += [lax.ppermute(x, ("a", "b"), [(0, 3), (3, 1), (7, 0)])]
        found += [lax.psum(x, "a"), lax.all_gather(x, "b", tiled=True)]
        return [x[None] for x in found]

    mesh = Mesh(np.array(jax.devices()[:D]).reshape(2, 4), ("a", "b"))
    spec = PartitionSpec(("a", "b"))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = random_array((D * 8, 3), np.int32)
    body = jax.make_jaxpr(fn, axis_env=[("a", 2), ("b", 4)])(x[:8])
    machine = Lockstep({"a": 2, "b": 4}, FLOATS)
    results = [spread(r, D) for r in ended(machine.run(body, [np.stack(np.split(x, D))]))]
    assert len(results) == len(jax.jit(mapped)(x))
    for tiles, wanted in zip(results, jax.jit(mapped)(x), strict=True):
        np.testing.assert_array_equal(np.concatenate(tiles), np.asarray(wanted))


def test_ragged_rows_are_exchanged():
    """Written out by hand: XLA's CPU backend has no ragged AllToAll to compare with."""

    def fn(rows, output, starts, counts, ends, received):
        return lax.ragged_all_to_all(rows, output, starts, counts, ends, received, axis_name="a")

    rows = [np.array([1, 2, 3], np.int32), np.array([4, 5, 6], np.int32)]
    sizes = [np.array(c, np.int32) for c in ([1, 2], [2, 1])]
    operands = [
        rows,
        [np.zeros(4, np.int32)] * 2,
        [np.array(s, np.int32) for s in ([0, 1], [0, 2])],
        sizes,
        [np.array(s, np.int32) for s in ([0, 0], [1, 2])],
        [np.array(s, np.int32) for s in ([1, 2], [2, 1])],
    ]
    body = jax.make_jaxpr(fn, axis_env=[("a", 2)])(*[o[0] for o in operands])
    given = [np.stack(o) for o in operands]
    (result,) = ended(Lockstep({"a": 2}, FLOATS).run(body, given))
    assert [r.tolist() for r in result] == [[1, 4, 5, 0], [2, 3, 6, 0]]


def test_few_compiled_operators_are_kept(monkeypatch):
    """Memory does not grow with the length of a program; equal operators are compiled once."""

    def long(x):
        for n in range(1, 6):
            x = lax.sin(lax.tanh(x)) + lax.pad(x, 0.0, ((0, 0, 0), (n, -n, 0)))
        return x

    eqns = jax.make_jaxpr(long)(ARGS[0]).jaxpr.eqns
    made, jit = [], jax.jit
    monkeypatch.setattr(jax, "jit", lambda fn: made.append(fn) or jit(fn))
    monkeypatch.setattr(on_host, "KEPT", 6)
    monkeypatch.setattr(on_host, "_compiled", {})
    for eqn in eqns:
        given = [np.zeros((1, *a.aval.shape), a.aval.dtype) for a in eqn.invars]
        (result,) = on_host.on_each(eqn, given, np.ones(1, bool))
        assert result.shape == (1, *eqn.outvars[0].aval.shape)
        assert len(on_host._compiled) <= 6
    assert (len(eqns), len(made)) == (20, 8)  # five different pads
