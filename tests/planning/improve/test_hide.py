"""Products beside transfers: what the barriers say, and that values and bytes stay the same."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import Literal

import gshard
from gshard.graph import Graph, live
from gshard.moving.costs import CostModel, use_cost_model
from gshard.planning.improve.hide import hide
from tests.oracle import annotated, assert_same, assignments, random_array, run, sent


def experts(x, wi, wo):
    """Dispatch, experts, combine: [E, G, C, M] by group, by expert, and by group again."""
    x = gshard.split(gshard.split(x, 1, 8), 0, 8)
    h = jax.nn.relu(jnp.einsum("EGCM,EMH->EGCH", x, wi))
    return gshard.split(jnp.einsum("EGCH,EHM->GECM", h, wo), 0, 8)


def loss(*args):
    return jnp.sum(jnp.sin(experts(*args)))


LARGE = (16, 16, 8, 64), (16, 64, 128), (16, 128, 64)  # more than the links send in a latency


def arrays(shapes):
    return [random_array(s, seed=i) for i, s in enumerate(shapes)]


def beside(program):
    """Of each AllToAll how many products two barriers keep between its start and its end.

    Such a product depends on what is sent by a barrier, and what reads the result on the product.
    """
    graph = Graph.of(program)
    barriers = [e for e in graph.eqns if e.primitive.name == "optimization_barrier"]
    found = []
    for eqn in graph.eqns:
        if eqn.primitive.name != "all_to_all":
            continue
        first = [e.outvars[0] for e in graph.users(eqn.invars[0]) if e.primitive.name == "slice"]
        late = [v for b in barriers if {*first} & {*b.invars} for v in b.outvars]
        held = [e for v in late for e in graph.users(v) if e.primitive.name == "dot_general"]
        users = graph.users(eqn.outvars[0])
        done = users[0].invars if len(users) == 1 and users[0] in barriers else []
        needed = set(live(graph.eqns, done))
        found.append(sum(e in needed for e in held))
    return found


def per_device(fn, shapes, **how):
    return gshard.jit(fn, **how).lower(*arrays(shapes))._program.history.programs["emit"]


def test_another_piece_and_gradients_of_weights_are_beside_transfers():
    """Each transfer is in two pieces.

    Forwards, nothing is beside the first piece of the dispatch and the last of the combine.
    Backwards nothing is before the first; the last one has the gradients of the experts' weights.
    """

    def layers(x, w, wi, wo):
        x = jnp.einsum("EGCM,MN->EGCN", gshard.split(x, 1, 8), w)
        return jnp.sum(jnp.sin(experts(x, wi, wo)))

    shapes = LARGE[0], (64, 64), *LARGE[1:]
    found = beside(per_device(jax.grad(layers, (1, 2, 3)), shapes, overlap=True))
    assert [n > 0 for n in found] == [False, True, True, False, False, True, True, True]


def test_all_results_of_barriers_are_used():
    """XLA drops operands of a barrier whose results nothing uses, and with them their order."""
    program = per_device(jax.grad(loss, (0, 1, 2)), LARGE, overlap=True)
    needed = set(live(program.eqns, program.outvars))
    read = {a for e in needed for a in e.invars if not isinstance(a, Literal)}
    barriers = [e for e in program.eqns if e.primitive.name == "optimization_barrier"]
    assert barriers
    assert all(v in read for b in barriers for v in b.outvars)


def test_without_overlap_there_are_no_barriers():
    program = per_device(jax.grad(loss, (0, 1, 2)), LARGE, overlap=False)
    assert all(e.primitive.name != "optimization_barrier" for e in program.eqns)
    assert not any(beside(program))


def test_values_and_bytes():
    step, args = jax.value_and_grad(loss, (0, 1, 2)), arrays(LARGE)
    hidden, plain = (gshard.jit(step, overlap=o) for o in (True, False))
    assert_same(run(hidden, *args), jax.jit(step)(*args), rtol=1e-4, atol=1e-4)
    assert sent(hidden.lower(*args)) == sent(plain.lower(*args))
    assert gshard.check(hidden, *args).ok


def test_in_a_loop():
    """Barriers inside the body."""

    def scanned(x, wi, wo):
        def layer(x, _):
            return experts(jnp.swapaxes(x, 0, 1), wi, wo), None

        return jax.lax.scan(layer, x, length=2)[0]

    args = arrays(LARGE)
    fn = gshard.jit(scanned, overlap=True)
    assert_same(run(fn, *args), jax.jit(scanned)(*args), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@given(st.data())
def test_any_program(data):
    """Random splits of two layers and their gradients, every transfer worth hiding."""
    shapes = [(8, 8), (8, 8), (8, 8)]
    inputs = [data.draw(assignments(2, 4)) for _ in shapes]
    outputs = [data.draw(assignments(2, 4)) for _ in shapes]

    def fn(x, w, v):
        def value(x, w, v):
            return jnp.sum(jnp.sin(jnp.tanh(x @ w) @ v))

        return jax.grad(value, (0, 1, 2))(x, w, v)

    args = arrays(shapes)
    how = {"devices": jax.devices()[:4], "overlap": True}
    marked = gshard.jit(annotated(fn, inputs, outputs), **how)
    program = marked.lower(*args)._program.history.programs["combine"]
    with use_cost_model(CostModel(latency=0.0)):
        barriers = hide(program)
    late = {v for e in barriers.eqns for v in e.outvars}
    for eqn in barriers.eqns:  # every equation is behind what it reads
        assert not any(a in late for a in eqn.invars if not isinstance(a, Literal))
        late -= set(eqn.outvars)
    assert_same(run(marked, *args), jax.jit(fn)(*args), rtol=1e-4, atol=1e-4)
