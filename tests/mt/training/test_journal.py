"""The journal under harm: a disk that fills up, figures that are not numbers."""

import errno
import json
import os
from types import SimpleNamespace

import pytest

from gshard.mt.run import Run
from gshard.mt.training import journal
from gshard.mt.training.journal import Journal


class Full:
    """A disk that takes `room` bytes more, and the half of a write that does not fit."""

    def __init__(self, room):
        self.room = room

    def take(self, count):
        taken = min(count, self.room)
        self.room -= taken
        if not taken and count:
            raise OSError(errno.ENOSPC, "No space left on device")
        return taken


@pytest.fixture
def run(tmp_path):
    return SimpleNamespace(folder=tmp_path, metrics=list)


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_full_disk_holds_nothing_up_and_loses_nothing(run, tmp_path, monkeypatch):
    disk, notes = Full(10_000), []

    class File(journal.Path().__class__):
        def open(self, mode="r", **options):
            file = super().open(mode, **options)
            if mode != "r+b":
                return file
            write = file.write
            limited = SimpleNamespace(
                truncate=file.truncate,
                seek=file.seek,
                write=lambda view: write(view[: disk.take(len(view))]),
            )

            class Context:
                __enter__ = staticmethod(lambda: limited)
                __exit__ = staticmethod(lambda *_: file.close())

            return Context()

    written = Journal(run, 0, notes.append)
    written._path = File(written._path)
    written.write("train", 1, nll=2.0)
    disk.room = 7  # half a line
    for step in range(2, 50):  # more than any queue holds
        written.write("train", step, nll=2.0)
    assert notes == ["the figures cannot be written (No space left on device); training continues"]
    disk.room = 100_000
    written.write("train", 50, nll=2.0)
    written.close()
    assert [r["step"] for r in records(tmp_path)] == list(range(1, 51))
    assert notes[1:] == ["the figures are written again"]


def test_tensorboard_without_a_disk(run, monkeypatch):
    """Its files cannot be written at all: the lines still are, at once, and close is quiet."""
    notes = []

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal.RecordWriter, "flush", full)
    written = Journal(run, 0, notes.append)
    for step in range(1, 100):
        written.write("train", step, nll=1.0)
    written.close()
    assert len(records(run.folder)) == 99
    assert len(notes) == 1


def test_what_is_not_finite_is_null(run):
    written = Journal(run, 0)
    written.write("train", 1, nll=float("nan"), loss=float("inf"), missing=None)
    written.close()
    assert records(run.folder) == [{"kind": "train", "step": 1, "nll": None, "loss": None}]
    assert os.listdir(run.folder / "tensorboard")


def test_lines_that_are_no_records_are_left_out(tmp_path):
    lines = ['{"kind": "train", "step": 1}', "5", "{}", '{"step": "x"}', "[1]", "\\xff", '{"st']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    found = Run(tmp_path, None).metrics()
    assert found == [{"kind": "train", "step": 1}]
