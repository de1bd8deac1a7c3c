import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gshard import cli
from tests.mt.samples import sentence, translated


def run(capsys, *arguments):
    """Exit status, output and errors of a `gshard` command."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return stopped.value.code, printed.out, printed.err


@pytest.fixture
def tsv(tmp_path):
    path = tmp_path / "a.tsv"
    lines = [
        f"{language}\t{translated(n, language)}\t{sentence(n)}\n"
        for language in ("de", "ru")
        for n in range(300)
    ]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_gather_stats_vocabulary_and_batches(capsys, tmp_path, tsv):
    out = tmp_path / "corpus"
    shares = ("--test-share", 0.1, "--dev-share", 0.1, "--jobs", 1)
    code, printed, _ = run(capsys, "data", "gather", "--out", out, "--tsv", tsv, *shares)
    assert code == 0
    assert "2 languages" in printed

    code, printed, _ = run(capsys, "data", "stats", out, "--verify")
    assert code == 0
    words = ("language", "de", "ru", "different English", "dropped", "licence")
    for word in (*words, "every file matches its checksum"):
        assert word in printed
    assert (out / "power-law.svg").read_text(encoding="utf-8").startswith("<svg")

    sizes = ("--source-size", 600, "--target-size", 500)
    code, printed, _ = run(capsys, "data", "vocabulary", out, *sizes)
    assert code == 0

    code, printed, _ = run(capsys, "data", "batches", out, "--steps", 5, "--rows", 4)
    assert code == 0
    assert "padding" in printed
    assert "de-en" in printed


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["data", "gather", "--tier", "tinny"], 1, "did you mean 'tiny'"),
        (["data", "gather", "--teir", "tiny"], 2, "--tier"),
        (["data", "gahter"], 2, "gather"),
        (["data", "gather", "--tier", "no.toml"], 1, "no tier file no.toml"),
        (["data", "gather", "--tsv", "none.tsv"], 1, "there is no none.tsv"),
        (["data", "gather"], 1, "nothing to gather"),
        (["data", "stats", "nowhere"], 1, "no corpus in nowhere"),
    ],
)
def test_mistakes_have_a_message_and_a_status(
    capsys, tmp_path, monkeypatch, arguments, status, message
):
    monkeypatch.chdir(tmp_path)
    code, _, errors = run(capsys, *arguments)
    assert code == status
    assert message in errors
    assert "Traceback" not in errors


def test_a_full_disk(capsys, tmp_path, tsv, monkeypatch):
    def full(rows, path, split):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gshard.mt.data.gather.write_rows", full)
    out = tmp_path / "corpus"
    code, _, errors = run(capsys, "data", "gather", "--out", out, "--tsv", tsv, "--jobs", 1)
    assert code == 1
    assert "the disk is full" in errors
    assert not (out / "manifest.json").exists()


def test_the_help_imports_nothing_heavy():
    heavy = "('pyarrow', 'grain', 'lxml', 'sentencepiece')"
    script = f"import sys, gshard.cli; print([m for m in {heavy} if m in sys.modules])"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_tiny_tier(capsys, tmp_path):
    code, printed, _ = run(capsys, "data", "gather", "--tier", "tiny", "--out", tmp_path)
    assert code == 0
    assert "106 languages" in printed


def test_brackets_in_an_origin_are_text(capsys, tmp_path):
    lines = [f"de\t{translated(n)}\t{sentence(n)}\t[/x] [red]{n % 2}\n" for n in range(40)]
    (tmp_path / "a.tsv").write_text("".join(lines), encoding="utf-8")
    options = ("--tsv", tmp_path / "a.tsv", "--out", tmp_path / "corpus", "--jobs", 1)
    assert run(capsys, "data", "gather", *options)[0] == 0
    status, out, _ = run(capsys, "data", "stats", tmp_path / "corpus")
    assert (status, "[/x] [red]0" in out) == (0, True)


def test_parquet_of_numbers_is_an_error_with_a_sentence(capsys, tmp_path):
    table = pa.table({"language": ["de"], "source": [5], "english": ["five"]})
    pq.write_table(table, tmp_path / "a.parquet")
    options = ("--parquet", tmp_path / "a.parquet", "--out", tmp_path / "corpus", "--jobs", 1)
    status, _, err = run(capsys, "data", "gather", *options)
    assert (status, "column 'source' holds int64, not text" in err) == (1, True)


def test_a_pipe_is_not_waited_for(capsys, tmp_path):
    os.mkfifo(tmp_path / "pipe.tsv")
    options = ("--tsv", tmp_path / "pipe.tsv", "--out", tmp_path / "corpus")
    status, _, err = run(capsys, "data", "gather", *options)
    assert (status, "pipe.tsv is not a regular file" in err) == (1, True)


def test_a_folder_that_cannot_be_made_is_a_sentence(capsys, tmp_path, tsv):
    (tmp_path / "file").write_text("")
    options = ("--tsv", tsv, "--out", tmp_path / "file" / "corpus")
    status, _, err = run(capsys, "data", "gather", *options)
    assert status == 1
    assert "file/corpus" in err
    assert "Not a directory" in err
