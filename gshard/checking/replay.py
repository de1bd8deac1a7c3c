"""`lowered.replay`: what one device runs, equation by equation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from gshard.checking.collectives import RUN_TOGETHER, exchanged
from gshard.checking.exact.number import Value, beside, floats, is_float, plain
from gshard.checking.lockstep import Emitted, Event, Lockstep, Numbers, runs_of
from gshard.checking.on_host import on_each
from gshard.checking.tiles import Place, Tiling, logical
from gshard.graph.readable import counted, size
from gshard.graph.reason import NO_REASON
from gshard.graph.regions import walk
from gshard.graph.source import reason_of, source_of
from gshard.moving.available import Held

FLOATS = Numbers(floats, on_each)  # as devices have them
Makers = Mapping[Any, JaxprEqn]  # of the variables of a program


@dataclass(frozen=True, eq=False)
class DeviceTile:
    """What a device has of a value: its tile, and where in the whole array that belongs.

    `array` is the tile, padding included. `shape` is that of the whole array and `place` the
    slices of it that the tile is; both are None for what an operator computes on the way, which
    is a part of no value of the user's program. An `unreduced` value's tile is a summand.
    """

    array: np.ndarray
    shape: tuple[int, ...] | None = None
    place: Place | None = None
    unreduced: bool = False

    @property
    def real(self) -> np.ndarray:
        """The tile without padding; all of it where it is not known what is padding."""
        rows: Any = [slice(s.stop - s.start) for s in self.place or ()]
        return self.array[(*rows, ...)]

    @functools.cached_property
    def range(self) -> str:
        """The least and the largest number, and how many are not finite."""
        values = self.real
        is_float = jnp.issubdtype(values.dtype, jnp.floating)
        if values.size == 0 or (values.dtype.kind not in "iuf" and not is_float):
            return ""
        finite = values[np.isfinite(values)] if is_float else values
        odd = values.size - finite.size
        shown = f"{finite.min():.4g} to {finite.max():.4g}" if finite.size else "nothing finite"
        return f"{shown}, {odd:,} not finite" if odd else shown

    def __str__(self) -> str:
        kind = f"{self.array.dtype}{list(self.array.shape)}"
        if self.shape is None:
            return f"{kind} (of this device alone)"
        if self.place is None:
            return f"{kind} (this device holds no tile)"
        rows = ", ".join(f"{s.start}:{s.stop}" for s in self.place)
        summand = "a summand of " if self.unreduced else ""
        padding = self.array.size - self.real.size
        more = f", {padding:,} elements of padding" if padding else ""
        return f"{kind} = {summand}[{rows}] of {list(self.shape)}{more}"

    __repr__ = __str__


def _history(eqn: JaxprEqn, makers: Makers, depth: int, indent: str = "") -> Iterator[str]:
    """The operators that led to the results of an equation, the latest first."""
    yield f"{indent}{_kinds(eqn.outvars)} = {eqn.primitive.name}  {source_of(eqn)}"
    operands = [makers.get(a, a) for a in eqn.invars if not isinstance(a, Literal)]
    for made in dict.fromkeys(operands) if depth > 1 else ():
        if isinstance(made, JaxprEqn):
            yield from _history(made, makers, depth - 1, indent + "  ")
        else:
            yield f"{indent}  {_kinds([made])} = argument  "


def _kinds(variables: Sequence[Any]) -> str:
    return ", ".join(v.aval.str_short(short_dtypes=True) for v in variables)


@dataclass(frozen=True, eq=False)
class ReplayStep:
    """One equation, as one `device` runs it.

    `runs` are the iteration numbers of the loops around it. `sent` and `received` have what a
    collective exchanges with which other device.
    """

    number: int
    operator: str
    source: str
    reason: str
    device: int
    runs: tuple[int, ...]
    operands: Sequence[DeviceTile]
    results: Sequence[DeviceTile]
    sent: dict[int, np.ndarray]
    received: dict[int, np.ndarray]
    eqn: JaxprEqn | None
    makers: Makers
    found: str = ""  # what `until` found

    def history(self, depth: int = 6) -> str:
        """The operators that led to this step, the latest first, with their lines."""
        return "\n".join(_history(self.eqn, self.makers, depth)) if self.eqn else "argument"

    def __str__(self) -> str:
        where = "".join(f" run {n}" for n in self.runs)
        lines = [f"{self.number}{where} on device {self.device}: {self.operator}  {self.source}"]
        lines += [f"  {self.found}"] if self.found else []
        lines += [f"  because: {self.reason}"] if self.reason else []
        for title, pieces in (("operand", self.operands), ("result", self.results)):
            lines += [f"  {title} {p}" + (f": {p.range}" if p.range else "") for p in pieces]
        for way, arrays in (("sends to", self.sent), ("receives from", self.received)):
            if arrays:
                devices = f"device{'s' * (len(arrays) > 1)} {', '.join(map(str, arrays))}"
                lines.append(f"  {way} {devices}: {size(sum(a.nbytes for a in arrays.values()))}")
        return "\n".join(lines)

    __repr__ = __str__


Until = str | Callable[[ReplayStep], bool] | None


class Replay(Iterator[ReplayStep]):
    """The steps of one `device`, one at a time; all devices run along.

    Iteration ends at the end of the program, or after the step that `until` asks for: at a source
    line ("model.py:12"), at the first step on any device that makes a NaN or an infinity ("nan"),
    or at the first step for which a function returns true. `last` is the newest step, `results` are
    the program's results once it has ended.
    """

    def __init__(
        self,
        emitted: Emitted,
        arguments: Sequence[Any],
        device: int,
        until: Until,
        tree: Callable[[list[Any]], Any],
    ):
        machine = Lockstep(emitted.sizes, FLOATS)
        if not 0 <= device < machine.count:
            raise ValueError(
                f"device is {device}; the program has devices 0 to {machine.count - 1}"
            )
        if isinstance(until, str) and until != "nan":
            _check_line(emitted, until)
        elif not (isinstance(until, str) or until is None or callable(until)):
            raise TypeError(
                f"until is {until!r}; allowed are a source line ('model.py:12'), 'nan', and a "
                "function of a step"
            )
        self.device, self.until = device, until
        self.last: ReplayStep | None = None
        self.results: Any = None
        self.ended = False  # at the end of the program, or where `until` said
        self._emitted, self._tree, self._machine, self._number = emitted, tree, machine, 0
        self._makers = {v: eqn for eqn in walk(emitted.body.jaxpr) for v in eqn.outvars}
        self._finite = Finite(machine.count, functools.partial(self._held, manual=True))
        values = [floats(logical(x)) for x in (*emitted.consts, *arguments)]
        self._running = machine.run(emitted.body, emitted.entering(values))

    def __next__(self) -> ReplayStep:
        while not self.ended:
            try:
                event = next(self._running)
            except StopIteration as end:
                self.ended = True
                self.results = self._tree(self._emitted.leaving(end.value))
                break
            step = self._step(event)
            if step is not None:
                self.last = step
                return step
        raise StopIteration

    def run(self) -> ReplayStep | None:
        """Continue to the step that `until` asks for, which is returned, or to the end: None."""
        for _ in self:
            pass
        return self.last if self.results is None else None

    def __repr__(self) -> str:
        what = f"{self._emitted.name}, device {self.device} of {self._machine.count}"
        state = f"at {self.last.operator} {self.last.source}" if self.last else "not started"
        state = state if self.results is None else "at its end"
        return f"<gshard.Replay of {what}: {state} after {counted(self._number, 'step')}>"

    # ------------------------------------------------------------ one event

    def _step(self, event: Event) -> ReplayStep | None:
        """The step that an event is, on this device or, for "nan", on the one where it happens."""
        odd = self._finite.look(event) if self.until == "nan" else None
        if (event.eqn is None or event.ends) and not odd:
            return None
        self._number += 1
        device, found = odd or (self.device, "")
        if not event.active[device]:
            return None  # this device took another branch
        step = self._of(event, device, found)
        line = isinstance(self.until, str) and self.until != "nan" and _at(step.source, self.until)
        self.ended = bool(odd or line or (callable(self.until) and self.until(step)))
        return step

    def _of(self, event: Event, device: int, found: str) -> ReplayStep:
        eqn = event.eqn
        why = NO_REASON if eqn is None else reason_of(eqn)
        sent: dict[int, np.ndarray] = {}
        received: dict[int, np.ndarray] = {}
        if eqn is not None and eqn.primitive in RUN_TOGETHER:
            sent, received = exchanged(eqn, plain(event.operands[0]), device, self._machine.axes)
        operands = self._pieces(eqn.invars if eqn else (), event.operands, device)
        results = self._pieces(event.variables, event.values, device)
        name, source = ("argument", "") if eqn is None else (eqn.primitive.name, source_of(eqn))
        of = (self._number, name, source, "" if why == NO_REASON else str(why))
        pieces = (operands, results, sent, received)
        return ReplayStep(*of, device, runs_of(event.path), *pieces, eqn, self._makers, found)

    def _pieces(
        self, atoms: Sequence[Any], values: Sequence[Value], device: int
    ) -> list[DeviceTile]:
        arrays = [x[device if len(x) > 1 else 0] for x in values]
        found = []
        for held, array in zip(map(self._held, atoms), arrays, strict=True):
            place = held and Tiling(held.sharding, held.shape).place(device)
            of = (held.shape, place, bool(held.sharding.unreduced)) if held else ()
            found.append(DeviceTile(array, *of))
        return found

    def _held(self, atom: Any, manual: bool = False) -> Held | None:
        """What a variable holds of the user's values; those of `manual` regions have no place."""
        known = () if isinstance(atom, Literal) else self._emitted.held.get(atom, ())
        placed = next((h for h in known if not h.sharding.manual), None)
        return placed or next(iter(known if manual else ()), None)


