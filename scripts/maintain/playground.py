"""Write what the playground shows beside the models: bigram counts, and what units follow.

The text that they come from is not written.
"""

from __future__ import annotations

import startup  # noqa: F401

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxgru import unroll
from jaxgru.analysis.ngrams import NGram, count_ngrams
from jaxgru.cli.options import Parser, run_script
from jaxgru.errors import UserError
from jaxgru.lm import load
from jaxgru.lm.data.dataset import Dataset, load_dataset
from jaxgru.lm.files import write_text
from jaxgru.lm.model import Params
from jaxgru.lm.runs.folders import current_commit

MODELS = ("astra_alpha", "astra_beta", "elman_alpha")
ASSETS = Path(__file__).parents[2] / "playground" / "assets"
UNITS_PER_FEATURE = 3
LEAST_CORRELATION = 0.3  # a unit that is shown as following something


def main() -> None:
    """Read the arguments, and write the assets."""
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, default=ASSETS, help="where to write (%(default)s)")
    folder = parser.parse_args().output
    _, config, tokenizer = load(MODELS[0])
    _, dataset = load_dataset(config, tokenizer)
    made = {"commit": current_commit(), "corpus": dataset.sha256}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "bigram.json", _json(made, nats=bigram_nats(count_bigrams(dataset))))
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


def states(params: Params, tokens: Int[np.ndarray, "T"]) -> list[Float[np.ndarray, "T H"]]:
    """Return the state of each layer after each token."""
    _, _, carries = unroll(list(params.layers), params.embedding[tokens][None], return_carries=True)
    return [np.asarray(h[0]) for h in carries]


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
                of_layer, correlation = int(layer_of[unit]), round(float(r[unit]), 3)
                result.append({"unit": int(unit), "layer": of_layer, "follows": follows,
                               "correlation": correlation})  # fmt: skip
    return result


def _standardised(x: Float[np.ndarray, "T N"]) -> Float[np.ndarray, "T N"]:
    x = (x - x.mean(axis=0, dtype=np.float64)).astype(np.float32)
    deviation = np.sqrt(np.square(x).mean(axis=0, dtype=np.float64))
    return x / np.where(deviation > 0, deviation, 1).astype(np.float32)


if __name__ == "__main__":
    run_script(main)
