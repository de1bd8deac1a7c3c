"""`gshard.jit` as users meet it: arguments, results, what is shown, and errors."""

import copy
import gc
import os
import pickle
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.runtime import pipeline
from tests.oracle import even_split, random_array, run


def double_rows(x):
    return gshard.split(x, 0, 8) * 2


def test_results_that_divide_are_ordinary_arrays():
    y = gshard.jit(double_rows)(random_array((16, 3)))
    assert isinstance(y, jax.Array)
    assert y.sharding.shard_shape(y.shape) == (2, 3)
    assert (y + 1).shape == (16, 3)


@pytest.mark.parametrize("order", [np.arange(8)[::-1], np.array([3, 1, 4, 0, 5, 7, 2, 6])])
def test_any_device_order_is_an_ordinary_array_too(order):
    x = random_array((16, 3))
    step = gshard.jit(lambda x: gshard.shard(x, order.reshape(8, 1)) * 2)
    y = run(step, x)
    assert isinstance(y, jax.Array)
    np.testing.assert_array_equal(y, x * 2)
    by_device = {s.device.id: s.index[0].start for s in y.addressable_shards}
    assert [by_device[d] for d in order] == list(range(0, 16, 2))
    np.testing.assert_array_equal(step(y), x * 4)


def test_fewer_partitions_than_devices():
    """Partition i is on device i; a count that does not divide leaves devices out."""
    x = random_array((12, 2))
    for count in range(1, 9):
        y = run(gshard.jit(lambda x, n=count: gshard.split(x, 0, n) + 1), x)
        np.testing.assert_array_equal(np.asarray(y), x + 1)
        if 12 % count == 0:
            tile = 12 // count
            starts = {s.device.id: s.index[0].start or 0 for s in y.addressable_shards}
            assert all(starts[i] == i * tile for i in range(count))


def test_uneven_results_stay_split_between_calls():
    x = random_array((13, 3))
    step = gshard.jit(double_rows)
    y = run(step, x)
    assert isinstance(y, gshard.UnevenArray)
    assert y.shape == (13, 3)
    np.testing.assert_array_equal(np.asarray(y), x * 2)
    np.testing.assert_array_equal(y + 1, x * 2 + 1)
    z = step(y)
    np.testing.assert_array_equal(np.asarray(z), x * 4)
    assert step.lower(y).collectives == []
    port = step.lower(y)._program.into[0]
    assert port.put(y.stack.sharding.mesh, y) is y.stack, "passing it on moved it"


def test_uneven_arrays_in_other_places():
    """Into another split, into plain JAX, and into numpy."""
    y = gshard.jit(double_rows)(random_array((13, 5)))
    logical = np.asarray(y)
    np.testing.assert_array_equal(gshard.jit(lambda x: gshard.split(x, 1, 4))(y), logical)
    np.testing.assert_array_equal(jnp.sin(jnp.asarray(y)), jnp.sin(logical))
    np.testing.assert_array_equal(y[3:5], logical[3:5])
    assert float(gshard.jit(lambda x: x.sum())(y)) == pytest.approx(logical.sum(), rel=1e-5)
    assert y.mean() == pytest.approx(logical.mean(), rel=1e-5)


def test_pytrees_static_and_keyword_arguments():
    def fn(tree, power, *, scale, name="x"):
        return {"y": gshard.split(tree["a"], 0, 4) ** power * scale, "name": name, "none": None}

    step = gshard.jit(fn, static_argnums=1)
    out = step({"a": random_array((8,)), "f": jnp.tanh}, 3, scale=2.0)
    np.testing.assert_allclose(out["y"], random_array((8,)) ** 3 * 2, rtol=1e-6)
    assert out["name"] == "x"
    assert out["none"] is None
    assert step({"a": random_array((8,)), "f": jnp.tanh}, 2, scale=1.0)["y"].shape == (8,)


def test_python_scalars_keep_their_weak_types():
    y = gshard.jit(lambda x, s: gshard.split(x, 0, 8) * s)(jnp.ones(8, jnp.bfloat16), 2.0)
    assert y.dtype == jnp.bfloat16


def test_donated_arguments_are_given_up():
    step = gshard.jit(double_rows, donate_argnums=0)
    x = step(random_array((16, 3)))
    step(x)
    assert x.is_deleted()


def test_a_program_is_lowered_once():
    traced = []

    def fn(x):
        traced.append(x.shape)
        return gshard.split(x, 0, 8)

    step = gshard.jit(fn)
    for _ in range(3):
        step(random_array((8, 2)))
    step(random_array((9, 2)))
    assert traced == [(8, 2), (9, 2)]


