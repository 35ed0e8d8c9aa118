"""`struct` does what `flax.struct.dataclass` does, without Flax."""

import dataclasses
import pickle

import flax.struct
import jax
import pytest

from jaxgru.cells.base import struct


@struct
class Ours:
    W: int
    rate: float = dataclasses.field(metadata={"static": True})
    b: int | None = None
    site: str = dataclasses.field(metadata={"static": True}, default="state")


@flax.struct.dataclass
class Theirs:
    W: int
    rate: float = flax.struct.field(pytree_node=False)
    b: int | None = None
    site: str = flax.struct.field(pytree_node=False, default="state")


def test_the_same_tree():
    flatten = jax.tree_util.tree_flatten_with_path
    ours, structure = flatten(Ours(1, 0.5, 2))
    theirs, _ = flatten(Theirs(1, 0.5, 2))
    assert ours == theirs and [leaf for _, leaf in ours] == [1, 2]
    assert jax.tree.unflatten(structure, [3, 4]) == Ours(3, 0.5, 4, "state")
    for other in (Ours(1, 0.4, 2), Ours(1, 0.5), Ours(1, 0.5, 2, "output")):
        assert jax.tree.structure(other) != structure


@pytest.mark.parametrize("cls", [Ours, Theirs])
def test_the_same_dataclass(cls):
    value = cls(1, 0.5)
    assert value.replace(b=2, site="output") == cls(1, 0.5, 2, "output")
    assert hash(value) == hash(cls(1, rate=0.5)) == hash((1, 0.5, None, "state"))
    assert pickle.loads(pickle.dumps(value)) == value
    assert jax.jit(lambda value: value)(value).rate == 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.W = 2
    with pytest.raises(TypeError, match="unexpected keyword argument 'c'"):
        value.replace(c=1)
