"""A model's arrays in files: their names, one file that others can read, and checks before use.

`weights.safetensors`: nothing in it is executed when it is read. The library checks the header
against the format: every byte belongs to one array, and every array has the bytes of its shape.

Weights may be in 8 bits: integers of -127 to 127, and a scale for each output of a product. What a
product sums over shares a scale, of every expert by itself, since a scale can be applied after the
sum. In the embeddings each token has one, which serves the lookup and the logits. Normalization and
routers keep their numbers: they are small, and a router's choices depend on them.

A checkpoint or release has a SHA-256 of every file, written with it. TensorStore notices some
damage by itself, but not a flipped bit in an uncompressed array or in the description of one: of
single flips, a third were restored as if nothing were wrong. Checksums are not signatures: whoever
changes a release can update them, so names, shapes and values of a release are checked too.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes  # noqa: F401  (numpy knows bfloat16 by it, also before JAX is imported)
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gshard.errors import UserError
from gshard.mt import atomic
from gshard.mt.batching.tokenizer import FILES
from gshard.mt.run import CONFIG, Run
from gshard.nn.config import Int8, TransformerConfig

T = TypeVar("T")
WEIGHTS = "weights.safetensors"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "I8": "int8"}
_SCALE = ".scale_of_8_bits"  # what an array's integers are multiplied by, under its name and this


def summed_axes(name: str) -> tuple[int, ...] | None:
    """The axes, from the end, that products with this weight sum over; None: it stays in floats."""
    *parents, leaf = name.split(".")
    if leaf == "table":
        return (-1,)
    attention = any(parent.endswith("attention") for parent in parents)
    if leaf in ("wq", "wk", "wv"):
        return (-3,)
    if leaf in ("wi", "wo"):
        return (-3, -2) if attention else (-2,)
    return None


class WeightsFile:
    """The arrays of a file by name, read when they are asked for, and its note.

    An array in 8 bits is read as the numbers that it stands for; `stored` gives the integers.
    """

    def __init__(self, path: Path):
        try:
            atomic.refuse_special(path)
            opened: Any = safe_open(path, framework="numpy")  # without types of its methods
            self._file = opened
            self.note: dict[str, str] = self._file.metadata() or {}
            arrays = {name: self._file.get_slice(name) for name in self._file.offset_keys()}
        except FileNotFoundError:
            raise UserError(f"{path} is missing") from None
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged: {error}") from None
        for name, array in arrays.items():
            if array.get_dtype() not in _DTYPES:
                kinds = " or ".join(_DTYPES)
                raise UserError(f"{path}: {name} holds {array.get_dtype()}, and not {kinds}")
            if (array.get_dtype() == "I8") != (f"{name}{_SCALE}" in arrays):
                raise UserError(f"{path}: {name} and its scale do not belong together")
        shapes = {name: tuple(array.get_shape()) for name, array in arrays.items()}
        self.shapes = {name: s for name, s in shapes.items() if not name.endswith(_SCALE)}
        self._scales = {name: shapes[name + _SCALE] for name in shapes if name + _SCALE in shapes}
        for name, scale in self._scales.items():
            shape = self.shapes[name]  # which the scale has, or 1 in a dim that shares one
            alike = len(scale) == len(shape) and all(
                one in (1, size) for one, size in zip(scale, shape, strict=True)
            )
            if not alike:
                raise UserError(f"{path}: {name} and its scale are not of one shape")

    def __getitem__(self, name: str) -> np.ndarray:
        found = self.stored(name)
        return found.astype(np.float32) if isinstance(found, Int8) else found

    def stored(self, name: str) -> np.ndarray | Int8:
        """An array as it is in the file."""
        values = self._file.get_tensor(name)
        if name not in self._scales:
            return values
        return Int8(values, self._file.get_tensor(name + _SCALE))

    def part(self, name: str, where: tuple[slice, ...]) -> np.ndarray:
        """A part of an array, as much of the file as that is."""
        if not where or 0 in self.shapes[name]:
            return self[name][where]
        values = self._file.get_slice(name)[where]
        if name not in self._scales:
            return values
        shared = zip(where, self._scales[name], strict=False)
        along = tuple(slice(None) if size == 1 else part for part, size in shared)
        return Int8(values, self._file.get_tensor(name + _SCALE)[along]).astype(np.float32)

    def not_finite(self) -> str:
        """The name of the first array with a value that is no number, or ""."""
        return next((name for name in self.shapes if not np.isfinite(self[name]).all()), "")


def write_weights(path: Path, arrays: Mapping[str, Any], note: Mapping[str, str]) -> None:
    """Write arrays of float32, bfloat16 or `Int8`, and a note, completely or not at all."""
    found = {}
    for name, array in arrays.items():
        if isinstance(array, Int8):
            found[name + _SCALE] = np.ascontiguousarray(array.scale)
            array = array.values
        found[name] = np.asarray(array, order="C")
    with atomic.new_file(path) as part:
        try:
            save_file(found, part, metadata=dict(note))
        except SafetensorError as error:
            if match := re.search(r"\(os error (\d+)\)", str(error)):  # a full disk, say
                raise OSError(int(match[1]), os.strerror(int(match[1])), str(path)) from None
            raise


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, as `encoder.dense.self_norm.scale`.

    An array that does not divide over its devices is saved by its logical value.
    """
    import jax  # which files of weights are read without

    from gshard import UnevenArray

    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda leaf: isinstance(leaf, UnevenArray)
    )
    return {
        _name(path): leaf.logical() if isinstance(leaf, UnevenArray) else leaf
        for path, leaf in leaves
    }


