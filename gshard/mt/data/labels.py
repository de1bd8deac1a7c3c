"""Which test a held-out sentence belongs to: far, near, or one of another domain.

*far*: nothing of its origin (a package, or a document) is in the training text, and no training
English of any language is close to it (`closeness`). *near*: all others of the same kind of text.
Sources that a tier names as other domains are tests of their own, called like the source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gshard.mt.data.closeness import close
from gshard.mt.data.corpus import write_rows
from gshard.mt.data.splits import CorpusRow, fingerprint, fold


def label_tests(folder: Path, entries: dict[str, dict[str, Any]], most: int) -> Counter[str]:
    """Write the test sentences of all languages again with their labels; what is dropped.

    Sentences of held-out documents that are training text of another origin too are dropped, and
    of each label those above `most`, unless the user gave them. `entries` are the manifest's.
    """
    rows = {
        language: _rows(folder, language) for language, entry in entries.items() if "test" in entry
    }
    keys = sorted({fold(row.english) for each in rows.values() for row in each})
    same: set[str] = set()
    is_close = dict(
        zip(keys, close(keys, _training(folder, entries, set(keys), same)), strict=True)
    )
    origins = {
        name for entry in entries.values() for name in entry.get("train", {}).get("origins", ())
    }
    dropped: Counter[str] = Counter()
    for language, each in rows.items():
        kept: dict[str, dict[int, CorpusRow]] = {}
        given: list[CorpusRow] = []
        for row in each:
            key = fold(row.english)
            label = "near" if row.origin in origins or is_close[key] else "far"
            labelled = row._replace(split=row.origin if row.split == "other" else label)
            if row.split == "test":
                given.append(labelled)
            elif key in same:
                dropped["held out, and in the training text"] += 1
            else:
                kept.setdefault(labelled.split, {})[fingerprint(key)] = labelled
        least = [
            row for _, found in sorted(kept.items()) for _, row in sorted(found.items())[:most]
        ]
        dropped["held out, more than needed"] += sum(map(len, kept.values())) - len(least)
        entry = write_rows(given + least, folder / "test" / f"{language}.parquet", "test")
        entries[language] |= {"test": entry}
        if entry is None:
            (folder / "test" / f"{language}.parquet").unlink()
            del entries[language]["test"]
    return dropped


def _rows(folder: Path, language: str) -> list[CorpusRow]:
    table = pq.read_table(folder / "test" / f"{language}.parquet")
    return list(map(CorpusRow, *(column.to_pylist() for column in table.columns)))


def _training(
    folder: Path, entries: Mapping[str, Any], held_out: set[str], same: set[str]
) -> Iterator[str]:
    """The training English of all languages, folded and once; what is held out goes to `same`."""
    seen: set[int] = set()
    for language, entry in entries.items():
        if "train" not in entry:
            continue
        file = pq.ParquetFile(folder / "train" / f"{language}.parquet")
        for batch in file.iter_batches(columns=["english"]):
            for text in pa.compute.unique(batch["english"]).to_pylist():
                if (mark := hash(text)) not in seen:
                    seen.add(mark)
                    key = fold(text)
                    same.update({key} & held_out)
                    yield key
