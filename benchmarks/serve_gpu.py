"""Load on a server with one GPU: target tokens a second, latency, and one sentence by itself.

    python -m benchmarks.serve_gpu                       the 32-expert model, beam 4; an H200
    python -m benchmarks.serve_gpu --batches             the same in batches, to compare
    python -m benchmarks.serve_gpu --model tiny          whether it runs, on a CPU too

Clients in a process of their own ask for one sentence after the other over HTTP. The model has the
paper's dims and fresh weights, which hardly ever end a sentence: a translation is as long as it
may get, 48 tokens for up to 16 of the source and 80 for up to 32. A word is a token: what
SentencePiece takes is not in it. `other` counts answers that differ from the sentence's own
translation, searched while others were: products of other sizes round otherwise, and weights that
have learned nothing have many continuations that are nearly as good.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.gpu.fresh import fresh_model
from benchmarks.load_clients import load, ready
from gshard.mt.batching.tokenizer import END, START, Task
from gshard.mt.decoding.pool import Pool
from gshard.mt.decoding.texts import TranslateConfig
from gshard.mt.decoding.translator import Translator
from gshard.mt.serving.service import Service
from gshard.nn.family import FAMILY
from gshard.nn.transformer import TransformerConfig

CLIENTS = (1, 8, 64, 256, 512)
TEXTS = 512
LONGEST = 32  # tokens of a source


class Words:
    """A tokenizer whose tokens are numbers."""

    needs_source, start = False, START
    config, tasks = SimpleNamespace(directions="to-english"), (Task("de", "en"),)

    def __init__(self, size: int):
        self.source_size = self.target_size = size

    def forced(self, target: str) -> tuple[int, ...]:
        return ()

    def source_lengths(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]

    def encode_source(
        self, texts: Sequence[str], target: str = "en", source: str = ""
    ) -> list[list[int]]:
        return [[*map(int, text.split()), END] for text in texts]

    def decode_target(self, sequences: Iterable[Iterable[int]]) -> list[str]:
        return [" ".join(str(i) for i in ids if i > END) for ids in sequences]


class OneSearch(Translator):
    """A translator whose sentences join and leave one search, on a CPU too."""

    @functools.cached_property
    def pool(self) -> Pool:
        return self.new_pool()


class Batches(Translator):
    """A translator that searches batches, on a GPU too."""

    pool = None  # type: ignore[assignment]


def config_of(name: str) -> TransformerConfig:
    """The paper's dims with 32 experts in the ways that are fast, or a model for tests."""
    c = FAMILY["moe_128e_12l"].config
    if name == "tiny":
        dims = {"model_dim": 32, "hidden_dim": 64, "heads": 2, "key_dim": 16, "value_dim": 16}
        layers = {"encoder_layers": 2, "decoder_layers": 2}
        return replace(c, experts=4, groups=None, target_vocab=500, **dims, **layers)
    types = {"dtype": "bfloat16", "weight_dtype": "bfloat16"}
    return replace(c, experts=32, groups=None, **types).tuned()


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=15.0, help="of each row")
    options.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    options.add_argument("--rows", type=int, default=256, help="sentences searched at once")
    options.add_argument("--model", choices=("paper", "tiny"), default="paper")
    options.add_argument("--batches", action="store_true")
    options.add_argument("--json", help="add the rows to this file, a line each")
    given = options.parse_args(arguments)
    config = config_of(given.model)
    how = TranslateConfig(beam=4, rows=given.rows, longest=LONGEST, most=2 * LONGEST + 16)
    kind = Batches if given.batches else OneSearch
    tokenizer: Any = Words(config.target_vocab)
    translator = kind(fresh_model(config), tokenizer, config=how)
    with ThreadPoolExecutor(8) as threads:  # the server's own thread finds them compiled
        list(threads.map(lambda program: program(), translator.to_compile()))
    service = Service(translator, "fresh")
    server = ready(service)
    rng = np.random.default_rng(0)
    sizes = rng.integers(4, LONGEST, TEXTS)
    texts = [" ".join(map(str, rng.integers(4, config.target_vocab, n))) for n in sizes]
    answers = service.submit_pieces(texts, "en").result()
    found = {text: hypotheses[0] for text, hypotheses in zip(texts, answers, strict=True)}
    want = {text: best.text.strip() for text, best in found.items()}
    tokens = float(np.mean([len(best.tokens) for best in found.values()]))
    what = "in batches" if given.batches else "in one search"
    print(f"{what}, {given.rows} sentences at once, {tokens:.1f} tokens a translation", flush=True)
    print("clients  tokens/s  sentences/s      p50      p95   ms a token  lost  other", flush=True)
    for clients in given.clients:
        load(server, texts, want, clients, 0.0)  # once each, untimed
        while service.health["compiling"]:
            load(server, texts, want, clients, 1.0)
        rate, took, counts = load(server, texts, want, clients, given.seconds)
        p50, p95 = (float(x) for x in np.percentile(took, [50, 95]))
        row = {"clients": clients, "tokens_per_s": rate * tokens, "sentences_per_s": rate}
        row |= {"p50": p50, "p95": p95, "ms_a_token": 1e3 * p50 / tokens, "how": what}
        row |= {"lost": counts["lost"], "other": counts["wrong"] / len(took)}
        print(
            f"{clients:7} {rate * tokens:9,.0f} {rate:12.1f} {p50:7.3f}s {p95:7.3f}s "
            f"{row['ms_a_token']:12.2f} {row['lost']:5} {row['other']:6.0%}",
            flush=True,
        )
        if given.json:
            with open(given.json, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    server.stop()


if __name__ == "__main__":
    main()
