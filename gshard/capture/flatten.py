"""A traced function -> one flat program over logical shapes.

Calls (`jit`, `custom_jvp`, `custom_vjp`, `remat`, linear solvers) are inlined, since
differentiation has already happened; other equations are expanded (see `expand`). Loops and
branches stay; each gets its own copy of its body, so that every variable occurs in one place of the
program. JAX's sharding constraints, reshards and operators with an `out_sharding` become
annotations.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    jaxpr_as_fun,
    new_jaxpr_eqn,
)
from jax.extend.core import primitives as p
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gshard._jax import (
    Var,
    current_context,
    custom_partitioning_p,
    discharge_refs,
    drop_unused,
    optimization_barrier_p,
    remat_p,
    reshard_p,
    sharding_constraint_p,
    unstack_p,
    without_mesh,
)
from gshard.capture.partly_manual import for_stacks, on_stacks
from gshard.capture.placement import DeviceOrder
from gshard.graph import CALLS, LOOPS, map_bodies
from gshard.graph.regions import MEANINGS, as_closed, walk
from gshard.graph.source import at_line_of, source_of
from gshard.rules.base.rule import REGIONS, RULES
from gshard.rules.callbacks import implementation, traced
from gshard.tensors.annotate import Annotation, annotate_p
from gshard.tensors.manual import (
    NamedAxes,
    is_shard_map,
    is_type_only,
    lower_named_axes,
    to_auto_p,
    to_manual_p,
)
from gshard.tensors.meshes import grid_of

# Parameters with annotations and JAX's shardings: of operators that only reshard, and of others.
_CONSTRAINTS = {
    annotate_p: "annotation",
    sharding_constraint_p: "sharding",
    reshard_p: "dst_sharding",
}
_OWN_SHARDING = ("sharding", "out_sharding")


def spec_of_type(named: NamedSharding) -> NamedSharding | None:
    """The spec in a type's sharding; axes that are not explicit are left open."""
    types = named.mesh.axis_types
    if AxisType.Explicit not in types:
        return None
    if set(types) == {AxisType.Explicit}:
        return named
    entries = (PartitionSpec.UNCONSTRAINED if e is None else e for e in named.spec)
    return NamedSharding(named.mesh, PartitionSpec(*entries))


def inline(closed: ClosedJaxpr, order: DeviceOrder, as_meant: bool = False) -> ClosedJaxpr:
    """The flat program of a traced one; pipelines are left, or the layers in order (`as_meant`)."""
    closed = discharge_refs(closed)
    live = ClosedJaxpr(drop_unused(closed.jaxpr), closed.consts)
    return _Builder(order, as_meant=as_meant).body(live, results=True)


def mesh_in(closed: ClosedJaxpr) -> Mesh | None:
    """The mesh of a program's own sharding constraints, if they agree on one."""
    marked = (e for e in walk(closed.jaxpr) if e.primitive in _CONSTRAINTS)
    named = (e.params[_CONSTRAINTS[e.primitive]] for e in marked)
    meshes = {n.mesh for n in named if isinstance(n, NamedSharding) and isinstance(n.mesh, Mesh)}
    return meshes.pop() if len(meshes) == 1 else None


@dataclass(frozen=True)
class Region:
    """A `jax.shard_map` over some axes of its mesh, and the sizes of all axes that are manual."""

    mesh: Any
    sizes: dict[str, int]


