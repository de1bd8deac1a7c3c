"""Fourier transforms along dims of which any are split: JAX's values, in few bytes."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from tests.oracle import (
    DEVICE_COUNTS,
    SIZES,
    assignments,
    check,
    check_grad,
    even_split,
    kinds,
    random_array,
    sent,
)

KINDS = {
    "fft": jnp.fft.fftn,
    "ifft": jnp.fft.ifftn,
    "rfft": jnp.fft.rfftn,
    "irfft": jnp.fft.irfftn,
}
TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_batch_dims_are_free_at_every_rank(rank):
    x = random_array((5, 6, *(4, 6, 3)[:rank]))
    dims = tuple(range(-rank, 0))

    def fn(x):
        return [f(x, axes=dims) for f in KINDS.values()]

    for split in (even_split(2 + rank, 0, 8), np.arange(6).reshape(3, 2, *[1] * rank)):
        low = check(fn, x, devices=split.size, inputs=[split], **TOLERANCE)
        assert sent(low) == 0


@st.composite
def transforms(draw):
    rank = draw(st.integers(1, 4))
    shape = tuple(draw(st.sampled_from([n for n in SIZES if n > 1])) for _ in range(rank))
    devices = draw(st.sampled_from(DEVICE_COUNTS))
    split = [draw(assignments(rank, devices)) for _ in range(2)]
    return shape, draw(st.integers(1, min(rank, 3))), devices, split


@given(transforms(), st.sampled_from(sorted(KINDS)))
def test_any_transform(case, kind):
    """Any kind and rank, any dims split on both sides, uneven ones too."""
    shape, count, devices, (first, last) = case
    x = random_array(shape, np.float32 if kind == "rfft" else np.complex64)
    dims = tuple(range(len(shape) - count, len(shape)))

    def fn(x):
        return KINDS[kind](x, axes=dims)

    check(fn, x, devices=devices, inputs=[first], outputs=[last], **TOLERANCE)


@pytest.mark.slow
@settings(max_examples=10)
@given(transforms(), st.sampled_from(["fft", "rfft", "irfft"]))
def test_any_gradient(case, kind):
    shape, count, devices, (first, last) = case
    dims = tuple(range(len(shape) - count, len(shape)))

    def fn(x):
        y = KINDS[kind](x, axes=dims)
        return jnp.real(y) + 2 * jnp.imag(y)

    x = random_array(shape)
    how = {"devices": devices, "inputs": [first], "outputs": [last]}
    check_grad(fn, x, **how, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("axes", "dim"), [((0,), 0), ((1,), 1), ((0, 1), 1)])
def test_along_a_split_dim_two_exchanges_take_the_place_of_a_gather(kind, axes, dim):
    x = random_array((256, 192), np.float32 if kind == "rfft" else np.complex64)
    split = [even_split(2, dim, 8)]
    fn = KINDS[kind]
    low = check(lambda x: fn(x, axes=axes), x, inputs=split, outputs=split, **TOLERANCE)
    assert kinds(low) == {"all_to_all": 2}
    tile = max(x.size, low.out_info.size) * 8 / 8
    gather = 7 * x.nbytes / 8
    assert sent(low) <= 2 * tile * 1.25 * 7 / 8  # a dim of 97 or 129 is padded
    assert sent(low) < gather / 2


def test_two_split_dims_are_each_moved_once_and_back():
    """A volume in pencils: each AllToAll is among the devices of one pencil alone."""
    x = random_array((16, 16, 16), np.complex64)
    pencils = np.arange(8).reshape(2, 4, 1)
    low = check(jnp.fft.fftn, x, inputs=[pencils], outputs=[pencils], **TOLERANCE)
    tile = x.nbytes / 8
    assert set(kinds(low)) == {"all_to_all"}
    assert sent(low) <= tile * (2 * 3 / 4 + 2)
    assert all(c.group_size < 8 or c.bytes <= tile * 7 / 8 for c in low.collectives)


def test_a_transform_and_its_inverse_take_one_exchange_each():
    """A convolution by way of frequencies: in between, the other dim is split."""

    def fn(x, filter):
        return jnp.fft.irfft2(jnp.fft.rfft2(x) * filter)

    args = random_array((4, 64, 128)), random_array((64, 65))
    low = check(fn, *args, inputs=[even_split(3, 1, 8)], **TOLERANCE)
    assert kinds(low) == {"all_to_all": 2}
    assert str(low.out_shardings) == "split dim 1 by 8"
    tile = 4 * 64 * 72 * 8 / 8  # 65 columns are padded to 72
    assert sent(low) == 2 * tile * 7 / 8


def test_the_result_of_a_transform_may_lie_where_it_is_wanted():
    """A result that is wanted split along the other dim needs no way back."""
    x = random_array((64, 48), np.complex64)
    how = {"inputs": [even_split(2, 1, 8)], "outputs": [even_split(2, 0, 8)]}
    low = check(jnp.fft.fft2, x, **how, **TOLERANCE)
    assert kinds(low) == {"all_to_all": 1}


def test_a_tensor_without_another_dim_is_gathered_and_says_why():
    x = random_array((64,), np.complex64)
    low = check(jnp.fft.fft, x, inputs=[even_split(1, 0, 8)], **TOLERANCE)
    assert kinds(low) == {"all_gather": 1}
    assert "there is no other to split" in low.collectives[0].reason


def test_what_a_function_of_jax_makes_stands_at_the_line_that_calls_it():
    x = jnp.zeros((64,), jnp.complex64)
    low = gshard.jit(lambda x: jnp.fft.fft(gshard.split(x, 0, 8)), devices=8).lower(x)
    assert "test_fft.py" in low.collectives[0].source


def test_a_long_convolution_leaves_its_split_to_the_batch():
    """Neither the spectra nor the gradient of the signal go back to the split of the time."""
    x, f = random_array((8, 64, 4)), random_array((64, 4), seed=1)

    def convolved(f, x):
        spectra = [jnp.fft.rfft(v, 128, axis=-2) for v in (x, f)]
        return jnp.sum(jnp.fft.irfft(spectra[0] * spectra[1], 128, axis=-2)[:, :64] ** 2)

    low = check_grad(convolved, f, x, inputs=[None, even_split(3, 0, 8)], **TOLERANCE)
    assert kinds(low) == {"all_reduce": 1}  # the filter's gradient, as long as the filter
    assert sent(low) == f.nbytes * 2 * 7 // 8
    low = check(convolved, f, x, inputs=[None, even_split(3, 1, 8)], **TOLERANCE)
    assert sent(low, "all_to_all") == 2 * x.nbytes // 8 * 7 // 8
