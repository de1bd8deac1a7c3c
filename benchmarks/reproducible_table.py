"""The tables of `benchmarks.reproducible`, made of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Rows = Sequence[dict[str, Any]]


def _place(row: dict[str, Any]) -> str:
    """The column of a row."""
    return f"{row['processes']} processes" if row["processes"] > 1 else str(row["devices"])


def verdict(row: dict[str, Any], rows: Rows) -> str:
    """Whether a row has the bits of one device."""
    if row["timed"]:
        return f"{row['time'] / row['usual time']:.2f} x usual"
    same = {name: row[name] for name in ("program", "type", "steps", "timed")}
    alone = [r["bits"] for r in rows if r["devices"] == 1 and r.items() >= same.items()]
    if row["devices"] == 1 or not alone:
        return row["bits"][:6]
    return "equal" if row["bits"] == alone[0] else "DIFFERENT"


def _table(rows: Rows, cell: Callable[[dict[str, Any]], str]) -> list[str]:
    """One line for a program and a type, one column for each place."""
    places = sorted({_place(r) for r in rows}, key=lambda name: (len(name), name))
    lines = [f"| program | type | {' | '.join(places)} |", "|---|---|" + "---:|" * len(places)]
    cells = {(r["program"], r["type"], _place(r)): cell(r) for r in rows}
    for program, dtype in dict.fromkeys((r["program"], r["type"]) for r in rows):
        found = [cells.get((program, dtype, place), "") for place in places]
        lines.append(f"| {program} | {dtype} | {' | '.join(found)} |")
    return lines


def _ratio(row: dict[str, Any]) -> str:
    """The bytes of a row beside the usual program's."""
    if not row["usual bytes"]:
        return "0" if not row["bytes"] else f"{row['bytes']:,} bytes"
    return f"{row['bytes'] / row['usual bytes']:.2f}"


def _times(rows: Rows) -> list[str]:
    lines = [
        "| program | type | devices | ms | x usual | processor time x usual |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for r in rows:
        ratio = r["time"] / r["usual time"]
        cells = [f"{1000 * r['time']:.1f}", f"{ratio:.2f}", f"{r['processor x usual']:.2f}"]
        lines.append(f"| {r['program']} | {r['type']} | {r['devices']} | {' | '.join(cells)} |")
    return lines


def tables(rows: Rows, names: Sequence[str]) -> str:
    """Bits, bytes and times of programs in the order of `names`; how many are within the aims."""
    rows = sorted(rows, key=lambda r: (names.index(r["program"]), r["type"] != "float32"))
    compared, timed = ([r for r in rows if r["timed"] == which] for which in (False, True))
    verdicts = [verdict(r, rows) for r in compared]
    equal, different = (verdicts.count(v) for v in ("equal", "DIFFERENT"))
    sent = [r for r in compared if r["processes"] == 1 and r["usual bytes"]]
    few = [r for r in sent if r["bytes"] <= 1.5 * r["usual bytes"]]
    steps = ", ".join(str(n) for n in sorted({r["steps"] for r in compared}))
    lines = [
        f"On {' and '.join(sorted({r['machine'] for r in rows}))}.",
        "",
        f"Bits of {steps} steps: {equal} of {equal + different} rows equal those of one device.",
        "",
        *_table(compared, lambda r: verdict(r, rows)),
        "",
        f"Bytes beside the usual program: {len(few)} of {len(sent)} rows at most 1.5 times.",
        "",
        *_table([r for r in compared if r["processes"] == 1], _ratio),
    ]
    for size in dict.fromkeys(r["size"] for r in sorted(timed, key=lambda r: r["size"] != "large")):
        some = [r for r in timed if r["size"] == size]
        fast = [r for r in some if r["time"] <= 1.3 * r["usual time"]]
        text = (
            f"Times of a step of {size} models: {len(fast)} of {len(some)} rows at most 1.3 times."
        )
        lines += ["", text, "", *_times(some)]
    return "\n".join(lines)
