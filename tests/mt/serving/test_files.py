"""Archives: runs of one sentence are one line, and all but the text stays as it was."""

import io
import time
import tracemalloc
import zipfile

import lxml.etree
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gshard.mt.serving import documents
from gshard.mt.serving.documents import from_text

WORD = (
    '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n<w:document xmlns:w="urn:w"><w:body>'
    '<w:p w:rsidR="00A1"><w:pPr><w:pStyle w:val="Title"/></w:pPr>{}</w:p></w:body></w:document>'
)
SLIDE = '<p:sld xmlns:a="urn:a" xmlns:p="urn:p"><a:p>{}</a:p></p:sld>'
ODT = (
    '<office:document-content xmlns:office="urn:o" xmlns:text="urn:t" xmlns:dc="urn:d">'
    "<office:automatic-styles><a>style</a></office:automatic-styles><office:body>{}"
    "</office:body></office:document-content>"
)
PAGE = '<?xml version="1.0"?>\n<html xmlns="http://www.w3.org/1999/xhtml"><body>{}</body></html>'
BOLD = "<w:rPr><w:b/></w:rPr>"


def run(text, formatting="", rest="<w:t>"):
    return f"<w:r>{formatting}{rest}{text}</w:t></w:r>"


def packed(parts, packing=zipfile.ZIP_DEFLATED):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", packing) as archive:
        for name, text in parts.items():
            how = zipfile.ZIP_STORED if name == "mimetype" else packing
            archive.writestr(name, text, how)
    return made.getvalue()


