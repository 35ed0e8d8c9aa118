"""What each library's file promises: the same call, the same numbers; weights go there and back."""

from __future__ import annotations

import contextlib
import os
from functools import partial

import against
import chex
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import carry_of, equinox_cell, layer, nnx_cell, normal, randomized, refused, resets
from annotations import unchecked
from conftest import slow
from flax import linen as nn
from flax import nnx
from random_models import same_bits

import jaxgru
from jaxgru import pytrees
from jaxgru.libraries import (
    LibraryError,
    common,
    dm_haiku,
    equinox_nn,
    flax_linen,
    flax_nnx,
    onnx,
    torch_nn,
)

os.environ.setdefault("KERAS_BACKEND", "jax")
import keras  # noqa: E402

from jaxgru.libraries import keras_layers  # noqa: E402

KEY = jax.random.key(0)

# --- The same call: of each library, our function and theirs of the same arguments


def three_calls(call, x, carry):
    """From a given carry and from the cell's own; reversed, and with padding."""
    B, T, _ = x.shape
    plain = call(x, initial_carry=carry, return_carry=True)
    if T == 1:
        return plain
    turned = dict(reverse=True, seq_lengths=np.arange(B, dtype=np.int32) % T + 1)
    x_T = x.swapaxes(0, 1)
    time_major = call(x_T, **turned, return_carry=True, time_major=True)
    return plain, call(x, **turned, keep_order=True), time_major


named = lambda kind: kind.removesuffix(", relu")


def options_of(kind):
    return {"activation_fn": jax.nn.relu} if "relu" in kind else {}


def linen_calls(cell, dtype, T, B, E, H):
    x = normal(B, T, E, dtype=dtype)
    carry = carry_of(B, H, dtype, "LSTM" in cell)
    linen_cell = partial(getattr(nn, named(cell)), **options_of(cell))

    def calls(rnn_class):
        apply = rnn_class(linen_cell(H, param_dtype=dtype)).apply
        return lambda variables, x, carry, **options: three_calls(
            partial(apply, variables, **options), x, carry
        )

    theirs = nn.RNN(linen_cell(H, param_dtype=dtype))
    variables = randomized(jax.eval_shape(theirs.init, KEY, x))
    return calls(flax_linen.RNN), calls(nn.RNN), (variables, x, carry)


def nnx_calls(cell, dtype, T, B, E, H):
    made = nnx_cell(named(cell), E, H, dtype, **options_of(cell))
    x = normal(B, T, E, dtype=dtype)
    carry = carry_of(B, H, dtype, "LSTM" in cell)

    def calls(rnn_class):
        graph, params, rest = nnx.split(rnn_class(made), nnx.Param, ...)

        def merged(params):
            return partial(nnx.merge(graph, params, rest), rngs=nnx.Rngs(0))

        return params, lambda params, x, carry, **options: three_calls(
            partial(merged(params), **options), x, carry
        )

    params, ours = calls(flax_nnx.RNN)
    same, theirs = calls(nnx.RNN)
    assert same_bits(params, same)
    return ours, theirs, (params, x, carry)


def equinox_calls(kind, dtype, T, B, E, H):
    """A batch with resets, whole and by `vmap`; one sequence, backwards."""
    cell = equinox_cell(kind, E, H, dtype)
    xs = normal(B, T, E, dtype=dtype)
    states = carry_of(B, H, dtype, kind == "LSTMCell")
    reset = resets(B, T)

    def theirs(cell, xs, states):
        def step(state, x):
            after = cell(x, state)
            return after, jax.tree.leaves(after)[0]

        run = partial(against.scanned, step, jax.tree.map(lambda s: jnp.zeros(H, dtype), states))
        each = jax.vmap(run)(states, xs, reset)
        first = jax.tree.map(lambda s: s[0], states)
        ends = np.append(reset[0, 1:], False)  # of episodes
        return each, each, run(first, xs[0], ends, reverse=True)

    def ours(cell, xs, states, **options):
        run = partial(equinox_nn.unroll, cell, **options)
        each = jax.vmap(lambda x, s, r: run(x, s, reset=r))(xs, states, reset)
        first = jax.tree.map(lambda s: s[0], states)
        backward = run(xs[0], first, reset=reset[0], reverse=True)
        return run(xs, states, reset=reset), each, backward

    return ours, theirs, (cell, xs, states)


