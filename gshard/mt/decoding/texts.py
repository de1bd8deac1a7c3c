"""From texts to batches of tokens and back, whatever searches the batches.

Texts are cut to what the model can take, and sorted by length into batches. What a text becomes
does not depend on the texts beside it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from gshard.errors import UserError, nearest
from gshard.mt.batching.tokenizer import END, PAD, Tokenizer
from gshard.mt.broadcast import Broadcast
from gshard.mt.decoding.search import BeamConfig, Translations
from gshard.mt.decoding.segment import cut, cut_sentences
from gshard.mt.progress import SILENT, Progress
from gshard.nn.config import TransformerConfig

MOST = 1 << 16  # hypotheses of a sentence, sentences in a batch: more than any device holds
_UNSPACED = ("zh", "ja", "yue", "wuu", "th", "lo", "km", "my", "bo", "dz")


@dataclass(frozen=True)
class TranslateConfig:
    """How to search, and the shapes to search in.

    A batch has `rows` sentences of `shortest`, twice that, ... up to `longest` source tokens;
    longer text is cut.
    A translation has at most twice the tokens of its source's shape and 16, within `most`.
    """

    beam: int = 4
    nbest: int = 1
    alpha: float = 0.6
    rows: int = 32
    longest: int = 128
    most: int = 256
    shortest: int = 16  # of the programs

    def __post_init__(self) -> None:
        if self.beam < 1:
            raise UserError(f"a beam of {self.beam} is too small; 1 is greedy search")
        if max(self.beam, self.rows) > MOST:
            raise UserError(
                f"a beam of {self.beam:,} in batches of {self.rows:,} rows; of each, {MOST:,} is "
                "the most"
            )
        if self.rows < 1:
            raise UserError(f"batches of {self.rows} rows are empty; at least 1 is needed")
        if self.longest < 4 or self.most < 2 or self.shortest < 1:
            raise UserError(
                f"longest is {self.longest}, most {self.most} and shortest {self.shortest} tokens; "
                "4, 2 and 1 are the least"
            )
        try:
            self.search(self.longest)
        except ValueError as error:
            raise UserError(str(error)) from None

    @property
    def lengths(self) -> tuple[int, ...]:
        """The source lengths of the programs: doubled up to the longest."""
        doubled = (self.shortest << n for n in range(self.longest.bit_length()))
        return (*(length for length in doubled if length < self.longest), self.longest)

    def shape(self, tokens: int) -> int:
        """The source length of the program for a sentence of so many tokens."""
        return next(length for length in self.lengths if tokens <= length)

    def search(self, length: int) -> BeamConfig:
        """How sentences of the program of that source length are searched."""
        most = min(2 * length + 16, self.most)
        return BeamConfig(self.beam, self.nbest, most, self.alpha)


class Hypothesis(NamedTuple):
    """A translation, its length-normalized log-probability, and its tokens with their end."""

    text: str
    score: float
    tokens: tuple[int, ...] = ()


class SearchJob(NamedTuple):
    """One piece of text to translate, its source tokens, and the program's source length."""

    piece: str
    ids: list[int]
    length: int


class Choices(NamedTuple):
    """The experts of each token at one MoE layer and their weights, the first choice first."""

    expert: np.ndarray  # [choices, tokens]
    weight: np.ndarray


class Routings(NamedTuple):
    """For each MoE layer of both stacks the choices of its tokens; of a dense stack none."""

    encoder: list[Choices]
    decoder: list[Choices]


