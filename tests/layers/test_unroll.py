"""`unroll`, `bidirectional` and `step`: what they compile to, what they take, and each other.

`test_options.py` compares the numbers of `unroll` with the cells; `test_refusals.py` has errors.
"""

import functools
import json
import math
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
from against import gradients, value_and_gradients
from against import randomized as random_like
from annotations import unchecked
from conftest import slow
from jax._src import test_util as jtu  # its counter of programs; there is no public one
from random_models import INIT

import jaxgru
from jaxgru import cells
from jaxgru.cells.layout import IN_COLUMNS, IN_ROWS
from jaxgru.layers import blocks, over_time

GRU_OR_LSTM = ["gru", "lstm", *slow("gru, reset after", "rnn")]
GRU_FIRST = ["gru", *slow(*(kind for kind in INIT if kind != "gru"))]
OTHERS = [kind for kind in INIT if "," in kind and kind != "gru, reset after"]  # of plain cells
EVERY = [*(kind for kind in INIT if kind not in OTHERS), *slow(*OTHERS)]
F = 3
H = 4
KEY = jax.random.key(0)

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch, forget_traces):
    """Of 2 steps for 3 rows, so that a sequence has several."""
    monkeypatch.setattr(blocks, "ROWS_AT_ONCE", 6)


def stack_of(kind, num_layers, seed=0):
    """Random parameters; no bias is zero."""

    def init(F):
        return INIT[kind](jax.random.key(0), F, H, dtype=jnp.float64)

    sizes = [F] + [H] * (num_layers - 1)
    return random_like([jax.eval_shape(partial(init, size)) for size in sizes], seed)


def test_which_way():
    """In columns: few rows, but not one or two, and large weights."""
    rows = [(64, 1024), (33, 1024), (3, 1024), (32, 767), (1, 8192)]
    columns = [(32, 768), (4, 768), (4, 1024), (32, 8192)]
    layout_of = lambda size: over_time.training_layout(*size).axis
    assert [*map(layout_of, rows)] == [IN_ROWS.axis] * len(rows)
    assert [*map(layout_of, columns)] == [IN_COLUMNS.axis] * len(columns)


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

    def run(layers, x):
        return jaxgru.unroll(layers, x, reverse=reverse, **padding)

    inputs = padded, jnp.nan_to_num(padded)
    seen, expected = (value_and_gradients(run, layers, x) for x in inputs)
    chex.assert_trees_all_equal(seen, expected)
    chex.assert_tree_all_finite(seen)
    one, of_one = jax.tree.map(lambda leaf: leaf[0], (padded, padding))
    with jax.debug_nans(True):  # it looks at the result of each operation outside of `jit`
        chex.assert_trees_all_close(gradients(run, layers, padded), expected, rtol=1e-12)
        alone, _ = jaxgru.unroll(layers, one, reverse=reverse, **of_one)
        both, _ = jaxgru.bidirectional(layers[0], layers[0], np.asarray(padded), **padding)
    np.testing.assert_allclose(alone, seen[0][0][0], rtol=1e-12)
    chex.assert_tree_all_finite(both)


