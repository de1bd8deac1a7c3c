"""Sentences a second and latency of `gshard serve`, by the number of clients.

    python -m benchmarks.serve --seconds 20

Starts a server in this process and lets 1, 8 and 64 clients ask for one sentence after the other,
untimed until every program that they need is compiled, and then for so many seconds. Waiting
requests share batches: many clients are served at a higher rate than one. The model is that of a
run; without one it is a small one that has learned nothing, so that every translation gets as long
as it may, on made-up text.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import json
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.load_clients import ready
from benchmarks.small_run import prepare, words
from gshard.mt.decoding.engines import open_translator
from gshard.mt.decoding.texts import TranslateConfig
from gshard.mt.run import Run
from gshard.mt.serving.server import Server
from gshard.mt.serving.service import Service
from gshard.mt.serving.settings import LOCAL

CLIENTS = (1, 8, 64)


def client(server: Server, texts: list[str], until: float) -> list[float]:
    """Ask for one text after the other, at least once: the seconds of each, refusals included."""
    connection = http.client.HTTPConnection(LOCAL, server.port, timeout=600)
    path = f"/{server.token}/translate"
    took: list[float] = []
    begin = time.perf_counter()
    while not took or begin < until:
        body = json.dumps({"text": texts[len(took) % len(texts)]})
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        said = reply.read().decode()
        if reply.status == 503:
            time.sleep(0.1)
            continue
        if reply.status != 200:
            raise RuntimeError(f"the server answered with {reply.status}: {said}")
        took.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    connection.close()
    return took


def measure(
    server: Server, texts: list[str], clients: int, seconds: float
) -> tuple[float, list[float]]:
    """Sentences a second, and how long each answer took."""
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        turned = (texts[n % len(texts) :] + texts[: n % len(texts)] for n in range(clients))
        asked = [pool.submit(client, server, mine, begin + seconds) for mine in turned]
        took = [seconds for each in asked for seconds in each.result()]
    return len(took) / (time.perf_counter() - begin), took


def prepared(server: Server, service: Service, texts: list[str], clients: int) -> None:
    """Let the clients ask until no program is missed any more."""
    while True:
        measure(server, texts, clients, 1.0)
        if not service.health["compiling"]:
            return
        while service.health["compiling"]:
            time.sleep(0.1)


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("run", type=Path, nargs="?")
    options.add_argument("--seconds", type=float, default=20.0)
    options.add_argument("--rows", type=int, default=32)
    options.add_argument("--devices", type=int, default=1)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.run:
            run, which = Run.open(given.run), "last"
            language = run.tokenizer.tasks[0].foreign
            texts = [source for source, _ in run.corpus.pairs(language, "test")][:100]
        else:
            prepare(Path(folder), 1, given.devices)
            run, which = Run.open(Path(folder) / "prepared"), "untrained"
            texts = [words(n, "de") for n in range(100)]
        longest = max(run.config.batch.source_length, 16)
        config = TranslateConfig(rows=given.rows, longest=longest)
        translator, step = open_translator(run, which, config, given.devices)
        service = Service(translator, run.name, step)
        server = ready(service)
        print(f"{'clients':>7} {'sentences/s':>11} {'median':>8} {'slowest':>8}", flush=True)
        for clients in CLIENTS:
            prepared(server, service, texts, clients)
            rate, took = measure(server, texts, clients, given.seconds)
            times = f"{statistics.median(took):6.2f} s {max(took):6.2f} s"
            print(f"{clients:7} {rate:11.1f} {times}", flush=True)
        server.stop()


if __name__ == "__main__":
    main()
