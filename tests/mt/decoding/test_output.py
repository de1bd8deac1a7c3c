"""Translations in a file that an interrupted command goes on with."""

import contextlib
import io
import os
import threading

import pytest

from gshard.errors import UserError
from gshard.mt.decoding.lines import FileOutput, Output

TEXT = [f"line {n}" for n in range(10)]
SETTINGS = {"step": 5, "beam": 4}


def chunks(text, size=3):
    return [text[i : i + size] for i in range(0, len(text), size)]


def translate(output, text, stop_after=None):
    """Two lines for each, as n-best lists have; stops as if killed after some chunks."""
    with contextlib.closing(output):
        for number, chunk in enumerate(output.after_done(chunks(text))):
            if number == stop_after:
                return
            output.add(chunk, [f"{t.upper()} {n}" for t in chunk for n in (1, 2)])
        output.finish()


def test_lines_go_out_at_once():
    stream = io.BytesIO()
    translate(Output(stream), TEXT)
    assert stream.getvalue().decode().splitlines()[:3] == ["LINE 0 1", "LINE 0 2", "LINE 1 1"]


@pytest.mark.parametrize("stop_after", [0, 1, 3])
def test_it_goes_on_where_it_stopped(tmp_path, stop_after):
    whole, path = tmp_path / "whole", tmp_path / "out" / "file"
    translate(FileOutput(whole, SETTINGS), TEXT)
    translate(FileOutput(path, SETTINGS), TEXT, stop_after)
    assert not path.exists()
    part = path.with_name("file.part")
    with part.open("ab") as file:
        file.write(b"half a li")  # what a crash leaves
    output = FileOutput(path, SETTINGS)
    assert output.done == 3 * stop_after
    translate(output, TEXT)
    assert path.read_bytes() == whole.read_bytes()
    assert sorted(p.name for p in path.parent.iterdir()) == ["file"]


@pytest.mark.parametrize(
    ("settings", "text", "said"),
    [
        ({**SETTINGS, "beam": 1}, TEXT, "with another beam"),
        (SETTINGS, ["other", *TEXT], "with other text"),
        (SETTINGS, TEXT[:2], "with a text of 6 lines or more"),
    ],
)
def test_what_does_not_belong_together_is_refused(tmp_path, settings, text, said):
    path = tmp_path / "file"
    translate(FileOutput(path, SETTINGS), TEXT, stop_after=2)
    with pytest.raises(UserError, match=said):
        translate(FileOutput(path, settings), text)


def test_one_command_at_a_time(tmp_path):
    """Both wrote to one file, each to its own end: lines were lost and mixed, exit status 0."""
    path = tmp_path / "file"
    first = FileOutput(path, SETTINGS)
    with pytest.raises(UserError, match=r"another command writes to .*/file at this moment"):
        FileOutput(path, SETTINGS)
    translate(first, TEXT)
    with contextlib.closing(FileOutput(path, SETTINGS)) as again:  # free again, from the beginning
        assert again.done == 0
    assert len(path.read_text().splitlines()) == 2 * len(TEXT)


def test_two_that_write_to_one_file(tmp_path):
    """Locks belong to open files: two threads are refused to each other as two processes are."""
    path, ends = tmp_path / "file", []

    def command(word):
        while True:
            with contextlib.suppress(UserError), contextlib.closing(FileOutput(path, {})) as output:
                for n in range(20):
                    output.add([str(n)], [f"{word} {n}"])
                output.finish()
                ends.append(path.read_text().splitlines())
                return

    both = [threading.Thread(target=command, args=word) for word in "ab"]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    wanted = [[f"{word} {n}" for n in range(20)] for word in "ab"]
    assert len(ends) == 2
    assert all(lines in wanted for lines in [*ends, path.read_text().splitlines()])


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_is_not_written_through(tmp_path, link):
    precious, path = tmp_path / "precious", tmp_path / "file"
    precious.write_text("years of it")
    link(precious, tmp_path / "file.part")
    with pytest.raises(OSError, match="is a link to another file"):
        FileOutput(path, SETTINGS)
    assert precious.read_text() == "years of it"


def test_what_is_no_translation_is_not_replaced(tmp_path):
    (tmp_path / "film.part").write_text("half a download")
    with pytest.raises(UserError, match="begun by something else than a translation"):
        FileOutput(tmp_path / "film", SETTINGS)
    assert (tmp_path / "film.part").read_text() == "half a download"
