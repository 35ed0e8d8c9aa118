"""A batch on all devices; `tests/on_eight_devices.py` shows that each computes its rows alone."""

import jax
import jax.numpy as jnp
import pytest

from jaxgru.errors import UserError
from jaxgru.parallel import shard_rows
from jaxgru.parallel.sharding import data_mesh


def test_the_rows_of_all_arrays_are_of_one_batch():
    batch = {"x": jnp.ones((4, 3)), "y": jnp.arange(4)}
    placed = shard_rows(batch)
    assert [leaf.sharding.spec[0] for leaf in placed.values()] == ["data", "data"]
    assert (placed["y"] == batch["y"]).all()
    with pytest.raises(UserError, match=r"the arrays have \[3, 4\] rows; the numbers must be eq"):
        shard_rows({"x": jnp.ones((4, 3)), "y": jnp.arange(3)})


@pytest.mark.parametrize("batch, seen", [(jnp.ones(()), "a single number"), (3, "a single number"),
                                         ({}, "no array")])  # fmt: skip
def test_a_batch_without_rows(batch, seen):
    with pytest.raises(UserError, match=f"the batch has {seen}; it must be of arrays whose first"):
        shard_rows(batch)


@pytest.mark.parametrize(
    "devices, size, nearest",
    [(8, 12, "8 or 16"), (8, 20, "16 or 24"), (8, 3, "8"), (3, 64, "63 or 66")],
)
def test_a_batch_that_does_not_divide_names_those_that_do(devices, size, nearest, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices() * devices)
    says = f"has {size} rows, but there are {devices} devices.*{nearest}\\."
    with pytest.raises(UserError, match=says):
        data_mesh(size)
