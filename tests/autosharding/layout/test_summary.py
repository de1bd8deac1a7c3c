"""A layout in words."""

import gshard
from gshard.autosharding.layout.annotations import Annotated, AnnotatedInside
from gshard.capture.inside import TensorSite


def test_equal_layers_are_one_line():
    """Weights of one shape that are sharded alike are printed once, with their number."""
    said = [Annotated(f"[0][{n}]['w']", (16, 32), ((), ("a",)), saves=2e-3) for n in range(12)]
    said.append(Annotated("[0][0]['b']", (32,), (("a",),)))
    place = TensorSite("model.py:7", "dot_general", False, (8, 32))
    inside = tuple(AnnotatedInside(place, (n,), (("a",), ())) for n in (0, 3))
    layout = gshard.Layout({"a": 8}, tuple(said), "h100", 1.0, 1, 1.0, inside=inside)
    assert str(layout).splitlines()[3:] == [
        "  [0][0]['w']: P(None, \"a\") of 16x32, and 11 more like it, saves 2 ms",
        "  [0][0]['b']: P(\"a\") of 32",
        '  model.py:7 dot_general 8x32 number 0: P("a", None), and 1 more like it',
    ]
