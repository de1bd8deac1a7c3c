"""Steps of Equinox and NNX as their authors wrote them: both programs, and `gshard.auto`."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gshard.comparing.comparison import compare
from gshard.comparing.step import Step
from gshard.comparing.torch_step import named_like


def on_mesh(*spec):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(*spec))


@pytest.mark.slow
def test_steps_of_equinox_and_nnx():
    eqx, nnx, optax = (pytest.importorskip(n) for n in ("equinox", "flax.nnx", "optax"))
    x = jax.device_put(jnp.ones((16, 8)), on_mesh("data"))

    @eqx.filter_jit
    def of_equinox(model, x):
        grads = eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        return eqx.apply_updates(model, grads)

    @nnx.jit
    def of_nnx(model, optimizer, x):
        grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)

    one = eqx.nn.Linear(8, 4, key=jax.random.key(0))
    two = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    trainer = nnx.Optimizer(two, optax.sgd(0.1), wrt=nnx.Param)
    for step, args in ((of_equinox, (one, x)), (of_nnx, (two, trainer, x))):
        found = compare(Step(step, args), "h100", seconds=2.0)
        assert found.programs[0].sent == found.programs[1].sent == 2 * (8 * 4 + 4) * 4 * 7 // 8
        assert len(found.programs) == 3


def test_inputs_have_the_names_of_the_function_or_of_the_module():
    """Further arguments (`*inputs`) by their place, and like a module's `forward` has them."""

    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2)

    def step(params, key, *inputs):
        return jax.grad(loss)(params, *inputs)

    def forward(pixels, mask=None):
        return pixels

    shapes = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}, jax.random.key(0)
    x = jax.ShapeDtypeStruct((65536, 64), jnp.float32)
    for name in ("inputs[0]", "pixels"):
        shown = str(Step(step, (*shapes, x)).by_auto(devices=8, hardware="h100", seconds=1.0))
        assert f'  {name}: P("a", None) of 65536x64' in shown
        step.__signature__ = named_like(step, forward, 1)
    for other in (lambda key: 0, lambda *pixels: 0):  # a name that is taken, and one of all
        assert "inputs" in named_like(lambda key, *inputs: 0, other, 1).parameters