def unnamed(leaves: dict[str, Any], like: Any) -> Any:
    """The tree `like`, with the leaves that `named` gave."""
    import jax

    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[_name(path)], like)


def _name(path: Any) -> str:
    import jax

    return jax.tree_util.keystr(path, simple=True, separator=".") or "value"


def in_layer(
    load: Callable[[str], T], c: TransformerConfig, side: str, n: int
) -> Callable[[str], T]:
    """The arrays of layer `n` of a stack by their names within it."""
    kind = "sparse" if n % 2 else "dense"

    def array(name: str) -> T:
        if c.stacked:
            return load(f"{side}.{kind}.{name}")[n // 2]  # type: ignore[index]
        return load(f"{side}.{n // 2}.{kind}.{name}")

    return array


def has_experts(c: TransformerConfig, side: str, n: int) -> bool:
    """Whether layer `n` of a stack has experts."""
    placed = (n + 1) % c.experts_every == 0
    return bool(placed and c.experts and (side == "encoder" or c.experts_in == "both"))


def count_of(model: Any) -> int:
    """How many weights a model has."""
    import jax

    return sum(leaf.size for leaf in jax.tree.leaves(model))


CHECKSUMS = "checksums.json"
_WRITTEN_LATER = (CHECKSUMS, "commit_success.txt")  # the latter by Orbax, at its end
_STAMPED = "_CHECKPOINT_METADATA"  # gets the time at which it was complete
_THREADS = 8  # hashing leaves Python's lock to others


def write_checksums(folder: Path, names: Sequence[str] = ()) -> None:
    """Add the checksums of the files in `folder` to it: all of them, or those named."""
    atomic.write_json(folder / CHECKSUMS, _sums(folder, names or _files(folder)))


def damage(folder: Path, items: Sequence[str] = (), names: Sequence[str] = ()) -> str:
    """What is wrong with the files of `folder`, or "" if they are those that were written.

    With `items`, of its subfolders only those are looked at; with `names`, only those files.
    """
    try:
        written = atomic.read_object(folder / CHECKSUMS)
        expected = {name: str(digest) for name, digest in written.items()}
    except FileNotFoundError:
        return f"it has no {CHECKSUMS}"
    except (OSError, ValueError) as error:
        return f"{CHECKSUMS} cannot be read: {error}"

    def wanted(name: str) -> bool:
        if names:
            return name in names
        return not items or "/" not in name or name.split("/")[0] in items

    there = list(filter(wanted, _files(folder)))
    if absent := sorted({*filter(wanted, expected), *names} - set(there)):
        return f"{absent[0]} is missing"
    try:
        found = _sums(folder, there)
    except OSError as error:
        return str(error)
    for name, digest in found.items():
        if name not in expected:
            return f"{name} does not belong to it"
        if digest != expected[name]:
            return f"{name} is not as it was written"
    return ""


def _files(folder: Path) -> list[str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    return [name for name in names if name.split("/")[-1] not in _WRITTEN_LATER]


def _digest(path: Path) -> str:
    if path.name != _STAMPED:
        return atomic.checksum(path)
    data = path.read_bytes()
    try:
        described = dict(json.loads(data))
        described.pop("commit_timestamp_nsecs", None)
        data = json.dumps(described, sort_keys=True).encode()
    except (ValueError, TypeError):
        pass  # damaged, and so different
    return hashlib.sha256(data).hexdigest()


def _sums(folder: Path, names: Sequence[str]) -> dict[str, str]:
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(lambda name: _digest(folder / name), names)
        return dict(zip(names, digests, strict=True))


VOCABULARY = "vocabulary"
# What translations depend on; the card beside them may be edited.
VERIFIED = (WEIGHTS, CONFIG, *(f"{VOCABULARY}/{name}" for name in FILES))
DETECTOR = "detector.safetensors"  # of languages, by their n-grams
MADE = "release.json"  # what the release was made from, for programs
_LATER = (DETECTOR, MADE)  # which releases of earlier versions have not


def verified_in(folder: Path) -> tuple[str, ...]:
    """The files of a release whose checksums are written, and compared when it is loaded."""
    listed = atomic.known_object(folder / CHECKSUMS) or {}  # damage is told elsewhere
    later = (name for name in _LATER if name in listed or (folder / name).exists())
    return (*VERIFIED, *later)


def is_release(run: Run) -> bool:
    """Whether a folder is a release, and not a run with checkpoints."""
    return any((run.folder / name).is_file() for name in (WEIGHTS, CHECKSUMS))


def has_checksums(run: Run) -> bool:
    """Whether it was made by a version that writes them."""
    return (run.folder / CHECKSUMS).exists()


def release_problem(run: Run, *, values: bool = True) -> str:
    """What is wrong with a release of the model that its configuration describes, or "".

    Without `values`, whoever reads the weights has to look whether they are finite.
    """
    if has_checksums(run) and (found := damage(run.folder, names=verified_in(run.folder))):
        return f"{run.folder} is damaged: {found}"
    path = run.folder / WEIGHTS
    try:
        weights = WeightsFile(path)
    except UserError as error:
        return str(error)
    if weights.shapes != run.weight_shapes:
        return f"{path} holds the weights of another model than {run.folder} describes"
    if values and (name := weights.not_finite()):
        return not_finite(run, name)
    step = weights.note.get("step", "0")
    return "" if re.fullmatch("[0-9]{1,18}", step) else f"{path} is damaged: its step is {step!r}"


def not_finite(run: Run, name: str) -> str:
    """A sentence about a weight."""
    return f"{run.folder / WEIGHTS} is damaged: {name} holds values that are not finite"


def opened_release(run: Run, which: str) -> int:
    """The step of a release that is intact, apart from the values of its weights; else an error."""
    if why := release_problem(run, values=False):
        raise UserError(why)
    if not has_checksums(run):
        print(f"gshard: {unverifiable(run)}", file=sys.stderr)
    return step_of(run, which)


def step_of(run: Run, which: str) -> int:
    """The step of a release; an error if `which` names another."""
    step = int(WeightsFile(run.folder / WEIGHTS).note.get("step", "0"))
    if which not in ("best", "last", str(step)):
        raise UserError(
            f"no checkpoint {which!r} in {run.folder}: it is the release of step {step}"
        )
    return step


def unverifiable(run: Run) -> str:
    """A sentence about a release that an earlier version made."""
    return (
        f"{run.folder} has no {CHECKSUMS}, as releases of earlier versions: its weights are "
        "finite and of the right shapes, but whether they are those that were released is unknown"
    )
