"""Tools to compare jaxgru with others: copy weights, draw shapes, compare and record numbers.

jaxgru's weights are (in, out), PyTorch's (out, in). Both get the same numbers, drawn by NumPy here:
no bias is zero, and no library's initialisation is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import settings
from hypothesis import strategies as st

import jaxgru
import torchref
from jaxgru.cells import AnyCell, LSTMCell, ResetBeforeGRUCell, RNNCell, sizes
from jaxgru.lm.config import ModelConfig
from jaxgru.lm.model import HeadParams, LayerNormParams, Params

DTYPES = ["float64", "float32"]
REPEATED = ["float64", pytest.param("float32", marks=pytest.mark.slow)]
"""For tests whose code other tests run in float32, too: published sizes, one step, sampling."""

TOLERANCE = {"float64": 1e-12, "float32": 2e-4}
"""Of one forward or backward pass, relative to the largest entry: a few thousand rounding errors.

Two implementations sum the same products in different orders. A sum of n products then differs by
about √n rounding errors (eps: float64 2e-16, float32 1e-7), a gradient is a sum of such sums over
batch and time, and cancellation can enlarge the relative difference. The largest seen are 7e-14 and
4e-5. An error in a formula is larger by orders of magnitude, and cannot be missed in float64.
"""

RECORD_VARIABLE = "JAXGRU_PARITY_RECORD"
"""Environment variable: a file to which every comparison is appended as a line of JSON."""

# The same examples in every run: a suite that fails must fail again when it is repeated.
same_every_run = settings(derandomize=True, deadline=None, database=None, max_examples=4)


def precision(dtype: str) -> Any:
    """Enable JAX's 64-bit types inside for "float64", and disable them for "float32"."""
    return jax.enable_x64(dtype == "float64")


# --- Shapes


VARIANTS: dict[str, dict[str, Any]] = {
    "gru": {"second_bias": True, "reset_gate": "before"}, "lstm": {"final_norm": True}, "rnn": {},
}  # fmt: skip
"""The study's, which torchref has."""


@st.composite
def model_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Draw small models of every kind, among them hidden size 1, vocabulary 2 and one layer.

    Tests make the config. Made here, its types would be checked while Hypothesis draws, and
    beartype draws, too, which Hypothesis warns of.
    """
    cell = draw(st.sampled_from(["gru", "lstm", "rnn"]))
    variant = VARIANTS[cell]
    if cell == "gru":
        variant = variant | {"second_bias": draw(st.booleans())}
    chosen = {
        "vocab_size": draw(st.integers(2, 9)),
        "embedding_dim": draw(st.integers(1, 7)),
        "hidden_dim": draw(st.integers(1, 9)),
        "num_layers": draw(st.integers(1, 3)),
    }
    return {"cell": cell, **chosen, **variant}


SMALLEST = {cell: ModelConfig(cell, 2, 1, 1, 1, **variant) for cell, variant in VARIANTS.items()}
"""Vocabulary 2, embedding 1, hidden 1, one layer."""


# --- Numbers


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale=1.0):
    """Return normal numbers with this standard deviation, as a JAX array."""
    return jax.device_put((scale * rng.standard_normal(shape)).astype(dtype))


def random_like(rng: np.random.Generator, shapes: Any, dtype: str) -> Any:
    """Return normal numbers for every leaf: deviation 1/√fan_in in matrices, 0.5 in vectors."""

    def draw(leaf: Any) -> jax.Array:
        scale = leaf.shape[0] ** -0.5 if len(leaf.shape) == 2 else 0.5
        return random_array(rng, leaf.shape, dtype, scale)

    return jax.tree.map(draw, shapes)


def random_params(rng: np.random.Generator, config: ModelConfig, dtype: str) -> Params:
    """Return a random model; no bias, second bias, scale or shift is zero."""
    shapes = jax.eval_shape(lambda: jaxgru.lm.init(jax.random.key(0), config))
    params = random_like(rng, shapes, dtype)
    return params.replace(embedding=random_array(rng, params.embedding.shape, dtype))


def random_cell(
    rng: np.random.Generator, cell: str, E: int, H: int, second_bias: bool, dtype: str
) -> AnyCell:
    """Return random parameters of one layer."""
    config = ModelConfig(cell, 2, E, H, 1, **VARIANTS[cell])
    layer = random_params(rng, config, dtype).layers[0]
    return layer if second_bias or cell != "gru" else layer.replace(c=None)


def random_carry(rng: np.random.Generator, params: Params, B: int, dtype: str) -> Any:
    """Return a random carry, nowhere zero."""
    zeros = jax.eval_shape(lambda: jaxgru.lm.initial_carry(params, B))
    return jax.tree.map(lambda leaf: random_array(rng, leaf.shape, dtype), zeros)


def random_tokens(rng: np.random.Generator, V: int, B: int, T: int) -> jax.Array:
    """Return random tokens (B, T) int32."""
    return jax.device_put(rng.integers(0, V, (B, T)).astype(np.int32))


# --- jaxgru ↔ torchref

GRU_KEYS = {
    "W": ["Wzx.weight", "Wrx.weight", "Wx.weight"], "U": ["Wzh.weight", "Wrh.weight", "Wh.weight"],
    "b": ["Wzx.bias", "Wrx.bias", "Wx.bias"], "c": ["bias_z", "bias_r"],
}  # fmt: skip
LSTM_KEYS = {
    name: [key.format(gate) for gate in "fiog"]
    for name, key in {"W": "W_{}_x.weight", "U": "W_{}_h.weight", "b": "b_{}"}.items()
}
RNN_KEYS = {"W": ["Wx.weight"], "U": ["Wh.weight"], "b": ["Wx.bias"]}


def cell_keys(p: AnyCell, prefix: str = "") -> AnyCell:
    """Return the struct with each array replaced by the names of its gates' torchref tensors."""
    keys = {ResetBeforeGRUCell: GRU_KEYS, LSTMCell: LSTM_KEYS, RNNCell: RNN_KEYS}[type(p)]
    present = {name: names for name, names in keys.items() if getattr(p, name) is not None}
    return type(p)(**{
        name: " ".join(prefix + key for key in names) for name, names in present.items()
    })  # fmt: skip


