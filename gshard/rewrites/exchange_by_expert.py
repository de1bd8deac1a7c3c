"""Experts without a capacity: tokens are exchanged by expert, and back.

A user sorts tokens by expert, gathers them in that order, multiplies with `ragged_dot`, and
scatters the results back. If propagation finds the experts split, the program is rewritten: the
gather becomes an exchange that sends every row to its expert's device, row-wise operators run
there, and the scatter becomes the exchange back. The gradient has the same form. All other
operators get the rows in token-major order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive
from jax.extend.core import primitives as p
from jax.lax import GatherScatterMode

from gshard._jax import Var
from gshard.annotate import Annotation, annotate_p
from gshard.graph import Graph, live, map_bodies
from gshard.operators.ragged_rows import ExpertGroups, grouped_dot_p, put_rows_p, take_rows_p
from gshard.operators.rule import RULES, factors_of
from gshard.rules.by_rows import is_ragged, multiplies_rows, puts_rows, sums_rows, takes_rows
from gshard.rules.pointwise import same_dims
from gshard.simplify.permutations import is_permutation
from gshard.tensors.sharding import Sharding, Split, compatible


def exchange_by_expert(closed: ClosedJaxpr, shardings: Mapping[Any, Sharding]) -> ClosedJaxpr:
    """The program with expert-major rows, if its groups are split; else `closed` itself.

    Variables outside the rewritten region stay the same.
    """
    jaxpr = _rewritten(closed.jaxpr, shardings)
    return closed if jaxpr is closed.jaxpr else ClosedJaxpr(jaxpr, closed.consts)


def _rewritten(jaxpr: Jaxpr, shardings: Mapping[Any, Sharding]) -> Jaxpr:
    eqns = [map_bodies(eqn, lambda body: exchange_by_expert(body, shardings)) for eqn in jaxpr.eqns]
    changed = any(a is not b for a, b in zip(eqns, jaxpr.eqns, strict=True))
    for sizes, groups in _groups(eqns, shardings).items():
        eqns = _Region(sizes, groups, eqns, jaxpr.outvars, shardings).rewritten()
        changed = True
    return jaxpr.replace(eqns=eqns) if changed else jaxpr


def _groups(eqns: Sequence[JaxprEqn], shardings: Mapping[Any, Sharding]) -> dict[Any, ExpertGroups]:
    """The groups that are split, by the variable of their sizes."""
    found: dict[Any, ExpertGroups] = {}
    for eqn in eqns:
        if not multiplies_rows(eqn) or shardings[eqn.invars[1]].manual:
            continue
        lhs, rhs, sizes = eqn.invars
        (dim,) = eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
        split, rows = shardings[rhs].splits[dim], lhs.aval.shape[0]
        if split and not split.idle and rows:
            parts = _with_copies(shardings[rhs], split)
            found.setdefault(sizes, ExpertGroups(split, parts, rows, rhs.aval.shape[dim]))
    return found


def _with_copies(sharding: Sharding, split: Split) -> Split:
    """`split`, its tiles divided further among the devices with copies of a tile."""
    if sharding.replicas == 1:
        return split
    copy = np.zeros(sharding.num_devices, np.int32)
    copy[sharding.devices.reshape(-1, sharding.replicas)] = np.arange(sharding.replicas)
    minor = Split.of(copy)
    assert minor
    return split.times(minor)


class _Region:
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
        self.members = self.find()
        self.moved: dict[Any, Any] = {}  # members, expert-major
        self.token_major: set[Any] = set()  # members that are also available in token-major order
        self.done: list[JaxprEqn] = []

    # ------------------------------------------------------------ which values are sorted rows

    def find(self) -> set[Any]:
        """Variables with the sorted rows, connected by row-wise operators."""
        members: set[Any] = set()
        for eqn in self.products():
            members.add(eqn.invars[0])
            members.add(eqn.outvars[0] if multiplies_rows(eqn) else eqn.invars[1])
        before = -1
        while before != len(members):
            before = len(members)
            for eqn in reversed(self.eqns):
                if members.intersection(eqn.outvars) and self.is_by_rows(eqn):
                    members.update(self.row_operands(eqn))
            for eqn in self.eqns:
                operands = self.row_operands(eqn)
                if not members.intersection(operands) or not self.is_by_rows(eqn):
                    continue
                if all(a in members or self.is_taken(a) for a in operands):
                    members.update((*operands, *eqn.outvars))
        return members

    def products(self) -> Iterator[JaxprEqn]:
        """The products by these sizes."""

        def has_rows(atom: Any) -> bool:
            return atom.aval.shape[0] == self.groups.rows

        for eqn in self.eqns:
            by_groups = multiplies_rows(eqn) or sums_rows(eqn)
            if by_groups and eqn.invars[2] is self.sizes and has_rows(eqn.invars[0]):
                yield eqn

    def row_operands(self, eqn: JaxprEqn) -> list[Any]:
        """The operands with a row for each of the result's."""
        if eqn.primitive not in RULES or len(eqn.outvars) != 1:
            return []
        factors = factors_of(RULES[eqn.primitive], eqn)
        (dims,) = factors.results
        if not dims or len(dims[0]) != 1:
            return []
        return [
            a
            for a, names in zip(eqn.invars, factors.operands, strict=True)
            if not isinstance(a, Literal) and names and names[0] == dims[0]
        ]

    def is_by_rows(self, eqn: JaxprEqn) -> bool:
        """Whether each row of the result depends on the same rows of the operands only."""
        if len(eqn.outvars) != 1 or eqn.primitive not in RULES:
            return False
        rule, shape = RULES[eqn.primitive], eqn.outvars[0].aval.shape
        if not shape or shape[0] != self.groups.rows:
            return False
        if eqn.primitive is annotate_p or not (
            rule.factors is same_dims or eqn.primitive in _BY_ROWS
        ):
            return False
        factors = factors_of(rule, eqn)
        name = factors.results[0][0]
        if not name:
            return eqn.primitive is p.broadcast_in_dim_p  # all rows are equal
        inside = [d for t in (*factors.operands, *factors.results) for d in t[1:]]
        return (
            len(name) == 1
            and not any(name[0] in dim for dim in inside)
            and name[0] not in {*factors.reduced, *factors.whole, *factors.resized}
            and all(len(t[0]) == 1 or name[0] not in t[0] for t in factors.operands if t)
        )

    def is_taken(self, atom: Any) -> bool:
        """Whether a value is made of rows that a gather takes by index."""
        eqn = self.graph.maker(atom)
        return eqn is not None and (takes_rows(eqn) is not None or self.is_added(eqn))

    # ------------------------------------------------------------ the new program

    def rewritten(self) -> list[JaxprEqn]:
        """The live equations of the new program."""
        products = set(self.products())
        for eqn in self.eqns:
            if eqn in products:
                self.multiply(eqn)
            elif self.members.intersection(eqn.outvars) and self.is_by_rows(eqn):
                self.by_rows(eqn)
            elif not self.try_put(eqn) and not self.try_take(eqn):
                self.emit(eqn, [self.read(a) for a in eqn.invars])
        for atom in self.results:
            self.read(atom)
        return live(self.done, self.results)

    def emit(self, eqn: JaxprEqn, invars: Sequence[Any], **changes: Any) -> None:
        """Append an equation in place of `eqn`."""
        self.done.append(eqn.replace(invars=list(invars), **changes))

    def multiply(self, eqn: JaxprEqn) -> None:
        """A product by groups."""
        lhs, rhs, sizes = eqn.invars
        kept = ("ragged_dot_dimension_numbers", "precision", "preferred_element_type")
        params = {"groups": self.groups, **{k: eqn.params[k] for k in kept}}
        if multiplies_rows(eqn):
            invars = [self.expert_major(lhs), self.read(rhs), sizes]
            moved = self.moved_var(eqn.outvars[0])
            self.emit(eqn, invars, outvars=[moved], primitive=grouped_dot_p, params=params)
        else:
            invars = [self.expert_major(lhs), self.expert_major(rhs), sizes]
            self.emit_token_major(eqn, invars, self.groups.split, grouped_dot_p, params)

    def by_rows(self, eqn: JaxprEqn) -> None:
        """A row-wise operator on expert-major rows."""
        (out,) = eqn.outvars
        rows = self.row_operands(eqn)
        if not rows:  # equal for every row: recomputed rather than moved
            self.emit(eqn, [self.read(a) for a in eqn.invars])
            self.token_major.add(out)
        invars = [
            self.read(a) if isinstance(a, Literal) or a not in rows else self.expert_major(a)
            for a in eqn.invars
        ]
        moved = self.moved_var(out)
        params = dict(eqn.params)
        for name in ("shape", "new_sizes"):
            if name in params:
                params[name] = tuple(moved.aval.shape)
        self.emit(eqn, invars, outvars=[moved], params=params)

    def moved_var(self, var: Any) -> Any:
        """A variable for an expert-major member."""
        aval = ShapedArray((self.groups.held, *var.aval.shape[1:]), var.aval.dtype)
        self.moved[var] = Var(aval)
        return self.moved[var]

    def expert_major(self, atom: Any) -> Any:
        """A member in expert-major order; one that is token-major is exchanged."""
        if atom in self.moved:
            return self.moved[atom]
        eqn = self.graph.maker(atom) or next(iter(self.products()))
        taken = takes_rows(eqn)
        moved = self.moved_var(atom)
        exchanged = Var(moved.aval)
        params: dict[str, Any] = {"source": None, "target": self.groups}
        if self.is_added(eqn):
            zeros, (_, indices, rows) = self.zeros(eqn, moved.aval), eqn.invars
            invars = [zeros, self.sizes, self.read(rows), self.read(indices)]
            params |= {"adds": True, "clip": eqn.params["mode"] == GatherScatterMode.CLIP}
            self.emit(eqn, invars, outvars=[exchanged], primitive=put_rows_p, params=params)
        else:
            invars = [atom, self.sizes]
            if taken:
                invars = [self.read(eqn.invars[0]), self.sizes, self.read(eqn.invars[1])]
            params |= taken or {"fill": None}
            self.emit(eqn, invars, outvars=[exchanged], primitive=take_rows_p, params=params)
        self.annotate(eqn, exchanged, moved, self.groups.parts)
        return moved

    def is_added(self, eqn: JaxprEqn) -> bool:
        """Whether sorted rows are sums of others, by index: the gradient of a gather of them."""
        if eqn.primitive is not p.scatter_add_p or not puts_rows(eqn):
            return False
        return self.graph.fill(eqn.invars[0]) == 0

    def zeros(self, eqn: JaxprEqn, aval: Any) -> Any:
        """An expert-major tensor of zeros."""
        out = Var(aval)
        params = {"shape": aval.shape, "broadcast_dimensions": (), "sharding": None}
        zero = Literal(np.zeros((), aval.dtype), ShapedArray((), aval.dtype))
        self.emit(eqn, [zero], outvars=[out], primitive=p.broadcast_in_dim_p, params=params)
        return out

    def annotate(self, eqn: JaxprEqn, atom: Any, annotated: Any, split: Split) -> None:
        """Annotate the split of rows; the dims of a row are left open."""
        rank = len(atom.aval.shape)
        sharding = Sharding((split, *(None,) * (rank - 1)), len(split.coords))
        note = Annotation.of_sharding("rows by group", sharding, tuple(range(1, rank)))
        params = {"annotation": note}
        self.emit(eqn, [atom], outvars=[annotated], primitive=annotate_p, params=params)

    def emit_token_major(
        self, eqn: JaxprEqn, invars: Sequence[Any], split: Split, primitive: Primitive, params: Any
    ) -> None:
        """Append equations for the token-major result of `eqn`, with a default split."""
        (out,) = eqn.outvars
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
        eqn = self.graph.maker(atom)
        if eqn is None or not (self.is_by_rows(eqn) or is_ragged(eqn)):
            return atom  # an input of the region
        params = {"source": self.groups, "target": None, "fill": None}
        invars = [self.moved[atom], self.sizes]
        self.emit_token_major(eqn, invars, self.groups.parts, take_rows_p, params)
        self.token_major.add(atom)
        return atom

    def try_put(self, eqn: JaxprEqn) -> bool:
        """Rewrite a scatter of rows back to tokens; False if `eqn` is none."""
        adds = eqn.primitive is p.scatter_add_p
        sets = eqn.primitive is p.scatter_p and eqn.params["update_jaxpr"] is None
        if not (adds or sets) or not puts_rows(eqn):
            return False
        operand, indices, updates = eqn.invars
        if updates not in self.moved or updates in self.token_major:
            return False
        if sets and not is_permutation(indices, self.graph):
            return False  # the order of updates of one row would matter
        clip = eqn.params["mode"] == GatherScatterMode.CLIP
        params = {"source": self.groups, "target": None, "adds": adds, "clip": clip}
        invars = [self.read(operand), self.sizes, self.moved[updates], self.read(indices)]
        self.emit_token_major(eqn, invars, self.groups.parts, put_rows_p, params)
        return True

    def try_take(self, eqn: JaxprEqn) -> bool:
        """Rewrite a gather of rows in another order; False if `eqn` is none."""
        taken = takes_rows(eqn)
        source = eqn.invars[0] if taken else None
        if not taken or isinstance(source, Literal) or source not in self.moved:
            return False
        if source in self.token_major:
            return False
        params = {"source": self.groups, "target": None, **taken}
        invars = [self.moved[source], self.sizes, self.read(eqn.invars[1])]
        self.emit_token_major(eqn, invars, self.groups.parts, take_rows_p, params)
        return True


_BY_ROWS: tuple[Primitive, ...] = (
    p.broadcast_in_dim_p, p.reshape_p, p.dot_general_p, p.reduce_sum_p, p.reduce_max_p,
    p.reduce_min_p, p.reduce_prod_p, p.reduce_and_p, p.reduce_or_p, p.argmax_p, p.argmin_p,
    p.transpose_p, p.squeeze_p,
)  # fmt: skip
