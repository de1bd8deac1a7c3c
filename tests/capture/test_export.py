"""`jax.export` of a `gshard.jit` function, and calls of the artifact on the user's own mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from tests.oracle import random_array
from tests.shows import shows

X, W, B = random_array((16, 4)), random_array((4, 8)), random_array((13,))


def double(x):
    return gshard.split(x, 0, 8) * 2


def layer(x, w, b):
    """`b` does not divide: it cannot be given in terms of the mesh that `x` and `w` are on."""
    return jnp.tanh(x @ w) * jnp.square(gshard.split(b, 0, 8)).sum()


def close(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-5)


def gradients(fn, *args):
    return jax.jit(jax.grad(lambda *args: fn(*args).sum(), argnums=range(len(args))))(*args)


@shows("jax.export")
@pytest.mark.parametrize("rows", [16, 13])
def test_export(rows):
    exported = jax.export.export(gshard.jit(double))(X[:rows])
    assert exported.nr_devices == 8
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    x = jax.device_put(X[:rows], NamedSharding(mesh, P()))
    np.testing.assert_array_equal(jax.jit(exported.call)(x), X[:rows] * 2)
    assert exported.in_shardings_jax(mesh) == (None,)  # nothing was said in terms of a mesh


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("sizes", [(8,), (4, 2)])
@pytest.mark.parametrize("given", ["arguments", "in_shardings", "set_mesh"])
def test_artifacts_on_the_mesh_of_the_user(given, sizes, kind):
    """In memory and read back, called and differentiated: its one mesh is the user's.

    On explicit axes JAX itself wants the artifact's arguments in the shardings it has.
    """
    mesh = jax.make_mesh(sizes, ("x", "y")[: len(sizes)], axis_types=(kind,) * len(sizes))
    specs = [P("x", None), P(None, "y") if len(sizes) > 1 else P(), P()]
    placed = jax.device_put((X, W, B), tuple(NamedSharding(mesh, s) for s in specs))
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in placed]
    if given == "arguments":
        exported = jax.export.export(gshard.jit(layer))(*placed)
    elif given == "in_shardings":
        shardings = tuple(NamedSharding(mesh, s) for s in specs[:2])
        fn = gshard.jit(layer, in_shardings=(*shardings, None))
        exported = jax.export.export(fn)(*structs)
    else:
        with jax.set_mesh(mesh):
            fn = gshard.jit(layer, in_shardings=(*specs[:2], None))
            exported = jax.export.export(fn)(*structs)
    wanted, wanted_gradients = layer(X, W, B), gradients(layer, X, W, B)
    for artifact in (exported, jax.export.deserialize(exported.serialize(vjp_order=1))):
        close(jax.jit(artifact.call)(*placed), wanted)
        close(gradients(artifact.call, *placed), wanted_gradients)
        shardings = artifact.in_shardings_jax(mesh)
        moved = jax.device_put((X, W, B), shardings)
        close(jax.jit(artifact.call)(*moved), wanted)
        artifact.out_shardings_jax(mesh)


def residual(x, w, v):
    """Products with weights that are split, and sums over the rows, whose number is not known."""
    y = jax.nn.softmax(jnp.tanh(gshard.replicate(x) @ gshard.split(w, 1, 8)), 0)
    y = y @ gshard.split(v, 0, 8)
    return jnp.pad(y, ((1, 0), (0, 0)))[1:] + jnp.arange(x.shape[0])[:, None], y.reshape(-1)


def repeated(x, w, v):
    return jax.lax.scan(lambda x, _: (x + residual(x, w, v)[0], x.mean()), x, length=3)


@pytest.mark.parametrize("fn", [residual, repeated])
def test_symbolic_dims_that_are_not_split(fn):
    w, v = random_array((4, 16)), random_array((16, 4))
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 4"), np.float32)
    exported = jax.export.export(gshard.jit(fn))(rows, w, v)
    assert exported.nr_devices == 8
    artifact = jax.export.deserialize(exported.serialize(vjp_order=1))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, P())
    for count in (3, 8):
        args = (random_array((count, 4)), w, v)
        placed = jax.device_put(args, everywhere)
        close(jax.jit(artifact.call)(*placed), jax.jit(fn)(*args))
        first = [lambda *args, call=call: call(*args)[0] for call in (artifact.call, fn)]
        close(gradients(first[0], *placed), gradients(first[1], *args))


def test_a_symbolic_dim_that_is_split_is_named():
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 4"), np.float32)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("x"))
    for fn, shardings, wanted in (
        (double, None, r"test_export.py:\d+: split\(.*\) splits a dim of the size b"),
        (lambda x: double(x.reshape(-1)), None, r"split\(.*\) splits a dim of the size 4\*b"),
        (lambda x: x, rows, r"^in_shardings: P\('x',?\) splits a dim of the size b"),
    ):
        with pytest.raises(ValueError, match=wanted + ", which is not known"):
            jax.export.export(gshard.jit(fn, in_shardings=shardings))(shape)
    with pytest.raises(ValueError, match=r"has the shape \(b, 4\): jax.export takes it"):
        gshard.jit(double).lower(shape)
