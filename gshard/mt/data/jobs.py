"""Units of work: a package or a user's file, read and cleaned into one Parquet file.

A unit's file carries the digest of everything it was made from and the counts of what was dropped,
and its own checksum is beside it: a later gathering knows whether it is still good, and makes it
again if not. Being independent, units run in as many processes as there are cores.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from gshard.mt import atomic
from gshard.mt.data import fetch, readers, user_text
from gshard.mt.data.clean import clean, normalise
from gshard.mt.data.splits import fingerprint, in_groups
from gshard.mt.data.tiers import Tier, Unit
from gshard.mt.data.unpack import Files

CLEANING = 1  # to be raised when readers or filters change what comes out
_ROWS = 200_000  # in memory at a time
_KEY = b"gshard"
Cells = tuple[str, str, str, str, str]
SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("language", "source", "english", "origin", "split")]
)


@dataclass(frozen=True)
class CleaningJob:
    """A unit to be read: a tier's packages, or something of the user's own.

    `rows` makes its rows, and is told what counts the dropped ones and what takes reports.
    """

    name: str
    target: Path
    digest: str
    weight: int  # the bytes that are to be read, about
    rows: Callable[[Counter[str], readers.Report], Iterator[Cells]]


@dataclass(frozen=True)
class Cleaned:
    """What came of a unit: pairs kept, why others were dropped, files that could not be read."""

    name: str
    pairs: int
    dropped: dict[str, int]
    problems: tuple[fetch.Skipped, ...]


def unit_job(unit: Unit, packages: Path, folder: Path, tier: Tier) -> CleaningJob:
    """The job of a tier's unit; its digest covers the packages that came and how to read them."""
    stamps = [fetch.fetched(package, packages) for package in unit.packages]
    weight = sum(stamp.bytes for stamp in stamps if stamp)
    kept = (tier.languages, tier.far_share)
    text = f"{CLEANING} {unit.source.read} {unit.source.split} {kept} {stamps}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    client = unit.packages[0].client
    target = folder / f"{client}-{unit.name}.parquet".replace("/", "+")
    rows = functools.partial(_unit_rows, unit, packages, *kept)
    return CleaningJob(unit.name, target, digest, weight, rows)


def own_job(what: user_text.Own, folder: Path) -> CleaningJob:
    """The job of a user's file or folder."""
    digest = hashlib.sha256(f"{CLEANING} {what.digest()}".encode()).hexdigest()
    place = hashlib.sha256(b"\n".join(os.fsencode(path.resolve()) for path in what.paths))
    # A name in the file system has 255 bytes at most, and the user's may have all of them.
    target = folder / f"own-{what.name[:50]}-{place.hexdigest()[:8]}.parquet"
    weight = sum(path.stat().st_size for path in what.paths)
    return CleaningJob(what.name, target, digest, weight, functools.partial(_own_rows, what))


def finished(job: CleaningJob) -> Cleaned | None:
    """The result of a job that an earlier gathering did from the same things."""
    try:
        if atomic.read_text(_checksum(job)).strip() != atomic.checksum(job.target):
            return None
        metadata = pq.read_metadata(job.target).metadata or {}
        note = json.loads(metadata[_KEY])
        if note["digest"] != job.digest:
            return None
        problems = tuple(fetch.Skipped(**problem) for problem in note["problems"])
        return Cleaned(job.name, note["pairs"], note["dropped"], problems)
    except (OSError, pa.ArrowException, KeyError, ValueError, TypeError, RecursionError):
        return None


def _checksum(job: CleaningJob) -> Path:
    """The file with the checksum of a job's file."""
    return job.target.with_name(job.target.name + ".sha256")


def read_and_clean(job: CleaningJob) -> Cleaned:
    """Read and clean a unit into its file."""
    dropped: Counter[str] = Counter()
    problems: list[fetch.Skipped] = []

    def report(path: str, why: str) -> None:
        problems.append(fetch.Skipped(path, why))

    pairs = 0
    with (
        atomic.new_file(job.target) as part,
        pq.ParquetWriter(part, SCHEMA, compression="zstd") as writer,
    ):
        for rows in in_groups(job.rows(dropped, report), _ROWS):
            writer.write_table(pa.table(list(map(list, zip(*rows, strict=True))), SCHEMA))
            pairs += len(rows)
        found = Cleaned(job.name, pairs, dict(dropped), tuple(problems))
        note = json.dumps({**asdict(found), "digest": job.digest})
        writer.add_key_value_metadata({_KEY: note.encode()})
    with atomic.new_file(_checksum(job)) as part:
        part.write_text(atomic.checksum(job.target) + "\n", encoding="utf-8")
    return found


def _own_rows(own: user_text.Own, dropped: Counter[str], report: readers.Report) -> Iterator[Cells]:
    for raw, origin, split in user_text.read_own(own, report):
        if own.clean:
            for english, text in clean(raw, dropped):
                yield raw.language, text, english, origin, split
        elif (english := normalise(raw.english)) and (text := normalise(raw.text)):
            yield raw.language, text, english, origin, split
        else:
            dropped["empty"] += 1


def _unit_rows(
    unit: Unit,
    packages: Path,
    languages: tuple[str, ...],
    far_share: float,
    dropped: Counter[str],
    report: readers.Report,
) -> Iterator[Cells]:
    """The rows of the packages that are unpacked in `packages`; no `languages` are all."""
    there = [package for package in unit.packages if fetch.fetched(package, packages)]
    files = Files({package.name: packages / package.id for package in there})
    origin_of = functools.cache(functools.partial(_origin, unit, far_share))
    once: set[tuple[str, str, str]] = set()  # catalogs repeat each other within a package
    for reading in unit.source.read:
        for raw in readers.read(files, reading, report, languages):
            origin, split = origin_of(raw.document)
            for english, text in clean(raw, dropped):
                if (row := (raw.language, text, english)) not in once:
                    once.add(row)
                    yield *row, origin, split
                else:
                    dropped["duplicate"] += 1


def _origin(unit: Unit, far_share: float, document: str) -> tuple[str, str]:
    """Where a pair is from, and "far" if its document is held out, in all languages at once.

    Catalogs are held out by the package, other formats by the file, whose path is then a part of
    the origin: text of a held-out document has an origin that no training text has.
    """
    if unit.source.split:
        return unit.source.name, unit.source.split
    named = (f"{name}:{document}".removesuffix(":") for name in (unit.name, unit.family))
    origin, shared = named
    if fingerprint(f"far {shared}") / 2**64 < far_share:
        return origin, "far"
    return unit.name, ""
