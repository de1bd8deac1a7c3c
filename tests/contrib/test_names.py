"""Leaves have the library's own names, not a wrapper's: in explain, memory, in_shardings, auto."""

import html
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import gshard
from gshard.contrib.equinox import filter_jit
from gshard.contrib.nnx import jit

X = jnp.ones((8192, 64))
WRAPPERS = ("dynamic_", "arrays[", ".states[")


class Model(eqx.Module):
    first: eqx.nn.Linear
    blocks: list[eqx.nn.Linear]
    activation: object = jax.nn.relu

    def __call__(self, x):
        x = self.activation(self.first(x))
        return sum(block(x) for block in self.blocks)


def equinox_model():
    keys = jax.random.split(jax.random.key(0), 3)
    return Model(
        eqx.nn.Linear(64, 64, key=keys[0]), [eqx.nn.Linear(64, 8, key=k) for k in keys[1:]]
    )


def shown(lowered, page=False):
    """Everything that is printed or written about a program."""
    explanation = lowered.explain(seconds=0)
    text = f"{explanation}\n{explanation.page() if page else ''}"
    assert not [w for w in WRAPPERS if w in text]
    return text


def step(model, x):
    model, x = gshard.fsdp(model), gshard.split(x, 0, 8)
    return eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)


def test_equinox():
    jitted = filter_jit(step, devices=8)
    lowered = jitted.lower(equinox_model(), X)
    assert lowered.in_shardings["model.first.weight"].tiles == (8, 1)
    assert {"model.blocks[1].weight", "model.blocks[0].bias", "x"} <= set(lowered.in_shardings)
    assert "model.first.weight" in shown(lowered)
    plain = gshard.jit(step, devices=8).lower(equinox_model(), X)  # with static leaves
    assert "model.first.weight" in shown(plain)


@pytest.mark.slow
def test_after_a_call_when_the_program_is_known():
    called = filter_jit(lambda model, x: step(model, x))
    called(equinox_model(), X)
    assert "model.first.weight" in called.lower(equinox_model(), X).in_shardings


@pytest.mark.filterwarnings("ignore:.*nnx.*:DeprecationWarning")
def test_nnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(64, 64, rngs=rngs)
            self.blocks = nnx.List([nnx.Linear(64, 8, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            return sum(block(nnx.relu(self.first(x))) for block in self.blocks)

    @jit(devices=8)
    def train_step(model, optimizer, x):
        nnx.update(model, gshard.fsdp(nnx.state(model)))
        x = gshard.split(x, 0, 8)
        optimizer.update(model, nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model))

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    lowered = train_step.lower(model, optimizer, X)
    assert lowered.in_shardings["model.first.kernel"].tiles == (8, 1)
    assert "model.blocks[1].kernel" in lowered.in_shardings
    assert any(name.startswith("optimizer.opt_state") for name in lowered.in_shardings)
    assert "model.first.kernel" in shown(lowered, page=True)


def test_linen():
    model = nn.Dense(64)
    params = model.init(jax.random.key(0), jnp.ones((1, 64)))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))

    def train_step(state, x):
        x, params = gshard.split(x, 0, 8), gshard.fsdp(state.params)
        grads = jax.grad(lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2))(params)
        return state.apply_gradients(grads=grads)

    lowered = gshard.jit(train_step, devices=8).lower(state, X)
    assert "state.params['kernel']" in shown(lowered)
    assert lowered.in_shardings[0].params["kernel"].tiles == (8, 1)


class NnxNet(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))])

    def __call__(self, x):
        return nnx.relu(self.blocks[0](x))


def of_equinox():
    def f(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    def spec_of(shardings):  # Equinox's own filter_jit takes no in_shardings
        return gshard.jit(lambda model, x: f(model, x), in_shardings=shardings)

    return f, equinox_model(), "model.blocks[1].weight", filter_jit, spec_of


def of_nnx():
    def f(model, x):
        return jnp.mean(model(x) ** 2)

    def spec_of(shardings):
        return jit(f, in_shardings=shardings)

    return f, NnxNet(), "model.blocks[0].kernel", jit, spec_of


def of_torch():
    torch = pytest.importorskip("torch")
    from gshard.contrib.torch import from_torch

    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).eval()
    function, params = from_torch(module, torch.zeros(X.shape))

    def f(params, x):
        return jnp.mean(function(params, x) ** 2)

    def spec_of(shardings):
        return gshard.jit(f, in_shardings=shardings)

    return f, params, "params['1.weight']", gshard.jit, spec_of


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*nnx.*:DeprecationWarning")
@pytest.mark.parametrize("library", [of_equinox, of_nnx, of_torch])
def test_names_in_explain_memory_errors_and_auto(library):
    f, model, name, library_jit, spec_of = library()

    def split(model, x):
        return f(model, gshard.split(x, 0, 8))

    explanation = library_jit(split, devices=8).lower(model, X).explain(seconds=0)
    page = html.unescape(explanation.page())
    assert name in page
    assert '<ul class="held">' in page  # what is live at the memory's peak
    assert not [w for w in WRAPPERS if w in page]
    mesh = jax.make_mesh((8,), ("a",))
    wrong = jax.NamedSharding(mesh, jax.P("a", None, None))
    with pytest.raises(ValueError, match=r"in_shardings of (model\.|params\[').*: .*has 3 entries"):
        spec_of((wrong, None)).lower(model, X)
    shown = str(gshard.auto(split, model, X, devices=8, hardware="h100", seconds=1))
    assert not re.search(r"^  \[\d\]", shown, re.MULTILINE)
