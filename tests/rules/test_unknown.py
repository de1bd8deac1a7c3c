"""A primitive without a rule: whole on every device, listed, and an error where one wants it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

import gshard
from tests.oracle import check, even_split, kinds, random_array, sent


def new_primitive(name, fn, implementation=None, **settings):
    """A primitive that XLA knows and gshard does not."""
    primitive = Primitive(name)
    primitive.multiple_results = settings.get("multiple_results", False)
    primitive.def_abstract_eval(
        lambda *avals, **params: jax.tree.map(
            lambda s: ShapedArray(s.shape, s.dtype),
            jax.eval_shape(lambda *args: fn(*args, **params), *avals),
        )
    )
    mlir.register_lowering(
        primitive, mlir.lower_fun(fn, multiple_results=primitive.multiple_results)
    )
    if implementation:
        primitive.def_impl(implementation)
    return primitive


reversed_sum_p = new_primitive("reversed_sum", lambda x, y: x[::-1] + y)
two_p = new_primitive(
    "sorted_and_summed", lambda x: [jnp.sort(x, axis=0), x.sum(0)], multiple_results=True
)
scaled_p = new_primitive(
    "scaled", lambda x, *, by: x * by, implementation=lambda x, *, by: jnp.multiply(x, by)
)
on_host_p = new_primitive(
    "on_host", lambda x: x + 1, implementation=lambda x: np.asarray(x) + np.float32(1)
)


def without_a_table(x):
    raise ValueError("the table of scales is empty\ncall make_table first")


table_p = new_primitive("scaled_by_table", lambda x: x * 3, implementation=without_a_table)


def test_the_error_of_an_implementation_is_shown():
    """It is the user's own code, and the reason why the primitive was not expanded."""
    low = check(table_p.bind, random_array((8, 3)), inputs=[even_split(2, 0, 8)])
    (gather,) = low.collectives
    wanted = "cannot be traced: ValueError: the table of scales is empty)"
    assert wanted in gather.reason
    with pytest.raises(NotImplementedError, match=r"scaled_by_table.*the table of scales is empty"):
        gshard.jit(table_p.bind, strict=True)(random_array((8, 3)))
    low = check(reversed_sum_p.bind, *[random_array((8, 3))] * 2, inputs=[even_split(2, 0, 8)])
    assert not any("traced" in c.reason for c in low.collectives)


def test_an_unknown_primitive_runs_whole_and_says_so():
    x, y = random_array((13, 3)), random_array((13, 3), seed=1)

    def fn(x, y):
        return reversed_sum_p.bind(x, y) * 2

    low = check(fn, x, y, inputs=[even_split(2, 0, 8)], outputs=[even_split(2, 0, 8)], exact=True)
    (gather,) = low.collectives
    assert gather.kind == "all_gather"
    assert "test_unknown.py:" in gather.source
    for part in ("reversed_sum has no rule", "replicated on every device", "gshard.register_rule"):
        assert part in gather.reason


def test_results_of_an_unknown_primitive_may_be_many():
    low = check(lambda x: two_p.bind(x), random_array((8, 5)), inputs=[even_split(2, 1, 5)])
    assert kinds(low) == {"all_gather": 1}  # of 5 tiles on 8 devices: less than a sum would send


def test_strict_makes_it_an_error():
    jitted = gshard.jit(lambda x: two_p.bind(gshard.split(x, 0, 8)), strict=True)
    with pytest.raises(NotImplementedError, match=r"test_unknown.py:\d+: .*'sorted_and_summed'.*"):
        jitted.lower(np.ones((8, 2), np.float32))
    ordinary = gshard.jit(lambda x: jnp.sin(gshard.split(x, 0, 8)), strict=True)
    np.testing.assert_allclose(ordinary(np.ones(8, np.float32)), np.sin(np.ones(8, np.float32)))


def test_in_loops_and_branches():
    x = random_array((13, 3))

    def fn(x):
        def step(c, _):
            return lax.cond(c[0, 0] > 0, lambda c: reversed_sum_p.bind(c, x), jnp.sin, c), c[0]

        return lax.scan(step, x, length=3)

    low = check(fn, x, inputs=[even_split(2, 0, 8)])
    assert any("reversed_sum has no rule" in c.reason for c in low.collectives)


