"""Locale names to language codes: `pt_BR`, `sr@latin`, `zh-TW`, `iw` and `deu` become one spelling.

Catalogs name languages in five conventions, some of them long withdrawn. The code is ISO 639-1
where there is one, ISO 639-3 otherwise; Traditional Chinese is its own language (`zh_Hant`), since
it is written differently, and regional variants of the others are not.

The script of a language is the cheapest test of whether a string is in it at all: a catalog
labelled Georgian is full of English where it is untranslated. Languages absent from
`languages.toml` are written in Latin letters.
"""

from __future__ import annotations

import functools
import re
import tomllib
from importlib import resources

_TABLES = tomllib.loads(
    (resources.files("gshard.mt.data") / "languages.toml").read_text(encoding="utf-8")
)
_NO_LANGUAGE = frozenset(_TABLES["no_language"].split())
_ALIASES: dict[str, str] = dict(pair.split("=") for pair in _TABLES["aliases"].split())
_TWO_LETTERS: dict[str, str] = dict(pair.split("=") for pair in _TABLES["two_letters"].split())
_SHORT = frozenset((*_TWO_LETTERS.values(), "en"))
_TRADITIONAL = frozenset(("tw", "hk", "mo", "hant"))
_CODE = re.compile(r"[a-z]{2,3}")


@functools.cache
def language_of(locale: str) -> str | None:
    """The language code of a locale name; None for English and for what is no language."""
    name = re.sub(r"\.(utf|iso).*$", "", locale.strip().replace("-", "_"), flags=re.I)
    name, _, modifier = name.partition("@")
    base, *subtags = name.lower().split("_")
    if base in _NO_LANGUAGE:
        return None
    code = _ALIASES.get(base, base)
    code = _TWO_LETTERS.get(code, code)
    if not _CODE.fullmatch(code):
        return None
    if code == "zh" and _TRADITIONAL.intersection(subtags):
        return "zh_Hant"
    if code == "ku" and ("iq" in subtags or "sorani" in subtags or "arab" in modifier.lower()):
        return "ckb"
    return code


_LOCALE = r"[a-z]{2,3}(?:[_-](?:[A-Za-z]{2}|[A-Za-z]{4}|\d{3}|[a-z]{5,8}))*(?:@[A-Za-z]+)?"
_LC_MESSAGES = re.compile(r"(?:^|/)([A-Za-z]{2,3}(?:[_@-][A-Za-z0-9@_-]+)?)/LC_MESSAGES/[^/]+$")
_RESOURCE = re.compile(r"/resource\.language\.([a-z]{2,3}(?:_[a-z]{2,4})?)/")
_REGION_SUFFIX = re.compile(r"(?:^|[-_.])([a-z]{2,3}[_-](?:[A-Z]{2}|[A-Z][a-z]{3})(?:@[a-z]+)?)$")
_NAME_SUFFIX = re.compile(r"^([a-z]{2,3})[-_](([a-z]{2})(?:@[a-z]+)?)$")
_SUFFIX = re.compile(r"(?:^|.*[-_.])([a-z]{2,3}(?:[_-][A-Za-z]{2,4})?(?:@[a-z]+)?)$")
_FOLDER = re.compile(rf"/(?:locale|locales|i18n|lang|po|translations)/({_LOCALE})/")


def language_of_path(path: str) -> str | None:
    """The language of a catalog, from its folder (`de/LC_MESSAGES/`) or its name (`app_de.qm`)."""
    path = path.replace("\\", "/")
    for pattern in (_LC_MESSAGES, _RESOURCE):
        if match := pattern.search(path):
            return language_of(match[1])
    stem = path.rsplit("/", 1)[-1].rsplit(".", 1)[0]
    # A program may have the name of a locale: `fet_ar` is Arabic, as a region would be `AR`.
    if (match := _NAME_SUFFIX.search(stem)) and match[3] in _SHORT and match[1] not in _SHORT:
        return language_of(match[2])
    # The longest locale wins: `app_pt_BR` is pt_BR, not a locale named BR.
    for pattern in (_REGION_SUFFIX, _SUFFIX):
        if (match := pattern.search(stem)) and (code := language_of(match[1])):
            return code
    if match := _FOLDER.search("/" + path):
        return language_of(match[1])
    return None


_LETTERS = {name: re.compile(f"[{ranges}]") for name, ranges in _TABLES["scripts"].items()}
_SCRIPTS = {
    language: tuple(scripts.split())
    for scripts, languages in _TABLES["written_in"].items()
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
