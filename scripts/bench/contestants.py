"""Who takes part in benchmark.py: jaxgru, and the libraries that people use now.

Each contestant is a function from a Task to a Contestant. The peers, in JAX and in PyTorch, define
only their model: training, forward pass and sampling are shared, so that peers differ in the
recurrence alone.

A new one is an entry in CONTESTANTS; its layer is a function in layers.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import runpy
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxgru
from bench import layers, timing
from bench.cells import CELLS
from bench.layers import Layer
from bench.timing import KINDS, AnyTask, Contestant, LayerTask, PPOTask, Task, on_cpu, random_tokens
from jaxgru.cells.step_masks import StepMasks
from jaxgru.errors import UserError
from jaxgru.layers import wavefront
from jaxgru.lm.config import Config, TrainingConfig
from jaxgru.lm.data.batching import random_crops
from jaxgru.lm.model import Params, round_model, token_nll
from jaxgru.lm.sampling import draw, filter_logits
from jaxgru.lm.training import TrainState, init_state, train_step
from jaxgru.parallel.sharding import ROWS, data_mesh
from pages.markdown import ROOT


def why_absent(name: str) -> str | None:
    """Return why a contestant cannot take part here; None if it can."""
    needs = CONTESTANTS[name].needs
    for module in needs:
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken installation may raise anything
            return f"{module} cannot be imported: {type(error).__name__}: {error}"
    if name == "wavefront" and on_cpu():
        return "it is for GPUs"
    if "torch" in needs and not on_cpu():
        import torch

        if not torch.cuda.is_available():
            return f"JAX computes on {jax.default_backend()}, but torch sees no GPU"
    return None


def is_measured(name: str, task: AnyTask) -> bool:
    """Return whether a contestant is measured at a task: at its kind and, if a layer, has it."""
    entry = CONTESTANTS[name]
    if isinstance(task, LayerTask) and task.cell not in entry.cells:
        return False
    return task.what in entry.kinds


def build(name: str, task: AnyTask, precision: str) -> Contestant:
    """Return a contestant, ready to be called.

    Raises:
      UserError: it has no such model, or cannot compute in that precision here.
    """
    entry = CONTESTANTS[name]
    if not is_measured(name, task):
        raise UserError(f"{name} has no such {task.what}")
    is_peer = entry.needs and "torch" not in entry.needs
    if on_cpu() and precision != "float32" and (is_peer or not isinstance(task, Task)):
        raise UserError("on a CPU it computes in float32 only")
    if isinstance(task, PPOTask):
        return _ppo(task, entry.ppo)
    if isinstance(task, LayerTask) and entry.layer:
        return layers.contestant(task, entry.layer(task))
    return entry.model(task, precision)


# --- jaxgru


def _jaxgru(task: Task, precision: str, implementation: str | None = None) -> Contestant:
    """Return jaxgru; implementation: of its layers, if it is not the config's."""
    model = task.config.model
    training = task.config.training
    if implementation:
        training = dataclasses.replace(training, implementation=implementation)
    if precision == "bfloat16":
        training = dataclasses.replace(training, compute_dtype="bfloat16")
    if task.what == "training":
        return _jaxgru_training(task, training)
    params = jaxgru.lm.init(jax.random.key(0), model)
    if precision == "bfloat16":
        params = round_model(params, jnp.bfloat16)
    if task.what == "forward":
        return _jaxgru_forward(task, params, training.implementation)
    return _jaxgru_sampling(task, params)


def _jaxgru_training(task: Task, training: TrainingConfig) -> Contestant:
    mesh = data_mesh(training.batch_size)

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        return train_step(training, state, tokens, mesh)

    state = init_state(task.config.model, training)
    everywhere = NamedSharding(mesh, P())
    return _compiled_training(step, *jax.device_put((state, random_tokens(task)), everywhere))


def _jaxgru_forward(task: Task, params: Params, implementation: str) -> Contestant:
    def forward(params: Params, tokens: jax.Array) -> jax.Array:
        logits, _ = jaxgru.lm.apply(params, tokens, implementation=implementation)
        return logits

    return _compiled(forward, params, random_tokens(task))


