"""Windows: every configuration against the unpartitioned run, and what they send."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

from gshard.rules.window import reach_of
from tests.oracle import (
    DEVICE_COUNTS,
    assignments,
    check,
    check_grad,
    even_split,
    kinds,
    random_array,
    sent,
)

SIZES = (1, 2, 3, 5, 7, 8, 13, 17)


def conv(stride=1, pad=(0, 0), base=1, dilation=1, groups=1, batch_groups=1):
    """A 1-dimensional convolution, NCW."""

    def fn(x, kernel):
        return lax.conv_general_dilated(
            x,
            kernel,
            (stride,),
            [pad],
            (base,),
            (dilation,),
            ("NCW", "OIW", "NCW"),
            feature_group_count=groups,
            batch_group_count=batch_groups,
        )

    return fn


def gradient(fn, argnums=0):
    """The gradient of half the sum of squares: cotangents lie as the results do."""
    return jax.grad(lambda *args: jnp.sum(fn(*args) ** 2) / 2, argnums)


# ---------------------------------------------------------------- what is sent


def gathers(lowered) -> list:
    """Gathers and exchanges, but for results that are wanted elsewhere."""
    kinds = ("all_gather", "all_to_all")
    return [
        c for c in lowered.collectives if c.kind in kinds and not c.reason.startswith("result of")
    ]


def halo_only(lowered) -> int:
    """Bytes sent, by CollectivePermutes only."""
    assert set(kinds(lowered)) <= {"collective_permute"}, kinds(lowered)
    return sent(lowered)


def test_conv_with_stride_on_an_uneven_width():
    """Non-constant halos: two rows to the left at most, two to the right."""
    x, kernel = random_array((4, 8, 69)), random_array((8, 8, 5), seed=1)
    lowered = check(conv(2, (2, 2)), x, kernel, inputs=[even_split(3, 2, 8)], rtol=1e-4, atol=1e-4)
    row = 4 * 8 * 4
    assert 0 < halo_only(lowered) <= 9 * row


@pytest.mark.parametrize(
    ("stride", "width", "base"),
    [(3, 61, 3), (2, 61, 3), (1, 61, 3), (2, 59, 3), (3, 53, 4)],
    ids=["divisible", "divisible by chance", "stride 1", "neither", "neither, large"],
)
def test_base_dilation_in_the_three_cases_of_the_paper(stride, width, base):
    x, kernel = random_array((2, 4, width)), random_array((4, 4, 5), seed=1)
    fn = conv(stride, (2, 1), base)
    lowered = check(fn, x, kernel, inputs=[even_split(3, 2, 8)], rtol=1e-4, atol=1e-4)
    row = 2 * 4 * 4
    assert halo_only(lowered) <= 7 * row  # less than a tile
    grad = check(
        gradient(fn, (0, 1)), x, kernel, inputs=[even_split(3, 2, 8)], rtol=1e-4, atol=1e-4
    )
    assert set(kinds(grad)) <= {"collective_permute", "all_reduce"}


def test_halo_that_reaches_past_the_next_neighbour():
    x, kernel = random_array((2, 2, 16)), random_array((2, 2, 7), seed=1)
    lowered = check(conv(1, (3, 3)), x, kernel, inputs=[even_split(3, 2, 8)])
    assert halo_only(lowered) == 6 * 2 * 2 * 4
    assert kinds(lowered) == {"collective_permute": 4}


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_several_spatial_dims_at_once(dim):
    """Corners come in two hops, inside the rows of the second exchange."""
    assigned = [[1, 2, 4], [2, 2, 2], [4, 1, 2]][dim]
    x, kernel = random_array((2, 13, 9, 11, 2)), random_array((3, 3, 3, 2, 2), seed=1)

    def fn(x, kernel):
        numbers = ("NHWDC", "HWDIO", "NHWDC")
        return lax.conv_general_dilated(x, kernel, (1, 2, 1), "SAME", dimension_numbers=numbers)

    assignment = np.arange(8).reshape([1, *assigned, 1])
    lowered = check(fn, x, kernel, inputs=[assignment], rtol=1e-4, atol=1e-4)
    assert halo_only(lowered) > 0
    grad = check(gradient(fn, (0, 1)), x, kernel, inputs=[assignment], rtol=1e-4, atol=1e-4)
    assert set(kinds(grad)) == {"collective_permute", "all_reduce"}


@pytest.mark.parametrize("groups", [1, 4])
def test_batch_split_is_free(groups):
    x, kernel = random_array((13, 8, 9)), random_array((8, 8 // groups, 3), seed=1)
    fn = conv(1, (1, 1), groups=groups)
    assert sent(check(fn, x, kernel, inputs=[even_split(3, 0, 8)], rtol=1e-4, atol=1e-4)) == 0
    grad = check(
        gradient(fn, (0, 1)), x, kernel, inputs=[even_split(3, 0, 8)], rtol=1e-4, atol=1e-4
    )
    assert kinds(grad) == {"all_reduce": 1}


@pytest.mark.parametrize(("groups", "devices"), [(8, 8), (8, 4), (4, 8), (6, 4)])
def test_groups_split_along_features_are_free(groups, devices):
    """Also with more tiles than groups: the output features of a group are cut then."""
    x, kernel = random_array((2, groups, 9)), random_array((groups * 2, 1, 3), seed=1)
    across = even_split(3, 1, min(devices, groups))
    fn = conv(1, (1, 1), groups=groups)
    lowered = check(
        fn, x, kernel, devices=min(devices, groups), inputs=[across], rtol=1e-4, atol=1e-4
    )
    if groups % devices == 0 or devices > groups:
        assert sent(lowered) == 0


CUT = [(6, 8, 8, 10), (12, 4, 4, 2), (10, 2, 4, None), (3, 5, 7, None), (20, 1, 2, None)]


@pytest.mark.parametrize(("groups", "inputs", "outputs", "rows"), CUT)
def test_features_of_groups_that_tiles_cut_are_fetched(groups, inputs, outputs, rows):
    """Those of the groups that a device has results of, with zeros for the other results."""
    x = random_array((2, groups * inputs, 9))
    kernel = random_array((groups * outputs, inputs, 3), seed=1)
    split, fn = even_split(3, 1, 8), conv(1, (1, 1), groups=groups)
    how = {"inputs": [split, even_split(3, 0, 8)], "rtol": 1e-4, "atol": 1e-4}
    low = check(fn, x, kernel, outputs=[split], **how)
    assert set(kinds(low)) <= {"collective_permute"}
    if rows:
        assert sent(low) == rows * x.nbytes // x.shape[1]
    check_grad(lambda *xs: jnp.tanh(fn(*xs)), x, kernel, argnums=(0, 1), **how)
    how["inputs"] = [None, even_split(3, 0, 8)]  # all features are on all devices
    assert sent(check(fn, x, kernel, outputs=[split], **how)) <= sent(low)


def test_batch_groups_split_along_groups_are_free():
    x, kernel = random_array((16, 3, 9)), random_array((8, 3, 3), seed=1)
    fn = conv(1, (1, 1), batch_groups=8)
    inputs = [even_split(3, 0, 8), even_split(3, 0, 8)]
    assert sent(check(fn, x, kernel, inputs=inputs, rtol=1e-4, atol=1e-4)) == 0


def test_input_features_leave_partial_sums():
    x, kernel = random_array((2, 13, 9)), random_array((5, 13, 3), seed=1)
    inputs = [even_split(3, 1, 8), even_split(3, 1, 8)]
    lowered = check(conv(1, (1, 1)), x, kernel, inputs=inputs, rtol=1e-4, atol=1e-4)
    assert kinds(lowered) == {"all_reduce": 1}
    x, kernel = random_array((8, 16, 9)), random_array((16, 16, 7), seed=1)
    for dim in (0, 1):
        lowered = check(
            conv(1, (3, 3)),
            x,
            kernel,
            inputs=inputs,
            outputs=[even_split(3, dim, 8)],
            rtol=1e-4,
            atol=1e-4,
        )
        assert kinds(lowered) == {"reduce_scatter": 1}


def test_output_features_are_free():
    x, kernel = random_array((2, 3, 9)), random_array((13, 3, 3), seed=1)
    inputs = [None, even_split(3, 0, 8)]
    assert sent(check(conv(1, (1, 1)), x, kernel, inputs=inputs)) == 0


def test_kernel_gradient_sums_over_both_split_sides():
    """The window is the split activation, dilated by the stride; the sums are the kernel's size."""
    x, g = random_array((2, 69, 3)), random_array((2, 35, 4), seed=1)

    def fn(x, g):
        _, pull = jax.vjp(
            lambda k: lax.conv_general_dilated(
                x, k, (2,), [(2, 2)], dimension_numbers=("NWC", "WIO", "NWC")
            ),
            jnp.zeros((5, 3, 4)),
        )
        return pull(g)

    split = even_split(3, 1, 8)
    lowered = check(fn, x, g, inputs=[split, split], rtol=1e-4, atol=1e-4)
    assert set(kinds(lowered)) == {"collective_permute", "all_reduce"}
    assert sent(lowered, "all_reduce") == 2 * 5 * 3 * 4 * 4 * 7 // 8


