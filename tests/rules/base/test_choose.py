"""The choice of a split for every factor."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.moving.available import Mover, Seen
from gshard.moving.costs import GENERIC_COSTS, use_cost_model
from gshard.planning import choose
from gshard.propagation.propagate import Propagated
from gshard.rules.base import ways
from gshard.rules.base.rule import REMEMBERED, RULES, Shares
from gshard.rules.base.uses import Uses
from gshard.rules.contraction import dot_work
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile
from tests.oracle import check, even_split, random_array

ROWS, COLUMNS = (Sharding.of_assignment(even_split(2, d, 8), 8) for d in (0, 1))
WHOLE = Sharding.replicated(2, 8)
X = np.zeros((8, 8), np.float32)


def equation(fn, *args):
    (eqn,) = jax.make_jaxpr(fn)(*args).jaxpr.eqns
    return eqn


def test_a_split_that_a_dim_cannot_express_is_not_taken_as_agreed():
    """The 5 of (3 4 5) is split in the result; the flat operand, which is whole, cannot be."""
    x = random_array((60,))
    check(
        lambda x: jnp.reshape(x, (3, 4, 5)), x, devices=4, outputs=[even_split(3, 2, 4)], exact=True
    )


class Forgetful(dict):
    """A cache that keeps nothing."""

    def __setitem__(self, key, value):
        pass


def test_layers_that_are_alike_are_written_down_at_once(monkeypatch):
    """What stays in place is chosen for the first layer, and the program is the same."""
    chosen = []
    for cache in ("in_place", "cheapest"):  # what other tests have left there
        monkeypatch.setattr(REMEMBERED, cache, {})
    choice = choose.Choice._cheapest
    monkeypatch.setattr(choose.Choice, "_cheapest", lambda *a: chosen.append(a) or choice(*a))

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
    monkeypatch.setattr(REMEMBERED, "in_place", Forgetful())
    assert lowered(12).as_text() == quick
    assert len(chosen) > 2 * of_many


def chooser(limit=0):
    """The choice for a program without equations, in which nothing is shared."""
    uses = Uses(jax.make_jaxpr(lambda: ())().jaxpr)
    return choose.Choice(Propagated({}), uses, {}, Mover(Place((), 8), Seen()), limit)


@pytest.fixture
def forgotten(monkeypatch):
    """No choice of another test is remembered."""
    for cache in ("in_place", "cheapest"):
        monkeypatch.setattr(REMEMBERED, cache, {})


def test_a_choice_is_made_anew_for_all_that_it_depends_on(forgotten, monkeypatch):
    calls = []
    made = choose.least
    monkeypatch.setattr(choose, "least", lambda *a: calls.append(a) or made(*a))
    eqn = equation(jnp.add, X, X)
    rule = RULES[eqn.primitive]

    def way(shardings=(ROWS, COLUMNS), target=ROWS, shares=None, machine=GENERIC_COSTS, limit=0):
        choice = chooser(limit)
        monkeypatch.setattr(choice, "_shares", lambda *_: shares)
        tiles = [Tile(X[: 8 // s.tiles[0], : 8 // s.tiles[1]], s, X.shape) for s in shardings]
        with use_cost_model(machine):
            return choice.cheapest(eqn, rule, tiles, [target])

    one = way()
    assert way() == one
    assert len(calls) == 1
    way(shardings=(ROWS, WHOLE))
    assert way(target=COLUMNS) != one
    way(shares=Shares(0.5, (1.0, 1.0), (1.0, 1.0), (frozenset(), frozenset())))
    way(machine=replace(GENERIC_COSTS, latency=GENERIC_COSTS.latency * 2))
    way(limit=1)
    assert len(calls) == 6


def test_what_needed_no_communication_needs_it_with_unreduced_operands(forgotten):
    eqn = equation(jnp.sin, X)
    tile = Tile(X[:1], ROWS, X.shape)
    rule, choice = RULES[eqn.primitive], chooser()
    assert choice.cheapest(eqn, rule, [tile], [ROWS]).how.in_place
    unreduced = replace(tile, sharding=ROWS.unreduced_over([COLUMNS.splits[1]]))
    assert not choice.cheapest(eqn, rule, [unreduced], [ROWS]).how.in_place


def test_an_operator_ran_in_place_for_the_same_results_only(forgotten):
    eqn, tile, choice = equation(jnp.negative, X), Tile(X[:1], ROWS, X.shape), chooser()
    for target, stays in ((ROWS, True), (WHOLE, False), (ROWS, True)):
        found = choice.cheapest(eqn, RULES[eqn.primitive], [tile], [target])
        assert found.how.in_place is stays


def test_kept_factors_stay_split_where_a_gather_is_cheaper():
    eqn = equation(jnp.sin, X)
    factors = RULES[eqn.primitive].factors(eqn)
    (row, _) = (dim[0] for dim in factors.results[0])

    def splits(kept):
        found = ways.by_factors(eqn, factors, [ROWS], [WHOLE], kept)
        return [way.how.chosen[row] for way in found]

    assert splits(()) == [ROWS.splits[0], None]
    assert splits({row}) == [ROWS.splits[0]]


def test_local_work_is_what_a_device_touches_or_multiplies():
    """Bytes of all operands and results, or two operations for each term of a product: the slower.

    A row of a product multiplies for less time than it takes to read all of the other operand.
    """
    machine = replace(GENERIC_COSTS, memory_per_byte=4.0, flops_per_byte=2.0)
    cases = (jnp.sin, 1, 2 * 64, 2 * 8), (jnp.dot, 2, 2 * 8**3 / 2, 8 + 64 + 8)
    with use_cost_model(machine):
        for fn, operands, replicated, by_row in cases:
            eqn = equation(fn, *[X] * operands)
            factors = RULES[eqn.primitive].factors(eqn)
            split = dict.fromkeys(factors.sizes) | {
                dim[0]: ROWS.splits[0] for dim in factors.results[0][:1]
            }
            work = dot_work if fn is jnp.dot else None
            assert ways.FactorSplit.of(eqn, factors, {}, 8).work(eqn, work) == replicated
            assert ways.FactorSplit.of(eqn, factors, split, 8).work(eqn, work) == by_row
