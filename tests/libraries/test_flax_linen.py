"""flax.linen's RNN, purejaxrl's ScannedRNN and ours: the same numbers; weights both ways."""

from __future__ import annotations

import copy
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from against import (
    FLAX_CASES,
    alike_under_strict_promotion,
    carry_of,
    layer,
    normal,
    precision,
    randomized,
    resets,
    same_cost,
    same_numbers,
)
from annotations import unchecked
from flax import linen as nn
from flax import serialization
from flax.errors import ScopeCollectionNotFound, ScopeParamShapeError
from flax.traverse_util import flatten_dict, path_aware_map
from random_models import same_bits

import jaxgru
from jaxgru import init_gru, init_lstm, init_min_gru, init_rnn
from jaxgru.libraries import InteropError
from jaxgru.libraries.flax_linen import CELLS, RNN, Layer, ScannedRNN, from_linen, to_linen

EVERY = pytest.mark.parametrize("cell_class", CELLS, ids=lambda cell: cell.__name__)


@pytest.mark.parametrize("cell, dtype, sizes", FLAX_CASES)
def test_the_same_call_gives_the_same_numbers(cell, dtype, sizes):
    """From a given carry and from the cell's own; reversed, and with padding."""
    with precision(dtype):
        (T, B, E, H), cell_class = sizes, getattr(nn, cell)
        x, carry = normal(B, T, E, dtype=dtype), carry_of(B, H, dtype, "LSTM" in cell)
        lengths = np.arange(B) % T + 1

        def calls(rnn):
            def function(variables, x, carry):
                call = functools.partial(rnn.apply, variables)
                plain = call(x, initial_carry=carry, return_carry=True)
                if dtype == np.float32 or T == 1:
                    return plain
                turned = dict(reverse=True, seq_lengths=lengths)
                return (
                    plain,
                    call(x, **turned, keep_order=True),
                    call(x.swapaxes(0, 1), **turned, return_carry=True, time_major=True),
                )

            return function

        ours, theirs = (cls(cell_class(H, param_dtype=dtype)) for cls in (RNN, nn.RNN))
        variables = randomized(jax.eval_shape(theirs.init, jax.random.key(0), x))
        same_numbers(calls(ours), calls(theirs), variables, x, carry)


def test_the_cost_is_that_of_unroll():
    x, rnn = normal(3, 5, 4, dtype=np.float32), RNN(nn.GRUCell(6))
    variables = randomized(jax.eval_shape(rnn.init, jax.random.key(0), x))
    same_cost(rnn.apply, variables, from_linen(variables["params"]["cell"]), x)


@EVERY
def test_the_same_initial_parameters(cell_class):
    x = normal(2, 3, 4, dtype=np.float32)
    ours, theirs = (jax.jit(cls(cell_class(6)).init)(jax.random.key(1), x) for cls in (RNN, nn.RNN))
    assert same_bits(ours, theirs)


class PureJaxRL(nn.Module):
    """purejaxrl's ScannedRNN, as in ppo_rnn.py."""

    @functools.partial(
        nn.scan, variable_broadcast="params", in_axes=0, out_axes=0, split_rngs={"params": False}
    )
    @nn.compact
    def __call__(self, carry, x):
        ins, resets = x
        carry = jnp.where(
            resets[:, np.newaxis], self.initialize_carry(ins.shape[0], ins.shape[1]), carry
        )
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


@EVERY
def test_the_table_of_a_module(cell_class):
    """`tabulate` counts the parameters of Flax's module, by the same names."""
    x, table = jnp.zeros((2, 3, 4)), nn.tabulate
    options = dict(console_kwargs={"width": 400, "force_terminal": False})
    ours, theirs = (
        table(rnn, jax.random.key(0), **options)(x)
        for rnn in (RNN(cell_class(6)), nn.RNN(cell_class(6)))
    )
    total = [re.search(r"Total Parameters: ([\d,]+)", text) for text in (ours, theirs)]
    assert total[0] and total[1] and total[0][1] == total[1][1]


