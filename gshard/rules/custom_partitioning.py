"""`jax.experimental.custom_partitioning`: the user's own partitioning of a function.

Its sharding rule is read like gshard's own rules. Its `partition` callback returns the function of
one device, on a mesh with one axis for every split factor; collectives over those axes become
gshard's. A function without a sharding rule is its body (see `expand`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from gshard._jax import custom_partitioning_p, parse_sharding_rule, tensor_types
from gshard.graph.evaluate import bind, evaluate, rebuilt
from gshard.graph.reason import Reason
from gshard.graph.source import because, on_behalf_of, source_of
from gshard.rules.base.register import parse_factors
from gshard.rules.base.rule import Context, Doc, Way, rule
from gshard.rules.base.ways import by_factors
from gshard.rules.callbacks import gathered
from gshard.rules.manual import run_over_groups
from gshard.tensors.devices import Place
from gshard.tensors.factors import Dim, Factor, Factors, shard_dims
from gshard.tensors.manual import (
    NamedAxes,
    axis_names_of,
    lower_named_axes,
    over_groups_p,
    row_of_device_p,
)
from gshard.tensors.meshes import entries_of
from gshard.tensors.sharding import Sharding, Shardings, Split, Targets
from gshard.tensors.tile import Tile, Tiles

Axes = dict[Factor, Split]  # the mesh: an axis for every factor that is split


def custom_factors(eqn: JaxprEqn) -> Factors:
    """The factors of the sharding rule; the callback reduces partial sums itself."""
    rule = eqn.params["sharding_rule"]
    settings: dict[str, Any] = {}
    if callable(rule):
        avals = [[a.aval for a in atoms] for atoms in (eqn.invars, eqn.outvars)]
        with tensor_types(*avals) as (operands, results):
            rule = rule(*eqn.params["static_args"], AbstractMesh((), ()), operands, results)
        if isinstance(rule, (list, tuple)):
            rule, settings = rule
    if isinstance(rule, str):
        rule = parse_sharding_rule(rule, settings)
    return parse_factors(eqn, rule, dict.fromkeys(rule.reduction_factors, "sum"))


def custom_ways(eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int) -> Iterator[Way]:
    """Every split of the factors that callbacks handle; they combine partial results themselves."""
    for way in by_factors(eqn, custom_factors(eqn), shardings, targets):
        factors, count = way.how.factors, targets[0].num_devices
        axes = {f: s for f, s in way.how.chosen.items() if s and _can_split(f, s, factors)}
        operands = tuple([shard_dims(dims, axes, factors, count) for dims in factors.operands])
        yield way._replace(operands=operands, how=(factors, axes))


@rule(
    custom_partitioning_p,
    factors=custom_factors,
    ways=custom_ways,
    doc=Doc(free="as its sharding rule says"),
)
def _custom(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    factors, axes = way.how
    reason = Reason("operand", eqn.primitive.name)
    if not axes:
        ready = gathered(ctx, tiles, reason)
        arrays = jaxpr_as_fun(eqn.params["call"])(*(t.array for t in ready))
        return [
            Tile(a, Sharding.replicated(a.ndim, ctx.place.num_devices), a.shape) for a in arrays
        ]
    lowered, operands, results = _ask(eqn, factors, axes)
    ready = [
        ctx.reshard(t, _sharding(ctx, spec, axes), reason)
        for t, spec in zip(tiles, operands, strict=True)
    ]
    sizes = [(f, s.tiles) for f, s in axes.items()]
    arguments = [t.array for t in ready]
    program = jax.make_jaxpr(lowered, axis_env=sizes)(
        *jax.tree.unflatten(eqn.params["in_tree"], arguments)
    )
    arrays = _evaluate(ctx.place, axes, program, arguments)
    made = []
    for array, spec, var in zip(arrays, results, eqn.outvars, strict=True):
        tile = Tile(array, _sharding(ctx, spec, axes), tuple(var.aval.shape))
        if not tile.is_standard:
            raise ValueError(
                f"{source_of(eqn)}: the function that partition() returned gives a tile of shape "
                f"{array.shape}, but a tensor of shape {tile.shape} split as {spec} has tiles of "
                f"shape {tile.sharding.local_shape(tile.shape)}"
            )
        made.append(tile)
    return made


def _can_split(factor: Factor, split: Split, factors: Factors) -> bool:
    """Callbacks do not handle padding: none may take part in a reduction, or be inside a dim."""
    inside = any(
        factor in dim and len(dim) > 1
        for dims in (*factors.operands, *factors.results)
        for dim in dims
    )
    if split.idle:
        return False
    even = factors.sizes[factor] % split.tiles == 0
    return even or not (factor in factors.reduced or inside)


def _ask(eqn: JaxprEqn, factors: Factors, axes: Axes) -> tuple[Any, list[Any], list[Any]]:
    """The function of one device, with the shardings of its operands and results."""
    params = eqn.params
    mesh = AbstractMesh(tuple(s.tiles for s in axes.values()), tuple(axes))

    def struct(atom: Any, dims: tuple[Dim, ...]) -> jax.ShapeDtypeStruct:
        spec = [tuple(f for f in dim if f in axes) or None for dim in dims]
        cuts = [int(np.prod([axes[f].tiles for f in names or ()])) for names in spec]
        shape = [-(-n // c) * c for n, c in zip(atom.aval.shape, cuts, strict=True)]  # rounded up
        named = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, atom.aval.dtype, sharding=named)

    operands = [struct(a, d) for a, d in zip(eqn.invars, factors.operands, strict=True)]
    results = [struct(v, d) for v, d in zip(eqn.outvars, factors.results, strict=True)]
    _, lowered, result_shardings, operand_shardings = params["partition"](
        *params["static_args"],
        mesh,
        jax.tree.unflatten(params["in_tree"], operands),
        jax.tree.unflatten(params["out_tree"], results),
    )
    specs = []
    for shardings, tree, atoms in (
        (operand_shardings, params["in_tree"], eqn.invars),
        (result_shardings, params["out_tree"], eqn.outvars),
    ):
        flat = tree.flatten_up_to(tuple(shardings) if isinstance(shardings, list) else shardings)
        both = zip(flat, atoms, strict=True)
        specs.append([entries_of(s.spec, len(a.aval.shape)) for s, a in both])
    return lowered, *specs


def _sharding(ctx: Context, spec: Sequence[tuple[str, ...]], axes: Axes) -> Sharding:
    splits: list[Split | None] = []
    for names in spec:
        split = None
        for name in names:
            split = split.times(axes[name]) if split else axes[name]
        splits.append(split)
    return Sharding(tuple(splits), ctx.place.num_devices)


def _evaluate(place: Place, axes: Axes, program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Run the function of one device, with its collectives over groups of gshard's devices."""
    mesh = Sharding((*axes.values(),), place.num_devices)
    # Devices beyond the mesh hold copies: a group is within one copy.
    named = NamedAxes((*axes, "copies of the mesh"), mesh.devices)

    def interpret(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        with on_behalf_of(eqn), because(Reason("asked", "a custom_partitioning function")):
            primitive, params = lower_named_axes(eqn, named) or (None, eqn.params)
            if primitive is over_groups_p:
                return run_over_groups(place, values, **params)
            if primitive is row_of_device_p:
                return [place.lookup(np.array(params["table"]))]
            names = axis_names_of(params.get("axis_name", params.get("axes", ())))
            if any(isinstance(name, str) for name in names):
                raise NotImplementedError(
                    f"{source_of(eqn)}: gshard cannot run {eqn.primitive.name!r} in the function "
                    "that partition() returned; use psum, all_gather, all_to_all, ppermute or "
                    "axis_index"
                )
            return bind(eqn, values, **{k: rebuilt(v, interpret) for k, v in params.items()})

    return evaluate(program, args, interpret)
