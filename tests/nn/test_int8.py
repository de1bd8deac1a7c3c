"""Weights in 8 bits inside the products of decoding, beside the numbers that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gshard.mt.decoding.on_device import beam_search
from gshard.mt.decoding.search import BeamConfig
from gshard.mt.training.loading import in_int8
from gshard.mt.training.weights import named, summed_axes
from gshard.nn.int8 import Int8, looked_up, product
from tests.nn import models

EQUATIONS = {  # of the layers, with the axes of the weight that they sum over
    "BLM,MH->BLH": (-2,),
    "BTM,MND->BTND": (-3,),
    "BTNU,NUM->BTM": (-3, -2),
    "EGCM,EMH->EGCH": (-2,),
    "EGCH,EHM->GECM": (-2,),
    "BLM,VM->BLV": (-1,),
}


@pytest.mark.slow
@given(
    equation=st.sampled_from(sorted(EQUATIONS)),
    sizes=st.lists(st.integers(1, 5), min_size=8, max_size=8),
    seed=st.integers(0, 99),
)
def test_a_product_is_that_of_the_numbers(equation, sizes, seed):
    rng = np.random.default_rng(seed)
    operands = equation.split("->")[0].split(",")
    size = dict(zip(sorted(set("".join(operands))), sizes, strict=False))
    x, w = (rng.standard_normal([size[dim] for dim in dims]) for dims in operands)
    x, rounded = jnp.float32(x), Int8.of(jnp.float32(w), EQUATIONS[equation])
    found = jax.jit(lambda x, w: product(equation, x, w))(x, rounded)
    np.testing.assert_allclose(
        found, np.einsum(equation, x, rounded.astype("float32")), rtol=1e-5, atol=1e-5
    )


@given(seed=st.integers(0, 99), axes=st.sampled_from([(-1,), (-2,), (-3, -2)]))
def test_rounded_as_on_a_cpu(seed, axes):
    array = np.random.default_rng(seed).standard_normal((3, 4, 5)).astype(np.float32)
    array[:, :, 0] = 0  # a channel without numbers has a scale too
    found, want = Int8.of(jnp.asarray(array), axes), Int8.of(array, axes)
    np.testing.assert_allclose(found.scale, want.scale, rtol=1e-6)
    assert np.abs(np.int16(found.values) - want.values).max() <= 1  # where it is half way
    assert np.mean(found.values == want.values) > 0.9


def test_rows_of_a_table():
    table = Int8.of(jax.random.normal(jax.random.key(0), (7, 4)), (-1,))
    tokens = jnp.array([[0, 6], [3, 9]])  # the last one is past the end
    want = np.asarray(table.astype("float32"))[[[0, 6], [3, 6]]]
    np.testing.assert_array_equal(looked_up(table, tokens), want)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"experts": 4, "stacked": False},
        {"experts": 0, "biases": True},
        {"experts": 4, "shared_hidden_dim": 6},
    ],
    ids=str,
)
def test_a_search_is_that_of_the_numbers(changes):
    """The oracle: the same model with the numbers that its 8 bits stand for, in float32."""
    model = models.model(models.config(target_vocab=9, **changes))
    rounded = in_int8(model)
    kept = [leaf.dtype for leaf in jax.tree.leaves(rounded)]
    assert kept.count(jnp.int8) == sum(summed_axes(name) is not None for name in named(model))
    is_int8 = lambda leaf: isinstance(leaf, Int8)  # noqa: E731
    numbers = jax.tree.map(
        lambda leaf: leaf.astype("float32") if is_int8(leaf) else leaf, rounded, is_leaf=is_int8
    )
    source = np.random.default_rng(0).integers(4, 12, (5, 6)).astype(np.int32)
    config = BeamConfig(beam=4, nbest=3, max_length=7)
    search = jax.jit(lambda model, source: beam_search(model, source, config))
    found, want = search(rounded, source), search(numbers, source)
    np.testing.assert_array_equal(found.tokens, want.tokens)
    np.testing.assert_allclose(found.scores, want.scores, rtol=1e-4, atol=1e-5)
    assert not np.array_equal(search(model, source).scores, want.scores)  # they are rounded
