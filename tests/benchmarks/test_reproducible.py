"""The benchmark of reproducible programs: steps of a recipe, on some devices and on one."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import reproducible
from benchmarks.reproducible_cases import case_of
from benchmarks.reproducible_table import verdict


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("devices", [2, 3, 8])
def test_a_recipe_has_the_same_bits_as_on_one_device(devices, dtype):
    found = [
        reproducible.bits_and_bytes(case_of("data parallel, Adam", dtype, n), 3)["bits"]
        for n in (1, devices)
    ]
    assert found[0] == found[1]


@pytest.mark.slow
def test_rows_are_measured_in_processes_once_and_shown(tmp_path, monkeypatch, capsys):
    """The second call finds all rows in the file."""
    rows = tmp_path / "rows.json"
    options = ["--only", "parallel block", "--devices", "1,8", "--types", "float32"]
    arguments = ["reproducible", str(rows), *options, "--steps", "2", "--jobs", "2"]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", arguments)
        reproducible.main()
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert sorted((r["devices"], r["processes"]) for r in found) == [(1, 1), (8, 1), (8, 4)]
    assert len({r["bits"] for r in found}) == 1
    monkeypatch.setattr(sys, "argv", ["reproducible", str(rows), "--show"])
    capsys.readouterr()
    reproducible.main()
    assert "2 of 2 rows equal" in capsys.readouterr().out


def test_rows_of_a_few_programs_come_first():
    found = reproducible.rows("data parallel", ["float32"], [1, 8], processes=True)
    assert [(r.program, r.devices, r.processes) for r in found] == [
        ("data parallel, Adam", 1, 1), ("data parallel, Adam", 8, 1), ("data parallel, Adam", 8, 4),
        ("data parallel, gradient accumulation", 1, 1),
        ("data parallel, gradient accumulation", 8, 1),
        ("data parallel, gradient accumulation", 8, 4),
    ]  # fmt: skip


def test_a_transform_has_no_row_of_a_narrow_type():
    found = reproducible.rows("Fourier", ["float32", "bfloat16"], [1], processes=False)
    assert [r.type for r in found] == ["float32"]


def test_large_programs_are_those_of_the_transformer():
    """The other recipes have sizes of their own."""
    assert {"MoE Transformer", "FSDP"} < set(reproducible.names("large"))
    assert not {"pipeline, 8 stages", "QLoRA, 8 bits under FSDP"} & set(reproducible.names("large"))


def test_rows_of_before_are_small(tmp_path):
    (tmp_path / "rows.json").write_text('{"program": "FSDP"}\n')
    assert reproducible.kept_rows(tmp_path / "rows.json") == [{"program": "FSDP", "size": "small"}]


def test_a_row_is_compared_with_that_of_one_device():
    """Of the same program, type and number of steps."""
    row = {"program": "FSDP", "type": "float32", "devices": 3, "processes": 1, "timed": False}
    row |= {"steps": 100, "bits": "ab"}
    others = [row | {"devices": 1, "bits": "cd", "steps": 2}]
    assert verdict(row, others) == "ab"
    assert verdict(row, [*others, row | {"devices": 1}]) == "equal"
    assert verdict(row, [*others, row | {"devices": 1, "bits": "ac"}]) == "DIFFERENT"


def test_a_digest_tells_bits_apart():
    x = jnp.float32([0.0, 1.0])
    assert reproducible.digest((x, jax.random.key(0))) == reproducible.digest(
        (x, jax.random.key(0))
    )
    assert reproducible.digest(x) != reproducible.digest(jnp.float32([-0.0, 1.0]))
