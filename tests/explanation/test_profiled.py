"""Profiles: read from a trace, compared with the forecast by line, and fitted."""

import functools
import inspect
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jax.profiler import ProfileData

import gshard
from benchmarks import calibration
from gshard.explanation.profiled import HloPlace, profile
from gshard.forecast import hardware

PLACES = {
    "dot.1": HloPlace("model.py:3", "dot", 1),
    "all-reduce.2": HloPlace("model.py:4", "all-reduce-start", 2),
    "while.3": HloPlace("model.py:4", "while", 1),
}


def event(ops, microseconds, device):
    """An event of some instructions, the outermost first."""
    values = [(1, f'str_value: "{op}"') for op in ops.split()]
    values += [(2, 'str_value: "jit_f"'), (3, f"int64_value: {device}")]
    stats = " ".join(f"stats {{ metadata_id: {n} {v} }}" for n, v in values)
    return f"events {{ metadata_id: 1 duration_ps: {microseconds * 10**6} {stats} }}"


def trace(folder, events, plane="/host:CPU"):
    """A trace of one line of events, as JAX writes it."""
    names = ("hlo_op", "hlo_module", "device_ordinal")
    metadata = "".join(
        f'stat_metadata {{ key: {n} value {{ id: {n} name: "{name}" }} }}'
        for n, name in enumerate(names, 1)
    )
    metadata += 'event_metadata { key: 1 value { id: 1 name: "an op" } }'
    text = f'planes {{ name: "{plane}" {metadata} lines {{ name: "a" {" ".join(events)} }} }}'
    path = folder / "host.xplane.pb"
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return folder


def step(ws, x):
    x, ws = gshard.split(x, 0, 8), gshard.fsdp(ws, 8)

    def loss(ws):
        h = x @ ws["a"]
        h = jnp.tanh(h)
        y = h @ ws["b"]
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))


def lowered(rows=64):
    struct = jax.ShapeDtypeStruct
    ws = {"a": struct((32, 64), "float32"), "b": struct((64, 32), "float32")}
    return gshard.jit(step).lower(ws, struct((rows, 32), "float32"))


def test_waits_at_collectives_do_not_count_and_loops_are_not_counted_twice(tmp_path):
    events = []
    for _ in range(3):  # steps
        for device, (dot, wait) in enumerate([(10, 90), (30, 50), (20, 70)]):
            events.append(event("dot.1", dot, device))
            events += [event("all-reduce.2", wait, device)] * 2
            events.append(event("while.3", 1000, device))
    found = profile("f", "jit_f", lowered().forecast("h100"), PLACES, trace(tmp_path, events))
    assert found.steps == 3
    rows = {row.name: row.measured for row in found.lines}
    assert np.isclose(rows["model.py:3"], 20e-6)  # the median of devices
    assert np.isclose(rows["model.py:4"], 100e-6)  # the last device waits for none
    assert np.isclose(found.measured, 120e-6)
    with pytest.raises(ValueError, match="has no step of jit_g: run the compiled function inside"):
        profile("g", "jit_g", lowered().forecast("h100"), PLACES, tmp_path)


def test_the_later_half_of_the_steps_counts(tmp_path):
    """A GPU's clock falls under load: its first steps are fast."""
    events = [e for us in (1, 1, 10, 20, 30) for e in (event("dot.1", us, 0),)]
    found = profile("f", "jit_f", lowered().forecast("h100"), PLACES, trace(tmp_path, events))
    assert found.steps == 5
    assert np.isclose(found.measured, 20e-6)


def test_kernels_of_branches_loops_and_command_buffers_count(tmp_path):
    """Instructions whose runs depend on data are more than the others: they do not count steps."""
    places = {**PLACES, "call.4": HloPlace("unknown", "call", 1)}
    places |= {f"fusion.{n}": HloPlace("model.py:9", "fusion", 0) for n in range(3)}
    events = [event("dot.1", 10, 0), event("call.4", 5, 0)] * 2
    events += [event(f"while.3 fusion.{n}", 1, 0) for n in range(3)] * 2 * 7
    trace(tmp_path, events, "/device:GPU:0")
    found = profile("f", "jit_f", lowered().forecast("h100"), places, tmp_path)
    rows = {row.name.split(" (")[0]: row.measured for row in found.lines if row.measured}
    wanted = {"model.py:9": 3 * 7e-6, "model.py:3": 10e-6, "command buffers": 5e-6}
    assert found.steps == 2
    assert rows == pytest.approx(wanted)


def test_a_real_trace_has_what_branches_and_loops_of_unknown_length_do(tmp_path):
    def steps(x, n):
        def tick(x, op):
            x = jax.lax.switch(op, [jnp.sin, lambda x: jnp.tanh(x @ x)], x)
            return jax.lax.fori_loop(0, 8 * op, lambda _, x: jnp.cos(x @ x), x), None

        return jax.lax.scan(tick, x, n)[0]

    arguments = jnp.ones((32, 32)), jnp.array([0, 1, 1, 1, 0])
    program = gshard.jit(steps, devices=jax.devices()[:2]).lower(*arguments)
    compiled = program.compile()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            jax.block_until_ready(compiled(*arguments))
    found = program.measured(tmp_path, "cpu")
    first = steps.__code__.co_firstlineno
    measured = {row.name.rpartition(":")[2] for row in found.lines if row.measured}
    assert found.steps == 3
    assert {str(first + 2), str(first + 3)} <= measured  # the branch, and the loop after it


