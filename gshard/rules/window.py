"""Convolution (section 3.3.3 and the appendix "SPMD Partitioning for Convolution").

Batch, feature and group dims split as in an einsum. A split spatial dim needs rows of the
neighbours: every device fetches the rows under its own windows, zeroes those outside of the tensor,
and convolves without padding. Which windows are its own:

- The result is split like the base: a device computes its rows of the result, all of the kernel.
- The window is split like the base (the gradient of a kernel, where the "window" is an
  activation): a device applies its part of the window to all results, and the sums are partial.

Base dilation makes the low padding differ between devices: the first window of one begins at an
element, that of another in a hole. The paper has three cases; here they are one: every device
begins early enough, at a window that starts at the same distance from an element on all devices,
and drops the results before its own (or, if the window is split, pads it with leading zeros).
Strides repeat that distance after `base / gcd(step, base)` windows, so fewer than that are dropped,
and none in the paper's first case.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard.graph.reason import Reason
from gshard.moving.costs import timed
from gshard.moving.fetch import Along, fetch
from gshard.moving.halo import window
from gshard.moving.row_windows import Widths, plan_fetch
from gshard.rules.base.rule import Context, Doc, Rule, Way, register
from gshard.rules.base.ways import by_factors
from gshard.tensors.factors import Dim, Factors, Shape, combining
from gshard.tensors.sharding import Sharding, Shardings, Split, Targets
from gshard.tensors.tile import Tile, Tiles, row_bytes, rows_within

NOTHING = 2**30  # as the first row that a device needs: it needs none


@dataclass(frozen=True)
class Reach:
    """The rows of a split base dim under the windows of each device, one entry per tile.

    A device computes `count` items, of which the first `lead[c]` are not its own, from `rows` rows
    beginning at `starts[c]`, with the same `padding` everywhere.
    """

    starts: np.ndarray
    rows: Widths
    padding: tuple[int, int]
    lead: np.ndarray
    count: int


Reaches = list[tuple[int, Reach, Split]]  # of some dims


def reach_of(
    tiles: int, per_tile: int, total: int, step: int, extent: int, low: int, base: int
) -> Reach:
    """The rows that `per_tile` of `total` items need on each device.

    Item i covers the positions from `i * step - low` on, `extent + 1` of them, of a base in
    which there is an element every `base` positions.
    """
    items = np.arange(tiles) * per_tile
    period = base // math.gcd(step, base)
    lead = np.where(items < total, items % period, 0)
    count = per_tile + int(lead.max())
    begin = (items - lead) * step - low
    first = -(-begin // base)
    hole = int(first[0] * base - begin[0])  # positions before the first element
    length = (count - 1) * step + extent + 1
    rows = (length - 1 - hole) // base + 1
    if rows <= 0:  # windows over holes only
        return Reach(np.full(tiles, NOTHING), 1, (0, length - 1), lead, count)
    high = length - hole - ((rows - 1) * base + 1)
    return Reach(np.where(items < total, first, NOTHING), rows, (hole, high), lead, count)


def bring(ctx: Context, eqn: JaxprEqn, tile: Tile, reaches: Reaches, fill: Any) -> Tile:
    """`tile` with the rows that each device needs, and `fill` outside of them and the tensor."""
    dims = [dim for dim, *_ in reaches]
    which = f"rows under the windows of dim {' and '.join(map(str, dims))}"
    reason = Reason("step", eqn.primitive.name, which)
    masked, plain = tile.unmasked or (None, tile)  # rows beyond the end are filled here
    along = [Along(dim, reach.starts, reach.rows) for dim, reach, _ in reaches]
    x = fetch(ctx.place, plain if masked in dims else tile, reason, *along)
    brought = Tile(x, tile.sharding, tile.shape)
    for dim, reach, _ in reaches if fill is not None else ():
        if (inside := existing(ctx, brought, dim, reach.starts, reach.rows)) is not None:
            x = lax.select(inside, brought.array, jnp.full(x.shape, fill, x.dtype))
            brought = brought.holding(x)
    return brought


def existing(
    ctx: Context, tile: Tile, dim: int, starts: np.ndarray, rows: Widths = 0
) -> jax.Array | None:
    """Which rows from `starts` on are of the tensor, and a tile's own `rows`; None if all are."""
    split, size, place = tile.sharding.splits[dim], tile.shape[dim], ctx.place
    assert split
    if ((starts >= 0) & (starts + tile.array.shape[dim] <= size)).all() and np.ndim(rows) == 0:
        return None
    end = place.of_tile(split, np.minimum(starts + rows, size)) if np.ndim(rows) else size
    return rows_within(tile.array.shape, dim, place.of_tile(split, starts), 0, end)


# ---------------------------------------------------------------- convolution


