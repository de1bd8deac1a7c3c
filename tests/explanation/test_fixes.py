"""Advice is applied as it is worded, and the program then sends what the advice says."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import gshard
from tests.oracle import sent

SHAPES = {"a": (32, 64), "b": (64, 64), "c": (64, 64), "d": (64, 8)}
STRUCTS = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in SHAPES.items()}


def step(calls, rows, transform=lambda loss: loss):
    """A network, or its gradient, whose weights one line annotates, each as `calls` says."""

    def annotated(ws):
        return {k: calls[k](w) if calls[k] else w for k, w in ws.items()}

    def loss(ws, x):
        ws = annotated(ws)
        y = gshard.split(x, 0, 8)
        for k in ws:
            y = jnp.tanh(y @ ws[k])
        return jnp.sum(y**2)

    x = jax.ShapeDtypeStruct((rows, 32), jnp.float32)
    return gshard.jit(transform(loss), devices=8).lower(STRUCTS, x)


def split(dim):
    def call(w):
        return gshard.split(w, dim, 8)

    return call


def replicate(w):
    return gshard.replicate(w)


def applied(fix, calls):
    """The annotations after the change, by the words of the advice."""
    chosen = set(calls) if fix.count == len(calls) else re.findall(r"ws\['(\w)'\]", fix.tensor)
    if 1 < fix.count < len(calls):  # those that are like the first
        first = (SHAPES[chosen[0]], calls[chosen[0]])
        chosen = [k for k in calls if (SHAPES[k], calls[k]) == first]
    assert len(chosen) == fix.count
    if fix.instead == "no annotation":
        return {**calls, **dict.fromkeys(chosen)}
    moved = re.fullmatch(r"split\(tensor, (\d), 8\)", fix.instead)
    return {**calls, **dict.fromkeys(chosen, DIMS[int(moved[1])] if moved else replicate)}


DIMS = [split(0), split(1)]


@given(
    st.lists(st.sampled_from([0, 0, 1]), min_size=4, max_size=4),
    st.sampled_from([(512, lambda loss: loss), (16, jax.grad), (8192, jax.grad)]),
)
@example([0, 0, 0, 1], (512, lambda loss: loss))
def test_every_advice_saves_what_it_says(dims, how):
    calls = {k: DIMS[d] for k, d in zip(SHAPES, dims, strict=True)}
    lowered = step(calls, *how)
    found = lowered.explain("h100", seconds=math.inf).search().fixes
    of_weights = [f for f in found if "ws[" in f.tensor]
    assert of_weights or how[1] is jax.grad
    for fix in of_weights:
        assert sent(step(applied(fix, calls), *how)) == fix.after, str(fix)
        assert fix.before == sent(lowered)


def test_the_advice_names_tensors_counts_and_memory():
    lowered = step(dict.fromkeys(SHAPES, DIMS[0]), 512)
    found = lowered.explain("h100", seconds=math.inf).search().fixes
    assert found
    for fix in found:
        if fix.count > 1:
            alike = f"of the {fix.count} tensors that have the shape of ws['"
            assert ("of all 4 tensors of this line (ws['" if fix.is_all else alike) in str(fix)
    assert any("more on each device" in str(fix) for fix in found)


def test_tensors_of_one_line_are_tried_one_by_one():
    def forward(ws, x):
        ws = {k: gshard.split(w, 0 if k == "a" else 1, 8) for k, w in ws.items()}
        return jnp.tanh(gshard.split(x, 0, 8) @ ws["a"]) @ ws["b"]

    structs = {"a": jax.ShapeDtypeStruct((64, 64), "float32")}
    structs["b"] = jax.ShapeDtypeStruct((64, 32), "float32")
    x = jax.ShapeDtypeStruct((8192, 64), "float32")
    text = str(gshard.jit(forward, devices=8).lower(structs, x).explain("h100", seconds=math.inf))
    assert "both tensors of this line (ws['a'] and 1 more) saves 21,504 of 21,504 B, and " in text
    assert "removing split(ws['a'], 0, 8) saves 14,336 of 21,504 B, and needs" in text


def test_all_tensors_of_a_line_move_to_another_dim_whatever_their_sizes():
    """Both weights of experts, split by the wrong dim in one line."""

    def experts(calls, x, ws):
        up, down = (call(w) for call, w in zip(calls, ws, strict=True))
        h = jnp.einsum("EGCM,EMH->EGCH", jnp.einsum("GSEC,GSM->EGCM", *x), up)
        return jnp.einsum("EGCH,EHM->GECM", h, down)

    def lowered(dim):
        def loss(ws, dispatch, x):
            x = gshard.split(dispatch, 0, 8), gshard.split(x, 0, 8)
            return jnp.sum(experts([split(dim)] * 2, x, ws) ** 2)

        shapes = [(8, 32, 64), (8, 64, 32)], (8, 16, 8, 4), (8, 16, 32)
        ws, *x = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s, "float32"),
            shapes,
            is_leaf=lambda s: type(s[0]) is int,
        )
        return gshard.jit(loss, devices=8).lower(ws, *x)

    found = lowered(1).explain("h100", seconds=math.inf).search().fixes
    fix = next(f for f in found if (f.count, f.instead) == (2, "split(tensor, 0, 8)"))
    assert "of both tensors of this line (ws[" in str(fix)
    assert sent(lowered(0)) == fix.after < fix.before


def test_advice_on_a_mesh_names_the_devices():
    """A split over the first axis of a mesh, which `split` cannot say."""
    ids = np.arange(8).reshape(2, 4)

    def lowered(call):
        def loss(ws, x):
            h = jnp.tanh(call(x) @ gshard.shard(ws[0], ids[:1]))
            return jnp.sum((h @ gshard.shard(ws[1], ids[:1].T)) ** 2)

        ws = [jax.ShapeDtypeStruct(s, "float32") for s in ((64, 128), (128, 64))]
        return gshard.jit(loss, devices=8).lower(ws, jax.ShapeDtypeStruct((512, 64), "float32"))

    found = lowered(lambda x: gshard.shard(x, ids[:, :1].T)).explain("h100", seconds=math.inf)
    words = "shard(x, [[0], [4]]) instead of shard(x, [[0, 4]])"
    fix = next(f for f in found.search().fixes if f.change == words)
    assert sent(lowered(lambda x: gshard.shard(x, [[0], [4]]))) == fix.after < fix.before


def test_a_change_of_more_tensors_saves_more_or_is_left_out():
    found = step(dict.fromkeys(SHAPES, DIMS[0]), 512).explain("h100", seconds=math.inf).search()
    assert {1, 4} <= {fix.count for fix in found.fixes}
    for fix in found.fixes:
        for other in found.fixes:
            if fix.source == other.source and fix.count > other.count:
                assert fix.after < other.after or fix.memory < other.memory


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad])
def test_copies_by_differentiation_are_one_tensor(transform):
    def loss(w, x):
        return jnp.sum((gshard.split(x, 0, 8) @ gshard.split(w, 0, 8)) ** 2)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (8192, 64))]
    found = (
        gshard.jit(transform(loss), devices=8)
        .lower(*shapes)
        .explain("h100", seconds=9)
        .search()
        .fixes
    )
    assert {fix.count for fix in found} <= {1}


WEIGHTS = {**dict.fromkeys("qkvo", (64, 64)), "up": (64, 128), "down": (128, 64), "head": (64, 256)}
WEIGHTS["embed"] = (256, 64)
TOKENS = jax.ShapeDtypeStruct((32, 16), "int32")


def block(w, tokens):
    """A block of a Llama between an embedding and a head."""
    x = w["embed"][gshard.split(tokens, 0, 8)]
    q, k, v = (x @ w[n] for n in "qkv")
    x = x + jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v @ w["o"]
    return (x + jax.nn.silu(x @ w["up"]) @ w["down"]) @ w["head"]


def in_equinox(calls):
    eqx = pytest.importorskip("equinox")
    from gshard.contrib.equinox import filter_jit

    class Net(eqx.Module):
        w: dict[str, jax.Array]

    def forward(net, tokens):
        return block({n: calls.get(n, fsdp)(net.w[n]) for n in WEIGHTS}, tokens)

    structs = {n: jax.ShapeDtypeStruct(s, "float32") for n, s in WEIGHTS.items()}
    return filter_jit(forward, devices=8).lower(Net(structs), TOKENS)


def in_nnx(calls):
    nnx = pytest.importorskip("flax.nnx")
    from gshard.contrib.nnx import jit

    class Net(nnx.Module):
        def __init__(self):
            for n, s in WEIGHTS.items():
                setattr(self, n, nnx.Param(jnp.zeros(s)))

    def forward(net, tokens):
        return block({n: calls.get(n, fsdp)(getattr(net, n)[...]) for n in WEIGHTS}, tokens)

    return jit(forward, devices=8).lower(Net(), jnp.zeros(TOKENS.shape, TOKENS.dtype))


def in_two_lines(calls):
    """A dict: one line annotates its square matrices, another one the rest."""

    def forward(net, tokens):
        w = {n: gshard.split(net[n], 0, 8) for n in net if n in "qkvo" and n not in calls}
        w |= {n: gshard.split(net[n], 1, 8) for n in net if n not in "qkvo" and n not in calls}
        return block({**w, **{n: call(net[n]) for n, call in calls.items()}}, tokens)

    structs = {n: jax.ShapeDtypeStruct(s, "float32") for n, s in WEIGHTS.items()}
    return gshard.jit(forward, devices=8).lower(structs, TOKENS)


def fsdp(w):
    return gshard.fsdp(w, 8)


def held(lowered):
    """Bytes of the arguments on each device."""
    return lowered.forecast("h100").memory.arguments


@pytest.mark.parametrize(
    ("program", "name"),
    [(in_equinox, "net.w['{}']"), (in_nnx, "net.{}"), (in_two_lines, "net['{}']")],
)
def test_advice_in_the_names_of_a_library_saves_and_costs_what_it_says(program, name):
    lowered = program({})
    tensors = {name.format(n): n for n in WEIGHTS}
    found = lowered.explain("h100", seconds=math.inf).search().fixes
    of_weights = [fix for fix in found if fix.tensor in tensors]
    assert of_weights
    for fix in of_weights:
        first = tensors[fix.tensor]
        chosen = [first] if fix.count == 1 else list(WEIGHTS)
        if fix.count > 1 and program is in_two_lines:
            chosen = [n for n in WEIGHTS if (n in "qkvo") == (first in "qkvo")]
        if not fix.is_all:
            chosen = [n for n in chosen if WEIGHTS[n] == WEIGHTS[first]]
        assert len(chosen) == fix.count, str(fix)
        moved = re.fullmatch(r"split\(tensor, (\d), 8\)", fix.instead)
        call = DIMS[int(moved[1])] if moved else replicate
        call = (lambda w: w) if fix.instead == "no annotation" else call
        changed = program(dict.fromkeys(chosen, call))
        assert sent(changed) == fix.after, str(fix)
        assert held(changed) - held(lowered) == fix.memory, str(fix)
