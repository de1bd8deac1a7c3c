"""The programs of a study compiled at the same time, those of each run in a process of its own.

Compiling is work of the CPU, and one after another it takes as long as short trainings do. The
processes leave their programs in JAX's persistent cache, where the study finds them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from gshard.mt import hosts
from gshard.mt.batching.packing import Arrays, fill
from gshard.mt.config import DeviceConfig
from gshard.mt.decoding.translator import Translator
from gshard.mt.evaluation.baseline_group import compiled_group, stacked_keys
from gshard.mt.evaluation.baseline_plan import plan_baselines
from gshard.mt.evaluation.baselines import BaselineModels
from gshard.mt.evaluation.evaluate import EvaluateConfig, search_of
from gshard.mt.evaluation.store import tasks_of
from gshard.mt.run import Run
from gshard.mt.study.plan import Study, read_plan
from gshard.mt.training.prepare import setup_of
from gshard.mt.training.programs import Programs
from gshard.nn.config import Batch, TransformerConfig
from gshard.nn.transformer import Transformer

BASELINES = "baselines"
_LIMIT = 600  # seconds for one run's programs
_SMALL = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # beside each other and the one that trains


def compile_ahead(
    plan: Study, names: Sequence[str], processes: int, note: Callable[[str], None]
) -> None:
    """Compile for the prepared runs `names`, or "baselines"; a failure is only reported."""
    began = time.monotonic()

    def compiled(name: str) -> str:
        command = [sys.executable, "-m", __name__, str(plan.path), name]
        begin = time.monotonic()
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **_SMALL},
                timeout=_LIMIT,
                capture_output=True,
                text=True,
            )
        except subprocess.TimeoutExpired:
            return f"{name}: not compiled within {_LIMIT} s"
        if done.returncode:
            return f"{name}: not compiled ahead: {done.stderr.strip()[-1000:]}"
        return f"{name}: {done.stdout.strip()} in {time.monotonic() - begin:.1f} s"

    with ThreadPoolExecutor(processes) as pool:
        for line in pool.map(compiled, names):
            note(line)
    note(f"compiled ahead in {time.monotonic() - began:.1f} s")


def compile_run(run: Run, evaluate: EvaluateConfig) -> int:
    """Compile the training step, its first state, its dev loss and the search; how many."""
    programs = Programs(setup_of(run, shapes=True, keeps_step=True))
    return programs.compile_all(blank_batch(run)) + _compile_search(run, run.model_config, evaluate)


def compile_baselines(run: Run, plan: Study, which: int) -> int:
    """Compile what the groups of a study's baselines are trained by, group number `which` alone."""
    assert plan.baselines
    config, devices = plan.baselines.config, hosts.chosen(DeviceConfig())
    wanted = plan_baselines(run, tasks_of(run.tokenizer, plan.evaluate.languages), config)
    groups = BaselineModels(run, config, devices).groups(wanted)
    if which >= len(groups):
        return 0
    group = groups[which]
    programs = compiled_group(group[0].model, config.training, len(group), tuple(devices))
    state, keys_N = programs.state_like(), stacked_keys(range(len(group)))
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((len(group), group[0].rows, x.shape[1]), x.dtype),
        Batch(**blank_batch(run)),  # type: ignore[arg-type]  # NumPy's, for their shapes
    )
    nll_N = jax.ShapeDtypeStruct((len(group),), jnp.float32)
    limits_N = jax.ShapeDtypeStruct((len(group),), jnp.int32)
    programs.first.lower(keys_N).compile()
    programs.step.lower(state, batch, keys_N, limits_N).compile()
    programs.dev.lower(state.train.model, batch).compile()
    programs.keep_best.lower(state, nll_N, limits_N).compile()
    return 4 + _compile_search(run, group[0].model, plan.evaluate)


def _compile_search(run: Run, config: TransformerConfig, evaluate: EvaluateConfig) -> int:
    search = search_of(run, evaluate)
    model = jax.eval_shape(lambda: Transformer(config, jax.random.key(0)))
    translator = Translator(model, run.tokenizer, hosts.strategy(DeviceConfig()), search)
    for length in search.lengths:
        translator.lower_search(translator.full_rows, length).compile()
    return len(search.lengths)


def blank_batch(run: Run) -> Arrays:
    """A batch of padding, shaped as those of a run."""
    config = run.config.batch
    return fill([[]] * config.rows, (), config.source_length, config.target_length, languages=False)


def _main(path: str, name: str) -> None:
    plan = read_plan(path)
    hosts.start(plan.runs[0].config.devices.count)
    hosts.cache_programs()
    kind, _, which = name.partition(":")
    if kind == BASELINES:
        assert plan.baselines
        run = Run.open(plan.place(plan.baselines.of))
        run.make_vocabulary()
        count = compile_baselines(run, plan, int(which))
    else:
        run = Run.open(plan.place(name))
        run.make_vocabulary()
        count = compile_run(run, plan.evaluate)
    print(f"{count} programs")


if __name__ == "__main__":
    _main(*sys.argv[1:])