@pytest.mark.parametrize("kind", GRU_FIRST)
def test_steps_one_by_one(kind):
    """Outputs and carries of `step`, and their gradients, are those of `unroll`."""
    layers = stack_of(kind, 2)
    x = random_like(np.zeros((2, 3, F)), 1)
    start = random_like(jaxgru.initial_carry(layers, 2), 2)
    reset = np.array([[False, True, False], [False, False, True]])
    mask = np.array([[True, False, True], [False, True, False]])

    def step_by_step(layers, x, carry):
        outputs = []
        for t in range(3):
            h, carry = jaxgru.step(layers, x[:, t], carry, reset=reset[:, t], mask=mask[:, t])
            outputs.append((h, carry))
        y, carries = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *outputs)
        return y, carry, carries

    at_once = partial(jaxgru.unroll, reset=reset, mask=mask, return_carries=True)
    seen = (value_and_gradients(run, layers, x, start) for run in (at_once, step_by_step))
    chex.assert_trees_all_close(*seen, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", GRU_OR_LSTM)
def test_what_is_not_asked_for_is_not_computed(kind):
    """Without resets and padding, nothing is chosen: neither forward nor backward."""
    layers = stack_of(kind, 2)
    x = np.zeros((2, 3, F))
    flags = dict(reset=np.zeros((2, 3), bool)), dict(lengths=np.array([3, 3]))
    for options, expected in (({}, False), *((option, True) for option in flags)):
        run = partial(jaxgru.unroll, **options)
        program = str(jax.make_jaxpr(partial(gradients, run))(layers, x))
        assert ("select_n" in program) == expected


@pytest.mark.parametrize("kind", ["lstm, blocks", *GRU_OR_LSTM])
def test_a_batch_without_rows(kind):
    """Empty outputs; weights without a gradient. Its 12 steps are computed as 6 and 6."""
    layers = stack_of(kind, 2)
    x = np.zeros((0, 12, F))
    options = dict(reset=np.zeros((0, 12), bool), lengths=np.zeros(0, int), remat=True)
    for run in (jaxgru.unroll, partial(jaxgru.unroll, **options)):
        (y, carry), of = value_and_gradients(run, layers, x)
        assert y.shape == (0, 12, H)
        chex.assert_tree_shape_prefix(carry, (0, H))
        chex.assert_trees_all_equal(of[0], jax.tree.map(jnp.zeros_like, layers))


def test_a_call_is_one_program():
    """Also with all options; the next call with the same shapes is none."""
    layers = stack_of("lstm", 2)
    x = random_like(np.zeros((2, 6, F)), 1)
    carry = jaxgru.initial_carry(layers, 2)
    options = dict(
        reset=np.zeros((2, 6), bool), lengths=np.array([3, 6]), reset_carry=carry, remat=True,
        return_carries=True, dropout=jaxgru.Dropout(KEY, 0.4, "state"),
    )  # fmt: skip
    both = partial(jaxgru.bidirectional, layers[0], layers[0])
    for call in (
        partial(jaxgru.unroll, layers, x),
        partial(jaxgru.unroll, layers, x, carry, reverse=True, **options),
        partial(both, x, **options | dict(reset_carry=None)),
        partial(jaxgru.step, layers, x[:, 0], carry, reset=np.ones(2), mask=np.zeros(2)),
    ):
        for programs in (1, 0):
            with jtu.count_jit_and_pmap_lowerings() as lowered:
                call()
            assert lowered() == programs


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_batch_axes_of_a_step_and_of_two_directions(batch):
    """(E, A) is a batch (E·A,); one sequence is a batch of one."""
    layers = stack_of("lstm", 2)
    B = math.prod(batch)
    T = 5
    x, carry = random_like((np.zeros((B, T, F)), jaxgru.initial_carry(layers, B)), 1)
    reset = np.arange(B) % 2 == 0
    lengths = np.arange(B) % T + 1

    def axes(tree):
        return jax.tree.map(lambda a: a.reshape((*batch, *a.shape[1:])), tree)

    whole = jaxgru.step(layers, x[:, 0], carry, reset=reset)
    seen = jaxgru.step(layers, *axes((x[:, 0], carry)), reset=axes(reset))
    chex.assert_trees_all_close(seen, axes(whole), rtol=1e-12, atol=1e-14)
    zeros = jaxgru.initial_carry(layers, batch)
    chex.assert_trees_all_equal(zeros, axes(jaxgru.initial_carry(layers, B)))
    both = partial(jaxgru.bidirectional, layers[1], layers[1], return_carries=True)
    x = random_like(np.zeros((B, T, H)), 3)
    seen = both(axes(x), lengths=axes(lengths))
    whole = both(x, lengths=lengths)
    chex.assert_trees_all_close(seen, axes(whole), rtol=1e-12, atol=1e-14)


def test_forms_of_the_same_call():
    """One layer is a list of one. The parts of an LSTM's state may come in a dict, in any order."""
    (layer,) = stack_of("lstm", 1)
    x = random_like(np.zeros((2, 3, F)), 1)
    start = random_like(jaxgru.initial_carry(layer, 2), 2)
    y, carry = jaxgru.unroll(layer, x, start)
    for form in (start, {"c": start.c, "h": start.h}, {"h": start.h, "c": start.c}):
        chex.assert_trees_all_equal(jaxgru.unroll([layer], x, [form]), (y, (carry,)))
        chex.assert_trees_all_close(jaxgru.step(layer, x[:, 0], form)[0], y[:, 0], rtol=1e-12)
    mapped, _ = jax.vmap(partial(jaxgru.unroll, layer))(jnp.stack([x, 2 * x]))
    chex.assert_trees_all_close(mapped[1], jaxgru.unroll(layer, 2 * x)[0], rtol=1e-12)


def test_the_arrays_of_other_libraries():
    """PyTorch's, lists, and dones as floats: the numbers are those of the same JAX arrays."""
    x = np.arange(2 * 3 * F).reshape(2, 3, F) / 9
    lengths = np.array([3, 1])
    flags = np.array([[False, True, False]] * 2)
    (layer,) = stack_of("gru", 1)
    expected = jaxgru.unroll(layer, jnp.asarray(x), lengths=lengths, reset=flags)
    forms = (
        [torch.tensor(array) for array in (x, lengths, flags)],
        [x, lengths.tolist(), flags.tolist()],
        [x, lengths, flags.astype(float)],
    )
    for x, lengths, reset in forms:
        with unchecked():  # the annotations say JAX's and NumPy's
            seen = jaxgru.unroll(layer, x, lengths=lengths, reset=reset)
        chex.assert_trees_all_equal(seen, expected)


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


# The first has a table, resets, padding and dropout; a process compiles all of the others
QUICK = "batch axes"
REST = ("gru", "gru, reset after", "gru, norm", "lstm", "lstm, projected", "rnn", "model", "flax")


@pytest.mark.parametrize("kind", [QUICK, *slow(*REST)])
def test_a_sharded_batch_stays_on_its_devices(kind):
    """Plain `jit`: no row is sent to the other device, no array holds the whole batch.

    For meshes whose axes are Auto and Explicit. And within a `shard_map` that checks which arrays
    vary over the devices.
    """
    compiled = on_two_devices(*((QUICK,) if kind == QUICK else REST))[kind]
    assert len(compiled) == (2 if kind in ("model", "flax") else 4)
    for seen in compiled.values():
        assert seen["collectives"] == ["all-reduce"]  # the sum of the weights' gradients
        assert set(seen["rows"]) <= {13, 13 * 7}  # and not 26 or 26 · 7
        assert seen["difference"] < 1e-11


def exported(function, parameters, *shapes):
    """The function, exported with the parameters as an argument, stored, and loaded again."""
    parameters = jax.eval_shape(lambda: parameters)
    program = jax.export.export(jax.jit(function))(parameters, *shapes)
    return jax.export.deserialize(program.serialize()).call


@pytest.mark.parametrize("kind, implementation", [("lstm", "auto"), ("gru", "wavefront")])
def test_export_with_symbolic_sizes(kind, implementation):
    """Batch and time are free. The wavefront, which needs sizes, falls back."""
    layers = stack_of(kind, 2)
    B, T = jax.export.symbolic_shape("B, T")
    run = partial(jaxgru.unroll, implementation=implementation)
    again = exported(run, layers, jax.ShapeDtypeStruct((B, T, F), jnp.float64))
    for sizes in ((1, 1), (3, 5)):
        x = random_like(np.zeros((*sizes, F)), 1)
        chex.assert_trees_all_close(again(layers, x), jaxgru.unroll(layers, x), rtol=1e-12)


@pytest.mark.parametrize("reverse", [False, True])
def test_export_of_padding_with_symbolic_sizes(reverse):
    """With resets, too."""
    layer = stack_of("gru", 1)[0]
    B, T = jax.export.symbolic_shape("B, T")
    run = lambda layer, x, reset, lengths: jaxgru.unroll(
        layer, x, reset=reset, lengths=lengths, reverse=reverse, return_carries=True
    )
    shapes = [((B, T, F), float), ((B, T), bool), ((B,), jnp.int32)]
    again = exported(run, layer, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    for rows, steps in ((1, 1), (3, 5)):
        x = random_like(np.zeros((rows, steps, F)), 1)
        arguments = x, x[..., 0] > 0, np.arange(rows, dtype=np.int32) % (steps + 1)
        seen = again(layer, *arguments)
        chex.assert_trees_all_close(seen, run(layer, *arguments), rtol=1e-12)


def test_export_of_a_gradient_with_a_symbolic_batch():
    layer = stack_of("gru", 1)[0]
    (B,) = jax.export.symbolic_shape("B")
    gradient = jax.grad(lambda layer, x: jnp.sin(jaxgru.unroll(layer, x)[0]).sum())
    again = exported(gradient, layer, jax.ShapeDtypeStruct((B, 2, F), jnp.float64))
    for rows in (1, 3):
        x = random_like(np.zeros((rows, 2, F)), 1)
        chex.assert_trees_all_close(again(layer, x), gradient(layer, x), rtol=1e-12)


def test_export_of_a_lookup():
    layer = stack_of("gru", 1)[0]
    run = lambda layer, x: jaxgru.unroll(layer, x)
    x = jaxgru.cells.Lookup(random_like(np.zeros((7, F)), 1), np.arange(10).reshape(2, 5) % 7)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x)
    again = exported(run, layer, shapes)
    chex.assert_trees_all_close(again(layer, x), run(layer, x), rtol=1e-12)


@pytest.mark.slow
def test_export_of_a_model_with_symbolic_sizes():
    """`apply` and `step`; few tokens, and more than the vocabulary."""
    params = jaxgru.lm.init(KEY, jaxgru.lm.ModelConfig("lstm", 5, F, H, 2), "float64")
    B, T = jax.export.symbolic_shape("B, T")

    def whole(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    of_one = jax.eval_shape(lambda: jaxgru.lm.initial_carry(params, 1))
    carry = jax.tree.map(lambda leaf: leaf.update(shape=(B, H)), of_one)
    apply = exported(jaxgru.lm.apply, params, whole(B, T), carry)
    step = exported(jaxgru.lm.step, params, whole(B), carry)
    for sizes in ((1, 1), (3, 4)):
        tokens = jnp.arange(math.prod(sizes), dtype=jnp.int32).reshape(sizes) % 5
        carry = random_like(jaxgru.lm.initial_carry(params, len(tokens)), 1)
        for again, run, x in (
            (apply, jaxgru.lm.apply, tokens), (step, jaxgru.lm.step, tokens[:, 0])
        ):  # fmt: skip
            seen = again(params, x, carry)
            expected = run(params, x, carry)
            chex.assert_trees_all_close(seen, expected, rtol=1e-12)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_a_start_has_the_precision_of_the_carry(kind):
    """A bfloat16 layer that carries float32: its gradients are those of the definition."""
    (layer,) = stack_of(kind, 1)
    x = random_like(np.zeros((2, 3, F)), 2)
    carry = random_like(jaxgru.initial_carry(layer, 2), 1)

    def in_dtype(tree, dtype):
        return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)

    layer = in_dtype(layer, jnp.bfloat16)
    carry = in_dtype(carry, jnp.float32)
    initial = jax.tree.map(lambda leaf: leaf[0], carry)
    run = partial(jaxgru.unroll, layer, x, carry, reset=np.array([[0, 1, 0], [0] * 3]))

    def y(initial, name):
        return run(reset_carry=initial, implementation=name)[0].sum()

    fast, plain = (jax.grad(y)(initial, name) for name in ("scan", "autodiff"))
    chex.assert_trees_all_close(fast, plain, rtol=0.05, atol=0.02)  # operands of 8 bits
    assert {leaf.dtype for leaf in jax.tree.leaves(fast)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("dtypes", [("float64", "float32"), ("float32", "bfloat16", "float32")])
def test_layers_of_a_stack_may_differ_in_precision(dtypes):
    """Each layer computes in its own: the stack is its layers, called one by one.

    To the rounding of the layer, or of one below it, for these are other programs.
    """
    stack = stack_of("gru", len(dtypes))
    stack = [
        jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), layer)
        for layer, dtype in zip(stack, dtypes, strict=True)
    ]
    x = random_like(np.zeros((2, 3, F)), 1)
    y, carry = jaxgru.unroll(stack, x)
    expected = x
    rounding = 0.0
    for layer, seen, dtype in zip(stack, carry, dtypes, strict=True):
        expected, end = jaxgru.unroll(layer, expected)
        rounding = max(rounding, {"float64": 1e-14, "float32": 1e-6, "bfloat16": 2**-7}[dtype])
        assert seen.dtype == dtype
        np.testing.assert_allclose(np.float64(seen), np.float64(end), atol=rounding)
    np.testing.assert_allclose(y, expected, atol=rounding)


