"""ONNX: three runtimes compute what jaxgru does, and weights go there and back bit for bit."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import NODE_MODULES, needs_web
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import model_configs, random_bits, random_params, same_bits

import jaxgru
from jaxgru.cells import GRUParams
from jaxgru.libraries import InteropError
from jaxgru.lm import Config, ModelConfig, load, load_config
from jaxgru.lm.data.tokenizers import CharacterTokenizer
from jaxgru.lm.formats.metadata import METADATA
from jaxgru.lm.formats.safetensors import save_safetensors
from jaxgru.lm.pretrained import pretrained_names

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from jaxgru.lm.formats.onnx import load_onnx, save_onnx, to_onnx  # noqa: E402

HERE = Path(__file__).resolve().parent

SIZES = dict(vocab_size=5, embedding_dim=3, hidden_dim=4)
CONFIGS = {
    "gru": ModelConfig(**SIZES, reset_gate="before"),
    "gru, second bias": ModelConfig(**SIZES, num_layers=2, second_bias=True, reset_gate="before"),
    "gru after": ModelConfig(**SIZES, num_layers=2, final_norm=True),
    "gru after, second bias": ModelConfig(**SIZES, second_bias=True),
    "lstm": ModelConfig("lstm", **SIZES, num_layers=3, final_norm=True),
    "rnn": ModelConfig("rnn", **SIZES, num_layers=2),
    "mlp": ModelConfig("mlp", **SIZES, num_layers=2, context_length=3),
    "mlp of one token": ModelConfig("mlp", **SIZES, context_length=1),
    "smallest gru": ModelConfig("gru", 2, 1, 1, reset_gate="before"),
    "smallest lstm": ModelConfig("lstm", 2, 1, 1),
}
FULL_SIZE = [
    "astra_alpha",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in "astra_beta astra_gamma scribe_alpha scribe_beta scribe_gamma leviathan".split()
    ),
]
NUM_TOKENS = 500  # of greedy text

# Float32: what we promise of logits, which are up to 17: some roundings of 1e-6 (of them as well
# as relative to them), since onnxruntime adds in another order and approximates tanh.
# Float64: the same sums, with roundings of 1e-16 in place of 6e-8.
TOLERANCE = {"float32": 1e-5, "float64": 1e-13}
NORM_TOLERANCE = 2e-8  # LayerNormalization's ε is a float32, off by 2.5e-8 of itself


class Runtime:
    """A graph in onnxruntime, or float64 in onnx.reference: the first output, then the carry."""

    def __init__(self, model) -> None:
        self.names = [value.name for value in model.graph.input]
        self.shapes = [
            [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
            for value in model.graph.input
        ]
        if model.graph.output[0].type.tensor_type.elem_type == TensorProto.DOUBLE:
            self.run = ReferenceEvaluator(model).run
            return
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.run = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        ).run

    def __call__(self, x, carry=None):
        if carry is None:
            carry = [np.zeros((len(x), *shape[1:]), np.float32) for shape in self.shapes[1:]]
        first, *carry = self.run(None, dict(zip(self.names, [x, *carry], strict=True)))
        return first, carry

    def in_pieces(self, x, carry=None):
        """The carry of one call goes into the next."""
        outputs, T = [], x.shape[1]
        for piece in np.split(x, sorted({1, T // 3, T // 2} - {0, T}), axis=1):
            y, carry = self(piece, carry)
            outputs.append(y)
        return np.concatenate(outputs, axis=1), carry


def close(ours, theirs, dtype, norm=False):
    """The outputs and every part of the carry."""
    tolerance = NORM_TOLERANCE if norm and dtype == "float64" else TOLERANCE[dtype]
    ours, theirs = ([first, *jax.tree.leaves(carry)] for first, carry in (ours, theirs))
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and b.dtype == dtype
        np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance)


def as_float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def random_carry(params, batch_size, dtype):
    rng = np.random.default_rng(batch_size)
    layers = getattr(params, "layers", params)
    like = jax.eval_shape(lambda: jaxgru.initial_carry(layers, batch_size))
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(dtype), like)


class TestSmallModels:
    """Against jaxgru in float64: float32 graphs in onnxruntime, float64 ones in onnx.reference."""

    @pytest.mark.parametrize("name", CONFIGS)
    def test_logits_and_carry(self, name):
        config, (B, T) = CONFIGS[name], (1, 1) if "smallest" in name else (3, 8)
        params = random_params(config)
        tokens = np.random.default_rng(1).integers(config.vocab_size, size=(B, T), dtype=np.int32)
        carry = random_carry(params, B, "float32")
        with jax.enable_x64(True):
            double = as_float64(params)
            start = jax.tree.map(jnp.asarray, as_float64(carry))
            ours = jaxgru.lm.apply(double, tokens, start, implementation="autodiff")
            reference = Runtime(to_onnx(double))
        runtime = Runtime(to_onnx(params))
        for run in (runtime, runtime.in_pieces):
            close(ours, run(tokens, jax.tree.leaves(carry)), "float32")
        carry = jax.tree.leaves(as_float64(carry))
        for run in (reference, reference.in_pieces):
            close(ours, run(tokens, carry), "float64", config.final_norm)

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
        with pytest.raises(
            InteropError, match="a MinGRUParams cannot be converted: ONNX has a GRU"
        ):
            to_onnx(random_params(ModelConfig("min_gru", **SIZES)))
        with pytest.raises(InteropError, match="are bfloat16 and float32; they must be all"):
            to_onnx(params.replace(embedding=params.embedding.astype(jnp.bfloat16)))
        with pytest.raises(InteropError, match="an ONNX graph needs the values of the weights"):
            jax.jit(to_onnx)(params)


TOKENIZER = CharacterTokenizer('a"é\n漢')
CONFIG = Config("small", CONFIGS["gru, second bias"])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.onnx"


@pytest.fixture
def saved(path):
    save_onnx(path, random_params(CONFIG.model), CONFIG, TOKENIZER)
    return path


class TestWholeModels:
    @settings(max_examples=8, deadline=None)
    @given(config=model_configs(), seed=st.integers(0, 99))
    def test_bit_for_bit(self, config, seed, tmp_path_factory):
        path = tmp_path_factory.mktemp("o") / "x.onnx"
        whole = dataclasses.replace(load_config("leviathan"), name="x", model=config)
        params, tokenizer = random_bits(config, seed), CharacterTokenizer('\n"\\é🎭漢')
        tokenizer = CharacterTokenizer(tokenizer.vocabulary[: config.vocab_size])
        save_onnx(path, params, whole, tokenizer)
        again, config_again, tokenizer_again = load_onnx(path)
        assert same_bits(again, params) and config_again == whole
        assert tokenizer_again.vocabulary == tokenizer.vocabulary

    @pytest.mark.parametrize("name", ["mlp", "mlp of one token"])
    def test_an_mlp(self, name, path):
        params = random_bits(CONFIGS[name])
        save_onnx(path, params, Config("x", CONFIGS[name]), TOKENIZER)
        assert same_bits(jaxgru.lm.load(path)[0], params)

    def test_metadata_are_those_of_a_safetensors_file(self, saved, tmp_path):
        """A runtime can read them all."""
        from safetensors import safe_open

        save_safetensors(tmp_path / "m.safetensors", random_params(CONFIG.model), CONFIG, TOKENIZER)
        with safe_open(tmp_path / "m.safetensors", "numpy") as file:
            expected = file.metadata()
        seen = onnxruntime.InferenceSession(saved).get_modelmeta().custom_metadata_map
        assert seen == expected

    def test_scores_are_onnxruntimes(self, saved):
        """Of a text, token by token, by who has the file alone."""
        params, _, tokenizer = load_onnx(saved)
        scores = jaxgru.lm.score(params, tokenizer, text := 'é"a\n漢aa"')
        tokens = tokenizer.encode(text)
        logits, _ = Runtime(onnx.load(saved))(tokens[None, :-1])
        p = np.exp(logits[0].astype(np.float64))
        expected = -np.log((p / p.sum(-1, keepdims=True))[np.arange(len(text) - 1), tokens[1:]])
        np.testing.assert_allclose(scores.nats, expected, rtol=1e-4, atol=1e-5)

    def test_the_same_model_gives_the_same_bytes(self, saved, tmp_path):
        save_onnx(tmp_path / "again.onnx", *load_onnx(saved))
        assert (tmp_path / "again.onnx").read_bytes() == saved.read_bytes()


def _tensor(name="layers.0.W", **changes):
    """Change fields of a tensor; None clears one."""

    def change(model):
        (tensor,) = (t for t in model.graph.initializer if t.name == name)
        for field, value in changes.items():
            tensor.ClearField(field)
            if isinstance(value, (list, dict)):
                getattr(tensor, field).extend(value)
            elif value is not None:
                setattr(tensor, field, value)

    return change


def _metadata(key, value):
    def change(model):
        (entry,) = (entry for entry in model.metadata_props if entry.key == key)
        entry.value = value(entry.value) if callable(value) else value

    return change


def _without(key):
    def change(model):
        kept = {e.key: e.value for e in model.metadata_props if e.key != key}
        helper.set_model_props(model, kept)

    return change


def _replaced(model):
    """The model becomes another one."""
    return lambda old: old.CopyFrom(model())


PASSWORDS = [onnx.StringStringEntryProto(key="location", value="/etc/passwd")]
EXTERNAL = dict(data_location=TensorProto.EXTERNAL, external_data=PASSWORDS, raw_data=None)
REFUSED = {
    "a tensor less": (lambda m: m.graph.initializer.pop(), "head.bo must be a float32 tensor"),
    "external data": (_tensor(**EXTERNAL), r"layers.0.W .* tensor \(1, 12, 3\) in the file"),
    "turned": (_tensor(dims=[1, 3, 12]), r"layers.0.W must be a float32 tensor \(1, 12, 3\)"),
    "a million axes": (_tensor(dims=[2**62] * 10**6), "layers.0.W must be a float32 tensor"),
    "integers": (_tensor(data_type=TensorProto.INT32), "layers.0.W must be a float32 tensor"),
    "another weight": (_tensor("embedding", raw_data=bytes(60)), "does not match its SHA-256"),
    "another config": (
        _metadata("config", lambda t: t.replace("second_bias = true", "second_bias = false")),
        "does not match its SHA-256",
    ),
    "config not TOML": (_metadata("config", "name ="), "its config is broken"),
    "vocabulary": (_metadata("tokenizer_data", '{"characters": "ab"}'), "has 2 tokens"),
    "not ours": (_metadata("format", "pt"), "not a model of this library"),
    "nothing in it": (_replaced(onnx.ModelProto), "not a model of this library"),
} | {
    f"no {key}": (_without(key), "metadata lack" if key != "format" else "of this library")
    for key in METADATA
}  # fmt: skip


class TestRefusals:
    @pytest.mark.parametrize("what", REFUSED)
    def test_contents(self, what, saved):
        change, says = REFUSED[what]
        model = onnx.load(saved)
        change(model)
        saved.write_bytes(model.SerializeToString())
        with pytest.raises(InteropError, match=says) as refusal:
            load_onnx(saved)
        assert str(saved) in str(refusal.value) and "\n" not in str(refusal.value)

    def test_flipped_or_cut_anywhere(self, saved):
        """Names of nodes are not read, so those can change; nothing else is lost unnoticed."""
        whole, params = saved.read_bytes(), random_params(CONFIG.model)
        damaged = [whole[:length] for length in range(0, len(whole), 211)]
        for place in range(0, len(whole), 89):  # the bits in turn
            flipped = bytearray(whole)
            flipped[place] ^= 1 << place % 8
            damaged.append(bytes(flipped))
        refused = 0
        for data in damaged:
            saved.write_bytes(data)
            try:
                again, config, tokenizer = load_onnx(saved)
            except InteropError as error:
                assert "cannot be used" in str(error)
                refused += 1
            else:
                assert same_bits(again, params) and config == CONFIG
                assert tokenizer.vocabulary == TOKENIZER.vocabulary
        assert refused > len(damaged) / 2


class TestCommand:
    def test_there_and_back(self, script, tmp_path):
        params = random_params(CONFIG.model)
        save_safetensors(tmp_path / "m.safetensors", params, CONFIG, TOKENIZER)
        done = script("convert", "m.safetensors", "m.onnx")
        assert (done.code, done.out, done.err) == (0, "small written to m.onnx\n", "")
        assert script("convert", "m.onnx", "n.safetensors").code == 0
        again, config, tokenizer = jaxgru.lm.load("n.safetensors")
        assert same_bits(again, params) and config == CONFIG
        assert tokenizer.vocabulary == TOKENIZER.vocabulary
        assert "already a .onnx file" in script("convert", "m.onnx", "n.onnx").err
        outcome = script("sample", "--run", "m.onnx", "--num-tokens", 5, "--prompt", "a")
        assert outcome.code == 0 and len(outcome.out) == 7

    def test_what_cannot_be_written(self, script, tmp_path):
        (tmp_path / "m.onnx").write_bytes(b"PK")
        outcome = script("convert", "m.onnx", "m.safetensors")
        assert outcome.code == 2 and outcome.err.count("\n") == 1
        assert "m.onnx cannot be used: it is not a" in outcome.err


class FullSize(NamedTuple):
    """A published model: trained if it ships with jaxgru. Tokens, their logits, greedy text."""

    params: jaxgru.lm.Params
    tokens: np.ndarray  # (1, T)
    results: tuple  # logits, carry
    text: list[int]


@pytest.fixture(scope="module", params=FULL_SIZE)
def full_size(request):
    config = load_config(request.param)
    if config.name in pretrained_names():
        params = load(config.name)[0]
    else:
        params = jaxgru.lm.init(jax.random.key(0), config.model)
        seconds = lambda p: {"c": 0.1 * p.b[: len(p.b) // 3 * 2]} if type(p) is GRUParams else {}
        params = params.replace(layers=tuple(p.replace(**seconds(p)) for p in params.layers))
    V = config.model.vocab_size
    tokens = np.random.default_rng(0).integers(V, size=(1, 200), dtype=np.int32)
    prompt, key = jnp.asarray(tokens), jax.random.key(0)
    text = jaxgru.lm.generate(params, key, prompt, NUM_TOKENS, temperature=0)[0]
    return FullSize(params, tokens, jax.jit(jaxgru.lm.apply)(params, tokens), text[0].tolist())


class TestFullSize:
    def test_onnxruntime(self, full_size):
        runtime = Runtime(to_onnx(full_size.params))
        logits, carry = runtime(full_size.tokens)
        close(full_size.results, (logits, carry), "float32")
        close(full_size.results, runtime.in_pieces(full_size.tokens), "float32")
        greedy = []
        for _ in range(NUM_TOKENS):
            token = logits[:, -1:].argmax(-1).astype(np.int32)
            greedy.append(token.item())
            logits, carry = runtime(token, carry)
        assert greedy == full_size.text

    @needs_web
    def test_onnxruntime_web(self, full_size, path):
        """WebAssembly under Node, as in a browser: the carry stays in JavaScript."""
        onnx.save(to_onnx(full_size.params), path)
        tokens = full_size.tokens[0].tolist()
        request = {"tokens": tokens, "pieces": [1, 66, 133], "greedy": NUM_TOKENS}
        done = subprocess.run(
            ["node", HERE / "onnx_web.mjs", NODE_MODULES, path],
            input=json.dumps(request), capture_output=True, text=True,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        seen, (logits, _) = json.loads(done.stdout), full_size.results
        for part in ("whole", "in_pieces"):
            theirs = np.array(seen[part], np.float32).reshape(logits.shape)
            close((logits, ()), (theirs, ()), "float32")
        assert seen["greedy"] == full_size.text
