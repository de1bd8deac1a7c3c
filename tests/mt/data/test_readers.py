import bz2
import contextlib
import gzip
import json
import os
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gshard.mt.data import readers, unpack
from gshard.mt.data.readers import catalogs, documents, keyed
from gshard.mt.data.tiers import Reading
from gshard.mt.data.unpack import Files
from tests.mt.samples import mo, pak, po, qm

ONE_AND_MANY = ("one file", "%d files", ["eine Datei", "%d Dateien"])


@pytest.mark.parametrize("make", [mo, po])
def test_gettext_pairs_contexts_and_plurals(make):
    read = catalogs.read_mo if make is mo else catalogs.read_po
    pairs = list(read(make([("Open", "Öffnen"), ONE_AND_MANY])))
    expected = [("Open", "Öffnen"), ("one file", "eine Datei"), ("%d files", "%d Dateien")]
    assert sorted(pairs) == sorted(expected)  # a compiled catalog is sorted by msgid


def test_plural_rule_decides_which_form_is_the_singular():
    # Three forms, the singular the last of them.
    forms = "nplurals=3; plural=(n==1 ? 2 : n<5 ? 0 : 1);"
    entry = ("one file", "%d files", ["few", "many", "single"])
    assert list(catalogs.read_mo(mo([entry], forms))) == [
        ("one file", "single"),
        ("%d files", "many"),
    ]


def test_a_language_without_plurals_gives_the_english_plural():
    entry = ("one file", "%d files", ["%d 文件"])
    assert list(catalogs.read_po(po([entry], "nplurals=1; plural=0;"))) == [("%d files", "%d 文件")]


@pytest.mark.parametrize(
    "rule", ["__import__('os')", "n(", "n" * 2000, "1/0", "(" * 200 + "n" + ")" * 200]
)
def test_a_hostile_plural_rule_does_nothing(rule):
    found = catalogs.plural_rule(f"Plural-Forms: nplurals=2; plural={rule};\n")
    pairs = list(catalogs.plural_pairs("a", "b", ["x", "y"], found))
    assert pairs == [("a", "x"), ("b", "y")]


def test_po_leaves_out_fuzzy_and_obsolete_entries():
    text = po([("Open", "Öffnen")]) + (
        b'\n#, fuzzy\nmsgid "Close"\nmsgstr "Zu"\n\n#~ msgid "Old"\n#~ msgstr "Alt"\n'
    )
    assert list(catalogs.read_po(text)) == [("Open", "Öffnen")]


def test_po_english_from_the_default_comment():
    text = (
        b'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\n'
        b'#. Default: "Add a \\"new\\" "\n#. "page"\nmsgid "label_add"\nmsgstr "Neue Seite"\n'
    )
    assert list(catalogs.read_po(text, english_from_comment=True)) == [
        ('Add a "new" page', "Neue Seite")
    ]


def test_po_in_another_encoding():
    text = (
        'msgid ""\nmsgstr "Content-Type: text/plain; charset=ISO-8859-1\\n"\n\n'
        'msgid "Open"\nmsgstr "Öffnen"\n'
    ).encode("latin-1")
    assert list(catalogs.read_po(text)) == [("Open", "Öffnen")]


def test_qt_takes_the_form_for_many():
    data = qm([("Open", "Öffnen"), ("%n files", "%n Datei", "%n Dateien")])
    assert list(catalogs.read_qm(data)) == [("Open", "Öffnen"), ("%n files", "%n Dateien")]


@pytest.mark.parametrize("version", [4, 5])
def test_chromium_packs(version):
    data = pak({7: "Öffnen", 9: "<!doctype html>", 12: "Schließen"}, version)
    assert keyed.read_pak(data) == {"7": "Öffnen", "12": "Schließen"}


def test_json_paths_without_metadata():
    data = json.dumps({"@metadata": {"authors": ["x"]}, "menu": ["Open", {"a": "Close"}]}).encode()
    assert keyed.read_json(data) == {"/menu/0": "Open", "/menu/1/a": "Close"}


