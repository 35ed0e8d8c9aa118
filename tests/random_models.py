"""Models with random weights, and equality bit for bit."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
from annotations import unchecked
from hypothesis import strategies as st

import jaxgru
from jaxgru import cells
from jaxgru.lm.config import Config, DataConfig, ModelConfig
from jaxgru.lm.data.tokenizers import CharacterTokenizer
from jaxgru.lm.model import Params, init


def in_blocks(init, **options):
    """Of two blocks, if they divide the units."""
    return lambda key, E, H, dtype: init(key, E, H, num_blocks=2 - H % 2, dtype=dtype, **options)


INIT = {  # of (key, E, H, dtype=…): H numbers are what a step returns
    "gru": partial(jaxgru.init_gru, second_bias=True, reset_gate="before"),
    "gru, reset after": partial(jaxgru.init_gru, second_bias=True),
    "lstm": jaxgru.init_lstm,
    "gru, blocks": in_blocks(jaxgru.init_gru, reset_gate="before"),
    "gru, norm": in_blocks(jaxgru.init_gru, layer_norm=True),
    "lstm, blocks": in_blocks(jaxgru.init_lstm),
    "lstm, norm": partial(jaxgru.init_lstm, layer_norm=True),
    "lstm, projected": lambda key, E, H, dtype: jaxgru.init_lstm(
        key, E, H + 2, proj_size=H, dtype=dtype
    ),
    "gru, mogrifier": jaxgru.init_mogrifier_gru,
    "rnn": jaxgru.init_rnn,
    "min_gru": cells.init_min_gru,
    "min_lstm": cells.init_min_lstm,
    "rg_lru": in_blocks(cells.init_rg_lru),
    "slstm": in_blocks(cells.init_slstm),
    "mlp": lambda key, E, H, dtype: cells.init_mlp(key, E, H, context_length=3, dtype=dtype),
}


def random_params(
    config: ModelConfig, seed: int = 0, scale: float = 1, dtype: str = "float32"
) -> Params:
    """Normal weights; no bias is zero. They are NumPy's: `init` would compile for each shape."""
    rng = np.random.default_rng(seed)
    return _fill(config, lambda shape: (scale * rng.standard_normal(shape)).astype(dtype))


def lines_model(path: Path) -> tuple[Params, Config, CharacterTokenizer]:
    """Save a model of lines with random weights, and return it, as `lm.load` does."""
    tokenizer = CharacterTokenizer("\nabcdefgh")
    model = ModelConfig("gru", tokenizer.vocab_size, 6, 10, 1)
    config = Config("lines", model, DataConfig(separator="line"))
    params = random_params(model)
    jaxgru.lm.save(path, params, config, tokenizer)
    return params, config, tokenizer


def random_bits(config: ModelConfig, seed: int = 0) -> Params:
    """Float32 weights of any bits at all: −0, subnormal numbers, infinities and NaNs among them."""
    rng = np.random.default_rng(seed)
    return _fill(config, lambda shape: rng.integers(0, 2**32, shape, np.uint32).view(np.float32))


def _fill(config, draw):
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), config))
    return jax.tree.map(lambda leaf: jax.device_put(draw(leaf.shape)), shapes)


def by_gate(layer) -> SimpleNamespace:
    """A layer's weights apart, under the letters of the equations: Wz, …; absent second biases 0.

    What is not of all gates, such as cn, keeps its name.
    """
    gates = getattr(layer, "gates", "")
    gates_of = dict.fromkeys("WUbwu", gates)
    gates_of["c"] = gates[:2]
    gates_of["p"] = getattr(layer, "peepholes", "")
    parts = {}
    for field in dataclasses.fields(layer):
        if field.metadata.get("static"):  # an option, such as an activation
            continue
        weights = getattr(layer, field.name)
        if gates_of.get(field.name):
            parts |= _parts(field.name, weights, gates_of[field.name])
        else:
            parts[field.name] = weights
    return SimpleNamespace(**parts)


def _parts(name, weights, gates) -> dict:
    """Weights that hold these gates side by side, apart."""
    if weights is None:
        return {name + gate: 0 for gate in gates}
    k = weights.shape[-1] // len(gates)
    return {name + gate: weights[..., i * k : (i + 1) * k] for i, gate in enumerate(gates)}


def same_bits(a, b) -> bool:
    """Whether two trees have the same structure, and leaves of the same dtype, shape and bytes."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    return [_bits(leaf) for leaf in jax.tree.leaves(a)] == [
        _bits(leaf) for leaf in jax.tree.leaves(b)
    ]


def _bits(leaf) -> tuple:
    return leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()


@st.composite
def model_configs(draw, cells=("gru", "lstm", "rnn")) -> ModelConfig:
    """Small models of every kind: one layer, hidden 1, vocabulary 2 and E ≠ H among them."""
    cell = draw(st.sampled_from(cells))
    fields = dict(
        cell=cell,
        vocab_size=draw(st.integers(2, 6)),
        embedding_dim=draw(st.integers(1, 5)),
        hidden_dim=draw(st.integers(1, 5)),
        num_layers=draw(st.integers(1, 3)),
    )
    if cell == "gru":
        fields["second_bias"] = draw(st.booleans())
        fields["reset_gate"] = draw(st.sampled_from(["before", "after"]))
    fields["final_norm"] = draw(st.booleans())
    with unchecked():  # beartype draws at random, too, which Hypothesis warns of
        return ModelConfig(**fields)


def only_model(config: ModelConfig, **changes) -> ModelConfig:
    """The config with some fields changed."""
    return dataclasses.replace(config, **changes)
