"""Packages onto this machine: downloaded by its own clients, unpacked into the run's folder.

Nothing is installed. A package is one folder with the few files worth reading and a stamp, made
under a temporary name and renamed: a folder that exists is whole, and gathering again skips it.
What fails is reported and skipped, and tried again the next time.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from gshard.mt import atomic
from gshard.mt.data.archives import MAX_BYTES
from gshard.mt.data.tiers import Package, Source
from gshard.mt.errors import UserError

STAMP = "gshard-package.json"
MAX_FILES = 200_000  # worth unpacking, of one package
MAX_UNPACKED = 8 << 30  # bytes of them
_BATCH = 25  # Debian packages a call of apt-get: few enough for a lively progress bar


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


@dataclass(frozen=True)
class Problem:
    """A package, file or line that was skipped, and why."""

    what: str
    why: str


class BrokenPackageError(Exception):
    """A download or an archive that cannot be used; the gathering goes on without it."""


def fetched(package: Package, folder: Path) -> Fetched | None:
    """The stamp of an unpacked package, or None where it is missing or of another version."""
    try:
        stamp = Fetched(**atomic.read_object(folder / package.id / STAMP))
    except (OSError, ValueError, TypeError):
        return None
    return stamp if stamp.wanted == package.version else None


def fetch(
    packages: Sequence[tuple[Package, Source]],
    folder: Path,
    done: Callable[[Package, Problem | None], None],
) -> list[Problem]:
    """Download and unpack what is not there yet, calling `done` for each package as it comes."""
    folder = folder.resolve()  # the clients run in folders of their own
    folder.mkdir(parents=True, exist_ok=True)
    atomic.sweep(folder)
    problems = []
    missing: dict[str, list[tuple[Package, Source]]] = {}
    for package, source in packages:
        if fetched(package, folder):
            done(package, None)
        else:
            missing.setdefault(package.client, []).append((package, source))
    for client, wanted in missing.items():
        for package, outcome in _CLIENTS[client](wanted, folder):
            problem = Problem(package.requirement, outcome) if outcome else None
            problems += [problem] if problem else []
            done(package, problem)
    return problems


# Each client yields every package with what went wrong, or "" when it is unpacked.
_Wanted = Sequence[tuple[Package, Source]]
_Outcomes = Iterator[tuple[Package, str]]


def _pip(wanted: _Wanted, folder: Path) -> _Outcomes:
    for package, source in wanted:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", scratch]
            command += [*source.arguments, "--", package.requirement]
            yield package, _one(command, package, source, folder, scratch)


def _npm(wanted: _Wanted, folder: Path) -> _Outcomes:
    for package, source in wanted:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as scratch:
            # A package's scripts would run on this machine, by packing alone.
            command = ["npm", "pack", "--silent", "--ignore-scripts", *source.arguments]
            command += ["--", package.requirement]
            yield package, _one(command, package, source, folder, scratch)


def _one(command: list[str], package: Package, source: Source, folder: Path, scratch: str) -> str:
    try:
        _call(command, scratch)
        archives = [path for path in Path(scratch).iterdir() if path.is_file()]
        if not archives:
            raise BrokenPackageError("the client downloaded nothing")
        unpack(archives[0], package, source, folder)
    except BrokenPackageError as error:
        return str(error)
    return ""


def _apt(wanted: _Wanted, folder: Path) -> _Outcomes:
    try:
        options = _apt_lists(folder, ("none",))
    except BrokenPackageError as error:
        yield from ((package, str(error)) for package, _ in wanted)
        return
    for start in range(0, len(wanted), _BATCH):
        batch = wanted[start : start + _BATCH]
        with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as scratch:
            command = ["apt-get", "download", "-q", *options]
            failures = {}
            try:
                _call(command + [package.requirement for package, _ in batch], scratch)
            except BrokenPackageError:
                # One unknown name fails the whole call, so ask for them one by one.
                for package, _ in batch:
                    if not list(Path(scratch).glob(f"{package.name}_*.deb")):
                        try:
                            _call([*command, package.requirement], scratch)
                        except BrokenPackageError as error:
                            failures[package.id] = str(error)
            for package, source in batch:
                archives = list(Path(scratch).glob(f"{package.name}_*.deb"))
                outcome = failures.get(package.id, "the client downloaded nothing")
                if archives:
                    outcome = ""
                    try:
                        unpack(archives[0], package, source, folder)
                    except BrokenPackageError as error:
                        outcome = str(error)
                    archives[0].unlink()
                yield package, outcome


def _apt_descriptions(wanted: _Wanted, folder: Path) -> _Outcomes:
    """Debian's translated package descriptions, which are part of the archive's own lists."""
    for package, source in wanted:
        outcome = ""
        try:
            with atomic.new_folder(folder / package.id) as part:
                lists = part / "lists"
                _apt_lists(part, source.arguments)
                found = sorted(lists.glob("*_Translation-*"))
                for path in found:
                    name = path.name.replace("%5f", "_").removesuffix(".lz4")
                    (part / name).write_bytes(_decompressed(path))
                shutil.rmtree(lists)
                shutil.rmtree(part / "cache")
                if not found:
                    raise BrokenPackageError("the archive offers no translated descriptions")
                size = sum(path.stat().st_size for path in part.iterdir())
                stamp = Fetched(
                    package.client, package.name, package.version, "", source.licence, size, ""
                )
                atomic.write_json(part / STAMP, asdict(stamp))
        except (BrokenPackageError, OSError) as error:
            if isinstance(error, OSError):
                raise
            outcome = str(error)
        yield package, outcome


def _apt_lists(folder: Path, languages: Iterable[str]) -> list[str]:
    """Fetch the archive's lists into `folder`; the options that make apt-get use them there.

    Private lists, so that neither root nor the system's own state is needed or changed.
    """
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    options = ["-o", f"Dir::State::lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]
    options += ["-o", "APT::Sandbox::User=", "-o", "Debug::NoLocking=1"]
    # An empty value clears what the system's configuration lists before ours are added.
    options += ["-o", "Acquire::Languages="]
    for language in languages:
        options += ["-o", f"Acquire::Languages::={language}"]
    _call(["apt-get", "update", "-q", *options], str(folder))
    return options


_CLIENTS: dict[str, Callable[[_Wanted, Path], _Outcomes]] = {
    "pip": _pip,
    "npm": _npm,
    "apt": _apt,
    "apt-descriptions": _apt_descriptions,
}


def _call(command: list[str], cwd: str) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise UserError(
            f"this tier needs the program {command[0]!r}, which is not on this machine"
        ) from None
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        # The last error line is the client's own summary; warnings before it are noise.
        errors = [line for line in lines if re.match(r"E:|ERROR|npm ERR|npm error", line)] or lines
        raise BrokenPackageError(errors[-1][:300] if errors else f"exit status {done.returncode}")


def _decompressed(path: Path) -> bytes:
    import pyarrow

    compression = "lz4" if path.suffix == ".lz4" else None
    with pyarrow.input_stream(str(path), compression=compression) as stream:
        return stream.read()


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Around the reading of an archive: whatever its damage raises, the gathering goes on."""
    try:
        yield
    except BrokenPackageError:
        raise
    except Exception as error:  # the standard library raises a dozen kinds
        raise BrokenPackageError(f"broken archive: {error or type(error).__name__}") from None


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
            target = part / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        with _reading():
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
        atomic.write_json(part / STAMP, asdict(stamp))
    return stamp


