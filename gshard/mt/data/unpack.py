"""An archive as a folder: the few files of a package that are worth reading, and a stamp.

The folder is made under a temporary name and renamed: one that exists is complete. Archives come
from strangers: whatever is wrong with one is a `BrokenPackageError`, and nothing of it is left.

Readers get the files of such folders as one flat list of paths, with archives and compression seen
through (`Files`): `app.zip/de/messages.mo` is a path like any other.
"""

from __future__ import annotations

import bz2
import contextlib
import errno
import fnmatch
import functools
import gzip
import json
import re
import stat
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from gshard.mt import atomic
from gshard.mt.data.tiers import Package, Source

STAMP = "gshard-package.json"
MAX_FILES = 200_000  # worth unpacking, of one package
MAX_UNPACKED = 8 << 30  # bytes of them


@dataclass(frozen=True)
class Fetched:
    """What a package's stamp says: the version that came, its licence, its archive's checksum."""

    client: str
    name: str
    wanted: str
    version: str
    licence: str
    bytes: int
    sha256: str


class BrokenPackageError(Exception):
    """A download or an archive that cannot be used; gathering continues without it."""


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """A context for reading an archive: any error of its damage lets gathering continue."""
    try:
        yield
    except BrokenPackageError:
        raise
    except Exception as error:  # the standard library raises a dozen kinds
        raise BrokenPackageError(f"broken archive: {error or type(error).__name__}") from None


# What the machine refuses, whatever the package; all else that writing raises is its own doing.
_OF_THE_MACHINE = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM,
    errno.EMFILE, errno.ENFILE, errno.ENOMEM,
)  # fmt: skip


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Around the writing of a package's files: names that no file can have are its own fault.

    A file where a folder is needed, say, a name of 300 letters, or one that is no text.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
            raise
        why = error.strerror if isinstance(error, OSError) else str(error)
        name = Path(error.filename).name if isinstance(error, OSError) and error.filename else ""
        raise BrokenPackageError(f"it cannot be unpacked: {name[:80]!r}: {why}") from None


def unpack(archive: Path, package: Package, source: Source, folder: Path) -> Fetched:
    """Unpack the files of `archive` that `source` keeps into the package's folder, and stamp it."""
    with atomic.new_folder(folder / package.id) as part:
        papers: dict[str, bytes] = {}  # what names version and licence
        count = size = 0
        for name, data in _kept(archive, package, source):
            count, size = count + 1, size + len(data)
            if count > MAX_FILES or size > MAX_UNPACKED:
                raise BrokenPackageError(
                    f"it unpacks to more than {MAX_FILES:,} files or {MAX_UNPACKED >> 30} GB"
                )
            if _is_paper(package, name):
                papers[name] = data
            with _writing():
                target = part / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
        with reading():
            version, licence = _identify(package, archive, papers)
        stamp = Fetched(
            package.client,
            package.name,
            package.version,
            version,
            source.licence or licence,
            archive.stat().st_size,
            atomic.checksum(archive),
        )
        with _writing():
            atomic.write_json(part / STAMP, asdict(stamp))
    return stamp


def _kept(archive: Path, package: Package, source: Source) -> Iterator[tuple[str, bytes]]:
    """The files of an archive that are worth unpacking, one by one."""
    found = members(archive)
    while True:
        with reading():
            try:
                name, read = next(found)
            except StopIteration:
                return
            if not _is_paper(package, name) and not any(
                fnmatch.fnmatchcase(name, pattern) for pattern in source.keep
            ):
                continue
            data = read()
        yield name, data


