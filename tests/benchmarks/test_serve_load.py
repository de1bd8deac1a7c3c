"""The load on a server: nothing is lost, and nobody gets another's answer."""

import re

import pytest


@pytest.mark.slow
def test_both_engines_answer_everyone(capsys):
    pytest.importorskip("ctranslate2")
    from benchmarks import serve_load

    small = ["--layers", "2", "--model-dim", "16"]
    serve_load.main([*small, "--seconds", "0.5", "--clients", "1", "8"])
    _, *rows, same = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in rows] == [
        [engine, count] for engine in ("gshard", "CTranslate2") for count in ("1", "8")
    ]
    for row in rows:
        lost, wrong, _ = row.split()[-3:]
        assert (lost, wrong) == ("0", "0")
    assert same.startswith("100 of 100 sentences")
    ours, theirs = map(float, re.findall(r"\d+\.\d", same))  # steps of a sentence
    assert abs(ours - theirs) < 0.5  # gshard counts no step after an end
