"""`gshard.contrib.nnx.jit` is `nnx.jit`: what a step changes in place, and what moves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gshard
from gshard.contrib.nnx import jit
from tests.oracle import compare, kinds, random_array, sent

pytestmark = pytest.mark.filterwarnings("ignore:.*nnx.*:DeprecationWarning")

X, Y = random_array((16, 4)), random_array((16, 2), seed=1)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def train_step(model, optimizer, x, y):
    x = gshard.split(x, 0, 8)
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def fresh():
    model = Network(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def trained(jitted, steps=4):
    """The losses, and everything in the model and the optimizer after them."""
    both = fresh()
    losses = [jitted(*both, X, Y) for _ in range(steps)]
    return losses, nnx.to_pure_dict(nnx.state(both))


def check_alike(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        compare(a, b, exact=False, rtol=1e-4)


@pytest.mark.parametrize("how", [{}, {"donate_argnums": (0, 1)}, {"graph": False}], ids=str)
def test_training_changes_modules_optimizers_and_rng_state(how):
    step = jit(train_step, strict=True, **how)
    got, wanted = trained(step), trained(nnx.jit(train_step))
    check_alike(got, wanted)
    assert got[0][0] > got[0][-1]
    lowered = step.lower(*fresh(), X, Y)
    assert isinstance(lowered, gshard.Lowered)
    assert set(kinds(lowered)) == {"all_reduce"}
    gradients = sum(x.size for x in jax.tree.leaves(nnx.state(fresh()[0], nnx.Param)))
    assert sent(lowered) < 2 * 4 * (gradients + 4 * 8 + 1)  # and statistics, twice, and the loss


@pytest.mark.slow
def test_compiled_program_changes_them_too():
    both = fresh()
    compiled = jit(train_step).lower(*both, X, Y).compile()
    again = fresh()
    check_alike(
        [compiled(*both, X, Y) for _ in range(2)], [nnx.jit(train_step)(*again, X, Y) for _ in "ab"]
    )


def test_the_step_is_traced_once():
    traced = []

    def counted(*args):
        traced.append(1)
        return train_step(*args)

    trained(jit(counted))
    assert len(traced) == 1


def test_shared_references_stay_shared():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(8, 4, rngs=rngs)
            self.out = self.embed

    @jit
    def double(model, x):
        model.embed.embedding[...] = model.embed.embedding[...] * 2
        return model.out.attend(gshard.split(x, 0, 8))

    model = Tied(nnx.Rngs(0))
    before = np.asarray(model.embed.embedding[...])
    got = double(model, X)
    assert model.out is model.embed
    np.testing.assert_array_equal(model.embed.embedding[...], 2 * before)
    compare(got, jnp.asarray(X @ (2 * before).T), exact=False)


def test_modules_made_inside_come_out():
    @jit
    def make(key):
        model = nnx.Linear(4, 8, rngs=nnx.Rngs(key))
        model.kernel[...] = gshard.split(model.kernel[...], 1, 8)
        return model

    model = make(jax.random.key(3))
    assert model.kernel[...].addressable_shards[0].data.shape == (4, 1)
    np.testing.assert_array_equal(model.kernel[...], nnx.Linear(4, 8, rngs=nnx.Rngs(3)).kernel[...])


def test_static_and_donated_arguments():
    @jit(static_argnames="times", donate_argnames="x")
    def repeated(model, x, times):
        for _ in range(times):
            x = model(x)
        return x

    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    x = jax.device_put(X, jax.NamedSharding(jax.make_mesh((8,), ("x",)), jax.P("x")))
    wanted = model(model(X))
    compare(repeated(model, x, times=2), wanted, exact=False)
    assert x.is_deleted()


def test_shardings_of_the_arguments():
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    sharding = nnx.StateSharding({nnx.Param: jax.NamedSharding(mesh, jax.P(None, "y")), ...: None})
    rows = jax.NamedSharding(mesh, jax.P("x"))
    model = nnx.Linear(4, 8, use_bias=False, rngs=nnx.Rngs(0))
    step = jit(lambda model, x: model(x), in_shardings=(sharding, rows))
    lowered = step.lower(model, X)
    assert lowered.collectives == []
    assert step(model, X).sharding.spec == jax.P("x", "y")
    compare(step(model, X), nnx.jit(lambda model, x: model(x))(model, X), exact=False)


def test_as_a_decorator_of_a_method_and_for_fewer_devices():
    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(8))

        @jit(devices=jax.devices()[:4])
        def add(self, x):
            self.count[...] = self.count[...] + gshard.split(x, 0, 4)

    counter = Counter()
    counter.add(jnp.ones(8))
    counter.add(jnp.ones(8))
    np.testing.assert_array_equal(counter.count[...], np.full(8, 2.0))
    assert counter.count[...].sharding.num_devices == 4


def test_unknown_keyword():
    with pytest.raises(TypeError, match="device_count"):
        jit(train_step, device_count=8)


def test_gshard_jit_warns_that_changes_are_lost():
    with pytest.warns(UserWarning, match=r"train_step changes .* use gshard\.contrib\.nnx\.jit"):
        gshard.jit(train_step)(*fresh(), X, Y)


def test_gshard_jit_is_silent_where_nothing_is_lost():
    """A forward pass in which nothing changes, and a module that is returned."""
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    gshard.jit(lambda model, x: model(x))(model, X)

    def step(model, x):
        model.kernel[...] = model.kernel[...] * 2
        return model, model(x)

    changed, _ = gshard.jit(step)(model, X)
    np.testing.assert_array_equal(changed.kernel[...], 2 * model.kernel[...])
