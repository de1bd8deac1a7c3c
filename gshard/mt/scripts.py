"""Which script a language is written in: the cheapest test of whether a string is in it at all.

A catalog labelled Georgian is full of English where nobody translated; there the script alone
tells. Languages absent from the tables are written in Latin letters.
"""

from __future__ import annotations

import re

_RANGES = {
    "latin": "A-Za-z\u00c0-\u024f\u1e00-\u1eff",
    "cyrillic": "\u0400-\u052f",
    "arabic": "\u0600-\u06ff\u0750-\u077f\u08a0-\u08ff\ufb50-\ufdff\ufe70-\ufeff",
    "devanagari": "\u0900-\u097f",
    "bengali": "\u0980-\u09ff",
    "meitei": "\u0980-\u09ff\uabc0-\uabff",  # Manipuri in either of its two scripts
    "gurmukhi": "\u0a00-\u0a7f",
    "gujarati": "\u0a80-\u0aff",
    "oriya": "\u0b00-\u0b7f",
    "tamil": "\u0b80-\u0bff",
    "telugu": "\u0c00-\u0c7f",
    "kannada": "\u0c80-\u0cff",
    "malayalam": "\u0d00-\u0d7f",
    "sinhala": "\u0d80-\u0dff",
    "thai": "\u0e00-\u0e7f",
    "lao": "\u0e80-\u0eff",
    "tibetan": "\u0f00-\u0fff",
    "myanmar": "\u1000-\u109f\uaa60-\uaa7f",
    "georgian": "\u10a0-\u10ff\u1c90-\u1cbf",
    "ethiopic": "\u1200-\u137f",
    "cherokee": "\u13a0-\u13ff",
    "syllabics": "\u1400-\u167f",
    "khmer": "\u1780-\u17ff",
    "greek": "\u0370-\u03ff\u1f00-\u1fff",
    "armenian": "\u0530-\u058f",
    "hebrew": "\u0590-\u05ff",
    "syriac": "\u0700-\u074f",
    "thaana": "\u0780-\u07bf",
    "ol-chiki": "\u1c50-\u1c7f\u0900-\u097f",
    "tifinagh": "\u2d30-\u2d7f",
    "han": "\u4e00-\u9fff",
    "japanese": "\u3040-\u30ff\u4e00-\u9fff\u3005",
    "korean": "\uac00-\ud7af\u4e00-\u9fff",
    "vai": "\ua500-\ua63f",
    "gothic": "\U00010330-\U0001034f",
}

_WRITTEN_IN = {
    "cyrillic": "ru uk bg mk ky mn ba cv os ce ab sah mhr mrj udm kv myv mdf bua tyv av lez xal "
    "rue cu inh krc kbd ady bxr kum alt cjs mns rsk kjh abq kca sjd tkr rut agx dar lbe nog",
    "arabic": "ar fa ur ps ug ckb skr azb arz mzn lrc bal pnb glk sdh khw bgn bqi lki ary aeb acm "
    "apc ajp ota kas hac haz",
    "devanagari": "hi mr ne mai bho sa doi brx kok hne bra awa new gom anp",
    "bengali": "bn as bpy syl",
    "meitei": "mni",
    "gurmukhi": "pa",
    "gujarati": "gu",
    "oriya": "or",
    "tamil": "ta",
    "telugu": "te",
    "kannada": "kn tcy",
    "malayalam": "ml",
    "sinhala": "si",
    "thai": "th nod tdd",
    "lao": "lo",
    "tibetan": "bo dz",
    "myanmar": "my shn mnw kjp blk ksw rki",
    "georgian": "ka xmf",
    "ethiopic": "am ti gez byn",
    "cherokee": "chr",
    "khmer": "km",
    "greek": "el grc pnt",
    "armenian": "hy hyw",
    "hebrew": "he yi",
    "syriac": "syc arc",
    "thaana": "dv",
    "ol-chiki": "sat",
    "tifinagh": "zgh",
    "han": "zh zh_Hant yue lzh gan wuu",
    "japanese": "ja",
    "korean": "ko",
    "vai": "vai",
    "gothic": "got",
    # Several scripts in real use: any of them will do.
    "cyrillic latin": "sr uz az be tt tk bs tg crh",
    "cyrillic latin arabic": "kk",
    "latin arabic": "ku ms",
    "arabic devanagari": "ks sd",
    "syllabics latin": "iu",
    "latin han": "nan hak cdo",
    "latin tifinagh": "kab shi",
    "latin hebrew": "lad",
}

_LETTERS = {name: re.compile(f"[{ranges}]") for name, ranges in _RANGES.items()}
_SCRIPTS = {
    language: tuple(scripts.split())
    for scripts, languages in _WRITTEN_IN.items()
    for language in languages.split()
}
_LETTER = re.compile(r"[^\W\d_]")
LATIN = _LETTERS["latin"]


def scripts_of(language: str) -> tuple[str, ...]:
    """The scripts that `language` is written in, Latin unless the table says otherwise."""
    return _SCRIPTS.get(language, ("latin",))


def count_letters(text: str) -> int:
    """How many letters of any script `text` has."""
    return len(_LETTER.findall(text))


def in_script(language: str, text: str) -> bool:
    """Whether enough letters of `text` are in a script of `language`.

    A third suffices for scripts other than Latin, whose text is full of Latin names and commands;
    Latin needs more, because what is left over then is another script altogether.
    """
    letters = count_letters(text)
    if letters == 0:
        return False
    return any(
        len(_LETTERS[script].findall(text)) >= (0.6 if script == "latin" else 0.35) * letters
        for script in scripts_of(language)
    )
