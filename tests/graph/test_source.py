"""The lines of operations: the user's own before a library's, and a library's before none."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from gshard.graph import source

OWN, LIBRARY = "/home/user/model.py", "/venv/site-packages/library/layer.py"


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
    frames = {name: SimpleNamespace(file_name=name, start_line=7) for name in (OWN, LIBRARY)}
    monkeypatch.setattr(source, "_user_frame", frames.get)
    source._closeness.cache_clear()
    (eqn,) = jax.make_jaxpr(jnp.sin)(1.0).eqns
    call, body = (
        eqn.replace(source_info=eqn.source_info.replace(traceback=t)) for t in (outer, inner)
    )
    assert source.source_of(source.at_line_of(call, body)) == f"{shown}:7"
    source._closeness.cache_clear()