def _kept(archive: Path, package: Package, source: Source) -> Iterator[tuple[str, bytes]]:
    """The files of an archive that are worth unpacking, one by one."""
    found = members(archive)
    while True:
        with _reading():
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
                    yield entry.filename, functools.partial(_read_zipped, zipped, entry)
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
                    file = tar.extractfile(member)
                    assert file is not None
                    yield name, functools.partial(_read_at_most, file, name)
    finally:
        if process:
            assert process.stdout is not None
            process.stdout.close()
            process.wait()


def _read_zipped(zipped: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    with zipped.open(entry) as file:
        return _read_at_most(file, entry.filename)


def _read_at_most(file: IO[bytes], name: str) -> bytes:
    """A file's contents, if they are of a sane size, whatever its header claims."""
    data = file.read(MAX_BYTES + 1)
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
    found = re.search(r"^Version: (.+)$", head, re.M)
    licence = ""
    for pattern in (
        r"^License-Expression: (.+)$",
        r"^Classifier: License :: (?:OSI Approved :: )?(.+)$",
        r"^License: (.+)$",
    ):
        if match := re.search(pattern, head, re.M):
            licence = match[1].strip()
            break
    return found[1].strip() if found else "", licence


def _debian_licence(text: str) -> str:
    """The licences that a Debian copyright file names, in its structured or its free form."""
    names = re.findall(r"^License:[ \t]*(\S[^\n]*)$", text, re.M)
    names = names or re.findall(r"/usr/share/common-licenses/([A-Z][\w.-]*\w)", text)
    once = list(dict.fromkeys(name.strip() for name in names))
    return ", ".join(once[:6]) or "see its copyright file"
