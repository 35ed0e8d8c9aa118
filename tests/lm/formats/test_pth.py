"""The study's .pth files, built here by hand from its list of keys: read, written, refused."""

from __future__ import annotations

import os
import pickle
import re
import sys
import types
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from random_models import by_gate, only_model, random_params, same_bits

import jaxgru
import torchref
from jaxgru.errors import UserError
from jaxgru.files import ModelFileError
from jaxgru.libraries import LibraryError
from jaxgru.lm import Config, ModelConfig, apply, load_config
from jaxgru.lm.config import TrainingConfig, config_dir
from jaxgru.lm.data.tokenizers import CharacterTokenizer
from jaxgru.lm.formats import pth
from jaxgru.lm.formats.pth import load_pth, load_pth_model, save_pth

torch = pytest.importorskip("torch")


def drawer():
    rng = np.random.default_rng(0)
    return lambda *shape: torch.tensor(rng.standard_normal(shape), dtype=torch.float32)


def saved(state, model_class, name, dropout, **sizes):
    about = dict(model_class=model_class, model_name=name, dropout=dropout, version=1, **sizes)
    return {"state_dict": state, "timestamp": "2025-01-02T03:04:05.678901", **about}


def gru_file(V=5, E=3, H=4, L=2):
    """What the study saves for a GRU, key by key; weights are PyTorch's (out, in)."""
    draw = drawer()
    state = {"embedding.weight": draw(V, E)}
    for i in range(L):
        for gate in ("Wz", "Wr", "W"):
            state[f"layers.{i}.grucell.{gate}x.weight"] = draw(H, E if i == 0 else H)
            state[f"layers.{i}.grucell.{gate}x.bias"] = draw(H)
            state[f"layers.{i}.grucell.{gate}h.weight"] = draw(H, H)
        state[f"layers.{i}.grucell.bias_z"] = draw(H)
        state[f"layers.{i}.grucell.bias_r"] = draw(H)
    state |= {"fc.linear_projection.weight": draw(V, H), "fc.linear_projection.bias": draw(V)}
    sizes = dict(n_classes=V, vocab_size=V, embd_dim=E, hidden_dim=H, num_layers=L)
    return saved(state, "MyGRUModel", "Astra_alpha", 0.1, **sizes)


def lstm_file(V=5, E=3, H=4, L=2):
    """What the study saves for an LSTM."""
    draw = drawer()
    state = {"embeddings.weight": draw(V, E)}
    for i in range(L):
        for gate in "fiog":
            state[f"lstm_layer.layers.{i}.W_{gate}_x.weight"] = draw(H, E if i == 0 else H)
            state[f"lstm_layer.layers.{i}.W_{gate}_h.weight"] = draw(H, H)
            state[f"lstm_layer.layers.{i}.b_{gate}"] = draw(H)
    state |= {"layer_norm.weight": draw(H), "layer_norm.bias": draw(H)}
    state["linear_projection.linear_projection.weight"] = draw(V, H)
    state["linear_projection.linear_projection.bias"] = draw(V)
    sizes = dict(vocab_size=V, in_features=E, hidden_dim=H, n_layers=L)
    return saved(state, "MyLSTMModel", "Leviathan", 0.2, **sizes)


FILES = {"gru": gru_file, "lstm": lstm_file}
PUBLISHED = sorted(path.stem for path in (config_dir() / "published").glob("*.toml"))


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "model.pth"


class TestReading:
    @pytest.mark.parametrize("kind", FILES)
    @pytest.mark.parametrize("V, E, H, L", [(5, 3, 4, 2), (2, 2, 1, 1)])
    def test_logits_are_the_study_s(self, kind, V, E, H, L, path):
        """And so are those of a file that we write again, with the reference's dropout."""
        file = FILES[kind](V, E, H, L)
        torch.save(file, path)
        params, model = load_pth_model(path)
        gru = dict(second_bias=True, reset_gate="before")
        has = gru if kind == "gru" else dict(final_norm=True)
        assert model == ModelConfig(kind, V, E, H, L, init_scheme="pytorch", **has)
        tokens = np.random.default_rng(1).integers(0, V, (1, 6))
        ours, _ = apply(params, tokens)
        for dropout in (file["dropout"], 0.3):
            theirs = torchref.load(path)
            with torch.no_grad():
                expected = theirs(torch.tensor(tokens))[0]
            np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-5)
            assert not theirs.training and theirs.dropout == dropout
            training = TrainingConfig(state_dropout=0.3, output_dropout=0.3)
            save_pth(path, params, Config("x", model, training=training))

    def test_the_two_biases_of_a_gate_are_not_exchanged(self, path):
        """No output would tell; the optimizer's moments and a file's names would."""
        file = gru_file()
        torch.save(file, path)
        for i, layer in enumerate(load_pth_model(path)[0].layers):
            names = {"bz": "Wzx.bias", "cz": "bias_z", "br": "Wrx.bias", "cr": "bias_r"}
            for ours, theirs in names.items():
                tensor = file["state_dict"][f"layers.{i}.grucell.{theirs}"]
                np.testing.assert_array_equal(getattr(by_gate(layer), ours), tensor)

    @pytest.mark.parametrize("kind", FILES)
    def test_a_bare_state_dict(self, kind, path):
        """What the study's early stopping saves. A module's parameters may stand in it, too."""
        file = FILES[kind]()
        torch.save(file, path)
        params, config = load_pth_model(path)
        for made in (lambda tensor: tensor, torch.nn.Parameter):
            torch.save({name: made(tensor) for name, tensor in file["state_dict"].items()}, path)
            bare, again = load_pth_model(path)
            assert same_bits(bare, params) and again == config


