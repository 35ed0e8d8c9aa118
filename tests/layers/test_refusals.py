"""What layers refuse, in one sentence that says what would be right: argument × fault."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import randomized
from annotations import unchecked

import jaxgru
from jaxgru import (
    Dropout,
    LSTMState,
    bidirectional,
    init_gru,
    init_lstm,
    init_mogrifier_gru,
    init_rnn,
    init_stack,
    initial_carry,
    round_weights,
    step,
    unroll,
)
from jaxgru.cells import Lookup, matmul, one_step
from jaxgru.layers.masks import dropout_masks

pytestmark = pytest.mark.usefixtures("float64")

KEY = jax.random.key(0)
F = 3
H = 4


def drawn(init, *sizes, **options):
    return randomized(jax.eval_shape(lambda: init(KEY, *sizes, **options)))


zeros = np.zeros
X = np.ones((2, 3, F), "f4")
X_t = np.ones((2, F), "f4")
h = zeros((2, H))
pair = zeros((2, 2, H))

GRU = drawn(init_gru, F, H)
LSTM = drawn(init_lstm, F, H)
MLP = drawn(jaxgru.cells.init_mlp, F, H, context_length=3)
MIN_GRU = drawn(jaxgru.init_min_gru, F, H)
NARROW = GRU.replace(b=GRU.b.astype(jnp.bfloat16))
RESIDUAL = [jaxgru.ResidualStack((drawn(init_rnn, 3, 4), *[drawn(init_rnn, 4, 4)] * 2))] * 2
WIDER = RESIDUAL[0].replace(layers=(RESIDUAL[0].layers[0], drawn(init_rnn, 4, 5)))
VARIATIONAL = Dropout(KEY, 0.5, "state", "variational")


def masks(*dropout):
    return dropout_masks([LSTM], Dropout(*dropout), 2, 3)


RIGHT = {  # the arguments of a function that a row leaves as they are
    unroll: dict(layers=GRU, x=X),
    step: dict(layers=GRU, x=X_t, carry=h),
    bidirectional: dict(forward=GRU, backward=GRU, x=X),
    initial_carry: dict(layers=GRU, batch_size=2),
    one_step: dict(params=LSTM, x=X_t),
    matmul: {},
    init_stack: dict(cell="gru", key=KEY, in_features=3, hidden_dim=4),
    **{init: dict(key=KEY, in_features=3, hidden_dim=6)
       for init in (init_gru, init_lstm, init_rnn, init_mogrifier_gru)},
}  # fmt: skip

layers_apart = "the parameters of layer 0 do not fit together, or not to an input of 3 features: "
no_state = "is {}; it must be LSTMState(h=…, c="
no_key = "the dropout's key is {}; it must be one key, as from jax.random.key"
exchanged = "the carry was passed as x; the order is layers, x (the input), carry"
whole = "it must be a whole number"
no_array = "an array, float32 (2, 3, 3); it must be a "


def dropped(*arguments, **options):
    return dict(dropout=Dropout(*arguments, **options))


# fmt: off
FAULTS = [
    # x
    (unroll, dict(x=X[0, 0]), "x is float32 (3,); it must be floating-point, (B, T"),
    (unroll, dict(x=np.ones((2, 3, F), int)), "x is int64 (2, 3, 3); it must be floating-point"),
    (unroll, dict(x=X[:, :0]), "x has the shape (2, 0, 3); it must have at least one step"),
    (unroll, dict(x=X[..., :2]), "x has 2 features per step; the layer takes 3"),
    (unroll, dict(x=X[..., :2], implementation="autodiff"), "x has 2 features per step; the layer"),
    (unroll, dict(x=None), "x is NoneType; it must be an array"),
    (unroll, dict(x=np.ma.masked_array(X)), "x is MaskedArray; it must be"),
    (matmul, dict(x=X_t, W=zeros((1, F, 1))), "block-diagonal weights are (1, 3, 1); they"),
    (step, dict(x=np.ones((2, F), int)), "x is int64 (2, 3); it must be floating-point, (B, F)"),
    (step, dict(mask=np.ones((2, 1), bool)), "mask is bool (2, 1); it must be bool (2,)"),
    (step, dict(x=X[0, 0, 0], carry=zeros(H)), "x is float32 (); it must be floating-point, (B, F"),
    *[(function, dict(x=several), f"x is a {several.__class__.__name__} of arrays; it must be one")
      for function in (unroll, bidirectional, step) for several in ((X, X), [X_t, X_t], [X_t[0]])],
    # layers
    (unroll, dict(layers=[]), "contains no layers"),
    (unroll, dict(layers=None), "layers is NoneType; it must be one layer"),
    (unroll, dict(layers={"a": GRU}), "layers is dict; it must be one layer"),
    (unroll, dict(layers=[GRU, GRU]), "the layer below it has 4 features per step; layer 1 takes"),
    (unroll, dict(layers=GRU.replace(U=zeros((4, 13)))),
     layers_apart + "cn float32 (4,), W float32 (3, 12), U float64 (4, 13)"),
    (unroll, dict(layers=LSTM.replace(b=zeros(17))), layers_apart + "W float32 (3, 16)"),
    (unroll, dict(layers=LSTM.replace(b=zeros(1))), layers_apart),
    (unroll, dict(layers=jax.tree.map(lambda w: jnp.stack([w, w]), GRU)), layers_apart),
    (unroll, dict(layers=GRU.replace(U=None)), "U None, b float32 (12,)"),
    (unroll, dict(layers=NARROW), "b bfloat16 (12,)"),
    (unroll, dict(layers=GRU.replace(W=np.ones((F, 12), "i4"))), "a weight in layers is int32; it"),
    (unroll, dict(layers=[jax.tree.map(lambda w: w.tolist(), GRU)]), layers_apart),
    (unroll, dict(layers=RESIDUAL), "is a pair, with the layers of two directions"),
    (unroll, dict(layers=WIDER), "layer 1 of a residual stack takes 4 features and gives 5;"),
    (initial_carry, dict(layers=GRU.replace(b="a")), "a weight in layers is str; it"),
    (bidirectional, dict(forward=[GRU, GRU], backward=[GRU]), "there are 2 forward and 1 backward"),
    (bidirectional, dict(backward=[GRU]), "only one direction is a list of layers; both must be"),
    (bidirectional, dict(forward=RESIDUAL[0], backward=RESIDUAL[1].layers),
     "only one direction is a ResidualStack"),
    (bidirectional, dict(forward=[GRU, GRU], backward=[GRU, GRU]),
     "the layer below it has 8 features per step; layer 1 takes 3"),
    # carry
    (unroll, dict(carry=zeros((3, H))), "the carry's shapes are (3, 4), but"),
    *[(unroll, dict(x=X, **order, **state), f"; with time_major={other} they would fit.")
      for order, rows, other in ((dict(), 3, True), (dict(time_major=True), 2, False))
      for state in (dict(carry=zeros((rows, H))), dict(reset_carry=zeros((rows, H))))],
    *[(unroll, dict(x=X, lengths=[1] * rows, time_major=time_major),
       f"one per row: ({5 - rows},); with time_major={not time_major} it would fit.")
      for time_major, rows in ((False, 3), (True, 2))],
    (unroll, dict(x=np.ones((5, *X.shape), "f4"), carry=zeros((2, 3, H)), layers=GRU),
     "the batch (5, 2) need (5, 2, 4); with time_major=True they would fit."),
    (step, dict(carry=zeros((1, H))), "need (2, 4): one entry per layer"),  # no axis T to exchange
    *[(unroll, dict(layers=layer, carry=state), f"with the keys 'h'; it must be {kind}, as from")
      for layer, state, kind in ((GRU, {"h": h}, "an array"), ([GRU], [{"h": h}], "an array"),
                                 (MLP, {"h": h}, "a tuple"))],
    (unroll, dict(reset_carry={"h": h}), "reset_carry of a layer is a dict with the keys 'h'; it"),
    (unroll, dict(layers=[GRU], carry=0.0), "the carry's shapes are (), but"),
    (unroll, dict(x=X[0], carry=zeros((1, H))),
     "the carry's shapes are (1, 4), but these layers and the batch () need (4,)"),
    (unroll, dict(carry=jnp.zeros((2, H), jnp.bfloat16)),
     "the carry's dtype is bfloat16; these layers' is float32"),
    (unroll, dict(carry=zeros((2, H), complex)), "the carry's dtype is complex128; these layers'"),
    (unroll, dict(layers=LSTM, carry=LSTMState(zeros((2, H), "f4"), h)),
     "a layer's carry has parts of float32 and float64; it must have one dtype"),
    (unroll, dict(layers=LSTM, x=(h, h), carry=X), exchanged),
    (step, dict(x=h, carry=X_t), exchanged),
    (step, dict(layers=[GRU], x=(h,), carry=X_t), exchanged),
    (step, dict(carry=None), "carry is None; it must be the last step's, or from initial_carry"),
    (step, dict(x=X), "(2, 4), but these layers and the batch (2, 3) need (2, 3, 4)"),
    (bidirectional, dict(carry=pair), "carry must be a pair, the forward and the backward layers"),
    (bidirectional, dict(forward=[GRU], backward=[GRU], carry=((h, h), None)),
     "shapes are ((2, 4), (2, 4)), but these layers and the batch (2,) need ((2, 4),): one entry"),
    *[row for state, seen in (((h, h), "tuple"), (pair, "an array (2, 2, 4)"),  # Flax has (c, h)
                              ({"c": h}, "a dict with the keys 'c'"))
      for row in (
          (unroll, dict(layers=LSTM, carry=state), no_state.format(seen)),
          (unroll, dict(layers=LSTM, reset_carry=state), no_state.format(seen)),
          (step, dict(layers=[LSTM], carry=[state]), no_state.format(seen)),
          (bidirectional, dict(forward=LSTM, backward=LSTM, carry=(state, state)),
           no_state.format(seen)),
          (one_step, dict(carry=state), no_state.format(seen)),
      )],
    # reset_carry
    (unroll, dict(reset_carry=zeros(3)), "the shapes of reset_carry are (3,); these layers need"),
    (unroll, dict(layers=[GRU], reset_carry=0.0), "the shapes of reset_carry are (); these"),
    (unroll, dict(reset_carry=zeros(4, int)), "reset_carry is int64; it must be"),
    (bidirectional, dict(reset_carry=pair), "reset_carry must be a pair, the forward and the"),
    # reset, mask, lengths
    (unroll, dict(reset=zeros((3, 2), bool)),
     "reset is bool (3, 2); it must be bool (2, 3), with its axes in the order of x's."),
    (unroll, dict(reset=True), "reset is bool (); it must be bool (2, 3)"),
    (unroll, dict(reset=np.full((2, 3), 0.5)), "reset contains 0.5; it must be bool, or numbers"),
    (step, dict(reset=[True, False, True]), "reset is bool (3,); it must be bool (2,)"),
    (unroll, dict(mask=np.ones((2, 4))), "mask is float64 (2, 4); it must be bool (2, 3)"),
    (unroll, dict(mask=np.ones((2, 3)), lengths=[1, 2]), "both lengths and a mask are given; give"),
    (unroll, dict(lengths=np.array([1, 4])), "lengths range from 1 to 4; they must be in 0 … T = "),
    (unroll, dict(lengths=np.array([1.0, 2.0])), "lengths is float64 (2,); it must be integers, "),
    (unroll, dict(lengths=3), "lengths is int64 (); it must be integers, one per row: (2,)"),
    (unroll, dict(x=X[0], lengths=[3]), "lengths is int64 (1,); it must be integers, one per row:"),
    (unroll, dict(lengths=[2**70, 1]), "lengths contains a whole number that is too large"),
    (unroll, dict(lengths=[2**40, 1]), "lengths range from 1 to 1099511627776; they must be in 0"),
    # options
    (unroll, dict(reverse=jnp.array(True)), "reverse is ArrayImpl; it must be True or False"),
    (bidirectional, dict(time_major="no"), "time_major is str; it must be True or False"),
    (unroll, dict(implementation="fast"), "the implementation is 'fast'"),
    (unroll, dict(implementation=["scan"]), "implementation is ['scan']; it"),
    (step, dict(implementation="fast"), "is 'fast'; it must be one of auto, scan, autodiff"),
    # dropout
    (unroll, dict(dropout=0.5), "dropout is 0.5; it must be a Dropout("),
    (unroll, dict(dropout=X), "dropout is " + no_array + "Dropout("),
    (unroll, dict(dropout=2 * [Dropout(KEY, 0.5, "state")]), "two dropouts have the site 'state';"),
    (unroll, dict(dropout=(Dropout(KEY, 0.5, "state"), 0.5)), "dropout is 0.5; it must be a Dropo"),
    *[(unroll, dropped(key, 0.5, "state"), no_key.format(seen))
      for key, seen in (("a", "str"), (3, "int"), (np.uint32(3), "uint32"))],
    (unroll, dropped(0.5, KEY, "state"), "rate is a key; the order is Dropout(key, rate, site)"),
    (unroll, dropped(KEY, "a", "state"), "the dropout rate is 'a'; it must be at least 0 and bel"),
    (unroll, dropped(KEY, 0.5, "state", first_row=-1),
     "first_row of the dropout is -1; it must be a whole number from 0 to 4294967295"),
    (unroll, dropped(KEY, 0.5, "state", first_step=2**40),
     "first_step of the dropout is 1099511627776; " + whole),
    (unroll, dict(remat=True) | dropped(KEY, 0.5, "state", first_step=-1),
     "first_step of the dropout is -1; " + whole),
    *[(unroll, dict(layers=layer, dropout=VARIATIONAL, implementation=implementation),
       f"jaxgru knows of none in {type(layer).__name__};")
      for layer in (MLP, MIN_GRU) for implementation in ("scan", "autodiff")],
    # sizes and options of a layer
    (initial_carry, dict(batch_size=-1), "batch_size is -1; " + whole),
    (initial_carry, dict(batch_size=2**70), "whole number from 0 to 2147483647"),
    (initial_carry, dict(batch_size="3"), "batch_size is '3'; " + whole),
    (initial_carry, dict(batch_size=None), "batch_size is None; " + whole),
    (initial_carry, dict(batch_size=X), "batch_size is " + no_array + "whole number"),
    (init_rnn, dict(hidden_dim=True), "hidden_dim is True; " + whole),
    (init_gru, dict(in_features=0), "in_features is 0; " + whole),
    (init_lstm, dict(hidden_dim=4.0), "hidden_dim is 4.0; " + whole),
    (init_rnn, dict(activation="gelu"), "is 'gelu'; it must be one of tanh, relu"),
    (init_lstm, dict(activation=[]), "activation is []; it must be one of tanh, relu"),
    (init_rnn, dict(clip=0), "clip is 0; it must be None or a positive number"),
    (init_gru, dict(reset_gate="never"), "is 'never'; it must be one of before, after"),
    (init_gru, dict(second_bias="no"), "second_bias is str; it must be True or False"),
    (init_gru, dict(dtype=int), "dtype is <class 'int'>; it must be a floating"),
    (init_rnn, dict(dtype="foo"), "dtype is 'foo'; it must be a floating"),
    (init_mogrifier_gru, dict(dtype=int), "dtype is <class 'int'>; it must be a floating-point"),
    (init_mogrifier_gru, dict(num_rounds=1), "num_rounds is 1; it must be a whole number from 2"),
    (init_mogrifier_gru, dict(rank=0), "rank is 0; it must be a whole number from 1"),
    (init_gru, dict(num_blocks=4), "num_blocks is 4; it must divide hidden_dim, 6"),
    (init_lstm, dict(num_blocks=0), "num_blocks is 0; it must be a whole number from 1"),
    (init_lstm, dict(proj_size=0), "proj_size is 0; it must be a whole number from 1"),
    (init_lstm, dict(proj_size=2, layer_norm=True), "layer_norm must be False with proj_s"),
    (init_lstm, dict(proj_size=2, num_blocks=2), "num_blocks must be 1 with proj_size; it is 2"),
    (init_lstm, dict(proj_size=2, activation="relu"), "activation must be 'tanh' with p"),
    (init_lstm, dict(layer_norm=True, clip=1.0), "clip must be None with layer_norm; it is 1.0"),
    (init_gru, dict(layer_norm=1), "layer_norm is int; it must be True or False"),
    (init_gru, dict(layer_norm=True, reset_gate="before"), "must be 'after' with layer_norm; it"),
    (init_gru, dict(layer_norm=True, second_bias=True), "second_bias must be False with laye"),
    (init_gru, dict(layer_norm=True, activation="relu"), "must be 'tanh' with layer_norm; it is"),
    (init_stack, dict(cell="gruu"), "the cell is 'gruu'; it must be one of gru, lstm, min_gru, "),
    (init_stack, dict(num_layers=0), "num_layers is 0; it must be a whole number from 1"),
    (init_stack, dict(hidden_dim=0), "hidden_dim is 0; " + whole),
]
# fmt: on


@pytest.mark.parametrize("function, arguments, says", FAULTS)
def test_one_sentence_says_what_is_wrong(function, arguments, says):
    with unchecked(), pytest.raises(ValueError) as raised:
        function(**RIGHT[function] | arguments)
    assert says in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "call, says",
    [
        (
            lambda: jax.jit(lambda reset: unroll(GRU, X, reset=reset))(zeros((2, 3))),
            "its values are not known here; pass reset.astype(bool) if each of them is 0 or 1",
        ),
        (lambda: round_weights(GRU, int), "dtype is <class 'int'>; it must be floating"),
        (lambda: masks(KEY, 0.5, "inside"), "site is 'inside'; it must be one of input, state, be"),
        (lambda: masks(KEY, 0.5, "state", "often"), "kind is 'often'; it must be one of each_step"),
        (lambda: masks(KEY, 0.5, "output", "zoneout"), "is 'output'; zoneout needs the site 'stat"),
        (
            lambda: masks(KEY, (0.5, 0.5), "state"),
            "the dropout rate is (0.5, 0.5); it must be at l",
        ),
        (
            lambda: masks(KEY, (0.5,), "state", "zoneout"),
            "1 rate; layer 0 has a carry of 2 parts, which",
        ),
        (lambda: masks(KEY, (), "state", "zoneout"), "0 rates; layer 0 has a carry of 2 parts"),
        (lambda: masks(KEY, (0, 0, 0), "state", "zoneout"), "3 rates; layer 0 has a carry of 2"),
        (lambda: masks(KEY, (0.5, 2), "state", "zoneout"), "rate is 2; it must be at least 0 and"),
        (lambda: masks(None, 0.5, "state"), "key is None; only zoneout has a mean to evaluate"),
    ],
)
def test_other_calls(call, says):
    with unchecked(), pytest.raises(ValueError) as raised:
        call()
    assert says in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("number", [2**32, -(2**31) - 1])
def test_a_row_number_that_does_not_fit(number):
    """In 32 bits, it would be another row's."""
    x = Lookup(X[0], np.full((2, 3), number))
    with jax.enable_x64(False), pytest.raises(ValueError, match=f"x contains {number}, which does"):
        unroll(GRU, x)


