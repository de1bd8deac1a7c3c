"""The first translation of a fresh process: what `gshard translate RELEASE` takes for one line.

    python -m benchmarks.first_translation              a release of random weights, made here
    python -m benchmarks.first_translation RELEASE

The model is that of `benchmarks.cpu_decode`. The command runs once so that files are in memory,
then `--rounds` times; the fastest counts, in wall and in processor time.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.random_model import dims, random_weights

LINE = "w17 w4 w90 w3 w250\n"


def vocabulary(size: int) -> bytes:
    """A SentencePiece model of made-up words."""
    from sentencepiece import sentencepiece_model_pb2 as formats

    model = formats.ModelProto()
    model.trainer_spec.model_type = formats.TrainerSpec.UNIGRAM
    model.trainer_spec.pad_id, model.trainer_spec.unk_id = 0, 1
    model.trainer_spec.bos_id, model.trainer_spec.eos_id = 2, 3
    kinds = formats.ModelProto.SentencePiece
    for piece, kind in (
        ("<pad>", kinds.CONTROL),
        ("<unk>", kinds.UNKNOWN),
        ("<s>", kinds.CONTROL),
        ("</s>", kinds.CONTROL),
    ):
        model.pieces.add(piece=piece, score=0.0, type=kind)
    for number in range(size - len(model.pieces)):
        model.pieces.add(piece=f"\u2581w{number}", score=-1.0 - number * 1e-4)
    return model.SerializeToString()


def make_release(folder: Path, precision: str) -> Path:
    """A release of the usual dims with random weights."""
    from gshard.mt import atomic
    from gshard.mt.batching.tokenizer import Tokenizer, VocabularyConfig
    from gshard.mt.config import RunConfig, to_json
    from gshard.mt.run import CONFIG
    from gshard.mt.training.weights import (
        VERIFIED,
        WEIGHTS,
        summed_axes,
        write_checksums,
        write_weights,
    )
    from gshard.nn.config import Int8

    config = dataclasses.replace(dims(), stacked=False)
    sizes = VocabularyConfig(config.source_vocab, config.target_vocab, languages=("de",))
    words = [vocabulary(size) for size in (config.source_vocab, config.target_vocab)]
    atomic.write_json(folder / CONFIG, to_json(RunConfig(config, vocabulary=sizes)))
    Tokenizer(*words, sizes).save(folder / "vocabulary")
    found = random_weights(config)
    for name in list(found) if precision == "int8" else []:
        if axes := summed_axes(name):
            found[name] = Int8.of(found[name], axes)
    write_weights(folder / WEIGHTS, found, {"step": "0"})
    write_checksums(folder, VERIFIED)
    return folder


def seconds(release: Path, rounds: int) -> tuple[float, float]:
    """The least wall and processor time of the command."""
    command = [sys.executable, "-m", "gshard.cli", "translate", str(release)]
    best = (float("inf"), float("inf"))
    for n in range(rounds + 1):
        begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            command, input=LINE, text=True, env=os.environ, stdout=subprocess.DEVNULL, check=True
        )
        wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if n:
            best = (min(best[0], wall), min(best[1], used))
    return best


def measured(rounds: int) -> Iterator[tuple[str, float, float]]:
    """Name, wall and processor time of releases with random weights."""
    for precision in ("float32", "int8"):
        with tempfile.TemporaryDirectory() as name:
            release = make_release(Path(name) / precision, precision)
            yield precision, *seconds(release, rounds)


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each release."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("release", type=Path, nargs="?")
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args(arguments)
    if given.release:
        show(given.release.name, *seconds(given.release, given.rounds))
        return
    for row in measured(given.rounds):
        show(*row)


def show(name: str, wall: float, used: float) -> None:
    """One line."""
    print(f"{name:12} first translation {wall:5.2f} s, processor {used:5.2f} s", flush=True)


if __name__ == "__main__":
    main()
