"""Loops and branches while a program is checked: what passes between their runs and around them.

Every run of a body is checked by itself, on what it begins with. Here that is compared with where
it comes from: the operands of the loop, or the end of the run before; and the loop's results with
the end of its last run, or with all runs' results stacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core import primitives as p

from gshard.checking.replaying.lockstep import Path
from gshard.checking.replaying.tiles import plain
from gshard.checking.report import Report
from gshard.checking.scope import Scope, Seen
from gshard.checking.shadow import (
    Gap,
    Known,
    Parts,
    Shadow,
    compare,
    gap_of_parts,
    merged,
    of_device,
    resummed,
)
from gshard.graph.regions import counts_of
from gshard.graph.source import source_of
from gshard.moving.seen import Held
from gshard.tensors.keys import is_key
from gshard.tensors.sharding import Sharding

Shadows = Sequence[Known | None]


class Auditor(Protocol):
    """What is needed of the audit."""

    count: int
    report: Report
    owner: dict[Jaxpr, JaxprEqn]

    def advance(self, scope: Scope, to_the_end: bool = False) -> None:
        """Check the equations of a scope."""

    def settle(
        self,
        scope: Scope,
        var: Any,
        found: Sequence[Seen],
        expected: Known,
        follows: bool = False,
    ) -> None:
        """Compare a value with what it should be."""

    def judge(
        self,
        scope: Scope,
        var: Any,
        held: Held,
        gap: Gap,
        what: str,
        source: str = "",
        follows: bool = False,
    ) -> None:
        """Note a comparison."""

    def trust(self, scope: Scope, var: Any, found: Sequence[Seen], why: str) -> None:
        """Take a value as it is."""


@dataclass
class _Runs:
    """What is kept of the runs of a loop: the first arguments, the last results, and the rows."""

    count: int = 0
    first: list[Known | None] = field(default_factory=list)
    last: list[Known | None] = field(default_factory=list)
    rows_in: dict[int, list[Known | None]] = field(default_factory=dict)
    rows_out: dict[int, list[Known | None]] = field(default_factory=dict)


class Links:
    """Follows the values that pass into loops, from run to run, and out."""

    def __init__(self, audit: Auditor):
        self.audit = audit
        self.runs: dict[tuple[JaxprEqn, Path], _Runs] = {}

    def ended(self, scope: Scope) -> None:
        """A run of a body is over: finish its equations, and compare what it began with."""
        self.audit.advance(scope, to_the_end=True)
        eqn = self.audit.owner[scope.jaxpr]
        runs = self.runs.setdefault((eqn, scope.path[:-1]), _Runs())
        begun = [scope.shadows.get(v) for v in scope.jaxpr.invars]
        results = [scope.read(a) for a in scope.jaxpr.outvars]
        number = scope.path[-1][1]
        if eqn.primitive is p.scan_p:
            consts, carried = counts_of(eqn)
            runs.rows_in[number] = begun[consts + carried :]
            runs.rows_out[number] = results[carried:]
            begun, results = begun[: consts + carried], results[:carried]
        elif eqn.primitive is p.while_p:
            if scope.jaxpr is eqn.params["cond_jaxpr"].jaxpr:
                return
            consts = eqn.params["body_nconsts"]
        else:
            consts = len(begun)
        if eqn.primitive is p.cond_p and runs.count:  # devices took different branches
            runs.first = list(map(merged, begun, runs.first))
        elif runs.count:
            variables = scope.jaxpr.invars[consts:]
            self._same(scope, variables, begun[consts:], runs.last, f"carried into run {number}")
        else:
            runs.first = begun
        runs.last = list(map(merged, results, runs.last)) if runs.last else results
        runs.count += 1

    def check_loop(
        self, scope: Scope, eqn: JaxprEqn, operands: Shadows, found: Mapping[Any, Sequence[Seen]]
    ) -> bool:
        """Compare a loop's operands and results with its runs; False if no run of it was seen."""
        runs = self.runs.pop((eqn, scope.path), None)
        if runs is None:
            return False
        expected: list[Known | None]
        if eqn.primitive is p.scan_p:
            consts, carried = counts_of(eqn)
            self._same(scope, eqn.invars, runs.first, operands[: consts + carried], "operand")
            rows = _stacked(runs.rows_in, len(operands) - consts - carried)
            rest = slice(consts + carried, None)
            self._same(scope, eqn.invars[rest], rows, operands[rest], "operand, row by row")
            expected = [*runs.last, *_stacked(runs.rows_out, len(eqn.outvars) - carried)]
        elif eqn.primitive is p.while_p:
            into = operands[eqn.params["cond_nconsts"] :]
            if runs.count:
                variables = eqn.invars[eqn.params["cond_nconsts"] :]
                self._same(scope, variables, runs.first, into, "operand")
            after = list(into[eqn.params["body_nconsts"] :])
            expected = list(map(merged, runs.last, after)) if runs.count else after
        else:
            self._same(scope, eqn.invars[1:], runs.first, operands[1:], "operand")
            expected = runs.last
        for var, known in zip(eqn.outvars, expected, strict=True):
            if known is None:
                self.audit.trust(scope, var, found[var], "of a loop with values that are not known")
            else:
                follows = bool(self.audit.report.differences)
                self.audit.settle(scope, var, found[var], known, follows)
        return True

    def _same(
        self, scope: Scope, atoms: Sequence[Any], got: Shadows, wanted: Shadows, what: str
    ) -> None:
        """Compare what a body begins with, with where it comes from."""
        eqn = self.audit.owner.get(scope.jaxpr)
        source = "" if eqn is None else source_of(eqn)
        for atom, a, b in zip(atoms, got, wanted, strict=False):
            if a is None or b is None:
                continue
            shape = tuple(atom.aval.shape)
            held = Held(atom, Sharding.replicated(len(shape), self.audit.count), shape)
            if isinstance(a, Parts) or isinstance(b, Parts):
                gap = gap_of_parts(a, b, self.audit.count)
            else:
                both = (resummed(x, self.audit.count) for x in (a, b))
                limit = sum((s.slack for s in both if s.slack is not None), np.zeros(()))
                tiles = [plain(a.value)] * self.audit.count
                gap = compare(tiles, held, plain(b.value), limit)
            follows = bool(self.audit.report.differences)
            self.audit.judge(scope, atom, held, gap, what, source, follows)