class TestScannedRNN:
    def test_in_a_model_as_in_purejaxrl(self):
        T, B, E, H = 7, 3, 4, 6
        x, dones = normal(T, B, E, dtype=np.float32), resets(T, B).astype(np.float32)
        first = ScannedRNN.initialize_carry(B, H)
        assert same_bits(first, PureJaxRL.initialize_carry(B, H))
        ours, theirs = ActorCritic(ScannedRNN), ActorCritic(PureJaxRL)
        variables, same = (
            jax.jit(model.init)(jax.random.key(0), first, (x, dones)) for model in (ours, theirs)
        )
        assert same_bits(variables, same)
        with precision(np.float64):
            x, carry = x.astype(np.float64), normal(B, H, dtype=np.float64)
            variables = jax.tree.map(lambda w: jnp.asarray(w, np.float64), variables)
            same_numbers(
                lambda *args: ours.apply(*args[:2], (args[2], dones)),
                lambda *args: theirs.apply(*args[:2], (args[2], dones)),
                *(variables, carry, x),
            )

    def test_another_cell_name_and_start(self):
        """Where a reset starts from is the cell's; parameters under another name are found."""
        T, B, E, H = 6, 3, 4, 5
        start = functools.partial(
            nn.OptimizedLSTMCell, carry_init=jax.nn.initializers.constant(0.3)
        )
        x, dones = normal(T, B, E, dtype=np.float32), resets(T, B)
        carry = carry_of(B, H, np.float32, pair=True)
        params = randomized(jax.eval_shape(start(H).init, jax.random.key(0), carry, x[0])["params"])

        def theirs(params, carry, x):
            first = ScannedRNN.initialize_carry(B, H, start)

            def step(carry, inputs):
                x, reset = inputs
                where = lambda a, b: jnp.where(reset[:, None], a, b)
                return start(H).apply({"params": params}, jax.tree.map(where, first, carry), x)

            return jax.lax.scan(step, carry, (x, dones))

        def ours(params, carry, x):
            return ScannedRNN(start).apply({"params": {"any": params}}, carry, (x, dones))

        same_numbers(ours, theirs, params, carry, x)
        new = ScannedRNN(start, cell_name="mine").init(jax.random.key(0), carry, (x, dones))
        assert list(new["params"]) == ["mine"]

    def test_the_cost_is_that_of_unroll(self):
        x, dones, carry = normal(5, 3, 4, dtype=np.float32), resets(5, 3), jnp.zeros((3, 6))
        variables = randomized(
            jax.eval_shape(ScannedRNN().init, jax.random.key(0), carry, (x, dones))
        )
        module = lambda variables, x: ScannedRNN().apply(variables, carry, (x, dones))[1]
        layer = from_linen(variables["params"]["GRUCell_1"])
        same_cost(module, variables, layer, x, reset=dones, time_major=True)

    def test_many_seeds_at_once(self):
        """purejaxrl trains with `vmap` over whole trainings."""
        x, dones = normal(5, 3, 4, dtype=np.float32), resets(5, 3)
        carry, model = jnp.zeros((3, 4)), ScannedRNN()
        like = jax.eval_shape(model.init, jax.random.key(0), carry, (x, dones))
        first, second = randomized(like, 0), randomized(like, 1)

        def gradient(variables):
            return jax.grad(lambda v: jnp.sum(model.apply(v, carry, (x, dones))[1]))(variables)

        both = jax.tree.map(lambda *weights: jnp.stack(weights), first, second)
        both, alone = jax.jit(jax.vmap(gradient))(both), jax.jit(gradient)(second)
        of_second = jax.tree.map(lambda leaf: leaf[1], both)
        chex.assert_trees_all_close(of_second, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["gru after", "gru after, second bias", "lstm", "rnn"])