def test_kernel_larger_than_the_activations_gathers_none_of_them():
    """Partial sums, though gathering both activations would send less."""
    x, kernel = random_array((1, 32, 16)), random_array((32, 32, 3), seed=1)
    fn = gradient(conv(1, (1, 1)), 1)
    lowered = check(fn, x, kernel, inputs=[even_split(3, 2, 8)], rtol=1e-3, atol=1e-3)
    assert set(kinds(lowered)) == {"collective_permute", "all_reduce"}


@pytest.mark.parametrize("argnum", [0, 1])
def test_patches_that_are_larger_than_their_number_stay_split(argnum):
    """15 x 15 patches of 16 x 16: halos of the image, in tiles of 8 x 4 patches, and no sums."""
    x, kernel = random_array((1, 1, 240, 240)), random_array((2, 1, 16, 16), seed=1)

    def fn(x, kernel):
        return lax.conv_general_dilated(x, kernel, (16, 16), "VALID")

    tiles = np.arange(8).reshape(1, 1, 2, 4)
    lowered = check(fn, x, kernel, inputs=[tiles], rtol=1e-4, atol=1e-4)
    assert halo_only(lowered) == 8 * 60 * 4 + 128 * 12 * 4
    grad = check(gradient(fn, argnum), x, kernel, inputs=[tiles], rtol=1e-3, atol=1e-3)
    assert sent(grad, "all_reduce") <= 2 * kernel.nbytes * argnum


