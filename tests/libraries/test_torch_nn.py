"""torch.nn's modules and ours: the same numbers in float64, and weights that go there and back."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import alike_under_strict_promotion, torch_gradients
from annotations import unchecked
from conftest import slow
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import random_params, same_bits

from jaxgru import LSTMState, bidirectional, cells, initial_carry, step, unroll
from jaxgru.libraries import InteropError
from jaxgru.libraries.torch_nn import from_torch, to_torch
from jaxgru.lm import ModelConfig, num_params

torch = pytest.importorskip("torch")
prune = pytest.importorskip("torch.nn.utils.prune")
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence  # noqa: E402

KINDS = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM, "rnn": torch.nn.RNN}


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def module(kind, E, H, L, dtype=torch.float64, seed=0, **options):
    """A module whose every weight and bias is random and not zero."""
    made = KINDS[kind](E, H, num_layers=L, dtype=dtype, **options)
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return made


def close(ours, theirs, tolerance=1e-10, dtype=np.float64):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.dtype == theirs.dtype == dtype
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


class TestTheSameNumbers:
    """What parity_tests/test_foreign.py and `TestTwoDirections` do not compute."""

    def test_one_step_is_torch_gru_cell(self):
        theirs = module("gru", 3, 4, 1)
        cell = torch.nn.GRUCell(3, 4, dtype=torch.float64)
        cell.load_state_dict({name[:-3]: w for name, w in theirs.state_dict().items()})
        x, h = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
        (p,) = from_torch(theirs)
        close(
            cells.gru_cell(p, jnp.asarray(h.numpy()), jnp.asarray(x.numpy())), cell(x, h).detach()
        )

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_module_without_biases(self, kind):
        theirs = module(kind, 3, 4, 2, bias=False)
        layers = from_torch(theirs)
        x = torch.randn(5, 2, 3, dtype=torch.float64)
        outputs, _ = unroll(layers, jnp.asarray(x.numpy()), time_major=True)
        close(outputs, theirs(x)[0].detach())
        if kind == "gru":
            assert layers[0].c is None and not layers[0].cn.any()


class TestResetAfter:
    @pytest.mark.parametrize("second_bias, biases", [(False, 4), (True, 6)])
    def test_a_model(self, second_bias, biases):
        """Counted by hand."""
        params = random_params(ModelConfig("gru", 5, 2, 3, second_bias=second_bias))
        assert num_params(params) == 5 * 2 + 3 * (2 * 3 + 3 * 3) + biases * 3 + (3 * 5 + 5)
        assert params.layers[0].reset_gate == "after"

    def test_init_is_pytorch_s_gru(self):
        """Without an option. The bias that the reset gate multiplies begins as zeros."""
        p = cells.init_gru(jax.random.key(0), 2, 3)
        assert not np.asarray(p.cn).any() and p.cn.shape == (3,)
        (again,) = from_torch(to_torch(p))
        assert same_bits(again.replace(c=None), p)


class TestTwoDirections:
    """Bidirectional stacks: `jaxgru.bidirectional` of the layers of both directions."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        "T, B, E, H, L, lengths, dtype, tolerance",
        [
            (1, 1, 2, 1, 1, None, np.float64, 1e-10),
            (5, 3, 4, 6, 2, [4, 1, 5], np.float64, 1e-10),
            *slow(
                (5, 3, 4, 6, 2, None, np.float64, 1e-10),
                (5, 3, 4, 6, 2, None, np.float32, 1e-4),
            ),
        ],
    )
    def test_forward_and_gradients(self, kind, T, B, E, H, L, lengths, dtype, tolerance):
        """Up to rounding: PyTorch's float32 gradients are up to 2e-5 from its float64 ones.

        With lengths, as of a sequence that is packed and padded again.
        """
        normal = lambda *shape: rng.standard_normal(shape).astype(dtype)
        same = partial(close, tolerance=tolerance, dtype=dtype)
        rng = np.random.default_rng(T)
        x = normal(T, B, E)
        states = [normal(2 * L, B, H) for _ in range(2 if kind == "lstm" else 1)]
        theirs = module(kind, E, H, L, getattr(torch, np.dtype(dtype).name), bidirectional=True)

        x_, *states_ = (torch.tensor(a, requires_grad=True) for a in (x, *states))
        given = pack_padded_sequence(x_, lengths, enforce_sorted=False) if lengths else x_
        outputs_, last_ = theirs(given, tuple(states_) if kind == "lstm" else states_[0])
        outputs_ = pad_packed_sequence(outputs_, total_length=T)[0] if lengths else outputs_
        lasts_ = list(last_) if kind == "lstm" else [last_]
        weights = [normal(*o.shape) for o in (outputs_, *lasts_)]
        pairs = zip(weights, (outputs_, *lasts_), strict=True)
        sum((torch.tensor(w) * o).sum() for w, o in pairs).backward()

        def scalar(directions, x, states):
            carries = [LSTMState(*s) if kind == "lstm" else s[0] for s in zip(*states, strict=True)]
            options = dict(lengths=lengths and jnp.array(lengths), time_major=True)
            y, ends = bidirectional(*directions, x, (carries[::2], carries[1::2]), **options)
            ends = [end for pair in zip(*ends, strict=True) for end in pair]
            ends = [jnp.stack(leaves) for leaves in zip(*map(jax.tree.leaves, ends), strict=True)]
            outputs = [y, *ends]
            return sum(jnp.sum(w * o) for w, o in zip(weights, outputs, strict=True)), outputs

        gradients, outputs = jax.jit(jax.grad(scalar, argnums=(0, 1, 2), has_aux=True))(
            from_torch(theirs), x, states
        )
        for ours, other in zip(outputs, (outputs_, *lasts_), strict=True):
            same(ours, other.detach())
        d_directions, d_x, d_states = gradients
        same(d_x, x_.grad)
        for ours, state in zip(d_states, states_, strict=True):
            same(ours, state.grad)
        jax.tree.map(same, d_directions, torch_gradients(theirs))

    @pytest.mark.parametrize("kind", KINDS)
    def test_bit_for_bit(self, kind):
        theirs = module(kind, 3, 4, 2, torch.float32, bidirectional=True)
        if kind != "gru":
            for name, weight in theirs.named_parameters():
                if "bias_hh" in name:  # acts only in a sum with the other
                    weight.data.zero_()
        again = to_torch(from_torch(theirs))
        assert list(again.state_dict()) == list(theirs.state_dict())
        for name, weight in theirs.state_dict().items():
            assert again.state_dict()[name].numpy().tobytes() == weight.numpy().tobytes()

    def test_refusals(self):
        forward, backward = from_torch(module("gru", 3, 4, 2, bidirectional=True))
        with pytest.raises(InteropError, match="there are 2 forward and 1 backward layers"):
            to_torch(forward, backward[:1])
        with pytest.raises(InteropError, match="layer 1 is 4 → 4, .* it must be 8 → 4"):
            stack = from_torch(module("gru", 3, 4, 2))
            to_torch(stack, stack)

    def test_what_takes_layers_of_one_direction_says_so(self):
        """`from_torch` returns a pair, which looks like a stack."""
        both, x = from_torch(module("gru", 3, 4, 2, bidirectional=True)), jnp.ones((2, 5, 3))
        says = r"layers is a pair, .* call jaxgru.bidirectional\(\*pair, x\)"
        for call in (
            lambda: unroll(both, x),
            lambda: step(both, x[:, 0], ()),
            lambda: initial_carry(both, 2),
        ):
            with unchecked(), pytest.raises(ValueError, match=says):
                call()


