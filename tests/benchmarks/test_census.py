"""The comparison of two censuses: a table, and whether a program sends more."""

from benchmarks.census import compare, markdown


def row(sent, equations, text="a"):
    return {
        "bytes": sent,
        "collectives": 1,
        "equations": equations,
        "text": text,
        "seconds": 0.5,
    }


BEFORE = {"layer": row(2048, 30), "random 0": row(10, 5), "random 1": row(20, 7), "gone": row(1, 1)}
AFTER = {"layer": row(1024, 31), "random 0": row(9, 5), "random 1": row(20, 6), "new": row(1, 1)}


def test_random_programs_are_one_row():
    head, _, layer, random = markdown(BEFORE, AFTER).splitlines()
    assert head == "| program | bytes before | now | equations before | now |"
    assert layer == "| layer | 2,048 | 1,024 | 30 | 31 |"
    assert random == "| 2 random programs | 30 | 29 | 12 | 11 |"


def test_more_bytes_are_a_failure(capsys):
    assert compare(BEFORE, AFTER)
    assert not compare(AFTER, BEFORE)
    assert "layer: bytes 1,024 -> 2,048" in capsys.readouterr().out
