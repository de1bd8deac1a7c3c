"""What DTensor itself sends for a plan: a training step on a fake process group, counted."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from gshard.autosharding.layout.for_torch import ForTorch

# How much of a tensor each of n devices sends, as in gshard's own count.
_SENT = {
    "all_gather_into_tensor": lambda n: n - 1,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_to_all_single": lambda n: (n - 1) / n,
}


class _Counted(TorchDispatchMode):  # type: ignore[misc]  # torch may not be installed
    """The bytes of the collectives that run, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: its collectives come here as operators on tiles
        kind = func._schema.name.removeprefix("_c10d_functional::")
        if func._schema.name.startswith("_c10d_functional::") and kind in _SENT:
            members = dist.get_world_size(_group_of(func, args))
            self.sent[kind] += int(args[0].numel() * args[0].itemsize * _SENT[kind](members))
        return func(*args, **(kwargs or {}))


def _group_of(func: Any, args: Any) -> Any:
    names = [argument.name for argument in func._schema.arguments]
    return torch.distributed.distributed_c10d._resolve_process_group(
        args[names.index("group_name")]
    )


@contextlib.contextmanager
def _fake_group(devices: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("a process group is initialized: count the bytes of a plan without one")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    try:
        yield
    finally:
        dist.destroy_process_group()


def dtensor_bytes(
    module: torch.nn.Module, plan: ForTorch, loss: Any, *inputs: torch.Tensor
) -> dict[str, int]:
    """The bytes that a device sends in a training step of DTensor under `plan`, by collective.

    `loss(module, *inputs)` is differentiated. No device is needed, and values are meaningless. The
    inputs are those of `plan.inputs`, in that order. Weights split along an axis of `plan.data` are
    gathered before their use and their gradients scattered, as FSDP does.
    """
    devices = math.prod(plan.mesh.values())
    # DTensor has no rule for the CPU's own attention.
    plain = sdpa_kernel(SDPBackend.MATH)
    with _fake_group(devices), implicit_replication(), plain, _Counted() as counted:
        mesh = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
        given = [
            distribute_tensor(x, mesh, placed, src_data_rank=None)
            for x, placed in zip(inputs, plan.inputs.values(), strict=True)
        ]
        weights = {
            name: distribute_tensor(p.detach(), mesh, plan.placements[name], src_data_rank=None)
            for name, p in module.named_parameters()
        }
        counted.sent.clear()
        used = {}
        for name, weight in weights.items():
            pairs = zip(plan.mesh, weight.requires_grad_().placements, strict=True)
            whole = [Replicate() if axis in plan.data else placed for axis, placed in pairs]
            used[name] = weight.redistribute(placements=whole)
        named = {f"module.{name}": weight for name, weight in used.items()}
        result = torch.func.functional_call(_Loss(module, loss), named, tuple(given))
        gradients = torch.autograd.grad(result, list(weights.values()))
        for gradient, weight in zip(gradients, weights.values(), strict=True):
            gradient.redistribute(placements=weight.placements)
    return dict(counted.sent)


class _Loss(torch.nn.Module):  # type: ignore[misc]  # as above
    def __init__(self, module: torch.nn.Module, loss: Any):
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, *inputs: Any) -> Any:
        return self.loss(self.module, *inputs)
