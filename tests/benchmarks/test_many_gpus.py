"""The benchmark of many GPUs: small, on virtual CPUs; and what is read off a schedule."""

import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks import many_gpus
from benchmarks.gpu import many
from benchmarks.gpu.schedule import exposed_gb, kernels, scheduled

TEXT = """HloModule m, is_scheduled=true

ENTRY %main (p: bf16[8,64]) -> bf16[8,64] {
  %a = bf16[8,64]{1,0} all-to-all(%p), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}
  %s.1 = ((bf16[8,64]{1,0}), bf16[8,64]{1,0}) all-to-all-start(%a), replica_groups={{0,1,2,3}}
  %f = bf16[8,64]{1,0} fusion(%p), kind=kLoop, calls=%fused
  %d.1 = bf16[8,64]{1,0} all-to-all-done(%s.1), metadata={op_name="x"}
  %s.2 = ((f32[16]{0}), f32[16]{0}) all-reduce-start(%f), replica_groups={{0,1,2,3,4,5,6,7}}
  %y = (bf16[8,64]{1,0}, s8[4]{0}) custom-call(%f, %p), custom_call_target="__cublas$lt$matmul"
  %d.2 = f32[16]{0} all-reduce-done(%s.2)
  %k = bf16[8,64]{1,0} custom-call(%f), custom_call_target="__gpu$xla.gpu.triton"
}
"""


def test_a_collective_is_hidden_if_a_product_runs_beside_it():
    found = scheduled(TEXT, 8)
    assert [(c.kind, c.hidden) for c in found] == [
        ("all_to_all", False),  # without a start: nothing runs beside it
        ("all_to_all", False),  # beside a pointwise kernel
        ("all_reduce", True),
    ]
    size = 8 * 64 * 2
    assert exposed_gb(TEXT, 8, "all_to_all") == pytest.approx(2 * [size * (7 / 8 + 3 / 4) / 1e9])
    assert exposed_gb(TEXT, 8, "all_reduce")[1] == 0
    assert kernels(TEXT) == 1


FUSED = """HloModule m, is_scheduled=true

%address (p0: bf16[8,64]) -> bf16[2,64] {
  %s = bf16[2,64]{1,0} slice(%p0), slice={[0:2], [0:64]}
  ROOT %y = bf16[2,64]{1,0} custom-call(%s, %s), custom_call_target="__cublas$gemm"
}

ENTRY %main (p: bf16[8,64]) -> bf16[8,64] {
  %s.1 = ((bf16[8,64]{1,0}), bf16[8,64]{1,0}) all-to-all-start(%p), replica_groups={{0,1,2,3}}
  %f = bf16[2,64]{1,0} fusion(%p), kind=kCustom, calls=%address, backend_config={}
  %d.1 = bf16[8,64]{1,0} all-to-all-done(%s.1), metadata={op_name="x"}
}
"""


def test_a_product_of_slices_is_one_too():
    """XLA wraps a product whose operands are slices in a fusion, which reads them in place."""
    assert [c.hidden for c in scheduled(FUSED, 8)] == [True]


TINY = {
    "model_dim": 64,
    "hidden_dim": 64,
    "heads": 2,
    "key_dim": 16,
    "value_dim": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "source_vocab": 128,
    "target_vocab": 128,
}


def sends_float32():
    """Whether XLA has the CPUs of this machine exchange bfloat16 as float32."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    exchange = jax.shard_map(
        lambda x: jax.lax.all_to_all(x, "x", 0, 0, tiled=True),
        mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"),
    )  # fmt: skip
    x = jax.ShapeDtypeStruct((64, 8), jnp.bfloat16)
    text = jax.jit(exchange).lower(x).compile().as_text()
    return re.search(r"f32\[[\d,]*\]\S* all-to-all", text) is not None


@pytest.mark.slow
@pytest.mark.parametrize("products", ["dtype", "float8"])
def test_a_row_runs_and_is_forecast(products):
    case = many_gpus.row(
        "moe_128e_12l", 8, 8, 256, dims=TINY, products=products, length=32, steps=1
    )
    case.update(many.measure(case))
    assert case["sent_gb"] >= case["exposed_gb"] > 0
    assert case["all_to_all_gb"] > 0
    case.update(many.forecast(case))
    assert case["forecast_ms"] > 0
    wider = 2 if sends_float32() else 1
    assert wider * case["forecast_all_to_all_gb"] == pytest.approx(case["all_to_all_gb"])
    case["peak_gb"] = 1.0  # CPUs do not count it
    assert many_gpus.show([case]).count("\n| moe_128e_12l") == 2


@pytest.mark.slow
def test_a_row_of_xla_s_partitioner_runs():
    more = {"dims": TINY, "length": 32, "steps": 1, "partitioner": "xla"}
    found = many.measure(many_gpus.row("moe_128e_12l", 8, 8, 256, **more))
    assert found["sent_gb"] >= found["exposed_gb"] > 0
    assert "text" not in found  # there is no program of ours to compare


def test_rows_are_of_the_paper_s_models_and_a_failure_is_a_line():
    cases = [case for name in ("large", "shallow", "deep") for case in many_gpus.CASES[name]]
    models = {case["model"] for case in cases if case["experts"] == experts_of(case["model"])}
    assert len(models) == 6
    failed = {**many_gpus.CASES["xla"][0], "error": "Traceback\nNotImplementedError: why"}
    assert "NotImplementedError: why" in many_gpus.show([failed])


def experts_of(model):
    return many.FAMILY[model].config.experts


FORECAST = {
    "forecast_ms": 190.0,
    "forecast_share": 0.5,
    "forecast_links_ms": 80.0,
    "forecast_sent_gb": 5.37,
    "forecast_all_to_all_gb": 4.0,
    "forecast_gb": 44.0,
}


def test_a_row_that_was_only_forecast_is_in_a_table_of_its_own():
    forecast, failed = many_gpus.CASES["large"][0] | FORECAST, many_gpus.CASES["large"][1]
    tables = many_gpus.show([forecast, failed | {"error": "longer than 110 s"}]).split("\n\n")
    assert ["ms, forecast" in table for table in tables] == [False, True]
    assert "5.37" not in tables[0]
    assert "5.37" in tables[1]


def test_measurements_are_added_row_by_row():
    case, other = many_gpus.CASES["grow"][0], many_gpus.CASES["grow"][1]
    measured, failed = {"ms": 2.0}, {"error": "out of memory"}
    old = [case | {"ms": 1.0, "text": "old"} | FORECAST, other | {"ms": 3.0}]
    assert many_gpus.merged(old, [case | measured, other | failed]) == [
        case | measured | FORECAST,  # nothing of the old measurement remains
        other | {"ms": 3.0},
    ]
    assert many_gpus.merged([case | failed], [case | measured]) == [case | measured]
    assert many_gpus.merged([case | FORECAST], [case | failed]) == [case | FORECAST | failed]
    eight_bits = case | {"products": "float8"}
    assert len(many_gpus.merged(old, [eight_bits | measured])) == 3