def conv_factors(
    eqn: JaxprEqn, split_windows: Collection[int] = (), whole_groups: bool = False
) -> Factors:
    """Batch `n`, input features `k`, output features `o`, groups `g`, and spatial dims `s`.

    A spatial factor joins base and result; or base and window, and is summed, if the window reaches
    farther than it moves, or is one of the `split_windows`. The features `c` of groups are split
    anywhere, as spatial dims are; or where groups are, as `g`, if these are to stay whole.
    """
    lhs_spec, rhs_spec, out_spec = eqn.params["dimension_numbers"]
    base, kernel, result = (v.aval.shape for v in (*eqn.invars, *eqn.outvars))
    rank = len(base)
    by_feature, by_batch = eqn.params["feature_group_count"], eqn.params["batch_group_count"]
    groups = max(by_feature, by_batch)
    group: Dim = ("g",) if groups > 1 else ()
    lhs: list[Dim] = [()] * rank
    rhs: list[Dim] = [()] * rank
    out: list[Dim] = [()] * rank
    lhs[lhs_spec[0]] = (*group, "n") if by_batch > 1 else ("n",)
    lhs[lhs_spec[1]] = (*group, "k") if by_feature > 1 else ("k",)
    rhs[rhs_spec[0]] = out[out_spec[1]] = (*group, "o")
    rhs[rhs_spec[1]], out[out_spec[0]] = ("k",), ("n",)
    if group and not whole_groups:
        lhs[lhs_spec[by_batch == 1]] = rhs[rhs_spec[0]] = out[out_spec[1]] = ("c",)
        tensor, dim = (rhs, rhs_spec[1]) if by_feature > 1 else (out, out_spec[0])
        tensor[dim] = ()
    sizes = {
        "n": result[out_spec[0]],
        "k": kernel[rhs_spec[1]],
        "o": kernel[rhs_spec[0]] // groups,
        **({"g": groups, "c": kernel[rhs_spec[0]]} if group else {}),
    }
    reduced, strides, gaps = {"k": "sum"}, eqn.params["window_strides"], eqn.params["rhs_dilation"]
    for i, (l, r, o) in enumerate(zip(lhs_spec[2:], rhs_spec[2:], out_spec[2:], strict=True)):
        lhs[l] = (f"s{i}",)
        sizes[f"s{i}"] = base[l]
        if i in split_windows or (kernel[r] - 1) * gaps[i] > (result[o] - 1) * strides[i]:
            rhs[r] = (f"s{i}",)
            reduced[f"s{i}"] = "sum"
        else:
            out[o] = (f"s{i}",)
    return Factors((tuple(lhs), tuple(rhs)), (tuple(out),), sizes, **combining(eqn, reduced))


def halo_cost(here: Sharding, atom: Any, reaches: Reaches) -> float:
    """What devices send so that each has the rows under its windows, one dim after the other."""
    local, shape, sent = list(here.local_shape(atom.aval.shape)), atom.aval.shape, list[int]()
    for dim, reach, split in reaches:
        plan = plan_fetch(split.tiles, shape[dim], reach.starts, reach.rows, rows=local[dim])
        sent.append(plan.sent * row_bytes(local, dim, atom.aval.dtype))
        local[dim] = int(np.max(reach.rows))
    return timed(sum(sent), sum(map(bool, sent)))


def conv_reaches(
    eqn: JaxprEqn, shardings: Shardings, part: Shape, local: Shape
) -> Iterator[tuple[int, Reach, Split]]:
    """The rows under the windows along split spatial dims, of a `part` of the kernel."""
    (lhs, rhs), params = shardings, eqn.params
    (base, kernel), result = (a.aval.shape for a in eqn.invars), eqn.outvars[0].aval.shape
    specs = zip(*(spec[2:] for spec in params["dimension_numbers"]), strict=True)
    for i, (l, r, o) in enumerate(specs):
        split = lhs.splits[l]
        if split is None or 0 in (*base, *kernel, *result):
            continue
        stride, dilation = params["window_strides"][i], params["rhs_dilation"][i]
        where = params["padding"][i][0], params["lhs_dilation"][i]
        if rhs.splits[r]:
            items = part[r], kernel[r], dilation, (result[o] - 1) * stride
        else:
            items = local[o], result[o], stride, (kernel[r] - 1) * dilation
        yield i, reach_of(split.tiles, *items, *where), split


