"""Writes text with a trained model."""

from __future__ import annotations

from jaxgru.analysis.ngrams import count_ngrams
from jaxgru.cli import printing
from jaxgru.cli.options import Parser, load_model
from jaxgru.config import load_config
from jaxgru.data.dataset import load_dataset


def main() -> None:
    """Reads the arguments and makes one call."""
    parser = Parser(__doc__)
    parser.add_model()
    parser.add_argument("--prompt", default="ROMEO: ", help="the whole of it is read (%(default)r)")
    parser.add_argument("--num-tokens", type=int, default=400, help="to write (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: greedy (%(default)s)")
    parser.add_argument("--top-k", type=int, help="only the K likeliest tokens (all)", metavar="K")
    parser.add_argument("--top-p", type=float, help="only the likeliest, to probability P (all)",
                        metavar="P")  # fmt: skip
    parser.add_argument("--stateless", action="store_true", help="throw the state away: the bug")
    parser.add_argument("--last-token-only", action="store_true",
                        help="read only the prompt's last token, as the study does")  # fmt: skip
    parser.add_argument("--num-samples", type=int, default=1, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (%(default)s)")
    parser.add_argument("--compare", action="store_true",
                        help="stateless and stateful side by side")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.compare and (arguments.stateless or arguments.num_samples != 1):
        parser.error("--compare shows one sample of each; leave out --stateless and --num-samples.")
    if arguments.ngram is not None and (arguments.stateless or arguments.compare):
        parser.error(
            "an n-gram model has no state to throw away: leave out --stateless, --compare."
        )
    options = printing.Options(
        num_tokens=arguments.num_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        stateful=not arguments.stateless,
        last_token_only=arguments.last_token_only,
        seed=arguments.seed,
    )
    if arguments.ngram is not None:
        _, dataset = load_dataset(load_config(arguments.config or "astra_alpha"))
        tokenizer = dataset.tokenizer
        model = count_ngrams(dataset.train, tokenizer.vocab_size, arguments.ngram)
    else:
        model, _, tokenizer = load_model(arguments)
    if arguments.compare:
        printing.print_comparison(model, tokenizer, arguments.prompt, options)
    else:
        printing.print_samples(model, tokenizer, arguments.prompt, options, arguments.num_samples)
