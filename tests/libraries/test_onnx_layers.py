"""Layers as ONNX's graphs, which onnxruntime computes; any graph's weights as layers."""

from __future__ import annotations

import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import LAYERS, layer, normal, precision, randomized, refused
from jax.ad_checkpoint import checkpoint_name
from random_models import same_bits

import jaxgru
from jaxgru.cells import RNNCell, init_mlp, init_rnn, struct
from jaxgru.libraries import LibraryError

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from jaxgru.libraries.onnx import from_onnx, to_onnx  # noqa: E402
from jaxgru.libraries.onnx_graph import B as symbolic_B  # noqa: E402
from jaxgru.libraries.onnx_graph import Graph  # noqa: E402

TOLERANCE = 1e-5  # some roundings of values of about 1
KEY = jax.random.key(0)
GRU = layer("gru")
GRU6 = layer("gru", 6)


def runtime(model):
    """A function from inputs, in the graph's order, to the outputs."""
    if model.producer_name:  # it is ours
        onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [value.name for value in model.graph.input]
    return lambda *inputs: session.run(None, dict(zip(names, map(np.asarray, inputs), strict=True)))


def close(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), theirs, strict=True):
        assert a.shape == b.shape and b.dtype == np.float32
        np.testing.assert_allclose(b, a, TOLERANCE, TOLERANCE)


def unrolled(sides, x, *carry, **options):
    """What jaxgru computes of layers in one direction or two, each a stack."""
    if len(sides) == 2:
        return jaxgru.bidirectional(*sides, x, *carry, **options)
    return jaxgru.unroll(sides[0], x, *carry, **options)


def in_float64(function, *inputs, **flags):
    """The results in float64, once for all batches, whose rows do not see one another."""
    with jax.enable_x64(True):
        double = lambda leaf: jnp.asarray(leaf, jnp.float64)
        return function(*jax.tree.map(double, inputs), **flags)


# --- Cells, by their equations


@struct
class ReluRNN(RNNCell):
    """Somebody's own cell, which ONNX's RNN is not, with an array of the open sizes."""

    def inputs(self, x):
        x_1 = jnp.concatenate([x, jnp.ones((*x.shape[:-1], 1), x.dtype)], -1)
        return x_1 @ jnp.concatenate([self.W, self.b[None]])

    def step(self, layout, h, a):
        return jax.nn.relu(a + layout.times(self.U, h))


@struct
class Nested(RNNCell):
    """A carry within a carry."""

    def zero_carry(self, batch_size):
        h = super().zero_carry(batch_size)
        return h, (h[:, 1:], {"before": h})

    def step(self, layout, carry, a):
        h, (rest, old) = carry
        new = jax.checkpoint(jnp.tanh)(a + layout.times(self.U, h) + old["before"])
        return new, (rest * new[:, 1:], {"before": h})


@struct
class Counting(RNNCell):
    """Whole numbers and flags in a carry."""

    def zero_carry(self, batch_size):
        h = super().zero_carry(batch_size)
        return h, jnp.zeros(batch_size, jnp.int32), h > 0

    def step(self, layout, carry, a):
        h, steps, flags = carry
        new = jax.lax.select_n(jax.lax.min(steps, 2)[:, None] + 0 * a.astype(int), a, h - a, h)
        return jnp.where(flags, new, a), steps + 1, jnp.where(flags, new > 0, a > 0)


def of_class(cls):
    return lambda *args, **options: cls(**vars(init_rnn(*args, **options)))


CELLS = LAYERS | {
    "a subclass": of_class(ReluRNN),
    "nested": of_class(Nested),
    "mlp": partial(init_mlp, context_length=3),
    "gru of blocks": partial(jaxgru.init_gru, num_blocks=2, second_bias=True),
    "lstm of blocks": partial(jaxgru.init_lstm, num_blocks=3),
    "gru, layer norm": partial(jaxgru.init_gru, layer_norm=True),
    "lstm, layer norm": partial(jaxgru.init_lstm, layer_norm=True, num_blocks=2),
    "projection": partial(jaxgru.init_lstm, proj_size=3),
    "min_gru": jaxgru.init_min_gru,
    "min_lstm": jaxgru.init_min_lstm,
    "rg_lru": partial(jaxgru.init_rg_lru, num_blocks=2),
    "slstm": partial(jaxgru.init_slstm, num_blocks=2),
    "mogrifier_gru": partial(jaxgru.init_mogrifier_gru, rank=2),
}


