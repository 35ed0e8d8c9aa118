"""Layers and stacks against torch.nn, dm-haiku, Keras and ONNX, converted by `jaxgru.libraries`."""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxgru.cells import AnyCell, GRUCell, LSTMState
from jaxgru.layers.implementations import unroll_layer
from jaxgru.libraries.torch_nn import from_torch
from jaxgru.libraries.torch_nn import to_torch as to_torch_nn
from parity_tests import conversion
from parity_tests.conversion import DTYPES, REPEATED, TOLERANCE, agree, to_torch

LONG = pytest.param((2, 128, 64, 48), marks=pytest.mark.slow)
SIZES = pytest.mark.parametrize("size", [(3, 20, 7, 11), (1, 1, 1, 1), LONG])
"""(B, T, E, H) of each comparison."""


class Case:
    """One layer or two: parameters, input (B, T, E), carry, and jaxgru's results.

    The gradient is that of a random linear function of all outputs and the final carries.
    """

    def __init__(self, kind: str, size: tuple[int, int, int, int], dtype: str, layers: int):
        B, T, E, H = size
        rng = np.random.default_rng(0)
        cell, _, after = kind.partition(", reset ")
        params = [
            conversion.random_cell(rng, cell, H if i else E, H, bool(after), dtype)
            for i in range(layers)
        ]
        if after:  # only this variant has a bias that its reset gate multiplies
            params = [
                GRUCell(**vars(p), cn=conversion.random_array(rng, (H,), dtype, 0.5))
                for p in params
            ]
        self.layers: tuple[AnyCell, ...] = tuple(params)
        self.x = conversion.random_array(rng, (B, T, E), dtype)
        draw = lambda: conversion.random_array(rng, (B, H), dtype)
        self.carry = tuple(LSTMState(draw(), draw()) if cell == "lstm" else draw() for _ in params)
        of_output = conversion.random_array(rng, (B, T, H), dtype)
        self.weights = of_output, jax.tree.map(lambda _: draw(), self.carry)
        self.dtype = dtype
        self.name = f"{kind}, {layers} layer{'s'[: layers > 1]}"

    def objective(self, *results: Any) -> Any:
        """Return the linear function of (output, carries), for implementations in JAX."""
        terms = jax.tree.map(jnp.vdot, self.weights, results)
        return sum(jax.tree.leaves(terms))

    @functools.cached_property
    def ours(self) -> tuple[Any, Any]:
        """(output (B, T, H), final carries) and the gradients of layers, input and carries."""

        def value(layers, x, carry):
            h = x.swapaxes(0, 1)
            new = []
            for layer, state in zip(layers, carry, strict=True):
                h, state = unroll_layer(layer, state, h)
                new.append(state)
            results = h.swapaxes(0, 1), tuple(new)
            return self.objective(*results), results

        gradients = jax.jit(jax.grad(value, (0, 1, 2), has_aux=True))
        return gradients(self.layers, self.x, self.carry)[::-1]

    def check(self, implementation: str, results: Any, gradients: Any = ()) -> None:
        """Compare with their (output, carries) and, if given, gradients (layers, x, carry)."""
        ours, of_ours = self.ours
        of = (f"gradient of {part}" for part in ("every parameter", "the input", "the carry"))
        parts = ["outputs", "final carry", *of]
        pairs = zip(parts, (*ours, *of_ours), (*results, *gradients), strict=bool(gradients))
        for part, a, b in pairs:
            agree(f"{self.name}: {part}", a, b, TOLERANCE[self.dtype], implementation)


@functools.lru_cache
def case_of(kind: str, size: tuple[int, int, int, int], dtype: str, layers: int = 1) -> Case:
    """Return a case, cached: several implementations are compared with the same results."""
    return Case(kind, size, dtype, layers)


