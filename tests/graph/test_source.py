"""The lines of operations: the user's own before a library's, and a library's before none."""

import linecache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard.graph import source
from gshard.nn import experts

OWN, LIBRARY = "/home/user/model.py", "/venv/site-packages/library/layer.py"


def test_a_line_of_an_installed_torch_model_comes_before_the_users():
    frames = [(LIBRARY, 7, "module: layers.1"), (LIBRARY, 9, "call"), (OWN, 3, "main")]
    assert source.shown_line(frames) == "layer.py:7, layers.1"
    assert source.shown_line(frames[1:]) == f"{OWN}:3"
    assert source.shown_line([]) == "unknown"


@pytest.mark.parametrize(
    ("inner", "outer", "shown"),
    [
        (None, OWN, OWN),
        (LIBRARY, OWN, OWN),
        (None, LIBRARY, LIBRARY),  # a model that is installed, as those of gshard.nn are
        (OWN, LIBRARY, OWN),
        (LIBRARY, None, LIBRARY),
    ],
)
def test_an_inlined_equation_has_the_closest_line(monkeypatch, inner, outer, shown):
    frames = {
        name: SimpleNamespace(file_name=name, start_line=7, function_name="f")
        for name in (OWN, LIBRARY)
    }
    monkeypatch.setattr(source, "_user_frame", frames.get)
    source._closeness.cache_clear()
    (eqn,) = jax.make_jaxpr(jnp.sin)(1.0).eqns
    call, body = (
        eqn.replace(source_info=eqn.source_info.replace(traceback=t)) for t in (outer, inner)
    )
    assert source.source_of(source.at_line_of(call, body)) == f"{source.shown_path(shown)}:7"
    source._closeness.cache_clear()


def test_paths_of_libraries_and_of_gshard_s_models_begin_with_their_names(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert source.shown_path(experts.__file__) == "gshard/nn/experts.py"
    shown = source.shown_path(np.__file__)
    assert shown == "numpy/__init__.py"
    assert linecache.getlines(shown) == linecache.getlines(np.__file__)
    assert source.shown_path(str(tmp_path / "a" / "model.py")) == "a/model.py"
    assert source.shown_path("/elsewhere/model.py") == "/elsewhere/model.py"
