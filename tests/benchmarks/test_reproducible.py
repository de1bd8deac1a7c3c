"""The benchmark of reproducible programs: steps of a recipe, on some devices and on one."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import reproducible
from benchmarks.reproducible_cases import case_of


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("devices", [2, 3, 8])
def test_a_recipe_has_the_same_bits_as_on_one_device(devices, dtype):
    found = reproducible.compared(case_of("data parallel, Adam", dtype, devices), 3, {})
    assert found["bits"] == "equal"


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
    assert [(r["devices"], r["processes"], r["bits"]) for r in found] == [
        (1, 1, "equal"), (8, 1, "equal"), (8, 4, "equal"),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["reproducible", str(rows), "--show"])
    capsys.readouterr()
    reproducible.main()
    assert "3 of 3 rows equal" in capsys.readouterr().out


def test_rows_of_a_program_with_a_mesh_of_its_own():
    found = reproducible.rows("HSDP", ["float32"], [1, 2, 8], processes=True)
    assert [(r.devices, r.processes) for r in found] == [(1, 1), (8, 1), (8, 4)]


def test_a_digest_tells_bits_apart():
    x = jnp.float32([0.0, 1.0])
    assert reproducible.digest((x, jax.random.key(0))) == reproducible.digest(
        (x, jax.random.key(0))
    )
    assert reproducible.digest(x) != reproducible.digest(jnp.float32([-0.0, 1.0]))