def test_a_dropout_needs_a_site():
    with pytest.raises(TypeError, match="site"):
        Dropout(KEY, 0.5)


@pytest.mark.parametrize("dtype", [np.longdouble, object, "U1", "M8[s]", ">f4", [("a", "f4")]])
@pytest.mark.parametrize("argument", ["layers", "x", "carry", "reset_carry", "reset", "lengths"])
def test_arrays_that_jax_does_not_have(argument, dtype):
    shapes = dict(x=(2, 3, F), carry=(2, H), reset_carry=(H,), reset=(2, 3), lengths=(2,))
    if argument == "layers":
        wrong = GRU.replace(b=zeros(3 * H, dtype))
    else:
        wrong = zeros(shapes[argument], dtype)
    with unchecked(), pytest.raises(ValueError) as raised:
        unroll(**RIGHT[unroll] | {argument: wrong})
    assert "\n" not in str(raised.value) and str(np.dtype(dtype)) in str(raised.value)


def test_parameters_that_contradict_each_other_are_refused_in_use_only():
    """A tree of them may hold anything: linen's `tabulate` and `tree.map` put other leaves in."""
    jax.tree.map(lambda leaf: 0, GRU, is_leaf=lambda leaf: leaf is None)
    wrong = GRU.replace(cn=zeros(5))
    with pytest.raises(ValueError, match="the parameters of layer 0 do not fit together"):
        unroll(wrong, X)
