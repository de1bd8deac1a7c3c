"""XLA's partitioner on the same annotations: the competitor, and a way out.

The annotations become sharding constraints, everything else is XLA's. Its collectives are read off
the compiled program, so that both partitioners are measured with one ruler.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import Mesh, NamedSharding

from gshard.annotate import annotate_p
from gshard.explain import Collective
from gshard.meshes import axis_names, partition_spec
from gshard.ports import ports
from gshard.propagate import propagate
from gshard.rules.control import bodies
from gshard.signature import Call, Signature
from gshard.source import on_behalf_of
from gshard.trace import trace
from gshard.uneven import UnevenArray


def lower_with_xla(signature: Signature, call: Call, devices: Any) -> XlaLowered:
    """Annotations as constraints, the rest to XLA; arguments start where gshard would put them."""
    if isinstance(devices, int):
        raise ValueError("partitioner='xla' needs real devices: XLA partitions when it compiles")
    flat_fn, results = signature.flat(call)
    program = trace(flat_fn, call.avals, len(devices), folded=False)
    shardings = propagate(program, len(devices))
    variables = [*program.jaxpr.constvars, *program.jaxpr.invars]
    shapes = [tuple(v.aval.shape) for v in variables]
    axes, _ = ports([shardings[v] for v in variables], shapes, len(devices))
    mesh = Mesh(np.asarray(devices).reshape(axes), axis_names(axes))

    def named(sharding, shape) -> NamedSharding | None:
        spec = partition_spec(sharding, axes) if sharding.is_even(shape) else None
        return None if spec is None else NamedSharding(mesh, spec)

    def constrained(*arrays):
        return _evaluate(program, arrays, lambda v: named(shardings[v], v.aval.shape))

    placed = [named(shardings[v], v.aval.shape) for v in program.jaxpr.invars]
    jitted = jax.jit(
        constrained,
        in_shardings=tuple(s or NamedSharding(mesh, jax.P()) for s in placed),
        donate_argnums=call.donated,
    )
    return XlaLowered(jitted, call, results, len(devices), shardings, program)


def _evaluate(program: ClosedJaxpr, arrays, sharding_of) -> list[Any]:
    """The program, with each annotation that divides as a constraint (XLA drops the others)."""

    def run(closed: ClosedJaxpr, args) -> list[Any]:
        jaxpr = closed.jaxpr
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))
        for eqn in jaxpr.eqns:
            values = [a.val if isinstance(a, Literal) else env[a] for a in eqn.invars]
            with on_behalf_of(eqn):
                if eqn.primitive is annotate_p:
                    wanted = sharding_of(eqn.outvars[0])
                    out = (
                        values[0]
                        if wanted is None
                        else jax.lax.with_sharding_constraint(values[0], wanted)
                    )
                    outs = [out]
                else:
                    params = dict(eqn.params)
                    if bodies(eqn):
                        params = {k: _rebuilt(v, run) for k, v in params.items()}
                    made = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
                    outs = made if eqn.primitive.multiple_results else [made]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [a.val if isinstance(a, Literal) else env[a] for a in jaxpr.outvars]

    return run(program, arrays)


def _rebuilt(param: Any, run) -> Any:
    """The body of a loop or branch with its annotations as constraints."""
    if isinstance(param, tuple):
        return tuple(_rebuilt(x, run) for x in param)
    if not isinstance(param, ClosedJaxpr):
        return param
    return jax.make_jaxpr(functools.partial(_call, run, param))(*param.in_avals)


def _call(run, closed: ClosedJaxpr, *args) -> list[Any]:
    return run(closed, args)


class XlaLowered:
    """What `Lowered` offers, for a program that XLA partitions."""

    def __init__(self, jitted, call: Call, results, num_devices: int, shardings, program):
        self._jitted, self._call, self._results = jitted, call, results
        self._num_devices = num_devices
        self._inputs = [shardings[v] for v in program.jaxpr.invars]

    @functools.cached_property
    def _lowered(self):
        return self._jitted.lower(*self._call.avals)

    @property
    def in_shardings(self) -> Any:
        """Where the arguments start: as gshard would have them."""
        return self._call.unflatten_arguments(self._inputs)

    @property
    def out_shardings(self) -> Any:
        """What XLA chose for the results."""
        return self._results.unflatten(self.compile()._executable.output_shardings)

    @property
    def collectives(self) -> list[Collective]:
        """What XLA's compiled program moves."""
        return list(collectives_of_hlo(self.compile().as_text(), self._num_devices))

    def as_text(self) -> str:
        """The annotated program; XLA partitions it when it compiles."""
        return self._lowered.as_text()

    @functools.cache  # noqa: B019  (one compilation per lowered program)
    def compile(self) -> XlaCompiled:
        """The program, partitioned and compiled by XLA."""
        return XlaCompiled(self)


