"""`unroll`, `bidirectional` and `step` against the cells run one row and one episode at a time."""

import functools
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from against import randomized as random_like
from annotations import unchecked
from conftest import slow
from jax._src import test_util as jtu  # its counter of programs; there is no public one
from random_models import INIT

import jaxgru
from jaxgru import cells
from jaxgru.cells.layout import IN_COLUMNS, IN_ROWS
from jaxgru.cells.lstm import RECURRENCE
from jaxgru.layers import implementations, over_time

GRU_OR_LSTM = ["gru", "lstm", *slow("gru, reset after", "rnn")]
GRU_FIRST = ["gru", *slow(*(kind for kind in INIT if kind != "gru"))]
OTHERS = [kind for kind in INIT if "," in kind and kind != "gru, reset after"]  # of plain cells
EVERY = [*(kind for kind in INIT if kind not in OTHERS), *slow(*OTHERS)]
F, H = 3, 4


@pytest.fixture(autouse=True)
def blocks(monkeypatch, forget_traces):
    """Of 2 steps for 3 rows, so that a sequence has several."""
    monkeypatch.setattr(implementations, "ROWS_AT_ONCE", 6)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def stack_of(kind, num_layers, seed=0):
    """Random parameters; no bias is zero."""
    init = lambda F: INIT[kind](jax.random.key(0), F, H, dtype=jnp.float64)
    sizes = [F] + [H] * (num_layers - 1)
    return random_like([jax.eval_shape(partial(init, size)) for size in sizes], seed)


def gradients(function, *arguments):
    """A scalar in which every output takes part with its own weight, and all its gradients."""

    def scalar(*arguments):
        outputs = function(*arguments)
        terms = [
            jnp.sum(y * jnp.cos(jnp.arange(y.size) + i).reshape(y.shape))
            for i, y in enumerate(jax.tree.leaves(outputs))
        ]
        return sum(terms), outputs

    return jax.grad(scalar, tuple(range(len(arguments))), has_aux=True)(*arguments)


AMID = [[False, False, True, False, False], [True, False, False, True, False]]
HOLES = [[False, True, False, True, True], [True, True, False, False, True]]


def test_which_way():
    """In rows: 64 of them or more, or at most 8,192 numbers in a state."""
    sizes = [(64, 1024), (1, 8192), (32, 256), (16, 512), (33, 256), (32, 512), (63, 131)]
    layouts = [over_time.training_layout(RECURRENCE, *size).axis for size in sizes]
    assert layouts == [IN_ROWS.axis] * 4 + [IN_COLUMNS.axis] * 3


@pytest.mark.parametrize("kind", EVERY)
def test_nothing_reaches_a_step_from_before_its_last_reset(kind):
    """The gradient of a step's output is exactly zero there, and not after."""
    layers, x = stack_of(kind, 2), random_like(np.zeros((1, 6, F)), 1)
    reset = np.array([[False, False, False, True, False, False]])
    carry = random_like(jaxgru.initial_carry(layers, 1), 2)
    output = lambda x, carry: jaxgru.unroll(layers, x, carry, reset=reset)[0][0, 5].sum()
    of_x, of_carry = jax.jit(jax.grad(output, (0, 1)))(x, carry)
    assert not of_x[0, :3].any() and of_x[0, 3:].all()
    assert not any(leaf.any() for leaf in jax.tree.leaves(of_carry))


@pytest.mark.parametrize(
    "kind, reverse",
    [
        ("gru", False),
        ("lstm", True),
        *slow(*((kind, False) for kind in INIT if kind != "gru"), ("gru", True)),
    ],
)
def test_what_is_in_the_padding_reaches_nothing(kind, reverse):
    """Neither outputs nor gradients: it is NaN here, at the end of rows, or within them."""
    layers = stack_of(kind, 2)
    x = random_like(np.zeros((3, 4, F)), 1)
    if reverse:
        padding = {"mask": jnp.array([[False, True, False, True], [True] * 4, [False] * 4])}
        padded = x.at[0, ::2].set(jnp.nan).at[2].set(jnp.nan)
    else:
        padding = {"lengths": jnp.array([2, 4, 0])}
        padded = x.at[0, 2:].set(jnp.nan).at[2].set(jnp.nan)
    run = lambda layers, x: jaxgru.unroll(layers, x, reverse=reverse, **padding)
    compiled = jax.jit(partial(gradients, run))
    seen, expected = (compiled(layers, x) for x in (padded, jnp.nan_to_num(padded)))
    chex.assert_trees_all_equal(seen, expected)
    chex.assert_tree_all_finite(seen)
    one, of_one = jax.tree.map(lambda leaf: leaf[0], (padded, padding))
    with jax.debug_nans(True):  # it looks at the result of each operation outside of `jit`
        chex.assert_trees_all_close(gradients(run, layers, padded), expected, rtol=1e-12)
        alone, _ = jaxgru.unroll(layers, one, reverse=reverse, **of_one)
        both, _ = jaxgru.bidirectional(layers[0], layers[0], np.asarray(padded), **padding)
    np.testing.assert_allclose(alone, seen[1][0][0], rtol=1e-12)
    chex.assert_tree_all_finite(both)


