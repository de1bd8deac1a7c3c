"""Layouts as files, edited by hand, and for other programs and devices than theirs."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.autosharding.layout.annotations import Annotated, AnnotatedInside
from gshard.capture.inside import TensorSite
from tests.autosharding.test_auto import arguments, step
from tests.oracle import random_array


@pytest.mark.slow
def test_files(tmp_path):
    layout = gshard.auto(step, *arguments(8192), devices=8, hardware="h100")
    path = tmp_path / "layout.json"
    layout.save(path)
    loaded = gshard.Layout.load(path)
    assert loaded == layout
    assert str(loaded) == str(layout)
    with pytest.raises(ValueError, match=r"gshard\.jit"):
        loaded.jit()
    content = json.loads(path.read_text())
    (name, entry), *_ = content["arguments"].items()
    for change, message in (
        ({"format": "other"}, "is not a layout"),
        ({"mesh": {"a": "many"}}, "positive sizes"),
        ({"arguments": {name: 3}}, "shape and dims"),
        ({"arguments": {name: {**entry, "dims": [["z"], []]}}}, "'z' is not in the mesh"),
        ({"arguments": {name: {**entry, "dims": [["a"], ["a"]]}}}, "splits two dims"),
        ({"arguments": {name: {**entry, "dims": [["a"]]}}}, "has 2 dims"),
    ):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(ValueError, match=message):
            gshard.Layout.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"layout\.json is not JSON"):
        gshard.Layout.load(path)


def _with(content, path, value):
    """JSON with the value at a path replaced."""
    if not path:
        return value
    changed = content.copy()
    changed[path[0]] = _with(content[path[0]], path[1:], value)
    return changed


def _all_paths(content, path=()):
    yield path
    inner = {dict: lambda: content.items(), list: lambda: enumerate(content)}
    for key, value in inner.get(type(content), tuple)():
        yield from _all_paths(value, (*path, key))


def test_a_file_edited_into_nonsense_is_an_error_or_a_layout(tmp_path):
    """Every value of a file, replaced by values of every other kind."""
    inside = AnnotatedInside(
        TensorSite("a.py:3", "dot_general", False, (8, 4)), (0, 2), (("a",), ())
    )
    layout = gshard.Layout(
        {"a": 2, "b": 4},
        (Annotated("[0]", (8, 4), (("a",), ("b",))),),
        "h100",
        1.0,
        1,
        0.5,
        inside=(inside,),
        results=(Annotated("result", (8, 4), (("a",), ())),),
    )
    path = tmp_path / "layout.json"
    layout.save(path)
    content = json.loads(path.read_text())
    for where in _all_paths(content):
        for value in (None, True, -3, 0.5, "x", [], [3], ["a"], {}, {"a": 1}, *HOSTILE):
            path.write_text(json.dumps(_with(content, where, value)))
            try:
                said = f"{path} {str(gshard.Layout.load(path))[:0]}"
            except ValueError as error:
                said = str(error)
            assert str(path) in said, (where, value)
            assert said.isprintable(), (where, value)
            assert len(said) < 2000, (where, value)


def nested(depth):
    return [nested(depth - 1)] if depth else []


HOSTILE = (10**400, 10**18, float("inf"), "\x1b[2J", ["\x1b[2J"], nested(300), list(range(9999)))


def test_files_that_cannot_be_read_at_all(tmp_path):
    path = tmp_path / "layout.json"
    for text in ("[" * 100_000, "1" * 5000, '"\\ud83d"', "[]", "\0", ""):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"layout\.json is not JSON: [^\n]*$"):
            gshard.Layout.load(path)
    path.unlink()
    os.mkfifo(path)  # nobody writes to it
    with pytest.raises(OSError, match="is not a regular file"):
        gshard.Layout.load(path)


def _layout(*annotations, **fields):
    return gshard.Layout({"a": 2, "b": 3}, annotations, "h100", 1.0, 1, 0.5, **fields)


def _product(x, y):
    return {"made": x @ y}


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            _layout(Annotated("[2]", (16, 8), (("a",), ()))),
            r"annotates argument \[2\], which _product \(.*test_annotations.py:\d+\) does not "
            r"have; its arguments are \[0\], \[1\]",
        ),
        (
            _layout(Annotated("[0]", (16, 9), (("a",), ()))),
            r"argument \[0\] of shape \(16, 9\); that of _product \(.*\) has shape \(16, 8\)",
        ),
        (
            _layout(results=(Annotated("result['other']", (16, 8), (("a",), ())),)),
            r"annotates result result\['other'\], .* its results are result\['made'\]",
        ),
        (
            _layout(results=(Annotated("result['made']", (4, 8), (("a",), ())),)),
            r"result\['made'\] of shape \(4, 8\); that of _product .* has shape \(16, 12\)",
        ),
        (
            _layout(
                inside=(AnnotatedInside(TensorSite("x.py:1", "sin", False, (8,)), None, ((),)),)
            ),
            r"a tensor made at x.py:1 sin 8, which this program does not have",
        ),
    ],
)
def test_a_layout_of_another_program_is_refused(layout, message):
    with pytest.raises(ValueError, match=message):
        gshard.jit(_product, annotations=layout, devices=6).lower(
            jnp.zeros((16, 8)), jnp.zeros((8, 12))
        )


def test_a_layout_runs_on_as_many_devices_as_it_is_for():
    """On the first of more devices; what else is given has to agree."""
    layout = _layout(Annotated("[0]", (16, 8), (("a",), ("b",))))
    x, y = random_array((16, 8)), random_array((8, 12))
    jitted = gshard.jit(_product, annotations=layout)
    assert len(jitted.lower(x, y).compile()(x, y)["made"].sharding.device_set) == 6
    np.testing.assert_allclose(jitted(x, y)["made"], x @ y, rtol=1e-5, atol=1e-5)
    for devices in (8, jax.devices()[:4]):
        with pytest.raises(ValueError, match="the layout is for 6 devices, and there are "):
            gshard.jit(_product, annotations=layout, devices=devices).lower(x, y)
    with pytest.raises(TypeError, match=r"annotations is 'a.json'; allowed is a gshard.Layout"):
        gshard.jit(_product, annotations="a.json")


def test_edits_of_a_file_are_obeyed(tmp_path):
    path = tmp_path / "layout.json"
    _layout(Annotated("[0]", (16, 8), (("a",), ("b",)))).save(path)
    content = json.loads(path.read_text())
    content["mesh"] = {"a": 2, "b": 4}
    content["arguments"] = {"[1]": {"shape": [8, 12], "dims": [[], ["a", "b"]]}}
    path.write_text(json.dumps(content))
    jitted = gshard.jit(_product, annotations=gshard.Layout.load(path), devices=8)
    lowered = jitted.lower(jnp.zeros((16, 8)), jnp.zeros((8, 12)))
    assert lowered.in_shardings[1].tiles == (1, 8)
    assert lowered.out_shardings["made"].tiles == (1, 8)
    content["arguments"]["[1]"]["dims"] = [[], ["b", "a"]]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"layout.json: argument \[1\]: the axes of a dim are"):
        gshard.Layout.load(path)
