"""Dropout by its equations, in NumPy; which masks there are, and that they are a whole's parts."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import randomized
from conftest import slow
from equations import gru, lstm, mogrifier, numbers

import jaxgru
from jaxgru import Dropout
from jaxgru.cells import Cell, struct
from jaxgru.layers.dropout import KINDS, SITES, in_two_directions, seed_dropout
from jaxgru.layers.masks import dropout_masks

KEY = jax.random.key(1)
F = 3
H = 5

pytestmark = pytest.mark.usefixtures("float64")


def problem(make, H=H):
    """A layer whose every weight is random, an input, and a carry."""
    layer = jax.eval_shape(lambda: make(KEY, F, H, dtype=jnp.float64))
    x = np.zeros((2, 4, F))
    carry = jaxgru.initial_carry(randomized(layer), 2)
    return randomized((layer, x, carry))


def projected_lstm(p, carry, x, m):
    m_h, c = lstm(p, carry, x, m)
    return m_h @ p.P, c


CELLS = {
    "mogrifier": (jaxgru.init_mogrifier_gru, mogrifier),
    "gru, reset before": (partial(jaxgru.init_gru, reset_gate="before"), gru),
    "gru": (jaxgru.init_gru, gru),
    "lstm": (jaxgru.init_lstm, lstm),
    # P's factor is as wide as h, but it is not masked
    "projected lstm": (lambda *a, **k: jaxgru.init_lstm(*a, **k, proj_size=a[2]), projected_lstm),
}


@pytest.mark.parametrize("H", [5, *slow(1, 33)])
@pytest.mark.parametrize("kind", CELLS)
def test_variational_dropout_at_the_state(kind, H):
    """The same mask at every step, where h enters the products."""
    make, equations = CELLS[kind]
    layer, x, carry = problem(make, H)
    dropout = Dropout(KEY, 0.25, "state", "variational")
    (masks,) = dropout_masks([layer], dropout, 2, 4)
    m = np.asarray(masks.recurrent.keep) / 0.75
    after = carry
    expected = []
    for t in range(4):
        after = equations(numbers(layer), after, x[:, t], m)
        expected.append(after[0] if "lstm" in kind else after)
    y, end = jaxgru.unroll(layer, x, carry, dropout=dropout)
    # Some sums of terms of about 1 nearly cancel: a rounding is then relatively large
    close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-15)
    close(y, np.stack(expected, 1))
    jax.tree.map(close, tuple(end), tuple(after))


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize(
    "kind, rate",
    [("lstm", 0.25), ("lstm", (0.25, 0.75)), ("lstm", (0.0, 0.5)), *slow(("gru", 0.25))],
)
def test_zoneout(kind, rate, mean):
    """Krueger et al. 2017, equations 4 and 5: h and c keep old values, each by its own mask."""
    make, equations = CELLS[kind]
    layer, x, carry = problem(make)
    dropout = Dropout(None if mean else KEY, rate, "state", "zoneout")
    (masks,) = dropout_masks([layer], dropout, 2, 4)
    updates = jax.tree.leaves(masks.zoneout)
    rates = rate if isinstance(rate, tuple) else (rate,) * len(updates)

    def step(parts, x):
        """Of a carry as a tuple of its parts."""
        if kind == "lstm":
            return equations(numbers(layer), parts, x)
        (h,) = parts
        return (equations(numbers(layer), h, x),)

    def shares(t):
        """How much of each part is new."""
        if mean:
            return [1 - rate for rate in rates]
        return [np.asarray(update[t]) for update in updates]

    assert mean or len({u.tobytes() for u in map(np.asarray, updates)}) == len(updates)
    parts = carry if kind == "lstm" else (carry,)
    for t in range(4):
        triples = zip(shares(t), step(parts, x[:, t]), parts, strict=True)
        parts = tuple(share * new + (1 - share) * old for share, new, old in triples)
    y, end = jaxgru.unroll(layer, x, carry, dropout=dropout)
    np.testing.assert_allclose(y[:, -1], parts[0], 1e-12)
    for seen, expected in zip(jax.tree.leaves(end), parts, strict=True):
        np.testing.assert_allclose(seen, expected, 1e-12)


ZEROS = [0, np.float32(0), np.int64(0), jnp.int32(0)]


@pytest.mark.parametrize("of_h", [0.25, jnp.float32(0.25)])
@pytest.mark.parametrize("of_c", ZEROS, ids=lambda rate: type(rate).__name__)
def test_a_pair_of_rates_of_any_two_kinds(of_h, of_c):
    layer, x, carry = problem(jaxgru.init_lstm)

    def run(rates):
        dropout = Dropout(KEY, rates, "state", "zoneout")
        return jaxgru.unroll(layer, x, carry, dropout=dropout)

    for rates, same in (((of_h, of_c), (0.25, 0.0)), ((of_c, of_h), (0.0, 0.25))):
        chex.assert_trees_all_close(run(rates), run(same), rtol=1e-12)


@pytest.mark.parametrize("rate", [0.25, (np.float32(0.25), 0), (jnp.float32(0.25), 0)])
def test_a_dropout_is_exported_and_restored(rate):
    """With its structure: a rate that is a number, a site and a kind."""
    layer, x, carry = problem(jaxgru.init_lstm)
    dropout = Dropout(KEY, rate, "state", "zoneout")
    run = jax.jit(lambda x, dropout: jaxgru.unroll(layer, x, carry, dropout=dropout))
    program = jax.export.export(run)(x, dropout).serialize()
    restored = jax.export.deserialize(program).call
    chex.assert_trees_all_equal(restored(x, dropout), run(x, dropout))


def test_eager_dropout_transfers_nothing_implicitly():
    layer, x, carry = jax.device_put(problem(jaxgru.init_lstm))
    dropout = Dropout(KEY, 0.25, "state")
    for each in (dropout, dropout.replace(first_row=3, first_step=2**31), dropout.replace(rate=0)):
        with jax.transfer_guard("disallow"):
            jaxgru.unroll(layer, x, carry, dropout=each)


# --- Which masks


def masks(dropout, L=3, B=6, T=7, H=H):
    stack = [jaxgru.init_lstm(KEY, F if i == 0 else H, H) for i in range(L)]
    return dropout_masks(stack, dropout, B, T)


@pytest.mark.parametrize("L", [3, *slow(1)])
@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("kind", ["each_step", "variational"])
def test_sites(site, kind, L):
    """Which layers have which mask."""
    fields = {
        "input": "input",
        "state": "recurrent" if kind == "variational" else "hidden",
        "between": "output",
        "output": "output",
    }
    layers_at = {
        "input": [0],
        "state": [*range(L)],
        "between": [*range(L - 1)],
        "output": [L - 1],
    }
    for i, layer in enumerate(jax.eval_shape(lambda: masks(Dropout(KEY, 0.5, site, kind), L))):
        names = ("input", "hidden", "recurrent", "output")
        present = [name for name in names if getattr(layer, name).keep is not None]
        expected = [fields[site]] if i in layers_at[site] else []
        assert present == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("H", [130, *slow(1, 4, 5)])
def test_a_rows_masks_are_the_same_in_a_part_of_the_batch(kind, H):
    """What lets a batch be split over devices, and a sequence into parts computed anew."""

    def draw(B, T, **offsets):
        dropout = Dropout(KEY, 0.4, "state", kind, **offsets)
        return jax.tree.leaves(jax.jit(lambda: masks(dropout, 2, B, T, H))())

    whole = draw(6, 7)
    parts = draw(2, 3, first_row=3, first_step=4)
    compared = 0
    for mask, part in zip(whole, parts, strict=True):
        if mask.ndim == 3:
            np.testing.assert_array_equal(part, mask[4:, 3:5])
        elif mask.ndim == 2:
            np.testing.assert_array_equal(part, mask[3:5])
        compared += mask.ndim > 0
    assert compared == (4 if kind == "zoneout" else 2)


@pytest.mark.parametrize("site", ["input", "between"])
def test_a_variational_mask_does_not_change_with_the_step(site):
    first, *_ = masks(Dropout(KEY, 0.4, site, "variational"))
    keep = np.asarray((first.input if site == "input" else first.output).keep)
    assert (keep == keep[:1]).all() and len({row.tobytes() for row in keep[0]}) > 1


def test_the_scale_is_that_of_the_rate_that_16_bits_have():
    """parity_tests/test_models.py tests the masks themselves, and what they do."""
    (mask,) = masks(Dropout(KEY, 0.1, "state"), 1)
    assert float(mask.hidden.scale) == pytest.approx(1 / (1 - 6554 / 65536), rel=1e-7)


@pytest.mark.parametrize("site", SITES)
def test_two_directions_have_masks_of_their_own(site):
    """Each layer's dropout is that of `unroll`; between and output as in PyTorch."""
    layer, x, _ = problem(jaxgru.init_gru)
    dropout = Dropout(KEY, 0.5, site)
    seen, _ = jaxgru.bidirectional([layer], [layer], x, dropout=dropout)
    (forward,), (backward,) = in_two_directions(dropout, 1)
    y_forward, _ = jaxgru.unroll(layer, x, dropout=forward)
    y_backward, _ = jaxgru.unroll(layer, x, reverse=True, dropout=backward)
    np.testing.assert_allclose(seen, np.concatenate([y_forward, y_backward], -1), atol=1e-12)
    assert (forward == []) == (site == "between")
    _, backward_by_layer = in_two_directions(dropout, 3)
    sites = [[dropout.site for dropout in dropouts] for dropouts in backward_by_layer]
    expected = {
        "input": [["input"], [], []],
        "state": [["state"]] * 3,
        "between": [["output"], ["output"], []],
        "output": [[], [], ["output"]],
    }
    assert sites == expected[site]
    for a, b in zip(forward, backward, strict=True):
        assert (jax.random.key_data(a.key) != jax.random.key_data(b.key)).any()


