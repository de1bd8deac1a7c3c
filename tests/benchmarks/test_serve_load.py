"""The load on a server: nothing is lost, and nobody gets another's answer."""

import pytest


@pytest.mark.slow
def test_both_engines_answer_everyone(capsys):
    pytest.importorskip("ctranslate2")
    from benchmarks import serve_load

    serve_load.main(["--seconds", "0.5", "--clients", "1", "8"])
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in rows] == [
        [engine, count] for engine in ("gshard", "ctranslate2") for count in ("1", "8")
    ]
    for row in rows:
        lost, wrong, _ = row.split()[-3:]
        assert (lost, wrong) == ("0", "0")