def constants(eqn: JaxprEqn, body: Jaxpr) -> list[tuple[Any, Any]]:
    """The arguments of a body that are the same in all runs, and the operands that they are."""
    if eqn.primitive is p.scan_p:
        return list(zip(body.invars, eqn.invars, strict=True))[: counts_of(eqn)[0]]
    if eqn.primitive is p.while_p:
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        first = (0, n_cond) if body is eqn.params["cond_jaxpr"].jaxpr else (n_cond, n_body)
        outside = eqn.invars[first[0] : first[0] + first[1]]
        return list(zip(body.invars, outside, strict=False))
    return list(zip(body.invars, eqn.invars[1:], strict=True))


def _stacked(rows: Mapping[int, Shadows], count: int) -> list[Known | None]:
    """The rows of all runs, as one value each."""
    columns = [[rows[number][column] for number in sorted(rows)] for column in range(count)]
    return list(map(_stack, columns))


def _stack(rows: Shadows) -> Known | None:
    known = [x for x in rows if x is not None]
    if len(known) < len(rows):
        return None
    parts = [x for x in known if isinstance(x, Parts)]
    if parts:
        devices = range(len(parts[0].of))
        return Parts(tuple(_stack_of([of_device(x, d) for x in known]) for d in devices))
    return _stack_of([of_device(x, 0) for x in known])


def _stack_of(rows: Sequence[Shadow | None]) -> Shadow | None:
    known = [x for x in rows if x is not None]
    if not known or len(known) < len(rows):
        return None
    join = jax.numpy.stack if is_key(known[0].value) else np.stack
    shape = np.shape(plain(known[0].value))
    slack, summands = (
        np.stack([np.zeros(shape) if x is None else x for x in column])
        if any(x is not None for x in column)
        else None
        for column in ([x.slack for x in known], [x.summands for x in known])
    )
    return Shadow(join([x.value for x in known]), slack, summands)
