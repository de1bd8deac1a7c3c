"""What equations say of themselves: their source line, reason, and how often they run."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import cond_p, while_p

from gshard._jax import exclude_frames, is_current, source_info_util, without_mesh
from gshard.graph.caching import cached
from gshard.graph.reason import NO_REASON, Reason
from gshard.graph.regions import bodies, runs_of

_PACKAGE = Path(__file__).parents[1]
_UNLIKELY = "gshard unlikely"
TICKS = "gshard ticks"  # begins the marks of `graph.source`
_IS_LIBRARY = "site-packages"  # in the path of a file that is not the user's own
MODULE = "module: "  # and its path: the function of a frame that has the line of a torch model

# gshard's frames are not user code, except those of these packages.
_PROGRAMS = ("mt", "nn", "models")
for _path in _PACKAGE.iterdir():
    if _path.name not in _PROGRAMS:
        exclude_frames(_path)


def source_of(eqn: JaxprEqn) -> str:
    """`file:line` of the user's operation, past the libraries in between.

    An annotation by a keyword of `gshard.jit` has no line: then it is the keyword.
    """
    line = _user_line(eqn.source_info)
    keyword = str(eqn.params.get("annotation", "")).partition(":")[0] if line == "unknown" else ""
    return keyword if keyword.endswith("_shardings") else line


def here() -> str:
    """`file:line` of the user's code that is running."""
    return _user_line(source_info_util.current())


def warn_once(line: str, message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at a line of the user's, `file:line`, once of each kind."""
    if (line, category) not in _warned:
        _warned.add((line, category))
        file, _, number = line.rpartition(":")
        warnings.warn_explicit(message, category, file or line, int(number) if file else 0)


_warned: set[tuple[str, type[Warning]]] = set()


def site_of(eqn: JaxprEqn) -> tuple[str, str]:
    """`file:line` of the user's operation, and the name of its function."""
    frame = _user_frame(eqn.source_info.traceback)
    return _user_line(eqn.source_info), frame.function_name.removeprefix(MODULE) if frame else ""


def span_of(eqn: JaxprEqn) -> tuple[str, int, int, int, int] | None:
    """The file of the user's operation and where in it: first line and column, last ones."""
    frame = _user_frame(eqn.source_info.traceback)
    if frame is None:
        return None
    ends = frame.start_line, frame.start_column, frame.end_line, frame.end_column
    return frame.file_name, *ends


def _user_line(source_info: Any) -> str:
    frame = _user_frame(source_info.traceback)
    known = [(frame.file_name, frame.start_line, frame.function_name)] if frame else []
    return shown_line(known)


def shown_line(frames: Sequence[tuple[str, int, str]]) -> str:
    """`file:line` of the user's among stack frames, the innermost first; "unknown" without any.

    A frame is its file, line and function. A line of a torch model is followed by its module.
    """
    of_model = [f for f in frames if f[2].startswith(MODULE)]
    own = [f for f in frames if _IS_LIBRARY not in f[0]]
    path, line, function = (of_model or own or frames or [("", 0, "")])[0]
    if not of_model:
        return f"{shown_path(path)}:{line}" if path else "unknown"
    path, module = shown_path(path), function.removeprefix(MODULE)
    path = os.path.basename(path) if _IS_LIBRARY in of_model[0][0] else path
    return f"{path}:{line}" + (f", {module}" if module else "")


def shown_path(path: str) -> str:
    """A path relative to the working folder if it is inside it, a library's from its name on."""
    try:
        return _from_folder(path, os.getcwd())
    except FileNotFoundError:  # the working folder was removed
        return path


@cached
def _from_folder(path: str, folder: str) -> str:
    if _IS_LIBRARY in path:  # `linecache` finds it, as Python does
        return path.rpartition(_IS_LIBRARY + os.sep)[2]
    if path.startswith(str(_PACKAGE) + os.sep):  # gshard's own models
        folder = str(_PACKAGE.parent)
    return os.path.relpath(path, folder) if path.startswith(folder + os.sep) else path


@cached
def _user_frame(traceback: Any) -> Any:
    frames = list(source_info_util.user_frames(traceback))
    of_model = [f for f in frames if f.function_name.startswith(MODULE)]
    own = [f for f in frames if _IS_LIBRARY not in f.file_name]
    return (of_model or own or frames or [None])[0]


def at_line_of(caller: JaxprEqn, eqn: JaxprEqn) -> JaxprEqn:
    """`eqn`, inlined from the call `caller`: with its name scopes, and its line if that is closer.

    JAX traces jitted functions of libraries separately from the code that calls them.
    """
    info, outer = eqn.source_info, caller.source_info
    if outer.name_stack.stack:
        info = info.replace(name_stack=outer.name_stack + info.name_stack)
    if _closeness(info.traceback) < _closeness(outer.traceback):
        info = info.replace(traceback=outer.traceback)
    return eqn if info is eqn.source_info else eqn.replace(source_info=info)


@cached
def _closeness(traceback: Any) -> int:
    """2 for a line of the user's own code, 1 for one of a library's, 0 for none."""
    frame = _user_frame(traceback)
    return 0 if frame is None else 1 + (_IS_LIBRARY not in frame.file_name)


def reason_of(eqn: JaxprEqn) -> Reason:
    """The reason of a node, or the one that `because` attached to an operation; or `NO_REASON`."""
    if "node" in eqn.params:
        return eqn.params["node"].reason
    for part in reversed(eqn.source_info.name_stack.stack):
        found = Reason.decoded(getattr(part, "name", ""))
        if found:
            return found
    return NO_REASON


def scopes_of(eqns: Iterable[JaxprEqn]) -> tuple[str, ...]:
    """The names of the user's `jax.named_scope`s around operations, the outermost first."""
    parts = [part for eqn in eqns for part in eqn.source_info.name_stack.stack]
    named = [part.name for part in parts if isinstance(part, source_info_util.Scope)]
    own = (_UNLIKELY, TICKS)
    return tuple(n for n in named if not n.startswith(own) and Reason.decoded(n) is None)


def phase_of(eqns: Iterable[JaxprEqn]) -> str:
    """Forward or backward, from the marks that differentiation leaves in names."""
    names = [str(e.source_info.name_stack) for e in eqns]
    if any("transpose(" in n for n in names):
        return "backward"
    return "forward" if any("jvp(" in n for n in names) else "other"


def because(reason: Reason) -> contextlib.AbstractContextManager[None]:
    """Attach `reason` to the operations made inside; profilers show it too, in the op's name."""
    return jax.named_scope(reason.encoded())


def unlikely() -> contextlib.AbstractContextManager[None]:
    """Mark loops and branches made inside as run only for very unbalanced data."""
    return jax.named_scope(_UNLIKELY)


def trips(eqn: JaxprEqn) -> int:
    """How often a body of this equation runs; as for balanced data if that depends on data."""
    marks = (getattr(part, "name", "") for part in eqn.source_info.name_stack.stack)
    return 0 if _UNLIKELY in marks else runs_of(eqn)


class on_behalf_of:  # noqa: N801  (a context, for every equation: a generator would be slower)
    """Operations made inside get the source line and name scope of `eqn`, but not its mesh."""

    __slots__ = ("inner", "user")

    def __init__(self, eqn: JaxprEqn):
        info = eqn.source_info
        name_stack = source_info_util.current_name_stack()
        if info.name_stack.stack:
            name_stack = name_stack + info.name_stack
        self.user = source_info_util.user_context(info.traceback, name_stack=name_stack)
        self.inner = () if is_current(eqn.ctx) else (eqn.ctx.manager, without_mesh())

    def __enter__(self) -> None:
        self.user.__enter__()
        for context in self.inner:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self.inner):
            context.__exit__(*error)
        self.user.__exit__(*error)