def _at(source: str, wanted: str) -> bool:
    """Whether `file:line` is the line asked for, by its path or the end of it; or the file."""
    file = source.rpartition(":")[0]
    return any(s == wanted or s.endswith("/" + wanted) for s in (source, file))


def _check_line(emitted: Emitted, wanted: str) -> None:
    """Refuse a line at which the program has no operator."""
    sources = dict.fromkeys(source_of(eqn) for eqn in walk(emitted.body.jaxpr))
    if not any(_at(source, wanted) for source in sources):
        shown = ", ".join(list(sources)[:8])
        more = f" and {len(sources) - 8} more" if len(sources) > 8 else ""
        raise ValueError(
            f"until is {wanted!r}, and no operator of the program is at that line; it has "
            f"operators at {shown}{more}; allowed are also 'nan' and a function of a step"
        )


class Finite:
    """Where NaNs and infinities come from: the first step whose operands have none, on any device.

    Padding may hold anything, so only values that are a part of the user's count; `held` says what
    a variable holds. What an operator computes on the way is taken to have what its operands have:
    which of it is padding is not known. For each of `count` devices there are two truth values:
    whether there is a NaN, and an infinity.
    """

    def __init__(self, count: int, held: Callable[[Any], Held | None]):
        self._none = np.zeros((count, 2), bool)
        self._held = held
        self._known: dict[Any, np.ndarray] = {}

    def look(self, event: Event) -> tuple[int, str] | None:
        """The device and the kind of what this event makes first, if it does."""
        begins = event.eqn is None and not self._known  # the arguments of the program
        inside = event.eqn is None or event.ends
        before, made = self._none if inside else self._operands(event), []
        for var, value in zip(event.variables, event.values, strict=True):
            if held := self._held(var):
                whole = held.sharding.manual or value.ndim <= len(held.shape)
                found = self._kinds(value, whole or beside(Tiling(*held[1:3]).real, value))
                made.append(found & event.active[:, None])
            self._known[var] = made[-1] if held else self._kinds(value) if inside else before
        return _first(made, before) if begins or not inside else None

    def _kinds(self, value: np.ndarray, real: Any = True) -> np.ndarray:
        """What the real elements have on each device."""
        if not is_float(value.dtype):
            return self._none
        dims = tuple(range(1, value.ndim))
        kinds = [(test(value) & real).any(dims) for test in (np.isnan, np.isinf)]
        return np.broadcast_to(np.stack(kinds, -1), self._none.shape)

    def _operands(self, event: Event) -> np.ndarray:
        """What the operands have on each device; to a collective, all devices hand theirs."""
        assert event.eqn is not None
        found = self._none
        for atom in event.eqn.invars:
            if isinstance(atom, Literal):
                found = found | self._kinds(np.asarray(atom.val)[None])
            else:
                found = found | self._known.get(atom, self._none)
        together = event.eqn.primitive in RUN_TOGETHER
        return np.broadcast_to(found.any(0), found.shape) if together else found


def _first(seen: Sequence[np.ndarray], before: np.ndarray) -> tuple[int, str] | None:
    for found in seen:
        for device in np.flatnonzero(found.any(1)):
            if found[device, 0] and not before[device, 0]:
                return int(device), f"the first NaN, on device {device}"
            if found[device, 1] and not before[device].any():
                return int(device), f"the first infinity, on device {device}"
    return None
