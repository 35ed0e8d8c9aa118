"""torchref's names are the study's, listed here from its description, and its files load."""

from __future__ import annotations

import pytest
import torch

import torchref

GRU_LAYER = [
    "Wx.weight", "Wx.bias", "Wh.weight", "Wzx.weight", "Wzx.bias", "Wzh.weight", "bias_z",
    "Wrx.weight", "Wrx.bias", "Wrh.weight", "bias_r",
]  # fmt: skip
LSTM_LAYER = [
    "W_f_x.weight", "W_f_h.weight", "b_f", "W_i_x.weight", "W_i_h.weight", "b_i",
    "W_o_x.weight", "W_o_h.weight", "b_o", "W_g_x.weight", "W_g_h.weight", "b_g",
]  # fmt: skip

GRU = {
    "keys": ["embedding.weight", "fc.linear_projection.weight", "fc.linear_projection.bias"]
    + [f"layers.{i}.grucell.{name}" for i in range(2) for name in GRU_LAYER],
    "metadata": {
        "model_class": "MyGRUModel", "model_name": "Astra", "n_classes": 65, "embd_dim": 8,
        "hidden_dim": 12, "dropout": 0.1, "vocab_size": 65, "num_layers": 2, "version": 1,
        "timestamp": "2024-01-01",
    },
}  # fmt: skip
LSTM = {
    "keys": ["embeddings.weight", "layer_norm.weight", "layer_norm.bias"]
    + [f"linear_projection.linear_projection.{name}" for name in ("weight", "bias")]
    + [f"lstm_layer.layers.{i}.{name}" for i in range(2) for name in LSTM_LAYER],
    "metadata": {
        "model_class": "MyLSTMModel", "model_name": "Leviathan", "in_features": 8,
        "hidden_dim": 12, "dropout": 0.2, "vocab_size": 65, "n_layers": 2, "version": 1,
        "timestamp": "2024-01-01",
    },
}  # fmt: skip


def shape(key: str) -> tuple[int, ...]:
    """Weights are (out, in): vocabulary 65, embedding 8, hidden 12."""
    if key.startswith("embedding"):
        return 65, 8
    if "linear_projection" in key:
        return (65, 12) if key.endswith("weight") else (65,)
    if not key.endswith("weight") or key.startswith("layer_norm"):
        return (12,)
    input_product = key.removesuffix(".weight").endswith("x")
    return 12, 8 if input_product and ".0." in key else 12


@pytest.mark.parametrize("study", [GRU, LSTM], ids=["gru", "lstm"])
def test_a_file_of_the_study_loads(study, tmp_path):
    """A file with the study's names, shapes and metadata loads, with each tensor in its place."""
    generator = torch.Generator().manual_seed(0)
    tensors = {key: torch.randn(shape(key), generator=generator) for key in study["keys"]}
    torch.save({"state_dict": tensors, **study["metadata"]}, tmp_path / "model.pth")
    model = torchref.load(tmp_path / "model.pth")
    assert not model.training and model.dropout == study["metadata"]["dropout"]
    loaded = model.state_dict()
    assert sorted(loaded) == sorted(study["keys"])
    assert all(torch.equal(loaded[key], tensors[key]) for key in study["keys"])
    logits, carry = model(torch.zeros((2, 3), dtype=torch.long))
    assert logits.shape == (2, 3, 65) and len(carry) == 2
