"""A ResNet on strips of its images: the same losses, halos only, and less memory per device."""

import functools

import jax
import numpy as np
import pytest

from examples.resnet_spatial import MESHES, images, init, losses, partitioned, train_step
from tests.oracle import kinds, sent

STEPS = 4


@functools.cache
def unpartitioned(shape, channels):
    """Weights, data, the loss curve and the memory of one device."""
    weights = init(jax.random.key(0), channels)
    data = images(jax.random.key(1), shape)
    step = jax.jit(train_step)
    memory = step.lower(weights, *data).compile().memory_analysis().temp_size_in_bytes
    return weights, data, losses(step, weights, *data, STEPS), memory


def sums(lowered) -> int:
    """Bytes of all but the halos."""
    return sent(lowered) - sent(lowered, "collective_permute")


def check_halos(mesh, weights, data):
    """Nothing moves but halos, and sums over devices; the lowered step."""
    lowered = partitioned(mesh).lower(weights, *data)
    # On two axes a sum may be scattered before it is passed on: never to send more than without.
    scattered = {"reduce_scatter"} if min(np.shape(mesh)) > 1 else set()
    assert set(kinds(lowered)) <= {"collective_permute", "all_reduce"} | scattered, kinds(lowered)
    if scattered:
        assert sums(lowered) <= sums(partitioned(MESHES["width by 8"]).lower(weights, *data))
    halo = ("conv_general_dilated: rows under the windows", "reduce_window", "select_and")
    summed = ("conv_general_dilated", "reduce_sum", "dot_general")
    for c in [value for each in lowered.collectives for value in each.members or (each,)]:
        assert c.reason.startswith(halo if c.kind == "collective_permute" else summed), c
    return lowered


def check_training(mesh, shape, channels) -> int:
    """Train on `mesh`; the bytes of activations and other temporaries on one device."""
    weights, data, wanted, _ = unpartitioned(shape, channels)
    step = partitioned(mesh)
    np.testing.assert_allclose(losses(step, weights, *data, STEPS), wanted, rtol=2e-3)
    lowered = check_halos(mesh, weights, data)
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", ["width by 8", "2 x 4"])
def test_strips_of_an_uneven_width_send_their_halos(name):
    """Sums over devices are those of the weights' gradients and of the statistics."""
    weights = jax.eval_shape(functools.partial(init, channels=(4, 8)), jax.random.key(0))
    data = jax.eval_shape(functools.partial(images, shape=(2, 24, 227, 3)), jax.random.key(1))
    check_halos(MESHES[name], weights, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["width by 8", "2 x 4"])
def test_training_on_strips_of_an_uneven_width(name):
    shape, channels = (2, 24, 227, 3), (4, 8)
    memory = check_training(MESHES[name], shape, channels)
    assert unpartitioned(shape, channels)[2][-1] < unpartitioned(shape, channels)[2][0]
    assert memory < unpartitioned(shape, channels)[3] / 2


@pytest.mark.slow
def test_memory_falls_with_the_number_of_devices():
    shape, channels = (2, 227, 227, 3), (8, 16, 24)
    memory = [check_training(MESHES[n], shape, channels) for n in ("1", *list(MESHES)[1:4])]
    assert sorted(memory, reverse=True) == memory
    assert memory[-1] < memory[0] / 4
    assert check_training(MESHES["2 x 4"], shape, channels) < memory[0] / 3
