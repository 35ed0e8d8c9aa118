"""Properties that rule out the study's bug: where the state comes from and where it goes.

The study dropped the state while sampling, and one of its samplers returned a state that its layers
never received. In these tests, a state that is lost, mixed up or unused changes a number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import jaxgru
from jaxgru.layers.dropout import Dropout
from jaxgru.layers.masks import dropout_masks
from jaxgru.lm.config import ModelConfig
from parity_tests import conversion
from parity_tests.conversion import REPEATED, TOLERANCE, VARIANTS, agree, to_torch

LSTM_FIRST = ["lstm", *(pytest.param(cell, marks=pytest.mark.slow) for cell in ("gru", "rnn"))]
apply = jax.jit(jaxgru.lm.apply)


def deep(cell: str, V: int = 12) -> ModelConfig:
    """Return a config of three layers; the study's bug can only hide in two or more."""
    return ModelConfig(cell, V, 5, 7, 3, **VARIANTS[cell])


@pytest.mark.parametrize("dtype", REPEATED)
@conversion.same_every_run
@example(fields=vars(conversion.SMALLEST["gru"]), B=1, lengths=[1, 1], seed=0)
@example(fields=vars(conversion.SMALLEST["lstm"]), B=1, lengths=[1, 1], seed=0)
@given(
    fields=conversion.model_fields(),
    B=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 5), min_size=2, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_splitting_changes_nothing(dtype, fields, B, lengths, seed):
    """A sequence split anywhere, with the carry passed on, equals torchref's whole sequence."""
    config = ModelConfig(**fields)
    rng = np.random.default_rng(seed)
    params = conversion.random_params(rng, config, dtype)
    tokens = conversion.random_tokens(rng, config.vocab_size, B, sum(lengths))
    start = conversion.random_carry(rng, params, B, dtype)
    logits, carry = conversion.torch_model(params)(
        to_torch(tokens), conversion.carry_to_torch(start)
    )

    pieces = []
    state = start
    for piece in jnp.split(tokens, np.cumsum(lengths)[:-1], axis=1):
        piece_logits, state = apply(params, piece, state)
        pieces.append(piece_logits)
    name = f"{config.cell}: a sequence in pieces"
    agree(f"{name}, logits", jnp.concatenate(pieces, axis=1), logits, TOLERANCE[dtype])
    agree(f"{name}, final carry", state, carry, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float64"])
@pytest.mark.parametrize("cell", LSTM_FIRST)
def test_the_carry_goes_through_every_layer(cell, dtype):
    """The derivatives of each layer's new carry, and of the logits, with respect to each old carry.

    They equal torchref's. They are not zero for the old carries of the layer itself and of layers
    below, so each carry is received and returned, and exactly zero for those of layers above.
    """
    rng = np.random.default_rng(0)
    params = conversion.random_params(rng, deep(cell), dtype)
    tokens = conversion.random_tokens(rng, 12, 2, 3)
    start = conversion.random_carry(rng, params, 2, dtype)

    jacobian = jax.jit(jax.jacrev(lambda carry: jaxgru.lm.apply(params, tokens, carry)))(start)
    model = conversion.torch_model(params)
    parts = len(jax.tree.leaves(start)) // 3

    def theirs_of(*flat):
        carry = [flat[i * parts : (i + 1) * parts] for i in range(3)]
        logits, new = model(to_torch(tokens), carry)
        return logits, *(tensor for layer in new for tensor in layer)

    flat = tuple(tensor for layer in conversion.carry_to_torch(start) for tensor in layer)
    theirs = torch.autograd.functional.jacobian(theirs_of, flat)
    # jaxgru's nesting, flattened, runs over outputs and then over inputs: PyTorch's order.
    agree(f"{cell}: derivative of logits and carry by the carry", jacobian, theirs, 1e-12)

    logits_by, carry_by = jacobian
    for old in range(3):
        assert all(np.abs(part).max() > 1e-4 for part in jax.tree.leaves(logits_by[old]))
        for new in range(3):
            parts = carry_by[new] if cell == "lstm" else [carry_by[new]]  # by h and by c
            for part in jax.tree.leaves([part[old] for part in parts]):
                assert (np.abs(part).max() > 1e-4) if old <= new else (part == 0).all()


@pytest.mark.parametrize("dtype", ["float64"])
@pytest.mark.parametrize(
    "cell, site",
    [
        ("lstm", None),
        ("gru", "state"),
        pytest.param("gru", None, marks=pytest.mark.slow),
        pytest.param("rnn", None, marks=pytest.mark.slow),
    ],
)
def test_causality_and_independent_rows(cell, site, dtype):
    """Each position has its own token, so the embedding's gradients are those of the inputs.

    The derivative of every logit with respect to every input equals torchref's. It is not zero for
    inputs of the same row up to that time, and exactly zero for later ones and other rows. A final
    carry depends on all inputs of its row and on no other row's.
    """
    B = 2
    T = 4
    config = deep(cell, V=B * T)
    rng = np.random.default_rng(0)
    params = conversion.random_params(rng, config, dtype)
    tokens = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
    dropout = site and Dropout(jax.random.key(0), 0.2, site)

    def results(embedding):
        return jaxgru.lm.apply(params.replace(embedding=embedding), tokens, None, dropout)

    by_logits, by_carry = jax.jit(jax.jacrev(results))(params.embedding)

    model = conversion.torch_model(params)
    masks = (
        conversion.masks_to_torch(dropout_masks(params.layers, dropout, B, T)) if dropout else None
    )
    name = "embeddings.weight" if cell == "lstm" else "embedding.weight"

    def theirs_of(embedding):
        logits, carry = torch.func.functional_call(
            model, {name: embedding}, (to_torch(tokens), None, masks)
        )
        return logits, *(tensor for layer in carry for tensor in layer)

    theirs = torch.autograd.functional.jacobian(theirs_of, to_torch(params.embedding))
    described = f"{cell}: derivative of logits and carry by the inputs"
    agree(described, (by_logits, by_carry), theirs, 1e-12)

    # (B, T, V, B·T, E) → does logit (b, t) depend on input (b', s)?
    depends = np.abs(by_logits).max(axis=(2, 4)).reshape(B, T, B, T)
    b, t, b_in, s = np.ogrid[:B, :T, :B, :T]
    may = (b == b_in) & (s <= t)
    assert (depends[~may] == 0).all()
    assert (depends[may] > 1e-9).all()
    for part in jax.tree.leaves(by_carry):  # (B, H, B·T, E)
        depends = np.abs(part).max(axis=(1, 3)).reshape(B, B, T)
        assert (depends[np.arange(B), np.arange(B)] > 1e-9).all()
        assert all((depends[i, j] == 0).all() for i in range(B) for j in range(B) if i != j)


# --- Stateless generation is a first-order Markov chain


def chain(cell: str, dtype: str):
    """Return a model of five tokens and its transition matrix by torchref, a softmax per token."""
    config = ModelConfig(cell, 5, 5, 7, 2, **VARIANTS[cell])
    params = conversion.random_params(np.random.default_rng(4), config, dtype)

    def triple(tree):
        """Make the memory noticeable."""
        return jax.tree.map(lambda leaf: 3 * leaf, tree)

    params = params.replace(embedding=triple(params.embedding), layers=triple(params.layers))
    with torch.no_grad():
        logits, _ = conversion.torch_model(params)(torch.arange(5)[:, None])
    return params, torch.softmax(logits[:, 0], dim=-1).numpy()


@pytest.mark.parametrize("dtype", REPEATED)
@pytest.mark.parametrize("cell", VARIANTS)
def test_windows_of_one_are_the_chain(cell, dtype):
    """A text in windows of one token gives rows of the matrix, whatever precedes them."""
    params, matrix = chain(cell, dtype)
    text = conversion.random_tokens(np.random.default_rng(0), 5, 1, 40)[0]
    logits, _ = apply(params, text[:, None])
    ours = jax.nn.softmax(logits[:, 0], axis=-1)
    agree(f"{cell}: transition matrix", ours, matrix[np.asarray(text)], TOLERANCE[dtype])
    stateful, _ = apply(params, text[None])
    assert np.abs(jax.nn.softmax(stateful[0], axis=-1) - ours)[1:].max() > 0.01


@pytest.mark.parametrize("cell", LSTM_FIRST)
def test_stateless_text_is_a_first_order_chain(cell):
    """A chi-squared test on 60,000 sampled tokens: the matrix alone determines the counts.

    The counts of the next token given one token, and given two tokens, both follow the matrix. By
    the same test, stateful text follows neither the matrix nor any first-order chain.
    """
    params, matrix = chain(cell, "float32")
    prompt = jnp.zeros((200, 1), jnp.int32)

    def counts(stateful: bool) -> tuple[np.ndarray, np.ndarray]:
        text, _, _ = jaxgru.lm.generate(params, jax.random.key(5), prompt, 300, stateful=stateful)
        text = np.asarray(text)
        triples = np.zeros((5, 5, 5))  # before, token, next
        np.add.at(triples, (text[:, :-2], text[:, 1:-1], text[:, 2:]), 1)
        return triples.sum(axis=0), triples

    def p_value(seen: np.ndarray, matrix: np.ndarray) -> float:
        expected = seen.sum(axis=-1, keepdims=True) * matrix
        return conversion.chi_squared(seen.reshape(-1, 5), expected.reshape(-1, 5))

    pairs, triples = counts(stateful=False)
    name = f"{cell}: stateless text"
    conversion.agree_in_distribution(f"{name} follows the matrix", p_value(pairs, matrix), 60_000)
    conversion.agree_in_distribution(
        f"{name} has no further memory", p_value(triples, matrix), 60_000
    )

    pairs, triples = counts(stateful=True)
    assert p_value(pairs, matrix) < 1e-9
    assert p_value(triples, pairs / pairs.sum(axis=1, keepdims=True)) < 1e-9
