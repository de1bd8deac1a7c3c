"""`gshard translate` whose output nobody reads any more, or would replace what it reads."""

import os
import subprocess
import sys

import pytest

from gshard.commands.translate import _text
from gshard.mt.errors import UserError

PROGRAM = """
import sys, time
from gshard.commands.translate import _UntilNobodyReads
from gshard.mt.progress import Silent

step = _UntilNobodyReads(Silent()).stage("translate", 1000)
step()
print("first line", flush=True)
for _ in range(6000):
    try:
        step()
    except BrokenPipeError:
        sys.exit(7)
    time.sleep(0.01)
"""


def test_work_ends_when_the_reader_has_left():
    """As in `gshard translate RUN FILE | head -1`, before the next chunk is done."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"first line\n"
    process.stdout.close()
    assert process.wait(120) == 7


@pytest.mark.parametrize("name", ["text", "link", "same", "./text"])
def test_the_text_is_not_replaced_by_its_translation(tmp_path, name):
    text = tmp_path / "text"
    text.write_text("years of it\n")
    (tmp_path / "link").symlink_to(text)
    os.link(text, tmp_path / "same")
    with pytest.raises(UserError, match="is the text itself"):
        _text(text, "utf-8", tmp_path / name)
    _text(text, "utf-8", tmp_path / "new")
    _text(None, "utf-8", text)
