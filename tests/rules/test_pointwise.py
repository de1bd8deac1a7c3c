"""Pointwise operators: any split, no communication, bit for bit; all of them in a few programs."""

import functools
import inspect
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.scipy import special

import gshard
from gshard.rules.pointwise import OffloadWarning
from tests.oracle import check, random_array

UNARY = [
    lax.abs, lax.acos, lax.asin, lax.asinh, lax.atan, lax.atanh, lax.bessel_i0e, lax.bessel_i1e,
    lax.cbrt, lax.ceil, lax.cos, lax.cosh, lax.digamma, lax.erf, lax.erf_inv, lax.erfc, lax.exp,
    lax.exp2, lax.expm1, lax.floor, lax.is_finite, lax.lgamma, lax.log, lax.log1p, lax.logistic,
    lax.neg, lax.round, lax.rsqrt, lax.sign, lax.sin, lax.sinh, lax.sqrt, lax.square, lax.tan,
    lax.tanh, lax.stop_gradient, lambda x: lax.acosh(1 + x * x), lambda x: lax.integer_pow(x, 3),
    lambda x: lax.reduce_precision(x, 5, 10), lambda x: lax.convert_element_type(x, jnp.bfloat16),
    lambda x: lax.bitcast_convert_type(x, jnp.int32), jax.nn.relu, jax.nn.gelu, jnp.nan_to_num,
    lambda x: lax.clamp(-0.5, x, 0.5), lambda x: lax.optimization_barrier(x), jnp.log2,
    jax.grad(lambda x: jnp.sum(jnp.tanh(x))),
]  # fmt: skip
BINARY = [
    lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.max, lax.min, lax.atan2, lax.nextafter,
    lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge, lax.complex, lax.pow,
    lambda x, y: lax.igamma(abs(x) + 1, abs(y)), lambda x, y: lax.igammac(abs(x) + 1, abs(y)),
    lambda x, y: special.zeta(2 + abs(x), 1 + abs(y)),
    lambda x, y: special.polygamma(1, 1 + abs(x)),
    lambda x, y: lax.betainc(1 + abs(x), 1 + abs(y), lax.logistic(x)),
    lambda x, y: lax.select(x > y, x, y), lambda x, y: lax.clamp(x - 1, y, x + 1),
]  # fmt: skip
if hasattr(lax, "polynomial"):  # since JAX 0.12
    UNARY += [lambda x: lax.polynomial(x, np.cos(np.arange(12.0)))]  # a scan inside
    BINARY += [
        lambda x, y: lax.polynomial(x, [1.0, y, 2.0]),
        jax.grad(lambda x, y: jnp.sum(lax.polynomial(x, [y[:1], 1.0, y, y]))),
        jax.grad(lambda x, y: jnp.sum(lax.polynomial(x, [y[:1], 1.0, y, y])), argnums=1),
    ]
INTEGER = [
    lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, lax.shift_left, lax.div, lax.rem, lax.max,
    lax.shift_right_arithmetic, lax.shift_right_logical, lambda x, y: lax.bitwise_not(x),
    lambda x, y: lax.population_count(x), lambda x, y: lax.clz(x), lambda x, y: lax.sign(y),
]  # fmt: skip
COMPLEX = [lax.conj, lax.real, lax.imag, lax.abs, lax.exp, lax.sin, lax.neg]

MESH = np.arange(6).reshape(2, 3)
SPLITS = [MESH, MESH.T, np.array([[5], [3], [1], [0]])]


@pytest.mark.parametrize(
    "split",
    [
        pytest.param(SPLITS[0], id="2x3"),
        pytest.param(SPLITS[1], id="3x2", marks=pytest.mark.slow),
        pytest.param(SPLITS[2], id="4 of 6", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("functions", "dtypes"),
    [
        (UNARY, ["float32"]),
        (BINARY, ["float32", "float32"]),
        (INTEGER, ["int32", "int32"]),
        (COMPLEX, ["complex64"]),
    ],
    ids=["unary", "binary", "integer", "complex"],
)
def test_every_function(functions, dtypes, split):
    args = [random_array((7, 5), d, seed=i) for i, d in enumerate(dtypes)]
    if dtypes[0] == "int32":
        args[1] = abs(args[1]) % 7 + 1

    def fn(*xs):
        return [f(*xs) for f in functions]

    inputs = [split] * len(args)
    lowered = check(fn, *args, devices=6, inputs=inputs, rtol=1e-6, atol=1e-6)
    assert lowered.collectives == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "uint8", "bool", "uint32"])
def test_other_types(dtype):
    args = [random_array((9, 4), dtype, seed=i) for i in range(2)]

    def fn(x, y):
        return x | y if dtype == "bool" else x + y * y, x == y

    assert check(fn, *args, inputs=[np.arange(8)[:, None]] * 2, exact=True).collectives == []


def test_sizes_of_one_and_scalars_broadcast():
    def fn(x, row, scalar):
        return x * row + scalar, jnp.where(x > row, x, scalar)

    x, row = random_array((13, 5)), random_array((1, 5))
    lowered = check(fn, x, row, np.float32(2), inputs=[np.arange(8)[:, None]], exact=True)
    assert lowered.collectives == []


@pytest.mark.skipif(not hasattr(lax, "mulhi"), reason="this release of JAX has no mulhi")
def test_mulhi_sends_nothing():
    """Lowered only: XLA cannot compile it for several devices yet, for `jax.jit` neither."""
    x = jax.ShapeDtypeStruct((13, 4), np.int32)
    fn = gshard.jit(lambda x, y: lax.mulhi(gshard.split(x, 0, 8), y), devices=8, strict=True)
    assert not fn.lower(x, x).collectives


def test_a_move_to_host_memory_is_not_dropped_silently():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, w):
        return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h"))

    def loss(w, x):
        return jnp.sum(layer(gshard.split(x, 0, 8), w))  # the line of the warning

    w, x = jnp.ones((4, 4)), jnp.arange(64.0).reshape(16, 4) / 64
    with pytest.warns(OffloadWarning, match=r"f32.*\[16,4\] on the devices") as caught:
        found = gshard.jit(jax.grad(loss))(w, x)
    [warning] = [each for each in caught if each.category is OffloadWarning]
    _, first = inspect.getsourcelines(loss)
    assert Path(warning.filename).name == Path(__file__).name
    assert warning.lineno == first + 1
    np.testing.assert_allclose(found, jax.grad(loss)(w, x), rtol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        home = jax.sharding.SingleDeviceSharding(jax.devices()[0])  # its own memory: no offload
        assert gshard.jit(lambda x: jax.device_put(x, home) + 1)(x).shape == x.shape