def test_a_key_is_used_once():
    """Also where its masks are drawn again; what JAX finds is only a second call with the key."""
    layers = partial(jaxgru.init_stack, "lstm", KEY, F, H, 2)
    both = partial(jaxgru.bidirectional, *layers(bidirectional=True))
    for run, remat in ((partial(jaxgru.unroll, layers()), True), (both, False)):
        call = partial(run, np.ones((2, 4, F)), remat=remat)
        keys = jax.random.split(jax.random.key(2))
        dropout = (
            Dropout(keys[0], 0.5, "state", "zoneout"),
            Dropout(keys[1], 0.5, "between", "variational"),
        )
        with jax.debug_key_reuse(True):
            call(dropout=dropout)
            with pytest.raises(jax.errors.KeyReuseError):
                call(dropout=dropout)


@pytest.mark.parametrize("options", [{"remat": True}, {"implementation": "wavefront"}])
def test_several_sites_in_one_call(options):
    """Each with the masks that it has alone, and a scale of its own."""
    rng = np.random.default_rng(0)
    T = 18
    layer, _, _ = problem(jaxgru.init_rnn)
    layers = [layer, layer.replace(W=rng.normal(size=(H, H)))]
    rates = {"input": 0.2, "state": 0.6, "between": 0.4, "output": 0.5}
    keys = jax.random.split(KEY, 4)
    dropout = tuple(Dropout(key, rates[site], site) for key, site in zip(keys, rates, strict=True))
    masks = {each.site: dropout_masks(layers, each, 2, T) for each in dropout}

    def drop(h, mask, t=slice(None)):
        return np.where(mask.keep[t], h * float(mask.scale), 0)

    x = rng.normal(size=(T, 2, F))
    h = np.zeros((2, 2, H))
    expected = []
    for t, y in enumerate(drop(x, masks["input"][0].input)):
        for i, (p, site) in enumerate(zip(layers, ("between", "output"), strict=True)):
            h[i] = drop(np.tanh(y @ p.W + h[i] @ p.U + p.b), masks["state"][i].hidden, t)
            y = drop(h[i], masks[site][i].output, t)
        expected.append(y)
    seen, _ = jaxgru.unroll(layers, x, dropout=dropout, time_major=True, **options)
    np.testing.assert_allclose(seen, expected, atol=1e-12)