class TestWriting:
    @pytest.mark.parametrize("kind", FILES)
    def test_the_study_s_layout(self, kind, path):
        """Keys, shapes, types and metadata are those of a file of the study's; so are the bits."""
        file = FILES[kind]()
        torch.save(file, path)
        params, model = load_pth_model(path)
        training = TrainingConfig(state_dropout=file["dropout"], output_dropout=file["dropout"])
        save_pth(path, params, Config(file["model_name"].lower(), model, training=training))
        written = torch.load(path, weights_only=True)
        assert written.keys() == file.keys()
        assert written["timestamp"] == ""  # so that the same model gives the same file
        for key in file.keys() - {"state_dict", "timestamp"}:
            assert written[key] == file[key] and type(written[key]) is type(file[key]), key
        assert written["state_dict"].keys() == file["state_dict"].keys()
        for name, tensor in file["state_dict"].items():
            assert written["state_dict"][name].is_contiguous()
            assert torch.equal(written["state_dict"][name], tensor)

    def test_a_single_bias_is_written_with_zeros_beside_it(self, path):
        model = ModelConfig("gru", 5, 3, 4, num_layers=2, reset_gate="before")
        params = random_params(model)
        save_pth(path, params, Config("x", model))
        again, config = load_pth_model(path)
        assert config.second_bias
        for one, two in zip(params.layers, again.layers, strict=True):
            assert not np.asarray(two.c).any() and same_bits(two.replace(c=None), one)

    @pytest.mark.parametrize("options, has", [
        ({"cell": "rnn"}, "cell = 'rnn'"), ({"cell": "lstm"}, "cell = 'lstm'"),
        ({"reset_gate": "before", "final_norm": True}, "final_norm = True"),
        ({}, "reset_gate = 'after'"),
        ({"reset_gate": "before", "activation": "relu"}, "activation = 'relu'"),
        ({"reset_gate": "before", "tied_embedding": True}, "tied_embedding = True"),
    ])  # fmt: skip
    def test_models_that_the_study_does_not_have(self, options, has, path):
        model = ModelConfig(vocab_size=3, embedding_dim=2, hidden_dim=2, **options)
        says = f"cannot be written: the study has only GRUs .*; this model has .*model.{has}"
        with pytest.raises(ModelFileError, match=says):
            save_pth(path, random_params(model), Config("x", model))
        assert not path.exists()

    def test_parameters_that_are_not_the_config_s(self, path):
        model = ModelConfig(vocab_size=3, embedding_dim=2, hidden_dim=2, reset_gate="before")
        params = random_params(model)
        larger = Config("x", only_model(model, vocab_size=4))
        with pytest.raises(ModelFileError, match=r"embedding has shape \(3, 2\).*\(4, 2\)"):
            save_pth(path, params, larger)
        with pytest.raises(ModelFileError, match="layers.1.U is missing"):
            save_pth(path, params, Config("x", only_model(model, num_layers=2)))
        half = jax.tree.map(lambda leaf: leaf.astype("float16"), params)
        with pytest.raises(ModelFileError, match="embedding is float16; it must be float32"):
            save_pth(path, half, Config("x", model))
        clipped = params.replace(layers=tuple(p.replace(clip=1.0) for p in params.layers))
        with pytest.raises(ModelFileError, match=r"layer 0 .*, clip=1.0\); the config says"):
            save_pth(path, clipped, Config("x", model))


def _set_tensor(name, value):
    return lambda file: file["state_dict"].__setitem__(name, value)


def _keep(*words):
    """Only the tensors whose names have one of these words."""
    return lambda file: [
        file["state_dict"].pop(name)
        for name in [*file["state_dict"]]
        if not any(word in name for word in words)
    ]


