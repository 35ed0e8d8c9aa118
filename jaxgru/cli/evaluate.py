"""Measure a model's loss with and without its state, or the loss of each token of a text.

Without --text, the text is the validation split of what the model was trained on.
"""

from __future__ import annotations

import csv
import io
import itertools
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgru.analysis import measures
from jaxgru.analysis.measures import MEASURES, TEXT_MEASURES, Measurements, Subject, measure
from jaxgru.analysis.ngrams import NGram, count_ngrams
from jaxgru.cli.options import Parser, trained_model, value_of, write_output
from jaxgru.errors import UserError, needs
from jaxgru.lm import Params
from jaxgru.lm.config import Config, DataConfig, load_config, override
from jaxgru.lm.data.corpus import load_corpus
from jaxgru.lm.data.dataset import Dataset, load_dataset, reads_newlines
from jaxgru.lm.data.documents import (
    encode_documents,
    encode_text,
    separator_token_of,
    split_documents,
)
from jaxgru.lm.data.sources import Corpus
from jaxgru.lm.data.tokenizers import Tokenizer, TokenizerError
from jaxgru.lm.evaluation import in_units, score_lines
from jaxgru.printing import counted, printable

with needs("train"):
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table
    from rich.text import Text


OPTIONS = {name: f"--{name.replace('_', '-')}" for name, row in MEASURES.items() if row.help}
"""The options that ask for a measure, by its name."""


class Task(NamedTuple):
    """A model, and what it is evaluated on: another text, or the dataset of its own text."""

    model: Params | NGram
    config: Config
    tokenizer: Tokenizer
    text: Corpus | Dataset

    def title(self, arguments: Namespace) -> str:
        """Return what the tables are about."""
        data = self.config.data
        name = data.corpus if isinstance(self.model, NGram) else self.config.name
        place = self.text.source.removeprefix("the file ")
        if isinstance(self.text, Corpus):
            return f"{name} on all of {place}"
        if arguments.text is not None and not data.validation:
            return f"{name} on the validation split of {place}"
        return name


def make_parser() -> Parser:
    """Return the parser of this command's options."""
    parser = Parser(
        __doc__,
        [
            "evaluate runs/astra_alpha",
            "evaluate astra_alpha",
            "evaluate mine.safetensors --text hamlet.txt --output hamlet.csv",
            "evaluate mine.safetensors --text names.txt --lines",
            "evaluate --ngram 2",
        ],
        usage="(MODEL | --ngram ORDER) [options]",
    )
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
    for name, option in OPTIONS.items():
        add(option, action="store_true", help=MEASURES[name].help)
    return parser


def main() -> None:
    """Parse the arguments, evaluate the model and print tables."""
    parser = make_parser()
    arguments = parser.parse_args()
    check(parser, arguments)
    task = _trained(arguments) if arguments.ngram is None else _ngram(arguments)
    if isinstance(task.text, Dataset):
        print_measures(task, task.text, arguments)
        return
    separator = task.config.data.separator
    try:
        if arguments.lines:
            print_lines(task.model, task.tokenizer, task.text, separator, arguments.output)
            return
        dataset = _as_dataset(task.tokenizer, task.text, separator)
    except TokenizerError as error:
        raise TokenizerError(
            f"the model cannot be evaluated on {task.text.source}: {error}"
        ) from error
    print_measures(task, dataset, arguments)


def check(parser: Parser, arguments: Namespace) -> None:
    """Refuse options that do not go together, before anything slow starts."""

    def refuse(options: Iterable[str], sentence: str) -> None:
        for option in options:
            if value_of(arguments, option):
                parser.error(sentence.format(option))

    if arguments.ngram is not None:
        refuse(
            ["--epoch", *OPTIONS.values(), "--validation"],
            "{} is for a model; it does not go with --ngram.",
        )
    if arguments.text is not None:
        refuse(
            ["--dynamic"],
            "{} chooses its settings on the text that a model was trained on; it does not go with "
            "--text.",
        )
    else:
        refuse(["--lines", "--encoding"], "{} is for --text; give the file, too.")
    if arguments.lines:
        refuse(
            ["--validation", *OPTIONS.values()],
            "--lines scores each line alone; leave out {}.",
        )
    if arguments.output is not None:
        parser.check_output(arguments.output, ".csv")


