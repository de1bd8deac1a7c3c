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


def test_what_is_freed_is_forgotten(monkeypatch):
    monkeypatch.setattr(number, "_LARGE", 1)
    x = drawn(random_array((16, 6)), np.random.default_rng(0))
    eqn = jax.make_jaxpr(lax.neg)(np.zeros((16, 6), np.float32)).eqns[0]
    before = len(number._known)
    (made,) = local(eqn, [x], np.ones(8, bool))
    assert len(number._known) == before + 1
    del made
    assert len(number._known) == before


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
