"""Sentences a second and latency of `gshard serve`, by the number of clients.

    python -m benchmarks.serve RUN --seconds 20

Starts the server of a run in this process and lets 1, 8 and 64 clients ask for one sentence after
the other. Waiting requests share batches: many clients are served at a higher rate than one.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import threading
import time
from pathlib import Path

from gshard.mt.decoding.serve import HOST, Server
from gshard.mt.decoding.service import Service
from gshard.mt.decoding.translator import TranslateConfig, open_translator
from gshard.mt.run import Run


def client(server: Server, texts: list[str], until: float, took: list[float]) -> None:
    """Ask for one text after the other; 503 is counted as a wait."""
    connection = http.client.HTTPConnection(HOST, server.port, timeout=600)
    number = 0
    while time.perf_counter() < until:
        begin = time.perf_counter()
        body = json.dumps({"text": texts[number % len(texts)]})
        path = f"/{server.token}/translate"
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        reply.read()
        if reply.status == 200:
            took.append(time.perf_counter() - begin)
            number += 1
        else:
            time.sleep(0.1)


def measure(server: Server, texts: list[str], clients: int, seconds: float) -> list[float]:
    """How long each answer took."""
    took: list[float] = []
    until = time.perf_counter() + seconds
    threads = [
        threading.Thread(target=client, args=(server, texts[n:] + texts[:n], until, took))
        for n in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("run", type=Path)
    options.add_argument("--seconds", type=float, default=20.0)
    options.add_argument("--rows", type=int, default=16)
    options.add_argument("--devices", type=int, default=1)
    given = options.parse_args()
    run = Run.open(given.run)
    config = TranslateConfig(4, 4, 0.6, given.rows, max(run.config.batch.source_length, 16))
    translator, step = open_translator(run, "last", config, given.devices)
    language = run.tokenizer.tasks[0].foreign
    texts = [source for source, _ in run.corpus.pairs(language, "test")][:100]
    service = Service(translator, run.name, step)
    server = Server(service, 0)
    threading.Thread(target=server.run, daemon=True).start()
    service.warm_up()
    while service.health["status"] != "ready":
        time.sleep(0.1)
    print(f"{'clients':>7} {'sentences/s':>11} {'median':>8} {'slowest':>8}")
    for clients in (1, 8, 64):
        begin = time.perf_counter()
        took = measure(server, texts, clients, given.seconds)
        rate = len(took) / (time.perf_counter() - begin)
        print(f"{clients:7} {rate:11.1f} {statistics.median(took):6.2f} s {max(took):6.2f} s")
    server.stop()


if __name__ == "__main__":
    main()
