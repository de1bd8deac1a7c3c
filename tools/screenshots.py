"""`python -m tools.screenshots`: pictures of gshard's pages for the README and the docs.

They are made by Chromium, from the paper's MoE layer on 8 virtual devices.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

ROOT = Path(__file__).parents[1]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def explain_page() -> str:
    """The explanation of the paper's MoE layer."""
    import gshard
    from examples.moe_layer import moe_layer

    shapes = ((8, 256, 64), (64, 8), (8, 64, 256), (8, 256, 64))
    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    return gshard.jit(moe_layer, devices=8).lower(*arguments).page()


def photograph(text: str, picture: Path, size: tuple[int, int] = (1200, 760)) -> None:
    """Save what a browser shows of a page."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        sys.exit(f"no browser: none of {', '.join(NAMES)} is installed")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(text, encoding="utf-8")
        flags = [
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
        ]
        shown = [f"--window-size={size[0]},{size[1]}", f"--screenshot={picture}", page.as_uri()]
        subprocess.run([browser, *flags, *shown], check=True, capture_output=True, timeout=100)


def main() -> None:
    """Make all pictures again."""
    photograph(explain_page(), ROOT / "docs" / "_static" / "explain.png")


if __name__ == "__main__":
    main()
