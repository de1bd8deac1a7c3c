"""A partitioner in one file: how gshard works, for products, elementwise operators, reductions,
reshapes and transposes. docs/explanation/tiny.md walks through it.

    capture    a function                -> a flat list of equations
    factors    an equation               -> which dims of its tensors are one dim
    propagate  a few annotations         -> a sharding for every value
    plan       equations and shardings   -> how each runs, and what is sent, as data
    emit       a plan                    -> one program for all devices
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, mlir
from jax.sharding import Mesh, PartitionSpec

Axes = tuple[str | None, ...]  # a sharding: the mesh axis that each dim is split along, or None

FLOPS_PER_BYTE, LATENCY = 512, 16 * 2**10  # in the time of sending a byte; in bytes

annotation_p = Primitive("annotation")  # the identity; a gradient gets the annotation too
annotation_p.def_impl(lambda x, axes: x)
annotation_p.def_abstract_eval(lambda x, axes: x)
ad.deflinear2(annotation_p, lambda ct, _, axes: [annotation_p.bind(ct, axes=axes)])
mlir.register_lowering(annotation_p, lambda ctx, x, axes: [x])


def annotate(x, *axes: str | None):
    return annotation_p.bind(x, axes=axes)


@dataclass(eq=False)
class Value:
    """A tensor of the program; two are the same only if they are one object."""

    shape: tuple[int, ...]
    dtype: Any


class Equation(NamedTuple):
    primitive: Primitive
    params: dict[str, Any]
    operands: list[Any]  # values, and literals: scalars in the program's text
    result: Value
    line: str  # of the user's code


class Program(NamedTuple):
    arguments: list[Value]
    equations: list[Equation]
    results: list[Any]
    constants: list[Any]  # the first arguments


def capture(fn, *args) -> Program:
    traced, equations = jax.make_jaxpr(fn)(*args), []

    def inline(jaxpr, inputs: list[Any]) -> list[Any]:
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))
        for eqn in jaxpr.eqns:
            operands = [a if isinstance(a, Literal) else known[a] for a in eqn.invars]
            called = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
            if called is not None:
                results = inline(called.jaxpr, operands)  # JAX hoists constants out of calls
            else:
                results = [Value(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
                line = source_line(eqn)
                equations.append(Equation(eqn.primitive, eqn.params, operands, results[0], line))
            known.update(zip(eqn.outvars, results, strict=True))
        return [a if isinstance(a, Literal) else known[a] for a in jaxpr.outvars]

    jaxpr = traced.jaxpr
    inputs = [Value(v.aval.shape, v.aval.dtype) for v in (*jaxpr.constvars, *jaxpr.invars)]
    results = inline(jaxpr, inputs)
    live, kept = {v for v in results if isinstance(v, Value)}, []
    for eqn in reversed(equations):
        if eqn.result in live:
            live |= {v for v in eqn.operands if isinstance(v, Value)}
            kept.insert(0, eqn)
    return Program(inputs, kept, results, traced.consts)


def source_line(eqn) -> str:
    frames = eqn.source_info.traceback.frames if eqn.source_info.traceback else []
    own = [f for f in frames if "/jax/" not in f.file_name and f.function_name != "annotate"]
    return f"{own[0].file_name.split('/')[-1]}:{own[0].line_num}" if own else "?"


class Factors(NamedTuple):
    """A letter for each dim of the operands and the result; None where a dim cannot be split."""

    operands: list[tuple[str | None, ...]]
    result: tuple[str | None, ...]

    def reduced(self) -> list[str]:  # where one of these is split, devices have partial results
        return sorted({n for dims in self.operands for n in dims if n} - set(self.result))


LETTERS = "abcdefghijklmnopqrstuvwxyz"
NEUTRAL = {"reduce_sum": 0, "dot_general": 0, "reduce_max": -math.inf}


def factors(eqn: Equation) -> Factors:
    """The rule of an operator; everything else follows from it."""
    shapes = [v.shape if isinstance(v, Value) else () for v in eqn.operands]
    made = eqn.result.shape
    a = tuple(LETTERS[: max([len(made), *map(len, shapes)])])
    match eqn.primitive.name:
        case "dot_general":
            (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
            a, b = a[: len(shapes[0])], list(LETTERS[13 : 13 + len(shapes[1])])
            for i, j in zip((*left, *left_batch), (*right, *right_batch), strict=True):
                b[j] = a[i]
            free = [n for i, n in enumerate(a) if i not in (*left, *left_batch)]
            free += [n for j, n in enumerate(b) if j not in (*right, *right_batch)]
            return Factors([a, tuple(b)], (*(a[i] for i in left_batch), *free))
        case "reduce_sum" | "reduce_max":
            return Factors([a], tuple(n for i, n in enumerate(a) if i not in eqn.params["axes"]))
        case "transpose":
            return Factors([a], tuple(a[i] for i in eqn.params["permutation"]))
        case "broadcast_in_dim":
            return Factors([aligned(shapes[0], eqn.params["broadcast_dimensions"], made)], a)
        case "reshape" | "squeeze":
            return reshaped(shapes[0], made)
        case "iota":
            return Factors([], (None,) * len(made))
    if any(n not in (1, r) for s in shapes for n, r in zip(s, made, strict=bool(s))):
        raise NotImplementedError(f"{eqn.line}: {eqn.primitive} is not in tiny: use gshard.jit")
    return Factors([aligned(s, range(len(s)), made) for s in shapes], a)  # elementwise


def aligned(shape, dims, made) -> tuple[str | None, ...]:
    """The letters of an operand whose dims are these of the result; of size 1, it is repeated."""
    return tuple(LETTERS[d] if n == made[d] else None for n, d in zip(shape, dims, strict=True))


def reshaped(before: tuple[int, ...], after: tuple[int, ...]) -> Factors:
    """Dims are grouped from the left until their sizes agree; the first of a group is split."""
    given, made = [None] * len(before), [None] * len(after)
    letters, i, j = iter(LETTERS), 0, 0
    while i < len(before) and j < len(after):
        if before[i] == 1 or after[j] == 1:
            i, j = i + (before[i] == 1), j + (before[i] != 1)
            continue
        given[i] = made[j] = next(letters)
        m, n, i, j = before[i], after[j], i + 1, j + 1
        while m != n:
            if m < n:
                m, i = m * before[i], i + 1
            else:
                n, j = n * after[j], j + 1
    return Factors([tuple(given)], tuple(made))


def letters_of(eqn: Equation) -> list[tuple[Value, int, str]]:
    """Every dim of every tensor that has a letter."""
    rule = factors(eqn)
    tensors = zip([*eqn.operands, eqn.result], [*rule.operands, rule.result], strict=True)
    values = [(value, names) for value, names in tensors if isinstance(value, Value)]
    return [(v, dim, name) for v, names in values for dim, name in enumerate(names) if name]


def propagate(program: Program) -> dict[Value, Axes]:
    values = [*program.arguments, *(eqn.result for eqn in program.equations)]
    found = {v: [None] * len(v.shape) for v in values}
    marks = [eqn for eqn in program.equations if eqn.primitive is annotation_p]
    fixed = {eqn.result: list(eqn.params["axes"]) for eqn in marks}
    found, before = found | fixed, None
    while before != str(list(found.values())):
        before = str(list(found.values()))
        for eqn in (*program.equations, *reversed(program.equations)):
            dims = letters_of(eqn)
            for (value, dim, letter), (other, there, same) in itertools.product(dims, dims):
                axis = found[value][dim]
                open_dim = other not in fixed and found[other][there] is None
                if axis and letter == same and open_dim and axis not in found[other]:
                    found[other][there] = axis
    return {v: tuple(axes) for v, axes in found.items()}


class Move(NamedTuple):
    """A collective, or a slice, along an axis: the dim that it splits changes (-1: none)."""

    kind: str
    axis: str
    source: int
    target: int
    sent: int  # bytes by each device
    reason: str


@dataclass
class Step:
    """An equation, the shardings that it runs under, and the moves of its operands and result."""

    equation: Equation
    operands: list[Axes]
    result: Axes
    before: list[tuple[Axes, list[Move]]]  # for each operand, the form that is moved
    after: list[Move]
    work: float

    def moves(self) -> list[Move]:
        return [m for m in (*(m for _, path in self.before for m in path), *self.after) if m.sent]

    def price(self) -> float:
        """The time of the step, as bytes that could be sent in it."""
        return sum(m.sent + LATENCY for m in self.moves()) + self.work / FLOPS_PER_BYTE


@dataclass
class Planner:
    """Chooses the cheapest way to run each equation: an axis, or none, for each letter."""

    mesh: Mesh
    axes: dict[Value, Axes]
    available: dict[Value, set[Axes]] = field(default_factory=dict)  # moved once for all readers

    def plan(self, program: Program) -> list[Step]:
        steps = []
        self.available = {value: {axes} for value, axes in self.axes.items()}
        for eqn in program.equations:
            steps.append(min(self.ways(eqn), key=Step.price))
            for operand, axes in zip(eqn.operands, steps[-1].operands, strict=True):
                if isinstance(operand, Value):
                    self.available[operand].add(axes)
        return steps

    def ways(self, eqn: Equation):
        """Every choice of the axes that the operands and the result suggest."""
        suggested, sizes = {}, {}
        for value, dim, letter in letters_of(eqn):
            suggested.setdefault(letter, {None}).add(self.axes[value][dim])
            sizes.setdefault(letter, set()).add(value.shape[dim])
        for chosen in itertools.product(*(sorted(s, key=str) for s in suggested.values())):
            split = {n: axis for n, axis in zip(suggested, chosen, strict=True) if axis}
            once = len(set(split.values())) == len(split)  # an axis splits one letter
            # Tiles need not be equal, except where a reshape groups rows.
            parts = ((sizes[n], self.mesh.shape[a]) for n, a in split.items())
            if once and all(len(s) == 1 or not any(n % count for n in s) for s, count in parts):
                yield self.step(eqn, split)

    def step(self, eqn: Equation, split: dict[str | None, str]) -> Step:
        rule, where = factors(eqn), f"{eqn.primitive} at {eqn.line}"
        operands = [tuple(map(split.get, names)) for names in rule.operands]
        result, wanted = tuple(map(split.get, rule.result)), self.axes[eqn.result]
        before = []
        for number, (value, axes) in enumerate(zip(eqn.operands, operands, strict=True)):
            why = f"operand {number} of {where}"
            forms = self.available[value] if isinstance(value, Value) else {axes}
            paths = [(form, self.path(value, form, axes, why)) for form in sorted(forms, key=str)]
            before.append(min(paths, key=lambda found: sum(m.sent for m in found[1])))
        now, after, why = list(result), [], f"result of {where}"
        over = "all_max" if eqn.primitive.name == "reduce_max" else "all_reduce"
        for axis in [split[n] for n in rule.reduced() if n in split]:
            dim, count = wanted.index(axis) if axis in wanted else -1, self.mesh.shape[axis]
            if over == "all_reduce" and dim >= 0 and now[dim] is None:
                now[dim] = axis
                sent = self.size(eqn.result, now) * (count - 1)
                after.append(Move("reduce_scatter", axis, -1, dim, sent, why))
            else:
                sent = 2 * self.size(eqn.result, now) * (count - 1) // count
                after.append(Move(over, axis, -1, -1, sent, why))
        after += self.path(eqn.result, tuple(now), wanted, why)
        shared = math.prod(self.mesh.shape[axis] for axis in split.values())
        return Step(eqn, operands, result, before, after, flops(eqn) / shared)

    def path(self, value, source: Axes, target: Axes, reason: str) -> list[Move]:
        """From one sharding to another: slice, exchange, gather; and slice what was gathered."""
        now, moves = list(source), []

        def move(axis: str, i: int, j: int) -> None:
            kind = "slice" if i < 0 else "all_gather" if j < 0 else "all_to_all"
            now[j if j >= 0 else i] = axis
            sent = 0 if i < 0 else self.size(value, now) * (self.mesh.shape[axis] - 1)
            now[i] = None if i >= 0 else now[i]
            moves.append(Move(kind, axis, i, j, sent, reason))

        def split() -> None:
            for held, j, axis in sorted((a in now, j, a) for j, a in enumerate(target) if a):
                if now[j] is None:
                    move(axis, now.index(axis) if held else -1, j)

        split()
        for i, axis in enumerate(now):
            if axis and axis != target[i]:
                move(axis, i, -1)
        split()
        return moves

    def tile(self, shape: tuple[int, ...], axes) -> tuple[int, ...]:
        """The shape of a device's tile: sizes that do not divide are rounded up."""
        counts = [self.mesh.shape[axis] if axis else 1 for axis in axes]
        return tuple(-(-n // count) for n, count in zip(shape, counts, strict=True))

    def size(self, value: Value, axes) -> int:
        return math.prod(self.tile(value.shape, axes)) * np.dtype(value.dtype).itemsize


def flops(eqn: Equation) -> float:
    if eqn.primitive.name != "dot_general":
        return 0.0
    (summed, _), _ = eqn.params["dimension_numbers"]
    return 2 * math.prod((*eqn.result.shape, *(eqn.operands[0].shape[i] for i in summed)))


def emit(planner: Planner, steps: list[Step], tiles: dict[tuple[Value, Axes], Any]) -> None:
    """Run the plan on tiles, inside `jax.shard_map`; what differs by device is `axis_index`."""
    for step in steps:
        eqn, operands, name = step.equation, [], step.equation.primitive.name
        for value, axes, (form, moves) in zip(
            eqn.operands, step.operands, step.before, strict=True
        ):
            if isinstance(value, Value) and (value, axes) not in tiles:
                tiles[value, axes] = moved(planner, value, tiles[value, form], moves)
            tile = tiles[value, axes] if isinstance(value, Value) else value.val
            is_padded = isinstance(value, Value) and name in NEUTRAL
            operands.append(masked(planner, value, tile, axes, name) if is_padded else tile)
        shape = planner.tile(eqn.result.shape, step.result)
        sizes = {"broadcast_in_dim": {"shape": shape}, "reshape": {"new_sizes": shape}}
        tile = eqn.primitive.bind(*operands, **(eqn.params | sizes.get(name, {})))
        tiles[eqn.result, planner.axes[eqn.result]] = moved(planner, eqn.result, tile, step.after)


def moved(planner: Planner, value: Value, tile, moves: list[Move]):
    for kind, axis, i, j, *_ in moves:
        count = planner.mesh.shape[axis]
        if j >= 0:  # the dim that is going to be split is padded to equal tiles
            tile = resized(tile, j, -(-value.shape[j] // count) * count)
        if kind == "slice":
            size = tile.shape[j] // count
            tile = lax.dynamic_slice_in_dim(tile, lax.axis_index(axis) * size, size, j)
        elif kind == "all_to_all":
            tile = lax.all_to_all(tile, axis, j, i, tiled=True)
        elif kind == "all_gather":
            tile = lax.all_gather(tile, axis, axis=i, tiled=True)
        elif kind == "reduce_scatter":
            tile = lax.psum_scatter(tile, axis, scatter_dimension=j, tiled=True)
        else:
            tile = lax.pmax(tile, axis) if kind == "all_max" else lax.psum(tile, axis)
        tile = resized(tile, i, value.shape[i]) if i >= 0 else tile
    return tile


def masked(planner: Planner, value: Value, tile, axes: Axes, name: str):
    """Padding is garbage: before a reduction it is replaced by what the reduction ignores."""
    for dim, axis in enumerate(axes):
        if axis and value.shape[dim] % planner.mesh.shape[axis]:
            rows = lax.broadcasted_iota(jnp.int32, tile.shape, dim)
            rows += lax.axis_index(axis) * tile.shape[dim]
            tile = jnp.where(rows < value.shape[dim], tile, jnp.asarray(NEUTRAL[name], tile.dtype))
    return tile


def resized(tile, dim: int, size: int):
    if size <= tile.shape[dim]:
        return lax.slice_in_dim(tile, 0, size, axis=dim)
    pads = [(0, size - n) if d == dim else (0, 0) for d, n in enumerate(tile.shape)]
    return jnp.pad(tile, pads, constant_values=jnp.nan if tile.dtype.kind == "f" else 1)


class Partitioned:
    """`fn` on the devices of a mesh, for arguments of these shapes; results are a flat list."""

    def __init__(self, fn, mesh: Mesh, *args) -> None:
        self.program = capture(fn, *args)
        self.planner = Planner(mesh, propagate(self.program))
        self.steps = self.planner.plan(self.program)
        self.moves = [move for step in self.steps for move in step.moves()]

    def __call__(self, *args) -> list[Any]:
        program, axes, mesh = self.program, self.planner.axes, self.planner.mesh

        def local(*given):
            tiles = {(v, axes[v]): t for v, t in zip(program.arguments, given, strict=True)}
            emit(self.planner, self.steps, tiles)
            return [tiles[v, axes[v]] for v in program.results]

        arguments = zip([*program.constants, *args], program.arguments, strict=True)
        padded = [self.padded(jnp.asarray(arg), v) for arg, v in arguments]
        ins = tuple(PartitionSpec(*axes[v]) for v in program.arguments)
        outs = [PartitionSpec(*axes[v]) for v in program.results]
        run = jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
        results = zip(jax.jit(run)(*padded), program.results, strict=True)
        return [r[tuple(map(slice, v.shape))] for r, v in results]

    def padded(self, array, v: Value):
        for dim, axis in enumerate(self.planner.axes[v]):
            count = self.planner.mesh.shape[axis] if axis else 1
            array = resized(array, dim, -(-v.shape[dim] // count) * count)
        return array
