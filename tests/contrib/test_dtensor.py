"""Plans for PyTorch, and what DTensor itself sends for them, beside gshard's own programs."""

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402

import gshard  # noqa: E402
from gshard.autosharding.layout.for_torch import ForTorch, for_torch  # noqa: E402
from gshard.contrib.torch import from_torch  # noqa: E402
from gshard.contrib.torch.dtensor import dtensor_bytes  # noqa: E402

MESH = {"a": 8}
ROWS = 2048  # enough that weights are the cheaper ones to send


@pytest.fixture(scope="module")
def exported():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64, bias=False))
    function, params = from_torch(module, torch.zeros(ROWS, 64))
    return module, function, params


def lowered(exported, annotate):
    _, function, params = exported

    def step(params, x):
        params, x = annotate(params, x)
        loss = jax.grad(lambda p: (function(p, x) ** 2).mean())
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, loss(params))

    return gshard.jit(step, devices=8).lower(params, jax.ShapeDtypeStruct((ROWS, 64), np.float32))


def of_dtensor(exported, plan):
    given = torch.zeros(ROWS, 64)
    return dtensor_bytes(exported[0], plan, lambda m, x: (m(x) ** 2).mean(), given)


def test_data_parallel_sends_the_same_bytes(exported):
    program = lowered(exported, lambda p, x: (p, gshard.split(x, 0, 8)))
    plan = for_torch(program.in_info, program.in_shardings, MESH)
    assert plan.data == ("a",)
    assert str(plan.placements["0.weight"]) == "(Replicate(),)"
    found = of_dtensor(exported, plan)
    assert found == {"all_reduce": sum(c.bytes for c in program.collectives)}
    assert 'replicate(model, device_mesh=mesh["a"])' in str(plan)


def test_fully_sharded_sends_the_same_bytes(exported):
    program = lowered(exported, lambda p, x: (gshard.fsdp(p, 8), gshard.split(x, 0, 8)))
    plan = for_torch(program.in_info, program.in_shardings, MESH)
    assert str(plan.placements["0.weight"]) == "(Shard(dim=0),)"
    assert str(plan.placements["2.weight"]) == "(Shard(dim=1),)"
    found = of_dtensor(exported, plan)
    assert found.keys() >= {"all_gather_into_tensor", "reduce_scatter_tensor"}
    assert sum(found.values()) == sum(c.bytes for c in program.collectives)
    text = str(plan)
    assert 'fully_shard(model, mesh=mesh["a"])' in text
    assert "shard_placement_fn: 2.weight by Shard(1)" in text


def test_tensor_parallel_sends_at_most_the_bytes_of_dtensor(exported):
    rules = {"0.*": 0, "2.weight": 1}
    program = lowered(exported, lambda p, x: (gshard.tensor_parallel(p, rules, 8), x))
    plan = for_torch(program.in_info, program.in_shardings, MESH)
    assert plan.data == ()
    found = of_dtensor(exported, plan)
    once = 2 * 7 * ROWS * 64 * 4 // 8
    assert found == {"all_reduce": 2 * once}  # DTensor reduces the result again for its gradient
    assert 0 < sum(c.bytes for c in program.collectives) <= 2 * once
    assert '    "0": ColwiseParallel(),\n    "2": RowwiseParallel(),' in str(plan)


def test_a_layout_prints_its_plan(exported, capsys):
    _, function, params = exported

    def step(params, x):
        loss = jax.grad(lambda p: (function(p, x) ** 2).mean())
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, loss(params))

    given = jax.ShapeDtypeStruct((ROWS, 64), np.float32)
    layout = gshard.auto(step, params, given, devices=8, hardware="h100", seconds=1)
    plan = layout.to_torch()
    assert capsys.readouterr().out == f"{plan}\n"
    assert plan.placements.keys() == params.keys()
    assert set(plan.inputs) == {"[1]"}


def test_layers_that_are_alike_are_one_line():
    placed = {f"layers.{n}.up.weight": (Shard(0),) for n in range(4)}
    text = str(ForTorch(MESH, {**placed, "head.weight": (Shard(1),)}, {}, ()))
    assert '"layers.*.up": ColwiseParallel()' in text
    assert '"layers.*.up.weight": [Shard(0)]' in text
    assert "layers.1" not in text
