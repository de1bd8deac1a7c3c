"""Formats in which a key names a message: the same key in two languages is a pair."""

from __future__ import annotations

import itertools
import json
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

Messages = dict[str, str]


def read_json(data: bytes) -> Messages:
    """Every string in a JSON document, under its path (`/menu/file/0`)."""
    return dict(_flat(json.loads(data.decode("utf-8-sig")), ""))


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, child in value.items():
            if key != "@metadata":  # mediawiki's list of translators
                yield from _flat(child, f"{path}/{key}")
    elif isinstance(value, list):
        for i, child in enumerate(value):
            yield from _flat(child, f"{path}/{i}")
    elif isinstance(value, str):
        yield path, value


_PROPERTY = re.compile(r"^\s*([^#!\s=:][^=:]*?)\s*[=:]\s*(.*)$")
_SHORTCUT = re.compile(r"(accesskeys?|\.key|\.style|commandkey)$", re.I)


def read_properties(data: bytes) -> Messages:
    """Java's and Mozilla's `key = value` lines, without keyboard shortcuts."""
    messages = {}
    for line in data.decode("utf-8", "replace").replace("\\\n", "").splitlines():
        match = _PROPERTY.match(line)
        if match and not _SHORTCUT.search(match[1]):
            messages[match[1]] = re.sub(
                r"\\u([0-9a-fA-F]{4})", lambda code: chr(int(code[1], 16)), match[2]
            )
    return messages


_ENTITY = re.compile(r"<!ENTITY\s+([\w.\-]+)\s+(?:\"([^\"]*)\"|'([^']*)')\s*>")


def read_dtd(data: bytes) -> Messages:
    """Mozilla's older message files: XML entities, without keyboard shortcuts."""
    found = _ENTITY.findall(data.decode("utf-8", "replace"))
    return {key: a or b for key, a, b in found if not _SHORTCUT.search(key)}


_FTL_MESSAGE = re.compile(r"^(-?[A-Za-z][\w-]*)\s*=\s?(.*)$")
_FTL_ATTRIBUTE = re.compile(r"^\s+\.([A-Za-z][\w-]*)\s*=\s?(.*)$")


def read_ftl(data: bytes) -> Messages:
    """Mozilla's Fluent messages and their attributes, without those that select among variants.

    A line-based reading: two million messages a language family are too many for a full parser,
    and only plain patterns are wanted.
    """
    messages: Messages = {}
    message = key = ""
    for line in data.decode("utf-8", "replace").splitlines():
        if line.startswith("#"):
            message = ""
        elif match := _FTL_MESSAGE.match(line):
            message = key = match[1]
            messages[key] = match[2]
        elif message and (match := _FTL_ATTRIBUTE.match(line)):
            key = f"{message}.{match[1]}"
            messages[key] = match[2]
        elif message and (line[:1] in " \t}" or not line):
            messages[key] += "\n" + line.strip()
    return {
        key: text.strip()
        for key, text in messages.items()
        if text.strip() and "->" not in text and not _SHORTCUT.search(key)
    }


_BRANDS = {"brandShortName": "Firefox", "vendorShortName": "Mozilla"}


def plain_mozilla(text: str) -> str:
    """A Mozilla message with product names in place of their references, variables as `{name}`."""

    def term(match: re.Match[str]) -> str:
        name = match[1].strip("-").split("-")[0]
        return {"brand": "Firefox", "vendor": "Mozilla"}.get(name, name.capitalize())

    text = re.sub(r"\{\s*(-[\w-]+)(?:\([^)]*\))?\s*\}", term, text)
    text = re.sub(r"&(brand|vendor)\w*Name;", lambda m: _BRANDS[m[1] + "ShortName"], text)
    text = re.sub(r'\{\s*"([^"]*)"\s*\}', r"\1", text)
    return re.sub(r"\{\s*\$?([\w-]+)[^{}]*\}", r"{\1}", text)


def mozilla_key(path: str) -> str:
    """A path inside a language pack without the names of its language, which occur twice."""
    inner = path.rsplit(".xpi/", 1)[-1]
    if match := re.search(r"(?:localization|locale|chrome)/([A-Za-z]{2,3}(?:-[A-Za-z]+)*)/", inner):
        inner = inner.replace(f"/{match[1]}/", "/L/").replace("/L/locale/L/", "/L/")
    return inner


def read_pak(data: bytes) -> Messages:
    """Chromium's resource packs: an index of (id, offset), then the texts."""
    (version,) = struct.unpack_from("<I", data)
    if version == 4:
        count, encoding = struct.unpack_from("<IB", data, 4)
        start = 9
    elif version == 5:
        encoding, count, _ = struct.unpack_from("<B3xHH", data, 4)
        start = 12
    else:
        raise ValueError(f"version {version} of resource packs is unknown")
    index = [struct.unpack_from("<HI", data, start + 6 * i) for i in range(count + 1)]
    messages = {}
    for (resource, begin), (_, end) in itertools.pairwise(index):
        raw = data[begin:end]
        if raw[:2] in (b"\x1e\x9b", b"\x1f\x8b"):  # compressed pages, not messages
            continue
        try:
            text = raw.decode("utf-8" if encoding == 1 else "utf-16-le")
        except UnicodeDecodeError:
            continue
        # Whole pages, and ICU messages that choose among variants.
        if not text.lstrip().startswith(("<!", "<html", "{")) and "plural," not in text:
            messages[str(resource)] = text
    return messages


