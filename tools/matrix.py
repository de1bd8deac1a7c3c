"""`make test-matrix`: the quick tests under every release of JAX that gshard supports.

Each release gets an environment of its own under `.venvs/`, made by the newest Python on this
machine that it runs on. A release without such a Python is skipped, and the summary says so.
`python -m tools.matrix --jax 0.11 tests/test_jit.py` takes one release and hands the other
arguments to pytest.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# A release of JAX, and the oldest Python that it runs on.
RELEASES = {"0.10": (3, 11), "0.11": (3, 12)}
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
        subprocess.run([*pip, "--editable", ".[dev]", f"jax=={release}.*"], check=True, cwd=ROOT)
        stamp.touch()
    return inside


def main() -> None:
    """Run the tests under each release; fail if any of them does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jax", action="append", choices=list(RELEASES), help="default: all")
    args, to_pytest = parser.parse_known_args()
    summary, failed = [], False
    for release in args.jax or RELEASES:
        oldest = RELEASES[release]
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
