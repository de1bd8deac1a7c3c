"""An emitted program, and the interpreter: what all devices run, one equation at a time.

What a constant is, and what operators do, is up to its `Numbers`: floats as devices have them
(`on_host`), or exact numbers (`exact`). Calls, loops and branches are entered. Every value has a
leading dim, with an entry for each device, or one for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import clean_up_dead_vars, last_used
from gshard.checking.collectives import over_groups, run_manual
from gshard.checking.exact.number import Value, alike, at, chosen, plain, stacked_once
from gshard.checking.tiles import Tiling
from gshard.graph.regions import LOOPS, called, counts_of
from gshard.graph.source import source_of
from gshard.moving.available import Held
from gshard.tensors.manual import MANUAL, NamedAxes
from gshard.tensors.sharding import Sharding

Path = tuple[tuple[JaxprEqn, int], ...]  # the loops and branches around, with the number of each
Crossing = tuple[Sharding, tuple[int, ...]]  # the sharding and the logical shape of an array


@dataclass(frozen=True, eq=False)
class Emitted:
    """What each device of a mesh with axes of these `sizes` runs.

    `flat` is the user's program, before anything was rewritten; `consts` are the values that the
    user's function closes over, which cross the border before its arguments do.
    """

    name: str
    body: ClosedJaxpr
    sizes: Mapping[str, int]
    into: Sequence[Crossing]
    out_of: Sequence[Crossing]
    consts: Sequence[Any]
    held: Mapping[Any, Sequence[Held]]  # what the variables of the program hold of the user's
    flat: ClosedJaxpr

    @property
    def count(self) -> int:
        """How many devices there are."""
        return math.prod(self.sizes.values())

    @property
    def unpartitioned(self) -> ClosedJaxpr:
        """The user's program, of everything that enters: constants are its first arguments."""
        jaxpr = self.flat.jaxpr
        variables = [*jaxpr.constvars, *jaxpr.invars]
        return ClosedJaxpr(jaxpr.replace(constvars=[], invars=variables), [])

    def entering(self, values: Sequence[Value]) -> list[Value]:
        """The tiles of all devices of everything that enters."""
        pairs = zip(values, self.into, strict=True)
        return [Tiling(*crossing).cut(value) for value, crossing in pairs]

    def leaving(self, results: Sequence[Value]) -> list[Any]:
        """The logical results."""
        pairs = zip(results, self.out_of, strict=True)
        return [plain(Tiling(*crossing).assembled(tiles))[0] for tiles, crossing in pairs]


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
    values: list[Value]  # others may be put in their places
    operands: Sequence[Value]
    path: Path
    ends: bool = False  # a loop or call, whose equations have been events of their own
    active: Any = True  # the devices that run here


Run = Generator[Event, None, list[Value]]


@dataclass(frozen=True)
class Numbers:
    """What constants are, what an equation that sends nothing does on the devices that are active,
    and the programs that some equations stand for."""

    constant: Callable[[Any], Value]
    local: Callable[[JaxprEqn, Sequence[Value], np.ndarray], list[Value]]
    written_out: Callable[[JaxprEqn], ClosedJaxpr | None] = lambda eqn: None


def _literal(atom: Literal) -> Any:
    """The value of a literal, in its own type: Python's numbers have 64 bits."""
    return np.asarray(atom.val, atom.aval.dtype) if np.isscalar(atom.val) else atom.val


