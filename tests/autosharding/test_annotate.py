"""Few annotations: what propagation finds is priced by the model, and deviations are annotated."""

from __future__ import annotations

import dataclasses

import pytest

import gshard
from benchmarks.auto_cases import few_tokens, many_tokens
from gshard.autosharding.annotate import AnnotationSearch, fewest, slowest
from gshard.autosharding.auto import auto
from gshard.autosharding.budget import Clock
from gshard.forecast.hardware import hardware
from tests.autosharding.test_evaluate import attend, chosen, struct

H100 = hardware("h100")
MESH = (8,)


@pytest.mark.slow
@pytest.mark.parametrize("case", [many_tokens, few_tokens])
def test_a_handful_of_annotations_is_as_good_as_all(case):
    program = case(False)
    evaluator, choice = chosen.__wrapped__(program.fn, *program.arguments)
    full = AnnotationSearch(evaluator, choice).everything()
    best = AnnotationSearch(evaluator, choice).few(Clock(60.0, counted=True))
    assert best is not None
    # As `auto` does: by the model each saves something, by the forecast some may be removed.
    best = fewest(best, 1.01 * full.seconds, evaluator, lambda: True)
    assert 0 < len(best.inside) <= 5 < len(full.inside) / 4
    assert best.seconds <= 1.01 * full.seconds
    # Each is needed: without it propagation would depart from the answer.
    for annotation in best.inside:
        assert annotation.saves > 0
    without = dataclasses.replace(best, inside=())
    jitted = gshard.jit(program.fn, devices=8, hardware="h100", annotations=without)
    assert jitted.lower(*program.arguments).forecast().serial_seconds > 1.01 * best.seconds


@pytest.mark.slow
def test_a_memory_limit_is_kept_with_few_annotations():
    """Propagation alone leaves the scores replicated, which is too much."""
    layout = auto(
        attend,
        struct(8192, 64),
        *[struct(64, 64)] * 3,
        devices=8,
        hardware="h100",
        memory="150 MB",
        seconds=5.0,
    )
    assert layout.memory_bytes <= 150e6
    assert len(layout.inside) <= 2


def test_fewer_annotations_keep_a_gap_that_is_small():
    assert slowest(1.0, 0.5) == pytest.approx(1.01)  # the gap is large already
    assert slowest(1.0, 0.995) == pytest.approx(0.995 / 0.99)
    assert slowest(1.0, 1.0) == pytest.approx(1 / 0.99, rel=2e-4)
