"""Products in eight bits, forward and backward, between bfloat16 (or float32) tensors.

Activations and weights are rounded to e4m3, gradients to e5m2, each tensor times a scale, which is
one number, or one for each expert. Sums are float32. Eight-bit values stay inside the functions
here: autodiff sees operands and results in their own dtype.

A scale is a power of two, so that it adds no rounding, and comes from the root mean square of
some rows. It need not be exact: the numbers are floating-point, and with the bulk near 1 the
largest that e4m3 has is 448 times that (57,344 in e5m2), its smallest a 512th. A maximum over all
numbers would cost a pass over each tensor. Larger numbers saturate.

Products run on the matrix units of GPUs that support them (Hopper and later). Elsewhere the same
rounded operands are multiplied in float32. Dims: E experts (or 1), R rows, K summed, N the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from gshard.nn.kernels import with_gradient
from gshard.nn.kernels.float8 import E4M3, E5M2, both_ways, gated, rounded
from gshard.tensors.annotate import target_platform

_EVERY = 64  # one of this many rows is sampled for a scale


class Eight(NamedTuple):
    """A tensor times its scale in eight bits, in both orders of its last two dims."""

    straight: Array
    turned: Array
    scale: Array  # [E]

    @staticmethod
    def of(x_ERC: Array, scale_E: Array, dtype: Any) -> Eight:
        """The tensor, rounded to `dtype`."""
        return Eight(*both_ways(x_ERC, scale_E, dtype), scale_E)


@jax.custom_vjp
def product(x_ERK: Array, w_EKN: Array) -> Array:
    """`x_ERK` times `w_EKN`; the result has the dtype of `x_ERK`."""
    return _product_forward(x_ERK, w_EKN)[0]


@jax.jit
def _product_forward(x_ERK: Array, w_EKN: Array) -> tuple[Array, Any]:
    # The two scales cancel, so that the product need not be multiplied by any.
    x, w = _balanced(x_ERK, w_EKN, 1.0)
    y_ERN = _dot(x.straight, w.turned, x_ERK.dtype)
    return y_ERN, ((x.turned, x.scale), (w.straight, w.scale))


@jax.jit
def _product_backward(kept: Any, grads_ERN: Array) -> tuple[Array, Array]:
    (x_EKR, x_scale), (w_EKN, w_scale) = kept
    dtype = grads_ERN.dtype
    grads = Eight.of(grads_ERN, _gradient_scale(grads_ERN), E5M2)
    dx_ERK = _dot(grads.straight, w_EKN, dtype)
    dw_EKN = _dot(x_EKR, grads.turned, dtype)
    return _unscaled(dx_ERK, grads.scale * w_scale), _unscaled(dw_EKN, x_scale * grads.scale)


product.defvjp(_product_forward, _product_backward)


@jax.custom_vjp
def feed_forward(x_ERM: Array, wi_EMH: Array, wo_EHM: Array) -> Array:
    """wo . relu(wi . x) in eight bits, the hidden units included.

    Its backward pass only needs the rounded hidden units, whose zeros mark where relu is flat.
    """
    return _feed_forward(x_ERM, wi_EMH, wo_EHM)[0]


@jax.jit
def _feed_forward(x_ERM: Array, wi_EMH: Array, wo_EHM: Array) -> tuple[Array, Any]:
    # With this scale the hidden units are near 1, and are written in eight bits.
    M = x_ERM.shape[-1]
    spread = _rms(x_ERM) * _rms_of_each(wi_EMH)
    hidden_scale = power_of_two(1.0 / (spread * math.sqrt(M)))
    x, wi = _balanced(x_ERM, wi_EMH, hidden_scale)
    h_ERH = _relu(_dot(x.straight, wi.turned, E4M3))
    wo = Eight.of(wo_EHM, power_of_two(1.0 / (_rms_of_each(wo_EHM) * math.sqrt(M))), E4M3)
    y_ERM = _unscaled(_dot(h_ERH, wo.turned, x_ERM.dtype), hidden_scale * wo.scale)
    kept = (x.turned, x.scale), (wi.straight, wi.scale), (h_ERH, hidden_scale)
    return y_ERM, (*kept, (wo.straight, wo.scale))


@jax.jit
def _feed_forward_backward(kept: Any, grads_ERM: Array) -> tuple[Array, Array, Array]:
    (x_EMR, x_scale), (wi_EMH, wi_scale), (h_ERH, h_scale), (wo_EHM, wo_scale) = kept
    dtype = grads_ERM.dtype
    dy = Eight.of(grads_ERM, _gradient_scale(grads_ERM), E5M2)
    dh_ERH, dh_EHR, h_EHR = gated(_dot(dy.straight, wo_EHM, E5M2), h_ERH)
    dwo_EHM = _unscaled(_dot(h_EHR, dy.turned, dtype), h_scale * dy.scale)
    dh_scale = dy.scale * wo_scale
    dx_ERM = _unscaled(_dot(dh_ERH, wi_EMH, dtype), dh_scale * wi_scale)
    dwi_EMH = _unscaled(_dot(x_EMR, dh_EHR, dtype), x_scale * dh_scale)
    return dx_ERM, dwi_EMH, dwo_EHM


feed_forward.defvjp(_feed_forward, _feed_forward_backward)


def _dot(a_ERK: Array, b_ENK: Array, dtype: Any) -> Array:
    """Rows of `a_ERK` times rows of `b_ENK`: both have the summed dim innermost."""
    numbers = (((2,), (2,)), ((0,), (0,)))
    if target_platform() == "gpu":
        return lax.dot_general(a_ERK, b_ENK, numbers, preferred_element_type=dtype)
    wide = (x.astype(jnp.float32) for x in (a_ERK, b_ENK))
    y_ERN = lax.dot_general(*wide, numbers, precision=lax.Precision.HIGHEST)
    return rounded(y_ERN, dtype) if jnp.dtype(dtype).itemsize == 1 else y_ERN.astype(dtype)


def _relu(x: Array) -> Array:
    """max(x, 0): the sign of a number in e4m3 is that of the same bits as an integer."""
    return lax.bitcast_convert_type(jnp.maximum(lax.bitcast_convert_type(x, jnp.int8), 0), x.dtype)


def _balanced(x_ERK: Array, w_EKN: Array, together: Array | float) -> tuple[Eight, Eight]:
    """Both in e4m3, with similar scales whose product is `together`, a power of two."""
    x_rms, w_rms_E = _rms(x_ERK), _rms_of_each(w_EKN)
    x_scale_E = power_of_two(jnp.sqrt(together * w_rms_E / x_rms))
    return Eight.of(x_ERK, x_scale_E, E4M3), Eight.of(w_EKN, together / x_scale_E, E4M3)


def _gradient_scale(grads_ERN: Array) -> Array:
    return jnp.broadcast_to(power_of_two(1.0 / _rms(grads_ERN)), (len(grads_ERN),))


def _unscaled(y_ERN: Array, scale_E: Array) -> Array:
    """Divided by the scale of its operands, which is exact in any dtype."""
    return y_ERN * (1.0 / scale_E).astype(y_ERN.dtype)[:, None, None]


def _rms(x_ERC: Array, dims: tuple[int, ...] | None = None) -> Array:
    """The root mean square of a sample of rows; over all experts, as one may have no tokens."""
    E, R, C = x_ERC.shape
    every = math.gcd(R, _EVERY)
    some = x_ERC.reshape(E, R // every, every, C)[:, :, 0].astype(jnp.float32)
    return jnp.sqrt(jnp.mean(jnp.square(some), dims))


def _rms_of_each(w_EKN: Array) -> Array:
    return _rms(w_EKN, (1, 2))


def power_of_two(x: Array) -> Array:
    """The largest power of two up to `x`; 1 for what has none, as where a tensor is all zeros."""
    exponent = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F800000)
    found = lax.bitcast_convert_type(exponent, jnp.float32)
    usual = (x > 2.0**-60) & (x < 2.0**60)
    return jnp.where(usual, found, 1.0)


Annotate = Callable[[Array], Array]

_SAMPLE = 64  # one of this many numbers of the last dims is sampled for a scale


def _exchanged_backward(here: Annotate, there: Annotate, _: None, grads: Array) -> tuple[Array]:
    return (_sent(there, here, grads, E5M2),)


@with_gradient(_exchanged_backward, keep=lambda *_: None, nondiff=(0, 1))
def exchanged(here: Annotate, there: Annotate, x: Array) -> Array:
    """`x`, which is sharded as `here` annotates, sharded as `there` does; sent in eight bits.

    What is sent is rounded to e4m3 forward and to e5m2 backward, times a scale; what is received
    has the dtype of before. Only what moves is rounded: on one device the tokens are rounded alike.
    """
    return _sent(here, there, x, E4M3)


def _sent(here: Annotate, there: Annotate, x: Array, dtype: Any) -> Array:
    """As bits: some libraries of collectives have no eight-bit floating-point numbers."""
    scale = _scale(x)
    bits = lax.bitcast_convert_type(rounded(x.astype(jnp.float32) * scale, dtype), jnp.uint8)
    found = lax.bitcast_convert_type(there(here(bits)), dtype)
    return (found.astype(jnp.float32) / scale).astype(x.dtype)


def _scale(x: Array) -> Array:
    """A power of two that brings the bulk of the numbers near 1, from a sample of them."""
    every = math.gcd(x.shape[-1], _SAMPLE)
    some = x.reshape(*x.shape[:-1], -1, every)[..., 0].astype(jnp.float32)
    return power_of_two(lax.rsqrt(jnp.mean(jnp.square(some))))
