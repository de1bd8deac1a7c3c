"""The family's forecasts: what is refused and what would work; small members end to end."""

import json

import pytest
from typer.testing import CliRunner

from gshard.cli import app, main
from gshard.forecast.hardware import several
from gshard.models.family import PARTS, fitting, memory_parts, part_of, plan


def test_a_batch_that_does_not_divide_names_the_nearest():
    with pytest.raises(ValueError, match=r"4,000,000 tokens.*multiple of 1,048,576.*4,194,304"):
        plan("moe_2048e_36l", batch_tokens=4_000_000)


def test_devices_must_divide_the_experts():
    with pytest.raises(ValueError, match=r"devices is 100.*must divide 128.*nearest.* 128"):
        plan("moe_128e_12l", devices=100)


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(ValueError, match=r"'moe_2048e_24l'; known are .*did you mean 'moe_2048e"):
        plan("moe_2048e_24l")


@pytest.fixture(scope="module")
def tiny():
    return plan("tiny", devices=8, batch_tokens=512)


@pytest.mark.slow
def test_every_operator_of_a_step_has_a_part(tiny):
    found = tiny.forecast("tpu-v3")
    parts = found.by(part_of)
    assert set(parts) <= set(PARTS)
    assert {"MoE feed-forward", "dispatch and combine", "transformer layers"} <= set(parts)
    assert sum(p.seconds for p in parts.values()) == pytest.approx(found.step_seconds)
    assert sum(p.sent for p in parts.values()) == found.sent_bytes
    assert found.sent_bytes == sum(c.total_bytes for c in tiny.lowered("tpu-v3").collectives)


@pytest.mark.slow
def test_parts_are_found_by_the_scopes_that_the_model_names(tiny):
    """Whatever its files are called; scopes of a loop's caller count for its body."""
    found = {}
    for operator in tiny.forecast("tpu-v3").operators:
        found.setdefault(part_of(operator), set()).add(operator.function)
    assert {"Experts.__call__"} <= found["MoE feed-forward"]
    assert {"route", "_queue", "_metrics"} <= found["gating"]
    assert "Embedding.__call__" in found["embeddings and loss"]
    assert not found["transformer layers"] & {"route", "Experts.__call__", "train_step"}


@pytest.mark.slow
def test_memory_is_told_by_what_it_is_for(tiny):
    found = tiny.forecast("tpu-v3")
    parts = memory_parts(tiny, found)
    assert sum(parts.values()) == found.memory_bytes
    assert all(count >= 0 for count in parts.values())
    assert parts["weights"] < 4 * tiny.model.weights  # float32, the experts split
    assert parts["gradients"] > 0


@pytest.mark.slow
def test_a_model_that_cannot_fit_says_why(tmp_path, capsys):
    path = tmp_path / "small.toml"
    path.write_text(
        'name = "small"\nmemory = 100_000\nmemory_bandwidth = 1e9\n[flops]\nfloat32 = 1e9\n'
        '[network]\nkind = "switch"\ninside_bandwidth = 1e9\noutside_bandwidth = 1e9\n'
    )
    with pytest.raises(SystemExit):
        main(["forecast", "tiny", "--batch-tokens", "512", "--hardware", str(path)])
    said = capsys.readouterr().err
    assert "even with rematerialization, which has 100 KB: weights and optimizer state al" in said
    assert " GB" not in said


@pytest.mark.slow
def test_the_command_prints_json_for_programs(tiny):
    done = CliRunner().invoke(app, ["forecast", "tiny", "--batch-tokens", "512", "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    for key in ("steps_per_second", "step_seconds", "memory_bytes", "sent_bytes", "parts"):
        assert said[key]


def test_a_mistake_is_one_line(capsys):
    with pytest.raises(SystemExit):
        main(["forecast", "tiny", "--hardware", "h1000"])
    assert "known are a100-40, a100-80" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["forecast", "tiny", "--remat", "full"], "remat is 'full'; allowed are"),
        (["forecast", "tiny", "--dispatch", "sort"], "dispatch is 'sort'; allowed are 'einsum'"),
        (["explain", "jax.numpy:tanh", "q32[8]"], "allowed are f16, f32"),
        (["explain", "jax.numpy:matmul", "f32[8,4]", "f32[5,4]"], "got (4,) and (5,)"),
        (["explain", "jax.numpy:none", "f32[8]"], "cannot be imported"),
    ],
)
def test_mistakes_of_all_kinds_are_one_line(command, said, capsys):
    with pytest.raises(SystemExit):
        main(command)
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_what_fits_is_ranked():
    devices, machine = several("8 x h100")
    found = fitting(devices, machine.replace(memory=2_000_000))
    assert [f.plan.model.name for f in found] == ["tiny"] * len(found)
    assert found
    assert all(f.forecast.fits for f in found)
