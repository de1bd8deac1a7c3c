"""Modules of PyTorch as functions of JAX: modes, buffers, tied weights, meta weights, errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import gshard  # noqa: E402
from gshard.contrib.torch import from_torch  # noqa: E402


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.up = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.drop(torch.relu(self.up(self.norm(x)))))


class Tied(nn.Module):
    """Layers, a tied product, a constant, and a branch without gradients."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.tensor([1.0, 2.0] * 6)

    def forward(self, tokens, *, bias=None):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        with torch.no_grad():
            frozen = self.head(x)
        return {"logits": self.head(x) * self.scale, "frozen": frozen, "bias": bias}


def made(**mode):
    torch.manual_seed(0)
    module = Tied().train(mode.get("train", False))
    tokens = torch.arange(16) % 12
    return module, tokens, jnp.asarray(tokens.numpy(), jnp.int32)


def test_values_gradients_and_names_are_those_of_the_module():
    module, tokens, given = made()
    function, params = from_torch(module, tokens)
    assert "embed.weight" in params
    assert "head.weight" not in params  # one tensor, one entry
    assert set(params) == dict(module.named_parameters()).keys()
    found = jax.jit(function)(params, given)
    want = module(tokens)
    assert found["bias"] is None
    np.testing.assert_allclose(found["logits"], want["logits"].detach().numpy(), 1e-5, 1e-6)

    def loss(params):
        result = function(params, given)
        return (result["logits"] ** 2).sum() + (result["frozen"] ** 3).sum()

    gradients = jax.jit(jax.grad(loss))(params)
    ((want["logits"] ** 2).sum() + (want["frozen"] ** 3).sum()).backward()
    for name, parameter in module.named_parameters():
        expected = parameter.grad.numpy()
        limit = 1e-5 * max(1, np.abs(expected).max())
        np.testing.assert_allclose(gradients[name], expected, 1e-4, limit, err_msg=name)


def test_training_mode_draws_by_a_key_and_returns_the_buffers():
    module, tokens, given = made(train=True)
    function, params = from_torch(module, tokens)
    with pytest.raises(ValueError, match=r"test_torch.py:\d+, layers.0: native_dropout draws"):
        function(params, given)
    run = jax.jit(function)
    one, after = run(params, given, key=jax.random.key(0), buffers=function.buffers)
    other, _ = run(params, given, key=jax.random.key(1), buffers=function.buffers)
    assert not np.allclose(one["logits"], other["logits"])
    np.testing.assert_array_equal(
        run(params, given, key=jax.random.key(0))["logits"], one["logits"]
    )
    module(tokens)  # BatchNorm sees the embeddings in the first layer, before any dropout
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        name = f"layers.0.norm.{name}"
        want = dict(module.named_buffers())[name].numpy()
        np.testing.assert_allclose(after[name], want, 1e-5, 1e-6)


def test_dropout_keeps_its_share_and_its_mean():
    module = nn.Dropout(0.25).train()
    function, params = from_torch(module, torch.ones(100, 100))
    found = np.asarray(function(params, jnp.ones((100, 100)), key=jax.random.key(0)))
    assert set(np.unique(found)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(found.mean() - 1) < 0.02


def test_meta_weights_are_shapes_and_make_the_same_program():
    module, tokens, given = made()
    with torch.device("meta"):
        empty = Tied().eval()
    function, params = from_torch(module, tokens)
    meta_function, meta_params = from_torch(empty, tokens)
    assert {n: (p.shape, p.dtype) for n, p in params.items()} == {
        n: (p.shape, p.dtype) for n, p in meta_params.items()
    }
    assert all(isinstance(p, jax.ShapeDtypeStruct) for p in meta_params.values())

    def lowered(function, params):
        def step(p, x):
            return function(p, gshard.split(x, 0, 8))["logits"]

        return gshard.jit(step, devices=8).lower(params, given)

    one, two = lowered(function, params), lowered(meta_function, meta_params)
    assert [c.bytes for c in one.collectives] == [c.bytes for c in two.collectives]
    found = meta_function(params, given)["logits"]
    assert np.isnan(found).all()  # the running means have no values: nothing wrong is returned


def test_lines_are_those_of_the_model_with_its_modules():
    module, tokens, given = made()
    function, params = from_torch(module, tokens)

    def step(params, x):
        def loss(p):
            return (function(p, gshard.split(x, 0, 8))["logits"] ** 2).sum()

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    lowered = gshard.jit(step).lower(params, given)
    sources = {c.source for c in lowered.collectives}
    line = Block.forward.__code__.co_firstlineno + 1
    assert f"test_torch.py:{line}, layers.1" in str(lowered.explain()), sources
    assert "jax" not in " ".join(sources)
    found = lowered.compile()(params, given)
    for name, want in jax.jit(step)(params, given).items():
        np.testing.assert_allclose(found[name], want, 1e-4, 1e-5)


def test_what_cannot_be_exported_is_one_line():
    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(ValueError, match=r"torch.export cannot export Branches: ") as error:
        from_torch(Branches(), torch.ones(4))
    assert len(str(error.value).splitlines()) == 1
    assert re.search(r"test_torch.py:\d+", str(error.value))


def test_an_operator_without_a_counterpart_can_be_given():
    class Inverse(nn.Module):
        def forward(self, x):
            return torch.linalg.inv_ex(x)[0]

    with pytest.raises(ValueError, match=r"test_torch.py:\d+.*linalg_inv_ex.*lowerings="):
        from_torch(Inverse(), torch.eye(3))
    own = {torch.ops.aten.linalg_inv_ex.default: lambda x, **_: (jnp.linalg.inv(x), None)}
    function, params = from_torch(Inverse(), torch.eye(3), lowerings=own)
    np.testing.assert_allclose(function(params, 2 * jnp.eye(3)), np.eye(3) / 2)


def test_inputs_unlike_those_of_the_export_are_refused():
    module, tokens, given = made()
    function, params = from_torch(module, tokens)
    with pytest.raises(ValueError, match=r"exported for an input of shape \(16,\)"):
        function(params, given[:8])
    with pytest.raises(ValueError, match="was exported for inputs"):
        function(params, given, bias=given)
    with pytest.raises(ValueError, match=r"'embed.weight', which is not among those given"):
        function({}, given)
    with pytest.raises(ValueError, match="key= is a keyword of the function"):
        from_torch(module, (), {"key": tokens})


def test_remat_computes_layers_again_with_the_same_gradients():
    module, tokens, given = made(train=True)
    plain, params = from_torch(module, tokens)
    again, _ = from_torch(module, tokens, remat=r"layers\.\d+")
    key = jax.random.key(0)

    def gradient(function):
        return jax.grad(lambda p: (function(p, given, key=key)["logits"] ** 2).mean())

    jaxpr = jax.make_jaxpr(gradient(again))(params)
    blocks = [e for e in jaxpr.eqns if e.primitive.name in ("checkpoint", "remat", "remat2")]
    assert len(blocks) == 2  # one for each layer, in its backward pass
    want, got = jax.jit(gradient(plain))(params), jax.jit(gradient(again))(params)
    jax.tree.map(lambda w, g: np.testing.assert_allclose(g, w, 1e-5, 1e-6), want, got)
    with pytest.raises(ValueError, match=r"remat='block' is the path of no module of Tied"):
        from_torch(module, tokens, remat="block")
