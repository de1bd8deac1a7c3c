"""Canonicalisation: the passes that rewrite groups of equations into normal forms."""

from gshard.capture.simplify.permutations import fold_permutation_checks
from gshard.capture.simplify.products import transpose_products
from gshard.capture.simplify.recursions import mark_recursions
from gshard.capture.simplify.row_maps import compose_row_maps

PASSES = (mark_recursions, fold_permutation_checks, compose_row_maps, transpose_products)