@pytest.mark.parametrize("kind", GRU_FIRST)
def test_carries_of_every_step_are_those_of_single_steps(kind):
    """`return_carries`, with gradients through c, too; `step`; and the cells themselves."""
    layers, x = stack_of(kind, 2), random_like(np.zeros((2, 3, F)), 1)
    start = random_like(jaxgru.initial_carry(layers, 2), 2)
    reset = np.array([[False, True, False], [False, False, True]])

    def at_once(layers, x, carry):
        y, end, carries = jaxgru.unroll(layers, x, carry, reset=reset, return_carries=True)
        return y, carries, end

    def of_cells(layers, h, carry, reset):
        after, at_start = [], jaxgru.initial_carry(layers, 2)
        carry = jax.tree.map(lambda *c: jax.vmap(jnp.where)(reset, *c), at_start, carry)
        for layer, c in zip(layers, carry, strict=True):
            after.append(cells.cell(layer, c, h))
            h = cells.hidden(after[-1])
        return h, tuple(after)

    def step_by_step(step, layers, x, carry):
        y, carries = [], []
        for t in range(3):
            h, carry = step(layers, x[:, t], carry, reset=reset[:, t])
            y.append(h)
            carries.append(carry)
        along = lambda *leaves: jnp.stack(leaves, axis=1)
        return along(*y), jax.tree.map(along, *carries), carry

    ways = at_once, partial(step_by_step, jaxgru.step), partial(step_by_step, of_cells)
    seen = (jax.jit(partial(gradients, way))(layers, x, start) for way in ways)
    chex.assert_trees_all_close(*seen, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", GRU_OR_LSTM)
def test_what_is_not_asked_for_is_not_computed(kind):
    """Without resets and padding, nothing is chosen: neither forward nor backward."""
    layers, x = stack_of(kind, 2), np.zeros((2, 3, F))
    flags = dict(reset=np.zeros((2, 3), bool)), dict(lengths=np.array([3, 3]))
    for options, expected in (({}, False), *((option, True) for option in flags)):
        run = partial(jaxgru.unroll, **options)
        program = str(jax.make_jaxpr(partial(gradients, run))(layers, x))
        assert ("select_n" in program) == expected


@pytest.mark.parametrize("kind", ["lstm, blocks", *GRU_OR_LSTM])
def test_a_batch_without_rows(kind):
    """Empty outputs; weights without a gradient. Its 12 steps are computed as 6 and 6."""
    layers, x = stack_of(kind, 2), np.zeros((0, 12, F))
    options = dict(reset=np.zeros((0, 12), bool), lengths=np.zeros(0, int), remat=True)
    for run in (jaxgru.unroll, partial(jaxgru.unroll, **options)):
        of_layers, (y, carry) = jax.jit(partial(gradients, run))(layers, x)
        assert y.shape == (0, 12, H)
        chex.assert_tree_shape_prefix(carry, (0, H))
        chex.assert_trees_all_equal(of_layers[0], jax.tree.map(jnp.zeros_like, layers))


def test_a_call_is_one_program():
    """Also with all options; the next call with the same shapes is none."""
    layers, x = stack_of("lstm", 2), random_like(np.zeros((2, 6, F)), 1)
    carry = jaxgru.initial_carry(layers, 2)
    options = dict(
        reset=np.zeros((2, 6), bool), lengths=np.array([3, 6]), initial=carry, remat=True,
        return_carries=True, dropout=jaxgru.Dropout(KEY, 0.4, "state"),
    )  # fmt: skip
    both = partial(jaxgru.bidirectional, layers[0], layers[0])
    for call in (
        partial(jaxgru.unroll, layers, x),
        partial(jaxgru.unroll, layers, x, carry, reverse=True, **options),
        partial(both, x, **options | dict(initial=None)),
        partial(jaxgru.step, layers, x[:, 0], carry, reset=np.array([True, False])),
    ):
        for programs in (1, 0):
            with jtu.count_jit_and_pmap_lowerings() as lowered:
                call()
            assert lowered() == programs


def test_more_batch_axes():
    """Of a step, and of two directions: (E, A) is a batch (E·A,)."""
    E, A, T, layers = 2, 3, 5, stack_of("lstm", 2)
    x, carry = map(random_like, (np.zeros((E, A, T, F)), jaxgru.initial_carry(layers, (E, A))))
    in_one = partial(jax.tree.map, lambda a: a.reshape(E * A, *a.shape[2:]))
    step, both = jaxgru.step, partial(jaxgru.bidirectional, layers[0], layers[0])
    at_once = step(layers, x[:, :, 0], carry)
    chex.assert_trees_all_equal(in_one(at_once), step(layers, in_one(x)[:, 0], in_one(carry)))
    chex.assert_trees_all_equal(in_one(both(x)), both(in_one(x)))


def test_rounded_weights_are_multiplied_as_an_equation_says():
    """An RNN in float64, whose products take operands that are rounded to bfloat16."""
    layer = random_like(jax.eval_shape(lambda: jaxgru.init_rnn(KEY, F, H, dtype="float32")), 3)
    x = random_like(np.zeros((2, 5, F), np.float32), 1)
    narrow = lambda a: np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64)
    h, expected = np.zeros((2, H)), []
    for now in x.swapaxes(0, 1):
        of_h = narrow(h.astype(np.float32)) @ narrow(layer.U)
        h = np.tanh(narrow(now) @ narrow(layer.W) + of_h + layer.b)
        expected.append(h)
    y, carry = jaxgru.unroll(jaxgru.round_weights(layer, jnp.bfloat16), x)
    assert y.dtype == carry.dtype == np.float32
    # Rounding of float32 alone; a state that is rounded otherwise would differ by 2⁻⁹
    np.testing.assert_allclose(y, np.stack(expected, 1), atol=1e-6)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_forms_of_the_same_call(kind):
    """One layer is a list of one; time-major is transposed; `initial` may lack the batch axis.

    The parts of an LSTM's state may come in a dict, in any order.
    """
    (layer,), x = stack_of(kind, 1), random_like(np.zeros((2, 3, F)), 1)
    reset = np.array([[False, True, False], [True, False, False]])
    initial = jax.tree.map(lambda c: c[0], random_like(jaxgru.initial_carry(layer, 1), 2))
    unroll = jax.jit(jaxgru.unroll, static_argnames="time_major")
    y, carry = unroll(layer, x, reset=reset, initial=initial)
    in_list = unroll([layer], x, reset=reset, initial=[initial])
    chex.assert_trees_all_equal((y, (carry,)), in_list)
    if kind == "lstm":
        named = {"c": initial.c, "h": initial.h}
        by_name = unroll([layer], x, reset=reset, initial=[named])
        chex.assert_trees_all_equal(by_name, in_list)
        h = jaxgru.step(layer, x[:, 0], dict(reversed(carry._asdict().items())))
        chex.assert_trees_all_equal(h, jaxgru.step(layer, x[:, 0], carry))
    rows = jax.tree.map(lambda c: jnp.stack([c, c]), initial)
    chex.assert_trees_all_equal((y, carry), unroll(layer, x, rows, reset=reset, initial=rows))
    turned = unroll(layer, x.swapaxes(0, 1), reset=reset.T, initial=initial, time_major=True)
    chex.assert_trees_all_equal((y.swapaxes(0, 1), carry), turned)
    mapped, _ = jax.jit(jax.vmap(partial(jaxgru.unroll, layer)))(jnp.stack([x, 2 * x]))
    chex.assert_trees_all_close(mapped[1], unroll(layer, 2 * x)[0], rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_input_takes_the_layers_dtype(dtype):
    layer = jax.eval_shape(
        partial(jaxgru.init_gru, in_features=F, hidden_dim=H, dtype=dtype), jax.random.key(0)
    )
    for given_dtype in ("float32", "bfloat16", "float64"):
        x = jax.ShapeDtypeStruct((2, 3, F), given_dtype)
        y, carry = jax.eval_shape(jaxgru.unroll, layer, x)
        assert y.dtype == carry.dtype == dtype


@functools.cache
def on_two_devices(*kinds):
    """What on_two_devices.py has seen of the compiled gradients."""
    command = [sys.executable, str(Path(__file__).parent / "on_two_devices.py"), *kinds]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


QUICK, REST = (
    ("gru", "batch axes"),
    ("gru, reset after", "gru, norm", "lstm", "lstm, projected", "rnn", "model", "flax"),
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*QUICK, *REST])
def test_a_sharded_batch_stays_on_its_devices(kind):
    """Plain `jit`: no row is sent to the other device, no array holds the whole batch.

    For meshes whose axes are Auto and Explicit. And within a `shard_map` that checks which arrays
    vary over the devices.
    """
    compiled = on_two_devices(*(QUICK if kind in QUICK else REST))[kind]
    assert len(compiled) == (2 if kind in ("model", "flax") else 4)
    for seen in compiled.values():
        assert seen["collectives"] == ["all-reduce"]  # the sum of the weights' gradients
        assert set(seen["rows"]) <= {13, 13 * 7}  # and not 26 or 26 · 7
        assert seen["difference"] < 1e-11


