"""Beam search on a CPU beside CTranslate2, in one run: target tokens a second, and memory.

    python -m benchmarks.cpu_decode
    python -m benchmarks.cpu_decode --threads 1 --sentences 16 --rounds 1
    python -m benchmarks.cpu_decode --rounds 1 --page docs/results/cpu.md        some 8 minutes
    python -m benchmarks.cpu_decode --bytes        of weights that a step reads

6 + 6 layers of 512/2048, vocabularies of 32,000 and 16,000, a beam of 4, random weights: every
search goes on to the last of `--steps` steps, in which the best hypothesis of each sentence gets
its tokens. Each engine has a process of its own for each number of threads; the engines take turns
for `--rounds` rounds, and the fastest search counts. `of CT2` is the share of CTranslate2's rate in
the same numbers (float32 or 8 bits), `of dense` that of the same engine without experts. `XLA` is
the compiled search, which `gshard translate` uses on accelerators; `--engines` asks for it. Memory
is the process's peak, that of loading included. `--clock processor` divides by processor time for
each thread, which other work on the machine affects less. `--page` writes the tables of the docs
between the marks in that file, with the first translation of a process
(`benchmarks.first_translation`).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.first_translation import measured
from benchmarks.random_model import dims, random_weights

ENGINES = {
    "CTranslate2 float32": {"engine": "ctranslate2"},
    "CTranslate2 int8": {"engine": "ctranslate2", "int8": True},
    "gshard float32": {"engine": "host"},
    "gshard int8": {"engine": "host", "int8": True},
    "gshard 32 experts float32": {"engine": "host", "experts": 32},
    "gshard 32 experts int8": {"engine": "host", "int8": True, "experts": 32},
    "XLA float32": {"engine": "xla"},
}
LENGTH = 24  # source tokens of a sentence
BEAM = 4
CLOCKS = ("wall", "processor")
TABLES = ("<!-- tables -->", "<!-- end of tables -->")
Search = Callable[[np.ndarray], int]  # sentences to target tokens


def host_engine(config: Any, steps: int, int8: bool, threads: int) -> Search:
    """gshard's search for CPUs."""
    from gshard.mt.decoding.host.translator import host_search
    from gshard.mt.decoding.search import BeamConfig

    model = host_model(config, int8, threads)
    search = BeamConfig(beam=BEAM, max_length=steps)
    return lambda source: int(host_search(model, source, search).lengths.sum())


def host_model(config: Any, int8: bool, threads: int) -> Any:
    """A model of random weights, arranged for products on a CPU."""
    from gshard.mt.decoding.host import products
    from gshard.mt.decoding.host.translator import HostModel
    from gshard.mt.training.weights import summed_axes
    from gshard.nn.config import Int8

    products.use_threads(threads)
    weights = random_weights(config)
    quantized = {}
    for name in list(weights) if int8 else []:
        if axes := summed_axes(name):
            quantized[name] = Int8.of(weights.pop(name), axes)
    return HostModel(config, lambda name: quantized[name] if name in quantized else weights[name])


def step_bytes(experts: int, steps: int) -> str:
    """How many weights a step of one sentence reads, without experts and with them."""
    from gshard.mt.decoding.host.translator import host_search
    from gshard.mt.decoding.search import BeamConfig

    config = dims(experts)
    model = host_model(config, True, 1)
    source = np.random.default_rng(1).integers(4, config.source_vocab, (1, LENGTH))
    with model.recording() as (_, decoder):
        host_search(model, source, BeamConfig(beam=BEAM, max_length=steps))
    distinct = np.mean([len(np.unique(choices.expert)) for choices in decoder])
    layer = 2 * config.model_dim * config.hidden_dim
    attention = 6 * config.model_dim**2  # of the source only queries and the result
    output = config.model_dim * config.target_vocab
    dense = config.decoder_layers * (attention + layer) + output
    sparse = dense + config.decoder_layers // 2 * (distinct - 1) * layer
    return (
        f"a step of one sentence reads {dense / 1e6:.1f} million weights without experts, and "
        f"{sparse / 1e6:.1f} million with {experts}, of which {BEAM} hypotheses need "
        f"{distinct:.1f} in a layer: if reading were all, {dense / sparse:.2f} of dense"
    )