def drawn(kind, E=4, H=6, seed=0):
    """A layer whose every weight and bias is random."""
    layer = randomized(jax.eval_shape(lambda: CELLS[kind](KEY, E, H)), seed)
    if kind != "rg_lru":
        return layer
    # ONNX Runtime's Sigmoid has an absolute error, which √(1 − a²) of a closed gate magnifies
    return jax.tree.map(lambda weight: 0.5 * weight, layer)


PLAIN = {
    "Abs", "Add", "Concat", "Div", "Equal", "Exp", "Expand", "Identity", "Less", "Log", "MatMul",
    "Max", "Min", "Mul", "Neg", "Not", "Reciprocal", "ReduceSum", "Reshape", "Shape", "Sigmoid",
    "Slice", "Split", "Sqrt", "Sub", "Tanh", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip


@pytest.mark.parametrize("kind", CELLS)
def test_a_step(kind):
    """Of plain operators; some rows are reset; of any number of rows."""
    p = drawn(kind)
    x = normal(7, 4, dtype=np.float32)
    reset = np.arange(7) % 3 == 1
    carry = randomized(jax.eval_shape(lambda: jaxgru.initial_carry(p, 7)))
    ours = in_float64(partial(jaxgru.step, reset=reset), p, x, carry)
    model = to_onnx(p, form="step", reset=True)
    assert {node.op_type for node in model.graph.node} <= PLAIN
    assert [value.name for value in model.graph.input][:2] == ["x", "reset"]
    run = runtime(model)
    for B in (1, 2, 7):

        def rows(tree, B=B):
            return jax.tree.map(lambda leaf: leaf[:B], tree)

        close(rows(ours), run(*rows([x, reset, *jax.tree.leaves(carry)])))


PADDED = [5, 0, 2, 1, 3, 4, 5]


@pytest.mark.parametrize(
    "kinds, directions, lengths, B, T, H",
    [
        (["gru", "gru"], 2, [8, 0, 3], 3, 8, 6),
        (["lstm", "lstm"], 2, [8, 0, 3], 3, 8, 6),
        (["rnn"], 2, [1], 1, 1, 1),
        (["rnn, relu", "rnn"], 2, [8, 0, 3], 3, 8, 6),
        (["rnn", "rnn"], -1, [2, 5, 0], 3, 8, 33),
        (["gru after"], 1, [2, 5, 0], 3, 8, 6),
        (["gru after, relu", "lstm, relu"], 1, None, 3, 8, 6),
        (["gru after, second bias", "lstm", "rnn"], 1, None, 3, 8, 6),
        *(([kind], 2, PADDED, 7, 5, 6) for kind in CELLS if kind not in LAYERS),
    ],
)
def test_the_same_numbers(kinds, directions, lengths, B, T, H):
    """In onnxruntime, of a stack, from any carry; ours in float64; also of one row."""
    two = directions == 2
    takes = [4, *[H * (1 + (directions == 2))] * len(kinds)]
    sides = [
        tuple(drawn(kind, takes[i], H, seed=7 * d + i) for i, kind in enumerate(kinds))
        for d in range(1 + two)
    ]
    x = normal(B, T, 4, dtype=np.float32)
    carry = jax.eval_shape(lambda: tuple(jaxgru.initial_carry(s, B) for s in sides))
    carry = randomized(carry if two else carry[0])
    lengths = {} if lengths is None else {"lengths": np.array(lengths, np.int32)}
    reverse = {} if two else {"reverse": directions == -1}
    ours = in_float64(partial(unrolled, **lengths, **reverse), sides, x, carry)
    run = runtime(to_onnx(sides if two else sides[0], lengths=bool(lengths), **reverse))
    for rows in (B, 1):
        inputs = [x, *lengths.values(), *jax.tree.leaves(carry)]

        def first(tree, rows=rows):
            return jax.tree.map(lambda leaf: leaf[:rows], tree)

        close(first(ours), run(*first(inputs)))


@pytest.mark.parametrize("form", ["step", "sequence"])
def test_a_residual_stack_of_several_cells(form):
    """A reset sets another state than zeros; with padding, it does not count there."""
    layers = jaxgru.ResidualStack((drawn("lstm"), drawn("gru", 6), drawn("min_gru", 6)))
    x = normal(3, 4, 4, dtype=np.float32)
    reset = np.random.default_rng(3).random((3, 4)) < 0.5

    def like(B):
        return jax.eval_shape(lambda: jaxgru.initial_carry(layers, B))

    carry = randomized(like(3))
    initial = randomized(like(1), seed=1)
    initial = jax.tree.map(lambda leaf: leaf[0], initial)
    options = {"lengths": np.array([4, 1, 2], np.int32)}
    run = jaxgru.unroll
    if form == "step":
        x = x[:, 0]
        reset = reset[:, 1]
        options = {}
        run = jaxgru.step
    flags = dict(reset_carry=initial, reset=reset, **options)
    model = to_onnx(layers, form=form, reset=True, reset_carry=initial, lengths=bool(options))
    theirs = runtime(model)(x, *options.values(), reset, *jax.tree.leaves(carry))
    close(in_float64(run, layers, x, carry, **flags), theirs)


def test_weights_are_in_a_graph_once_and_unchanged():
    p = drawn("mogrifier_gru")
    x = normal(1, 1, 4, dtype=np.float32)
    model = to_onnx(p)
    close(jaxgru.unroll(p, x), runtime(model)(x, np.zeros((1, 6), np.float32)))
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    for name, weight in vars(p).items():
        assert same_bits(stored.pop(f"layers.0.{name}"), np.asarray(weight))
    assert sum(a.size for a in stored.values() if a.dtype == np.float32) == 2  # 1.0 and 2.0


def test_whole_numbers_and_flags_in_a_carry():
    p = Counting(**vars(layer("rnn")))
    x = normal(3, 5, 4, dtype=np.float32)
    theirs = runtime(to_onnx(p))(x, *jax.tree.leaves(jaxgru.initial_carry(p, 3)))
    chex.assert_trees_all_close(jax.tree.leaves(jaxgru.unroll(p, x)), theirs, rtol=1e-5, atol=1e-5)
    assert [a.dtype for a in theirs] == [np.float32, np.float32, np.int32, bool]


def test_names_of_two_directions():
    model = to_onnx(([layer("lstm")], [layer("lstm")]), lengths=True)
    carry = [f"carry.{way}.0.{part}" for way in ("forward", "backward") for part in "hc"]
    assert [value.name for value in model.graph.input] == ["x", "lengths", *carry]


@pytest.mark.parametrize(
    "kind, dtype",
    [*((kind, np.float32) for kind in LAYERS), ("gru after, second bias", np.float64)],
)
def test_bit_for_bit(kind, dtype):
    """Both directions of a stack; absent second biases become zeros."""
    with precision(dtype):
        ahead, back = (
            [layer(kind, E, 3, dtype, seed=2 * d + i) for i, E in enumerate((2, 6))]
            for d in range(2)
        )
        nodes = from_onnx(to_onnx((ahead, back)))
        read = [*(n.layer for n in nodes), *(n.backward for n in nodes)]
        for p, q in zip([*ahead, *back], read, strict=True):
            if "gru" in kind and p.c is None:
                assert not q.c.any()
                q = q.replace(c=None)
            assert same_bits(p, q)


def of(layers, **options):
    return lambda: to_onnx(layers, **options)


test_refusals = refused(
    (of([]), "there is no layer"),
    (of([{}]), "dict cannot be converted; a layer is what init_gru returns"),
    (of([[GRU], [layer("rnn")]]), "directions of layer 0 must be of one kind and size, with the"),
    (of([[GRU, GRU6], [GRU, GRU6]]), "has 12 features per step; layer 1 takes 6"),
    (of([[GRU], [GRU]], reverse=True), "in both directions already"),
    (of(GRU, form="steps"), "form is 'steps'; it must be one of sequence, step"),
    (of(GRU, form="step", lengths=True), "a step reads neither backward nor lengths"),
    (of(GRU, reset=True, reverse=True), "read backward take no resets, so reset must"),
    (of(GRU, reset_carry=np.zeros(6)), "reset_carry is what a reset sets, so reset must be True"),
    (of(GRU, reset=True, reset_carry=np.zeros(5)), "the shapes of reset_carry are .5,.; these"),
    (of((jaxgru.ResidualStack((GRU,)), [GRU])), "only one direction is a ResidualStack"),
    (of(GRU.replace(W=jnp.bfloat16(GRU.W))), "are bfloat16 and float32; they must be"),
)


# --- Functions: right, or refused


# What a cell of somebody else's may compute of a (B, 4)
FUNCTIONS = [
    jax.nn.softmax, jax.nn.standardize, jax.nn.sigmoid, jax.nn.gelu, jnp.sign, jnp.floor,
    jnp.ceil, jnp.abs, jnp.negative,
    lambda a: a,
    lambda a: a * a - 2 * a,
    lambda a: jax.lax.div(a, jnp.full_like(a, 2)),
    lambda a: jnp.clip(a, -1, 1) ** 3,
    lambda a: jax.lax.clamp(jnp.zeros((), a.dtype), a, jnp.ones((), a.dtype)),
    lambda a: jnp.where((a > 0) & ~(a >= 1) | (a != a[:, :1]), a, jnp.ones_like(a)),
    lambda a: jax.lax.erf(a) ** 2 * a.max(-1, keepdims=True) - a.min(-1)[:, None],
    lambda a: a.sum(()) + a.prod(()) + a.max(()) + a.min(()) + a.sum(1, keepdims=True),
    lambda a: a.reshape(-1, 2, 2).prod((1, 2)),
    lambda a: jax.lax.max(a, jnp.full_like(a, 1)),
    lambda a: (a < a[:, :1]) ^ (a <= a[:, 1:2]),
    lambda a: jax.lax.select_n(a > 0, a, a[:, :1] + jnp.zeros_like(a)),
    lambda a: jax.lax.select_n((a > 0).astype(int), a, jnp.zeros_like(a)),
    lambda a: jax.lax.select_n((a > 0).astype(int) + (a > 1), a, a[:, :1] + jnp.zeros_like(a), a),
    lambda a: jax.lax.select_n(a > 0, a),
    lambda a: jax.lax.reshape(a, (4, a.shape[0]), (1, 0)),
    lambda a: jax.checkpoint(lambda a: checkpoint_name(a + 1, "a"))(a),
    lambda a: a * jax.random.randint(KEY, (4,), 1, 9),
    lambda a: jnp.stack([a[:, 1], a[:, -1]], 1)[:, None] @ a[:, None, 1:3].swapaxes(1, 2),
    lambda a: jnp.concatenate([jnp.zeros((a.shape[0], 1)), a, jnp.pad(a, [(0, 0), (1, 0)])], 1),
    lambda a: jnp.einsum("bij,bjk->kb", a.reshape(-1, 2, 2), a.reshape(-1, 2, 2)[:, ::1]),
    lambda a: jnp.concatenate([jnp.tile(a, (1, 2)), jnp.repeat(a, 2, axis=1)], 1),
    lambda a: jnp.split(a, [1, 3], 1)[1],
    lambda a: jnp.einsum("ij,bj->ib", np.arange(8, dtype=a.dtype).reshape(2, 4), a),
]  # fmt: skip

# Of these, each digit of a small result counts. ONNX Runtime's Sigmoid is 0 below −18
ELEMENTWISE = [
    jnp.expm1, jnp.log1p, jnp.exp, jnp.log, jnp.tanh, jnp.sqrt, jnp.sin, jnp.cos, jax.lax.erf,
    jax.lax.rsqrt, jax.nn.relu, jax.nn.elu, jax.nn.selu, jax.nn.celu, jax.nn.softplus,
    jax.nn.log_sigmoid, jax.nn.mish, jax.nn.hard_tanh, jax.nn.leaky_relu, jax.nn.soft_sign,
    lambda a: jnp.logaddexp(a, 1), lambda a: a**-3, lambda a: abs(a) ** 0.3, lambda a: 2**a,
]  # fmt: skip


def in_graph(dtype, functions):
    """Those that can be written, as a function from (B, 4); and why the others cannot."""
    graph = Graph(np.zeros((), np.float32))
    refusals = []
    written = []
    a = graph.value(graph.input("a", symbolic_B, 4), symbolic_B, 4)
    for i, function in enumerate(functions):

        def of_dtype(a, f=function):
            return f(a.astype(dtype)).astype(np.float32)

        try:
            jax.eval_shape(of_dtype, np.zeros((3, 4), np.float32))
        except (TypeError, ValueError):
            continue  # JAX does not take this dtype either
        try:
            value = graph.add("A cell", of_dtype, a)
        except LibraryError as error:
            refusals.append(str(error))
        else:
            graph.node("Identity", value.name, outputs=[graph.output(f"y{i}", *value.shape)])
            written.append(of_dtype)
    return runtime(graph.model()), written, refusals


@pytest.mark.parametrize(
    "dtype, some, others",
    [
        ("float32", True, False),
        ("int32", True, False),
        ("bool", True, True),
        ("uint32", False, True),
        ("bfloat16", False, True),
    ],
)
# Some functions cast an infinity to whole numbers while JAX traces them
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_functions_of_a_dtype(dtype, some, others):
    """Some are written, or others refused, or both."""
    run, written, refusals = in_graph(dtype, FUNCTIONS)
    assert (bool(written), bool(refusals)) == (some, others)
    for B in (1, 3) if some else ():
        a = 2 * normal(B, 4, dtype=np.float32)
        close(jax.jit(lambda a: [function(a) for function in written])(a), run(a))
    says = rf"A cell computes JAX's (reduce_or|\w+ of {dtype}), which jaxgru cannot write as .*"
    assert all(re.fullmatch(says, message) for message in refusals)


def test_small_and_large():
    """To a few roundings of float32, from 1e-12 to 50 and at the poles."""
    run, written, _ = in_graph("float32", ELEMENTWISE)
    a = np.geomspace(1e-12, 50, 201)
    a = np.float32([*a, *-a, 0, -1, np.inf, -np.inf, np.nan, 88]).reshape(-1, 4)
    with jax.enable_x64(True):
        ours = jax.jit(lambda a: [function(a) for function in ELEMENTWISE])(a.astype(float))
    assert len(written) == len(ELEMENTWISE)
    for y, want in zip(run(a), ours, strict=True):
        np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-30)