class TextTranslator(abc.ABC):
    """Texts in, n-best lists out; an engine defines `search` and `routings`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: TranslateConfig,
        model_config: TransformerConfig,
        weights: int,
        broadcast: Broadcast | None = None,
        name: str = "",
    ):
        self.tokenizer = tokenizer
        self.config = config
        self.model_config = model_config
        self.weights = weights
        self._broadcast, self._name = broadcast or Broadcast(), name
        self.missed: set[tuple[int, int]] = set()  # rows and length of what would have fitted

    @abc.abstractmethod
    def search(self, source: np.ndarray, forced: np.ndarray | None = None) -> Translations:
        """The n-best lists of a batch of tokens, padded at the end.

        Every translation begins with the token `forced`, if it is given.
        """

    @abc.abstractmethod
    def routings(self, source: Sequence[int], output: Sequence[int]) -> Routings:
        """The experts of every token of a sentence and of its translation."""

    def search_program(self, rows: int, length: int) -> Callable[..., Translations]:
        """The search of `rows` sentences of `length` tokens, compiled where it has to be."""
        return self.search

    @property
    def pool(self) -> Any:
        """The `decoding.pool.Pool` that sentences join and leave, where the engine has one."""
        return None

    def to_compile(self) -> list[Callable[[], Any]]:
        """What has to run once before a server is ready."""
        return []

    def beam(self, length: int) -> BeamConfig:
        """How sentences of the program of that source length are searched."""
        return replace(self.config.search(length), start=self.tokenizer.start)

    @property
    def full_rows(self) -> int:
        """Sentences in a full batch."""
        return self.config.rows

    def _rows(self, count: int, length: int) -> int:
        """The rows of the batch for so many sentences, at least as many."""
        return count

    def translate(
        self,
        texts: Sequence[str],
        target: str = "en",
        progress: Progress = SILENT,
        source: str = "",
    ) -> list[list[Hypothesis]]:
        """For each text, in order, its best translations, the best one first.

        Some models have to know the language of the text, `source`.
        Blank text becomes one empty translation. Pieces of text that was too long are translated
        apart and joined, best with best; the score is then their mean.
        """
        cuts = self._cuts(texts)
        distinct = list(dict.fromkeys(piece for pieces in cuts for piece in pieces))
        jobs = self.jobs(distinct, target, source)
        found: dict[str, list[Hypothesis]] = {}
        step = progress.stage("translate", len(jobs))
        for batch in self._batches(jobs):
            hypotheses = self._search(batch, target)
            found.update(zip((job.piece for job in batch), hypotheses, strict=True))
            step(count=len(batch))
        return [joined([found[p] for p in pieces if p in found], target) for pieces in cuts]

    def pieces(self, text: str) -> list[str]:
        """The text in pieces that the model can take; most often there is one."""
        return self._cuts([text])[0]

    def sentences(self, text: str) -> list[str]:
        """The text in sentences, short ones together; joined they are the text."""
        return cut_sentences(well_formed(text), self.tokenizer.source_lengths, self._room)

    def _cuts(self, texts: Sequence[str]) -> list[list[str]]:
        """The pieces of each text; those that fit are found together, which is far faster."""
        size, room = self.tokenizer.source_lengths, self._room
        whole = [well_formed(text) for text in texts]
        return [
            [text] if tokens <= room else cut(text, size, room)
            for text, tokens in zip(whole, size(whole), strict=True)
        ]

    @property
    def _room(self) -> int:
        return self.config.longest - self._overhead

    @property
    def _overhead(self) -> int:
        """Tokens beside those of the text: the end, and a tag if the model has several targets."""
        return 1 if self.tokenizer.config.directions == "to-english" else 2

    def jobs(self, pieces: Sequence[str], target: str, source: str) -> list[SearchJob]:
        """What there is to translate; of blank text nothing."""
        longest, jobs = self.config.longest, []
        encoded = self.tokenizer.encode_source(pieces, target, source) if pieces else []
        for piece, ids in zip(pieces, encoded, strict=True):
            if len(ids) > longest:  # a single character that the longest program cannot hold
                ids = [*ids[: longest - 1], END]
            if len(ids) > self._overhead:
                jobs.append(SearchJob(piece, ids, self.config.shape(len(ids))))
        return jobs

    def _batches(self, jobs: Sequence[SearchJob]) -> Iterator[list[SearchJob]]:
        """Batches of one shape, with sentences of like length together: they end together."""
        for length in self.config.lengths:
            alike = sorted((j for j in jobs if j.length == length), key=lambda j: len(j.ids))
            for i in range(0, len(alike), self.config.rows):
                yield alike[i : i + self.config.rows]

    def _search(self, batch: Sequence[SearchJob], target: str) -> Iterator[list[Hypothesis]]:
        """The n-best lists of a batch."""
        length = max(job.length for job in batch)
        source = np.full((self._rows(len(batch), length), length), PAD, np.int32)
        for row, job in enumerate(batch):
            source[row, : len(job.ids)] = job.ids
        arrays = (source, *(np.array(token, np.int32) for token in self.tokenizer.forced(target)))
        with self._broadcast.running("search", self._name, *arrays):
            found = self.search(*arrays)
        for row in range(len(batch)):
            yield self.hypotheses(found, row)

    def hypotheses(self, found: Translations, row: int = 0) -> list[Hypothesis]:
        """The n-best list of a row that was searched."""
        places = [n for n in range(self.config.nbest) if found.lengths[row, n]]
        tokens = [tuple(found.tokens[row, n, : found.lengths[row, n]].tolist()) for n in places]
        texts = self.tokenizer.decode_target(tokens)
        scores = [float(found.scores[row, n]) for n in places]
        return [Hypothesis(*each) for each in zip(texts, scores, tokens, strict=True)]


def choose_target(tokenizer: Tokenizer, source: str = "", target: str = "") -> str:
    """The language to translate into, which must be one that the model has learned.

    Into English the source need not be named, since the model sees text only; if it is, it must
    be known too. Without a target it is English, or the only one there is.
    """
    sources = sorted({task.source for task in tokenizer.tasks})
    targets = sorted({task.target for task in tokenizer.tasks})
    if source and source not in (*sources, *targets):
        raise UserError(_unknown(source, "from", sources))
    if not source and tokenizer.needs_source:
        raise UserError(
            "this model has to know the language of the text (--from, or `source`), which is one "
            f"of {', '.join(sources)}"
        )
    if not target:
        target = "en" if "en" in targets and source != "en" else ""
        if not target and len(targets) > 1:
            raise UserError(
                f"which language to translate into? --to is one of {', '.join(targets)}"
            )
        target = target or targets[0]
    if target not in targets:
        raise UserError(_unknown(target, "into", targets))
    if source == target:
        raise UserError(f"the text is in {source!r} and is to be translated into {target!r}")
    return target


def _unknown(language: str, way: str, known: Sequence[str]) -> str:
    near = nearest(language, known) if len(known) > 1 else ""
    return (
        f"this model does not translate {way} {language!r}{near}; "
        f"it translates {way} {', '.join(known)}"
    )


def is_unspaced(language: str) -> bool:
    """Whether sentences of a language follow each other without a space."""
    return language.split("_")[0].split("-")[0] in _UNSPACED


def well_formed(text: str) -> str:
    """The text with U+FFFD for halves of surrogate pairs, which no encoding can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def joined(pieces: Sequence[Sequence[Hypothesis]], target: str) -> list[Hypothesis]:
    """The n-best list of a text from those of its pieces."""
    if len(pieces) == 1:
        return list(pieces[0])
    if not pieces:
        return [Hypothesis("", 0.0)]
    space = "" if is_unspaced(target) else " "
    joined = []
    for n in range(max(map(len, pieces))):
        each = [piece[min(n, len(piece) - 1)] for piece in pieces]
        text = space.join(stripped for h in each if (stripped := h.text.strip()))
        score = sum(h.score for h in each) / len(each)
        joined.append(Hypothesis(text, score, tuple(t for h in each for t in h.tokens)))
    return joined


def routes(
    translator: TextTranslator, piece: str, best: Hypothesis, target: str, source: str = ""
) -> dict[str, list[dict[str, Any]]]:
    """The experts of a piece of text and of its translation, as the search ran them.

    Each token of the `source` and the `output` has its `piece`, and for each MoE layer in `layers`
    its experts with their weights, the first choice first. A token of the output has the experts
    that produced it.
    """
    tokenizer, config = translator.tokenizer, translator.config
    (ids,) = tokenizer.encode_source([piece], target, source)
    ids = ids[: config.longest]
    tokens = best.tokens[: config.search(config.shape(len(ids))).max_length]
    found = translator.routings(ids, tokens)
    return {
        "source": _routes(tokenizer.spell_source(ids), found.encoder),
        "output": _routes(tokenizer.spell_target(tokens), found.decoder),
    }


def _routes(pieces: Sequence[str], layers: Sequence[Choices]) -> list[dict[str, Any]]:
    def at(each: Choices, t: int) -> list[tuple[int, float]]:
        return list(zip(each.expert[:, t].tolist(), each.weight[:, t].tolist(), strict=True))

    return [{"piece": p, "layers": [at(x, t) for x in layers]} for t, p in enumerate(pieces)]
