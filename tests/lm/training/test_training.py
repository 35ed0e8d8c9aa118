"""The recipe against formulas worked out by hand, and runs that stop, stall or blow up."""

import dataclasses
import itertools
import math
import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from random_models import by_gate, random_params

from jaxgru.cells import CELLS
from jaxgru.layers.dropout import Dropout
from jaxgru.layers.masks import dropout_masks
from jaxgru.lm.config import Config, DataConfig, ModelConfig, TrainingConfig, load_config
from jaxgru.lm.data.batching import random_crops, stream_windows
from jaxgru.lm.model import HeadParams, Params, apply, init, initial_carry, token_nll
from jaxgru.lm.training import Observer, Progress, fit, init_state, loop, step, train_steps
from jaxgru.lm.training.optimizer import clip_by_global_norm, learning_rate, optimizer
from jaxgru.lm.training.step import loss_fn

CONFIG = Config(
    model=ModelConfig("gru", 3, 2, 4, 2, second_bias=True, reset_gate="before"),
    training=TrainingConfig(
        epochs=3, steps_per_epoch=5, batch_size=2, sequence_length=4, learning_rate=0.05,
        state_dropout=0.2,
    ),
)  # fmt: skip
REGULARIZED = Config(
    model=dataclasses.replace(CONFIG.model, reset_gate="after"),
    data=DataConfig(batches="streams"),
    training=dataclasses.replace(
        CONFIG.training, schedule="cosine_per_step", warmup_steps=2, decay_biases=False,
        input_dropout=0.3, between_dropout=0.4, output_dropout=0.5, weight_drop=0.25,
        ema_decay=0.3, random_offset=True, reset_probability=0.5,
    ),
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 3, 200).astype(np.int32)


def trained_by(config=CONFIG, **options):
    """The config with another recipe."""
    return dataclasses.replace(config, training=dataclasses.replace(config.training, **options))


@pytest.fixture(scope="module")
def finished():
    """A run of CONFIG; training on would donate its state."""
    return run()


def run(config=CONFIG, tokens=TOKENS, observer=None):
    """A whole run in memory; returns the state, the result and the progress."""
    progress = Progress()
    state = init_state(config.model, config.training, config.data.batches)
    state, best = fit(config, state, None, progress, tokens, tokens[:50], observer or Observer())
    return state, best, progress


def arrays(tree):
    """A copy on the host, which donation cannot take away; a key as its numbers."""

    def numbers(x):
        is_key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(x) if is_key else x)

    return [numbers(x) for x in jax.tree.leaves(tree)]


def assert_same(a, b):
    chex.assert_trees_all_equal(arrays(a), arrays(b))


@pytest.mark.parametrize("options, rates", [
    ({}, [6, 6, 4.5, 4.5, 1.5, 1.5]),  # lr·(1 + cos(πe/E))/2 in epoch e
    ({"schedule": "linear"}, [6, 5, 4, 3, 2, 1]),
    ({"schedule": "constant"}, [6, 6, 6, 6, 6, 6]),
    ({"schedule": "constant", "warmup_steps": 4}, [1.5, 3, 4.5, 6, 6, 6]),
    ({"schedule": "linear", "warmup_steps": 2}, [3, 5, 4, 3, 2, 1]),
    ({"warmup_steps": 3}, [2, 4, 4.5, 4.5, 1.5, 1.5]),
    ({"warmup_steps": 1}, [6, 6, 4.5, 4.5, 1.5, 1.5]),
    ({"schedule": "cosine_per_step"}, [6, 3 + 1.5 * 3**0.5, 4.5, 3, 1.5, 3 - 1.5 * 3**0.5]),
])  # fmt: skip
def test_schedules_by_hand(options, rates):
    training = TrainingConfig(epochs=3, steps_per_epoch=2, learning_rate=6.0, **options)
    schedule = jax.jit(learning_rate(training))
    np.testing.assert_allclose([schedule(step) for step in range(6)], rates, rtol=1e-6)


