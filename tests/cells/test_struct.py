"""`struct` does what `flax.struct.dataclass` does, without Flax."""

import dataclasses
import pickle

import equinox
import flax.serialization
import flax.struct
import jax
import orbax.checkpoint
import pytest
from random_models import same_bits

import jaxgru
import jaxgru.libraries.flax_rnn  # for Flax's serialization
from jaxgru.pytrees import struct


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


def test_two_classes_with_the_same_fields_are_two():
    """`jit` does not run what it has compiled for the other; of 30, JAX's own dataclasses do."""

    def make(i):
        return struct(type("Same", (), {"__annotations__": {"x": jax.Array}, "k": i}))

    times = jax.jit(lambda p: p.x * p.k)
    assert [float(times(make(i)(jax.numpy.float32(1)))) for i in range(30)] == [*range(30)]


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


# --- Saved and restored


def orbax_(folder, saved, template):
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "layer", saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "layer", template)


def equinox_(folder, saved, template):
    equinox.tree_serialise_leaves(folder / "layer.eqx", saved)
    return equinox.tree_deserialise_leaves(folder / "layer.eqx", template)


def flax_(folder, saved, template):
    return flax.serialization.from_bytes(template, flax.serialization.to_bytes(saved))


def fields(folder, saved, template):
    return type(template)(**vars(saved))


@pytest.mark.parametrize("second_bias", [False, True])
@pytest.mark.parametrize("restored", [orbax_, equinox_, flax_, fields])
def test_a_gru_is_not_restored_as_the_other(tmp_path, restored, second_bias):
    """Their equations differ, so no way of saving may take one for the other."""
    grus = [
        jaxgru.init_gru(jax.random.key(i), 4, 4, reset_gate=gate, second_bias=second_bias)
        for i, gate in enumerate(("before", "after"))
    ]
    for saved, template in (grus, grus[::-1]):
        folder = tmp_path / type(saved).__name__
        folder.mkdir()
        with pytest.raises(Exception, match="cn|changed shape|Error at leaf"):
            restored(folder, saved, template)
    after = grus[1]
    assert same_bits(restored(tmp_path, after, jax.tree.map(jax.numpy.zeros_like, after)), after)
