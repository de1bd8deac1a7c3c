"""`make test-matrix`: the quick tests under every release of JAX that gshard supports.

Each release gets an environment of its own under `.venvs/`, made by the newest Python on this
machine that it runs on. A release without such a Python is skipped, and the summary says so.
`python -m tools.matrix --jax 0.11 tests/test_jit.py` takes one release and hands the other
arguments to pytest.

The newest release on pip's index is one of them, alone by `--jax newest`, whether pyproject.toml
allows it or not. While it does not, the command fails: the upper bound is to be raised.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# The releases of JAX that pyproject.toml allows, and the oldest Python that each runs on.
RELEASES = {"0.10": (3, 11), "0.11": (3, 12), "0.12": (3, 12)}
PYTHONS = ((3, 13), (3, 12), (3, 11))


def interpreters() -> Iterator[str]:
    """Interpreters to try: this one, those on the path, and those that pyenv has built."""
    yield sys.executable
    for major, minor in PYTHONS:
        if found := shutil.which(f"python{major}.{minor}"):
            yield found
    if pyenv := shutil.which("pyenv"):
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True).stdout.strip()
        for major, minor in PYTHONS:
            found = sorted(Path(root, "versions").glob(f"{major}.{minor}.*/bin/python"))
            yield from map(str, found)


def version_of(python: str) -> tuple[int, ...] | None:
    """The version of an interpreter; None if it does not start, like a shim of pyenv."""
    ask = "import sys, venv; print(*sys.version_info[:2])"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else None


def python_for(oldest: tuple[int, int]) -> str | None:
    """An interpreter that is new enough, and not newer than those we test on."""
    for python in interpreters():
        version = version_of(python)
        if version in PYTHONS and version >= oldest:
            return python
    return None


def newest() -> tuple[str, tuple[int, int]]:
    """The newest release of JAX on pip's index, and the oldest Python that it runs on.

    Nothing is installed. pip is asked as if by a Python newer than all, which hides no release.
    """
    as_if = ["--python-version", "3.99", "--only-binary", ":all:", "--target", "unused"]
    quiet = ["--quiet", "--disable-pip-version-check", "--ignore-installed", "--no-deps"]
    ask = ["install", "--dry-run", *quiet, *as_if, "--report", "-", "jax"]
    told = subprocess.run([sys.executable, "-m", "pip", *ask], stdout=subprocess.PIPE)
    if told.returncode:
        sys.exit("pip finds no release of JAX; --jax 0.12 tests one without asking for the newest")
    (found,) = json.loads(told.stdout)["install"]
    release = ".".join(found["metadata"]["version"].split(".")[:2])
    (oldest,) = re.findall(r">=\s*3\.(\d+)", found["metadata"]["requires_python"])
    return release, (3, int(oldest))


def releases(wanted: list[str] | None) -> dict[str, tuple[int, int]]:
    """The releases to test: all supported ones and the newest, or those that are asked for."""
    if wanted and "newest" not in wanted:
        return {release: RELEASES[release] for release in wanted}
    release, oldest = newest()
    supported = {name: RELEASES[name] for name in wanted or RELEASES if name != "newest"}
    return {**supported, release: oldest}


def environment(release: str, python: str) -> Path:
    """The interpreter of an environment with this release, made or brought up to date."""
    folder = ROOT / ".venvs" / f"jax-{release}"
    inside = folder / "bin" / "python"
    stamp = folder / "installed"
    if not stamp.exists() or stamp.stat().st_mtime < (ROOT / "pyproject.toml").stat().st_mtime:
        print(f"JAX {release}: installing into {folder.relative_to(ROOT)}", flush=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        pip = [str(inside), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--upgrade", "pip"], check=True)
        # Where pyproject.toml does not allow the release, it replaces one that is allowed.
        allowed = release if release in RELEASES else list(RELEASES)[-1]
        subprocess.run([*pip, "--editable", ".[dev]", f"jax=={allowed}.*"], check=True, cwd=ROOT)
        subprocess.run([*pip, f"jax=={release}.*"], check=True)
        stamp.touch()
    return inside


def main() -> None:
    """Run the tests under each release; fail if any of them does, or is not allowed yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--jax", action="append", choices=[*RELEASES, "newest"], help="default: all"
    )
    args, to_pytest = parser.parse_known_args()
    summary, failed = [], False
    for release, oldest in releases(args.jax).items():
        if release not in RELEASES:
            failed = True
            summary.append(f"JAX {release} is out: raise the upper bound in pyproject.toml")
        python = python_for(oldest)
        if python is None:
            needed = ".".join(map(str, oldest))
            summary.append(f"JAX {release}: SKIPPED, it needs Python {needed} or newer; none here")
            continue
        inside = environment(release, python)
        code = subprocess.run(
            [str(inside), "-m", "pytest", *(to_pytest or ["-n", "2"])], cwd=ROOT
        ).returncode
        failed |= code != 0
        summary.append(f"JAX {release}: {'passed' if code == 0 else f'FAILED (pytest: {code})'}")
    print("\n".join(summary))
    sys.exit(failed)


if __name__ == "__main__":
    main()