class TestThereAndBack:
    @settings(max_examples=15, deadline=None)
    @given(
        kind=st.sampled_from(sorted(KINDS)),
        E=st.integers(1, 4),
        H=st.integers(1, 4),
        L=st.integers(1, 3),
        double=st.booleans(),
        seed=st.integers(0, 99),
    )
    def test_bit_for_bit(self, kind, E, H, L, double, seed):
        theirs = module(kind, E, H, L, torch.float64 if double else torch.float32, seed)
        layers = from_torch(theirs)
        again = to_torch(layers)
        assert type(again) is type(theirs)
        assert again.state_dict().keys() == theirs.state_dict().keys()
        for name, tensor in theirs.state_dict().items():
            if kind != "gru" and name.startswith("bias_ih"):
                tensor = tensor + theirs.state_dict()[name.replace("_ih", "_hh")]
            elif kind != "gru" and name.startswith("bias_hh"):
                tensor = torch.zeros_like(tensor)
            assert again.state_dict()[name].dtype == tensor.dtype
            assert torch.equal(again.state_dict()[name], tensor)
        assert same_bits(from_torch(again), layers)

    def test_single_biases_become_second_ones_of_zero(self):
        config = ModelConfig(embedding_dim=3, hidden_dim=4, num_layers=2)
        layers = random_params(config).layers
        again = from_torch(to_torch(layers))
        for layer, second in zip(layers, again, strict=True):
            assert not np.asarray(second.c).any()
            assert same_bits(second.replace(c=None), layer)

    def test_options_that_change_no_weight(self):
        plain = module("lstm", 3, 4, 2)
        other = module("lstm", 3, 4, 2, batch_first=True, dropout=0.5)
        assert same_bits(from_torch(plain), from_torch(other))

    @pytest.mark.parametrize("kind", KINDS)
    def test_nothing_is_shared(self, kind):
        """Training a module must not move our arrays, nor making one PyTorch's generator."""
        theirs = module(kind, 16, 16, 1)
        layers = from_torch(theirs)
        before = jax.tree.map(np.array, layers)
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.add_(1)
        assert same_bits(layers, before)
        generator = torch.random.get_rng_state()
        made = to_torch(layers)
        assert torch.equal(torch.random.get_rng_state(), generator)
        with torch.no_grad():
            made.weight_hh_l0.zero_()
        assert same_bits(layers, before)

    def test_the_module_can_be_trained(self):
        made = to_torch(from_torch(module("gru", 2, 3, 2)))
        made(torch.randn(4, 1, 2, dtype=torch.float64))[0].sum().backward()
        assert all(parameter.grad is not None for parameter in made.parameters())


