"""Kinds of operators: sets of primitives that several parts of the package treat alike."""

from __future__ import annotations

from jax.extend.core import primitives as p

from gshard._jax import (
    custom_partitioning_p,
    optimization_barrier_p,
    private_primitives,
    random_unwrap_p,
    random_wrap_p,
    scatter_sub_p,
)

KERNELS = frozenset(private_primitives("pallas.pallas_call", "pallas_call_p"))
RAGGED_PRODUCTS = frozenset(private_primitives("lax.lax", "ragged_dot_general_p"))
PRODUCTS = {p.dot_general_p, p.conv_general_dilated_p} | RAGGED_PRODUCTS
REDUCTIONS = {
    p.reduce_sum_p, p.reduce_max_p, p.reduce_min_p, p.reduce_prod_p, p.reduce_and_p, p.reduce_or_p,
    p.reduce_xor_p, p.argmax_p, p.argmin_p,
}  # fmt: skip

# Another view of their operand; who registers a primitive of this kind adds it here.
ALIASES = {
    p.reshape_p, p.squeeze_p, p.bitcast_convert_type_p, p.copy_p, p.stop_gradient_p,
    optimization_barrier_p, random_wrap_p, random_unwrap_p,
}  # fmt: skip

SCATTERS = {p.scatter_p, p.scatter_add_p, p.scatter_mul_p, p.scatter_min_p, p.scatter_max_p}
SCATTERS |= {scatter_sub_p}

# Never fused with their neighbours, like products, loops and collectives.
APART = SCATTERS | KERNELS | {
    p.gather_p, p.sort_p, p.top_k_p, p.approx_top_k_p, p.cumsum_p, p.cumprod_p, p.cummax_p,
    p.cummin_p, p.cumlogsumexp_p, p.dynamic_update_slice_p, p.fft_p, p.cholesky_p,
    p.triangular_solve_p, p.lu_p, p.qr_p, p.eigh_p, p.svd_p, p.reduce_window_sum_p,
    p.reduce_window_max_p, p.reduce_window_min_p, p.reduce_window_p, p.select_and_scatter_add_p,
    p.select_and_gather_add_p, p.concatenate_p, p.rng_bit_generator_p, custom_partitioning_p,
    *private_primitives("callback", "io_callback_p", "pure_callback_p"),
    *private_primitives("ffi", "ffi_call_p"),
}  # fmt: skip
