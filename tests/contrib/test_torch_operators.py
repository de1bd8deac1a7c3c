"""Each operator of `gshard.contrib.torch` beside torch itself: values, types and gradients.

A family is one module, exported once, which returns the result of every function in it by name.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from gshard.contrib.torch import from_torch  # noqa: E402
from gshard.contrib.torch.exported import OPERATORS, name_of  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("torch operators")]


class Family(torch.nn.Module):
    def __init__(self, functions):
        super().__init__()
        self.functions = functions

    def forward(self, *inputs):
        return {name: function(*inputs) for name, function in self.functions.items()}


def numbers(*shape, seed=0, low=-2.0, high=2.0):
    torch.manual_seed(seed)
    return torch.rand(*shape) * (high - low) + low


def used(functions, *inputs):
    """The operators that a family is lowered by, after its results were compared with torch's."""
    family = Family(functions)
    function, params = from_torch(family, inputs)
    given = [jnp.asarray(x.numpy()) for x in inputs]
    found = jax.jit(function)(params, *given)
    for name, expected in family(*inputs).items():
        pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(found[name]), strict=True)
        for want, got in pairs:
            want = np.asarray(want)
            assert got.shape == want.shape, name
            kind = jax.dtypes.canonicalize_dtype(want.dtype)
            assert got.dtype == kind, (name, got.dtype, kind)
            np.testing.assert_allclose(got, want, 3e-6, 3e-6, err_msg=name)
    check_gradients(functions, function, params, inputs)
    return lowered_by(function)


def lowered_by(function):
    return {name_of(node) for node, step in function._graph._steps.items() if step}


def check_gradients(functions, function, params, inputs):
    """Gradients of all real results with respect to the first input, by both libraries."""
    if not inputs[0].is_floating_point():
        return
    x = inputs[0].clone().requires_grad_()
    results = Family(functions)(x, *inputs[1:])
    real = [n for n, r in results.items() if isinstance(r, torch.Tensor) and r.requires_grad]

    want = torch.autograd.grad(sum((results[n] ** 2).sum() for n in real), x)[0].numpy()

    def total(x, *rest):
        found = function(params, x, *rest)
        return sum((found[n] ** 2).sum() for n in real)

    got = jax.jit(jax.grad(total))(*(jnp.asarray(i.numpy()) for i in inputs))
    np.testing.assert_allclose(got, want, 1e-4, 1e-5 * max(1, np.abs(want).max()))


UNARY = """abs atan asinh ceil cos cosh erf erfc exp exp2 expm1 floor isfinite isinf isnan
logical_not neg round sigmoid sign sin sinh square tan tanh trunc relu"""
INSIDE = "acos asin atanh erfinv"  # of (-1, 1)
ABOVE = "acosh digamma lgamma log log10 log1p log2 reciprocal rsqrt sqrt"  # of (1, 3)
BINARY = "maximum minimum atan2 hypot fmod remainder copysign eq ne lt le gt ge"
COVERED: set[str] = set()


def test_elements():
    functions = {name: lambda x, y, name=name: getattr(torch, name)(x) for name in UNARY.split()}
    functions |= {n: lambda x, y, n=n: getattr(torch, n)(x / 2.1) for n in INSIDE.split()}
    functions |= {n: lambda x, y, n=n: getattr(torch, n)(x.abs() + 1.1) for n in ABOVE.split()}
    for name in BINARY.split():
        functions[name] = lambda x, y, name=name: getattr(torch, name)(x, y)
    functions |= {
        "add": lambda x, y: torch.add(x, y, alpha=3),
        "sub": lambda x, y: 2 - torch.sub(x, y, alpha=3),
        "floor_div": lambda x, y: torch.div(x, y, rounding_mode="floor"),
        "trunc_div": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        "pow": lambda x, y: x**3 + x.abs() ** y + 2**x,
        "clamp": lambda x, y: x.clamp(-1, 1) + x.clamp(min=0.5) + x.clamp(max=y),
        "where": lambda x, y: torch.where(x > y, x, 2.0),
        "gelu": lambda x, y: F.gelu(x) + F.gelu(x, approximate="tanh"),
        "silu": lambda x, y: F.silu(x) + F.elu(x) + F.leaky_relu(x) + F.softplus(x) + F.mish(x),
        "hard": lambda x, y: F.hardtanh(x) + F.hardswish(x) + F.hardsigmoid(x) + F.logsigmoid(x),
        "scalar": lambda x, y: x * torch.tensor(2.0) + 1,
        "both": lambda x, y: (x > 0) & (y > 0) | ~(x > 1) ^ torch.logical_or(x > 0, y > 1),
        "logical": lambda x, y: (torch.logical_and(x, y), torch.logical_xor(x > 0, y)),
        "rotary": lambda x, y: torch.view_as_complex(x.reshape(3, 2, 2)).abs(),
        "complex": lambda x, y: torch.view_as_real(torch.complex(x, y).conj() * torch.polar(y, x)),
    }
    COVERED.update(used(functions, numbers(3, 4), numbers(3, 4, seed=1, low=0.5)))


