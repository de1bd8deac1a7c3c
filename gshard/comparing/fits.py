"""Whether a training step fits in memory, with which batch, and what would make it fit.

All figures are forecasts of lowered programs: every batch and every change is partitioned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding

import gshard
from gshard.comparing.step import Step
from gshard.forecast import Forecast, Hardware
from gshard.forecast.memory import LiveValue
from gshard.graph.readable import size

_PROBES = 8  # batches that are lowered to find the largest, at most
_PRECISION = 0.02  # of the largest batch
_KEPT_LINES = 4  # shown

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Fits:
    """Bytes on each device against its memory, and the changes that were tried."""

    step: str
    devices: int
    hardware: str
    needed: int
    limit: int
    where: str  # the line of the peak
    batch: int
    largest: int  # 0 if no batch fits
    too_large: int  # the smallest that was seen not to fit; 0 if none was seen
    changes: tuple[tuple[str, int | None], ...]  # what was changed, and what is needed then
    kept: tuple[tuple[str, int], ...] = ()  # lines whose values are live at the peak, and bytes

    @property
    def fits(self) -> bool:
        """Whether it fits as it is."""
        return self.needed <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """Machine-readable."""
        return {**asdict(self), "fits": self.fits}

    def __str__(self) -> str:
        word = "fits" if self.fits else "does not fit"
        lines = [
            f"{self.step} {word} on {self.devices} x {self.hardware}: "
            f"{size(self.needed)} of {size(self.limit)} on each device, the peak at {self.where}"
        ]
        if self.batch:
            beyond = f", {self.too_large:,} does not fit" if self.too_large else ""
            most = f"{self.largest:,}{beyond}" if self.largest else "none"
            lines.append(f"largest batch: {most} (now {self.batch:,})")
        if not self.fits and self.kept:
            lines.append("largest at the peak (candidates for jax.checkpoint):")
            lines += [f"  {line:<44} {size(held):>8}" for line, held in self.kept]
        if self.changes:
            lines.append("what would change it:")
        for change, needed in self.changes:
            figure = "" if needed is None else f"{size(needed):>8}  {self._word(needed)}"
            lines.append(f"  {change:<44} {figure}".rstrip())
        return "\n".join(lines)

    def _word(self, needed: int) -> str:
        return "fits" if needed <= self.limit else "does not fit"


def fits(
    step: Step,
    machine: Hardware,
    batch: Sequence[int] | None = None,
    seconds: float = 0.0,
    tell: Tell = lambda _: None,
) -> Fits:
    """Whether a step fits; arguments at `batch` have the batch as their first dim.

    By default these are the last arguments whose arrays begin with the same size. With `seconds`,
    what `gshard.auto` reaches in about as many is one of the changes.
    """

    def lowered(step: Step, **how: Any) -> Forecast:
        return step.by_gshard(machine, **how).forecast()

    tell(f"partitioning {step.name}")
    own = lowered(step)
    numbers = batch_arguments(step.args) if batch is None else tuple(batch)
    now = _rows(step.args, numbers)

    def needed_with(rows: int) -> int:
        tell(f"partitioning it for a batch of {rows:,}")
        return lowered(step.with_args(_resized(step.args, numbers, rows))).memory_bytes

    unit = own.devices if now % own.devices == 0 else 1
    limit = own.hardware.memory
    found = _largest(needed_with, now, own.memory_bytes, limit, unit) if now else (0, 0)
    changes: list[tuple[str, int | None]] = []
    if own.memory_bytes > limit:
        changes = list(_changes(step, lowered, own, numbers, tell))
        if seconds:
            tell(f"gshard.auto chooses annotations, about {seconds:.0f} seconds")
            changes.append(_auto(step, machine, own.devices, seconds))
    return Fits(
        step.name, own.devices, own.hardware.name, own.memory_bytes, limit, own.memory.where,
        now, *found, tuple(changes), tuple(_kept(own.memory.held)),
    )  # fmt: skip


def batch_arguments(args: Sequence[Any]) -> tuple[int, ...]:
    """The last arguments whose arrays all begin with the same size."""
    found: list[int] = []
    for number in reversed(range(len(args))):
        first = {leaf.shape[0] for leaf in _arrays(args[number])}
        same = not found or first == {_rows(args, found)}
        if len(first) != 1 or not same:
            break
        found.append(number)
    return tuple(reversed(found))


def _arrays(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if getattr(leaf, "shape", ())]


def _rows(args: Sequence[Any], numbers: Sequence[int]) -> int:
    sizes = [leaf.shape[0] for number in numbers for leaf in _arrays(args[number])]
    return sizes[0] if sizes else 0


def _resized(args: Sequence[Any], numbers: Sequence[int], rows: int) -> tuple[Any, ...]:
    """The arguments with another batch, as abstract values."""

    def resized(leaf: Any) -> Any:
        if not getattr(leaf, "shape", ()):
            return leaf
        held = getattr(leaf, "sharding", None)
        held = held if isinstance(held, NamedSharding) else None
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype, sharding=held)

    return tuple(jax.tree.map(resized, a) if i in numbers else a for i, a in enumerate(args))


def _largest(
    needed: Callable[[int], int], now: int, needed_now: int, limit: int, unit: int
) -> tuple[int, int]:
    """The largest batch that was seen to fit, a multiple of `unit`, and the smallest that does not.

    A line through two batches says which to try: the first through none and `now`, those after it
    through the largest that fits and the smallest that does not, or the two nearest to the limit.
    """
    known = {0: 0, now: needed_now}
    low, high = (now, 0) if needed_now <= limit else (0, now)
    for _ in range(_PROBES):
        near = max(unit, _PRECISION * high)
        if high and high - low <= near:
            break
        a, b = (
            (low, high) if low and high else sorted(known)[-2:] if low else sorted(known)[:3][-2:]
        )
        a = a if known[b] > known[a] else 0
        rows = int(a + (limit - known[a]) * (b - a) / max(known[b] - known[a], 1))
        if not high:
            rows = max(rows, 2 * low)
        elif low:  # near one of the two, the next is nearer to the other
            rows = int(min(max(rows, low + near / 2), high - near / 2))
        rows = max(unit, rows // unit * unit, low + unit)
        rows = min(rows, high - unit) if high else rows
        if rows in known or rows < unit:
            break
        known[rows] = needed(rows)
        low, high = (rows, high) if known[rows] <= limit else (low, rows)
    return low, high


def _changes(
    step: Step, lowered: Callable[..., Forecast], own: Forecast, batch: Sequence[int], tell: Tell
) -> Iterator[tuple[str, int]]:
    """Changes one after the other, each added to those before it if it helps."""
    others = tuple(i for i in range(len(step.args)) if i not in batch)
    count, now = own.devices, own.memory_bytes
    added = ""

    def annotated(fsdp: bool, parts: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
        def rows(x: Any) -> Any:
            return gshard.split(x, 0, parts) if getattr(x, "shape", ()) else x

        def given(number: int, a: Any) -> Any:
            if number in batch:
                return jax.tree.map(rows, a)
            return gshard.fsdp(a, parts) if fsdp else a

        return tuple(given(i, a) for i, a in enumerate(args))

    split, fsdp = partial(annotated, False, count), partial(annotated, True, count)
    donated = {"donate_argnums": others}
    tried: list[tuple[str, dict[str, Any]]] = [
        (f"gshard.split(batch, 0, {count})", {"arguments": split}),
        (f"donate_argnums={others}", {"arguments": split, **donated}),
        ("gshard.fsdp of the other arguments", {"arguments": fsdp, **donated}),
    ]
    tried += [
        (f"on {n} devices", {"arguments": partial(annotated, True, n), "devices": n, **donated})
        for n in (2 * count, 4 * count, 8 * count)
        if _rows(step.args, batch) % n == 0
    ]
    again = step.with_remat()
    if again is not None:
        tell("partitioning it with its layers computed again")
        step, needed = again, lowered(again).memory_bytes
        if needed < now:
            now = needed
            yield "layers computed again: from_torch(..., remat=)", needed
            added = "and "
    for name, change in tried if step.is_plain else ():
        if now <= own.hardware.memory and "devices" in change:
            return
        tell(f"partitioning it with {name}")
        needed = lowered(step, **change).memory_bytes
        if needed < now:
            now = needed
            yield f"{added}{name}", needed
            added = "and "


def _kept(held: Iterable[LiveValue]) -> list[tuple[str, int]]:
    """The lines that made most of what is live at the peak."""
    found: dict[str, int] = {}
    for value in held:
        found[value.source] = found.get(value.source, 0) + value.bytes
    found.pop("unknown", None)
    return sorted(found.items(), key=lambda item: -item[1])[:_KEPT_LINES]


def _auto(step: Step, machine: Hardware, devices: int, seconds: float) -> tuple[str, int | None]:
    try:
        layout = step.by_auto(hardware=machine, devices=devices, seconds=seconds)
        return "what gshard.auto chose", layout.memory_bytes
    except ValueError as error:  # nothing fits: it says how much the least holds
        return f"gshard.auto: {str(error).splitlines()[0]}", None
