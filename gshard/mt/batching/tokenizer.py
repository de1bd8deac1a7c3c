"""SentencePiece vocabularies: one for all source languages, one for the target side.

They are trained on temperature-sampled text, so that small languages get pieces of their own, and
fall back to bytes, so that no character is ever unknown. For many-to-many translation a tag such
as `<2de>` is prepended to the source and names the language to translate into; tags are control
symbols, which no text can spell.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import sentencepiece

from gshard.errors import UserError, nearest, one_of
from gshard.mt import atomic
from gshard.nn.config import Count, SettingBounds

if TYPE_CHECKING:
    from gshard.mt.data.corpus import Corpus

PAD, UNKNOWN, START, END = range(4)  # the same in both vocabularies
DIRECTIONS = ("to-english", "from-english", "both")
_THREADS = 4  # fixed: the sums of the training depend on how the text is shared out
_SHARPNESS = 0.5  # of the probabilities of drawn pieces: 1 draws by them, 0 all ways alike
_NOTE = "tokenizer.json"
FILES = (_NOTE, "source.model", "target.model")


@dataclass(frozen=True)
class VocabularyConfig:
    """How the two vocabularies are made."""

    source_size: int = 16_000
    target_size: int = 8_000
    directions: str = "to-english"
    temperature: Annotated[float, SettingBounds(0, float("inf"))] = 5.0
    sentences: int = 1_000_000  # at most so many of each side
    seed: Count = 0
    languages: tuple[str, ...] = ()  # all, unless named
    segment_to: Count = 0  # examples; languages with fewer pairs are cut into pieces several ways

    def __post_init__(self) -> None:
        one_of("directions", self.directions, DIRECTIONS)


@dataclass(frozen=True)
class Task:
    """A direction of translation; one of its two sides is English."""

    source: str
    target: str

    @property
    def foreign(self) -> str:
        """The side that is not English."""
        return self.target if self.source == "en" else self.source

    def __str__(self) -> str:
        return f"{self.source}-{self.target}"


class Tokenizer:
    """Text to token ids and back, on both sides."""

    needs_source = False  # whether the language of a text has to be known before it is encoded
    start = START  # what a decoder begins with

    def __init__(self, source_model: bytes, target_model: bytes, config: VocabularyConfig):
        self.config = config
        self.models = (source_model, target_model)  # as SentencePiece writes them
        self._load()

    def _load(self) -> None:
        self._source, self._target = (
            sentencepiece.SentencePieceProcessor(model_proto=model) for model in self.models
        )

    def __getstate__(self) -> dict[str, object]:  # a processor does not travel, its model does
        return {"config": self.config, "models": self.models}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._load()

    @staticmethod
    def load(folder: str | Path) -> Tokenizer:
        """The tokenizer that `save` left in `folder`."""
        folder = Path(folder)
        models = []
        try:
            note = atomic.read_object(folder / _NOTE)
            for side in ("source", "target"):
                atomic.refuse_special(folder / f"{side}.model")
                models.append((folder / f"{side}.model").read_bytes())
                if hashlib.sha256(models[-1]).hexdigest() != note[side]:
                    raise UserError(f"{folder}/{side}.model is not the file that was saved")
            given = dict(note["config"], languages=tuple(map(str, note["config"]["languages"])))
            config = VocabularyConfig(**given)
            found = (
                SharedTokenizer(models[0], note["pieces"], note["tags"], config)
                if "pieces" in note
                else Tokenizer(models[0], models[1], config)
            )
            if not found.tasks:
                raise ValueError("it has no languages to translate between")
            return found
        except FileNotFoundError as error:
            raise UserError(f"no tokenizer in {folder}: {error.filename} is missing") from None
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise UserError(f"{folder / _NOTE} is damaged: {error!r}") from None

    def save(self, folder: str | Path) -> None:
        """Write both models and a note with their checksums."""
        refuse_to_replace(Path(folder))
        with atomic.new_folder(Path(folder)) as part:
            note: dict[str, object] = {"config": asdict(self.config), **self._noted()}
            for side, model in zip(("source", "target"), self.models, strict=True):
                (part / f"{side}.model").write_bytes(model)
                note[side] = hashlib.sha256(model).hexdigest()
            atomic.write_json(part / _NOTE, note)

    def _noted(self) -> dict[str, object]:
        """What the note has beside the settings and checksums."""
        return {}

    @property
    def digest(self) -> str:
        """Identifies this tokenizer: equal digests tokenize every text alike."""
        text = b"".join(hashlib.sha256(model).digest() for model in self.models)
        ways = f" {self.config.segment_to}" if self.config.segment_to else ""
        return hashlib.sha256(text + f"{self.config.directions}{ways}".encode()).hexdigest()

    @property
    def source_size(self) -> int:
        """How many ids the source side has."""
        return int(self._source.vocab_size())

    @property
    def target_size(self) -> int:
        """How many ids the target side has."""
        return int(self._target.vocab_size())

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The directions of translation that the vocabularies are made for."""
        into = [Task(language, "en") for language in self.config.languages]
        out = [Task("en", language) for language in self.config.languages]
        wanted = {"to-english": into, "from-english": out, "both": into + out}
        return tuple(wanted[self.config.directions])

    def tag(self, language: str) -> int:
        """The id of the tag that asks for a translation into `language`."""
        tag = int(self._source.piece_to_id(f"<2{language}>"))
        if tag == UNKNOWN:
            known = (*self.config.languages, "en")
            raise UserError(f"no target language {language!r}{nearest(language, known)}")
        return tag

    def forced(self, target: str) -> tuple[int, ...]:
        """The token that a decoder has to write first; none, unless the model is made so."""
        return ()

    def source_lengths(self, texts: Sequence[str]) -> list[int]:
        """How many pieces each source sentence has, without tags and ends."""
        return [len(ids) for ids in self._source.encode(list(texts), num_threads=_THREADS)]

    def encode_source(
        self, texts: Sequence[str], target: str = "en", source: str = ""
    ) -> list[list[int]]:
        """The ids of source sentences with their end, after a tag unless all go to English."""
        start = [] if self.config.directions == "to-english" else [self.tag(target)]
        pieces = self._source.encode(list(texts), num_threads=_THREADS)
        return [[*start, *ids, END] for ids in pieces]

    def draw_source(self, texts: Sequence[str], target: str, seed: int) -> list[list[int]]:
        """The same with pieces that are drawn, likely ones more often (Kudo, 2018)."""
        start = [] if self.config.directions == "to-english" else [self.tag(target)]
        sentencepiece.set_random_generator_seed(seed)  # of threads to come: one draws all
        pieces = self._source.encode(
            list(texts), num_threads=1, enable_sampling=True, alpha=_SHARPNESS, nbest_size=-1
        )
        return [[*start, *ids, END] for ids in pieces]

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of target sentences, each with its end; a decoder begins with START."""
        return [[*ids, END] for ids in self._target.encode(list(texts), num_threads=_THREADS)]

    def decode_target(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Text of target ids, each sequence up to its end."""
        cut = []
        for ids in sequences:
            ids = [int(i) for i in ids]
            ids = ids[: ids.index(END)] if END in ids else ids
            cut.append([i for i in ids if i not in (PAD, START)])
        return [str(text) for text in self._target.decode(cut)]

    def spell_source(self, ids: Iterable[int]) -> list[str]:
        """The piece, tag or symbol of each source id."""
        return [str(self._source.id_to_piece(int(i))) for i in ids]

    def spell_target(self, ids: Iterable[int]) -> list[str]:
        """The piece or symbol of each target id."""
        return [str(self._target.id_to_piece(int(i))) for i in ids]


