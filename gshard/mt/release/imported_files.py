"""The files of a checkpoint of Hugging Face, whoever made them: settings, tensors, tokenizer.

Settings have the types and ranges that `transformers` gives them, tensors have exactly the shapes
that follow from the settings, and every tensor has a place: what is damaged is refused in one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import sentencepiece
from safetensors import SafetensorError, safe_open

from gshard.errors import UserError
from gshard.mt import atomic
from gshard.mt.batching.tokenizer import SharedTokenizer, Tokenizer, VocabularyConfig
from gshard.mt.release import exported
from gshard.mt.typed import built
from gshard.nn.config import LARGEST, Count, Positive, SettingBounds
from gshard.untrusted import read_bytes, refuse_special, short_repr

_NUMBERS = ("F16", "BF16", "F32", "F64")
_TABLE = "model.shared.weight"
_SAME = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
_COMPUTED = ("model.encoder.embed_positions.weights", "model.decoder.embed_positions.weights")


@dataclass(frozen=True)
class TheirSettings:
    """The settings of a checkpoint; those of transformers, which leaves out what is as usual."""

    model_type: Literal["m2m_100", "nllb-moe"]
    activation_function: str = "relu"
    scale_embedding: bool = True
    tie_word_embeddings: bool = True
    vocab_size: Positive = 128_112
    encoder_layers: Positive = 12
    decoder_layers: Positive = 12
    encoder_attention_heads: Positive = 16
    decoder_attention_heads: Positive = 16
    encoder_ffn_dim: Positive = 4096
    decoder_ffn_dim: Positive = 4096
    d_model: Positive = 1024
    pad_token_id: Annotated[int, SettingBounds(-1, LARGEST)] = 1  # -1: positions begin with 0
    bos_token_id: Count = 0
    eos_token_id: Count = 2
    decoder_start_token_id: Count = 2
    num_experts: Positive = 128
    encoder_sparse_step: Count = 4
    decoder_sparse_step: Count = 4
    router_bias: bool = False
    moe_eval_capacity_token_fraction: Annotated[float, SettingBounds(0, LARGEST)] = 1.0
    moe_token_dropout: Annotated[float, SettingBounds(0, 1)] = 0.2
    second_expert_policy: str = "all"


def read_settings(folder: Path) -> TheirSettings:
    """The settings in `config.json`, of which others have no part in a model."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} has no config.json: it is no checkpoint of Hugging Face")
    known = TheirSettings.__dataclass_fields__
    given = {name: value for name, value in read_json(path).items() if name in known}
    return built(TheirSettings, given, f"{path}: ")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        return atomic.read_object(path)
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None


class Tensors:
    """The tensors of a checkpoint by name, read when they are asked for."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._place: dict[str, Any] = {}
        self._read: set[str] = set()
        for path in _paths(folder):
            try:
                refuse_special(path)
                opened: Any = safe_open(path, framework="numpy")
                names = opened.keys()
            except FileNotFoundError:
                raise UserError(f"{path} is missing") from None
            except (SafetensorError, OSError, ValueError) as error:  # a name that no file can have
                raise UserError(f"{path} is damaged: {short_repr(str(error))}") from None
            for name in names:
                if name in self._place:
                    raise UserError(f"{folder} has two tensors {short_repr(name)}")
                self._place[name] = opened
        others = (name for name in _SAME if name in self._place)
        if _TABLE not in self._place and (other := next(others, "")):  # one table, several names
            self._table = other
        else:
            self._table = _TABLE

    def rows(self) -> int:
        """How many rows the table of embeddings has."""
        shape = self._part(self._table).get_shape()
        return int(shape[0]) if shape else 0

    def table(self, *shape: int) -> np.ndarray:
        """The table of embeddings."""
        return self(self._table, *shape)

    def _part(self, name: str) -> Any:
        if name not in self._place:
            raise UserError(f"{self._folder} has no tensor {name}")
        return self._place[name].get_slice(name)

    def __call__(self, name: str, *shape: int) -> np.ndarray:
        """A tensor, which has to be of this shape, in float32."""
        part = self._part(name)
        where = f"{self._folder}: the tensor {name}"
        if part.get_dtype() not in _NUMBERS:
            allowed = " or ".join(_NUMBERS)
            raise UserError(f"{where} holds {part.get_dtype()}; allowed is {allowed}")
        if tuple(part.get_shape()) != shape:
            raise UserError(
                f"{where} has the shape {part.get_shape()}, and by config.json {list(shape)}"
            )
        self._read.add(name)
        with np.errstate(over="ignore", invalid="ignore"):
            values = self._place[name].get_tensor(name).astype(np.float32)
        if not np.isfinite(values).all():
            raise UserError(f"{where} has values that are not finite")
        return values

    def refuse_unread(self) -> None:
        """An error if a tensor was never asked for: the model would be another one."""
        left = sorted(self._place.keys() - self._read - {*_SAME, *_COMPUTED})
        if left:
            raise UserError(
                f"{self._folder}: config.json has no place for {len(left)} tensors, such as "
                f"{short_repr(left[0])}"
            )


def _paths(folder: Path) -> Iterator[Path]:
    """The files with weights."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = read_json(index).get("weight_map")
        names = list(listed.values()) if isinstance(listed, dict) and listed else [""]
        for name in names:
            if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
                raise UserError(f"{index} is damaged: {short_repr(name)} is no file of the folder")
        for name in sorted(set(names)):
            yield folder / name
    elif (folder / "model.safetensors").is_file():
        yield folder / "model.safetensors"
    else:
        raise UserError(
            f"{folder} has no model.safetensors; `save_pretrained` of transformers writes one"
        )


_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)

