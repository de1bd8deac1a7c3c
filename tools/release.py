"""`python -m tools.release`: what is published, built and checked as a user would install it.

    python -m tools.release --build     the sdist and the wheel, in build/release/dist
    python -m tools.release --check     both, and the wheel's tests in clean environments

The wheel is built from the sdist, so a file that is missing from the sdist is missing from both.
Each environment of `--check` has one Python, one release of JAX, the wheel and pytest, and nothing
of the checkout: the tests are copied to an empty folder. Environments that exist are used again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

from tools.matrix import interpreters, version_of

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "release"

# The oldest and the newest supported pair of a Python and a release of JAX.
PAIRS = {"0.10": (3, 11), "0.12": (3, 13)}

# Tests that need the wheel and its dependencies, and nothing else of the repository.
TESTS = (
    "tests/test_face.py",
    "tests/test_manual.py",
    "tests/test_repeated_calls.py",
    "tests/contrib/test_equinox.py",
    "tests/contrib/test_nnx.py",
    "tests/rules/test_contraction.py",
)
EXTRAS = "nn,cli,plots"
TEST_PACKAGES = ("flax>=0.12", "hypothesis>=6.120", "pytest>=8,<9.2")


def environment(name: str, python: str, *packages: str) -> Path:
    """The interpreter of a virtual environment that has these packages."""
    folder = FOLDER / name
    inside = folder / "bin" / "python"
    if not inside.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(inside), "-m", "pip", "install", "--quiet", *packages], check=True)
    return inside


def build() -> Path:
    """Build the sdist, and from that the wheel; both are in `build/release/dist`."""
    name = f"builder-{sys.version_info[0]}.{sys.version_info[1]}"
    python = environment(name, sys.executable, "setuptools>=77")
    source, dist = FOLDER / "source", FOLDER / "dist"
    for folder in (source, dist):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    tracked = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, tracked.stdout.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    make = "from setuptools import build_meta; build_meta.build_{}(r'{}')"
    call = [str(python), "-c"]
    subprocess.run(
        [*call, make.format("sdist", dist)], cwd=source, check=True, stdout=subprocess.DEVNULL
    )
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        packed.extractall(FOLDER / "unpacked", filter="data")
    unpacked = FOLDER / "unpacked" / sdist.name.removesuffix(".tar.gz")
    subprocess.run(
        [*call, make.format("wheel", dist)], cwd=unpacked, check=True, stdout=subprocess.DEVNULL
    )
    shutil.rmtree(FOLDER / "unpacked")
    shutil.rmtree(source)
    (wheel,) = dist.glob("*.whl")
    return wheel


def python_of(version: tuple[int, int]) -> str | None:
    """An interpreter of exactly this version, if the machine has one."""
    return next((p for p in interpreters() if version_of(p) == version), None)


def check(wheel: Path, release: str, tests: Iterable[str]) -> str:
    """Install the wheel into a clean environment and run its tests there; what came out."""
    version = PAIRS[release]
    title = f"Python {version[0]}.{version[1]}, JAX {release}"
    python = python_of(version)
    if python is None:
        return f"{title}: FAILED, there is no such Python on this machine"
    name = f"python-{version[0]}.{version[1]}-jax-{release}"
    inside = environment(name, python, f"{wheel}[{EXTRAS}]", f"jax=={release}.*", *TEST_PACKAGES)
    again = ["--force-reinstall", "--no-deps", str(wheel)]  # the same version, built again
    subprocess.run([str(inside), "-m", "pip", "install", "--quiet", *again], check=True)
    empty = FOLDER / f"{name}-tests"
    shutil.rmtree(empty, ignore_errors=True)
    shutil.copytree(ROOT / "tests", empty / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", empty)  # pytest's settings
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = [str(inside), "-c", "import gshard; print(gshard.__file__)"]
    found = subprocess.run(where, cwd=empty, env=clean, check=True, capture_output=True, text=True)
    if not Path(found.stdout.strip()).is_relative_to(inside.parents[1]):
        return f"{title}: FAILED, gshard was imported from {found.stdout.strip()}"
    command = [str(inside), "-m", "pytest", "-p", "no:cacheprovider", *tests]
    code = subprocess.run(command, cwd=empty, env=clean).returncode
    return f"{title}: {'passed' if code == 0 else f'FAILED (pytest: {code})'}"


def main() -> None:
    """Build, and check if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--build", action="store_true", help="the sdist and the wheel")
    what.add_argument("--check", action="store_true", help="and the wheel's tests")
    parser.add_argument(
        "--jax", action="append", choices=list(PAIRS), help="check this release of JAX only"
    )
    args, tests = parser.parse_known_args()
    wheel = build()
    for path in sorted(wheel.parent.iterdir()):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes", flush=True)
    if args.check:
        outcomes = [check(wheel, release, tests or TESTS) for release in args.jax or PAIRS]
        print("\n".join(outcomes))
        sys.exit(any("FAILED" in outcome for outcome in outcomes))


if __name__ == "__main__":
    main()