def _jaxgru_sampling(task: Task, params: Params) -> Contestant:
    model = task.config.model
    top_k = min(timing.TOP_K, model.vocab_size)
    prompt = random_tokens(task)
    key = jax.random.key(2)
    # Split the rows over the cores where the weights are small: each core reads all of them
    if task.batch_size % jax.device_count() == 0 and model.hidden_dim <= 256:
        mesh = data_mesh(task.batch_size)
        prompt = jax.device_put(prompt, NamedSharding(mesh, P(ROWS)))
        params, key = jax.device_put((params, key), NamedSharding(mesh, P()))

    def generate() -> tuple:
        return jaxgru.lm.generate(
            params, key, prompt, task.num_tokens, temperature=timing.TEMPERATURE, top_k=top_k
        )

    return Contestant(timing.calling(generate))


def _wavefront(task: Task, precision: str) -> Contestant:
    params = jaxgru.lm.init(jax.random.key(0), task.config.model)
    recurrences = [layer.custom_gradient() for layer in params.layers]
    x = jnp.zeros((task.num_tokens, task.batch_size, 1))
    carry = jaxgru.lm.initial_carry(params, task.batch_size)
    masks = [StepMasks()] * len(params.layers)
    if not wavefront.supports(params.layers, recurrences, x, carry, masks):
        raise UserError(f"its layers cannot run at once over {task.num_tokens} steps")
    return _jaxgru(task, precision, "wavefront")


def _compiled_training(step: Callable, state: Any, tokens: jax.Array) -> Contestant:
    """Compile (state, tokens) → (state, loss) with the state donated; a call returns the loss."""
    program, seconds = timing.compiled(step, state, tokens, donate=(0,))

    def call() -> jax.Array:
        nonlocal state
        state, loss = program(state, tokens)
        return loss

    return Contestant(timing.calling(call), seconds)


def _compiled(function: Callable, *arguments: Any) -> Contestant:
    """Compile a function for these arguments, with which it is then called."""
    program, seconds = timing.compiled(function, *arguments)
    return Contestant(timing.calling(lambda: program(*arguments)), seconds)


# --- Other libraries on JAX


class JaxModel(NamedTuple):
    """A peer's model, as pure functions."""

    params: Any
    apply: Callable  # (params, tokens (B, T), carry) → (logits (B, T, V), carry)
    zeros: Callable  # batch size → carry


def _jax(task: Task, precision: str, make_model: Callable[[Config], JaxModel]) -> Contestant:
    model = make_model(task.config)
    match task.what:
        case "training":
            return _jax_training(task, model)
        case "forward":
            return _jax_forward(task, model)
    return _jax_sampling(task, model)


def _jax_training(task: Task, model: JaxModel) -> Contestant:
    training = task.config.training
    mesh = data_mesh(training.batch_size)
    optimizer = optax.chain(
        optax.clip_by_global_norm(training.max_grad_norm),
        optax.adamw(training.learning_rate, weight_decay=training.weight_decay),
    )

    def loss_fn(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        logits, _ = model.apply(params, inputs, model.zeros(len(inputs)))
        return token_nll(logits, targets).mean()

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(ROWS), P(ROWS)),
        out_specs=P(),
        check_vma=False,
    )
    def loss_and_grads(params: Any, *batch: jax.Array) -> tuple:
        return jax.lax.pmean(jax.value_and_grad(loss_fn)(params, *batch), ROWS)

    def step(state: tuple, tokens: jax.Array) -> tuple[tuple, jax.Array]:
        params, opt_state, key = state
        key, subkey = jax.random.split(key)
        batch = random_crops(subkey, tokens, training.batch_size, training.sequence_length)
        loss, grads = loss_and_grads(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), loss

    state = model.params, optimizer.init(model.params), jax.random.key(2)
    everywhere = NamedSharding(mesh, P())
    return _compiled_training(step, *jax.device_put((state, random_tokens(task)), everywhere))


def _jax_forward(task: Task, model: JaxModel) -> Contestant:
    def forward(params: Any, tokens: jax.Array) -> jax.Array:
        return model.apply(params, tokens, model.zeros(task.batch_size))[0]

    return _compiled(forward, model.params, random_tokens(task))


