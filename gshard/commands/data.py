"""`gshard data`: gather parallel text, inspect it, train vocabularies and try batches."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gshard.commands import show
from gshard.commands.options import Languages, PlainCommand, PlainGroup, Plots, complete_tiers
from gshard.errors import UserError

if TYPE_CHECKING:
    from gshard.mt.data.gather import GatherConfig

app = typer.Typer(cls=PlainGroup, no_args_is_help=True, help="Gather parallel text and inspect it.")

Tier = Annotated[
    str,
    typer.Option(
        help="tiny, core, full, m4 (that of the results), or a .toml file of your own",
        autocompletion=complete_tiers,
    ),
]
Vocabularies = Annotated[
    Path | None, typer.Option(help="folder of the vocabularies", show_default="CORPUS/vocabulary")
]
Temperature = Annotated[
    float, typer.Option(help="1 samples in proportion to the data, inf all languages equally")
]
CorpusFolder = Annotated[Path, typer.Argument(help="folder of a gathered corpus")]


@app.command(cls=PlainCommand)
def gather(
    tier: Tier = "",
    out: Annotated[Path, typer.Option(help="folder of the corpus")] = Path("corpus"),
    tsv: Annotated[
        list[str], typer.Option(help="[SPLIT=]FILE with language, source, English[, origin]")
    ] = [],  # noqa: B006  (typer copies it)
    moses: Annotated[
        list[str], typer.Option(help="[SPLIT=]FOREIGN,ENGLISH, as corpus.de,corpus.en")
    ] = [],  # noqa: B006
    parquet: Annotated[
        list[str], typer.Option(help="[SPLIT=]FILE with columns language, source, english")
    ] = [],  # noqa: B006
    catalogs: Annotated[
        list[str], typer.Option(help="[SPLIT=]FOLDER of gettext or Qt catalogs")
    ] = [],  # noqa: B006
    clean: Annotated[
        bool, typer.Option(help="filter your own text too, or keep it unfiltered")
    ] = True,
    test_share: Annotated[
        float | None, typer.Option(help="share of long sentences held out for test")
    ] = None,
    dev_share: Annotated[
        float | None, typer.Option(help="share of long sentences held out for dev")
    ] = None,
    licence: Annotated[
        str, typer.Option(help="licence of your own text, for the manifest and cards of models")
    ] = "the user's own",
    jobs: Annotated[int, typer.Option(help="processes; 0 means one per core")] = 0,
    ray: Annotated[
        bool, typer.Option("--ray", help="gather on a Ray cluster; implied by RAY_ADDRESS")
    ] = False,
) -> None:
    """Gather a corpus: download, read, clean, split and write. Run it again to continue."""
    from gshard.mt.data import gather as work
    from gshard.mt.data import tiers
    from gshard.mt.data.splits import SPLITS, HeldOutShares
    from gshard.mt.data.user_text import parse_own

    loaded = tiers.load(tier) if tier else None
    given = {"tsv": tsv, "moses": moses, "parquet": parquet, "catalogs": catalogs}
    own = tuple(parse_own(kind, text, clean) for kind, texts in given.items() for text in texts)
    usual = HeldOutShares(loaded.test_share, loaded.dev_share) if loaded else HeldOutShares()
    shares = HeldOutShares(
        usual.test if test_share is None else test_share,
        usual.dev if dev_share is None else dev_share,
    )
    config = work.GatherConfig(out, loaded, own, shares, jobs, licence)
    if ray or "RAY_ADDRESS" in os.environ:
        config = _on_ray(config)
    with show.bars() as bars:
        corpus, skipped = work.gather(config, bars)
    show.problems(skipped)
    everywhere = corpus.manifest["languages"]
    totals = [
        f"{sum(corpus.count(language, split) for language in everywhere):,} {split}"
        for split in SPLITS
    ]
    show.console.print(f"{len(corpus.languages)} languages: {', '.join(totals)}")
    show.console.print(f"`gshard data stats {out}` shows more", soft_wrap=True)


def _on_ray(config: GatherConfig) -> GatherConfig:
    """The same on the nodes of a Ray cluster, which share files but not the current folder."""

    try:
        from gshard.mt.launch.ray_cluster import connect
    except ImportError:
        raise UserError("--ray needs more packages: pip install 'gshard[cluster]'") from None
    connect(os.environ.get("RAY_ADDRESS"))
    own = tuple(
        replace(each, paths=tuple(path.absolute() for path in each.paths)) for each in config.own
    )
    return replace(config, out=config.out.absolute(), own=own, ray=True)


@app.command(cls=PlainCommand)
def stats(
    corpus: CorpusFolder = Path("corpus"),
    most: Annotated[int, typer.Option(help="languages to show; 0 means all")] = 0,
    plots: Plots = None,
    verify: Annotated[bool, typer.Option(help="verify the checksum of every file")] = False,
) -> None:
    """Print the table of languages, what was dropped and why, and draw the power law."""
    from gshard.mt.data import stats as work
    from gshard.mt.data.corpus import Corpus

    opened = Corpus.open(corpus)
    show.console.print(work.language_table(opened, most))
    show.console.print(work.dropped_table(opened))
    show.console.print(work.source_table(opened))
    picture = work.power_law(opened).save((plots or corpus) / "power-law.svg")
    show.console.print(f"power law: {picture}", soft_wrap=True)
    if verify:
        if bad := opened.verify():
            raise UserError("\n".join(bad))
        show.console.print("every file matches its checksum")


@app.command(cls=PlainCommand)
def vocabulary(
    corpus: CorpusFolder = Path("corpus"),
    out: Vocabularies = None,
    source_size: Annotated[int, typer.Option(help="pieces of the source vocabulary")] = 16_000,
    target_size: Annotated[int, typer.Option(help="pieces of the target vocabulary")] = 8_000,
    directions: Annotated[
        str, typer.Option(help="to-english, from-english or both")
    ] = "to-english",
    temperature: Temperature = 5.0,
    sentences: Annotated[int, typer.Option(help="sentences to train on, at most")] = 1_000_000,
    languages: Languages = "",
    seed: Annotated[int, typer.Option(help="random seed of the sample")] = 0,
) -> None:
    """Train the SentencePiece vocabularies on a temperature sample of the corpus."""
    from gshard.mt.batching.tokenizer import VocabularyConfig, refuse_to_replace, train_tokenizer
    from gshard.mt.data.corpus import Corpus

    chosen = tuple(language for language in languages.split(",") if language)
    config = VocabularyConfig(
        source_size, target_size, directions, temperature, sentences, seed, chosen
    )
    opened = Corpus.open(corpus)
    place = out or corpus / "vocabulary"
    refuse_to_replace(place)
    with show.console.status("training the vocabularies"):
        tokenizer = train_tokenizer(opened, config)
    tokenizer.save(place)
    show.console.print(
        f"{tokenizer.source_size:,} source and {tokenizer.target_size:,} target pieces in {place}"
    )


@app.command(cls=PlainCommand)
def batches(
    corpus: CorpusFolder = Path("corpus"),
    vocabulary: Vocabularies = None,
    steps: Annotated[int, typer.Option(help="batches to make")] = 200,
    rows: Annotated[int, typer.Option(help="rows of a batch")] = 32,
    source_length: Annotated[int, typer.Option(help="source tokens in a row")] = 64,
    target_length: Annotated[int, typer.Option(help="target tokens in a row")] = 36,
    temperature: Temperature = 5.0,
    workers: Annotated[int, typer.Option(help="processes that read ahead; 0 uses threads")] = 0,
) -> None:
    """Make batches as training does, and show their padding, speed and mixture."""

    from gshard.mt.batching.batches import BatchConfig, Batches
    from gshard.mt.batching.tokenizer import Tokenizer
    from gshard.mt.batching.tokens import open_tokens
    from gshard.mt.data.corpus import Corpus

    opened = Corpus.open(corpus)
    tokenizer = Tokenizer.load(vocabulary or corpus / "vocabulary")
    config = BatchConfig(rows, source_length, target_length, temperature, languages=True)
    with show.bars() as bars:
        step = bars.stage("encode", len(tokenizer.tasks))
        tokens = open_tokens(opened, tokenizer, corpus / "tokens", step=step)
    made = Batches(tokens, config, workers=workers)
    iterator = made.iterate()
    counts = [0] * len(tokens)
    next(iterator)  # the first batch includes the start of the workers
    begin, before = time.perf_counter(), iterator.tokens
    for _ in range(steps):
        languages = next(iterator)["languages"]
        for task in range(len(tokens)):
            counts[task] += int((languages == task).sum())
    seconds = time.perf_counter() - begin
    iterator.close()
    show.console.print(
        f"{steps} batches in {seconds:.2f} s, "
        f"{(iterator.tokens - before) / seconds:,.0f} tokens/s, "
        f"{iterator.padding:.1%} padding, {made.too_long:,} of {made.examples:,} examples too long"
    )
    total = sum(counts)
    top = sorted(zip(counts, made.tasks, strict=True), key=lambda pair: -pair[0])
    shown = ", ".join(f"{task} {count / total:.1%}" for count, task in [*top[:5], *top[-5:]])
    show.console.print(f"most and least of the source tokens: {shown}")
