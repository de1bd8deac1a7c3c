"""Runs that share a folder: whose files are whose, and whether their processes still run."""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from gshard import _jax, recording
from gshard.planning.emission import record
from gshard.recording import GONE, RUNNING, by_run, read, standstill
from gshard.recording.files import Owner
from tests.recording.recorders import SUFFIXES, entered, own

ROOT = Path(__file__).parents[2]


class TestRunsThatShareAFolder:
    def test_healthy_runs_do_not_accuse_each_other(self, tmp_path):
        for run, count in (("a", 9), ("b", 2)):
            for index in range(2):
                entered(recording.Recorder(tmp_path, index, run), count)
        assert standstill(read(tmp_path)).culprits  # as one run they would
        runs = by_run(read(tmp_path))
        assert {run: len(positions) for run, positions in runs.items()} == {"a": 2, "b": 2}
        assert not any(standstill(positions).culprits for positions in runs.values())
        shown = [sys.executable, "-m", "gshard.recording", tmp_path]
        out = subprocess.run(shown, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert [line.split()[:3] for line in out.splitlines()] == [
            ["run", "a:", "all"],
            ["run", "b:", "all"],
        ]

    def test_a_new_run_leaves_the_files_of_one_that_lives(self, tmp_path):
        entered(recording.Recorder(tmp_path, 0, "a"), 2)
        gone = Owner("a", 1, socket.gethostname(), 2**22 + 1, 5)
        dead = Owner("c", 0, socket.gethostname(), 2**22 + 1, 5)
        elsewhere = Owner("d", 0, "another-host", 2**22 + 1, 5)
        for owner in (gone, dead, elsewhere):
            for suffix in SUFFIXES:
                (tmp_path / f"{owner}{suffix}").write_bytes(b"")
        entered(recording.Recorder(tmp_path, 0, "b"), 2)
        assert [(p.run, p.process, p.state) for p in read(tmp_path)] == [
            ("a", 0, RUNNING),
            ("a", 1, GONE),
            ("b", 0, RUNNING),
            ("d", 0, RUNNING),
        ]

    def test_a_number_that_another_process_has_by_now(self, tmp_path):
        entered(recording.Recorder(tmp_path, 0), 2)
        now = own()
        before = Owner("0", 1, now.host, now.pid, now.begun - 1)
        for suffix in SUFFIXES:
            (tmp_path / f"{before}{suffix}").write_bytes((tmp_path / f"{now}{suffix}").read_bytes())
        assert [p.state for p in read(tmp_path)] == [RUNNING, GONE]

    def test_processes_of_one_run_share_its_name(self):
        """What the coordination service of JAX has kept first is the name for all."""
        kept = {}

        class Client:
            def key_value_set(self, key, value):
                if key in kept:
                    raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
                kept[key] = value

            def blocking_key_value_get(self, key, milliseconds):
                return kept[key]

        with pytest.MonkeyPatch.context() as patch:
            assert record.run_id() != record.run_id()
            patch.setattr(_jax.processes, "client", Client())
            assert record.run_id() == record.run_id()
