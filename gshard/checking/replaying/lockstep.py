"""The interpreter: what all devices run, one equation at a time, each on all devices in turn.

A value is a list with an entry for each device; None for a device that does not run there, as in a
branch that it does not take. Local work is done by the primitives themselves, on one CPU device;
collectives by `collectives`. Calls, loops and branches are entered.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard.checking.replaying.collectives import NAMES, groups_of, rank_in, run_collective
from gshard.checking.replaying.on_host import OnHost
from gshard.graph.regions import LOOPS, called, counts_of
from gshard.graph.source import source_of
from gshard.tensors.devices import lookup_p

Value = list[Any]  # an entry for each device
Path = tuple[tuple[JaxprEqn, int], ...]  # the loops and branches around, with the number of each


def runs_of(path: Path) -> tuple[int, ...]:
    """The numbers of the runs of the loops on a path, which has branches of conditionals, too."""
    return tuple(number for eqn, number in path if eqn.primitive is not p.cond_p)


class DivergedError(RuntimeError):
    """Some devices of a group run a collective that the others do not: on hardware this hangs."""


@dataclass(frozen=True, eq=False)
class Event:
    """An equation that was run, or, where `eqn` is None, a body that begins.

    `variables` are the results of the equation, or the arguments of the body.
    """

    eqn: JaxprEqn | None
    variables: Sequence[Any]
    values: Sequence[Value]
    operands: Sequence[Value]
    path: Path
    ends: bool = False  # a loop or call, whose equations have been events of their own


Run = Generator[Event, None, list[Value]]


class Lockstep:
    """Runs programs for all devices of a mesh with axes of these `sizes`."""

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = dict(sizes)
        self.count = int(np.prod(list(self.sizes.values())))
        self.on_host = OnHost()
        self._last: dict[Jaxpr, dict[Any, int]] = {}

    def run(
        self,
        closed: ClosedJaxpr,
        args: Sequence[Value],
        active: Sequence[bool] | None = None,
        path: Path = (),
    ) -> Run:
        """Run a program on the `active` devices: the events on the way, and at last its results."""
        jaxpr = closed.jaxpr
        variables = (*jaxpr.constvars, *jaxpr.invars)
        values = (*([c] * self.count for c in closed.consts), *args)
        active = [True] * self.count if active is None else active
        env: dict[Any, Value] = dict(zip(variables, values, strict=True))
        last = self._last_uses(jaxpr)
        yield Event(None, variables, values, (), path)

        def read(atom: Any) -> Value:
            if isinstance(atom, Literal):
                return [atom.val if on else None for on in active]
            return env[atom]

        for number, eqn in enumerate(jaxpr.eqns):
            operands = [read(a) for a in eqn.invars]
            results = yield from self._equation(eqn, operands, active, path)
            env.update(zip(eqn.outvars, results, strict=True))
            entered = eqn.primitive in LOOPS or called(eqn) is not None
            yield Event(eqn, eqn.outvars, results, operands, path, entered)
            for atom in (*eqn.invars, *eqn.outvars):
                if not isinstance(atom, Literal) and last.get(atom, -1) <= number:
                    env.pop(atom, None)
        return [read(a) for a in jaxpr.outvars]

    def _last_uses(self, jaxpr: Jaxpr) -> dict[Any, int]:
        """The number of the last equation that reads each variable."""
        if jaxpr not in self._last:
            last = {
                a: number
                for number, eqn in enumerate(jaxpr.eqns)
                for a in eqn.invars
                if not isinstance(a, Literal)
            }
            last |= {a: len(jaxpr.eqns) for a in jaxpr.outvars if not isinstance(a, Literal)}
            self._last[jaxpr] = last
        return self._last[jaxpr]

    def _equation(
        self, eqn: JaxprEqn, operands: list[Value], active: Sequence[bool], path: Path
    ) -> Run:
        primitive = eqn.primitive
        if primitive is p.scan_p:
            return (yield from self._scan(eqn, operands, active, path))
        if primitive is p.while_p:
            return (yield from self._while(eqn, operands, active, path))
        if primitive is p.cond_p:
            return (yield from self._cond(eqn, operands, path))
        if (body := called(eqn)) is not None:
            return (yield from self.run(body, operands, active, path))
        if primitive is p.axis_index_p:
            numbers = rank_in(eqn, self.sizes)
            return [_on([jnp.asarray(n, jnp.int32) for n in numbers], active)]
        if primitive.name in NAMES:
            self._check_together(eqn, active)
            with eqn.ctx.manager, np.errstate(all="ignore"):
                return run_collective(eqn, operands, self.sizes)
        return self._local(eqn, operands, active)

    def _check_together(self, eqn: JaxprEqn, active: Sequence[bool]) -> None:
        for group in groups_of(eqn, self.sizes):
            if len({active[d] for d in group}) > 1:
                here = [d for d in group if active[d]]
                away = [d for d in group if not active[d]]
                raise DivergedError(
                    f"{source_of(eqn)}: devices {here} run {eqn.primitive.name}, and devices "
                    f"{away} of their group do not: they took another branch of a cond or left a "
                    "loop earlier. On hardware this program hangs"
                )

    def _local(self, eqn: JaxprEqn, operands: list[Value], active: Sequence[bool]) -> list[Value]:
        """The results of an equation that sends nothing; equal operands give results once."""
        results: list[Value] = [[None] * self.count for _ in eqn.outvars]
        known: dict[tuple[int, ...], Sequence[Any]] = {}
        for device in range(self.count):
            if not active[device]:
                continue
            own = [value[device] for value in operands]
            key = tuple(map(id, own))
            if key not in known or eqn.effects:
                known[key] = self._evaluate(eqn, own)
            for result, array in zip(results, known[key], strict=True):
                result[device] = array
        return results

    def _evaluate(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive is lookup_p:
            return [jnp.asarray(eqn.params["table"].rows[int(values[0])])]
        return self.on_host(eqn, values)

    def _scan(
        self, eqn: JaxprEqn, operands: list[Value], active: Sequence[bool], path: Path
    ) -> Run:
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        consts, carried = counts_of(eqn)
        carry, xs = operands[consts : consts + carried], operands[consts + carried :]
        stacks: list[list[Value]] = [[] for _ in eqn.outvars[carried:]]
        order = range(length)
        for number in reversed(order) if eqn.params["reverse"] else order:
            rows = [[None if x is None else x[number] for x in value] for value in xs]
            inside = (*path, (eqn, number))
            args = [*operands[:consts], *carry, *rows]
            results = yield from self.run(body, args, active, inside)
            carry = results[:carried]
            for stack, result in zip(stacks, results[carried:], strict=True):
                stack.append(result)
        if eqn.params["reverse"]:
            stacks = [stack[::-1] for stack in stacks]
        made = [
            self._stacked(stack, var.aval)
            for stack, var in zip(stacks, eqn.outvars[carried:], strict=True)
        ]
        return [*carry, *made]

    def _stacked(self, rows: list[Value], aval: Any) -> Value:
        if not rows:
            return [jnp.zeros(aval.shape, aval.dtype)] * self.count
        columns = zip(*rows, strict=True)
        return [None if c[0] is None else jnp.stack([jnp.asarray(x) for x in c]) for c in columns]

    def _while(
        self, eqn: JaxprEqn, operands: list[Value], active: Sequence[bool], path: Path
    ) -> Run:
        """Each device runs the loop until its own condition is false."""
        cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry, number = operands[n_cond + n_body :], 0
        running = list(active)
        while True:
            inside = (*path, (eqn, number))
            now = [_on(v, running) for v in carry]
            consts = [_on(v, running) for v in operands[: n_cond + n_body]]
            (again,) = yield from self.run(cond, [*consts[:n_cond], *now], running, inside)
            running = [on and bool(again[d]) for d, on in enumerate(running)]
            if not any(running):
                return list(carry)
            now = [_on(v, running) for v in carry]
            consts = [_on(v, running) for v in operands[n_cond : n_cond + n_body]]
            results = yield from self.run(body, [*consts, *now], running, inside)
            carry = [_merged(r, c) for r, c in zip(results, carry, strict=True)]
            number += 1

    def _cond(self, eqn: JaxprEqn, operands: list[Value], path: Path) -> Run:
        index, *arguments = operands
        branches = eqn.params["branches"]
        chosen = [None if i is None else min(max(int(i), 0), len(branches) - 1) for i in index]
        results: list[Value] = [[None] * self.count for _ in eqn.outvars]
        for number in sorted({i for i in chosen if i is not None}):
            taken = [i == number for i in chosen]
            inside = (*path, (eqn, number))
            args = [_on(v, taken) for v in arguments]
            made = yield from self.run(branches[number], args, taken, inside)
            results = [_merged(m, r) for m, r in zip(made, results, strict=True)]
        return results


def _on(value: Value, devices: Sequence[bool]) -> Value:
    """A value on some devices alone."""
    return [x if on else None for x, on in zip(value, devices, strict=True)]


def _merged(new: Value, old: Value) -> Value:
    """The new value where there is one, else the old one."""
    return [o if n is None else n for n, o in zip(new, old, strict=True)]