# What a setting may forbid or get wrong, seen when a program is traced: nothing is compiled
def shapes_of(kind, dtype):
    """A layer's shapes: its biases in `dtype`, its matrices in bfloat16."""
    layer = jax.eval_shape(partial(INIT[kind], jax.random.key(0), F, H, dtype=dtype))

    def narrow(leaf):
        return leaf.update(dtype=jnp.bfloat16) if leaf.ndim > 1 else leaf

    return jax.tree.map(narrow, layer)


def wide_carry(layer):
    shapes = jax.eval_shape(lambda layer: jaxgru.initial_carry(layer, 2), layer)
    return jax.tree.map(lambda leaf: leaf.update(dtype=jnp.float32), shapes)


def gradient_shapes(function, *arguments):

    def scalar(*a):
        return sum(jnp.sum(y.astype(jnp.float32)) for y in jax.tree.leaves(function(*a)))

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
    layer = shapes_of(kind, dtype)
    x = jax.ShapeDtypeStruct((2, 3, F), "float32")
    carry = initial = wide_carry(layer)

    def with_name(function):
        return partial(function, implementation=implementation)

    run, both, one_step = map(with_name, (jaxgru.unroll, jaxgru.bidirectional, jaxgru.step))

    def with_all(layer, x, carry, initial):
        return run(layer, x, carry, reset_carry=initial, **ALL_OPTIONS)

    lengths = np.array([3, 2])
    dtypes = partial(jax.tree.map, lambda leaf: leaf.dtype)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for function, *arguments in (
            (run, layer, x, carry),
            (with_all, layer, x, carry, initial),
            (lambda p, x, c: one_step(p, x[:, 0], c, reset=x[:, 0, 0] > 0), layer, x, carry),
            (lambda p, x: both(p, p, x, lengths=lengths), layer, x),
        ):
            assert dtypes(gradient_shapes(function, *arguments)) == dtypes(tuple(arguments))