_PIECES = "sentencepiece.bpe.model"
_SYMBOLS = ("<pad>", "<unk>", "<s>", "</s>")  # in gshard's order
_CODES: dict[str, str] = exported.LAYOUT["languages"]  # of M2M100's tokenizer, not in its files


def read_tokenizer(folder: Path, given: TheirSettings, sizes: tuple[int, int]) -> Tokenizer | None:
    """The vocabularies: two in gshard's own layout, one of all ids in others; None without.

    `given` are the checkpoint's settings, and `sizes` the rows of its tables.
    """
    path = folder / exported.VOCABULARY
    try:
        if path.is_file():
            settings = read_json(path)
            config = built(VocabularyConfig, settings, f"{path}: ")
            models = [read_bytes(folder / f"{side}.spm") for side in ("source", "target")]
            tokenizer = Tokenizer(models[0], models[1], config)
        elif (folder / _PIECES).is_file():
            tokenizer = read_shared(folder, given, sizes[1])
        else:
            return None
    except FileNotFoundError as error:
        raise UserError(f"{folder}: {Path(error.filename).name} is missing") from None
    except _DAMAGED as error:
        why = f"{type(error).__name__}: {str(error).strip()[:200]}"
        raise UserError(f"{folder}: the tokenizer's files are damaged: {why}") from None
    found = (tokenizer.source_size, tokenizer.target_size)
    if found != sizes:
        raise UserError(f"{folder}: the vocabularies have {found} pieces, the tables {sizes} rows")
    if odd := [each for each in tokenizer.config.languages if not _is_name(each)]:
        raise UserError(f"{folder}: {short_repr(odd[0])} is no name of a language")
    if len({*tokenizer.config.languages}) < len(tokenizer.config.languages):
        raise UserError(f"{folder} has a language twice")
    return tokenizer


def _is_name(language: str) -> bool:
    return 0 < len(language) < 40 and language.isprintable() and not set(language) & set(" /<>")


def read_shared(folder: Path, given: TheirSettings, size: int) -> SharedTokenizer:
    """The tokenizer of an NLLB or M2M100 checkpoint, by the files that `transformers` writes.

    M2M100 has the ids of its pieces in `vocab.json`. NLLB's are those of the SentencePiece model
    plus one. Behind them are the languages, in the order of their list where no id is written.
    """
    model = read_bytes(folder / _PIECES)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    settings = _json(folder / "tokenizer_config.json")
    if settings.get("legacy_behaviour"):
        raise UserError(f"{folder} writes a source's language behind it (legacy_behaviour)")
    if (folder / "vocab.json").is_file():
        known = read_json(folder / "vocab.json")
        if [known.get(symbol) for symbol in _SYMBOLS] != symbols(folder, given):
            raise UserError(f"{folder}: vocab.json has other symbols than config.json")
    else:
        count = int(processor.vocab_size())
        known = {str(processor.id_to_piece(i)): i + 1 for i in range(3, count)}
    tags = _tags(folder, settings, max(known.values()) + 1)
    ids = [*known.values(), *tags.values()]
    least = 0 if (folder / "vocab.json").is_file() else len(_SYMBOLS)
    if odd := [i for i in ids if type(i) is not int or not least <= i < size]:
        raise UserError(
            f"{folder}: a piece or language has the id {short_repr(odd[0])}; allowed are those of "
            f"the table of {size} rows"
        )
    if len(set(ids)) < len(ids) or min(tags.values()) < len(_SYMBOLS):
        raise UserError(f"{folder}: two pieces or languages have the same id")
    names = [f"<unused {i}>" for i in range(size)]
    for piece, i in known.items():
        names[i] = piece
    names[: len(_SYMBOLS)] = _SYMBOLS
    for language, i in tags.items():
        names[i] = f"<{language}>"
    config = VocabularyConfig(size, size, "both", languages=tuple(tags))
    return SharedTokenizer(model, names, tags, config)


def _tags(folder: Path, settings: Mapping[str, Any], behind: int) -> dict[str, int]:
    """The languages with their ids, which begin at `behind` where none are written."""
    if (folder / "vocab.json").is_file():
        kind = settings.get("language_codes", "m2m100")
        if kind not in list(_CODES):
            raise UserError(
                f"{folder} has the languages of {short_repr(kind)}; known are those of "
                f"{', '.join(_CODES)}"
            )
        return {code: behind + n for n, code in enumerate(_CODES[kind].split())}
    listed = settings.get("additional_special_tokens")
    listed = listed or _json(folder / "special_tokens_map.json").get("additional_special_tokens")
    codes = [each["content"] if isinstance(each, dict) else each for each in listed or ()]
    if odd := [code for code in codes if not isinstance(code, str)]:
        raise UserError(f"{folder}: {short_repr(odd[0])} is no name of a language")
    added = settings.get("added_tokens_decoder", {})
    written = {each["content"]: int(i) for i, each in added.items()}
    found = {
        code: written.get(code, behind + n)
        for n, code in enumerate(codes)
        if code not in ("<mask>", *_SYMBOLS)
    }
    if not found:
        raise UserError(f"{folder}: its tokenizer lists no languages (additional_special_tokens)")
    return found


def symbols(folder: Path, given: TheirSettings) -> list[int]:
    """The ids of the symbols, in gshard's order; they have to be the first four."""
    pad, bos, eos, begin = (
        getattr(given, f"{name}_token_id") for name in ("pad", "bos", "eos", "decoder_start")
    )
    unknown = set(range(len(_SYMBOLS))) - {pad, bos, eos}
    if len(unknown) != 1 or begin != eos:
        raise UserError(
            f"{folder} has the symbols pad {pad}, bos {bos}, eos {eos} and a decoder that begins "
            f"with {begin}; expected are ids below 4, and eos"
        )
    return [pad, *unknown, bos, eos]


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