def haiku_calls(kind, dtype, T, B, E, H):
    """With resets, backwards, batch-major; random draws that follow are the same, too."""
    x = normal(T, B, E, dtype=dtype)
    dones = resets(T, B)
    carry = carry_of(B, H, dtype, True)
    state = hk.LSTMState(*carry) if kind == "LSTM" else carry[0]

    def calls(unroll):
        def function(x, state, **options):
            core = getattr(hk, kind)(H)
            run = partial(unroll, **options)
            batch_major = x.swapaxes(0, 1), dones.T
            return (
                run(hk.ResetCore(core), (x, dones), state),
                run(core, x[:, 0], jax.tree.map(lambda s: s[0], state), reverse=True),
                run(hk.ResetCore(core), batch_major, state, False, True, return_all_states=True),
                run(core, x, state),
                jax.random.normal(hk.next_rng_key(), 2),
            )

        return hk.transform(function)

    ours = calls(dm_haiku.dynamic_unroll)
    theirs = calls(hk.dynamic_unroll)
    params = randomized(jax.eval_shape(theirs.init, KEY, x, state))

    def applied(model):
        return lambda params, x, state, **options: model.apply(params, KEY, x, state, **options)

    return applied(ours), applied(theirs), (params, x, state)


FLAX = ["GRUCell", "LSTMCell", "OptimizedLSTMCell", "SimpleCell"]
CALLS = [
    *((linen_calls, cell) for cell in ("GRUCell, relu", *FLAX[2:])),
    *((nnx_calls, cell) for cell in ("GRUCell", "OptimizedLSTMCell, relu", "SimpleCell")),
    *((equinox_calls, cell) for cell in ("GRUCell", "LSTMCell")),
    *((haiku_calls, cell) for cell in ("GRU", "LSTM")),
]
ONE_EACH = pytest.mark.parametrize(
    "calls, kind",
    [(linen_calls, "GRUCell"), (nnx_calls, "LSTMCell"), (equinox_calls, "GRUCell"),
     (haiku_calls, "LSTM")],
)  # fmt: skip


@pytest.mark.parametrize(
    "calls, kind, dtype, sizes",
    [
        *((*call, np.float64, (5, 3, 4, 6)) for call in CALLS),
        (linen_calls, "GRUCell, relu", np.float64, (1, 1, 2, 1)),
        *slow(
            *((*call, np.float64, (1, 1, 2, 1)) for call in CALLS[1:]),
            *((*call, np.float32, (5, 3, 4, 6)) for call in CALLS),
            (linen_calls, "LSTMCell", np.float64, (5, 3, 4, 6)),
            (nnx_calls, "LSTMCell", np.float64, (5, 3, 4, 6)),
        ),
    ],
)
def test_the_same_call_gives_the_same_numbers(calls, kind, dtype, sizes):
    """Outputs, carries, and the gradients of parameters, inputs and carries: ours by hand."""
    with against.precision(dtype):
        ours, theirs, args = calls(kind, dtype, *sizes)
        against.same_numbers(ours, theirs, *args)
        assert "custom_vjp_call" in str(jax.make_jaxpr(ours)(*args))


@ONE_EACH
def test_strict_promotion(calls, kind):
    ours, _, args = calls(kind, np.float32, 5, 3, 4, 6)
    against.alike_under_strict_promotion(lambda: jax.jit(ours)(*args))


@ONE_EACH
def test_forward_mode_of_the_plain_implementation(calls, kind):
    ours, theirs, args = calls(kind, np.float32, 3, 2, 4, 6)

    def along(f):
        return jax.jit(lambda *args: jax.jvp(f, args, randomized(args)))(*args)

    results = along(partial(ours, implementation="autodiff")), along(theirs)
    chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-5)


def haiku_init(unroll, kind):
    def model(x):
        core = getattr(hk, kind)(6)
        return unroll(core, x, core.initial_state(3)), hk.Linear(2)(x)

    return hk.transform(model).init


linen_init = lambda rnn, kind: rnn(getattr(nn, kind)(6)).init
UNROLLS = dm_haiku.dynamic_unroll, hk.dynamic_unroll


