"""What is flax.linen's own: ScannedRNN, names of a Layer's parameters, restored ones, refusals."""

from __future__ import annotations

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from against import carry_of, layer, normal, randomized, refused, resets, same_numbers, scanned
from annotations import unchecked
from flax import linen as nn
from flax import serialization
from flax.errors import ScopeParamShapeError
from flax.traverse_util import flatten_dict, path_aware_map
from random_models import same_bits

import jaxgru
from jaxgru import init_gru, init_lstm, init_min_gru, init_rnn
from jaxgru.cells import Cell, struct
from jaxgru.libraries import LibraryError
from jaxgru.libraries.flax_linen import RNN, Layer, ScannedRNN, from_linen


class PureJaxRL(nn.Module):
    """The class of PureJaxRL, and of JaxMARL's IPPO and MAPPO."""

    @partial(
        nn.scan, variable_broadcast="params", in_axes=0, out_axes=0, split_rngs={"params": False}
    )
    @nn.compact
    def __call__(self, carry, x):
        ins, resets = x
        carry = jnp.where(resets[:, np.newaxis], self.initialize_carry(*carry.shape), carry)
        return nn.GRUCell(features=ins.shape[1])(carry, ins)

    @staticmethod
    def initialize_carry(batch_size, hidden_size):
        cell = nn.GRUCell(features=hidden_size)
        return cell.initialize_carry(jax.random.PRNGKey(0), (batch_size, hidden_size))


class ActorCritic(nn.Module):
    """A user's model; which ScannedRNN is the one changed line."""

    scanned: type[nn.Module]

    @nn.compact
    def __call__(self, carry, x):
        observations, dones = x
        embedding = nn.relu(nn.Dense(6)(observations))
        carry, embedding = self.scanned(name="rnn")(carry, (embedding, dones))
        return carry, nn.Dense(2)(embedding)


def test_in_a_model_as_in_purejaxrl():
    T = 7
    B = 3
    E = 4
    H = 6
    x = normal(T, B, E, dtype=np.float32)
    dones = resets(T, B).astype(np.float32)
    first = ScannedRNN.initialize_carry(B, H)
    assert same_bits(first, PureJaxRL.initialize_carry(B, H))
    ours = ActorCritic(ScannedRNN)
    theirs = ActorCritic(PureJaxRL)
    with unchecked():  # PureJaxRL's first flags are floats
        drawn = [
            jax.jit(model.init)(jax.random.key(0), first, (x, dones)) for model in (ours, theirs)
        ]
    chex.assert_trees_all_close(*drawn, rtol=1e-5, atol=1e-6)
    with jax.enable_x64(True):
        x = x.astype(np.float64)
        carry = normal(B, H, dtype=np.float64)
        variables = jax.tree.map(lambda w: jnp.asarray(w, np.float64), drawn[0])
        same_numbers(
            lambda variables, carry, x: ours.apply(variables, carry, (x, dones)),
            lambda variables, carry, x: theirs.apply(variables, carry, (x, dones)),
            *(variables, carry, x),
        )


def test_another_cell_name_and_start():
    """Where a reset starts from is the cell's; parameters under another name are found."""
    T = 6
    B = 3
    E = 4
    H = 5
    start = partial(nn.OptimizedLSTMCell, carry_init=jax.nn.initializers.constant(0.3))
    x = normal(T, B, E, dtype=np.float32)
    dones = resets(T, B)
    carry = carry_of(B, H, np.float32, pair=True)
    params = randomized(jax.eval_shape(start(H).init, jax.random.key(0), carry, x[0])["params"])

    def theirs(params, carry, x):
        step = partial(start(H).apply, {"params": params})
        return scanned(step, ScannedRNN.initialize_carry(B, H, start), carry, x, dones)

    def ours(params, carry, x):
        return ScannedRNN(start).apply({"params": {"any": params}}, carry, (x, dones))

    same_numbers(ours, theirs, params, carry, x)
    with_cell = ScannedRNN(start(H)).apply({"params": {"any": params}}, carry, (x, dones))
    assert same_bits(with_cell, ours(params, carry, x))
    of_cell, of_class = (ScannedRNN.initialize_carry(B, H, cell) for cell in (start(H), start))
    assert same_bits(of_cell, of_class)
    new = ScannedRNN(start, cell_name="mine").init(jax.random.key(0), carry, (x, dones))
    assert list(new["params"]) == ["mine"]


