"""Hardware is data: peak rates by dtype, memory, links.

Hardware is described by a TOML file in `machines/`, a file of the user's, or a `Hardware` object.
Peaks are the vendor's. `Efficiency` has the share of each peak that programs reach: 1 unless
measured or fitted, and the file says against what.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gshard.errors import nearest
from gshard.forecast.compilers import COMPILERS
from gshard.forecast.topology import Network, Switch, Torus
from gshard.moving.costs import CostModel
from gshard.untrusted import printable, read_text, short_repr

_MACHINES = Path(__file__).parent / "machines"


@dataclass(frozen=True)
class Efficiency:
    """The share of each peak that operators reach, and the overhead of starting one."""

    products: float = 1.0  # of the peak rate, by matrix products and convolutions
    memory: float = 1.0  # of the memory's bandwidth, by everything else
    updates: float = 1.0  # of that share, by updates in place: one core of a CPU writes the rows
    links: float = 1.0  # of the links' bandwidth, by collectives
    operator_seconds: float = 0.0  # to start one fused operator
    skew_seconds: float = 0.0  # skew between devices at a collective, per hop across its group
    slack: float = 1.0  # bytes of temporaries in the compiler's schedule, per byte in ours
    step_seconds: float = 0.0  # outside the program: feeding it and fetching its results
    fitted: str = ""  # which of these are fitted, and to what


@dataclass(frozen=True)
class Hardware:
    """One device, and the network that connects it to others.

    `flops` are peak rates (a multiplication and an addition are two) by the dtype of the operands;
    `float32_exact` is for products at full float32 precision, where the default is lower.
    """

    name: str
    flops: Mapping[str, float]
    memory: int
    memory_bandwidth: float
    network: Network
    efficiency: Efficiency = field(default_factory=Efficiency)
    compiler: str = "gpu"  # which operators its compiler fuses: see `gshard.forecast.program`

    def __hash__(self) -> int:
        return hash(self.name)  # `flops` may be a dict; equality compares all fields

    def rate(self, dtype: Any, exact: bool = False) -> float:
        """Operations per second of a matrix product on operands of `dtype`."""
        name = np.dtype(dtype).name if not isinstance(dtype, str) else dtype
        if exact and f"{name}_exact" in self.flops:
            return self.flops[f"{name}_exact"]
        if name in self.flops:
            return self.flops[name]
        wider = self.flops.get("float32_exact", self.flops["float32"])
        return wider / 2 if name in ("float64", "complex128") else wider

    @property
    def vector_rate(self) -> float:
        """Operations per second outside matrix products."""
        return self.flops.get("vector", self.flops.get("float32_exact", self.flops["float32"]))

    @property
    def overlaps(self) -> bool:
        """Whether its compiler schedules collectives during products that do not need them."""
        return COMPILERS[self.compiler].overlaps

    @property
    def sent_per_second(self) -> float:
        """The bytes that a device sends in a second, over a link or within its node."""
        net = self.network
        links = net.link_bandwidth if net.kind == "torus" else net.inside_bandwidth
        return links * self.efficiency.links

    @property
    def cost_model(self) -> CostModel:
        """The partitioner's cost model: each speed relative to that of the links."""
        net, sent, efficiency = self.network, self.sent_per_second, self.efficiency
        waited = net.hop_seconds if net.kind == "torus" else net.inside_seconds
        return CostModel(
            latency=(waited + efficiency.operator_seconds + efficiency.skew_seconds) * sent,
            flops_per_byte=self.rate("bfloat16") * efficiency.products / sent,
            memory_per_byte=self.memory_bandwidth * efficiency.memory / sent,
            calls_to_compare=self.compiler == "cpu",
        )

    def topology(self, devices: int) -> Torus | Switch:
        """How this many devices are connected."""
        return self.network.topology(devices)

    def replace(self, **changes: Any) -> Hardware:
        """The same hardware with `changes`."""
        return replace(self, **changes)

    def as_toml(self, comment: str) -> str:
        """A file that `hardware=` and `--hardware` accept."""
        entries = asdict(self)
        tables = {name: v for name, v in entries.items() if isinstance(v, Mapping)}
        text = [f"# {comment}"]
        text += [f"{k} = {_toml(v)}" for k, v in entries.items() if k not in tables]
        for name, table in tables.items():
            text += ["", f"[{name}]", *(f"{k} = {_toml(v)}" for k, v in table.items())]
        return "\n".join(text) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool | str):
        return f'"{value}"' if isinstance(value, str) else str(value).lower()
    return repr(value)


def known() -> list[str]:
    """The names that `hardware` accepts."""
    return sorted(path.stem for path in _MACHINES.glob("*.toml"))


def hardware(name: str | Path | Hardware) -> Hardware:
    """Hardware by name, ours or the manufacturer's (`a100-80`, `A100-SXM4-80GB`), or a file."""
    if isinstance(name, Hardware):
        return name
    path = Path(name)
    if path.suffix == ".toml":
        if not path.exists():
            raise ValueError(f"there is no file {path} to read hardware from")
        return read(path)
    text = str(name).lower()
    found = text if text in known() else _name(text)
    if found is None:
        raise ValueError(
            f"hardware is {str(name)!r}; known are {', '.join(known())}, or a path to a TOML file "
            f"like those in gshard/forecast/machines{nearest(text, known())}"
        )
    return read(_MACHINES / f"{found}.toml")