@dataclass
class _Builder:
    """Copies equations with fresh variables, collecting the constants of inlined calls."""

    order: DeviceOrder
    axes: NamedAxes | None = None  # of the enclosing `jax.shard_map`, over all axes of its mesh
    region: Region | None = None  # the enclosing one over some axes of its mesh
    as_meant: bool = False
    eqns: list[JaxprEqn] = field(default_factory=list)
    consts: dict[Var, Any] = field(default_factory=dict)

    def body(self, closed: ClosedJaxpr, results: bool = False) -> ClosedJaxpr:
        """A copy of a program; its `results` are annotated with the shardings in their types."""
        invars = [_fresh(v) for v in closed.jaxpr.invars]
        outvars = self.inline(closed, invars)
        if results:
            outvars = list(map(self.result, closed.jaxpr.outvars, outvars))
        jaxpr = Jaxpr(
            list(self.consts),
            invars,
            outvars,
            self.eqns,
            closed.jaxpr.effects,
            debug_info=closed.jaxpr.debug_info.with_unknown_names(),
        )
        return ClosedJaxpr(jaxpr, list(self.consts.values()))

    def inline(
        self, closed: ClosedJaxpr, args: Sequence[Any], caller: JaxprEqn | None = None
    ) -> list[Any]:
        """Append the equations of a program that `caller` calls with `args`; its results."""
        jaxpr, start = closed.jaxpr, len(self.eqns)
        env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            env[var] = _fresh(var)
            self.consts[env[var]] = value

        def read(atom: Any) -> Any:
            return _plain(atom) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            invars = [read(a) for a in eqn.invars]
            env.update(zip(eqn.outvars, self.equation(eqn, invars), strict=True))
        if caller is not None:
            self.eqns[start:] = [at_line_of(caller, eqn) for eqn in self.eqns[start:]]
        return [read(a) for a in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, invars: list[Any]) -> list[Any]:
        """Append one equation; its new result variables."""
        if eqn.primitive in CALLS:
            return self.call(eqn, invars)
        if eqn.primitive in _CONSTRAINTS:
            sharding = eqn.params[_CONSTRAINTS[eqn.primitive]]
            sharding = spec_of_type(sharding) if eqn.primitive is reshard_p else sharding
            return [self.annotate(eqn, invars[0], sharding)]
        if is_shard_map(eqn):
            return self.shard_map(eqn, invars)
        if is_type_only(eqn) or _is_weakness_only(eqn):
            return invars
        found = lower_named_axes(eqn, self.axes) if self.axes else None
        if found or (self.region and (found := for_stacks(eqn))):
            return self.append(eqn, invars, [_fresh(v) for v in eqn.outvars], *found)
        if (branch := _branch_of_all(eqn)) is not None:  # others are JAX's choice: exports
            return self.inline(branch, invars[1:], eqn)
        if (expanded := expand(eqn)) is not None:
            return self.inline(expanded, invars)
        if self.as_meant and eqn.primitive in MEANINGS:
            return self.inline(MEANINGS[eqn.primitive](eqn), invars, eqn)
        outvars = [_fresh(v) for v in eqn.outvars]
        if eqn.primitive in LOOPS or eqn.primitive in MEANINGS:
            eqn = map_bodies(eqn, lambda body: replace(self, eqns=[], consts={}).body(body))
        params = dict(eqn.params)
        own = [params[k] for k in _OWN_SHARDING if isinstance(params.get(k), NamedSharding)]
        params.update((k, None) for k in _OWN_SHARDING if k in params)
        context = current_context() if self.region else eqn.ctx
        self.eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params, ctx=context))
        return [self.annotate(eqn, outvars[0], spec_of_type(own[0]))] if own else outvars

    def annotate(self, eqn: JaxprEqn, atom: Any, sharding: Any) -> Any:
        """`atom` annotated with an annotation or a JAX sharding."""
        if sharding is None or (isinstance(sharding, NamedSharding) and sharding.mesh.empty):
            return atom
        annotation = self.annotation_of(eqn, sharding, len(atom.aval.shape))
        return self.append(eqn, [atom], [Var(atom.aval)], annotate_p, {"annotation": annotation})[0]

    def annotation_of(self, eqn: JaxprEqn, sharding: Any, rank: int) -> Annotation:
        """An annotation or a JAX sharding on these devices; errors name the user's line."""
        name = f"{eqn.primitive.name} to {getattr(sharding, 'spec', sharding)}"
        if self.region and isinstance(sharding, NamedSharding):
            sharding = NamedSharding(self.region.mesh, sharding.spec)
        try:
            if isinstance(sharding, Annotation):
                return sharding.on(self.order.count)
            return self.order.annotation(sharding, rank, name)
        except ValueError as error:
            asked = "" if isinstance(sharding, Annotation) else f"{name}: "
            raise ValueError(f"{source_of(eqn)}: {asked}{error}") from None

    def append(
        self,
        eqn: JaxprEqn,
        invars: list[Any],
        outvars: list[Any],
        primitive: Primitive,
        params: dict[str, Any],
    ) -> list[Any]:
        """Append an equation in place of `eqn`; its results."""
        info, ctx = eqn.source_info, current_context() if self.region else eqn.ctx
        self.eqns.append(new_jaxpr_eqn(invars, outvars, primitive, params, set(), info, ctx))
        return outvars

    def shard_map(self, eqn: JaxprEqn, args: list[Any]) -> list[Any]:
        """A `jax.shard_map` as a manual region: its operands split, its body inlined."""
        mesh, closed, count = eqn.params["mesh"], as_closed(eqn.params["jaxpr"]), self.order.count
        manual = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
        if self.axes or mesh.size != count:
            raise NotImplementedError(
                f"{source_of(eqn)}: jax.shard_map over the axes {sorted(map(str, manual))} of a "
                f"mesh of {mesh.size} devices {mesh.axis_names}: inside of gshard.jit its mesh has "
                f"to have all {count} devices, and it cannot be inside of another one over all axes"
            )
        if set(manual) != set(mesh.axis_names):
            return self.partly_manual(eqn, manual, args)
        entered = []
        for atom, spec, var in zip(args, eqn.params["in_specs"], closed.jaxpr.invars, strict=True):
            annotation = self.annotation_of(eqn, NamedSharding(mesh, spec), len(atom.aval.shape))
            params = {"annotation": annotation, "copies": "all"}
            entered += self.append(eqn, [atom], [_fresh(var)], to_manual_p, params)
        self.axes = NamedAxes(tuple(mesh.axis_names), grid_of(mesh, self.order.numbers_in_meshes))
        left = self.inline(closed, entered)
        self.axes = None
        results = []
        for atom, spec, var in zip(left, eqn.params["out_specs"], eqn.outvars, strict=True):
            annotation = self.annotation_of(eqn, NamedSharding(mesh, spec), len(var.aval.shape))
            params = {"annotation": annotation, "shape": var.aval.shape, "copies": "first"}
            results += self.append(eqn, [atom], [_fresh(var)], to_auto_p, params)
        return results

    def partly_manual(self, eqn: JaxprEqn, manual: Collection[str], args: list[Any]) -> list[Any]:
        """A `jax.shard_map` over some axes of its mesh, as a function of all parts at once."""
        mesh = self.region.mesh if self.region else eqn.params["mesh"]
        sizes = {str(name): int(mesh.shape[name]) for name in mesh.axis_names if name in manual}
        around = self.region.sizes if self.region else {}
        inside = _Builder(self.order, region=Region(mesh, {**around, **sizes}))

        def annotate(stack: Any, axes: tuple[str, ...]) -> Any:
            more = (PartitionSpec.UNCONSTRAINED,) * (stack.ndim - len(axes))
            sharding = NamedSharding(mesh, PartitionSpec(*axes, *more))
            return annotate_p.bind(stack, annotation=self.annotation_of(eqn, sharding, stack.ndim))

        specs = eqn.params["in_specs"], eqn.params["out_specs"]
        body = inside.body(as_closed(eqn.params["jaxpr"]))
        region = on_stacks(body, sizes, *specs, annotate)
        structs = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in args]
        with without_mesh():
            whole = jax.make_jaxpr(region, axis_env=list(around.items()))(*structs)
        return self.inline(whole, args, eqn)

    def result(self, var: Any, atom: Any) -> Any:
        """A result, annotated if its type has a sharding (explicit axes of a mesh)."""
        sharding = getattr(var.aval, "sharding", None)
        if sharding is None or sharding.mesh.empty or not any(sharding.spec):
            return atom
        name, marked = f"a type, {sharding.spec}", Var(atom.aval)
        params = {"annotation": self.order.annotation(sharding, len(atom.aval.shape), name)}
        self.eqns.append(new_jaxpr_eqn([atom], [marked], annotate_p, params, set()))
        return marked

    def call(self, eqn: JaxprEqn, args: list[Any]) -> list[Any]:
        inner = eqn.params[CALLS[eqn.primitive]]
        if eqn.primitive is remat_p and eqn.params["differentiated"]:
            args = self.barrier(eqn, args)
        if eqn.primitive is p.linear_solve_p:  # only the solver remains to be run, on its constants
            lengths = eqn.params["const_lengths"]
            first = lengths.matvec + lengths.vecmat
            right_side = args[first + lengths.solve + lengths.transpose_solve :]
            inner, args = inner.solve, args[first : first + lengths.solve] + right_side
        return self.inline(as_closed(inner), args, eqn)

    def barrier(self, eqn: JaxprEqn, args: list[Any]) -> list[Any]:
        """A barrier that keeps XLA from undoing rematerialization."""
        prevent = eqn.params["prevent_cse"]
        marks = [prevent] * len(args) if isinstance(prevent, bool) else prevent
        kept = {i: a for i, a in enumerate(args) if marks[i] and not isinstance(a, Literal)}
        if not kept:
            return args
        fresh = [Var(a.aval) for a in kept.values()]
        after = self.append(eqn, list(kept.values()), fresh, optimization_barrier_p, {})
        results = dict(zip(kept, after, strict=True))
        return [results.get(i, a) for i, a in enumerate(args)]


