"""What is planned is what is sent, to the byte.

The reshards and reductions of a plan send what the collectives in their code send, and those that
are left just before emission, combined or not, are the emitted program's.
"""

from gshard.graph.regions import walk
from gshard.moving.inventory import collectives_of
from gshard.moving.nodes import TensorNode, code_of, node_of
from gshard.planning.plan import Plan


def assert_planned_is_sent(lowered):
    """Assert that every collective of the plan is one of the emitted program, and all are."""
    plan, programs = lowered.plan, lowered._program.history.programs
    for eqn in walk(plan.jaxpr):
        node, avals = node_of(eqn), [a.aval for a in eqn.invars]
        if isinstance(node, TensorNode):
            shape = tuple(avals[0].shape)
            code = code_of(node.unexplained(), shape, tuple(a.dtype for a in avals))
            (result,) = code.results
            assert result.aval.shape == node.result(shape), (node, shape)
    expanded, combined = (Plan(programs[n], plan.num_devices) for n in ("expand", "combine"))
    assert plan.bytes == expanded.bytes
    assert combined.sends == collectives_of(programs["emit"], plan.num_devices)
