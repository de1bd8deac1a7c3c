"""`gshard.fsdp` and `gshard.tensor_parallel`: shardings, values and bytes, in every library."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gshard


def of_weights(annotate, weights):
    """The shardings of the weights of a function that annotates them, by their paths."""
    lowered = gshard.jit(lambda ws: jax.tree.map(lambda w: w * 2, annotate(ws)), devices=8).lower(
        weights
    )
    return lowered.in_shardings[0]


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def test_fsdp_of_a_training_step_sends_what_the_recipe_does():
    def step(ws, x):
        x = gshard.split(x, 0, 8)
        ws = gshard.fsdp(ws)
        grads = jax.grad(lambda ws: jnp.mean((jnp.tanh(x @ ws["up"]) @ ws["down"]) ** 2))(ws)
        return jax.tree.map(lambda w, g: w - g, ws, grads)

    ws = {"up": struct(64, 128), "down": struct(128, 64)}
    lowered = gshard.jit(step, devices=8).lower(ws, struct(8192, 64))
    kinds = {c.kind: c.total_bytes for c in lowered.collectives}
    each = 2 * 64 * 128 * 4 * 7 // 8
    assert kinds == {"all_gather": each, "reduce_scatter": each}
    assert [lowered.in_shardings[0][k].tiles for k in ("up", "down")] == [(1, 8), (8, 1)]
    rng = np.random.default_rng(0)
    values = {k: rng.normal(size=w.shape).astype("float32") for k, w in ws.items()}
    x = rng.normal(size=(16, 64)).astype("float32")
    wanted = jax.jit(step)(values, x)  # where annotations have no effect
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, gshard.jit(step)(values, x), wanted)


@given(st.lists(st.sampled_from([1, 3, 8, 64, 4096]), min_size=1, max_size=3))
def test_fsdp_splits_the_largest_dim_that_divides(shape):
    (found,) = of_weights(lambda ws: gshard.fsdp(ws), [struct(*shape)])
    fitting = [n for n in shape if n % 8 == 0]
    if np.prod(shape) < 4096 or not fitting:
        assert found.tiles == (1,) * len(shape)
    else:
        assert np.prod(found.tiles) == 8
        assert shape[found.tiles.index(8)] == max(fitting)


def test_tensor_parallel_by_paths_and_over_the_rows_of_a_mesh():
    ws = {"mlp": {"up": struct(64, 128), "down": struct(128, 64)}, "norm": struct(64)}
    rules = {"mlp.up": 1, "*.down": 0}
    found = of_weights(lambda ws: gshard.tensor_parallel(ws, rules), ws)
    assert [found["mlp"][k].tiles for k in ("up", "down")] == [(1, 8), (8, 1)]
    assert found["norm"].tiles == (1,)
    found = of_weights(lambda ws: gshard.tensor_parallel(ws, rules, fsdp=2), ws)
    assert [found["mlp"][k].tiles for k in ("up", "down")] == [(2, 4), (4, 2)]
    # Columns of the mesh of 2 x 4 hold the same rows of `up`, and rows the same columns.
    assert found["mlp"]["up"].devices[0, :, 0].tolist() == [0, 1, 2, 3]
    assert found["mlp"]["down"].devices[:, 0, 0].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"no weight matches 'mlp.upp'; did you mean 'mlp.up'\?"):
        of_weights(lambda ws: gshard.tensor_parallel(ws, {"mlp.upp": 1}), ws)


def test_the_trees_of_libraries_and_logical_names():
    eqx, nn, nnx = (pytest.importorskip(n) for n in ("equinox", "flax.linen", "flax.nnx"))
    model = eqx.nn.MLP(64, 64, 128, 1, key=jax.random.key(0))
    arrays, rest = eqx.partition(model, eqx.is_array)
    found = of_weights(
        lambda ws: eqx.filter(gshard.fsdp(eqx.combine(ws, rest)), eqx.is_array), arrays
    )
    assert found.layers[0].weight.tiles == (8, 1)
    named = nn.with_partitioning(nn.initializers.ones, ("embed", "mlp"))
    boxed = nn.Dense(128, kernel_init=named).init(jax.random.key(0), jnp.ones((1, 64)))
    found = of_weights(lambda ws: gshard.tensor_parallel(ws, ["mlp"]), boxed)
    assert found["params"]["kernel"].value.tiles == (1, 8)
    found = of_weights(gshard.fsdp, nnx.state(nnx.Linear(64, 128, rngs=nnx.Rngs(0))))
    assert found["kernel"].get_value().tiles == (1, 8)
