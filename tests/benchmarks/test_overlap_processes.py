"""Overlap between processes: the benchmark compares values and bytes before it times anything."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_two_processes_agree_with_and_without_pieces():
    command = [sys.executable, "-m", "benchmarks.overlap_processes", "--small", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| MoE layer, value and gradient |" in done.stdout
    assert "| 2 feed-forward blocks, tensor parallel |" in done.stdout
