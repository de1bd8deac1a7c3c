"""Tiny files of every format, made on the spot."""

import re
import struct

import polib

from gshard.mt.data.readers.catalogs import MAGIC

GERMAN = "nplurals=2; plural=n != 1;"


def catalog(entries, plural_forms=GERMAN):
    """A polib catalog from (msgid, msgstr) or (msgid, plural, [forms])."""
    file = polib.POFile()
    file.metadata = {
        "Content-Type": "text/plain; charset=UTF-8",
        "Plural-Forms": plural_forms,
    }
    for entry in entries:
        if len(entry) == 2:
            file.append(polib.POEntry(msgid=entry[0], msgstr=entry[1]))
        else:
            forms = dict(enumerate(entry[2]))
            file.append(polib.POEntry(msgid=entry[0], msgid_plural=entry[1], msgstr_plural=forms))
    return file


def mo(entries, plural_forms=GERMAN):
    return catalog(entries, plural_forms).to_binary()


def po(entries, plural_forms=GERMAN):
    return str(catalog(entries, plural_forms)).encode()


def qm(pairs):
    messages = b""
    for english, *translations in pairs:
        for text in translations:
            raw = text.encode("utf-16-be")
            messages += struct.pack(">BI", 3, len(raw)) + raw
        raw = english.encode()
        messages += struct.pack(">BI", 8, 7) + b"comment"
        messages += struct.pack(">BI", 6, len(raw)) + raw + struct.pack(">BI", 7, 3) + b"ctx"
        messages += b"\x01"
    hashes = b"\x42" + struct.pack(">I", 4) + b"\0\0\0\0"
    return MAGIC + hashes + b"\x69" + struct.pack(">I", len(messages)) + messages


def pak(messages, version=5):
    texts = [(i, text.encode()) for i, text in messages.items()]
    head = struct.pack("<IIB", 4, len(texts), 1)
    if version == 5:
        head = struct.pack("<IB3xHH", 5, 1, len(texts), 0)
    offset = len(head) + 6 * (len(texts) + 1)
    index = body = b""
    for i, raw in texts:
        index += struct.pack("<HI", i, offset + len(body))
        body += raw
    return head + index + struct.pack("<HI", 0, offset + len(body)) + body


# Long enough to be held out, different in every letter-bearing word.
WORDS = re.findall(
    r"\w+",
    "river mountain window garden letter summer bridge kitchen teacher morning captain silver "
    "market doctor forest village station engine winter harbour",
)


def sentence(n):
    """A distinct English sentence of seven words for each n below 8000."""
    a, b, c = WORDS[n % 20], WORDS[n // 20 % 20], WORDS[n // 400 % 20]
    return f"The {a} saw the {b} {c} today."


def translated(n, language="de"):
    """A made-up translation: other words of similar length, in the language's script."""
    text = sentence(n).lower().translate(str.maketrans("aeiourst", "ouaeinkm"))
    if language == "ru":
        return "".join(chr(ord("\u0430") + ord(c) - 97) if "a" <= c <= "z" else c for c in text)
    return text