@pytest.mark.parametrize(
    "init, pair, kind",
    [
        *((linen_init, (flax_linen.RNN, nn.RNN), kind) for kind in FLAX),
        *((haiku_init, UNROLLS, kind) for kind in ("GRU", "LSTM")),
    ],
)
def test_the_same_parameters_are_drawn(init, pair, kind):
    x = normal(5, 3, 4, dtype=np.float32)
    ours, theirs = (jax.jit(init(run, kind))(KEY, x) for run in pair)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-6)


# --- Weights: of each library, something of theirs with random weights


def linen_params(cell):
    like = jax.eval_shape(nn.RNN(getattr(nn, cell)(6)).init, KEY, np.ones((3, 5, 4), np.float32))
    return randomized(like["params"]["cell"])


def haiku_params(core):
    model = hk.transform(lambda x, s: getattr(hk, core)(6)(x, s))
    state = carry_of(3, 6, np.float32, core == "LSTM")
    (params,) = jax.eval_shape(model.init, KEY, np.ones((3, 4), np.float32), state).values()
    return randomized(params)


def keras_layer(kind, **options):
    return against.keras_drawn(getattr(keras.layers, kind)(6, **options))


nnx_lstm = partial(flax_nnx.to_nnx, lstm=nnx.LSTMCell)
of_keras = lambda layer: layer.get_weights()
of_nnx = lambda cell: nnx.split(cell)[1]
itself = lambda params: params
FROM = {
    torch_nn.to_torch: lambda module: torch_nn.from_torch(module)[0],
    keras_layers.to_keras: keras_layers.from_keras,
    flax_nnx.to_nnx: flax_nnx.from_nnx,
    nnx_lstm: flax_nnx.from_nnx,
    flax_linen.to_linen: flax_linen.from_linen,
    equinox_nn.to_equinox: equinox_nn.from_equinox,
    dm_haiku.to_haiku: dm_haiku.from_haiku,
    onnx.to_onnx: lambda model: onnx.from_onnx(model)[0].layer,
}
THERE_AND_BACK = [
    *((partial(nnx_cell, k, dtype=dtype), nnx_lstm if k == "LSTMCell" else flax_nnx.to_nnx, of_nnx)
      for k in FLAX for dtype in (np.float32, np.float64)),
    *((partial(nnx_cell, k, activation_fn=jax.nn.relu), flax_nnx.to_nnx, of_nnx)
      for k in ("GRUCell", "OptimizedLSTMCell", "SimpleCell")),
    *((partial(linen_params, k), flax_linen.to_linen, itself) for k in FLAX),
    *((partial(equinox_cell, k), equinox_nn.to_equinox, itself) for k in ("GRUCell", "LSTMCell")),
    (partial(haiku_params, "GRU"), dm_haiku.to_haiku, itself),
    *((partial(keras_layer, k, **options), keras_layers.to_keras, of_keras)
      for k in ("GRU", "LSTM", "SimpleRNN") for options in ({}, {"activation": "relu"})),
    (partial(keras_layer, "GRU", reset_after=False), keras_layers.to_keras, of_keras),
]  # fmt: skip


@pytest.mark.parametrize("make, back, arrays", THERE_AND_BACK)
def test_weights_there_and_back(make, back, arrays):
    """Bit for bit, in both directions, as is the structure, which holds the sizes."""
    with jax.enable_x64(True):
        theirs = make()
        p = FROM[back](theirs)
        again = back(p)
        assert type(again) is type(theirs)
        assert same_bits(arrays(again), arrays(theirs))
        assert same_bits(FROM[back](again), p)
        if isinstance(theirs, nnx.Module):
            assert nnx.graphdef(again) == nnx.graphdef(theirs)


BEFORE = (dm_haiku.to_haiku, keras_layers.to_keras)
AFTER = (flax_linen.to_linen, flax_nnx.to_nnx, equinox_nn.to_equinox)


@pytest.mark.parametrize("back", BEFORE + AFTER)
def test_second_biases_become_the_first(back):
    """Of z and r, which act only in a sum; nnx's GRU has no cn, either."""
    p = layer("gru, second bias" if back in BEFORE else "gru after, second bias")
    p = p.replace(cn=jnp.zeros(6)) if back is flax_nnx.to_nnx else p
    b = jnp.concatenate([p.b[:12] + p.c, p.b[12:]])
    assert same_bits(FROM[back](back(p)), p.replace(b=b, c=None))