def test_integers():
    functions = {
        "bits": lambda x, y: (x & y, x | y, x ^ y, ~x, x << 1, x >> 1),
        "shifts": lambda x, y: (x.bitwise_left_shift(y), x.bitwise_right_shift(y)),
        "floor": lambda x, y: (x // y, torch.div(x, y, rounding_mode="trunc"), x % y, x / y),
        "pow": lambda x, y: (x**2, x.sum(), x.prod(0), x.cumsum(1), x.float().mean()),
        "any": lambda x, y: (x > 0).any(1), "all": lambda x, y: (x > 0).all(),
        "counts": lambda x, y: torch.histc(x.float(), bins=8, min=0, max=7),
    }  # fmt: skip
    torch.manual_seed(0)
    given = torch.randint(-7, 8, (4, 6)), torch.randint(1, 5, (4, 6))
    COVERED.update(used(functions, *given))


def test_reductions():
    functions = {
        "sum": lambda x: (x.sum(), x.sum((0, 2)), x.sum(1, keepdim=True)),
        "mean": lambda x: (x.mean(), x.mean(-1), x.double().mean((0, 1)).float()),
        "prod": lambda x: x.prod(1),
        "amax": lambda x: x.amax((0, 1)) + x.amin((0, 1)),
        "max": lambda x: (x.max(), x.max(1), x.min(2, keepdim=True), x.argmax(1), x.argmin()),
        "var": lambda x: x.var(1) + x.std(1, unbiased=False) + torch.var_mean(x, 1)[1],
        "norm": lambda x: torch.linalg.vector_norm(x, dim=1) + x.norm(p=1, dim=1),
        "cumulative": lambda x: x.cumsum(1) + x.cumprod(2) + x.logcumsumexp(0),
        "logsumexp": lambda x: x.logsumexp(1),
        "softmax": lambda x: x.softmax(1) + x.log_softmax(-1),
        "half": lambda x: x.bfloat16().softmax(1, dtype=torch.float32),
    }
    COVERED.update(used(functions, numbers(2, 3, 4)))


def test_shapes():
    functions = {
        "view": lambda x: x.reshape(6, -1).view(2, 3, 4).flatten(1).unflatten(1, (3, 4)),
        "permute": lambda x: x.permute(2, 0, -2).transpose(0, 1).mT,
        "expand": lambda x: x[:, None].expand(-1, 5, -1, 4) + x.unsqueeze(-1).squeeze().sum(),
        "slice": lambda x: x[:, 1:, ::2] + x[:, -2:, 1::2],
        "select": lambda x: x.select(1, -1) + x[1, 2],
        "split": lambda x: [*x.split(2, 1), *x.chunk(3, 2), *x.unbind(0), *x.split([1, 2], 1)],
        "cat": lambda x: torch.cat([x, x[:, :1]], 1),
        "stack": lambda x: torch.stack([x, 2 * x, x], 1) * torch.stack([x, x, x], -3),
        "empty": lambda x: torch.cat([torch.zeros(0), x[0, 0]]),
        "repeat": lambda x: x.repeat(2, 1, 1, 2) + x.repeat_interleave(2, 2).sum(),
        "flip": lambda x: x.flip(0, 2) + x.roll(1, 1) + x.roll((1, 2), (0, 2)),
        "diagonal": lambda x: x.diagonal(0, 1, 2) + x.tril(-1).sum() + x.triu().sum(),
        "pad": lambda x: F.pad(x, (1, 2, -1, 1), value=3.0),
        "reflect": lambda x: F.pad(x, (1, 2), "reflect") + F.pad(x, (2, 1), "replicate"),
        "unfold": lambda x: x.unfold(2, 2, 1),
        "make": lambda x: (torch.arange(5), torch.arange(1.0, 2.0, 0.25), torch.eye(3)),
        "like": lambda x: x.new_zeros(2, 3) + torch.full((2, 3), 2.5) + torch.ones_like(x[:, :, 0]),
        "linspace": lambda x: torch.linspace(0, 1, 5) + torch.empty(5).fill_(2.0),
        "inplace": lambda x: torch.zeros(2, 3, 4).copy_(x).mul_(2).clone(),
        "set": lambda x: _with_set(x),
    }
    COVERED.update(used(functions, numbers(2, 3, 4)))


def _with_set(x):
    y = x.clone()
    y[:, 1] = 0
    y[:, :, ::2] = x[:, :, 1::2]
    return y


def test_indexing():
    torch.manual_seed(0)
    rows, places = torch.randint(0, 6, (4,)), torch.randint(0, 6, (3, 5))
    functions = {
        "index": lambda x, r, p: (x[r], x[:, r], x[r, r - 2], x[p]),
        "negative": lambda x, r, p: x[-1 - r],
        "put": lambda x, r, p: x.index_put((r,), x[:4], accumulate=True),
        "select": lambda x, r, p: x.index_select(1, r) + x.take_along_dim(r[None], 1).sum(),
        "add": lambda x, r, p: x.index_add(0, r, x[:4], alpha=2) + x.index_fill(0, r, 1.0),
        "gather": lambda x, r, p: x.gather(0, p[:, :3]) + x.gather(1, p[:3, :3]),
        "scatter": lambda x, r, p: x.scatter_add(1, p, x[:3, :5]),
        "reduce": lambda x, r, p: x.scatter_reduce(1, p, x[:3, :5], "amax"),
        "value": lambda x, r, p: x.scatter(0, p[:1, :3], 7.0),
        "embedding": lambda x, r, p: F.embedding(p, x),
        "sort": lambda x, r, p: (x.sort(0)[0], x.sort(1, descending=True)),
        "argsort": lambda x, r, p: r.argsort(descending=True, stable=True),
        "topk": lambda x, r, p: (x.topk(2, 0), x.topk(3, 1, largest=False)),
        "fill": lambda x, r, p: x.masked_fill(x > 1, -torch.inf).exp(),
        "bucketize": lambda x, r, p: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
        "one_hot": lambda x, r, p: F.one_hot(r, 6),
    }  # fmt: skip
    COVERED.update(used(functions, numbers(6, 6), rows, places))


def test_products_and_losses():
    w, b = numbers(5, 4, seed=1), numbers(5, seed=2)
    targets = torch.tensor([1, 0, -100, 3])
    functions = {
        "linear": lambda x: F.linear(x, w, b),
        "matmul": lambda x: (x @ w.T, x[0, 0] @ w.T, x @ x.mT, x[0, 0] @ x[0, 1]),
        "addmm": lambda x: torch.addmm(b, x[0], w.T, alpha=2, beta=3),
        "baddbmm": lambda x: torch.baddbmm(x @ x.mT, x, x.mT),
        "mm": lambda x: torch.mm(x[0], w.T),
        "einsum": lambda x: torch.einsum("bsm,nm->bns", x, w),
        "layer_norm": lambda x: F.layer_norm(x, (3, 4), w[:3], w[2:]) + F.rms_norm(x, (4,), w[0]),
        "group_norm": lambda x: F.group_norm(x, 3, b[:3], b[2:]),
        "instance_norm": lambda x: F.instance_norm(x),
        "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        "masked": lambda x: F.scaled_dot_product_attention(x, x, x, x @ x.mT > 1),
        "one_key": lambda x: F.scaled_dot_product_attention(x, x[:1], x[:1]),
        "biased": lambda x: F.scaled_dot_product_attention(x, x, x, x @ x.mT, scale=0.3),
        "grouped": lambda x: F.scaled_dot_product_attention(
            x[None].repeat(1, 3, 1, 1), x[None], x[None], enable_gqa=True),
        "loss": lambda x: F.cross_entropy(x.reshape(-1, 4)[:4], targets),
        "smooth": lambda x: F.cross_entropy(x[0], targets[:3].abs() % 4, label_smoothing=0.1),
        "mse": lambda x: F.mse_loss(x, x * 0) + F.smooth_l1_loss(x, x * 0),
        "bce": lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid()),
        "cosine": lambda x: F.cosine_similarity(x, x.flip(0), 2) + F.normalize(x, dim=2)[..., 0],
    }  # fmt: skip
    COVERED.update(used(functions, numbers(2, 3, 4)))


