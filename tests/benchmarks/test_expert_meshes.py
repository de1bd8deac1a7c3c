"""The shapes of large Mixtures of Experts, on a mesh of experts and one of weights."""

import pytest

import gshard
from benchmarks import expert_meshes
from benchmarks.expert_meshes import QWEN, Run


@pytest.mark.parametrize("exchange", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bytes_are_at_most_those_by_hand(exchange):
    """Of the cheaper program: with so many tokens the experts move, unless tokens are told to."""
    run = Run(QWEN._replace(layers=2), "b200", 16, 8, exchange=exchange)
    weights, batch = expert_meshes.shapes(run)
    step = expert_meshes.step_of(run)
    low = gshard.jit(step, devices=16, hardware="b200").lower(weights, batch)
    tokens, experts = expert_meshes.by_hand(run, weights)
    assert experts < tokens
    sent = sum(c.total_bytes for c in low.collectives)
    assert sent <= 1.05 * (tokens if exchange else experts)
    assert low.forecast("b200").fits
