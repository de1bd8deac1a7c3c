"""Machines are data: every file reads, mistakes say what would work."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from gshard.forecast import forecast, measure
from gshard.forecast.hardware import _MACHINES, Hardware, hardware, known, present, read, several


@pytest.mark.parametrize("name", known())
def test_every_machine_reads_and_joins_devices(name):
    machine = hardware(name)
    assert machine.name == name
    assert machine.rate("float32") >= machine.rate("float32", exact=True) > 0
    for devices in (1, 2, 8, 64):
        assert machine.topology(devices).devices >= devices


def test_the_named_machines_are_there():
    wanted = {
        "tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7", "a100-40", "a100-80", "h100",
        "h200", "b200", "gb200", "l4", "l40s", "mi300x", "cpu",
    }  # fmt: skip
    assert wanted <= set(known())


def test_an_unknown_name_says_what_is_known_and_the_nearest():
    with pytest.raises(ValueError, match=r"'h-100'.*tpu-v3.*did you mean 'h100'"):
        hardware("h-100")
    with pytest.raises(ValueError, match=r"'a100'.*did you mean 'a100-40' or 'a100-80'\?"):
        hardware("a100")


@pytest.mark.parametrize(
    ("spelt", "name"),
    [
        ("H100", "h100"),
        ("h100-sxm", "h100"),
        ("a100-80gb", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("TPU v5 lite", "tpu-v5e"),
        ("v6e", "tpu-v6e"),
    ],
)
def test_names_as_people_write_them(spelt, name):
    assert several(f"8x{spelt}") == (8, hardware(name))


@pytest.mark.parametrize("given", ["h100", "8", "x h100", "0xh100", f"{'9' * 5000}xh100"])
def test_devices_are_a_number_and_a_name(given):
    with pytest.raises(ValueError, match="write a number and a name, as in 8xh100"):
        several(given)


def test_a_user_adds_a_machine_in_a_few_lines(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nmemory = 1_000\nmemory_bandwidth = 10.0\n[flops]\nfloat32 = 5.0\n'
        '[network]\nkind = "switch"\ninside_bandwidth = 1.0\n'
    )
    machine = hardware(path)
    assert machine.memory == 1_000
    assert machine.rate("int8") == 5.0
    assert isinstance(machine, Hardware)
    assert hardware(machine) is machine


@pytest.mark.parametrize(
    ("line", "said"), [("memroy = 1", "memroy is not one of"), ("", "memory is missing")]
)
def test_a_mistake_in_a_file_is_named(tmp_path, line, said):
    path = tmp_path / "mine.toml"
    path.write_text(
        f'name = "mine"\n{line}\nmemory_bandwidth = 1.0\n[flops]\nfloat32 = 1.0\n'
        '[network]\nkind = "switch"\n'
    )
    with pytest.raises(ValueError, match=said):
        read(path)


H200 = (_MACHINES / "h200.toml").read_text()
NUMBERS = [line for line in H200.splitlines() if re.match(r"\w+ = [0-9]", line)]


@pytest.mark.parametrize("value", ["-1", "nan", "inf", '"\\u001b"', "[]", "{}", "true", "1" * 400])
def test_a_value_that_no_hardware_has_is_one_line(tmp_path, value):
    path = tmp_path / "mine.toml"
    for line in NUMBERS:
        path.write_text(H200.replace(line, f"{line.partition(' ')[0]} = {value}"))
        with pytest.raises(ValueError, match=r"^\S+mine.toml: .* has to be a .*number .* 0$"):
            read(path)


@pytest.mark.parametrize(
    "text",
    [
        b"\xff", b"hello", b"x = " + b"[" * 20_000, None, b"network = 3", b"flops = 3",
        re.sub(r"(?m)^float32 = .*", "", H200).encode(), H200.replace("switch", "ring").encode(),
        re.sub("kind = .*", 'kind = "torus"\ndims = 1000000', H200).encode(),
    ],
)  # fmt: skip
def test_whatever_a_file_holds_it_is_one_line(tmp_path, text):
    path = tmp_path / "mine.toml"
    if text is None:
        os.mkfifo(path)
    else:
        path.write_bytes(text)
    with pytest.raises(ValueError, match=r"^\S+mine.toml.* .+$"):
        read(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        hardware(tmp_path / "none.toml")


def test_without_an_accelerator_the_devices_are_the_cpu():
    assert present().name == "cpu"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("TPU v6 lite", "tpu-v6e"),
        ("TPU7x", "tpu-v7"),
        ("TPU v3", "tpu-v3"),
        ("TPU v4", "tpu-v4"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5p", "tpu-v5p"),
        ("TPU v5", "tpu-v5p"),
        ("cpu", "cpu"),
    ],
)
def test_the_default_is_what_jax_says_the_devices_are(kind, name, monkeypatch):
    device = type("Device", (), {"device_kind": kind})()
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert present().name == name


def test_measured_hardware_can_be_read_on_cpus_and_gpus(monkeypatch, tmp_path):
    for name in ("_products", "_bandwidth", "_updates", "_exchange"):
        monkeypatch.setattr(measure, name, lambda *given: (1e9, jax.devices))
    monkeypatch.setattr(measure, "_operator", lambda: (1.0, jax.devices))
    path = tmp_path / "mine.toml"
    path.write_text(measure.measured(1))
    assert hardware(path).compiler == "cpu"
    assert hardware(path).network.single_step

    class Gpu:
        platform, device_kind = "gpu", "NVIDIA H200"

        def memory_stats(self):
            return {"bytes_limit": 10**11}

    monkeypatch.setattr(jax, "devices", lambda: [Gpu()])
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax, "block_until_ready", lambda made: made)
    path.write_text(measure.measured(1))
    found = hardware(path)
    assert (found.name, found.compiler, found.memory) == ("NVIDIA H200", "gpu", 10**11)
    assert found.network == hardware("h200").network, "one GPU has nobody to send to"


def test_rows_written_in_place_take_the_time_of_one_core():
    """XLA for CPUs has no threads for them; what is read from such a buffer has all."""

    def fn(buffer, row):
        buffer = jax.lax.dynamic_update_slice_in_dim(buffer, jnp.sin(row), 2, 0)
        return buffer, jnp.sum(jax.lax.dynamic_slice_in_dim(buffer, 1, 2))

    jaxpr = jax.make_jaxpr(fn)(jnp.zeros((8, 4096)), jnp.zeros((1, 4096))).jaxpr
    cpu = hardware("cpu")
    slow = cpu.replace(efficiency=replace(cpu.efficiency, updates=0.25))
    pairs = zip(*(forecast(jaxpr, 1, each).operators for each in (cpu, slow)), strict=True)
    longer = {one.name: other.memory_seconds / one.memory_seconds for one, other in pairs}
    assert longer.pop("dynamic_update_slice") == pytest.approx(4)
    assert set(longer.values()) == {1.0}


def test_help_of_the_measurement_measures_nothing():
    command = [sys.executable, "-m", "gshard.forecast.measure", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "usage:" in shown
    assert "memory_bandwidth" not in shown
