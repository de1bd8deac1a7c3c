"""`gshard compare` on five public training steps, as their authors wrote them.

    python -m benchmarks.public_steps FOLDER             the table
    python -m benchmarks.public_steps FOLDER --markdown  the table of docs/howto/compare.md
    python -m benchmarks.public_steps FOLDER --only lm1b the screen of one

FOLDER has clones of jax (jax-ml/jax), flax (google/flax), equinox (patrick-kidger/equinox) and
dm-haiku (google-deepmind/dm-haiku), whose files are imported, or run up to the step if they are
notebooks. Packages that only read data or write logs are replaced by mocks where they are not
installed. What a script's main function does, is done here: the model of its default size, the
arguments of a step, the batch on 8 devices along its first dim. Haiku itself has to be installed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

DATA_AND_LOGS = (
    "clu", "grain", "ml_collections", "sentencepiece", "tensorflow", "tensorflow_datasets",
    "tensorflow_text", "tensorboard", "flax.metrics",
)  # fmt: skip


@contextlib.contextmanager
def importing(folder: Path) -> Iterator[None]:
    """A context in which modules of a folder are found, and those of data and logs are mocks."""
    missing = {}
    for name in DATA_AND_LOGS:
        if importlib.util.find_spec(name.split(".")[0]) is None or name == "flax.metrics":
            missing[name] = mock.MagicMock(ConfigDict=types.SimpleNamespace)
            missing[name].__path__ = []
    inner = {f"{n}.{i}": m for n, m in missing.items() for i in ("metric_writers", "tensorboard")}
    before = set(sys.modules)
    with mock.patch.dict(sys.modules, {**missing, **inner}):
        sys.path.insert(0, str(folder))
        try:
            yield
        finally:
            sys.path.remove(str(folder))
            for name in set(sys.modules) - before:
                module = sys.modules[name]
                if str(folder) in str(getattr(module, "__file__", "")):
                    del sys.modules[name]


def on_devices(tree: Any, *spec: str, kind: Any = AxisType.Auto) -> Any:
    """Arrays on a mesh of 8 devices."""
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(kind,))
    return jax.device_put(tree, NamedSharding(mesh, P(*spec)))


def spmd_mnist(folder: Path) -> tuple[Any, tuple[Any, ...]]:
    with importing(folder / "jax" / "examples"):
        module = importlib.import_module("spmd_mnist_classifier_fromscratch")
    vars(module)["step_size"] = 0.001  # its main script's global
    params = module.init_random_params(0.1, [784, 1024, 1024, 10])
    batch = np.zeros((128, 784), np.float32), np.zeros((128, 10), np.float32)
    explicit = functools.partial(on_devices, kind=AxisType.Explicit)
    params = jax.tree.map(np.float32, params)
    return module.train_step, (explicit(params), explicit(batch, "batch"))


def lm1b(folder: Path) -> tuple[Any, tuple[Any, ...]]:
    importlib.import_module("flax.training.checkpoints")  # looks whether TensorFlow is installed
    with importing(folder / "flax" / "examples" / "lm1b"):
        train = importlib.import_module("train")
        models, utils = (importlib.import_module(name) for name in ("models", "utils"))
        config = importlib.import_module("configs.default").get_config()
    settings = models.TransformerConfig(
        vocab_size=config.vocab_size, output_vocab_size=config.vocab_size, dtype=jnp.bfloat16,
        logits_via_embedding=config.logits_via_embedding, emb_dim=config.emb_dim,
        num_heads=config.num_heads, num_layers=config.num_layers, qkv_dim=config.qkv_dim,
        mlp_dim=config.mlp_dim, max_len=config.max_eval_target_length, deterministic=False,
        dropout_rate=config.dropout_rate, attention_dropout_rate=config.attention_dropout_rate,
        decode=False, kernel_init=train.nn.initializers.xavier_uniform(),
        bias_init=train.nn.initializers.normal(stddev=1e-6),
    )  # fmt: skip
    mesh = Mesh(utils.create_device_mesh(config), config.mesh_axes)
    rate = train.create_learning_rate_schedule(config.learning_rate, config.warmup_steps)
    optimizer = train.optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)
    model = models.TransformerLM(settings.replace(deterministic=True))
    state, shardings = utils.setup_initial_state(
        model, optimizer, config, jax.random.PRNGKey(0), mesh
    )
    step = jax.jit(
        train.train_step,
        in_shardings=(shardings, NamedSharding(mesh, P(config.data_sharding)), None),
        out_shardings=(shardings, None),
        static_argnums=(2, 3, 4),
        donate_argnums=0,
    )
    rows = 8 * config.per_device_batch_size, config.max_target_length
    batch = {"inputs": jnp.ones(rows, jnp.int32)}
    return step, (state, batch, settings, rate, 0.0, jax.random.PRNGKey(1))


def parallelism(folder: Path) -> tuple[Any, tuple[Any, ...]]:
    path = folder / "equinox" / "docs" / "examples" / "parallelism.ipynb"
    found = run_notebook(path, until="train_step")
    model, state = found["eqx"].filter_shard(
        (found["model"], found["opt_state"]), found["model_sharding"]
    )
    batch = found["xs"][: found["batch_size"]], found["ys"][: found["batch_size"]]
    return found["train_step"], (model, state, *jax.device_put(batch, found["data_sharding"]))


def run_notebook(path: Path, until: str) -> dict[str, Any]:
    """The names of a notebook after the cell that defines `until`; tracebacks name its cells."""
    found: dict[str, Any] = {"__name__": path.stem}
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "code" and until not in found:
            exec(compile("".join(cell["source"]), f"{path.name}[{number}]", "exec"), found)
    return found


def nnx_mnist(folder: Path) -> tuple[Any, tuple[Any, ...]]:
    with importing(folder / "flax" / "examples" / "mnist"):
        train = importlib.import_module("train")
    nnx = train.nnx
    model = train.CNN(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, train.optax.sgd(0.1, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    model.train()
    batch = {"image": jnp.zeros((128, 28, 28, 1)), "label": jnp.zeros(128, jnp.int32)}
    return train.train_step, (model, optimizer, metrics, on_devices(batch, "batch"), nnx.Rngs(0))


def haiku_transformer(folder: Path) -> tuple[Any, tuple[Any, ...]]:
    names = ("examples", "examples.transformer")  # gshard's own examples are a package, too
    kept = {n: sys.modules.pop(n) for n in [*sys.modules] if n.partition(".")[0] == "examples"}
    with importing(folder / "dm-haiku"):
        train = importlib.import_module(f"{names[1]}.train")
        data = train.dataset.Batch(*np.ones((2, 128, train.SEQUENCE_LENGTH), np.int32))
        state = train.init(jax.random.PRNGKey(0), data)
    sys.modules.update(kept)
    return train.update, (on_devices(state), on_devices(data, "batch"))


STEPS: dict[str, tuple[str, Callable[[Path], tuple[Any, tuple[Any, ...]]]]] = {
    "lm1b": ("Flax, `examples/lm1b/train.py:train_step`, FSDP", lm1b),
    "spmd_mnist": (
        "JAX, `examples/spmd_mnist_classifier_fromscratch.py:train_step`",
        spmd_mnist,
    ),
    "parallelism": ("Equinox, `docs/examples/parallelism.ipynb:train_step`", parallelism),
    "nnx_mnist": ("Flax NNX, `examples/mnist/train.py:train_step`", nnx_mnist),
    "haiku": ("Haiku, `examples/transformer/train.py:update`", haiku_transformer),
}


def main() -> None:
    from gshard.comparing.comparison import compare
    from gshard.comparing.step import Step
    from gshard.explanation.hlo import collectives_of_hlo
    from gshard.graph.readable import duration, size

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--only", choices=STEPS)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds for gshard.auto")
    given = parser.parse_args()
    rows = ["| step | XLA's HLO | XLA | gshard | faster by forecast |", "|---|---:|---:|---:|---:|"]
    for name in [given.only] if given.only else STEPS:
        title, made = STEPS[name]
        step = Step(*made(given.folder.resolve()))
        found = compare(step, given.hardware, given.budget)
        text = step.by_xla().as_text() or ""
        in_hlo = sum(c.total_bytes for c in collectives_of_hlo(text, found.devices))
        xla, own = found.programs[:2]
        if not given.markdown:
            print(f"\n{title}\n{found}", flush=True)
        rows.append(
            f"| {title} | {size(in_hlo)} | {size(xla.sent)}, {duration(xla.seconds)} | "
            f"{size(own.sent)}, {duration(own.seconds)} | {xla.seconds / own.seconds:.2f} |"
        )
    if not given.only:
        print("\n".join(rows))


if __name__ == "__main__":
    main()
