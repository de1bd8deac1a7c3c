"""A comparison: bytes are those of XLA's own HLO and of gshard's plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard.comparing.comparison import compare
from gshard.comparing.step import Step
from gshard.explanation.hlo import collectives_of_hlo

STRUCT = jax.ShapeDtypeStruct
MIB = 2**20


def on_mesh(*spec):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, P(*spec))


@jax.jit
def data_parallel(w, x):
    return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)


def test_a_data_parallel_step_is_the_same_in_both():
    x = STRUCT((8192, 512), "float32", sharding=on_mesh("data"))
    w = STRUCT((512, 512), "float32", sharding=on_mesh())
    found = compare(Step(data_parallel, (w, x)), "h100")
    xla, own = found.programs
    assert xla.sent == own.sent == 2 * MIB * 7 // 8
    text = data_parallel.lower(w, x).compile().as_text()
    assert xla.sent == sum(c.total_bytes for c in collectives_of_hlo(text, 8))
    assert xla.memory >= 3 * MIB / 2
    assert own.memory >= 3 * MIB / 2
    assert found.lines == ()
    assert found.same == (1, xla.sent)
    assert np.isclose(xla.seconds, own.seconds, rtol=0.05)
    assert found.verdicts[0].startswith("not worth it: gshard.jit instead of jax.jit: 1.0")
    assert "1 line with the same bytes in both: 1.84 MB" in str(found)


def test_a_step_of_gshard_keeps_its_annotations_under_xla():
    def step(x):
        return jnp.cumsum(gshard.split(x, 0, 8), axis=0)

    x = STRUCT((64, 16), "float32")
    found = compare(Step(gshard.jit(step), (x,)), "cpu")
    listed = gshard.jit(step, partitioner="xla").lower(x).collectives
    assert found.programs[0].sent == sum(c.total_bytes for c in listed) > 0


@pytest.mark.slow
def test_what_auto_would_reach_and_a_step_without_shardings():
    w, x = STRUCT((512, 512), "float32"), STRUCT((65536, 512), "float32")
    found = compare(Step(data_parallel, (w, x)), "h100", seconds=5.0)
    assert "XLA runs the step on 1 device: nothing in it is sharded" in found.notes
    assert [p.name for p in found.programs] == ["XLA", "gshard", "auto"]
    assert found.programs[2].seconds < 0.5 * found.programs[0].seconds
    assert found.verdicts[1].startswith("worth it: what gshard.auto chose: ")
