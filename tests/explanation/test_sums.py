"""Sums by line, layer, function and kind add up to what is sent, and counts agree everywhere."""

import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from gshard.forecast.report import by_function
from gshard.graph.readable import size
from tests.mt.browser import act


def fsdp(params, tokens):
    """A Transformer's layers with weights split over 6 devices, and the gradient of its loss."""

    def loss(params):
        weights = jax.tree.map(lambda w: gshard.split(w, 0, 6), params)
        x = weights["embedding"][gshard.split(tokens, 0, 6)]
        for number, layer in enumerate(weights["layers"]):
            with jax.named_scope(f"layer{number}"):
                scores = jnp.einsum("bsd,btd->bst", x @ layer["q"], x @ layer["k"])
                x = x + jnp.einsum("bst,btd->bsd", jax.nn.softmax(scores), x)
                x = x + jax.nn.silu(x @ layer["up"]) @ layer["down"]
        return jnp.mean(x**2)

    return jax.value_and_grad(loss)(params)


def moe(params, x):
    def loss(params):
        tokens = gshard.split(x, 0, 6)
        with jax.named_scope("router"):
            gates = jax.nn.softmax(tokens @ params["gate"])
            chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 12)
        with jax.named_scope("experts"):
            sent = gshard.split(jnp.einsum("gse,gsm->egsm", chosen, tokens), 0, 6)
            h = jax.nn.relu(jnp.einsum("egsm,emh->egsh", sent, gshard.split(params["w"], 0, 6)))
        return jnp.mean(jnp.einsum("gse,egsh->gsh", chosen * gates, h) ** 2)

    return jax.value_and_grad(loss)(params)


def halo(u, kernel):
    u = gshard.split(u, 0, 6)

    def body(u, _):
        with jax.named_scope("laplace"):
            image = u[None, None]
            v = jax.lax.conv_general_dilated(image, kernel[None, None], (1, 1), "SAME")[0, 0]
        norm = jnp.sqrt(jnp.sum(v * v))
        return u + jnp.roll(v, 1, 0) / norm, (norm, jnp.max(v))

    return jax.lax.scan(body, u, None, length=5)


def branches(x, which):
    x = gshard.split(x, 0, 6)
    chosen = jax.lax.switch(which, [lambda: jnp.sum(x, 0), lambda: (x.T @ x)[0]])
    return chosen, jnp.sum((x > 0).astype(jnp.int32), 0), jnp.max(x, 0)


