"""`gshard translate`: translate lines of text, in order."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from gshard.commands import options
from gshard.commands.show import bars, screen
from gshard.errors import UserError

if TYPE_CHECKING:
    from gshard.mt.decoding.lines import Output, TextLines
    from gshard.mt.decoding.texts import Hypothesis, TextTranslator
    from gshard.mt.launch.environment import Hosts
    from gshard.mt.progress import Advance, Progress

_CHUNK = 16  # batches that are read at a time: enough to sort sentences by length
_CHARACTERS = 2_000_000  # upper bound
# Plain output is one line per translation, without terminal escapes: controls become spaces.
_CONTROLS = dict.fromkeys((*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029), " ")


_Source = Annotated[
    str, typer.Option("--from", help="language of the text, checked against those of the model")
]
_Target = Annotated[str, typer.Option("--to", help="language to translate into", show_default="en")]


def translate(
    run: options.Run,
    file: Annotated[
        Path | None,
        typer.Argument(help="text, one sentence per line", show_default="standard input"),
    ] = None,
    source: _Source = "",
    target: _Target = "",
    beam: options.Beam = 4,
    nbest: Annotated[int, typer.Option(help="translations of each line, the best first")] = 1,
    alpha: options.Alpha = 0.6,
    as_json: options.Json = False,
    checkpoint: options.Checkpoint = "best",
    rows: options.Rows = 32,
    encoding: Annotated[str, typer.Option(help="encoding of the input text")] = "utf-8",
    out: Annotated[
        Path | None, typer.Option(help="write to this file; run again to continue it")
    ] = None,
    devices: options.Devices = 0,
    engine: options.Engine = "auto",
    weights: options.Weights = "",
    threads: options.Threads = 0,
    coordinator: options.Coordinator = "",
    processes: options.Processes = None,
    process: options.Process = None,
) -> None:
    """Translate lines of text from a file, or from standard input as they arrive."""
    from gshard.mt.broadcast import Broadcast
    from gshard.mt.decoding.engines import engine_of, open_translator
    from gshard.mt.decoding.lines import FileOutput, Output
    from gshard.mt.decoding.texts import TranslateConfig, choose_target
    from gshard.mt.launch.status import reporting
    from gshard.mt.run import Run as OpenedRun

    opened, which = OpenedRun.open(run), options.members(coordinator, processes, process)
    longest = opened.config.batch.source_length  # the longest that the model was trained on
    config = TranslateConfig(beam, nbest, alpha, rows, max(longest, 16))
    wanted = choose_target(opened.tokenizer, source, target)
    lines = _text(file, encoding, out)
    if which.index == 0:  # the only one that reads and writes
        lines.check()
    stream, reader = _output(which)
    with reporting() as reporter:
        broadcast = Broadcast(reporter)
        with _status(f"loading {opened.name}"):
            given = (opened, checkpoint, config, devices, which, broadcast)
            translator, step = open_translator(*given, engine_of(engine, weights, threads))
        if which.index:
            for message in broadcast.receive():
                translator.search(*message.arrays)
            return
        with broadcast.leading():
            settings = {
                "run": str(run.resolve()), "step": step, "target": wanted, "beam": beam,
                "nbest": nbest, "alpha": alpha, "json": as_json, "weights": weights,
            }  # fmt: skip
            output = Output(stream) if out is None else FileOutput(out, settings)
            with contextlib.closing(output):
                broadcast.step = output.done
                _translate(lines, translator, (source, wanted), output, reader, as_json)


def _text(file: Path | None, encoding: str, out: Path | None) -> TextLines:
    """The text to translate, which the output may not replace."""
    from gshard.mt.decoding.lines import TextLines

    if file and out and file.exists() and out.exists() and out.samefile(file):
        raise UserError(f"--out {out} is the text itself, which would be replaced")
    return TextLines(file, encoding)


def _translate(
    lines: TextLines,
    translator: TextTranslator,
    languages: tuple[str, str],
    output: Output,
    reader: int,
    as_json: bool,
) -> None:
    """Translate all lines, in chunks, until the reader of descriptor `reader` is gone."""
    config, (source, target) = translator.config, languages
    chunks = lines.chunks(_CHUNK * config.rows, _CHARACTERS, first=config.rows)
    try:
        for chunk in output.after_done(chunks):
            first = output.done + 1
            with _progress(first, output.done + len(chunk)) as progress:
                until = _UntilNobodyReads(progress, reader)
                found = translator.translate(chunk, target, until, source)
            output.add(chunk, _formatted(chunk, found, first, config.nbest, as_json))
        output.finish()
    except BrokenPipeError:  # the reader closed its end, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), reader)
    except KeyboardInterrupt:
        print(f"\ninterrupted; {output.done:,} lines are translated and written", file=sys.stderr)
        raise typer.Exit(130) from None


def _formatted(
    texts: Sequence[str],
    found: Sequence[Sequence[Hypothesis]],
    first: int,
    nbest: int,
    as_json: bool,
) -> Iterator[str]:
    """The lines to write for some texts, the first of which is line `first`."""
    from gshard.mt.decoding.texts import well_formed

    for number, (text, hypotheses) in enumerate(zip(texts, found, strict=True), first):
        if as_json:
            best = hypotheses[0]
            record = {
                "source": well_formed(text),
                "translation": best.text,
                "score": best.score,
                "nbest": [{"text": h.text, "score": h.score} for h in hypotheses],
            }
            yield json.dumps(record, ensure_ascii=False)
        elif nbest > 1:
            for h in hypotheses:
                yield f"{number}\t{h.score:.4f}\t{h.text.translate(_CONTROLS)}"
        else:
            yield hypotheses[0].text.translate(_CONTROLS)


class _UntilNobodyReads:
    """Shows progress, and stops when the reader of the output is gone."""

    def __init__(self, shown: Progress, output: int = 1):
        self._shown = shown
        self._output = select.poll()
        self._output.register(output, 0)  # poll only whether the other end is closed

    def stage(self, name: str, total: int) -> Advance:
        step = self._shown.stage(name, total)

        def checked(note: str = "", count: int = 1) -> None:
            if any(event & select.POLLERR for _, event in self._output.poll(0)):
                raise BrokenPipeError
            step(note, count)

        return checked


def _output(which: Hosts) -> tuple[IO[bytes], int]:
    """Standard output and its descriptor, which a replaced `sys.stdout` does not have.

    Among several processes it is for translations alone: output of JAX's C++ code goes to
    standard error.
    """
    if which.index or which.count == 1:
        return sys.stdout.buffer, 1
    kept = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(kept, "wb"), kept


def _status(text: str) -> contextlib.AbstractContextManager[object]:

    console = screen(stderr=True)
    return console.status(text) if console.is_terminal else contextlib.nullcontext()


def _progress(first: int, last: int) -> contextlib.AbstractContextManager[Progress]:
    """A bar on standard error while a chunk is translated, removed afterwards."""
    from gshard.mt.progress import SILENT

    console = screen(stderr=True)
    if not console.is_terminal:
        return contextlib.nullcontext(SILENT)
    lines = f"line {first:,}" if first == last else f"lines {first:,} to {last:,}"
    return bars(console, lines, transient=True, redirect_stdout=False)
