"""What is planned is what is sent: every node of a plan, to the byte, and in all.

That holds for the reshards and reductions of the plan, and for the combined collectives in its
place just before emission.
"""

import jax
import jax.numpy as jnp

from gshard.emission import emit
from gshard.graph.regions import walk
from gshard.moving.inventory import collectives_of
from gshard.moving.nodes import node_of
from gshard.planning.plan import Plan, node_bytes
from gshard.tensors.devices import Place


def carried_out(node, aval, devices):
    """What one device sends when a node is carried out."""

    def run(x, number):
        return node.run(Place(("d",), devices, {"id": number}), x)

    types = (jax.ShapeDtypeStruct(aval.shape, aval.dtype), jax.ShapeDtypeStruct((), jnp.int32))
    traced = jax.make_jaxpr(run, axis_env=[("d", devices)])(*types)
    (result,) = traced.out_avals
    assert result.shape == node.result(tuple(aval.shape))
    return sum(c.total_bytes for c in collectives_of(emit(traced.jaxpr, {"d": devices}), devices))


def assert_planned_is_sent(lowered):
    """Assert that the bytes of each node, and of all, are those of the emitted program."""
    plan, programs = lowered.plan, lowered._program.history.programs
    for eqn in walk(plan.jaxpr):
        node = node_of(eqn)
        if node is not None:
            sent = carried_out(node, eqn.invars[0].aval, plan.num_devices)
            assert node_bytes(node, eqn) == sent, (node, eqn.invars[0].aval)
    assert plan.bytes == Plan(programs["expand"], plan.num_devices).bytes
    combined = Plan(programs["combine"], plan.num_devices).sends
    emitted = collectives_of(programs["emit"], plan.num_devices)
    assert [(s.kind.replace("-", "_"), s.bytes, s.count, s.reason) for s in combined] == [
        (c.kind, c.bytes, c.count, c.why) for c in emitted
    ]
