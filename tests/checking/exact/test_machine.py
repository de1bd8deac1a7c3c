"""Operators on exact numbers, beside JAX's own: on whole numbers both are exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from gshard.checking.audit import EXACT
from gshard.checking.exact import field
from gshard.checking.exact.number import Exact, constant, of_array, plain
from gshard.checking.lockstep import Lockstep, ended

D = 4
X = np.random.default_rng(0).integers(-4, 5, (D, 3, 5, 4)).astype(np.float32)
W = np.random.default_rng(1).integers(-4, 5, (D, 4, 3)).astype(np.float32)
I = np.random.default_rng(2).integers(0, 6, (D, 2)).astype(np.int32)
IMAGE = np.random.default_rng(3).integers(-4, 5, (D, 2, 6, 7, 4)).astype(np.float32)
KERNEL = np.random.default_rng(4).integers(-2, 3, (D, 3, 2, 2, 6)).astype(np.float32)


def run(fn, *args):
    """The results of all devices, as exact numbers, by one run for all of them."""
    closed = jax.make_jaxpr(fn)(*(a[0] for a in args))
    with np.errstate(all="ignore"):
        return closed, ended(Lockstep({"a": D}, EXACT).run(closed, [of_array(a) for a in args]))


MOVED = {
    "reordered": lambda x, i: lax.reshape(x, (10, 6), (2, 0, 1)),
    "views": lambda x, i: (x.reshape(5, 12).T[::-1], x.transpose(2, 0, 1), x[None, 1:, ::2]),
    "joined": lambda x, i: (jnp.concatenate([x, -x], 1), jnp.stack([x, x * 2], 1)),
    "padded": lambda x, i: lax.pad(x, 7.0, [(-1, 2, 0), (1, -2, 1), (0, 0, 2)]),
    "bits padded": lambda x, i: lax.bitcast_convert_type(
        lax.pad(lax.bitcast_convert_type(x, jnp.uint32), jnp.uint32(0), [(1, 0, 0)] * 3), x.dtype
    ),
    "nothing padded": lambda x, i: lax.pad(x[:, :0], 7.0, [(0, 0, 0), (1, 2, 0), (-1, 0, 0)]),
    "rows": lambda x, i: (x[i[0]], x[:, i], x.at[i].get(mode="fill", fill_value=3)),
    "one of each": lambda x, i: jnp.take_along_axis(x, jnp.abs(x).astype(int) % 3, 1),
    "windows": lambda x, i: lax.dynamic_slice(x, (i[0], i[1], 0), (2, 2, 4)),
    "updates": lambda x, i: lax.dynamic_update_slice(x, x[:2, :2] * 2, (i[0], i[1], 0)),
    "written": lambda x, i: (x.at[i].set(9, mode="drop"), x.at[:, i].add(x[:, :2])),
    "repeated": lambda x, i: x.at[i * 0].add(2.0).at[i * 0].mul(3.0).at[i * 0].max(x[:2]),
    "applied": lambda x, i: (x.at[i * 0].apply(lambda v: v * 2 + 1), i.at[i].apply(jnp.negative)),
    "sorted": lambda x, i: (jnp.sort(x, 0), lax.sort_key_val(x, x * 2, 1), lax.top_k(x, 2)[0]),
    "places": lambda x, i: (jnp.argmax(x, 1), jnp.argmin(x), jnp.argsort(-x, stable=True)),
    "chosen": lambda x, i: (jnp.where(x > 1, x, -x), jnp.clip(x, -2, 1), jnp.sign(x)),
}
SUMMED = {
    "sums": lambda x, w: (x.sum(1), x.sum(), jnp.prod(x, 2), x.max(), x.min((0, 1)), (x > 0).all()),
    "cumulative": lambda x, w: (jnp.cumsum(x, 1), lax.cummax(x, 0), lax.cumprod(x, 2, True)),
    "products": lambda x, w: (x @ w, jnp.einsum("abc,adc->abd", x, x), jnp.tensordot(x, x, 3)),
    "powers": lambda x, w: (x**3, x * x - x, -x, jnp.square(w), jnp.abs(w), x // 2, x % 3),
    "types": lambda x, w: (x.astype(int) * 3, jnp.round(x / 2), jnp.floor(x / 2), x > w[0, 0]),
    "complex": lambda x, w: complex_numbers(lax.complex(x, x[::-1]), lax.complex(w, w * 2)),
    "pooled": lambda x, w: lax.reduce_window(x, 0.0, lax.add, (2, 3, 1), (1, 2, 1), "SAME"),
    "pooled from 5 on": lambda x, w: lax.reduce_window(
        x, 5.0, lax.add, (2, 3, 1), (1, 2, 1), "SAME"
    ),
    "largest": lambda x, w: lax.reduce_window(x, -np.inf, lax.max, (2, 2, 2), (1, 1, 2), "VALID"),
    "gradients of pools": lambda x, w: jax.grad(
        lambda x: (lax.reduce_window(x, -np.inf, lax.max, (2, 2, 1), (1, 2, 1), "SAME") ** 2).sum()
    )(x + jnp.arange(60.0).reshape(x.shape) * 16),
    "keys folded": lambda x, w: jax.vmap(
        lambda k: jax.random.bits(jax.random.fold_in(k, jnp.int32(x[0, 0, 0])))
    )(jax.random.split(jax.random.key(0), 3)),
    "groups": lambda x, w: lax.ragged_dot(x[0], jnp.stack([w, w * 2]), jnp.array([2, 3])),
    "loops": lambda x, w: lax.scan(lambda c, r: (c + r[0, 0], r * c), 0.0, x),
    "while": lambda x, w: lax.while_loop(
        lambda c: c[1] < c[0][0, 0, 0], lambda c: (c[0], c[1] + 1), (x, -9.0)
    ),
    "loops of a batch": lambda x, w: jax.vmap(
        lambda row: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, row)
    )(x[0]),
    "branches": lambda x, w: lax.cond(x[0, 0, 0] > 0, lambda: x * 2, lambda: x + 1),
}
CONVOLVED = {
    "plain": lambda x, k: conv(x, k, (1, 1), "SAME"),
    "dilated": lambda x, k: conv(x, k, (2, 1), [(2, 1), (0, 3)], rhs_dilation=(1, 2)),
    "transposed": lambda x, k: conv(x, k, (1, 1), [(1, 2), (0, 1)], lhs_dilation=(2, 3)),
    "its gradient": lambda x, k: jax.grad(lambda k: conv(x, k, (2, 1), "SAME").sum())(k),
}


def complex_numbers(z, w):
    parts = z.real, z.imag, z.conj(), z.max(), jnp.sort(z, 0)
    return *parts, z * z - 1, z**3, z.sum(0), jnp.cumsum(z, 1), z @ w, z / 2j


def conv(x, k, *args, **more):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, k, *args, dimension_numbers=numbers, feature_group_count=2, **more
    )


CASES = [(fn, X, I) for fn in MOVED.values()] + [(fn, X, W) for fn in SUMMED.values()]
CASES += [(fn, IMAGE, KERNEL) for fn in CONVOLVED.values()]


@pytest.mark.parametrize("case", CASES, ids=[*MOVED, *SUMMED, *CONVOLVED])
def test_as_jax(case):
    fn, *args = case
    closed, found = run(fn, *args)
    for d in range(D):
        wanted = jaxpr_as_fun(closed)(*(a[d] for a in args))
        for got, right in zip(found, wanted, strict=True):
            right = np.asarray(right)
            own = plain(got)[d if len(plain(got)) > 1 else 0]
            np.testing.assert_array_equal(own, right)
            if isinstance(got, Exact):
                residues = got.one[d if len(got.r) > 1 else 0]
                np.testing.assert_array_equal(residues, constant(right).one[0])


TRANSFORMS = {
    "of complex numbers": lambda z: jnp.fft.fft2(z),
    "and back": lambda z: jnp.fft.ifft(z, axis=0),
    "of real numbers": lambda z: jnp.fft.rfftn(z.real),
    "to real numbers": lambda z: jnp.fft.irfft2(z),
    "cut off": lambda z: (jnp.fft.irfft(z, 5), jnp.fft.rfft(z.imag, 7)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    """Sums of products, as of any linear function: their floats are the transforms."""
    z = (X[:, 0] + 1j * X[:, 1]).astype(np.complex64)
    closed, found = run(TRANSFORMS[name], z)
    for d in range(D):
        for got, right in zip(found, jaxpr_as_fun(closed)(z[d]), strict=True):
            np.testing.assert_allclose(got.f[d], right, rtol=1e-4, atol=1e-5)
            assert got.is_complex == jnp.iscomplexobj(right)


def test_draws_of_gamma():
    """By a key for all elements, or for some: as JAX draws them, one by one."""

    def fn(key, x):
        return jax.random.gamma(key, x), jax.vmap(jax.random.loggamma)(jax.random.split(key, 4), x)

    def part(key, x):
        return [drawn[1:] for drawn in fn(key, x)]

    key, x = jax.random.key(3), (np.arange(12, dtype=np.float32) / 3 + 0.5).reshape(4, 3)
    raw = np.asarray(jax.random.key_data(key))[None]
    closed, machine = (jax.make_jaxpr(f)(key, x) for f in (fn, part)), Lockstep({"a": 1}, EXACT)
    with np.errstate(all="ignore"):
        found = [ended(machine.run(each, [raw, of_array(x[None])])) for each in closed]
    for whole, rows, right in zip(*found, fn(key, x), strict=True):
        np.testing.assert_allclose(whole.f[0], right, rtol=1e-4)
        np.testing.assert_array_equal(whole.r[:, 1:], rows.r)


SYSTEMS = {
    "tridiagonal": (lambda d, b: lax.linalg.tridiagonal_solve(d[0], d[1], d[2], b), (3, 4)),
    "triangular": (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), (4, 4)),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_solvers_are_linear_and_unknown(name):
    """Of the right side, column by column, and with another matrix for other systems."""
    solve, shape = SYSTEMS[name]

    def fn(a, b, c):
        both = jnp.concatenate([b, c], 1)
        return solve(a, b) + solve(a, c), solve(a, b + c), solve(a, both), solve(a * 2, b)

    rng, columns = np.random.default_rng(5), (4, 3)
    a = rng.integers(1, 3, shape).astype(np.float32) + 4 * np.eye(*shape, dtype=np.float32)
    args = [a, *(rng.integers(-4, 5, columns).astype(np.float32) for _ in range(2))]
    with np.errstate(all="ignore"):
        closed, found = run(fn, *(np.broadcast_to(x, (D, *x.shape)) for x in args))
    for got, right in zip(found, jaxpr_as_fun(closed)(*args), strict=True):
        np.testing.assert_allclose(got.f[0], right, rtol=1e-5, atol=1e-6)
    sums, together, wide, other = (x.r[0] for x in found)
    np.testing.assert_array_equal(sums, together)
    np.testing.assert_array_equal(sums, field.add(wide[:, :3], wide[:, 3:]))
    assert (other != wide[:, :3]).all()


def test_random_bits():
    def fn(key, n):
        first, second = jax.random.split(key)
        keys = jax.random.split(jax.random.fold_in(first, n), 3)
        bits = jax.vmap(lambda k: jax.random.bits(k, (2,), jnp.uint8))(keys)
        return bits, jax.random.key_data(keys), jax.random.uniform(second, (5,))

    keys, numbers = jax.random.split(jax.random.key(3), D), np.arange(D, dtype=np.int32)
    closed = jax.make_jaxpr(fn)(keys[0], numbers[0])
    given = [np.asarray(jax.random.key_data(keys)), numbers]
    found = ended(Lockstep({"a": D}, EXACT).run(closed, given))
    for got, right in zip(found, jax.vmap(fn)(keys, numbers), strict=True):
        np.testing.assert_array_equal(plain(got), np.asarray(right))


def test_exponentials_of_differences_from_a_maximum():
    """Each half with its own maximum, rescaled: the same as with one maximum for all."""

    def both(x):
        plain_one = jnp.exp(x - x.max())
        halves = x[:1], x[1:]
        own = [h.max() for h in halves]
        all_of_them = jnp.maximum(*own)
        parts = [
            jnp.exp(m - all_of_them) * jnp.exp(h - m) for h, m in zip(halves, own, strict=True)
        ]
        return plain_one.sum(), sum(p.sum() for p in parts)

    x = X + np.random.default_rng(0).random(X.shape).astype(np.float32)
    _, (one, other) = run(both, x)
    assert (one.r == other.r).all()
    assert (one.f != other.f).any()


def test_floats_of_unknown_functions():
    """They decide comparisons: of every function they are JAX's, in 64 bits."""
    x = np.linspace(0.1, 0.9, 12, dtype=np.float32).reshape(3, 4)
    functions = [lax.tanh, lax.lgamma, lax.erf_inv, lax.bessel_i0e, lambda x: lax.igamma(x, x + 1)]
    for fn in functions:
        closed = jax.make_jaxpr(fn)(x)
        (got,) = ended(Lockstep({"a": 1}, EXACT).run(closed, [of_array(x[None])]))
        with jax.enable_x64(True):
            np.testing.assert_allclose(got.f[0], fn(x.astype(np.float64)), rtol=1e-12)
