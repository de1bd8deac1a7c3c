"""Packages that were made to do harm, files that rotted, gatherings that were killed."""

import io
import json
import os
import random
import shutil
import tarfile
import zipfile
from collections import Counter

import pytest

from gshard.errors import UserError
from gshard.mt import atomic
from gshard.mt.atomic import locked
from gshard.mt.data import fetch, jobs, readers, tiers, unpack
from gshard.mt.data.clean import clean
from gshard.mt.data.gather import GatherConfig, gather
from gshard.mt.data.splits import HeldOutShares
from gshard.mt.data.tiers import Package, Reading, Source
from gshard.mt.data.unpack import Files
from gshard.mt.data.user_text import parse_own
from tests.mt.samples import mo, sentence, translated

SHARES = HeldOutShares(0.1, 0.1)
CATALOG = mo([(sentence(n), translated(n)) for n in range(60)])
METADATA = b"Version: 1.0\nLicense-Expression: MIT\n"


def wheel(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {"app-1.dist-info/METADATA": METADATA, **members}.items():
            archive.writestr(name, data)


def tarball(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


HOSTILE = {
    "a file where a folder is": {"de/a": b"x", "de/a/b.mo": CATALOG},
    "a folder where a file is": {"de/a/b.mo": CATALOG, "de/a": b"x"},
    "a name of 300 letters": {f"de/{'a' * 300}.mo": CATALOG},
    "a folder of 300 letters": {f"{'a' * 300}/de.mo": CATALOG},
    "a path of 5000 letters": {"de/" * 1700 + "a.mo": CATALOG},
    "a stamp that is a folder": {f"{unpack.STAMP}/de.mo": CATALOG},
    "a name with a null": {"de/a\x00.mo": CATALOG},
}


@pytest.mark.parametrize("pack", [wheel, tarball])
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_package_is_skipped_and_named(tmp_path, monkeypatch, kind, pack):
    """One such package ended the gathering, each time again."""
    good, bad = Package("pip", "good"), Package("pip", "bad")
    source = Source("apps", (bad, good), (Reading("catalogs"),), ("*",))
    wheel(tmp_path / "good.whl", {"de/LC_MESSAGES/a.mo": CATALOG})
    pack(tmp_path / "bad.whl", HOSTILE[kind])

    def download(command, scratch):
        name = command[-1]
        shutil.copy(tmp_path / f"{name}.whl", scratch)

    monkeypatch.setattr(fetch, "_call", download)
    tier = tiers.Tier("test", (source,))
    corpus, problems = gather(GatherConfig(tmp_path / "out", tier, shares=SHARES, jobs=1))
    assert corpus.languages == ("de",)
    if problems:  # a ZIP file cannot hold a null, and the tape's format is not bound by it
        assert [problem.what for problem in problems] == ["bad"]
        assert [entry["what"] for entry in corpus.manifest["skipped"]] == ["bad"]
    else:
        assert kind == "a name with a null"
    assert not list((tmp_path / "out").rglob(atomic.PREFIX + "*"))


def test_a_file_where_a_packages_folder_belongs(tmp_path, monkeypatch):
    package = Package("pip", "good")
    source = Source("apps", (package,), (Reading("catalogs"),), ("*",))
    wheel(tmp_path / "good.whl", {"de/LC_MESSAGES/a.mo": CATALOG})
    monkeypatch.setattr(
        fetch, "_call", lambda command, scratch: shutil.copy(tmp_path / "good.whl", scratch)
    )
    place = tmp_path / "out" / "work" / "packages"
    place.mkdir(parents=True)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "work.txt").write_text("years of it")
    for put in (
        lambda path: path.write_text("a file"),
        lambda path: path.symlink_to(tmp_path / "precious"),
    ):
        put(place / package.id)
        config = GatherConfig(tmp_path / "out", tiers.Tier("t", (source,)), shares=SHARES, jobs=1)
        corpus, problems = gather(config)
        assert (corpus.languages, problems) == (("de",), [])
        shutil.rmtree(place / package.id)
    assert (tmp_path / "precious" / "work.txt").exists()


def test_what_the_machine_refuses_is_not_the_packages_fault(tmp_path, monkeypatch):
    wheel(tmp_path / "a.whl", {"de/a.mo": CATALOG})
    package = Package("pip", "app")
    source = Source("apps", (package,), (Reading("catalogs"),), ("*",))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(unpack.Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        unpack.unpack(tmp_path / "a.whl", package, source, tmp_path / "p")


@pytest.fixture
def config(tmp_path):
    lines = [f"de\t{translated(n)}\t{sentence(n)}\n" for n in range(60)]
    (tmp_path / "a.tsv").write_text("".join(lines))
    own = (parse_own("tsv", str(tmp_path / "a.tsv")),)
    return GatherConfig(tmp_path / "out", own=own, shares=SHARES, jobs=1)


def test_a_flipped_bit_in_a_unit_is_noticed_and_the_unit_made_again(config):
    """More than half of them gave other text without a word, the others a traceback each time."""
    want = gather(config)[0].manifest
    (unit,) = (config.out / "work" / "units").glob("*.parquet")
    whole, draw = unit.read_bytes(), random.Random(0)
    for path in [unit] * 25 + [unit.with_name(unit.name + ".sha256")] * 5:
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        assert gather(config)[0].manifest == want
        assert unit.read_bytes() == whole


def test_a_unit_that_somebody_else_wrote_is_made_again(config, monkeypatch):
    gather(config)
    (job,) = [jobs.own_job(own, config.out / "work" / "units") for own in config.own]
    for key, note in (("gshard", "[" * 100_000), ("gshard", "5"), ("gshard", "{}"), ("other", "")):
        table = jobs.pa.table({"a": [1]}).replace_schema_metadata({key: note})
        jobs.pq.write_table(table, job.target)
        atomic.write_json(job.target.with_name("x"), {})
        (job.target.with_name(job.target.name + ".sha256")).write_text(atomic.checksum(job.target))
        assert jobs.finished(job) is None
    gather(config)
    assert jobs.finished(job) is not None


def test_what_a_killed_gathering_left_is_swept(config):
    first = gather(config)[0]
    left = [config.out / "work" / ".part-abc", config.out / ".part-corpus-abc"]
    for folder in left:
        (folder / "train").mkdir(parents=True)
        (folder / "train" / "de.arrow").write_text("half")
    other = config.out / ".part-of-something-else"
    other.write_text("not ours")
    assert gather(config)[0].manifest == first.manifest
    assert [folder for folder in left if folder.exists()] == []
    assert other.exists()


def test_one_gathering_at_a_time(config):
    """The second would sweep away what the first is writing."""
    config.out.mkdir()
    with (
        locked(config.out / "work", "gathered into"),
        pytest.raises(UserError, match=r"work is being gathered into by process"),
    ):
        gather(config)


def test_half_of_a_letter_in_a_message(tmp_path):
    """JSON can spell what no UTF-8 file can hold; one such message ended the gathering."""
    files = {"en": sentence, "de": lambda n: translated(n) + " \ud83d"}
    for language, text in files.items():
        (tmp_path / "p" / language).mkdir(parents=True)
        messages = json.dumps({str(n): text(n) for n in range(9)})
        (tmp_path / "p" / language / "a.json").write_text(messages)
    reading = Reading("json", "app/{language}/*.json")
    raws = readers.read(Files({"app": tmp_path / "p"}), reading, lambda *_: None)
    cleaned = [pair for raw in raws for pair in clean(raw, Counter())]
    assert [text for _, text in cleaned] == [translated(n) for n in range(9)]


def test_a_name_as_long_as_names_can_be(tmp_path):
    path = tmp_path / ("ü" * 120 + ".tsv")
    path.write_text("".join(f"de\t{translated(n)}\t{sentence(n)}\n" for n in range(60)))
    own = (parse_own("tsv", str(path)),)
    assert gather(GatherConfig(tmp_path / "o", own=own, shares=SHARES, jobs=1))[0].languages


def test_what_steers_a_terminal_is_spelt_out():
    problem = fetch.Skipped("a\x1b]0;title\x07\udcff\n", "\x1b[2J" + "x" * 999)
    assert problem.what == r"a\x1b]0;title\x07\udcff\n"
    assert problem.why.startswith(r"\x1b[2Jxx")
    assert len(problem.why) == 300


def test_names_that_are_no_text(tmp_path):
    """File names are bytes; what is written down about them is text."""
    folder = os.fsencode(tmp_path) + b"/po-\xff"
    os.makedirs(folder + b"/de/LC_MESSAGES")
    with open(folder + b"/de/LC_MESSAGES/a.mo", "wb") as file:
        file.write(CATALOG)
    with open(folder + b"/de/LC_MESSAGES/\xfe.mo", "wb") as file:
        file.write(b"broken")
    own = (parse_own("catalogs", os.fsdecode(folder)),)
    corpus, problems = gather(GatherConfig(tmp_path / "out", own=own, shares=SHARES, jobs=1))
    assert corpus.languages == ("de",)
    assert len(problems) == 1
    json.dumps(corpus.manifest, ensure_ascii=False).encode()