def model_keys(params: Params) -> Params:
    """Return the tree with each array replaced by the name of its torchref tensor."""
    cell = type(params.layers[0])
    layer = {
        ResetBeforeGRUCell: "layers.{}.grucell.",
        LSTMCell: "lstm_layer.layers.{}.",
        RNNCell: "layers.{}.rnncell.",
    }[cell]
    lstm = cell is LSTMCell
    head = "linear_projection.linear_projection." if lstm else "fc.linear_projection."
    return Params(
        embedding="embeddings.weight" if lstm else "embedding.weight",
        layers=tuple(cell_keys(p, layer.format(i)) for i, p in enumerate(params.layers)),
        norm=params.norm and LayerNormParams("layer_norm.weight", "layer_norm.bias"),
        head=HeadParams(head + "weight", head + "bias"),
    )


def _is_linear(key: str, array: Any) -> bool:
    return array.ndim == 2 and not key.startswith("embedding")


def to_state_dict(keys: Any, params: Any) -> dict[str, torch.Tensor]:
    """Copy parameters into a state dict of torchref."""
    pairs = zip(jax.tree.leaves(keys), map(np.asarray, jax.tree.leaves(params)), strict=True)
    return {
        key: to_torch(gate.T if _is_linear(key, gate) else gate)
        for names, leaf in pairs
        for gates in [names.split()]
        for key, gate in zip(gates, np.split(leaf, len(gates), axis=-1), strict=True)
    }


