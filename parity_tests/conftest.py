"""The precision of each test."""

from __future__ import annotations

import pytest
import torch

from parity_tests.conversion import precision

torch.set_num_threads(1)  # the sizes are small, so threads only slow it down


@pytest.fixture(autouse=True)
def _precision(request: pytest.FixtureRequest):
    """Enable JAX's 64-bit types in tests with the parameter dtype="float64", and in no others."""
    parameters = getattr(request.node, "callspec", None)
    dtype = parameters.params.get("dtype", "float32") if parameters else "float32"
    with precision(dtype):
        yield
