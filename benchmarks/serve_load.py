"""Load on `gshard serve` beside CTranslate2 of the same dims: rate, latency, checked answers.

    python -m benchmarks.serve_load --seconds 60 --page docs/results/cpu.md        9 minutes
    python -m benchmarks.serve_load --minutes 60        only gshard: is its memory flat?

1, 8, 64 and 256 clients ask for one sentence after the other. Both engines have the same weights (a
dense model that has learned nothing), the same greedy search and the same HTTP server and batches,
so that what differs is the engine. Each answer is compared with the engine's own translation of
that sentence: `wrong` counts answers that are another's, `lost` requests without an answer. A
refusal (503) is retried and counted. With `--minutes`, 8 clients ask for so long, the process's
memory is printed each minute, and an exit status of 1 tells that the second half of the time ended
with over 2% more than it began with, or that an answer was lost or another's.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import http.client
import json
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.cpu_decode import write_page
from benchmarks.serve import prepared, ready
from benchmarks.soak import prepare, words
from gshard.mt.decoding.host.model import HostModel
from gshard.mt.decoding.host.products import use_threads
from gshard.mt.decoding.host.translator import HostTranslator
from gshard.mt.decoding.texts import Hypothesis, TextTranslator, TranslateConfig
from gshard.mt.release.ctranslate2 import specification
from gshard.mt.run import Run
from gshard.mt.serving.server import Server
from gshard.mt.serving.service import Service
from gshard.mt.serving.settings import LOCAL
from gshard.mt.training.names import named
from gshard.nn.transformer import Transformer

CLIENTS = (1, 8, 64, 256)
LOAD = ("<!-- load -->", "<!-- end of load -->")


class Engine:
    """A translator whose batches CTranslate2 searches."""

    def __init__(self, translator: TextTranslator, model: Transformer, folder: Path, threads: int):
        import ctranslate2

        spec, tokenizer = specification(model), translator.tokenizer
        spec.register_source_vocabulary(tokenizer.spell_source(range(tokenizer.source_size)))
        spec.register_target_vocabulary(tokenizer.spell_target(range(tokenizer.target_size)))
        spec.validate()
        spec.optimize(quantization=None)
        folder.mkdir()
        spec.save(str(folder))
        self._engine = ctranslate2.Translator(str(folder), intra_threads=threads)
        self._translator = translator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._translator, name)

    def translate(self, texts: list[str], target: str = "en") -> list[list[Hypothesis]]:
        tokenizer, config = self._translator.tokenizer, self._translator.config
        sources = [tokenizer.spell_source(ids) for ids in tokenizer.encode_source(texts, target)]
        found = self._engine.translate_batch(
            sources, beam_size=config.beam, max_decoding_length=config.most, disable_unk=True
        )
        best = (each.hypotheses[0] for each in found)
        return [[Hypothesis("".join(pieces).replace("▁", " ").strip(), 0.0)] for pieces in best]


def client(server: Server, texts: list[str], want: dict[str, str], until: float) -> Any:
    """Ask until the time is over: the seconds of each answer, and what went wrong."""
    connection = http.client.HTTPConnection(LOCAL, server.port, timeout=600)
    took, counts = [], collections.Counter()
    for n in range(1 << 30):
        if n and time.perf_counter() >= until:
            break
        text, begin = texts[n % len(texts)], time.perf_counter()
        given = {"q": text, "source": "auto", "target": "en", "api_key": server.token}
        try:
            connection.request(
                "POST", "/translate", json.dumps(given), {"Content-Type": "application/json"}
            )
            reply = connection.getresponse()
            answer = json.loads(reply.read())
        except (OSError, http.client.HTTPException):
            counts["lost"] += 1
            connection.close()
            continue
        if reply.status == 503:
            counts["refused"] += 1
            time.sleep(0.05)
            continue
        took.append(time.perf_counter() - begin)
        counts["wrong"] += reply.status != 200 or answer["translatedText"] != want[text].strip()
    connection.close()
    return took, counts


def load(server: Server, texts: list[str], want: dict[str, str], clients: int, seconds: float):
    """Sentences a second, the seconds of each, and counts of what went wrong."""
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        turned = (texts[n % len(texts) :] + texts[: n % len(texts)] for n in range(clients))
        asked = [pool.submit(client, server, mine, want, begin + seconds) for mine in turned]
        took, counts = [], collections.Counter()
        for each in asked:
            times, wrong = each.result()
            took += times
            counts += wrong
    return len(took) / (time.perf_counter() - begin), took, counts


def measured(
    name: str, translator: Any, texts: list[str], clients: Any, seconds: float
) -> list[str]:
    """Print the rows of one engine; they are returned for a page."""
    rows = []
    want = {
        text: hypotheses[0].text
        for text, hypotheses in zip(texts, translator.translate(texts), strict=True)
    }
    service = Service(translator, name)
    server = ready(service)
    for count in clients:
        prepared(server, service, texts, min(count, 64))
        rate, took, counts = load(server, texts, want, count, seconds)
        p50, p99 = np.percentile(took, [50, 99])
        wrong = " ".join(f"{counts[kind]:7}" for kind in ("lost", "wrong", "refused"))
        print(f"{name:12} {count:7} {rate:11.1f} {p50:6.2f} s {p99:6.2f} s {wrong}", flush=True)
        cells = [name, count, f"{rate:.1f}", f"{p50:.2f} s", f"{p99:.2f} s", *wrong.split()]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    server.stop()
    return rows


def memory() -> float:
    """Megabytes that this process has in memory, on Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def long_load(translator: Any, texts: list[str], minutes: float, every: float = 60.0) -> int:
    """Print the process's memory while clients ask: the exit status."""
    want = {t: h[0].text for t, h in zip(texts, translator.translate(texts), strict=True)}
    service = Service(translator, "gshard")
    server = ready(service)
    print(f"{'minutes':>8} {'sentences':>10} {'memory':>10} {'lost':>7} {'wrong':>7}", flush=True)
    total, counts, sizes = 0, collections.Counter(), []
    begin = time.perf_counter()
    while (passed := time.perf_counter() - begin) < 60 * minutes:
        _, took, wrong = load(server, texts, want, 8, min(every, 60 * minutes - passed))
        total, counts = total + len(took), counts + wrong
        sizes.append(memory())
        print(
            f"{(time.perf_counter() - begin) / 60:8.1f} {total:10,} {sizes[-1]:7.1f} MB "
            f"{counts['lost']:7} {counts['wrong']:7}",
            flush=True,
        )
    server.stop()
    grown = sizes[-1] / sizes[len(sizes) // 2] - 1
    print(f"memory in the second half of the time: {100 * grown:+.2f}%")
    return int(grown > 0.02 or counts["lost"] + counts["wrong"] > 0)


def _table(names: Sequence[str], rows: list[str]) -> str:
    return "\n".join([f"| {' | '.join(names)} |", "|---" + "|---:" * (len(names) - 1) + "|", *rows])


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    options.add_argument("--threads", type=int, default=2, help="of each engine")
    options.add_argument("--minutes", type=float, default=0.0, help="watch the memory so long")
    options.add_argument("--page", type=Path, help="write the table into this page")
    given = options.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, 1, 1)
        run = Run.open(folder / "prepared")
        dims = run.model_config
        head_dim = dims.model_dim // dims.heads
        dims = dataclasses.replace(dims, experts=0, key_dim=head_dim, value_dim=head_dim)
        model = Transformer(dims, jax.random.key(0))
        config = TranslateConfig(beam=1, rows=32, longest=32, most=32)
        use_threads(given.threads)
        arrays = {name: np.asarray(leaf) for name, leaf in named(model).items()}
        translator = HostTranslator(HostModel(dims, arrays.__getitem__), run.tokenizer, config)
        texts = [words(n, "de") for n in range(100)]
        if given.minutes:
            sys.exit(long_load(translator, texts, given.minutes))
        head = f"{'engine':12} {'clients':>7} {'sentences/s':>11} {'median':>8} {'p99':>8}"
        print(f"{head} {'lost':>7} {'wrong':>7} {'refused':>7}", flush=True)
        rows = measured("gshard", translator, texts, given.clients, given.seconds)
        engine = Engine(translator, model, folder / "ct2", given.threads)
        rows += measured("CTranslate2", engine, texts, given.clients, given.seconds)
    if given.page:
        names = ("engine", "clients", "sentences/s", "median", "p99", "lost", "wrong", "refused")
        write_page(given.page, [_table(names, rows)], LOAD)


if __name__ == "__main__":
    main()
