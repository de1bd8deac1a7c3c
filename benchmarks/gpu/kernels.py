"""What a GPU spent a step on: kernels from a profile, summed by kind."""

from __future__ import annotations

import collections
import glob
import re
import tempfile
from collections.abc import Callable

import jax

# The first pattern that is found in a kernel's name says what it is.
KINDS = (
    ("attention", r"flash_|cached_attention|fmha|cudnn.*sdpa|mha_"),
    ("normalization", r"norm_grads"),
    ("loss", r"vocabulary_grads"),
    ("to eight bits", r"eight_bits"),
    ("matrix products", r"grouped_product|nvjet|gemm|cutlass|cublas|xmma|wgmma|__dot|splitK"),
    ("copies", r"[Mm]emcpy|copy|Memset|memset|transpose"),
    ("reductions", r"reduce|input_reduce"),
    ("gathers and scatters", r"gather|scatter|sort"),
    ("element-wise", r"fusion|loop_|wrapped"),
)


def profile(run: Callable[[], object], steps: int) -> tuple[dict[str, float], list]:
    """Milliseconds a step by kind, and the 60 longest kernels: name, ms and calls a step."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                run()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(path)
        times: collections.Counter[str] = collections.Counter()
        calls: collections.Counter[str] = collections.Counter()
        for plane in data.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if "Stream" not in line.name:
                    continue
                for event in line.events:
                    times[event.name] += event.duration_ns
                    calls[event.name] += 1
    kinds: collections.Counter[str] = collections.Counter()
    for name, ns in times.items():
        kinds[kind_of(name)] += ns / 1e6 / steps
    longest = [(n[:90], ns / 1e6 / steps, calls[n] / steps) for n, ns in times.most_common(60)]
    return dict(kinds.most_common()), longest


def kind_of(name: str) -> str:
    """The kind of a kernel by its name."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "others")
