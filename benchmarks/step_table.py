"""Tables and the plot of `benchmarks.step_time`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
GOAL = 1.05
HEADS = (
    "program",
    "XLA, ms",
    "gshard, ms",
    "over XLA",
    "processor time",
    "bytes",
    "planned for accelerators",
)


def cells(row: Row) -> list[str]:
    """A row of the table as text: milliseconds, then ratios to XLA's program."""
    if "error" in row:
        return [row["name"], row["error"].splitlines()[0][:80], *[""] * (len(HEADS) - 2)]
    sent = row["bytes"]
    bytes_over = f"{sent['gshard'] / sent['xla']:.2f}" if sent["xla"] else f"{sent['gshard']:,}"
    return [
        row["name"],
        f"{row['ms']['xla']:.2f}",
        f"{row['ms']['gshard']:.2f}",
        over_xla(row),
        f"{row['processor']['gshard']:.2f}",
        bytes_over,
        f"{row['ratio']['default']:.2f}",
    ]


def over_xla(row: Row) -> str:
    """The ratio with its interval, which rows of earlier runs do not have."""
    ratio = f"{row['ratio']['gshard']:.2f}"
    if "interval" not in row:
        return ratio
    low, high = row["interval"]["gshard"]
    return f"{ratio} ({low:.2f} to {high:.2f})"


def above(rows: Sequence[Row], limit: float = GOAL) -> list[str]:
    """The programs that take longer than they may, rounded as in the table."""
    return [r["name"] for r in rows if "ratio" in r and round(r["ratio"]["gshard"], 2) > limit]


def summary(rows: Sequence[Row]) -> str:
    """How many rows are above the goal, and which."""
    slow = above(rows)
    failed = [row["name"] for row in rows if "error" in row]
    lines = [f"{len(slow)} of {len(rows)} programs above {GOAL}: {', '.join(slow) or 'none'}"]
    return "\n".join(lines + [f"failed: {', '.join(failed)}"] * bool(failed))


def markdown(rows: Sequence[Row]) -> str:
    """The table for the docs."""
    lines = [HEADS, ("---", *["---:"] * (len(HEADS) - 1)), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(tables: Sequence[tuple[str, Sequence[Row]]], path: Path) -> None:
    """Time against bytes, each over XLA's, a panel for each table."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(tables), figsize=(4.6 * len(tables), 3.6), layout="constrained", squeeze=False
    )
    for ax, (title, rows) in zip(axes[0], tables, strict=True):
        found = [r for r in rows if "ratio" in r and r["bytes"]["xla"]]
        sent = [max(r["bytes"]["gshard"] / r["bytes"]["xla"], 0.01) for r in found]
        ax.scatter(sent, [r["ratio"]["gshard"] for r in found], s=16)
        ax.axhline(1, color="gray", linewidth=0.8)
        ax.axvline(1, color="gray", linewidth=0.8)
        ax.set(xscale="log", yscale="log", title=title)
        ax.set(xlabel="bytes over XLA's (0.01: none)", ylabel="step time over XLA's")
    figure.savefig(path)