def test_several_sites_in_two_directions():
    """Each direction has those of both sites."""
    layer, x, _ = problem(jaxgru.init_rnn)
    output_key, state_key = jax.random.split(KEY)
    output = Dropout(output_key, 0.5, "output")
    state = Dropout(state_key, 0.5, "state")
    y, _ = jaxgru.bidirectional(layer, layer, x, dropout=(output, state))
    of_state, _ = jaxgru.bidirectional(layer, layer, x, dropout=state)
    of_output, _ = jaxgru.bidirectional(layer, layer, np.ones_like(x), dropout=output)
    np.testing.assert_allclose(y, np.where(of_output == 0, 0, 2 * of_state), atol=1e-12)


@pytest.mark.parametrize("name", [name for name in jaxgru.cells.CELLS if name != "mlp"])
def test_dropped_weights(name):
    """A quarter of U is zero, nothing else; the others are scaled, and so are their gradients."""
    pair = jaxgru.init_stack(name, KEY, 33, 33, 2, bidirectional=True, dtype="float64")
    layers = randomized(jax.eval_shape(lambda: pair))
    if not pair[0][0].recurrent:
        with pytest.raises(ValueError, match="no recurrent matrices"):
            jaxgru.drop_weights(KEY, layers, 0.25)
        return
    drop = partial(jaxgru.drop_weights, KEY, rate=0.25)
    seen, pullback = jax.vjp(drop, layers)
    (gradient,) = pullback(jax.tree.map(jnp.ones_like, layers))
    patterns = set()
    # Of both directions' layers, one after another
    for new, old, d in zip(*(sum(tree, ()) for tree in (seen, layers, gradient)), strict=True):
        keep = np.asarray(new.U != 0)
        assert abs(keep.mean() - 0.75) < 0.03
        patterns.add(keep.tobytes())
        np.testing.assert_allclose(new.U, np.where(keep, old.U / 0.75, 0), rtol=1e-15)
        np.testing.assert_allclose(d.U, keep / 0.75, rtol=1e-15)
        chex.assert_trees_all_equal(new.replace(U=old.U), old)
    assert len(patterns) == 4