def several(text: str) -> tuple[int, Hardware]:
    """`64 x h100` as a number of devices and what they are."""
    match = re.fullmatch(r"\s*([1-9][0-9]{0,6})\s*[xX*]\s*(.+?)\s*", text)
    if match is None:
        raise ValueError(f"the devices are {text!r}; write a number and a name, as in 8xh100")
    return int(match[1]), hardware(match[2])


def read(path: Path) -> Hardware:
    """Hardware from a TOML file; a misspelt key, or a value that none has, is an error."""
    try:
        text = tomllib.loads(read_text(path))
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as TOML: {error}") from None
    made: Hardware = _made(path, "the file", Hardware, text)
    _check(path, set(), set(), {"flops.float32"} - {f"flops.{dtype}" for dtype in made.flops})
    for name, value, allowed in (
        ("compiler", made.compiler, tuple(COMPILERS)),
        ("network.kind", made.network.kind, ("switch", "torus")),
        ("network.dims", made.network.dims, range(1, 7)),
    ):
        if value not in allowed:
            raise ValueError(f"{path}: {name} is {value!r}; allowed are {tuple(allowed)}")
    return made


def _made(path: Path, where: str, kind: type, given: Any) -> Any:
    if not isinstance(given, dict):
        raise ValueError(f"{path}: {where} is {short_repr(given)}; it has to be a table")
    known = {f.name: f for f in fields(kind)}
    needed = {name for name, f in known.items() if f.default is f.default_factory}  # no default
    _check(path, set(given), set(known), needed)
    of = {name: (known[name].type, known[name].default) for name in given}
    return kind(**{name: _value(path, name, given[name], *of[name]) for name in given})


def _value(path: Path, name: str, given: Any, kind: Any, default: Any = None) -> Any:
    """The value of a field of this type; numbers are above 0 where that is not the default."""
    if tables := {"Network": Network, "Efficiency": Efficiency}.get(kind):
        return _made(path, name, tables, given)
    if name == "flops":
        rates = given.items() if isinstance(given, dict) else [("", given)]
        return {dtype: _value(path, f"flops.{dtype}", rate, "float") for dtype, rate in rates}
    if kind == "str" and isinstance(given, str):
        return printable(given)
    if kind == "bool" and isinstance(given, bool):
        return given
    least = 0.0 if default == 0 else 1e-30
    is_number = kind in ("int", "float") and type(given) in (int, float) and least <= given < 1e30
    if is_number and (kind == "float" or given == int(given)):
        return int(given) if kind == "int" else float(given)
    number = f"number {'above' if least else 'of at least'} 0"
    allowed = {"str": "text", "bool": "true or false", "int": f"a whole {number}"}
    what = allowed.get(kind, f"a {number}")
    raise ValueError(f"{path}: {name} is {short_repr(given)}; it has to be {what}")


def present(device: jax.Device | None = None) -> Hardware:
    """The hardware that JAX reports for a device, by default the first; a CPU if unknown."""
    return hardware(_name((device or jax.devices()[0]).device_kind) or "cpu")


def accelerator(device: jax.Device | None = None) -> Hardware | None:
    """The hardware to plan for by default: what JAX reports for `device`, or for its first one.

    None for CPUs: programs are often tried on CPUs that will run on accelerators, so plans are made
    for a generic accelerator. `hardware="cpu"` plans for the CPU itself.
    """
    name = _name((device or jax.devices()[0]).device_kind)
    return None if name is None else _known_hardware(name)


_known_hardware = functools.cache(hardware)


def _name(kind: str) -> str | None:
    """The name of the hardware with this `device_kind`, or spelt so by a user; None if unknown.

    Its words count, however they are joined: `A100-SXM4-80GB` and `a100_80gb` are an `a100-80`.
    """
    words = set(re.findall("[a-z0-9]+", kind.lower()))
    return next((name for mark, name in _KINDS.items() if words.issuperset(mark.split())), None)


_KINDS = {
    "gb200": "gb200",
    "b200": "b200",
    "h200": "h200",
    "h100": "h100",
    "a100 80gb": "a100-80",
    "a100 40gb": "a100-40",
    "l40s": "l40s",
    "l4": "l4",
    "mi300x": "mi300x",
    "tpu7x": "tpu-v7",
    "v7": "tpu-v7",
    "v6 lite": "tpu-v6e",
    "v6e": "tpu-v6e",
    "v5 lite": "tpu-v5e",
    "v5e": "tpu-v5e",
    "v5p": "tpu-v5p",
    "v5": "tpu-v5p",
    "v4": "tpu-v4",
    "v3": "tpu-v3",
}  # words of JAX's `device_kind`; the first match counts


def _check(path: Path, given: set[str], allowed: set[str], needed: set[str]) -> None:
    if unknown := given - allowed:
        raise ValueError(f"{path}: {', '.join(sorted(unknown))} is not one of {sorted(allowed)}")
    if missing := needed - given:
        raise ValueError(f"{path}: {', '.join(sorted(missing))} is missing")
