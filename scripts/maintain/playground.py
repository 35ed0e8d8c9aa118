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
from jaxgru.files import write_text
from jaxgru.lm import load
from jaxgru.lm.data.dataset import Dataset, load_dataset
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
    source = {"commit": current_commit(), "corpus": dataset.sha256}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "bigram.json", _json(source, nats=bigram_nats(count_bigrams(dataset))))
        write_text(folder / "units.json", _json(source, models=all_units(dataset)))
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}.") from error
    print(f"written to {folder}")


def _json(source: dict[str, str | None], **content: Any) -> str:
    """Return an object with one row of numbers, or one unit, per line."""
    text = json.dumps(source | content)
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
    of_text = features(dataset.tokenizer.decode(dataset.validation))
    by_model = {}
    for name in MODELS:
        params, _, _ = load(name)
        by_model[name] = units(states(params, dataset.validation), of_text)
    return by_model


def states(params: Params, tokens: Int[np.ndarray, "T"]) -> list[Float[np.ndarray, "T H"]]:
    """Return the state of each layer after each token."""
    _, _, carries = unroll(list(params.layers), params.embedding[tokens][None], return_carries=True)
    return [np.asarray(h[0]) for h in carries]


def features(text: str) -> dict[str, Float[np.ndarray, "T"]]:
    """Return what a unit may follow, after each character of a text.

    Tiny Shakespeare has no double quotation marks, and its single ones are mostly apostrophes.
    """
    return {
        "position in the line": _since(r"\n", text),
        "position in the speech": _since(r"\n\n", text),
        "position in the sentence": _since(r"[.?!]\s", text),
        "position in the word": _since(r"[^A-Za-z']", text),
        "inside a speaker's name": _inside(r"(?<=\n\n)[^\n:]+(?=:\n)", text),
        "after a speaker's name": _one_of(":", text),
        "upper case": _inside(r"[A-Z]", text),
        "a run of upper-case letters": _inside(r"[A-Z]{2,}", text),
        "after a vowel": _one_of("aeiouAEIOU", text),
        "after a space": _one_of(" ", text),
        "after a line's end": _one_of("\n", text),
        "after an empty line": _inside(r"(?<=\n)\n", text),
        "after a comma": _one_of(",", text),
        "after a sentence's end": _one_of(".?!", text),
    }


def _since(pattern: str, text: str) -> Float[np.ndarray, "T"]:
    """Count the characters since the last match."""
    ends = np.zeros(len(text) + 1, np.int64)
    for match in re.finditer(pattern, text):
        ends[match.end()] = match.end()
    return np.arange(len(text)) + 1.0 - np.maximum.accumulate(ends)[1:]


def _inside(pattern: str, text: str) -> Float[np.ndarray, "T"]:
    """1 at the characters of the matches."""
    result = np.zeros(len(text))
    for match in re.finditer(pattern, text):
        result[match.start() : match.end()] = 1
    return result


def _one_of(characters: str, text: str) -> Float[np.ndarray, "T"]:
    """1 at each of these characters."""
    return np.isin(list(text), list(characters)).astype(float)


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
            if abs(r[unit]) < LEAST_CORRELATION:
                continue
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


if __name__ == "__main__":
    run_script(main)
