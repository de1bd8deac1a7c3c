"""docs/results/paper.md and the command that runs and times its rows."""

import json
import re
import sys
from pathlib import Path

from tools import reproduce
from tools.reproduce import PAGE, Row, rows


def test_every_row_has_a_command_or_is_as_above():
    found = rows(PAGE.read_text())
    assert len(found) > 15
    for row in found:
        assert len(row.cells) == 5, row.line
        assert row.command or row.cells[1] in ("as above", "none")


def test_every_table_figure_and_algorithm_of_the_paper_has_a_row_that_says_what_it_is():
    text = re.sub(r"(Figure|Table|Algorithm)s?", r"\1", PAGE.read_text())
    found = rows(text)
    named = set()
    for row in found:
        kinds = re.findall(r"\*\*(measured|forecast|not reproduced)\*\*", row.cells[3])
        assert len(kinds) == 1, row.line
        assert row.cells[1] != "none" or kinds == ["not reproduced"], row.line
        for kind, numbers in re.findall(
            r"(Figure|Table|Algorithm) (\d+(?: to \d+|(?:, \d+)* and \d+)?)", row.cells[0]
        ):
            first, *rest = map(int, re.findall(r"\d+", numbers))
            last = range(first, rest[-1] + 1) if "to" in numbers else (first, *rest)
            named |= {(kind, number) for number in last}
    for kind, count in (("Figure", 13), ("Table", 4), ("Algorithm", 2)):
        assert {number for k, number in named if k == kind} == set(range(1, count + 1)), kind


def test_the_rows_of_translation_have_the_scores_of_their_study():
    """Those that docs/results/figure/longer.json has, from which `as above` prints them."""
    study = json.loads(Path("docs/results/figure/longer.json").read_text())
    won = {(each["first"], each["second"]): each["groups"] for each in study["comparisons"]}
    model = {each["name"]: each for each in study["models"]}
    name = "{}-{}-long".format

    def over(first: str, second: str, unit: str = "chrf", group: str = "all") -> float:
        return won[first, second][group][unit]["mean"]

    def high(first: str, second: str) -> float:
        return model[first]["chrf_high"] - model[second]["chrf_high"]

    many, dense = name("moe-128", 6), name("dense", 6)
    deep, deep_dense = name("moe-128", 12), name("dense", 12)
    few = name("moe-32", 6)
    when = next(each["when"] for each in study["efficiency"] if each["loss"] == 3)
    tokens = dict(zip(model, when, strict=True))
    fewer = tokens[many][0] / tokens[deep][0]
    said = (
        f"over bilingual models | 128 experts and 12 layers {model[deep]['delta_bleu']:+.1f} BLEU",
        f"experts are better | {over(many, dense):+.2f} chrF++ at 6 layers, "
        f"{over(deep, deep_dense):+.2f} at 12",
        f"much text most | {high(many, dense):+.1f} chrF++ with much text, "
        f"{over(many, dense, group='low'):+.1f} with little, at 6 layers",
        f"diminishing returns | {over(few, dense, 'bleu'):+.1f} BLEU from none to 32, "
        f"{over(many, few, 'bleu'):+.1f} to 128",
        f"deeper models gain | {over(deep, many, 'bleu'):+.2f} BLEU with 128 experts, "
        f"{over(deep_dense, dense, 'bleu'):+.2f} without",
        f"depth does not help | {over(deep, many):+.2f} chrF++ with 128 experts, "
        f"{over(deep_dense, dense):+.2f} without",
        f"dense depth helps | {over(many, deep_dense, group='low'):.1f} chrF++ below 128 experts "
        f"at 6 layers with little text, {high(many, deep_dense):.1f} with much",
        f"fewer tokens to a loss | {fewer:.2f} times fewer",
    )
    found = rows(PAGE.read_text())
    for each in said:
        claim, score = each.split(" | ")
        (row,) = (row for row in found if claim in row.cells[0])
        assert score in row.cells[3], row.line


def test_scores_that_are_not_comparable_say_so_where_they_are_read():
    """BLEU of software messages, in the README and on the page of the figure."""
    lines = [line for line in Path("README.md").read_text().splitlines() if "BLEU 30.7" in line]
    assert len(lines) == 1
    assert "not comparable" in lines[0]
    page = " ".join(Path("docs/results/figure.md").read_text().split())
    assert "BLEU here is not comparable with the paper's" in page
    assert "ready set" not in page


def test_the_processor_time_of_a_command_and_of_its_children():
    """Of a process that a process starts, too; the output of neither is swallowed."""
    burn = "import time\\nwhile time.process_time() < 0.5: pass"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{burn}'])"
    assert 0.5 <= reproduce.seconds_of(f'{sys.executable} -c "{program}"') < 5


def test_times_are_written_into_their_rows():
    row = Row("| a claim | `make layer` | minutes | what came out | none |")
    assert row.with_time(reproduce.shown(41.2)) == (
        "| a claim | `make layer` | 41 s | what came out | none |"
    )
    assert reproduce.shown(200) == "3 min"
    assert Row("| b | `gshard study` | 2 min on one H200 | c | d |").needs_gpu