def test_images():
    w, t = numbers(6, 2, 3, 3, seed=1), numbers(4, 3, 3, 3, seed=2)
    b = numbers(6, seed=3)
    functions = {
        "convolution": lambda x: F.conv2d(x, w, b, stride=2, padding=1, dilation=1, groups=2),
        "dilated": lambda x: F.conv2d(x, w[:, :2], padding="same", dilation=2, groups=2),
        "transposed": lambda x: F.conv_transpose2d(x, t, b[:3], 2, 1, 1),
        "grouped": lambda x: F.conv_transpose2d(x, t[:, :, :2], b, 2, (0, 1), groups=2),
        "conv1d": lambda x: F.conv1d(x[:, :, 0], w[:, :, 0], groups=2),
        "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
        "max_ceil": lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True),
        "avg_ceil": lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True),
        "avg_pool": lambda x: F.avg_pool2d(x, 3, 2, 1),
        "avg_inside": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        "adaptive": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
        "global": lambda x: F.adaptive_avg_pool2d(x, 1),
        "nearest": lambda x: F.interpolate(x, scale_factor=2),
        "bilinear": lambda x: F.interpolate(x, (9, 11), mode="bilinear"),
        "corners": lambda x: F.interpolate(x, (9, 11), mode="bilinear", align_corners=True),
        "pool3d": lambda x: F.max_pool3d(x, 2) + F.avg_pool3d(x, 2),
        "shuffle": lambda x: F.pixel_shuffle(x, 2),
    }  # fmt: skip
    COVERED.update(used(functions, numbers(2, 4, 7, 7)))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrences(kind):
    torch.manual_seed(0)
    layer = getattr(torch.nn, kind)(4, 3, num_layers=2, bidirectional=True, batch_first=True)
    plain = getattr(torch.nn, kind)(4, 3, bias=False)
    x = numbers(2, 5, 4)
    module = Family({"deep": layer, "plain": plain})
    module.layers = torch.nn.ModuleList([layer, plain])
    function, params = from_torch(module, x)
    found = function(params, jnp.asarray(x.numpy()))
    for want, got in zip(jax.tree.leaves(module(x)), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(got, want.detach().numpy(), 1e-5, 1e-6)
    COVERED.update(lowered_by(function))


def test_experts_of_hugging_face_are_ragged_products():
    """The operator that `experts_implementation="grouped_mm"` exports, without transformers."""
    x, w = numbers(10, 4), numbers(3, 4, 5, seed=1)
    ends = torch.tensor([3, 3, 10], dtype=torch.int32)
    got = OPERATORS["grouped_mm_fallback"](*(jnp.asarray(v.numpy()) for v in (x, w, ends)))
    want = torch.cat([x[:3] @ w[0], x[3:] @ w[2]])
    np.testing.assert_allclose(got, want.numpy(), 1e-5, 1e-6)


def test_every_operator_is_tested():
    """Those that draw numbers are tested with modules; others need transformers, or a GPU."""
    elsewhere = {"native_dropout", "bernoulli", "rand", "rand_like", "randn", "randn_like"}
    elsewhere |= {"_grouped_mm", "grouped_mm_fallback", "detach", "empty_permuted"}
    if len(COVERED) > 60:  # all the tests above have run in this process
        assert " ".join(sorted(set(OPERATORS) - COVERED - elsewhere)) == ""