class SharedTokenizer(Tokenizer):
    """One vocabulary for all languages and both sides, as NLLB and M2M100 have it.

    A source begins with the tag of its own language, and a translation with that of the target,
    which the decoder is forced to write after the END that it begins with. `pieces` are the names
    of all ids and `tags` the ids of the languages. Tags are no pieces of the SentencePiece model:
    no text can spell one.
    """

    needs_source, start = True, END

    def __init__(
        self, model: bytes, pieces: Sequence[str], tags: Mapping[str, int], config: VocabularyConfig
    ):
        self._pieces, self._tags = tuple(pieces), dict(tags)
        super().__init__(model, model, config)

    def _load(self) -> None:
        super()._load()
        tags = set(self._tags.values())
        spelled = enumerate(self._pieces)
        self._ids = {piece: i for i, piece in spelled if i > END and i not in tags}

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), **{f"_{k}": v for k, v in self._noted().items()}}

    def _noted(self) -> dict[str, object]:
        return {"pieces": self._pieces, "tags": self._tags}

    @property
    def digest(self) -> str:
        """Identifies this tokenizer: equal digests tokenize every text alike."""
        text = json.dumps([self._pieces, self._tags], sort_keys=True)
        return hashlib.sha256((super().digest + text).encode()).hexdigest()

    @property
    def source_size(self) -> int:
        """How many ids there are."""
        return len(self._pieces)

    target_size = source_size

    @functools.cached_property
    def tasks(self) -> tuple[Task, ...]:  # type: ignore[override]  # cached property
        """Every language into every other."""
        return tuple(Task(*pair) for pair in itertools.permutations(self.config.languages, 2))

    def forced(self, target: str) -> tuple[int, ...]:
        """The tag of the target language."""
        return (self.tag(target),)

    def tag(self, language: str) -> int:
        """The id of a language."""
        if language not in self._tags:
            raise UserError(f"no language {language!r}{nearest(language, self._tags)}")
        return self._tags[language]

    def encode_source(
        self, texts: Sequence[str], target: str = "en", source: str = ""
    ) -> list[list[int]]:
        """The ids of sentences in the language `source`: its tag, their pieces, the end."""
        tag = self.tag(source)
        return [[tag, *ids] for ids in self.encode_target(texts)]

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of sentences, each with its end; a decoder begins with its language's tag."""
        found = self._source.encode(list(texts), out_type=str, num_threads=_THREADS)
        return [[*(self._ids.get(piece, UNKNOWN) for piece in each), END] for each in found]

    def decode_target(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Text of ids, each sequence up to its end, without tags and other symbols."""
        texts = []
        for ids in sequences:
            spelled = self.spell_target(itertools.takewhile(lambda i: i != END, map(int, ids)))
            texts.append(str(self._target.decode([each for each in spelled if each in self._ids])))
        return texts

    def spell_source(self, ids: Iterable[int]) -> list[str]:
        """The piece, tag or symbol of each id."""
        return [self._pieces[int(i)] for i in ids]

    spell_target = spell_source


def refuse_to_replace(folder: Path) -> None:
    """An error if there is something else in `folder` than vocabularies, which are replaced."""
    if folder.exists() and (not folder.is_dir() or {p.name for p in folder.iterdir()} - {*FILES}):
        raise UserError(f"{folder} has other files too; name a new folder for the vocabularies")


def temperature_shares(counts: Sequence[int], temperature: float) -> np.ndarray:
    """The share of each language at a temperature; languages without data get none.

    It goes from 1, in proportion to the data, to infinity, uniform. The corpus follows a power law:
    sampled as it is, small languages are hardly ever seen; sampled uniformly, large ones starve.
    With counts n, language l gets the share n_l^(1/T) / sum n^(1/T).
    """
    if not temperature >= 1:
        raise UserError(
            f"temperature {temperature}: 1 samples in proportion to the data, inf uniformly"
        )
    sizes = np.asarray(counts, dtype=np.float64)
    weights = np.where(sizes > 0, np.maximum(sizes, 1) ** (1 / temperature), 0.0)
    if not weights.sum():
        raise UserError("there is nothing to sample from")
    return weights / weights.sum()


def train_tokenizer(corpus: Corpus, config: VocabularyConfig) -> Tokenizer:
    """Train both vocabularies on a temperature sample of `corpus`; equal inputs, equal models."""
    for language in config.languages:
        corpus.path(language)  # an unknown language is an error here, not later
    languages = config.languages or corpus.languages
    config = VocabularyConfig(**{**asdict(config), "languages": tuple(languages)})
    foreign, english = _sample(corpus, config)
    # English is on the source side as often as all other languages together.
    sides = {
        "to-english": (foreign, english),
        "from-english": (english, foreign),
        "both": ([*foreign, *english], [*english, *foreign]),
    }
    source, target = sides[config.directions]
    tags = [f"<2{language}>" for language in ("en", *languages)]
    return Tokenizer(
        # The source is normalised, which forgives odd Unicode; the target is not, so that a
        # decoded sentence is exactly what was encoded.
        _train(source, config.source_size, "nmt_nfkc", tags),
        _train(target, config.target_size, "identity", []),
        config,
    )


def _sample(corpus: Corpus, config: VocabularyConfig) -> tuple[list[str], list[str]]:
    counts = [corpus.count(language) for language in config.languages]
    shares = temperature_shares(counts, config.temperature)
    foreign, english = [], []
    for i, language in enumerate(config.languages):
        wanted = min(counts[i], max(1, round(shares[i] * config.sentences)))
        rng = np.random.default_rng([config.seed, i])
        rows = np.sort(rng.choice(counts[i], wanted, replace=False))
        table = corpus.read(language, columns=["source", "english"]).take(rows)
        foreign += table["source"].to_pylist()
        english += table["english"].to_pylist()
    return foreign, list(dict.fromkeys(english))  # the same English comes from many languages


def _train(texts: Sequence[str], size: int, normalisation: str, tags: list[str]) -> bytes:
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=filter(None, texts),
            model_writer=model,
            model_type="unigram",
            vocab_size=size,
            hard_vocab_limit=False,  # a small corpus has fewer pieces than were asked for
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name=normalisation,
            control_symbols=tags,
            pad_id=PAD,
            unk_id=UNKNOWN,
            bos_id=START,
            eos_id=END,
            num_threads=_THREADS,
            shuffle_input_sentence=False,
            minloglevel=2,
        )
    except RuntimeError as error:
        needed = 256 + 4 + len(tags)
        hint = f" (bytes, tags and symbols alone take {needed})" if size <= needed + 100 else ""
        raise UserError(f"a vocabulary of {size} pieces cannot be trained: {error}{hint}") from None
    return model.getvalue()
