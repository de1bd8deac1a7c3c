"""A stack of pairs as a pipeline: `gshard.pipeline` in the place of `lax.scan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gshard.nn.pair import Pair
from gshard.nn.strategy import Strategy
from gshard.pipelining.api import pipeline


def in_stages(
    body: Callable[..., tuple[Array, Any]],
    stack: Any,
    keys: Array | None,
    x_BTM: Array,
    rest: Any,
    strategy: Strategy,
    *,
    remat: bool,
) -> tuple[Array, Any]:
    """`body(x, pair, key, *rest)` over the pairs in stages: the results, and reports by pair.

    `rest` has rows as `x_BTM` does, which travel with it. A group of tokens stays in one
    microbatch. Reports are means over the microbatches, and what is random is drawn for each.
    """
    count, B, groups = strategy.microbatches, len(x_BTM), _groups(stack)
    if not isinstance(stack, Pair):
        raise ValueError(f"{strategy.stages} stages need stacked=True, the weights of all pairs")
    if B % count or (groups or count) % count:
        raise ValueError(
            f"{B} sequences in {groups or B} groups do not divide into {count} microbatches"
        )
    pairs, together = len(jax.tree.leaves(stack)[0]), max(B // (groups or B), 1)

    def ordered(a: Array, sizes: tuple[int, int]) -> Array:
        """Rows such that every `count`-th is of one microbatch: groups there; or back."""
        return a.reshape(-1, *sizes, *a.shape[1:]).swapaxes(1, 2).reshape(a.shape)

    def one(weights: Any, values: Any) -> Any:
        (pair, key, number), (x, rows, rest, reports) = weights, values
        key = None if key is None else jax.random.fold_in(key, rows[0])
        x, report = body(x, pair, key, *rest)
        here = jnp.arange(pairs) == number
        reports = jax.tree.map(
            lambda kept, new: jnp.where(here.reshape(-1, *[1] * new.ndim), new, kept),
            reports,
            report,
        )
        return x, rows, rest, reports

    weights = (stack, keys, jnp.arange(pairs))
    batch = jax.tree.map(lambda a: ordered(a, (count, together)), (x_BTM, jnp.arange(B), rest))
    first = jax.tree.map(lambda a: a[0], (stack, keys))
    of_part = jax.tree.map(lambda a: a[: B // count], (batch[0], batch[2]))
    report = jax.eval_shape(lambda w, v: body(v[0], *w, *v[1])[1], first, of_part)
    empty = jax.tree.map(lambda a: jnp.zeros((B, pairs, *a.shape), a.dtype), report)
    run = jax.checkpoint(one) if remat else one
    x_BTM, _, _, reports = pipeline(
        run, weights, (*batch, empty), stages=strategy.stages, microbatches=count
    )
    return ordered(x_BTM, (together, count)), jax.tree.map(lambda a: jnp.mean(a, 0), reports)


def _groups(stack: Any) -> int | None:
    """The groups of the batch, in a stack that has experts."""
    moe = getattr(getattr(stack, "sparse", None), "moe", None)
    return moe and moe.groups
