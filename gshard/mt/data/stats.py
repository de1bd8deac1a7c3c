"""What is in a corpus: a table by language, why text was dropped, and a picture."""

from __future__ import annotations

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
    table = Table(title=f"{len(corpus.languages)} languages{counted}")
    for name in ("rank", "language", *SPLITS, "English words", "4 words or more"):
        table.add_column(name, justify="left" if name == "language" else "right")
    shown = corpus.languages[: most or None]
    for rank, language in enumerate(shown, 1):
        train = corpus.manifest["languages"][language]["train"]
        table.add_row(
            str(rank),
            language,
            *(f"{corpus.count(language, split):,}" for split in SPLITS),
            f"{train['english_words']:,}",
            f"{train['at_least_4_words'] / train['pairs']:.0%}",
        )
    table.add_section()
    everywhere = corpus.manifest["languages"]
    totals = [sum(corpus.count(language, split) for language in everywhere) for split in SPLITS]
    trains = [entry["train"] for entry in everywhere.values() if "train" in entry]
    words = sum(entry["english_words"] for entry in trains)
    long = sum(entry["at_least_4_words"] for entry in trains)
    share = f"{long / totals[0]:.0%}" if totals[0] else ""
    table.add_row("", "all", *(f"{total:,}" for total in totals), f"{words:,}", share)
    return table


def dropped_table(corpus: Corpus) -> Table:
    """How many pairs were dropped, by reason."""
    table = Table(title="dropped")
    table.add_column("reason")
    table.add_column("pairs", justify="right")
    dropped = corpus.manifest["dropped"]
    for reason in sorted(dropped, key=lambda reason: -dropped[reason]):
        table.add_row(Text(reason), f"{dropped[reason]:,}")
    return table


def source_table(corpus: Corpus, most: int = 20) -> Table:
    """The sources that gave the most pairs, with version and licence."""
    table = Table(title="sources")
    for name in ("source", "version", "licence"):
        table.add_column(name, overflow="fold")
    table.add_column("pairs", justify="right")
    stated = {source["name"]: source for source in corpus.manifest["sources"]}
    pairs: dict[str, int] = {}
    for entry in corpus.manifest["languages"].values():
        for split in entry.values():
            for origin, count in split["origins"].items():
                pairs[origin] = pairs.get(origin, 0) + count
    for origin in sorted(pairs, key=lambda origin: -pairs[origin])[:most]:
        source = stated.get(origin, {})
        stated_of = (source.get("version", ""), source.get("licence", ""))
        # As text: brackets in a name are not markup.
        cells = (Text(str(cell)) for cell in (origin, *stated_of, f"{pairs[origin]:,}"))
        table.add_row(*cells)
    return table


def power_law(corpus: Corpus) -> Chart:
    """Training pairs by language, in the order of their number, both axes logarithmic.

    The paper's corpus falls by five powers of ten from the first language to the hundredth.
    """
    counts = [corpus.count(language) for language in corpus.languages]
    points = [(float(rank), float(count)) for rank, count in enumerate(counts, 1)]
    title = f"{sum(counts):,} pairs of {len(counts)} languages with English"
    return lines(title, {"pairs": points}, "language, by its pairs", "training pairs", log=True)
