"""Write what the playground shows beside the models: counted bigrams, and what units follow.

The text that they come from is not written.
"""

from __future__ import annotations

import startup  # noqa: F401

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from jaxtyping import Bool, Float, Int
from safetensors.numpy import save

from jaxgru import unroll
from jaxgru.analysis.ngrams import NGram, count_ngrams
from jaxgru.cli.options import Parser, run_script
from jaxgru.errors import UserError
from jaxgru.lm import apply, generate, load
from jaxgru.lm.data.dataset import Dataset, load_dataset
from jaxgru.lm.evaluation import stream_nll, token_nll, window_nll
from jaxgru.lm.files import write_bytes, write_text
from jaxgru.lm.formats.safetensors import load_safetensors
from jaxgru.lm.model import Params
from jaxgru.lm.pretrained import FOLDER
from jaxgru.lm.runs.commits import current_commit
from jaxgru.lm.sampling import filter_logits

MODELS = ("astra_alpha", "astra_beta", "elman_alpha")
ASSETS = Path(__file__).parents[2] / "playground" / "assets"
UNITS_PER_FEATURE = 3
LEAST_CORRELATION = 0.3  # a unit that is shown as following something


def main() -> None:
    """Read the arguments, and write the assets, or the fixtures of the tests."""
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, default=ASSETS, help="where to write (%(default)s)")
    parser.add_argument(
        "--fixtures", type=Path, metavar="FOLDER",
        help="write what the models compute, for tests of the playground, instead",
    )  # fmt: skip
    arguments = parser.parse_args()
    _, config, tokenizer = load(MODELS[0])
    config, dataset = load_dataset(config, tokenizer)
    folder = arguments.fixtures or arguments.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.fixtures:
            write_numbers(folder)
            for name in MODELS:
                write_fixture(folder, FOLDER / f"{name}.safetensors", dataset.validation[:10_000])
        else:
            made = {"commit": current_commit(), "corpus": config.data.sha256}
            nats = bigram_nats(count_bigrams(dataset))
            write_text(folder / "bigram.json", _json(made, nats=nats))
            write_text(folder / "units.json", _json(made, models=all_units(dataset)))
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}.") from error
    print(f"written to {folder}")


def _json(made: dict[str, str | None], **content: Any) -> str:
    """Return an object with one row of numbers, or one unit, per line."""
    text = json.dumps(made | content)
    return re.sub(r"(?<=[\]}],) (?=[\[{])", "\n", text) + "\n"


# --- Bigrams


def count_bigrams(dataset: Dataset) -> NGram:
    """Return the smoothed bigrams of the training text: no character is impossible."""
    return count_ngrams(dataset.train, dataset.tokenizer.vocab_size, order=2)


def bigram_nats(bigrams: NGram) -> list[list[float]]:
    """Return −ln p(w | v) as [v][w], nats."""
    rows = (bigrams.probabilities(np.array([v])) for v in range(bigrams.vocab_size))
    return [[round(float(nats), 4) for nats in -np.log(p)] for p in rows]


# --- What units follow


def all_units(dataset: Dataset) -> dict[str, list[dict[str, Any]]]:
    """Return each model's units, over the validation text."""
    text = dataset.tokenizer.decode(dataset.validation)
    return {
        name: units(states(load(name)[0], dataset.validation), features(text)) for name in MODELS
    }


def states(
    params: Params, tokens: Int[np.ndarray, "T"], reset_every: int | None = None
) -> list[Float[np.ndarray, "T H"]]:
    """Return the state of each layer after each token."""
    x = params.embedding[tokens][None]
    resets = _resets(len(tokens), reset_every)
    _, _, carries = unroll(list(params.layers), x, reset=resets, return_carries=True)
    return [np.asarray(h[0]) for h in carries]


def _resets(num_tokens: int, every: int | None) -> Bool[np.ndarray, "1 T"]:
    """Return before which tokens the state is reset to zero."""
    return (np.arange(num_tokens) % (every or num_tokens) == 0)[None]


def features(text: str) -> dict[str, Float[np.ndarray, "T"]]:
    """Return what a unit may follow, after each character of a text.

    Tiny Shakespeare has no double quotation marks, and its single ones are mostly apostrophes.
    """
    characters = np.array(list(text))

    def since(pattern: str) -> Float[np.ndarray, "T"]:
        """Count the characters since the last match."""
        ends = np.zeros(len(text) + 1, np.int64)
        for match in re.finditer(pattern, text):
            ends[match.end()] = match.end()
        return np.arange(len(text)) + 1.0 - np.maximum.accumulate(ends)[1:]

    def inside(pattern: str) -> Float[np.ndarray, "T"]:
        """1 at the characters of the matches."""
        result = np.zeros(len(text))
        for match in re.finditer(pattern, text):
            result[match.start() : match.end()] = 1
        return result

    def one_of(some: str) -> Float[np.ndarray, "T"]:
        return np.isin(characters, list(some)).astype(float)

    return {
        "position in the line": since(r"\n"),
        "position in the speech": since(r"\n\n"),
        "position in the sentence": since(r"[.?!]\s"),
        "position in the word": since(r"[^A-Za-z']"),
        "inside a speaker's name": inside(r"(?<=\n\n)[^\n:]+(?=:\n)"),
        "after a speaker's name": one_of(":"),
        "upper case": inside(r"[A-Z]"),
        "a run of upper-case letters": inside(r"[A-Z]{2,}"),
        "after a vowel": one_of("aeiouAEIOU"),
        "after a space": one_of(" "),
        "after a line's end": one_of("\n"),
        "after an empty line": inside(r"(?<=\n)\n"),
        "after a comma": one_of(","),
        "after a sentence's end": one_of(".?!"),
    }


