"""Measure a model's loss with and without its state, or the loss of each token of a text.

Without --text, the text is the validation split of what the model was trained on.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import itertools
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxgru.analysis import state_cost
from jaxgru.analysis.ngrams import NGram, count_ngrams
from jaxgru.cli.options import Parser, lines_of, trained_model, write_output
from jaxgru.errors import UserError, counted, needs, printable
from jaxgru.lm.config import Config, ConfigError, DataConfig, load_config
from jaxgru.lm.data.corpus import load_corpus
from jaxgru.lm.data.dataset import Dataset, load_dataset
from jaxgru.lm.data.sources import Corpus
from jaxgru.lm.data.tokenizers import Tokenizer, TokenizerError
from jaxgru.lm.data.units import encode_units, end_token, split_units
from jaxgru.lm.dynamic import CHOSEN_ON, choose_dynamic, dynamic_nll
from jaxgru.lm.evaluation import in_units, perplexity, stream_nll, window_loss
from jaxgru.lm.generation import default_prompt
from jaxgru.lm.load import Found
from jaxgru.lm.model import Params
from jaxgru.lm.runs.terminal import progress_bar
from jaxgru.lm.scoring import NLL, Scores, score, score_lines

with needs("train"):
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table
    from rich.text import Text


def make_parser() -> Parser:
    """Return the parser of this command's options."""
    parser = Parser(
        __doc__,
        ["evaluate runs/astra_alpha", "evaluate astra_alpha",
         "evaluate mine.safetensors --text hamlet.txt --output hamlet.csv",
         "evaluate mine.safetensors --text names.txt --lines", "evaluate --ngram 2"],
        usage="(MODEL | --ngram INT) [options]",
    )  # fmt: skip
    parser.add_model()
    add = parser.add_argument_group("measures").add_argument
    add(
        "--text",
        metavar="FILE",
        help="text to score as a whole; - reads standard input. If the model's own text has moved, "
        "give it here: it is read and split as in training",
    )
    add(
        "--encoding",
        metavar="NAME",
        default="utf-8",
        help="encoding of --text, by Python's name for it, such as latin-1 (default: %(default)s)",
    )
    add("--validation", metavar="FILE", help="the model's own data.validation, if it has moved")
    add(
        "--output",
        metavar="FILE",
        type=Path,
        help=".csv file to write: position, token and nats of each token but the first, over one "
        "stream, or the table of --lines; an older file is replaced",
    )
    add(
        "--lines",
        action="store_true",
        help="score each line of --text alone, from its first token on: a table of number, nats, "
        "tokens, nats per token and text, on standard output if there is no --output",
    )
    add(
        "--dynamic",
        action="store_true",
        help="also evaluate weights that keep learning as they read (Krause et al. 2018), with "
        "settings chosen on the end of the training text; takes minutes",
    )
    add(
        "--random-batches",
        action="store_true",
        help="also evaluate 200 random batches of 64 windows of 256 tokens, like nanoGPT",
    )
    return parser