def traced(function):
    graph = Graph(np.zeros((), np.float32))
    return lambda: graph.add("A cell", function, graph.value("a", symbolic_B, 4))


I8 = np.arange(4, dtype=np.int8)
I32 = np.int32
ONES = np.ones(4, np.float32)

test_functions_that_are_refused = refused(
    (traced(lambda a: jnp.cumsum(a, 1)), "A cell computes JAX's cumsum, which jaxgru cannot"),
    (traced(lambda a: a.mean(0)), "A cell computes JAX's dim_as_value"),
    (traced(lambda a: a[:, np.array([2, 0])]), "A cell computes an index that is an array"),
    (traced(lambda a: a[:, 7]), "A cell computes an index outside of its axis"),
    (traced(lambda a: a[:, ::2]), "A cell computes "),
    (traced(lambda a: abs(a + 1j)), "A cell computes JAX's add of complex64"),
    (traced(lambda a: jnp.einsum("ij,j->i", a, I8, preferred_element_type=I32)),
     "JAX's dot_general of int8"),
    (traced(lambda a: jax.lax.dot(a.astype(int), ONES, preferred_element_type=np.float32)),
     "dot_general of several"),
    (traced(lambda a: a + jnp.zeros(len(a))), r"A cell needs the batch .* write h.shape\[0\]"),
)  # fmt: skip


