"""`gshard translate` whose output nobody reads any more."""

import subprocess
import sys

PROGRAM = """
import sys, time
from gshard.mt.commands.translate import _UntilNobodyReads
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
