"""`gshard serve` from the wheel, in an environment of its own and an empty folder."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from gshard.mt.release.make import make_release
from tests.mt.processes import PATIENCE
from tests.mt.runs import make_run
from tests.test_packaging import wheel  # noqa: F401  (a fixture)


def installed(built, folder):
    """The folder of commands of a new environment that has the wheel with the extra `mt`."""
    copied = shutil.copy(built, folder)
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    commands = folder / "env" / "bin"
    subprocess.run(
        [commands / "pip", "install", "--quiet", "--no-compile", f"{copied}[mt]"], check=True
    )
    return commands


def ask(address, **fields):
    body = json.dumps(fields).encode() if fields else None
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        return reply.read().decode()


@pytest.mark.slow
def test_a_release_is_translated_and_served_without_the_checkout(tokenizer, tmp_path, wheel):  # noqa: F811
    run = make_run(tmp_path / "run", tokenizer)
    release = make_release(run, tmp_path / "release")
    shutil.rmtree(run.folder)
    commands = installed(wheel.filename, tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "XLA_FLAGS")
    clean = {k: v for k, v in os.environ.items() if k not in left_out}
    clean |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    where = [commands / "python", "-c", "import gshard; print(gshard.__file__)"]
    imported = subprocess.run(where, cwd=empty, env=clean, check=True, capture_output=True)
    assert Path(imported.stdout.decode().strip()).is_relative_to(tmp_path / "env")

    call = [commands / "gshard", "translate", release, "--to", "de"]
    done = subprocess.run(call, cwd=empty, env=clean, input=b"ein Haus\n", capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert done.stdout.count(b"\n") == 1

    call = [commands / "gshard", "serve", release, "--open", "--port=0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(call, cwd=empty, env=clean, **pipes) as process:
        try:
            base = re.search(r"http://127.0.0.1:\d+", process.stdout.readline().decode())[0]
            page = ask(f"{base}/")
            assert '<a href="/docs">the API</a>' in page
            languages = json.loads(ask(f"{base}/languages"))
            assert any("de" in language["targets"] for language in languages)
            assert "openapi" in json.loads(ask(f"{base}/openapi.json"))
            said = json.loads(ask(f"{base}/translate", q="ein Haus", source="auto", target="de"))
            assert said["translatedText"].strip() == done.stdout.decode().strip()
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert b"Traceback" not in process.stderr.read()
    assert not list(empty.iterdir()), "the server writes nothing into the folder that it is in"