def test_a_function_is_lowered_anew_for_arguments_that_are_sharded_otherwise():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    step = gshard.jit(lambda x: x * 2)
    for spec in (("i",), (None, "i"), ()):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        x = jax.device_put(random_array((8, 16)), sharding)
        assert step(x).sharding.is_equivalent_to(sharding, 2)


def test_equal_shardings_are_one():
    """Also those that come from another process."""
    sharding = gshard.Sharding.of_assignment(np.arange(8).reshape(4, 2)[::-1], 8)
    again = gshard.Sharding.of_assignment(np.arange(8).reshape(4, 2)[::-1], 8)
    assert sharding is again is pickle.loads(pickle.dumps(sharding))
    assert copy.deepcopy(sharding) is sharding
    assert sharding != gshard.Sharding.of_assignment(np.arange(8).reshape(4, 2), 8)


def test_numbers_that_look_alike_stay_apart():
    """Literals of a program are shared; those that differ in a bit, a type or a weak type are not.

    The types of the results say so: a strong float16 would win over the others.
    """

    def fn(x, n):
        zeros = x * 0.0, x * -0.0, x * np.float16(0), n * 1, n * np.int8(1), x + jnp.nan
        return (*zeros, jnp.copysign(1.0, 0.0 * x), jnp.copysign(1.0, -0.0 * x))

    args = jnp.ones(16, jnp.float16), jnp.ones(16, jnp.int8)
    got, wanted = gshard.jit(fn)(*args), jax.jit(fn)(*args)
    for a, b in zip(got, wanted, strict=True):
        assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def test_the_garbage_collector_is_left_as_it_was():
    def refused(x):
        part = gshard.auto_to_manual_spmd_partition(gshard.split(x, 0, 8))
        return gshard.split(part, 0, 8)

    with pytest.raises(ValueError, match="conflicts with the manual region"):
        gshard.jit(refused).lower(np.ones(8, np.float32))
    assert gc.isenabled()
    gc.disable()
    try:
        gshard.jit(lambda x: x + 1).lower(np.ones(8, np.float32))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_looks_at_new_objects_alone_during_a_lowering(monkeypatch):
    monkeypatch.setattr(pipeline, "_FROZEN", threading.Event())
    frozen = []

    def fn(x):
        frozen.append(gc.get_freeze_count())
        return x + 1

    try:
        gc.unfreeze()
        gshard.jit(fn).lower(np.ones(8, np.float32))
        assert gc.get_freeze_count() == 0
        gc.freeze()
        kept = gc.get_freeze_count()
        gshard.jit(lambda x: fn(x)).lower(np.ones(8, np.float32))
        assert gc.get_freeze_count() >= kept - 100  # the user's own stays; some objects died
        monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("counted again"))
        gshard.jit(lambda x: x - 1).lower(np.ones(8, np.float32))
    finally:
        gc.freeze()
    assert all(frozen)


def test_annotations_are_the_identity_elsewhere():
    x = random_array((6, 4))

    def fn(x):
        x = gshard.split(x, 0, 8)
        x = gshard.shard(jnp.sin(gshard.replicate(x)), even_split(2, 1, 2))
        return jnp.sum(x * x)

    wanted = jnp.sum(jnp.sin(x) ** 2)
    np.testing.assert_allclose(fn(x), wanted, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(fn)(x), wanted, rtol=1e-6)
    np.testing.assert_allclose(
        jax.grad(fn)(x), jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2))(x), rtol=1e-5
    )
    batch = random_array((3, 6, 4))
    np.testing.assert_allclose(jax.vmap(fn)(batch), [fn(x) for x in batch], rtol=1e-5)


def test_vmap_leaves_its_dim_open():
    """The user's split stands, and the batch may be split by what follows."""

    def fn(batch):
        rows = jax.vmap(lambda x: gshard.shard(x, np.array([[0], [4]])))(batch)
        return gshard.shard(rows * 2, np.arange(8).reshape(2, 4).T[:, :, None])

    lowered = gshard.jit(fn).lower(random_array((4, 6, 5)))
    assert lowered.collectives == []


def test_the_cotangent_gets_the_annotation():
    def fn(x):
        return jnp.sum(gshard.split(x, 0, 8) ** 2)

    assert (
        str(gshard.jit(jax.grad(fn)).lower(random_array((16,))).out_shardings) == "split dim 0 by 8"
    )


