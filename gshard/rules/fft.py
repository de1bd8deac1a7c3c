"""Fourier transforms: along a split dim by moving the split to another dim, and back.

A transform of several dims transforms each in turn, so an unsplit dim can be transformed while
another is split, and then take over its split: an AllToAll of the tile, where a gather would send
it to every device. Unless annotated otherwise, the result keeps that split, and the inverse
transform moves it back. Every order of the dims is a way, with every dim that may take over a
split. A tensor without another dim is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from gshard.rules.base.rule import Context, Doc, Way, rule
from gshard.rules.base.ways import by_factors
from gshard.tensors.factors import Factors
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile, byte_size

Done = frozenset[int]  # the dims that have been transformed
Path = tuple[tuple[Done, Sharding], ...]  # the sharding while these dims are transformed


def fft_dims(eqn: JaxprEqn) -> Factors:
    """Batch dims keep their splits; the transformed dims exchange theirs.

    The first dim's goes to the last one and the other way round: that is the sharding after the one
    AllToAll of the transform, and the next transform moves it back.
    """
    rank, count = len(eqn.invars[0].aval.shape), len(eqn.params["fft_lengths"])
    batch = [f"b{i}" for i in range(rank - count)]
    core = [f"t{i}" for i in range(count)]
    return Factors.of(eqn, [[*batch, *core]], [[*batch, *reversed(core)]], resized=core)


@dataclass(frozen=True)
class _Transform:
    """A transform of several dims as transforms of one dim each."""

    eqn: JaxprEqn

    @property
    def kind(self) -> lax.FftType:
        """Complex or real, forwards or backwards."""
        return lax.FftType(self.eqn.params["fft_type"])

    @property
    def dims(self) -> Done:
        """All dims that are transformed: the last ones."""
        rank = len(self.eqn.invars[0].aval.shape)
        return frozenset(range(rank - len(self.eqn.params["fft_lengths"]), rank))

    def next(self, done: Done) -> Done:
        """The dims that can be transformed next: real-to-complex first, complex-to-real last."""
        last, left = max(self.dims), self.dims - done
        if self.kind is lax.FftType.RFFT and last in left:
            return frozenset({last})
        return left - {last} if self.kind is lax.FftType.IRFFT and len(left) > 1 else left

    def aval(self, done: Done) -> Any:
        """The shape and type of the tensor after these dims."""
        first, after = self.eqn.invars[0].aval, self.eqn.outvars[0].aval
        return after if max(self.dims) in done else first

    def along(self, x: jax.Array, dim: int) -> jax.Array:
        """`x` with one dim transformed."""
        length = self.eqn.params["fft_lengths"][dim - x.ndim]
        kind = self.kind
        if dim != x.ndim - 1:
            backwards = kind in (lax.FftType.IFFT, lax.FftType.IRFFT)
            kind = lax.FftType.IFFT if backwards else lax.FftType.FFT
        return jnp.moveaxis(_in_rows(jnp.moveaxis(x, dim, -1), kind, (length,)), -1, dim)


def _in_rows(x: jax.Array, kind: lax.FftType, lengths: tuple[int, ...]) -> jax.Array:
    """`lax.fft` on row-major arrays, which XLA's FFT for CPUs assumes.

    A gather along another dim than the first would change the layout of its operand.
    """
    rows = Layout(major_to_minor=tuple(range(x.ndim)))
    return with_layout_constraint(lax.fft(x, kind, lengths), rows)


def fft_ways(
    eqn: JaxprEqn, shardings: Sequence[Sharding], targets: Sequence[Sharding], limit: int
) -> Iterator[Way]:
    """Dims in any order that is possible; `Way.how` is the sharding under which each is done."""
    transform, paths = _Transform(eqn), dict[Path, None]()
    for way in by_factors(eqn, fft_dims(eqn), shardings, targets):
        (wanted,) = way.operands
        if 0 in eqn.invars[0].aval.shape:
            wanted = wanted.unsplit(transform.dims)
        split = any(wanted.splits[d] for d in transform.dims)
        for start in (*shardings, wanted) if split else (wanted,):
            paths |= dict.fromkeys(_paths(transform, Done(), start))
    return (_way(transform, path) for path in paths)


@rule(
    p.fft_p,
    factors=fft_dims,
    ways=fft_ways,
    doc=Doc(
        free="batch dims",
        gather="the dims of the transform: AllToAll with another dim, AllGather where there is "
        "none",
    ),
)
def _fft(
    ctx: Context, eqn: JaxprEqn, way: Way, tiles: list[Tile], targets: list[Sharding]
) -> list[Tile]:
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
            array = _in_rows(array, transform.kind, eqn.params["fft_lengths"])
        else:
            for dim in sorted(dims, reverse=transform.kind is not lax.FftType.IRFFT):
                array = transform.along(array, dim)
        done |= dims
        tile = Tile(array, here, tuple(transform.aval(done).shape))
    return [tile]


def _paths(transform: _Transform, done: Done, here: Sharding) -> Iterator[Path]:
    """The ways to transform the dims that are left, of a tensor with the sharding `here`."""
    if done == transform.dims:
        yield ()
        return
    for there in _next_shardings(transform, done, here):
        dims = _transformed(transform, done, there)
        for rest in _paths(transform, done | dims, there):
            yield ((dims, there), *rest)


def _way(transform: _Transform, path: Path) -> Way:
    """To transform dims under these shardings, one after the other."""
    done, work, sent, here = Done(), 0.0, 0.0, path[0][1]
    for dims, there in path:
        aval = transform.aval(done)
        sent += reshard_cost(here, there, aval.shape, aval.dtype)
        work += _work(transform, done, there, dims)
        done, here = done | dims, there
    return Way((path[0][1],), (here,), path, work=work, sent=sent)


def _next_shardings(transform: _Transform, done: Done, here: Sharding) -> Iterator[Sharding]:
    """Shardings under which more dims can be transformed."""
    able = transform.next(done)
    if any(here.splits[d] is None for d in able):
        yield here
    else:
        for dim in sorted(able):
            yield from whole_along(here, dim)


def _transformed(transform: _Transform, done: Done, here: Sharding) -> Done:
    """The dims that can be transformed under a sharding, in a valid order."""
    dims: Done = frozenset()
    while more := {d for d in transform.next(done | dims) if here.splits[d] is None}:
        dims |= more
    return dims


def _work(transform: _Transform, done: Done, here: Sharding, dims: Done) -> float:
    """The time of the local transforms, in bytes that could be sent in that time."""
    aval = transform.aval(done)
    local = here.local_shape(aval.shape)
    return worked(touched=sum(passes(local[d]) for d in dims) * byte_size(local, aval.dtype))
