"""jaxgru's GRU against the ONNX operator `GRU` with linear_before_reset=0; forward only.

ONNX's z weights the OLD state: Ht = (1 − zt) ⊙ ht + zt ⊙ Ht−1. Its operator has no gradient.
"""

from __future__ import annotations

import numpy as np
import pytest

from parity_tests.foreign import SIZES, Case, blocks_from_struct, case_of, z_reversed

onnx = pytest.importorskip("onnx")


def gru_model(case: Case):
    """A graph of one GRU node, its weights as constants; inputs x (T, B, E) and h (1, B, H)."""
    from onnx import TensorProto, helper, numpy_helper

    W, U, b = blocks_from_struct(case.layers[0], "zrn", z_reversed)
    constants = {
        "W": W.T[None],  # (directions, 3H, E)
        "R": U.T[None],
        "B": np.concatenate([b, np.zeros_like(b)])[None],  # input's and recurrence's biases
    }
    type_ = TensorProto.DOUBLE if case.dtype == "float64" else TensorProto.FLOAT
    H = b.size // 3
    node = helper.make_node(
        "GRU", ["x", "W", "R", "B", "", "h"], ["Y", "Y_h"], hidden_size=H, linear_before_reset=0
    )
    graph = helper.make_graph(
        [node],
        "gru",
        [helper.make_tensor_value_info(name, type_, [None] * 3) for name in ("x", "h")],
        [
            helper.make_tensor_value_info("Y", type_, [None] * 4),
            helper.make_tensor_value_info("Y_h", type_, [None] * 3),
        ],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    onnx.checker.check_model(model)
    feeds = {
        "x": np.asarray(case.x).swapaxes(0, 1).copy(),
        "h": np.asarray(case.carry[0])[None],
    }
    return model, feeds


def check(case: Case, implementation: str, results: list[np.ndarray]) -> None:
    """Y is (T, directions, B, H) and Y_h (directions, B, H)."""
    Y, Y_h = results
    case.check(implementation, (Y[:, 0].swapaxes(0, 1), (Y_h[0],)))


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
