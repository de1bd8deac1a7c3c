"""Pipelines on devices: values, gradients, what is sent, and memory."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.graph.regions import walk
from gshard.graph.source import Ticks
from gshard.pipelining.schedules import NAMES, make
from gshard.runtime import pipeline
from tests.oracle import random_array
from tests.pipelining.programs import (
    KINDS,
    dense,
    dropout,
    in_order,
    keyed,
    loss_of,
    make_dense,
    make_kind,
    piped,
    plain,
)  # fmt: skip


def close(found, wanted):
    """To rounding, which is that of the terms of a sum: the largest are thousands (`cnn`)."""

    def compared(a, b):
        atol = max(5e-5, 1e-6 * float(np.abs(b).max()))
        np.testing.assert_allclose(a, b, rtol=5e-5, atol=atol)

    jax.tree.map(compared, found, wanted)


def compare(block, arguments, devices=8, **settings):
    """The lowered gradient of a pipeline, whose values are those of the layers in order."""
    wrap = keyed if block is dropout else lambda run: run
    loss, wanted = wrap(piped(block, **settings)), wrap(plain(block))
    found = gshard.jit(jax.value_and_grad(loss, (0, 1)), devices=jax.devices()[:devices])
    close(found(*arguments), jax.jit(jax.value_and_grad(wanted, (0, 1)))(*arguments))
    return found.lower(*arguments)


def test_a_mesh_of_stages_and_data():
    """Layers that do not divide, a batch split within the stages: gradients are summed once."""

    def block(w, x):
        return dense(w, gshard.split(x, 0, 2))

    arguments = make_dense(layers=6, batch=16)
    lowered = compare(block, arguments, stages=4, microbatches=8, schedule="zb-h1")
    permutes = [c for c in lowered.collectives if "microbatches handed" in str(c.why)]
    # A microbatch has 2 rows, one on each device of a stage: there and back once, as it must.
    assert sum(c.total_bytes for c in permutes) == 2 * 8 * (1 * 8 * 4)
    inside = [c for c in lowered.collectives if c.kind != "collective_permute" and c.count > 1]
    assert not inside, inside


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("layers", [16, 19])
def test_every_schedule(name, stages, layers):
    arguments = make_dense(layers=layers, batch=16)
    compare(dense, arguments, stages=stages, microbatches=8, schedule=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["moe", "cnn", "dropout"])
def test_every_schedule_with_other_layers(kind, name):
    """Experts on the devices of a stage, convolutions, dropout; 9 layers in 2 or 4 parts.

    The capacity of an expert is of a microbatch: the oracle takes the microbatches one by one.
    """
    arguments, settings = make_kind(kind, 9, 16), {"stages": 2, "microbatches": 4}
    if kind != "moe":
        compare(KINDS[kind], arguments, devices=4, schedule=name, **settings)
        return
    loss = piped(KINDS[kind], schedule=name, **settings)
    found = gshard.jit(jax.value_and_grad(loss, (0, 1)), devices=jax.devices()[:4])
    close(found(*arguments), jax.jit(jax.value_and_grad(loss, (0, 1)))(*arguments))
    sent = found.lower(*arguments).collectives
    assert {c.group_size for c in sent if c.kind == "all_to_all"} <= {2}


@pytest.mark.slow
def test_a_table_of_ones_own_and_an_interleaved_one_of_three_chunks():
    arguments = make_dense(layers=6, batch=16)
    own = make("1f1b", 2, 4).text
    compare(dense, arguments, stages=2, microbatches=4, schedule=own)
    chunks = make("interleaved", 2, 4, 3)
    compare(dense, arguments, stages=2, microbatches=4, schedule=chunks)


@pytest.mark.slow
def test_layers_split_within_a_stage_and_rematerialized():
    """Tensor parallelism inside: collectives of a layer are between the devices of a stage."""

    def block(w, x):
        w = {"in": gshard.split(w["in"], 1, 4), "out": gshard.split(w["out"], 0, 4)}
        return dense(w, x)

    arguments = make_dense(layers=4, batch=16)
    for layer in (block, jax.checkpoint(block)):
        lowered = compare(layer, arguments, stages=2, microbatches=4)
        sums = [c for c in lowered.collectives if c.kind == "all_reduce" and c.count > 1]
        assert {c.group_size for c in sums} == {4}


@pytest.mark.slow
def test_closures_keys_and_outputs_in_stages():
    weights, x, targets = make_dense(layers=4, batch=16)
    gain = jnp.linspace(0.5, 1.5, 8)
    weights = {**weights, "key": jax.random.split(jax.random.key(3), 4)}
    rows = jnp.arange(16)

    def outputs(weights, gain, x):
        def block(w, x):
            h, rows = x
            keys = jax.vmap(functools.partial(jax.random.fold_in, w["key"]))(rows)
            kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, h.shape[1:]))(keys)
            return dense(w, h) * gain * kept, rows

        return gshard.pipeline(block, weights, (x, rows), stages=4, microbatches=4)[0]

    def loss(floats, gain, x):
        return loss_of(outputs({**weights, **floats}, gain, x), targets)

    floats = {k: weights[k] for k in ("in", "out")}
    step = jax.value_and_grad(loss, (0, 1, 2))
    close(gshard.jit(step)(floats, gain, x), step(floats, gain, x))


def test_outputs_of_all_types():
    """Of those that nothing adds up, too: keys of the rows, and truth values."""

    def block(w, x):
        drawn = jax.vmap(lambda key: jax.random.normal(key, (8,)))(x["key"])
        return {**x, "h": dense(w, x["h"] + drawn), "real": ~x["real"], "small": x["small"] * 2}

    weights, h, _ = make_dense(layers=3, batch=8)
    rows = jnp.arange(8)
    x = {"h": h, "key": jax.random.split(jax.random.key(3), 8), "real": rows % 3 == 0}
    x["small"] = rows.astype(jnp.int8) - 4
    fn = functools.partial(gshard.pipeline, block, stages=2, microbatches=np.int64(2))
    found = gshard.jit(fn, devices=jax.devices()[:4])(weights, x)
    wanted = in_order(block, weights, x)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, wanted)
    for tree in (found, wanted):
        tree["key"] = jax.random.key_data(tree["key"])
    close(found, wanted)


@pytest.mark.slow
def test_memory_is_constant_in_the_microbatches():
    """From twice as many microbatches as stages on, but for the batch itself.

    And as forecast: what nobody needs, such as gradients of the batch here, is not held.
    """
    found = {}
    for name in ("gpipe", "1f1b", "zb-h1"):
        for microbatches in (8, 32):
            arguments = make_dense(layers=4, width=32, batch=4 * microbatches)
            loss = piped(dense, stages=4, microbatches=microbatches, schedule=name)
            step = gshard.jit(jax.value_and_grad(loss), devices=jax.devices()[:4])
            lowered = step.lower(*arguments)
            temporary = lowered.compile().memory_analysis().temp_size_in_bytes
            batch = 4 * microbatches * 32 * 4
            found[name, microbatches] = temporary - 4 * batch
            forecast = lowered.forecast("cpu").memory.temporary
            assert forecast == pytest.approx(temporary, rel=0.1), (name, microbatches)
    for name in ("1f1b", "zb-h1"):
        assert found[name, 32] <= found[name, 8] + 4096, found
    assert found["gpipe", 32] > 1.5 * found["gpipe", 8], found


@pytest.mark.slow
def test_a_check_compares_a_pipeline_with_its_meaning():
    arguments = make_dense(layers=2, batch=4)
    loss = piped(dense, stages=2, microbatches=2, schedule="1f1b")
    assert gshard.check(jax.value_and_grad(loss), *arguments, devices=2).ok


def test_what_a_lowered_program_says_of_its_pipelines():
    arguments = make_dense(layers=8, batch=32)
    loss = piped(dense, stages=8, microbatches=16, schedule="zb-h1")
    lowered = gshard.jit(jax.value_and_grad(loss), devices=8).lower(*arguments)
    (found,) = lowered.pipelines
    assert (found.schedule, found.stages, found.microbatches, found.ticks) == ("zb-h1", 8, 16, 55)
    assert found.bubble <= 0.1273
    assert found.in_flight == 8
    forecast = lowered.forecast(hardware="h100")
    said = r"8 stages, 16 microbatches, zb-h1: bubble 12.7%, stage 7 slowest by \d+%, 8 in flight"
    assert re.search(said, str(forecast))
    products = [t for t in forecast.operators if t.name.startswith("dot_general")]
    assert [t.count for t in products] == [16] * 6  # two of each pass, on every device
    assert sum(t.waited for t in products) == 2 * 55  # a step waits for one pass in every tick
    assert forecast.sent_bytes == sum(c.total_bytes for c in lowered.collectives)
    found = [(e.primitive.name, t) for e in walk(lowered.jaxpr) if (t := Ticks.of(e))]
    loops = [t for name, t in found if name == "while"]
    assert [t.own for t in loops] == [(55 - 16, 16)] * 4  # F, the head, B and W of the last stage
    head = loops.pop(1)
    waited = [t.together[2] for t in loops]  # ticks in which all wait for F, B and W
    assert sum(waited) == 55
    assert 1 <= head.together[2] <= waited[0]
    assert 55 in {e.params["length"] for e in lowered.jaxpr.eqns if e.primitive.name == "scan"}
    assert 'class="op-W"' in lowered.page()


def test_what_layers_send_is_that_of_one_stage():
    """By zb-h1 a stage does B and W apart for other microbatches than the next: 1F1B never does."""

    def block(w, x):
        return dense({"in": gshard.split(w["in"], 1, 2), "out": gshard.split(w["out"], 0, 2)}, x)

    sent = []
    for name in ("1f1b", "zb-h1"):
        step = jax.grad(piped(block, stages=2, microbatches=8, schedule=name))
        lowered = gshard.jit(step, devices=4).lower(*make_dense(layers=4, batch=32))
        sums = [c for c in lowered.collectives if c.group_size == 2 and "handed" not in str(c.why)]
        sent.append(sum(c.total_bytes for c in sums))
        products = [t for t in lowered.forecast("h100").operators if t.name == "dot_general"]
        assert sum(t.count for t in products) == 6 * 2 * 8  # of two layers
    assert sent[0] == sent[1] > 0


def test_permutes_are_in_cliques_of_their_own_on_gpus_where_xla_can():
    """Two stages are the same pairs in all ticks; XLA hangs where these differ (xla 44530).

    A flag that XLA does not have is left out: it would refuse to compile.
    """
    flag = "xla_gpu_collective_permute_connected_components"
    for machine, stages in (("h100", 2), ("h100", 4), ("tpu-v5e", 2)):
        step = jax.grad(piped(dense, stages=stages, microbatches=2, schedule="1f1b"))
        lowered = gshard.jit(step, devices=stages, hardware=machine).lower(*make_dense(4, batch=4))
        options = dict(lowered._program.settings.compiler_options)
        expected = (machine, stages) == ("h100", 2) and pipeline._is_option(flag)
        assert (flag in options) == expected
    assert not pipeline._is_option("xla_gpu_no_such_flag")


@pytest.mark.slow
def test_no_tick_copies_slots_or_sums():
    """Ticks copy messages, and what a product transposes: buffers are updated in place.

    Where W follows B at once, both are one loop: nothing is kept for W. In zb-h1 it does but for
    the first and last microbatches, for which there is a loop of B and one of W as well.
    """
    arguments = make_dense(layers=8, width=16, batch=32)
    for name, loops in (("1f1b", 3), ("zb-h1", 5)):
        loss = piped(jax.checkpoint(dense), stages=2, microbatches=8, schedule=name)
        step = gshard.jit(jax.value_and_grad(loss), devices=jax.devices()[:2])
        lowered = step.lower(*arguments)
        found = [e for e in walk(lowered.jaxpr) if e.primitive.name == "while" and Ticks.of(e)]
        assert len(found) == loops
        text, sizes = lowered.compile().as_text().partition("ENTRY")[0], []
        for part in re.split(r"\n\n(?=%)", text):
            if not part.startswith(("%fused", "%wrapped")):
                shapes = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", part)
                sizes += [math.prod(map(int, shape.split(","))) for shape in shapes]
        hidden = 4 * 2 * 16  # of a microbatch, in a layer: less than any buffer
        assert 0 < max(sizes) <= hidden, sizes


def test_a_tick_does_nothing_but_its_operation():
    """With one layer in a stage, too: XLA moves what no run of a loop changes out of the loop.

    In 1F1B it has one slot for what W needs, and all of a buffer does not depend on the layer. Its
    sums have one row: forecasts know which buffers that takes.
    """
    for name in ("zb-h1", "1f1b"):
        loss = piped(dense, stages=4, microbatches=8, schedule=name)
        step = gshard.jit(jax.value_and_grad(loss), devices=jax.devices()[:4])
        lowered = step.lower(*make_dense(layers=4, width=32, batch=32))
        compiled = lowered.compile()
        planned, text = compiled.memory_analysis().temp_size_in_bytes, compiled.as_text()
        assert lowered.forecast("cpu").memory.temporary == pytest.approx(planned, rel=0.05)
        (tick,) = (part for part in re.split(r"\n\n(?=%|ENTRY)", text) if " conditional(" in part)
        products = [n for n in re.findall(r'op_name="([^"]*)"', text) if "dot_general" in n]
        assert products
        assert not set(products) & set(re.findall(r'op_name="([^"]*)"', tick))
        assert " dot(" not in tick


def test_permutes_wait_for_the_loops_of_their_tick():
    """XLA's CPUs run what no data orders side by side: collectives met in two orders, and hung."""

    def block(w, x):
        return dense({"in": gshard.split(w["in"], 1, 2), "out": gshard.split(w["out"], 0, 2)}, x)

    loss = piped(block, stages=2, microbatches=4, schedule="zbv")
    step = gshard.jit(jax.value_and_grad(loss), devices=jax.devices()[:4])
    text = step.lower(*make_dense(layers=4, batch=8)).compile().as_text()
    (tick,) = (part for part in re.split(r"\n\n(?=%|ENTRY)", text) if " conditional(" in part)
    loops, before, permutes = set(), {}, list[set[str]]()
    for name, op, operands in re.findall(r"%(\S+) = .*? ([a-z][\w-]*)\((%[^)]*)\)", tick):
        reads = set(re.findall(r"%([\w.-]+)", operands))
        before[name] = (loops & reads).union(*(before.get(a, set()) for a in reads))
        if op == "while":
            assert before[name] == loops
            loops.add(name)
        elif op == "conditional":
            permutes.append(before[name])
    assert permutes
    assert all(waited == loops for waited in permutes)
    assert len(loops) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_reproducible_bits_are_those_of_one_device(kind):
    """Any order of stages rounds otherwise: the layers run in order on all devices."""
    arguments, wrap = make_kind(kind, 3, 8), keyed if kind == "dropout" else lambda run: run
    step = jax.value_and_grad(wrap(piped(KINDS[kind], stages=2, microbatches=2)))
    found = [
        gshard.jit(step, devices=jax.devices()[:count], reproducible=True)(*arguments)
        for count in (1, 4)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), *map(jax.device_get, found))