def test_fluent_messages_attributes_and_selectors():
    data = (
        b"# comment\nopen = Open { -brand-short-name }\n    .label = Open it\n"
        b"    .accesskey = O\nlong =\n    Two\n    lines\n"
        b"count = { $n ->\n    [one] one\n   *[other] many\n}\n"
    )
    messages = keyed.read_ftl(data)
    assert messages == {
        "open": "Open { -brand-short-name }",
        "open.label": "Open it",
        "long": "Two\nlines",
    }
    assert keyed.plain_mozilla(messages["open"]) == "Open Firefox"
    assert keyed.plain_mozilla("{ $count } files &brandShortName;") == "{count} files Firefox"


def test_properties_and_dtd():
    data = b"open = \\u00d6ffnen\nopen.accesskey = O\n# no\nlong = one \\\n two\n"
    assert keyed.read_properties(data) == {"open": "Öffnen", "long": "one  two"}
    assert keyed.read_dtd(b"<!ENTITY open \"Open\">\n<!ENTITY o.accesskey 'O'>") == {"open": "Open"}


def test_ini_php_and_js():
    assert keyed.read_ini(b'\xef\xbb\xbfOpen="Say \\"open\\""\n') == {"Open": 'Say "open"'}
    php = keyed.read_php(b"$lang['open'] = 'It\\'s open';\n$lang['x'] = \"y\";")
    assert php == {"open": "It's open", "x": "y"}
    js = keyed.read_js(b'Blockly.Msg["OPEN"] = "Open\\n";Blockly.Msg["A_HELPURL"] = "http://x";')
    assert js == {"OPEN": "Open\n"}


def test_descriptions_align_only_equal_numbers_of_paragraphs():
    def block(code, *paragraphs):
        body = "\n .\n ".join(paragraphs)
        return f"Package: a\nDescription-md5: {'0' * 8}\nDescription-{code}: Title\n {body}\n\n"

    english = keyed.read_descriptions(block("en", "One.", "Two.").encode())
    german = keyed.read_descriptions(block("de", "Eins.", "Zwei.").encode())
    short = keyed.read_descriptions(block("fr", "Un.").encode())
    assert len(english) == 3
    assert english.keys() == german.keys()
    assert english.keys() & short.keys() == {"00000000/title"}


def test_wikitext_is_unwrapped():
    text = "'''Bold''' [[Help:X|help]] for {{PLURAL:$1|1=one page|$1 pages}} at {{SITENAME}}"
    assert keyed.plain_wikitext(text) == "Bold help for $1 pages at Wiki"
    assert keyed.plain_wikitext("{{FOO|{{BAR}}}}") == ""


DOCBOOK = (
    '<?xml version="1.0"?><!DOCTYPE book PUBLIC "x" "y" [<!ENTITY app "Tool">]>'
    "<book><title>{title}</title><legalnotice><para>no</para></legalnotice>"
    "<para>{one} <emphasis>&app;</emphasis></para>{extra}"
    "<sect1><title>{head}</title><para>{two} &Ctrl;</para><para>{three}</para></sect1></book>"
)


def _docbook(extra="", **words):
    text = DOCBOOK
    for name, word in {**words, "extra": extra}.items():
        text = text.replace("{" + name + "}", word)
    return documents.xml_blocks(text.encode())


ENGLISH = {"title": "Book", "one": "The tool", "head": "Part", "two": "Press", "three": "End"}
FRENCH = {"title": "Livre", "one": "L'outil", "head": "Partie", "two": "Appuyer", "three": "Fin"}


def test_docbook_blocks_and_alignment():
    english, french = _docbook(**ENGLISH), _docbook(**FRENCH)
    assert ("para", "The tool Tool") in english
    assert ("Part", "Partie") in list(documents.align(english, french))
    # The paragraph with a key that only KDE's own tools could name has a gap.
    assert any(documents.GAP in text for _, text in english)


