"""flax.nnx's RNN and ours on the same cells: outputs, carries, gradients; weights both ways."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import (
    FLAX_CASES,
    alike_under_strict_promotion,
    carry_of,
    close,
    layer,
    normal,
    precision,
    randomized,
    resets,
    same_cost,
    same_numbers,
)
from annotations import unchecked
from flax import nnx
from random_models import same_bits

import jaxgru
from jaxgru.libraries import InteropError
from jaxgru.libraries.flax_nnx import CELLS, RNN, Layer, from_nnx, to_nnx

EVERY = pytest.mark.parametrize("cell_class", CELLS, ids=lambda cell: cell.__name__)


def made(cell_class, E=4, H=6, dtype=np.float32, **options):
    """A cell whose every weight and bias is random."""
    if cell_class is nnx.SimpleCell:
        options.setdefault("dtype", dtype)
    options = dict(param_dtype=dtype, **options)
    cell = nnx.eval_shape(lambda: cell_class(E, H, **options, rngs=nnx.Rngs(0)))  # draws nothing
    nnx.update(cell, randomized(nnx.state(cell)))
    return cell


def problem(cell, T, B, E, H, dtype):
    pair = isinstance(cell, (nnx.LSTMCell, nnx.OptimizedLSTMCell))
    return normal(B, T, E, dtype=dtype), carry_of(B, H, dtype, pair)


@pytest.mark.parametrize("kind, dtype, sizes", FLAX_CASES)
def test_the_same_call_gives_the_same_numbers(kind, dtype, sizes):
    """From a given carry and from the cell's own; reversed, and with padding."""
    with precision(dtype):
        T, B, E, H = sizes
        cell = made(getattr(nnx, kind), E, H, dtype)
        x, carry = problem(cell, T, B, E, H, dtype)
        lengths = np.arange(B) % T + 1

        def calls(rnn_class):
            graph, params, rest = nnx.split(rnn_class(cell), nnx.Param, ...)

            def function(params, x, carry):
                rnn = partial(nnx.merge(graph, params, rest), rngs=nnx.Rngs(0))
                plain = rnn(x, initial_carry=carry, return_carry=True)
                if dtype == np.float32 or T == 1:
                    return plain
                turned = dict(reverse=True, seq_lengths=lengths)
                return (
                    plain,
                    rnn(x, **turned, keep_order=True),
                    rnn(x.swapaxes(0, 1), **turned, return_carry=True, time_major=True),
                )

            return function, params

        (ours, params), (theirs, same) = calls(RNN), calls(nnx.RNN)
        assert same_bits(params, same)
        same_numbers(ours, theirs, params, x, carry)


@pytest.mark.parametrize(
    "cell_class, start",
    [(nnx.GRUCell, None), (nnx.OptimizedLSTMCell, jax.nn.initializers.constant(0.3))],
)
def test_resets_as_in_a_scan_of_the_cell(cell_class, start):
    T, B, E, H = 6, 4, 3, 5
    with precision(np.float64):
        with pytest.warns(UserWarning, match="carry_init") if start else nullcontext():
            cell = made(cell_class, E, H, np.float64, carry_init=start)
        x, carry = problem(cell, T, B, E, H, np.float64)
        reset = resets(B, T)
        graph, params, rest = nnx.split(RNN(cell, return_carry=True), nnx.Param, ...)

        def ours(params, x, carry):
            rnn = nnx.merge(graph, params, rest)
            return rnn(x, initial_carry=carry, reset=reset, rngs=nnx.Rngs(0))

        def theirs(params, x, carry):
            cell = nnx.merge(graph, params, rest).cell
            first = cell.initialize_carry((B, E), nnx.Rngs(0))

            def step(carry, inputs):
                x, reset = inputs
                where = lambda a, b: jnp.where(reset[:, None], a, b)
                return cell(jax.tree.map(where, first, carry), x)

            carry, y = jax.lax.scan(step, carry, (x.swapaxes(0, 1), reset.T))
            return carry, y.swapaxes(0, 1)

        same_numbers(ours, theirs, params, x, carry)


