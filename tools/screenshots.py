"""`python -m tools.screenshots`: pictures of gshard's pages for the README and the docs.

They are made by Chromium: the explain page of a block of Llama 3 8B on 8 H100, the
report of the runs that its tests make up, and the pages of `gshard serve`, to translate and of its
API, with a small model of random weights.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urljoin

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "_static"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def explain(picture: Path) -> None:
    """The explanation of a block of Llama with a mistake in its annotations."""
    import gshard
    from examples.llama_block import block, shapes

    lowered = gshard.jit(block, devices=8, hardware="h100").lower(*shapes())
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(lowered.explain(seconds=float("inf")).page(), encoding="utf-8")
        photograph(page.as_uri(), picture)


def report(picture: Path) -> None:
    """The report of made-up runs."""
    from gshard.mt.report import write_report
    from tests.mt.report import made_up_runs

    with tempfile.TemporaryDirectory() as folder:
        runs = made_up_runs.make(Path(folder))
        page, _ = write_report(runs[:2], Path(folder) / "report.html")
        photograph(page.as_uri(), picture, (1200, 1000))


def serve(picture: Path) -> None:
    """The page of a server whose model has random weights."""
    with served() as address:
        photograph(address, picture, (1200, 640))


def api(picture: Path) -> None:
    """What the server says of its API."""
    with served() as address:
        photograph(urljoin(address, "/docs"), picture, (1200, 760))


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The address of the page of a server whose model has random weights."""
    from gshard.mt.decoding.texts import TranslateConfig
    from gshard.mt.decoding.translator import Translator
    from gshard.mt.serving.server import Server
    from gshard.mt.serving.service import Service
    from gshard.mt.serving.settings import Settings
    from tests.mt.conftest import made_corpus, made_tokenizer
    from tests.mt.runs import random_model

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = made_tokenizer(made_corpus(Path(folder)))
    config = TranslateConfig(beam=3, nbest=3, rows=1, longest=24, most=10)
    translator = Translator(random_model(tokenizer), tokenizer, config=config)
    service = Service(translator, "a model of random weights", 0)
    service.warm_up()
    server = Server(service, Settings(port=0))
    threading.Thread(target=server.run, daemon=True).start()
    yield server.address
    server.stop()


def photograph(address: str, picture: Path, size: tuple[int, int] = (1200, 860)) -> None:
    """Save what a browser shows of a page."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        sys.exit(f"no browser: none of {', '.join(NAMES)} is installed")
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}"]
        flags += [f"--window-size={size[0]},{size[1]}", "--virtual-time-budget=3000"]
        command = [browser, *flags, f"--screenshot={picture}", address]
        subprocess.run(command, check=True, capture_output=True, timeout=100)


PAGES: dict[str, Callable[[Path], None]] = {
    "explain": explain,
    "report": report,
    "serve": serve,
    "api": api,
}


def main() -> None:
    """Make all pictures again, or those that are named."""
    for name in sys.argv[1:] or PAGES:
        PAGES[name](FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
