"""Whether a model translates or recites: outputs that are verbatim in its training text.

Where no held-out sentence is in the training text, an output that is one is not its reference,
however fluent. The lengths of outputs and references are compared as well: memorized outputs are
mostly short.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gshard.mt.batching.tokenizer import Task
from gshard.mt.data.corpus import Corpus


@dataclass(frozen=True)
class Recited:
    """Of all outputs of a system: those of the training text, those right, and their length."""

    verbatim: float  # share of outputs that are sentences of the training text
    exact: float  # share of outputs that are the reference
    length: float  # words of all outputs, over those of all references


def verbatim(
    pairs: Mapping[str, Sequence[tuple[str, str]]], known: Mapping[str, Collection[str]]
) -> Recited:
    """From (output, reference) by target language, and the training text in each of them."""
    total = verbatim = exact = words = wanted = 0
    for target, each in pairs.items():
        for output, reference in each:
            total += 1
            verbatim += output in known[target]
            exact += output == reference
            words += len(output.split())
            wanted += len(reference.split())
    return Recited(verbatim / max(total, 1), exact / max(total, 1), words / max(wanted, 1))


def training_targets(corpus: Corpus, tasks: Sequence[Task]) -> dict[str, set[str]]:
    """The distinct sentences of the training text in each target language."""
    found: dict[str, set[str]] = {}
    for task in tasks:
        column = "english" if task.target == "en" else "source"
        texts = corpus.read(task.foreign, "train", [column])[column].to_pylist()
        found.setdefault(task.target, set()).update(texts)
    return found