def test_spatial_splits_travel_through_a_network():
    """One annotation on the image: convolutions, pools and their gradients all stay split."""
    x = random_array((2, 37, 16, 3))
    kernels = [random_array((3, 3, 3, 4), seed=1), random_array((3, 3, 4, 4), seed=2)]

    def fn(x, *kernels):
        for kernel, stride in zip(kernels, (2, 1), strict=True):
            numbers = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(
                x, kernel, (stride,) * 2, "SAME", dimension_numbers=numbers
            )
            x = lax.reduce_window(
                jnp.tanh(x), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"
            )
        return x * x

    split = even_split(4, 1, 8)
    assert halo_only(check(fn, x, *kernels, inputs=[split], rtol=1e-4, atol=1e-4)) > 0
    lowered = check(gradient(fn, (0, 1, 2)), x, *kernels, inputs=[split], rtol=1e-3, atol=1e-3)
    assert set(kinds(lowered)) == {"collective_permute", "all_reduce"}
    assert kinds(lowered)["all_reduce"] == 2


# ---------------------------------------------------------------- any configuration


@given(
    tiles=st.integers(1, 9),
    per_tile=st.integers(1, 5),
    step=st.integers(1, 5),
    extent=st.integers(0, 9),
    low=st.integers(-6, 6),
    base=st.integers(1, 5),
)
@settings(max_examples=200)
def test_reach_covers_exactly_the_elements_under_the_windows(
    tiles, per_tile, step, extent, low, base
):
    reach = reach_of(tiles, per_tile, tiles * per_tile, step, extent, low, base)
    hole, high = reach.padding
    for c in range(tiles):
        first = c * per_tile - reach.lead[c]
        begin = first * step - low
        end = begin + (reach.count - 1) * step + extent
        under = [q for q in range(begin, end + 1) if q % base == 0]
        rows = range(reach.starts[c], reach.starts[c] + reach.rows)
        if under:
            assert [q // base for q in under] == list(rows)
            assert begin + hole == rows[0] * base
        assert hole + (reach.rows - 1) * base + 1 + high == end - begin + 1
        assert 0 <= reach.lead[c] <= reach.count - per_tile


@st.composite
def convolutions(draw):
    rank = draw(st.integers(1, 2))
    ints = [st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)]
    stride, base, dilation = ([draw(i) for _ in range(rank)] for i in ints)
    pads = [(draw(st.integers(-2, 4)), draw(st.integers(-2, 4))) for _ in range(rank)]
    groups = draw(st.sampled_from([1, 1, 2, 3, 4]))
    by_batch = draw(st.booleans())
    batch, inputs, outputs = (draw(st.sampled_from((1, 2, 3, 5))) for _ in range(3))
    space = [draw(st.sampled_from((*SIZES, 0))) for _ in range(rank)]
    taps = [draw(st.sampled_from((1, 2, 3, 5))) for _ in range(rank)]
    lhs = [batch * groups if by_batch else batch, inputs if by_batch else inputs * groups, *space]
    rhs = [outputs * groups, inputs, *taps]
    specs = [tuple(draw(st.permutations(range(rank + 2)))) for _ in range(3)]
    config = {
        "window_strides": stride,
        "padding": pads,
        "lhs_dilation": base,
        "rhs_dilation": dilation,
        "dimension_numbers": lax.ConvDimensionNumbers(*specs),
        "batch_group_count" if by_batch else "feature_group_count": groups,
    }
    shapes = [
        [sizes[spec.index(d)] for d in range(rank + 2)]
        for sizes, spec in zip((lhs, rhs), specs[:2], strict=True)
    ]
    devices = draw(st.sampled_from(DEVICE_COUNTS))
    spatial = draw(st.booleans())  # batch and spatial dims only
    dims = [specs[0][0], *specs[0][2:]] if spatial else None
    split = [draw(assignments(rank + 2, devices, dims))]
    if not spatial:
        split.append(draw(assignments(rank + 2, devices)))
        split.append(draw(assignments(rank + 2, devices)))
    return shapes, config, devices, split