@pytest.mark.parametrize("max_norm, factor", [(1.0, 1 / (5 + 1e-6)), (5.0, 5 / (5 + 1e-6)), (9, 1)])
def test_clipping_by_hand(max_norm, factor):
    """The 3-4-5 triangle spread over two parameters: one norm over all of them."""
    grads = {"a": jnp.array([3.0]), "b": jnp.array([[0.0, -4.0]])}
    clipped, _ = clip_by_global_norm(max_norm).update(grads, None)
    np.testing.assert_allclose(clipped["a"], [3 * factor], rtol=1e-7)
    np.testing.assert_allclose(clipped["b"], [[0, -4 * factor]], rtol=1e-7)


@pytest.mark.parametrize("decay_biases", [True, False])
def test_adamw_by_hand_over_three_steps(decay_biases):
    """Loshchilov & Hutter's algorithm 2 in Python floats, decay on a bias-shaped parameter or not.

    In float64: in float32 the bias corrections 1 − βᵗ alone cost a relative 1e-6.
    """
    with jax.enable_x64(True):
        recipe = TrainingConfig(
            epochs=3, steps_per_epoch=1, learning_rate=0.1, weight_decay=0.2, max_grad_norm=100.0,
            decay_biases=decay_biases,
        )  # fmt: skip
        params = {"W": jnp.array([[1.5]]), "b": jnp.array([-0.5])}
        state = optimizer(recipe).init(params)
        update = jax.jit(optimizer(recipe).update)
        expected = {"W": 1.5, "b": -0.5}
        moments = {name: (0.0, 0.0) for name in expected}
        for t in (1, 2, 3):
            grads = {"W": jnp.array([[0.3 * t]]), "b": jnp.array([0.7 / t])}
            updates, state = update(grads, state, params)
            params = jax.tree.map(lambda p, u: p + u, params, updates)
            rate = 0.1 * (1 + math.cos(math.pi * (t - 1) / 3)) / 2
            for name in expected:
                g = float(grads[name].ravel()[0])
                m, v = moments[name]
                m = 0.9 * m + 0.1 * g
                v = 0.999 * v + 0.001 * g * g
                moments[name] = m, v
                step = m / (1 - 0.9**t) / (math.sqrt(v / (1 - 0.999**t)) + 1e-8)
                decay = 0.2 if decay_biases or name == "W" else 0
                expected[name] = expected[name] * (1 - rate * decay) - rate * step
        for name in expected:
            assert float(params[name].ravel()[0]) == pytest.approx(expected[name], rel=1e-12)


def test_a_tied_embedding_learns_as_pytorchs():
    """Three steps of clipping and AdamW: the one array decays once, along both its gradients."""
    torch = pytest.importorskip("torch")
    from jaxgru.libraries.torch_nn import from_torch

    torch.manual_seed(0)
    embedding = torch.nn.Embedding(5, 4)
    gru = torch.nn.GRU(4, 4)
    head = torch.nn.Linear(4, 5)
    head.weight = embedding.weight

    def array(parameter):
        return jnp.array(parameter.detach().numpy())

    def as_ours():
        return Params(
            array(embedding.weight), from_torch(gru), None, HeadParams(None, array(head.bias))
        )

    rates = dict(learning_rate=0.1, weight_decay=0.5, max_grad_norm=0.1, schedule="constant")
    recipe = TrainingConfig(**rates)
    params = as_ours()
    weights = [*embedding.parameters(), *gru.parameters(), head.bias]
    theirs = torch.optim.AdamW(weights, 0.1, weight_decay=0.5)
    state = optimizer(recipe).init(params)
    for inputs, targets in np.random.default_rng(0).integers(0, 5, (3, 2, 3, 6)):
        logits = head(gru(embedding(torch.tensor(inputs.T)))[0])
        theirs.zero_grad()
        of_tokens = logits.flatten(0, 1), torch.tensor(targets.T).flatten()
        torch.nn.functional.cross_entropy(*of_tokens).backward()
        torch.nn.utils.clip_grad_norm_(weights, 0.1)
        theirs.step()
        grads, _ = jax.jit(jax.grad(loss_fn, has_aux=True))(params, inputs, targets)
        updates, state = optimizer(recipe).update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    chex.assert_trees_all_close(params, as_ours(), rtol=1e-4, atol=1e-5)


