"""Text cut into pieces, and lines read from files and pipes in any encoding."""

import os
import re
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gshard.errors import UserError
from gshard.mt.decoding import lines as lines_module
from gshard.mt.decoding.lines import TextLines
from gshard.mt.decoding.segment import cut


# Cutting. Sizes are not additive: that of a joined text may be more than that of its parts.
def letters(texts):
    return [len(re.sub(r"\s", "", text)) + text.count("e") for text in texts]


def clumsy(texts):
    return [len(text) + len(text) ** 2 // 50 for text in texts]


@pytest.mark.slow
@given(
    text=st.text(st.sampled_from("abeé .,!?\n。”\uff0c\u2028\u0301"), max_size=200) | st.text(),
    longest=st.integers(1, 40),
    size=st.sampled_from([letters, clumsy]),
)
def test_pieces_lose_nothing_and_fit(text, longest, size):
    pieces = cut(text, size, longest)
    assert "".join(pieces) == text
    for piece in pieces:
        assert size([piece])[0] <= longest or len(piece) == 1
    if size([text])[0] <= longest:
        assert pieces == [text]


def test_cuts_are_at_sentences_then_clauses_then_words():
    def words(texts):
        return [len(text.split()) for text in texts]

    text = "One two three four. Five six seven eight! Nine ten, eleven, twelve."
    assert cut(text, words, 5) == [
        "One two three four. ",
        "Five six seven eight! ",
        "Nine ten, eleven, twelve.",
    ]
    assert cut(text, words, 3) == [
        "One two three ",
        "four. ",
        "Five six seven ",
        "eight! ",
        "Nine ten, eleven, ",
        "twelve.",
    ]
    wide = ["河流看见了山。", "“真的\uff1f”", "他说\uff0c是的\uff01"]
    assert cut("".join(wide), lambda texts: [len(t) for t in texts], 9) == wide
    assert cut("He said: “Yes.” He went.", words, 3) == ["He said: “Yes.” ", "He went."]


def test_a_million_characters_are_cut_quickly(tokenizer):
    def size(texts):
        return [len(ids) - 2 for ids in tokenizer.encode_source(texts, "de")]

    begin = time.perf_counter()
    for unit in (".", " ", "The river saw. "):
        text = unit * (1_000_000 // len(unit))
        pieces = cut(text, size, 126)
        assert "".join(pieces) == text
        assert max(size(pieces)) <= 126
    assert time.perf_counter() - begin < 60


# Reading.
def read(path, encoding="utf-8", lines=2, characters=100):
    return [line for chunk in TextLines(path, encoding).chunks(lines, characters) for line in chunk]


@pytest.mark.parametrize("block", [1, 3, 1 << 16])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "gb18030", "latin-1"])
def test_lines_of_any_encoding(tmp_path, monkeypatch, block, encoding):
    monkeypatch.setattr(lines_module, "_READ", block)
    monkeypatch.setattr(lines_module, "_PAUSE", 0)
    text = "one\r\n\ntwo\0three\rfour\n ü\x85 five\x0b\x0c\n"
    if encoding != "latin-1":
        text += "山河\u2028sechs 😀\n"
    path = tmp_path / "a.txt"
    for end in ("", "last"):
        path.write_bytes((text + end).encode(encoding))
        want = [line.removesuffix("\r") for line in (text + end).split("\n")]
        assert read(path, encoding) == (want if end else want[:-1])
    sizes = [len(chunk) for chunk in TextLines(path, encoding).chunks(2, 100)]
    assert max(sizes) <= 2 or block > 3
    path.write_bytes(b"\xef\xbb\xbfone\n\xed\xa0\x80")
    assert read(path) == ["one", "\ud800"]


@pytest.mark.parametrize("block", [1, 4, 1 << 16])
def test_the_place_of_a_wrong_byte_is_said(tmp_path, monkeypatch, block):
    monkeypatch.setattr(lines_module, "_READ", block)
    path = tmp_path / "a.txt"
    for data, encoding, place in [
        ("gut\nschön\nüber".encode("latin-1"), "utf-8", "line 2, byte 7 "),
        ("\ufeffgut\nböse\n".encode() + b"\xff", "utf-8", "line 3, byte 13 "),
        ("gut\n山".encode()[:-1], "utf-8", "line 2, byte 4 "),
        ("gut\n\n".encode("utf-16") + b"a", "utf-16", "line 3, byte 12 "),
        (b"gut\n\xff\xff", "ascii", "line 2, byte 4 "),
    ]:
        path.write_bytes(data)
        with pytest.raises(UserError, match=place) as caught:
            TextLines(path, encoding).check()
        assert "--encoding" in str(caught.value)


def test_a_pause_ends_a_chunk(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    seen = threading.Event()

    def write():
        with path.open("wb", buffering=0) as pipe:
            pipe.write(b"one\ntwo\nthr")
            seen.wait(20)
            pipe.write(b"ee\n")

    writer = threading.Thread(target=write)
    writer.start()
    lines = TextLines(path)
    lines.check()  # takes nothing from a pipe
    chunks = lines.chunks(100, 1000)
    assert next(chunks) == ["one", "two"]
    seen.set()
    assert list(chunks) == [["three"]]
    writer.join()


def test_the_first_chunks_are_small_and_double(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{n}\n" for n in range(100)))
    chunks = list(TextLines(path).chunks(16, 1000, first=2))
    assert [len(chunk) for chunk in chunks] == [2, 4, 8, 16, 16, 16, 16, 16, 6]
    assert [int(line) for chunk in chunks for line in chunk] == list(range(100))


def test_a_line_without_end_is_an_error(monkeypatch, tmp_path):
    """As of /dev/zero, which would fill the memory."""
    monkeypatch.setattr(lines_module, "_LONGEST", 200_000)
    with pytest.raises(UserError, match="/dev/zero has a line of more than 200,000 characters"):
        list(TextLines(Path("/dev/zero")).chunks(10, 1000))
    path = tmp_path / "many.txt"
    path.write_text(("x" * 90_000 + "\n") * 9)
    assert sum(map(len, TextLines(path).chunks(10, 1000))) == 9
