"""Fourier transforms: along a split dim by moving the split to another dim, and back.

A transform of several dims transforms each in turn, so an unsplit dim can be transformed while
another is split, and then take over its split: an AllToAll of the tile, where a gather would send
it to every device. Unless annotated otherwise, the result keeps that split, and the inverse
transform moves it back. Every order of the dims is a way, with every dim that may take over a
split. A tensor without another dim is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard.graph.reason import Reason
from gshard.moving.costs import passes, worked
from gshard.moving.plan import reshard_cost, whole_along
from gshard.rules.base.rule import Context, Doc, Way, linear_in, rule
from gshard.rules.base.ways import by_factors
from gshard.tensors.factors import Factors
from gshard.tensors.sharding import Sharding, Shardings, Targets
from gshard.tensors.tile import Arrays, Tile, Tiles, byte_size

Done = frozenset[int]  # the dims that have been transformed
Path = tuple[tuple[Done, Sharding], ...]  # the sharding while these dims are transformed


def fft_dims(eqn: JaxprEqn) -> Factors:
    """Batch dims keep their splits; the transformed dims exchange theirs.

    The first dim's goes to the last one and the other way round: that is the sharding after the one
    AllToAll of the transform, and the next transform moves it back. If there is one, a batch dim
    takes its split over, and keeps it for the inverse.
    """
    rank, count = len(eqn.invars[0].aval.shape), len(eqn.params["fft_lengths"])
    batch = [f"b{i}" for i in range(rank - count)]
    core = [f"t{i}" for i in range(count)]
    found = Factors.of(eqn, [[*batch, *core]], [[*batch, *reversed(core)]], resized=core)
    return found.unsplit(core) if count == 1 else found


class _Transform:
    """A transform of several dims, the last ones, as transforms of one dim each."""

    def __init__(self, eqn: JaxprEqn):
        self.eqn, self.lengths = eqn, eqn.params["fft_lengths"]
        self.kind, self.last = lax.FftType(eqn.params["fft_type"]), eqn.invars[0].aval.ndim - 1
        self.dims = frozenset(range(self.last + 1 - len(self.lengths), self.last + 1))

    def next(self, done: Done) -> Done:
        """The dims that can be transformed next: real-to-complex first, complex-to-real last."""
        left = self.dims - done
        if self.kind is lax.FftType.RFFT and self.last in left:
            return frozenset({self.last})
        return left - {self.last} if self.kind is lax.FftType.IRFFT and len(left) > 1 else left

    def aval(self, done: Done) -> Any:
        """The shape and type of the tensor after these dims."""
        return (self.eqn.outvars if self.last in done else self.eqn.invars)[0].aval

    def paths(self, done: Done, here: Sharding) -> Iterator[Path]:
        """The ways to transform the dims that are left, of a tensor with the sharding `here`."""
        able = self.next(done)
        if not able:
            yield ()
        in_place = any(here.splits[d] is None for d in able)
        moved = (s for d in sorted(able) for s in whole_along(here, d))
        for there in (here,) if in_place else moved:
            now = done
            while more := {d for d in self.next(now) if there.splits[d] is None}:
                now |= more
            yield from (((now - done, there), *rest) for rest in self.paths(now, there))

    def way(self, path: Path) -> Way:
        """To transform dims under these shardings, one after the other."""
        done, work, sent, here = Done(), 0.0, 0.0, path[0][1]
        for dims, there in path:
            aval = self.aval(done)
            sent += reshard_cost(here, there, aval.shape, aval.dtype)
            local = there.local_shape(aval.shape)
            touched = sum(passes(local[d]) for d in dims) * byte_size(local, aval.dtype)
            work += worked(touched=touched)
            done, here = done | dims, there
        return Way((path[0][1],), (here,), path, work=work, sent=sent)

    def along(self, x: jax.Array, dim: int) -> jax.Array:
        """`x` with one dim transformed."""
        kind = self.kind
        if dim != self.last:
            backwards = kind in (lax.FftType.IFFT, lax.FftType.IRFFT)
            kind = lax.FftType.IFFT if backwards else lax.FftType.FFT
        length = (self.lengths[dim - x.ndim],)
        return jnp.moveaxis(_in_rows(jnp.moveaxis(x, dim, -1), kind, length), -1, dim)


def _in_rows(x: jax.Array, kind: lax.FftType, lengths: tuple[int, ...]) -> jax.Array:
    """`lax.fft` on row-major arrays, which XLA's FFT for CPUs assumes.

    A gather along another dim than the first would change the layout of its operand.
    """
    rows = Layout(major_to_minor=tuple(range(x.ndim)))
    return with_layout_constraint(lax.fft(x, kind, lengths), rows)


def fft_ways(eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int) -> Iterator[Way]:
    """Dims in any order that is possible; `Way.how` is the sharding under which each is done."""
    transform, paths = _Transform(eqn), dict[Path, None]()
    for way in by_factors(eqn, fft_dims(eqn), shardings, targets):
        (wanted,) = way.operands
        if 0 in eqn.invars[0].aval.shape:
            wanted = wanted.unsplit(transform.dims)
        split = any(wanted.splits[d] for d in transform.dims)
        for start in (*shardings, wanted) if split else (wanted,):
            paths |= dict.fromkeys(transform.paths(Done(), start))
    return map(transform.way, paths)


def _local(ctx: Context, eqn: JaxprEqn, tiles: Tiles, shapes: Any) -> Arrays:
    """The transform of a tile that is whole along all its dims."""
    transform = _Transform(eqn)
    return [_in_rows(tiles[0].array, transform.kind, transform.lengths)]


@rule(
    p.fft_p,
    factors=fft_dims,
    local=_local,
    ways=fft_ways,
    linear=linear_in((0,)),
    doc=Doc(
        free="batch dims",
        gather="the dims of the transform: AllToAll with another dim, AllGather where there is "
        "none",
    ),
)
def _fft(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    (tile,), transform = tiles, _Transform(eqn)
    done: Done = frozenset()
    for dims, here in way.how:
        reason = Reason("operand", "fft")
        if any(tile.sharding.splits[d] for d in dims):
            gathered = not set(here.splits) - {None}
            why = ", and there is no other to split" * (gathered and len(tile.shape) == 1)
            reason = Reason("step", "fft", f"its dim must be unsplit{why}")
        tile = ctx.reshard(tile, here, reason)
        array = tile.array
        if dims == transform.dims:
            array = _in_rows(array, transform.kind, transform.lengths)
        else:
            for dim in sorted(dims, reverse=transform.kind is not lax.FftType.IRFFT):
                array = transform.along(array, dim)
        done |= dims
        tile = Tile(array, here, tuple(transform.aval(done).shape))
    return [tile]
