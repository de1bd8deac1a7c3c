"""Forecasts of the family's training steps, with the paper's breakdown, and which members fit.

A batch is counted as the paper's table must be: source and target tokens together. On 128 cores a
step of 36 layers on 1M tokens of each side would need 1.16 s at the peak rate without any
rematerialization, and 1.55 s with it, but the table has 1.49 s.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import jax

import gshard
from gshard.errors import nearest
from gshard.forecast import Forecast, Hardware, Timed
from gshard.forecast import hardware as hardware_of
from gshard.forecast.collective import Topology
from gshard.forecast.report import OUTSIDE
from gshard.nn import FAMILY, Model, Strategy, adafactor, init_state, train_step
from gshard.nn.config import Dispatch

REMATERIALIZED = 36  # layers from which on the paper rematerializes
GROUP = 2048  # tokens of a group at most: beyond that the one-hot masks grow too large
PARTS = (
    "transformer layers",
    "MoE feed-forward",
    "gate einsums",
    "gating",
    "dispatch and combine",
    "gradients over devices",
    "embeddings and loss",
    "update",
    OUTSIDE,
)


@dataclass(frozen=True)
class Deployment:
    """A member of the family on some devices."""

    model: Model
    batch_tokens: int  # source and target together

    @property
    def devices(self) -> int:
        """How many."""
        return self.model.devices

    def lowered(self, hardware: str | Path | Hardware) -> gshard.Lowered:
        """Its training step with Adafactor, partitioned for abstract devices of this hardware."""
        chosen = hardware_of(hardware)
        key = (chosen.cost_model, chosen.compiler)  # all that partitioning and tracing depend on
        if key not in self._programs:
            self._programs[key] = self._lower(chosen)
        return self._programs[key]

    @functools.cached_property
    def _programs(self) -> dict[Any, gshard.Lowered]:
        return {}

    def _lower(self, hardware: Hardware) -> gshard.Lowered:
        model, optimizer = self.model, adafactor()
        strategy = Strategy(model.devices)
        key = jax.eval_shape(lambda: jax.random.key(0))
        state = jax.eval_shape(lambda key: init_state(model.config, optimizer, key), key)

        def step(state: Any, batch: Any, key: Any) -> Any:
            return train_step(state, batch, key, optimizer=optimizer, strategy=strategy)

        step_fn = gshard.jit(step, devices=model.devices, donate_argnums=0, hardware=hardware)
        return step_fn.lower(state, model.batch, key)

    def forecast(
        self, hardware: str | Path | Hardware, topology: Topology | None = None
    ) -> Forecast:
        """Its step, planned for this hardware and on it."""
        return self.lowered(hardware).forecast(hardware, topology)


def memory_parts(chosen: Deployment, found: Forecast) -> dict[str, int]:
    """The peak by what it is for: gradients are what has a weight's shape and is no argument."""
    (state, *_), _ = jax.tree.flatten(
        chosen.lowered(found.hardware).in_shardings, lambda x: hasattr(x, "model")
    )
    model = jax.tree.leaves(state.model)
    shapes = jax.tree.leaves(chosen.model.shapes)
    local = [(s.local_shape(w.shape), w.dtype.itemsize) for s, w in zip(model, shapes, strict=True)]
    weights = sum(math.prod(shape) * width for shape, width in local)
    texts = {"[" + ",".join(map(str, shape)) + "]" for shape, _ in local if len(shape) > 1}
    held = sum(h.bytes for h in found.memory.held) or 1
    share = sum(h.bytes for h in found.memory.held if h.shape[h.shape.index("[") :] in texts) / held
    gradients = round(share * found.memory.temporary)
    return {
        "weights": weights,
        "optimizer state and batch": found.memory.arguments - weights,
        "results that are not donated": found.memory.results - found.memory.donated,
        "gradients": gradients,
        "activations and other temporaries": found.memory.temporary - gradients,
    }


