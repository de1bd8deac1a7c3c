"""Translated manuals: two documents with the same structure are paired block by block.

Help pages and manuals hold the longest sentences of all sources. They have no keys (LibreOffice's
have: an id for each paragraph), but a translation made from a template keeps every element, so
the sequence of block elements is the alignment; where it differs, the pair of documents is split at
its headings and only the equal sections count.
"""

from __future__ import annotations

import html
import html.entities
import re
from collections.abc import Iterator

from lxml import etree
from lxml import html as lxml_html

Block = tuple[str, str]  # (element, text)

_HTML_BLOCKS = frozenset((
    "p", "li", "dt", "dd", "h1", "h2", "h3", "h4", "h5", "h6", "td", "th", "caption",
))  # fmt: skip
_HTML_SKIP = frozenset(("script", "style", "head", "pre"))
_XML_BLOCKS = frozenset((
    "p", "para", "simpara", "title", "term", "desc", "screeninfo", "phrase", "cite", "subtitle",
    "entry", "member", "td", "glossterm",
))  # fmt: skip
_XML_SKIP = frozenset((
    "credit", "legalnotice", "author", "copyright", "othercredit", "authorgroup", "revhistory",
    "date", "releaseinfo", "keywordset", "license", "years", "name", "email", "screen",
    "programlisting", "indexterm",
))  # fmt: skip
_HEADINGS = frozenset(("h1", "h2", "h3", "h4", "title"))

# An entity whose text this file does not define (a key's name, a licence notice). A block with
# one has a gap that only the documentation system could fill, and is dropped.
GAP = "\N{INVISIBLE SEPARATOR}"
_NAMED_GAPS = re.compile(
    r"&(?:[LMR]MBn?|Ctrl|Alt|Shift|Enter|Esc|Tab|Space|Backspace|Del|Meta|PgUp|PgDn|Left|Right|Up"
    r"|Down|Home|End|Ins|Prnt|documentation-feedback|install\.\w+|updating\.documentation"
    r"|reporting\.bugs|i18n[\w.-]*|\w*Notice|under\w+);"
)


def html_blocks(data: bytes) -> list[Block]:
    """The block elements of an HTML page, in order."""
    return list(_blocks(_parse_html(data), _HTML_BLOCKS, _HTML_SKIP))


def html_ids(data: bytes) -> dict[str, str]:
    """The paragraphs and headings of LibreOffice's help by their ids, without code."""
    found: dict[str, str] = {}
    for element in _parse_html(data).iter("p", "h1", "h2", "h3", "h4", "h5", "title"):
        name = element.get("id", "")
        is_text = "code" not in element.get("class", "")
        if is_text and name.startswith(("par_id", "hd_id", "tit")) and (text := _text(element)):
            found.setdefault(name, text)
    return found


def xml_blocks(data: bytes) -> list[Block]:
    """The block elements of a DocBook or Mallard page, in order."""
    parser = etree.XMLParser(
        recover=True, resolve_entities=False, no_network=True, load_dtd=False, huge_tree=True
    )
    root = etree.fromstring(_expand_entities(data.decode("utf-8", "replace")).encode(), parser)
    if root is None:
        raise ValueError("not an XML document")
    return list(_blocks(root, _XML_BLOCKS, _XML_SKIP))


def align(english: list[Block], other: list[Block]) -> Iterator[tuple[str, str]]:
    """Pairs of blocks of two documents, whole if their structures are equal, else by section."""
    if _tags(english) == _tags(other):
        yield from ((a, b) for (_, a), (_, b) in zip(english, other, strict=True))
        return
    left, right = _sections(english), _sections(other)
    if [_tags(section)[:1] for section in left] != [_tags(section)[:1] for section in right]:
        return
    for mine, theirs in zip(left, right, strict=True):
        if _tags(mine) == _tags(theirs):
            yield from ((a, b) for (_, a), (_, b) in zip(mine, theirs, strict=True))
        elif mine:
            yield mine[0][1], theirs[0][1]  # at least the headings


def _tags(blocks: list[Block]) -> list[str]:
    return [tag for tag, _ in blocks]


def _sections(blocks: list[Block]) -> list[list[Block]]:
    sections: list[list[Block]] = [[]]
    for block in blocks:
        if block[0] in _HEADINGS:
            sections.append([])
        sections[-1].append(block)
    return sections


def _blocks(root: etree._Element, names: frozenset[str], skip: frozenset[str]) -> Iterator[Block]:
    """The innermost block elements: a list item that holds paragraphs is not one itself."""
    found: list[Block] = []

    def visit(element: etree._Element) -> bool:
        if not isinstance(element.tag, str):  # a comment or an entity
            return False
        name = etree.QName(element).localname
        if name in skip:
            return False
        inner = False
        for child in element:
            inner = visit(child) or inner
        if name not in names:
            return inner
        if not inner and (text := _text(element)):
            found.append((name, text))
        return True

    visit(root)
    return iter(found)


def _text(element: etree._Element) -> str:
    return " ".join("".join(element.itertext()).split())  # type: ignore[arg-type]


def _parse_html(data: bytes) -> etree._Element:
    text = data.decode("utf-8", "replace")
    # An encoding declared inside a decoded string is an error to lxml.
    text = re.sub(r"^\s*<\?xml[^>]*\?>", "", text)
    if not text.strip():
        raise ValueError("an empty page")
    try:
        return lxml_html.fromstring(text)
    except (etree.ParserError, ValueError) as error:
        raise ValueError(f"not an HTML page: {error}") from None


_DOCTYPE = re.compile(r"<!DOCTYPE[^\[>]*(\[.*?\]\s*)?>", re.S)
_DEFINITION = re.compile(r"<!ENTITY\s+([\w.-]+)\s+(?:\"([^\"]*)\"|'([^']*)')\s*>")
_REFERENCE = re.compile(r"&(?!(?:amp|lt|gt|quot|apos|#\w+);)([\w.-]+);")


def _expand_entities(text: str) -> str:
    """The document with its entities written out, since the files that define them are not there.

    Product names are entities (`&kappname;`, `&Qt;`, `&konqueror;`): their own name is the best
    guess, the same guess on both sides.
    """
    defined = {}
    if doctype := _DOCTYPE.search(text):
        found = _DEFINITION.findall(doctype[0])
        defined = {name: a or b for name, a, b in found}
        text = text[: doctype.start()] + text[doctype.end() :]
    text = re.sub(r"^\s*<\?xml[^>]*\?>", "", text)
    text = _NAMED_GAPS.sub(GAP, text)

    def expand(match: re.Match[str]) -> str:
        name = match[1]
        if name in defined and "<" not in defined[name] and "&" not in defined[name]:
            return html.escape(defined[name], quote=False)
        if name + ";" in html.entities.html5:
            return html.escape(html.entities.html5[name + ";"], quote=False)
        words = name.replace("-", " ")
        return words if any(letter.isupper() for letter in words) else words.capitalize()

    return _REFERENCE.sub(expand, text)
