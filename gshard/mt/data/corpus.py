"""A corpus on disk: one Parquet file for each language and split, and a manifest.

The manifest is the corpus. It is replaced in one rename, names the folder of the files that belong
to it, and has a checksum for each, so a gathering that dies leaves the old corpus or the new one.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gshard.errors import UserError, nearest
from gshard.mt import atomic
from gshard.mt.data.splits import SPLITS, CorpusRow, in_groups

MANIFEST = "manifest.json"
VERSION = 1
_FOLDER = re.compile(r"corpus-[0-9a-f]+")
_LANGUAGE = re.compile(r"\w[\w@.+-]*")
_GROUP = 65536  # rows that are written together
SCHEMA = pa.schema([("source", pa.string()), ("english", pa.string()), ("origin", pa.string())])


@dataclass(frozen=True)
class Corpus:
    """The pairs of many languages with English, as the manifest in `folder` describes them."""

    folder: Path
    manifest: dict[str, Any]

    @staticmethod
    def open(folder: str | Path) -> Corpus:
        """The corpus in `folder`; an error that says what is wrong if there is none."""
        path = Path(folder) / MANIFEST
        try:
            manifest = atomic.read_object(path)
        except FileNotFoundError:
            raise UserError(
                f"no corpus in {folder} (`gshard data gather --out {folder}` makes one)"
            ) from None
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}") from None
        if manifest.get("version") != VERSION:
            raise UserError(f"{path} has version {manifest.get('version')}, not {VERSION}")
        if wrong := _wrong(manifest):
            raise UserError(f"{path} is damaged: {wrong}")
        return Corpus(Path(folder), manifest)

    @property
    def languages(self) -> tuple[str, ...]:
        """Languages with training text, the one with the most pairs first."""
        counts = {language: self.count(language) for language in self.manifest["languages"]}
        ordered = sorted(counts, key=lambda language: (-counts[language], language))
        return tuple(language for language in ordered if counts[language])

    def count(self, language: str, split: str = "train") -> int:
        """How many pairs `language` has in `split`."""
        entry = self.manifest["languages"].get(language, {}).get(split)
        return int(entry["pairs"]) if entry else 0

    def path(self, language: str, split: str = "train") -> Path:
        """The Parquet file of a language and split."""
        languages = self.manifest["languages"]
        if language not in languages:
            raise UserError(
                f"no language {language!r} in this corpus{nearest(language, languages)}"
            )
        if split not in SPLITS:
            raise UserError(f"no split {split!r}{nearest(split, SPLITS)}")
        if split not in languages[language]:
            raise UserError(f"{language} has no {split} sentences in this corpus")
        return self.folder / self.manifest["folder"] / split / f"{language}.parquet"

    def read(
        self, language: str, split: str = "train", columns: list[str] | None = None
    ) -> pa.Table:
        """The pairs of a language and split: columns source, english and origin.

        A file that is not the one that was gathered is an error, not other text.
        """
        path = self.path(language, split)
        if why := self._problem(language, split):
            raise UserError(f"{why}; gather the corpus again")
        try:
            return pq.read_table(path, columns=columns)
        except pa.ArrowInvalid as error:
            raise UserError(f"{path} is damaged ({error}); gather the corpus again") from None

    def _problem(self, language: str, split: str) -> str:
        """What is wrong with a file by the manifest's checksum, or ""."""
        path = self.path(language, split)
        if not path.is_file():
            return f"{path} is missing"
        same = atomic.checksum(path) == self.manifest["languages"][language][split]["sha256"]
        return "" if same else f"{path} is not the file that was gathered (its checksum differs)"

    def pairs(self, language: str, split: str = "train") -> Iterator[tuple[str, str]]:
        """(source, English) of a language and split, one by one."""
        table = self.read(language, split, ["source", "english"])
        for batch in table.to_batches():
            yield from zip(batch["source"].to_pylist(), batch["english"].to_pylist(), strict=True)

    def labelled(self, language: str, split: str) -> Iterator[tuple[str, str, str]]:
        """(source, English, test) of a language and split; of one without labels, its name."""
        entry = self.manifest["languages"].get(language, {}).get(split, {})
        columns = ["source", "english", *(["test"] if "tests" in entry else [])]
        found = [column.to_pylist() for column in self.read(language, split, columns).columns]
        return zip(*found[:2], found[2] if len(found) > 2 else [split] * len(found[0]), strict=True)

    def verify(self) -> list[str]:
        """What differs from the manifest's checksums: one line for each bad file."""
        everything = self.manifest["languages"].items()
        found = (self._problem(language, split) for language, each in everything for split in each)
        return list(filter(None, found))


def write_rows(
    rows: Iterable[CorpusRow], path: Path, split: str = "train"
) -> dict[str, Any] | None:
    """Write one language and split; its entry of the manifest, or None if there are no rows.

    A test has a label for each row (`CorpusRow.split`).
    """
    is_test = split == "test"
    schema = SCHEMA.append(pa.field("test", pa.string())) if is_test else SCHEMA
    labels, counts, origins = Counter[str](), Counter[str](), Counter[str]()
    groups = in_groups(rows, _GROUP)
    if (first := next(groups, None)) is None:
        return None
    with (
        atomic.new_file(path) as part,
        pq.ParquetWriter(part, schema, compression="zstd") as writer,
    ):
        for group in itertools.chain([first], groups):
            columns = [list(column) for column in zip(*group, strict=True)][: len(schema)]
            writer.write_table(pa.table(columns, schema), _GROUP)
            labels.update(columns[3] if is_test else ())
            words = [len(row.english.split()) for row in group]
            counts["pairs"] += len(group)
            counts["english_words"] += sum(words)
            counts["at_least_4_words"] += sum(count >= 4 for count in words)
            origins.update(row.origin for row in group)
    return {
        **counts,
        "origins": dict(origins),
        **({"tests": dict(sorted(labels.items()))} if is_test else {}),
        "bytes": path.stat().st_size,
        "sha256": atomic.checksum(path),
    }


def _wrong(manifest: dict[str, Any]) -> str:
    """What in a manifest cannot be, or ""; names in it become paths, of this folder only."""
    if not _FOLDER.fullmatch(str(manifest.get("folder"))):
        return f"the folder {manifest.get('folder')!r} is none that gathering makes"
    languages = manifest.get("languages")
    if not isinstance(languages, dict):
        return "it has no languages"
    for language, splits in languages.items():
        if not _LANGUAGE.fullmatch(language):
            return f"{language!r} is no name of a language"
        if not isinstance(splits, dict):
            return f"{language} has no splits"
        for split, entry in splits.items():
            known = isinstance(entry, dict) and isinstance(entry.get("sha256"), str)
            if split not in SPLITS or not known or type(entry.get("pairs")) is not int:
                return f"{split!r} of {language} is no split with pairs and a checksum"
    there = isinstance(manifest.get("dropped"), dict) and isinstance(manifest.get("sources"), list)
    return "" if there else "it does not say what was dropped, and what it was made from"
