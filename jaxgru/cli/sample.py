"""Generate text with a trained model."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxgru.analysis.ngrams import NGram, count_ngrams
from jaxgru.cli.options import Parser, trained_model, unescaped, value_of, write_output
from jaxgru.errors import UserError, check_whole, needs
from jaxgru.lm import Params, processors, stream_text
from jaxgru.lm.config import load_config
from jaxgru.lm.data.dataset import load_dataset, reads_newlines
from jaxgru.lm.data.documents import split_documents
from jaxgru.lm.data.sources import read_text, with_newlines
from jaxgru.lm.data.tokenizers import Tokenizer, check_utf_8
from jaxgru.lm.generation import PROMPT, Options, default_prompt, generate_texts
from jaxgru.lm.processors import Processor
from jaxgru.printing import shown

DEFAULT = "astra_beta"  # where no model is named


class ProcessorOption(NamedTuple):
    """An option, what it makes of its number, and its help."""

    option: str
    processor: Callable[[float], Processor]
    help: str


PROCESSORS = (
    ProcessorOption(
        "--repetition-penalty",
        processors.RepetitionPenalty,
        "divide the logits of tokens already in the text by this, such as 1.2 (default: 1)",
    ),
    ProcessorOption(
        "--frequency-penalty",
        processors.FrequencyPenalty,
        "subtract this from a token's logit for each time that it is in the text (default: 0)",
    ),
    ProcessorOption(
        "--presence-penalty",
        processors.PresencePenalty,
        "subtract this from the logits of tokens already in the text (default: 0)",
    ),
    ProcessorOption(
        "--min-p",
        processors.MinP,
        "exclude tokens less likely than this fraction of the likeliest one (default: none)",
    ),
    ProcessorOption(
        "--typical",
        processors.Typical,
        "sample from the tokens of nearly average surprise that together have this probability "
        "(default: all)",
    ),
)
"""Options, in the order in which they are applied."""
PENALTIES = [row.option for row in PROCESSORS if row.option.endswith("-penalty")]


class Author(NamedTuple):
    """A model, and what its texts depend on."""

    model: Params | NGram
    tokenizer: Tokenizer
    separator: str
    newlines: bool  # whether all line ends become newlines in its own text
    text_sha256: str

    def read(self, text: str) -> str:
        """Return a typed text with line ends as in the model's own text."""
        return with_newlines(text) if self.newlines else text


def make_parser() -> Parser:
    """Return the parser of this command's options."""
    parser = Parser(
        __doc__,
        [
            "sample",
            "sample astra_alpha --prompt 'JULIET: ' --temperature 0.6",
            "sample runs/astra_alpha --compare --temperature 0",
            "sample astra_beta --stop '\\n\\n' --num-samples 8",
            "sample astra_beta --prompts names.txt --output texts.jsonl",
        ],
        usage="[MODEL] [options]",
    )
    parser.add_model(DEFAULT)
    add = parser.add_argument_group("text").add_argument
    _add_prompts(parser, add)
    _add_token_options(add)
    _add_text_options(add)
    return parser


def _add_prompts(parser: Parser, add: Callable[..., Any]) -> None:
    """Add the options that say what texts begin with."""
    add(
        "--prompt",
        type=unescaped,
        help="text to continue, in which \\n is a newline "
        f"(default: {PROMPT!r}; for models of other texts a newline or word)",
    )
    add(
        "--prompts",
        metavar="FILE",
        help="continue each line of this file (-: of standard input) or, of a .jsonl file, each "
        "line's prompt, in batches: a JSON object with line, prompt and the text after it for "
        "each, on standard output if there is no --output",
    )
    parser.add_encoding(add, "--prompts")
    add("--output", type=Path, help=".jsonl file for --prompts; an older file is replaced")


def _add_token_options(add: Callable[..., Any]) -> None:
    """Add the options that say how many tokens are drawn, and how each of them is."""
    add(
        "--num-tokens",
        type=int,
        default=Options.num_tokens,
        help="number of tokens to generate (default: %(default)s)",
    )
    add(
        "--temperature",
        type=float,
        default=Options.temperature,
        help="divisor of the logits; 0 takes the likeliest token (default: %(default)s)",
    )
    add("--top-k", type=int, help="sample from this many of the likeliest tokens (default: all)")
    add(
        "--top-p",
        type=float,
        help="sample from the likeliest tokens that together have this probability (default: all)",
    )
    for row in PROCESSORS:
        add(row.option, type=float, help=row.help)
    add(
        "--exempt",
        metavar="TEXT",
        type=unescaped,
        help="the tokens of TEXT, in which \\n is a newline, never count for a penalty",
    )