def test_without_jit():
    """`JAX_DISABLE_JIT=1`: what a debugger shows is what is computed."""
    layer = stack_of("gru", 1)
    x = random_like(np.zeros((1, 2, F)), 1)
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


# --- Forward mode


def test_forward_mode_through_a_step():
    """A slope against that of reverse mode; without "autodiff", one sentence says so."""
    (layer,) = stack_of("lstm", 1)
    x = random_like(np.zeros((2, F)), 1)
    carry, along = (random_like(jaxgru.initial_carry(layer, 2), i) for i in (2, 3))

    def loss(carry, **options):
        return jnp.sum(jaxgru.step(layer, x, carry, **options)[0] ** 2)

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
    reset = np.arange(15).reshape(3, 5) % 4 == 2
    along = random_like(at, 2)

    def product(implementation):
        options = dict(reset=reset, implementation=implementation)

        def loss(*at):
            return jnp.sum(jaxgru.unroll(*at, **options)[0] ** 2)

        return jax.jit(lambda at: jax.jvp(jax.grad(loss, (0, 1)), at, along)[1])(at)

    chex.assert_trees_all_close(product("auto"), product("autodiff"), rtol=1e-10, atol=1e-10)


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
    reset, mask = np.random.default_rng(0).random((2, 2, 5)) < [[[0.4]], [[0.6]]]
    flags = dict(reset=reset, mask=mask)

    def ours(layers, back, x, carry, initial):
        return jaxgru.bidirectional(
            layers, back, x, carry, reset_carry=initial, return_carries=True, **flags
        )

    def each(layers, back, x, carry, initial):
        ends = ([], [])
        every = ([], [])
        for i in range(2):
            ys = []
            for d, layer in enumerate((layers[i], back[i])):
                y, end, of_steps = jaxgru.unroll(
                    layer, x, carry[d][i], reset_carry=initial[d][i], reverse=bool(d),
                    return_carries=True, **flags,
                )  # fmt: skip
                ys.append(y)
                ends[d].append(end)
                every[d].append(of_steps)
            x = jnp.concatenate(ys, -1)
        return x, tuple(map(tuple, ends)), tuple(map(tuple, every))

    arguments = layers, back, x, carry, initial
    both = (value_and_gradients(run, *arguments) for run in (ours, each))
    chex.assert_trees_all_close(*both, rtol=1e-12)