def test_a_run_is_repeatable_bit_for_bit_and_its_seed_matters(finished):
    losses = lambda progress: [record.train_loss for record in progress.records]
    state, _, progress = finished
    again, _, progress_again = run()
    assert_same(state, again)
    assert losses(progress) == losses(progress_again)
    *_, of_another_seed = run(trained_by(seed=1))
    assert losses(progress)[0] != losses(of_another_seed)[0]


def test_each_key_is_used_once():
    """Also in loops: those over micro-batches, and those of `remat`."""
    training = trained_by(REGULARIZED, gradient_accumulation=2, remat=True).training
    dropout = Dropout(jax.random.key(0), 0.5, "state")
    state = init_state(CONFIG.model, training, "streams")
    loss = jax.jit(partial(loss_fn, remat=True))
    with jax.debug_key_reuse(True):
        train_steps.lower(training, state, TOKENS, np.int32(1))
        loss.lower(state.params, TOKENS[None], TOKENS[None], dropout)


@pytest.mark.slow
def test_strict_promotion_changes_nothing():
    """Nor does it fail, as Optax does under it, or where numbers have 64 bits."""
    options = {"compute_dtype": "bfloat16", "gradient_accumulation": 2, "remat": True}
    config = trained_by(epochs=1, patience=1, **options)
    expected = run(config)[:2]
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert_same(run(config)[:2], expected)
        with jax.enable_x64(True):
            run(config)