def test_partitioned_parameters():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    model = RNN(nn.GRUCell(6, kernel_init=init))
    x = normal(2, 3, 4, dtype=np.float32)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    assert isinstance(variables["params"]["cell"]["ir"]["kernel"], nn.Partitioned)
    theirs = jax.jit(nn.RNN(nn.GRUCell(6, kernel_init=init)).apply)(variables, x)
    np.testing.assert_allclose(jax.jit(model.apply)(variables, x), theirs, 1e-5, 1e-5)
    weights = layer("rnn")
    boxed = lambda w: nn.Partitioned(w, (None,) * w.ndim)
    module = Layer(lambda key: jax.tree.map(boxed, weights))
    variables = module.init(jax.random.key(0), x)
    assert nn.get_partition_spec(variables)["params"]["layers"]["RNNCell"]["W"]["kernel"]
    assert same_bits(module.bind(variables).layer(), weights)


X = np.ones((5, 3, 4), np.float32)
DONES = resets(5, 3)
H0 = np.zeros((3, 6), np.float32)
GRU = RNN(nn.GRUCell(6), time_major=True)


def drawn(module, *args, **options):
    return module.init(jax.random.key(0), *args, **options)


def of_another(cell):
    """The parameters of a cell, to an RNN and to a ScannedRNN of a GRU."""
    params = drawn(nn.RNN(cell, time_major=True), X)
    renamed = {"params": {"GRUCell_1": params["params"]["cell"]}}
    return lambda: GRU.apply(params, X), lambda: ScannedRNN().apply(renamed, H0, (X, DONES))


CELL = {"i": {"kernel": np.zeros((4, 6)), "bias": np.zeros(6)}, "h": {"kernel": np.zeros((6, 6))}}


def of_rnn(*args, **options):
    return lambda: drawn(ScannedRNN(**options), *args)


test_refusals = refused(
    *((call, r"of this GRUCell: the tensor") for call in of_another(nn.LSTMCell(6))),
    *((call, "it must be|need") for call in of_another(nn.GRUCell(5))),
    (of_rnn({"h": H0}, (X, DONES)), "the carry is dict; it must be an"),
    (of_rnn(H0, (X, DONES), cell=nn.LSTMCell), r"has 1 array; .* LSTMCell has 2, as ScannedRNN.in"),
    (of_rnn((H0, H0), (X, DONES)), "the carry has 2 arrays; that of this GRUCell has 1, as Scan"),
    (of_rnn(H0[:2], (X, DONES)), r"the carry has shape \(2, 6\); it must be \(3, 6\)"),
    (of_rnn(H0, (X, None)), "resets is NoneType; it must be an array"),
    (of_rnn(H0, (X, DONES.T)), r"reset has shape \(3, 5\); it must be"),
    (lambda: drawn(GRU, X, initial_carry=H0[:2]), r"initial_carry has shape \(2, 6\); it must"),
    (lambda: from_linen({"if": 0, "in": 0}), "the parameters if, in are not those of a flax.l"),
    (lambda: from_linen(CELL | {"h": CELL["i"]}), "the tensor h.bias does not belong there"),
)


@pytest.mark.parametrize(
    "decayed",
    [
        lambda path, _: path[-1] == "kernel",
        lambda path, _: path[-1] not in ("bias", "scale"),
        lambda _, weight: weight.ndim > 1,
    ],
)
def test_weight_decay_of_matrices_alone(decayed):
    """What Flax's users write for their Dense and LayerNorm modules, too."""
    module = Layer(
        lambda key: [init_lstm(key, 4, 6, layer_norm=True), init_gru(key, 6, 6, num_blocks=2)]
    )
    variables = jax.eval_shape(module.init, jax.random.key(0), X)
    mask = flatten_dict(path_aware_map(decayed, variables))
    assert mask == {path: path[-2][0] in "WU" for path in mask}
    assert {path[-1] for path in mask} == {"kernel", "bias", "scale"}


