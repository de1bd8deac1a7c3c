"""The order in which operators run: depth first to save memory, breadth first on CPUs."""

from __future__ import annotations

from collections import deque
from typing import Any

from jax.extend.core import Literal

from gshard.forecast.program import Body, DeviceOperator
from gshard.moving.inventory import transfers


def depth_first(body: Body) -> list[DeviceOperator]:
    """Operators ordered so that each result is finished before the next is begun."""
    makers = {v: operator for operator in body.operators for v in operator.writes}
    place = {o: i for i, o in enumerate(body.operators)}
    done: set[DeviceOperator] = set()
    order: list[DeviceOperator] = []
    goals = [body.stands_for(v) for v in body.outputs if not isinstance(v, Literal)]
    goals += [v for operator in body.operators for v in operator.writes]
    for goal in goals:
        stack = [makers[goal]] if goal in makers else []
        while stack:
            operator = stack[-1]
            if operator in done:
                stack.pop()
                continue
            needed = {makers[v]: makers[v] for v in operator.reads if v in makers}
            waiting = [o for o in needed.values() if o not in done]
            if waiting:
                stack.append(min(waiting, key=lambda o: place[o]))
                continue
            stack.pop()
            done.add(operator)
            order.append(operator)
    return order


def breadth_first(body: Body) -> list[DeviceOperator]:
    """Operators in the order in which their operands become ready, as XLA for CPUs runs them."""
    readers: dict[Any, list[DeviceOperator]] = {}
    pending: dict[DeviceOperator, int] = {}
    for operator in body.operators:
        needed = set(operator.reads)
        pending[operator] = len(needed)
        for var in needed:
            readers.setdefault(var, []).append(operator)
    for waiting in readers.values():
        waiting.sort(key=lambda o: _when_rewritten(o, body))
    made = {v for o in body.operators for v in o.writes}
    outside = [v for o in body.operators for v in o.reads if v not in made]
    queue = deque(o for o in body.operators if not pending[o])
    order: list[DeviceOperator] = []
    ready: deque[Any] = deque(dict.fromkeys([*body.inputs, *outside]))
    while ready or queue:
        if ready:
            for operator in readers.get(ready.popleft(), ()):
                pending[operator] -= 1
                if not pending[operator]:
                    queue.append(operator)
            continue
        order.append(queue.popleft())
        ready.extend(dict.fromkeys(order[-1].writes))
    return order


def _when_rewritten(operator: DeviceOperator, body: Body) -> int:
    """When XLA for CPUs rewrites a matrix product: consumers of a value run in that order.

    Unchanged are those that contract the rows of their first operand. Last are those whose result
    is transposed, except in programs for several devices, which are simplified again: there they
    are first.
    """
    root = operator.root
    if root.name != "dot_general" or not root.reads:
        return 1
    if any(body.alias[v] == root.writes[0] for v in body.folded):
        return 0 if any(transfers(o.root.eqn) for o in body.operators) else 2
    ((summed, _), (kept, _)) = root.eqn.params["dimension_numbers"]
    by_rows = len(kept) in summed
    return 0 if not root.added and by_rows != (root.reads[0] in body.folded) else 1
