"""The precision of each test."""

from __future__ import annotations

import pytest
import torch

from parity_tests.bridge import precision

torch.set_num_threads(1)  # the sizes are small; threads only get in each other's way


@pytest.fixture(autouse=True)
def _precision(request: pytest.FixtureRequest):
    """A test with the parameter dtype="float64" runs with JAX's 64-bit types; no other does."""
    parameters = getattr(request.node, "callspec", None)
    dtype = parameters.params.get("dtype", "float32") if parameters else "float32"
    with precision(dtype):
        yield
