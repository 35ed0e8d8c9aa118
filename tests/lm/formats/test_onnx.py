"""ONNX: three runtimes compute what jaxgru does, and weights go there and back bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import subprocess
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import randomized
from conftest import NODE_MODULES, needs_web
from random_models import random_params, same_bits

import jaxgru
from jaxgru.cells import CELLS, Cell, struct
from jaxgru.cells.contract import options_of_cell
from jaxgru.files import ModelFileError
from jaxgru.libraries import LibraryError
from jaxgru.lm import Config, ModelConfig, load, load_config
from jaxgru.lm.config.fields import ConfigError, choices, field_types
from jaxgru.lm.data.corpus import TINY_SHAKESPEARE_SHA256
from jaxgru.lm.data.tokenizers import CharacterTokenizer
from jaxgru.lm.formats.safetensors import save_safetensors
from jaxgru.lm.load import find_model
from jaxgru.lm.pretrained import pretrained_names

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from onnx import TensorProto  # noqa: E402

from jaxgru.lm.formats.onnx import load_onnx, save_onnx, to_onnx  # noqa: E402

HERE = Path(__file__).resolve().parent

SIZES = dict(vocab_size=5, embedding_dim=3, hidden_dim=4)
CONFIGS = {
    "gru": ModelConfig(**SIZES, num_layers=2, second_bias=True, reset_gate="before"),
    "gru after": ModelConfig(**SIZES, num_layers=2, final_norm=True),
    "lstm": ModelConfig("lstm", **SIZES, num_layers=3, final_norm=True),
    "mlp": ModelConfig("mlp", **SIZES, num_layers=2, context_length=3),
    "mogrifier_gru": ModelConfig("mogrifier_gru", **SIZES, rank=2, final_norm=True),
    "tied": ModelConfig("lstm", **SIZES, num_layers=2, proj_size=3, tied_embedding=True),
    "smallest": ModelConfig("rnn", 2, 1, 1),
}
SLOW = "astra_beta astra_gamma scribe_alpha scribe_beta scribe_gamma leviathan best_gru".split()
FULL_SIZE = ["astra_alpha", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
NUM_TOKENS = 500  # of greedy text

# What we promise of logits, which are up to 17: some roundings of 1e-6 (of them as well as relative
# to them), since onnxruntime adds in another order and approximates tanh
TOLERANCE = 1e-5


class Runtime:
    """A graph in onnxruntime: the first output, then the carry."""

    def __init__(self, model) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def __call__(self, x, carry=None):
        first, *states = self.session.get_inputs()
        if carry is None:
            carry = [np.zeros((len(x), *state.shape[1:]), np.float32) for state in states]
        names = (value.name for value in (first, *states))
        arrays = map(np.asarray, [x, *carry])
        y, *carry = self.session.run(None, dict(zip(names, arrays, strict=True)))
        return y, carry

    def in_pieces(self, x, carry=None):
        """The carry of one call goes into the next."""
        outputs = []
        T = x.shape[1]
        for piece in np.split(x, sorted({1, T // 3, T // 2} - {0, T}), axis=1):
            y, carry = self(piece, carry)
            outputs.append(y)
        return np.concatenate(outputs, axis=1), carry


def close(ours, theirs):
    """The outputs and every part of the carry."""
    ours, theirs = ([first, *jax.tree.leaves(carry)] for first, carry in (ours, theirs))
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and b.dtype == np.float32
        np.testing.assert_allclose(b, a, rtol=TOLERANCE, atol=TOLERANCE)


class TestSmallModels:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_logits_and_carry(self, name):
        """Against jaxgru in float64."""
        config = CONFIGS[name]
        B, T = (1, 1) if name == "smallest" else (3, 8)
        params = random_params(config)
        tokens = np.random.default_rng(1).integers(config.vocab_size, size=(B, T), dtype=np.int32)
        carry = randomized(jax.eval_shape(lambda: jaxgru.initial_carry(params.layers, B)))
        with jax.enable_x64(True):
            double = partial(jax.tree.map, lambda leaf: jnp.asarray(leaf, jnp.float64))
            ours = jaxgru.lm.apply(double(params), tokens, double(carry), implementation="autodiff")
        runtime = Runtime(to_onnx(params))
        for run in (runtime, runtime.in_pieces):
            close(ours, run(tokens, jax.tree.leaves(carry)))

    def test_the_graph(self):
        """Standard operators of an opset that every runtime has, any B and T, jaxgru's shapes."""
        for config in CONFIGS.values():
            model = to_onnx(random_params(config))
            onnx.checker.check_model(model, full_check=True)
            assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 17)]
        model = to_onnx(random_params(CONFIGS["lstm"]))
        carry = [f"{i}.{name}" for i in range(3) for name in "hc"]
        for values, first, shape in (
            (model.graph.input, "tokens", ["B", "T"]),
            (model.graph.output, "logits", ["B", "T", 5]),
        ):
            out = "_out" if first == "logits" else ""
            assert [v.name for v in values] == [first, *(f"carry{out}.{name}" for name in carry)]
            seen = [
                [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values
            ]
            assert seen == [shape] + [["B", 4]] * 6
        assert model.graph.input[0].type.tensor_type.elem_type == TensorProto.INT32

    def test_refusals(self):
        params = random_params(CONFIGS["gru"])
        with pytest.raises(LibraryError, match="are bfloat16 and float32; they must be"):
            to_onnx(params.replace(embedding=params.embedding.astype(jnp.bfloat16)))
        with pytest.raises(LibraryError, match="an ONNX graph needs the values of the weights"):
            jax.jit(to_onnx)(params)


TOKENIZER = CharacterTokenizer('a"é\n漢')
CONFIG = Config("small", CONFIGS["gru"])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.onnx"


@pytest.fixture
def saved(path):
    save_onnx(path, random_params(CONFIG.model), CONFIG, TOKENIZER)
    return path


def test_metadata_are_those_of_a_safetensors_file(saved, tmp_path):
    """A runtime can read them all."""
    from safetensors import safe_open

    save_safetensors(tmp_path / "m.safetensors", random_params(CONFIG.model), CONFIG, TOKENIZER)
    with safe_open(tmp_path / "m.safetensors", "numpy") as file:
        expected = file.metadata()
    seen = onnxruntime.InferenceSession(saved).get_modelmeta().custom_metadata_map
    assert seen == expected
    assert find_model(saved).text_sha256() == expected["text_sha256"] == TINY_SHAKESPEARE_SHA256


NUMBERS = dict(context_length=[2], rank=[2], num_blocks=[1, 2], proj_size=[0, 3])
"""Of options that are numbers, values to try."""


def values_to_try(field):
    """Values of an option: both flags, every name, or some numbers."""
    if field_types(ModelConfig)[field.name] is bool:
        return [False, True]
    return choices(ModelConfig, field) or NUMBERS.get(field.name, [field.default])


def every_option(cell):
    """The models of a cell with all options that go together and decide how it computes."""
    options = set(options_of_cell(cell)) - {"init_scheme"}
    fields = [field for field in dataclasses.fields(ModelConfig) if field.name in options]
    names = [field.name for field in fields]
    for values in itertools.product(*map(values_to_try, fields)):
        with contextlib.suppress(ConfigError):
            yield ModelConfig(cell, **SIZES, **dict(zip(names, values, strict=True)))


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_with_every_option_goes_there_and_back(cell, path):
    number = 0
    for model in every_option(cell):
        params = random_params(model)
        save_onnx(path, params, Config("m", model), CharacterTokenizer("abcd\n"))
        read, config, _ = load_onnx(path)
        assert same_bits(read, params) and config.model == model
        number += 1
    assert number


def test_layers_that_a_cell_wraps_go_there_and_back(path, monkeypatch):
    """Their weights have paths of several names."""

    @struct
    class Wrapped(Cell):
        layer: Cell

        def sizes(self):
            return self.layer.sizes()

        def zero_carry(self, batch_size):
            return self.layer.zero_carry(batch_size)

        def inputs(self, x):
            return self.layer.inputs(x)

        def step(self, layout, carry, a):
            return self.layer.step(layout, carry, a)

    def init_wrapped(key, in_features, hidden_dim, *, dtype=jnp.float32):
        return Wrapped(jaxgru.init_lstm(key, in_features, hidden_dim, dtype=dtype))

    monkeypatch.setitem(CELLS, "wrapped", init_wrapped)
    model = ModelConfig("wrapped", **SIZES)
    params = random_params(model)
    save_onnx(path, params, Config("m", model), CharacterTokenizer("abcd\n"))
    assert same_bits(load_onnx(path)[0], params)


def _tensor(**changes):
    """Change fields of a tensor; None clears one."""

    def change(model):
        (tensor,) = (t for t in model.graph.initializer if t.name == "layers.0.W")
        for field, value in changes.items():
            tensor.ClearField(field)
            if isinstance(value, list):
                getattr(tensor, field).extend(value)
            elif value is not None:
                setattr(tensor, field, value)

    return change


def _metadata(key, old, new):
    def change(model):
        (entry,) = (entry for entry in model.metadata_props if entry.key == key)
        entry.value = entry.value.replace(old, new)

    return change


PASSWORDS = [onnx.StringStringEntryProto(key="location", value="/etc/passwd")]
EXTERNAL = dict(data_location=TensorProto.EXTERNAL, external_data=PASSWORDS, raw_data=None)
REFUSED = {
    "a tensor less": (lambda m: m.graph.initializer.pop(), "head.bo must be a float32 tensor"),
    "external data": (_tensor(**EXTERNAL), r"layers.0.W .* tensor \(1, 12, 3\) in the file"),
    "turned": (_tensor(dims=[1, 3, 12]), r"layers.0.W must be a float32 tensor \(1, 12, 3\)"),
    "another weight": (_tensor(raw_data=bytes(144)), "does not match its SHA-256"),
    "config not TOML": (_metadata("config", "[", ""), "its config is broken"),
    "vocabulary": (_metadata("tokenizer_data", "a", "b"), "does not match its SHA-256"),
    "nothing in it": (lambda m: m.CopyFrom(onnx.ModelProto()), "not a model of this library"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what, saved):
    change, says = REFUSED[what]
    model = onnx.load(saved)
    change(model)
    saved.write_bytes(model.SerializeToString())
    with pytest.raises(ModelFileError, match=f"{saved} cannot be used: .*{says}"):
        load_onnx(saved)


def test_no_onnx_file(path):
    path.write_bytes(b"\xff\xff")
    with pytest.raises(ModelFileError, match="m.onnx cannot be used: it is not a whole ONNX file"):
        load_onnx(path)


@pytest.fixture(scope="module", params=FULL_SIZE)
def full_size(request):
    """A published model, trained if it ships; tokens, their logits and carry; greedy text."""
    config = load_config(request.param)
    if config.name in pretrained_names():
        params = load(config.name)[0]
    else:
        params = jaxgru.lm.init(jax.random.key(0), config.model)
    V = config.model.vocab_size
    tokens = np.random.default_rng(0).integers(V, size=(1, 200), dtype=np.int32)
    prompt = jnp.asarray(tokens)
    key = jax.random.key(0)
    text = jaxgru.lm.generate(params, key, prompt, NUM_TOKENS, temperature=0)[0]
    return params, tokens, jax.jit(jaxgru.lm.apply)(params, tokens), text[0].tolist()


class TestFullSize:
    def test_onnxruntime(self, full_size):
        params, tokens, results, text = full_size
        runtime = Runtime(to_onnx(params))
        logits, carry = runtime(tokens)
        close(results, (logits, carry))
        close(results, runtime.in_pieces(tokens))
        greedy = []
        for _ in range(NUM_TOKENS):
            token = logits[:, -1:].argmax(-1).astype(np.int32)
            greedy.append(token.item())
            logits, carry = runtime(token, carry)
        assert greedy == text

    @needs_web
    def test_onnxruntime_web(self, full_size, path):
        """WebAssembly under Node, as in a browser: the carry stays in JavaScript."""
        params, tokens, (logits, _), text = full_size
        onnx.save(to_onnx(params), path)
        request = {"tokens": tokens[0].tolist(), "greedy": NUM_TOKENS}
        done = subprocess.run(
            ["node", HERE / "onnx_web.mjs", NODE_MODULES, path],
            input=json.dumps(request), capture_output=True, text=True,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        seen = json.loads(done.stdout)
        theirs = np.array(seen["whole"], np.float32).reshape(logits.shape)
        close((logits, ()), (theirs, ()))
        assert seen["greedy"] == text