def members(archive: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The regular files of a wheel, tarball or .deb: each path with a function that reads it.

    Links and paths that would leave the folder are passed over.
    """
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for entry in zipped.infolist():
                if not entry.is_dir() and _inside(entry.filename):
                    opened: Callable[[], Any] = functools.partial(zipped.open, entry)
                    yield entry.filename, functools.partial(_read_at_most, opened, entry.filename)
        return
    process = None
    if archive.suffix == ".deb":
        command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        tar = tarfile.open(fileobj=process.stdout, mode="r|")  # noqa: SIM115
    else:
        tar = tarfile.open(archive, mode="r|*")  # noqa: SIM115
    try:
        with tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if member.isreg() and _inside(name):
                    opened = functools.partial(tar.extractfile, member)
                    yield name, functools.partial(_read_at_most, opened, name)
    finally:
        if process:
            assert process.stdout is not None
            process.stdout.close()
            process.wait()


def _read_at_most(opened: Callable[[], Any], name: str) -> bytes:
    """A file's contents, if they are of a sane size, whatever its header claims."""
    with opened() as file:
        data: bytes = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{name} unpacks to more than {MAX_BYTES >> 20} MB")
    return data


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _is_paper(package: Package, name: str) -> bool:
    if package.client == "apt":
        return name == f"usr/share/doc/{package.name}/copyright"
    if package.client == "npm":
        return name == "package/package.json"
    return name.endswith(".dist-info/METADATA") and name.count("/") == 1


def _identify(package: Package, archive: Path, papers: dict[str, bytes]) -> tuple[str, str]:
    """The version and the licence that a package states about itself."""
    text = next(iter(papers.values()), b"").decode("utf-8", "replace")
    if package.client == "apt":
        version = archive.name.split("_")[1].replace("%3a", ":")
        return version, _debian_licence(text)
    if package.client == "npm":
        data = json.loads(text or "{}")
        licence = data.get("license", "")
        return data.get("version", ""), licence if isinstance(licence, str) else json.dumps(licence)
    head = text.split("\n\n", 1)[0]
    classifier = "Classifier: License :: (?:OSI Approved :: )?"
    starts = ("Version: ", "License-Expression: ", classifier, "License: ")
    found = [re.search(f"^{start}(.+)$", head, re.M) for start in starts]
    version, *licences = (match[1].strip() if match else "" for match in found)
    return version, next(filter(None, licences), "")


def _debian_licence(text: str) -> str:
    """The licences that a Debian copyright file names, in its structured or its free form."""
    names = re.findall(r"^License:[ \t]*(\S[^\n]*)$", text, re.M)
    names = names or re.findall(r"/usr/share/common-licenses/([A-Z][\w.-]*\w)", text)
    once = list(dict.fromkeys(name.strip() for name in names))
    return ", ".join(once[:6]) or "see its copyright file"


_ARCHIVES = (".zip", ".xpi")
# Both have overloads by mode, which mypy does not match; the default gives bytes.
_COMPRESSED: dict[str, Callable[[Any], IO[bytes]]] = {".gz": gzip.open, ".bz2": bz2.open}  # type: ignore[dict-item]
MAX_BYTES = 128 << 20  # of a file, unpacked: no message file is this long; a bomb or a mistake is
MAX_MEMBERS = 200_000  # of an archive


class Files:
    """Files under named roots; a path begins with its root's name, and reading it is lazy."""

    def __init__(self, roots: Mapping[str, Path]):
        self._places: dict[str, tuple[Path, str, str]] = {}
        self.broken: list[tuple[str, str]] = []
        for name, root in roots.items():
            for place in sorted(p for p in root.rglob("*") if not p.is_dir()):
                path = f"{name}/{place.relative_to(root).as_posix()}"
                if why := _not_a_file(place):
                    self.broken.append((path, why))
                elif place.suffix in _ARCHIVES:
                    self._add_archive(path, place)
                else:
                    self._add(path, place, "")
        self._open: tuple[Path, zipfile.ZipFile] | None = None

    def _add(self, path: str, place: Path, member: str) -> None:
        suffix = next((suffix for suffix in _COMPRESSED if path.endswith(suffix)), "")
        self._places.setdefault(path.removesuffix(suffix), (place, member, suffix))

    def _add_archive(self, path: str, place: Path) -> None:
        try:
            with zipfile.ZipFile(place) as archive:
                entries = archive.infolist()
                if len(entries) > MAX_MEMBERS:
                    raise ValueError(f"{len(entries):,} files; {MAX_MEMBERS:,} are the most")
                for entry in entries:
                    if not entry.is_dir():
                        self._add(f"{path}/{entry.filename}", place, entry.filename)
        except Exception as error:  # a damaged archive raises a dozen kinds
            self.broken.append((path, str(error) or type(error).__name__))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, path: object) -> bool:
        return path in self._places

    def read(self, path: str) -> bytes:
        """The contents of the file at `path`, decompressed."""
        place, member, suffix = self._places[path]
        if member:
            # Archives are read file after file: the last one stays open.
            if self._open is None or self._open[0] != place:
                self._open = (place, zipfile.ZipFile(place))
            file: IO[bytes] = self._open[1].open(member)
        else:
            file = place.open("rb")
        with file:
            unpacked = functools.partial(_COMPRESSED[suffix], file) if suffix else lambda: file
            return _read_at_most(unpacked, path)


def _not_a_file(place: Path) -> str:
    """Why a path cannot be read as a file, or ""; a pipe would be waited for without end."""
    try:
        mode = place.stat().st_mode
    except OSError as error:
        return error.strerror or str(error)  # a link that leads nowhere, say
    return "" if stat.S_ISREG(mode) else "it is not a regular file"