def _fresh(var: Any) -> Var:
    """A fresh variable of this type, without the sharding in the type, which has been read."""
    return Var(_without_mesh(var.aval))


def _is_weakness_only(eqn: JaxprEqn) -> bool:
    """Whether an equation only says that a number is no longer a Python scalar."""
    converted = eqn.primitive is p.convert_element_type_p and eqn.params["sharding"] is None
    return converted and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype


def _branch_of_all(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The branch of `lax.platform_dependent` that all platforms take but Pallas in its kernels."""
    names = eqn.params.get("branches_platforms") or ()
    taken = [n for n, own in enumerate(names) if own != ("mosaic",)]
    return eqn.params["branches"][taken[0]] if [names[n] for n in taken] == [None] else None


def _plain(literal: Literal) -> Literal:
    aval = _without_mesh(literal.aval)
    return literal if aval is literal.aval else Literal(np.asarray(literal.val), aval)


def _without_mesh(aval: Any) -> Any:
    if isinstance(aval, ShapedArray) and not aval.sharding.mesh.empty:
        return ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
    return aval


def expand(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """A program equivalent to `eqn`, of primitives that have rules, if it needs one; else None.

    A primitive without a rule is often a Python function of arrays, which can be traced (sparse
    matrices, Equinox). A loop with a condition batched by `vmap` runs while any member does; a
    `psum` over an axis of `vmap` sums over a dim; `x.ravel(order="F")` is of `x.T`.
    """
    if eqn.primitive is p.while_p and eqn.params["cond_jaxpr"].out_avals[0].shape:
        return traced(eqn, _batched_while)
    if eqn.primitive in _REDUCERS and all(isinstance(a, int) for a in eqn.params["axes"]):
        return traced(eqn, _reduction_over_dims)
    if eqn.primitive is p.reshape_p and eqn.params["dimensions"] is not None:
        return traced(eqn, _transposed_first)
    if eqn.primitive is unstack_p:
        return traced(eqn, _rows)
    described = eqn.primitive is not custom_partitioning_p or eqn.params["sharding_rule"]
    known = eqn.primitive in RULES or eqn.primitive in REGIONS
    if (known and described) or eqn.effects:
        return None
    closed = implementation(eqn)
    if not isinstance(closed, ClosedJaxpr):
        return None
    wanted = [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    same = [(a.shape, a.dtype) for a in closed.out_avals] == wanted
    endless = any(_alike(inner, eqn) for inner in walk(closed.jaxpr))
    return closed if same and not endless else None


def _alike(one: JaxprEqn, other: JaxprEqn) -> bool:
    """Whether equations are equal; a solver may call another solver inside."""
    if one.primitive is not other.primitive:
        return False
    shapes = [[(a.aval.shape, a.aval.dtype) for a in eqn.invars] for eqn in (one, other)]
    return shapes[0] == shapes[1] and str(one.params) == str(other.params)


_REDUCERS = {p.psum_p: lax.reduce_sum, p.pmax_p: lax.reduce_max, p.pmin_p: lax.reduce_min}


def _reduction_over_dims(eqn: JaxprEqn, *operands: Any) -> list[Any]:
    """A collective over the axis of a `vmap`, which has become a dim."""
    return [_REDUCERS[eqn.primitive](x, eqn.params["axes"]) for x in operands]


def _transposed_first(eqn: JaxprEqn, operand: Any) -> list[Any]:
    """A reshape of a tensor whose dims are in another order."""
    order, shape = eqn.params["dimensions"], eqn.params["new_sizes"]
    return [lax.reshape(lax.transpose(operand, order), shape)]


def _rows(eqn: JaxprEqn, operand: Any) -> list[Any]:
    """The rows of `unstack`, which are slices in JAX 0.10."""
    axis, count = eqn.params["axis"], len(eqn.outvars)
    return [lax.index_in_dim(operand, n, axis, keepdims=False) for n in range(count)]


def _batched_while(eqn: JaxprEqn, *operands: Any) -> list[Any]:
    """A loop batched by `vmap`: it runs while any member does; others keep their values."""
    cond, body = (jaxpr_as_fun(eqn.params[k]) for k in ("cond_jaxpr", "body_jaxpr"))
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, rest = operands[:n_cond], operands[n_cond:]
    body_consts, carry = rest[:n_body], list(rest[n_body:])

    def going(carried: list[Any]) -> Any:
        (again,) = cond(*cond_consts, *carried)
        return again

    def step(carried: list[Any]) -> list[Any]:
        again = going(carried)
        masks = [lax.broadcast_in_dim(again, x.shape, range(again.ndim)) for x in carried]
        return list(map(lax.select, masks, body(*body_consts, *carried), carried))

    return lax.while_loop(lambda carried: jnp.any(going(carried)), step, carry)