def _ngram(arguments: Namespace) -> Task:
    """Count an n-gram model, and load the text to evaluate it on."""
    config, dataset = load_dataset(load_config(arguments.config or "astra_alpha"))
    tokenizer = dataset.tokenizer
    text = _another_text(arguments, config.data, tokenizer, "") or dataset
    model = count_ngrams(
        dataset.train, tokenizer.vocab_size, arguments.ngram, dataset.separator_token
    )
    return Task(model, config, tokenizer, text)


def _trained(arguments: Namespace) -> Task:
    """Load a trained model, and the text to evaluate it on."""
    model = trained_model(arguments)
    params, config, tokenizer = model.load(arguments.epoch)
    data = config.data
    if arguments.dynamic and data.separator:
        raise UserError("--dynamic reads a text as one stream, not in documents (data.separator).")
    sha256 = model.text_sha256()
    text = _another_text(arguments, data, tokenizer, sha256)
    if text is not None:
        return Task(params, config, tokenizer, text)
    if not sha256:
        raise UserError(
            "the model does not record the SHA-256 of the text that it was trained on, "
            f"{data.corpus}; give a text with --text."
        )
    places = {
        "name": config.name,
        "data.corpus": arguments.text or data.corpus,
        "data.validation": arguments.validation or data.validation,
    }
    options = "--text", "--validation"
    _, dataset = load_dataset(override(config, places), tokenizer, sha256, options)
    return Task(params, config, tokenizer, dataset)


def _another_text(
    arguments: Namespace, data: DataConfig, tokenizer: Tokenizer, sha256: str
) -> Corpus | None:
    """Return the text that --text names; None: there is none, or it is the model's own."""
    place = arguments.text
    if place is None:
        return None
    is_another = arguments.lines or place == "-"
    if not is_another and load_corpus(place, reads_bytes=True).sha256 == sha256.split(" ")[0]:
        return None
    if arguments.validation is not None:
        raise UserError("--validation goes with the model's own text; --text is another.")
    return load_corpus(
        place,
        encoding=arguments.encoding or "utf-8",
        reads_bytes=tokenizer.reads_bytes,
        newlines=reads_newlines(data, tokenizer),
    )


def _as_dataset(tokenizer: Tokenizer, text: Corpus, separator: str) -> Dataset:
    """Return a text, all of it for validation."""
    if separator:
        tokens, size = encode_documents(tokenizer, split_documents(text.text, separator), separator)
    else:
        tokens, size = encode_text(tokenizer, text.text)
    separator_token = separator_token_of(tokenizer, separator)
    no_tokens = np.empty(0, np.int32)
    return Dataset(no_tokens, tokens, tokenizer, text.source, size, text.sha256, separator_token)


def print_measures(task: Task, dataset: Dataset, arguments: Namespace) -> None:
    """Print the tables of the measures, and write the nats of each token to --output."""
    title = task.title(arguments)
    model = task.model
    console = Console(highlight=False)
    if isinstance(model, NGram):
        nats = model.token_nll(dataset.validation)
        losses = [(f"order {model.order}", float(nats.mean()))]
        sizes = len(nats), dataset.num_characters
        tables = [losses_table("n-gram model", losses, title, *sizes)]
    else:
        subject = Subject(model, dataset, task.config.training.sequence_length)
        names = [name for name in OPTIONS if getattr(arguments, name)]
        with console.status("measuring") as status:
            record = measure(subject, names, lambda name: status.update(f"measuring {name}"))
        nats = subject.nats
        tables = tables_of(title, subject, record)
    console.print(*tables, sep="\n")
    pieces = [task.tokenizer.pieces[token] for token in dataset.validation[1:]]
    _print_unknown(console, task.tokenizer, pieces)
    if arguments.output is not None:
        rows = zip(itertools.count(1), pieces, map(_rounded, nats), strict=False)
        write_table(arguments.output, ["position", "token", "nats"], rows)


def print_lines(
    model: Params | NGram, tokenizer: Tokenizer, text: Corpus, separator: str, output: Path | None
) -> None:
    """Write the table of --lines; of a file, print the mean loss and the unknown tokens."""
    lines = split_documents(text.text, "line")
    nll: Any = NGram.token_nll if isinstance(model, NGram) else None
    rows: list[list[Any]] = []
    pieces: list[str] = []
    total = 0.0
    for scores in score_lines(model, tokenizer, lines, nll, separator):
        nats = float(scores.nats.sum())
        count = scores.num_tokens
        mean = _rounded(nats / count) if count else ""
        line = lines[len(rows)]
        rows.append([len(rows) + 1, _rounded(nats), count, mean, line])
        pieces += scores.pieces
        total += nats
    write_table(output, ["line", "nats", "tokens", "nats_per_token", "text"], rows)
    if output is not None:
        sizes = f"{counted(len(rows), 'line')} of {text.source}: {counted(len(pieces), 'token')}"
        print(f"{sizes}, {total / max(len(pieces), 1):.4f} nats per token")
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
    """Print how many of the tokens are unknown, if the tokenizer has a token for that."""
    if tokenizer.unknown is None:
        return
    unknown = tokenizer.pieces[tokenizer.unknown]
    number = pieces.count(unknown)
    total = counted(len(pieces), "predicted token")
    share = f"{number / max(len(pieces), 1):.1%}"
    console.print(
        f"{number:,} of {total} ({share}) are {unknown.strip()}: they are not in the model's "
        "vocabulary",
        markup=False,
    )