def unpacked(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        return {info.filename: archive.read(info) for info in archive.infolist()}


NAMES = {  # a part with text, the document around it
    ".docx": ("word/document.xml", WORD),
    ".pptx": ("ppt/slides/slide1.xml", SLIDE),
    ".odt": ("content.xml", ODT),
    ".epub": ("OEBPS/ch1.xhtml", PAGE),
}


def archive(suffix, inner):
    name, around = NAMES[suffix]
    return packed({"mimetype": "x", name: around.format(inner), "media/image1.png": b"\x89\0\xff"})


def shouted(suffix, inner):
    """The lines of a document, and the document with them in capitals."""
    opened = documents.opened(suffix, archive(suffix, inner))
    parts = unpacked(opened.written(opened.text.upper()))
    name, around = NAMES[suffix]
    before, after = around.split("{}")
    made = parts.pop(name).decode()
    assert parts == {"mimetype": b"x", "media/image1.png": b"\x89\0\xff"}
    lxml.etree.fromstring(made.encode())
    assert (made[: len(before)], made[-len(after) :]) == (before, after)
    return opened.text.split("\n"), made[len(before) : -len(after)]


@pytest.mark.parametrize(
    ("inner", "lines", "made"),
    [
        (  # cut by the spelling checker, by a later edit, and by another language
            run("A hou")
            + '<w:proofErr w:type="spellStart"/><w:r w:rsidRPr="00B2"><w:t xml:space="preserve">se '
            + "&amp; </w:t></w:r>"
            + run("garden", '<w:rPr><w:lang w:val="en-US"/></w:rPr>'),
            ["A house & garden"],
            '<w:r><w:t xml:space="preserve">A HOUSE &amp; GARDEN</w:t></w:r><w:proofErr w:type="'
            'spellStart"/><w:r w:rsidRPr="00B2"><w:t xml:space="preserve"></w:t></w:r><w:r><w:rPr>'
            '<w:lang w:val="en-US"/></w:rPr><w:t xml:space="preserve"></w:t></w:r>',
        ),
        (  # a word in bold is a line of its own
            run("A ") + run("big", BOLD) + run(" house"),
            ["A ", "big", " house"],
            '<w:r><w:t xml:space="preserve">A </w:t></w:r><w:r><w:rPr><w:b/></w:rPr><w:t '
            'xml:space="preserve">BIG</w:t></w:r><w:r><w:t xml:space="preserve"> HOUSE</w:t></w:r>',
        ),
        (  # neither instructions of fields nor what was deleted
            '<w:r><w:instrText>PAGE one</w:instrText></w:r><w:del><w:r><w:delText>gone</w:delText>'
            "</w:r></w:del>" + run("x&lt;y", rest="<w:t xml:lang='en'>"),
            ["x<y"],
            '<w:r><w:instrText>PAGE one</w:instrText></w:r><w:del><w:r><w:delText>gone</w:delText>'
            "</w:r></w:del><w:r><w:t xml:lang='en'>X&lt;Y</w:t></w:r>",
        ),
        (  # another paragraph
            run("one", rest="<w:t >") + "</w:p><w:p>" + run("two\nthree", rest="<w:t >"),
            ["one", "two three"],
            "<w:r><w:t >ONE</w:t></w:r></w:p><w:p><w:r><w:t >TWO THREE</w:t></w:r>",
        ),
    ],
)  # fmt: skip
def test_runs_of_one_format_are_one_line(inner, lines, made):
    assert shouted(".docx", inner) == (lines, made)


def test_other_formats():
    slide = (
        '<a:r><a:rPr lang="en" dirty="0"/><a:t>Two </a:t></a:r><a:r><a:rPr lang="de"/><a:t>words'
        '</a:t></a:r><a:r><a:rPr b="1"/><a:t>bold</a:t></a:r><a:fld><a:rPr/><a:t>7</a:t></a:fld>'
    )
    lines, made = shouted(".pptx", slide)
    assert lines == ["Two words", "bold", "7"]
    assert "<a:t>TWO WORDS</a:t>" in made
    assert '<a:rPr lang="de"/><a:t></a:t>' in made
    odt = (
        '<text:p text:style-name="P1">One <text:span text:style-name="T1">two</text:span>.</text:p>'
        "<office:annotation><dc:creator>Ann</dc:creator><dc:date>2024-01-01T00:00:00</dc:date>"
        "<text:p>note</text:p></office:annotation>"
    )
    lines, made = shouted(".odt", odt)
    assert lines == ["One ", "two", "note"]
    assert made == odt.replace("One", "ONE").replace("two", "TWO").replace(">note", ">NOTE")
    page = "<h1>Title</h1>\n<p>a\xa0b&#233;<!-- no --></p><pre><code>one</code></pre>"
    lines, made = shouted(".epub", page)
    assert lines == ["Title", "a\xa0bé"]
    assert made == "<h1>TITLE</h1>\n<p>A\xa0BÉ<!-- no --></p><pre><code>one</code></pre>"


def test_a_books_first_part_is_neither_packed_nor_extended():
    data = documents.opened(".epub", archive(".epub", "<p>a</p>")).written("b")
    assert data[:38].endswith(b"mimetype")  # a header of 30 bytes, and no field between
    assert data[38:39] == b"x"


def test_a_translation_has_the_lines_of_its_text():
    opened = documents.opened(".docx", archive(".docx", run("One") + run("Two", BOLD)))
    document = from_text(opened.text, lambda text: [text])
    made = unpacked(opened.written(document.joined(["E\nins", "Zwei"], "de")))["word/document.xml"]
    assert b">E ins<" in made
    assert b">Zwei<" in made


@given(st.lists(st.tuples(st.sampled_from(["", BOLD]), st.text("a é<&\n\u2028", max_size=5))))
def test_the_text_is_that_of_the_runs(given_runs):
    escaped = [(f, t.replace("&", "&amp;").replace("<", "&lt;")) for f, t in given_runs]
    opened = documents.opened(".docx", archive(".docx", "".join(run(t, f) for f, t in escaped)))
    made = unpacked(opened.written(opened.text))["word/document.xml"]
    found = "".join(lxml.etree.fromstring(made).itertext())
    assert found.split() == "".join(text for _, text in given_runs).split()


@pytest.mark.parametrize("suffix", sorted(NAMES))
def test_what_is_no_document_is_refused_in_one_line(suffix):
    good = archive(suffix, "")
    with pytest.warns(UserWarning, match="Duplicate"):
        twice = packed_twice()
    name = NAMES[suffix][0]
    bombs = [
        packed({name: b" " * (documents.LARGEST + 1)}),
        packed({name: b" ", "picture": b" " * documents._MOST}),
    ]
    squeezed = bytearray(packed({name: b"a" * 99}, zipfile.ZIP_LZMA))
    squeezed[39 + len(name) : 49 + len(name)] = b"\xff" * 10
    locked = bytearray(good)
    locked[good.rindex(b"PK\1\2") + 8] |= 1  # the flag of encryption
    for data in (b"", b"text", good[:-30], good[:60], twice, *bombs, bytes(locked),
                 packed({"a": ""}), packed({name: b"\xff"}), bytes(squeezed)):  # fmt: skip
        with pytest.raises(ValueError, match=rf"^no \{suffix}: .+$"):
            documents.opened(suffix, data)


def packed_twice():
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("a", "")
        archive.writestr("a", "")
    return made.getvalue()


@pytest.mark.parametrize(
    "piece",
    [
        "<w:r>", "<w:t ", "<w:r><w:rPr>", "<w:r><w:rPr><w:t>a</w:t>", "</w:r><w:proofErr ",
        "<w:r><w:t>a</w:t></w:r>", "<w:r ", '<w:r><w:rPr lang="',
    ],
)  # fmt: skip
def test_time_is_linear(piece):
    """A hostile part takes about twice as long if it is twice as long."""

    def seconds(count):
        data = packed({"word/document.xml": piece * count})
        began = time.process_time()
        documents.opened(".docx", data)
        return time.process_time() - began

    seconds(10)
    few, many = seconds(4_000), seconds(32_000)
    assert many < 24 * few + 0.05


def test_attributes_without_number_take_no_memory():
    """One start tag with a million attributes, of which two can count."""
    source = b'<p class="notranslate" ' + b"a " * 1_000_000 + b">kept</p>said"
    data = packed({"a.xhtml": source})
    tracemalloc.start()
    opened = documents.opened(".epub", data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert opened.text == "said"
    assert peak < 12 * len(source)
