"""Which members of the family fit on some devices, with which batch and rematerialization."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gshard.forecast import Forecast, Hardware, hardware
from gshard.models.family import Deployment, check_devices, check_tokens, plan
from gshard.nn import FAMILY


@dataclass(frozen=True)
class Fitting:
    """A plan that fits, and its forecast."""

    plan: Deployment
    forecast: Forecast

    @property
    def tokens_per_second(self) -> float:
        """Source and target tokens that a second of training takes in."""
        return self.plan.batch_tokens * self.forecast.steps_per_second


def parse(text: str) -> tuple[int, Hardware]:
    """`64 x h100` as a number of devices and what they are."""
    match = re.fullmatch(r"\s*(\d+)\s*[x*]\s*(\S+)\s*", text)
    if match is None:
        raise ValueError(f"the devices are {text!r}; write a number and a name, as in '64 x h100'")
    return int(match[1]), hardware(match[2])


def fitting(
    devices: int, machine: Hardware, tell: Callable[[str], None] = lambda _: None
) -> list[Fitting]:
    """What fits: the largest model first, then the most tokens a second.

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