def xla_engine(config: Any, steps: int) -> Search:
    """gshard's search as one compiled program."""
    import jax

    from gshard.mt.decoding.on_device import beam_search
    from gshard.mt.decoding.search import BeamConfig
    from gshard.mt.training.loading import model_like
    from gshard.mt.training.weights import unnamed

    model = jax.device_put(unnamed(random_weights(config), model_like(config)))
    search = BeamConfig(beam=BEAM, max_length=steps)
    run = jax.jit(lambda model, source: beam_search(model, source, search).lengths)
    return lambda source: int(np.asarray(run(model, source)).sum())


def ctranslate2_engine(config: Any, steps: int, int8: bool, threads: int) -> Search:
    """CTranslate2 with the same weights."""
    import ctranslate2

    from gshard.mt.release.exported import specification
    from gshard.mt.training.loading import model_like
    from gshard.mt.training.weights import unnamed

    spec = specification(unnamed(random_weights(config), model_like(config)))
    source_pieces = ["<unk>", "<s>", "</s>", *map(str, range(3, config.source_vocab))]
    spec.register_source_vocabulary(source_pieces)
    spec.register_target_vocabulary(source_pieces[: config.target_vocab])
    spec.validate()
    spec.optimize(quantization="int8" if int8 else None)
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        translator = ctranslate2.Translator(
            folder,
            compute_type="int8" if int8 else "float32",
            intra_threads=threads,
            inter_threads=1,
        )

    def search(source: np.ndarray) -> int:
        sentences = [[str(token) for token in row] for row in source]
        found = translator.translate_batch(
            sentences,
            beam_size=BEAM,
            max_decoding_length=steps,
            min_decoding_length=steps,
            disable_unk=True,
        )
        return sum(len(each.hypotheses[0]) for each in found)

    return search


def measure(given: dict[str, Any]) -> dict[str, Any]:
    """Of one engine: for each number of sentences its best rate; and the peak of memory."""
    config, steps = dims(given.get("experts", 0)), given["steps"]
    int8, threads = given.get("int8", False), given["threads"]
    if given["engine"] == "host":
        search = host_engine(config, steps, int8, threads)
    elif given["engine"] == "xla":
        search = xla_engine(config, steps)
    else:
        search = ctranslate2_engine(config, steps, int8, threads)
    rng = np.random.default_rng(1)
    rates = {}
    for sentences in given["sentences"]:
        source = rng.integers(4, config.source_vocab, (sentences, LENGTH)).astype(np.int32)
        search(source)
        best = dict.fromkeys(CLOCKS, 0.0)
        for _ in range(3 if sentences == 1 else 1):
            begin = time.perf_counter(), time.process_time() / threads
            tokens = search(source)
            ends = time.perf_counter(), time.process_time() / threads
            for clock, first, last in zip(CLOCKS, begin, ends, strict=True):
                best[clock] = max(best[clock], tokens / (last - first))
        rates[str(sentences)] = best
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"rates": rates, "megabytes": peak}


def in_own_process(given: dict[str, Any]) -> dict[str, Any]:
    """`measure` in a new process that has as many processors as threads."""
    threads = given["threads"]
    variables = {"OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    processors = sorted(os.sched_getaffinity(0))[:threads]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cpu_decode", "--measure", json.dumps(given)],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, processors),
    )
    return json.loads(done.stdout.splitlines()[-1])


def table(threads: int, found: dict[str, dict[str, Any]], sentences: list[int], clock: str) -> None:
    """Print the rows of one number of threads."""
    seconds = "a second" if clock == "wall" else "a second of processor time"
    print(f"\n{threads} thread{'s' * (threads > 1)}: target tokens {seconds}")
    heads = [f"{f'{count} sentences':>14} {'of CT2':>7} {'of dense':>8}" for count in sentences]
    print(f"{'':26}" + " ".join(heads) + f" {'memory':>9}")
    for name, row in found.items():
        numbers = "int8" if "int8" in name else "float32"
        cells = []
        for count in map(str, sentences):
            rate = row["rates"][count][clock]
            peer = found.get(f"CTranslate2 {numbers}")
            dense = found.get(f"gshard {numbers}") if "experts" in name else None
            shares = [f"{rate / o['rates'][count][clock]:.2f}" if o else "" for o in (peer, dense)]
            cells.append(f"{rate:14.1f} {shares[0]:>7} {shares[1]:>8}")
        print(f"{name:26}" + " ".join(cells) + f" {row['megabytes']:6.0f} MB", flush=True)