@SIZES
@pytest.mark.parametrize("dtype", REPEATED)
@pytest.mark.parametrize("kind", ["gru, reset after", "lstm", "rnn"])
def test_torch_nn(kind, size, dtype):
    """Two layers; all biases of both sides are random, but those that only act in a sum."""
    case = case_of(kind, size, dtype, 2)
    module = to_torch_nn(case.layers)
    x = to_torch(case.x).requires_grad_()
    module.batch_first = True
    # PyTorch has one array per kind of state, (layers, B, H); ours is a tuple by layer.
    pair = kind == "lstm"

    def stack(carry):
        kinds = zip(*carry, strict=True) if pair else [carry]
        return [to_torch(np.stack([np.asarray(part) for part in parts])) for parts in kinds]

    def unstack(states):
        return [state[i] for i in range(2) for state in states]

    start = [state.requires_grad_() for state in stack(case.carry)]
    output, final = module(x, tuple(start) if pair else start[0])
    final = final if pair else (final,)
    of_output, of_carry = case.weights
    terms = zip([to_torch(of_output), *stack(of_carry)], [output, *final], strict=True)
    sum((w * y).sum() for w, y in terms).backward()

    # Weights map linearly, so the conversion of their gradients is the gradient of ours.
    gradient = copy.deepcopy(module)
    for (name, p), q in zip(module.named_parameters(), gradient.parameters(), strict=True):
        q.data = p.grad if "gru" in kind or "bias_hh" not in name else torch.zeros_like(p)
    gradients = from_torch(gradient), x.grad, unstack([state.grad for state in start])
    case.check(f"torch.nn.{type(module).__name__}", (output, unstack(final)), gradients)


def compare_in_jax(case: Case, implementation: str, run: Any, weights: Any, convert: Any) -> None:
    """Compare with a function of weights, x and h; `convert` makes a layer of the weights."""

    def value(weights, x, carry):
        output, final = run(weights, x, carry[0])
        return case.objective(output, (final,)), (output, (final,))

    gradients = jax.jit(jax.grad(value, (0, 1, 2), has_aux=True))
    (of_weights, *others), results = gradients(weights, case.x, case.carry)
    case.check(implementation, results, ((convert(of_weights),), *others))


@pytest.mark.parametrize("dtype", DTYPES)
@SIZES
def test_haiku(size, dtype):
    """`hk.dynamic_unroll` of `hk.GRU`."""
    hk = pytest.importorskip("haiku")
    from jaxgru.libraries.dm_haiku import from_haiku, to_haiku

    def network(x, h):
        return hk.dynamic_unroll(hk.GRU(size[-1]), x, h, time_major=False)

    apply = hk.without_apply_rng(hk.transform(network)).apply
    case = case_of("gru", size, dtype)
    run = lambda gru, *args: apply({"gru": gru}, *args)
    compare_in_jax(case, "dm-haiku GRU", run, to_haiku(case.layers[0]), from_haiku)


@pytest.mark.parametrize("dtype", REPEATED)
@SIZES
def test_keras(size, dtype):
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras was already imported with another backend")
    from jaxgru.libraries.keras_layers import from_keras, to_keras

    case = case_of("gru", size, dtype)
    layer = to_keras(case.layers[0], return_sequences=True, return_state=True)
    if dtype == "float64":
        layer.cell.activation = jnp.tanh  # Keras's own rounds float64 to float32
    seeds = [variable.value for variable in layer.non_trainable_variables]  # of its dropout, unused

    def run(weights, x, h):
        return layer.stateless_call(weights, seeds, x, initial_state=h)[0]

    weights = [variable.value for variable in layer.trainable_variables]
    convert = functools.partial(from_keras, layer)
    compare_in_jax(case, "Keras GRU(reset_after=False)", run, weights, convert)


@pytest.mark.parametrize(
    "runtime, dtype",
    [("onnxruntime", "float32"), ("onnx.reference", "float32"), ("onnx.reference", "float64")],
)
@SIZES
def test_onnx(size, runtime, dtype):
    """Forward only. ONNX Runtime's own kernel has only float32."""
    pytest.importorskip("onnx")
    from jaxgru.libraries.onnx import to_onnx

    case = case_of("gru", size, dtype)
    model = to_onnx(case.layers)
    if runtime == "onnxruntime":
        onnxruntime = pytest.importorskip("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        run = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        ).run
    else:
        from onnx.reference import ReferenceEvaluator

        run = ReferenceEvaluator(model).run
    y, h = run(None, {"x": np.asarray(case.x), "carry.0.h": np.asarray(case.carry[0])})
    case.check(f"ONNX GRU, {runtime}", (y, (h,)))
