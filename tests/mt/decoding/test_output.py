"""Translations in a file that an interrupted command goes on with."""

import io

import pytest

from gshard.mt.decoding.output import FileOutput, Output
from gshard.mt.errors import UserError

TEXT = [f"line {n}" for n in range(10)]
SETTINGS = {"step": 5, "beam": 4}


def chunks(text, size=3):
    return [text[i : i + size] for i in range(0, len(text), size)]


def translate(output, text, stop_after=None):
    """Two lines for each, as n-best lists have; stops as if killed after some chunks."""
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