def shapes_like(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@pytest.mark.parametrize("kind, implementation", [("lstm", "auto"), ("gru", "wavefront")])
def test_export_with_symbolic_sizes(kind, implementation):
    """Batch and time free, the parameters an argument: the exported program computes the same.

    The wavefront, which needs sizes, falls back.
    """
    layers, (B, T) = stack_of(kind, 2), jax.export.symbolic_shape("B, T")
    run = jax.jit(partial(jaxgru.unroll, implementation=implementation))
    x = jax.ShapeDtypeStruct((B, T, F), jnp.float64)
    exported = jax.export.export(run)(shapes_like(layers), x)
    again = jax.export.deserialize(exported.serialize())
    for sizes in ((1, 1), (3, 5)):
        x = random_like(np.zeros((*sizes, F)), 1)
        chex.assert_trees_all_close(again.call(layers, x), jaxgru.unroll(layers, x), rtol=1e-12)


@pytest.mark.slow
def test_export_of_a_model_with_symbolic_sizes():
    """`apply` and `step`, the parameters an argument; few tokens, and more than the vocabulary."""
    params = jaxgru.lm.init(jax.random.key(0), jaxgru.lm.ModelConfig("lstm", 5, F, H, 2), "float64")
    B, T = jax.export.symbolic_shape("B, T")
    ids, carry = jax.ShapeDtypeStruct((B, T), jnp.int32), jaxgru.lm.initial_carry(params, 1)
    carry = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((B, H), leaf.dtype), carry)
    apply = jax.export.export(jax.jit(jaxgru.lm.apply))(shapes_like(params), ids, carry)
    token = jax.ShapeDtypeStruct((B,), jnp.int32)
    step = jax.export.export(jax.jit(jaxgru.lm.step))(shapes_like(params), token, carry)
    again = jax.export.deserialize(apply.serialize()), jax.export.deserialize(step.serialize())
    for rows, T in ((1, 1), (3, 4)):
        tokens = jnp.arange(rows * T, dtype=jnp.int32).reshape(rows, T) % 5
        carry = random_like(jaxgru.lm.initial_carry(params, rows), 1)
        seen = again[0].call(params, tokens, carry), again[1].call(params, tokens[:, 0], carry)
        expected = (
            jaxgru.lm.apply(params, tokens, carry), jaxgru.lm.step(params, tokens[:, 0], carry)
        )  # fmt: skip
        chex.assert_trees_all_close(seen, expected, rtol=1e-12)


def test_export_of_a_gradient_with_a_symbolic_batch():
    layer, (B,) = stack_of("gru", 1)[0], jax.export.symbolic_shape("B")
    gradient = jax.jit(jax.grad(lambda layer, x: jnp.sin(jaxgru.unroll(layer, x)[0]).sum()))
    x = jax.ShapeDtypeStruct((B, 2, F), jnp.float64)
    exported = jax.export.export(gradient)(shapes_like(layer), x)
    for rows in (1, 3):
        x = random_like(np.zeros((rows, 2, F)), 1)
        chex.assert_trees_all_close(exported.call(layer, x), gradient(layer, x), rtol=1e-12)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_a_start_has_the_precision_of_the_carry(kind):
    """A bfloat16 layer that carries float32: its gradients are those of the definition."""
    layer = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), stack_of(kind, 1)[0])
    carry = jax.tree.map(
        lambda leaf: random_like(np.zeros(leaf.shape), 1).astype(jnp.float32),
        jaxgru.initial_carry(layer, 2),
    )
    initial = jax.tree.map(lambda leaf: leaf[0], carry)
    reset = jnp.zeros((2, 3), bool).at[0, 1].set(True)
    x = random_like(np.zeros((2, 3, F)), 2)

    def outputs(initial, implementation):
        return jaxgru.unroll(
            layer, x, carry, reset=reset, initial=initial, implementation=implementation
        )[0].sum()

    fast, plain = (jax.grad(outputs)(initial, name) for name in ("scan", "autodiff"))
    chex.assert_trees_all_close(fast, plain, rtol=0.05, atol=0.02)  # operands of 8 bits
    assert {leaf.dtype for leaf in jax.tree.leaves(fast)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("dtypes", [("float64", "float32"), ("float32", "bfloat16", "float32")])
def test_layers_of_a_stack_may_differ_in_precision(dtypes):
    """Each layer computes in its own: the stack is its layers, called one by one."""
    stack = stack_of("gru", len(dtypes))
    stack = [
        jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), layer)
        for layer, dtype in zip(stack, dtypes, strict=True)
    ]
    x = expected = random_like(np.zeros((2, 3, F)), 1)
    for layer in stack:
        expected, _ = jaxgru.unroll(layer, expected)
    y, carry = jaxgru.unroll(stack, x)
    chex.assert_trees_all_equal(y, expected)
    assert tuple(h.dtype for h in carry) == dtypes


