"""Communication in pieces beside products: plan in, plan out; values, bytes and pieces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import gshard
from gshard.graph.regions import walk
from gshard.moving.nodes import node_of
from tests.oracle import assert_same, kinds, random_array, run, sent
from tests.planning.improve.products import overlapped as in_pieces
from tests.planning.improve.products import split_products


def experts(x, wi, wo):
    """Dispatch, experts, combine: [E, G, C, M] by group, by expert, and by group again."""
    x = gshard.split(gshard.split(x, 1, 8), 0, 8)
    h = jax.nn.relu(jnp.einsum("EGCM,EMH->EGCH", x, wi))
    return gshard.split(jnp.einsum("EGCH,EHM->GECM", h, wo), 0, 8)


def block(x, wi, wo):
    """A tensor-parallel feed-forward layer; rows are split outside it."""
    x = gshard.split(x, 0, 8)
    h = gshard.split(jax.nn.relu(x @ gshard.split(wi, 1, 8)), 1, 8)
    return gshard.split(h @ gshard.split(wo, 0, 8), 0, 8)


EXPERTS = (16, 16, 8, 4), (16, 4, 12), (16, 12, 4)
BLOCK = (64, 4), (4, 24), (24, 4)


def arrays(shapes):
    return [random_array(s, seed=i) for i, s in enumerate(shapes)]


def programs(fn, shapes, **how):
    """The plan before the pass, and after it without what nothing reads any more."""
    found = gshard.jit(fn, **how).lower(*arrays(shapes))._program.history.programs
    names = list(found)
    at = names.index("overlap")
    assert names[at - 1 : at + 2] == ["share", "overlap", "drop_unused"], names
    return found["share"], found["drop_unused"]


def steps(jaxpr):
    """The products and nodes of a plan, in its order."""
    names = [node_of(e).name if node_of(e) else e.primitive.name for e in walk(jaxpr)]
    return [n for n in names if n in ("reshard", "reduce", "dot_general", "concatenate")]


def test_dispatch_and_combine():
    """Two local experts, one after the other: the second is sent while the first is multiplied."""
    before, after = programs(experts, EXPERTS, overlap=True)
    assert steps(before) == ["reshard", "dot_general", "dot_general", "reshard"]
    one = ["dot_general", "dot_general", "reshard"]
    assert steps(after) == ["reshard", "reshard", *one, *one, "concatenate"]


def test_gather_product_and_product_scatter():
    before, after = programs(block, BLOCK, overlap=True)
    assert steps(before) == ["reshard", "dot_general", "dot_general", "reduce"]
    one = ["dot_general", "dot_general", "reduce"]
    count = steps(after).count("reduce")
    assert steps(after) == ["reshard"] * count + one * count + ["concatenate"]


def test_hidden_units_are_not_joined():
    """What the backward pass reads of the forward pass it reads in pieces."""

    def loss(*args):
        return jnp.sum(experts(*args) ** 2)

    _, after = programs(jax.grad(loss, (0, 1, 2)), EXPERTS, overlap=True)
    joined = [e.outvars[0].aval.shape for e in walk(after) if e.primitive.name == "concatenate"]
    assert (2, 16, 8, 12) not in joined
    assert sum(n == "reshard" for n in steps(after)) == 8


@pytest.mark.parametrize(("fn", "shapes"), [(experts, EXPERTS), (block, BLOCK)])
def test_values_and_bytes(fn, shapes):
    def loss(*args):
        return jnp.sum(jnp.sin(fn(*args)))

    step, args = jax.value_and_grad(loss, (0, 1, 2)), arrays(shapes)
    overlapped, plain = (gshard.jit(step, overlap=o) for o in (True, False))
    assert_same(run(overlapped, *args), jax.jit(step)(*args), rtol=1e-4, atol=1e-4)
    new, old = overlapped.lower(*args), plain.lower(*args)
    assert sent(new) == sent(old)
    pieces = [c for c in new.collectives if c.why.pieces > 1]
    assert len(pieces) >= 8  # two nodes of each pass
    assert all(c.values == 1 for c in pieces)  # small as they are, they are not combined again
    assert gshard.check(overlapped, *args).ok


@given(split_products())
def test_any_product_in_pieces(marked):
    assert all(c.why.pieces in (1, 2, 4) for c in in_pieces(marked).collectives)


def test_in_a_loop():
    def scanned(x, wi, wo):
        return jax.lax.scan(lambda x, _: (block(x, wi, wo), None), x, length=3)[0]

    args = arrays(BLOCK)
    step = gshard.jit(scanned, overlap=True)
    assert_same(run(step, *args), jax.jit(scanned)(*args), rtol=1e-3, atol=1e-3)
    assert any(c.why.pieces > 1 and c.count == 3 for c in step.lower(*args).collectives)


LARGE = (128, 256, 32, 1024), (128, 1024, 8192), (128, 8192, 1024)


def lowered(fn, shapes, **how):
    return gshard.jit(fn, devices=8, **how).lower(
        *[jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    )


def test_chosen_by_the_hardware():
    """In pieces on GPUs where that is faster: the paper's layer, and not one of small dims."""
    auto = functools.partial(lowered, overlap="auto")
    found = {name: auto(experts, LARGE, hardware=name) for name in ("h200", "cpu")}
    assert kinds(found["h200"]) == {"all_to_all": 8}
    assert kinds(found["cpu"]) == {"all_to_all": 2}
    assert sent(found["h200"]) == sent(found["cpu"])
    assert kinds(auto(experts, EXPERTS, hardware="h200")) == {"all_to_all": 2}
    assert kinds(lowered(experts, LARGE, hardware="h200")) == {"all_to_all": 2}
    assert kinds(auto(experts, LARGE)) == {"all_to_all": 2}  # a generic accelerator


def test_nothing_to_hide_behind():
    """Few columns: the products take less time than it would take to start more of them."""
    thin = (128, 256, 32, 1024), (128, 1024, 8), (128, 8, 1024)
    found = lowered(experts, thin, hardware="h200", overlap="auto")
    assert all(c.why.pieces == 1 for c in found.collectives)


def test_what_excludes_it():
    with pytest.raises(ValueError, match="overlap=True changes gshard's plans, which partitioner"):
        gshard.jit(block, overlap=True, partitioner="xla")
    with pytest.raises(ValueError, match="which reproducible=True does not allow"):
        gshard.jit(block, overlap=True, reproducible=True)


def test_weights_gathered_ahead():
    """A gather that waits for nothing runs beside the products before it, as it is."""

    def layers(x, ws):
        for w in ws:
            x = jax.nn.relu(x @ gshard.split(w, 0, 8))
        return x

    shapes = (
        jax.ShapeDtypeStruct((65536, 4096), jnp.bfloat16),
        [jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)] * 3,
    )
    how = {"devices": 8, "hardware": "h200", "overlap": "auto"}
    step = gshard.jit(lambda x, ws: layers(gshard.split(x, 0, 8), ws), **how)
    found = step.lower(*shapes)
    gathers = [c for c in found.collectives if c.kind == "all_gather"]
    assert [c.why.pieces for c in gathers[-2:]] == [1, 1]
    assert np.prod([c.why.pieces for c in gathers]) <= 4
