"""`gshard.prove`: from shapes alone, and faults that are smaller than rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from typer.testing import CliRunner

import gshard
from gshard.checking.smaller import smaller_size
from gshard.cli import app
from gshard.moving import collectives
from tests.oracle import random_array

D = 8


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def layer(x, w, v):
    x, w = gshard.split(x, 0, D), gshard.split(w, 1, 4)
    return jax.nn.softmax(jnp.tanh(x @ w) @ v).sum(0)


def test_for_many_devices_from_shapes():
    """Sizes are reduced, even ones to even ones, and the plan is the one of the sizes given."""
    shapes = [struct(*s, dtype=jnp.bfloat16) for s in ((1024, 512), (512, 2048), (2048, 777))]
    lowered = gshard.jit(layer, devices=64).lower(*shapes)
    report = lowered.prove()
    assert report.exact, report
    assert report.same_plan
    assert report.error_probability < 1e-15
    assert set(report.sizes) == {1024, 512, 2048, 777}
    assert report.sizes[1024] % 8 == 0
    assert report.sizes[777] % 2 == 1
    assert "sizes were reduced" in str(report)
    assert report.covered.share == 1


@pytest.mark.parametrize("size", [9, 15, 16, 100, 1000, 1001, 4096])
@pytest.mark.parametrize("tiles", [1, 3, 8, 64])
def test_smaller_sizes_keep_the_shape_of_their_tiles(size, tiles):
    new = smaller_size(size, tiles, 16)
    assert 1 < new <= size

    def shape(n):
        local = -(-n // tiles)
        return -(-n // local), n % local == 0

    assert shape(new) == shape(size) or new == size
    padding, rows = -size % tiles, -(-new // tiles)
    if shape(size)[0] == tiles and padding < rows:
        assert -new % tiles == padding


def test_sizes_that_the_function_depends_on_stay():
    def heads(x, w):
        y = gshard.split(x, 0, D) @ w
        return jax.nn.softmax(y.reshape(-1, 16, 32)).sum(0)

    report = gshard.prove(heads, struct(4096, 256), struct(256, 512), devices=D)
    assert report.exact, report
    assert 512 not in report.sizes
    assert report.sizes[4096] < 4096


def test_groups_of_different_sizes_and_constants():
    """Six tiles on eight devices, two of which hold nothing, and rows that the function knows."""
    rows = np.asarray([0, 5, 0])

    def fn(x, w):
        x = gshard.shard(x, np.arange(6)[:, None])
        return jnp.fft.rfft2(jnp.cumsum(x, 0)) * x.sum(), w[rows]

    report = gshard.prove(fn, struct(6, 3), struct(7, 2), devices=D)
    assert report.exact, report


def test_complex_numbers_are_ordered_by_their_parts():
    """Real parts are equal, and devices compare these first and the others after that."""

    def fn(x):
        z = gshard.split(lax.complex(jnp.ones_like(x), x), 0, D)
        return z.max(0), z.min(0), (z * z.conj()).real.sum()

    lowered = gshard.jit(fn, devices=D).lower(struct(64, 65536))
    assert len([c for c in lowered.collectives if c.kind == "all_reduce"]) >= 4
    report = lowered.prove()
    assert report.exact, report


def test_on_a_command_line(tmp_path, monkeypatch):
    (tmp_path / "proved.py").write_text(
        "import gshard\n\n\ndef fn(x, w):\n    return gshard.split(x, 1, 4) @ w\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["explain", "proved:fn", "f32[3,8]", "f32[8,5]", "--devices", "4", "--prove"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "all equal exactly" in result.output


# --------------------------------------------------------------- faults below rounding


def total(x):
    return gshard.split(x, 0, D).sum(0) * 1.0


def planted(plant, change):
    """A change of every sum over devices."""
    right = collectives.all_reduce
    plant(collectives, "all_reduce", lambda place, x, *more: change(right, place, x, *more))


def test_a_small_element_left_out(plant):
    """One of 16 rows, a million times smaller than the others, is missing in the sum."""
    x = random_array((16, 4)) + 2
    x[9] *= 1e-7
    planted(
        plant, lambda sum_of, place, part, *more: sum_of(place, part - without(place, x), *more)
    )
    report = gshard.check(total, x, devices=D)
    assert not report.ok
    assert report.first.operator == "reduce_sum"
    assert np.isclose(report.first.got, report.first.expected, rtol=1e-6)


def without(place, x):
    """Row 9, on the device that has it."""
    return jnp.where(place.device_id() == 4, jnp.asarray(x[9]), 0)


def test_a_sum_in_a_narrower_type(plant):
    def narrow(sum_of, place, part, *more):
        return sum_of(place, part.astype(jnp.bfloat16), *more).astype(part.dtype)

    assert gshard.prove(lambda x: total(x), struct(16, 4), devices=D).exact
    planted(plant, narrow)
    report = gshard.prove(total, struct(16, 4), devices=D)
    assert report.first.operator == "reduce_sum"
    assert "summed in 7 bits instead of 23" in str(report.first)


def test_tiles_that_look_alike_are_swapped(plant):
    """Zeros, as at the start of a training run: no two elements are the same in the field."""

    def moved(x):
        return gshard.replicate(gshard.split(x, 0, D) * 2.0)

    plant(collectives, "_covering", lambda *_, **__: (tuple(range(D))[::-1],))
    report = gshard.check(moved, np.zeros((16, 3), np.float32), devices=D)
    assert not report.ok
    assert "reshard of mul" in str(report.first)