def markdown(threads: int, found: dict[str, dict[str, Any]], sentences: list[int]) -> str:
    """The same table for a page, with wall time and, in brackets, processor time."""
    heads = [f"{count} sentence{'s' * (count > 1)}" for count in sentences]
    lines = [
        f"{threads} thread{'s' * (threads > 1)}:",
        "",
        f"| | {' | '.join(f'{head} | of CT2 | of dense' for head in heads)} | memory |",
        "|---" + "|---:" * (3 * len(sentences) + 1) + "|",
    ]
    for name, row in found.items():
        numbers = "int8" if "int8" in name else "float32"
        peer = found.get(f"CTranslate2 {numbers}")
        dense = found.get(f"gshard {numbers}") if "experts" in name else None
        cells = []
        for count in map(str, sentences):
            cells.append("{:.0f} ({:.0f})".format(*_both(row, count)))
            cells += [
                "{:.2f} ({:.2f})".format(
                    *(a / b for a, b in zip(_both(row, count), _both(other, count), strict=True))
                )
                if other and other is not row
                else ""
                for other in (peer, dense)
            ]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['megabytes']:.0f} MB |")
    return "\n".join(lines)


def _both(row: dict[str, Any], count: str) -> list[float]:
    return [row["rates"][count][clock] for clock in CLOCKS]


def first_translations() -> str:
    """A row for each kind of weights."""
    rows = [f"| {name} | {wall:.1f} s | {used:.1f} s |" for name, wall, used in measured(3)]
    head = ["| first translation of a process | wall | processor |", "|---|---:|---:|"]
    return "\n".join([*head, *rows])


def write_page(path: Path, tables: list[str], marks: tuple[str, str]) -> None:
    """Replace what is between two marks of a page."""
    begin, end = marks
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    body = "\n\n".join(tables)
    path.write_text(f"{before}{begin}\n\n{body}\n\n{end}{after}", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Print a table for each number of threads."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options.add_argument("--sentences", type=int, nargs="+", default=[1, 16, 64])
    options.add_argument("--steps", type=int, default=32)
    options.add_argument("--rounds", type=int, default=2)
    usual = [name for name in ENGINES if not name.startswith("XLA")]
    options.add_argument("--engines", nargs="+", default=usual, choices=list(ENGINES))
    options.add_argument("--clock", nargs="+", default=["wall"], choices=CLOCKS)
    options.add_argument("--page", type=Path, help="write the tables into this page")
    options.add_argument("--bytes", action="store_true", help="of weights that a step reads")
    options.add_argument("--measure", help=argparse.SUPPRESS)
    given = options.parse_args(arguments)
    if given.measure:
        print(json.dumps(measure(json.loads(given.measure))))
        return
    if given.bytes:
        print(step_bytes(32, given.steps))
        return
    tables = []
    for threads in given.threads:
        found: dict[str, dict[str, Any]] = {}
        for _ in range(given.rounds):
            for name in given.engines:
                asked = {"threads": threads, "steps": given.steps, "sentences": given.sentences}
                row = in_own_process({**ENGINES[name], **asked})
                best = found.setdefault(name, row)
                for count, rates in row["rates"].items():
                    for clock, rate in rates.items():
                        best["rates"][count][clock] = max(best["rates"][count][clock], rate)
        for clock in given.clock:
            table(threads, found, given.sentences, clock)
        tables.append(markdown(threads, found, given.sentences))
    if given.page:
        write_page(given.page, [*tables, first_translations()], TABLES)


if __name__ == "__main__":
    main()
