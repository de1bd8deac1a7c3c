"""`gshard.jit(reproducible=True)`: the same bits on any devices.

Importing this package registers the rules of its operators; nothing below `jit` imports it.
"""

from gshard.capture.stage import Variant
from gshard.reproducible import rules  # noqa: F401  (registers the operators)
from gshard.reproducible.merge import merge_trees
from gshard.reproducible.order import fix_order
from gshard.reproducible.pins import pin_rounded
from gshard.reproducible.products import COMPILER_OPTIONS

REPRODUCIBLE = Variant(
    passes=(fix_order, pin_rounded, merge_trees),
    rewrites=("choose_row_spaces",),  # the others change the order of sums
    compiler_options=COMPILER_OPTIONS,
    opaque_first=True,
)
