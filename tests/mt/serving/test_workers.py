"""Several worker processes behind one socket, and what ends them."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from gshard import cli
from gshard.mt.serving.server import listen
from gshard.mt.serving.settings import Settings
from gshard.mt.serving.workers import Served
from tests.mt.processes import PATIENCE, alive, launched, until
from tests.mt.runs import make_run


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
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
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


@pytest.mark.slow
def test_workers_end_with_a_parent_that_is_killed(tokenizer, corpus, tmp_path):
    run = make_run(tmp_path / "random", tokenizer, corpus.folder)
    options = ["--port=0", "--devices=1", "--workers=2", "--open", "--rows=1"]
    command = [sys.executable, "-m", "gshard.cli", "serve", str(run.folder), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        port = int(re.search(r"http://127.0.0.1:(\d+)", process.stdout.readline().decode())[1])
        get(f"http://127.0.0.1:{port}/health")
        children = launched(process.pid)
        process.kill()
        process.wait(PATIENCE)
    until(lambda: not any(map(alive, children)))
    listen(Settings(port=port)).close()


def test_an_address_of_another_machine_is_a_line_before_anything_is_loaded(
    tokenizer, corpus, tmp_path, monkeypatch, capsys
):
    run = make_run(tmp_path / "random", tokenizer, corpus.folder)
    monkeypatch.setattr(Served, "open", lambda self: pytest.fail("loaded"))
    for address in ("203.0.113.1", "no.such.host.invalid", "a\0b"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["serve", str(run.folder), f"--host={address}", "--port=0"])
        said = capsys.readouterr().err
        assert (ended.value.code, said.count("\n")) == (1, 1)
        assert f"--host {address!r} --port 0 cannot be used: " in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--logs=xml"], "allowed are none, text, json"),
        (["--keys=none.toml"], "no file none.toml"),
        (["--req-limit=5"], "--req-limit is for --open"),
        (["--char-limit=0"], "at least 1"),
        (["--tls-cert=a.pem"], "belong together"),
        (["--proxies=localhost"], "'localhost': 'localhost' does not appear to be an IPv4"),
        (["--proxies=127.0.0.1, 10.0.0.1/8"], "has host bits set; allowed are * and addresses"),
        (["--proxies=0.0.0.0/0,*"], "allowed are * and addresses or networks"),
        (["--cors=https://example.org/"], "an origin without a path, such as https"),
        (["--cors=example.org"], "is no origin as browsers send it"),
        (["--open", "--req-limit=1" + "0" * 400], "at most 1,000,000,000"),
        (["--host=256.1.1.1", "--port=0"], "no run in"),  # which is looked for first
    ],
)
def test_options_that_make_no_sense(options, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", str(tmp_path), *options])
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (1, 1)
    assert message in said
