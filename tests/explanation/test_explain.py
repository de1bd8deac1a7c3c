"""An explanation names the line, the reason and a change that does what it says."""

import inspect

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard.explanation.chains import chain
from gshard.explanation.fixes import fixes

SHAPES = [(8, 64, 32), (32, 8), (8, 32, 128), (8, 128, 32)]


def layer(dispatched):
    """The paper's MoE layer; `dispatched` annotates the tokens that go to their experts."""

    def moe(x, gate, wi, wo):
        x = gshard.split(x, 0, 8)
        wi, wo = gshard.split(wi, 0, 8), gshard.split(wo, 0, 8)
        gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, gate))
        mask = jax.nn.one_hot(jnp.argmax(gates, -1), 8)[..., None] * jnp.ones((1, 1, 1, 32))
        d = dispatched(jnp.einsum("gsec,gsm->egcm", mask, x))
        h = jax.nn.relu(jnp.einsum("egcm,emh->egch", d, wi))
        y = gshard.split(jnp.einsum("egch,ehm->gecm", h, wo), 0, 8)
        return jnp.einsum("gsec,gecm->gsm", mask, y)

    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in SHAPES]
    return gshard.jit(moe, devices=8).lower(*arguments)


def replicated(d):
    return gshard.replicate(d)  # the deliberate mistake: every device gets all tokens


def sent(lowered):
    return sum(c.total_bytes for c in lowered.collectives)


def test_a_bad_annotation_is_named_and_the_change_removes_what_it_says():
    bad = layer(replicated)
    line = inspect.getsourcelines(replicated)[1] + 1
    found = fixes(bad._program.subject)
    assert found, "no change was found"
    here = [f for f in found if f.source.endswith(f"test_explain.py:{line}")]
    assert here[0].after == found[0].after, "the mistaken line is among the best to change"
    assert here[0].before == sent(bad)
    change = {
        "no annotation": lambda d: d,
        **{f"split(tensor, {i}, 8)": lambda d, i=i: gshard.split(d, i, 8) for i in range(4)},
    }[here[0].instead]
    assert sent(layer(change)) == here[0].after
    assert here[0].removed > 0.3 * sent(bad)


def test_the_text_has_totals_reasons_and_the_change():
    text = layer(replicated).explain("tpu-v3")
    line = inspect.getsourcelines(replicated)[1] + 1
    for said in (
        "by kind",
        "all_gather",
        "by line",
        "operand of dot_general",
        f"test_explain.py:{line}",
        "in place of replicate",
    ):
        assert said in text


def test_a_chain_leads_from_an_annotation_to_the_value():
    def fn(x):
        x = gshard.split(x, 1, 4)
        return jnp.tanh(jnp.transpose(x) * 2)

    lowered = gshard.jit(fn, devices=4).lower(jax.ShapeDtypeStruct((6, 8), jnp.float32))
    subject = lowered._program.subject
    links = chain(subject, subject.flat.jaxpr.outvars[0], 0)
    assert [link.operator.split("(")[0] for link in links] == ["split", "transpose", "mul", "tanh"]


def test_large_values_that_are_whole_everywhere_are_named():
    def fn(x, w):
        return gshard.split(x, 0, 4) @ w

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 512), (512, 512))]
    text = gshard.jit(fn, devices=4).lower(*shapes).explain("h100")
    assert "large values that every device holds whole" in text
    assert "f32[512,512]  an argument" in text


def test_the_other_partitioner_has_no_program_to_look_at():
    lowered = gshard.jit(lambda x: x, partitioner="xla").lower(jnp.ones(4))
    with pytest.raises(ValueError, match="omit the keyword"):
        lowered.explain()
