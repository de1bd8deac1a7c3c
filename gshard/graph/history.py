"""A program as text, one line per equation; and the history of a lowering: the program after every
stage and pass, with changes marked."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from gshard.graph.regions import Names, bodies

Note = Callable[[JaxprEqn], str]  # the note for an equation, or ""
NO_NOTE: Note = lambda eqn: ""  # noqa: E731


def program_text(
    jaxpr: Jaxpr, title: str = "program", note: Note = NO_NOTE, names: dict[Any, str] | None = None
) -> str:
    """The program as readable text; a `note` follows its equation.

    `names` has the names of variables that were shown before.
    """
    names = {} if names is None else names
    lines = [f"{title} ({_inputs(jaxpr, names)})"]
    lines += _lines(jaxpr, names, note, "  ")
    return "\n".join(lines)


def _inputs(jaxpr: Jaxpr, names: dict[Any, str]) -> str:
    return ", ".join(_typed(v, names) for v in (*jaxpr.constvars, *jaxpr.invars))


def _lines(jaxpr: Jaxpr, names: dict[Any, str], note: Note, indent: str) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        # A node of a plan also reads the device's number, which is not shown.
        read = eqn.invars[:1] if "node" in eqn.params else eqn.invars
        operands = "".join(f" {_name(a, names)}" for a in read)
        results = ", ".join(_typed(v, names) for v in eqn.outvars)
        remark = f"  # {found}" if (found := note(eqn)) else ""
        yield f"{indent}{results} = {eqn.primitive.name}{_params(eqn)}{operands}{remark}"
        for body in bodies(eqn):
            yield f"{indent}  body ({_inputs(body, names)})"
            yield from _lines(body, names, note, indent + "    ")
    yield f"{indent}return " + ", ".join(_name(a, names) for a in jaxpr.outvars)


def _params(eqn: JaxprEqn) -> str:
    """The informative parameters, shortened; long device groups are omitted."""
    shown = []
    for key, value in eqn.params.items():
        # Not `value in (None, (), False)`: some types cannot be compared with others.
        if value is None or (isinstance(value, (int, float, tuple)) and not value):
            continue
        if key in _LEFT_OUT or isinstance(value, (Jaxpr, ClosedJaxpr)):
            continue
        if isinstance(value, tuple) and any(isinstance(v, (Jaxpr, ClosedJaxpr)) for v in value):
            continue
        text = str(value) if len(str(value)) <= _LENGTH else str(value)[: _LENGTH - 3] + "..."
        shown.append(text if key == "node" else f"{key}={text}")
    return f"[{' '.join(shown)}]" if shown else ""


_LENGTH = 100  # of a parameter
_LEFT_OUT = {
    "axis_name", "axis_size", "tiled", "sharding", "out_sharding", "weak_type", "ft_in", "ft_out",
}  # fmt: skip


def _name(atom: Any, names: dict[Any, str]) -> str:
    if isinstance(atom, Literal):
        return str(atom.val) if np.ndim(atom.val) == 0 else str(np.asarray(atom.val).tolist())
    if atom not in names:
        number, letters = len(names), ""
        while True:
            letters = chr(ord("a") + number % 26) + letters
            number = number // 26 - 1
            if number < 0:
                break
        names[atom] = letters
    return names[atom]


def _typed(var: Any, names: dict[Any, str]) -> str:
    return f"{_name(var, names)}:{var.aval.str_short(short_dtypes=True)}"


P = TypeVar("P", ClosedJaxpr, Jaxpr)
Pass = Callable[[P], P | tuple[P, Names]]  # a pass that renames variables also returns which


@dataclass(frozen=True)
class Snapshot:
    """The program after a stage or pass; `remarks` say where a pass applied, or why it did not."""

    name: str
    jaxpr: Jaxpr
    note: Note
    remarks: Sequence[str]


@dataclass
class History:
    """The stages of one lowering, in order, and what they renamed. Texts are made on demand."""

    stages: list[Snapshot] = field(default_factory=list)
    renamed: Names = field(default_factory=dict)

    def add(
        self, name: str, jaxpr: Jaxpr, note: Note = NO_NOTE, remarks: Sequence[str] = ()
    ) -> None:
        """Record the program after a stage."""
        self.stages.append(Snapshot(name, jaxpr, note, tuple(dict.fromkeys(remarks))))

    def run(self, passes: Iterable[Pass[P]], program: P, note: Note = NO_NOTE) -> P:
        """The program after these passes, each recorded under its name."""
        for change in passes:
            changed = change(program)
            program, names = changed if isinstance(changed, tuple) else (changed, {})
            self.renamed |= names
            self.add(change.__name__, getattr(program, "jaxpr", program), note)
        return program

    def now(self, var: Any) -> Any:
        """The variable of the last program that a variable of an earlier one became."""
        while var in self.renamed:
            var = self.renamed[var]
        return var

    @property
    def programs(self) -> dict[str, Jaxpr]:
        """The program after each stage, by the stage's name."""
        return {stage.name: stage.jaxpr for stage in self.stages}

    def texts(self) -> dict[str, str]:
        """The text of every stage; a line that the stage before does not have begins with `>`.

        Every variable has one name throughout.
        """
        names: dict[Any, str] = {}
        found: dict[str, str] = {}
        before: list[str] = []
        for number, stage in enumerate(self.stages):
            lines = program_text(stage.jaxpr, stage.name, stage.note, names).split("\n")
            marked = _marked(before[1:], lines[1:]) if before else [f"  {s}" for s in lines[1:]]
            remarks = stage.remarks
            if not remarks and before[1:] == lines[1:]:
                remarks = ["no equation changed"]
            head = [lines[0], *(f"# {remark}" for remark in remarks)]
            found[f"{number:02d}-{stage.name}"] = "\n".join([*head, *marked])
            before = lines
        return found

    def dump(self, folder: str | Path) -> list[Path]:
        """One file per stage in `folder`, numbered."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for name, text in self.texts().items():
            paths.append(folder / f"{name}.txt")
            paths[-1].write_text(text + "\n")
        return paths


def _marked(before: list[str], lines: list[str]) -> list[str]:
    """The lines, each marked if its equation is new."""
    old, new = ([line.split("  # ")[0] for line in each] for each in (before, lines))
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    marked = []
    for kind, _, _, first, end in matcher.get_opcodes():
        mark = " " if kind == "equal" else ">"
        marked += [f"{mark} {line}" for line in lines[first:end]]
    return marked
