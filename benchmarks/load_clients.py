"""Clients of a server in a process of their own, so that they do not share its interpreter.

Reads a JSON object from standard input: `port`, `token`, `texts`, `want` (the expected translation
of each text), `clients` and `seconds`. Each client asks for one text after the other, and after a
refusal (503) waits for as long as the server says, within the time. Prints a JSON object:
`seconds` from the first request to the last answer, `took` (seconds of each answer) and `counts`:
`lost` (no answer), `wrong` (another translation) and `refused`. `load` is the other side of it.
"""

from __future__ import annotations

import collections
import concurrent.futures
import http.client
import json
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gshard.mt.serving.server import Server
    from gshard.mt.serving.service import Service

_LOCAL = "127.0.0.1"


def client(given: dict[str, Any], n: int, until: float) -> tuple[list[float], dict[str, int]]:
    """Ask until the time is over: the seconds of each answer, and what went wrong."""
    texts = given["texts"][n % len(given["texts"]) :] + given["texts"][: n % len(given["texts"])]
    connection = http.client.HTTPConnection(_LOCAL, given["port"], timeout=600)
    took: list[float] = []
    counts: collections.Counter[str] = collections.Counter()
    asked = 0
    while not asked or time.perf_counter() < until:
        text, begin = texts[asked % len(texts)], time.perf_counter()
        asked += 1
        body = {"q": text, "source": "auto", "target": "en", "api_key": given["token"]}
        try:
            connection.request(
                "POST", "/translate", json.dumps(body), {"Content-Type": "application/json"}
            )
            reply = connection.getresponse()
            answer = json.loads(reply.read())
        except (OSError, http.client.HTTPException):
            counts["lost"] += 1
            connection.close()
            continue
        if reply.status == 503:
            counts["refused"] += 1
            wait = float(reply.headers.get("Retry-After", 1))
            time.sleep(max(0.0, min(wait, until - time.perf_counter())))
            continue
        took.append(time.perf_counter() - begin)
        wrong = reply.status != 200 or answer["translatedText"] != given["want"][text]
        counts["wrong"] += wrong
    connection.close()
    return took, counts


def ready(service: Service) -> Server:
    """A server that runs, once every program is compiled."""
    from gshard.mt.serving.server import Server  # which the clients' process does without
    from gshard.mt.serving.settings import Settings

    server = Server(service, Settings(port=0))
    threading.Thread(target=server.run, daemon=True).start()
    service.warm_up()
    while service.health["status"] != "ready":
        time.sleep(0.1)
    return server


def load(
    server: Server, texts: list[str], want: dict[str, str], clients: int, seconds: float
) -> tuple[float, list[float], collections.Counter[str]]:
    """Sentences a second, the seconds of each, and counts of what went wrong."""
    given = {"port": server.port, "token": server.token, "texts": texts, "want": want}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.load_clients"],
        input=json.dumps({**given, "clients": clients, "seconds": seconds}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    took = found["took"]
    return len(took) / found["seconds"], took, collections.Counter(found["counts"])


def main() -> None:
    """Run the clients."""
    given = json.load(sys.stdin)
    begin = time.perf_counter()
    took: list[float] = []
    counts: collections.Counter[str] = collections.Counter()
    with concurrent.futures.ThreadPoolExecutor(given["clients"]) as pool:
        until = begin + given["seconds"]
        asked = [pool.submit(client, given, n, until) for n in range(given["clients"])]
        for each in asked:
            times, wrong = each.result()
            took += times
            counts.update(wrong)
    print(json.dumps({"seconds": time.perf_counter() - begin, "took": took, "counts": counts}))


if __name__ == "__main__":
    main()
