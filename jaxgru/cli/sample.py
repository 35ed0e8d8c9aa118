"""Generate text with a trained model."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jaxgru.analysis.ngrams import count_ngrams
from jaxgru.cli.options import Parser, trained_model, unescaped, write_output
from jaxgru.errors import UserError, check_whole, needs
from jaxgru.lm import processors
from jaxgru.lm.config import load_config
from jaxgru.lm.data.dataset import load_dataset, reads_newlines
from jaxgru.lm.data.sources import read_text, with_newlines
from jaxgru.lm.data.tokenizers import Tokenizer
from jaxgru.lm.data.tokenizers.base import check_utf_8
from jaxgru.lm.data.units import split_units
from jaxgru.lm.generation import PROMPT, Options, default_prompt, generate_texts, stream_text
from jaxgru.lm.model import Params
from jaxgru.printing import shown

DEFAULT = "astra_beta"  # where no model is named
PROCESSORS = (
    ("--repetition-penalty", processors.RepetitionPenalty,
     "divide the logits of tokens already in the text by this, such as 1.2 (default: 1)"),
    ("--frequency-penalty", processors.FrequencyPenalty,
     "subtract this from a token's logit for each time that it is in the text (default: 0)"),
    ("--presence-penalty", processors.PresencePenalty,
     "subtract this from the logits of tokens already in the text (default: 0)"),
    ("--min-p", processors.MinP,
     "exclude tokens less likely than this fraction of the likeliest one (default: none)"),
    ("--typical", processors.Typical,
     "sample from the tokens of nearly average surprise that together have this probability "
     "(default: all)"),
)  # fmt: skip
"""Options, in the order in which they are applied."""
PENALTIES = [option for option, *_ in PROCESSORS if option.endswith("-penalty")]


def make_parser() -> Parser:
    """Return the parser of this command's options."""
    # fmt: off
    parser = Parser(
        __doc__,
        ["sample", "sample astra_gamma --prompt 'JULIET: ' --temperature 0.6",
         "sample runs/astra_alpha --compare --temperature 0",
         "sample astra_beta --stop '\\n\\n' --num-samples 8",
         "sample astra_beta --prompts names.txt --output texts.jsonl"],
        usage="[MODEL] [options]",
    )
    parser.add_model(DEFAULT)
    add = parser.add_argument_group("text").add_argument
    add("--prompt", type=unescaped,
        help="text to continue, in which \\n is a newline "
        f"(default: {PROMPT!r}; for models of other texts a newline or word)")
    add("--prompts", metavar="FILE",
        help="continue each line of this file (-: of standard input) or, of a .jsonl file, each "
        "line's prompt, in batches: a JSON object with line, prompt and the text after it for "
        "each, on standard output if there is no --output")
    parser.add_encoding(add, "--prompts")
    add("--output", type=Path, help=".jsonl file for --prompts; an older file is replaced")
    add("--num-tokens", type=int, default=Options.num_tokens,
        help="number of tokens to generate (default: %(default)s)")
    add("--temperature", type=float, default=Options.temperature,
        help="divisor of the logits; 0 takes the likeliest token (default: %(default)s)")
    add("--top-k", type=int, help="sample from this many of the likeliest tokens (default: all)")
    add("--top-p", type=float,
        help="sample from the likeliest tokens that together have this probability (default: all)")
    for option, _, help in PROCESSORS:
        add(option, type=float, help=help)
    add("--exempt", metavar="TEXT", type=unescaped,
        help="the tokens of TEXT, in which \\n is a newline, never count for a penalty")
    add("--stop", action="append", default=[], metavar="TEXT", type=unescaped,
        help="end the text before TEXT, in which \\n is a newline; may be given several times. The "
        "text of a model that was trained in units (data.unit) also ends where the unit does")
    add("--unknown", action=argparse.BooleanOptionalAction, default=Options.unknown,
        help="whether the text may hold the token of unknown words or characters (default: no)")
    add("--stateless", action="store_true", help="reset the state to zero before every token")
    add("--last-token-only", action="store_true",
        help="read only the last token of the prompt, like the study's samplers")
    # fmt: on
    add("--num-samples", type=int, default=1, help="number of samples (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of the random choices (default: %(default)s)")
    add("--compare", action="store_true", help="print text with and without the state side by side")
    return parser