@pytest.mark.parametrize("back", [torch_nn.to_torch, keras_layers.to_keras])
def test_absent_second_biases_become_zeros(back):
    p = layer("gru after")
    zeros = jnp.zeros(6)
    # −0, because the sign of z changes
    assert same_bits(FROM[back](back(p)), p.replace(c=jnp.concatenate([-zeros, zeros])))


# --- Modules of our own layers, and what no library has


STACK = (layer("gru after"), layer("lstm", 6))
PAIR = ((layer("rnn"), layer("lstm", 12)), (layer("gru"), layer("rnn", 12)))


def linen_module(*args):
    module = flax_linen.Layer(*args)
    return module.bind(module.init(KEY, jnp.ones((3, 5, 4))))


MODULES = {"linen": linen_module, "nnx": flax_nnx.Layer, "equinox": equinox_nn.Layer}


@pytest.mark.parametrize("library", MODULES)
@pytest.mark.parametrize(
    "weights", [layer("gru, second bias"), STACK, PAIR, jaxgru.ResidualStack(STACK)]
)
def test_our_layers_are_modules(library, weights):
    """One, a stack, two directions: each computes what jaxgru's functions do, to rounding."""
    alike = partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-5)
    # Weights that are not rounded make 5e-3
    alike_narrow = partial(chex.assert_trees_all_close, atol=1e-3)
    make = MODULES[library]
    x = normal(3, 5, 4, dtype=np.float32)
    module = make(weights)
    options = dict(lengths=np.array([5, 0, 2]))
    two = weights is PAIR
    run = (lambda pair, *a, **o: jaxgru.bidirectional(*pair, *a, **o)) if two else jaxgru.unroll
    alike(module(x, **options), run(weights, x, **options))
    narrow = jaxgru.round_weights(weights, jnp.bfloat16)
    alike_narrow(make(weights, jnp.bfloat16)(x), run(narrow, x))
    if two:
        assert same_bits(module.initial_carry(3), tuple(jaxgru.initial_carry(p, 3) for p in PAIR))
    else:
        carry = jaxgru.initial_carry(weights, 3)
        assert same_bits(module.initial_carry(3), carry)
        alike(module.step(x[:, 0], carry), jaxgru.step(weights, x[:, 0], carry))
        rounded = make(weights, jnp.bfloat16).step(x[:, 0], carry)
        alike_narrow(rounded, jaxgru.step(narrow, x[:, 0], carry))
    assert same_bits(module.layer(), weights)


@pytest.mark.parametrize("library", MODULES)
def test_weights_of_a_module_drop(library):
    """Those of Flax's, which hold arrays by name, through their method `layer`."""
    module = MODULES[library](STACK)
    x = normal(3, 5, 4, dtype=np.float32)
    dropped = jaxgru.drop_weights(KEY, module.layer(), 0.5)
    assert all(0.3 < (p.U == 0).mean() < 0.7 for p in dropped)
    assert not same_bits(jaxgru.unroll(dropped, x), module(x))
    if library == "equinox":
        assert same_bits(jaxgru.drop_weights(KEY, module, 0.5).layers, dropped)
        return
    params = nnx.state(module) if library == "nnx" else module.variables
    for what in (module, params):
        with pytest.raises(ValueError, match=r"contains no jaxgru layers; .* method layer\(\) of"):
            jaxgru.drop_weights(KEY, what, 0.5)


GRU = layer("gru")
GRU_AFTER = layer("gru after")
RNN = layer("rnn")
after = "GRU.* whose reset gate acts after the product"
second = layer("gru after, second bias")
state_of_nnx = jax.jit(lambda p: nnx.state(flax_nnx.to_nnx(p)))