def _add_text_options(add: Callable[..., Any]) -> None:
    """Add the options that concern whole texts."""
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        type=unescaped,
        help="end the text before TEXT, in which \\n is a newline; may be given several times. The "
        "text of a model that was trained in documents (data.separator) also ends where the "
        "document does",
    )
    add(
        "--unknown",
        action=argparse.BooleanOptionalAction,
        default=Options.unknown,
        help="whether the text may hold the token of unknown words or characters (default: no)",
    )
    add("--stateless", action="store_true", help="reset the state to zero before every token")
    add(
        "--last-token-only",
        action="store_true",
        help="read only the last token of the prompt, like the study's samplers",
    )
    add("--num-samples", type=int, default=1, help="number of samples (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of the random choices (default: %(default)s)")
    add("--compare", action="store_true", help="print text with and without the state side by side")


def main() -> None:
    """Parse the arguments, load the model and print samples."""
    parser = make_parser()
    arguments = parser.parse_args()
    check(parser, arguments)
    chain = _logits_processors(arguments)
    author = _trained(arguments) if arguments.ngram is None else _ngram(arguments)
    if arguments.exempt is not None:
        exempt = exempt_tokens(author.tokenizer, author.read(arguments.exempt))
        chain = [processors.Exempt(processor, exempt) for processor in chain]
    options = dataclasses.replace(
        _options(arguments),
        stateful=not arguments.stateless,
        stop=[author.read(text) for text in arguments.stop],
        logits_processor=tuple(chain),
        separator=author.separator,
    )
    if arguments.prompts is not None:
        write_texts(author, options, arguments)
        return
    prompt = _prompt(author, arguments.prompt)
    if arguments.compare and isinstance(author.model, Params):
        print_comparison(author.model, author.tokenizer, prompt, options)
        return
    for sample in range(arguments.num_samples):
        text = stream_text(author.model, author.tokenizer, prompt, options, sample)
        if arguments.num_samples > 1:
            print(f"--- sample {sample + 1} of {arguments.num_samples}, seed {options.seed}")
        for piece in text:
            print(piece, end="", flush=True)
        print()


