"""Files that were damaged, or put there by somebody else: a sentence, and nothing is lost."""

import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gshard import cli
from gshard.errors import UserError
from gshard.mt import atomic
from gshard.mt.batching.tokenizer import Tokenizer
from gshard.mt.config import read
from gshard.mt.data import tiers
from gshard.mt.data.corpus import Corpus
from gshard.mt.decoding.lines import FileOutput
from gshard.mt.evaluation.baselines import read_tree, write_tree
from gshard.mt.evaluation.store import Store, Translation
from gshard.mt.run import read_metrics
from gshard.mt.study.plan import read_plan

NESTED = "[" * 100_000
NO_OBJECTS = ("", "{", "[]", "5", NESTED, '{"a": ' + "9" * 5000 + "}", "\udcff")


@pytest.mark.parametrize("text", NO_OBJECTS)
def test_what_is_no_object(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=r"."):
        atomic.read_object(path)


def test_pipes_and_devices_are_neither_read_nor_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for special in (pipe, Path("/dev/null"), tmp_path):
        with pytest.raises(OSError, match="is not a regular file"):
            atomic.read_text(special)
        with pytest.raises(OSError, match="is not a regular file"):
            atomic.checksum(special)
        with pytest.raises(OSError, match="is not a regular file"), atomic.new_file(special):
            pass
        with pytest.raises(OSError, match="is not a regular file"):
            FileOutput(special, {})
    assert pipe.is_fifo()
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "plan.toml", "tier.toml"])
def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    readers = {
        "metrics.jsonl": lambda path: read_metrics(path.parent),
        "config.json": read,
        "plan.toml": read_plan,
        "tier.toml": lambda path: tiers.load(str(path)),
    }
    with pytest.raises((OSError, UserError), match=r"regular file|no tier file"):
        readers[name](tmp_path / name)


def test_the_command_says_it_in_a_sentence(tmp_path, capsys):
    os.mkfifo(tmp_path / "plan.toml")
    with pytest.raises(SystemExit) as ended:
        cli.main(["study", str(tmp_path / "plan.toml")])
    assert ended.value.code == 1
    assert "plan.toml: is not a regular file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"folder": "../../precious"}, "is none that gathering makes"),
        ({"folder": "/etc"}, "is none that gathering makes"),
        ({"folder": None}, "is none that gathering makes"),
        ({"languages": []}, "it has no languages"),
        ({"languages": {"../x": {}}}, "'../x' is no name of a language"),
        ({"languages": {"de": 5}}, "de has no splits"),
        ({"languages": {"de": {"train": {"pairs": 5}}}}, "'train' of de is no split"),
        ({"languages": {"de": {"train": {"pairs": "5", "sha256": ""}}}}, "'train' of de"),
        ({"languages": {"de": {"other": {}}}}, "'other' of de"),
        ({"dropped": 5}, "does not say what was dropped"),
        ({"version": 9}, "has version 9"),
    ],
)
def test_a_manifest_that_cannot_be(corpus, tmp_path, change, said):
    text = json.dumps({**corpus.manifest, **change})
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=said):
        Corpus.open(tmp_path)


