"""A per-device program as the operators that a compiler makes of it.

XLA joins pointwise equations into their consumers, so most values of a program are never stored.
Here a value is stored if it leaves the body, if an operator that cannot join reads or makes it, or
if it is dear to compute and read more than once. Each stored value that pointwise equations make
is one operator: what it reads is what stands stored at the end of every chain that leads to it.
How much is joined depends on the compiler: XLA for TPUs also joins a matrix product with what makes
its operands and with what reads its result; XLA for CPUs draws random bits in a loop of their own,
undoes rematerialization outside of loops (equal equations are computed once), and waits for all
gradients to reduce them over devices together.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from gshard.tile import byte_size

CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2"}
LOOPS = {"scan", "while", "cond"}
COLLECTIVES = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_to_all": "all_to_all",
    "ppermute": "collective_permute",
    "reduce_scatter": "reduce_scatter",
}
PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
ALIASES = {
    "reshape", "squeeze", "expand_dims", "bitcast_convert_type", "copy", "stop_gradient",
    "random_wrap", "random_unwrap", "optimization_barrier", "copy_p",
}  # fmt: skip
STYLES = ("cpu", "gpu", "tpu")  # XLA's compilers, as far as they differ in what they join
APART = {
    "gather", "scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_min", "scatter_max",
    "sort", "top_k", "approx_top_k", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp",
    "dynamic_update_slice", "fft", "cholesky", "triangular_solve", "lu", "qr", "eigh", "svd",
    "reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window",
    "select_and_scatter_add", "select_and_gather_add", "pallas_call", "ffi_call", "io_callback",
    "pure_callback", "custom_partitioning", "concatenate", "rng_bit_generator",
}  # fmt: skip
_DEAR = {
    "exp", "exp2", "expm1", "log", "log1p", "pow", "sqrt", "rsqrt", "cbrt", "tanh", "sin", "cos",
    "tan", "logistic", "erf", "erf_inv", "erfc", "div", "rem", "threefry2x32", "atan2",
    "integer_pow", "digamma", "lgamma",
}  # fmt: skip
_REDUCED_APART = {"reduce_sum", "reduce_max", "reduce_min"}
_REDUCED_FROM = 4096  # elements
_SQUARES = {"mul", "square", "integer_pow"}
_FROM_LITTLE = {"broadcast_in_dim", "iota"}


@dataclass(frozen=True, eq=False)
class Op:
    """An equation of a body, calls inlined; `reads` are variables, literals left out."""

    eqn: JaxprEqn
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    joins: bool  # whether a compiler joins it with its neighbours

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.eqn.primitive.name

    @property
    def reduces(self) -> bool:
        """Whether it joins with what it reads, but not with who reads it."""
        return self.name.startswith(("reduce_", "arg")) and self.joins


@dataclass
class Operator:
    """What a device runs as one: an op that stands apart, or a fused group that ends in `root`."""

    root: Op
    reads: list[Any]
    writes: list[Any]
    members: list[Op] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """What it reads and writes, each stored value once."""
        return sum(map(size_of, self.reads)) + sum(map(size_of, self.writes))


@dataclass
class Body:
    """The operators of one program or loop body, in its order."""

    jaxpr: Jaxpr
    inputs: list[Any]
    outputs: list[Any]
    operators: list[Operator]
    alias: dict[Any, Any]  # values that are another one under a new shape
    folded: set[Any]  # of those the transposes of what a product reads or makes

    def stands_for(self, var: Any) -> Any:
        """The stored value that `var` is only another view of."""
        while var in self.alias:
            var = self.alias[var]
        return var


def size_of(var: Any) -> int:
    """Bytes of a value."""
    aval = var.aval
    return byte_size(aval.shape, aval.dtype) if hasattr(aval, "shape") else 0


def bodies_of(eqn: JaxprEqn) -> list[Jaxpr]:
    """The programs inside an equation."""
    return [getattr(j, "jaxpr", j) for j in jaxprs_in_params(eqn.params)]


def flatten(jaxpr: Jaxpr, style: str) -> tuple[list[Op], list[Any]]:
    """The equations with calls inlined, and the results' variables."""
    ops: list[Op] = []
    apart = APART | set(COLLECTIVES) | PRODUCTS | LOOPS
    if style == "cpu":
        apart = apart | {"threefry2x32"}
    outputs = _inline(jaxpr, {}, ops, apart)
    if style != "cpu":
        return ops, outputs
    ops, outputs = _once(ops, outputs)
    return _with_broadcasts(ops), outputs