def test_rows_from_neighbours_inside_of_a_stage():
    """Stages run a layer in other ticks: no device may wait for those of another stage."""

    def taken(wl, x):
        return jnp.tanh(jnp.roll(x * wl, 1, axis=1) + jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0))))

    w, x = random_array((4, 5)), random_array((8, 6, 5), seed=1)
    wanted = jax.lax.scan(lambda c, wl: (taken(wl, c), None), x, w)[0]
    for parts in (2, 4):  # of the devices of a stage: a pair, a ring

        def fn(w, x, parts=parts):
            def block(wl, x):
                return taken(wl, gshard.split(x, 1, parts))

            return gshard.pipeline(block, w, x, stages=2, microbatches=4, schedule="gpipe")

        np.testing.assert_allclose(gshard.jit(fn)(w, x), wanted, rtol=1e-5, atol=1e-6)
        found = gshard.jit(fn).lower(w, x).collectives
        permuted = {str(c.why) for c in found if c.kind == "collective_permute"}
        assert permuted == {"pipeline: microbatches handed down"}
        rows = [(c.kind, c.bytes) for c in found if "rows of dim 1" in str(c.why)]
        # Between two devices at a time. 6 rows in 4 parts are on 3 devices: a ring of these takes
        # three rounds, a chain two.
        assert rows == [("all_to_all", 40)] * (2 if parts == 2 else 5)
