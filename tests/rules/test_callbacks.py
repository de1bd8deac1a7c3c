"""What cannot be split: run whole, run once, or refused with the user's line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import gshard
from tests.oracle import check, check_grad, even_split, random_array, sent


def test_a_pure_callback_sees_the_whole():
    x = random_array((13, 2))

    def fn(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda v: np.asarray(v)[::-1] - np.mean(v), shape, x)

    low = check(fn, x, devices=3, inputs=[even_split(2, 0, 3)], outputs=[even_split(2, 0, 3)])
    assert "pure_callback sees whole arrays only" in low.collectives[0].reason


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.bool_])
def test_an_effect_happens_once(dtype):
    x = random_array((8,), dtype)
    seen = []

    def note(v):
        seen.append(np.asarray(v))
        return np.asarray(v)

    def fn(x):
        return io_callback(note, jax.ShapeDtypeStruct(x.shape, x.dtype), gshard.split(x, 0, 8))

    got = gshard.jit(fn)(x)
    np.testing.assert_array_equal(got, x)
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0], x)
    reasons = [c.reason for c in gshard.jit(fn).lower(x).collectives]
    assert any("runs on the first device only" in r for r in reasons)


def test_debug_print_prints_once(capfd):
    def fn(x):
        jax.debug.print("sum {}", x.sum())
        return x * 2

    gshard.jit(lambda x: fn(gshard.split(x, 0, 8)))(np.ones(8, np.float32))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("sum 8.0") == 1


def refusals():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))

    def ordered(x):
        return io_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)

    def mapped(x):
        return jax.shard_map(lambda v: lax.psum(v, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())(
            x
        )

    def reference(x):
        ref = jax.new_ref(x)
        ref[0] = 1.0
        return ref[...]

    return {"io_callback": ordered, "shard_map": mapped, "ref": reference}


@pytest.mark.parametrize("name", ["io_callback", "shard_map", "ref"])
def test_refusals_name_the_primitive_and_the_line(name):
    fn = refusals()[name]
    with pytest.raises(NotImplementedError, match=r"test_outside.py:\d+: .*" + name):
        gshard.jit(lambda x: fn(gshard.split(x, 0, 8))).lower(np.ones(8, np.float32))


def test_ragged_dot():
    x, w = random_array((12, 5)), random_array((3, 5, 7))
    sizes = np.array([3, 5, 4], np.int32)

    def fn(x, w):
        return lax.ragged_dot(x, w, sizes)

    for split_x, split_w in (
        (None, even_split(3, 2, 2)),
        (even_split(2, 1, 2), even_split(3, 1, 2)),
        (even_split(2, 0, 2), None),
    ):
        check(fn, x, w, devices=2, inputs=[split_x, split_w], rtol=1e-4)
    low = check(
        fn, x, w, devices=2, inputs=[None, even_split(3, 2, 2)], outputs=[even_split(2, 1, 2)]
    )
    assert sent(low) == 0
    check_grad(fn, x, w, argnums=(0, 1), devices=2, inputs=[None, even_split(3, 2, 2)])


def test_custom_vmap_and_composite_are_their_bodies():
    @jax.custom_batching.custom_vmap
    def twice(x):
        return x * 2

    twice.def_vmap(lambda size, batched, x: (x * 2, True))
    x = random_array((13, 3))
    low = check(
        lambda x: twice(x) + lax.composite(jnp.sin, "my.sin")(x), x, inputs=[even_split(2, 0, 8)]
    )
    assert sent(low) == 0
