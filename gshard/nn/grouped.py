"""Blocks of rows, each by its own expert: experts without a capacity, with gradients.

An expert may have any number of tokens. They are sorted by expert, and each expert's are padded to
entire blocks, which adds few rows. On Hopper kernels in Mosaic GPU look up the expert of a block,
so that weights that no token needs are not read. They compute a result in tiles: two warpgroups
have half of its columns each, a third one fetches operands. relu's gradient is applied where the
gradient of the hidden units is written, which saves a pass over these. Elsewhere a loop multiplies
block by block. Dims: N blocks of C rows, M model dim, H hidden dim, E experts; the blocks' experts
ascend, and E means none, which gives zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gshard.nn.config import Int8
from gshard.nn.int8 import Weight
from gshard.tensors.annotate import target_platform

_SHARED_BYTES = 227 << 10  # a little less than what Hopper has for a block of threads
_DEPTH = 64  # of a sum, in shared memory at a time
_DOWN = 128  # rows of the tile of a sum over rows
_TOGETHER = 16  # blocks of rows before the next columns, so that caches have both


class Tiles(NamedTuple):
    """The columns of a tile, and the launch parameters."""

    columns: int = 256
    programs: int = 132  # the multiprocessors of an H100 or H200
    interpret: Any = None


TILES = Tiles()


def fits(x: Array, *weights: Weight) -> bool:
    """Whether the kernels can be used: on Hopper, on bfloat16, with dims that tiles divide."""
    return (
        target_platform() == "gpu"
        and getattr(jax.devices()[0], "compute_capability", "9.0") == "9.0"
        and x.dtype == jnp.bfloat16
        and all(
            (isinstance(w, Int8) or w.dtype == x.dtype)
            and w.shape[1] % TILES.columns == w.shape[2] % TILES.columns == 0
            for w in weights
        )
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def feed_forward(
    x_NCM: Array, wi_EMH: Weight, wo_EHM: Weight, expert_N: Array, keep_NCH: Array | None = None,
    tiles: Tiles | None = None,
) -> Array:  # fmt: skip
    """Each block by its expert, wo . relu(wi . x); `keep_NCH` is dropout's factor of each unit.

    Weights in 8 bits have no gradients.
    """
    return _forward(x_NCM, wi_EMH, wo_EHM, expert_N, keep_NCH, tiles)[0]


def _forward(
    x_NCM: Array, wi_EMH: Weight, wo_EHM: Weight, expert_N: Array, keep_NCH: Array | None,
    tiles: Tiles | None,
) -> tuple[Array, tuple[Any, ...]]:  # fmt: skip
    h_NCH = times(x_NCM, wi_EMH, expert_N, tiles, relu=True)
    h_NCH = h_NCH if keep_NCH is None else h_NCH * keep_NCH
    y_NCM = times(h_NCH, wo_EHM, expert_N, tiles)
    return y_NCM, (x_NCM, h_NCH, wi_EMH, wo_EHM, expert_N, keep_NCH)


def _backward(tiles: Tiles | None, kept: tuple[Any, ...], dy_NCM: Array) -> tuple[Any, ...]:
    x_NCM, h_NCH, wi_EMH, wo_EHM, expert_N, keep_NCH = kept
    dh_NCH = times(dy_NCM, wo_EHM, expert_N, tiles, turned=True, gate_NCH=h_NCH)
    dh_NCH = dh_NCH if keep_NCH is None else dh_NCH * keep_NCH
    dx_NCM = times(dh_NCH, wi_EMH, expert_N, tiles, turned=True)
    dwi_EMH = _sums(x_NCM, dh_NCH, expert_N, wi_EMH, tiles)
    return dx_NCM, dwi_EMH, _sums(h_NCH, dy_NCM, expert_N, wo_EHM, tiles), None, None


feed_forward.defvjp(_forward, _backward)


class _ResultTile(NamedTuple):
    """A tile of a result: arrays, and the blocks of both that a step of its sum multiplies."""

    steps: Any
    left: Any
    right: Any
    left_at: Callable[[Any], Any]
    right_at: Callable[[Any], Any]
    there: Callable[[Any, Any], Any]  # its part of an array like the result, for some columns


def times(
    x_NCM: Array, w: Weight, expert_N: Array, tiles: Tiles | None = None, *, turned: bool = False,
    relu: bool = False, gate_NCH: Array | None = None,
) -> Array:  # fmt: skip
    """Each block times its expert's weight, or that `turned`; zeros where the gate is not above."""
    (N, C, M), E = x_NCM.shape, len(w)
    values, H = w.values if isinstance(w, Int8) else w, w.shape[1 if turned else 2]
    tiles = tiles or (TILES if fits(x_NCM, w) else None)
    if tiles:
        given = [expert_N, x_NCM.reshape(N * C, M), values]
        given += [] if gate_NCH is None else [gate_NCH.reshape(N * C, H)]
        across, columns = H // tiles.columns, tiles.columns

        def plan(number: Any, refs: Any) -> _ResultTile:
            block, column = plgpu.planar_snake(number, (N, across), 0, _TOGETHER)
            expert = refs[0][block]
            return _ResultTile(
                jnp.where(expert < E, M // _DEPTH, 0).astype(jnp.int32),
                refs[1],
                refs[2].at[jnp.minimum(expert, E - 1)],
                lambda step: (block, step),
                lambda step: (column, step) if turned else (step, column),
                lambda ref, own: ref.at[pl.ds(block * C, C), own(column * columns)],
            )

        y_NCH = _launched(
            plan, N * across, C, (False, turned), given, (N * C, H), tiles, relu=relu
        ).reshape(N, C, H)
    else:

        def by_block(x_CM: Array, expert: Array) -> Array:
            w_MH = lax.dynamic_index_in_dim(values, jnp.minimum(expert, E - 1), keepdims=False)
            w_MH = (w_MH.T if turned else w_MH).astype(x_CM.dtype)
            nothing = jnp.zeros((C, H), x_CM.dtype)
            return lax.cond(expert < E, lambda: x_CM @ w_MH, lambda: nothing)

        y_NCH = lax.map(lambda given: by_block(*given), (x_NCM, expert_N))
        y_NCH = jnp.maximum(y_NCH, 0) if relu else y_NCH
        y_NCH = y_NCH if gate_NCH is None else jnp.where(gate_NCH > 0, y_NCH, 0)
    if isinstance(w, Int8):  # a scale is positive: relu may come before it
        y_NCH = y_NCH * w.scale[jnp.minimum(expert_N, E - 1)].astype(y_NCH.dtype)
    return y_NCH


def _sums(x_NCM: Array, y_NCH: Array, expert_N: Array, w: Array, tiles: Tiles | None) -> Array:
    """For each expert of `w` the sum over its rows of `x` transposed times `y`."""
    (N, C, M), (E, _, H) = x_NCM.shape, w.shape
    tiles = tiles or (TILES if fits(x_NCM, w) else None)
    if tiles is None:

        def add(sums_EMH: Array, block: tuple[Array, Array, Array]) -> tuple[Array, None]:
            x_CM, y_CH, expert = block
            part_MH = jnp.matmul(x_CM.T, y_CH, preferred_element_type=jnp.float32)
            return sums_EMH.at[expert].add(part_MH, mode="drop"), None

        empty_EMH = jnp.zeros(w.shape, jnp.float32)
        return lax.scan(add, empty_EMH, (x_NCM, y_NCH, expert_N))[0].astype(w.dtype)
    first_E = jnp.sum(expert_N < jnp.arange(E + 1)[:, None], axis=1, dtype=jnp.int32)
    down, across, each, columns = M // _DOWN, H // tiles.columns, C // _DEPTH, tiles.columns

    def plan(number: Any, refs: Any) -> _ResultTile:
        expert, inside = lax.div(number, down * across), lax.rem(number, down * across)
        row, column = plgpu.planar_snake(inside, (down, across), 0, min(_TOGETHER, down))
        first = refs[0][expert]
        return _ResultTile(
            (refs[0][expert + 1] - first) * each,
            refs[1],
            refs[2],
            lambda step: (first * each + step, row),
            lambda step: (first * each + step, column),
            lambda ref, own: ref.at[expert, pl.ds(row * _DOWN, _DOWN), own(column * columns)],
        )

    given = [first_E, x_NCM.reshape(N * C, M), y_NCH.reshape(N * C, H)]
    return _launched(plan, E * down * across, _DOWN, (True, False), given, (E, M, H), tiles)


def _launched(
    plan: Callable[[Any, Any], _ResultTile], count: int, rows: int, turned: tuple[bool, bool],
    given: list[Array], result: tuple[int, ...], tiles: Tiles, *, relu: bool = False,
) -> Array:  # fmt: skip
    """The kernel: `count` tiles of so many rows. A fourth array that is given is a gate."""
    kernel = _Kernel(plan, count, rows, turned, given, tiles.columns, relu)
    semantics = plgpu.LoweringSemantics.Warpgroup
    found: Array = plgpu.kernel(
        kernel.run,
        out_type=jax.ShapeDtypeStruct(result, kernel.dtype),
        grid=(tiles.programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="group",
        kernel_name="grouped_product",
        interpret=tiles.interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )(*given)
    return found


class _Kernel:
    """One program of the kernel: tiles in turn, half the columns by each group of warps."""

    def __init__(
        self, plan: Callable[[Any, Any], _ResultTile], count: int, rows: int,
        turned: tuple[bool, bool], given: list[Array], columns: int, relu: bool,
    ):  # fmt: skip
        self.plan, self.count, self.rows, self.turned = plan, count, rows, turned
        self.columns, self.relu = columns, relu
        self.dtype, self.half, self.gated = given[1].dtype, columns // 2, len(given) == 4
        self.dtypes = [x.dtype for x in given[1:3]]
        self.narrow = given[2].dtype != self.dtype  # weights of 8 bits are converted in place
        step = _DEPTH * (2 * rows + given[2].dtype.itemsize * columns)
        others = 2 * columns * (rows + (_DEPTH if self.narrow else 0))
        self.stages = min((_SHARED_BYTES - others) // step, 6)

    def pipeline(self, tile: _ResultTile, body: Any, context: Any) -> Any:
        """The loop over the steps of a tile, whose operands are fetched ahead."""
        sizes = ((self.rows, _DEPTH), (_DEPTH, self.columns))
        blocks = [size[::-1] if t else size for size, t in zip(sizes, self.turned, strict=True)]
        specs = [
            plgpu.BlockSpec(block, at, transforms=_swizzled(block[1], dtype))
            for block, at, dtype in zip(blocks, tile[3:5], self.dtypes, strict=True)
        ]
        return plgpu.emit_pipeline_warp_specialized(
            body, grid=(tile.steps,), in_specs=specs, memory_registers=40, wg_axis="group",
            num_compute_wgs=2, max_concurrent_steps=self.stages, compute_context=context,
        )  # fmt: skip

    def compute(
        self, number: Any, refs: Any, buffers: Any, out: Any, wide: Any, loaded: Any
    ) -> None:
        """One tile of the result, written to where it belongs."""
        tile, group, half = self.plan(number, refs), lax.axis_index("group"), self.half
        mine = pl.ds(group * half, half)

        def own(column: Any) -> Any:
            return pl.ds(column + group * half, half)

        def multiply(_: Any, left: Any, right: Any, sums: Any) -> Any:
            left = _turned(left) if self.turned[0] else left
            right = _turned(right.at[mine]) if self.turned[1] else right.at[:, mine]
            if self.narrow:
                wide[group] = right[...].astype(self.dtype)
                plgpu.commit_smem()
                right = wide.at[group]
            plgpu.wgmma(sums, left, right)
            plgpu.wgmma_wait(0)
            return sums

        def write(run: Any, sums: Any) -> None:
            own_out = out.at[group]
            if self.gated:  # fetched while the sums are computed
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.copy_gmem_to_smem(tile.there(refs[3], own), own_out, loaded.at[group])
            run(sums)
            found = sums[...]
            if self.gated:
                plgpu.barrier_wait(loaded.at[group])
                found = jnp.where(own_out[...] > 0, found, 0.0)
            else:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            own_out[...] = (jnp.maximum(found, 0.0) if self.relu else found).astype(self.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own_out, tile.there(refs[-1], own))

        def context(run: Any) -> None:
            sums = plgpu.WGMMAAccumulatorRef((self.rows, half), jnp.float32)
            pl.run_scoped(functools.partial(write, run), sums)

        self.pipeline(tile, multiply, context)(tile.left, tile.right, allocations=buffers)

    def run(self, *refs: Any) -> None:
        """All tiles of this program, with what is shared between them."""

        def every(*scratch: Any) -> None:
            @plgpu.nd_loop((self.count,), collective_axes="program")
            def _(loop: Any) -> None:
                self.compute(loop.index[0], refs, *scratch)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        first = self.plan(jnp.int32(0), refs)
        unused = self.pipeline(first, lambda *_: None, lambda *_: None)
        order = _swizzled(self.half, self.dtype)
        shared = [
            plgpu.SMEM((2, size, self.half), self.dtype, transforms=order)
            for size in (self.rows, _DEPTH)
        ]
        pl.run_scoped(
            every,
            unused.get_allocations(first.left, first.right),
            shared[0],
            shared[1] if self.narrow else None,
            plgpu.Barrier(num_barriers=2) if self.gated else None,
            collective_axes="group",
        )


def _swizzled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """The order in shared memory that the matrix units read without conflicts."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(8 * columns * itemsize)
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def _turned(ref: Any) -> Any:
    """A block with its dims swapped."""
    if hasattr(ref, "transpose"):
        return ref.transpose((1, 0))
    return plgpu.transpose_ref(ref, (1, 0))  # JAX 0.10