def _jax_sampling(task: Task, model: JaxModel) -> Contestant:
    top_k = min(timing.TOP_K, task.config.model.vocab_size)

    def generate(params: Any, key: jax.Array, prompt: jax.Array) -> jax.Array:
        def next_token(state: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
            logits, carry = model.apply(params, *state)
            token = draw(key, filter_logits(logits[:, -1], timing.TEMPERATURE, top_k))
            token = token[:, None].astype(prompt.dtype)
            return (token, carry), token

        keys = jax.random.split(key, task.num_tokens)
        return jax.lax.scan(next_token, (prompt, model.zeros(task.batch_size)), keys)[1]

    return _compiled(generate, model.params, jax.random.key(2), random_tokens(task))


def _zeros(config: Config) -> Callable[[int], list]:
    """Return a function from a batch size to zero states, one per layer: h, or two for an LSTM."""

    def zeros(batch_size: int) -> list:
        h = jnp.zeros((batch_size, config.model.hidden_dim))
        state = (h, h) if config.model.cell == "lstm" else h
        return [state] * config.model.num_layers

    return zeros


def _haiku_model(config: Config) -> JaxModel:
    import haiku as hk

    m = config.model
    is_lstm = m.cell == "lstm"
    core = {"gru": hk.GRU, "lstm": hk.LSTM, "rnn": hk.VanillaRNN}[m.cell]
    zeros = _zeros(config)

    def network(tokens: jax.Array, carry: list) -> tuple[jax.Array, list]:
        x = hk.Embed(m.vocab_size, m.embedding_dim)(tokens.T)
        new_carry = []
        for state in carry:
            first = hk.LSTMState(*state) if is_lstm else state
            x, last = hk.dynamic_unroll(core(m.hidden_dim), x, first)
            new_carry.append(tuple(last) if is_lstm else last)
        if m.final_norm:
            x = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        return hk.Linear(m.vocab_size)(x).swapaxes(0, 1), new_carry

    init, apply = hk.without_apply_rng(hk.transform(network))
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = jax.jit(init)(jax.random.key(0), tokens, zeros(1))
    return JaxModel(params, apply, zeros)


def _nnx_model(config: Config) -> JaxModel:
    from flax import nnx

    m = config.model
    cell = {"gru": nnx.GRUCell, "lstm": nnx.LSTMCell, "rnn": nnx.SimpleCell}[m.cell]

    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embedding = nnx.Embed(m.vocab_size, m.embedding_dim, rngs=rngs)
            in_features = m.embedding_dim
            for i in range(m.num_layers):
                layer = cell(in_features, m.hidden_dim, rngs=rngs)
                setattr(self, f"layer{i}", nnx.RNN(layer, time_major=True, return_carry=True))
                in_features = m.hidden_dim
            self.norm = nnx.LayerNorm(m.hidden_dim, rngs=rngs) if m.final_norm else lambda x: x
            self.head = nnx.Linear(m.hidden_dim, m.vocab_size, rngs=rngs)

        def __call__(self, tokens: jax.Array, carry: list) -> tuple[jax.Array, list]:
            x = self.embedding(tokens.T)
            new_carry = []
            for i, state in enumerate(carry):
                state, x = getattr(self, f"layer{i}")(x, initial_carry=state)
                new_carry.append(state)
            return self.head(self.norm(x)).swapaxes(0, 1), new_carry

    # Split here and merge in `apply`: nnx.jit would do so in Python at every call
    graph, params, rest = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)

    def apply(params: Any, tokens: jax.Array, carry: list) -> tuple[jax.Array, list]:
        state = jax.tree.map(lambda leaf: leaf, (params, rest))  # nnx requires one of this trace
        return nnx.merge(graph, *state)(tokens, carry)

    return JaxModel(params, apply, _zeros(config))


# --- Layers, and PyTorch


def _torch(task: Task | LayerTask, precision: str) -> Contestant:
    from bench import torch_peers  # its libraries may be absent

    return torch_peers.contestant(task, precision)


# --- Reinforcement learning


