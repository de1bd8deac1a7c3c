"""From the files of a package to raw pairs: a table of formats, and the search for the English.

Two kinds. A catalog holds both sides. Everything else comes as one file a language, and is paired
with the file of the same path in English, by key or by structure.
"""

from __future__ import annotations

import functools
import lzma
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from gshard.mt.data.locales import language_of, language_of_path
from gshard.mt.data.readers import catalogs, documents, keyed
from gshard.mt.data.tiers import Reading
from gshard.mt.data.unpack import Files


class Raw(NamedTuple):
    """A pair as a reader finds it, before any cleaning.

    `kind` says what it may contain: "message" (accelerators of any style, markup), "menu" (`&`
    accelerators), "keyed" (markup only) or "document" (plain text, perhaps with gaps), and
    "sentence" (a user's own text). `document` is the path without the language, of formats that
    have a file for each.
    """

    language: str
    english: str
    text: str
    kind: str
    document: str = ""


Report = Callable[[str, str], None]  # (path, why it was skipped)


def read(
    files: Files, reading: Reading, report: Report, languages: Collection[str] = ()
) -> Iterator[Raw]:
    """All pairs that `reading` finds in `files`, of some languages or of all.

    Files that cannot be read are reported.
    """
    for path, why in files.broken:
        report(path, why)
    if reading.format == "catalogs":
        yield from _catalogs(files, reading, report, languages)
    else:
        yield from _aligned(files, reading, report, languages)


def _catalogs(
    files: Files, reading: Reading, report: Report, languages: Collection[str]
) -> Iterator[Raw]:
    read_po = functools.partial(catalogs.read_po, english_from_comment=reading.english_from_comment)
    parsers: dict[str, Callable[[bytes], _Pairs]] = {"qm": catalogs.read_qm, "po": read_po}
    for path in files:
        stem, _, suffix = path.rpartition(".")
        if suffix not in ("mo", "gmo", "po", "qm") or "/help/" in path:
            continue
        # Catalogs often come in both forms. The compiled one has no fuzzy entries, the
        # source alone has comments.
        if suffix == "po" and not reading.english_from_comment and f"{stem}.mo" in files:
            continue
        if suffix != "po" and reading.english_from_comment and f"{stem}.po" in files:
            continue
        language = language_of_path(path)
        if language is None or (languages and language not in languages):
            continue
        parse = parsers.get(suffix, catalogs.read_mo)
        kind = "menu" if suffix == "qm" else "keyed" if reading.english_from_comment else "message"
        try:
            for english, text in parse(files.read(path)):
                yield Raw(language, english, text, kind)
        except UNREADABLE as error:
            report(path, str(error) or type(error).__name__)


# What a broken file or archive makes the readers raise; anything else is a fault of ours.
UNREADABLE = (
    ValueError,
    OSError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    RuntimeError,  # also of archives with a password, and of methods that are not known
    SyntaxError,  # lxml's
    struct.error,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
)


def _aligned(
    files: Files, reading: Reading, report: Report, languages: Collection[str]
) -> Iterator[Raw]:
    pattern = path_pattern(reading.files)
    paths: dict[str, dict[str, str]] = {}  # locale -> group -> path
    for path in files:
        if match := pattern.fullmatch(path):
            group = path
            spans = [match.span(name) for name in match.groupdict()]
            for begin, end in sorted(spans, reverse=True):
                group = group[:begin] + group[end:]
            if reading.format == "mozilla":
                group = keyed.mozilla_key(path)
            paths.setdefault(match["language"], {})[group] = path
    parse, pairs, kind = _format(reading)

    def parsed(path: str) -> Any:
        try:
            return parse(path, files.read(path))
        except UNREADABLE as error:
            report(path, str(error) or type(error).__name__)
            return None

    # Language after language, since each is in a package or archive of its own.
    english = {group: parsed(path) for group, path in paths.get(reading.english, {}).items()}
    for locale, groups in paths.items():
        language = language_of(locale)
        if language is None or locale == reading.english:
            continue
        if languages and language not in languages:
            continue
        for group, path in groups.items():
            if english.get(group) and (other := parsed(path)):
                for a, b in pairs(english[group], other):
                    yield Raw(language, a, b, kind, group)


def path_pattern(files: str) -> re.Pattern[str]:
    """A path pattern as a regular expression.

    `*` stays within a folder and `**` does not; both must agree for two files to belong together.
    `{language}` and `{any}` may differ.
    """
    pieces = {
        "**/": "(?:.*/)?",
        "**": ".*",
        "*": "[^/]*",
        "{any}": "(?P<any>[^/]*)",
        "{language}": r"(?P<language>[A-Za-z]{1,3}(?:[_@-][A-Za-z0-9]+)*)",
    }
    parts = re.split(r"(\*\*/|\*\*|\*|\{any\}|\{language\})", files)
    return re.compile("".join(pieces.get(part) or re.escape(part) for part in parts))


_Pairs = Iterator[tuple[str, str]]


def _format(reading: Reading) -> tuple[Callable[[str, bytes], Any], Callable[..., _Pairs], str]:
    """How a format is parsed, how two parsed files are paired, and the kind of what comes out."""

    def by_key(english: dict[str, str], other: dict[str, str]) -> _Pairs:
        for key, text in other.items():
            if key in english and only.search(key):
                yield english[key], text

    only, name = re.compile(reading.only), reading.format
    blocks = dict.fromkeys(("docbook", "mallard"), documents.xml_blocks)
    blocks["html"] = documents.html_blocks
    if name in blocks:
        return (lambda _, data: blocks[name](data)), _without_gaps, "document"
    wikitext = keyed.plain_wikitext if reading.markup == "wikitext" else str
    plain = keyed.plain_mozilla if name == "mozilla" else wikitext

    def parse(path: str, data: bytes) -> dict[str, str]:
        formats = {**keyed.FORMATS, "html-ids": documents.html_ids}
        found = keyed.read_mozilla(path, data) if name == "mozilla" else formats[name](data)
        return {key: plain(text) for key, text in found.items()}

    return parse, by_key, {"html-ids": "document", "pak": "menu"}.get(name, "keyed")


def _without_gaps(english: list[documents.Block], other: list[documents.Block]) -> _Pairs:
    for a, b in documents.align(english, other):
        if documents.GAP not in a and documents.GAP not in b:
            yield a, b