@pytest.mark.slow
def test_segments_computed_anew_need_little_memory():
    """XLA's own plan of a gradient, as docs/guide/layer.md tells it: 47 and 3.7 MB."""

    def planned(remat):
        layer = jaxgru.init_gru(KEY, 16, 128)
        x = jax.ShapeDtypeStruct((4, 4096, 16), jnp.float32)

        def loss(layer, x):
            return jaxgru.unroll(layer, x, remat=remat)[1].sum()

        program = jax.jit(jax.grad(loss)).lower(layer, x).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert 8 * planned(True) < planned(False)


# --- A dropout rate that is traced


@pytest.mark.parametrize("kind", ["each_step", *slow("zoneout", "variational")])
def test_a_traced_dropout_rate(kind):
    (layer,) = stack_of("gru", 1)
    x = random_like(np.zeros((2, 3, F)), 1)
    dropout = partial(jaxgru.Dropout, jax.random.key(1), site="state", kind=kind)

    def run(rate, x=x):
        return jaxgru.unroll(layer, x, dropout=dropout(rate=rate))[0]

    rates = jnp.array([0.0, 0.4, 0.75, 1.0, -0.1])
    seen = jax.jit(jax.vmap(run))(rates)
    for y, rate in zip(seen[:3], (0.0, 0.4, 0.75), strict=True):
        np.testing.assert_allclose(y, run(rate), rtol=1e-12)
        np.testing.assert_allclose(run(jnp.asarray(rate)), run(rate), rtol=1e-12)
    assert np.isnan(seen[3:, :, 1 if kind == "variational" else 0 :]).all()
    np.testing.assert_allclose(run(jnp.int32(0)), run(0.0), rtol=1e-12)
    with jax.numpy_dtype_promotion("strict"):
        run(jnp.bfloat16(0.3))
    for dtype in ("float16", "bfloat16"):  # the rate is what the dtype makes of 0.3
        rate = jnp.asarray(0.3, dtype)
        # 1/(1 − p); on an H200, a program rounds it once more, 1.3 units in the last place off
        rtol = 1e-7 if jax.default_backend() == "cpu" else 2**-22
        first = lambda rate: run(rate, x[:, :1])  # later steps could enlarge a rounding
        np.testing.assert_allclose(jax.jit(first)(rate), first(float(rate)), rtol=rtol)
        np.testing.assert_array_equal(run(np.asarray(rate)[()]), run(float(rate)))
