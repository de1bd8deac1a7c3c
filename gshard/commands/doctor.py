"""`gshard doctor`: versions, devices, extras, caches, free disk: for an issue report."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from typing import Any

import gshard
from gshard.commands.options import Json

_FLAGS = ("JAX_", "XLA_", "NCCL_", "CUDA_VISIBLE_DEVICES", "GSHARD_")


def doctor(as_json: Json = False) -> None:
    """Show versions, devices, extras, caches and free disk: what an issue report needs."""
    found = report()
    if as_json:
        print(json.dumps(found))
        return
    width = max(map(len, found))
    for name, value in found.items():
        rows = [f"{k}: {v}" for k, v in value.items()] if isinstance(value, dict) else [value]
        for i, row in enumerate(rows or ["none"]):
            print(f"{'' if i else name:{width}}  {row}")


def report() -> dict[str, Any]:
    """The state of this installation, by subject."""
    import jax

    from gshard.forecast.hardware import present

    cache = jax.config.jax_compilation_cache_dir
    packages = ("jax", "jaxlib", "numpy", "flax", "equinox", "optax")
    return {
        "system": f"Python {platform.python_version()}, {platform.platform()}",
        "processors": f"{os.cpu_count()}, {_gigabytes(_memory())} of memory",
        "versions": {"gshard": gshard.__version__}
        | {name: version for name in packages if (version := _version(name))},
        "devices": _devices(),
        "hardware": f"{present().name} (times of gshard explain, unless --hardware names another)",
        "extras": _extras(),
        "compilation cache": f"{cache} ({_gigabytes(_size(Path(cache)))})" if cache else "none",
        "free disk": f"{_gigabytes(shutil.disk_usage(Path.cwd()).free)} here, "
        f"{_gigabytes(shutil.disk_usage(Path.home()).free)} at home",
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_FLAGS)},
    }


def _devices() -> str:
    """The devices of JAX, or why there are none."""
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        return f"none: {str(error).splitlines()[0]}"
    kinds = ", ".join(sorted({d.device_kind for d in devices}))
    return f"{len(devices)} x {kinds}, {jax.process_count()} process(es), {devices[0].platform}"


def _extras() -> dict[str, str]:
    """Every extra, with the packages that it lacks."""
    try:
        required = metadata.requires("gshard") or []
    except metadata.PackageNotFoundError:
        return {"gshard": f"is not installed: it is imported from {Path(__file__).parents[2]}"}
    needed = defaultdict[str, list[str]](list)
    for line in required:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        package = re.match(r"([\w.-]+)(?:\[([\w,-]+)])?", line)
        if extra and package:
            parts = [f"gshard[{part}]" for part in (package[2] or "").split(",")]
            needed[f"gshard[{extra[1]}]"] += parts if package[1] == "gshard" else [package[1]]

    def lacks(name: str) -> set[str]:
        if name in needed:
            return {each for part in needed[name] for each in lacks(part)}
        return set() if _version(name) else {name}

    found = {extra[7:-1]: ", ".join(sorted(lacks(extra))) for extra in sorted(needed)}
    return {extra: f"lacks {each}" if each else "complete" for extra, each in found.items()}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory() -> int:
    if sys.platform == "linux" or sys.platform == "darwin":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def _size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else 0


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
