"""The tokenizer of a checkpoint of Hugging Face, by the files that `transformers` writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sentencepiece

from gshard.mt.batching.tokenizer import SharedTokenizer, Tokenizer, VocabularyConfig
from gshard.mt.config import built
from gshard.mt.errors import UserError
from gshard.mt.release import huggingface
from gshard.mt.release.imported_files import read_json
from gshard.untrusted import read_bytes, short_repr

_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)

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


def read_tokenizer(
    folder: Path, given: Mapping[str, Any], sizes: tuple[int, int]
) -> Tokenizer | None:
    """The vocabularies: two in gshard's own layout, one of all ids in others; None without.

    `given` are the checkpoint's settings, and `sizes` the rows of its tables.
    """
    path = folder / huggingface.VOCABULARY
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


def read_shared(folder: Path, given: Mapping[str, Any], size: int) -> SharedTokenizer:
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


def symbols(folder: Path, given: Mapping[str, Any]) -> list[int]:
    """The ids of the symbols, in gshard's order; they have to be the first four."""
    pad, bos, eos, begin = (
        int(given[f"{name}_token_id"]) for name in ("pad", "bos", "eos", "decoder_start")
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