@functools.lru_cache(maxsize=64)
def plan(
    name: str,
    devices: int | None = None,
    batch_tokens: int | None = None,
    remat: str | None = None,
    dispatch: str = "einsum",
) -> Deployment:
    """A member on its own devices and batch, or on others.

    Rematerialization and dispatch are the paper's by default: models of 36 layers and more do not
    fit without rematerialization, and its breakdown is that of einsums.
    """
    if name not in FAMILY:
        known = ", ".join(FAMILY)
        raise ValueError(f"the model is {name!r}; known are {known}{nearest(name, FAMILY)}")
    member = FAMILY[name]
    count = member.devices if devices is None else devices
    tokens = member.batch_tokens if batch_tokens is None else batch_tokens
    check_devices(member, count)
    check_tokens(member, count, tokens)
    each = tokens // 2
    groups = None
    if member.config.experts:
        own = each // count
        groups = count * -(-own // GROUP)
    if dispatch not in get_args(Dispatch):
        allowed = ", ".join(map(repr, get_args(Dispatch)))
        raise ValueError(f"dispatch is {dispatch!r}; allowed are {allowed}")
    if remat is None:
        layers = member.config.encoder_layers + member.config.decoder_layers
        remat = "layer" if layers >= REMATERIALIZED else "none"
    if remat not in ("none", "layer"):
        raise ValueError(f"remat is {remat!r}; allowed are 'none' and 'layer'")
    changed = member.replace(groups=groups, dispatch=dispatch, remat=remat)
    model = replace(changed, devices=count, batch_tokens=each)
    return Deployment(model, tokens)


def check_devices(member: Model, devices: int) -> None:
    """Experts are split over all devices: there must be one for each at least."""
    experts = member.config.experts
    if devices < 1 or (experts and experts % devices):
        allowed = [d for d in range(1, experts + 1) if experts % d == 0] if experts else []
        near = min(allowed, key=lambda d: abs(d - devices), default=1)
        raise ValueError(
            f"devices is {devices}, but the {experts} experts of {member.name} are split over all "
            f"devices: their number must divide {experts}; the nearest that does is {near}"
        )


def check_tokens(member: Model, devices: int, tokens: int) -> None:
    """Sequences of both sides are split over all devices, evenly."""
    unit = 2 * member.length * devices
    if tokens < unit or tokens % unit:
        near = max(unit, round(tokens / unit) * unit)
        raise ValueError(
            f"the batch has {tokens:,} tokens, but sequences of {member.length} tokens on both "
            f"sides over {devices} devices take a multiple of {unit:,}; the nearest is {near:,}"
        )


def part_of(operator: Timed) -> str:
    """The paper's breakdown (figure 8), and what it leaves out."""
    if operator.collective == "all_to_all":
        return "dispatch and combine"
    if operator.collective and operator.phase == "backward":
        return "gradients over devices"
    named = (_PART_OF_SCOPE[name] for name in reversed(operator.scope) if name in _PART_OF_SCOPE)
    return next(named, "update" if operator.phase == "other" else "transformer layers")


_PART_OF_SCOPE = {  # by the scopes that `gshard.nn` names
    "experts": "MoE feed-forward",
    "moe": "gate einsums",
    "gating": "gating",
    "embedding": "embeddings and loss",
    "loss": "embeddings and loss",
    "update": "update",
}


@dataclass(frozen=True)
class Fitting:
    """A plan that fits, and its forecast."""

    plan: Deployment
    forecast: Forecast

    @property
    def tokens_per_second(self) -> float:
        """Source and target tokens that a second of training takes in."""
        return self.plan.batch_tokens * self.forecast.steps_per_second


def fitting(
    devices: int, machine: Hardware, tell: Callable[[str], None] = lambda _: None
) -> list[Fitting]:
    """What fits: the largest model first, then the most tokens per second.

    Each attempt takes as long as a lowering; `tell` is called before each.
    """
    found = []
    for name, member in FAMILY.items():
        try:
            check_devices(member, devices)
        except ValueError:
            continue
        found += list(_best(name, devices, machine, tell))
    if not found:
        raise ValueError(
            f"none of {', '.join(FAMILY)} fits on {devices} x {machine.name} with "
            f"{machine.memory / 1e9:.0f} GB each; more devices hold more experts"
        )
    return sorted(found, key=lambda f: (-f.plan.model.weights, -f.tokens_per_second))


def _best(
    name: str, devices: int, machine: Hardware, tell: Callable[[str], None]
) -> Iterator[Fitting]:
    """The largest batch that fits, without rematerialization and with it."""
    member = FAMILY[name]
    unit = 2 * member.length * devices
    for remat in ("none", "layer"):
        for times in (32, 8, 2):
            tokens = unit * times
            try:
                check_tokens(member, devices, tokens)
            except ValueError:
                continue
            tell(f"partitioning {name} with {tokens:,} tokens, remat {remat}")
            chosen = plan(name, devices, tokens, remat, dispatch="index")
            forecast = chosen.forecast(machine)
            if forecast.fits:
                yield Fitting(chosen, forecast)
                break
            state = forecast.memory.arguments
            if state > machine.memory:
                return  # no batch is small enough