def test_weights_there_and_back(kind):
    p = layer(kind)
    if kind.startswith("gru"):
        p = p.replace(c=None)
    assert same_bits(from_linen(to_linen(p)), p)
    cell = {"gru": nn.GRUCell, "lst": nn.LSTMCell, "rnn": nn.SimpleCell}[kind[:3]](6)
    x = normal(3, 5, 4, dtype=np.float32)
    like = jax.eval_shape(nn.RNN(cell).init, jax.random.key(0), x)["params"]["cell"]
    shapes = functools.partial(jax.tree.map, lambda leaf: leaf.shape)
    assert shapes(to_linen(p)) == shapes(like)


def test_second_biases_become_the_first():
    p = layer("gru after, second bias")
    q = from_linen(to_linen(p))
    assert same_bits((q.b[:12], q.b[12:], q.cn), (p.b[:12] + p.c, p.b[12:], p.cn))


def test_partitioned_parameters():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    model, x = RNN(nn.GRUCell(6, kernel_init=init)), normal(2, 3, 4, dtype=np.float32)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    assert isinstance(variables["params"]["cell"]["ir"]["kernel"], nn.Partitioned)
    theirs = jax.jit(nn.RNN(nn.GRUCell(6, kernel_init=init)).apply)(variables, x)
    np.testing.assert_allclose(jax.jit(model.apply)(variables, x), theirs, 1e-5, 1e-5)
    weights, boxed = layer("rnn"), lambda w: nn.Partitioned(w, (None,) * w.ndim)
    module = Layer(lambda key: jax.tree.map(boxed, weights))
    variables = module.init(jax.random.key(0), x)
    assert nn.get_partition_spec(variables)["params"]["layers"]["RNNParams"]["W"]["kernel"]
    assert same_bits(module.bind(variables).layer(), weights)


def test_strict_promotion():
    rnn, x, first = RNN(nn.GRUCell(6)), normal(3, 5, 4, dtype=np.float32), jnp.zeros((3, 6))
    params = randomized(jax.eval_shape(rnn.init, jax.random.key(0), x))
    scanned = {"params": {"GRUCell_1": params["params"]["cell"]}}
    lengths, pair = jnp.array([5, 2, 1]), (x.swapaxes(0, 1), resets(5, 3))
    alike_under_strict_promotion(
        lambda: (
            rnn.apply(params, x, seq_lengths=lengths, reverse=True, return_carry=True),
            ScannedRNN().apply(scanned, first, pair),
        )
    )


def test_a_copy_of_a_module():
    """`deepcopy` makes new objects of jax.nn.sigmoid and jnp.tanh, which have no names."""
    rnn, x = RNN(nn.GRUCell(6)), normal(3, 5, 4, dtype=np.float32)
    params = randomized(jax.eval_shape(rnn.init, jax.random.key(0), x))
    assert same_bits(copy.deepcopy(rnn).apply(params, x), rnn.apply(params, x))


def test_forward_mode_of_the_plain_implementation():
    x, first = normal(3, 2, 4, dtype=np.float32), jnp.ones((2, 4))
    dones, scanned = resets(3, 2), PureJaxRL()
    params = randomized(jax.eval_shape(scanned.init, jax.random.key(0), first, (x, dones)))
    rnn = {"params": {"cell": params["params"]["GRUCell_1"]}}
    plain = dict(implementation="autodiff")

    def derivatives(scan, run, **options):
        of_scan = lambda x: scan.apply(params, first, (x, dones), **options)
        of_run = lambda x: run(nn.GRUCell(4)).apply(rnn, x, **options)
        return jax.jit(jax.jacfwd(lambda x: (of_scan(x), of_run(x))))(x)

    ours, theirs = derivatives(ScannedRNN(), RNN, **plain), derivatives(scanned, nn.RNN)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_bfloat16_products_beside_a_float32_state():
    x = normal(3, 5, 4, dtype=np.float32)
    ours, theirs = (cls(nn.GRUCell(6, dtype=jnp.bfloat16)) for cls in (RNN, nn.RNN))
    variables = jax.jit(theirs.init)(jax.random.key(0), x)
    ours, theirs = (jax.jit(model.apply)(variables, x) for model in (ours, theirs))
    assert ours.dtype == theirs.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, atol=0.05)  # Flax rounds the gates, too