@pytest.mark.parametrize("lengths", [None, np.array([5, 2, 1])])
@pytest.mark.parametrize("time_major", [False, True])
def test_resets_backward_are_those_of_unroll(lengths, time_major):
    cell, x, reset = made(nnx.GRUCell), normal(3, 5, 4, dtype=np.float32), resets(3, 5)
    turn = (lambda a: a.swapaxes(0, 1)) if time_major else lambda a: a
    rnn = RNN(cell, reverse=True, keep_order=True, time_major=time_major)
    y = turn(rnn(turn(x), seq_lengths=lengths, reset=turn(reset).astype(int), rngs=nnx.Rngs(0)))
    real = np.arange(5) < (5 if lengths is None else lengths[:, None])
    expected, _ = jaxgru.unroll(from_nnx(cell), x, reset=reset, reverse=True, lengths=lengths)
    np.testing.assert_allclose(np.where(real[..., None], y, 0), expected, 1e-6, 1e-6)


def test_any_batch_axes_order_and_direction():
    def calls(x, rnn_class):
        cell, other = made(nnx.GRUCell), made(nnx.LSTMCell)
        rnn = partial(rnn_class(cell, return_carry=True), rngs=nnx.Rngs(0))
        both = nnx.Bidirectional(rnn_class(cell), rnn_class(other), return_carry=True)
        return (
            rnn(x),
            rnn(x[0, 0], reverse=True),
            rnn(x[0], reverse=True, keep_order=True),
            both(x[0], seq_lengths=np.array([5, 2, 1]), rngs=nnx.Rngs(0)),
        )

    x = normal(2, 3, 5, 4, dtype=np.float32)
    ours, theirs = (jax.jit(partial(calls, rnn_class=cls))(x) for cls in (RNN, nnx.RNN))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(close, ours, theirs)


def test_the_cost_is_that_of_unroll():
    cell = made(nnx.GRUCell)
    graph, params, rest = nnx.split(RNN(cell), nnx.Param, ...)
    module = lambda params, x: nnx.merge(graph, params, rest)(x, rngs=nnx.Rngs(0))
    same_cost(module, params, from_nnx(cell), normal(3, 5, 4, dtype=np.float32))


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize(
    "T, lengths", [(5, np.array([0, 9, 3])), (130, np.array([0, 127, 3], np.int8))]
)
def test_the_carry_after_lengths_that_flax_takes(T, lengths, time_major):
    """After no step and after more than T, Flax returns the carry after the last step.

    It does not take int8 for so many steps.
    """
    cell, x = made(nnx.OptimizedLSTMCell), normal(3, T, 4, dtype=np.float32)
    x = x.swapaxes(0, 1) if time_major else x
    options = dict(return_carry=True, time_major=time_major)
    call = nnx.jit(lambda rnn, lengths: rnn(x, seq_lengths=lengths, **options))
    ours, theirs = call(RNN(cell), lengths), call(nnx.RNN(cell), lengths.astype(np.int32))
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_lengths_beyond_either_end():
    """Flax takes the value at the end, from which no gradient comes."""
    cell, x = made(nnx.GRUCell), normal(5, 5, 4, dtype=np.float32)
    lengths = jnp.array([6, 0, -4, -5, 3])

    def gradient(rnn_class):
        rnn = rnn_class(cell, return_carry=True)
        last = lambda rnn, x: jnp.sum(jnp.sin(rnn(x, seq_lengths=lengths)[0]))
        return nnx.jit(nnx.grad(last, argnums=1))(rnn, x)

    ours, theirs = gradient(RNN), gradient(nnx.RNN)
    np.testing.assert_allclose(ours, theirs, 1e-5, 1e-6)
    assert [bool(row.any()) for row in theirs] == [False, True, True, False, True]