def test_gathering_removes_nothing_but_what_it_made(tmp_path, capsys):
    """The manifest of a folder names the files that a new gathering replaces."""
    precious, out = tmp_path / "precious", tmp_path / "corpus"
    precious.mkdir()
    (precious / "work.txt").write_text("years of it")
    out.mkdir()
    hostile = {"version": 1, "folder": "../precious", "languages": {}, "dropped": {}, "sources": []}
    (out / "manifest.json").write_text(json.dumps(hostile))
    rows = [f"de\tDas Haus steht am Fluss {n}.\tThe house is by the river {n}." for n in range(9)]
    (tmp_path / "a.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    given = ["--tsv", str(tmp_path / "a.tsv"), "--out", str(out), "--jobs", "1"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "gather", *given])
    assert (precious / "work.txt").read_text() == "years of it", capsys.readouterr()
    assert not ended.value.code
    assert Corpus.open(out).languages == ("de",)


@pytest.mark.parametrize(
    "change",
    [
        lambda note: note.replace("{", "[", 1),
        lambda note: note[: len(note) // 2],
        lambda note: json.dumps({**json.loads(note), "config": 5}),
        lambda note: json.dumps({"config": {}}),
        lambda note: note.replace('"seed"', '"sead"'),
    ],
)
def test_a_vocabularys_note_that_is_damaged(tokenizer, tmp_path, change):
    tokenizer.save(tmp_path / "v")
    path = tmp_path / "v" / "tokenizer.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=r"tokenizer\.json is damaged"):
        Tokenizer.load(tmp_path / "v")


def test_vocabularies_replace_vocabularies_only(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "v")
    tokenizer.save(tmp_path / "v")
    (tmp_path / "v" / "thesis.tex").write_text("years of it")
    with pytest.raises(UserError, match="has other files too"):
        tokenizer.save(tmp_path / "v")
    assert (tmp_path / "v" / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('extends = "{itself}"', "extends itself"),
        ("extends = 5", "extends is 5, which is not text"),
        ("source = 5", "source is 5, which is not a list"),
        ("source = [5]", "source is 5, which is not a table"),
        ('test_share = "much"', "test_share is 'much', which is not a number"),
        ("dev_share = true", "dev_share is True"),
        ('test_share = 0.1 "\udcff"', "not text in UTF-8"),
    ],
)
def test_a_tier_of_wrong_types(tmp_path, text, said):
    path = tmp_path / "mine.toml"
    written = text.format(itself=path) if "{" in text else text
    path.write_text(written, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UserError, match=said):
        tiers.load(str(path))


@pytest.mark.parametrize("line", ["5", "{}", "null", '["de", "a", "b", "c"]', NESTED])
def test_a_line_of_the_store_that_is_none(tmp_path, line):
    note = {"weights": "x"}
    Store(tmp_path / "s", note).add([("de", "one", Translation("eins", -1.0))])
    (path,) = (tmp_path / "s").glob("*.jsonl")
    with path.open("a") as file:
        file.write(line + "\n")
    again = Store(tmp_path / "s", note)
    assert again.get("de", "one") == Translation("eins", -1.0)
    assert len(again) == 1


@pytest.mark.parametrize(
    "change",
    [{"settings": 5}, {"bytes": -1}, {"done": -3}, {"bytes": 10**9}, {"done": "x"}, {"text": None}],
)
def test_a_note_of_translations_that_is_damaged(tmp_path, change):
    out = tmp_path / "a.txt"
    with contextlib.closing(FileOutput(out, {"run": "r"})) as output:
        output.add(["a", "b"], ["A", "B"])
    path = tmp_path / "a.txt.part.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with contextlib.closing(FileOutput(out, {"run": "r"})) as output:
        if change == {"text": None}:  # which only the text itself can tell
            with pytest.raises(UserError, match="begun with other text"):
                list(output.after_done([["a", "b", "c"]]))
            return
        assert output.done == 0
        assert list(output.after_done([["a"]])) == [["a"]]


def test_a_flipped_bit_in_a_stored_translation_is_noticed(tmp_path):
    """A letter that rotted gave another BLEU."""
    note, draw = {"weights": "x"}, random.Random(0)
    rows = [("de", f"line {n}", Translation(f"Zeile {n}", -n / 7)) for n in range(20)]
    Store(tmp_path / "s", note).add(rows)
    (path,) = (tmp_path / "s").glob("*.jsonl")
    whole = path.read_bytes()
    for _ in range(100):
        data = bytearray(whole)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        again = Store(tmp_path / "s", note)
        found = [(target, source, again.get(target, source)) for target, source, _ in rows]
        there = [row for row in found if row[2] is not None]
        assert there == rows[: len(again)]
        assert len(again) < len(rows)
    path.write_text(json.dumps(["de", "old", "alt", -1.0]) + "\n")  # of an earlier version
    assert Store(tmp_path / "s", note).get("de", "old") == Translation("alt", -1.0)


def test_translations_are_not_written_through_a_link(tmp_path):
    precious, note = tmp_path / "precious", {"weights": "x"}
    precious.write_text("years of it")
    Store(tmp_path / "s", note)
    (tmp_path / "s" / "translations.jsonl").symlink_to(precious)
    with pytest.raises(OSError, match="is a link to another file"):
        Store(tmp_path / "s", note)  # which would cut off what is no translation
    assert precious.read_text() == "years of it"


def test_a_damaged_archive_of_weights_is_none(tmp_path):
    tree, draw = {"a": np.arange(6.0), "b": np.ones((2, 3))}, random.Random(0)
    path = tmp_path / "weights.npz"
    write_tree(path, tree)
    whole = path.read_bytes()
    for _ in range(200):
        data = bytearray(whole)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        found = read_tree(path, tree)
        if found is not None:  # in the date of a file, say
            assert all(np.array_equal(found[name], tree[name]) for name in tree)


LIMITED = """
import errno, pathlib, resource, sys
import numpy as np
from gshard.mt import atomic
from gshard.mt.batching.tokens import _save
from gshard.mt.decoding.lines import FileOutput
from gshard.mt.training.weights import write_weights

folder = pathlib.Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
big = np.ones(100_000, np.float32)
output = FileOutput(folder / "out", {})
for write in (
    lambda: _save(folder / "a.npy", big),
    lambda: write_weights(folder / "w", {"a": big}, {}),
    lambda: atomic.write_json(folder / "a.json", ["x"] * 100_000),
    lambda: output.add(["x"], ["y" * 100_000]),
):
    try:
        write()
    except OSError as error:
        assert error.errno == errno.EFBIG, error
    else:
        raise AssertionError("nothing was refused")
output.add(["x"], ["y"])
output.finish()
assert (folder / "out").read_text() == "y\\n"
from gshard import cli
cli.main(["data", "gather", "--out", str(folder / "c"), "--tsv", sys.argv[2], "--jobs", "1"])
"""


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(tmp_path):
    """What it is that refuses is known to the end, where it becomes a line."""
    draw = random.Random(0)
    rows = ("".join(draw.choices("abcdefgh ijklm", k=60)) for _ in range(2500))
    (tmp_path / "a.tsv").write_text("".join(f"de\tA{row}.\tThe {row[::-1]}.\n" for row in rows))
    command = [sys.executable, "-c", LIMITED, tmp_path / "x", tmp_path / "a.tsv"]
    (tmp_path / "x").mkdir()
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("gshard: a file would be larger than")
    assert "Traceback" not in ended.stderr
    left = {path.name for path in (tmp_path / "x").iterdir()}
    assert left == {"a.npy", "c", "out"}  # the first is written into a folder that is not whole yet