def group_reach(eqn: JaxprEqn, shardings: Shardings, rows: int) -> Reaches:
    """The features of the groups that a device's `rows` of the result are of; none if they are its.

    It computes all results of these groups, with zeros for the kernels that it has not.
    """
    (lhs_spec, rhs_spec, _), params = eqn.params["dimension_numbers"], eqn.params
    (base, kernel), (here, there) = (a.aval.shape for a in eqn.invars), shardings
    groups = max(params["feature_group_count"], params["batch_group_count"])
    dim = lhs_spec[params["batch_group_count"] == 1]
    split, size = here.splits[dim], kernel[rhs_spec[0]]
    if groups == 1 or split is None or split is not there.splits[rhs_spec[0]] or not size:
        return []
    wide, each, whole = size // groups, base[dim] // groups, split.rows(groups)
    if (rows, split.rows(base[dim])) == (whole * wide, whole * each):
        return []
    begin = np.minimum(np.arange(split.tiles) * rows, size - 1)
    first, end = begin // wide, -(-np.minimum(begin + rows, size) // wide)
    lead, most = begin - first * wide, int((end - first).max()) * wide
    return [(dim, Reach(first * each, (end - first) * each, (0, 0), lead, most), split)]


def conv_ways(eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int) -> Iterator[Way]:
    """Spatial splits stay: they cost halos, and partial sums where the window is split too."""
    lhs_spec, rhs_spec, _ = eqn.params["dimension_numbers"]
    split_windows = [i for i, r in enumerate(rhs_spec[2:]) if shardings[1].splits[r]]
    grouped = max(eqn.params["feature_group_count"], eqn.params["batch_group_count"]) > 1
    for whole_groups in (True, False)[: 1 + grouped]:
        factors = conv_factors(eqn, split_windows, whole_groups)
        spatial = [f for f in factors.sizes if f[0] == "s"]
        for way in by_factors(eqn, factors, shardings, targets, kept=spatial):
            (_, (_, part)), ((_, local),) = way.how.operands, way.how.results
            standard = zip(way.how.operands, eqn.invars, strict=True)
            if grouped and any(n != s.local_shape(a.aval.shape) for (s, n), a in standard):
                continue  # tiles of whole groups are of other sizes
            found = conv_reaches(eqn, way.operands, part, local)
            reaches = [(lhs_spec[2 + i], reach, split) for i, reach, split in found]
            reaches += group_reach(eqn, way.operands, part[rhs_spec[0]])
            yield way._replace(sent=halo_cost(way.operands[0], eqn.invars[0], reaches))


def conv_local(ctx: Context, eqn: JaxprEqn, tiles: Tiles, shapes: list[Shape]) -> list[jax.Array]:
    """The convolution of a device: halos, then its own windows without padding."""
    place, params = ctx.place, dict(eqn.params)
    lhs, rhs = tiles
    aval, (local,) = eqn.outvars[0].aval, shapes
    if 0 in (*lhs.shape, *rhs.shape, *aval.shape):
        return [jnp.zeros(local, aval.dtype)]
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    if max(params["feature_group_count"], params["batch_group_count"]) > 1:
        # Backends run groups as one convolution and mask products of different groups by zeros.
        lhs, rhs = lhs.masked(place, 0, lhs_spec[:2]), rhs.masked(place, 0, rhs_spec[:1])
    padding = list(params["padding"])
    kernel = rhs.array
    shardings = [t.sharding for t in tiles]
    unaligned, under = Reaches(), group_reach(eqn, shardings, kernel.shape[rhs_spec[0]])
    for _, reach, split in under:
        kernel = window(place, kernel, rhs_spec[0], -reach.lead[split.own], reach.count, 0)
        unaligned.append((out_spec[1], reach, split))
    for i, reach, split in conv_reaches(eqn, shardings, rhs.array.shape, local):
        l, r, o = (spec[2 + i] for spec in (lhs_spec, rhs_spec, out_spec))
        if rhs.sharding.splits[r]:
            # This device's part of the window behind `lead` zeros: the paper's "pad the window".
            kernel = window(place, kernel, r, -reach.lead[split.own], reach.count, 0)
        else:
            unaligned.append((o, reach, split))
        under.append((l, reach, split))
        padding[i] = reach.padding
    lhs = bring(ctx, eqn, lhs, under, 0)
    params["feature_group_count"] = lhs.array.shape[lhs_spec[1]] // kernel.shape[rhs_spec[1]]
    params["batch_group_count"] = lhs.array.shape[lhs_spec[0]] // local[out_spec[0]]
    out = eqn.primitive.bind(lhs.array, kernel, **(params | {"padding": tuple(padding)}))
    return [own_results(ctx, out, unaligned, local)]


def own_results(ctx: Context, out: jax.Array, reaches: Reaches, local: Shape) -> jax.Array:
    """This device's own rows of what it computed."""
    for dim, reach, split in reaches:
        out = window(ctx.place, out, dim, reach.lead[split.own], local[dim])
    return out


register(
    Rule(
        conv_factors,
        local=conv_local,
        ways=conv_ways,
        doc=Doc(
            free="batch, output features, groups",
            halo="spatial dims: the rows that windows reach beyond a tile",
            gather="input features, a split window: AllReduce or ReduceScatter of the result",
        ),
    ),
    p.conv_general_dilated_p,
)