def undrawn(*_):
    raise AssertionError("Flax draws the parameters.")


UNDRAWN = functools.partial(nn.GRUCell, kernel_init=undrawn)


class TestRefusals:
    @pytest.mark.parametrize(
        "cell, says",
        [
            (nn.GRUCell(6, gate_fn=nn.hard_sigmoid), "gate_fn of this GRUCell is not sigmoid"),
            (nn.LSTMCell(6, activation_fn=nn.relu), "activation_fn of this LSTMCell is not tanh"),
            (nn.SimpleCell(6, residual=True), "this SimpleCell is residual"),
            (nn.MGUCell(6), "the cell is an MGUCell; it must be a flax.linen GRUCell, LSTMCell"),
        ],
    )
    def test_cells(self, cell, says):
        x = normal(2, 3, 4, dtype=np.float32)
        with pytest.raises(InteropError, match=says):
            RNN(cell).init(jax.random.key(0), x)
        with pytest.raises(InteropError, match=says):
            model = ScannedRNN(lambda features, parent: cell.clone(parent=parent))
            model.init(jax.random.key(0), jnp.zeros((3, 6)), (x, resets(2, 3)))

    def test_an_input_that_is_no_pair(self):
        with unchecked(), pytest.raises(InteropError, match="a ScannedRNN takes a pair"):
            ScannedRNN().init(jax.random.key(0), np.zeros((3, 6)), np.zeros((5, 3, 4)))

    @pytest.mark.parametrize(
        "carry, says",
        [
            (None, "the carry is a NoneType; it must be an array"),
            (0.0, r"the carry has shape \(\); initialize_carry makes the first one"),
            ((), r"the carry has shape \(0,\); initialize_carry makes the first one"),
            ({"h": np.zeros((3, 6))}, "the carry is a dict; it must be an array"),
            (np.zeros((2, 6)), r"the carry has shape \(2, 6\); it must be \(3, 6\)"),
            (np.ones((3, 6), int), "the carry is int32; it must be floating-point"),
            ((np.zeros((3, 6)),) * 2, r"the carry is a tuple; this cell's is an array \(3, 6\)"),
        ],
    )
    def test_a_carry_that_does_not_fit(self, carry, says):
        x = np.zeros((5, 3, 4)), resets(5, 3)
        with unchecked(), pytest.raises(ValueError, match=says):
            ScannedRNN(UNDRAWN).init(jax.random.key(0), carry, x)

    @pytest.mark.parametrize(
        "carry, says",
        [
            ("zeros", "initial_carry is a str; it must be an array"),
            (np.zeros((2, 6)), r"initial_carry has shape \(2, 6\); it must be \(3, 6\)"),
        ],
    )
    def test_a_carry_that_does_not_fit_an_rnn(self, carry, says):
        with unchecked(), pytest.raises(ValueError, match=says):
            RNN(UNDRAWN(6)).init(jax.random.key(0), np.zeros((3, 5, 4)), initial_carry=carry)

    def test_a_carry_that_is_no_pair(self):
        x, carry = np.zeros((5, 3, 4)), np.zeros((3, 6))
        says = r" must be a pair of arrays \(3, 6\), as an LSTM has"
        with pytest.raises(InteropError, match="the carry" + says):
            ScannedRNN(nn.LSTMCell).init(jax.random.key(0), carry, (x, resets(5, 3)))
        with pytest.raises(InteropError, match="initial_carry" + says):
            rnn = RNN(nn.LSTMCell(6), time_major=True)
            rnn.init(jax.random.key(0), x, initial_carry=carry)

    @pytest.mark.parametrize("theirs", [nn.SimpleCell(6), nn.GRUCell(5), nn.LSTMCell(6)])
    def test_the_parameters_of_another_cell(self, theirs):
        """Flax misses some of them, or a shape differs; ours would compute the other cell."""
        x, carry = np.zeros((3, 5, 4), np.float32), np.zeros((5, 6), np.float32)
        params = nn.RNN(theirs).init(jax.random.key(0), x)
        says = (
            rf"the parameters are \w+Params of {theirs.features} features; the cell is a GRUCell "
        )
        with pytest.raises(InteropError, match=says + "of 6"):
            RNN(nn.GRUCell(6)).apply(params, x)
        params = {"params": {"GRUCell_1": params["params"]["cell"]}}
        with pytest.raises(InteropError, match=says + "of 6"):
            ScannedRNN().apply(params, carry, (x, resets(3, 5)))

    def test_a_scanned_cell_that_is_no_class(self):
        x, carry = np.zeros((3, 5, 4), np.float32), np.zeros((5, 6), np.float32)
        with unchecked(), pytest.raises(InteropError, match="is already a GRUCell; it must be the"):
            ScannedRNN(nn.GRUCell(6)).init(jax.random.key(0), carry, (x, resets(3, 5)))

    def test_no_step(self):
        says = r"inputs has shape \(0, 3, 4\); it must have at least one step"
        x, carry = np.zeros((0, 3, 4), np.float32), np.zeros((3, 6), np.float32)
        with pytest.raises(InteropError, match=says):
            ScannedRNN().init(jax.random.key(0), carry, (x, resets(0, 3)))
        with pytest.raises(InteropError, match=says):
            RNN(nn.GRUCell(6), time_major=True).init(jax.random.key(0), x)

    @pytest.mark.parametrize("inputs", ["ones", None])
    def test_inputs_that_are_none(self, inputs):
        says = f"inputs is a {type(inputs).__name__}; it must be an array"
        with unchecked(), pytest.raises(ValueError, match=says):
            RNN(nn.GRUCell(6)).init(jax.random.key(0), inputs)
        with unchecked(), pytest.raises(ValueError, match=says):
            ScannedRNN().init(jax.random.key(0), np.zeros((3, 6)), (inputs, resets(5, 3)))
        with (
            unchecked(),
            pytest.raises(ValueError, match="resets is a NoneType; it must be an arr"),
        ):
            ScannedRNN().init(jax.random.key(0), np.zeros((3, 6)), (np.zeros((5, 3, 4)), None))

    def test_weights(self):
        with pytest.raises(
            InteropError,
            match="linen.GRUCell applies the reset gate after the product, this GRU before",
        ):
            to_linen(layer("gru"))
        with pytest.raises(InteropError, match="a dict cannot be converted: Flax has"):
            to_linen({})
        with pytest.raises(InteropError, match="the parameters hf, hn, if, in are not those of a"):
            from_linen({"if": 0, "in": 0, "hf": 0, "hn": 0})
        with unchecked(), pytest.raises(InteropError, match="the parameters are a NoneType; they"):
            from_linen(None)
        with unchecked(), pytest.raises(InteropError, match="the parameters 1 are not those of a"):
            from_linen({1: 2})
        with pytest.raises(ScopeCollectionNotFound):
            RNN(nn.GRUCell(6)).apply({}, normal(2, 3, 4, dtype=np.float32))

    @pytest.mark.parametrize(
        "name, dense, says",
        [
            ("h", {}, "the tensor h/kernel is missing"),
            ("h", 0, "the tensor h/kernel is missing"),
            ("i", {"kernel": np.zeros((4, 6))}, "the tensor i/bias is missing"),
            (
                "h",
                {"kernel": np.zeros((4, 6))},
                r"h/kernel has shape \(4, 6\); it must be \(6, 6\)",
            ),
            ("h", {"kernel": None}, "h/kernel is a NoneType; it must be an array"),
            (
                "h",
                {"kernel": np.zeros((6, 6)), "bias": np.zeros(6)},
                "the tensor h/bias does not belong there",
            ),
        ],
    )
    def test_a_cell_with_other_weights(self, name, dense, says):
        cell = {"i": {"kernel": np.zeros((4, 6)), "bias": np.zeros(6)}}
        with pytest.raises(ValueError, match=says):
            from_linen(cell | {"h": {"kernel": np.zeros((6, 6))}} | {name: dense})


