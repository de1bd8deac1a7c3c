"""Operators that work element by element: any split of any dim, nothing to communicate."""

from __future__ import annotations

from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard._jax import optimization_barrier_p
from gshard.annotate import annotate_p
from gshard.rules.registry import Factors, Rule, register


def same_dims(eqn: JaxprEqn) -> Factors:
    """Every operand has the result's dims, or size 1 there, or is a scalar for all elements."""
    shape = eqn.outvars[0].aval.shape
    names = [f"d{i}" for i in range(len(shape))]
    operands = [
        [name if n == m else None for name, n, m in zip(names, a.aval.shape, shape, strict=True)]
        if a.aval.shape
        else []
        for a in eqn.invars
    ]
    return Factors.of(eqn, operands, [names])


def one_to_one(eqn: JaxprEqn) -> Factors:
    """Result i is operand i, whatever the dims."""
    names = [[f"v{i}d{d}" for d in range(len(a.aval.shape))] for i, a in enumerate(eqn.invars)]
    return Factors.of(eqn, names, names)


POINTWISE = (
    p.abs_p, p.acos_p, p.acosh_p, p.add_jaxvals_p, p.add_p, p.and_p, p.asin_p, p.asinh_p,
    p.atan2_p, p.atan_p, p.atanh_p, p.bessel_i0e_p, p.bessel_i1e_p, p.cbrt_p, p.ceil_p, p.clamp_p,
    p.clz_p, p.complex_p, p.conj_p, p.convert_element_type_p, p.copy_p, p.cos_p, p.cosh_p,
    p.digamma_p, p.div_p, p.eq_p, p.eq_to_p, p.erf_inv_p, p.erf_p, p.erfc_p, p.exp2_p, p.exp_p,
    p.expm1_p, p.floor_p, p.ge_p, p.gt_p, p.igamma_grad_a_p, p.igamma_p, p.igammac_p, p.imag_p,
    p.integer_pow_p, p.is_finite_p, p.le_p, p.le_to_p, p.lgamma_p, p.log1p_p, p.log_p,
    p.logistic_p, p.lt_p, p.lt_to_p, p.max_p, p.min_p, p.mul_p, p.name_p, p.ne_p, p.neg_p,
    p.nextafter_p, p.not_p, p.or_p, p.polygamma_p, p.population_count_p, p.pow_p, p.real_p,
    p.reduce_precision_p, p.regularized_incomplete_beta_p, p.rem_p, p.round_p, p.rsqrt_p,
    p.select_n_p, p.shift_left_p, p.shift_right_arithmetic_p, p.shift_right_logical_p, p.sign_p,
    p.sin_p, p.sinh_p, p.sqrt_p, p.square_p, p.stop_gradient_p, p.sub_p, p.tan_p, p.tanh_p,
    p.xor_p, p.zeta_p,
)  # fmt: skip

register(Rule(same_dims, level=0, doc="every dim is free"), *POINTWISE)
register(
    Rule(
        same_dims, local=lambda ctx, eqn, tiles, shapes: [tiles[0].array], level=0, doc="identity"
    ),
    annotate_p,
    p.sharding_constraint_p,
)
register(Rule(one_to_one, level=0, doc="every dim is free"), optimization_barrier_p)
register(
    Rule(
        one_to_one,
        local=lambda ctx, eqn, tiles, shapes: [t.array for t in tiles],
        level=0,
        doc="identity: values are where their shardings put them",
    ),
    p.device_put_p,
)