BAD = "layers.1.grucell.Wzx.weight"
REFUSED = {
    "missing tensor": (lambda file: file["state_dict"].pop(BAD), f"{BAD} is missing"),
    "missing head": (_keep("embedding"), "its embedding or head is missing or no matrix"),
    "a vector": (_set_tensor("embedding.weight", torch.zeros(4)), "embedding or head is missing"),
    "missing layers": (_keep("embedding", "fc"), "num_layers is 0"),
    "extra tensor": (_set_tensor("head.weight", torch.zeros(2)), "head.weight does not belong"),
    "turned tensor": (_set_tensor(BAD, torch.zeros(4, 3)), r"shape \(4, 3\); it must be \(4, 4\)"),
    "float64": (_set_tensor(BAD, torch.zeros(4, 4).double()), "float64; it must be float32"),
    "a list": (_set_tensor(BAD, [1.0]), "'list' object has no attribute 'numpy'"),
    "no data": (_set_tensor(BAD, torch.zeros(4, 4, device="meta")), "NotImplementedError: Cannot"),
    "no state_dict": (lambda file: file.update(state_dict=None), "state_dict is NoneType"),
    "another model": (lambda file: file.pop("state_dict"), "neither a checkpoint of the study"),
}  # fmt: skip


class TestRefusals:
    @pytest.mark.parametrize("what, bare", [
        *((what, False) for what in REFUSED),
        *((what, True) for what in ("missing tensor", "missing head", "extra tensor", "float64")),
    ])  # fmt: skip
    def test_contents(self, what, bare, path):
        change, says = REFUSED[what]
        file = gru_file()
        change(file)
        torch.save(file["state_dict"] if bare else file, path)
        with pytest.raises(UserError, match=f"^{path} cannot be used: .*{says}"):
            load_pth_model(path)

    def test_metadata(self, path):
        """A rate must be one. A name is only a label."""
        tokenizer = CharacterTokenizer("abcde")
        torch.save(gru_file() | {"model_name": 5}, path)
        assert load_pth(path, tokenizer)[1].name == "5"
        for rate in (2, "0.1", None, torch.zeros(2)):
            torch.save(gru_file() | {"dropout": rate}, path)
            with pytest.raises(ModelFileError, match=f"^{path} cannot be used: "):
                load_pth(path, tokenizer)

    @pytest.mark.parametrize(
        "value, says",
        [
            (torch.nn.GRU(2, 3).state_dict(), "keys are .'weight_ih_l0', .*torch_nn.from_torch"),
            ({"config": {"embd_dim": 3}, "weights": {}}, r"keys are \['config', 'weights'\]"),
            ([gru_file()], "its state_dict is list, not a dict"),
            (torch.nn.Linear(2, 2), "more than tensors and plain values"),
        ],
        ids=range(4),
    )
    def test_something_else(self, value, says, path):
        torch.save(value, path)
        with pytest.raises(ModelFileError, match=f"{path} cannot be used: .*{says}"):
            load_pth_model(path)

    def test_no_checkpoint_at_all(self, path):
        path.write_bytes(b"weights")
        with pytest.raises(ModelFileError, match="damaged, not a file of torch.save"):
            load_pth_model(path)

    @pytest.mark.parametrize("method", ["STORED", "DEFLATED", "only the pickle"])
    def test_a_damaged_byte(self, method, path):
        """Of the archive, however it is compressed, or of its pickle before that was packed."""
        torch.save(gru_file(), path)
        params = load_pth_model(path)[0]
        with zipfile.ZipFile(path) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        (pickled,) = (name for name in parts if name.endswith("data.pkl"))

        def pack(parts):
            with zipfile.ZipFile(path, "w", getattr(zipfile, f"ZIP_{method}", 0)) as archive:
                for name, data in parts.items():
                    archive.writestr(name, data)
            return path.read_bytes()

        whole = pack(parts)
        refused = 0
        spoilt = parts[pickled] if method == "only the pickle" else whole
        for place in range(0, len(spoilt), 49):
            data = bytearray(spoilt)
            data[place] ^= 0xFF
            pack(parts | {pickled: data}) if spoilt is not whole else path.write_bytes(data)
            try:  # what is not of the model is not missed, such as the time that an archive keeps
                again = load_pth_model(path)[0]
                assert spoilt is not whole or same_bits(again, params)
            except ModelFileError as error:
                assert str(error).startswith(f"{path} cannot be used: ")
                refused += 1
        assert refused > len(spoilt) / 49 / 2

    def test_code_is_not_run(self, path, tmp_path):
        witness = tmp_path / "witness"

        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(witness),)

        for value in (Evil(), gru_file() | {"version": Evil()}):
            torch.save(value, path)
            with pytest.raises(ModelFileError, match="nothing in it was run"):
                load_pth_model(path)
            path.write_bytes(pickle.dumps(value))
            with pytest.raises(ModelFileError, match="not a file of torch.save"):
                load_pth_model(path)
        assert not witness.exists()
        pickle.loads(pickle.dumps(Evil()))
        assert witness.exists()  # the witness would have told

    def test_without_pytorch(self, path, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", None)
        model = ModelConfig(vocab_size=2, embedding_dim=1, hidden_dim=1, reset_gate="before")

        def save():
            return save_pth(path, random_params(model), Config("x", model))

        for call in (lambda: load_pth_model(path), save):
            with pytest.raises(LibraryError, match="PyTorch is needed but not installed"):
                call()

    def test_pytorch_is_not_imported_before_it_is_needed(self):
        for path in Path(jaxgru.__file__).parent.rglob("*.py"):
            assert not re.search(r"^(import|from) torch\b", path.read_text(), re.MULTILINE), path


SIZES = ("vocab_size", "embedding_dim", "hidden_dim", "num_layers")


def whole_config(file_name, kind, sizes, **metadata):
    """The config of a file with these sizes and metadata."""
    (layout,) = (each for each in pth._LAYOUTS if each.config.cell == kind)
    model = only_model(layout.config, **dict(zip(SIZES, sizes, strict=True)))
    return pth._whole_config(Path(f"{file_name}.pth"), model, metadata, "characters")


class TestAsARun:
    def test_a_published_model(self, path, monkeypatch, shakespeare):
        monkeypatch.setattr(pth, "load_corpus", lambda: types.SimpleNamespace(text=shakespeare))
        torch.save(gru_file(V=65, E=64, H=128, L=1), path)
        params, config, tokenizer = load_pth(path)
        published = load_config("astra_alpha")
        assert (config.name, config.model) == ("astra_alpha", published.model)
        assert (config.training, config.data) == (published.training, published.data)
        assert same_bits(params, load_pth_model(path)[0])
        assert tokenizer.vocabulary == "".join(sorted(set(shakespeare)))

    @pytest.mark.parametrize("name", PUBLISHED)
    def test_the_study_s_models(self, name):
        """Known by their sizes alone; the tokenizer is the one that was given."""
        published = load_config(name)
        cell, V, E, H, L = (getattr(published.model, field) for field in ("cell", *SIZES))
        config = whole_config("x", cell, (V, E, H, L), model_name="Astra-δ")
        assert (config.name, config.training) == (name, published.training)
        assert config.data.tokenizer == "characters"
        mine = whole_config("x", cell, (V, E, H, L), dropout=0.25)
        assert [*mine.training.dropouts.values()] == [0.25]  # the file's own, for the file says it
        other = whole_config("x", cell, (V, E, H + 1, L))
        assert (other.name, other.training) == ("x", TrainingConfig())

    @pytest.mark.parametrize("model_name, name", [
        ("Scribe-gamma", "scribe-gamma"),  # which is not of this size
        ("My Model (2)", "my_model__2_"), ("../../etc", "_.._etc"), ("Astra-δ", "astra-_"),
        ("Überraschung", "_berraschung"), ("...", "custom"), ("", "custom"),
    ])  # fmt: skip
    def test_any_other_model(self, model_name, name):
        config = whole_config("x", "gru", (5, 3, 4, 2), model_name=model_name, dropout=0.1)
        assert (config.name, config.training) == (name, TrainingConfig(state_dropout=0.1))

    def test_pieces_for_a_thousand_tokens(self, path, monkeypatch, shakespeare):
        text = types.SimpleNamespace(text=shakespeare[:60_000])
        monkeypatch.setattr(pth, "load_corpus", lambda: text)
        torch.save(gru_file(V=1000, E=2, H=3, L=1), path)
        _, config, tokenizer = load_pth(path)
        assert config.data.tokenizer == "sentencepiece" and tokenizer.vocab_size == 1000
        assert tokenizer.decode(tokenizer.encode("my lord")) == "my lord"

    def test_a_text_that_it_would_be_mistaken_for(self, path):
        """A file of 65 tokens is read as one of Tiny Shakespeare."""
        model = ModelConfig(vocab_size=65, embedding_dim=1, hidden_dim=1, reset_gate="before")
        with pytest.raises(ModelFileError, match="would not hold the tokenizer, .* with 65 tokens"):
            save_pth(path, random_params(model), Config("x", model), text_sha256="of another")

    def test_the_tokenizer_that_is_missing_or_another(self, path):
        torch.save(gru_file(), path)
        with pytest.raises(ModelFileError, match="no tokenizer, and none is known for 5 tokens"):
            load_pth(path)
        with pytest.raises(ModelFileError, match="the tokenizer has 3 tokens, but .* has 5"):
            load_pth(path, CharacterTokenizer("abc"))