@pytest.mark.slow
def test_it_trains_without_jit():
    """Slowly, for whoever looks for an error step by step."""
    training = TrainingConfig(epochs=1, steps_per_epoch=1, batch_size=1, sequence_length=2)
    config = Config(model=ModelConfig("rnn", 3, 1, 2), training=training)
    expected, _, _ = run(config, TOKENS[:9])
    with jax.disable_jit():
        ours, _, _ = run(config, TOKENS[:9])
    for a, b in zip(arrays(ours), arrays(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_records_say_what_happened(finished):
    _, _, progress = finished
    assert [r.epoch for r in progress.records] == [1, 2, 3]
    assert [r.step for r in progress.records] == [5, 10, 15]
    rates = [r.learning_rate for r in progress.records]
    np.testing.assert_allclose(rates, [0.05, 0.0375, 0.0125])
    assert progress.finished
    for r in progress.records:
        assert r.tokens_per_second == pytest.approx(5 * 2 * 4 / r.seconds)


def with_val_losses(monkeypatch, losses):
    """Replaces the validation loss by a script, to drive early stopping."""
    script = iter(losses)
    monkeypatch.setattr(loop, "window_loss", lambda *_: next(script))


@pytest.mark.parametrize("losses, patience, epochs, best", [
    ([3, 2, 2.5, 2.6, 1], 2, 4, 2),  # stops after two epochs that are not better
    ([3, 2, 2, 2, 1], 2, 4, 2),  # equal is not better
    ([3, 4, 2, 4, 1], 2, 5, 5),  # a better one starts the count again
    ([1, 2, 3, 4, 5], 2, 3, 1),
    ([1, 2, 3, 4, 5], 0, 5, 1),  # without patience, the last weights are the result
])  # fmt: skip
def test_early_stopping_ends_with_the_best_weights(monkeypatch, losses, patience, epochs, best):
    with_val_losses(monkeypatch, losses)
    after = []
    observer = Observer(on_epoch=lambda state, best, progress: after.append(arrays(state.params)))
    _, result, progress = run(trained_by(epochs=5, patience=patience), observer=observer)
    assert progress.epoch == epochs and progress.best_epoch == best
    assert_same(result, after[best - 1 if patience else -1])


PLATEAU = trained_by(schedule="plateau", plateau_factor=0.5, plateau_patience=2)


def test_a_plateau_by_hand(monkeypatch):
    """Two epochs in a row without a loss that is better by 1e-4 of the best one."""
    with_val_losses(monkeypatch, [3.0, 2.0, 2.5, 1.9999, 1.0, 1.1, 0.9, 1.2, 1.3, 1.4])
    _, _, progress = run(trained_by(PLATEAU, epochs=10, steps_per_epoch=1))
    rates = [record.learning_rate / 0.05 for record in progress.records]
    np.testing.assert_allclose(rates, [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.25])


def test_a_plateau_scales_the_learning_rate():
    """Of the weight decay, too."""
    state = init_state(CONFIG.model, PLATEAU.training)
    *others, plateau = state.opt_state
    quarter = state.replace(opt_state=(*others, plateau._replace(scale=jnp.float32(0.25))))
    ours, *_ = train_steps(PLATEAU.training, quarter, TOKENS, 4)
    lower = trained_by(schedule="constant", learning_rate=0.05 / 4).training
    expected, *_ = train_steps(lower, init_state(CONFIG.model, lower), TOKENS, 4)
    chex.assert_trees_all_close(ours.params, expected.params, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad_step", [7, *slow(0, 1)])
def test_a_loss_that_is_not_finite_stops_at_its_step(bad_step, monkeypatch):
    """An embedding is spoilt before a step; that step is named, counted from 1."""
    rate = 0.05 + 0.001 * (bad_step + 1)  # compiled by no other test, and not used by one
    config = trained_by(learning_rate=rate)
    progress = Progress()
    state = init_state(config.model, config.training)
    original = step.train_step

    def spoilt(recipe, state, *given):
        infinite = jnp.where(state.step == bad_step, jnp.inf, 0.0)
        params = state.params.replace(embedding=state.params.embedding + infinite)
        return original(recipe, state.replace(params=params), *given)

    monkeypatch.setattr(step, "train_step", spoilt)
    with pytest.raises(loop.NonFiniteLoss, match=f"nan at step {bad_step + 1}\\."):
        fit(config, state, None, progress, TOKENS, TOKENS, Observer())
    assert progress.epoch == bad_step // 5


def test_a_validation_loss_that_is_not_finite_stops_the_run(monkeypatch):
    with_val_losses(monkeypatch, [1.0, math.nan])
    saved = []
    observer = Observer(on_epoch=lambda *_: saved.append(1))
    with pytest.raises(loop.NonFiniteLoss, match="validation loss is nan after step 10"):
        run(observer=observer)
    assert len(saved) == 1


@pytest.mark.parametrize("after, config", [(1, CONFIG), (5, CONFIG), (2, REGULARIZED)])
def test_an_interrupted_run_resumes_to_the_same_bits(after, config):
    """Interrupted after some chunk of steps; what was saved then ends in the undisturbed result."""
    expected, _, undisturbed = run(config)
    saved = []
    chunks = []

    def on_interrupt(state, best, progress):
        saved.append((jax.tree.map(jnp.copy, state), best, progress))

    observer = Observer(on_steps=lambda *_: chunks.append(1), on_interrupt=on_interrupt)
    observer.interrupted = lambda: len(chunks) == after
    with pytest.raises(KeyboardInterrupt):
        run(config, observer=observer)
    state, best, progress = saved[0]
    assert 0 < int(state.step) < 15
    final, result = fit(config, state, best, progress, TOKENS, TOKENS[:50], Observer())
    assert_same(final, expected)
    assert_same(result, final.params if config is CONFIG else final.ema)
    losses = [(r.train_loss, r.val_loss) for r in progress.records]
    assert losses == [(r.train_loss, r.val_loss) for r in undisturbed.records]


def test_a_chunk_of_any_length_is_traced_once(monkeypatch):
    """Epochs, a resume and other numbers of steps run one compiled program."""
    chex.clear_trace_counter()
    monkeypatch.setattr(step, "train_step", chex.assert_max_traces(step.train_step, n=1))
    fresh = trained_by(learning_rate=0.00123).training  # compiled by no other test
    state = init_state(CONFIG.model, fresh)
    for num_steps in (1, 3, 2):
        state, _, done = train_steps(fresh, state, TOKENS, num_steps)
        assert done == num_steps


@pytest.mark.parametrize("epochs, trained", [(2, 3), (3, 3), (5, 5)])
def test_a_run_with_other_epochs_than_before_ends(epochs, trained):
    """Fewer than were done: nothing more is trained. It went on for ever, for 3 is never 2."""
    *begun, progress = run()
    tokens = TOKENS, TOKENS[:50]
    state, _ = fit(trained_by(epochs=epochs), *begun, progress, *tokens, Observer())
    assert progress.finished and progress.epoch == trained
    assert int(state.step) == trained * CONFIG.training.steps_per_epoch


@pytest.mark.parametrize("cell", CELLS)
def test_the_state_has_a_buffer_for_each_array(cell):
    """Donation takes each buffer once: none may stand for two arrays."""
    options = {"mlp": {"context_length": 2}}.get(cell, {})
    model = ModelConfig(cell, 3, 4, 4, 2, **options)
    state = init_state(model, trained_by(ema_decay=0.9).training, "streams")
    params = init(jax.random.key(0), model)  # for a training loop of a user's
    for tree in (dataclasses.replace(state, key=state.step + 1), params, initial_carry(params, 2)):
        pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]
        assert len(set(pointers)) == len(pointers)


@pytest.mark.slow
@pytest.mark.parametrize("length, site", [(7, "state"), (1, "state"), (16, "between")])
def test_computing_parts_anew_changes_nothing(length, site):
    """Loss, state and gradients in float64, at lengths with and without a rest; the same masks."""
    with jax.enable_x64(True):
        model = ModelConfig("lstm" if site == "between" else "gru", 5, 3, 4, 2, final_norm=True)
        params = random_params(model, dtype="float64")
        inputs, targets = np.random.default_rng(1).integers(0, 5, (2, 3, length), np.int32)
        dropout = Dropout(jax.random.key(2), 0.3, site, first_row=2, first_step=5)

        def compute(remat):
            return jax.jit(jax.value_and_grad(partial(loss_fn, remat=remat), has_aux=True))(
                params, inputs, targets, dropout
            )

        chex.assert_trees_all_close(compute(False), compute(True), rtol=1e-11, atol=1e-13)


@pytest.mark.slow
def test_parts_computed_anew_need_memory_for_their_length_only():
    """XLA's own plan of a gradient grows as √T does: twice as much for the second fourfold length.

    It grows by 2.2 times as much; what is kept for each step would make that 4 times.
    """
    model = ModelConfig("gru", 5, 8, 32, 2)
    params = random_params(model)

    def planned_bytes(length):
        tokens = jnp.zeros((4, length), jnp.int32)
        dropout = Dropout(jax.random.key(2), 0.1, "state")
        gradient = jax.jit(jax.grad(partial(loss_fn, remat=True), has_aux=True))
        program = gradient.lower(params, tokens, tokens, dropout).compile()
        return program.memory_analysis().temp_size_in_bytes

    short, middle, long = map(planned_bytes, (256, 1024, 4096))
    assert long - middle < 2.5 * (middle - short)


@pytest.mark.parametrize("implementation", ["scan", "wavefront"])
def test_a_training_step_of_astra_gamma_lowers_for_gpus_and_tpus(implementation):
    """JAX lowers for hardware that is not there, and raises an error for what it cannot compute."""
    options = {"training.implementation": implementation, "training.compute_dtype": "bfloat16"}
    config = load_config("astra_gamma", options)
    training = config.training
    state = jax.eval_shape(lambda: init_state(config.model, training))
    tokens = jax.ShapeDtypeStruct((100_000,), jnp.int32)
    compiled = jax.jit(lambda state, tokens: step.train_step(training, state, tokens))
    program = compiled.trace(state, tokens).lower(lowering_platforms=("cuda", "tpu")).as_text()
    assert "_platform_index" in program  # one program for both
    products = re.findall(r"dot_general .*: \(tensor<\S+x(\w+)>", program)
    assert "bf16" in products and set(products) <= {"bf16", "f32"}


def test_many_micro_batches_in_half_precision():
    mean = lambda rows, first_row: (rows.mean(), rows)
    ones = jnp.ones((1024, 1), jnp.bfloat16)
    assert step.mean_of_micro_batches(mean, 1024, ones, 0)[0] == 1  # bfloat16's sum ends at 256


def test_a_run_in_bfloat16_learns_and_keeps_float32():
    """Losses near those of float32, not the same; parameters and moments stay float32."""
    runs = {}
    for dtype in ("float32", "bfloat16"):
        state, _, progress = run(trained_by(compute_dtype=dtype))
        runs[dtype] = [record.train_loss for record in progress.records]
        floats = [x for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim]
        assert {x.dtype for x in floats} == {jnp.dtype("float32")}
    assert runs["float32"] != runs["bfloat16"]
    np.testing.assert_allclose(runs["bfloat16"], runs["float32"], rtol=0.01)


STREAMS = dataclasses.replace(CONFIG.training, gradient_accumulation=2)


def test_streams_hand_their_state_on():
    """Losses of windows 0, 1, … of 4 streams, by `apply` on each whole stream up to there.

    With a learning rate of nothing the parameters stay, so each loss is that of one long sequence.
    After 12 windows of 4 (a stream has 49 predictions) they begin again, from zeros.
    """
    still = dataclasses.replace(STREAMS, learning_rate=1e-30, state_dropout=0.0)
    state = init_state(CONFIG.model, still, "streams")
    streams = np.stack([TOKENS[49 * row : 49 * row + 49] for row in range(4)])
    logits, _ = jax.jit(apply)(state.params, streams[:, :48])
    nll = np.asarray(jax.jit(token_nll)(logits, streams[:, 1:])).reshape(4, 12, 4).mean((0, 2))
    _, losses, _ = train_steps(still, state, TOKENS, 14)
    np.testing.assert_allclose(losses[:14], np.append(nll, nll[:2]), rtol=1e-6)
    _, crops, _ = train_steps(still, init_state(CONFIG.model, still), TOKENS, 2)
    assert not np.allclose(crops[:2], nll[:2])


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "mlp"])  # a carry of two arrays, not of one shape
def test_a_stream_computed_by_parts_is_the_same(cell):
    """By parts of the batch and of the sequence, with dropout: the same losses and state."""
    context = 3 if cell == "mlp" else 0
    model = ModelConfig(cell, 3, 2, 4, 2, context_length=context)
    whole = dataclasses.replace(STREAMS, batch_size=4, gradient_accumulation=1)
    ends = []
    for recipe in (whole, STREAMS, dataclasses.replace(whole, remat=True)):
        state = init_state(model, recipe, "streams")
        state, losses, _ = train_steps(recipe, state, TOKENS, 5)
        ends.append((losses[:5], state.carry))
        assert any(np.abs(leaf).max() > 0.01 for leaf in jax.tree.leaves(state.carry))
    for end in ends[1:]:
        chex.assert_trees_all_close(ends[0], end, rtol=1e-5, atol=1e-5)


