"""What the models compute, for the tests of the playground's engine."""

from __future__ import annotations

import json
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
from jaxgru.files import write_bytes
from jaxgru.lm import apply, generate
from jaxgru.lm.evaluation import stream_nll, window_nll
from jaxgru.lm.formats.safetensors import load_safetensors
from jaxgru.lm.model import Params, token_nll
from jaxgru.lm.sampling import filter_logits

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
    logits = y[0, -1:] @ params.Wo + params.head.bo
    return token_nll(logits, tokens[-1:])[0]


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
