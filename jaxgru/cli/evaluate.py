"""Evaluate a trained model on its validation split or on another text, with and without its state.

With --ngram, print the loss of a counted n-gram model on that split.
"""

from __future__ import annotations

import dataclasses

from jaxgru.analysis import state_cost
from jaxgru.analysis.ngrams import count_ngrams
from jaxgru.cli.options import Parser, trained_model
from jaxgru.errors import UserError, needs, printable
from jaxgru.lm.config import Config, load_config
from jaxgru.lm.data.corpus import load_corpus
from jaxgru.lm.data.dataset import Dataset, load_dataset
from jaxgru.lm.data.tokenizers import Tokenizer, TokenizerError
from jaxgru.lm.evaluation import in_units
from jaxgru.lm.files import check_writable
from jaxgru.lm.generation import default_prompt
from jaxgru.lm.runs.study_record import best_kept_epoch, save_record

with needs("train"):
    from msgspec.structs import replace
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text


def make_parser() -> Parser:
    """Return the parser of this command's options."""
    parser = Parser(
        __doc__,
        ["evaluate --run runs/astra_alpha", "evaluate --pretrained astra_alpha",
         "evaluate --run astra_alpha.safetensors --text hamlet.txt", "evaluate --ngram 2"],
    )  # fmt: skip
    parser.add_model()
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="UTF-8 text to evaluate on, the whole of it (default: the validation split of the "
        "text that the model was trained on, which may be given here if it was moved)",
    )
    parser.add_argument(
        "--save", action="store_true", help="also write the results into the run folder"
    )
    parser.add_argument(
        "--random-batches",
        action="store_true",
        help="also evaluate 200 random batches of 64 windows of 256 tokens, as nanoGPT does; "
        "with the best epoch's weights, too, if the run has kept those of each epoch",
    )
    return parser


def main() -> None:
    """Parse the arguments, evaluate the model and print tables."""
    parser = make_parser()
    arguments = parser.parse_args()
    counted = arguments.ngram is not None
    model = None if counted else trained_model(arguments)
    run = None if model is None or model.format else model.path
    if arguments.save:
        if run is None:
            parser.error("--save writes into a run folder; give one with --run.")
        if arguments.text is not None:
            parser.error("--save is for the run's own text; it does not go with --text.")
        try:
            check_writable(run)
        except OSError as error:
            parser.error(f"--save: {arguments.run} cannot be written: {error.strerror}.")
    if arguments.random_batches and counted:
        parser.error("--random-batches is for a model; it does not go with --ngram.")
    if arguments.text is not None and counted:
        parser.error("--text is for a model; --ngram counts the text of --config.")
    console = Console(highlight=False)
    if model is None:
        config, dataset = load_dataset(load_config(arguments.config or "astra_alpha"))
        console.print(_ngram(config.name, arguments.ngram, dataset))
        return

    params, config, tokenizer = model.load()
    text_sha256 = model.text_sha256()
    dataset = load_text(config, tokenizer, text_sha256, arguments.text)
    window, whole = config.training.sequence_length, dataset.train is dataset.validation
    name = config.name
    if arguments.text is not None:
        part = "all" if whole else "the validation split"
        name += f" on {part} of {escape(printable(arguments.text))}"
    with console.status("compiling") as status:
        record = state_cost.measure(
            params,
            tokenizer,
            dataset,
            window,
            lambda what: status.update(f"measuring {what}"),
            arguments.random_batches,
            default_prompt(text_sha256, tokenizer),
        )
        if arguments.random_batches and run:
            status.update("measuring the best epoch")
            best = best_kept_epoch(run, dataset.validation, window)
            if best and record.random_batches:
                epoch, params = best
                found = state_cost.evaluate_random_batches(params, dataset.validation, epoch)
                batches = replace(record.random_batches, best=found)
                record = replace(record, random_batches=batches)
    console.print(_losses(name, window, record), _text(record.text, whole), sep="\n")
    if record.chain:
        console.print(_markov_chain(record.chain))
    if arguments.save and run:
        save_record(run, record.to_dict())


