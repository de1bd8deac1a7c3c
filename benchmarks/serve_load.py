"""Load on `gshard serve` beside CTranslate2 of the same dims: rate, latency, checked answers.

    python -m benchmarks.serve_load --seconds 60 --page docs/results/cpu.md        10 minutes
    python -m benchmarks.serve_load --layers 2 --model-dim 16    what a request costs by itself
    python -m benchmarks.serve_load --minutes 60        only gshard: is its memory flat?

1, 8, 64 and 256 clients, in a process of their own, ask for one sentence after the other. Both
engines have the same weights (a dense model that has learned nothing), the same greedy search and
the same HTTP server and batches, so that what differs is the engine; the table is followed by how
many of the sentences both translate alike, and by the mean length of the translations. Each answer
is compared with the engine's own translation of that sentence: `wrong` counts other answers, `lost`
requests without an answer. A refusal (503) is counted and repeated when the server says. With
`--minutes`, 8 clients ask for that long, the process's memory is printed each minute, and an exit
status of 1 means that memory grew by over 2% in the second half of the time, or that an answer was
lost or wrong.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import resource
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu_decode import write_page
from benchmarks.load_clients import load, ready
from benchmarks.random_model import random_weights
from benchmarks.small_run import prepare, words
from gshard.mt.batching.tokenizer import END, PAD, START
from gshard.mt.decoding.host.products import use_threads
from gshard.mt.decoding.host.translator import HostModel, HostTranslator
from gshard.mt.decoding.texts import Hypothesis, TextTranslator, TranslateConfig
from gshard.mt.release.exported import specification
from gshard.mt.run import Run
from gshard.mt.serving.service import Service
from gshard.mt.training.loading import model_like
from gshard.mt.training.weights import unnamed
from gshard.nn.config import TransformerConfig

CLIENTS = (1, 8, 64, 256)
LOAD = ("<!-- load -->", "<!-- end of load -->")


class Engine:
    """A translator whose batches CTranslate2 searches."""

    def __init__(
        self, translator: TextTranslator, arrays: dict[str, Any], folder: Path, threads: int
    ):
        import ctranslate2

        dims, tokenizer = translator.model_config, translator.tokenizer
        spec = specification(unnamed(arrays, model_like(dims)))
        spec.register_source_vocabulary(tokenizer.spell_source(range(tokenizer.source_size)))
        spec.register_target_vocabulary(tokenizer.spell_target(range(tokenizer.target_size)))
        spec.validate()
        spec.optimize(quantization=None)
        folder.mkdir()
        spec.save(str(folder))
        self._engine = ctranslate2.Translator(str(folder), intra_threads=threads)
        self._translator = translator
        self._never = [[piece] for piece in tokenizer.spell_target([PAD, START])]
        self._ids = {p: n for n, p in enumerate(tokenizer.spell_target(range(dims.target_vocab)))}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._translator, name)

    def translate(
        self, texts: list[str], target: str = "en", source: str = ""
    ) -> list[list[Hypothesis]]:
        tokenizer, config = self._translator.tokenizer, self._translator.config
        sources = [tokenizer.spell_source(ids) for ids in tokenizer.encode_source(texts, target)]
        found = self._engine.translate_batch(
            sources,
            beam_size=config.beam,
            max_decoding_length=config.most,
            disable_unk=True,
            suppress_sequences=self._never,  # which gshard's search never writes either
        )
        best = (tuple(self._ids[piece] for piece in each.hypotheses[0]) for each in found)
        tokens = [(*ids, END)[: config.most] for ids in best]
        return [
            [Hypothesis(text, 0.0, ids)]
            for text, ids in zip(tokenizer.decode_target(tokens), tokens, strict=True)
        ]


def measured(
    name: str, translator: Any, found: dict[str, Hypothesis], clients: Any, seconds: float
) -> list[str]:
    """Print the rows of one engine, whose translations are known; they are returned for a page."""
    rows = []
    texts, want = list(found), {text: best.text.strip() for text, best in found.items()}
    service = Service(translator, name)
    server = ready(service)
    for count in clients:
        load(server, texts, want, min(count, 8), 0.0)  # once each, untimed
        rate, took, counts = load(server, texts, want, count, seconds)
        p50, p99 = np.percentile(took, [50, 99])
        wrong = " ".join(f"{counts[kind]:7}" for kind in ("lost", "wrong", "refused"))
        print(f"{name:12} {count:7} {rate:11.1f} {p50:6.2f} s {p99:6.2f} s {wrong}", flush=True)
        cells = [name, count, f"{rate:.1f}", f"{p50:.2f} s", f"{p99:.2f} s", *wrong.split()]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    server.stop()
    return rows


def translations(translator: Any, texts: list[str]) -> dict[str, Hypothesis]:
    """The best translation of each text."""
    return {t: found[0] for t, found in zip(texts, translator.translate(texts), strict=True)}


def compared(mine: dict[str, Hypothesis], other: dict[str, Hypothesis]) -> str:
    """A sentence about the work of both engines: that they do the same, or how far not.

    What is cut at the largest length has an end as its last token in gshard, and in CTranslate2
    one token more.
    """
    alike = sum(
        best.tokens[:-1] == other[text].tokens[: len(best.tokens) - 1]
        for text, best in mine.items()
    )
    steps = [np.mean([len(best.tokens) for best in found.values()]) for found in (mine, other)]
    return (
        f"{alike} of {len(mine)} sentences have the same translation in both engines; one takes "
        f"{steps[0]:.1f} steps on average in gshard and {steps[1]:.1f} in CTranslate2."
    )


def memory() -> float:
    """Megabytes that this process has in memory, on Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def long_load(translator: Any, texts: list[str], minutes: float, every: float = 60.0) -> int:
    """Print the process's memory while clients ask: the exit status."""
    want = {text: best.text.strip() for text, best in translations(translator, texts).items()}
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


