"""What is in a corpus: a table by language, why text was dropped, and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from rich.table import Table
from rich.text import Text

from gshard.mt.data.corpus import Corpus
from gshard.mt.data.splits import SPLITS
from gshard.pages import Chart
from gshard.pages.curves import lines


def language_table(corpus: Corpus, most: int = 0) -> Table:
    """Pairs by language and split, the largest language first; `most` rows, or all."""
    english = corpus.manifest.get("english", 0)  # earlier versions did not count them
    counted = f", {english:,} different English sentences" if english else " with English"
    heads = ("rank", "language", *SPLITS, "English words", "4 words or more")
    shown = enumerate(corpus.languages[: most or None], 1)
    rows = [[str(rank), language, *_counted(corpus, [language])] for rank, language in shown]
    table = _table(f"{len(corpus.languages)} languages{counted}", heads, ("language",), rows)
    table.add_section()
    table.add_row("", "all", *_counted(corpus, corpus.manifest["languages"]))
    return table


def _counted(corpus: Corpus, languages: Collection[str]) -> list[str]:
    """Pairs of every split, English words, and the share of pairs with at least four of them."""
    pairs = [sum(corpus.count(language, split) for language in languages) for split in SPLITS]
    trains = [corpus.manifest["languages"][language].get("train", {}) for language in languages]
    names = ("english_words", "at_least_4_words")
    words, long = (sum(train.get(name, 0) for train in trains) for name in names)
    share = f"{long / pairs[0]:.0%}" if pairs[0] else ""
    return [*(f"{count:,}" for count in (*pairs, words)), share]


def dropped_table(corpus: Corpus) -> Table:
    """How many pairs were dropped, by reason."""
    dropped = Counter(corpus.manifest["dropped"]).most_common()
    rows = [[reason, f"{count:,}"] for reason, count in dropped]
    return _table("dropped", ("reason", "pairs"), ("reason",), rows)


def source_table(corpus: Corpus, most: int = 20) -> Table:
    """The sources that gave the most pairs, with version and licence."""
    stated = {source["name"]: source for source in corpus.manifest["sources"]}
    pairs = Counter[str]()
    for entry in corpus.manifest["languages"].values():
        for split in entry.values():
            pairs.update(split["origins"])
    heads, rows = ("source", "version", "licence"), []
    for origin, count in pairs.most_common(most):
        about = (stated.get(origin, {}).get(name, "") for name in heads[1:])
        rows.append([origin, *map(str, about), f"{count:,}"])
    return _table("sources", (*heads, "pairs"), heads, rows)


def _table(title: str, heads: Sequence[str], left: Sequence[str], rows: list[list[str]]) -> Table:
    """Cells are text, in which brackets are no markup; columns but those in `left` are numbers."""
    table = Table(title=title)
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def power_law(corpus: Corpus) -> Chart:
    """Training pairs by language, in the order of their number, both axes logarithmic.

    The paper's corpus falls by five powers of ten from the first language to the hundredth.
    """
    counts = [corpus.count(language) for language in corpus.languages]
    points = [(float(rank), float(count)) for rank, count in enumerate(counts, 1)]
    title = f"{sum(counts):,} pairs of {len(counts)} languages with English"
    return lines(title, {"pairs": points}, "language, by its pairs", "training pairs", log=True)