def test_lists_are_arrays():
    layer = stack_of("lstm", 1)[0]
    x = random_like(np.zeros((2, 3, F)), 1)
    carry = jaxgru.LSTMState(*(random_like(np.zeros((2, H)), i) for i in (2, 3)))
    flags = jnp.array([[False, True, False], [False] * 3])
    run = partial(jaxgru.unroll, layer, x)
    expected = run(carry, reset=flags, lengths=jnp.array([3, 2]), initial=carry)
    with unchecked():  # the annotations say arrays
        seen = run(carry, reset=flags.tolist(), lengths=[3, 2], initial=carry)
    chex.assert_trees_all_equal(seen, expected)


KEY = jax.random.key(0)
GRU = jaxgru.init_gru(KEY, F, H)
LSTM = jaxgru.init_lstm(KEY, F, H)


@pytest.mark.parametrize(
    "call, says",
    [
        (
            lambda x: jaxgru.unroll(GRU, x[0, 0]),
            "x is float32 (3,); it must be floating-point, (B, T",
        ),
        (
            lambda x: jaxgru.unroll(GRU, jnp.ones((2, 3, F), int)),
            "x is int64 (2, 3, 3); it must be f",
        ),
        (
            lambda x: jaxgru.unroll(GRU, x[:, :0]),
            "x has the shape (2, 0, 3); it must have at least one step",
        ),
        (lambda x: jaxgru.unroll(GRU, x[..., :2]), "x has 2 features per step; the layer takes 3"),
        (lambda x: jaxgru.unroll([], x), "contains no layers"),
        (lambda x: jaxgru.round_weights(GRU, int), "dtype is <class 'int'>; it must be floating"),
        (lambda x: jaxgru.unroll(GRU, x, jnp.zeros((3, H))), "the carry's shapes are (3, 4), but"),
        *[
            (
                lambda x, run=run, state=state: run(x, state),
                f"is {seen}; it must be LSTMState(h=…, c=",
            )
            for state, seen in (
                ((jnp.zeros((2, H)),) * 2, "a tuple"),  # Flax has (c, h)
                (jnp.zeros((2, 2, H)), "an array (2, 2, 4)"),
                ({"c": jnp.zeros((2, H))}, "a dict with the keys 'c'"),
            )
            for run in (
                partial(jaxgru.unroll, LSTM),
                lambda x, state: jaxgru.unroll(LSTM, x, initial=state),
                lambda x, state: jaxgru.step([LSTM], x[:, 0], [state]),
                lambda x, state: jaxgru.bidirectional(LSTM, LSTM, x, (state, state)),
                lambda x, state: cells.cell(LSTM, state, x[:, 0]),
            )
        ],
        (
            lambda x: jaxgru.unroll(GRU, x, jnp.zeros((2, H), jnp.bfloat16)),
            "the carry's dtype is bfloat16; these layers' is float32",
        ),
        (
            lambda x: jaxgru.unroll(GRU, x, reset=jnp.zeros((3, 2), bool)),
            "reset is bool (3, 2); it must be bool (2, 3)",
        ),
        (
            lambda x: jaxgru.unroll(GRU, x, reset=jnp.full((2, 3), 0.5)),
            "reset contains 0.5; it must be bool, or numbers that are 0 or 1",
        ),
        (
            lambda x: jax.jit(lambda r: jaxgru.unroll(GRU, x, reset=r))(jnp.zeros((2, 3))),
            "its values are not known here; pass reset.astype(bool) if each of them is 0 or 1",
        ),
        (
            lambda x: jaxgru.unroll(GRU, x, mask=jnp.ones((2, 4))),
            "mask is float64 (2, 4); it must be bool (2, 3)",
        ),
        (
            lambda x: jaxgru.unroll(GRU, x, mask=jnp.ones((2, 3)), lengths=[1, 2]),
            "both lengths and a mask are given; give one of them",
        ),
        (
            lambda x: jaxgru.unroll(GRU, x[0], jnp.zeros((1, H))),
            "the carry's shapes are (1, 4), but these layers and the batch () need (4,)",
        ),
        (
            lambda x: jaxgru.unroll(GRU, x[0], lengths=[3]),
            "lengths is int64 (1,); it must be integers, one per row: ()",
        ),
        *[
            (call, "the carry was passed as x; the order is layers, x (the input), carry")
            for call in (
                lambda x: jaxgru.step(GRU, jnp.zeros((2, H)), x[:, 0]),
                lambda x: jaxgru.unroll(LSTM, (jnp.zeros((2, H)),) * 2, x),
                lambda x: jaxgru.step([GRU], (jnp.zeros((2, H)),), x[:, 0]),
            )
        ],
        (
            lambda x: jaxgru.bidirectional(GRU, GRU, x, initial=jnp.zeros((2, 2, H))),
            "initial must be a pair, the forward and the backward layers",
        ),
        (
            lambda x: jaxgru.unroll(GRU, x, lengths=jnp.array([1, 4])),
            "lengths range from 1 to 4; they must be in 0 … T = 3",
        ),
        (
            lambda x: jaxgru.unroll(GRU, x, lengths=jnp.array([1.0, 2.0])),
            "lengths is float64 (2,); it must be integers, one per row: (2,)",
        ),
        (
            lambda x: jaxgru.unroll(GRU, x, initial=jnp.zeros(3)),
            "the shapes of initial are (3,); these layers need (4,)",
        ),
        (lambda x: jaxgru.unroll(GRU, None), "x is a NoneType; it must be an array"),
        (lambda x: jaxgru.unroll(None, x), "layers is a NoneType; it must be one layer"),
        (lambda x: jaxgru.unroll({"a": GRU}, x), "layers is a dict; it must be one layer"),
        (
            lambda x: jaxgru.unroll([GRU, GRU], x),
            "the layer below it has 4 features per step; layer 1 takes 3",
        ),
        (
            lambda x: jaxgru.unroll(GRU, x[..., :2], implementation="autodiff"),
            "x has 2 features per step; the layer takes 3",
        ),
        (
            lambda x: jaxgru.unroll(GRU.replace(U=jnp.zeros((4, 13))), x),
            "the parameters of layer 0 do not fit together, or not to an input of 3 features: "
            "cn float32 (4,), W float32 (3, 12), U float64 (4, 13)",
        ),
        (
            lambda x: jaxgru.unroll(LSTM.replace(b=jnp.zeros(17)), x),
            "the parameters of layer 0 do not fit together, or not to an input of 3 features: "
            "W float32 (3, 16)",
        ),
        (lambda x: jaxgru.unroll(GRU.replace(U=None), x), "U None, b float32 (12,)"),
        (
            lambda x: jaxgru.unroll(GRU.replace(b=GRU.b.astype(jnp.bfloat16)), x),
            "b bfloat16 (12,)",
        ),
        (
            lambda x: jaxgru.unroll(GRU, x, jnp.zeros((2, H), complex)),
            "the carry's dtype is complex128; these layers' is float32",
        ),
        (
            lambda x: jaxgru.unroll(
                LSTM, x, jaxgru.LSTMState(jnp.zeros((2, H), "float32"), jnp.zeros((2, H)))
            ),
            "a layer's carry has parts of float32 and float64; it must have one dtype",
        ),
        (lambda x: jaxgru.unroll([GRU], x, 0.0), "the carry's shapes are (), but"),
        (lambda x: jaxgru.unroll([GRU], x, initial=0.0), "the shapes of initial are (); these"),
        (
            lambda x: jaxgru.unroll(GRU, x, initial=jnp.zeros(4, int)),
            "initial is int64; it must be",
        ),
        (lambda x: jaxgru.unroll(GRU, x, reset=True), "reset is bool (); it must be bool (2, 3)"),
        (
            lambda x: jaxgru.unroll(GRU, x, lengths=3),
            "lengths is int64 (); it must be integers, one per row: (2,)",
        ),
        (
            lambda x: jaxgru.step(GRU, x[:, 0], jnp.zeros((2, H)), reset=[True, False, True]),
            "reset is bool (3,); it must be bool (2,)",
        ),
        (
            lambda x: jaxgru.step(GRU, x[:, 0], None),
            "carry is None; it must be the last step's, or from initial_carry",
        ),
        (
            lambda x: jaxgru.step(GRU, jnp.ones((2, F), int), jnp.zeros((2, H))),
            "x is int64 (2, 3); it must be floating-point, (B, F)",
        ),
        (
            lambda x: jaxgru.unroll(GRU, x, reverse=jnp.array(True)),
            "reverse is an ArrayImpl; it must be True or False",
        ),
        (lambda x: jaxgru.unroll(GRU, x, dropout=0.5), "dropout is 0.5; it must be a Dropout("),
        *[
            (
                lambda x, key=key: jaxgru.unroll(GRU, x, dropout=jaxgru.Dropout(key, 0.5, "state")),
                f"the dropout's key is {seen}; it must be one key, as from jax.random.key",
            )
            for key, seen in (("a", "a str"), (3, "an int"), (np.uint32(3), "a uint32"))
        ],
        (
            lambda x: jaxgru.unroll(GRU, x, dropout=jaxgru.Dropout(0.5, KEY, "state")),
            "the dropout rate is a key; the order is Dropout(key, rate, site)",
        ),
        (
            lambda x: jaxgru.bidirectional(GRU, GRU, x, jnp.zeros((2, 2, H))),
            "carry must be a pair, the forward and the backward layers",
        ),
        (
            lambda x: jaxgru.bidirectional([GRU], [GRU], x, ((jnp.zeros((2, H)),) * 2, None)),
            "shapes are ((2, 4), (2, 4)), but these layers and the batch (2,) need ((2, 4),): one",
        ),
        (
            lambda x: jaxgru.bidirectional([GRU, GRU], [GRU, GRU], x),
            "the layer below it has 8 features per step; layer 1 takes 3",
        ),
        (
            lambda x: jaxgru.unroll(jaxgru.init_lstm(KEY, F, 4).replace(b=jnp.zeros(1)), x),
            "the parameters of layer 0 do not fit together, or not to an input of 3 features",
        ),
        (
            lambda x: jaxgru.unroll(jax.tree.map(lambda w: jnp.stack([w, w]), GRU), x),
            "the parameters of layer 0 do not fit together, or not to an input of 3 features",
        ),
        (lambda x: jaxgru.initial_carry(GRU, -1), "batch_size is -1; it must be a whole number"),
        (lambda x: jaxgru.initial_carry(GRU, 2**70), "whole number from 0 to 2147483647"),
        (lambda x: jaxgru.unroll(GRU, np.ma.masked_array(x)), "x is a MaskedArray; it must be"),
        (lambda x: jaxgru.initial_carry(GRU, "3"), "batch_size is '3'; it must be a whole number"),
        (lambda x: jaxgru.initial_carry(GRU, None), "batch_size is None; it must be a whole"),
        (
            lambda x: jaxgru.init_rnn(KEY, 3, 4, activation="gelu"),
            "is 'gelu'; it must be one of ta",
        ),
        (
            lambda x: jaxgru.init_rnn(KEY, 3, 4, clip=0),
            "clip is 0; it must be None or a positive number",
        ),
        (
            lambda x: jaxgru.init_lstm(KEY, 3, 4, activation=[]),
            "activation is []; it must be one of tanh, relu",
        ),
        (
            lambda x: jaxgru.init_gru(KEY, 3, 4, layer_norm=True, activation="relu"),
            "they are False, 'after', 'relu' and None",
        ),
        (
            lambda x: jaxgru.init_lstm(KEY, 3, 4, proj_size=2, activation="relu"),
            "'tanh' and clip None; they are 'relu' and None",
        ),
        (lambda x: jaxgru.init_rnn(KEY, 3, True), "hidden_dim is True; it must be a whole number"),
        (lambda x: jaxgru.init_gru(KEY, 0, 4), "in_features is 0; it must be a whole number"),
        (lambda x: jaxgru.init_lstm(KEY, 3, 4.0), "hidden_dim is 4.0; it must be a whole number"),
        (
            lambda x: jaxgru.init_gru(KEY, 3, 4, reset_gate="never"),
            "reset_gate is 'never'; it must be one of before, after",
        ),
        (
            lambda x: jaxgru.init_gru(KEY, 3, 4, dtype=int),
            "dtype is <class 'int'>; it must be a fl",
        ),
        (
            lambda x: jaxgru.init_rnn(KEY, 3, 4, dtype="foo"),
            "dtype is 'foo'; it must be a floating",
        ),
        (
            lambda x: jaxgru.unroll(GRU.replace(W=jnp.ones((F, 3 * H), jnp.int32)), x),
            "a weight in layers is int32; it must be a floating-point array",
        ),
        (
            lambda x: jaxgru.unroll([jax.tree.map(lambda w: w.tolist(), GRU)], x),
            "a weight in layers is a float; it must be a floating-point array",
        ),
        (lambda x: jaxgru.initial_carry(GRU.replace(b="a"), 2), "a weight in layers is a str; it"),
        (
            lambda x: jaxgru.unroll(GRU, x, dropout=jaxgru.Dropout(KEY, "a", "state")),
            "the dropout rate is 'a'; it must be at least 0 and below 1",
        ),
        (lambda x: jaxgru.unroll(GRU, x, implementation="fast"), "the implementation is 'fast'"),
        (
            lambda x: jaxgru.step(GRU, x[:, 0], jnp.zeros((2, H)), implementation="fast"),
            "the implementation is 'fast'; it must be one of auto, scan, autodiff",
        ),
        (
            lambda x: jaxgru.bidirectional(GRU, GRU, x, time_major="no"),
            "time_major is a str; it must be True or False",
        ),
        (
            lambda x: jaxgru.init_gru(KEY, 3, 4, second_bias="no"),
            "second_bias is a str; it must be True or False",
        ),
        (
            lambda x: jaxgru.unroll(GRU, x, lengths=[2**70, 1]),
            "lengths contains a whole number that is too large",
        ),
        (
            lambda x: jaxgru.unroll(GRU, x, lengths=[2**40, 1]),
            "lengths range from 1 to 1099511627776; they must be in 0 … T = 3",
        ),
        (
            lambda x: jaxgru.unroll(
                GRU, x, dropout=jaxgru.Dropout(KEY, 0.5, "state", first_row=-1)
            ),
            "first_row of the dropout is -1; it must be a whole number from 0 to 4294967295",
        ),
        (
            lambda x: jaxgru.unroll(
                GRU, x, dropout=jaxgru.Dropout(KEY, 0.5, "state", first_step=2**40)
            ),
            "first_step of the dropout is 1099511627776; it must be a whole number",
        ),
        (
            lambda x: jaxgru.unroll(
                GRU, x, remat=True, dropout=jaxgru.Dropout(KEY, 0.5, "state", first_step=-1)
            ),
            "first_step of the dropout is -1; it must be a whole number",
        ),
        (
            lambda x: jaxgru.unroll(GRU, x, dropout=x),
            "dropout is an array, float32 (2, 3, 3); it must be a Dropout(",
        ),
        (
            lambda x: jaxgru.initial_carry(GRU, x),
            "batch_size is an array, float32 (2, 3, 3); it must be a whole number",
        ),
        (
            lambda x: jaxgru.unroll(GRU, x, implementation=["scan"]),
            "implementation is ['scan']; it",
        ),
        (
            lambda x: jaxgru.step(GRU, x, jnp.zeros((2, H))),
            "the carry's shapes are (2, 4), but these layers and the batch (2, 3) need (2, 3, 4)",
        ),
        (
            lambda x: jaxgru.step(GRU, x[0, 0, 0], jnp.zeros(H)),
            "x is float32 (); it must be floating-point, (B, F)",
        ),
        (
            lambda x: jaxgru.bidirectional([GRU, GRU], [GRU], x),
            "there are 2 forward and 1 backward layers",
        ),
        (
            lambda x: jaxgru.bidirectional(GRU, [GRU], x),
            "only one direction is a list of layers; both must be, or neither",
        ),
    ],
)
def test_bad_input_is_one_sentence(call, says):
    with unchecked(), pytest.raises(ValueError) as raised:
        call(jnp.ones((2, 3, F), jnp.float32))
    assert says in str(raised.value) and "\n" not in str(raised.value)