def test_jaxgru_layers_are_modules():
    """A stack, and two directions: their parameters are what `unroll` takes."""
    stack = (layer("gru after"), layer("lstm", 6))
    pair = ((layer("rnn"),), (layer("lstm"),))
    x = normal(3, 5, 4, dtype=np.float32)
    for weights in (stack, pair, layer("gru"), jaxgru.ResidualStack(stack)):
        module = Layer(lambda key, weights=weights: weights)
        variables = module.init(jax.random.key(0), x)
        assert same_bits(module.bind(variables).layer(), weights)
        run = jaxgru.bidirectional if weights is pair else jaxgru.unroll
        args = weights if weights is pair else (weights,)
        assert same_bits(module.apply(variables, x), run(*args, x))


X = normal(3, 5, 4, dtype=np.float32)


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
    variables = module.init(jax.random.key(0), X)
    mask = flatten_dict(path_aware_map(decayed, variables))
    assert mask == {path: path[-2][0] in "WU" for path in mask}
    assert {path[-1] for path in mask} == {"kernel", "bias", "scale"}


def test_each_layer_of_a_stack_has_names_of_its_own():
    module = Layer(lambda key: (init_rnn(key, 4, 6), init_rnn(key, 6, 6)))
    variables = module.init(jax.random.key(0), X)
    names = {"W/kernel", "U/kernel", "b/bias"}
    paths = {f"layers/{i}/RNNParams/{name}" for i in "01" for name in names}
    assert flatten_dict(variables["params"], sep="/").keys() == paths


