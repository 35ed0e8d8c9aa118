"""What is torch.nn's own: two directions, cells, state dicts, modules that compute otherwise."""

from __future__ import annotations

from functools import partial

import against
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import carry_of, layer, normal, refused
from conftest import slow
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import same_bits

from jaxgru import LSTMState, bidirectional, initial_carry, step, unroll
from jaxgru.libraries import LibraryError
from jaxgru.libraries.torch_nn import from_torch, to_torch

torch = pytest.importorskip("torch")
prune = pytest.importorskip("torch.nn.utils.prune")
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence  # noqa: E402

KINDS = {
    "gru": torch.nn.GRU,
    "lstm": torch.nn.LSTM,
    "rnn": torch.nn.RNN,
    "rnn_relu": partial(torch.nn.RNN, nonlinearity="relu"),
}


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def module(kind, E, H, L, dtype=torch.float64, **options):
    """A module whose every weight and bias is random and not zero."""
    return drawn(KINDS[kind](E, H, num_layers=L, dtype=dtype, **options))


def drawn(made):
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return made


def close(ours, theirs, tolerance=1e-10, dtype=np.float64):
    ours = np.asarray(ours)
    theirs = np.asarray(theirs)
    assert ours.dtype == theirs.dtype == dtype
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_without_biases(kind):
    theirs = module(kind, 3, 4, 2, bias=False)
    layers = from_torch(theirs)
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    outputs, _ = unroll(layers, jnp.asarray(x.numpy()), time_major=True)
    close(outputs, theirs(x)[0].detach())
    if kind == "gru":
        assert layers[0].c is None and not layers[0].cn.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "T, B, E, H, L, lengths, dtype, tolerance",
    [
        (1, 1, 2, 1, 1, None, np.float64, 1e-10),
        (5, 3, 4, 6, 2, [4, 1, 5], np.float64, 1e-10),
        *slow((5, 3, 4, 6, 2, None, np.float64, 1e-10), (5, 3, 4, 6, 2, None, np.float32, 1e-4)),
    ],
)
def test_forward_and_gradients(kind, T, B, E, H, L, lengths, dtype, tolerance):
    """Up to rounding: PyTorch's float32 gradients are up to 2e-5 from its float64 ones.

    With lengths, as of a sequence that is packed and padded again.
    """
    same = partial(close, tolerance=tolerance, dtype=dtype)
    x = normal(T, B, E, dtype=dtype)
    count = 2 if kind == "lstm" else 1
    states = [normal(2 * L, B, H, dtype=dtype, seed=3 + i) for i in range(count)]
    theirs = module(kind, E, H, L, getattr(torch, np.dtype(dtype).name), bidirectional=True)

    x_, *states_ = (torch.tensor(a, requires_grad=True) for a in (x, *states))
    packed = pack_padded_sequence(x_, lengths, enforce_sorted=False) if lengths else x_
    outputs_, last_ = theirs(packed, tuple(states_) if kind == "lstm" else states_[0])
    outputs_ = pad_packed_sequence(outputs_, total_length=T)[0] if lengths else outputs_
    lasts_ = list(last_) if kind == "lstm" else [last_]
    results_ = [outputs_, *lasts_]
    torch.autograd.backward(results_, [*map(torch.tensor, against.weights_of(results_, dtype))])

    def ours(directions, x, states):
        carries = [LSTMState(*s) if kind == "lstm" else s[0] for s in zip(*states, strict=True)]
        options = dict(lengths=lengths and jnp.array(lengths), time_major=True)
        y, ends = bidirectional(*directions, x, (carries[::2], carries[1::2]), **options)
        ends = [end for pair in zip(*ends, strict=True) for end in pair]
        return [y, *(jnp.stack(s) for s in zip(*map(jax.tree.leaves, ends), strict=True))]

    results, gradients = against.value_and_gradients(ours, from_torch(theirs), x, states)
    jax.tree.map(same, results, [result.detach() for result in results_])
    expected = against.torch_gradients(theirs), x_.grad, [state.grad for state in states_]
    jax.tree.map(same, gradients, expected)


