"""A batch on all devices; `tests/on_eight_devices.py` shows that each computes its rows alone."""

import jax.numpy as jnp
import pytest

from jaxgru.errors import UserError
from jaxgru.parallel import shard_rows


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