def test_restored_by_flax_and_orbax(tmp_path):
    """Into what has its names and shapes alone: a GRU has all that a minGRU has."""
    module = Layer(lambda key: init_gru(key, 4, 6))
    saved = module.init(jax.random.key(0), X)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "it", saved)
        checkpointer.wait_until_finished()
        from_orbax = lambda like: checkpointer.restore(tmp_path / "it", like)
        from_bytes = lambda like: serialization.from_bytes(like, serialization.to_bytes(saved))
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
                with pytest.raises(InteropError, match="is missing|does not belong there"):
                    other.apply(saved, X)
            wider = Layer(lambda key: init_gru(key, 4, 8))
            with pytest.raises((ScopeParamShapeError, ValueError), match="shape"):
                wider.apply(restored(wider.init(jax.random.key(1), X)), X)


@pytest.mark.parametrize("kind", ["gru", "gru after, second bias", "lstm", "rnn"])
def test_flax_serialization(kind):
    """Bytes and state dicts of a stack, and of the carry."""
    stack, other = [layer(kind)], [layer(kind, seed=1)]
    carry = jaxgru.initial_carry(stack, 2)
    assert same_bits(serialization.from_bytes(other, serialization.to_bytes(stack)), stack)
    assert same_bits(serialization.from_bytes(carry, serialization.to_bytes(carry)), carry)
    state = serialization.to_state_dict(stack)
    assert same_bits(serialization.from_state_dict(other, state), stack)
    del state["0"][next(iter(state["0"]))]
    with pytest.raises(InteropError, match="; it must contain cn|; it must contain W"):
        serialization.from_state_dict(other, state)
    residual, other = (jaxgru.ResidualStack(tuple(layers)) for layers in (stack, other))
    read = serialization.from_bytes(other, serialization.to_bytes(residual))
    assert same_bits(read, residual) and isinstance(read, jaxgru.ResidualStack)