@settings(max_examples=5, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    E=st.integers(1, 4),
    H=st.integers(1, 4),
    L=st.integers(1, 3),
    two=st.booleans(),
    double=st.booleans(),
)
def test_there_and_back_bit_for_bit(kind, E, H, L, two, double):
    theirs = module(kind, E, H, L, torch.float64 if double else torch.float32, bidirectional=two)
    layers = from_torch(theirs)
    again = to_torch(layers)
    assert type(again) is type(theirs)
    wanted = theirs.state_dict()
    for name in [name for name in wanted if kind != "gru" and name.startswith("bias_ih")]:
        second = name.replace("_ih", "_hh")  # only their sum acts
        wanted |= {name: wanted[name] + wanted[second], second: torch.zeros_like(wanted[second])}

    def as_numpy(state):
        return {name: weight.numpy() for name, weight in state.items()}

    assert same_bits(as_numpy(again.state_dict()), as_numpy(wanted))
    assert same_bits(from_torch(again), layers)


def test_options_that_change_no_weight():
    plain = module("lstm", 3, 4, 2)
    other = module("lstm", 3, 4, 2, batch_first=True, dropout=0.5)
    layers = from_torch(other)
    assert same_bits(from_torch(plain), layers)
    x = torch.randn(3, 5, 3, dtype=torch.float64)
    with jax.enable_x64(True), torch.no_grad():
        y, (h, _) = to_torch(layers, batch_first=True)(x)
        ours, carry = unroll(layers, x.numpy())
        np.testing.assert_allclose(y, ours, rtol=1e-12)
        np.testing.assert_allclose(h[1], carry[1].h, rtol=1e-12)


def test_nothing_is_shared():
    """Training a module must not move our arrays, nor making one PyTorch's generator."""
    theirs = module("gru", 16, 16, 1)
    layers = from_torch(theirs)
    before = jax.tree.map(np.array, layers)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(1)
    assert same_bits(layers, before)
    generator = torch.random.get_rng_state()
    made = to_torch(layers)
    assert torch.equal(torch.random.get_rng_state(), generator)
    made(torch.randn(4, 1, 16, dtype=torch.float64))[0].sum().backward()
    assert all(parameter.grad is not None for parameter in made.parameters())
    with torch.no_grad():
        made.weight_hh_l0.zero_()
    assert same_bits(layers, before)


@pytest.mark.parametrize(
    "kind, options",
    [
        ("gru", {"bidirectional": True}),
        ("lstm", {"bias": False}),
        ("rnn", {"bidirectional": True}),
        ("rnn_relu", {}),
        ("lstm", {"proj_size": 2, "bidirectional": True}),
    ],
)
def test_state_dicts(kind, options, monkeypatch):
    """The same layers as of the module, also from NumPy arrays, where PyTorch is not needed."""
    theirs = module(kind, 3, 4, 2, **options)
    want = from_torch(theirs)
    cell = kind if "rnn" in kind else None
    assert same_bits(from_torch(theirs.state_dict(), cell=cell), want)
    assert same_bits(from_torch(dict(theirs.named_parameters()), cell=kind), want)
    parts = torch.nn.ModuleDict({"1": theirs, "0": module("gru", 1, 2, 1)})
    model = torch.nn.ModuleDict({"gru": parts})
    for prefix in ("gru.1", "gru.1."):
        assert same_bits(from_torch(model.state_dict(), cell=kind, prefix=prefix), want)
    arrays = {name: weight.numpy() for name, weight in theirs.state_dict().items()}
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert same_bits(from_torch(arrays, cell=kind), want)
    with pytest.raises(LibraryError, match="PyTorch is needed but not installed"):
        from_torch(None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("E, H, bias", [(3, 5, True), (1, 1, False)])
def test_cells(kind, E, H, bias):
    """A cell becomes one layer, whose step is the cell's call."""
    name = kind.removesuffix("_relu")
    options = {"nonlinearity": "relu"} if name != kind else {}
    make = getattr(torch.nn, f"{name.upper()}Cell")
    theirs = drawn(make(E, H, bias=bias, dtype=torch.float64, **options))
    x = normal(2, E)
    carry = carry_of(2, H, np.float64, kind == "lstm")
    with torch.no_grad():
        after = theirs(torch.from_numpy(x), jax.tree.map(torch.from_numpy, carry))
    p = from_torch(theirs)
    assert same_bits(from_torch(theirs.state_dict(), cell=kind), p)
    h, carry = step(p, x, LSTMState(*carry) if kind == "lstm" else carry)
    jax.tree.map(close, jax.tree.leaves(carry), jax.tree.leaves(after))
    close(h, jax.tree.leaves(carry)[0])


def state(cell=None, **changes):
    """The conversion of a GRU's state dict with some tensors changed; None: without it."""
    tensors = module("gru", 3, 4, 1).state_dict() | changes
    return lambda: from_torch({n: w for n, w in tensors.items() if w is not None}, cell=cell)


def changed(change):
    """The conversion of an LSTM that may compute something else."""

    def convert():
        lstm = torch.nn.LSTM(2, 3)
        change(lstm)
        from_torch(lstm)

    return convert


class Doubled(torch.nn.LSTM):
    def forward(self, x, hx=None):
        y, h = super().forward(x, hx)
        return 2 * y, h


def both():
    return from_torch(module("gru", 3, 4, 2, bidirectional=True))


utils = torch.nn.utils
ones = torch.ones
LARGER = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.GRU(2, 3), torch.nn.LSTM(2, 3)])
LARGER = LARGER.state_dict()
GATES = torch.nn.GRU(2, 3).state_dict()
RELU = torch.nn.RNN(2, 3, nonlinearity="relu")


