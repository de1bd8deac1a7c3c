"""Modules as people write them in plain PyTorch: a training step of each, partitioned over 8."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

import gshard  # noqa: E402
from gshard.contrib.torch import from_torch  # noqa: E402

pytestmark = pytest.mark.slow


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.down(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.ReLU(True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layers = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.layers(self.pool(self.stem(x)))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(1, 17, 16))
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.down2 = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.up1 = nn.ConvTranspose2d(16, 8, 2, 2)
        self.up2 = nn.Upsample(scale_factor=2, mode="bilinear")
        self.head = nn.Conv2d(16, 10, 1)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        up = self.up1(two) + self.up2(two)[:, :8]
        return self.head(torch.cat([one, up], 1)).mean((2, 3))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.lstm = nn.LSTM(16, 16, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 10)

    def forward(self, tokens):
        x, (h, _) = self.lstm(self.embed(tokens))
        return self.head(x.mean(1) + torch.cat([h[-2], h[-1]], -1))


@pytest.mark.parametrize("kind", [ResNet, ViT, UNet, Words])
def test_a_training_step_is_that_of_torch_and_of_one_device(kind):
    torch.manual_seed(0)
    module = kind().train()
    images = torch.randn(16, 3, 32, 32)
    x = torch.randint(0, 32, (16, 12)) if kind is Words else images
    targets = torch.arange(16) % 10
    function, params = from_torch(module, x)

    def step(params, x, targets):
        def loss(p):
            scores = jax.nn.log_softmax(function(p, x))
            return -jnp.take_along_axis(scores, targets[:, None], 1).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    given = params, jnp.asarray(x.numpy()), jnp.asarray(targets.numpy())
    alone, value = jax.jit(step)(*given)
    split = gshard.jit(lambda p, x, t: step(p, gshard.split(x, 0, 8), t))
    lowered = split.lower(*given)
    found, over_8 = lowered.compile()(*given)
    assert sum(c.bytes for c in lowered.collectives) > 0
    assert abs(float(over_8) - float(value)) < 1e-5

    expected = F.cross_entropy(module(x), targets)
    expected.backward()
    assert abs(float(value) - expected.item()) < 1e-5
    for name, parameter in module.named_parameters():
        want = (parameter - 0.1 * parameter.grad).detach().numpy()
        np.testing.assert_allclose(alone[name], want, 1e-4, 1e-5, err_msg=name)
        np.testing.assert_allclose(found[name], want, 1e-4, 1e-5, err_msg=name)