def main() -> None:
    """Parse the arguments, evaluate the model and print tables."""
    parser = make_parser()
    arguments = parser.parse_args()
    counted = arguments.ngram is not None
    model = None if counted else trained_model(arguments)
    try:
        encoding = DataConfig(encoding=arguments.encoding).encoding
    except ConfigError as error:
        parser.error(str(error).replace("data.encoding", "--encoding"))
    if encoding != "utf-8" and arguments.text is None:
        parser.error("--encoding is for --text; the model's own text is read as in training.")
    for option in ("--epoch", "--dynamic", "--random-batches", "--validation"):
        if counted and getattr(arguments, option[2:].replace("-", "_")):
            parser.error(f"{option} is for a model; it does not go with --ngram.")
    if arguments.dynamic and arguments.text is not None:
        parser.error(
            "--dynamic chooses its settings on the text that a model was trained on; it does not "
            "go with --text."
        )
    if arguments.lines and arguments.text is None:
        parser.error("--lines is for --text; give the file whose lines to score.")
    for option in ("--validation", "--random-batches"):
        if arguments.lines and getattr(arguments, option[2:].replace("-", "_")):
            parser.error(f"--lines scores each line alone; leave out {option}.")
    output = arguments.output
    if output is not None:  # before anything slow starts
        parser.check_output(output, ".csv")
    if arguments.lines:
        print_lines(model, arguments, encoding)
        return
    console = Console(highlight=False)
    if model is None:
        text = None if arguments.text is None else load_corpus(arguments.text, encoding=encoding)
        config, dataset = load_dataset(load_config(arguments.config or "astra_alpha"))
        scores = _counted(arguments.ngram, dataset, text)
        rows = [(f"order {arguments.ngram}", scores.loss)]
        name = _title(config.name, arguments.text)
        console.print(_in_units(name, "n-gram model", rows, scores, losses=True))
    else:
        params, config, tokenizer = model.load(arguments.epoch)
        sha256, window = model.text_sha256(), config.training.sequence_length
        if arguments.dynamic and config.data.unit:
            parser.error("--dynamic reads a text as one stream, not in units (data.unit).")
        given = arguments.text
        if given is not None and (
            given == "-" or load_corpus(given, reads_bytes=True).sha256 != sha256.split(" ")[0]
        ):
            if arguments.validation is not None:
                parser.error("--validation goes with the model's own text; --text is another.")
            text = load_corpus(given, encoding=encoding, reads_bytes=tokenizer.reads_bytes)
            rows, scores = _scored(
                params, config, tokenizer, text, arguments.random_batches, console
            )
            name = _title(config.name, arguments.text)
            console.print(_in_units(name, "state reset to zero", rows, scores, losses=True))
            _print_unknown(console, tokenizer, scores.pieces)
        else:
            dataset = _own_text(config, tokenizer, sha256, given, arguments.validation)
            moved = None if config.data.validation else given
            name = _title(config.name, moved, "the validation split of ")
            prompt = default_prompt(sha256, tokenizer)
            steps = state_cost.num_steps(tokenizer, arguments.random_batches)
            with _in_steps(console, steps) as begin:
                record = state_cost.measure(
                    params, tokenizer, dataset, window, begin, arguments.random_batches, prompt
                )
            console.print(_losses(name, window, record, dataset.end is not None))
            _print_unknown(console, tokenizer, _pieces(dataset))
            if record.text:
                console.print(_text(record.text))
            if arguments.dynamic:
                with _in_steps(console, 1) as begin:
                    begin("choosing the settings of dynamic evaluation")
                    chosen = choose_dynamic(params, dataset.train[-CHOSEN_ON:])
                    loss = float(dynamic_nll(params, dataset.validation, chosen).mean())
                rates = f"η {chosen.learning_rate:g}, λ {chosen.decay:g}, every {chosen.every}"
                rows = [("fixed", record.stream), (f"learning: {rates}", loss)]
                console.print(_in_units(name, "weights, one stream", rows, record))
            if record.chain:
                console.print(_markov_chain(record.chain))
            split = params, dataset.validation, dataset.end
            scores = output and _of_split(dataset, stream_nll(*split))
    if output is not None and scores is not None:
        tokens = enumerate(zip(scores.pieces, scores.nats, strict=True), 1)
        rows = ([position, piece, _rounded(nats)] for position, (piece, nats) in tokens)
        write_table(output, ["position", "token", "nats"], rows)