def test_streams_start_where_the_cells_do(monkeypatch, forget_traces):
    """A pass begins with the cells' own start, and not with zeros."""
    B = 5
    T = 7
    recipe = dataclasses.replace(
        STREAMS, batch_size=B, sequence_length=T, gradient_accumulation=1, state_dropout=0.0
    )
    cell = type(random_params(CONFIG.model).layers[0])

    def half(self, batch_size):
        return jnp.full((batch_size, len(self.U)), 0.5, self.b.dtype)

    monkeypatch.setattr(cell, "zero_carry", half)
    forget_traces()
    state = init_state(CONFIG.model, recipe, "streams")
    inputs, targets, _ = stream_windows(jnp.asarray(TOKENS), jnp.int32(0), B, T)
    logits, _ = apply(state.params, inputs, jax.tree.map(lambda c: c * 0 + 0.5, state.carry))
    expected = token_nll(logits, targets).mean()
    _, losses, _ = train_steps(recipe, state, TOKENS, 1)
    assert float(losses[0]) == pytest.approx(float(expected), rel=1e-6)


@jax.jit
@partial(jax.value_and_grad, has_aux=True)
def of_unit(params, carry, x, y):
    """The sum of its tokens' losses, its last state, and the gradient."""
    logits, carry = apply(params, x[None], carry)
    return token_nll(logits, y[None]).sum(), carry