def main() -> None:
    """Parse the arguments, load the model and print samples."""
    parser = make_parser()
    arguments = parser.parse_args()
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
    value_of = lambda option: getattr(arguments, option[2:].replace("-", "_"))
    of_logits = [option for option, *_ in PROCESSORS]
    for option in ("--stateless", "--compare", "--epoch", *of_logits):
        if arguments.ngram is not None and value_of(option) not in (None, False):
            parser.error(f"an n-gram model has no state, epochs or logits; leave out {option}.")
    has_penalty = any(value_of(option) is not None for option in PENALTIES)
    if arguments.exempt is not None and not has_penalty:
        parser.error(f"--exempt is for {', '.join(PENALTIES)}; give one of them, too.")
    values = ((kind, value_of(option)) for option, kind, _ in PROCESSORS)
    asked = tuple(kind(value) for kind, value in values if value is not None)
    named = {field.name for field in dataclasses.fields(Options)}
    options = Options(
        **{name: value for name, value in vars(arguments).items() if name in named},
        stateful=not arguments.stateless,
    )
    if arguments.ngram is not None:
        config, dataset = load_dataset(load_config(arguments.config or "astra_alpha"))
        tokenizer, text_sha256 = dataset.tokenizer, dataset.sha256
        model = count_ngrams(dataset.train, tokenizer.vocab_size, arguments.ngram, dataset.end)
    else:
        trained = trained_model(arguments, DEFAULT)
        model, config, tokenizer = trained.load(arguments.epoch)
        text_sha256 = trained.text_sha256()
    unit = config.data.unit
    newlines = reads_newlines(config.data, tokenizer)
    as_read = with_newlines if newlines else str  # typed texts, too, are like the model's own
    if arguments.exempt is not None:
        exempt = exempt_tokens(tokenizer, as_read(arguments.exempt))
        asked = tuple(processors.Exempt(processor, exempt) for processor in asked)
    stop = [as_read(end) for end in options.stop]
    options = dataclasses.replace(options, unit=unit, stop=stop, logits_processor=asked)
    if arguments.prompts is not None:
        prompts = read_prompts(arguments.prompts, arguments.encoding or "utf-8", newlines)
        read = [as_read(prompt) for prompt in prompts.values()]
        texts = generate_texts(model, tokenizer, read, options, arguments.num_samples)
        lines = zip(itertools.cycle(prompts.items()), texts, strict=False)
        records = ({"line": n, "prompt": prompt, "text": text} for (n, prompt), text in lines)
        dumped = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        write_output(arguments.output, dumped)
        return
    if arguments.prompt is not None:
        prompt = as_read(arguments.prompt)
    else:
        prompt = "" if unit else default_prompt(text_sha256, tokenizer)
    if arguments.compare and isinstance(model, Params):
        print_comparison(model, tokenizer, prompt, options)
        return
    for sample in range(arguments.num_samples):
        text = stream_text(model, tokenizer, prompt, options, sample)
        if arguments.num_samples > 1:
            print(f"--- sample {sample + 1} of {arguments.num_samples}, seed {options.seed}")
        for piece in text:
            print(piece, end="", flush=True)
        print()


def exempt_tokens(tokenizer: Tokenizer, text: str) -> Int[np.ndarray, "N"]:
    """Return the tokens of --exempt. Raises UserError where the vocabulary lacks some of it."""
    tokens = tokenizer.encode(text)
    unknown = tokenizer.unknown
    if unknown is not None and unknown in tokens:
        named = tokenizer.pieces[unknown].strip()
        if unknown in tokenizer.encode(text.replace(named, "")):
            raise UserError(
                f"--exempt is {shown(text)}, some of which the model's vocabulary lacks, so that "
                f"{named} would be exempt; leave that out."
            )
    return tokens


def read_prompts(place: str, encoding: str, newlines: bool = True) -> dict[int, str]:
    """Return the lines of a file or, of a .jsonl file, the `prompt` in each, by line number.

    Blank lines of a .jsonl file are left out. `newlines` is as for `read_text`.
    """
    text = read_text(place, encoding, newlines=newlines).text
    lines = dict(enumerate(split_units(text, "line"), 1))
    if ".jsonl" not in Path(place).suffixes:  # which may end in .gz
        return lines
    prompts = {}
    for number, line in lines.items():
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, TypeError, LookupError, RecursionError):
            prompt = None
        if not isinstance(prompt, str):
            raise UserError(
                f"line {number} of {place} is {shown(line)}; it must be a JSON object whose prompt "
                'is a string, such as {"prompt": "ROMEO:"}.'
            )
        try:
            check_utf_8(prompt)
        except UserError as error:
            raise UserError(f"line {number} of {place}: {error}") from error
        prompts[number] = prompt
    if not prompts:
        raise UserError(f'{place} has no prompts; it must have lines like {{"prompt": "ROMEO:"}}.')
    return prompts


def print_comparison(params: Params, tokenizer: Tokenizer, prompt: str, options: Options) -> None:
    """Print text with and without the state side by side, of the same prompt and options."""
    with needs("train"):
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

    table = Table(show_lines=True, title=f"seed {options.seed}, temperature {options.temperature}")
    texts, unit = [], "character" if tokenizer.kind == "characters" else "token"
    for name, stateful in (("state kept", True), (f"reset before every {unit}", False)):
        table.add_column(name, ratio=1)
        option = dataclasses.replace(options, stateful=stateful)
        texts.append(Text("".join(stream_text(params, tokenizer, prompt, option))))
    table.add_row(*texts)
    Console().print(table)