def _once(ops: list[Op], outputs: list[Any]) -> tuple[list[Op], list[Any]]:
    """Equal equations on equal values computed once, barriers against that notwithstanding."""
    same: dict[Any, Any] = {}
    seen: dict[Any, Op] = {}
    kept = []
    for op in ops:
        reads = tuple(same.get(v, v) for v in op.reads)
        if op.name == "optimization_barrier":
            same.update(zip(op.writes, reads, strict=True))
            continue
        fixed = tuple(str(a) for a in op.eqn.invars if isinstance(a, Literal))
        settings = tuple((k, _key(v)) for k, v in sorted(op.eqn.params.items()))
        first = seen.setdefault((op.name, reads, fixed, settings), op)
        if first is op or op.eqn.effects or op.name in LOOPS:
            kept.append(Op(op.eqn, reads, op.writes, op.joins))
        else:
            same.update(zip(op.writes, first.writes, strict=True))
    return kept, [v if isinstance(v, Literal) else same.get(v, v) for v in outputs]


def _key(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return str(value)
    return value


def _inline(jaxpr: Jaxpr, env: dict[Any, Any], ops: list[Op], apart: set[str]) -> list[Any]:
    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else env.get(atom, atom)

    for eqn in jaxpr.eqns:
        reads = [read(a) for a in eqn.invars]
        inner = bodies_of(eqn) if eqn.primitive.name in CALLS else []
        if len(inner) == 1 and len(inner[0].invars) == len(reads):
            # A body may be shared by several calls: its variables get fresh stand-ins.
            fresh = _Fresh(zip(inner[0].invars, reads, strict=True))
            results = _inline(inner[0], fresh, ops, apart)
            env.update(zip(eqn.outvars, results, strict=True))
            continue
        writes = []
        for var in eqn.outvars:
            if isinstance(env, _Fresh):
                env[var] = Stored(var.aval)
            writes.append(env.get(var, var))
        values = tuple(r for r in reads if not isinstance(r, Literal))
        ops.append(Op(eqn, values, tuple(writes), eqn.primitive.name not in apart))
    return [read(a) for a in jaxpr.outvars]


class _Fresh(dict[str, Any]):
    """The values of one call of a body."""


@dataclass(eq=False, frozen=True)
class Stored:
    """A value of an inlined call."""

    aval: Any


@functools.lru_cache(maxsize=512)
def body_of(jaxpr: Jaxpr, style: str) -> Body:
    """What a compiler makes of one body."""
    ops, outputs = flatten(jaxpr, style)
    makers = {var: op for op in ops for var in op.writes}
    readers: dict[Any, list[Op]] = defaultdict(list)
    for op in ops:
        for var in op.reads:
            readers[var].append(op)
    folded = {v for op in ops if _is_folded(op, makers, readers) for v in op.writes}
    alias = {
        new: old
        for op in ops
        if op.name in ALIASES or folded.intersection(op.writes)
        if len(op.reads) == len(op.writes)
        for new, old in zip(op.writes, op.reads, strict=True)
    }
    leaving = {v for v in outputs if not isinstance(v, Literal)}
    body = Body(jaxpr, [*jaxpr.constvars, *jaxpr.invars], outputs, [], alias, folded)
    stored = _stored(ops, readers, leaving, body)
    if style == "cpu":
        _store_what_is_reduced(ops, makers, stored, body)
    if style == "tpu":
        _join_products(ops, readers, leaving, stored, body)
    for op in ops:
        if op.writes and op.writes[0] in alias:
            continue
        if op.joins or (style == "tpu" and op.name in PRODUCTS):
            kept = [v for v in op.writes if v in stored]
            if kept:
                body.operators.append(_fusion(op, kept, makers, stored, body))
        else:
            reads = list(dict.fromkeys(body.stands_for(v) for v in op.reads))
            body.operators.append(Operator(op, reads, list(op.writes), [op]))
    if style == "cpu":
        body.operators = _reduced_together(body.operators)
    return body


def _is_folded(op: Op, makers: dict[Any, Op], readers: dict[Any, list[Op]]) -> bool:
    """Whether a matrix product does this transpose on the way: of an operand, or of its result."""
    if op.name != "transpose" or len(op.writes[0].aval.shape) != 2 or not op.reads:
        return False
    users, maker = readers[op.writes[0]], makers.get(op.reads[0])
    made = maker is not None and maker.name == "dot_general" and len(readers[op.reads[0]]) == 1
    return made or (bool(users) and all(u.name == "dot_general" for u in users))


def _reduced_together(operators: list[Operator]) -> list[Operator]:
    """All-reduces that do not depend on each other as one, where the last of them stands."""
    merged: dict[Any, Operator] = {}
    late: dict[int, Operator] = {}
    behind: dict[Any, set[int]] = {}  # for every value the joined all-reduces that it waits for
    for operator in operators:
        waits = set().union(*(behind.get(v, set()) for v in operator.reads))
        params = operator.root.eqn.params
        if COLLECTIVES.get(operator.root.name) == "all_reduce":
            key = (operator.root.name, _key(params.get("axis_index_groups")), len(waits))
            first = merged.setdefault(key, operator)
            late[id(operator)] = first
            if first is not operator:
                first.reads += operator.reads
                first.writes += operator.writes
            waits = waits | {id(first)}
        for var in operator.writes:
            behind[var] = waits
    last = {id(late[id(o)]): number for number, o in enumerate(operators) if id(o) in late}
    ordered = []
    for number, operator in enumerate(operators):
        joint = late.get(id(operator))
        if joint is None or last[id(joint)] == number:
            ordered.append(joint or operator)
    return _in_order(ordered)


def _in_order(operators: list[Operator]) -> list[Operator]:
    """The same operators, each after those that make what it reads, else as they stand."""
    makers = {v: o for o in operators for v in o.writes}
    done: set[int] = set()
    order: list[Operator] = []
    for goal in operators:
        stack = [goal]
        while stack:
            operator = stack[-1]
            waiting = [
                makers[v] for v in operator.reads if v in makers and id(makers[v]) not in done
            ]
            if id(operator) in done or not waiting:
                stack.pop()
                if id(operator) not in done:
                    done.add(id(operator))
                    order.append(operator)
            else:
                stack.append(waiting[0])
    return order


def _stored(
    ops: Sequence[Op], readers: dict[Any, list[Op]], leaving: set[Any], body: Body
) -> set[Any]:
    """The values that are written to memory."""
    stored: set[Any] = set()
    for op in ops:
        for var in op.writes:
            needed = var in leaving or any(not u.joins for u in readers[var])
            if needed or (var not in body.alias and (not op.joins or op.reduces)):
                stored.add(body.stands_for(var))
    dear: set[Any] = set()  # values that nobody stores and that it would be dear to compute again
    for op in ops:
        if op.name in _FROM_LITTLE or not op.writes or op.writes[0] in body.alias:
            continue
        if op.name in _DEAR or any(body.stands_for(v) in dear for v in op.reads):
            for var in op.writes:
                if var not in stored and _uses(var, readers, body) > 1:
                    stored.add(var)
                elif var not in stored:
                    dear.add(var)
    return stored


def _with_broadcasts(ops: list[Op]) -> list[Op]:
    """Operands that XLA's library for reductions on CPUs reads as large as the product of them."""
    makers = {v: op for op in ops for v in op.writes}
    counts = Counter(v for op in ops for v in op.reads)
    widened: dict[Any, Any] = {}
    changed: dict[int, list[Op]] = {}
    for op in ops:
        maker = _reduced_product(op, makers, counts)
        if maker is None:
            continue
        (result,) = maker.writes
        small = [v for v in maker.reads if _elements(v) < _elements(result)]
        new = []
        for var in small:
            key = var, result.aval.shape
            if key not in widened:
                widened[key] = Stored(result.aval)
                new.append(Op(maker.eqn, (var,), (widened[key],), True))
        reads = tuple(widened.get((v, result.aval.shape), v) for v in maker.reads)
        changed[id(maker)] = [*new, Op(maker.eqn, reads, maker.writes, True)]
    return [new for op in ops for new in changed.get(id(op), [op])]


def _reduced_product(op: Op, makers: dict[Any, Op], counts: Mapping[Any, int]) -> Op | None:
    """The product that a reduction on CPUs takes in: the one thing that it joins with."""
    if op.name not in _REDUCED_APART or _elements(op.reads[0]) < _REDUCED_FROM:
        return None
    maker = makers.get(op.reads[0])
    return maker if maker and maker.name in _SQUARES and counts[op.reads[0]] == 1 else None


def _store_what_is_reduced(
    ops: Sequence[Op], makers: dict[Any, Op], stored: set[Any], body: Body
) -> None:
    """Add what reductions on CPUs read: their operand, or the operands of the product it is."""
    counts = Counter(v for op in ops for v in op.reads)
    for op in ops:
        if op.name in _REDUCED_APART and _elements(op.reads[0]) >= _REDUCED_FROM:
            product = _reduced_product(op, makers, counts)
            stored.update(map(body.stands_for, product.reads if product else op.reads))


def _elements(var: Any) -> int:
    return math.prod(var.aval.shape)


def _join_products(
    ops: Sequence[Op],
    readers: dict[Any, list[Op]],
    leaving: set[Any],
    stored: set[Any],
    body: Body,
) -> None:
    """Take out of `stored` what passes between a product and a single neighbour.

    An operator holds one product at most: `holding` are the values that already come with one.
    """
    holding: set[Any] = set()
    for op in ops:
        if not op.writes or op.writes[0] in body.alias:
            continue
        product = op.name in PRODUCTS
        found = [v for v in map(body.stands_for, op.reads) if v in holding]
        for extra in found if product else found[1:]:
            stored.add(extra)
            holding.discard(extra)
        for var in op.writes:
            users = _users(var, readers, body)
            alone = len(users) == 1 and not _leaves(var, leaving, readers, body)
            if product and alone and users[0].joins:
                stored.discard(var)
            joined = op.joins and not op.reduces and not found
            if alone and joined and users[0].name in PRODUCTS:
                stored.discard(var)
            if var not in stored and (product or found):
                holding.add(var)


def _users(var: Any, readers: dict[Any, list[Op]], body: Body) -> list[Op]:
    """Who reads a value, through views of it."""
    users = []
    for op in readers[var]:
        views = [w for w in op.writes if body.alias.get(w) is var]
        users += [u for w in views for u in _users(w, readers, body)] if views else [op]
    return users


def _leaves(var: Any, leaving: set[Any], readers: dict[Any, list[Op]], body: Body) -> bool:
    """Whether a value or a view of it leaves the body."""
    views = [w for op in readers[var] for w in op.writes if body.alias.get(w) is var]
    return var in leaving or any(_leaves(w, leaving, readers, body) for w in views)


def _uses(var: Any, readers: dict[Any, list[Op]], body: Body) -> int:
    return len(_users(var, readers, body))


def _fusion(
    root: Op, kept: list[Any], makers: dict[Any, Op], stored: set[Any], body: Body
) -> Operator:
    reads: dict[Any, None] = {}
    members: dict[int, Op] = {id(root): root}
    waiting = [root]
    while waiting:
        for var in waiting.pop().reads:
            var = body.stands_for(var)
            maker = makers.get(var)
            if maker is None or var in stored:
                reads[var] = None
            elif id(maker) not in members:
                members[id(maker)] = maker
                waiting.append(maker)
    return Operator(root, list(reads), kept, list(members.values()))


def trips(eqn: JaxprEqn) -> int:
    """How often a body of this equation runs; once where only the data know."""
    return eqn.params["length"] if eqn.primitive.name == "scan" else 1


def walk(jaxpr: Jaxpr, style: str) -> Iterator[tuple[Operator, int, tuple[JaxprEqn, ...]]]:
    """Every operator with its number of runs and the loops around it, bodies before their loop."""
    yield from _walk(jaxpr, style, 1, ())


def _walk(
    jaxpr: Jaxpr, style: str, times: int, around: tuple[JaxprEqn, ...]
) -> Iterator[tuple[Operator, int, tuple[JaxprEqn, ...]]]:
    for operator in body_of(jaxpr, style).operators:
        eqn = operator.root.eqn
        if operator.root.name in LOOPS:
            inner = bodies_of(eqn)
            if operator.root.name == "cond":
                inner = inner[-1:]
            for body in inner:
                yield from _walk(body, style, times * trips(eqn), (*around, eqn))
        else:
            yield operator, times, around
