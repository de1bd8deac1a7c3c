"""The second stage: a sharding for every value, and the rewrites that these call for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from gshard.graph.history import History
from gshard.propagation.flow import OperatorTable
from gshard.propagation.propagate import Propagated, propagate
from gshard.propagation.rewrites.batch_alike import batch_alike
from gshard.propagation.rewrites.blocked_scans import block_scans
from gshard.propagation.rewrites.exchange_by_expert import exchange_by_expert
from gshard.propagation.rewrites.in_parts import compute_in_parts
from gshard.propagation.rewrites.merged_dims import undo_merges
from gshard.propagation.rewrites.ring_attention import ring_attention
from gshard.propagation.rewrites.row_spaces import choose_row_spaces
from gshard.propagation.rewrites.rows_of_stacks import unstack_rows
from gshard.tensors.sharding import Sharding

Rewrite = Callable[[Jaxpr, Mapping[Any, Sharding], int, list[str]], Jaxpr]

# Rewrites that depend on shardings, and what the dump says of a program with nothing to rewrite.
REWRITES: dict[str, tuple[Rewrite, str]] = {
    "undo_merges": (undo_merges, "not applied: no reshape moves rows for a sum"),
    "block_scans": (block_scans, "not applied: no associative scan runs along a split dim"),
    "batch_alike": (batch_alike, "not applied: no equal computations would cost less as one"),
    "unstack_rows": (unstack_rows, "not applied: no device has rows of a stack that all read"),
    "compute_in_parts": (compute_in_parts, "not applied: no tiles move to be concatenated"),
    "choose_row_spaces": (choose_row_spaces, "not applied: no rows would stay in their tiles"),
    "exchange_by_expert": (
        lambda jaxpr, shardings, limit, remarks: exchange_by_expert(
            jaxpr, shardings, remarks, itertools.count()
        ),
        "not applied: there is no ragged product",
    ),
    "ring_attention": (
        ring_attention,
        "not applied: no keys, and no scores of a device's queries, exceed the memory limit",
    ),
}


@dataclass(frozen=True, eq=False)
class Known:
    """What is given: the shardings of some `arguments` and of tensors `inside`, and the devices."""

    num_devices: int
    memory_limit: int
    arguments: Sequence[Sharding | None]
    inside: Mapping[Any, Sharding]


def shard(
    flat: ClosedJaxpr, known: Known, rewrites: Collection[str] | None, history: History
) -> tuple[ClosedJaxpr, Propagated]:
    """The program with the rewrites that apply, of some if given, and the shardings of its values.

    After a rewrite splits are propagated again: those found before were of another program.
    """
    count, limit = known.num_devices, known.memory_limit
    arguments = zip(flat.jaxpr.invars, known.arguments, strict=True)
    given = {var: sharding for var, sharding in arguments if sharding is not None}

    table = OperatorTable()

    def propagated(flat: ClosedJaxpr) -> Propagated:
        return propagate(flat, count, given, limit, known.inside, table)

    found = propagated(flat)
    history.add("propagate", flat.jaxpr, found.note)
    for title in REWRITES if rewrites is None else rewrites:
        rewrite, otherwise = REWRITES[title]
        remarks: list[str] = []
        jaxpr = rewrite(flat.jaxpr, found.shardings, limit, remarks)
        if jaxpr is not flat.jaxpr:
            flat = flat.replace(jaxpr=jaxpr)
            found = propagated(flat)
        history.add(title, flat.jaxpr, found.note, remarks or [otherwise])
    return flat, found