def test_the_arrays_of_other_libraries():
    """PyTorch's, and NumPy's: the numbers are those of the same JAX arrays."""
    x, lengths = np.arange(2 * 3 * F).reshape(2, 3, F) / 9, np.array([3, 1])
    flags = np.array([[False, True, False]] * 2)
    (layer,) = stack_of("gru", 1)
    expected = jaxgru.unroll(layer, jnp.asarray(x), lengths=lengths, reset=flags)
    arrays = map(torch.tensor, (x, lengths, flags))
    with unchecked():  # the annotations say JAX's and NumPy's
        x, lengths, flags = arrays
        seen = jaxgru.unroll(layer, x, lengths=lengths, reset=flags)
    chex.assert_trees_all_equal(seen, expected)


def test_parameters_that_contradict_each_other_are_refused_in_use_only():
    """A tree of them may hold anything: linen's `tabulate` and `tree.map` put other leaves in."""
    jax.tree.map(lambda leaf: 0, GRU, is_leaf=lambda leaf: leaf is None)
    wrong = GRU.replace(cn=jnp.zeros(5))
    with pytest.raises(ValueError, match="the parameters of layer 0 do not fit together"):
        jaxgru.unroll(wrong, jnp.ones((1, 1, F)))


# What a setting may forbid or get wrong, seen when a program is traced: nothing is compiled
def shapes_of(kind, dtype):
    """A layer's shapes: its biases in `dtype`, its matrices in bfloat16."""
    layer = jax.eval_shape(partial(INIT[kind], jax.random.key(0), F, H, dtype=dtype))
    narrow = lambda leaf: leaf.update(dtype=jnp.bfloat16) if leaf.ndim > 1 else leaf
    return jax.tree.map(narrow, layer)