def _ppo(task: PPOTask, name: str) -> Contestant:
    """Return a training of the example, whose name for the recurrence this is."""
    ppo = runpy.run_path(str(ROOT / "examples" / "recurrent_ppo.py"))
    rnn = ppo["RNNS"][name]
    settings = ppo["Settings"](
        num_envs=4 * task.batch_size,
        num_steps=task.num_tokens,
        hidden_dim=task.hidden_dim,
        updates=task.updates,
    )

    def train(key: jax.Array) -> jax.Array:
        init_key, key = jax.random.split(key)
        params = ppo["init_policy"](init_key, rnn, settings.hidden_dim)
        _, returns = ppo["train"](params, key, rnn, settings)
        return returns

    key = jax.random.key(0)
    if task.seeds == 1:
        return _compiled(train, key)
    return _compiled(jax.vmap(train), jax.random.split(key, task.seeds))


class Entry(NamedTuple):
    """A contestant: what the page says of it, what it computes, and where it takes part."""

    text: str
    kinds: tuple[str, ...]  # what of a task
    model: Callable[[Task, str], Contestant] | None = None  # of a precision
    layer: Callable[[LayerTask], Layer] | None = None  # or the model does it
    cells: Collection[str] = ("GRU", "LSTM")  # its layers
    ppo: str = ""  # its name in examples/recurrent_ppo.py
    needs: tuple[str, ...] = ()  # modules, besides jaxgru's own dependencies
    package: str = ""  # whose version is recorded
    label: str = ""  # of its column in the page's tables and its bar in the figure


MODEL = ("training", "forward", "sampling")

CONTESTANTS = {
    "jaxgru": Entry(
        text="`train_step`, `apply` and `generate`",
        kinds=KINDS,
        model=_jaxgru,
        layer=layers.jaxgru_layer,
        cells=CELLS,
        ppo="jaxgru",
        label="jaxgru",
    ),
    "wavefront": Entry(
        text='jaxgru with `training.implementation = "wavefront"`: its layers in parallel, for '
        "GPUs",
        kinds=("training", "forward"),
        model=_wavefront,
        label="wavefront",
    ),
    "autodiff": Entry(
        text='jaxgru with `training.implementation = "autodiff"`: its cell in a `lax.scan`, which '
        "JAX differentiates (not measured for writing, which takes one step at a time)",
        kinds=("training", "forward", "layer", "resets"),
        model=partial(_jaxgru, implementation="autodiff"),
        layer=partial(layers.jaxgru_layer, implementation="autodiff"),
        cells=CELLS,
        label="lax.scan",
    ),
    "nnx": Entry(
        text="`nnx.RNN` of `nnx.GRUCell` (`LSTMCell`, `SimpleCell`), without dropout, or one "
        "layer's `GRUCell` (`OptimizedLSTMCell`) under a scan; its GRU applies the reset gate "
        "after the multiplication, which is cheaper",
        kinds=(*MODEL, "resets", "step"),
        model=partial(_jax, make_model=_nnx_model),
        layer=layers.nnx_layer,
        needs=("flax.nnx",),
        package="flax",
        label="Flax NNX",
    ),
    "linen": Entry(
        text="`linen.GRUCell` (`OptimizedLSTMCell`) under a scan",
        kinds=("ppo", "resets", "step"),
        layer=layers.linen_layer,
        ppo="flax",
        needs=("flax.linen",),
        package="flax",
        label="Flax Linen",
    ),
    "equinox": Entry(
        text="`eqx.nn.GRUCell` (`LSTMCell`) by `vmap`, under a scan",
        kinds=("resets", "step"),
        layer=layers.equinox_layer,
        needs=("equinox",),
        package="equinox",
        label="Equinox",
    ),
    "haiku": Entry(
        text="`hk.GRU` (`LSTM`, `VanillaRNN`) under `hk.dynamic_unroll`, without dropout, with "
        "resets in an `hk.ResetCore`",
        kinds=(*MODEL, "resets"),
        model=partial(_jax, make_model=_haiku_model),
        layer=layers.haiku_layer,
        cells=("GRU, reset before", "LSTM"),
        needs=("haiku",),
        package="dm-haiku",
        label="dm-haiku",
    ),
    "torch.nn": Entry(
        text="`torch.nn.GRU` (`LSTM`, `RNN`) of the same sizes, through oneDNN or cuDNN, without "
        "dropout; its GRU applies the reset gate after the multiplication",
        kinds=(*MODEL, "layer"),
        model=_torch,
        needs=("torch", "torchref"),
        package="torch",
        label="torch.nn",
    ),
}
"""The contestants, in the page's order, each as it is fastest on a CPU: JAX splits the batch,
PyTorch the products."""
