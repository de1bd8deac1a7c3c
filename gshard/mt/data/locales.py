"""Locale names to language codes: `pt_BR`, `sr@latin`, `zh-TW`, `iw` and `deu` become one spelling.

Catalogs name languages in five conventions, some of them long withdrawn. The code is ISO 639-1
where there is one, ISO 639-3 otherwise; Traditional Chinese is its own language (`zh_Hant`), since
it is written differently, and regional variants of the others are not.
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
_FOLDER = re.compile(
    rf"/(?:locale|locales|i18n|lang|po|translations)/({_LOCALE})/",
)


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
