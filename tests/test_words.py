"""Phrases that readers do not understand are found, wherever a line ends, and only in prose."""

from pathlib import Path

from tools import words


def test_a_phrase_is_found_across_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Path("docs/page.md")
    page.parent.mkdir()
    page.write_text("# Title\n\nSmall gradients travel\ntogether.\n")
    assert words.is_read(page)
    assert words.phrases(page) == ["line 3: 'travel together'; see tools/words.py"]


def test_docstrings_comments_and_messages_are_read_and_code_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = Path("gshard/a.py")
    program.parent.mkdir()
    program.write_text(
        '"""Keys come round."""\nmade, anew = 1, 2  # is whole on every device\n'
        'raise ValueError("tiles that lie like those")\n'
    )
    assert [p.split(":")[0] for p in words.phrases(program)] == ["line 1", "line 2", "line 3"]
    assert not words.is_read(Path("tests/test_a.py"))


def test_the_fields_own_words_are_left_alone(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "The whole batch is replicated; small collectives are combined. A lie is a lie."
    )
    assert not words.phrases(page)


def test_a_sentence_begins_with_the_name_of_a_thing(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Of the nodes two move. It is\nfor nothing. Those of rules. Of course.\n")
    assert [found.split("'")[1] for found in words.phrases(page)] == [
        "Of ",
        "for nothing",
        "Those ",
    ]


def test_pages_compare_with_others_and_count_per_second(tmp_path):
    text = "A page beside a program: 5 tokens a second, 3 ms a step.\n"
    page, program = tmp_path / "page.md", tmp_path / "program.py"
    page.write_text(text)
    program.write_text(f'"""{text}"""\n')
    wanted = ["beside", "tokens a second", "ms a step"]
    assert [found.split("'")[1] for found in words.phrases(page)] == wanted
    assert [found.split("'")[1] for found in words.phrases(program)] == wanted[1:]