def test_documents_of_other_structure_align_by_section():
    english, french = _docbook(**ENGLISH), _docbook("<para>de plus</para>", **FRENCH)
    pairs = list(documents.align(english, french))
    assert ("End", "Fin") in pairs
    assert ("The tool Tool", "L'outil Tool") not in pairs
    assert ("Book", "Livre") in pairs
    assert list(documents.align(english, english[:2])) == []


def test_html_blocks_are_the_innermost():
    page = b"<html><body><h1>A</h1><ul><li><p>x</p></li><li>y <b>z</b></li></ul><pre>c</pre></body>"
    assert documents.html_blocks(page) == [("h1", "A"), ("p", "x"), ("li", "y z")]


def test_html_by_ids():
    page = b'<p id="par_id1">a</p><p id="par_id2" class="bascode">b</p><p id="other">c</p>'
    assert documents.html_ids(b"<html><body>" + page + b"</body></html>") == {"par_id1": "a"}


def _read(folder, reading):
    reports = []
    files = Files({"pkg": folder})
    found = list(readers.read(files, reading, lambda path, why: reports.append((path, why))))
    return [(raw.language, raw.english, raw.text) for raw in found], reports


def test_catalogs_in_folders_and_archives(tmp_path):
    place = tmp_path / "locale" / "de" / "LC_MESSAGES"
    place.mkdir(parents=True)
    (place / "app.mo").write_bytes(mo([("Open", "Öffnen")]))
    (place / "app.po").write_bytes(po([("Open", "nicht gelesen")]))
    (tmp_path / "app_pt_BR.qm").write_bytes(qm([("Close", "Fechar")]))
    (tmp_path / "en.mo").write_bytes(mo([("Open", "Open it")]))
    with zipfile.ZipFile(tmp_path / "locales.zip", "w") as archive:
        archive.writestr("fr/LC_MESSAGES/app.mo", mo([("Open", "Ouvrir")]))
    (tmp_path / "sv.mo").write_bytes(b"\xde\x12\x04\x95 truncated")
    (tmp_path / "bad.zip").write_bytes(b"PK\x03\x04 no")
    pairs, reports = _read(tmp_path, Reading("catalogs"))
    assert sorted(pairs) == [
        ("de", "Open", "Öffnen"),
        ("fr", "Open", "Ouvrir"),
        ("pt", "Close", "Fechar"),
    ]
    assert sorted(path for path, _ in reports) == ["pkg/bad.zip", "pkg/sv.mo"]


def test_files_meet_the_english_of_the_same_path(tmp_path):
    for language, text in (("en", "Open"), ("de", "Öffnen"), ("zh-TW", "開啟")):
        for part in ("a", "b"):
            place = tmp_path / part / f"{language}.json"
            place.parent.mkdir(exist_ok=True)
            place.write_text(json.dumps({"k": text + part, "other": 1}))
    (tmp_path / "a" / "fr.json").write_text("{broken")
    pairs, reports = _read(tmp_path, Reading("json", "*/**/{language}.json"))
    assert sorted(pairs) == [
        ("de", "Opena", "Öffnena"),
        ("de", "Openb", "Öffnenb"),
        ("zh_Hant", "Opena", "開啟a"),
        ("zh_Hant", "Openb", "開啟b"),
    ]
    assert [path for path, _ in reports] == ["pkg/a/fr.json"]


def test_what_any_matches_may_differ(tmp_path):
    for package, language, text in (("common", "en-US", "Open"), ("l10n", "de", "Öffnen")):
        place = tmp_path / package / f"{language}.pak"
        place.parent.mkdir()
        place.write_bytes(pak({1: text}))
    reading = Reading("pak", "*/{any}/{language}.pak", "en-US")
    assert _read(tmp_path, reading)[0] == [("de", "Open", "Öffnen")]


def test_compressed_documents(tmp_path):
    for language, words in (("C", ENGLISH), ("fr", FRENCH)):
        text = DOCBOOK
        for name, word in {**words, "extra": ""}.items():
            text = text.replace("{" + name + "}", word)
        place = tmp_path / language / "index.docbook.bz2"
        place.parent.mkdir()
        place.write_bytes(bz2.compress(text.encode()))
    pairs, _ = _read(tmp_path, Reading("docbook", "*/{language}/**.docbook", "C"))
    assert ("fr", "End", "Fin") in pairs
    assert not any("Press" in english for _, english, _ in pairs)  # it has a gap


