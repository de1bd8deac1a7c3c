"""Tests that are far, near and of other domains, from packages of an index made on the spot."""

import os
import shutil
import zipfile

import pyarrow.parquet as pq
import pytest

from gshard.mt.data import fetch, tiers
from gshard.mt.data.gather import GatherConfig, gather
from gshard.mt.data.splits import HeldOutShares, fold
from tests.mt.data.test_closeness import is_close
from tests.mt.samples import mo, sentence, translated

TIER = """
far_share = 0.5
languages = ["de", "ru"]
sample = [2, 0.8]

[[source]]
name = "apps"
client = "pip"
keep = ["*.mo"]
read = [{ format = "catalogs" }]
packages = ["one==1.0", "two", "three", "four-l10n-de", "four-l10n-ru"]

[[source]]
name = "verses"
client = "pip"
split = "other"
keep = ["*.mo"]
read = [{ format = "catalogs" }]
packages = ["five"]
"""
NUMBERS = {  # of the sentences in each package; some are in two
    "one": range(150), "two": range(100, 250), "three": range(250, 400),
    "four-l10n-de": range(400, 500), "four-l10n-ru": range(400, 500), "five": range(500, 540),
}  # fmt: skip


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that pip takes for its index, and no other."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "index"
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", folder.as_uri())
    for name, numbers in NUMBERS.items():
        info = f"{name.replace('-', '_')}-1.0.dist-info"
        wheel = folder / name / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
        wheel.parent.mkdir(parents=True)
        with zipfile.ZipFile(wheel, "w") as file:
            for language in ("de", "ru", "fr"):
                if not name.startswith("four") or name.endswith(language):
                    entries = [(sentence(n), translated(n, language)) for n in numbers]
                    entries += [(f"{sentence(n)} again", "x" + translated(n)) for n in numbers[:9]]
                    entries.append(("Open", f"{language}{name}"))
                    file.writestr(f"{language}/LC_MESSAGES/a.mo", mo(entries))
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nLicense: MIT\n"
            file.writestr(f"{info}/METADATA", metadata)
            file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            file.writestr(f"{info}/RECORD", "")
        (wheel.parent / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    return folder


def test_an_interrupted_gathering_resumes_and_its_tests_are_what_they_are_called(
    tmp_path, index, monkeypatch
):
    tier = tiers.parse(TIER, "small")
    config = GatherConfig(tmp_path / "out", tier, shares=HeldOutShares(0.1, 0.1), jobs=1)
    original, came = fetch.unpack, []

    def interrupted(archive, package, source, folder):
        if package.name == "three":
            raise KeyboardInterrupt
        came.append(package.name)
        return original(archive, package, source, folder)

    monkeypatch.setattr(fetch, "unpack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gather(config)
    assert came == ["one", "two"]
    assert not (tmp_path / "out" / "manifest.json").exists()
    monkeypatch.setattr(fetch, "unpack", original)
    for name in came:
        shutil.rmtree(index / name)  # they are not asked for again
    corpus, skipped = gather(config)
    assert not skipped
    assert corpus.verify() == []
    licences = {source["name"]: source["licence"] for source in corpus.manifest["sources"]}
    assert licences == dict.fromkeys(NUMBERS, "MIT")
    assert all(source["sha256"] for source in corpus.manifest["sources"])
    assert set(corpus.manifest["languages"]) == {"de", "ru"}
    again, _ = gather(config)
    assert again.manifest == corpus.manifest
    compared_with_a_loop(corpus)


def compared_with_a_loop(corpus):
    """Every label, by looking at all training text; and how much of that was kept."""
    rows = {
        (language, split): pq.read_table(corpus.path(language, split)).to_pylist()
        for language, entry in corpus.manifest["languages"].items()
        for split in entry
    }
    train = [row for (_, split), each in rows.items() if split == "train" for row in each]
    texts = {fold(row["english"]) for row in train}
    assert corpus.manifest["english"] == len({row["english"] for row in train})
    origins = {row["origin"] for row in train}
    found = set()
    for (_, split), each in rows.items():
        for row in each if split == "test" else ():
            key = fold(row["english"])
            assert key not in texts
            is_near = row["origin"] in origins or any(is_close(key, text) for text in texts)
            expected = "near" if is_near else "far"
            assert row["test"] == ("verses" if row["origin"] == "verses" else expected)
            found.add((row["test"], row["origin"]))
    assert {test for test, _ in found} == {"far", "near", "verses"}
    # Packages of one family are held out together, and all of them: no origin is in both.
    assert "verses" not in origins
    far = {origin for test, origin in found if test == "far"}
    assert not far & origins
    assert len({name for name in origins if name.startswith("four")}) in (0, 2)
    # Of n pairs about 2 n^0.8 stay, sentences first.
    kept = [row for row in rows["de", "train"] if len(row["english"].split()) < 4]
    assert len(kept) < 3
    dropped = corpus.manifest["dropped"]["more than the sample"]
    total = len(train) + dropped
    assert len(train) < 0.8 * total
    counts = corpus.manifest["languages"]["de"]["test"]["tests"]
    assert sum(counts.values()) == corpus.count("de", "test")
    assert dict(counts) == {k: counts[k] for k in sorted(counts)}
