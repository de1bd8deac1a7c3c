"""A profile compared with its forecast: each line and collective, and hardware fitted to it.

A trace of `jax.profiler` has the time of every instruction of a compiled program on every device.
XLA's HLO says which line an instruction is of. A device that is early at a collective waits in it:
a collective counts with the shortest time among the devices, everything else with the median.

Hardware is fitted to one profile, or to several of different batches at once: then costs that
grow with the batch (products, activations) are separated from constant ones (weights, starts).
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard.forecast import Forecast, Hardware
from gshard.forecast.collective import KINDS
from gshard.forecast.time import Timed
from gshard.graph.readable import duration, size

_LINES = 15  # shown
_SHARE = 0.02  # of the forecast: a resource below it is not fitted
_PRIOR = 0.02  # the weight of one scale for all resources, against that of the lines
_STEP = 3.0  # the weight of a step's total, against that of a line
_ROUNDS = 8  # what bounds an operator depends on the fit, and the fit on what bounds it
_START = 1e-6  # the unit of `operator_seconds` in the equations
_WARM, _TRACED = 2.0, 1.0  # seconds of steps on a GPU: before the trace, and in it at least
_MOST = 200  # steps in a trace
_AROUND = ("while", "conditional", "call")  # instructions whose bodies have times of their own
_BUFFERED = "command buffers (their lines: XLA_FLAGS=--xla_gpu_enable_command_buffer=)"

Work = tuple[str, bool]  # the operators of a line: its collectives, or the others


@dataclass(frozen=True)
class HloPlace:
    """Where an instruction comes from: its line, its operator, and runs of it in a step.

    The runs are 0 where they depend on data, in branches and in loops whose length does.
    """

    line: str
    operator: str
    runs: int


@dataclass(frozen=True)
class TimedRow:
    """A line or a collective: seconds in a step, measured and forecast, and bytes sent."""

    name: str
    measured: float
    forecast: float
    sent: int


@dataclass(frozen=True)
class FitSample:
    """What a profile says of the hardware: seconds of works, and the operators of its forecast."""

    measured: Mapping[Work, float]
    forecast: Forecast
    shortest: float  # run of an instruction: no operator costs less than its start


@dataclass(frozen=True)
class Profile:
    """What was measured compared with what was forecast; prints as one screen."""

    name: str
    devices: int
    steps: int
    measured: float  # seconds of a step's operators
    forecast: float
    lines: tuple[TimedRow, ...]
    collectives: tuple[TimedRow, ...]
    hardware: Hardware  # with efficiencies fitted to the measured times
    samples: tuple[FitSample, ...] = field(default=(), repr=False)  # that it is fitted to

    def __str__(self) -> str:
        ratio = self.measured / (self.forecast or 1.0)
        text = [
            f"{self.name} on {self.devices} x {self.hardware.name}, {self.steps} steps: "
            f"{duration(self.measured)} measured, {duration(self.forecast)} forecast "
            f"({ratio:.2f} times the forecast)"
        ]
        for title, rows in (("line", self.lines), ("collective", self.collectives)):
            shown = rows[:_LINES]
            width = max((len(row.name) for row in shown), default=0)
            if shown:
                text += ["", f"{title:<{width}}  {'measured':>9} {'forecast':>9} {'sent':>9}"]
            text += [
                f"{row.name:<{width}}  {duration(row.measured) if row.measured else '':>9} "
                f"{duration(row.forecast) if row.forecast else '':>9} "
                f"{size(row.sent) if row.sent else '':>9}".rstrip()
                for row in shown
            ]
            if len(rows) > _LINES:
                text.append(f"and {len(rows) - _LINES} more")
        paid = self.hardware.efficiency
        fitted = f"products {paid.products:.3g}, memory {paid.memory:.3g}, links {paid.links:.3g}"
        start = f"{duration(paid.operator_seconds)} to start an operator"
        return "\n".join([*text, "", f"fitted efficiency: {fitted}; {start}"])

    def fitted_with(self, *others: Profile) -> Profile:
        """This profile, its hardware fitted to the others as well: to steps of other batches."""
        samples = (*self.samples, *(sample for other in others for sample in other.samples))
        return replace(self, samples=samples, hardware=_fitted(samples, self.name))

    def as_dict(self) -> dict[str, Any]:
        """Machine-readable."""
        return {k: v for k, v in asdict(replace(self, samples=())).items() if k != "samples"}

    def hardware_toml(self) -> str:
        """The fitted hardware as a file that `hardware=` and `--hardware` accept."""
        return self.hardware.as_toml(f"Fitted to {self.steps} profiled steps of {self.name}.")


def trace_steps(
    compiled: Callable[..., Any],
    given: tuple[Any, ...],
    steps: int,
    folder: str | Path,
    warm: float = _WARM,
) -> None:
    """Run steps under the profiler; on GPUs for a second at least, after others for `warm` seconds.

    Steps follow each other without a pause, as in training: a GPU lowers its clock under load, and
    raises it in a pause. At most two steps wait, for the sake of memory. Abstract arguments are
    made: normal numbers, and zeros as integers. Each step has copies of its own, since it may be
    given its arguments to overwrite.
    """

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return 0.02 * jax.random.normal(jax.random.key(0), leaf.shape, leaf.dtype)
        return jnp.zeros(leaf.shape, leaf.dtype)

    def copied(leaf: Any) -> Any:
        return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf

    first = jax.tree.map(made, given)

    def run(count: int) -> float:
        start, ahead = time.monotonic(), list[Any]()
        for _ in range(count):
            ahead.append(compiled(*jax.tree.map(copied, first)))
            jax.block_until_ready(ahead[:-2])
            del ahead[:-2]
        jax.block_until_ready(ahead)
        return time.monotonic() - start

    run(1)
    if jax.default_backend() != "cpu":
        count = max(steps, math.ceil(warm * steps / run(steps)))
        steps = max(steps, min(math.ceil(_TRACED * count / run(count)), _MOST))
    with jax.profiler.trace(str(folder)):
        run(steps)


def profile(
    name: str, module: str, forecast: Forecast, places: Mapping[str, HloPlace], trace: str | Path
) -> Profile:
    """A trace of the program `module` compared with its forecast; `places` by instruction."""
    taken = _by_device(Path(trace), module, places)
    if not taken:
        raise ValueError(
            f"the trace in {trace} has no step of {module}: run the compiled function inside of "
            "jax.profiler.trace, and keep it that long"
        )
    found = [(len(times), places[op].runs) for d in taken.values() for op, times in d.items()]
    counted = [round(count / runs) or 1 for count, runs in found if runs]
    steps = statistics.mode(counted or [count for count, _ in found])
    seconds: dict[str, float] = {}
    for op in {op for own in taken.values() for op in own}:
        of_all = min if _kind(places[op]) else statistics.median
        seconds[op] = of_all(_later(own[op], steps) for own in taken.values() if op in own)
    lines: dict[str, float] = defaultdict(float)
    sends: dict[str, float] = defaultdict(float)
    works: dict[Work, float] = defaultdict(float)
    for op, each in seconds.items():
        line, kind = places[op].line, _kind(places[op])
        line = _BUFFERED if places[op].operator == "call" else line
        lines[line] += each
        works[line, bool(kind)] += each
        if kind:
            sends[f"{kind} at {line}"] += each
    values = [(t.source, t) for t in forecast.values]
    sent = [(f"{t.collective} at {t.source}", t) for t in forecast.operators if t.collective]
    rows = _rows(lines, values)
    shortest = min(statistics.median(times) for own in taken.values() for times in own.values())
    samples = (FitSample(works, forecast, shortest),)
    both = sum(seconds.values()), sum(row.forecast for row in rows)
    fitted = _fitted(samples, name)
    return Profile(name, forecast.devices, steps, *both, rows, _rows(sends, sent), fitted, samples)


def _later(runs: list[float], steps: int) -> float:
    """The seconds of a step in the later half of the steps: a GPU's clock falls in the first."""
    later = runs[len(runs) * (steps // 2) // steps :]
    return sum(later) / len(later) * len(runs) / steps


def _kind(place: HloPlace) -> str:
    """The kind of a collective, as gshard calls it; "" for another operator."""
    kind = place.operator.removesuffix("-start").replace("-", "_")
    return kind if kind in KINDS else ""


def _by_device(
    trace: Path, module: str, places: Mapping[str, HloPlace]
) -> dict[str, dict[str, list[float]]]:
    """The seconds of each run of each instruction, by device."""
    found: dict[str, dict[str, list[float]]] = {}
    with warnings.catch_warnings():  # JAX 0.12's types of traces warn, and abort under -W error
        warnings.simplefilter("ignore", DeprecationWarning)
        for path in [trace] if trace.is_file() else sorted(trace.rglob("*.xplane.pb")):
            for device, ops, seconds in _events(path, module):
                known = [op for op in ops if op in places]
                inner = [op for op in known if places[op].operator not in _AROUND]
                # A GPU's events are kernels: one of a command buffer, say, is of a call alone.
                for op in (inner or (known if "/device:GPU" in device else []))[-1:]:
                    found.setdefault(device, {}).setdefault(op, []).append(seconds)
    return found


def _events(path: Path, module: str) -> Iterator[tuple[str, list[str], float]]:
    """Device, instructions and seconds: CPUs number their devices, others have a plane for each.

    An event inside of a loop or branch may have these instructions, too, before its own.
    """
    from jax.profiler import ProfileData

    for plane in ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                pairs = list(event.stats)
                stats, ops = dict(pairs), [str(value) for name, value in pairs if name == "hlo_op"]
                if stats.get("hlo_module") == module and ops:
                    device = f"{plane.name}:{stats.get('device_ordinal', '')}"
                    yield device, ops, event.duration_ns / 1e9


def _rows(
    measured: Mapping[str, float], values: Sequence[tuple[str, Timed]]
) -> tuple[TimedRow, ...]:
    expected: dict[str, float] = defaultdict(float)
    sent: dict[str, int] = defaultdict(int)
    for name, t in values:
        expected[name] += t.alone_seconds * t.count
        sent[name] += t.sent * t.count
    names = dict.fromkeys([*measured, *expected])
    rows = [TimedRow(n, measured.get(n, 0.0), expected[n], sent[n]) for n in names]
    return tuple(sorted(rows, key=lambda r: -max(r.measured, r.forecast)))


def _fitted(samples: Sequence[FitSample], name: str) -> Hardware:
    """The hardware whose forecasts are nearest to the measured times: least squares, positive.

    The unknowns are the seconds of products, memory traffic and links, relative to the forecast's,
    and those to start an operator. A resource that these lines do not tell from others is scaled
    as the steps are.
    """
    machine = samples[0].forecast.hardware
    paid = machine.efficiency
    most = min(sample.shortest for sample in samples) / _START
    found = np.array([1.0, 1.0, 1.0, paid.operator_seconds / _START])
    for _ in range(_ROUNDS):
        parts = [_equations(sample, found[:3]) for sample in samples]
        terms, times = (np.concatenate(part) for part in zip(*parts, strict=True))
        before, found = found, _solved(terms, times, paid.operator_seconds / _START, most)
        if np.allclose(before, found, rtol=1e-3):
            break
    fitted = replace(
        paid,
        products=float(paid.products / found[0]),
        memory=float(paid.memory / found[1]),
        links=float(paid.links / found[2]),
        operator_seconds=float(found[3] * _START),
        fitted=f"to profiled steps of {name}",
    )
    return machine.replace(efficiency=fitted)


def _equations(sample: FitSample, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Terms and measured times of each line and of the step, relative to the step's time."""
    # Products, memory, links, starts, and the waits for links, which are not fitted.
    expected: dict[Work, np.ndarray] = defaultdict(lambda: np.zeros(5))
    links = sample.forecast.hardware.efficiency.links
    for whole in sample.forecast.operators:
        for t in whole.members or (whole,):
            sending = min(t.link_seconds, t.roofline_seconds / links) if t.collective else 0.0
            busy = np.array([t.arithmetic_seconds, t.memory_seconds, sending])
            bound = 2 if t.collective else int(np.argmax(busy * scale))
            own = expected[t.source, bool(t.collective)]
            own[bound] += busy[bound] * t.count
            own[3] += _START * t.count * (t.sent / whole.sent if whole.sent else 1.0)
            own[4] += (t.link_seconds - sending) * t.count
    known = [work for work in sample.measured if work in expected]
    terms = np.array([expected[work] for work in known]).reshape(-1, 5)
    times = np.array([sample.measured[work] for work in known])
    total = sum(sample.measured.values())
    times *= total / (times.sum() or 1.0)  # with what XLA added, such as copies
    terms = np.vstack([terms, _STEP * sum(expected.values())]) / total
    return terms[:, :4], np.append(times, _STEP * total) / total - terms[:, 4]


def _solved(terms: np.ndarray, times: np.ndarray, start: float, most: float) -> np.ndarray:
    """The four unknowns; a resource with little share of the forecast stays as it is."""
    from scipy.optimize import lsq_linear

    first = np.array([1.0, 1.0, 1.0, start])
    sums = terms.sum(0) * first
    used = np.flatnonzero((sums >= _SHARE * sums.sum()) | (np.arange(4) == 3))
    ratio = times.sum() / ((terms.sum(0) * first).sum() or 1.0)
    prior = _PRIOR * np.diag(np.linalg.norm(terms, axis=0))[used]
    rest = times - np.delete(terms, used, 1) @ np.delete(first, used)
    if len(used):
        wanted = np.concatenate([rest, prior @ (first * ratio)])
        bounds = 0.0, np.where(used == 3, most, np.inf)
        first[used] = lsq_linear(
            np.vstack([terms[:, used], prior[:, used]]), wanted, bounds, method="bvls"
        ).x
    first[:3][first[:3] <= 0] = 1.0
    return first
