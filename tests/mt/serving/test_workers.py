"""Several worker processes behind one socket, and what ends them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from gshard import cli
from tests.mt.processes import PATIENCE
from tests.mt.runs import make_run
from tests.mt.serving.slow_translator import until


def get(address):
    with urllib.request.urlopen(address, timeout=PATIENCE) as reply:
        return reply.read().decode()


@pytest.mark.slow
def test_two_workers_share_limits_and_metrics_and_finish_on_sigterm(tokenizer, corpus, tmp_path):
    run = make_run(tmp_path / "random", tokenizer, corpus.folder)
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nname = "few"\nkey = "a key of few"\nper_minute = 8\n')
    options = [
        "--port=0",
        "--devices=1",
        "--workers=2",
        f"--keys={keys}",
        "--logs=json",
        "--rows=1",
    ]
    command = [sys.executable, "-m", "gshard.cli", "serve", str(run.folder), *options]
    quickly = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=quickly
        ) as process,
        contextlib.ExitStack() as at_last,
    ):
        at_last.callback(process.kill)
        base = re.search(r"http://127.0.0.1:\d+", process.stdout.readline().decode())[0]
        statuses = []

        def ask():
            given = {"q": "a", "source": "auto", "target": "de", "api_key": "a key of few"}
            body = json.dumps(given).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{base}/translate", body, headers)
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
                    statuses.append(reply.status)
            except urllib.error.HTTPError as error:
                statuses.append(error.code)

        clients = [threading.Thread(target=ask) for _ in range(12)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        # One limit for both workers: with one each, all 12 would be within it.
        assert set(statuses) == {200, 429}

        def all_are_counted():  # by whichever worker answers
            found = get(f"{base}/metrics")
            total = re.findall(r'requests_total{route="/translate",status="\d+"} (\S+)', found)
            return sum(map(float, total)) == 12

        until(all_are_counted)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        said = process.stderr.read()
        assert b"Traceback" not in said
        assert b"leaked" not in said  # what the workers share is given back


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--logs=xml"], "allowed are none, text, json"),
        (["--keys=none.toml"], "no file none.toml"),
        (["--req-limit=5"], "--req-limit is for --open"),
        (["--char-limit=0"], "at least 1"),
        (["--tls-cert=a.pem"], "belong together"),
        (["--host=256.1.1.1", "--port=0"], "no run in"),  # which is looked for first
    ],
)
def test_options_that_make_no_sense(options, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", str(tmp_path), *options])
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (1, 1)
    assert message in said
