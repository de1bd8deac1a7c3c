"""Results that do not divide are arrays wherever a `jax.Array` is one."""

import contextlib
import copy
import pickle
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

import gshard
from tests.oracle import kinds, random_array, run
from tests.shows import shows

X = random_array((13, 3))


@pytest.fixture(scope="module")
def uneven():
    made = gshard.jit(lambda x: gshard.split(x, 0, 8) * 2)(X)
    assert isinstance(made, gshard.UnevenArray)
    return made


WANTED = X * 2

CASES = {
    "sum": lambda y: jnp.sum(y),
    "sin": lambda y: jnp.sin(y),
    "equal": lambda y: y == y,
    "rows": lambda y: jnp.stack(list(y)),
    "jit": lambda y: jax.jit(lambda a: a + 1)(y),
    "zeros_like": lambda y: jnp.zeros_like(y) + y,
    "left": lambda y: 2 - y,
    "matmul": lambda y: y.T @ y,
    "numpy": lambda y: np.add(y, 1),
    "index": lambda y: y[3:7, 1],
    "at": lambda y: y.at[0].set(1.0),
    "method": lambda y: y.mean(axis=0),
    "astype": lambda y: y.astype(jnp.bfloat16).astype(jnp.float32),
    "concatenate": lambda y: jnp.concatenate([y, y]),
    "where": lambda y: jnp.where(y > 1, y, 0),
    "grad": lambda y: jax.grad(lambda a: jnp.sum(a**2))(y),
    "vmap": lambda y: jax.vmap(jnp.sum)(y),
    "scan": lambda y: lax.scan(lambda c, r: (c + r.sum(), None), 0.0, y)[0],
    "device_put": lambda y: jax.device_put(y, jax.devices()[1]),
    "device_get": lambda y: jax.device_get(y),
    "pickle": lambda y: pickle.loads(pickle.dumps(y)),
    "deepcopy": lambda y: copy.deepcopy(y),
    "tree": lambda y: jax.tree.map(jnp.add, {"a": y}, {"a": y})["a"],
    "reversed": lambda y: jnp.stack(list(reversed(y))),
    "asarray": lambda y: jnp.asarray(y),
}


@shows("uneven results are arrays")
@pytest.mark.parametrize("name", CASES)
def test_works_like_an_array(name, uneven):
    got, wanted = CASES[name](uneven), CASES[name](jnp.asarray(WANTED))
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-6)
    assert got.dtype == wanted.dtype


def test_what_it_says_about_itself(uneven):
    assert isinstance(uneven, jax.Array)
    assert (uneven.shape, uneven.ndim, uneven.size, len(uneven)) == ((13, 3), 2, 39, 13)
    assert uneven.nbytes == WANTED.nbytes
    assert uneven.is_fully_addressable
    assert not uneven.is_fully_replicated
    assert not uneven.sharding.is_fully_replicated
    assert str(uneven.tiling) == "split dim 0 by 8"
    assert repr(uneven.sharding) == "UnevenSharding(split dim 0 by 8)"
    assert repr(uneven).startswith("UnevenArray([[")
    assert str(uneven) == f"{uneven}" == str(np.asarray(uneven))
    with pytest.raises(TypeError):
        hash(uneven)


def test_arrays_like_it(uneven):
    """JAX makes them by its sharding, under a mesh and without."""
    for mesh in (None, Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))):
        with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
            made = jnp.ones_like(uneven)
            np.testing.assert_array_equal(made + 1, np.full((13, 3), 2, np.float32))
            np.testing.assert_array_equal(uneven + made, WANTED + 1)
            step = gshard.jit(lambda x, y: gshard.split(x, 0, 8) + y)
            np.testing.assert_array_equal(np.asarray(step(uneven, made)), WANTED + 1)


ON_TILES = {
    "with a number": lambda y: 3 - y * 2.5,
    "with itself": lambda y: y * y + y,
    "with a scalar": lambda y: y / jnp.float32(4) + np.float32(1),
    "compared": lambda y: (y > 1) & (y != y.astype(jnp.int32)),
    "powers": lambda y: abs(-y) ** 2 % 3 // 1,
    "integers": lambda y: (y.astype(jnp.int32) << 2) ^ 5,
    "narrower": lambda y: y.astype(jnp.bfloat16) * 2,
    "rounded": lambda y: round((y / 3).round(1)),
}


