"""The transpose of a product as the product of its swapped operands.

JAX writes the gradient of a weight as `(x.T @ dy).T`. As one product, it
is reduced and scattered without a copy into another order.
"""

from __future__ import annotations

from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard.capture.simplify.passes import in_every_body
from gshard.graph import Graph


@in_every_body
def transpose_products(graph: Graph) -> list[JaxprEqn]:
    """The equations, with `(a @ b).T` as one product."""
    return [
        _turned(eqn, graph)
        if eqn.primitive is p.transpose_p and graph.uses(eqn.invars[0]) == 1
        else eqn
        for eqn in graph.eqns
    ]


def _turned(eqn: JaxprEqn, graph: Graph) -> JaxprEqn:
    """A transpose that moves the dims of one operand of a product behind those of the other."""
    product = graph.maker(eqn.invars[0])
    if product is None or product.primitive is not p.dot_general_p:
        return eqn
    params = product.params
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    batch, rank = len(left_batch), len(eqn.params["permutation"])
    of_left = batch + product.invars[0].aval.ndim - len(left) - batch
    swapped = (*range(batch), *range(of_left, rank), *range(batch, of_left))
    if tuple(eqn.params["permutation"]) != swapped or params.get("out_sharding") is not None:
        return eqn
    precision = params["precision"]
    other = {
        "dimension_numbers": ((right, left), (right_batch, left_batch)),
        "precision": precision[::-1] if isinstance(precision, tuple) else precision,
    }
    return product.replace(
        invars=product.invars[::-1], outvars=eqn.outvars, params={**params, **other}
    )
