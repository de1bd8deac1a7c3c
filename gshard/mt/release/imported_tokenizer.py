"""The tokenizer of a checkpoint of Hugging Face, by the files that `transformers` writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sentencepiece

from gshard.mt import atomic
from gshard.mt.batching.tokenizer import SharedTokenizer, Tokenizer, VocabularyConfig
from gshard.mt.errors import UserError
from gshard.mt.release import huggingface

_PIECES = "sentencepiece.bpe.model"
_SYMBOLS = ("<pad>", "<unk>", "<s>", "</s>")  # in gshard's order
_CODES = {  # of M2M100's tokenizer, whose files do not list them
    "m2m100": (
        "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl "
        "gu ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml "
        "mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl "
        "tn tr uk ur uz vi wo xh yi yo zh zu"
    ),
    "wmt21": "en ha is ja cs ru zh de",
}


def read_tokenizer(folder: Path, size: int) -> Tokenizer | None:
    """The vocabularies: two in gshard's own layout, one of `size` ids in others; None without."""
    path = folder / huggingface.VOCABULARY
    if not path.is_file():
        return read_shared(folder, size) if (folder / _PIECES).is_file() else None
    try:
        given = atomic.read_object(path)
        config = VocabularyConfig(**{**given, "languages": tuple(map(str, given["languages"]))})
        models = [(folder / f"{side}.spm").read_bytes() for side in ("source", "target")]
        return Tokenizer(models[0], models[1], config)
    except FileNotFoundError as error:
        raise UserError(f"{folder}: {Path(error.filename).name} is missing") from None
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UserError(f"{path} is damaged: {error!r}") from None


def read_shared(folder: Path, size: int) -> SharedTokenizer:
    """The tokenizer of an NLLB or M2M100 checkpoint, by the files that `transformers` writes.

    M2M100 has the ids of its pieces in `vocab.json`. NLLB's are those of the SentencePiece model
    plus one. Behind them are the languages, in the order of their list where no id is written.
    """
    model = (folder / _PIECES).read_bytes()
    settings = _json(folder / "tokenizer_config.json")
    if settings.get("legacy_behaviour"):
        raise UserError(f"{folder} writes a source's language behind it (legacy_behaviour)")
    if (folder / "vocab.json").is_file():
        known = _json(folder / "vocab.json")
    else:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        count = int(processor.vocab_size())
        known = {str(processor.id_to_piece(i)): i + 1 for i in range(3, count)}
    names = [f"<unused {i}>" for i in range(size)]
    for piece, i in known.items():
        if len(_SYMBOLS) <= i < size:
            names[i] = piece
    names[: len(_SYMBOLS)] = _SYMBOLS
    tags = _tags(folder, settings, max(known.values()) + 1)
    for language, i in tags.items():
        if i >= size:
            raise UserError(f"{folder}: the id {i} of {language} is beyond the table of {size}")
        names[i] = f"<{language}>"
    config = VocabularyConfig(size, size, "both", languages=tuple(tags))
    return SharedTokenizer(model, names, tags, config)


def _tags(folder: Path, settings: Mapping[str, Any], behind: int) -> dict[str, int]:
    """The languages with their ids, which begin at `behind` where none are written."""
    if (folder / "vocab.json").is_file():
        kind = settings.get("language_codes", "m2m100")
        if kind not in _CODES:
            raise UserError(
                f"{folder} has the languages of {kind!r}; known are those of {', '.join(_CODES)}"
            )
        return {code: behind + n for n, code in enumerate(_CODES[kind].split())}
    listed = settings.get("additional_special_tokens")
    listed = listed or _json(folder / "special_tokens_map.json").get("additional_special_tokens")
    codes = [each["content"] if isinstance(each, dict) else each for each in listed or ()]
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


def symbols(folder: Path) -> list[int]:
    """The ids of the symbols, in gshard's order; they have to be the first four."""
    given = _json(folder / "config.json")
    pad, bos, eos = (
        given.get(f"{name}_token_id", usual) for name, usual in (("pad", 1), ("bos", 0), ("eos", 2))
    )
    unknown = set(range(len(_SYMBOLS))) - {pad, bos, eos}
    if len(unknown) != 1 or given.get("decoder_start_token_id", eos) != eos:
        raise UserError(
            f"{folder} has the symbols pad {pad}, bos {bos}, eos {eos} and a decoder that begins "
            f"with {given.get('decoder_start_token_id')}; expected are ids below 4, and eos"
        )
    return [pad, *unknown, bos, eos]


def _json(path: Path) -> dict[str, Any]:
    try:
        return atomic.read_object(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
