"""`python -m tools.notebooks NAME ... [--update]`: run the tutorials that are notebooks.

Each runs in a folder of its own. With `--update` what its cells print is written into it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorial").glob("*.ipynb"))


def executed(path: Path, folder: str) -> Any:
    """The notebook with what its cells print, run in `folder`."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=900, resources={"metadata": {"path": folder}})
    # Cells call `gshard`, which need not be on the path of whoever calls this interpreter.
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    client.execute(env={**os.environ, "PATH": scripts})
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran
        if cell.cell_type == "code":
            cell.execution_count = None
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = None
    return notebook


def printed(notebook: Any) -> list[str]:
    """What the cells print whose output is the same in every run."""
    return [
        "".join(output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code" and "varies" not in cell.metadata.get("tags", ())
    ]


def main() -> None:
    """Run notebooks, and write down what they print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="such as first-model (default: all)")
    parser.add_argument("--update", action="store_true", help="write into the notebooks")
    given = parser.parse_args()
    for path in NOTEBOOKS:
        if given.names and path.stem not in given.names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(path, folder)
        if given.update:
            nbformat.write(notebook, path)
        print(path.stem, *printed(notebook), sep="\n", flush=True)


if __name__ == "__main__":
    main()
