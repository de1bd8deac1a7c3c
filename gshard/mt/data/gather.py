"""`gshard data gather` on one screen: fetch, read and clean, sort by language, split, write.

Every stage leaves complete, stamped files: stopped anywhere and started again, it continues.
Memory is bounded, whatever the tier: of a language, fingerprints of each pair.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import multiprocessing
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gshard.errors import UserError
from gshard.mt import atomic
from gshard.mt.atomic import locked
from gshard.mt.data import fetch, jobs
from gshard.mt.data.corpus import MANIFEST, VERSION, Corpus, write_rows
from gshard.mt.data.labels import label_tests
from gshard.mt.data.splits import (
    CorpusRow,
    HeldOutShares,
    given_splits,
    split_language,
    without_duplicates,
)
from gshard.mt.data.tiers import Tier
from gshard.mt.data.user_text import Own
from gshard.mt.launch.status import end_with_parent
from gshard.mt.progress import SILENT, Advance, Progress

_BUFFERED = 1_000_000  # rows held while sorting by language
_PART = f"{atomic.PREFIX}corpus-"  # of a corpus that is not complete yet
_TOGETHER = 10_000  # rows of a language that are read together
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class GatherConfig:
    """What to gather, where to, and how to split it."""

    out: Path
    tier: Tier | None = None
    own: tuple[Own, ...] = ()
    shares: HeldOutShares = field(default_factory=HeldOutShares)
    jobs: int = 0  # processes; 0 is one for each core
    licence: str = "the user's own"  # of `own`
    ray: bool = False  # on the nodes of a Ray cluster


def gather(config: GatherConfig, progress: Progress = SILENT) -> tuple[Corpus, list[fetch.Skipped]]:
    """Gather a corpus into `config.out`; what had to be skipped is returned beside it."""
    if config.tier is None and not config.own:
        raise UserError("nothing to gather: name a tier, or text of your own")
    work = config.out / "work"
    with locked(work, "gathered into"):
        atomic.sweep(work)
        atomic.remove(config.out.glob(_PART + "*"))
        return _Gathering(config, work, progress).run()


@dataclass(frozen=True)
class _Gathering:
    """A gathering by the only process that changes these folders."""

    config: GatherConfig
    work: Path
    progress: Progress
    problems: list[fetch.Skipped] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    def run(self) -> tuple[Corpus, list[fetch.Skipped]]:
        """All stages."""
        if tier := self.config.tier:
            packages = tier.packages()
            step = self.progress.stage("download", len(packages))
            folder = self.work / "packages"
            self.problems.extend(fetch.fetch(packages, folder, lambda each, _: step(each.name)))
        jobs = self._jobs()
        results = self._read(jobs)
        for result in results:
            self.problems.extend(result.problems)
            self.dropped.update(result.dropped)
        with tempfile.TemporaryDirectory(prefix=atomic.PREFIX, dir=self.work) as scratch:
            step = self.progress.stage("sort", len(jobs))
            languages, forced = _sort_by_language(jobs, Path(scratch), self.config.shares, step)
            if not languages:
                first = self.problems[:10]
                reasons = "".join(f"\n  {problem.what}: {problem.why}" for problem in first)
                skipped = f"; skipped:{reasons}" if reasons else ""
                raise UserError(f"no pair survived the cleaning; nothing was written{skipped}")
            corpus = self._write(languages, forced, {r.name: r.pairs for r in results})
        return corpus, self.problems

    def _jobs(self) -> list[jobs.CleaningJob]:
        folder, packages = self.work / "units", self.work / "packages"
        folder.mkdir(exist_ok=True)
        found = [jobs.own_job(own, folder) for own in self.config.own]
        if tier := self.config.tier:
            for unit in tier.units():
                if any(fetch.fetched(package, packages) for package in unit.packages):
                    found.append(jobs.unit_job(unit, packages, folder, tier))
        return found

    def _read(self, wanted: list[jobs.CleaningJob]) -> list[jobs.Cleaned]:
        step = self.progress.stage("read and clean", len(wanted))
        results = {job.target: result for job in wanted if (result := jobs.finished(job))}
        for result in results.values():
            step(result.name)
        todo = [job for job in wanted if job.target not in results]
        # The largest first, so that no process is left alone with it at the end.
        todo.sort(key=lambda job: job.weight, reverse=True)
        for job, result in _parallel(jobs.read_and_clean, todo, self.config):
            results[job.target] = result
            step(result.name)
        return [results[job.target] for job in wanted]

    def _write(
        self, languages: dict[str, list[Path]], forced: dict[int, str], units: dict[str, int]
    ) -> Corpus:
        config, step = self.config, self.progress.stage("split and write", len(languages))
        entries: dict[str, Any] = {}
        old = ""
        with contextlib.suppress(UserError, KeyError):
            old = str(Corpus.open(config.out).manifest["folder"])
        with contextlib.ExitStack() as stack:
            part = Path(tempfile.mkdtemp(prefix=_PART, dir=config.out))
            stack.callback(shutil.rmtree, part, ignore_errors=True)
            sample = config.tier.sample if config.tier else (1.0, 1.0)
            task = functools.partial(_write_language, part, config.shares, forced, sample)
            for (language, _), (entry, reasons) in _parallel(task, list(languages.items()), config):
                entries[language] = entry
                self.dropped.update(reasons)
                step(language)
            too_many, english = label_tests(part, entries, config.shares.most["test"])
            self.dropped.update(too_many)
            sums = sorted(split["sha256"] for entry in entries.values() for split in entry.values())
            folder = f"corpus-{hashlib.sha256(''.join(sums).encode()).hexdigest()[:12]}"
            part.chmod(0o755)
            atomic.put_folder(part, config.out / folder)  # perhaps in place of the same corpus
        manifest = {
            "version": VERSION,
            "folder": folder,
            "tier": config.tier.name if config.tier else None,
            "shares": {"test": config.shares.test, "dev": config.shares.dev}
            | {f"most_{split}": count for split, count in config.shares.most.items()},
            "languages": entries,
            "english": english,  # different sentences to train on
            "sources": self._sources(),
            "units": units,
            "dropped": {reason: count for reason, count in self.dropped.items() if count},
            "skipped": [{"what": problem.what, "why": problem.why} for problem in self.problems],
        }
        atomic.write_json(config.out / MANIFEST, manifest)
        if old and old != folder:
            shutil.rmtree(config.out / old, ignore_errors=True)
        return Corpus.open(config.out)

    def _sources(self) -> list[dict[str, Any]]:
        """Where everything came from: name, version, licence, checksum of the archive."""
        sources: list[dict[str, Any]] = []
        for package, _ in self.config.tier.packages() if self.config.tier else ():
            if stamp := fetch.fetched(package, self.work / "packages"):
                names = ("client", "name", "version", "licence", "bytes", "sha256")
                sources.append({name: getattr(stamp, name) for name in names})
                sources[-1]["licence"] = stamp.licence or "unknown"
        for own in self.config.own:
            files = [path for path in own.paths if path.is_file()]
            sources.append(
                {
                    "client": own.kind,
                    "name": own.name,
                    "licence": self.config.licence,
                    "bytes": sum(path.stat().st_size for path in files),
                    "sha256": ", ".join(atomic.checksum(path) for path in files),
                }
            )
        return sources


def _parallel(
    work: Callable[[T], R], items: list[T], config: GatherConfig
) -> Iterator[tuple[T, R]]:
    """Each item with its result, as they come; in this process if there is little to do."""
    if config.ray and items:
        from gshard.mt.launch.ray_cluster import on_ray

        yield from on_ray(work, items, config.jobs)
        return
    processes = min(config.jobs or os.cpu_count() or 1, len(items))
    if processes <= 1:
        for item in items:
            yield item, work(item)
        return
    context = multiprocessing.get_context("spawn")  # threads of Arrow do not survive a fork
    with concurrent.futures.ProcessPoolExecutor(processes, context, end_with_parent) as pool:
        futures = {pool.submit(work, item): item for item in items}
        try:
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _sort_by_language(
    jobs: list[jobs.CleaningJob], scratch: Path, shares: HeldOutShares, step: Advance
) -> tuple[dict[str, list[Path]], dict[int, str]]:
    """All units' rows as files by language, in the units' order, and the splits users gave."""
    files: dict[str, list[Path]] = {}
    forced: dict[int, str] = {}
    buffer: dict[str, list[pa.Table]] = {}
    buffered = 0

    def flush() -> None:
        for language, tables in sorted(buffer.items()):
            paths = files.setdefault(language, [])
            path = scratch / f"{language}-{len(paths)}.arrow"
            table = pa.concat_tables(tables)
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table, _TOGETHER)
            paths.append(path)
        buffer.clear()

    for job in jobs:
        for batch in pq.ParquetFile(job.target).iter_batches(_BUFFERED // 5):
            table = pa.Table.from_batches([batch])
            given = table.filter(pc.not_equal(table["split"], "")).select(["english", "split"])
            pairs = zip(*(column.to_pylist() for column in given.columns), strict=True)
            forced = given_splits(pairs, shares, forced)
            for language, rows in _by_language(table):
                buffer.setdefault(language, []).append(rows)
            buffered += table.num_rows
            if buffered >= _BUFFERED:
                flush()
                buffered = 0
        step(job.name)
    flush()
    return files, forced


def _by_language(table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """The rows of each language, in their order."""
    indices = pc.sort_indices(table["language"])
    table = table.take(indices)  # Arrow's sort of one key is stable
    start = 0
    for language, count in Counter(table["language"].to_pylist()).items():
        yield language, table.slice(start, count).select(["source", "english", "origin", "split"])
        start += count


def _write_language(
    part: Path,
    shares: HeldOutShares,
    forced: dict[int, str],
    sample: tuple[float, float],
    item: tuple[str, list[Path]],
) -> tuple[dict[str, Any], Counter[str]]:
    (language, paths), dropped = item, Counter[str]()
    rows = without_duplicates(_LanguageFiles(paths), dropped)
    written = {
        split: write_rows(kept, part / split / f"{language}.parquet", split)
        for split, kept in split_language(rows, shares, forced, dropped, sample).items()
    }
    return {split: entry for split, entry in written.items() if entry}, dropped


@dataclass(frozen=True)
class _LanguageFiles:
    """The rows of a language, read from its files as often as they are asked for."""

    paths: list[Path]

    def __iter__(self) -> Iterator[CorpusRow]:
        for path in self.paths:
            with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    columns = [batch[name].to_pylist() for name in CorpusRow._fields]
                    yield from map(CorpusRow, *columns)
