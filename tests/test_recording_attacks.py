"""Recording where others have been: it never ends a run, writes through a link, or accuses."""

import contextlib
import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard import _jax, recording
from gshard.mt.launch import whereabouts
from gshard.planning.emission import record
from gshard.recording import GONE, RUNNING, by_run, files, read, standstill
from gshard.recording.files import Owner
from tests.strangers import belongs_to_another

ROOT = Path(__file__).parents[1]
TABLE = [{"kind": "all_reduce", "source": "train.py:9", "bytes": 4}] * 3
SUFFIXES = (".position", ".programs", ".ending")


def entered(recorder, count):
    program = recorder.program("step", TABLE)
    for number in range(count):
        recorder.enter(0, program, number % 3)
    return recorder


def own(run="0", index=0):
    """The name of this process's files."""
    return Owner(run, index, socket.gethostname(), os.getpid(), files.looked_at(os.getpid())[1])


def refused(place, capfd):
    """Whether this process does not record in a folder, says so in one line, and goes on."""
    before = {p: p.lstat() for p in place.iterdir()} if place.is_dir() else {}
    entered(recording.Recorder(place, 0), 5)
    after = {p: p.lstat() for p in place.iterdir()} if place.is_dir() else {}
    assert before == after
    err = capfd.readouterr().err
    assert err.startswith("gshard: positions are not recorded: ")
    assert err.count("\n") == 1
    return err


class TestFoldersOfOthers:
    def test_the_default_is_a_folder_of_this_user(self, monkeypatch, tmp_path):
        monkeypatch.setenv(recording.VARIABLE, "1")
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        place = recording.folder()
        assert place == tmp_path / f"gshard-record-{os.geteuid()}"
        entered(recording.Recorder(place, 0), 2)
        assert place.stat().st_mode & 0o777 == 0o700
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in place.iterdir())

    def test_one_that_another_user_made(self, monkeypatch, tmp_path, capfd):
        place = tmp_path / "record"
        place.mkdir(mode=0o700)
        belongs_to_another(place, monkeypatch)
        assert "belongs to another user" in refused(place, capfd)

    @pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
    def test_one_that_others_can_write_to(self, mode, tmp_path, capfd):
        place = tmp_path / "record"
        place.mkdir()
        place.chmod(mode)
        assert "chmod go-w" in refused(place, capfd)

    def test_a_link_in_its_place(self, tmp_path, capfd):
        (tmp_path / "victim").mkdir(mode=0o700)
        (tmp_path / "record").symlink_to(tmp_path / "victim")
        refused(tmp_path / "record", capfd)
        assert list((tmp_path / "victim").iterdir()) == []

    @pytest.mark.parametrize("suffix", SUFFIXES)
    @pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder", "file"])
    def test_something_planted_as_one_of_its_files(self, suffix, kind, tmp_path, capfd):
        place, victim = tmp_path / "record", tmp_path / "victim"
        place.mkdir(mode=0o700)
        if kind != "dangling":
            victim.write_text("precious")
        planted = place / f"{own()}{suffix}"
        {
            "link": lambda: planted.symlink_to(victim),
            "dangling": lambda: planted.symlink_to(victim),
            "pipe": lambda: os.mkfifo(planted),
            "folder": planted.mkdir,
            "file": lambda: planted.write_text("precious"),
        }[kind]()
        entered(recording.Recorder(place, 0), 5)
        assert capfd.readouterr().err.count("gshard: positions are not recorded") == 1
        assert not victim.exists() if kind == "dangling" else victim.read_text() == "precious"
        assert standstill(read(place)) is None


class TestRecordingNeverEndsARun:
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG])
    @pytest.mark.parametrize("call", ["open", "write", "pwrite"])
    def test_a_disk_that_refuses(self, call, code, monkeypatch, tmp_path, capfd):
        before = getattr(os, call)

        def refuse(*args, **kwargs):
            if call == "open" and not kwargs:  # a folder or another file
                return before(*args)
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, call, refuse)
        entered(recording.Recorder(tmp_path / "record", 0), 5)
        assert capfd.readouterr().err == (
            f"gshard: positions are not recorded: {tmp_path / 'record'}: {os.strerror(code)}\n"
        )
        assert list((tmp_path / "record").glob("*.position")) == []  # it is not taken for behind

    def test_a_disk_that_is_full_later(self, monkeypatch, tmp_path, capfd):
        both = [entered(recording.Recorder(tmp_path, index), 4) for index in range(2)]
        assert {p.entered for p in read(tmp_path)} == {4}

        def refuse(*args):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", refuse)
            entered(both[0], 1)
        entered(both[0], 3)
        entered(both[1], 3)
        assert [(p.process, p.entered) for p in read(tmp_path)] == [(1, 7)]
        assert not standstill(read(tmp_path)).culprits
        assert "not recorded" in capfd.readouterr().err

    def test_no_folder_can_be_made(self, tmp_path, capfd):
        (tmp_path / "file").write_text("")
        refused(tmp_path / "file" / "record", capfd)

    def test_a_file_that_is_cut(self, tmp_path):
        """A process that had mapped it would die of SIGBUS."""
        recorder = entered(recording.Recorder(tmp_path, 0), 700)
        for path in tmp_path.iterdir():
            os.truncate(path, 0)
        assert [p.entered for p in read(tmp_path)] == [0]
        entered(recorder, 3)
        (position,) = read(tmp_path)
        assert (position.entered, len(position.newest)) == (703, 3)

    def test_the_folder_is_removed(self, tmp_path):
        recorder = entered(recording.Recorder(tmp_path / "record", 0), 2)
        for path in (tmp_path / "record").iterdir():
            path.unlink()
        (tmp_path / "record").rmdir()
        entered(recorder, 3)
        assert read(tmp_path / "record") == []


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


def damage(path, data):
    """Something else where a file of a process is, or something else in it."""
    raw = path.read_bytes() if path.is_file() else b""
    kind = data.draw(st.sampled_from(["bytes", "cut", "flip", "pipe", "folder", "gone", "link"]))
    with contextlib.suppress(FileNotFoundError):
        path.unlink() if not path.is_dir() else path.rmdir()
    if kind == "bytes":
        path.write_bytes(data.draw(st.binary(max_size=200)))
    elif kind == "cut":
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    elif kind == "flip" and raw:
        at = data.draw(st.integers(0, len(raw) - 1))
        path.write_bytes(raw[:at] + data.draw(st.binary(min_size=1, max_size=9)) + raw[at + 1 :])
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_in_the_folder_it_is_read_in_one_line(data, tmp_path_factory):
    """Files that are damaged, cut, pipes, folders or links, and files of other names."""
    scratch = tmp_path_factory.mktemp("scratch")
    place = scratch / "record"
    for index in range(3):
        entered(recording.Recorder(place, index), data.draw(st.integers(0, 300)))
    for path in sorted(place.iterdir()):
        if data.draw(st.booleans()):
            damage(path, data)
    odd = st.sampled_from(["stray", "0-1.position", ".position", "0-99-h-1-1.position", "x\x1b[2J"])
    for name in data.draw(st.lists(odd, unique=True)):
        (place / name).write_bytes(b"\x00\xff")
    for positions in by_run(read(place)).values():
        words = str(standstill(positions))
        assert words.isprintable()
    found = whereabouts.held_up_by(scratch, 3, lambda index: [None, -9, 0][index])
    assert found is None or (found[0] < 3 and found[1].isprintable())
