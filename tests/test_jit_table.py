"""The page that compares `gshard.jit` with `jax.jit` is made from the tests that show its rows."""

from tools.jit_table import PAGE, page


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run python -m tools.jit_table --update"