# --- Nodes of any graph


GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}


def graph_of(op, direction="forward", without=(), more=(), H=3, E=2, peepholes=False, **attributes):
    """A graph of one node with random weights and dynamic sizes; and its weights."""
    D = 2 if direction == "bidirectional" else 1
    rows = GATES[op] * H
    shapes = {"W": (D, rows, E), "R": (D, rows, H), "B": (D, 2 * rows)}
    shapes |= {"P": (D, 3 * H)} if peepholes else {}
    shapes |= dict(more)
    weights = {n: normal(*s, dtype=np.float32, seed=i) for i, (n, s) in enumerate(shapes.items())}
    weights = {name: weight for name, weight in weights.items() if name not in without}
    optional = ("B", "", "", "", "P") if "P" in weights else ("B",)
    names = ["x", "W", "R", *(name if name in weights else "" for name in optional)]
    outputs = ["y", "h", "c"][: 3 if op == "LSTM" else 2]
    node = helper.make_node(
        op, names, outputs, "it", hidden_size=H, direction=direction, **attributes
    )

    def value(name):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)

    stored = [numpy_helper.from_array(weight, name) for name, weight in weights.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", "B", E])
    graph = helper.make_graph([node], "g", [x], [value(name) for name in outputs], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("direction", ["reverse", "bidirectional"])
@pytest.mark.parametrize(
    "op, options",
    [
        ("GRU", {"linear_before_reset": 0}),
        ("GRU", {"linear_before_reset": 1, "activations": ["Sigmoid", "Tanh"]}),
        ("GRU", {"linear_before_reset": 1, "activations": ["Sigmoid", "Relu"]}),
        ("LSTM", {"without": "B"}),
        ("LSTM", {"activations": ["Sigmoid", "Relu", "Relu"]}),
        ("LSTM", {"peepholes": True, "H": 4}),
        ("LSTM", {"peepholes": True, "input_forget": 1, "clip": 0.25}),
        ("LSTM", {"input_forget": 1, "activations": ["Sigmoid", "Relu", "Relu"]}),
        ("RNN", {"activations": ["Relu"]}),
        ("GRU", {"linear_before_reset": 0, "clip": 0.25}),
        ("RNN", {"clip": 0.25}),
    ],
)
def test_any_node(op, options, direction):
    """Its weights compute in onnxruntime what they compute here."""
    two = direction == "bidirectional"
    if "activations" in options and two:
        names = options["activations"]  # and tanh in the other direction
        names = names + [name.replace("Relu", "Tanh") for name in names]
        options = options | {"activations": names}
    model = graph_of(op, direction, **options)
    (node,) = from_onnx(model)
    assert (node.name, node.direction) == ("it", direction)
    x = normal(5, 2, options.get("E", 2), dtype=np.float32, seed=9)
    sides = (node.layer, node.backward)[: 1 + two]
    reverse = {} if two else {"reverse": True}
    ours, ends = unrolled(sides, x, time_major=True, **reverse)
    ends = zip(*map(jax.tree.leaves, ends if two else (ends,)), strict=True)
    ours = ours.reshape(5, 2, 1 + two, -1).swapaxes(1, 2)
    close([ours, *map(np.stack, ends)], runtime(model)(x))
    (again,) = from_onnx(to_onnx([[side] for side in sides] if two else sides))
    chex.assert_trees_all_close((again.layer, again.backward), (node.layer, node.backward))


@pytest.mark.parametrize("op", GATES)
def test_batches_before_steps(op):
    """`layout` 1, which onnxruntime lacks: it turns the states, and not the weights."""
    model = graph_of(op, layout=1)
    other = graph_of(op)
    assert same_bits(from_onnx(model)[0].layer, from_onnx(other)[0].layer)
    x = normal(2, 5, 2, dtype=np.float32, seed=9)
    y = ReferenceEvaluator(model).run(["y"], {"x": x})[0]  # (B, T, D, H)
    close(jaxgru.unroll(from_onnx(model)[0].layer, x)[0], [y.reshape(2, 5, 3)])


@pytest.mark.parametrize("kind, two", [("GRU", True), ("LSTM", False), ("RNN", True)])
# PyTorch warns that this exporter is its older one, and of its own tracing
@pytest.mark.filterwarnings("ignore")
def test_what_pytorch_exports(kind, two, tmp_path):
    """Stacked: the nodes are in the layers' order; the weights are those of the module."""
    torch = pytest.importorskip("torch")
    module = getattr(torch.nn, kind)(4, 5, 3, bidirectional=two)
    x = torch.randn(6, 1, 4)
    path = tmp_path / "torch.onnx"
    torch.onnx.export(module, (x,), path, dynamo=False)
    nodes = from_onnx(path)
    assert {node.direction for node in nodes} == {"bidirectional" if two else "forward"}
    ahead = [node.layer for node in nodes]
    back = [node.backward for node in nodes]
    y, _ = unrolled((ahead, back)[: 1 + two], x.numpy(), time_major=True)
    close(y, [module(x)[0].detach().numpy()])


def test_weights_that_nodes_compute():
    """Of constants: here W is transposed, R a Constant, and B two parts."""
    model = graph_of("GRU")
    plain = graph_of("GRU")
    weights = {t.name: numpy_helper.to_array(t) for t in plain.graph.initializer}
    del model.graph.initializer[:]
    turned = numpy_helper.from_array(np.ascontiguousarray(weights["W"].swapaxes(1, 2)), "V")
    parts = [
        numpy_helper.from_array(w, f"b{i}") for i, w in enumerate(np.split(weights["B"], 2, 1))
    ]
    model.graph.initializer.extend([turned, *parts])
    before = [
        helper.make_node("Transpose", ["V"], ["W"], perm=[0, 2, 1]),
        helper.make_node("Constant", [], ["R"], value=numpy_helper.from_array(weights["R"])),
        helper.make_node("Concat", ["b0", "b1"], ["B"], axis=1),
    ]
    nodes = [*before, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    assert same_bits(from_onnx(model)[0].layer, from_onnx(plain)[0].layer)


def test_weights_in_a_file_beside(tmp_path):
    path = tmp_path / "m.onnx"
    model = graph_of("LSTM")
    want = from_onnx(model)[0].layer
    onnx.save(model, path, save_as_external_data=True, location="m.bin", size_threshold=0)
    assert same_bits(from_onnx(path)[0].layer, want)
    with pytest.raises(LibraryError, match="its W is in a file beside the graph's; pass the gr"):
        from_onnx(onnx.load(path, load_external_data=False))


test_nodes_that_are_refused = refused(*((partial(from_onnx, model), says) for model, says in (
    (graph_of("GRU", activations=["HardSigmoid", "Tanh"]),
     r"'it' has activations=\['hardsigmoid', 'tanh'\]; it must be \['sigmoid', 'tanh'\]"),
    (graph_of("LSTM", clip=-1.0), "the LSTM 'it' has clip=-1.0; it must be ab"),
    (graph_of("LSTM", more={"P": (1, 8)}), r"tensor P has shape \(1, 8\); it mus"),
    (graph_of("GRU", without="W"), "W comes from 'W', an input of the graph"),
    (onnx.ModelProto(), "cannot be used: its graph contains no GRU, LSTM or RNN node"),
)))  # fmt: skip


@pytest.mark.parametrize("two", [False, True])
def test_peepholes_of_zeros(two):
    """As a new layer has them; and, of two directions, one that has none."""
    p = jaxgru.init_coupled_lstm(KEY, 4, 6, peepholes=True)
    x = normal(3, 5, 4, dtype=np.float32)
    q = randomized(p, 1).replace(p=None)
    model = to_onnx(([p], [q]) if two else p)
    (node,) = from_onnx(model)
    assert same_bits(node.layer, p)
    if two:
        p = randomized(p, 2)
        for sides in ((p, q), (q, p)):
            model = to_onnx([[side] for side in sides])
            y, ends = jaxgru.bidirectional(*sides, x)
            zeros = jax.tree.map(jnp.zeros_like, jax.tree.leaves(ends))
            close(jax.tree.leaves((y, ends)), runtime(model)(x, *zeros))