@pytest.mark.parametrize("batches, options", [
    *slow(("streams", {})), ("crops", {}),
    ("streams", {"remat": True, "gradient_accumulation": 3, "batch_size": 1}),
])  # fmt: skip
def test_units_against_a_plain_loop_over_them(batches, options):
    """Four steps in float64, in which token 0 ends a document: loss, gradient and state.

    Each unit is computed by itself, from zeros; the first one of a row of a stream goes on from the
    row's last state. AdamW's first moment has the gradients.
    """
    T = 6
    B = 3
    sizes = {"batch_size": B, "sequence_length": T, "state_dropout": 0.0, "max_grad_norm": 1e9}
    recipe = dataclasses.replace(CONFIG.training, **sizes | options)

    def plain(params, carry, inputs, targets):
        units = []
        ends = []
        for row, (x, y) in enumerate(zip(inputs, targets, strict=True)):
            state = jax.tree.map(lambda c, row=row: c[row : row + 1], carry)
            for begin, end in itertools.pairwise(sorted({0, *np.flatnonzero(x == 0), T})):
                state = initial_carry(params, 1) if x[begin] == 0 else state
                (value, state), grads = of_unit(params, state, x[begin:end], y[begin:end])
                units.append((value, grads))
            ends.append(state)
        value, grads = jax.tree.map(lambda *parts: np.sum(parts, 0) / (B * T), *units)
        return value, jax.tree.map(lambda *rows: np.concatenate(rows), *ends), grads

    with jax.enable_x64(True):
        params = random_params(CONFIG.model, dtype="float64")
        state = init_state(CONFIG.model, recipe, batches)
        carry = zeros = initial_carry(params, B)
        fresh = None if state.carry is None else jax.tree.map(jnp.copy, zeros)
        opt_state = optimizer(recipe).init(params)
        state = state.replace(params=params, opt_state=opt_state, carry=fresh)
        moment = jax.tree.map(np.zeros_like, params)
        ends = 0
        for step in range(4):
            if batches == "streams":
                inputs, targets, _ = stream_windows(jnp.asarray(TOKENS), jnp.int32(step), B, T)
            else:
                key, _ = jax.random.split(jax.random.fold_in(state.key, step))
                inputs, targets = random_crops(key, jnp.asarray(TOKENS), B, T)
                carry = zeros
            inputs = np.asarray(inputs)
            targets = np.asarray(targets)
            ends += (inputs[:, 1:] == 0).sum()
            value, carry, grads = plain(state.params, carry, inputs, targets)
            moment = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moment, grads)
            state, losses, _ = train_steps(recipe, state, TOKENS, 1, separator_token=0)
            assert float(losses[0]) == pytest.approx(float(value), rel=1e-11)
            chex.assert_trees_all_close(state.opt_state[1][0].mu, moment, rtol=1e-9, atol=1e-13)
            if batches == "streams":
                chex.assert_trees_all_close(state.carry, carry, rtol=1e-9)
        assert ends > 9


