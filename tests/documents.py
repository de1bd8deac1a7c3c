"""The pages of the documentation, taken apart: prose, links and code blocks.

In a fenced block the word after the fence says what a test does with it:

    python   is run, all blocks of a page in one process, in order; one that begins with a comment
             `# slow: ...` only by `make test-all`, one with `# not run: ...` is only compiled
    text     right after a python block is what that block prints; `...` stands for what is left out
    console  is not run; each command in it must exist, with the options that it is given
    {...}    is a directive of Sphinx, which builds the site
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

FENCE = re.compile(r"^```([^\s`]*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")

# Importing JAX and gshard takes longer than most pages do: pages run in processes that are forked
# from one which has imported both, and in which no backend of JAX was started.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["jax.numpy", "gshard.jit"])


@dataclass(frozen=True)
class Block:
    """A fenced code block, the line on which its code begins, and the output shown after it."""

    kind: str
    code: str
    line: int
    shown: str | None = None

    @property
    def runs(self) -> bool:
        """Whether some test runs it."""
        return self.kind == "python" and not self.code.startswith("# not run: ")

    @property
    def slow(self) -> bool:
        """Whether only `make test-all` runs it."""
        return self.runs and self.code.startswith("# slow: ")


def name(page: Path) -> str:
    """A page's path in the repository, as a test's id."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, each python block with the text block that follows it."""
    text = page.read_text()
    found = list(FENCE.finditer(text))
    for match, after in itertools.zip_longest(found, found[1:]):
        shown = None
        if after and after[1] == "text" and not text[match.end() : after.start()].strip():
            shown = after[2]
        line = text.count("\n", 0, match.start()) + 2
        yield Block(match[1], match[2], line, shown if match[1] == "python" else None)


def printed(found: list[Block], folder: Path) -> list[str]:
    """What each of a page's python blocks prints, run as a reader would, in `folder`.

    A block whose first line is a comment like `# layer.py` is saved under that name, so that the
    lines that gshard names are those of that file.
    """
    paths = []
    for number, block in enumerate(found):
        named = re.match(r"# (\w+\.py)\n", block.code)
        paths.append(folder / (named[1] if named else f"block_{number}.py"))
        paths[-1].write_text(block.code)
    process = PROCESSES.Process(target=_run, args=(paths, folder))
    process.start()
    process.join()
    assert process.exitcode == 0, (folder / "errors").read_text()[-4000:]
    return (folder / "printed").read_text().split("\0")[:-1]


def _run(paths: list[Path], folder: Path) -> None:
    """Run files in order, with the names of one module; a zero is printed after each."""
    os.chdir(folder)
    for name, number in (("printed", 1), ("errors", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    sys.path.insert(0, "")
    jax.config.update("jax_platforms", "cpu")
    namespace = {"__name__": "__main__"}
    for path in paths:
        exec(compile(path.read_text(), str(path), "exec"), namespace)
        print(end="\0", flush=True)
