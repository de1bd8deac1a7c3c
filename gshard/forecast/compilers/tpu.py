"""XLA for TPUs fuses a matrix product with the producers of its operands and the consumers of its
result."""

from __future__ import annotations

from typing import Any

from gshard.forecast.compilers.base import Compiler, Dataflow
from gshard.forecast.dataflow import Op
from gshard.graph.kinds import PRODUCTS


class TPU(Compiler):
    """XLA for TPUs."""

    copies_slices = False

    def fuses(self, op: Op) -> bool:
        """Products too."""
        return op.joins or op.primitive in PRODUCTS

    def stores(self, flow: Dataflow) -> set[Any]:
        """Not the values between a product and its single neighbour.

        An operator holds one product at most: `holding` are the values that already come with one.
        """
        stored = super().stores(flow)
        holding: set[Any] = set()
        for op in flow.ops:
            if not op.writes or flow.is_view(op):
                continue
            product = op.primitive in PRODUCTS
            found = [v for v in map(flow.stands_for, op.reads) if v in holding]
            for extra in found if product else found[1:]:
                stored.add(extra)
                holding.discard(extra)
            for var in op.writes:
                users = flow.users(var)
                alone = len(users) == 1 and not flow.leaves(var)
                if product and alone and users[0].joins:
                    stored.discard(var)
                joined = op.joins and not op.reduces and not found
                if alone and joined and users[0].primitive in PRODUCTS:
                    stored.discard(var)
                if var not in stored and (product or found):
                    holding.add(var)
        return stored