class TestStateDicts:
    """The same layers as of the module, also from NumPy arrays, where PyTorch is not needed."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        "E, H, L, options",
        [(3, 4, 3, {"bidirectional": True}), (1, 1, 1, {"bias": False}), (2, 33, 1, {})],
    )
    def test_those_of_modules(self, kind, E, H, L, options, monkeypatch):
        theirs = module(kind, E, H, L, **options)
        want, cell = from_torch(theirs), "rnn" if kind == "rnn" else None
        state = theirs.state_dict()
        assert same_bits(from_torch(state, cell=cell), want)
        monkeypatch.setitem(__import__("sys").modules, "torch", None)
        arrays = {name: weight.numpy() for name, weight in state.items()}
        assert same_bits(from_torch(arrays, cell=kind), want)

    @pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"bias": False}])
    def test_a_projection(self, options):
        theirs = module("lstm", 3, 4, 2, proj_size=2, **options)
        assert same_bits(from_torch(theirs.state_dict()), from_torch(theirs))

    def test_on_the_cpu_with_gradients(self):
        theirs = module("lstm", 3, 4, 1)
        assert same_bits(from_torch(dict(theirs.named_parameters())), from_torch(theirs))

    @pytest.mark.parametrize(
        "change, cell, says",
        [
            (lambda s: s.pop("weight_hh_l0"), None, "the matrix weight_hh_l0 is missing.$"),
            (lambda s: s.pop("bias_hh_l0"), None, "the tensor bias_hh_l0 is missing"),
            (
                lambda s: s.update(scale=s["bias_ih_l0"]),
                None,
                "the tensor scale does not belong",
            ),
            (
                lambda s: s.update(weight_ih_l0=s["bias_ih_l0"]),
                None,
                "the matrix weight_ih_l0 is missing",
            ),
            (lambda s: s.update(weight_hr_l0=s["weight_hh_l0"]), None, "weight_hr_l0 has shape"),
            (lambda s: s.update(weight_hr_l0=s["weight_hh_l0"][:4]), None, "is an LSTM's, but the"),
            (
                lambda s: None,
                "lstm",
                r"\(12, 3\) and weight_hh_l0 \(12, 4\) do not fit cell='lstm'",
            ),
            (
                lambda s: s.update(weight_hh_l0=s["bias_hh_l0"][:, None]),
                None,
                "do not fit a GRU, an LSTM o",
            ),
            (
                lambda s: [s.update({f"rnn.{name}": s.pop(name)}) for name in list(s)],
                None,
                "weight_ih_l0 is missing, but 'rnn.weight_ih_l0' is there; pass that",
            ),
        ],
    )
    def test_refusals(self, change, cell, says):
        state = dict(module("gru", 3, 4, 1).state_dict())
        change(state)
        with pytest.raises(InteropError, match=says):
            from_torch(state, cell=cell)

    def test_what_the_weights_alone_do_not_say(self):
        with pytest.raises(InteropError, match='nonlinearity; if it is tanh, pass cell="rnn"'):
            from_torch(module("rnn", 3, 4, 1).state_dict())
        with pytest.raises(
            InteropError, match="cell is 'gru'; leave it out, because only a state_dict needs it"
        ):
            from_torch(module("gru", 3, 4, 1), cell="gru")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("E, H, bias", [(3, 5, True), (1, 1, False)])
def test_cells(kind, E, H, bias):
    """A cell becomes one layer, whose step is the cell's call."""
    theirs = getattr(torch.nn, f"{kind.upper()}Cell")(E, H, bias=bias, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    rng = np.random.default_rng(0)
    x, *states = (rng.standard_normal((2, size)) for size in (E, *[H] * (1 + (kind == "lstm"))))
    as_torch = [torch.from_numpy(state) for state in states]
    with torch.no_grad():
        after = theirs(torch.from_numpy(x), tuple(as_torch) if kind == "lstm" else as_torch[0])
    p = from_torch(theirs)
    assert same_bits(from_torch(theirs.state_dict(), cell=kind), p)
    h, carry = step(p, x, LSTMState(*states) if kind == "lstm" else states[0])
    for ours, other in zip(
        jax.tree.leaves(carry), after if kind == "lstm" else [after], strict=True
    ):
        close(ours, other)
    close(h, jax.tree.leaves(carry)[0])


def test_strict_promotion():
    theirs = module("lstm", 3, 4, 2, bidirectional=True)
    alike_under_strict_promotion(
        lambda: (from_torch(theirs), from_torch(to_torch(from_torch(theirs))))
    )


def test_one_layer_needs_no_list():
    p = cells.init_lstm(jax.random.key(0), 2, 3)
    with torch.no_grad():
        alone, listed = to_torch(p), to_torch([p])
        x = torch.ones(4, 1, 2)
        assert torch.equal(alone(x)[0], listed(x)[0])


class TestRefusals:
    @pytest.mark.parametrize(
        "make, says",
        [
            (lambda: torch.nn.RNN(2, 3, nonlinearity="relu"), "nonlinearity is relu"),
            (lambda: torch.nn.Linear(2, 3), "a Linear cannot be converted"),
            (lambda: torch.nn.RNNCell(2, 3, nonlinearity="relu"), "nonlinearity is relu"),
            (lambda: torch.nn.GRUCell(2, 3, device="meta"), "on the device meta"),
            (lambda: torch.nn.GRU(2, 3, dtype=torch.bfloat16), "are bfloat16"),
            (
                lambda: torch.nn.GRU(2, 3, device="meta"),
                "on the device meta, where weights have no",
            ),
            (lambda: None, "a NoneType cannot be converted"),
        ],
    )
    def test_modules(self, make, says):
        with pytest.raises(InteropError, match=says):
            from_torch(make())

    @pytest.mark.parametrize(
        "change, says",
        [
            (
                lambda m: torch.nn.utils.weight_norm(m, "weight_hh_l0"),
                "has forward hooks, .* call torch.nn.utils.remove_weight_norm",
            ),
            (lambda m: torch.nn.utils.spectral_norm(m, "weight_hh_l0"), "has forward hooks"),
            (lambda m: prune.l1_unstructured(m, "weight_hh_l0", 0.5), "has forward hooks"),
            (lambda m: m.register_forward_hook(lambda m, x, y: y), "has forward hooks"),
            (lambda m: setattr(m, "forward", lambda x: x), "or a forward of its own"),
            (
                lambda m: torch.nn.utils.parametrizations.weight_norm(m, "weight_hh_l0"),
                "weight_hh_l0 of this ParametrizedLSTM is parametrized, .*remove_parametrizations",
            ),
            (
                lambda m: m.register_parameter("bias_n", torch.nn.Parameter(torch.ones(3))),
                "this LSTM: the tensor bias_n does not belong there",
            ),
            (lambda m: m.register_buffer("scale", torch.ones(3)), "the tensor scale does not"),
            (lambda m: m.add_module("lora", torch.nn.Linear(1, 1)), "the tensor lora.bias does"),
        ],
    )
    @pytest.mark.filterwarnings("ignore::FutureWarning")
    def test_what_may_change_what_a_module_computes(self, change, says):
        """Behind hooks the weights are stale until the next call: they are not those computed."""
        lstm = torch.nn.LSTM(2, 3)
        change(lstm)
        with pytest.raises(InteropError, match=says):
            from_torch(lstm)

    def test_a_subclass(self):
        class Doubled(torch.nn.LSTM):
            def forward(self, x, hx=None):
                y, h = super().forward(x, hx)
                return 2 * y, h

        with pytest.raises(InteropError, match="a Doubled may compute .* convert its state_dict"):
            from_torch(Doubled(2, 3))

    @pytest.mark.filterwarnings("ignore::FutureWarning")
    def test_normalized_and_pruned_weights_once_they_are_fixed(self):
        """As the sentence says; their own values changed before, which only `remove` sees."""
        normed, pruned, parametrized = (torch.nn.LSTM(2, 3) for _ in range(3))
        torch.nn.utils.weight_norm(normed, "weight_hh_l0").weight_hh_l0_g.data.mul_(2)
        torch.nn.utils.remove_weight_norm(normed, "weight_hh_l0")
        prune.l1_unstructured(pruned, "weight_hh_l0", 0.5).weight_hh_l0_orig.data.mul_(2)
        prune.remove(pruned, "weight_hh_l0")
        torch.nn.utils.parametrizations.weight_norm(parametrized, "weight_hh_l0")
        parametrized.parametrizations.weight_hh_l0.original0.data.mul_(2)
        torch.nn.utils.parametrize.remove_parametrizations(parametrized, "weight_hh_l0")
        x = torch.randn(4, 1, 2)
        for lstm in (normed, pruned, parametrized):
            ours, _ = unroll(from_torch(lstm), x.numpy(), time_major=True)
            np.testing.assert_allclose(ours, lstm(x)[0].detach(), atol=1e-6)

    def test_float64_where_jax_would_round_it(self):
        with jax.enable_x64(False), pytest.raises(InteropError, match="JAX_ENABLE_X64"):
            from_torch(module("rnn", 2, 3, 1))

    def layers(self, **config):
        return random_params(ModelConfig(embedding_dim=2, hidden_dim=3, **config)).layers

    def test_layers(self):
        after = self.layers(num_layers=2)
        with pytest.raises(InteropError, match="there is no layer"):
            to_torch(())
        with pytest.raises(InteropError, match="this GRU before it, so it cannot be converted"):
            to_torch(self.layers(reset_gate="before"))
        with pytest.raises(InteropError, match="of one kind"):
            to_torch([*self.layers(cell="rnn"), *self.layers(cell="lstm")])
        with pytest.raises(InteropError, match="all float32 or all float64"):
            to_torch(jax.tree.map(lambda w: w.astype(jnp.bfloat16), after))
        with pytest.raises(InteropError, match="all float32 or all float64"):
            to_torch([after[0], jax.tree.map(lambda w: w.astype(jnp.float64), after[1])])
        with pytest.raises(InteropError, match="layer 1 is 2 → 3, .* it must be 3 → 3"):
            to_torch([after[0], after[0]])
        with pytest.raises(InteropError, match="a dict cannot be converted: PyTorch has a GRU"):
            to_torch([{}])
        with pytest.raises(InteropError, match="a PyTorch module needs the values of the weights"):
            jax.jit(to_torch)(after)

    def test_without_pytorch(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "torch", None)
        with pytest.raises(InteropError, match="PyTorch is needed but not installed"):
            from_torch(None)