def wide_carry(layer):
    shapes = jax.eval_shape(lambda layer: jaxgru.initial_carry(layer, 2), layer)
    return jax.tree.map(lambda leaf: leaf.update(dtype=jnp.float32), shapes)


def gradient_shapes(function, *arguments):
    scalar = lambda *a: sum(jnp.sum(y.astype(jnp.float32)) for y in jax.tree.leaves(function(*a)))
    return jax.eval_shape(jax.grad(scalar, tuple(range(len(arguments)))), *arguments)


ALL_OPTIONS = dict(
    reset=np.array([[False, True, False]] * 2),
    lengths=np.array([3, 2]),
    reverse=True,
    return_carries=True,
    dropout=jaxgru.Dropout(jax.random.key(0), 0.4, "state"),
)


@pytest.mark.parametrize("implementation", ["auto", *slow("autodiff")])
@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float32")])
@pytest.mark.parametrize("kind", EVERY)
def test_promotes_nothing_implicitly_and_gradients_have_their_arguments_dtypes(
    kind, dtype, implementation
):
    """With narrow matrices, layers of bfloat16 that carry float32, and every option at once."""
    layer, x = shapes_of(kind, dtype), jax.ShapeDtypeStruct((2, 3, F), "float32")
    carry = initial = wide_carry(layer)
    run = partial(jaxgru.unroll, implementation=implementation)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for function, arguments in (
            (run, (layer, x, carry)),
            (lambda *a: run(*a[:3], initial=a[3], **ALL_OPTIONS), (layer, x, carry, initial)),
            (
                lambda layer, x, carry: jaxgru.step(
                    layer, x[:, 0], carry, reset=x[:, 0, 0] > 0, implementation=implementation
                ),
                (layer, x, carry),
            ),
            (
                lambda layer, x: jaxgru.bidirectional(
                    layer, layer, x, lengths=np.array([3, 2]), implementation=implementation
                ),
                (layer, x),
            ),
        ):
            seen = gradient_shapes(function, *arguments)
            assert jax.tree.map(lambda leaf: leaf.dtype, seen) == jax.tree.map(
                lambda leaf: leaf.dtype, arguments
            )


