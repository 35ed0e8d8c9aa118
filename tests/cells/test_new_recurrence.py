"""A recurrence that the library has never heard of: one file, one call of `register`."""

import dataclasses
import re
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, TINY
from equations import sigma
from minimal_gated_unit import init_mgu

import jaxgru
from jaxgru import cells
from jaxgru.cells.contract import Cell
from jaxgru.lm.config import load_config
from jaxgru.lm.evaluation import window_loss
from jaxgru.lm.runs.lifecycle import resume_run, start_run
from jaxgru.pytrees import struct


@pytest.fixture(scope="module")
def registered():
    cells.register(init_mgu)
    yield
    del cells.CELLS["mgu"]


@pytest.fixture(scope="module")
def run(registered, tmp_path_factory, tiny_text):
    """Two epochs of a model of two such layers, trained and lengthened to three."""
    options = TINY | {
        "model.cell": "mgu",
        "model.second_bias": False,
        "model.reset_gate": "after",
        "model.init_scheme": "orthogonal",
        "name": "mgu",
    }
    config = load_config("astra_alpha", options | {"data.corpus": str(tiny_text)})
    run = start_run(config, tmp_path_factory.mktemp("runs"))
    return resume_run(run, {"training.epochs": 3})


@pytest.mark.slow
def test_it_was_trained_and_resumed(run):
    _, config, _ = jaxgru.lm.load(run)
    assert config.model.cell == "mgu" and config.training.epochs == 3
    losses = [line.split('"val_loss": ')[1] for line in (run / "metrics.jsonl").open()]
    assert len(losses) == 3
    assert (run / "samples.txt").exists()


@pytest.mark.slow
def test_it_is_what_numpy_computes(run):
    """Logits of a prompt, from the equations alone."""
    params, _, _ = jaxgru.lm.load(run)
    tokens = jnp.array([[3, 1, 4, 1, 5]])
    logits, carry = jaxgru.lm.apply(params, tokens)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    states = [np.zeros(9), np.zeros(9)]
    for t, token in enumerate(tokens[0]):
        x = p.embedding[token]
        for i, q in enumerate(p.layers):
            h = states[i]
            f = sigma(x @ q.Wf + h @ q.Uf + q.bf)
            n = np.tanh(x @ q.Wn + (f * h) @ q.Un + q.bn)
            states[i] = x = (1 - f) * h + f * n
        np.testing.assert_allclose(logits[0, t], x @ p.head.Wo + p.head.bo, atol=2e-6)
    np.testing.assert_allclose(carry[-1][0], states[-1], atol=1e-6)


@pytest.mark.slow
def test_it_is_sampled_and_evaluated_with_its_state(run):
    params, _, tokenizer = jaxgru.lm.load(run)
    prompt = jnp.array([[1, 2]])
    key = jax.random.key(0)
    whole, _, _ = jaxgru.lm.generate(params, key, prompt, 20)
    first, carry, key = jaxgru.lm.generate(params, key, prompt, 12)
    rest, _, _ = jaxgru.lm.generate(params, key, first[:, -1:], 8, carry)
    np.testing.assert_array_equal(whole, jnp.concatenate([first, rest], axis=1))
    tokens = tokenizer.encode("But soft what light through yonder")
    assert window_loss(params, tokens, 1) != window_loss(params, tokens, 8)


