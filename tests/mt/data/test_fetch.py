import io
import json
import random
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from gshard.errors import UserError
from gshard.mt import atomic
from gshard.mt.data import fetch, tiers, unpack
from gshard.mt.data.tiers import Package, Reading, Source
from tests.mt.samples import mo

METADATA = "Metadata-Version: 2.1\nName: app\nVersion: 1.5\nLicense-Expression: MIT\n\nText"


def source_of(*packages, keep=("*.mo",)):
    return Source("test", tuple(packages), (Reading("catalogs"),), tuple(keep))


def wheel(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("app/locale/de/LC_MESSAGES/app.mo", mo([("Open", "Öffnen")]))
        archive.writestr("app/code.py", "print()")
        archive.writestr("../outside.mo", b"no")
        archive.writestr("app-1.5.dist-info/METADATA", METADATA)
    return path


def test_unpacks_what_is_kept_and_stamps_it(tmp_path):
    package = Package("pip", "app")
    stamp = unpack.unpack(wheel(tmp_path / "a.whl"), package, source_of(package), tmp_path / "p")
    assert (stamp.version, stamp.licence) == ("1.5", "MIT")
    files = {path.name for path in (tmp_path / "p").rglob("*") if path.is_file()}
    assert files == {"app.mo", "METADATA", unpack.STAMP}
    assert fetch.fetched(package, tmp_path / "p") == stamp
    assert fetch.fetched(Package("pip", "app", "2.0"), tmp_path / "p") is None


def test_npm_tarballs(tmp_path):
    package = Package("npm", "@scope/app")
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        for name, data in (
            ("package/package.json", b'{"version": "3.1", "license": "ISC"}'),
            ("package/de.json", b"{}"),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
        link = tarfile.TarInfo("package/link.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    source = source_of(package, keep=("*.json",))
    stamp = unpack.unpack(tmp_path / "a.tgz", package, source, tmp_path / "p")
    assert (stamp.version, stamp.licence) == ("3.1", "ISC")
    assert not (tmp_path / "p" / package.id / "package" / "link.json").exists()


@pytest.mark.parametrize(
    "data", [b"", b"not an archive", b"PK\x03\x04 truncated", b"\x1f\x8b\x08 truncated"]
)
def test_a_broken_archive_leaves_nothing(tmp_path, data):
    (tmp_path / "a.tgz").write_bytes(data)
    package = Package("npm", "app")
    with pytest.raises(unpack.BrokenPackageError, match="broken archive"):
        unpack.unpack(tmp_path / "a.tgz", package, source_of(package), tmp_path / "p")
    assert not list((tmp_path / "p").iterdir())


def test_truncated_wheel_and_tarball(tmp_path):
    package = Package("pip", "app")
    whole = wheel(tmp_path / "a.whl").read_bytes()
    (tmp_path / "b.whl").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(unpack.BrokenPackageError):
        unpack.unpack(tmp_path / "b.whl", package, source_of(package), tmp_path / "p")


def test_a_failed_download_is_reported_skipped_and_tried_again(tmp_path, monkeypatch):
    good, bad = Package("pip", "good"), Package("pip", "bad", "9")
    source = source_of(good, bad)
    calls = []

    def run(command, cwd, **options):
        name = command[-1]
        calls.append(name)
        if name == "bad==9" and len(calls) < 3:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no such thing\n")
        wheel(Path(cwd) / command[command.index("--dest") + 1] / "a.whl")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    folder = Path("packages")  # relative, while the clients run elsewhere
    wanted = [(good, source), (bad, source)]
    seen = []
    problems = fetch.fetch(wanted, folder, lambda package, problem: seen.append(package.name))
    assert problems == [fetch.Skipped("bad==9", "ERROR: no such thing")]
    assert seen == ["good", "bad"]
    assert fetch.fetch(wanted, folder, lambda *_: None) == []
    assert calls == ["good", "bad==9", "bad==9"]  # what was there is not fetched again


def test_apt_asks_one_by_one_when_a_batch_fails(tmp_path, monkeypatch):
    packages = [Package("apt", name) for name in ("one", "gone", "two")]
    source = source_of(*packages)

    def run(command, cwd, **options):
        names = [word for word in command if word in ("one", "gone", "two")]
        if command[1] == "download" and "gone" in names:
            message = "E: Unable to locate package gone\n"
            return subprocess.CompletedProcess(command, 100, "", message)
        for name in names:
            wheel(f"{cwd}/{name}_1%3a2.0-1_all.deb")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    problems = fetch.fetch([(p, source) for p in packages], tmp_path, lambda *_: None)
    assert [problem.what for problem in problems] == ["gone"]
    stamp = fetch.fetched(packages[2], tmp_path)
    assert stamp is not None
    assert stamp.version == "1:2.0-1"


def test_a_missing_client_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    package = Package("npm", "app")
    with pytest.raises(UserError, match="'npm', which is not on this machine"):
        fetch.fetch([(package, source_of(package))], tmp_path / "p", lambda *_: None)


def test_debian_licences():
    structured = "Format: x\n\nFiles: *\nLicense: GPL-2+\n text\n\nLicense: MIT\n more"
    assert unpack._debian_licence(structured) == "GPL-2+, MIT"
    assert unpack._debian_licence("see /usr/share/common-licenses/LGPL-2.1.") == "LGPL-2.1"
    assert unpack._debian_licence("") == "see its copyright file"


def test_what_a_killed_run_left_is_swept(tmp_path):
    (tmp_path / ".part-abc").mkdir()
    (tmp_path / ".part-abc" / "file").write_text("x")
    (tmp_path / ".part-x.json").write_text("x")
    atomic.sweep(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_is_whole_or_absent(tmp_path):
    path = tmp_path / "a.json"
    atomic.write_json(path, {"old": 1})

    def fill_the_disk():
        with atomic.new_file(path) as part:
            part.write_text("half")
            raise OSError(28, "no space left on disk")

    with pytest.raises(OSError, match="disk"):
        fill_the_disk()
    assert json.loads(path.read_text()) == {"old": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.slow
def test_pip_downloads_a_real_package(tmp_path):
    package = Package("pip", "django-allauth", "65.21.1")
    assert fetch.fetch([(package, source_of(package))], tmp_path, lambda *_: None) == []
    stamp = fetch.fetched(package, tmp_path)
    assert stamp is not None
    assert stamp.version == "65.21.1"
    assert sys.executable  # the interpreter whose pip it was
    assert list((tmp_path / package.id).rglob("*.mo"))


def tarball(path):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in (("package/package.json", b'{"version": "3.1"}'), ("package/a.mo", b"x")):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


@pytest.mark.parametrize(("make", "client"), [(wheel, "pip"), (tarball, "npm")])
def test_no_damage_to_an_archive_ends_the_gathering(tmp_path, make, client):
    """Bytes changed, cut and swapped at random: the package comes, or is named and passed over."""
    package, draw = Package(client, "app"), random.Random(0)
    whole = make(tmp_path / "whole").read_bytes()
    broken = 0
    for trial in range(200):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 1, 4, 40])):
            data[draw.randrange(len(data))] = draw.randrange(256)
        if draw.random() < 0.2:
            del data[draw.randrange(len(data)) :]
        archive = tmp_path / f"a{trial}"
        archive.write_bytes(data)
        try:
            unpack.unpack(archive, package, source_of(package), tmp_path / "p")
        except unpack.BrokenPackageError:
            broken += 1
    assert broken > 20


def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(unpack, "MAX_BYTES", 1 << 20)
    package = Package("pip", "app")
    with zipfile.ZipFile(tmp_path / "a.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("app/de.mo", bytes(8 << 20))
    with pytest.raises(unpack.BrokenPackageError, match="unpacks to more than 1 MB"):
        unpack.unpack(tmp_path / "a.whl", package, source_of(package), tmp_path / "p")
    monkeypatch.setattr(unpack, "MAX_FILES", 2)
    with zipfile.ZipFile(tmp_path / "b.whl", "w") as archive:
        for n in range(3):
            archive.writestr(f"app/{n}.mo", b"x")
    with pytest.raises(unpack.BrokenPackageError, match="more than 2 files"):
        unpack.unpack(tmp_path / "b.whl", package, source_of(package), tmp_path / "p")
    assert not list((tmp_path / "p").rglob("*.mo"))


@pytest.mark.parametrize(
    ("client", "package"),
    [
        ("npm", "./folder"),
        ("npm", "--unsafe-perm"),
        ("npm", "https://example.org/a.tgz"),
        ("npm", "file:folder"),
        ("npm", "git+ssh://host/a"),
        ("pip", "-r"),
        ("pip", "../a"),
        ("pip", "a@https://example.org/a.whl"),
        ("apt", "-o=Dir::Etc=x"),
        ("apt", "./a.deb"),
        ("pip", "app==-1"),
    ],
)
def test_what_is_no_name_of_a_package_is_refused(client, package):
    text = f"""
        [[source]]
        name = "s"
        client = "{client}"
        packages = ["{package}"]
        read = [{{format = "catalogs"}}]
    """
    with pytest.raises(UserError, match="is not a valid name"):
        tiers.parse(text, "mine")
    if client == "pip":
        option = text.replace(package, "app") + 'arguments = ["--index-url"]'
        with pytest.raises(UserError, match="argument '--index-url'; allowed are --python-version"):
            tiers.parse(option, "mine")


def test_a_packages_scripts_are_not_run(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(fetch, "_call", lambda command, cwd: commands.append(command))
    for client in ("npm", "pip"):
        package = Package(client, "app")
        fetch.fetch([(package, source_of(package))], tmp_path, lambda *_: None)
    assert "--ignore-scripts" in commands[0]
    assert "--only-binary=:all:" in commands[1]
    for command in commands:
        assert command[-2:] == ["--", "app"]
