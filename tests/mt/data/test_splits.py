from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gshard.errors import UserError
from gshard.mt.data import corpus, splits
from gshard.mt.data.splits import (
    MAX_VARIANTS,
    SPLITS,
    CorpusRow,
    HeldOutShares,
    fingerprint,
    fold,
    given_splits,
    split_language,
    without_duplicates,
)
from tests.mt.samples import sentence

# Few distinct sentences in several spellings, so that collisions are the rule.
ENGLISH = st.builds(
    lambda n, change: change(sentence(n)),
    st.integers(0, 60),
    st.sampled_from([str, str.upper, lambda t: t + " 12!", lambda t: t.replace(" ", "  ")]),
)
SOURCES = st.integers(0, 30).map(lambda n: f"quelle {chr(97 + n % 26)} {'b' * (n // 26)}")
ROWS = st.lists(
    st.builds(CorpusRow, SOURCES, ENGLISH, st.just("o"), st.sampled_from(["", "", "", *SPLITS])),
    max_size=80,
)
SHARES = HeldOutShares(0.3, 0.2)


def split_all(languages, shares=SHARES):
    forced = given_splits(
        ((row.english, row.split) for rows in languages for row in rows if row.split), shares, {}
    )
    return [split_one(rows, shares, forced, Counter()) for rows in languages]


def split_one(rows, shares, forced, dropped):
    splits = split_language(without_duplicates(rows, dropped), shares, forced, dropped)
    return {split: list(kept) for split, kept in splits.items()}


@given(st.lists(ROWS, min_size=1, max_size=3))
def test_no_english_in_two_splits_and_no_held_out_source_in_train(languages):
    seen = {split: set() for split in SPLITS}
    for result in split_all(languages):
        for split, rows in result.items():
            seen[split] |= {fold(row.english) for row in rows}
        sources = {split: {fold(row.source) for row in rows} for split, rows in result.items()}
        assert not sources["train"] & (sources["dev"] | sources["test"])
        assert not sources["dev"] & sources["test"]
    assert not seen["train"] & (seen["dev"] | seen["test"])
    assert not seen["dev"] & seen["test"]


@given(ROWS, ROWS)
def test_gathering_more_moves_nothing(rows, more):
    rows = [row._replace(split="") for row in rows]
    more = [row._replace(split="") for row in more]
    before, after = split_all([rows])[0], split_all([rows + more])[0]
    held = {fold(row.english) for split in ("dev", "test") for row in before[split]}
    assert not held & {fold(row.english) for row in after["train"]}
    for split in ("dev", "test"):
        other = "test" if split == "dev" else "dev"
        assert not {fold(row.english) for row in before[split]} & {
            fold(row.english) for row in after[other]
        }


@given(ROWS)
def test_every_row_is_kept_or_counted(rows):
    dropped = Counter()
    forced = given_splits(((row.english, row.split) for row in rows if row.split), SHARES, {})
    result = split_one(rows, SHARES, forced, dropped)
    assert sum(map(len, result.values())) + dropped.total() == len(rows)


def test_a_smaller_share_holds_out_a_subset():
    keys = [fold(sentence(n)) for n in range(2000)]
    few, many = HeldOutShares(0.02, 0.01), HeldOutShares(0.04, 0.02)
    for split in ("dev", "test"):
        small = {key for key in keys if few.split_of(key) == split}
        assert small
        assert small < {key for key in keys if many.split_of(key) == split}


def test_shares_are_about_what_was_asked_for():
    counts = Counter(HeldOutShares(0.1, 0.05).split_of(fold(sentence(n))) for n in range(4000))
    assert 300 < counts["test"] < 500
    assert 130 < counts["dev"] < 270
    assert HeldOutShares(0.5, 0.4).split_of("open the file") == "train"  # too short to hold out


def test_given_splits_are_kept_and_the_stronger_wins():
    rows = [
        CorpusRow("a", sentence(1), "o", "test"),
        CorpusRow("b", sentence(2), "o", "train"),
        CorpusRow("c", "Open", "o", "dev"),
        CorpusRow("d", sentence(1).upper(), "o", "train"),
    ]
    result = split_all([rows], HeldOutShares(0, 0))[0]
    assert [row.source for row in result["test"]] == ["a"]
    assert [row.source for row in result["train"]] == ["b"]
    assert [row.source for row in result["dev"]] == ["c"]
    # The same English, given to training in one language, is in no test of another.
    other = [CorpusRow("e", sentence(2), "o")]
    forced = HeldOutShares(0.99, 0)
    assert [row.source for row in split_all([rows, other], forced)[1]["train"]] == ["e"]


