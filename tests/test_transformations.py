"""Functions of `gshard.jit` under JAX's transformations, and inside of other jitted functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import hijax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gshard
from tests.oracle import kinds, random_array
from tests.shows import shows

X, W = random_array((16, 4)), random_array((4, 6))


def loss(x, w):
    return jnp.sum(jnp.tanh(gshard.split(x, 0, 8) @ w) ** 2)


jitted = gshard.jit(loss)


def close(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@shows("jax.grad", "jax.value_and_grad")
def test_gradients():
    close(jax.grad(jitted, 1)(X, W), jax.grad(loss, 1)(X, W))
    close(jax.value_and_grad(jitted, (0, 1))(X, W), jax.value_and_grad(loss, (0, 1))(X, W))


@shows("jax.vmap")
def test_vmap():
    xs = np.stack([X, 2 * X, X - 1])
    close(jax.vmap(jitted, (0, None))(xs, W), jax.vmap(loss, (0, None))(xs, W))
    close(gshard.jit(jax.vmap(jitted, (0, None)))(xs, W), jax.vmap(loss, (0, None))(xs, W))


@shows("jax.jvp", "jax.linearize", "jax.vjp", "jax.hessian")
def test_derivatives():
    close(jax.jvp(jitted, (X, W), (X, W)), jax.jvp(loss, (X, W), (X, W)))
    close(jax.linearize(jitted, X, W)[1](X, W), jax.jvp(loss, (X, W), (X, W))[1])
    close(jax.vjp(jitted, X, W)[1](1.0), jax.vjp(loss, X, W)[1](1.0))
    close(jax.hessian(jitted, 1)(X, W), jax.hessian(loss, 1)(X, W))


@shows("jax.checkpoint")
def test_checkpoint():
    close(jax.grad(jax.checkpoint(jitted), 1)(X, W), jax.grad(loss, 1)(X, W))


@shows("jax.eval_shape", "jax.make_jaxpr")
def test_abstract_evaluation():
    assert jax.eval_shape(jitted, X, W).shape == ()
    assert jitted.eval_shape(X, W).dtype == jnp.float32
    assert jax.make_jaxpr(jitted)(X, W).out_avals[0].shape == ()


@shows("lax.scan", "lax.cond", "lax.while_loop")
def test_inside_of_control_flow():
    total, _ = lax.scan(lambda c, x: (c + jitted(x, W), None), 0.0, np.stack([X, X]))
    close(total, 2 * loss(X, W))
    close(lax.cond(True, jitted, lambda x, w: 0.0, X, W), loss(X, W))
    close(lax.fori_loop(0, 3, lambda _, c: c + jitted(X, W), 0.0), 3 * loss(X, W))


@shows("inside jax.jit")
def test_inside_of_jax_jit_annotations_are_constraints():
    outer = jax.jit(lambda x, w: 2 * jitted(x, w))
    close(outer(X, W), 2 * loss(X, W))
    text = outer.lower(X, W).as_text()
    assert "sharding_constraint" in text or "@Sharding" in text
    assert "all-reduce" in outer.lower(X, W).compile().as_text(), "XLA did not partition it"


@shows("inside gshard.jit")
def test_inside_of_gshard_jit_annotations_stay():
    outer = gshard.jit(lambda x, w: 2 * jitted(x, w))
    close(outer(X, W), 2 * loss(X, W))
    assert kinds(outer.lower(X, W)) == kinds(jitted.lower(X, W)) == {"all_reduce": 1}


@shows("gshard.jit of a gradient of gshard.jit")
def test_gradients_are_partitioned_by_an_outer_gshard_jit():
    outer = gshard.jit(jax.grad(jitted, 1))
    close(outer(X, W), jax.grad(loss, 1)(X, W))
    plain = gshard.jit(jax.grad(loss, 1))
    assert kinds(outer.lower(X, W)) == kinds(plain.lower(X, W))


@shows("inside eqx.filter_jit", "inside nnx.jit")
def test_inside_of_other_libraries_jits():
    eqx = pytest.importorskip("equinox")
    nnx = pytest.importorskip("flax.nnx")
    close(eqx.filter_jit(lambda x, w: jitted(x, w))(X, W), loss(X, W))
    close(nnx.jit(lambda x, w: jitted(x, w))(X, W), loss(X, W))
    close(eqx.filter_grad(lambda w: jitted(X, w))(W), jax.grad(loss, 1)(X, W))


@pytest.mark.parametrize("outer", [jax.jit, lambda fn: fn])
def test_annotations_inside_of_shard_map_are_refused(outer):
    """Every device has its own values there."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    regions = {"in_specs": P("x"), "out_specs": P("x")}
    annotated = gshard.jit(lambda x: gshard.split(x, 0, 2) * 2)
    with pytest.raises(ValueError, match=r"test_transformations.py:\d+: split\(.*jax.shard_map"):
        outer(jax.shard_map(annotated, mesh=mesh, **regions))(np.ones((16, 2), np.float32))
    plain = jax.shard_map(gshard.jit(lambda x: x * 2), mesh=mesh, **regions)
    np.testing.assert_array_equal(outer(plain)(np.ones((16, 2), np.float32)), 2)