# ------------------------------------------------ runs that a pipeline's schedule chooses


class Ticks(NamedTuple):
    """The branches of a conditional in a loop, and in how many runs of the loop they run.

    `own` is how often one device takes each. `together` are the branches that devices are in at the
    same time, as the bits of a number, and how often. Both are in `out_of` runs of the loop around
    them, by default as many as `together` has.
    """

    own: tuple[int, ...]
    together: Mapping[int, int]
    out_of: int = 0

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Mark the conditionals and loops made inside."""
        numbers = (self.own, self.together.keys(), self.together.values(), (self.out_of,))
        return jax.named_scope("|".join([TICKS, *(".".join(map(str, n)) for n in numbers)]))

    @staticmethod
    def of(eqn: JaxprEqn) -> Ticks | None:
        """The ticks of a conditional, or of such a loop (its condition, its body)."""
        stack = eqn.source_info.name_stack.stack if eqn.primitive in (cond_p, while_p) else ()
        for part in reversed(stack):
            tag, *parts = getattr(part, "name", "").split("|")
            if tag == TICKS:
                own, bits, counts, (out_of,) = (tuple(map(int, text.split("."))) for text in parts)
                return Ticks(own, dict(zip(bits, counts, strict=True)), out_of)
        return None

    @property
    def runs(self) -> int:
        """How often the loop runs."""
        return self.out_of or sum(self.together.values())

    def slowest(self, costs: Sequence[float]) -> list[int]:
        """In how many runs of the loop each branch is the one that the others wait for."""
        found = [0] * len(costs)
        for bits, count in self.together.items():
            running = [branch for branch in range(len(costs)) if bits >> branch & 1]
            found[max(running, key=costs.__getitem__)] += count
        return found


def runs_inside(eqn: JaxprEqn, times: int) -> list[int]:
    """How often a device runs each program inside an equation, which it runs `times` times."""
    if (ticks := Ticks.of(eqn)) is None:
        return [times * trips(eqn)] * len(bodies(eqn))
    return [times * count // ticks.runs for count in ticks.own]
