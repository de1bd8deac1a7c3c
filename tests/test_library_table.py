"""The page about other people's programs has a row for each of them."""

import re

from tools.library_table import FOLDER, PAGE


def test_the_page_has_every_program():
    """What the rows say takes minutes to find out; which rows there are does not."""
    tests = {
        f"{path.stem}.{name}"
        for path in FOLDER.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    listed = set(re.findall(r"^\| `([\w.]+)", PAGE.read_text(), re.MULTILINE))
    assert listed == tests, "run python -m tools.library_table --update"