@pytest.mark.parametrize("copied", [copy.deepcopy, nnx.clone])
def test_a_copy_of_a_module(copied):
    """`deepcopy` makes new objects of jax.nn.sigmoid and jnp.tanh, which have no names."""
    rnn, x = RNN(made(nnx.GRUCell)), normal(3, 5, 4, dtype=np.float32)
    assert same_bits(copied(rnn)(x), rnn(x))
    hard = made(nnx.GRUCell, gate_fn=jax.jit(jax.nn.hard_sigmoid))
    with pytest.raises(InteropError, match="the gate_fn of this GRUCell is not sigmoid"):
        from_nnx(copied(hard))


def test_forward_mode_of_the_plain_implementation():
    cell, x = made(nnx.LSTMCell), normal(2, 3, 4, dtype=np.float32)

    def derivative(rnn_class, **options):
        graph, *arguments, rest = nnx.split(rnn_class(cell), nnx.Param, ...)
        arguments.append(x)

        def outputs(params, x):
            return nnx.merge(graph, params, rest)(x, rngs=nnx.Rngs(0), **options)

        return jax.jit(lambda *args: jax.jvp(outputs, args, randomized(args)))(*arguments)

    ours, theirs = derivative(RNN, implementation="autodiff"), derivative(nnx.RNN)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_strict_promotion():
    cell, x = made(nnx.LSTMCell), normal(3, 5, 4, dtype=np.float32)
    options = dict(seq_lengths=jnp.array([5, 2, 1], jnp.int8), reverse=True, return_carry=True)
    alike_under_strict_promotion(lambda: RNN(cell, rngs=nnx.Rngs(0))(x, **options))


