from collections import Counter

import pytest

from gshard.mt.data.clean import (
    clean,
    normalise,
    placeholders,
    reason_to_drop,
    strip_accelerators,
    strip_context,
)
from gshard.mt.data.readers import Raw


def cleaned(english, text, language="de", kind="message"):
    dropped = Counter()
    return clean(Raw(language, english, text, kind), dropped), dict(dropped)


@pytest.mark.parametrize(
    ("reason", "english", "text", "language"),
    [
        ("empty", "Open", "", "de"),
        ("untranslated", "Open", "open", "de"),
        ("too long", "word " * 101, "Wort " * 101, "de"),
        ("too long", "a" * 1_000_000, "b", "de"),
        ("identifier", "org.gnome.Shell", "org.gnom.Schale", "de"),
        ("identifier", "MAX_SIZE", "GRÖSSE", "de"),
        ("identifier", "https://example.org/", "https://example.de/", "de"),
        ("credits or header", "translator-credits", "Erika Mustermann", "de"),
        ("no words", "%d %%", "%d Prozent %%", "de"),
        ("no words", "Page", "123", "de"),
        ("English side is not English", "Открыть file", "Datei öffnen", "de"),
        ("mostly symbols", "ab +++ === ??? !!!", "ab und vieles +++", "de"),
        ("mostly placeholders", "%(name)s of %(other)s", "%(name)s von %(other)s", "de"),
        ("code or command", "call foo() now", "foo() jetzt rufen", "de"),
        ("code or command", "Usage: tool [OPTION]... FILE", "Aufruf: tool [OPTION]... DATEI", "de"),
        ("wrong script", "Open the file", "Datei öffnen", "ru"),
        ("length ratio", "Open the file and then close it again, please", "Auf", "de"),
        ("placeholders differ", "Open %s now", "Jetzt öffnen", "de"),
        ("English left", "Open the new file", "Open the new Datei", "de"),
        ("English left", "Delete it", "Delete the file when you have been there", "de"),
        ("markup differs", "<b>Open</b> it", "Öffne es", "de"),
    ],
)
def test_every_reason(reason, english, text, language):
    assert cleaned(english, text, language) == ([], {reason: 1})


def test_a_gap_in_a_document():
    pair = ("See the page for , please.", "Siehe die Seite für , bitte.")
    assert cleaned(*pair, kind="document") == ([], {"gap in the sentence": 1})


@pytest.mark.parametrize(
    ("english", "text", "language", "pair"),
    [
        ("_File", "_Datei", "de", ("File", "Datei")),
        ("&Open", "Ö&ffnen", "de", ("Open", "Öffnen")),
        ("~Edit", "~Bearbeiten", "de", ("Edit", "Bearbeiten")),
        ("&File", "文件(&F)", "zh", ("File", "文件")),
        ("_File", "ファイル(_F)", "ja", ("File", "ファイル")),
        ("menu|Open", "Öffnen", "de", ("Open", "Öffnen")),
        ("_: a verb\nOpen", "Öffnen", "de", ("Open", "Öffnen")),
        ("?verb:Open", "Öffnen", "de", ("Open", "Öffnen")),
        ("verb^Open", "Öffnen", "de", ("Open", "Öffnen")),
        ("<b>Open</b> it", "<b>Öffne</b> es", "de", ("Open it", "Öffne es")),
        (
            "Tom &amp; Jerry go",
            "Tom &amp; Jerry gehen",
            "de",
            ("Tom & Jerry go", "Tom & Jerry gehen"),
        ),
        ("Copy %1$s to %2$s", "Nach %2$s wird %1$s kopiert", "de", None),
        ("A  long\u00a0way\u200b", "Ein  weiter\u00a0Weg", "de", ("A long way", "Ein weiter Weg")),
    ],
)
def test_unwrapping(english, text, language, pair):
    pair = pair or (english, text)
    assert cleaned(english, text, language) == ([pair], {})


def test_names_with_underscores_are_no_accelerators():
    pair = ("Set user_name_map here", "Setze user_name_map hier")
    assert strip_accelerators(*pair, "message") == pair
    assert strip_accelerators("A_B", "A_B", "keyed") == ("A_B", "A_B")


def test_a_context_that_the_translation_has_too_belongs_to_the_message():
    assert strip_context("yes|no", "ja|nein") == "yes|no"


def test_paragraphs_items_and_sentences_are_cut_when_both_sides_agree():
    english = "First one.\n\nSecond one."
    assert len(cleaned(english, "Der erste.\n\nDer zweite.")[0]) == 2
    assert len(cleaned(english, "Der erste und der zweite.")[0]) == 1
    items = cleaned("- one thing\n- other thing", "- eine Sache\n- andere Sache")[0]
    assert items == [("one thing", "eine Sache"), ("other thing", "andere Sache")]
    english = "The first sentence is about this long. The second one has a similar length."
    german = "Der erste Satz ist ungefähr so lang. Der zweite hat eine ähnliche Länge."
    assert len(cleaned(english, german)[0]) == 2


def test_placeholders_in_another_order_are_the_same():
    assert placeholders("%1$s and %2$s") == placeholders("%2$s und %1$s")
    assert placeholders("%s {0} ${x} @x@ %(n)s") == Counter(["%s", "{0}", "${x}", "@x@", "%(n)s"])


@pytest.mark.parametrize(
    ("language", "text"),
    [("sr", "Отвори датотеку"), ("sr", "Otvori datoteku"), ("kk", "Файлды ашу")],
)
def test_languages_with_several_scripts(language, text):
    assert reason_to_drop(language, "Open the file", text) is None


def test_normalise_composes_and_joins():
    assert normalise("  e\u0301\t\u202ax\n") == "é x"