class XlaCompiled:
    """What `Compiled` offers, for a program that XLA partitioned."""

    def __init__(self, lowered: XlaLowered):
        self._lowered = lowered
        self._executable = lowered._lowered.compile()
        self.as_text = self._executable.as_text
        self.cost_analysis = self._executable.cost_analysis
        self.memory_analysis = self._executable.memory_analysis

    def __call__(self, *args, **kwargs) -> Any:
        """Run it."""
        return self.run(self._lowered._call.signature.bind(args, kwargs))

    def run(self, call: Call) -> Any:
        """Place the arguments, execute, put the results into the user's tree."""
        return self._lowered._results.unflatten(self._executable(*self._put(call)))

    def place(self, *args, **kwargs):
        """The arguments where the program wants them."""
        call = self._lowered._call.signature.bind(args, kwargs)
        return call.unflatten_arguments(self._put(call))

    def _put(self, call: Call) -> list[jax.Array]:
        wanted = self._executable.input_shardings[0]
        return [
            jax.device_put(x.logical() if isinstance(x, UnevenArray) else x, s)
            for x, s in zip(call.leaves, wanted, strict=True)
        ]


# ---------------------------------------------------------------- reading XLA's program

_OPS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
    "reduce-scatter": "reduce_scatter",
}
_LINE = re.compile(
    r"= (?P<type>\(.*?\)|\S+) "
    r"(?P<op>all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d*(?:e\d+m\d+\w*)?)\[(?P<dims>[\d,]*)\]")


def collectives_of_hlo(text: str, num_devices: int) -> Iterator[Collective]:
    """The collectives of a compiled program, with the trip counts of the loops they stand in."""
    runs = _trip_counts(text)
    for computation, line in _lines(text):
        found = _LINE.search(line)
        if not found:
            continue
        kind = _OPS[found["op"]]
        shapes = [(m["dtype"], m["dims"]) for m in _SHAPE.finditer(found["type"])]
        size = sum(_bytes(dtype, dims) for dtype, dims in shapes)
        if found["op"] + "-start(" in line and len(shapes) > 1:
            size //= 2  # operand and result stand side by side
        members = _group_size(line, num_devices)
        sent = {
            "all_reduce": 2 * size * (members - 1) // members,
            "all_gather": size * (members - 1) // members,  # of its result, unlike ours
            "all_to_all": size * (members - 1) // members,
            "reduce_scatter": size * (members - 1),
            "collective_permute": size,
        }[kind]
        where = re.search(r'source_file="([^"]*)" source_line=(\d+)', line)
        source = f"{where[1]}:{where[2]}" if where else "unknown"
        if sent:
            yield Collective(
                kind, sent, runs.get(computation, 1), members, shapes[0][0], source, "XLA"
            )


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """(computation, line) for every line of the program."""
    computation = ""
    for line in text.splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            computation = head[1]
        yield computation, line


def _trip_counts(text: str) -> dict[str, int]:
    """How often each computation runs: the product of the loops around it."""
    calls: dict[str, list[tuple[str, int]]] = {}
    for computation, line in _lines(text):
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
        for kind, callee in re.findall(r"(body|calls|to_apply|condition)=%?([\w.\-]+)", line):
            times = int(trips[1]) if trips and kind == "body" else 1
            calls.setdefault(callee, []).append((computation, times))

    @functools.cache
    def runs(computation: str) -> int:
        callers = calls.get(computation, [])
        return sum(runs(caller) * times for caller, times in callers) if callers else 1

    return {callee: runs(callee) for callee in calls}


def _group_size(line: str, num_devices: int) -> int:
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed[1].split(","))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    if iota:
        return int(iota[2])
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
    if pairs:
        return len(set(re.findall(r"\d+", pairs[1])))
    return num_devices


def _bytes(dtype: str, dims: str) -> int:
    count = math.prod(int(d) for d in dims.split(",")) if dims else 1
    width = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])  # type: ignore[index]
    return count * max(width // 8, 1)
