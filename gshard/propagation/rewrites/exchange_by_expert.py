"""Experts without a capacity: tokens are exchanged by expert, and back.

A user sorts tokens by expert, gathers them in that order, multiplies with `ragged_dot`, and
scatters the results back. If propagation finds the experts split, the program is rewritten: the
gather becomes an exchange that sends every row to its expert's device, row-wise operators run
there, and the scatter becomes the exchange back. The gradient has the same form. All other
operators get the rows in token-major order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive
from jax.extend.core import primitives as p
from jax.lax import GatherScatterMode

from gshard._jax import Var, optimization_barrier_p
from gshard.graph import Graph, at_every_level, filling, in_order, live, needed_for
from gshard.graph.evaluate import equations_of
from gshard.graph.source import source_of
from gshard.moving.steps import copies_as_split
from gshard.propagation.spread import rowwise
from gshard.rules.base.ragged_rows import ExpertGroups, grouped_dot_p, put_rows_p, take_rows_p
from gshard.rules.base.rule import RULES, equation_key, factors_of
from gshard.rules.contraction import ragged_dot_general_p
from gshard.rules.grouped import puts_rows, takes_rows
from gshard.tensors.annotate import Annotation, annotate_p
from gshard.tensors.factors import Factor
from gshard.tensors.sharding import Sharding, Split, compatible


@at_every_level
def exchange_by_expert(
    jaxpr: Jaxpr, shardings: Mapping[Any, Sharding], remarks: list[str], numbers: Iterator[int]
) -> Jaxpr:
    """The program with expert-major rows, if its groups are split; else `jaxpr` itself.

    Variables outside the rewritten region stay the same. `remarks` gets a line for every ragged
    product: whether its rows are exchanged. `numbers` tell lists of sizes apart.
    """
    if not any(map(_multiplies_rows, jaxpr.eqns)):
        return jaxpr
    eqns = _one_variable_for_sizes(jaxpr.eqns)
    found = _groups(eqns, shardings, numbers, remarks)
    for sizes, groups in found.items():
        eqns = _ExpertRegion(sizes, groups, eqns, jaxpr.outvars, shardings).rewritten(remarks)
    return jaxpr.replace(eqns=eqns) if found else jaxpr


def _one_variable_for_sizes(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The equations, where products by equal sizes have one variable for them."""
    first: dict[Any, Any] = {}  # the first variable with a value
    same: dict[Any, Any] = {}
    for eqn in eqns:
        if eqn.primitive is optimization_barrier_p:  # rematerialized products have sizes of its own
            values = zip(eqn.outvars, eqn.invars, strict=True)
            same |= {v: same.get(a, a) for v, a in values if not isinstance(a, Literal)}
        kept = {k: v for k, v in eqn.params.items() if k != "update_jaxpr"}  # an addition
        kind = equation_key(eqn.replace(params=kept) if eqn.primitive is p.scatter_add_p else eqn)
        if kind is not None and len(eqn.outvars) == 1 and not eqn.effects:
            operands = [same.get(a, a) for a in eqn.invars if not isinstance(a, Literal)]
            same[eqn.outvars[0]] = first.setdefault((kind, *operands), eqn.outvars[0])
    return [
        eqn.replace(invars=[*eqn.invars[:2], same.get(eqn.invars[2], eqn.invars[2])])
        if _is_ragged(eqn)
        else eqn
        for eqn in eqns
    ]


def _groups(
    eqns: Sequence[JaxprEqn],
    shardings: Mapping[Any, Sharding],
    numbers: Iterator[int],
    remarks: list[str],
) -> dict[Any, ExpertGroups]:
    """The groups that are split, by the variable of their sizes."""
    found: dict[Any, ExpertGroups] = {}
    for eqn in filter(_multiplies_rows, eqns):
        (lhs, rhs, sizes), here = eqn.invars, shardings[eqn.invars[1]]
        (dim,) = eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
        split, rows = None if here.manual else here.splits[dim], lhs.aval.shape[0]
        if not split or split.idle or not rows:
            remarks.append(f"not applied at {source_of(eqn)}: its groups are not split")
            continue
        remarks.append(f"applied at {source_of(eqn)}: rows are on the devices of their groups")
        if sizes not in found:
            copies, count = copies_as_split(here), rhs.aval.shape[dim]
            parts = split.times(copies) if copies else split  # tiles are divided among their copies
            found[sizes] = ExpertGroups(split, parts, rows, count, next(numbers))
    return found


