"""What a process runs: versions, source files, switches of JAX and settings.

Processes that trace different programs hang in their first collective, or train a wrong model. They
compare this before they begin (`company`).
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "libtpu",
    "numpy",
    "equinox",
    "optax",
    "grain",
    "orbax-checkpoint",
    "sentencepiece",
)
# Those of XLA's flags in which hosts may differ, since the program is the same.
_ONLY_FILES = ("--xla_dump", "--xla_gpu_per_fusion_autotune_cache_dir", "--xla_force_host")
_SOURCE = "source of "
_MOST = 3  # differing source files that are named


def fingerprint(switches: Mapping[str, object], settings: Mapping[str, object]) -> dict[str, str]:
    """What this process runs, by name; `switches` are JAX's, `settings` the command's."""
    flags = sorted(os.environ.get("XLA_FLAGS", "").split())
    return {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        **{name: version for name in _PACKAGES if (version := _version(name))},
        **_sources(),
        "XLA_FLAGS": " ".join(flag for flag in flags if not flag.startswith(_ONLY_FILES)),
        **{name: str(value) for name, value in switches.items()},
        **{name: str(value) for name, value in settings.items()},
    }


def differences(mine: Mapping[str, str], first: Mapping[str, str]) -> str:
    """Where this process differs from the first one, in words; nothing if it does not."""
    apart = sorted(name for name in {**mine, **first} if mine.get(name) != first.get(name))
    files = [name for name in apart if name.startswith(_SOURCE)]
    parts = [
        f"{name} is {_shown(mine, name)} and not {_shown(first, name)}"
        for name in apart
        if name not in files
    ]
    parts += [f"the {name} is another" for name in files[:_MOST]]
    if len(files) > _MOST:
        parts.append(f"so are those of {len(files) - _MOST} more files")
    return ", ".join(parts)


def _shown(values: Mapping[str, str], name: str) -> str:
    return repr(value)[:100] if (value := values.get(name)) is not None else "missing"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _sources() -> dict[str, str]:
    root = Path(__file__).parents[2]
    return {
        f"{_SOURCE}{path.relative_to(root.parent)}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*.py"))
    }
