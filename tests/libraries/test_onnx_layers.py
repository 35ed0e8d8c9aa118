"""Layers as ONNX's graphs, which onnxruntime computes; any graph's weights as layers."""

from __future__ import annotations

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import LAYERS, layer, normal, precision, randomized
from jax.ad_checkpoint import checkpoint_name
from random_models import same_bits

import jaxgru
from jaxgru.cells import RNNParams, init_mlp, struct
from jaxgru.libraries import InteropError

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from jaxgru.libraries.onnx import from_onnx, to_onnx  # noqa: E402
from jaxgru.libraries.onnx_graph import B as symbolic_B  # noqa: E402
from jaxgru.libraries.onnx_graph import Graph  # noqa: E402

TOLERANCE = 1e-5  # some roundings of values of about 1
KEY, GRU, GRU6 = jax.random.key(0), layer("gru"), layer("gru", 6)
MLP = init_mlp(KEY, 4, 6, context_length=3)


def runtime(model):
    """A function from inputs by name to the outputs."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda **inputs: session.run(None, {n: np.asarray(x) for n, x in inputs.items()})


def close(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), theirs, strict=True):
        assert a.shape == b.shape and b.dtype == np.float32
        np.testing.assert_allclose(b, a, TOLERANCE, TOLERANCE)


class TestOut:
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
            pytest.param(["lstm"], -1, None, 1, 3, 6, marks=pytest.mark.slow),
        ],
    )
    def test_the_same_numbers(self, kinds, directions, lengths, B, T, H):
        """In onnxruntime, of a stack, from any carry; ours in float64."""
        two = directions == 2
        stacks = [
            tuple(
                layer(kind, H * (1 + two) if i else 4, H, seed=7 * d + i)
                for i, kind in enumerate(kinds)
            )
            for d in range(1 + two)
        ]
        x = normal(B, T, 4, dtype=np.float32)
        carry = jax.eval_shape(lambda: tuple(jaxgru.initial_carry(s, B) for s in stacks))
        carry = randomized(carry if two else carry[0])
        lengths = {} if lengths is None else {"lengths": np.array(lengths, np.int32)}
        given = {} if two else {"reverse": directions == -1}
        model = to_onnx(stacks if two else stacks[0], lengths=bool(lengths), **given)
        onnx.checker.check_model(model, full_check=True)
        names = [value.name for value in model.graph.input]
        inputs = [x, *lengths.values(), *jax.tree.leaves(carry)]
        theirs = runtime(model)(**dict(zip(names, inputs, strict=True)))
        with jax.enable_x64(True):
            double = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), tree)
            stacks, x, carry = double((stacks, x, carry))
            if two:
                close(jaxgru.bidirectional(*stacks, x, carry, **lengths), theirs)
            else:
                close(jaxgru.unroll(stacks[0], x, carry, **lengths, **given), theirs)

    def test_directions_given_apart_and_names(self):
        p, q = layer("lstm"), layer("lstm", seed=1)
        model = to_onnx(p, q, lengths=True)
        assert model == to_onnx(((p,), (q,)), lengths=True)
        carry = [f"carry.{way}.0.{part}" for way in ("forward", "backward") for part in "hc"]
        assert [value.name for value in model.graph.input] == ["x", "lengths", *carry]

    @pytest.mark.parametrize("kind", LAYERS)
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_bit_for_bit(self, kind, dtype):
        """Both directions of a stack; absent second biases become zeros."""
        with precision(dtype):
            ahead, back = (
                [layer(kind, E, 3, dtype, seed=2 * d + i) for i, E in enumerate((2, 6))]
                for d in range(2)
            )
            nodes = from_onnx(to_onnx(ahead, back))
            assert [node.reads for node in nodes] == [(), (nodes[0].name,)]
            read = [*(n.layer for n in nodes), *(n.backward for n in nodes)]
            for p, q in zip([*ahead, *back], read, strict=True):
                if "gru" in kind and p.c is None:
                    assert not q.c.any()
                    q = q.replace(c=None)
                assert same_bits(p, q)

    @pytest.mark.parametrize(
        "layers, options, says",
        [
            ([], {}, "there is no layer"),
            ([{}], {}, "dict cannot be converted; a layer is what init_gru returns"),
            ([GRU, GRU], {}, "has 6 features per step; layer 1 takes 4"),
            (
                [[GRU], [layer("rnn")]],
                {},
                "directions of layer 0 must be of one kind and size, with the same opt",
            ),
            ([GRU], {"backward": [GRU, GRU]}, "there are 1 forward and 2 backward layers"),
            ([GRU, GRU6], {"backward": [GRU, GRU6]}, "has 12 features per step; layer 1 takes 6"),
            (GRU, {"backward": GRU, "reverse": True}, "in both directions already"),
            (GRU, {"form": "steps"}, "form is 'steps'; it must be one of sequence, step"),
            (GRU, {"form": "step", "lengths": True}, "a step reads neither backward nor lengths"),
            (GRU, {"reset": True, "reverse": True}, "read backward take no resets, so reset must"),
            (GRU, {"initial": np.zeros(6)}, "initial is what a reset sets, so reset must be True"),
            (GRU, {"reset": True, "initial": np.zeros(5)}, "the shapes of initial are .5,.; these"),
            ((jaxgru.ResidualStack((GRU,)), [GRU]), {}, "only one direction is a ResidualStack"),
            (GRU.replace(W=jnp.bfloat16(GRU.W)), {}, "are bfloat16 and float32; they must be"),
            (GRU.replace(b=jnp.complex64(GRU.b)), {}, "are complex64 and float32; they must be"),
        ],
    )
    def test_refusals(self, layers, options, says):
        with pytest.raises(ValueError, match=says):
            to_onnx(layers, **options)

    def test_an_mlp(self):
        """From any carry, in two calls, the second of fewer steps than the window."""
        x, start = normal(3, 7, 4, dtype=np.float32), randomized(jaxgru.initial_carry(MLP, 3))
        run, (h, context) = runtime(to_onnx(MLP)), start
        parts = []
        for piece in (x[:, :6], x[:, 6:]):
            y, h, context = run(**{"x": piece, "carry.0.h": h, "carry.0.context": context})
            parts.append(y)
        ours, carry = jaxgru.unroll(MLP, x, start)
        close([ours, *jax.tree.leaves(carry)], [np.concatenate(parts, axis=1), h, context])


@struct
class ReluRNN(RNNParams):
    """Somebody's own cell, which ONNX's RNN is not."""

    def step(self, layout, h, a):
        return jax.nn.relu(a + layout.times(self.U, h))


@struct
class Nested(RNNParams):
    """A carry within a carry."""

    def zero_carry(self, batch_size):
        h = super().zero_carry(batch_size)
        return h, (h[:, 1:], {"before": h})

    def step(self, layout, carry, a):
        h, (rest, old) = carry
        new = jax.checkpoint(jnp.tanh)(a + layout.times(self.U, h) + old["before"])
        return new, (rest * new[:, 1:], {"before": h})


@struct
class Counting(RNNParams):
    """Whole numbers and flags in a carry."""

    def zero_carry(self, batch_size):
        h = super().zero_carry(batch_size)
        return h, jnp.zeros(batch_size, jnp.int32), h > 0

    def step(self, layout, carry, a):
        h, steps, flags = carry
        new = jax.lax.select_n(jax.lax.min(steps, 2)[:, None] + 0 * a.astype(int), a, h - a, h)
        return jnp.where(flags, new, a), steps + 1, jnp.where(flags, new > 0, a > 0)


CELLS = {
    **{kind: layer(kind) for kind in LAYERS},
    "a subclass": ReluRNN(**vars(layer("rnn"))),
    "nested": Nested(**vars(layer("rnn"))),
    "mlp": MLP,
    **{
        kind: randomized(init(KEY, 4, 6, **options))
        for kind, (init, options) in {
            "gru of blocks": (jaxgru.init_gru, dict(num_blocks=2, second_bias=True)),
            "lstm of blocks": (jaxgru.init_lstm, dict(num_blocks=3)),
            "gru, layer norm": (jaxgru.init_gru, dict(layer_norm=True)),
            "lstm, layer norm": (jaxgru.init_lstm, dict(layer_norm=True, num_blocks=2)),
            "projection": (jaxgru.init_lstm, dict(proj_size=3)),
            "min_gru": (jaxgru.init_min_gru, {}),
            "mogrifier_gru": (jaxgru.init_mogrifier_gru, dict(rank=2)),
        }.items()
    },
}
PLAIN = {
    "Add", "Concat", "Div", "Identity", "MatMul", "Max", "Min", "Mul", "Not", "Reciprocal",
    "ReduceSum", "Reshape", "Sigmoid", "Slice", "Split", "Sqrt", "Sub", "Tanh", "Transpose",
    "Unsqueeze", "Where",
}  # fmt: skip


def rows(B, tree):
    return jax.tree.map(lambda leaf: leaf[:B], tree)


def in_float64(function, layers, *inputs, **flags):
    """The results in float64, once for all batches, whose rows do not see one another."""
    with jax.enable_x64(True):
        double = lambda leaf: jnp.asarray(leaf, jnp.float64)
        return function(*jax.tree.map(double, (layers, *inputs)), **flags)


class TestCells:
    """Of any cell, by its equations."""

    @pytest.mark.parametrize("kind", CELLS)
    def test_a_step(self, kind):
        """Of plain operators; some rows are reset."""
        p = CELLS[kind]
        x, reset = normal(7, 4, dtype=np.float32), np.arange(7) % 3 == 1
        carry = randomized(jax.eval_shape(lambda: jaxgru.initial_carry(p, 7)))
        ours = in_float64(jaxgru.step, p, x, carry, reset=reset)
        model = to_onnx(p, form="step", reset=True)
        onnx.checker.check_model(model, full_check=True)
        assert {node.op_type for node in model.graph.node} <= PLAIN
        run, names = runtime(model), [value.name for value in model.graph.input]
        assert names[:2] == ["x", "reset"]
        for B in (1, 2, 7):
            inputs = rows(B, [x, reset, *jax.tree.leaves(carry)])
            close(rows(B, ours), run(**dict(zip(names, inputs, strict=True))))

    @pytest.mark.parametrize("kind", [kind for kind in CELLS if kind not in LAYERS])
    def test_a_sequence(self, kind):
        """Both directions, padding, from any carry."""
        p, q = CELLS[kind], randomized(CELLS[kind], seed=5)
        x, lengths = normal(7, 5, 4, dtype=np.float32), np.array([5, 0, 2, 1, 3, 4, 5], np.int32)
        carry = jax.eval_shape(lambda: (jaxgru.initial_carry(p, 7),) * 2)
        carry = randomized(carry)
        ours = in_float64(jaxgru.bidirectional, p, q, x, carry, lengths=lengths)
        model = to_onnx(p, q, lengths=True)
        onnx.checker.check_model(model, full_check=True)
        run, names = runtime(model), [value.name for value in model.graph.input]
        for B in (1, 7):
            inputs = rows(B, [x, lengths, *jax.tree.leaves(carry)])
            close(rows(B, ours), run(**dict(zip(names, inputs, strict=True))))

    @pytest.mark.parametrize("form", ["step", "sequence"])
    def test_a_residual_stack_of_several_cells(self, form):
        """A reset sets another state than zeros; with padding, it does not count there."""
        layers = [CELLS["lstm"], layer("gru", 6), randomized(jaxgru.init_min_gru(KEY, 6, 6))]
        layers = jaxgru.ResidualStack(tuple(layers))
        flags = {"reset": np.random.default_rng(3).random((3, 4)) < 0.5}
        options = {"lengths": np.array([4, 1, 2], np.int32)} if form == "sequence" else {}
        x = normal(3, 4, 4, dtype=np.float32)
        carry, initial = (
            randomized(jax.eval_shape(lambda B=B: jaxgru.initial_carry(layers, B)), seed=B)
            for B in (3, 1)
        )
        initial = jax.tree.map(lambda leaf: leaf[0], initial)
        if form == "step":
            x, flags["reset"] = x[:, 0], flags["reset"][:, 1]
        ours = in_float64(
            jaxgru.unroll if options else jaxgru.step, layers, x, carry, initial=initial,
            **flags, **options,
        )  # fmt: skip
        model = to_onnx(layers, form=form, reset=True, initial=initial, lengths=bool(options))
        inputs = [x, *options.values(), flags["reset"], *jax.tree.leaves(carry)]
        names = [value.name for value in model.graph.input]
        close(ours, runtime(model)(**dict(zip(names, inputs, strict=True))))

    def test_one_step_of_a_sequence(self):
        """Weights are in the graph once, and unchanged."""
        p = CELLS["mogrifier_gru"]
        model, x = to_onnx(p), normal(1, 1, 4, dtype=np.float32)
        close(jaxgru.unroll(p, x), runtime(model)(**{"x": x, "carry.0.h": np.zeros((1, 6), "f4")}))
        stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        for name, weight in vars(p).items():
            assert same_bits(stored[f"layers.0.{name}"], np.asarray(weight))
        assert sum(a.size for a in stored.values() if a.dtype == np.float32) == sum(
            leaf.size
            for leaf in [*jax.tree.leaves(p), np.zeros(2)]  # and 1.0 and 2.0
        )

    def test_whole_numbers_and_flags_in_a_carry(self):
        p, x = Counting(**vars(layer("rnn"))), normal(3, 5, 4, dtype=np.float32)
        model = to_onnx(p)
        names = [value.name for value in model.graph.input]
        carry = map(np.asarray, jax.tree.leaves(jaxgru.initial_carry(p, 3)))
        theirs = runtime(model)(**dict(zip(names, [x, *carry], strict=True)))
        for a, b in zip(jax.tree.leaves(jaxgru.unroll(p, x)), theirs, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(b, a, TOLERANCE, TOLERANCE)


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
    graph, refused, written = Graph(np.zeros((), np.float32)), [], []
    a = graph.value(graph.input("a", symbolic_B, 4), symbolic_B, 4)
    for i, function in enumerate(functions):
        of_dtype = lambda a, f=function: f(a.astype(dtype)).astype(np.float32)
        try:
            jax.eval_shape(of_dtype, np.zeros((3, 4), np.float32))
        except (TypeError, ValueError):
            continue  # JAX does not take this dtype either
        try:
            value = graph.add("A cell", of_dtype, a)
        except InteropError as error:
            refused.append(str(error))
        else:
            graph.node("Identity", value.name, outputs=[graph.output(f"y{i}", *value.shape)])
            written.append(of_dtype)
    return runtime(graph.model()), written, refused


class TestFunctions:
    """Right, or refused."""

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
    def test_of_a_dtype(self, dtype, some, others):
        """Some are written, or others refused, or both."""
        run, written, refused = in_graph(dtype, FUNCTIONS)
        assert (bool(written), bool(refused)) == (some, others)
        for B in (1, 3) if some else ():
            a = 2 * normal(B, 4, dtype=np.float32)
            close([function(a) for function in written], run(a=a))
        says = rf"A cell computes JAX's (reduce_or|\w+ of {dtype}), which jaxgru cannot write as .*"
        assert all(re.fullmatch(says, message) for message in refused)

    def test_small_and_large(self):
        """To a few roundings of float32, from 1e-12 to 50 and at the poles."""
        run, written, _ = in_graph("float32", ELEMENTWISE)
        a = np.geomspace(1e-12, 50, 201)
        a = np.float32([*a, *-a, 0, -1, np.inf, -np.inf, np.nan, 88]).reshape(-1, 4)
        with jax.enable_x64(True):
            ours = [function(a.astype(float)) for function in ELEMENTWISE]
        assert len(written) == len(ELEMENTWISE)
        for y, want in zip(run(a=a), ours, strict=True):
            np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-30)

    @pytest.mark.parametrize(
        "function, says",
        [
            (lambda a: jnp.cumsum(a, 1), "A cell computes JAX's cumsum, which jaxgru cannot"),
            (lambda a: a.mean(0), "A cell computes JAX's dim_as_value"),
            (lambda a: a[:, np.array([2, 0])], "A cell computes an index that is an array"),
            (lambda a: a[:, 7], "A cell computes an index outside of its axis"),
            (lambda a: a[:, ::2], "A cell computes "),
            (lambda a: abs(a + 1j), "A cell computes JAX's add of complex64"),
            (lambda a: jnp.einsum("ij,j->i", a, np.arange(4, dtype=np.int8),
                                  preferred_element_type=np.int32), "JAX's dot_general of int8"),
            (lambda a: jax.lax.dot(a.astype(int), np.ones(4, np.float32),
                                   preferred_element_type=np.float32), "dot_general of several"),
            (lambda a: a + jnp.zeros(len(a)), r"A cell needs the batch size .* write h.shape\[0\]"),
        ],
    )  # fmt: skip
    def test_refusals(self, function, says):
        graph = Graph(np.zeros((), np.float32))
        with pytest.raises(InteropError, match=says):
            graph.add("A cell", function, graph.value("a", symbolic_B, 4))


GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}


def graph_of(op, direction="forward", without=(), more=(), H=3, E=2, peepholes=False, **attributes):
    """A graph of one node with random weights and dynamic sizes; and its weights."""
    D, rows = 2 if direction == "bidirectional" else 1, GATES[op] * H
    shapes = {"W": (D, rows, E), "R": (D, rows, H), "B": (D, 2 * rows)}
    shapes |= {"P": (D, 3 * H)} if peepholes else {}
    shapes |= dict(more)
    weights = {n: normal(*s, dtype=np.float32, seed=i) for i, (n, s) in enumerate(shapes.items())}
    weights = {name: weight for name, weight in weights.items() if name not in without}
    names = ["x", *("WRB" if "B" in weights else "WR"), *[""] * (3 + ("B" not in weights)), ""]
    names = [*names[:7], "P"] if "P" in weights else names[:4]
    outputs = ["y", "h", "c"][: 3 if op == "LSTM" else 2]
    node = helper.make_node(
        op, names, outputs, "it", hidden_size=H, direction=direction, **attributes
    )
    value = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
    stored = [numpy_helper.from_array(weight, name) for name, weight in weights.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", "B", E])
    graph = helper.make_graph([node], "g", [x], [value(name) for name in outputs], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class TestIn:
    @pytest.mark.parametrize("direction", ["reverse", "bidirectional"])
    @pytest.mark.parametrize(
        "op, options",
        [
            ("GRU", {"linear_before_reset": 0}),
            ("GRU", {"linear_before_reset": 1, "activations": ["Sigmoid", "Tanh"]}),
            ("GRU", {"linear_before_reset": 1, "activations": ["Sigmoid", "Relu"]}),
            ("LSTM", {"without": "B"}),
            ("LSTM", {"activations": ["Sigmoid", "Relu", "Relu"]}),
            ("LSTM", {"H": 33}),
            ("LSTM", {"peepholes": True, "H": 4}),
            ("LSTM", {"peepholes": True, "input_forget": 1, "clip": 0.25}),
            ("LSTM", {"input_forget": 1, "activations": ["Sigmoid", "Relu", "Relu"]}),
            ("RNN", {"H": 1, "E": 1}),
            ("RNN", {"activations": ["Relu"]}),
            ("GRU", {"linear_before_reset": 0, "clip": 0.25}),
            ("GRU", {"linear_before_reset": 1, "clip": 0.25}),
            ("LSTM", {"clip": 0.25}),
            ("RNN", {"clip": 0.25}),
        ],
    )
    def test_any_node(self, op, options, direction):
        """Its weights compute in onnxruntime what they compute here."""
        two = direction == "bidirectional"
        if "activations" in options and two:
            names = options["activations"]  # and tanh in the other direction
            names = names + [name.replace("Relu", "Tanh") for name in names]
            options = options | {"activations": names}
        model = graph_of(op, direction, **options)
        (node,) = from_onnx(model)
        assert (node.name, node.direction, node.reads) == ("it", direction, ())
        x = normal(5, 2, options.get("E", 2), dtype=np.float32, seed=9)
        y, *states = runtime(model)(x=x)
        if two:
            ours, ends = jaxgru.bidirectional(node.layer, node.backward, x, time_major=True)
        else:
            reverse = direction == "reverse"
            ours, end = jaxgru.unroll(node.layer, x, reverse=reverse, time_major=True)
            ends = (end,)
        ends = [np.stack(parts) for parts in zip(*map(jax.tree.leaves, ends), strict=True)]
        close([ours.reshape(5, 2, 1 + two, -1).swapaxes(1, 2), *ends], [y, *states])
        (again,) = from_onnx(to_onnx(node.layer, node.backward))
        chex.assert_trees_all_close((again.layer, again.backward), (node.layer, node.backward))

    @pytest.mark.parametrize("op", GATES)
    def test_batches_before_steps(self, op):
        """`layout` 1, which onnxruntime lacks: it turns the states, and not the weights."""
        model, other = graph_of(op, layout=1), graph_of(op)
        assert same_bits(from_onnx(model)[0].layer, from_onnx(other)[0].layer)
        x = normal(2, 5, 2, dtype=np.float32, seed=9)
        y = ReferenceEvaluator(model).run(["y"], {"x": x})[0]  # (B, T, D, H)
        close(jaxgru.unroll(from_onnx(model)[0].layer, x)[0], [y.reshape(2, 5, 3)])

    @pytest.mark.parametrize("kind, two", [("GRU", True), ("LSTM", False), ("RNN", True)])
    @pytest.mark.filterwarnings("ignore")
    def test_what_pytorch_exports(self, kind, two, tmp_path):
        """Stacked: every node reads the one before; the weights are those of the module."""
        torch = pytest.importorskip("torch")
        module = getattr(torch.nn, kind)(4, 5, 3, bidirectional=two)
        x = torch.randn(6, 1, 4)
        path = tmp_path / "torch.onnx"
        torch.onnx.export(module, (x,), path, dynamo=False)
        nodes = from_onnx(path)
        assert [node.reads for node in nodes] == [(), (nodes[0].name,), (nodes[1].name,)]
        assert {node.direction for node in nodes} == {"bidirectional" if two else "forward"}
        ahead, back = [node.layer for node in nodes], [node.backward for node in nodes]
        x, theirs = x.numpy(), module(x)[0].detach().numpy()
        if two:
            y, _ = jaxgru.bidirectional(ahead, back, x, time_major=True)
        else:
            y, _ = jaxgru.unroll(ahead, x, time_major=True)
        close(y, [theirs])

    def test_weights_that_nodes_compute(self):
        """Of constants: here W is transposed, R a Constant, and B two parts."""
        model, plain = graph_of("GRU"), graph_of("GRU")
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

    def test_weights_in_a_file_beside(self, tmp_path):
        path, model = tmp_path / "m.onnx", graph_of("LSTM")
        want = from_onnx(model)[0].layer
        onnx.save(model, path, save_as_external_data=True, location="m.bin", size_threshold=0)
        assert same_bits(from_onnx(path)[0].layer, want)
        with pytest.raises(
            InteropError, match="its W is in a file beside the graph's; pass the gr"
        ):
            from_onnx(onnx.load(path, load_external_data=False))

    @pytest.mark.parametrize(
        "model, says",
        [
            (lambda: graph_of("GRU", activations=["HardSigmoid", "Tanh"]),
             r"'it' has activations=\['hardsigmoid', 'tanh'\]; it must be \['sigmoid', 'tanh'\]"),
            (lambda: graph_of("LSTM", clip=-1.0), "the LSTM 'it' has clip=-1.0; it must be ab"),
            (lambda: graph_of("LSTM", more={"P": (1, 8)}), r"tensor P has shape \(1, 8\); it mus"),
            (lambda: graph_of("GRU", without="W"), "W comes from 'W', an input of the graph"),
            (lambda: graph_of("GRU", more={"B": (1, 9)}), r"tensor B has shape \(1, 9\); it mus"),
            (onnx.ModelProto, "cannot be used: its graph contains no GRU, LSTM or RNN node"),
        ],
    )  # fmt: skip
    def test_refusals(self, model, says):
        with pytest.raises(InteropError, match=says):
            from_onnx(model())

    def test_peepholes_of_zeros(self):
        model = graph_of("LSTM", peepholes=True)
        (P,) = (t for t in model.graph.initializer if t.name == "P")
        P.CopyFrom(numpy_helper.from_array(np.zeros((1, 9), np.float32), "P"))
        assert same_bits(from_onnx(model)[0].layer, from_onnx(graph_of("LSTM"))[0].layer)

    def test_other_dtypes(self):
        with precision(np.float64):
            model = to_onnx(layer("rnn", dtype=np.float64))
        with pytest.raises(InteropError, match="JAX_ENABLE_X64"):
            from_onnx(model)