class _ExpertRegion:
    """The equations of a program around the products by one list of sizes."""

    def __init__(
        self,
        sizes: Any,
        groups: ExpertGroups,
        eqns: Sequence[JaxprEqn],
        results: Sequence[Any],
        shardings: Mapping[Any, Sharding],
    ):
        self.sizes = sizes
        self.groups = groups
        self.shardings = shardings
        self.eqns = eqns
        self.results = results
        self.graph = Graph(eqns, results)
        # These cannot use rows that are sent by the sizes.
        self.before = set(needed_for([sizes], eqns))
        self.members: dict[Any, int] = {}  # variables with the sorted rows, and the dim of these
        self.find()
        self.moved: dict[Any, Any] = {}  # members, expert-major
        self.inputs: set[Any] = set()  # members that are not made by the region's operators
        self.token_major: set[Any] = set()  # members that are also available in token-major order
        self.done: list[JaxprEqn] = []

    # ------------------------------------------------------------ which values are sorted rows

    def find(self) -> None:
        """Find the variables with the sorted rows, connected by row-wise operators."""
        for eqn in self.products():
            self.members[eqn.invars[0]] = 0
            self.members[eqn.outvars[0] if _multiplies_rows(eqn) else eqn.invars[1]] = 0
        before = -1
        while before != len(self.members):
            before = len(self.members)
            for eqn in reversed(self.eqns):
                for factor in self.row_factors(eqn, eqn.outvars):
                    self.add(eqn, factor)
            for eqn in self.eqns:
                for factor in self.row_factors(eqn, eqn.invars):
                    rows = [eqn.invars[i] for i in self.along(eqn, factor)[0]]
                    if all(a in self.members or self.is_taken(a) for a in rows):
                        self.add(eqn, factor)

    def add(self, eqn: JaxprEqn, factor: Factor) -> None:
        """Make the variables of an operator that have a dim for its rows members."""
        for atom, dim in self.dims(eqn, factor):
            self.members.setdefault(atom, dim)

    def row_factors(self, eqn: JaxprEqn, atoms: Sequence[Any]) -> list[Factor]:
        """The factors of a row-wise operator that are the rows of some members among `atoms`."""
        known = [a for a in atoms if not isinstance(a, Literal) and a in self.members]
        if not known or eqn in self.before or eqn.primitive not in RULES:
            return []
        if eqn.primitive is annotate_p:
            return []
        return [
            f
            for f in factors_of(RULES[eqn.primitive], eqn).sizes
            if any((a, self.members[a]) in self.dims(eqn, f) for a in known)
            and rowwise(eqn, f)
            and all(self.members.get(a, d) == d for a, d in self.dims(eqn, f))
        ]

    def along(self, eqn: JaxprEqn, factor: Factor) -> tuple[dict[int, int], dict[int, int]]:
        """The dims for `factor` of the operands and of the results, by their numbers."""
        factors = factors_of(RULES[eqn.primitive], eqn)
        operands, results = (
            {
                i: dims.index((factor,))
                for i, (atom, dims) in enumerate(zip(atoms, tensors, strict=True))
                if (factor,) in dims and not isinstance(atom, Literal)
            }
            for atoms, tensors in ((eqn.invars, factors.operands), (eqn.outvars, factors.results))
        )
        return operands, results

    def dims(self, eqn: JaxprEqn, factor: Factor) -> list[tuple[Any, int]]:
        """The variables that have a dim for `factor`, and these dims."""
        sides = zip((eqn.invars, eqn.outvars), self.along(eqn, factor), strict=True)
        return [(atoms[i], dim) for atoms, dims in sides for i, dim in dims.items()]

    def products(self) -> Iterator[JaxprEqn]:
        """The products by these sizes."""
        for eqn in self.eqns:
            by_sizes = (_multiplies_rows(eqn) or _sums_rows(eqn)) and eqn.invars[2] is self.sizes
            if by_sizes and eqn.invars[0].aval.shape[0] == self.groups.rows:
                yield eqn

    def is_taken(self, atom: Any) -> bool:
        """Whether a value is made of rows that a gather takes by index."""
        eqn = self.graph.maker(atom)
        return eqn is not None and (takes_rows(eqn) is not None or self.is_added(eqn))

    # ------------------------------------------------------------ the new program

    def rewritten(self, remarks: list[str]) -> list[JaxprEqn]:
        """The live equations of the new program, each after those that it depends on."""
        products = set(self.products())
        for eqn in self.eqns:
            if eqn in products:
                self.multiply(eqn)
            elif factors := self.row_factors(eqn, eqn.outvars):
                self.by_rows(eqn, factors)
            elif not self.try_put(eqn) and not self.try_take(eqn):
                known = len(self.token_major)
                self.emit(eqn, [self.read(a) for a in eqn.invars])
                if len(self.token_major) > known:
                    where = f"{eqn.primitive.name} at {source_of(eqn)}"
                    remarks.append(f"rows are exchanged back for {where}, which is not row-wise")
        for atom in self.results:
            self.read(atom)
        return in_order(live(self.done, self.results))

    def emit(self, eqn: JaxprEqn, invars: Sequence[Any], **changes: Any) -> None:
        """Append an equation in place of `eqn`."""
        self.done.append(eqn.replace(invars=list(invars), **changes))

    def multiply(self, eqn: JaxprEqn) -> None:
        """A product by groups."""
        lhs, rhs, sizes = eqn.invars
        kept = ("ragged_dot_dimension_numbers", "precision", "preferred_element_type")
        params = {"groups": self.groups, **{k: eqn.params[k] for k in kept}}
        if _multiplies_rows(eqn):
            invars = [self.expert_major(lhs), self.read(rhs), sizes]
            moved = self.moved_var(eqn.outvars[0])
            self.emit(eqn, invars, outvars=[moved], primitive=grouped_dot_p, params=params)
        else:
            invars = [self.expert_major(lhs), self.expert_major(rhs), sizes]
            self.emit_token_major(
                eqn, eqn.outvars[0], invars, self.groups.split, grouped_dot_p, params
            )

    def by_rows(self, eqn: JaxprEqn, factors: Sequence[Factor]) -> None:
        """A row-wise operator on expert-major rows."""
        sides = [self.along(eqn, f) for f in factors]
        rows = {i for operands, _ in sides for i in operands}
        made = {i for _, results in sides for i in results}
        if not rows:  # equal for every row: recomputed rather than moved
            self.emit(eqn, [self.read(a) for a in eqn.invars])
            self.token_major.update(eqn.outvars)
        invars = [
            self.expert_major(a) if i in rows else self.read(a) for i, a in enumerate(eqn.invars)
        ]
        outvars = [self.moved_var(v) if i in made else v for i, v in enumerate(eqn.outvars)]
        self.emit(eqn, invars, outvars=outvars)

    def moved_var(self, var: Any) -> Any:
        """A variable for an expert-major member."""
        self.moved[var] = Var(ShapedArray(var.aval.shape, var.aval.dtype))
        return self.moved[var]

    def expert_major(self, atom: Any) -> Any:
        """A member in expert-major order; one that is token-major is exchanged."""
        if atom in self.moved:
            return self.moved[atom]
        self.inputs.add(atom)
        eqn, dim = self.graph.maker(atom) or next(iter(self.products())), self.members[atom]
        moved, taken = self.moved_var(atom), takes_rows(eqn)
        params: dict[str, Any] = {"source": None, "target": self.groups}
        if self.is_added(eqn) and not dim:
            primitive, (_, indices, rows) = put_rows_p, eqn.invars
            zero = Literal(np.zeros((), moved.aval.dtype), ShapedArray((), moved.aval.dtype))
            self.done.append(filling(eqn, zero, zeros := Var(moved.aval)))
            invars = [zeros, self.sizes, self.read(rows), self.read(indices)]
            params |= {"adds": True, "clip": eqn.params["mode"] == GatherScatterMode.CLIP}
        elif taken and not dim:
            primitive, params = take_rows_p, params | taken
            invars = [self.read(eqn.invars[0]), self.sizes, self.read(eqn.invars[1])]
        else:
            primitive, params = take_rows_p, params | {"fill": None}
            invars = [self.turned(eqn, atom, dim, 0), self.sizes]
        aval = invars[0].aval if dim else moved.aval
        exchanged, first = Var(aval), Var(aval) if dim else moved
        self.emit(eqn, invars, outvars=[exchanged], primitive=primitive, params=params)
        self.annotate(eqn, exchanged, first, self.groups.ragged)
        if dim:
            self.turned(eqn, first, 0, dim, moved)
        return moved

    def turned(self, eqn: JaxprEqn, atom: Any, dim: int, to: int, out: Any = None) -> Any:
        """A value with one of its dims moved to another place."""
        if dim == to:
            return atom
        turn = functools.partial(jnp.moveaxis, source=dim, destination=to)
        made, (turned,) = equations_of(turn, [atom], [out] if out else [], like=eqn)
        self.done += made
        return turned

    def is_added(self, eqn: JaxprEqn) -> bool:
        """Whether sorted rows are sums of others, by index: the gradient of a gather of them."""
        if eqn.primitive is not p.scatter_add_p or not puts_rows(eqn):
            return False
        return self.graph.fill(eqn.invars[0]) == 0

    def annotate(self, eqn: JaxprEqn, atom: Any, annotated: Any, split: Split) -> None:
        """Annotate the split of rows; the dims of a row are left open."""
        rank = len(atom.aval.shape)
        sharding = Sharding((split, *(None,) * (rank - 1)), len(split.coords))
        note = Annotation.of_sharding("rows by group", sharding, tuple(range(1, rank)))
        params = {"annotation": note}
        self.emit(eqn, [atom], outvars=[annotated], primitive=annotate_p, params=params)

    def emit_token_major(
        self, eqn: JaxprEqn, out: Any, invars: Sequence[Any], split: Split, primitive: Primitive,
        params: Any,
    ) -> None:  # fmt: skip
        """Append equations for the token-major `out` of `eqn`, with a default split."""
        splits = self.shardings[out].splits
        few = out.aval.shape[0] < split.tiles
        settled = splits[0] or few or not compatible((split, *splits[1:]))
        made = out if settled else Var(out.aval)
        self.emit(eqn, invars, outvars=[made], primitive=primitive, params=params)
        if not settled:
            self.annotate(eqn, made, out, split)

    def read(self, atom: Any) -> Any:
        """A value in token-major order; an expert-major member is exchanged back."""
        if isinstance(atom, Literal) or atom not in self.moved or atom in self.token_major:
            return atom
        if atom in self.inputs:
            return atom
        self.token_major.add(atom)
        eqn, dim = self.graph.makers[atom], self.members[atom]
        params = {"source": self.groups, "target": None, "fill": None}
        invars = [self.turned(eqn, self.moved[atom], dim, 0), self.sizes]
        if dim:
            first = Var(invars[0].aval)
            self.emit(eqn, invars, outvars=[first], primitive=take_rows_p, params=params)
            self.turned(eqn, first, 0, dim, atom)
        else:
            self.emit_token_major(eqn, atom, invars, self.groups.parts, take_rows_p, params)
        return atom

    def try_put(self, eqn: JaxprEqn) -> bool:
        """Rewrite a scatter of rows back to tokens; False if `eqn` is none."""
        adds = eqn.primitive is p.scatter_add_p
        sets = eqn.primitive is p.scatter_p and eqn.params["update_jaxpr"] is None
        if not (adds or sets) or not puts_rows(eqn):
            return False
        operand, indices, updates = eqn.invars
        if updates not in self.moved or updates in self.token_major or self.members[updates]:
            return False
        if sets and not self.graph.is_permutation(indices):
            return False  # the order of updates of one row would matter
        clip = eqn.params["mode"] == GatherScatterMode.CLIP
        params = {"source": self.groups, "target": None, "adds": adds, "clip": clip}
        invars = [self.read(operand), self.sizes, self.moved[updates], self.read(indices)]
        self.emit_token_major(eqn, eqn.outvars[0], invars, self.groups.parts, put_rows_p, params)
        return True

    def try_take(self, eqn: JaxprEqn) -> bool:
        """Rewrite a gather of rows in another order; False if `eqn` is none."""
        taken = takes_rows(eqn)
        source = eqn.invars[0] if taken else None
        if not taken or isinstance(source, Literal) or source not in self.moved:
            return False
        if source in self.token_major or self.members[source]:
            return False
        params = {"source": self.groups, "target": None, **taken}
        invars = [self.moved[source], self.sizes, self.read(eqn.invars[1])]
        self.emit_token_major(eqn, eqn.outvars[0], invars, self.groups.parts, take_rows_p, params)
        return True


def _is_ragged(eqn: JaxprEqn) -> bool:
    """Whether an equation is a `ragged_dot` with rows in the leading dim."""
    if eqn.primitive is not ragged_dot_general_p or any(isinstance(a, Literal) for a in eqn.invars):
        return False
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    plain = not any(numbers.dot_dimension_numbers[1]) and len(eqn.invars[2].aval.shape) == 1
    return plain and tuple(numbers.lhs_ragged_dimensions) == (0,)


def _multiplies_rows(eqn: JaxprEqn) -> bool:
    """Whether it multiplies each row with its group's matrix."""
    return _is_ragged(eqn) and bool(eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions)


def _sums_rows(eqn: JaxprEqn) -> bool:
    """Whether it sums, for each group, the products of its rows."""
    if not _is_ragged(eqn) or _multiplies_rows(eqn):
        return False
    contracted = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0]
    return tuple(map(tuple, contracted)) == ((0,), (0,))