def test_bfloat16_products_beside_a_float32_state():
    cell = nnx.GRUCell(4, 6, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = normal(3, 5, 4, dtype=np.float32)
    ours, theirs = (cls(cell, return_carry=True)(x) for cls in (RNN, nnx.RNN))
    assert [leaf.dtype for leaf in ours] == [leaf.dtype for leaf in theirs] == [np.float32] * 2
    np.testing.assert_allclose(ours[1], theirs[1], atol=0.05)  # Flax rounds the gates, too


def test_it_is_trained_and_saved_like_flax():
    """The parameters, their names and the module's other state are those of `nnx.RNN`."""
    cell = made(nnx.GRUCell)
    ours, theirs = RNN(cell), nnx.RNN(cell)
    assert isinstance(ours, nnx.RNN)
    x = normal(3, 5, 4, dtype=np.float32)
    ours(x), theirs(x)
    assert same_bits(
        jax.tree.map(jax.random.key_data, *[nnx.state(ours, nnx.RngKey)]),
        jax.tree.map(jax.random.key_data, nnx.state(theirs, nnx.RngKey)),
    )
    others = nnx.filterlib.Not(nnx.RngKey)
    assert same_bits(nnx.state(ours, others), nnx.state(theirs, others))
    gradient = nnx.jit(nnx.grad(lambda rnn: jnp.sum(rnn(x))))(ours)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
    assert jax.tree.structure(gradient) == jax.tree.structure(nnx.state(ours, nnx.Param))


@pytest.mark.parametrize("kind", ["gru, second bias", "gru after, second bias", "lstm", "rnn"])
def test_a_layer_of_our_own_is_a_module_of_params(kind):
    weights = layer(kind)
    module = Layer(weights)
    x = normal(3, 5, 4, dtype=np.float32)
    assert same_bits(module.layer(), weights)
    matrices = nnx.to_flat_state(nnx.state(module, nnx.PathContains("kernel"))).leaves
    assert [m.ndim for m in matrices] == [w.ndim for w in jax.tree.leaves(weights) if w.ndim > 1]
    reset = resets(3, 5)
    ours = nnx.jit(lambda module, x: module(x, reset=reset))(module, x)
    assert same_bits(ours, jax.jit(lambda p, x: jaxgru.unroll(p, x, reset=reset))(weights, x))
    gradient = nnx.jit(nnx.grad(lambda module: jnp.sum(module(x)[0])))(module)
    assert len(jax.tree.leaves(gradient)) == len(jax.tree.leaves(weights))


def test_stacks_and_two_directions_are_modules_of_params():
    stack = (layer("gru after"), layer("lstm", 6))
    pair = ((layer("rnn"), layer("lstm", 12)), (layer("gru"), layer("rnn", 12)))
    x, lengths = normal(3, 5, 4, dtype=np.float32), np.array([5, 0, 2])
    residual = jaxgru.ResidualStack((layer("gru after"), layer("lstm", 6)))
    for weights, run in (
        (stack, jaxgru.unroll),
        (residual, jaxgru.unroll),
        (pair, lambda p, *a, **o: jaxgru.bidirectional(*p, *a, **o)),
    ):
        module = Layer(weights)
        assert same_bits(module.layer(), weights)
        ours = nnx.jit(lambda module, x: module(x, lengths=lengths))(module, x)
        assert same_bits(
            ours, jax.jit(lambda p, x, run=run: run(p, x, lengths=lengths))(weights, x)
        )
        gradient = nnx.jit(nnx.grad(lambda module: jnp.sum(module(x)[0])))(module)
        assert len(jax.tree.leaves(gradient)) == len(jax.tree.leaves(weights))


@pytest.mark.slow
def test_forward_mode_of_reversed_rows():
    """`_flip` has a gradient of its own, which forward mode does without."""
    rnn, lengths = RNN(made(nnx.GRUCell)), np.array([5, 0, 2])
    options = dict(seq_lengths=lengths, reverse=True, keep_order=True)
    x, start = normal(3, 5, 4, dtype=np.float32), jnp.zeros((3, 6))
    run = lambda x, **more: rnn(x, initial_carry=start, **options, **more)
    ours = jax.jacfwd(lambda x: run(x, implementation="autodiff"))(x)
    np.testing.assert_allclose(ours, jax.jacrev(run)(x), 1e-5, 1e-5)
    each = jax.vmap(jax.grad(lambda x: jnp.sum(run(x))))(x[None])
    np.testing.assert_allclose(each[0], jax.grad(lambda x: jnp.sum(run(x)))(x), 1e-5, 1e-5)


@EVERY
def test_weights_there_and_back(cell_class):
    cell = made(cell_class)
    weights = from_nnx(cell)
    options = {"lstm": cell_class} if cell_class is nnx.LSTMCell else {}
    again = to_nnx(weights, **options)
    assert type(again) is cell_class
    assert nnx.graphdef(again) == nnx.graphdef(cell)
    assert same_bits(nnx.state(again), nnx.state(cell))
    assert same_bits(from_nnx(again), weights)


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_from_torch_and_back_bit_for_bit(kind, two):
    """Two layers, in one direction or in both; b_hh is zero, as nnx has one bias per gate."""
    torch = pytest.importorskip("torch")
    from jaxgru.libraries.torch_nn import from_torch, to_torch

    module = getattr(torch.nn, kind)(3, 5, num_layers=2, bidirectional=two)
    generator = torch.Generator().manual_seed(0)
    for name, weight in module.named_parameters():
        random = torch.randn(weight.shape, generator=generator)
        random.view(-1)[0] = -0.0
        weight.data = torch.zeros_like(weight) if "bias_hh" in name else random
    through = lambda layers: [from_nnx(to_nnx(layer)) for layer in layers]
    layers = from_torch(module)
    again = to_torch(*map(through, layers)) if two else to_torch(through(layers))
    assert again.state_dict().keys() == module.state_dict().keys()
    for name, weight in module.state_dict().items():
        assert again.state_dict()[name].numpy().tobytes() == weight.numpy().tobytes()


def test_second_biases_become_the_first():
    p = layer("gru after, second bias").replace(cn=jnp.zeros(6))
    q = from_nnx(to_nnx(p))
    assert q.c is None and not q.cn.any()
    assert same_bits((q.b[:12], q.b[12:]), (p.b[:12] + p.c, p.b[12:]))


def test_what_flax_takes_besides_arrays_of_floats():
    """Integer inputs, and, which nnx refuses, lists: of inputs, of lengths, as a carry."""
    x = np.arange(60).reshape(3, 5, 4) % 7
    cell = made(nnx.LSTMCell)
    start = jnp.ones((3, 6)), jnp.zeros((3, 6))  # (c, h)
    options = dict(initial_carry=start, seq_lengths=jnp.array([1, 5, 2]), return_carry=True)
    theirs = nnx.RNN(cell)(x, **options)
    with unchecked():  # the annotations say arrays
        ours = RNN(cell)(
            x.tolist(), **{**options, "initial_carry": list(start), "seq_lengths": [1, 5, 2]}
        )
    chex.assert_trees_all_close(ours, theirs, rtol=2e-6, atol=2e-6)


class TestRefusals:
    @pytest.mark.parametrize(
        "cell_class, options, says",
        [
            (nnx.GRUCell, dict(gate_fn=jax.nn.hard_sigmoid), "gate_fn of this GRUCell is not sigm"),
            (nnx.LSTMCell, dict(activation_fn=jax.nn.relu), "activation_fn of this LSTMCell is no"),
            (nnx.SimpleCell, dict(residual=True), "this SimpleCell is residual"),
            (nnx.GRUCell, dict(promote_dtype=lambda *a, **k: None), "promote_dtype of its own"),
        ],
    )
    def test_cells(self, cell_class, options, says):
        for use in (RNN, from_nnx):
            with pytest.raises(InteropError, match=says):
                use(made(cell_class, **options))

    def test_other_classes(self):
        with pytest.raises(InteropError, match="the cell is a Linear; it must be a flax.nnx GRUCe"):
            RNN(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        own = type("Own", (nnx.GRUCell,), {})(2, 3, rngs=nnx.Rngs(0))
        with pytest.raises(InteropError, match="an Own; .*SimpleCell itself, not a subclass"):
            RNN(own)
        with pytest.raises(
            InteropError, match="a ResetBeforeGRUParams; .* in jaxgru.libraries.flax_nnx.L"
        ):
            RNN(layer("gru"))
        with pytest.raises(InteropError, match="state_axes is given"):
            RNN(made(nnx.GRUCell), state_axes={nnx.Param: 0})

    @pytest.mark.parametrize(
        "arguments, says",
        [
            (dict(reset=resets(5, 3)), r"reset has shape \(5, 3\); it must be \(3, 5\)"),
            (dict(seq_lengths=np.arange(5)), r"seq_lengths has shape \(5,\); it must be \(3,\)"),
            (dict(seq_lengths=np.ones(3)), "seq_lengths are float32; they must be integers"),
            (dict(initial_carry=0.0), r"initial_carry has shape \(\); it must be \(3, 6\)"),
            (dict(initial_carry=np.zeros((2, 6))), r"carry has shape \(2, 6\); it must be"),
            (dict(initial_carry=[[0.0] * 5] * 3), r"carry has shape \(3, 5\); it must be"),
            (
                dict(initial_carry=np.ones((3, 6), bool)),
                "initial_carry is bool; it must be floating",
            ),
            (dict(initial_carry="zeros"), "initial_carry is a str; it must be an array"),
            (dict(initial_carry=(None, None)), "initial_carry is a tuple; this cell's is an array"),
        ],
    )
    def test_shapes(self, arguments, says):
        with unchecked(), pytest.raises(ValueError, match=says):
            RNN(made(nnx.GRUCell))(normal(3, 5, 4, dtype=np.float32), **arguments)

    @pytest.mark.parametrize("carry", [np.zeros((3, 6)), [np.zeros((3, 6))] * 3, {}, 0.0])
    def test_what_is_no_pair(self, carry):
        with pytest.raises(InteropError, match=r"carry must be a pair of arrays \(3, 6\), as an L"):
            RNN(made(nnx.LSTMCell))(normal(3, 5, 4, dtype=np.float32), initial_carry=carry)

    @pytest.mark.parametrize(
        "cell_class, part, name, shape, says",
        [
            (nnx.GRUCell, "dense_i", "kernel", (4, 16), r"dense_i.kernel .*; it must be \(4, 18\)"),
            (nnx.GRUCell, "dense_h", "kernel", (6,), r"dense_h.kernel .*; it must be \(6, 18\)"),
            (nnx.GRUCell, "dense_i", "bias", (15,), r"dense_i.bias has shape \(15,\); it must"),
            (nnx.SimpleCell, "dense_i", "bias", (18,), r"dense_i.bias .*; it must be \(6,\)"),
            (nnx.OptimizedLSTMCell, "dense_h", "bias", (6,), r"it must be \(24,\)"),
            (nnx.LSTMCell, "hf", "kernel", (4, 6), r"hf.kernel .*; it must be \(6, 6\)"),
        ],
    )
    def test_weights_of_other_shapes(self, cell_class, part, name, shape, says):
        cell = made(cell_class)
        setattr(getattr(cell, part), name, nnx.Param(jnp.ones(shape)))
        with pytest.raises(InteropError, match=f"an? {cell_class.__name__}: the tensor .*{says}"):
            RNN(cell)(normal(3, 5, 4, dtype=np.float32))

    def test_a_bias_that_is_missing_or_not_of_the_cell(self):
        cell = made(nnx.GRUCell)
        cell.dense_h.bias = nnx.Param(jnp.ones(18))
        with pytest.raises(InteropError, match="dense_h.bias does not belong there"):
            from_nnx(cell)
        cell = made(nnx.GRUCell)
        cell.dense_i.bias = None
        with pytest.raises(InteropError, match="dense_i.bias is missing"):
            from_nnx(cell)

    def test_parameters_that_flax_may_add(self):
        """As a hidden bias of the GRU, which google/flax PR 5595 proposes."""
        cell = made(nnx.GRUCell)
        cell.bias_hn = nnx.Param(jnp.ones(6))
        with pytest.raises(InteropError, match="the tensor bias_hn does not belong there"):
            RNN(cell)(normal(3, 5, 4, dtype=np.float32))
        cell = made(nnx.LSTMCell)
        cell.peephole = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
        with pytest.raises(InteropError, match="the tensor peephole.bias does not belong"):
            from_nnx(cell)
        cell = made(nnx.GRUCell)
        cell.dense_h.scale = nnx.BatchStat(jnp.ones(6))
        with pytest.raises(InteropError, match="the tensor dense_h.scale does not belong"):
            from_nnx(cell)
        cell = made(nnx.GRUCell)
        cell.dense_i = nnx.LoRALinear(4, 18, lora_rank=2, rngs=nnx.Rngs(0))
        with pytest.raises(InteropError, match="dense_i of this GRUCell is a LoRALinear; only an"):
            from_nnx(cell)

    def test_an_input_without_steps(self):
        with pytest.raises(InteropError, match=r"inputs has shape \(4,\); it must have steps"):
            RNN(made(nnx.GRUCell))(np.ones(4, np.float32))

    def test_layers(self):
        with unchecked(), pytest.raises(ValueError, match="no cell has parameters of type dict"):
            Layer({})
        with unchecked(), pytest.raises(ValueError, match="layers contains no layers"):
            Layer([])
        module = Layer(jaxgru.init_min_gru(jax.random.key(0), 4, 6))
        nnx.update(module, nnx.state(Layer(layer("gru"))))  # its fields include those of the minGRU
        with pytest.raises(InteropError, match="Params.* does not belong there"):
            module.layer()
        with unchecked(), pytest.raises(InteropError, match="a list .* convert its layers one by"):
            to_nnx([layer("gru")])
        with pytest.raises(
            InteropError,
            match="nnx.GRUCell applies the reset gate after the product, this GRU before",
        ):
            to_nnx(layer("gru"))
        with pytest.raises(
            InteropError, match="cn is not zero .* runs as it is in .*flax_nnx.Layer"
        ):
            to_nnx(layer("gru after, second bias"))
        with pytest.raises(InteropError, match="not known under a transformation"):
            jax.jit(lambda p: nnx.state(to_nnx(p)))(layer("gru after, second bias"))
        with pytest.raises(InteropError, match="a dict cannot be converted: Flax has"):
            to_nnx({})
        with pytest.raises(InteropError, match="lstm is .*GRUCell.*; it must be nnx.OptimizedLSTM"):
            to_nnx(layer("lstm"), lstm=nnx.GRUCell)