@contextlib.contextmanager
def _in_steps(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on a terminal; yield a function to call with each step as it begins."""
    with progress_bar(total, console) as (bar, task):
        done = itertools.count()
        yield lambda what: bar.update(task, completed=next(done), what=what, status="")


def print_lines(found: Found | None, arguments: Namespace, encoding: str) -> None:
    """Write the table of --lines, and print the mean loss where the table is a file.

    Raises UserError where the text cannot be read or encoded, or the table not be written.
    """
    model: Any
    nll: NLL | None = None
    if found is None:
        _, dataset = load_dataset(load_config(arguments.config or "astra_alpha"))
        tokenizer, nll = dataset.tokenizer, NGram.token_nll
        model = count_ngrams(dataset.train, tokenizer.vocab_size, arguments.ngram)
    else:
        model, _, tokenizer = found.load(arguments.epoch)
    text = load_corpus(arguments.text, encoding=encoding, reads_bytes=tokenizer.reads_bytes)
    lines = lines_of(text.text)
    rows, total, num_tokens = [], 0.0, 0
    with _encoded(text):
        for scores in score_lines(model, tokenizer, lines, nll):
            nats, count = float(scores.nats.sum()), scores.num_tokens
            mean = _rounded(nats / count) if count else ""
            rows.append([len(rows) + 1, _rounded(nats), count, mean, lines[len(rows)]])
            total, num_tokens = total + nats, num_tokens + count
    write_table(arguments.output, ["line", "nats", "tokens", "nats_per_token", "text"], rows)
    if arguments.output is not None:
        print(f"{counted(len(rows), 'line')} of {text.source}: {counted(num_tokens, 'token')}, "
              f"{total / max(num_tokens, 1):.4f} nats per token")  # fmt: skip


def _own_text(
    config: Config, tokenizer: Tokenizer, sha256: str, text: str | None, validation: str | None
) -> Dataset:
    """Load the text that a model was trained on; `text` and `validation` say where it is now."""
    if not sha256:
        raise UserError(
            "the model does not record the SHA-256 of the text that it was trained on, "
            f"{config.data.corpus}; give a text with --text."
        )
    given = {"corpus": text, "validation": validation}
    moved = {name: place for name, place in given.items() if place is not None}
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, **moved))
    return load_dataset(config, tokenizer, sha256, ("--text", "--validation"))[1]


def write_table(path: Path | None, names: list[str], rows: Iterable[list[Any]]) -> None:
    """Write rows as comma-separated values. Raises UserError if the file cannot be written."""
    table = io.StringIO(newline="")
    csv.writer(table, lineterminator="\n").writerows(itertools.chain([names], rows))
    write_output(path, [table.getvalue()])


def _rounded(nats: float) -> float:
    return float(f"{nats:.7g}")


def _title(name: str, text: str | None, part: str = "all of ") -> str:
    if text is None:
        return name
    return f"{name} on {part}{'standard input' if text == '-' else escape(printable(text))}"


def _counted(order: int, dataset: Dataset, text: Corpus | None) -> Scores:
    """Score a text, or the validation split, with n-grams counted in the training split."""
    model = count_ngrams(dataset.train, dataset.tokenizer.vocab_size, order)
    if text is not None:
        with _encoded(text):
            return score(model, dataset.tokenizer, text.text, NGram.token_nll)
    return _of_split(dataset, model.token_nll(dataset.validation))


def _of_split(dataset: Dataset, nats: Float[np.ndarray, "_"]) -> Scores:
    """Return the scores of the validation split."""
    return Scores(nats, dataset.num_characters, _pieces(dataset))


def _pieces(dataset: Dataset) -> list[str]:
    """Return the predicted tokens of the validation split, as the vocabulary spells them."""
    return [dataset.tokenizer.pieces[token] for token in dataset.validation[1:]]


def _print_unknown(console: Console, tokenizer: Tokenizer, pieces: list[str]) -> None:
    if tokenizer.unknown is not None:
        unknown = tokenizer.pieces[tokenizer.unknown]
        number, total = pieces.count(unknown), counted(len(pieces), "predicted token")
        share = f"{number / len(pieces):.1%}"
        what = f"{unknown.strip()}: they are not in the model's vocabulary"
        console.print(f"{number:,} of {total} ({share}) are {what}", markup=False)


@contextlib.contextmanager
def _encoded(text: Corpus) -> Iterator[None]:
    try:
        yield
    except TokenizerError as error:
        raise TokenizerError(f"the model cannot be evaluated on {text.source}: {error}") from error


def _scored(
    params: Params, config: Config, tokenizer: Tokenizer, text: Corpus, random_batches: bool,
    console: Console,
) -> tuple[list[tuple[str, float]], Scores]:  # fmt: skip
    """Return the loss of a text for each treatment of the state, and its scores as one stream."""
    rows, window, unit = [], config.training.sequence_length, config.data.unit
    end = end_token(tokenizer, unit)
    with _in_steps(console, 3 + random_batches) as begin:
        begin("one stream")
        with _encoded(text):
            if unit:
                tokens, size = encode_units(tokenizer, split_units(text.text, unit), unit)
            else:
                tokens = tokenizer.encode(text.text)
                size = len(text.text) - tokenizer.num_characters(tokens[:1], text.text)
        pieces = [tokenizer.pieces[token] for token in tokens[1:]]
        scores = Scores(stream_nll(params, tokens, end), size, pieces)
        rows.append((_one_stream(end is not None), scores.loss))
        for title, every in ((_windows(window), window), ("every token", 1)):
            begin(title)
            rows.append((title, window_loss(params, tokens, every, end=end)))
        if random_batches:
            begin("random batches")
            rows.append(_random_batches(state_cost.evaluate_random_batches(params, tokens, end)))
    return rows, scores


def _one_stream(of_units: bool) -> str:
    return "only where a unit begins" if of_units else "never: one stream"


def _losses(name: str, window: int, record: state_cost.StateCost, of_units: bool) -> Table:
    every = lambda n: "every token" if n == 1 else f"every {n:,} tokens"
    rows = [
        *((every(n), loss) for n, loss in record.memory_curve),
        (_one_stream(of_units), record.stream),
        (_windows(window), record.windows),
        ("sensitivity: every token minus never", record.sensitivity),
    ]
    if batches := record.random_batches:
        rows.append(_random_batches(batches))
    return _in_units(name, "state reset to zero", rows, record)


def _windows(window: int) -> str:
    return f"windows of {window}, as in training"


def _random_batches(found: state_cost.MeanLoss) -> tuple[str, float]:
    what = f"200 random batches of 64 windows of {state_cost.RANDOM_WINDOW}"
    return f"{what} (± {found.standard_error:.4f} nats/token)", found.mean


def _in_units(
    name: str,
    what: str,
    rows: list[tuple[str, float]],
    text: Scores | state_cost.StateCost,
    losses: bool = False,
) -> Table:
    """Return a table of (title, nats per token) in all units.

    Where each token is a character, the losses per token are left out: they are the same.

    losses: all rows are losses and not differences, so perplexity replaces bits per token.
    """
    sizes = text.num_tokens, text.num_characters
    names = ["nats/token", "perplexity" if losses else "bits/token", "nats/char", "bits/char"]
    units = "nats: −ln p of the next token, on average; bits: −log₂ p; less is better"
    left_out = {"nats/token", "bits/token"} if sizes[0] == sizes[1] else set()
    columns = [Column(unit, justify="right") for unit in names if unit not in left_out]
    table = Table(
        what,
        *columns,
        title=f"{name}: {counted(sizes[0], 'token')}, {counted(sizes[1], 'character')}",
        caption=units + "; perplexity: e to the nats per token" * losses,
        caption_justify="left",
    )
    for row, loss in rows:
        nats, bits, *per_character = in_units(loss, *sizes).values()
        values = nats, perplexity(loss) if losses else bits, *per_character
        cells = (f"{v:.4f}" for unit, v in zip(names, values, strict=True) if unit not in left_out)
        table.add_row(row, *cells)
    return table


def _text(texts: dict[str, state_cost.Text]) -> Table:
    table = Table(
        "",
        *(Column(name, justify="right") for name in texts),
        title=f"text from {state_cost.NUM_PROMPTS} prompts: greedy for loops, else temperature "
        f"{state_cost.TEMPERATURE}, top-k {state_cost.TOP_K}",
        caption="last token only: the model has read one token of the prompt, as in the study",
        caption_justify="left",
    )
    for measure, title in state_cost.TEXT_MEASURES.items():
        cells = [getattr(text, measure) for text in texts.values()]
        table.add_row(title, *("–" if value is None else f"{value:.4g}" for value in cells))
    return table


def _markov_chain(chain: state_cost.Chain) -> Table:
    table = Table(
        "greedy text ends in",
        Column("period", justify="right"),
        Column("share of tokens that lead there", justify="right"),
        title=f"reset at every token, a Markov chain: {chain.kl_to_bigram:.4f} nats per token from "
        "the corpus's bigram counts",
    )
    for cycle in chain.cycles:
        # as Text, because in a plain str Rich takes "[/b]" for markup
        table.add_row(Text(repr(cycle.text)), str(cycle.period), f"{cycle.basin:.0%}")
    return table
