"""Qt's compiled translations (.qm): a tagged stream of messages, integers big-endian."""

from __future__ import annotations

import struct
from collections.abc import Iterator

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