def test_without_jit():
    """`JAX_DISABLE_JIT=1`: what a debugger shows is what is computed."""
    layer, x = stack_of("gru", 1), random_like(np.zeros((1, 2, F)), 1)
    loss = lambda layer, x: jaxgru.unroll(layer, x)[0].sum()
    expected = jax.grad(loss)(layer, x)
    with jax.disable_jit():
        chex.assert_trees_all_close(jax.grad(loss)(layer, x), expected, rtol=1e-12)


def test_an_error_in_a_users_cell_is_the_users():
    """Not one about parameters that do not fit."""

    @cells.struct
    class Odd(cells.Cell):
        b: jax.Array
        sizes = lambda self: (F, H)

        def step(self, layout, h, x):
            raise TypeError("mine")

    with pytest.raises(TypeError, match="^mine"):
        jaxgru.unroll(Odd(jnp.zeros(H)), jnp.ones((1, 1, F)))


# --- Arrays that JAX does not have


@pytest.mark.parametrize("dtype", [np.longdouble, object, "U1", "M8[s]", ">f4", [("a", "f4")]])
@pytest.mark.parametrize("argument", ["layers", "x", "carry", "initial", "reset", "lengths"])
def test_arrays_that_jax_does_not_have_are_refused(argument, dtype):
    shapes = dict(x=(2, 3, F), carry=(2, H), initial=(H,), reset=(2, 3), lengths=(2,))
    wrong = np.zeros(shapes.get(argument, (3 * H,)), dtype)
    arguments: dict = dict(layers=GRU, x=jnp.ones((2, 3, F)))
    arguments[argument] = GRU.replace(b=wrong) if argument == "layers" else wrong
    with unchecked(), pytest.raises(ValueError) as raised:
        jaxgru.unroll(**arguments)
    assert "\n" not in str(raised.value) and str(np.dtype(dtype)) in str(raised.value)


# --- Forward mode


def test_forward_mode_through_a_step():
    """A slope against that of reverse mode; without "autodiff", one sentence says so."""
    (layer,), x = stack_of("lstm", 1), random_like(np.zeros((2, F)), 1)
    carry, along = (random_like(jaxgru.initial_carry(layer, 2), i) for i in (2, 3))
    loss = lambda carry, **options: jnp.sum(jaxgru.step(layer, x, carry, **options)[0] ** 2)
    plain = partial(loss, implementation="autodiff")
    _, slope = jax.jvp(plain, (carry,), (along,))
    expected = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, jax.grad(loss)(carry), along)))
    np.testing.assert_allclose(slope, expected, rtol=1e-12)
    for function in (loss, lambda c: jaxgru.unroll(layer, x[:, None], c)[0].sum()):
        with pytest.raises(TypeError, match='it needs implementation="autodiff"') as raised:
            jax.jvp(function, (carry,), (along,))
        assert "\n" not in str(raised.value)
    guide = Path(__file__).parents[2].joinpath("docs/guide/layer.md").read_text(encoding="utf-8")
    for call in (
        lambda: jax.jvp(jax.jit(loss), (carry,), (along,)),
        lambda: jax.linearize(loss, carry)[1](along),
    ):
        with pytest.raises(TypeError) as raised:
            call()
        assert f"`TypeError: {raised.value}`" in guide


@pytest.mark.parametrize("kind", GRU_FIRST)
def test_forward_mode_through_a_gradient(kind):
    """A Hessian times a vector, by the hand-written gradient as by JAX's."""
    at = stack_of(kind, 1), random_like(np.zeros((3, 5, F)), 1)
    reset, along = np.arange(15).reshape(3, 5) % 4 == 2, random_like(at, 2)

    def product(implementation):
        options = dict(reset=reset, implementation=implementation)
        loss = lambda *at: jnp.sum(jaxgru.unroll(*at, **options)[0] ** 2)
        return jax.jit(lambda at: jax.jvp(jax.grad(loss, (0, 1)), at, along)[1])(at)

    chex.assert_trees_all_close(product("auto"), product("autodiff"), rtol=1e-10, atol=1e-10)


# --- Episodes and padding


@pytest.mark.parametrize("reverse", [True, *slow(False)])
@pytest.mark.parametrize("padding", [{}, {"lengths": [5, 3]}, {"mask": [[0, 1, 0, 1, 1], [1] * 5]}])
def test_each_episode_cut_out(padding, reverse):
    """The real steps of each episode, as a sequence of their own; dones as floats."""
    (layer,), x = stack_of("gru", 1), np.array(random_like(np.zeros((2, 5, F)), 1))
    run = jax.jit(partial(jaxgru.unroll, layer, reverse=reverse))
    starts = np.array([[1, 0, 1, 1, 0], [1, 0, 1, 0, 0]], np.float32)
    padding = {name: np.array(value) for name, value in padding.items()}
    real = np.array(padding.get("mask", np.ones((2, 5))), bool)
    real &= np.arange(5) < padding.get("lengths", np.array([5, 5]))[:, None]
    y = np.array(jaxgru.unroll(layer, x, reset=starts, reverse=reverse, **padding)[0])
    assert not y[~real].any()
    for b in range(2):
        for episode in set(np.cumsum(starts[b])):
            steps = real[b] & (np.cumsum(starts[b]) == episode)
            if steps.any():
                alone, _ = run(x[b, steps])
                np.testing.assert_allclose(y[b, steps], alone, rtol=1e-12)


