"""The choice of a split for every factor."""

import jax
import jax.numpy as jnp

import gshard
from gshard.operators import choose
from gshard.planning import planner as partition
from tests.oracle import check, even_split, random_array


def test_a_split_that_a_dim_cannot_express_is_not_taken_as_agreed():
    """The 5 of (3 4 5) is split in the result; the flat operand, which is whole, cannot be."""
    x = random_array((60,))
    check(
        lambda x: jnp.reshape(x, (3, 4, 5)), x, devices=4, outputs=[even_split(3, 2, 4)], exact=True
    )


def test_layers_that_are_alike_are_written_down_at_once(monkeypatch):
    """What stays in place is chosen for the first layer, and the program is the same."""
    chosen = []
    for cache in ("_in_place", "_cheapest_before"):  # what other tests have left there
        monkeypatch.setattr(choose, cache, {})
    run_as = choose.run_as
    monkeypatch.setattr(choose, "run_as", lambda *args: chosen.append(args) or run_as(*args))

    def fn(x, weights):
        x = gshard.split(x, 0, 8)
        for w in weights:
            x = jnp.tanh(x @ w) / jnp.sqrt(jnp.sum(x * x, 1, keepdims=True)) + x[::-1]
        return x

    def lowered(layers):
        chosen.clear()
        args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 8), (layers, 8, 8))]
        return gshard.jit(lambda *args: fn(*args), devices=8).lower(*args)

    lowered(2)
    few, many = len(chosen), lowered(12)
    quick, of_many = many.as_text(), len(chosen)
    assert of_many < few + 12 * 2  # of a layer's 9 equations, those that are not in place
    monkeypatch.setattr(partition, "in_place_again", lambda *_: None)
    assert lowered(12).as_text() == quick
    assert len(chosen) > 2 * of_many