class Lockstep:
    """Runs programs for all devices of a mesh with axes of these `sizes`."""

    def __init__(self, sizes: Mapping[str, int], numbers: Numbers):
        grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        self.axes, self.count = NamedAxes(tuple(sizes), grid), grid.size
        self.numbers = numbers

    def run(
        self,
        closed: ClosedJaxpr,
        args: Sequence[Value],
        active: np.ndarray | None = None,
        path: Path = (),
    ) -> Run:
        """Run a program on the `active` devices: the events on the way, and at last its results."""
        jaxpr, constant = closed.jaxpr, self.numbers.constant
        variables = (*jaxpr.constvars, *jaxpr.invars)
        on = np.ones(self.count, bool) if active is None else active
        begins = [*map(constant, closed.consts), *args]
        yield Event(None, variables, begins, (), path, active=on)
        env: dict[Any, Value] = dict(zip(variables, begins, strict=True))
        last = last_used(jaxpr)

        def read(atom: Any) -> Value:
            return constant(_literal(atom)) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            operands = [read(a) for a in eqn.invars]
            results = yield from self._equation(eqn, operands, on, path)
            entered = eqn.primitive in LOOPS or called(eqn) is not None
            yield Event(eqn, eqn.outvars, results, operands, path, entered, on)
            env.update((v, x) for v, x in zip(eqn.outvars, results, strict=True) if v in last)
            clean_up_dead_vars(eqn, env, last)
        return [read(a) for a in jaxpr.outvars]

    def _equation(
        self, eqn: JaxprEqn, operands: list[Value], active: np.ndarray, path: Path
    ) -> Run:
        primitive = eqn.primitive
        loops = {p.scan_p: self._scan, p.while_p: self._while, p.cond_p: self._cond}
        if loop := loops.get(primitive):
            return (yield from loop(eqn, operands, active, path))
        body = called(eqn) or self.numbers.written_out(eqn)
        if body is not None:
            return (yield from self.run(body, operands, active, path))
        eqn = over_groups(eqn, self.axes)
        if eqn.primitive in MANUAL:
            self._check_together(eqn, active)
            with eqn.ctx.manager, np.errstate(all="ignore"):
                return run_manual(eqn, operands, self.count)
        return self.numbers.local(eqn, operands, active)

    def _check_together(self, eqn: JaxprEqn, active: np.ndarray) -> None:
        for group in () if active.all() else eqn.params.get("groups", ()):
            if len({bool(active[d]) for d in group}) > 1:
                here = [d for d in group if active[d]]
                away = [d for d in group if not active[d]]
                raise DivergedError(
                    f"{source_of(eqn)}: devices {here} run {eqn.params['primitive']}, and "
                    f"{away} of their group do not: they took another branch of a cond or left a "
                    "loop earlier. On hardware this program hangs"
                )

    def _scan(self, eqn: JaxprEqn, operands: list[Value], active: np.ndarray, path: Path) -> Run:
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        consts, carried = counts_of(eqn)
        carry, xs = operands[consts : consts + carried], operands[consts + carried :]
        stacks: list[list[Value]] = [[] for _ in eqn.outvars[carried:]]
        turn = slice(None, None, -1 if eqn.params["reverse"] else 1)
        for number in range(length)[turn]:
            rows = [at(value, (slice(None), number)) for value in xs]
            args = [*operands[:consts], *carry, *rows]
            results = yield from self.run(body, args, active, (*path, (eqn, number)))
            carry = results[:carried]
            for stack, result in zip(stacks, results[carried:], strict=True):
                stack.append(result)
        if not length:
            nothing = (np.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars[carried:])
            return [*carry, *map(self.numbers.constant, nothing)]
        return [*carry, *(stacked_once(alike(stack[turn])) for stack in stacks)]

    def _while(self, eqn: JaxprEqn, operands: list[Value], active: np.ndarray, path: Path) -> Run:
        """Each device runs the loop until its own condition is false."""
        cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry, number, running = operands[n_cond + n_body :], 0, active
        while True:
            inside = (*path, (eqn, number))
            now = (*operands[:n_cond], *carry)
            (again,) = yield from self.run(cond, now, running, inside)
            rows = tuple(range(1, again.ndim))  # each row of a batch has a condition of its own
            running = running & np.broadcast_to(again.any(rows), (self.count,))
            if not running.any():
                return list(carry)
            now = (*operands[n_cond : n_cond + n_body], *carry)
            results = yield from self.run(body, now, running, inside)
            if rows:
                results = [chosen(again, r, c) for r, c in zip(results, carry, strict=True)]
            carry = [_merged(r, c, running) for r, c in zip(results, carry, strict=True)]
            number += 1

    def _cond(self, eqn: JaxprEqn, operands: list[Value], active: np.ndarray, path: Path) -> Run:
        index, *arguments = operands
        branches = eqn.params["branches"]
        own = np.broadcast_to(plain(index), (self.count,)).astype(int)
        own = np.clip(own, 0, len(branches) - 1)
        results: list[Any] = [None] * len(eqn.outvars)
        for number in sorted(set(own[active].tolist())):
            taken = active & (own == number)
            made = yield from self.run(branches[number], arguments, taken, (*path, (eqn, number)))
            results = [_merged(new, old, taken) for new, old in zip(made, results, strict=True)]
        return results


def _merged(new: Value, old: Value | None, devices: np.ndarray) -> Value:
    """The new value on some devices, the old one on the others."""
    return new if old is None or devices.all() else chosen(devices, new, old)


def ended(run: Run, look: Callable[[Event], None] = lambda event: None) -> list[Value]:
    """The results of a run, after a look at all of its events."""
    while True:
        try:
            look(next(run))
        except StopIteration as end:
            return list(end.value)