def test_what_is_python_underneath_is_partitioned_like_python():
    x = random_array((13, 3))
    low = check(lambda x: scaled_p.bind(x, by=3.0), x, inputs=[even_split(2, 0, 8)], exact=True)
    assert sent(low) == 0
    gshard.jit(lambda x: scaled_p.bind(x, by=3.0), strict=True).lower(x)


def test_python_that_calls_itself_is_unfolded():
    """As solvers that call others do; one that calls the very same would never end."""

    def again(x, *, times):
        return repeated_p.bind(x + 1, times=times - 1) if times else x

    repeated_p = new_primitive("repeated", lambda x, *, times: x + times, implementation=again)
    endless_p = new_primitive("endless", jnp.sin, implementation=lambda x: endless_p.bind(x))
    x, split = random_array((13, 3)), even_split(2, 0, 8)
    assert sent(check(lambda x: repeated_p.bind(x, times=3), x, inputs=[split])) == 0
    low = check(endless_p.bind, x, inputs=[split])
    assert "endless has no rule" in low.collectives[0].reason


def test_python_that_cannot_be_traced_runs_whole():
    low = check(on_host_p.bind, random_array((13, 3)), inputs=[even_split(2, 0, 8)], exact=True)
    assert "on_host has no rule" in low.collectives[0].reason


def test_in_a_manual_region_it_runs_on_what_each_device_has():
    x = random_array((16, 3))

    def fn(x):
        assigned = np.arange(8).reshape(8, 1)
        part = gshard.auto_to_manual_spmd_partition(gshard.shard(x, assigned))
        return gshard.manual_to_auto_spmd_partition(reversed_sum_p.bind(part, part), assigned)

    got = gshard.jit(fn, strict=True)(x)
    tiles = x.reshape(8, 2, 3)
    np.testing.assert_array_equal(got, (tiles[:, ::-1] + tiles).reshape(16, 3))
    assert sent(gshard.jit(fn).lower(x)) == 0


def nests(x):
    return [
        jax.vmap(lambda v: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + abs(v) + 1, v))(x),
        jax.vmap(
            lambda v: lax.while_loop(
                lambda c: c[0] < 5,
                lambda c: (
                    c[0] + 1,
                    lax.while_loop(lambda d: d < 20, lambda d: d * 2 + 1, c[1] + abs(v).max()),
                ),
                (v[0].astype(jnp.int32), v[1]),
            )
        )(x),
        jax.vmap(lambda v: lax.cond(v[0] > 0, lambda v: v * 2, lambda v: -v, v))(x),
        jax.vmap(lambda v: lax.fori_loop(0, v[0].astype(jnp.int32), lambda i, c: c + i, v))(x),
    ]


def test_vmapped_loops_go_on_while_one_does():
    x = random_array((13, 3)) * 4
    low = check(nests, x, inputs=[even_split(2, 0, 8)])
    assert set(kinds(low)) == {"all_reduce"}  # one bit: does any member go on?
    assert all(c.bytes <= 2 for c in low.collectives)


def test_collectives_over_the_axis_of_a_vmap_are_reductions():
    """What a batch norm does: the members of a batch look at one another."""
    x = random_array((13, 3))

    def member(v):
        mean = lax.pmean(v, "batch")
        gathered = lax.all_gather(v, "batch")
        return (v - mean) / (lax.pmax(v, "batch") - lax.pmin(v, "batch")), gathered[0] * v

    low = check(jax.vmap(member, axis_name="batch"), x, inputs=[even_split(2, 0, 8)])
    assert "all_reduce" in kinds(low)
    assert all(c.bytes <= 2 * 3 * 4 for c in low.collectives), low.collectives  # a row of 3


def test_platforms_are_told_apart():
    def fn(x):
        return lax.platform_dependent(x, cpu=lambda x: x + 1, tpu=lambda x: x - 1, default=jnp.sin)

    def other(x):
        return lax.platform_dependent(x, tpu=lambda x: x - 1, default=jnp.sin) + jnp.linalg.det(x)

    x = random_array((8, 8))
    assert sent(check(fn, x, inputs=[even_split(2, 0, 8)], exact=True)) == 0
    check(other, x, inputs=[even_split(2, 0, 8)], rtol=1e-4, atol=1e-4)
    check(lambda x: jnp.diag(x), random_array((13,)), inputs=[even_split(1, 0, 8)], exact=True)
    check(lambda x: jnp.diag(x), random_array((13, 13)), inputs=[even_split(2, 0, 8)], exact=True)
