"""Operators of ATen for layers: products, convolutions, norms, attention, recurrences, dropout.

Products, attention and recurrences are those that models call: torch would decompose them into
products of merged dims, a softmax in ten steps and a program for every time step, which hides the
dims that are to be sharded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.contrib.torch.arrays import Operator


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    y = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return y if bias is None else y + bias


def _grouped_mm(x: Any, weight: Any, offs: Any, bias: Any = None, out_dtype: Any = None) -> Any:
    """Rows of each group times the weight of the group: experts without a capacity."""
    sizes = jnp.diff(offs, prepend=jnp.zeros((1,), offs.dtype)).astype(jnp.int32)
    y = lax.ragged_dot(x, weight, sizes)
    return y if bias is None else y + bias


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: Any = None, enable_gqa: bool = False, *, random: Any = None,
) -> Any:  # fmt: skip
    """Softmax of scores in 32 bits; a row that is masked everywhere gives zeros, as in torch."""
    if enable_gqa:
        key, value = (jnp.repeat(x, query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("...qd,...kd->...qk", query * scale, key, preferred_element_type=wide)
    if is_causal:
        attn_mask = jnp.tri(query.shape[-2], key.shape[-2], dtype=bool)
    if attn_mask is not None and attn_mask.dtype == bool:
        weights = jax.nn.softmax(jnp.where(attn_mask, scores, jnp.finfo(wide).min), -1)
        weights = weights if is_causal else jnp.where(attn_mask, weights, 0)
    else:
        weights = jax.nn.softmax(scores if attn_mask is None else scores + attn_mask, -1)
    if dropout_p:
        weights = _dropout(weights, dropout_p, random=random)[0]
    return jnp.einsum("...qk,...kd->...qd", weights.astype(value.dtype), value)


def _dropout(x: Any, p: float, train: bool | None = True, *, random: Any) -> Any:
    """The kept elements, scaled, and which they are."""
    if not train or p == 0:
        return x, jnp.ones(x.shape, bool)
    kept = jax.random.bernoulli(random(), 1 - p, x.shape)
    return jnp.where(kept, x / (1 - p) if p < 1 else x, 0), kept


def _convolution(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    space = weight.ndim - 2
    stride, padding, dilation, extra = (
        list(v) * (space // len(v)) for v in (stride, padding, dilation, output_padding)
    )
    pads = [(p, p) for p in padding]
    if transposed:  # the gradient of a convolution: of the dilated image, by the kernel in reverse
        by_group = weight.reshape(groups, -1, *weight.shape[1:]).swapaxes(1, 2)
        weight = by_group.reshape(-1, *by_group.shape[2:])
        weight = jnp.flip(weight, tuple(range(2, weight.ndim)))
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        pads = [(r - p, r - p + e) for r, p, e in zip(reach, padding, extra, strict=True)]
    window, image = ([1] * space, stride) if transposed else (stride, None)
    y = lax.conv_general_dilated(x, weight, window, pads, image, dilation, None, groups)
    return y if bias is None else y + bias.reshape((-1,) + (1,) * space)


def _layer_norm(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    """In 32 bits at least; also the mean, and 1 / the deviation."""
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = jnp.mean(x, dims, keepdims=True)
    scale = lax.rsqrt(jnp.var(x, dims, keepdims=True) + eps)
    y = (x - mean) * scale
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, mean, scale


def _group_norm(
    x: Any, weight: Any, bias: Any, n: int, c: int, size: int, groups: int, eps: float
) -> Any:
    shape = (groups, c // groups, size)
    weight, bias = (v if v is None else v.reshape(*shape[:2], 1) for v in (weight, bias))
    y, mean, scale = _layer_norm(x.reshape(n, *shape), shape[1:], weight, bias, eps)
    return y.reshape(x.shape), mean[:, :, 0, 0], scale[:, :, 0, 0]


def _windows(x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> Any:
    """The windows of `lax.reduce_window` for pooling over the last dims."""
    space = len(kernel)
    each = [list(v) * (space // len(v)) for v in (stride or kernel, padding, dilation)]
    pads = []
    for n, k, s, p, d in zip(x.shape[-space:], kernel, *each, strict=True):
        over = (n + 2 * p - d * (k - 1) - 1) % s  # a last window that starts in the padding: none
        starts = n + 2 * p - d * (k - 1) - 1 - over + s
        pads.append((p, p + (s - over if ceil and over and starts < n + p else 0)))
    ones = (1,) * (x.ndim - space)
    windows = (*ones, *kernel), (*ones, *each[0]), [(0, 0)] * len(ones) + pads
    return *windows, None, (*ones, *each[2])


def _max_pool(
    x: Any, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil: Any = 0
) -> Any:
    """The largest values; not where they were, which an unpooling would read."""
    least = -jnp.inf if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.iinfo(x.dtype).min
    around = _windows(x, kernel, stride, padding, dilation, ceil)
    return lax.reduce_window(x, np.asarray(least, x.dtype), lax.max, *around), None


def _avg_pool(
    x: Any, kernel: Any, stride: Any = (), padding: Any = (0,), ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    if ceil_mode and any(padding) and count_include_pad:
        raise NotImplementedError("average pooling with both a padding that counts and ceil_mode")
    around = _windows(x, kernel, stride, padding, (1,), ceil_mode)
    zero = np.zeros((), x.dtype)
    total = lax.reduce_window(x, zero, lax.add, *around)
    if divisor_override or (count_include_pad and not ceil_mode):
        return total / (divisor_override or math.prod(kernel))
    return total / lax.reduce_window(jnp.ones_like(x), zero, lax.add, *around)


def _recurrence(cell: Operator) -> Operator:
    """Layers and directions of a cell, each one a `lax.scan` over time."""

    def run(
        x: Any, start: Any, weights: Sequence[Any], has_biases: bool, num_layers: int, p: float,
        train: bool, bidirectional: bool, batch_first: bool, *, random: Any = None,
    ) -> Any:  # fmt: skip
        x = jnp.swapaxes(x, 0, 1) if batch_first else x
        start = start if isinstance(start, list | tuple) else [start]
        each, directions = (4 if has_biases else 2), 1 + bidirectional
        finals: list[Any] = []
        for layer in range(num_layers):
            x = _dropout(x, p if layer else 0, train, random=random)[0]
            outputs = []
            for n in range(layer * directions, (layer + 1) * directions):
                w_x, w_h, b_x, b_h = (*weights[n * each : (n + 1) * each], None, None)[:4]

                def step(h: Any, seen: Any, w_h: Any = w_h, b_h: Any = b_h) -> Any:
                    h = cell(h, seen, _linear(h[0], w_h, b_h))
                    return h, h[0]

                first, seen = tuple(h[n] for h in start), _linear(x, w_x, b_x)
                final, output = lax.scan(step, first, seen, reverse=bool(n % directions))
                finals.append(final)
                outputs.append(output)
            x = jnp.concatenate(outputs, -1)
        x = jnp.swapaxes(x, 0, 1) if batch_first else x
        return (x, *map(jnp.stack, zip(*finals, strict=True)))

    return run


def _lstm_cell(state: Any, seen: Any, recurrent: Any) -> Any:
    i, f, g, o = jnp.split(seen + recurrent, 4, -1)
    c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru_cell(state: Any, seen: Any, recurrent: Any) -> Any:
    r, z, n = jnp.split(seen, 3, -1)
    r_h, z_h, n_h = jnp.split(recurrent, 3, -1)
    z = jax.nn.sigmoid(z + z_h)
    n = jnp.tanh(n + jax.nn.sigmoid(r + r_h) * n_h)
    return ((1 - z) * n + z * state[0],)


_coin = jax.random.bernoulli

LAYERS: dict[str, Operator] = {
    "linear": _linear,
    **dict.fromkeys(("mm", "bmm", "matmul"), jnp.matmul),
    "einsum": lambda equation, operands, **_: jnp.einsum(equation, *operands),
    **dict.fromkeys(("_grouped_mm", "grouped_mm_fallback"), _grouped_mm),
    "convolution": _convolution,
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
    **{f"max_pool{n}d_with_indices": _max_pool for n in (2, 3)},
    **{f"avg_pool{n}d": _avg_pool for n in (2, 3)},
}


def _drawn(draw: Operator) -> Operator:
    def drawn(size: Any, dtype: Any = None, *, random: Any) -> Any:
        shape, own = (size.shape, size.dtype) if hasattr(size, "shape") else (size, jnp.float32)
        return draw(random(), tuple(shape), dtype or own)

    return drawn


# These take `random`, which returns a new key each time.
RANDOM: dict[str, Operator] = {
    "scaled_dot_product_attention": _attention,
    "lstm": _recurrence(_lstm_cell),
    "gru": _recurrence(_gru_cell),
    "native_dropout": _dropout,
    "bernoulli": lambda x, p=None, *, random: _coin(random(), x if p is None else p, x.shape),
    **dict.fromkeys(("rand", "rand_like"), _drawn(jax.random.uniform)),
    **dict.fromkeys(("randn", "randn_like"), _drawn(jax.random.normal)),
}
