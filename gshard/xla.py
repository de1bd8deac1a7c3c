"""XLA's partitioner on the same annotations: the competitor, and a way out.

The annotations become sharding constraints, everything else is XLA's. Its collectives are read off
the compiled program, so that both partitioners are measured with one ruler.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import Mesh, NamedSharding

from gshard import _jax
from gshard.annotate import annotate_p
from gshard.explain import Collective
from gshard.meshes import make_mesh, partition_spec
from gshard.placement import DeviceOrder
from gshard.ports import in_place, ports
from gshard.program import Settings
from gshard.propagate import propagate
from gshard.rules.control import bodies
from gshard.sharding import Sharding
from gshard.source import on_behalf_of
from gshard.trace import inline
from gshard.uneven import UnevenArray


def lower_with_xla(
    traced: jax.stages.Traced,
    given: Sequence[Sharding | None],
    order: DeviceOrder,
    mesh: Mesh | None,
    settings: Settings,
    options: Any,
) -> XlaProgram:
    """Annotations as constraints, the rest to XLA; arguments start where gshard would put them."""
    if isinstance(order.devices, int):
        raise ValueError("partitioner='xla' needs real devices: XLA partitions when it compiles")
    flat = inline(traced.jaxpr, order, folded=False)
    lies = {v: s for v, s in zip(flat.jaxpr.invars, given, strict=True) if s is not None}
    shardings = propagate(flat, order.count, lies)
    closed_over = _jax.closed_over(traced)
    variables = [*flat.jaxpr.constvars, *flat.jaxpr.invars]
    shapes = [tuple(v.aval.shape) for v in variables]
    axes, _ = ports([shardings[v] for v in variables], shapes, order.count)
    own = make_mesh(axes, order.devices)

    def named(sharding: Sharding, shape: Sequence[int]) -> NamedSharding | None:
        spec = partition_spec(sharding, axes) if sharding.is_even(shape) else None
        return None if spec is None else NamedSharding(own, spec)

    def constrained(*arrays: jax.Array) -> list[Any]:
        arguments = [*closed_over, *arrays]
        return _evaluate(flat, arguments, lambda v: named(shardings[v], v.aval.shape))

    arguments = flat.jaxpr.invars[len(closed_over) :]
    placed = [named(shardings[v], v.aval.shape) for v in arguments]
    into = [s or NamedSharding(own, jax.P()) for s in placed]
    constrained.__name__ = constrained.__qualname__ = traced.fun_name
    jitted = jax.jit(
        constrained,
        in_shardings=into,
        donate_argnums=settings.donated,
        keep_unused=settings.keep_unused,
        compiler_options=dict(settings.compiler_options) or None,
    )
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in arguments]
    with _jax.without_mesh():
        return XlaProgram(
            jitted.trace(*structs), order.count, into, [shardings[v] for v in arguments]
        )


@dataclass(frozen=True, eq=False)
class XlaProgram:
    """A program that XLA partitions when it compiles it."""

    traced: jax.stages.Traced
    num_devices: int
    into: list[NamedSharding]
    inputs: list[Sharding]
    wraps = False
    per_device = False

    @property
    def subject(self) -> Any:
        """Nothing: XLA partitions when it compiles."""
        raise NotImplementedError

    @property
    def jaxpr(self) -> Jaxpr:
        """The annotated program, on logical shapes: XLA partitions it when it compiles."""
        return self.traced.jaxpr.jaxpr

    @functools.cached_property
    def _compiled(self) -> jax.stages.Compiled:
        return self.traced.lower().compile()

    def fits(self, given: Sequence[Sharding | None]) -> bool:
        """Whether it takes arguments that lie like that as they are."""
        own = given[len(given) - len(self.inputs) :]
        return all(g is None or g == s for g, s in zip(own, self.inputs, strict=True))

    def collectives(self) -> list[Collective]:
        """What XLA's compiled program moves."""
        return list(collectives_of_hlo(self._compiled.as_text() or "", self.num_devices))

    def text(self) -> str:
        """The annotated program."""
        return self.traced.lower().as_text()

    def input_shardings(self) -> list[Any]:
        """Where the arguments start: as gshard would have them."""
        return self.inputs

    def output_shardings(self) -> list[Any]:
        """What XLA chose for the results."""
        return jax.tree.leaves(self._compiled.output_shardings)

    def structs(self, dtypes: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """The arguments as shapes with their shardings."""
        avals = self.traced.jaxpr.in_avals
        return [
            jax.ShapeDtypeStruct(a.shape, dtype, sharding=s)
            for a, dtype, s in zip(avals, dtypes, self.into, strict=True)
        ]

    def compile(self, compiler_options: dict | None) -> jax.stages.Compiled:
        """The program, partitioned and compiled by XLA."""
        if compiler_options:
            return self.traced.lower().compile(compiler_options=compiler_options)
        return self._compiled

    def placed_consts(self) -> list[jax.Array]:
        """None: XLA takes the values that the user's function closes over as constants."""
        return []

    def put(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """The arguments where the program wants them."""
        return [
            x
            if isinstance(x, jax.Array) and in_place(x.sharding, s, x.ndim)
            else jax.device_put(x.logical() if isinstance(x, UnevenArray) else x, s)
            for x, s in zip(leaves, self.into, strict=True)
        ]

    def shown(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The arguments, as they are."""
        return list(arrays)

    def get(self, out: Sequence[jax.Array]) -> list[jax.Array]:
        """The results, as they are."""
        return list(out)

    def logical(self, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        """The program on logical values."""
        return self.traced(*arguments)


def _evaluate(program: ClosedJaxpr, arrays: Sequence[Any], sharding_of: Callable) -> list[Any]:
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
