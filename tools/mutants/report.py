"""What became of the mutants, as a page of the docs and as lines."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.mutants import naming
from tools.mutants.mutations import KINDS, Mutation
from tools.mutants.running import results

_ABOUT = (
    "Small mistakes are put into the partitioner, one at a time and in memory only. Each mutant "
    "meets the quick tests that execute the changed lines, quick ones first, until one fails. "
    "`python -m tools.mutants` runs them, and `--report` writes this page."
)

Results = Mapping[str, Mapping[str, Any]]


def counts(mutations: Sequence[Mutation], found: Results) -> tuple[int, int, int]:
    """How many were run, how many of them died, and how many are equivalent."""
    ran = [(m, found[m.key]) for m in mutations if m.key in found]
    died = sum(result["how"] != "survived" for _, result in ran)
    equal = sum(result["how"] == "survived" and bool(m.equivalent) for m, result in ran)
    return len(ran), died, equal


def summary(mutations: Sequence[Mutation], found: Results) -> str:
    """One line."""
    ran, died, equal = counts(mutations, found)
    seconds = sum(found[m.key]["seconds"] for m in mutations if m.key in found)
    share = 100 * died / max(ran - equal, 1)
    return (
        f"{ran} mutants, {died} killed ({share:.1f}% of those that are not equivalent), "
        f"{equal} equivalent, {ran - died - equal} survived; {seconds / 60:.0f} processor minutes"
    )


def listed(mutations: Sequence[Mutation], found: Results) -> str:
    """A line for every mutation."""
    rows = []
    for m in mutations:
        result = found.get(m.key, {"how": "not run", "by": ""})
        how = "equivalent" if result["how"] == "survived" and m.equivalent else result["how"]
        rows.append(f"{m.name:28} {m.kind:10} {how:10} {result['by']}".rstrip())
    return "\n".join(rows)


def page(mutations: Sequence[Mutation], folder: Path) -> str:
    """docs/results/mutants.md."""
    found = results(folder)
    ran = [m for m in mutations if m.key in found]
    lines = [
        "# Mutants: mistakes that the tests notice",
        "",
        *textwrap.wrap(_ABOUT, 100),
        "",
        *textwrap.wrap(f"Run of {len(mutations)}: {summary(ran, found)}.", 100),
        "",
        *_table("mistake", [(KINDS[k], [m for m in ran if m.kind == k]) for k in KINDS], found),
        "",
        *_table(
            "package",
            [
                (f"`{name}/`", [m for m in ran if m.file.rpartition("/")[0] == name])
                for name in sorted({m.file.rpartition("/")[0] for m in ran})
            ],
            found,
        ),
        "",
        "## Equivalent",
        "",
        "Mistakes that no test can notice, and why:",
        "",
    ]
    lines += [
        textwrap.fill(f"- `{m.name}` in `{m.file}`: {m.equivalent}", 100, subsequent_indent="  ")
        for m in ran
        if m.equivalent and found[m.key]["how"] == "survived"
    ] or ["none."]
    lines += [
        "",
        "## Survived",
        "",
        "Mistakes that no quick test noticed within the processor time that a mutant has:",
        "",
    ]
    lines += [
        f"- `{m.name}` in `{m.file}` ({KINDS[m.kind]})"
        for m in ran
        if not m.equivalent and found[m.key]["how"] == "survived"
    ] or ["none."]
    lines += [
        "",
        "## Refuted by `gshard.prove`",
        "",
        *textwrap.wrap(_named(mutations, folder), 100),
    ]
    return "\n".join(lines) + "\n"


def _named(mutations: Sequence[Mutation], folder: Path) -> str:
    """Of the mutants that change values of small programs, those whose line a proof names."""
    found = naming.results(folder)
    tried = [(m.name, found[m.key]) for m in mutations if m.key in found]
    if not tried:
        return "Not measured yet: `python -m tools.mutants --prove` does."
    shown = [(name, line) for name, line in tried if line["named"] or line["refuted"]]
    missed = [f"`{name}`" for name, line in shown if not line["named"]]
    named = len(shown) - len(missed)
    rest = f" Another line is named for {', '.join(missed)}." if missed else ""
    return (
        f"{len(tried)} were tried. {len(shown)} are refuted in one of the programs of "
        f"`tools/mutants` from shapes alone, and the line of {named} is "
        f"named, {100 * named / max(len(shown), 1):.1f}% (`python -m tools.mutants --prove`).{rest}"
    )


def _table(title: str, rows: Sequence[tuple[str, Sequence[Mutation]]], found: Results) -> list[str]:
    lines = [
        f"| {title} | mutants | killed | equivalent | survived |",
        "|---|---|---|---|---|",
    ]
    for name, members in rows:
        ran, died, equal = counts(members, found)
        if ran:
            lines.append(f"| {name} | {ran} | {died} | {equal} | {ran - died - equal} |")
    return lines