def shaped(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


LAYER = {"q": shaped(12, 12), "k": shaped(12, 12), "up": shaped(12, 18), "down": shaped(18, 12)}
PROGRAMS = {
    "fsdp": (
        fsdp,
        {"embedding": shaped(30, 12), "layers": [LAYER, LAYER]},
        shaped(12, 7, dtype=jnp.int32),
    ),
    "moe": (moe, {"gate": shaped(8, 12), "w": shaped(12, 8, 10)}, shaped(6, 5, 8)),
    "halo": (halo, shaped(50, 8), shaped(5, 3)),
    "branches": (branches, shaped(13, 5), shaped(dtype=jnp.int32)),
}


def lowered(name):
    fun, *arguments = PROGRAMS[name]
    return gshard.jit(fun, devices=6).lower(*arguments)


def check_sums(program, hardware):
    """Every sum of bytes is exact; sums of times are equal up to rounding."""
    explanation = program.explain(hardware, seconds=0)
    forecast, sent = explanation.forecast, sum(c.total_bytes for c in program.collectives)
    times = sum(float(t.total_seconds) for t in forecast.operators if t.collective)
    by_value: dict[str, int] = {}
    for value in (v for c in program.collectives for v in c.members or (c,)):
        by_value[value.source] = by_value.get(value.source, 0) + value.total_bytes
    assert {cost.name: cost.sent for cost in explanation.lines} == by_value
    assert forecast.sent_bytes == sent
    for costs in (explanation.lines, explanation.kinds):
        assert sum(cost.sent for cost in costs) == sent
        assert sum(cost.seconds for cost in costs) == pytest.approx(times)
    for key in (by_function, lambda t: "/".join(t.scope), lambda t: t.source):
        parts = forecast.by(key).values()
        assert sum(part.sent for part in parts) == sent
        assert sum(part.seconds for part in parts) == pytest.approx(forecast.step_seconds)
    by_line = {line: part.sent for line, part in forecast.by(lambda t: t.source).items()}
    assert {line: sent for line, sent in by_line.items() if sent} == {
        line: sent for line, sent in by_value.items() if sent
    }
    return explanation


@pytest.mark.parametrize("hardware", ["cpu", "h100", "tpu-v3"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_sums_and_counts_agree(name, hardware):
    program = lowered(name)
    explanation = check_sums(program, hardware)
    number, runs = len(program.collectives), sum(c.count for c in program.collectives)
    first = str(explanation).splitlines()[0]
    assert re.search(rf": {number} collectives?\b", first)
    assert f"{size(explanation.subject.sent)} sent by each device" in first
    assert sum(cost.runs for cost in explanation.kinds) == runs
    assert (f"run {runs} times" in first) == (runs > number)
    chains = [" ".join(links) for links in explanation.chains.values()]
    assert len(set(chains)) == len(chains)


def test_values_that_are_combined_count_in_their_own_layer():
    """The gradients of all layers are sent together; each layer has its share, exactly."""
    program = lowered("fsdp")
    parts = program.explain("h100", seconds=0).forecast.by(lambda t: "/".join(t.scope[:1]))
    assert parts["layer0"].sent == parts["layer1"].sent > 0
    assert all(len({v.source for v in c.members}) > 1 for c in program.collectives if c.members)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.sampled_from(["sum", "product", "shift", "max", "loop"]), min_size=1, max_size=5),
    st.sampled_from(["bfloat16", "float32"]),
    st.sampled_from(["cpu", "h100"]),
)
def test_sums_of_any_program_add_up(steps, dtype, hardware):
    def fn(x, w):
        x, w = gshard.split(x, 0, 6), gshard.split(w, 0, 6)
        found = []
        for number, step in enumerate(steps):
            with jax.named_scope(f"step{number}"):
                if step == "sum":
                    found.append(jnp.sum(x * x, 0))
                elif step == "max":
                    found.append(jnp.max(x, 0))
                elif step == "product":
                    x = jnp.tanh(x @ w)
                elif step == "shift":
                    x = x + jnp.roll(x, 2, 0)
                else:
                    x = jax.lax.scan(lambda c, _: (c + jnp.roll(c, 1, 0), None), x, None, 3)[0]
        return x, found

    arguments = shaped(18, 12, dtype=dtype), shaped(12, 12, dtype=dtype)
    check_sums(gshard.jit(fn, devices=6).lower(*arguments), hardware)


def test_the_page_has_the_same_sums(tmp_path):
    """What its script adds up, by line and by layer, is what `lowered.collectives` sends."""
    explanation = lowered("fsdp").explain("h100", seconds=0)
    path = tmp_path / "page.html"
    path.write_text(explanation.page(), encoding="utf-8")
    said = act(
        path,
        tmp_path,
        """
        one("#sums").open = true;
        one("#sums").dispatchEvent(new Event("toggle"));
        const found = {};
        for (const key of ["line", "layer", "kind", "called"]) {
          type("#sum-by", key);
          found[key] = one("#sum-found").textContent;
        }
        type("#sum-by", "layer");
        const layers = Object.fromEntries(all("#sum-table tbody tr").map((row) =>
          [row.cells[0].textContent, row.cells[2].textContent]));
        one(".src.sends").click();
        return { found, layers, clicked: one("#detail b").textContent,
          row: one(".src.sends").dataset.line };
        """,
    )
    sent = size(explanation.subject.sent)
    assert all(f"{sent} sent in all" in text for text in said["found"].values())
    assert said["layers"]["layer0"] == said["layers"]["layer1"] != ""
    (cost,) = [c for c in explanation.lines if c.name == said["row"]]
    assert f"{size(cost.sent)} sent" in said["clicked"]
