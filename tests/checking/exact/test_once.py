"""Large results that both programs compute of the same memory."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import gshard
from gshard.checking.exact import number
from gshard.checking.exact.number import drawn, moved
from gshard.checking.exact.operators import local
from tests.oracle import random_array

OPERATORS = {
    "elements": (lax.mul, (16, 6), (16, 6)),
    "sum": (lambda x: x.sum(1), (16, 6)),
    "maximum": (lambda x: x.max(1), (16, 6)),
    "product": (lambda x, y: jnp.einsum("gab,gbc->gac", x, y), (16, 3, 5), (16, 5, 2)),
}


def test_tiles_of_the_same_memory_are_computed_once(monkeypatch):
    on, rng = np.ones(8, bool), np.random.default_rng(0)
    for name, (fn, *shapes) in OPERATORS.items():
        values = [drawn(random_array(s, seed=n), rng) for n, s in enumerate(shapes)]
        tiles = [moved(lambda a: a.reshape(8, 2, *a.shape[2:]), x) for x in values]
        whole, part = (
            jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(x.shape[1:], np.float32) for x in xs)).eqns[0]
            for xs in (values, tiles)
        )
        monkeypatch.setattr(number, "_LARGE", 1)
        (logical,) = local(whole, values, on)
        (found,) = local(part, tiles, on)
        (turned,) = local(part, [moved(lambda a: a[::-1], x) for x in tiles], on)
        (copied,) = local(part, [moved(np.copy, x) for x in tiles], on)
        assert np.shares_memory(logical.r, found.r), name
        assert not any(np.shares_memory(logical.r, x.r) for x in (turned, copied)), name
        np.testing.assert_array_equal(copied.r, found.r, name)
        np.testing.assert_array_equal(turned.r[::-1], found.r, name)
        np.testing.assert_allclose(copied.f, found.f)


def test_what_was_compared_is_forgotten(monkeypatch):
    monkeypatch.setattr(number, "_LARGE", 1)
    x = drawn(random_array((16, 6)), np.random.default_rng(0))
    eqn = jax.make_jaxpr(lax.neg)(np.zeros((16, 6), np.float32)).eqns[0]
    (made,), (again,) = (local(eqn, [x], np.ones(8, bool)) for _ in range(2))
    number.forget()
    (later,) = local(eqn, [x], np.ones(8, bool))
    assert np.shares_memory(made.r, again.r)
    assert not np.shares_memory(made.r, later.r)
    gshard.prove(lambda x: -x, np.zeros((16, 6), np.float32), devices=8)
    assert not number._known


def test_constants_are_the_same_wherever_they_are(monkeypatch):
    monkeypatch.setattr(number, "_LARGE", 2)
    number.forget()
    x = drawn(random_array((16, 6)), np.random.default_rng(0))
    eqn = jax.make_jaxpr(lambda x: x * 2)(np.zeros((16, 6), np.float32)).eqns[0]
    two, other, three = (number.constant(np.float32(n)) for n in (2, 2, 3))
    found = [local(eqn, [x, n], np.ones(8, bool))[0] for n in (two, other, three)]
    assert np.shares_memory(found[0].r, found[1].r)
    assert not (found[0].r == found[2].r).any()


def test_gathers_of_the_same_memory_are_made_once(monkeypatch):
    monkeypatch.setattr(number, "_LARGE", 1)
    number.forget()
    x, i = drawn(random_array((8, 6)), np.random.default_rng(0)), np.arange(6)[None] % 4
    shapes = jax.ShapeDtypeStruct((6,), np.float32), jax.ShapeDtypeStruct((6,), np.int32)
    closed = jax.make_jaxpr(lambda x, i: x.at[i].get(mode="clip"))(*shapes)
    (eqn,) = [e for e in closed.jaxpr.eqns if e.primitive is lax.gather_p]
    values = moved(lambda a: a[0][None], x), i.astype(np.int32)[..., None]
    (one,), (other,) = (local(eqn, values, np.ones(8, bool)) for _ in range(2))
    (moved_on,) = local(eqn, [values[0], (values[1] + 1) % 6], np.ones(8, bool))
    assert np.shares_memory(one.r, other.r)
    assert (one.r != moved_on.r).any()


def test_a_proof_is_the_same(monkeypatch):
    def step(w, x):
        def layer(h, w):
            return jax.nn.softmax(gshard.split(h, 0, 8) @ w), h.max()

        return jax.grad(lambda w: lax.scan(layer, x, w)[0][:, 0].sum())(w)

    shapes = np.zeros((3, 4, 4), np.float32), np.zeros((16, 4), np.float32)
    found = []
    for large in (2**60, 1):
        monkeypatch.setattr(number, "_LARGE", large)
        report = gshard.prove(step, *shapes, devices=8)
        assert report.exact
        found.append((report.compared, report.degree, report.not_compared))
    assert found[0] == found[1]
