"""Catalogs: gettext's, compiled (.mo) and in source (.po), and Qt's (.qm).

`polib` reads .po, whose quoting, comments and obsolete entries are many fine points. The compiled
form is two tables of offsets, and reading it here is six times faster than building polib's
objects for thirty million messages. Qt's compiled form (.qm) is a tagged
stream of messages, integers big-endian.
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


MAGIC = bytes.fromhex("3cb86418caef9c95cd211cbf60a1bddd")
_MESSAGES = 0x69  # the section with the texts; the others are hashes, contexts, rules

# Tags inside a message.
_END, _SOURCE16, _TRANSLATION, _CONTEXT16, _OBSOLETE1, _SOURCE, _CONTEXT, _COMMENT, _OBSOLETE2 = (
    range(1, 10)
)


def read_qm(data: bytes) -> Iterator[tuple[str, str]]:
    """(English, translation); of numbered forms the last, which is the one for many."""
    if data[:4] != MAGIC[:4]:
        raise ValueError("not a Qt translation file")
    position = len(MAGIC)
    while position + 5 <= len(data):
        tag, length = struct.unpack_from(">BI", data, position)
        position += 5
        if tag == _MESSAGES:
            yield from _messages(data[position : position + length])
        position += length


def _messages(data: bytes) -> Iterator[tuple[str, str]]:
    english = ""
    translations: list[str] = []
    position = 0
    while position < len(data):
        tag = data[position]
        position += 1
        if tag == _END:
            if english and translations and translations[-1]:
                yield english, translations[-1]
            english, translations = "", []
        elif tag == _OBSOLETE1:
            position += 4
        elif tag == _OBSOLETE2:
            position += 1
        elif _SOURCE16 <= tag <= _COMMENT:
            if position + 4 > len(data):
                raise ValueError("truncated message")
            (length,) = struct.unpack_from(">I", data, position)
            position += 4
            if length == 0xFFFFFFFF:  # a null string
                length = 0
            raw = data[position : position + length]
            position += length
            if tag == _TRANSLATION:
                translations.append(raw.decode("utf-16-be", "replace"))
            elif tag == _SOURCE16:
                english = raw.decode("utf-16-be", "replace")
            elif tag == _SOURCE:
                english = raw.decode("utf-8", "replace")
        else:
            raise ValueError(f"unknown tag {tag} in a message")
