"""gettext catalogs, compiled (.mo) and in source (.po): the format of most free software.

`polib` reads .po, whose quoting, comments and obsolete entries are many fine points. The compiled
form is two tables of offsets, and reading it here is six times faster than building polib's
objects for thirty million messages.
"""

from __future__ import annotations

import contextlib
import gettext
import re
import struct
from collections.abc import Callable, Iterator

import polib

_PLURAL_FORMS = re.compile(r"Plural-Forms:\s*nplurals\s*=\s*\d+\s*;\s*plural\s*=\s*([^;\n]+)", re.I)
_CHARSET = re.compile(r"charset=([\w.-]+)", re.I)
_DEFAULT = re.compile(r'Default:\s*"(.*)"\s*$', re.S)

Pair = tuple[str, str]


def plural_rule(header: str) -> Callable[[int], int] | None:
    """The function from a number to a plural form that a catalog's header states, if it does.

    `gettext.c2py` is the standard library's own compiler for these C expressions: it accepts
    integers, `n` and operators and nothing else, so a hostile catalog cannot run code.
    """
    match = _PLURAL_FORMS.search(header)
    if not match:
        return None
    try:
        return gettext.c2py(match[1].strip())  # type: ignore[attr-defined, no-any-return]
    except (ValueError, RecursionError):
        return None


def plural_pairs(
    singular: str, plural: str, forms: list[str], rule: Callable[[int], int] | None
) -> Iterator[Pair]:
    """The English forms with the translated forms for one thing and for five.

    The order of the forms differs among languages: some have one form for both, some list the
    singular last. Only the catalog's rule tells.
    """
    if len(forms) == 1:
        yield plural, forms[0]
        return
    one, five = 0, len(forms) - 1
    if rule:
        with contextlib.suppress(ValueError, ZeroDivisionError, OverflowError):
            one, five = rule(1), rule(5)
    if one != five and 0 <= one < len(forms):
        yield singular, forms[one]
    if 0 <= five < len(forms):
        yield plural, forms[five]


def read_mo(data: bytes) -> Iterator[Pair]:
    """(English, translation) of a compiled catalog."""
    order = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}.get(data[:4])
    if order is None or len(data) < 20:
        raise ValueError("not a compiled gettext catalog")
    _, count, originals, translations = struct.unpack_from(order + "4I", data, 4)
    if max(originals, translations) + 8 * count > len(data):
        raise ValueError("truncated catalog")
    ids = struct.unpack_from(f"{order}{2 * count}I", data, originals)
    texts = struct.unpack_from(f"{order}{2 * count}I", data, translations)
    charset, rule = "utf-8", None
    for i in range(0, 2 * count, 2):
        key = data[ids[i + 1] : ids[i + 1] + ids[i]]
        value = data[texts[i + 1] : texts[i + 1] + texts[i]]
        if not key:  # the header: the empty message sorts first
            header = value.decode("latin-1")
            charset = match[1] if (match := _CHARSET.search(header)) else charset
            rule = plural_rule(header)
            continue
        english, text = _decode(key, charset), _decode(value, charset)
        if not english or not text:
            continue
        english = english.rsplit("\x04", 1)[-1]  # prefixed by a context
        singular, nul, plural = english.partition("\0")
        forms = text.split("\0")
        if not nul:
            yield english, forms[0]
        elif all(forms):
            yield from plural_pairs(singular, plural, forms, rule)


def _decode(raw: bytes, charset: str) -> str:
    for encoding in (charset, "utf-8"):
        try:
            return raw.decode(encoding)
        except (UnicodeDecodeError, LookupError):
            continue
    return ""


def read_po(data: bytes, english_from_comment: bool = False) -> Iterator[Pair]:
    """(English, translation) of a catalog in source, without fuzzy and obsolete entries.

    With `english_from_comment`, an entry's comment `Default: "..."` is its English, as in Plone,
    whose msgids are identifiers.
    """
    match = re.search(rb"charset=([\w.-]+)", data[:4096])
    charset = match[1].decode("ascii") if match else "utf-8"
    text = _decode(data, charset) or data.decode("utf-8", "replace")
    # polib takes a string for a path when there is a file of that name; a newline makes it text.
    try:
        catalog = polib.pofile("\n" + text, wrapwidth=0)
    except (OSError, UnicodeError, IndexError) as error:
        raise ValueError(f"not a gettext catalog: {error}") from None
    rule = plural_rule("Plural-Forms: " + catalog.metadata.get("Plural-Forms", ""))
    for entry in catalog:
        if entry.obsolete or entry.fuzzy:
            continue
        english = entry.msgid
        if english_from_comment and (default := _DEFAULT.search(entry.comment)):
            # The comment is wrapped as msgid lines are, in quoted pieces.
            joined = re.sub(r'"\s*\n\s*"', "", default[1])
            english = polib.unescape(joined)
        if entry.msgid_plural:
            forms = [entry.msgstr_plural[i] for i in sorted(entry.msgstr_plural)]
            if forms and all(forms):
                yield from plural_pairs(english, entry.msgid_plural, forms, rule)
        elif entry.msgstr:
            yield english, entry.msgstr