test_what_the_other_library_lacks = refused(
    (partial(torch_nn.to_torch, GRU), f"PyTorch has .* a {after}"),
    (partial(flax_nnx.to_nnx, GRU), f"Flax has .* a {after}"),
    (partial(flax_linen.to_linen, GRU), f"a {after}"),
    (partial(equinox_nn.to_equinox, GRU), f"a {after}"),
    (partial(dm_haiku.to_haiku, GRU_AFTER), "a GRU whose reset gate acts before the product"),
    (partial(flax_nnx.to_nnx, [GRU_AFTER]), "list cannot be converted: Flax has"),
    (partial(equinox_nn.to_equinox, RNN), "RNNCell cannot be .*: Equinox has an LSTMCell"),
    (partial(dm_haiku.to_haiku, RNN), "RNNCell cannot be converted: dm-haiku has an LSTM, an"),
    (partial(keras_layers.to_keras, {}), "dict cannot be converted: Keras has"),
    (partial(jax.jit(torch_nn.to_torch), GRU_AFTER), "PyTorch module needs the values of the wei"),
    (partial(jax.jit(keras_layers.to_keras), GRU), "a Keras layer needs the values of the wei"),
    (
        partial(
            jax.jit(torch_nn.from_torch),
            {"weight_ih_l0": np.ones((9, 2)), "weight_hh_l0": np.ones((9, 3))},
        ),
        "from_torch needs the values of the weights, which are not known",
    ),
    (partial(state_of_nnx, GRU_AFTER), "not known under a transformation; convert outside"),
    (partial(flax_nnx.to_nnx, second), "cn is not zero .* runs as it is in"),
    (partial(torch_nn.to_torch, ()), "there is no layer to convert"),
    (partial(keras_layers.to_keras, ([RNN] * 2, [RNN])), "are 2 forward and 1 backward layers"),
)


@pytest.mark.parametrize("back", [torch_nn.to_torch, keras_layers.to_keras, onnx.to_onnx])
def test_float64_that_jax_would_round(back):
    with jax.enable_x64(True):
        theirs = back(layer("rnn", dtype=np.float64))
    with pytest.raises(LibraryError, match="are float64, .* JAX_ENABLE_X64=1"):
        FROM[back](theirs)


@pytest.mark.parametrize("convert", [c for c in FROM if c not in (flax_linen.to_linen, nnx_lstm)])
@pytest.mark.parametrize("kind", ["gru", "gru after", "lstm", "rnn"])
def test_an_option_arrives_or_is_refused_by_name(convert, kind, monkeypatch):
    """Also one that no library has heard of. Without one, nothing is promoted."""
    plain = layer(kind)
    if kind == "gru after":
        plain = plain.replace(cn=jnp.zeros_like(plain.cn))
    with contextlib.suppress(LibraryError):
        theirs = convert(plain)  # the library has such a cell, which Keras cannot make strictly
        against.alike_under_strict_promotion(lambda: FROM[convert](theirs))
        for option in (dict(activation="relu"), dict(clip=0.5)):
            try:
                back = FROM[convert](convert(plain.replace(**option)))
            except LibraryError as error:
                assert "with {}={!r} cannot".format(*option.popitem()) in str(error)
            else:
                assert pytrees.options_of(back) == option
        if convert is not onnx.to_onnx:  # it writes any other cell's equations
            monkeypatch.setattr(common, "options_of", lambda p: {"peepholes": True})
            with pytest.raises(LibraryError) as refusal:
                convert(plain)
            assert "with peepholes=True cannot" in str(refusal.value)


def with_bias(cell, b):
    cell.dense_i.bias.set_value(b)
    return cell


LINEN = flax_linen.to_linen(GRU_AFTER)
HAIKU = dm_haiku.to_haiku(GRU)
KERAS = keras_layers.to_keras(RNN)
BIASED = {
    "nnx": lambda b: flax_nnx.from_nnx(with_bias(nnx_cell("GRUCell"), b)),
    "linen": lambda b: flax_linen.from_linen(LINEN | {"in": LINEN["in"] | {"bias": b}}),
    "equinox": lambda b: equinox_nn.from_equinox(
        eqx.tree_at(lambda cell: cell.bias, equinox_cell("GRUCell"), b)
    ),
    "haiku": lambda b: dm_haiku.from_haiku(HAIKU | {"b": b}),
    "keras": lambda b: keras_layers.from_keras(KERAS, [RNN.W, RNN.U, b]),
}


@pytest.mark.parametrize("library", BIASED)
@pytest.mark.parametrize(
    "bias, says",
    [
        ("b", "is str; it must be an array of a dtype that JAX supports"),
        (None, "(is NoneType; it must be an array|is missing)"),
        (np.ones(6, bool), "is bool; it must be floating-point"),
        (np.ones(6, np.int32), "is int32; it must be floating-point"),
        (1j, "is complex64; it must be floating-point"),
        (1.0, r"has shape \(\); it must be \("),
    ],
)
def test_what_is_no_bias(library, bias, says):
    with unchecked(), pytest.raises(ValueError, match=rf": the tensor (\w*\.)?b(ias)? {says}"):
        BIASED[library](bias)
