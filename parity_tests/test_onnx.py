"""jaxgru's GRU, exported, against the ONNX operator `GRU`; forward only: it has no gradient."""

from __future__ import annotations

import numpy as np
import pytest

from parity_tests.foreign import SIZES, Case, case_of

pytest.importorskip("onnx")
from jaxgru.lm.formats.onnx import to_onnx  # noqa: E402


def gru_model(case: Case):
    """The exported layer, whose inputs are x (B, T, E) and h (B, H)."""
    model = to_onnx(case.layers)
    feeds = {"x": np.asarray(case.x), "carry.0.h": np.asarray(case.carry[0])}
    return model, feeds


def check(case: Case, implementation: str, results: list[np.ndarray]) -> None:
    y, h = results
    case.check(implementation, (y, (h,)))


@pytest.mark.parametrize("dtype", ["float32"])
@pytest.mark.parametrize("size", SIZES)
def test_onnxruntime(size, dtype):
    """ONNX Runtime's own kernel, which has only float32."""
    onnxruntime = pytest.importorskip("onnxruntime")
    case = case_of("gru", size, dtype)
    model, feeds = gru_model(case)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    check(case, "ONNX GRU, onnxruntime", session.run(None, feeds))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("size", SIZES)
def test_reference_evaluator(size, dtype):
    """The ONNX project's reference implementation in NumPy."""
    from onnx.reference import ReferenceEvaluator

    case = case_of("gru", size, dtype)
    model, feeds = gru_model(case)
    check(case, "ONNX GRU, onnx.reference", ReferenceEvaluator(model).run(None, feeds))