_INI = re.compile(r'^([\w.\-]+)\s*=\s*"(.*)"\s*$', re.M)


def read_ini(data: bytes) -> Messages:
    """`key="value"` lines."""
    found = _INI.findall(data.decode("utf-8-sig", "replace"))
    return {key: value.replace('\\"', '"') for key, value in found}


_PHP = re.compile(
    r"\[\s*['\"]([\w. -]+)['\"]\s*\]\s*=\s*"
    r"(?:'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\")\s*;"
)


def read_php(data: bytes) -> Messages:
    """Assignments to a PHP array, `$lang['key'] = 'text';`."""
    found = _PHP.findall(data.decode("utf-8", "replace"))
    return {key: re.sub(r"\\(['\"\\])", r"\1", single or double) for key, single, double in found}


_JS = re.compile(r'\["(\w+)"\]\s*=\s*("(?:[^"\\]|\\.)*");')


def read_js(data: bytes) -> Messages:
    """Assignments of string literals to the members of a JavaScript object."""
    messages = {}
    for key, literal in _JS.findall(data.decode("utf-8", "replace")):
        if not key.endswith(("HELPURL", "HUE")):
            try:
                messages[key] = json.loads(literal)
            except ValueError:
                continue
    return messages


_MD5 = re.compile(r"^Description-md5: (\w+)", re.M)
_DESCRIPTION = re.compile(r"^Description-(?!md5)[\w@]+: (.*(?:\n .*)*)", re.M)


def read_descriptions(data: bytes) -> Messages:
    """Debian's package descriptions by the checksum of their English, cut into paragraphs.

    The number of paragraphs is in the keys, so that a translation with more or fewer of them meets
    its English in the title only.
    """
    messages = {}
    for block in data.decode("utf-8", "replace").split("\n\n"):
        checksum, description = _MD5.search(block), _DESCRIPTION.search(block)
        if not checksum or not description:
            continue
        title, *lines = description[1].split("\n")
        messages[f"{checksum[1]}/title"] = title
        paragraphs: list[list[str]] = [[]]
        for line in lines:
            if line.strip() == ".":
                paragraphs.append([])
                continue
            if re.match(r"  | [*-] ", line) and paragraphs[-1]:  # verbatim, or an item of a list
                paragraphs.append([])
            paragraphs[-1].append(line.strip())
        texts = [" ".join(paragraph) for paragraph in paragraphs if paragraph]
        for i, text in enumerate(texts):
            messages[f"{checksum[1]}/{i}/{len(texts)}"] = text
    return messages


def plain_wikitext(text: str) -> str:
    """A MediaWiki message with links, plurals and emphasis unwrapped; "" if templates remain."""
    flags = re.I
    for _ in range(3):  # templates nest
        text = re.sub(r"\{\{\s*PLURAL\s*:[^|{}]*\|([^{}]*)\}\}", _last_form, text, flags=flags)
        inner = r"\{\{\s*(?:GENDER|GRAMMAR|#if|#FORMAL)\s*:[^|{}]*\|([^{}|]*)(?:\|[^{}]*)?\}\}"
        text = re.sub(inner, r"\1", text, flags=flags)
        text = re.sub(r"\{\{\s*SITENAME\s*\}\}", "Wiki", text, flags=flags)
        text = re.sub(r"\{\{int:([^{}|]+)\}\}", r"{\1}", text)
    if "{{" in text:
        return ""
    text = re.sub(r"\[\[[^\[\]|]*\|([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"\[\[:?([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"\[(?:https?:|//|mailto:|\$)\S*\s+([^\[\]]*)\]", r"\1", text)
    text = re.sub(r"'{2,5}|</?nowiki/?>", "", text)
    text = re.sub(r"^[*#:;]+\s*", "", text, flags=re.M)
    return re.sub(r"^=+\s*(.*?)\s*=+$", r"\1", text, flags=re.M)


def _last_form(match: re.Match[str]) -> str:
    return match[1].split("|")[-1].split("=", 1)[-1]


FORMATS: dict[str, Callable[[bytes], Messages]] = {
    "json": read_json,
    "properties": read_properties,
    "ini": read_ini,
    "php": read_php,
    "js": read_js,
    "pak": read_pak,
    "descriptions": read_descriptions,
}


def read_mozilla(path: str, data: bytes) -> Messages:
    """A file of a Firefox or Thunderbird language pack, in whichever of its three formats."""
    readers = {"ftl": read_ftl, "properties": read_properties, "dtd": read_dtd}
    reader = readers.get(path.rsplit(".", 1)[-1])
    return reader(data) if reader else {}
