"""What cannot be split: run whole, run once, or refused with the user's line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import gshard
from tests.oracle import check, check_grad, even_split, random_array, sent


def test_a_pure_callback_sees_the_whole():
    x = random_array((13, 2))

    def fn(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda v: np.asarray(v)[::-1] - np.mean(v), shape, x)

    low = check(fn, x, devices=3, inputs=[even_split(2, 0, 3)], outputs=[even_split(2, 0, 3)])
    assert "pure_callback needs replicated operands" in low.collectives[0].reason


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


def test_ordered_effects_happen_once_and_in_order():
    seen = []

    def note(k, v):
        seen.append(int(k))
        return np.float32(v)

    def fn(x):
        def step(c, k):
            shape = jax.ShapeDtypeStruct((), np.float32)
            return io_callback(note, shape, k, c + x.sum(), ordered=True), None

        return lax.scan(step, 0.0, jnp.arange(5))[0]

    got = gshard.jit(lambda x: fn(gshard.split(x, 0, 8)))(np.ones(8, np.float32))
    assert got == 40
    assert seen == [0, 1, 2, 3, 4]


def references(x):
    """References that are read, written and added to, also in a loop and across a jit."""
    table, total = jax.new_ref(x), jax.new_ref(jnp.zeros(x.shape[1:]))
    table[0] = x[1] + 1

    def step(i, _):
        table[i] = table[i - 1] * 2 + x[i]
        total[...] += table[i]

    lax.fori_loop(1, 5, step, None)
    jax.jit(lambda: table.__setitem__((slice(6, 8), 0), jnp.array([3.0, 4.0])))()
    return table[...], total[...], jax.ref.freeze(total)


@pytest.mark.parametrize("dim", [0, 1])
def test_references_are_values(dim):
    x = random_array((13, 8))
    low = check(references, x, inputs=[even_split(2, dim, 8)], exact=True)
    if dim == 1:
        assert sent(low) == 0, low.collectives


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


@pytest.mark.parametrize("rows", [16, 13])
def test_inspected_shardings_are_the_plans(rows):
    """Also of values that are in a loop; nothing is moved."""
    seen = []

    def fn(x):
        y = gshard.split(x, 0, 8) * 2
        jax.debug.inspect_array_sharding(y, callback=seen.append)

        def body(carried, _):
            jax.debug.inspect_array_sharding(carried, callback=seen.append)
            return carried + 1, None

        return jax.lax.scan(body, y, length=3)[0]

    x, step = random_array((rows, 4)), gshard.jit(fn)
    result = step(x)
    np.testing.assert_allclose(np.asarray(result.logical() if rows == 13 else result), x * 2 + 3)
    assert step.lower(x).collectives == []
    assert len(seen) == 2
    for sharding in seen:
        if rows == 13:
            assert sharding == result.sharding
        else:
            assert sharding.is_equivalent_to(result.sharding, 2)
