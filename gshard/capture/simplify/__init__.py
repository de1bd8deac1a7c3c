"""Canonicalisation: the passes that rewrite groups of equations into normal forms."""

from gshard.capture.simplify.fixed_order import fix_order
from gshard.capture.simplify.permutations import fold_permutation_checks
from gshard.capture.simplify.pins import pin_rounded
from gshard.capture.simplify.products import transpose_products
from gshard.capture.simplify.row_maps import compose_row_maps
from gshard.capture.simplify.trees import merge_trees

PASSES = (fold_permutation_checks, compose_row_maps, transpose_products)

# Of a reproducible program, after the others.
FIXED_ORDER = (fix_order, pin_rounded, merge_trees)