def sized(dims: TransformerConfig, layers: int, model_dim: int) -> TransformerConfig:
    """A dense model of these sizes with the vocabularies of another."""
    heads = max(2, model_dim // 64)
    return dataclasses.replace(
        dims,
        experts=0,
        encoder_layers=layers,
        decoder_layers=layers,
        model_dim=model_dim,
        hidden_dim=4 * model_dim,
        heads=heads,
        key_dim=model_dim // heads,
        value_dim=model_dim // heads,
    )


def distinct_weights(dims: TransformerConfig) -> dict[str, np.ndarray]:
    """Random weights with which every source has a translation of its own.

    With weights of the usual size all translations are one, and an answer that belongs to another
    request would look like the right one: cross-attention has larger weights here.
    """
    arrays = random_weights(dims)
    return {name: 8 * a if "cross_attention.w" in name else a for name, a in arrays.items()}


def _table(names: Sequence[str], rows: list[str]) -> str:
    return "\n".join([f"| {' | '.join(names)} |", "|---" + "|---:" * (len(names) - 1) + "|", *rows])


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    options.add_argument("--threads", type=int, default=2, help="of each engine")
    options.add_argument("--minutes", type=float, default=0.0, help="watch the memory so long")
    options.add_argument("--layers", type=int, default=6, help="of the encoder and of the decoder")
    options.add_argument("--model-dim", type=int, default=512, help="the hidden dim is four times")
    options.add_argument("--page", type=Path, help="write the table into this page")
    given = options.parse_args(arguments)
    use_threads(given.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, 1, 1)
        run = Run.open(folder / "prepared")
        dims = sized(run.model_config, given.layers, given.model_dim)
        arrays = distinct_weights(dims)
        config = TranslateConfig(beam=1, rows=32, longest=32, most=32)
        translator = HostTranslator(HostModel(dims, arrays.__getitem__), run.tokenizer, config)
        texts = [words(n, "de") for n in range(100)]
        if given.minutes:
            sys.exit(long_load(translator, texts, given.minutes))
        engine = Engine(translator, arrays, folder / "ct2", given.threads)
        engines = {"gshard": translator, "CTranslate2": engine}
        found = {name: translations(each, texts) for name, each in engines.items()}
        head = f"{'engine':12} {'clients':>7} {'sentences/s':>11} {'median':>8} {'p99':>8}"
        print(f"{head} {'lost':>7} {'wrong':>7} {'refused':>7}", flush=True)
        different = len({best.text for best in found["gshard"].values()})
        assert different >= 80, f"only {different} of {len(texts)} translations are different"
        rows = []
        for name, each in engines.items():
            rows += measured(name, each, found[name], given.clients, given.seconds)
        same = compared(*found.values())
        print(same)
    if given.page:
        names = ("engine", "clients", "sentences/s", "median", "p99", "lost", "wrong", "refused")
        write_page(given.page, [_table(names, rows), textwrap.fill(same, 100)], LOAD)


if __name__ == "__main__":
    main()