@pytest.mark.parametrize("name", ON_TILES)
def test_operators_on_elements_stay_split(name, uneven):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = ON_TILES[name](uneven)
    wanted = ON_TILES[name](jnp.asarray(WANTED))
    assert isinstance(got, gshard.UnevenArray)
    assert got.tiling == uneven.tiling
    assert (got.dtype, got.weak_type) == (wanted.dtype, wanted.weak_type)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


def test_what_they_make_is_taken_as_it_is(uneven):
    step = gshard.jit(lambda x: gshard.split(x, 0, 8) + 1)
    made = uneven * 2
    (placed,) = step.lower(made).compile().place(made)
    assert placed.stack is made.stack
    assert step.lower(made).collectives == []


def test_a_gather_is_told_once_with_the_line(uneven):
    with pytest.warns(
        gshard.tensors.uneven.GatheredWarning, match=r"shape \(13, 3\).*156 bytes"
    ) as told:
        [jnp.sin(uneven) for _ in range(3)]  # this line
    (warning,) = told
    source = Path(__file__).read_text().splitlines()
    assert Path(warning.filename).resolve() == Path(__file__)
    assert "# this line" in source[warning.lineno - 1]
    with pytest.warns(gshard.tensors.uneven.GatheredWarning):
        uneven + X  # nothing is known about how X is split


@pytest.mark.parametrize("read", [np.from_dlpack, jnp.from_dlpack])
def test_other_libraries_get_the_gathered_value(uneven, read, monkeypatch):
    monkeypatch.setattr("gshard.graph.source._warned", set())  # once for each line
    with pytest.warns(gshard.tensors.uneven.GatheredWarning):
        got = read(uneven)
    np.testing.assert_array_equal(got, uneven)


def test_moves_nothing_between_calls(uneven):
    step = gshard.jit(lambda x: gshard.split(x, 0, 8) + 1)
    lowered = step.lower(uneven)
    assert lowered.collectives == []
    (placed,) = lowered.compile().place(uneven)
    assert placed.stack is uneven.stack
    np.testing.assert_array_equal(np.asarray(step(uneven)), WANTED + 1)


def test_optimizers_and_serialization(uneven, tmp_path):
    optax = pytest.importorskip("optax")
    serialization = pytest.importorskip("flax.serialization")
    checkpoint = pytest.importorskip("orbax.checkpoint")
    state = optax.adam(1e-3).init({"w": uneven})
    assert state[0].mu["w"].shape == (13, 3)
    data = serialization.to_bytes({"w": uneven})
    np.testing.assert_array_equal(serialization.from_bytes({"w": uneven}, data)["w"], WANTED)
    with checkpoint.StandardCheckpointer() as saver:
        saver.save(tmp_path / "saved", {"w": uneven})
        saver.wait_until_finished()
        np.testing.assert_array_equal(saver.restore(tmp_path / "saved")["w"], WANTED)


def test_an_array_in_other_tiles_is_brought_into_those_of_the_program(uneven):
    """Stacks of the same shape, of which the devices hold other tiles."""
    turned = np.arange(8)[::-1, None]
    program = gshard.jit(lambda y: gshard.shard(y, turned) + 1)
    compiled = program.lower(jax.ShapeDtypeStruct(X.shape, X.dtype)).compile()
    np.testing.assert_array_equal(compiled(uneven), WANTED + 1)
    np.testing.assert_array_equal(compiled(compiled(uneven)), WANTED + 1 + 1)


def test_devices_in_another_order():
    """A result of a function that has the devices the other way round keeps its tiles' places."""
    x = random_array((13, 3))
    made = gshard.jit(lambda x: gshard.split(x, 0, 8), devices=jax.devices()[::-1])(x)
    assert isinstance(made, gshard.UnevenArray)
    step = gshard.jit(lambda x: gshard.split(x, 0, 8) + 1)
    np.testing.assert_array_equal(np.asarray(run(step, made)), x + 1)
    assert kinds(step.lower(made)) == {"collective_permute": 1}