@shows("jax.shard_map inside")
def test_manual_regions_of_jax():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    P = jax.P

    def body(x, w):
        total = lax.psum(x @ w, "model")
        return total + lax.axis_index("data").astype(x.dtype), lax.pmax(x, ("data", "model"))

    def fn(x, w):
        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P("data", "model"), P("model", None)),
            out_specs=(P("data"), P()),
        )
        return mapped(jnp.sin(x), w)

    x, w = random_array((6, 8)), random_array((8, 5))
    close(gshard.jit(fn)(x, w), jax.jit(fn)(x, w))
    assert kinds(gshard.jit(fn).lower(x, w)) == {"all_reduce": 2}


def test_a_ragged_exchange_of_jax():
    """It is the user's, so it stays; how much is sent only the data know, at most the operand."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def fn(x, out, *where):
        def body(x, out, *where):
            return lax.ragged_all_to_all(x, out, *where, axis_name="model")

        rows = jax.P(("data", "model"))
        return jax.shard_map(body, mesh=mesh, in_specs=(rows,) * 6, out_specs=rows)(x, out, *where)

    x, where = jnp.zeros((64, 5)), [jnp.ones(32, jnp.int32)] * 4
    (exchange,) = gshard.jit(fn).lower(x, x, *where).collectives  # XLA has none for CPUs
    assert (exchange.kind, exchange.group_size) == ("all_to_all", 4)
    assert exchange.bytes == 8 * 5 * 4 * 3 // 4


def test_functions_with_other_leaves_inside_of_traces():
    step = gshard.jit(lambda tree, x: tree["f"](gshard.split(x, 0, 8)) * tree["scale"])
    tree = {"f": jnp.tanh, "scale": 2.0}
    close(jax.jit(lambda x: step(tree, x))(X), 2 * np.tanh(X))


def test_traced_values_do_not_leak():
    with jax.checking_leaks():
        close(gshard.jit(lambda x: gshard.split(x, 0, 8) + 1)(X), X + 1)
        jax.grad(lambda x: jitted(x, W))(X)


class Tripled(getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive):  # the name before 0.11
    """An operator that says itself what it is in smaller ones, as `jax.lax.custom_root` does."""

    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {}
        super().__init__()

    def expand(self, x):
        return 3.0 * jnp.sum(x, axis=0) + jnp.sin(x)

    def vjp_fwd(self, nonzero, x):
        return self(x), x

    def vjp_bwd_retval(self, x, grad):
        return (3.0 * jnp.sum(grad, axis=0) + jnp.cos(x) * grad,)


@shows("operators of jax.experimental.hijax, jax.lax.custom_root among them")
def test_operators_that_say_what_they_are_in_smaller_ones():
    def fn(x):
        x = gshard.split(x, 1, 8)
        return jax.value_and_grad(lambda x: jnp.sum(Tripled(jax.typeof(x))(x) ** 2))(x)

    x = random_array((3, 16))
    assert kinds(gshard.jit(fn).lower(x)) == {"all_reduce": 1}  # of the scalar
    close(gshard.jit(fn)(x), jax.jit(fn)(x))