def test_a_real_trace_has_every_collective_and_the_fit_meets_its_times(tmp_path):
    program = lowered()
    compiled = program.compile()
    arguments = {"a": jnp.ones((32, 64)), "b": jnp.ones((64, 32))}, jnp.ones((64, 32))
    jax.block_until_ready(compiled(*arguments))
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(2):
            jax.block_until_ready(compiled(*arguments))
    found = program.measured(tmp_path)
    assert found.steps == 2
    sent = {row.name: row for row in found.collectives}
    assert {name for name, row in sent.items() if row.forecast} <= {
        name for name, row in sent.items() if row.measured
    }
    assert sum(row.sent for row in found.lines) == sum(c.total_bytes for c in program.collectives)
    assert " measured, " in str(found)
    path = tmp_path / "mine.toml"
    path.write_text(found.hardware_toml())
    assert hardware(path) == replace(found.hardware, flops=dict(found.hardware.flops))


BELIEVED = hardware("h100")


@functools.cache
def program(rows):
    ws = {"a": (4096, 8192), "b": (8192, 4096)}
    given = {n: jax.ShapeDtypeStruct(s, "bfloat16") for n, s in ws.items()}
    x = jax.ShapeDtypeStruct((rows, 4096), "bfloat16")
    return gshard.jit(step, devices=8, hardware=BELIEVED).lower(given, x)


def profiled(folder, rows, true):
    """The profile of a step whose every operator takes the time of the hardware `true`."""
    places, events = {}, []
    for n, t in enumerate(program(rows).forecast(true).values):
        places[f"op.{n}"] = HloPlace(t.source, t.collective.replace("_", "-") or "dot", 1)
        events.append(event(f"op.{n}", round(t.alone_seconds * t.count * 1e6), 0))
    folder.mkdir(exist_ok=True)
    trace(folder, events)
    return profile("f", "jit_f", program(rows).forecast(BELIEVED), places, folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(*[st.floats(0.2, 1.0)] * 3, st.sampled_from([0.0, 2e-5, 2e-4]))
@example(0.31, 0.5, 0.4, 0.0)
@example(0.9, 0.25, 0.8, 2e-4)
def test_hardware_fitted_to_two_batches_meets_the_times_of_others(
    tmp_path, products, memory, links, start
):
    paid = replace(
        BELIEVED.efficiency, products=products, memory=memory, links=links, operator_seconds=start
    )
    true = BELIEVED.replace(efficiency=paid)
    small, large = (profiled(tmp_path / str(rows), rows, true) for rows in (8192, 65536))
    fitted = small.fitted_with(large).hardware
    # 4096 rows have another plan, and waits for the links, which the fit does not tell from bytes.
    for rows, most in ((4096, 0.05), (16384, 0.02), (32768, 0.02), (131072, 0.02)):
        want = program(rows).forecast(true).serial_seconds
        assert abs(program(rows).forecast(fitted).serial_seconds / want - 1) < most


def test_one_batch_meets_its_own_time_and_two_tell_starts_from_work(tmp_path):
    paid = replace(BELIEVED.efficiency, products=0.4, memory=0.6, operator_seconds=3e-4)
    true = BELIEVED.replace(efficiency=paid)
    one = profiled(tmp_path / "one", 16384, true)
    assert abs(program(16384).forecast(one.hardware).serial_seconds / one.measured - 1) < 0.01
    both = one.fitted_with(profiled(tmp_path / "two", 131072, true)).hardware.efficiency
    assert np.isclose(both.operator_seconds, 3e-4, rtol=0.1)
    assert np.isclose(both.products, 0.4, rtol=0.02)
    assert "samples" not in one.as_dict()


# Microseconds of a step on one H200: of each line by its words, and of the shortest kernel.
ON_H200 = {
    2: {"wide =": 123, "scale =": 70, "return (wide": 248, "q, k, v": 3248, "is_causal": 6685,
        "silu": 15128, "jnp.mean(y": 24, "w - 1e-3": 477, "": 235, "shortest": 1},
    8: {"wide =": 481, "scale =": 232, "return (wide": 629, "q, k, v": 12423, "is_causal": 25507,
        "silu": 56876, "jnp.mean(y": 93, "w - 1e-3": 750, "": 545, "shortest": 1},
}  # fmt: skip
UNSEEN = {1: 13.35e-3, 4: 49.61e-3, 12: 149.19e-3}  # seconds


def test_the_fit_to_two_batches_on_an_h200_meets_the_unseen_ones(tmp_path, monkeypatch):
    """Larger batches had a higher rate there: constants of a step must not make up for it."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    text = inspect.getsource(calibration).splitlines()

    def forecast(rows, machine="h200"):
        given = calibration.arguments((rows, 2048))
        return gshard.jit(calibration.step, devices=1).lower(*given).forecast(machine)

    def place(words):
        found = [n for n, line in enumerate(text, 1) if words and words in line]
        return HloPlace(f"benchmarks/calibration.py:{found[0]}" if found else "unknown", "dot", 1)

    def of(rows):
        places = {f"op.{n}": place(words) for n, words in enumerate(ON_H200[rows])}
        times = zip(places, ON_H200[rows].values(), strict=True)
        folder = tmp_path / str(rows)
        folder.mkdir()
        trace(folder, [event(op, us, 0) for op, us in times], "/device:GPU:0")
        return profile("step", "jit_f", forecast(rows), places, folder)

    fitted = of(2).fitted_with(of(8)).hardware
    assert fitted.efficiency.operator_seconds < 2e-6
    for rows, seconds in UNSEEN.items():
        assert forecast(rows, fitted).serial_seconds == pytest.approx(seconds, rel=0.03)
