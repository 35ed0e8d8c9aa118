# pyright: basic, reportUnnecessaryTypeIgnoreComment=true
"""Calls as type checkers see them: pyright reads this file, and nothing runs it.

A mistake whose line ignores its error is one that pyright must find: if it does not, the comment is
unnecessary, which is an error.
"""

from typing import assert_type

import jax
import jax.numpy as jnp

import jaxgru
from jaxgru import lm

KEY = jax.random.key(0)
X = jnp.ones((2, 5, 3))
GRU = jaxgru.init_stack("gru", KEY, 3, 4)[0]
LSTM = jaxgru.init_peephole_lstm(KEY, 3, 4)


def right_calls(params: lm.Params, cell: str) -> None:
    y, carry = jaxgru.unroll(LSTM, X)
    assert_type(carry, jaxgru.LSTMState)
    assert_type(jaxgru.initial_carry(LSTM, 2), jaxgru.LSTMState)
    y, carry, each = jaxgru.unroll(LSTM, X, carry, reset=None, return_carries=True)
    assert_type(each.c, jax.Array)
    h, carry = jaxgru.step(LSTM, y[:, 0], carry._asdict())
    assert_type(h, jax.Array)

    stack = jaxgru.init_stack(jaxgru.init_gru, KEY, 3, 4, num_layers=2)
    y, (first, second) = jaxgru.unroll([*stack, LSTM], X, dropout=jaxgru.Dropout(KEY, 0.5, "state"))
    jaxgru.step(jaxgru.init_stack("rnn", KEY, 3, 4, residual=True), X[:, 0], (first, second))
    pair = jaxgru.init_stack("lstm", KEY, 3, 4, bidirectional=True)
    y, (forward, backward) = jaxgru.bidirectional(*pair, X, implementation="scan")
    jaxgru.bidirectional(GRU, LSTM, y, (forward, backward), return_carries=True)
    jaxgru.init_stack(jaxgru.cells.CELLS[cell], KEY, 3, 4)

    tokens, state, key = lm.generate(params, KEY, jnp.ones((2, 3), int), 5, temperature=0)
    tokens, _, _, logprobs = lm.generate(params, key, tokens, 5, state, return_logprobs=True)
    assert_type(logprobs, jax.Array)


def mistakes(params: lm.Params) -> None:
    y, carry = jaxgru.unroll(LSTM, X)
    y.no_such_method()  # pyright: ignore[reportAttributeAccessIssue]
    carry.m()  # pyright: ignore[reportAttributeAccessIssue]
    a, b, c = jaxgru.unroll(LSTM, X)  # pyright: ignore[reportAssignmentType]
    a, b = jaxgru.unroll([LSTM], X, return_carries=True)  # pyright: ignore[reportAssignmentType]
    a, b = jaxgru.bidirectional(GRU, GRU, X, return_carries=True)  # pyright: ignore[reportAssignmentType]
    jaxgru.step(GRU, X[0])  # pyright: ignore[reportCallIssue]
    jaxgru.unroll(LSTM, X, lenghts=None)  # pyright: ignore[reportCallIssue]
    jaxgru.unroll(LSTM, X, implementation="fast")  # pyright: ignore[reportCallIssue, reportArgumentType]
    jaxgru.init_stack("gruu", KEY, 3, 4)  # pyright: ignore[reportArgumentType]
    jaxgru.Dropout(KEY, 0.5, "states")  # pyright: ignore[reportArgumentType]
    jaxgru.Dropout(KEY, 0.5, "state", "zone_out")  # pyright: ignore[reportArgumentType]
    lm.apply(params, X, implementation="fast")  # pyright: ignore[reportArgumentType]
    a, b = lm.generate(params, KEY, X, 5)  # pyright: ignore[reportAssignmentType]
