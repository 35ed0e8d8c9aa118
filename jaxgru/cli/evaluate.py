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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxgru.analysis import state_cost
from jaxgru.analysis.ngrams import NGram, count_ngrams
from jaxgru.cli.options import Parser, check_printable, trained_model, write_output
from jaxgru.errors import UserError, counted, needs, printable
from jaxgru.lm.config import Config, load_config
from jaxgru.lm.data.corpus import load_corpus
from jaxgru.lm.data.dataset import Dataset, load_dataset
from jaxgru.lm.data.sources import Corpus
from jaxgru.lm.data.tokenizers import Tokenizer, TokenizerError
from jaxgru.lm.data.units import encode_text, encode_units, end_token, split_units
from jaxgru.lm.dynamic import CHOSEN_ON, choose_dynamic, dynamic_nll
from jaxgru.lm.evaluation import in_units, perplexity, stream_nll
from jaxgru.lm.model import Params
from jaxgru.lm.scoring import evaluate, score_lines

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
    parser.add_encoding(add, "--text")
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
    check(parser, arguments)
    load = _trained if arguments.ngram is None else _counted
    model, config, tokenizer, text = load(arguments)
    output, console = arguments.output, Console(highlight=False)
    name = config.data.corpus if isinstance(model, NGram) else config.name
    place = text.source.removeprefix("the file ")
    if isinstance(text, Dataset):  # whose validation split is evaluated
        tokens, size, end = text.validation, text.num_characters, text.end
        if arguments.text is not None and not config.data.validation:
            name += f" on the validation split of {place}"
    elif arguments.lines:
        print_lines(model, tokenizer, text, config.data.unit, output)
        return
    else:
        tokens, size, end = _encoded(tokenizer, text, config.data.unit)
        name += f" on all of {place}"
    pieces = [tokenizer.pieces[token] for token in tokens[1:]]
    if isinstance(model, Params) and isinstance(text, Dataset):
        _print_state_cost(console, name, model, config, text, pieces, arguments)
        nats = stream_nll(model, tokens, end) if output is not None else ()
    else:
        if isinstance(model, Params):
            what, window = "state reset to zero", config.training.sequence_length
            with console.status("measuring"):
                batches = None
                if arguments.random_batches:  # first, because the text can be too short for them
                    batches = state_cost.evaluate_random_batches(model, tokens, end)
                scores = evaluate(model, tokens, size, window, end)
            nats, curve = scores["stream"].nats, [(1, scores["stateless"].loss)]
            windows = scores["windows"].loss
            rows = _losses(curve, scores["stream"].loss, end, windows, window, batches)
        else:
            nats, what = model.token_nll(tokens), "n-gram model"
            rows = [(f"order {model.order}", float(nats.mean()))]
        console.print(_in_units(name, what, rows, len(nats), size, losses=True))
        _print_unknown(console, tokenizer, pieces)
    if output is not None:
        tokens = enumerate(zip(pieces, map(_rounded, nats), strict=True), 1)
        rows = ((position, *token) for position, token in tokens)
        write_table(output, ["position", "token", "nats"], rows)


def check(parser: Parser, arguments: Namespace) -> None:
    """Refuse options that do not go together, before anything slow starts."""
    given, ngram = arguments.text is not None, arguments.ngram is not None
    for applies, options, says in (
        (ngram, ("--epoch", "--dynamic", "--random-batches", "--validation"),
         "{} is for a model; it does not go with --ngram."),
        (given, ("--dynamic",),
         "{} chooses its settings on the text that a model was trained on; it does not go with "
         "--text."),
        (not given, ("--lines", "--encoding"), "{} is for --text; give the file, too."),
        (arguments.lines, ("--validation", "--random-batches"),
         "--lines scores each line alone; leave out {}."),
    ):  # fmt: skip
        for option in options:
            if applies and getattr(arguments, option[2:].replace("-", "_")):
                parser.error(says.format(option))
    if arguments.output is not None:
        parser.check_output(arguments.output, ".csv")


