"""Files of processes that are damaged, or are none: read in one line, or left out."""

import contextlib
import os

from hypothesis import given, settings
from hypothesis import strategies as st

from gshard import recording
from gshard.mt.launch import status
from gshard.recording import by_run, read, standstill
from tests.recording.recorders import entered


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
    found = status.held_up_by(scratch, 3, lambda index: [None, -9, 0][index])
    assert found is None or (found[0] < 3 and found[1].isprintable())