def tables_of(name: str, subject: Subject, record: Measurements) -> list[Table | str]:
    """Return the table of losses, a line for each other number, and the tables of the rest."""
    losses: list[tuple[str, float]] = []
    lines: list[str] = []
    for field, row in MEASURES.items():
        value = getattr(record, field)
        if not row.unit or value is None:
            continue
        for k, number in _points(value):
            title = row.title.format(s=subject, v=value, k=k)
            if row.unit != "nats/token":
                lines.append(f"{title}: {number:.4f} {row.unit}")
            elif k != 1:  # a reset before every token is a measure of its own
                losses.append((title, number))
    sizes = record.num_tokens, record.num_characters
    tables: list[Table | str] = [losses_table("state reset to zero", losses, name, *sizes), *lines]
    if record.text:
        tables.append(text_table(record.text))
    if record.chain:
        tables.append(chain_table(record.chain))
    return tables


def _points(value: Any) -> list[tuple[int, float]]:
    """Return the numbers of a measure by k; most measures have one number, and no k."""
    if isinstance(value, list):
        return value
    return [(0, getattr(value, "mean", value))]


def losses_table(
    what: str, losses: Iterable[tuple[str, float]], name: str, num_tokens: int, num_characters: int
) -> Table:
    """Return a table of (title, nats per token), also as perplexity and per character.

    Where each token is a character, nats per token are left out.
    """
    heads = [what]
    rows: list[list[str]] = []
    for title, nats in losses:
        units = in_units(nats, num_tokens, num_characters)
        if num_tokens == num_characters:
            del units["nats_per_token"]
        heads = [what, *(unit.replace("_per_", "/").removesuffix("acter") for unit in units)]
        rows.append([title, *(f"{number:.4f}" for number in units.values())])
    return _table(
        f"{name}: {counted(num_tokens, 'token')}, {counted(num_characters, 'character')}",
        heads,
        rows,
        "nats: −ln p of the next token, on average; bits: −log₂ p; perplexity: e to the nats per "
        "token; less is better",
    )


COLUMNS = {"stateless": "reset at every token", "stateful": "state kept"}
"""What the texts of `measures.TREATMENTS` are called; the others by their names."""


def text_table(texts: Mapping[str, measures.Text]) -> Table:
    """Return the table of what a model writes with its state and without it."""
    rows = []
    for field, title in TEXT_MEASURES.items():
        values = [getattr(text, field) for text in texts.values()]
        rows.append([title, *("–" if value is None else f"{value:.4g}" for value in values)])
    return _table(
        f"text from {measures.NUM_PROMPTS} prompts: greedy for loops, else temperature "
        f"{measures.TEMPERATURE}, top-k {measures.TOP_K}",
        ["", *(COLUMNS.get(text, text) for text in texts)],
        rows,
        "last token only: the model has read one token of the prompt, as in the study",
    )


def chain_table(chain: measures.Chain) -> Table:
    """Return the table of the cycles that greedy text without a state ends in."""
    return _table(
        "reset at every token, the model is a Markov chain; its distance from the text's bigram "
        f"counts (KL divergence): {chain.kl_to_bigram:.4f} nats per token",
        ["greedy text ends in", "period", "share of tokens that lead there"],
        [[repr(c.text), str(c.period), f"{c.basin:.0%}"] for c in chain.cycles],
    )


def _table(title: str, heads: list[str], rows: list[list[str]], caption: str = "") -> Table:
    """Return a table of a column of words, then of numbers."""
    columns = [heads[0], *(Column(head, justify="right") for head in heads[1:])]
    table = Table(*columns, title=escape(printable(title)), caption=caption)
    table.caption_justify = "left"
    for row in rows:
        table.add_row(*map(Text, row))  # in plain strings, Rich takes "[/b]" for markup
    return table