def test_held_out_sentences_have_no_placeholder_and_one_reference():
    shares = HeldOutShares(0.99, 0)
    rows = [
        CorpusRow("eins", sentence(3), "o"),
        CorpusRow("zwei", sentence(3) + "!", "o"),
        CorpusRow("drei %s", sentence(4) + " %s", "o"),
    ]
    dropped = Counter()
    result = split_language(rows, shares, {}, dropped)
    assert [row.source for row in result["test"]] == ["eins"]
    assert dropped["second reference of a held-out sentence"] == 1
    assert dropped["held out, not fit for a test"] == 1


def test_no_more_than_needed_are_held_out():
    shares = HeldOutShares(0.99, 0, {"test": 3, "dev": 3})
    rows = [CorpusRow(f"q{'x' * n}", sentence(n), "o") for n in range(10)]
    kept = split_language(rows, shares, {}, Counter())["test"]
    again = split_language(rows[::-1], shares, {}, Counter())["test"]
    assert len(kept) == 3
    assert kept == again


def test_duplicates_and_variants():
    dropped = Counter()
    rows = [CorpusRow(f"wort {'x' * n}", "Open", "o") for n in range(MAX_VARIANTS + 2)]
    rows += [CorpusRow("Wort x!", "open", "o"), CorpusRow("open", "Open!", "o")]
    assert len(list(without_duplicates(rows, dropped))) == MAX_VARIANTS
    assert dropped == {"more than 4 translations": 2, "duplicate": 1, "untranslated": 1}


# Few English sentences with many translations each.
FEW = st.lists(
    st.builds(CorpusRow, SOURCES, st.integers(0, 2).map(sentence), st.just("o"), st.just("")),
    min_size=20,
    max_size=80,
)


@given(st.one_of(ROWS, FEW))
def test_duplicates_are_those_that_a_loop_finds(rows):
    dropped, expected, kept = Counter(), Counter(), []
    seen, variants = set(), Counter()
    for row in rows:
        english, pair, kind = splits._marks(row)
        usual = kind == splits._USUAL
        if kind == splits._UNTRANSLATED:
            expected["untranslated"] += 1
        elif pair in seen:
            expected["duplicate"] += 1
        elif usual and variants[english] == MAX_VARIANTS:
            expected["more than 4 translations"] += 1
        else:
            variants[english] += usual
            kept.append(row)
        seen.add(pair)
    found = without_duplicates(rows, dropped)
    assert (len(found), list(found), list(found)) == (len(kept), kept, kept)
    assert +dropped == expected


@given(ROWS)
def test_duplicates_as_a_set_finds_them(rows):
    """Of rows with a given split, and of those without if each English is there a few times."""
    rows = [row for row in rows if row.split]
    assert list(without_duplicates(rows, Counter())) == list(dict.fromkeys(rows))


def test_what_is_held_out_does_not_depend_on_what_is_remembered():
    """More candidates than are kept in memory: the least fingerprints are chosen all the same."""
    shares = HeldOutShares(0.99, 0, {"test": 3, "dev": 3})
    rows = [CorpusRow(f"q {n}", sentence(n), "o") for n in range(3000)]
    marks = {fold(row.english): row for row in reversed(rows)}
    ranked = sorted((k for k in marks if shares.split_of(k) == "test"), key=fingerprint)
    assert len(ranked) > 2000
    assert split_language(rows, shares, {}, Counter())["test"] == [marks[k] for k in ranked[:3]]


def test_a_language_is_written_group_by_group_as_at_once(tmp_path, monkeypatch):
    rows = [CorpusRow(f"q {n}", sentence(n), f"o{n % 3}") for n in range(10)]
    monkeypatch.setattr(corpus, "_GROUP", 4)
    entry = corpus.write_rows(iter(rows), tmp_path / "some.parquet")
    columns = [[getattr(row, name) for row in rows] for name in corpus.SCHEMA.names]
    table = pa.table(columns, corpus.SCHEMA)
    pq.write_table(table, tmp_path / "all.parquet", compression="zstd", row_group_size=4)
    assert (tmp_path / "some.parquet").read_bytes() == (tmp_path / "all.parquet").read_bytes()
    assert entry["pairs"] == 10
    assert entry["origins"] == {"o0": 4, "o1": 3, "o2": 3}
    assert corpus.write_rows([], tmp_path / "none.parquet") is None
    assert not (tmp_path / "none.parquet").exists()


def test_impossible_shares():
    with pytest.raises(UserError, match="cannot hold out nan"):
        HeldOutShares(float("nan"), 0.1)
    with pytest.raises(UserError, match="cannot hold out"):
        HeldOutShares(0.9, 0.2)