def _counted(arguments: Namespace) -> tuple[NGram, Config, Tokenizer, Corpus | Dataset]:
    """Return an n-gram model, its config and tokenizer, and the text to evaluate it on."""
    config, dataset = load_dataset(load_config(arguments.config or "astra_alpha"))
    text = _another_text(arguments, dataset.tokenizer, "") or dataset
    model = count_ngrams(dataset.train, dataset.tokenizer.vocab_size, arguments.ngram, dataset.end)
    return model, config, dataset.tokenizer, text


def _trained(arguments: Namespace) -> tuple[Params, Config, Tokenizer, Corpus | Dataset]:
    """Return what `_counted` returns, of a trained model."""
    found = trained_model(arguments)
    params, config, tokenizer = found.load(arguments.epoch)
    if arguments.dynamic and config.data.unit:
        raise UserError("--dynamic reads a text as one stream, not in units (data.unit).")
    sha256 = found.text_sha256()
    if (text := _another_text(arguments, tokenizer, sha256)) is not None:
        return params, config, tokenizer, text
    if not sha256:
        raise UserError(
            "the model does not record the SHA-256 of the text that it was trained on, "
            f"{config.data.corpus}; give a text with --text."
        )
    given = {"corpus": arguments.text, "validation": arguments.validation}
    moved = {name: place for name, place in given.items() if place is not None}
    own = dataclasses.replace(config, data=dataclasses.replace(config.data, **moved))
    dataset = load_dataset(own, tokenizer, sha256, ("--text", "--validation"))[1]
    return params, config, tokenizer, dataset


def _another_text(arguments: Namespace, tokenizer: Tokenizer, sha256: str) -> Corpus | None:
    """Return the text that --text names; None: there is none, or it is the model's own."""
    place = arguments.text
    if place is None:
        return None
    whole = arguments.lines or place == "-"
    if not whole and load_corpus(place, reads_bytes=True).sha256 == sha256.split(" ")[0]:
        return None
    if arguments.validation is not None:
        raise UserError("--validation goes with the model's own text; --text is another.")
    encoding = arguments.encoding or "utf-8"
    return load_corpus(place, encoding=encoding, reads_bytes=tokenizer.reads_bytes)


@contextlib.contextmanager
def _naming(text: Corpus) -> Iterator[None]:
    try:
        yield
    except TokenizerError as error:
        raise TokenizerError(f"the model cannot be evaluated on {text.source}: {error}") from error


def _encoded(
    tokenizer: Tokenizer, text: Corpus, unit: str
) -> tuple[Int[np.ndarray, "N"], int, int | None]:
    """Return what a dataset has of its validation split: tokens, characters, end-of-unit token."""
    with _naming(text):
        if unit:
            units = encode_units(tokenizer, split_units(text.text, unit), unit)
            return *units, end_token(tokenizer, unit)
        return *encode_text(tokenizer, text.text), None


def print_lines(
    model: Params | NGram, tokenizer: Tokenizer, text: Corpus, unit: str, output: Path | None
) -> None:
    """Write the table of --lines; of a file, print the mean loss and the unknown tokens."""
    if output is None:
        check_printable(text.text)
    rows: list[list[Any]] = []
    pieces: list[str] = []
    lines, total = split_units(text.text, "line"), 0.0
    nll: Any = NGram.token_nll if isinstance(model, NGram) else None
    with _naming(text):
        for scores in score_lines(model, tokenizer, lines, nll, unit):
            nats, count = float(scores.nats.sum()), scores.num_tokens
            mean = _rounded(nats / count) if count else ""
            rows.append([len(rows) + 1, _rounded(nats), count, mean, lines[len(rows)]])
            pieces += scores.pieces
            total += nats
    write_table(output, ["line", "nats", "tokens", "nats_per_token", "text"], rows)
    if output is not None:
        print(f"{counted(len(rows), 'line')} of {text.source}: {counted(len(pieces), 'token')}, "
              f"{total / max(len(pieces), 1):.4f} nats per token")  # fmt: skip
        _print_unknown(Console(highlight=False), tokenizer, pieces)


def write_table(path: Path | None, names: list[str], rows: Iterable[Any]) -> None:
    """Write rows as comma-separated values."""
    table = io.StringIO(newline="")
    for row in itertools.chain([names], rows):
        has_return = any("\r" in str(value) for value in row)  # which a plain writer does not quote
        quoting = csv.QUOTE_NONNUMERIC if has_return else csv.QUOTE_MINIMAL
        csv.writer(table, lineterminator="\n", quoting=quoting).writerow(row)
    write_output(path, [table.getvalue()])