stale = r"LSTM .* without hooks, parametrized weights .*remove_weight_norm"
of_two = r"layers is a pair, .* call jaxgru.bidirectional\("

# Behind hooks the weights are stale until the next call: they are not those computed
test_refusals = pytest.mark.filterwarnings("ignore::FutureWarning")(
    refused(
        (lambda: from_torch(RELU, cell="rnn"), "RNN is not that of cell='rnn'; .* is rnn_relu"),
        (lambda: from_torch(GATES, cell="rnn_relu"), "not that of cell='rnn_relu': weight_ih"),
        (lambda: to_torch([layer("rnn"), layer("rnn, relu", 6)]), "has one for all"),
        (lambda: from_torch(torch.nn.Linear(2, 3)), "Linear cannot be converted"),
        (lambda: from_torch(LARGER), r"pass the prefix .*: its recurrent modules are 1, 2\.$"),
        (lambda: from_torch(LARGER, prefix="3"), r"the prefix '3'; its .* modules are 1, 2\.$"),
        (lambda: from_torch(torch.nn.GRU(2, 3), prefix="a"), "prefix 'a' is for a state_dict"),
        (lambda: from_torch(torch.nn.GRU(2, 3, dtype=torch.bfloat16)), "are bfloat16"),
        (lambda: from_torch(Doubled(2, 3)), "Doubled .* without hooks, .* methods of its own"),
        (changed(lambda m: utils.weight_norm(m, "weight_hh_l0")), stale),
        (changed(lambda m: prune.l1_unstructured(m, "weight_hh_l0", 0.5)), stale),
        (changed(lambda m: m.register_forward_hook(lambda m, x, y: y)), stale),
        (changed(lambda m: utils.parametrizations.weight_norm(m, "weight_hh_l0")), stale),
        (state(bias_hh_l0=None), "the tensor bias_hh_l0 is missing"),
        (state(weight_hr_l0=ones(4, 4)), "the tensor weight_hr_l0 does not belong"),
        (state("lstm"), r"not that of cell='lstm': weight_ih_l0 has shape \(12, 3\), weight_h"),
        (lambda: from_torch(module("rnn", 3, 4, 1).state_dict()), 'if it is tanh, pass cell="rnn'),
        (lambda: from_torch(module("gru", 3, 4, 1), cell="lstm"), "GRU is not that of cell='ls"),
        (lambda: to_torch([layer("gru after")] * 2), "below it has 6 features .* layer 1 takes"),
        (lambda: to_torch([layer("gru after"), layer("lstm", 6)]), "of one kind and size"),
        (lambda: to_torch([layer("gru after"), {}]), "^dict cannot be converted: PyTorch has"),
        # What `from_torch` returns of two directions looks like a stack
        (lambda: unroll(both(), ones((2, 5, 3)).numpy()), of_two),
        (lambda: step(both(), ones((2, 3)).numpy(), ()), of_two),
        (lambda: initial_carry(both(), 2), of_two),
    )
)