def check_convolution(case):
    shapes, config, devices, split = case
    x, kernel = (random_array(s, seed=i) for i, s in enumerate(shapes))

    def fn(x, kernel):
        return lax.conv_general_dilated(x, kernel, **config)

    try:
        result = jax.eval_shape(fn, x, kernel).shape
    except (ValueError, TypeError):
        assume(False)  # a configuration that JAX refuses
    how = {"devices": devices, "inputs": split[:2], "rtol": 1e-3, "atol": 1e-3}
    lowered = check(fn, x, kernel, outputs=split[2:], **how)
    grad = check(gradient(fn, (0, 1)), x, kernel, outputs=split[:2], **how)
    specs = config["dimension_numbers"]
    wide = any(
        shapes[1][r] >= result[o] or (shapes[1][r] - 1) * dilation >= shapes[0][l] * base / 2
        for l, r, o, base, dilation in zip(
            *(spec[2:] for spec in specs),
            config["lhs_dilation"],
            config["rhs_dilation"],
            strict=True,
        )
    )
    if len(split) == 1 and config.get("batch_group_count", 1) == 1 and not wide:
        assert not gathers(lowered)
        assert not gathers(grad)


@given(convolutions())
@settings(max_examples=6)
def test_any_convolution(case):
    check_convolution(case)


@pytest.mark.slow
@given(convolutions())
@settings(max_examples=300)
def test_any_convolution_at_length(case):
    check_convolution(case)


def test_a_dilated_window_reaches_as_far_as_its_last_tap():
    x, kernel = random_array((1, 2, 29)), random_array((2, 2, 3), seed=1)
    lowered = check(conv(1, (2, 2), dilation=2), x, kernel, inputs=[even_split(3, 2, 8)])
    assert halo_only(lowered) == 2 * 2 * 2 * 4


def test_padding_of_groups_of_the_batch_is_in_no_product():
    """A backend may run groups as one convolution, and multiply other groups' values by zeros."""
    x, kernel = random_array((10, 2, 9)), random_array((5, 2, 3), seed=1)
    fn = conv(1, (1, 1), batch_groups=5)
    check(fn, x, kernel, devices=2, inputs=[even_split(3, 0, 2)], outputs=[even_split(3, 1, 2)])
