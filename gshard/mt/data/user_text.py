"""The user's own parallel text: TSV, Moses pairs, Parquet, and folders of gettext catalogs.

A file with a mistake in its form is an error that names the line: guessing would shift two sides
against each other. What is merely bad text is left to the filters.
"""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from gshard.errors import UserError, nearest
from gshard.mt import atomic
from gshard.mt.data import readers
from gshard.mt.data.locales import language_of
from gshard.mt.data.splits import SPLITS
from gshard.mt.data.tiers import Reading
from gshard.mt.data.unpack import Files

_COLUMNS = ("language", "source", "english", "origin", "split")
_COMPRESSION = {".zst": "zstd", ".gz": "gzip", ".bz2": "bz2", ".lz4": "lz4"}


@dataclass(frozen=True)
class Own:
    """One thing the user points at: `kind` tsv, moses, parquet or catalogs, and its given split."""

    kind: str
    paths: tuple[Path, ...]
    split: str = ""
    clean: bool = True

    @property
    def name(self) -> str:
        """The origin that its pairs carry where the file names none."""
        return atomic.printable(self.paths[0].name)

    def digest(self) -> str:
        """Changes when a file does: names, sizes and times of last change."""
        text = f"{self}"
        for path in self.paths:
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                stat = file.lstat()
                text += f"\n{file} {stat.st_size} {stat.st_mtime_ns}"
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


OwnPair = tuple[readers.Raw, str, str]  # a pair of the user's text unchanged, its origin and split


def parse_own(kind: str, argument: str, clean: bool = True) -> Own:
    """`[SPLIT=]PATH`, or two paths with a comma for Moses, checked before any work begins."""
    split, equals, rest = argument.partition("=")
    if equals and split in SPLITS:
        argument = rest
    elif equals and not Path(argument).exists() and nearest(split, SPLITS):
        raise UserError(f"--{kind} {argument}: no split {split!r}{nearest(split, SPLITS)}")
    else:
        split = ""
    paths = tuple(Path(part) for part in (argument.split(",") if kind == "moses" else [argument]))
    if kind == "moses" and len(paths) != 2:
        raise UserError(f"--moses {argument}: give two files, FOREIGN,ENGLISH")
    for path in paths:
        if not path.exists():
            raise UserError(f"--{kind}: there is no {path}")
        if path.is_dir() != (kind == "catalogs"):
            raise UserError(f"--{kind}: {path} is {'a' if path.is_dir() else 'no'} folder")
        if not path.is_dir() and not path.is_file():
            raise UserError(f"--{kind}: {path} is not a regular file")
        if path.is_file() and not path.stat().st_size:
            raise UserError(f"--{kind}: {path} is empty")
    if kind == "moses" and language_of(_moses_language(paths[0])) is None:
        raise UserError(
            f"--moses: the ending of {paths[0].name} must name its language, as corpus.de does"
        )
    return Own(kind, paths, split, clean)


def read_own(own: Own, report: readers.Report) -> Iterator[OwnPair]:
    """The pairs in the user's files."""
    return _READERS[own.kind](own, report)


def _lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, compressed or not; an error names the first line that is not."""
    compression = _COMPRESSION.get(path.suffix)
    try:
        with pa.input_stream(str(path), compression=compression) as stream:
            for number, line in enumerate(io.BufferedReader(stream), 1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    raise UserError(
                        f"{path}, line {number}: not UTF-8; convert the file first, for instance "
                        "with iconv"
                    ) from None
                yield text.rstrip("\r\n")
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise UserError(f"{path}: cannot be decompressed: {error}") from None


def _read_tsv(own: Own, report: readers.Report) -> Iterator[OwnPair]:
    """Lines `language, source, English[, origin]`, with or without a line of titles."""
    (path,) = own.paths
    columns = 0
    for number, line in enumerate(_lines(path), 1):
        cells = line.split("\t")
        if number == 1 and cells[0].lower() in ("language", "lang"):
            continue
        if len(cells) not in (3, 4):
            raise UserError(
                f"{path}, line {number}: {len(cells)} columns, where language, source, English "
                "and perhaps an origin are needed"
            )
        columns = columns or len(cells)
        language = _language(cells[0], f"{path}, line {number}")
        origin = cells[3] if len(cells) == 4 and cells[3] else own.name
        raw = readers.Raw(language, cells[2], cells[1], "sentence")
        yield raw, origin, own.split
    if not columns:
        raise UserError(f"{path} has no pairs")


def _language(name: str, where: str) -> str:
    # Most files are long runs of one language, and language_of remembers its answers.
    language = language_of(name)
    if language is None:
        raise UserError(f"{where}: {name!r} is not a language to translate from")
    return language


def _moses_language(path: Path) -> str:
    name = path.name
    for suffix in _COMPRESSION:
        name = name.removesuffix(suffix)
    return name.rpartition(".")[2]


def _read_moses(own: Own, report: readers.Report) -> Iterator[OwnPair]:
    """Two files whose lines belong together."""
    foreign, english = (_lines(path) for path in own.paths)
    language = _language(_moses_language(own.paths[0]), str(own.paths[0]))
    for number, (mine, theirs) in enumerate(itertools.zip_longest(foreign, english)):
        if mine is None or theirs is None:
            short = own.paths[0 if mine is None else 1]
            raise UserError(
                f"{short} ends after line {number}, and the other does not: the files are not "
                "aligned"
            )
        yield readers.Raw(language, theirs, mine, "sentence"), own.name, own.split


def _read_parquet(own: Own, report: readers.Report) -> Iterator[OwnPair]:
    """Columns language, source and english, and perhaps origin and split."""
    (path,) = own.paths
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a Parquet file: {error}") from None
    names = file.schema_arrow.names
    for name in ("language", "source", "english"):
        if name not in names:
            raise UserError(f"{path} has no column {name!r}{nearest(name, names)}")
    for field in file.schema_arrow:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if field.name in _COLUMNS and not text:
            raise UserError(f"{path}: column {field.name!r} holds {field.type}, not text")
    for batch in file.iter_batches():
        rows = batch.to_pydict()
        count = batch.num_rows
        splits = rows.get("split", [own.split] * count)
        origins = rows.get("origin", [own.name] * count)
        for i in range(count):
            split = splits[i] or own.split
            if split and split not in SPLITS:
                raise UserError(f"{path}: no split {split!r}{nearest(split, SPLITS)}")
            language = _language(rows["language"][i] or "", str(path))
            raw = readers.Raw(
                language, rows["english"][i] or "", rows["source"][i] or "", "sentence"
            )
            yield raw, origins[i] or own.name, split


def _read_catalogs(own: Own, report: readers.Report) -> Iterator[OwnPair]:
    """Every gettext and Qt catalog under a folder."""
    (folder,) = own.paths
    found = False
    for raw in readers.read(Files({folder.name: folder}), Reading("catalogs"), report):
        found = True
        yield raw, own.name, own.split
    if not found:
        raise UserError(f"{folder} holds no catalog (.mo, .po or .qm) of a language we know")


_READERS: dict[str, Callable[[Own, readers.Report], Iterator[OwnPair]]] = {
    "tsv": _read_tsv,
    "moses": _read_moses,
    "parquet": _read_parquet,
    "catalogs": _read_catalogs,
}
