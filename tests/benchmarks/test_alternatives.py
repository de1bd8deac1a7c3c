"""The table of kernels and what could replace them."""

import jax

from benchmarks.gpu import alternatives


def test_every_kernel_has_another_way_to_do_the_same():
    """Shapes alone: kernels need a GPU, and their values are compared where they run."""
    for title, ways, shapes in (
        ("norm", *alternatives.norm()),
        ("loss", *alternatives.loss()),
        ("eight bits", *alternatives.eight_bits()),
        ("decoding", *alternatives.few_tokens()),
    ):
        ours, plain = (
            jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(ways[name], *shapes))
            for name in (alternatives.OURS, alternatives.PLAIN)
        )
        assert jax.tree.leaves(ours) == jax.tree.leaves(plain), title


def test_the_table():
    rows = [
        {"what": "norm", "way": "gshard", "ms": 2.0, "difference": 0.0},
        {"what": "norm", "way": "plain", "ms": 3.0, "difference": 0.001},
        {"what": "norm", "way": "other", "error": "ValueError: a|b\nmore"},
    ]
    lines = alternatives.table(rows).splitlines()
    assert lines[2:] == [
        "| norm | gshard | 2.000 | 1.00 | 0.0e+00 |",
        "| norm | plain | 3.000 | 1.50 | 1.0e-03 |",
        "| norm | other | ValueError: a b |  |  |",
    ]