def units(
    layers: Sequence[Float[np.ndarray, "T H"]], features: dict[str, Float[np.ndarray, "T"]]
) -> list[dict[str, Any]]:
    """Return the units that follow a feature most closely, by Pearson's correlation.

    For each feature, in order, these are at most `UNITS_PER_FEATURE`, the best one first.
    """
    h = np.concatenate([_standardised(layer) for layer in layers], axis=1)
    layer_of = np.repeat(np.arange(len(layers)), [layer.shape[1] for layer in layers])
    result = []
    for follows, feature in features.items():
        r = h.T @ _standardised(feature[:, None])[:, 0] / len(feature)
        for unit in np.argsort(-abs(r), kind="stable")[:UNITS_PER_FEATURE]:
            if abs(r[unit]) >= LEAST_CORRELATION:
                result.append(
                    {
                        "unit": int(unit),
                        "layer": int(layer_of[unit]),
                        "follows": follows,
                        "correlation": round(float(r[unit]), 3),
                    }
                )
    return result


def _standardised(x: Float[np.ndarray, "T N"]) -> Float[np.ndarray, "T N"]:
    x = (x - x.mean(axis=0, dtype=np.float64)).astype(np.float32)
    deviation = np.sqrt(np.square(x).mean(axis=0, dtype=np.float64))
    return x / np.where(deviation > 0, deviation, 1).astype(np.float32)


# --- Fixtures: what the tests compare the playground's engine with

RESETS = (1, 2, 5, 32, 128, None)
GREEDY_TOKENS = 320
PROMPT_TOKENS = 40
STATES = 200  # tokens
WINDOW = 150  # tokens of `reach`
SAMPLING = tuple((t, k) for t in (0.1, 0.8, 3.0) for k in (None, 1, 2, 30))


def write_fixture(
    folder: Path,
    model: Path,
    tokens: Int[np.ndarray, "N"],
    resets: Sequence[int | None] = RESETS,
) -> None:
    """Write what a model computes for a text to `folder`, under the model's name.

    Args:
      model: a .safetensors file of jaxgru, without layer normalisation.
      tokens: at least two.
      resets: numbers of tokens between two resets of the state to zero; None: no resets.
    """
    params, _, _ = load_safetensors(model)
    tensors: dict[str, Any] = {"logits": apply(params, tokens[None])[0][0]}
    for every in resets:
        nats = stream_nll(params, tokens) if every is None else window_nll(params, tokens, every)
        tensors[f"nats.{every}"] = nats
        tensors[f"states.{every}"] = np.concatenate(states(params, tokens[:STATES], every), axis=1)
        tensors[f"reach.{every}"] = reach(params, tokens[:WINDOW], every)
    prompt = tokens[:PROMPT_TOKENS]
    greedy = {
        str(every): generate(
            params, jax.random.key(0), prompt[None], GREEDY_TOKENS, temperature=0,
            stateful=every is None,
        )[0][0].tolist()
        for every in (1, None)
    }  # fmt: skip
    described = {
        "model": str(model),
        "tokens": tokens.tolist(),
        "prompt": prompt.tolist(),
        "greedy": greedy,
    }
    _write(folder / f"{model.stem}.fixture.safetensors", tensors, described)


def write_numbers(folder: Path) -> None:
    """Write what does not depend on a model: distributions, random numbers, narrow floats."""
    # with ties: at the top, and where top-k ends
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 65)).round(1), jnp.float32)
    words = np.random.default_rng(1).integers(2**32, size=(2, 2, 20), dtype=np.uint32)
    half = np.arange(2**16, dtype=np.uint16).view(np.float16)  # all numbers of 16 bits
    tensors = {
        "logits": logits[0],
        "probabilities": [jax.nn.softmax(filter_logits(logits, t, k))[0] for t, k in SAMPLING],
        "half_in_32_bits": half,
    }
    described = {
        "sampling": SAMPLING,
        "keys": words[0].T.tolist(),
        "counters": words[1].T.tolist(),
        "random": [np.asarray(threefry_2x32(*w)).tolist() for w in words.transpose(2, 0, 1)],
    }
    _write(folder / "numbers.safetensors", tensors, described, half=half)


def _write(
    path: Path, tensors: dict[str, Any], described: dict[str, Any], **as_they_are: np.ndarray
) -> None:
    arrays = {name: np.ascontiguousarray(x, np.float32) for name, x in tensors.items()}
    write_bytes(path, save(arrays | as_they_are, {"fixture": json.dumps(described)}))


def reach(
    params: Params, tokens: Int[np.ndarray, "T"], reset_every: int | None
) -> Float[np.ndarray, "T-1"]:
    """Return the norms of the gradient of the last token's nats by the embeddings before it."""
    x = params.embedding[tokens[:-1]]
    gradient = _reach(params, x, tokens, _resets(len(x), reset_every))
    return np.linalg.norm(np.asarray(gradient, np.float64), axis=1)  # in 32 bits, squares underflow


@jax.jit
@partial(jax.grad, argnums=1)
def _reach(params, x, tokens, resets):
    y, _ = unroll(list(params.layers), x[None], reset=resets)
    logits = y[0, -1:] @ params.head.Wo + params.head.bo
    return token_nll(logits, tokens[-1:])[0]


if __name__ == "__main__":
    run_script(main)
