"""An explanation names the line, the reason and a change that does what it says."""

import inspect
import math
import re

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard.explanation.fixes import search
from gshard.explanation.why import origin

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
    found = search(bad._program.subject).fixes
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
    text = str(layer(replicated).explain("tpu-v3", seconds=math.inf))
    line = inspect.getsourcelines(replicated)[1] + 1
    for said in (
        "by kind",
        "all_gather",
        "by line",
        "x is split by g at line",
        f"test_explain.py:{line}",
        "instead of replicate(d)",
    ):
        assert said in text


def test_a_chain_leads_from_an_annotation_to_the_value():
    def fn(x):
        x = gshard.split(x, 1, 4)
        return jnp.tanh(jnp.transpose(x) * 2)

    lowered = gshard.jit(fn, devices=4).lower(jax.ShapeDtypeStruct((6, 8), jnp.float32))
    subject = lowered._program.subject
    links = origin(subject, subject.flat.jaxpr.outvars[0], 0).links
    assert [link.operator.split("(")[0] for link in links] == ["split", "transpose", "mul", "tanh"]


def test_large_values_that_are_whole_everywhere_are_named():
    def fn(x, w):
        return gshard.split(x, 0, 4) @ w

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 512), (512, 512))]
    text = str(gshard.jit(fn, devices=4).lower(*shapes).explain("h100", seconds=0))
    assert "large values that are replicated" in text
    assert "w f32[512,512]  an argument" in text


def test_one_sentence_says_which_splits_meet():
    def fn(tokens, experts):
        tokens = gshard.split(tokens, 0, 8)
        experts = gshard.split(experts, 0, 8)
        sent = gshard.split(jnp.einsum("gcm,gec->egm", tokens, jnp.ones((8, 8, 4))), 0, 8)
        return jnp.einsum("egm,emh->egh", sent, experts)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 4, 16), (8, 16, 32))]
    explanation = gshard.jit(fn, devices=8).lower(*shapes).explain("h100", seconds=0)
    first = inspect.getsourcelines(fn)[1]
    (cost,) = explanation.lines
    assert cost.name.endswith(f"test_explain.py:{first + 3}")
    assert explanation.why(cost) == (
        f"tokens is split by g at line {first + 1}, sent by e at line {first + 3}; "
        f"the einsum gcm,gec->egm at line {first + 3} has to turn one into the other."
    )


def test_a_sum_over_a_split_dim_says_so_and_arguments_have_names():
    def fn(params, x):
        return gshard.split(x, 0, 4) @ gshard.split(params["w"], 0, 4)

    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (64, 64)))
    explanation = gshard.jit(fn, devices=4).lower({"w": w}, x).explain("h100", seconds=0)
    said = " ".join(explanation.why(cost) for cost in explanation.lines)
    assert re.search(r"x is split by dim 0 at line \d+, params\['w'\] by dim 0 at line", said), said


def test_counts_agree_where_values_are_combined():
    """A header that says 1 collective, and two lines that send with it."""

    def fn(x, y):
        x, y = gshard.split(x, 0, 8), gshard.split(y, 0, 8)
        a = jnp.sum(x, 0)
        b = jnp.sum(y, 0)
        return a, b

    shapes = [jax.ShapeDtypeStruct((64, 3), jnp.float32)] * 2
    explanation = gshard.jit(fn, devices=8).lower(*shapes).explain("h100", seconds=0)
    assert "1 collective, for 2 values" in explanation.about
    assert sum(cost.count for cost in explanation.lines) == 2
    assert sum(cost.count for cost in explanation.kinds) == 1
    assert [cost.runs for cost in (*explanation.lines, *explanation.kinds)] == [1, 1, 1]
    assert explanation.sentence.startswith("One all_reduce of ")


def test_two_annotations_on_one_line_are_told_apart():
    def fn(x):
        return gshard.replicate(gshard.split(x, 0, 4))

    lowered = gshard.jit(fn, devices=4).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32))
    explanation = lowered.explain("h100", seconds=0)
    assert "; replicate(" in explanation.why(explanation.lines[0])


def test_times_of_lines_are_those_of_the_collectives():
    explanation = layer(replicated).explain("h100", seconds=0)
    total = sum(cost.seconds for cost in explanation.kinds)
    assert sum(cost.seconds for cost in explanation.lines) == pytest.approx(total)