def test_each_layer_of_a_stack_has_names_of_its_own():
    module = Layer(lambda key: (init_rnn(key, 4, 6), init_rnn(key, 6, 6, activation="relu")))
    variables = module.init(jax.random.key(0), X)
    names = {"W/kernel", "U/kernel", "b/bias"}
    layers = "0/RNNCell", "1/RNNCell_activation=relu"  # the weights of one do not fit the other
    paths = {f"layers/{layer}/{name}" for layer in layers for name in names}
    assert flatten_dict(variables["params"], sep="/").keys() == paths


def test_restored_by_flax_and_orbax(tmp_path):
    """Into what has its names and shapes alone: a GRU has all that a minGRU has."""
    module = Layer(lambda key: init_gru(key, 4, 6))
    saved = module.init(jax.random.key(0), X)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "it", saved)
        checkpointer.wait_until_finished()

        def from_orbax(like):
            return checkpointer.restore(tmp_path / "it", like)

        def from_bytes(like):
            return serialization.from_bytes(like, serialization.to_bytes(saved))

        for restored in (from_orbax, from_bytes):
            again = restored(module.init(jax.random.key(1), X))
            assert same_bits(module.apply(again, X), module.apply(saved, X))
            for make in (
                lambda key: init_min_gru(key, 4, 6),
                lambda key: init_gru(key, 4, 6, reset_gate="before"),
                lambda key: init_gru(key, 4, 6, second_bias=True),
                lambda key: [init_gru(key, 4, 6)],
            ):
                other = Layer(make)
                with pytest.raises(ValueError, match="match"):
                    restored(other.init(jax.random.key(1), X))
                with pytest.raises(LibraryError, match="is missing|does not belong there"):
                    other.apply(saved, X)
            wider = Layer(lambda key: init_gru(key, 4, 8))
            with pytest.raises((ScopeParamShapeError, ValueError), match="shape"):
                wider.apply(restored(wider.init(jax.random.key(1), X)), X)


def test_a_layer_starts_where_its_cell_does(monkeypatch):
    """With variables and without."""
    gru = layer("gru")

    def half(self, batch_size):
        return jnp.full((batch_size, len(self.U)), 0.5)

    monkeypatch.setattr(type(gru), "zero_carry", half)
    module = Layer(gru)
    variables = module.init(jax.random.key(0), X)
    for start in (module.initial_carry(2), module.bind(variables).initial_carry(2)):
        assert same_bits(start, jnp.full((2, 6), 0.5))


@pytest.mark.parametrize("kind", ["gru", "gru after, second bias", "lstm", "rnn"])
def test_flax_serialization(kind):
    """Bytes and state dicts of a stack, and of the carry."""
    stack = [layer(kind)]
    other = [layer(kind, seed=1)]
    carry = jaxgru.initial_carry(stack, 2)
    assert same_bits(serialization.from_bytes(other, serialization.to_bytes(stack)), stack)
    assert same_bits(serialization.from_bytes(carry, serialization.to_bytes(carry)), carry)
    state = serialization.to_state_dict(stack)
    assert same_bits(serialization.from_state_dict(other, state), stack)
    relu = [p.replace(activation="relu", clip=2.0) for p in stack]
    assert same_bits(serialization.from_bytes(relu, serialization.to_bytes(relu)), relu)
    for target, saved in ((stack, relu), (relu, stack)):
        with pytest.raises(LibraryError, match="activation='relu', clip=2.0"):
            serialization.from_bytes(target, serialization.to_bytes(saved))
    del state["0"][next(iter(state["0"]))]
    with pytest.raises(ValueError, match="target dict contains keys {'(cn|W)'} which are not"):
        serialization.from_state_dict(other, state)

    @struct
    class Own(Cell):  # defined after Flax learned of the library's
        b: jax.Array

    own = Own(X[0, 0])
    target = Own(X[0, 1])
    assert same_bits(serialization.from_bytes(target, serialization.to_bytes(own)), own)
    with pytest.raises(LibraryError, match="the saved Own has .*; it must have none"):
        serialization.from_bytes(target, serialization.to_bytes(stack[0]))
    residual, other = (jaxgru.ResidualStack(tuple(layers)) for layers in (stack, other))
    read = serialization.from_bytes(other, serialization.to_bytes(residual))
    assert same_bits(read, residual) and isinstance(read, jaxgru.ResidualStack)
