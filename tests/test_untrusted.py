"""Files, folders and text that others may have made."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gshard import untrusted
from tests.strangers import belongs_to_another


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        (f'{{"a": 1{"0" * 400}}}', "a number has 401 digits"),
        (f'{{"a": {"9" * 5000}}}', "a number has 5000 digits"),
        ('{"a": "\\ud83d"}', "half of a surrogate pair"),
        ("[1]", "holds no JSON object"),
        ("{", "Expecting"),
        ("", "Expecting"),
    ],
)
def test_json_that_is_no_object(text, message, tmp_path):
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match=message):
        untrusted.read_object(tmp_path / "file")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.dictionaries(st.text(), JSON), st.booleans())
def test_json_that_is_well(tmp_path_factory, value, ascii_only):
    path = tmp_path_factory.mktemp("json") / "file"
    path.write_text(json.dumps(value, ensure_ascii=ascii_only), encoding="utf-8")
    assert untrusted.read_object(path) == value


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_not_waited_for(make, tmp_path):
    make(tmp_path / "file")
    with pytest.raises(OSError, match="is not a regular file"):
        untrusted.read_bytes(tmp_path / "file")


def test_no_more_is_read_than_asked_for(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert untrusted.read_bytes(tmp_path / "file", 3) == b"123"


def test_a_folder_of_ones_own(tmp_path, monkeypatch):
    place = tmp_path / "a" / "b"
    os.close(untrusted.own_folder(place))
    assert place.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(place)
    with pytest.raises(OSError, match="link"):
        untrusted.own_folder(tmp_path / "link")
    place.chmod(0o770)
    with pytest.raises(PermissionError, match="can be written to by others"):
        untrusted.own_folder(place)
    place.chmod(0o700)
    belongs_to_another(place, monkeypatch)
    with pytest.raises(PermissionError, match="belongs to another user"):
        untrusted.own_folder(place)


@given(st.text())
def test_what_is_printable_stays_and_the_rest_is_spelt_out(text):
    assert untrusted.printable(text).isprintable()
    assert not text.isprintable() or untrusted.printable(text) == text
    lines = untrusted.printable_lines(f"a\n{text}")
    assert lines.count("\n") == 1 + text.count("\n")


@given(JSON)
def test_a_value_in_an_error_is_short(value):
    shown = untrusted.short_repr([value] * 5)
    assert len(shown) < 20_000
    assert shown.isprintable()
