"""`make test-matrix` finds the newest release of JAX by itself, and asks for a raised bound."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from tools import matrix


@pytest.fixture
def index(tmp_path, monkeypatch):
    """pip's index is a folder; the function adds a release of JAX to it."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")

    def add(version, python):
        name = f"jax-{version}"
        with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
            described = f"Metadata-Version: 2.1\nName: jax\nVersion: {version}\n"
            wheel.writestr(f"{name}.dist-info/METADATA", f"{described}Requires-Python: {python}\n")
            tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            wheel.writestr(f"{name}.dist-info/WHEEL", tags)
            wheel.writestr(f"{name}.dist-info/RECORD", "")

    return add


@pytest.fixture
def tested(monkeypatch):
    """Environments and pytest are not started: the releases for which they would have been."""
    found = []
    run = subprocess.run

    def environment(release, python):
        found.append(release)
        return Path("python")

    def started(command, **how):
        passed = subprocess.CompletedProcess(command, 0)
        return passed if command[0] == "python" else run(command, **how)

    monkeypatch.setattr(matrix, "environment", environment)
    monkeypatch.setattr(subprocess, "run", started)
    monkeypatch.setattr(matrix, "python_for", lambda oldest: "python" if oldest < (3, 15) else None)
    return found


def main(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["matrix", *arguments])
    with pytest.raises(SystemExit) as ended:
        matrix.main()
    return ended.value.code


def test_the_newest_release_is_part_of_the_matrix(index, tested, monkeypatch, capsys):
    index("0.12.0.1", ">=3.12")
    index("0.9.2", ">=3.11")
    assert matrix.newest() == ("0.12", (3, 12))
    assert main(monkeypatch) == 0
    assert tested == ["0.10", "0.11", "0.12"]
    index("0.13.0", ">=3.14")  # this Python may be too old for it
    index("0.14.0rc1", ">=3.14")
    assert matrix.newest() == ("0.13", (3, 14))
    assert main(monkeypatch) == 1
    assert tested[3:] == ["0.10", "0.11", "0.12", "0.13"]
    assert "JAX 0.13 is out: raise the upper bound in pyproject.toml" in capsys.readouterr().out


def test_a_release_that_no_python_here_runs_is_named_too(index, tested, monkeypatch, capsys):
    index("0.13.0", ">=3.15")
    assert main(monkeypatch, "--jax", "newest") == 1
    assert tested == []
    said = capsys.readouterr().out
    assert "raise the upper bound" in said
    assert "JAX 0.13: SKIPPED, it needs Python 3.15 or newer" in said


def test_one_release_is_tested_without_an_index(index, tested, monkeypatch):
    assert main(monkeypatch, "--jax", "0.11") == 0
    assert tested == ["0.11"]
    assert "pip finds no release of JAX" in main(monkeypatch)