def _rounded(nats: float) -> float:
    return float(f"{nats:.7g}")


def _print_unknown(console: Console, tokenizer: Tokenizer, pieces: list[str]) -> None:
    if tokenizer.unknown is not None:
        unknown = tokenizer.pieces[tokenizer.unknown]
        number, total = pieces.count(unknown), counted(len(pieces), "predicted token")
        share = f"{number / max(len(pieces), 1):.1%}"
        what = f"{unknown.strip()}: they are not in the model's vocabulary"
        console.print(f"{number:,} of {total} ({share}) are {what}", markup=False)


def _print_state_cost(
    console: Console, name: str, params: Params, config: Config, dataset: Dataset,
    pieces: list[str], arguments: Namespace,
) -> None:  # fmt: skip
    """Print every measure of a model on the validation split of its own text."""
    tokenizer, window = dataset.tokenizer, config.training.sequence_length
    batches = arguments.random_batches
    with console.status("measuring") as status:
        record = state_cost.measure(params, tokenizer, dataset, window, status.update, batches)
    sizes = record.num_tokens, record.num_characters
    rows = _losses(
        record.memory_curve, record.stream, dataset.end, record.windows, window,
        record.random_batches,
    )  # fmt: skip
    rows.append(("sensitivity: every token minus never", record.sensitivity))
    console.print(_in_units(name, "state reset to zero", rows, *sizes))
    _print_unknown(console, tokenizer, pieces)
    if record.text:
        console.print(_text(record.text))
    if arguments.dynamic:
        with console.status("choosing the settings of dynamic evaluation"):
            chosen = choose_dynamic(params, dataset.train[-CHOSEN_ON:])
            loss = float(dynamic_nll(params, dataset.validation, chosen).mean())
        rates = f"η {chosen.learning_rate:g}, λ {chosen.decay:g}, every {chosen.every}"
        rows = [("fixed", record.stream), (f"learning: {rates}", loss)]
        console.print(_in_units(name, "weights, one stream", rows, *sizes))
    if record.chain:
        console.print(_markov_chain(record.chain))


def _losses(
    curve: Iterable[tuple[int, float]], stream: float, end: int | None, windows: float, window: int,
    batches: state_cost.MeanLoss | None,
) -> list[tuple[str, float]]:  # fmt: skip
    """Return the title and the nats per token of each treatment of the state."""
    every = lambda n: "every token" if n == 1 else f"every {n:,} tokens"
    rows = [
        *((every(n), loss) for n, loss in curve),
        ("never: one stream" if end is None else "only where a unit begins", stream),
        (f"windows of {window}, as in training", windows),
    ]
    if batches is not None:
        what = f"200 random batches of 64 windows of {state_cost.RANDOM_WINDOW}"
        rows.append((f"{what} (± {batches.standard_error:.4f} nats/token)", batches.mean))
    return rows


def _in_units(
    name: str,
    what: str,
    rows: list[tuple[str, float]],
    num_tokens: int,
    num_characters: int,
    losses: bool = False,
) -> Table:
    """Return a table of (title, nats per token), also per character and, of losses, as perplexity.

    Where each token is a character, nats per token are left out.
    """
    shown = num_tokens != num_characters, losses, True, True
    names = "nats/token", "perplexity", "nats/char", "bits/char"
    units = "nats: −ln p of the next token, on average; bits: −log₂ p; less is better"
    table = Table(
        what,
        *(Column(unit, justify="right") for unit in itertools.compress(names, shown)),
        title=f"{escape(printable(name))}: {counted(num_tokens, 'token')}, "
        f"{counted(num_characters, 'character')}",
        caption=units + "; perplexity: e to the nats per token" * losses,
        caption_justify="left",
    )
    for row, nats in rows:
        _, _, *per_character = in_units(nats, num_tokens, num_characters).values()
        values = nats, perplexity(nats), *per_character
        table.add_row(row, *(f"{value:.4f}" for value in itertools.compress(values, shown)))
    return table


def _text(texts: Mapping[str, state_cost.Text]) -> Table:
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