@struct
class Wrapped(Cell):
    """A cell of a user's own around a layer, as in the guide."""

    inside: list[Cell]
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})

    def sizes(self):
        return self.inside[0].sizes()

    def zero_carry(self, batch_size):
        return self.inside[0].zero_carry(batch_size)

    def step(self, layout, carry, a):
        return self.inside[0].step(layout, carry, self.inside[0].inputs(a))


def test_weights_drop_in_layers_that_a_cell_wraps():
    gru = jaxgru.init_gru(KEY, 33, 33)
    rnn = jaxgru.init_rnn(KEY, 33, 33)
    twice = Wrapped([Wrapped([gru], 2.0), rnn])
    dropped = jaxgru.drop_weights(KEY, [twice, gru], 0.25)
    assert jax.tree.structure(dropped) == jax.tree.structure([twice, gru])
    wrapper, alone = dropped
    inner, beside = wrapper.inside
    masks = [np.asarray(layer.U != 0) for layer in (inner.inside[0], beside, alone)]
    for mask in masks:
        assert abs(mask.mean() - 0.75) < 0.05
    assert (masks[0] != masks[2]).any() and (masks[0][:, :33] != masks[1]).any()
    assert jaxgru.unroll(dropped, jnp.ones((1, 2, 33)))[0].shape == (1, 2, 33)
    with pytest.raises(ValueError, match="the layers have no recurrent matrices"):
        jaxgru.drop_weights(KEY, Wrapped([jaxgru.init_min_gru(KEY, 3, 4)]), 0.25)


def test_what_drops_weights_keeps():
    """The dtype of U for any rate, and what is no layer; a traced rate out of range is NaN."""
    layer = jaxgru.init_gru(KEY, F, H, dtype="bfloat16")
    for rate in (0.5, np.float64(0.5), jnp.float32(0.5)):
        model = jaxgru.drop_weights(KEY, {"rnn": layer, "head": jnp.ones(3)}, rate)
        assert model["rnn"].U.dtype == jnp.bfloat16 and (model["head"] == 1).all()
        assert 0 < (model["rnn"].U == 0).mean() < 1
    drop = jax.jit(lambda rate: jaxgru.drop_weights(KEY, layer, rate).U)
    assert jnp.isnan(drop(1.5)).all() and jnp.isnan(drop(1.0)).all() and jnp.isnan(drop(-0.5)).all()


@pytest.mark.parametrize("site", ["state", "between", "output"])
def test_seeds_of_other_layers(site):
    """Seeds are drawn for certain layers, and each part of a carry has its own with zoneout."""
    two = jaxgru.init_stack("gru", KEY, F, H, num_layers=2, bidirectional=True)
    three = jaxgru.init_stack("gru", KEY, F, H, num_layers=3)
    x = np.ones((2, 4, F))
    seeds = seed_dropout(Dropout(KEY, 0.25, site), two[0])
    for layers in (three, three[:1]):
        with pytest.raises(ValueError, match="seeds are of other layers: there are"):
            jaxgru.unroll(layers, x, dropout=seeds)
    with pytest.raises(ValueError, match="of one direction; give two directions a key"):
        jaxgru.bidirectional(*two, x, dropout=seeds)


def test_seeds_of_another_kind():
    gru = jaxgru.init_gru(KEY, F, H)
    (seeds,) = seed_dropout(Dropout(KEY, 0.25, "state", "zoneout"), [gru])
    with pytest.raises(ValueError, match=r"there are \[1\] per layer, .* needs \[2\]"):
        jaxgru.unroll(jaxgru.init_lstm(KEY, F, H), np.ones((2, 4, F)), dropout=seeds)