def test_every_regularizer_against_a_plain_loop():
    """Five steps in float64: loss, gradient and state by the equations, step by step.

    The masks are those that the keys give, each at its own place. The average is d·average +
    (1 − d)·parameters with d = min(0.3, (1 + t)/(10 + t)). AdamW's first moment has the gradients.
    """
    model = REGULARIZED.model
    B = 3
    T = 2
    sizes = {"batch_size": B, "sequence_length": T}
    recipe = dataclasses.replace(REGULARIZED.training, **sizes, max_grad_norm=1e9)
    rates = {"state": 0.2, "input": 0.3, "between": 0.4, "output": 0.5}

    def drawn(key, step):
        """What a step draws: its windows, the rows that start from zeros, and its masks."""
        pass_key = jax.random.fold_in(key, 2**32 - 1)
        key = jax.random.fold_in(key, step)
        reset_key, weight_key, *sites = jax.random.split(jax.random.fold_in(key, 2), 5)
        x, y, first = stream_windows(jnp.asarray(TOKENS), jnp.int32(step), B, T, pass_key)
        zero = first | jax.random.bernoulli(reset_key, 0.5, (B,))
        sites = zip([jax.random.split(key)[1], *sites], rates.items(), strict=True)
        state, below, between, above = (
            dropout_masks(params.layers, Dropout(key, rate, site), B, T)
            for key, (site, rate) in sites
        )
        factors = lambda mask: mask.keep * mask.scale
        masks = {
            "input": factors(below[0].input),
            "state": [factors(state[0].hidden), factors(state[1].hidden)],
            "output": [factors(between[0].output), factors(above[1].output)],
        }
        kept = [
            jax.random.bernoulli(jax.random.split(layer, 1)[0], 0.75, (4, 12)) / 0.75
            for layer in jax.random.split(weight_key, 2)
        ]
        return x, y, zero, masks, kept

    def loss(params, carry, x, y, zero, masks, kept):
        sigmoid = jax.nn.sigmoid
        total = 0.0
        hidden = [jnp.where(zero[:, None], 0, h) for h in carry]
        for t in range(T):
            h = params.embedding[x[:, t]] * masks["input"][t]
            for i, layer in enumerate(params.layers):
                p = by_gate(layer.replace(U=layer.U * kept[i]))
                old = hidden[i]
                z = sigmoid(h @ p.Wz + p.bz + old @ p.Uz + p.cz)
                r = sigmoid(h @ p.Wr + p.br + old @ p.Ur + p.cr)
                n = jnp.tanh(h @ p.Wn + p.bn + r * (old @ p.Un + p.cn))
                hidden[i] = ((1 - z) * old + z * n) * masks["state"][i][t]
                h = hidden[i] * masks["output"][i][t]
            log_p = jax.nn.log_softmax(h @ params.head.Wo + params.head.bo)
            total -= log_p[jnp.arange(B), y[:, t]].mean() / T
        return total, hidden

    with jax.enable_x64(True):
        params = random_params(model, dtype="float64")
        state = init_state(model, recipe, "streams")
        carry = jax.tree.map(lambda h: h.astype(float), state.carry)
        opt_state = optimizer(recipe).init(params)
        average = jax.tree.map(jnp.copy, params)
        state = state.replace(params=params, opt_state=opt_state, carry=carry, ema=average)
        draws = jax.jit(partial(drawn, state.key))
        plain = jax.jit(jax.value_and_grad(loss, has_aux=True))
        moment = jax.tree.map(jnp.zeros_like, params)
        resets = 0
        average = arrays(average)
        for step, d in enumerate([0.1, 2 / 11, 0.25, 0.3, 0.3]):
            x, y, zero, masks, kept = draws(step)
            (value, carry), grads = plain(state.params, carry, x, y, zero, masks, kept)
            moment = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moment, grads)
            resets += int(zero.sum()) if step else 0
            state, losses, _ = train_steps(recipe, state, TOKENS, 1)
            assert float(losses[0]) == pytest.approx(float(value), rel=1e-11)
            chex.assert_trees_all_close(state.opt_state[1][0].mu, moment, rtol=1e-9, atol=1e-13)
            chex.assert_trees_all_close(state.carry, tuple(carry), rtol=1e-9)
            pairs = zip(average, arrays(state.params), strict=True)
            average = [d * old + (1 - d) * new for old, new in pairs]
            for ours, theirs in zip(arrays(state.evaluated), average, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9)
        assert 0 < resets < 12
