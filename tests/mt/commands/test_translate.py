"""`gshard translate` whose output nobody reads any more, or would replace what it reads."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import pytest

from gshard.commands.translate import _text
from gshard.errors import UserError
from gshard.mt.decoding.engines import only_cpus
from gshard.mt.release.make import make_release
from tests.mt.runs import make_run

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


def test_a_release_is_translated_on_a_cpu_without_jax(tokenizer, tmp_path):
    """JAX, Equinox and Grain take longer to import than a sentence takes to translate."""
    release = make_release(make_run(tmp_path / "run", tokenizer), tmp_path / "release")
    program = (
        "import sys\n"
        "from gshard.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "heavy = ('jax', 'equinox', 'grain', 'pyarrow', 'orbax')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "translate", str(release)],
        input="a line\nand another\n",
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *translations, heavy = done.stdout.splitlines()
    assert (len(translations), heavy) == (2, "[]")


@pytest.mark.parametrize(
    ("variables", "certain"),
    [
        ({"JAX_PLATFORMS": "cpu"}, True),
        ({"JAX_PLATFORMS": "cuda,cpu"}, False),
        ({"PJRT_NAMES_AND_LIBRARY_PATHS": "mine:/lib/mine.so"}, False),
        ({"TPU_LIBRARY_PATH": "/lib/libtpu.so"}, False),
    ],
    ids=str,
)
def test_what_jax_would_run_on_is_known_before_it_is_imported(monkeypatch, variables, certain):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert only_cpus() is certain


def test_plugins_of_jax_may_be_accelerators(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    assert only_cpus()
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ("a plugin",))
    assert not only_cpus()
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "jax_plugins")
    assert not only_cpus()