def test_collectives_say_what_why_and_where():
    def fn(x, w):
        x, w = gshard.split(x, 1, 8), gshard.split(w, 0, 8)
        return gshard.replicate(x @ w)  # this line

    source = Path(__file__).read_text().splitlines()
    line = next(i for i, s in enumerate(source, 1) if "# this line" in s)
    lowered = gshard.jit(fn).lower(random_array((4, 16)), random_array((16, 6)))
    (found,) = lowered.collectives
    assert (found.kind, found.count, found.group_size) == ("all_reduce", 1, 8)
    assert found.bytes == 2 * 4 * 6 * 4 * 7 // 8
    assert found.dtype == "float32"
    shown = os.path.relpath(__file__)  # the tests' working folder is above
    assert found.source == f"{shown}:{line}"
    assert "dot_general" in found.reason
    text = lowered.as_text()
    assert f"{shown}:{line}" in text
    assert "psum" in text


def test_collectives_count_the_trips_of_loops():
    def fn(x, w):
        x, w = gshard.split(x, 1, 8), gshard.split(w, 0, 8)
        return jax.lax.scan(lambda c, _: (gshard.split(c @ w, 1, 8), None), x, None, length=5)[0]

    lowered = gshard.jit(fn).lower(random_array((64, 16)), random_array((16, 16)))
    assert {c.count for c in lowered.collectives} == {5}


def test_in_and_out_shardings_are_trees():
    def fn(tree):
        return {"out": gshard.split(tree["x"], 0, 8) @ tree["w"]}

    lowered = gshard.jit(fn).lower({"x": random_array((8, 4)), "w": random_array((4, 2))})
    assert str(lowered.in_shardings[0]["x"]) == "split dim 0 by 8"
    assert str(lowered.in_shardings[0]["w"]) == "replicated"
    assert str(lowered.out_shardings["out"]) == "split dim 0 by 8"


def test_compiled_follows_jax():
    x = random_array((16, 3))
    compiled = gshard.jit(double_rows).lower(x).compile()
    np.testing.assert_array_equal(run(compiled, x), x * 2)
    assert "HloModule" in compiled.as_text()
    assert compiled.cost_analysis()
    assert compiled.memory_analysis().argument_size_in_bytes == 2 * 3 * 4


def test_xla_as_the_partitioner():
    def fn(x, w):
        x = jax.lax.fori_loop(0, 2, lambda i, x: gshard.split(x @ w, 0, 8), gshard.split(x, 0, 8))
        return gshard.replicate(x)

    x, w = random_array((16, 4)), random_array((4, 4))
    step = gshard.jit(fn, partitioner="xla")
    np.testing.assert_allclose(run(step, x, w), x @ w @ w, rtol=1e-5)
    assert {c.kind for c in step.lower(x, w).collectives} == {"all_gather"}


# ---------------------------------------------------------------- errors


def raises_here(match: str):
    """The error names this file, and says `match`."""
    return pytest.raises(ValueError, match=rf"(?s)test_jit\.py:\d+.*{match}")


def test_more_partitions_than_devices():
    with raises_here("9 partitions.*8 devices.*at most 8"):
        gshard.jit(lambda x: gshard.split(x, 0, 9)).lower(random_array((16,)))


def test_unknown_devices():
    with raises_here(r"\[8\].*0 to 7"):
        gshard.jit(lambda x: gshard.shard(x, [0, 8])).lower(random_array((16,)))


@pytest.mark.parametrize(
    ("annotate", "match"),
    [
        (lambda x: gshard.split(x, 2, 4), r"dimension 2 is out of range.*\(4, 4\).*-2 to 1"),
        (lambda x: gshard.split(x, 0, 0), "at least 1"),
        (lambda x: gshard.shard(x, [0, 1]), "rank 1.*rank 2"),
        (lambda x: gshard.shard(x, [[0, 1], [1, 2]]), r"\[1\] are named more than once"),
        (lambda x: gshard.shard(x, [[-1, 0]]), "count from 0"),
        (lambda x: gshard.shard(x, np.zeros((1, 0), int)), "names no device"),
    ],
)
def test_bad_annotations(annotate, match):
    with raises_here(match):
        gshard.jit(annotate).lower(random_array((4, 4)))


def test_device_ids_are_integers():
    with pytest.raises(TypeError, match="integers"):
        gshard.shard(random_array((4,)), [0.5, 1.5])


def test_functions_that_cannot_be_traced():
    with pytest.raises(jax.errors.TracerBoolConversionError, match="test_jit"):
        gshard.jit(lambda x: x if x.sum() > 0 else -x)(random_array((4,)))


def test_bad_settings():
    with pytest.raises(ValueError, match="'gshard' and 'xla'"):
        gshard.jit(double_rows, partitioner="gspmd")
    with pytest.raises(ValueError, match="at least 1"):
        gshard.jit(double_rows, devices=0)
    with pytest.raises(ValueError, match="real devices"):
        gshard.jit(double_rows, devices=64, partitioner="xla").lower(random_array((8, 2)))
