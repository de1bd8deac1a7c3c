"""Documents: what is translated, and that all else comes out as it went in."""

import html
import re
import time

import lxml.html
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gshard.mt.serving.documents import from_html, from_subtitles, from_text


def cut(text):
    """A sentence ends with a dot and a space."""
    return [piece for piece in re.split(r"(?<=\. )", text) if piece]


def shouted(document, target="de"):
    return document.joined([sentence.upper() for sentence in document.sentences], target)


def test_lines_paragraphs_and_the_space_between_sentences_are_kept():
    text = "  One. Two.\r\n\n\t* * *\n\nthree  \n"
    document = from_text(text, cut)
    assert document.sentences == ["One.", "Two.", "three"]
    assert shouted(document) == text.upper()


def test_spaces_between_sentences_are_those_of_the_target():
    document = from_text("One. Two.", cut)
    assert document.joined(["一。", "二。"], "zh") == "一。二。"
    unspaced = from_text("一。二。", lambda text: re.findall(".。", text))
    assert unspaced.joined(["One.", "Two."], "en") == "One. Two."


@given(st.text(alphabet="ab. \n\r\t\u2028\xa0->1é語", max_size=60))
def test_text_that_is_translated_to_itself_is_unchanged(text):
    for read in (from_text, from_subtitles):
        document = read(text, cut)
        assert document.joined(document.sentences, "de") == text
        assert all(sentence == sentence.strip() != "" for sentence in document.sentences)


def test_html_keeps_every_tag_and_attribute():
    source = (
        '<!DOCTYPE html><P CLASS=a title="One. two">one &amp; <b >two</b>&nbsp;x &lt;i&gt;\n y</P>'
        "<!-- one --><script>if (a < b) one()</script><style>p {}</style><code>one</code><br/>"
        '<span translate="no">one <span>two</span> three</span> four <i class="x notranslate">k</i>'
        "&eacute;t&eacute; &#50;x <img alt='one'> tail"
    )
    document = from_html(source, cut)
    assert document.sentences == ["one &", "two", "x <i> y", "four", "été 2x", "tail"]
    assert shouted(document) == (
        '<!DOCTYPE html><P CLASS=a title="One. two">ONE &amp; <b >TWO</b>&nbsp;X &lt;I&gt; Y</P>'
        "<!-- one --><script>if (a < b) one()</script><style>p {}</style><code>one</code><br/>"
        '<span translate="no">one <span>two</span> three</span> FOUR <i class="x notranslate">k</i>'
        "ÉTÉ 2X <img alt='one'> TAIL"
    )


@pytest.mark.parametrize("broken", ["a < b", "<p", "</", "a & b", "&#x;", "<b>x", "x</b>", "<!--a"])
def test_broken_html_is_not_lost(broken):
    document = from_html(broken, cut)
    found = document.joined(document.sentences, "de")
    assert html.unescape(found) == html.unescape(broken)


@given(st.text(alphabet="<>!?-/[]=&#;\"' \tab9x\ud83d\0", max_size=40))
@example("<![x")
def test_no_html_is_refused_or_lost(text):
    document = from_html(text, cut)
    found = document.joined(document.sentences, "de")
    assert html.unescape(found).split() == html.unescape(text).split()


def test_markup_is_found_as_browsers_find_it():
    comments = "a<!---->b<!-->c<!--->d<!--e-->f<!--g--!>h<!i>j<?k>l</ m>n</>o<![x]>p<![CDATA[q]]>r"
    assert from_html(comments, cut).sentences == list("abcdfhjlnopr")
    tags = "a<p x='>' =y z=\"'>\">b<SCRIPT>if(a<b)</Script >c<p class=notranslate/x>d</p>"
    assert from_html(tags, cut).sentences == ["a", "b", "c", "d"]
    kept = "<p translate='no' translate=yes>a</p><p class='x &#110;otranslate'>b</p><svg/>c<b t"
    assert from_html(kept, cut).sentences == ["c"]
    assert from_html("&#" + "9" * 5000, cut).sentences == []


@pytest.mark.parametrize(
    "unit",
    [
        *"< \t\x1c&",
        " \xa0",
        "<!--",
        "<a",
        "<a ",
        "<a b=",
        "<a b='",
        "<a b=\"'",
        "<a/",
        "<![",
        "&#1",
    ],
)
@pytest.mark.parametrize("read", [from_text, from_html, from_subtitles])
def test_the_time_to_cut_grows_with_the_length_only(read, unit):
    """A hundred thousand characters in seconds of this process; with its square it were minutes."""
    begin = time.process_time()
    for text in (unit * (100_000 // len(unit)), f"<p {unit * (100_000 // len(unit))}>a"):
        read(text, lambda paragraph: [paragraph])
    assert time.process_time() - begin < 10


TEXTS = st.text(alphabet="ab<>&. \"'é", min_size=1, max_size=12)


@st.composite
def elements(draw, depth=0):
    """Markup, in pieces: text is escaped, and anything may be nested."""
    kind = draw(st.sampled_from(["text", "text", "b", "p", "comment", "script"]))
    if kind == "text" or depth > 2:
        return html.escape(draw(TEXTS), quote=False)
    if kind == "comment":
        return "<!-- no translation -->"
    if kind == "script":
        return "<script>let a = '<b>' && 1;</script>"
    inner = "".join(draw(st.lists(elements(depth + 1), max_size=3)))
    value = html.escape(draw(TEXTS))
    return f'<{kind} title="{value}">{inner}</{kind}>'


def skeleton(source):
    """Tags with their attributes, comments and scripts, as another parser finds them."""
    tree = lxml.html.fragment_fromstring(f"<div>{source}</div>")
    return [
        (str(each.tag), sorted(each.attrib.items()), each.text if each.tag == "script" else "")
        for each in tree.iter()
    ]


@given(st.lists(elements(), max_size=4).map("".join))
def test_another_parser_finds_the_same_tags_and_the_translated_text(source):
    document = from_html(source, cut)
    found = document.joined([sentence.replace("a", "x") for sentence in document.sentences], "de")
    assert skeleton(found) == skeleton(source)
    before, after = (
        lxml.html.fragment_fromstring(f"<div>{s}</div>").xpath("//text()[not(parent::script)]")
        for s in (source, found)
    )
    words = ["".join(each).replace("a", "x").split() for each in (before, after)]
    assert words[0] == "".join(after).split()