def check(parser: Parser, arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together, before anything slow starts."""
    if arguments.compare and arguments.stateless:
        parser.error("--compare samples with the state kept and reset; leave out --stateless.")
    if arguments.compare and arguments.num_samples != 1:
        parser.error("--compare shows one sample of each; leave out --num-samples.")
    if arguments.prompts is not None and (arguments.prompt is not None or arguments.compare):
        parser.error("--prompts names the file of all prompts; leave out --prompt and --compare.")
    if arguments.output is not None:
        if arguments.prompts is None:
            parser.error("--output is the file for the texts of --prompts; give --prompts, too.")
        parser.check_output(arguments.output, ".jsonl")
    if arguments.encoding is not None and arguments.prompts is None:
        parser.error("--encoding is for --prompts; give the file, too.")
    check_whole("num_samples", arguments.num_samples, 2**32)
    if arguments.ngram is not None:
        of_logits = [row.option for row in PROCESSORS]
        for option in ("--stateless", "--compare", "--epoch", *of_logits):
            if value_of(arguments, option) not in (None, False):
                parser.error(f"an n-gram model has no state, epochs or logits; leave out {option}.")
    has_penalty = any(value_of(arguments, option) is not None for option in PENALTIES)
    if arguments.exempt is not None and not has_penalty:
        parser.error(f"--exempt is for {', '.join(PENALTIES)}; give one of them, too.")


def _options(arguments: argparse.Namespace) -> Options:
    """Return the options that have the names of their fields."""
    values = vars(arguments)
    names = [field.name for field in dataclasses.fields(Options) if field.name in values]
    return Options(**{name: values[name] for name in names})


def _logits_processors(arguments: argparse.Namespace) -> list[Processor]:
    """Return the processors of the logits that the options name."""
    chain: list[Processor] = []
    for row in PROCESSORS:
        value = value_of(arguments, row.option)
        if value is not None:
            chain.append(row.processor(value))
    return chain


def _ngram(arguments: argparse.Namespace) -> Author:
    """Count an n-gram model."""
    config, dataset = load_dataset(load_config(arguments.config or "astra_alpha"))
    tokenizer = dataset.tokenizer
    model = count_ngrams(
        dataset.train, tokenizer.vocab_size, arguments.ngram, dataset.separator_token
    )
    newlines = reads_newlines(config.data, tokenizer)
    return Author(model, tokenizer, config.data.separator, newlines, dataset.sha256)


def _trained(arguments: argparse.Namespace) -> Author:
    """Load a trained model."""
    model = trained_model(arguments, DEFAULT)
    params, config, tokenizer = model.load(arguments.epoch)
    newlines = reads_newlines(config.data, tokenizer)
    return Author(params, tokenizer, config.data.separator, newlines, model.text_sha256())


def _prompt(author: Author, prompt: str | None) -> str:
    """Return the prompt as the model reads it, or the default one; in documents, that is none."""
    if prompt is not None:
        return author.read(prompt)
    if author.separator:
        return ""
    return default_prompt(author.text_sha256, author.tokenizer)


def write_texts(author: Author, options: Options, arguments: argparse.Namespace) -> None:
    """Write the texts of --prompts, each as a JSON object in a line of its own."""
    encoding = arguments.encoding or "utf-8"
    prompts = read_prompts(arguments.prompts, encoding, author.newlines)
    texts = generate_texts(
        author.model,
        author.tokenizer,
        [author.read(prompt) for prompt in prompts.values()],
        options,
        arguments.num_samples,
    )
    write_output(arguments.output, _json_lines(prompts, texts))


def _json_lines(prompts: dict[int, str], texts: Iterable[str]) -> Iterator[str]:
    """Yield a JSON object for each text; each sample begins with the first prompt again."""
    numbered_prompts = itertools.cycle(prompts.items())
    for (number, prompt), text in zip(numbered_prompts, texts, strict=False):
        record = {"line": number, "prompt": prompt, "text": text}
        yield json.dumps(record, ensure_ascii=False) + "\n"


def exempt_tokens(tokenizer: Tokenizer, text: str) -> Int[np.ndarray, "N"]:
    """Return the tokens of --exempt.

    Raises:
      UserError: the vocabulary lacks some of the text.
    """
    tokens = tokenizer.encode(text)
    unknown = tokenizer.unknown
    if unknown is None or unknown not in tokens:
        return tokens
    piece = tokenizer.pieces[unknown].strip()  # which the text may name on purpose
    if unknown in tokenizer.encode(text.replace(piece, "")):
        raise UserError(
            f"--exempt is {shown(text)}, some of which the model's vocabulary lacks, so that "
            f"{piece} would be exempt; leave that out."
        )
    return tokens


def read_prompts(place: str, encoding: str, newlines: bool = True) -> dict[int, str]:
    """Return the lines of a file or, of a .jsonl file, the `prompt` in each, by line number.

    Blank lines of a .jsonl file are left out. `newlines` is as for `read_text`.

    Raises:
      UserError: a .jsonl file has no prompts, or a line of it has none.
    """
    text = read_text(place, encoding, newlines=newlines).text
    lines = dict(enumerate(split_documents(text, "line"), 1))
    suffixes = Path(place.lower()).suffixes
    if ".jsonl" not in suffixes:  # which may end in .gz
        return lines
    prompts = {
        number: _prompt_of_json(line, f"line {number} of {place}")
        for number, line in lines.items()
        if line.strip()
    }
    if not prompts:
        raise UserError(f'{place} has no prompts; it must have lines like {{"prompt": "ROMEO:"}}.')
    return prompts


def _prompt_of_json(line: str, name: str) -> str:
    """Return the prompt in a line, which errors call `name`."""
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, TypeError, LookupError, RecursionError):
        prompt = None
    if not isinstance(prompt, str):
        raise UserError(
            f"{name} is {shown(line)}; it must be a JSON object whose prompt is a string, such as "
            '{"prompt": "ROMEO:"}.'
        )
    try:
        check_utf_8(prompt)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    return prompt


def print_comparison(params: Params, tokenizer: Tokenizer, prompt: str, options: Options) -> None:
    """Print text with and without the state side by side, of the same prompt and options."""
    with needs("train"):
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

    def text(stateful: bool) -> Text:
        variant = dataclasses.replace(options, stateful=stateful)
        return Text("".join(stream_text(params, tokenizer, prompt, variant)))

    token = "character" if tokenizer.kind == "characters" else "token"
    table = Table(show_lines=True, title=f"seed {options.seed}, temperature {options.temperature}")
    table.add_column("state kept", ratio=1)
    table.add_column(f"reset before every {token}", ratio=1)
    table.add_row(text(stateful=True), text(stateful=False))
    Console().print(table)