def test_language_packs_name_their_language_twice(tmp_path):
    for name, locale, text in (("en-gb", "en-GB", "Open it"), ("pt-br", "pt-BR", "Abra")):
        place = tmp_path / name
        place.mkdir()
        with zipfile.ZipFile(place / f"langpack-{locale}.xpi", "w") as pack:
            pack.writestr(f"browser/chrome/{locale}/locale/{locale}/a.ftl", f"open = {text}\n")
            pack.writestr(f"localization/{locale}/b.properties", f"shut = {text}!\n")
    reading = Reading("mozilla", "*/{language}/**", "en-gb")
    assert sorted(_read(tmp_path, reading)[0]) == [
        ("pt", "Open it", "Abra"),
        ("pt", "Open it!", "Abra!"),
    ]


@pytest.mark.parametrize(
    ("read", "data"),
    [
        (catalogs.read_mo, b"\xde\x12\x04\x95" + b"\xff" * 40),
        (catalogs.read_mo, b""),
        (catalogs.read_po, b'msgid "a\nmsgstr'),
        (catalogs.read_qm, b"no"),
        (catalogs.read_qm, qm([("a", "b")])[:30] + b"\x69\0\0\0\x05\x77"),
        (keyed.read_pak, b"\x09\0\0\0aaaa"),
        (keyed.read_json, b"\xff\xfe"),
        (documents.html_blocks, b" "),
    ],
)
def test_broken_files_raise_what_is_reported(read, data):
    with pytest.raises(readers.UNREADABLE):
        list(read(data))


ALL = [
    catalogs.read_mo,
    catalogs.read_po,
    catalogs.read_qm,
    documents.html_blocks,
    documents.html_ids,
    documents.xml_blocks,
    keyed.read_ftl,
    keyed.read_dtd,
    *keyed.FORMATS.values(),
]
STARTS = [
    b"",
    mo([("a", "b")])[:28],
    qm([("a", "b")])[:40],
    pak({1: "x"})[:14],
    b"<a>",
    b"{",
    b"msgid ",
]


@given(st.sampled_from(ALL), st.sampled_from(STARTS), st.binary(max_size=60))
def test_no_bytes_break_a_reader(read, start, rest):
    with contextlib.suppress(readers.UNREADABLE):
        list(read(start + rest))


def test_pipes_devices_and_links_to_nowhere_are_named_and_not_waited_for(tmp_path):
    (tmp_path / "de").mkdir()
    os.mkfifo(tmp_path / "de" / "pipe.mo")
    (tmp_path / "de" / "nowhere.mo").symlink_to(tmp_path / "gone")
    (tmp_path / "de" / "zero.mo").symlink_to("/dev/zero")
    (tmp_path / "de" / "good.mo").write_bytes(mo([("Open", "Öffnen")]))
    files = Files({"pkg": tmp_path})
    assert list(files) == ["pkg/de/good.mo"]
    assert {path for path, _ in files.broken} == {
        "pkg/de/pipe.mo",
        "pkg/de/nowhere.mo",
        "pkg/de/zero.mo",
    }


@pytest.mark.parametrize("name", ["de/a.po.gz", "de/a.po.bz2", "de.zip"])
def test_what_unpacks_without_end_is_named(tmp_path, name, monkeypatch):
    monkeypatch.setattr(unpack, "MAX_BYTES", 1 << 20)
    place = tmp_path / name
    place.parent.mkdir(exist_ok=True)
    data = bytes(4 << 20)
    if name.endswith(".zip"):
        with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("de/a.po", data)
    else:
        place.write_bytes((gzip if name.endswith("gz") else bz2).compress(data))
    files = Files({"pkg": tmp_path})
    (path,) = files
    with pytest.raises(ValueError, match="unpacks to more than 1 MB"):
        files.read(path)