def load_text(config: Config, tokenizer: Tokenizer, sha256: str, text: str | None) -> Dataset:
    """Load the text that a model is evaluated on; None: the one that it was trained on, by SHA-256.

    That one is split as in training, wherever it is now. Of another, both splits are all of it.

    Raises:
      UserError: the text cannot be read, or the model cannot encode it; without `text`, also if the
        model's own was moved, has changed, or cannot be told from others for lack of a SHA-256.
    """
    if text is None:
        if not sha256:
            raise UserError(
                f"the model does not say by a SHA-256 which {config.data.corpus} it was trained "
                "on; give a text with --text."
            )
        return load_dataset(config, tokenizer, sha256, "--text")[1]
    data = config.data
    corpus = load_corpus(text, encoding=data.encoding, reads_bytes=tokenizer.reads_bytes)
    if corpus.sha256 == sha256:
        data = dataclasses.replace(config.data, corpus=text)
        return load_dataset(dataclasses.replace(config, data=data), tokenizer)[1]
    try:
        tokens = tokenizer.encode(corpus.text)
    except TokenizerError as error:
        raise TokenizerError(f"the model cannot be evaluated on {text}: {error}") from error
    num_characters = len(corpus.text) - tokenizer.num_characters(tokens[:1], corpus.text)
    return Dataset(tokens, tokens, tokenizer, corpus.source, num_characters, corpus.sha256)


def _losses(name: str, window: int, record: state_cost.StateCost) -> Table:
    rows = [
        ("every token: stateless" if every == 1 else f"every {every:,} tokens", loss)
        for every, loss in record.memory_curve
    ]
    rows += [
        ("never: one stream", record.stream),
        (f"windows of {window}, as in training", record.windows),
        ("sensitivity: stateless minus one stream", record.sensitivity),
    ]
    if batches := record.random_batches:
        what = f"200 random batches of 64 windows of {state_cost.RANDOM_WINDOW}"
        for found in filter(None, (batches, batches.best)):
            whose = f", epoch {found.epoch}" if found.epoch else ""
            error = f" (± {found.standard_error:.4f} nats/token)"
            rows.append((what + whose + error, found.mean))
    sizes = record.num_tokens, record.num_characters
    return _in_units(name, "state reset to zero", rows, *sizes)


def _ngram(name: str, order: int, dataset: Dataset) -> Table:
    tokens = dataset.validation
    model = count_ngrams(dataset.train, dataset.tokenizer.vocab_size, order)
    rows = [(f"order {order}", float(model.token_nll(tokens).mean()))]
    return _in_units(name, "counted n-grams", rows, len(tokens) - 1, dataset.num_characters)


def _in_units(
    name: str, what: str, rows: list[tuple[str, float]], num_tokens: int, num_characters: int
) -> Table:
    table = Table(title=f"{name}: {num_tokens:,} tokens, {num_characters:,} characters")
    table.add_column(what)
    for unit in ("nats/token", "bits/token", "nats/char", "bits/char"):
        table.add_column(unit, justify="right")
    for row, loss in rows:
        units = in_units(loss, num_tokens, num_characters)
        table.add_row(row, *(f"{value:.4f}" for value in units.values()))
    return table


def _text(texts: dict[str, state_cost.Text], whole: bool) -> Table:
    """whole: the text has no splits, so no words are known from training."""
    table = Table(
        title=f"text from {state_cost.NUM_PROMPTS} prompts: greedy for loops, else temperature "
        f"{state_cost.TEMPERATURE}, top-k {state_cost.TOP_K}"
    )
    table.add_column("")
    for name in texts:
        table.add_column(name.removeprefix("validation ") if whole else name, justify="right")
    for measure, title in state_cost.TEXT_MEASURES.items():
        cells = [getattr(text, measure) for text in texts.values()]
        title = title.replace("the training text", "the text") if whole else title
        table.add_row(title, *("–" if value is None else f"{value:.4g}" for value in cells))
    return table


def _markov_chain(chain: state_cost.Chain) -> Table:
    table = Table(
        title=f"the stateless Markov chain: {chain.kl_to_bigram:.4f} nats per token from the "
        "counted bigram, weighted by the corpus"
    )
    table.add_column("greedy text ends in")
    table.add_column("period", justify="right")
    table.add_column("share of tokens that lead there", justify="right")
    for cycle in chain.cycles:
        # as Text, because in a plain str Rich takes "[/b]" for markup
        table.add_row(Text(repr(cycle.text)), str(cycle.period), f"{cycle.basin:.0%}")
    return table
