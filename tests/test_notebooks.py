"""Tutorials that are notebooks run, and print what is stored in them."""

import doctest

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
from tests.documents import LINK  # noqa: E402
from tools.notebooks import NOTEBOOKS, executed, printed  # noqa: E402


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Jupyter's parts
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    wanted = printed(nbformat.read(path, as_version=4))
    got = printed(executed(path, str(tmp_path)))
    for a, b in zip(got, wanted, strict=True):
        assert doctest.OutputChecker().check_output(b, a, doctest.ELLIPSIS), a


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_python_with_their_output_and_links_that_lead(path):
    """Quick: what a change of a page or a name may break."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert any(printed(notebook)), "run `python -m tools.notebooks --update`"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            compile(cell.source, path.name, "exec")
            assert not any(output.output_type == "error" for output in cell.outputs)
        else:
            for link in LINK.findall(cell.source):
                assert "://" in link or (path.parent / link).exists(), link
