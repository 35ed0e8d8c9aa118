"""A batch on all devices; `tests/on_eight_devices.py` shows that each computes its rows alone."""

import jax
import jax.numpy as jnp
import pytest

from jaxgru.errors import UserError
from jaxgru.parallel import shard_rows


def test_a_batch_is_shared_by_rows(monkeypatch):
    batch = {"x": jnp.ones((4, 3)), "y": jnp.arange(4)}
    placed = shard_rows(batch)
    assert [leaf.sharding.spec[0] for leaf in placed.values()] == ["data", "data"]
    assert (placed["y"] == batch["y"]).all()
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices() * 3)
    with pytest.raises(UserError, match="has 4 rows, but there are 3 devices.* multiple of"):
        shard_rows(batch)