def from_state_dict(keys: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return torchref's tensors, or anything with their names, in the structure of jaxgru's params.

    Raises:
      KeyError: a name is missing.
    """

    def array(key: str) -> np.ndarray:
        value = to_numpy(tensors[key])
        return value.T if _is_linear(key, value) else value

    def side_by_side(names):
        return np.concatenate([array(key) for key in names.split()], axis=-1)

    return jax.tree.map(side_by_side, keys)


def torch_model(params: Params, dropout: float = 0.0, site: str = "state") -> torch.nn.Module:
    """Return torchref's model with these parameters, in training mode."""
    V, E = params.embedding.shape
    H = params.Wo.shape[0]
    L = len(params.layers)
    first = params.layers[0]
    if isinstance(first, ResetBeforeGRUCell):
        second_bias = first.c is not None
        model = torchref.MyGRUModel(V, E, H, L, dropout, site, second_bias=second_bias)
    else:
        kinds = {LSTMCell: torchref.MyLSTMModel, RNNCell: torchref.MyRNNModel}
        model = kinds[type(first)](V, E, H, L, dropout, site)
    model.to(torch.float64 if params.embedding.dtype == jnp.float64 else torch.float32)
    model.load_state_dict(to_state_dict(model_keys(params), params), strict=True)
    return model


def torch_cell(p: AnyCell) -> torch.nn.Module:
    """Return torchref's cell with these parameters."""
    E, H = sizes(p)
    if isinstance(p, ResetBeforeGRUCell):
        cell = torchref.models.GRUCell(E, H, p.c is not None)
    else:
        kinds = {LSTMCell: torchref.models.LSTMCell, RNNCell: torchref.models.RNNCell}
        cell = kinds[type(p)](E, H)
    cell.to(torch.float64 if p.U.dtype == jnp.float64 else torch.float32)
    cell.load_state_dict(to_state_dict(cell_keys(p), p), strict=True)
    return cell


def to_torch(array: Any) -> torch.Tensor:
    """Copy an array to a tensor; integers become int64, as PyTorch's indices must be."""
    tensor = torch.from_numpy(np.array(array))
    return tensor if tensor.is_floating_point() else tensor.long()


def to_numpy(value: Any) -> np.ndarray:
    """Return a JAX array, tensor or number as a NumPy array."""
    return value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def carry_to_torch(carry: Any) -> list[tuple[torch.Tensor, ...]]:
    """Convert jaxgru's carry (h or (h, c) per layer) to torchref's ((h,) or (h, c) per layer)."""
    return [
        tuple(map(to_torch, layer if isinstance(layer, tuple) else (layer,))) for layer in carry
    ]


def masks_to_torch(masks: list) -> list[torch.Tensor | None] | None:
    """Convert what `dropout_masks` returns, of any site, to factors (B, T, H), one per layer."""

    def factor(pair: tuple) -> torch.Tensor | None:
        masks = [mask for mask in (pair.hidden, pair.output) if mask.keep is not None]
        if not masks:
            return None
        keep = np.asarray(masks[0].keep)
        return to_torch(np.where(keep, np.asarray(masks[0].scale), 0).swapaxes(0, 1))

    return list(map(factor, masks))


# --- Comparing


def agree(
    quantity: str, ours: Any, theirs: Any, tolerance: float, implementation: str = "torchref"
) -> None:
    """Assert that two trees hold the same numbers, and record the largest difference.

    Shapes and dtypes must be equal, and for each leaf |ours − theirs| ≤ tolerance · scale. A scale
    is the leaf's largest entry, but at least a hundredth of the largest of the whole tree: an entry
    that results from cancellation has the rounding errors of larger numbers, so a relative error
    per entry would mean nothing. Tolerance 0 means identical.
    """
    paths, ours = zip(*jax.tree_util.tree_leaves_with_path(ours), strict=True)
    ours = [to_numpy(leaf) for leaf in ours]
    theirs = [to_numpy(leaf) for leaf in jax.tree.leaves(theirs)]
    assert len(ours) == len(theirs)
    floor = max(np.abs(leaf).max() for leaf in theirs) / 100
    largest_absolute = largest_relative = 0.0
    for path, a, b in zip(paths, ours, theirs, strict=True):
        where = f"{quantity}{jax.tree_util.keystr(path)}"
        assert a.shape == b.shape, f"{where}: shape {a.shape}, theirs {b.shape}"
        if a.dtype.kind == "f":
            assert a.dtype == b.dtype, f"{where}: {a.dtype}, theirs {b.dtype}"
        assert np.isfinite(a).all() and np.isfinite(b).all(), f"{where}: not finite"
        absolute = float(np.abs(a - b).max())
        scale = float(max(np.abs(b).max(), floor))
        relative = absolute / scale if scale else float(absolute > 0)
        largest_absolute = max(largest_absolute, absolute)
        largest_relative = max(largest_relative, relative)
        assert relative <= tolerance, (
            f"{where}: off by {absolute:.3g}, {relative:.3g} of the scale {scale:.3g}; "
            f"allowed is {tolerance:.3g} of it"
        )
    values = dict(implementation=implementation, dtype=str(ours[0].dtype), tolerance=tolerance)
    values |= dict(absolute=largest_absolute, relative=largest_relative)
    record(kind="values", quantity=quantity, size=sum(leaf.size for leaf in ours), **values)


def agree_in_distribution(
    quantity: str, p_value: float, size: int, implementation: str = "torchref", level: float = 1e-3
) -> None:
    """Assert that a test of equal distributions does not reject, and record its p-value.

    The seeds are fixed, so the same versions of the libraries always give the same p-value. For
    correct code it is uniform on [0, 1]: a new version fails one test in 1/level.
    """
    values = dict(implementation=implementation, size=size, p_value=float(p_value), level=level)
    record(kind="distribution", quantity=quantity, **values)
    assert p_value >= level, f"{quantity}: p = {p_value:.3g}"


def chi_squared(seen: np.ndarray, expected: np.ndarray) -> float:
    """Return the p-value of counts (R, N) against expected counts with the same row sums.

    This is Pearson's test with a multinomial per row. Cells of a row that expect fewer than ten
    counts are merged, as the chi-squared law requires, and left out if they still expect fewer.
    """
    statistic = freedom = 0
    for s, e in zip(seen, expected, strict=True):
        rare = e < 10
        s = np.append(s[~rare], s[rare].sum())
        e = np.append(e[~rare], e[rare].sum())
        if e[-1] < 10:
            s = s[:-1]
            e = e[:-1]
        if len(e) > 1:
            e = e * (s.sum() / e.sum())
            statistic += ((s - e) ** 2 / e).sum()
            freedom += len(e) - 1
    assert freedom > 2, "too few tokens to test"
    return float(scipy.stats.chi2.sf(statistic, freedom))


def record(**fields: Any) -> None:
    """Append a line of JSON to the file that JAXGRU_PARITY_RECORD names, if it is set."""
    path = os.environ.get(RECORD_VARIABLE)
    if path:
        fields["test"] = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0]
        with open(path, "a") as file:
            file.write(json.dumps(fields) + "\n")
