"""`python -m tools.badges --update`: the badges of the README, as files made from pyproject.toml.

They are small SVG images in docs/_static/badges, so that the README needs no service that draws
them. A test fails while they are out of date.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "_static" / "badges"
WIDTH = 6.6  # of a character, in pixels
BADGE = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" \
aria-label="{label}: {value}"><title>{label}: {value}</title>
<rect width="{width}" height="20" rx="3" fill="#555"/>
<rect x="{left}" width="{right}" height="20" rx="3" fill="{color}"/>
<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{label_at}" y="14">{label}</text><text x="{value_at}" y="14">{value}</text></g></svg>
"""


def badge(label: str, value: str, color: str) -> str:
    """One badge as SVG."""
    left, right = (round(len(text) * WIDTH) + 12 for text in (label, value))
    return BADGE.format(
        label=label, value=value, color=color, left=left, right=right, width=left + right,
        label_at=left / 2, value_at=left + right / 2,
    )  # fmt: skip


def badges() -> dict[str, str]:
    """All badges by file name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)]
    (jax,) = (r for r in project["dependencies"] if r.startswith("jax"))
    low, high = re.findall(r"\d+\.(\d+)", jax)
    return {
        "version.svg": badge("version", project["version"], "#2a6fb0"),
        "python.svg": badge("python", f"{pythons[0]} to {pythons[-1]}", "#2a6fb0"),
        "jax.svg": badge("jax", f"0.{low} to 0.{int(high) - 1}", "#2a6fb0"),
        "licence.svg": badge("licence", project["license"], "#3a8a4d"),
    }


def main() -> None:
    """Write the badges."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", required=True, help="write the files")
    parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in badges().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
