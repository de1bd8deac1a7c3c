"""Which language a text is in, by the character n-grams of the languages of a corpus.

    python -m gshard.mt.decoding.detect CORPUS

prints the share of the corpus' test sentences whose language is found. Detectors that can be
installed know some hundred languages and not those of anybody's own corpus; this one knows just
those that a model has learned. It is naive Bayes over n-grams of 1 to 4 characters, hashed: one
table of numbers, [languages, buckets].
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gshard.errors import UserError
from gshard.mt.data.corpus import Corpus
from gshard.mt.run import Run
from gshard.mt.training.weights import DETECTOR, WeightsFile, write_weights

_BUCKETS = 1 << 15
_LENGTHS = (1, 2, 3, 4)  # characters of an n-gram
_READ = 2_000  # characters of a text that are looked at
_CHARACTERS = 400_000  # of a language, to learn from
_SMOOTHING = 0.5


class Detected(NamedTuple):
    """A language, and how sure that is, from 0 to 100."""

    language: str
    confidence: float


class Detector:
    """The log-probability of each bucket of n-grams in each language."""

    def __init__(self, languages: Sequence[str], table_LB: np.ndarray):
        self.languages = tuple(languages)
        self._table_LB = table_LB.astype(np.float32)

    @staticmethod
    def train(texts: Mapping[str, Iterable[str]]) -> Detector:
        """Learn from some text of each language."""
        counts = [_counts("\n".join(lines)) + _SMOOTHING for lines in texts.values()]
        rows = [np.log(count / count.sum()) for count in counts]
        return Detector(list(texts), np.stack(rows))

    @staticmethod
    def of(corpus: Corpus, languages: Sequence[str]) -> Detector:
        """Learn from the training text of a corpus; English is among the languages."""
        texts: dict[str, list[str]] = {"en": []}
        share = _CHARACTERS // max(len(languages), 1) + 1000
        for language in languages:
            pairs = list(corpus.pairs(language))
            texts[language] = _up_to(_CHARACTERS, (source for source, _ in pairs))
            texts["en"] += _up_to(share, (english for _, english in pairs))
        return Detector.train(texts)

    def detect(self, text: str, most: int = 3) -> list[Detected]:
        """The likeliest languages, the best first; none for text without a letter."""
        text = text[:_READ]
        if not any(c.isalpha() for c in text):
            return []
        counts = _counts(text)
        seen = np.flatnonzero(counts)
        scores_L = self._table_LB[:, seen] @ counts[seen].astype(np.float32)
        # N-grams that overlap are no independent witnesses: each character counts once.
        weights_L = np.exp((scores_L - scores_L.max()) / len(_LENGTHS))
        shares_L = weights_L / weights_L.sum() * self._fit(scores_L, counts.sum())
        best = np.argsort(-shares_L, kind="stable")[:most]
        found = [Detected(self.languages[n], round(100 * float(shares_L[n]), 1)) for n in best]
        return [each for n, each in enumerate(found) if n == 0 or each.confidence >= 1.0]

    @functools.cached_property
    def _moments(self) -> tuple[np.ndarray, np.ndarray]:
        """The entropy of an n-gram of each language, and the deviation of its log-probability."""
        p_LB = np.exp(self._table_LB)
        mean_L = (p_LB * self._table_LB).sum(1)
        return -mean_L, np.sqrt((p_LB * self._table_LB**2).sum(1) - mean_L**2)

    def _fit(self, scores_L: np.ndarray, count: float) -> np.ndarray:
        """How typical of each language a text of `count` n-grams is: near 0 for other languages.

        A text's mean log-probability is near minus the language's entropy. One standard error
        below it is still typical; further down it is twice the normal distribution's tail.
        """
        entropy_L, deviation_L = self._moments
        z_L = (scores_L / count + entropy_L) / deviation_L * np.sqrt(count / len(_LENGTHS))
        return np.array([min(1.0, math.erfc(-(z + 1.0) / math.sqrt(2))) for z in z_L])

    def save(self, path: Path) -> None:
        """Write the table and the names of its rows."""
        note = {"languages": " ".join(self.languages)}
        write_weights(path, {"table": self._table_LB.astype("bfloat16")}, note)

    @staticmethod
    def load(path: Path) -> Detector:
        """What `save` wrote."""
        weights = WeightsFile(path)
        languages = weights.note.get("languages", "").split()
        if weights.shapes != {"table": (len(languages), _BUCKETS)} or not languages:
            raise UserError(f"{path} is damaged: it has no table of {len(languages)} languages")
        return Detector(languages, weights["table"])


def detector_of(run: Run) -> Detector | None:
    """The detector of a release, or one that learns from a run's corpus; None without either."""
    if (run.folder / DETECTOR).is_file():
        return Detector.load(run.folder / DETECTOR)
    try:
        return Detector.of(run.corpus, run.tokenizer.config.languages)
    except UserError:  # the corpus is not here
        return None


def _up_to(characters: int, lines: Iterable[str]) -> list[str]:
    """Lines until there are so many characters."""
    taken: list[str] = []
    for line in lines:
        if characters <= 0:
            break
        taken.append(line)
        characters -= len(line)
    return taken


def _counts(text: str) -> np.ndarray:
    """How often each bucket occurs. Words begin and end with a space; digits are all alike."""
    plain = "".join("0" if c.isdigit() else c for c in f" {' '.join(text.lower().split())} ")
    points = np.frombuffer(plain.encode("utf-32-le", "surrogatepass"), np.uint32)
    counts = np.zeros(_BUCKETS)
    hashed = np.zeros(len(points), np.uint64)
    for length in _LENGTHS:
        if len(points) < length:
            break
        # The n-grams of this length, from those that are one character shorter.
        hashed = hashed[: len(points) - length + 1]
        hashed = hashed * np.uint64(6364136223846793005) + points[length - 1 :] + np.uint64(1)
        mixed = (hashed ^ (hashed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        counts += np.bincount((mixed >> np.uint64(40)).astype(np.int64) % _BUCKETS, None, _BUCKETS)
    return counts


def accuracy(corpus: Corpus, detector: Detector, split: str = "test") -> dict[str, float]:
    """The share of each language's sentences that are found to be in it."""
    shares = {}
    for language in detector.languages:
        if language != "en" and corpus.count(language, split):
            sources = [source for source, _ in corpus.pairs(language, split)][:500]
            found = (detector.detect(source, 1) for source in sources)
            right = sum(bool(best) and best[0].language == language for best in found)
            shares[language] = right / len(sources)
    return shares


def main(folder: str) -> None:
    """Print the accuracy on a corpus."""
    corpus = Corpus.open(folder)
    shares = accuracy(corpus, Detector.of(corpus, corpus.languages))
    worst = sorted(shares, key=lambda language: shares[language])[:10]
    print(f"{len(shares)} languages: {100 * np.mean(list(shares.values())):.1f} % of the sentences")
    print("least: " + ", ".join(f"{name} {100 * shares[name]:.0f} %" for name in worst))


if __name__ == "__main__":
    main(sys.argv[1])
