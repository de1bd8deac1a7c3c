"""Recording where others have been: it never ends a run, nor writes through a link."""

import errno
import os

import pytest

from gshard import recording
from gshard.recording import read, standstill
from tests.recording.recorders import SUFFIXES, entered, own
from tests.strangers import belongs_to_another


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
