"""`jax.shard_map` over some axes of a mesh, the others partitioned: `jax.jit`'s values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gshard
from tests.oracle import assert_same, kinds, random_array, run
from tests.shows import shows

P = PartitionSpec
X, W = random_array((8, 12)), random_array((12, 16), seed=1)
ORDERS = {"as they count": range(8), "another": [3, 1, 0, 2, 7, 5, 6, 4]}


def mesh_of(order=range(8), shape=(2, 4)) -> Mesh:
    return Mesh(np.array(jax.devices())[list(order)].reshape(shape), ("x", "y"))


def column_sums(x):
    """A loop with a collective in its body."""
    start = lax.pcast(jnp.zeros(x.shape[1]), ("x",), to="varying")
    return lax.scan(lambda c, row: (c + lax.psum(row, "x"), c), start, x)[1]


def split_inside(x):
    """A constraint of what is made in the region, on an axis that is not manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P(None, "y")))


def nested(x):
    """A region over the other axis in this one."""
    inner = jax.shard_map(
        lambda v: v + lax.psum(v, "y") + lax.axis_index("y"),
        in_specs=P(None, "y"),
        out_specs=P(None, "y"),
        axis_names={"y"},
    )
    return inner(x) * lax.psum(x, "x") + lax.axis_index("x")


# A body, the specs of its argument and result, the axes, and the collectives that it takes.
BODIES = {
    "each its own": (lambda x: x * 2 + lax.axis_index("x"), P("x"), P("x"), "x", set()),
    "psum": (lambda x: lax.psum(x, "x"), P("x"), P(), "x", {"all_reduce"}),
    "pmax": (lambda x: lax.pmax(x.max(), "x"), P("x"), P(), "x", {"all_reduce"}),
    "pmean": (lambda x: x - lax.pmean(x, "y"), P(None, "y"), P(None, "y"), "y", {"all_reduce"}),
    "ppermute": (
        lambda x: lax.ppermute(x, "y", [(i, (i + 1) % 4) for i in range(4)]),
        P("y"), P("y"), "y", {"collective_permute"},
    ),
    "ppermute of some": (
        lambda x: lax.ppermute(x, "y", [(0, 2), (1, 3)]),
        P("y"), P("y"), "y", {"collective_permute"},
    ),
    "all_gather": (
        lambda x: lax.all_gather(x, "x", tiled=True), P("x"), P("x"), "x", {"all_to_all"},
    ),
    "all_to_all": (
        lambda x: lax.all_to_all(x, "x", 1, 0, tiled=True), P("x"), P("x"), "x", {"all_to_all"},
    ),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True),
        P("x"), P("x"), "x", {"all_to_all"},
    ),
    "a loop": (column_sums, P("x"), P("x"), "x", {"all_reduce"}),
    "a constraint": (split_inside, P("x"), P("x"), "x", set()),
    "nested": (nested, P("x"), P("x"), "x", {"all_reduce"}),
}  # fmt: skip


@shows("jax.shard_map over some axes of a mesh")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", BODIES)
def test_bodies(name, order):
    body, into, out_of, axis, collectives = BODIES[name]
    mesh = mesh_of(ORDERS[order])

    def fn(x):
        return jax.shard_map(body, mesh=mesh, in_specs=into, out_specs=out_of, axis_names={axis})(x)

    step = gshard.jit(fn)
    assert_same(run(step, X), jax.jit(fn)(X))
    assert set(kinds(step.lower(X))) == collectives


def product(mesh, axes=frozenset({"x"})):
    """A product of matrices whose inner dim is cut by hand."""
    return jax.shard_map(
        lambda x, w: lax.psum(jnp.tanh(x @ w), "x"),
        mesh=mesh,
        in_specs=(P(None, "x"), P("x")),
        out_specs=P(),
        axis_names=axes,
    )


def test_gradients():
    def loss(w, x):
        return jnp.sum(product(mesh_of())(x, w) ** 2)

    step = gshard.jit(jax.value_and_grad(loss))
    wanted = jax.jit(jax.value_and_grad(loss))(W, X)
    assert_same(run(step, W, X, rtol=1e-4), wanted, rtol=1e-4)


def test_the_other_axis_is_partitioned_inside():
    """What is split over the other axis outside stays so in the region: nothing is gathered."""
    mesh = mesh_of()
    x = jax.device_put(X, NamedSharding(mesh, P("y", "x")))
    w = jax.device_put(W, NamedSharding(mesh, P("x")))
    step = gshard.jit(product(mesh))
    assert_same(run(step, x, w), jax.jit(product(mesh))(X, W))
    lowered = step.lower(x, w)
    assert kinds(lowered) == {"all_reduce": 1}
    assert lowered.out_shardings.tiles == (4, 1)
    assert lowered.collectives[0].bytes == X.shape[0] // 4 * W.shape[1] * 4


def test_two_of_three_axes():
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    mesh = Mesh(devices, ("x", "y", "z"))

    def body(x):
        return x + lax.psum(x, ("x", "z")) * lax.axis_index("z")

    def fn(x):
        spec = P(("z", "x"))
        return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"x", "z"})(
            x
        )

    assert_same(run(gshard.jit(fn), X), jax.jit(fn)(X))