def test_the_first_sentence_has_the_costliest_line_and_its_share():
    explanation = layer(replicated).explain("h100", seconds=0)
    worst = max(explanation.lines, key=lambda cost: cost.seconds)
    share = worst.seconds / explanation.forecast.step_seconds
    assert f"B at {worst.name} takes {share:.0%} of the step" in explanation.sentence
    assert explanation.about.startswith("moe on 8 x h100: 2 collectives")
    assert len(repr(explanation).splitlines()) == 1


def test_without_collectives_it_says_that_nothing_is_sent():
    lowered = gshard.jit(lambda x: gshard.split(x, 0, 4) * 2, devices=4).lower(jnp.ones((8, 2)))
    assert "Nothing is sent" in str(lowered.explain("h100"))


def test_the_hardware_is_what_is_there_unless_another_is_named():
    lowered = layer(replicated)
    assert (
        "8 x cpu (as JAX reports here, explain('h100') for a GPU)"
        in lowered.explain(seconds=0).about
    )
    assert "8 x h100:" in lowered.explain("h100", seconds=0).about


def test_a_search_without_time_tries_nothing_and_says_so():
    explanation = layer(replicated).explain("h100", seconds=0)
    assert explanation.search().tried == 0
    assert "changes not tried yet" in str(explanation)


def test_a_search_tells_its_progress_and_begins_behind_the_costliest_line():
    told = []
    explanation = layer(replicated).explain("h100", seconds=math.inf)
    found = explanation.search(lambda done, total: told.append((done, total)))
    assert told == [(n, found.candidates) for n in range(1, found.candidates + 1)]
    assert found.tried == found.candidates
    worst = explanation.lines[0]
    fix = found.for_line(worst.name, worst.sent)
    assert fix.left.get(worst.name, 0) < worst.sent
    assert sum(fix.left.values()) == fix.after


def test_the_other_partitioner_has_no_program_to_look_at():
    lowered = gshard.jit(lambda x: x, partitioner="xla").lower(jnp.ones(4))
    with pytest.raises(ValueError, match="omit the keyword"):
        lowered.explain()


def test_arguments_split_by_in_shardings_have_their_names_and_the_keyword():
    axis = jax.sharding.AxisType.Auto
    mesh = jax.sharding.AbstractMesh((2, 3), ("x", "y"), axis_types=(axis, axis))
    rows = jax.sharding.NamedSharding(mesh, jax.P(("x", "y")))

    def total(tokens, weight):
        return (jnp.tanh(tokens) * weight).sum(0)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((12, 5), (5,))]
    jitted = gshard.jit(total, devices=6, in_shardings=(rows, None))
    explanation = jitted.lower(*shapes).explain("h100", seconds=math.inf)
    said = str(explanation)
    assert "tokens is split by x and y (in_shardings); the sum at line" in said
    assert "in_shardings: removing P(('x', 'y')" in said
    assert "unknown" not in said
    assert "Mesh" not in said


def test_the_first_sentence_says_what_bounds_the_step():
    def fn(x, w):
        return jnp.tanh(gshard.split(x, 0, 8) @ gshard.split(w, 0, 8))

    def bounds(*shapes):
        structs = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
        found = gshard.jit(fn, devices=8).lower(*structs).explain("h100", seconds=0)
        text = str(found)
        assert found.bounds in text.splitlines()[1]
        shares = [
            float(n) for n in re.findall(r"(?:is|traffic|communication|compute) (\d+)%", text)
        ]
        assert sum(shares[:3]) == pytest.approx(100, abs=2)
        return found.bounds

    assert bounds((2**17, 8192), (8192, 8192)).startswith("Compute is ")
    assert bounds((2**20, 64), (64, 64)).startswith("Memory traffic is ")
    assert bounds((8, 8192), (8192, 8192)).startswith("Communication is ")


def test_the_first_sentence_names_the_worst_line_of_every_resource():
    def fn(x, w):
        x = gshard.split(x, 0, 8)
        y = jnp.tanh(x @ w)
        return jnp.sin(y @ w.T)

    structs = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2**16, 8192), (8192, 8192))]
    bounds = gshard.jit(fn, devices=8).lower(*structs).explain("h100", seconds=0).bounds
    first = inspect.getsourcelines(fn)[1]
    at = rf"\(\d+% at tests/explanation/test_explain\.py:({first + 2}|{first + 3})\)"
    assert re.fullmatch(rf"Compute is \d+% of the step {at}, memory traffic \d+% {at}\.", bounds)