@pytest.mark.parametrize("n", [1, 2])
def test_the_guides_dreamer_gru(n):
    """The code of the page, against NumPy in float64, from the equations."""
    page = (ROOT / "docs" / "guide" / "custom_cell.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)

    def page_of(name):
        return next(block for block in blocks if f"class {name}" in block)

    rng = np.random.default_rng(0)
    B = 2
    T = 5
    E = 3
    H = 4
    starts = rng.random((B, T)) < 0.3
    x = rng.normal(size=(B, T, E))
    with jax.enable_x64(True):
        names = {"__name__": f"page_{n}", "x": x.astype("float32"), "starts": starts}
        exec(page_of("LeakyRNN") + page_of("DreamerCell"), names)
        W, gain, b = (rng.normal(size=s) for s in ((n, H // n + E, 3 * H // n), 3 * H, 3 * H))
        y, _ = jaxgru.unroll(names["DreamerCell"](W, gain, b), x, reset=starts)
    for row in range(B):
        for t in range(T):
            h = np.zeros(H) if t == 0 or starts[row, t] else h
            of_group = [np.concatenate([part, x[row, t]]) for part in np.split(h, n)]
            a = np.concatenate([part @ U for part, U in zip(of_group, W, strict=True)])
            a = gain * (a - a.mean()) / np.sqrt(a.var() + 1e-3) + b
            gates = [np.split(part, 3) for part in np.split(a, n)]
            reset, candidate, update = (np.concatenate(gate) for gate in zip(*gates, strict=True))
            candidate = np.tanh(sigma(reset) * candidate)
            update = sigma(update - 1)
            h = update * candidate + (1 - update) * h
            np.testing.assert_allclose(y[row, t], h, atol=1e-12)
    drawn = names["init_dreamer_gru"](jax.random.key(0), 64, 512, num_groups=n).W
    np.testing.assert_allclose(drawn.std(), (512 + n * 64) ** -0.5, rtol=0.005)  # 5 σ


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mgu.safetensors", "mgu.onnx"])
def test_it_is_saved(name, run, tmp_path):
    params, config, tokenizer = jaxgru.lm.load(run)
    jaxgru.lm.save(tmp_path / name, params, config, tokenizer)
    again, config_again, _ = jaxgru.lm.load(tmp_path / name)
    data = dataclasses.replace(config.data, corpus=f"./{Path(config.data.corpus).name}")
    assert config_again == dataclasses.replace(config, data=data)
    chex.assert_trees_all_equal(again, params)


def test_what_a_class_lacks_is_said():
    class Plain(cells.Cell):
        W: jax.Array
        sizes = lambda self: self.W.shape

    with pytest.raises(TypeError, match="^Plain has no fields: write @jaxgru.cells.struct above"):
        Plain(jnp.eye(2))

    class Halved(jaxgru.RNNCell):
        pass

    fields = vars(jaxgru.init_rnn(jax.random.key(0), 2, 3))
    with pytest.raises(ValueError, match="^Halved is no pytree: write @jaxgru.cells.struct above"):
        jaxgru.unroll(Halved(**fields), jnp.ones((1, 4, 2)))
    with pytest.raises(TypeError, match="^Plain has no field b, .* define its method zero_carry"):
        jaxgru.initial_carry(cells.struct(Plain)(jnp.eye(2)), 3)


def test_another_of_its_name_is_refused(registered):
    with pytest.raises(ValueError, match="the cell mgu is drawn by minimal_gated_unit.init_mgu"):

        @cells.register
        def init_mgu(key, in_features, hidden_dim, *, dtype): ...

    with pytest.raises(ValueError, match="GRUCell is not named init_…; the rest of the name"):
        cells.register(jaxgru.GRUCell)
    with pytest.raises(
        jaxgru.UserError,
        match="reset_gate is 'before', .* mgu, which has no .*, or give --model.reset_gate after.",
    ):
        jaxgru.lm.ModelConfig(cell="mgu", reset_gate="before")


def test_a_cell_that_is_defined_again_replaces_the_one_before():
    """As when a notebook's cell runs twice; a cell from another place does not."""

    def define(scale):
        @struct
        class Params(Cell):
            b: jax.Array
            sizes = lambda self: (1, *self.b.shape)
            step = lambda self, layout, h, x: scale * h + self.b

        @cells.register
        def init_twice(key, in_features, hidden_dim, *, dtype=jnp.float32):
            return Params(jnp.ones(hidden_dim, dtype))

    define(2)
    define(3)
    layers = jaxgru.init_stack("twice", jax.random.key(0), 1, 2)
    y, _ = jaxgru.unroll(layers, jnp.ones((1, 2, 1)))
    np.testing.assert_array_equal(y, [[[1, 1], [4, 4]]])


def test_a_config_decides_the_options_that_it_has():
    """Also one at the config's default, where the cell has another; 0 is the cell's own."""
    drawn = {}

    @cells.register
    def init_options(key, E, H, *, num_blocks=4, second_bias=True, rank=8, clip=2.0, **rest):
        drawn.update(num_blocks=num_blocks, second_bias=second_bias, rank=rank, clip=clip)
        return jaxgru.init_rnn(key, E, H)

    jaxgru.lm.ModelConfig(cell="options")
    assert drawn == dict(num_blocks=1, second_bias=False, rank=8, clip=2.0)