def test_the_carry_after_the_last_step_that_was_read():
    """Backward, that of step 0, though it begins an episode, and that of the first real step.

    A reset at a padded step counts with a mask, not with lengths; parts of a sequence then give
    what the whole gives.
    """
    (layer,), x = stack_of("gru", 1), random_like(np.zeros((1, 4, F)), 1)
    carry, starts = jnp.ones((1, H)), np.array([[True, False, False, True]])
    run = partial(jaxgru.unroll, layer, x, carry, reset=starts)
    y, end = run(reverse=True)
    np.testing.assert_array_equal(end, y[:, 0])
    y, end = run(reverse=True, mask=np.array([[False, False, True, False]]))
    np.testing.assert_array_equal(end, y[:, 2])
    only, _ = jaxgru.unroll(layer, x[:, 2:3])  # the carry is of the episode that begins at step 3
    np.testing.assert_allclose(y[:, 2:3], only, rtol=1e-12)
    _, end = run(mask=np.array([[True, True, True, False]]))
    assert not end.any()
    y, end = run(lengths=np.array([3]))
    np.testing.assert_array_equal(end, y[:, 2])


def test_one_sequence_without_a_batch():
    """Every argument and result lacks the axis; the numbers are those of a batch of one."""
    layers, x = stack_of("lstm", 2), random_like(np.zeros((1, 5, F)), 1)
    carry, initial = (random_like(jaxgru.initial_carry(layers, 1), i) for i in (2, 3))
    flags = dict(reset=np.array([[0, 1, 0, 1, 0]]), mask=np.array([[1, 1, 0, 1, 1]]))
    first = lambda tree: jax.tree.map(lambda leaf: leaf[0], tree)
    options = dict(return_carries=True, dropout=jaxgru.Dropout(jax.random.key(0), 0.4, "state"))
    whole = jaxgru.unroll(layers, x, carry, initial=initial, **flags, **options)
    for time_major in (False, True):
        alone = jaxgru.unroll(
            layers, x[0], first(carry), initial=first(initial), **first(flags), **options,
            time_major=time_major,
        )  # fmt: skip
        chex.assert_trees_all_equal(alone, first(whole))
    both = jaxgru.bidirectional(layers[0], layers[0], x, lengths=np.array([3]), return_carries=True)
    alone = jaxgru.bidirectional(
        layers[0], layers[0], x[0], lengths=np.array(3), return_carries=True
    )
    chex.assert_trees_all_equal(alone, first(both))
    h, after = jaxgru.step(layers, x[0, 0], first(carry), reset=np.array(True))
    whole = jaxgru.step(layers, x[:, 0], carry, reset=np.array([True]))
    chex.assert_trees_all_equal((h, after), first(whole))


@pytest.mark.parametrize("kind", ["lstm", *slow("gru")])
def test_two_directions_are_each_direction(kind):
    """With resets, padding, carries, `initial`: layer by layer, and as gradients."""
    (first,) = stack_of(kind, 1)
    second = jax.eval_shape(lambda: INIT[kind](jax.random.key(0), 2 * H, H, dtype=jnp.float64))
    layers = [first, random_like(second, 5)]
    back = [random_like(first, 6), random_like(second, 7)]
    x = random_like(np.zeros((2, 5, F)), 1)
    carry, initial = (
        tuple(random_like(jaxgru.initial_carry(layers, 2), i + k) for k in (0, 1)) for i in (2, 8)
    )
    flags = dict(reset=np.array(AMID), mask=np.array(HOLES))

    def ours(layers, back, x, carry, initial):
        return jaxgru.bidirectional(
            layers, back, x, carry, initial=initial, return_carries=True, **flags
        )

    def each(layers, back, x, carry, initial):
        ends, every = ([], []), ([], [])
        for i in range(2):
            ys = []
            for d, layer in enumerate((layers[i], back[i])):
                y, end, of_steps = jaxgru.unroll(
                    layer, x, carry[d][i], initial=initial[d][i], reverse=bool(d),
                    return_carries=True, **flags,
                )  # fmt: skip
                ys.append(y)
                ends[d].append(end)
                every[d].append(of_steps)
            x = jnp.concatenate(ys, -1)
        return x, tuple(map(tuple, ends)), tuple(map(tuple, every))

    arguments = layers, back, x, carry, initial
    chex.assert_trees_all_close(
        *(jax.jit(partial(gradients, run))(*arguments) for run in (ours, each)), rtol=1e-12
    )


@pytest.mark.slow
def test_segments_computed_anew_need_little_memory():
    """XLA's own plan of a gradient, as docs/guide/layer.md tells it: 47 and 3.7 MB."""

    def planned(remat):
        layer, x = jaxgru.init_gru(KEY, 16, 128), jax.ShapeDtypeStruct((4, 4096, 16), jnp.float32)
        loss = lambda layer, x: jaxgru.unroll(layer, x, remat=remat)[1].sum()
        program = jax.jit(jax.grad(loss)).lower(layer, x).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert 8 * planned(True) < planned(False)


# --- A dropout rate that is traced


@pytest.mark.parametrize("kind", ["each_step", *slow("zoneout", "variational")])
def test_a_traced_dropout_rate(kind):
    (layer,), x = stack_of("gru", 1), random_like(np.zeros((2, 3, F)), 1)
    dropout = partial(jaxgru.Dropout, jax.random.key(1), site="state", kind=kind)
    run = lambda rate, x=x: jaxgru.unroll(layer, x, dropout=dropout(rate=rate))[0]
    rates = jnp.array([0.0, 0.4, 0.75, 1.0, -0.1])
    seen = jax.jit(jax.vmap(run))(rates)
    for y, rate in zip(seen[:3], (0.0, 0.4, 0.75), strict=True):
        np.testing.assert_allclose(y, run(rate), rtol=1e-12)
        np.testing.assert_array_equal(run(jnp.asarray(rate)), run(rate))
    assert np.isnan(seen[3:, :, 1 if kind == "variational" else 0 :]).all()
    np.testing.assert_array_equal(run(jnp.int32(0)), run(0.0))
    with jax.numpy_dtype_promotion("strict"):
        run(jnp.bfloat16(0.3))
    for dtype in ("float16", "bfloat16"):  # the rate is what the dtype makes of 0.3
        rate = jnp.asarray(0.3, dtype)
        # 1/(1 − p); on an H200, a program rounds it once more, 1.3 units in the last place off
        rtol = 1e-7 if jax.default_backend() == "cpu" else 2**-22
        first = lambda rate: run(rate, x[:, :1])  # later steps could enlarge a rounding
        np.testing.assert_allclose(jax.jit(first)(rate), first(float(rate)), rtol=rtol)
        np.testing.assert_array_equal(run(np.asarray(rate)[()]), run(float(rate)))
