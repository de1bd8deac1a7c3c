"""`gshard.register_rule`: rules for primitives of other libraries.

A rule is written like an einsum, in the notation of `jax.experimental.custom_partitioning`: a name,
a factor, for every dim of every operand and result. "b m k, k n -> b m n" says that `b`, `m` and
`n` may be split anywhere, and that a split of `k`, where it is `reduced`, leaves partial results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Primitive

from gshard._jax import parse_sharding_rule
from gshard.graph.source import source_of
from gshard.rules.base.rule import REGIONS, RULES, Context, Doc, Rule, bind_local
from gshard.tensors.factors import Factors, Shape
from gshard.tensors.tile import Tile

KINDS = ("sum", "max", "min", "prod", "and", "or", "xor")
_ELLIPSIS = "…"  # JAX's parse of "..."


def register_rule(
    primitive: Primitive,
    rule: str | Callable[[JaxprEqn], str] | Rule,
    *,
    reduced: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
    local: Callable[..., Any] | None = None,
) -> None:
    """Register how the dims of `primitive` may be split, replacing an earlier rule.

    `rule` names the dims: operands, an arrow, results; dims are separated by spaces, tensors by
    commas. `...` means any leading dims, `(a b)` a dim made of two factors, major first, whose
    `sizes` are needed if no other dim has them. For a primitive whose ranks vary, pass a function
    from the equation to such a string.

    A factor that operands and results share may be split: the primitive then runs on tiles. A
    factor of operands only may be split if `reduced` says how the devices' results are combined
    (sum, max, min, prod, and, or, xor). All reduced factors have the same reduction, as a sum of
    maxima is not the maximum of sums; padding is filled with its identity. All other factors stay
    unsplit. `local(*tiles, **params)` replaces the primitive on tiles, if it needs other parameters
    there.

    A `gshard.extend.Rule` instead of the string can do everything that gshard's own rules do.
    """
    if not isinstance(primitive, Primitive):
        raise TypeError(
            f"register_rule: {primitive!r} is not a primitive (jax.extend.core.Primitive)"
        )
    if not isinstance(rule, Rule):
        wrong = {f: k for f, k in (reduced or {}).items() if k not in KINDS}
        if wrong:
            raise ValueError(
                f"register_rule: reduced={wrong}; allowed are {', '.join(map(repr, KINDS))}"
            )
        if len(set((reduced or {}).values())) > 1:
            raise ValueError(
                f"register_rule: reduced={dict(reduced or {})} has several reductions, and their "
                "order is not known; allowed is one: name the factors of the last one alone, and "
                "the others stay unsplit"
            )
        if isinstance(rule, str):
            parsed = parse_sharding_rule(rule, sizes or {})
            _check_reduced(parsed, rule, reduced or {})
        rule = _rule_of(rule, reduced or {}, sizes or {}, local)
    RULES[primitive] = rule
    REGIONS.pop(primitive, None)


def _rule_of(
    notation: str | Callable[[JaxprEqn], str],
    reduced: Mapping[str, str],
    sizes: Mapping[str, int],
    local: Callable[..., Any] | None,
) -> Rule:
    def factors(eqn: JaxprEqn) -> Factors:
        text = notation if isinstance(notation, str) else notation(eqn)
        return parse_factors(eqn, parse_sharding_rule(text, sizes), reduced)

    def run(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], shapes: list[Shape]) -> Sequence[Any]:
        if local is None:
            return bind_local(ctx, eqn, tiles, shapes)
        return jax.tree.leaves(local(*(t.array for t in tiles), **eqn.params))

    says = notation if isinstance(notation, str) else "as its rule says"
    return Rule(factors, local=run, doc=Doc(free=says))


def _check_reduced(parsed: Any, text: str, reduced: Mapping[str, str]) -> None:
    known = set(_names(parsed.operand_mappings)) - set(_names(parsed.result_mappings))
    if not known.issuperset(reduced):
        raise ValueError(
            f"register_rule: {text!r}: reduced factors occur in operands only, which are here "
            f"{sorted(known) or 'none'}; given are {sorted(reduced)}"
        )


def _names(mappings: Sequence[Any]) -> Iterator[str]:
    for mapping in mappings:
        for dim in mapping:
            yield from [dim] if isinstance(dim, str) else dim


def parse_factors(eqn: JaxprEqn, rule: Any, reduced: Mapping[str, str]) -> Factors:
    """The factors that a parsed rule gives an equation.

    Factors that the rule does not pass through, that differ in size, or that only operands or only
    results have (and are not reduced) stay unsplit.
    """
    sizes: dict[str, int] = dict(rule.factor_sizes)
    replicated = {*rule.need_replication_factors, *rule.permutation_factors}
    sides = []
    for mappings, atoms in (
        (rule.operand_mappings, eqn.invars),
        (rule.result_mappings, eqn.outvars),
    ):
        if len(mappings) != len(atoms):
            raise ValueError(
                f"{source_of(eqn)}: the rule of {eqn.primitive.name!r} names {len(mappings)} "
                f"{'operands' if atoms is eqn.invars else 'results'}, but there are {len(atoms)}"
            )
        sides.append([_dims(eqn, m, a.aval.shape) for m, a in zip(mappings, atoms, strict=True)])
    for tensors, atoms in zip(sides, (eqn.invars, eqn.outvars), strict=True):
        for dims, atom in zip(tensors, atoms, strict=True):
            for dim, n in zip(dims, atom.aval.shape, strict=True):
                if len(dim) == 1 and sizes.setdefault(dim[0], n) != n:
                    replicated.add(dim[0])
    before, after = ({f for dims in side for dim in dims for f in dim} for side in sides)
    replicated |= (before ^ after) - set(reduced)
    return Factors(
        tuple(sides[0]), tuple(sides[1]), sizes, dict(reduced), replicated=frozenset(replicated)
    )


def _dims(eqn: JaxprEqn, mapping: Any, shape: Shape) -> tuple[tuple[str, ...], ...]:
    """The factors of each dim; `...` matches all remaining dims."""
    dims = [(d,) if isinstance(d, str) else tuple(d) for d in mapping]
    if dims and dims[0][0].startswith(_ELLIPSIS):
        (name,), dims = dims[0], dims[1:]
        dims = [(f"{name}{i}",) for i in range(len(shape) - len(dims))] + dims
    if len(dims) != len(shape):
        raise ValueError(
            f"{source_of(eqn)}: the rule of {eqn.primitive.name!r} has {len(dims)} dims for a "
            f"tensor of shape {tuple(shape)}"
        )
    return tuple(dims)
