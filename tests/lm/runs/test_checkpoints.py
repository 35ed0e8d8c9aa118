"""Checkpoints that give back every bit."""

import dataclasses
import json
import logging
import os
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tomli_w
from conftest import contents, slow

import jaxgru
from jaxgru.files import CHECKSUMS, hashes
from jaxgru.lm.config import SECTIONS, Config, ModelConfig, TrainingConfig, choices, to_dict
from jaxgru.lm.data.tokenizers import CharacterTokenizer, TokenizerError, save_tokenizer
from jaxgru.lm.runs import checkpoints
from jaxgru.lm.runs.checkpoints import (
    Checkpoint,
    finish_writing,
    open_checkpoints,
    restore,
    save,
)
from jaxgru.lm.runs.folders import (
    LOCK,
    RunError,
    RunInfo,
    create_run,
    lock_run,
    save_config,
    save_info,
)
from jaxgru.lm.training import Epoch, Progress, init_state

TOKENIZER = CharacterTokenizer("abc")
RECIPE = TrainingConfig(epochs=2, steps_per_epoch=2, batch_size=2, sequence_length=4)
GRU = ModelConfig("gru", 3, 2, 4, 2, second_bias=True)


def make_run(root, model=GRU, recipe=RECIPE):
    """A run with one checkpoint, of two steps: an epoch. Its best parameters are others."""
    config = Config("tiny", model, training=recipe)
    rng = np.random.default_rng(0)
    run = create_run(root, config, TOKENIZER)
    (run / LOCK).touch()  # as whoever trained it has left it
    is_float = lambda leaf: leaf.dtype == np.float32

    def random(leaf):
        return jnp.asarray(rng.normal(size=leaf.shape), "float32")

    fresh = init_state(model, recipe)
    state = jax.tree.map(lambda leaf: random(leaf) if is_float(leaf) else leaf, fresh)
    state = state.replace(step=jnp.array(2, state.step.dtype))
    kept = jax.tree.map(lambda x: x + 1, state.params)
    record = Epoch(1, 2, 1e-3, 0.5, 0.1 + 0.2, tokens_per_second=8.0, seconds=0.25)
    progress = Progress(records=[record], best_val_loss=0.1 + 0.2)
    fingerprint = checkpoints.compute_fingerprint(config, RunInfo(), TOKENIZER)
    with open_checkpoints(run) as manager:
        save(manager, state, kept, progress, fingerprint)
    return run, config, state, kept, progress


def assert_same(a, b):
    """Structure, dtypes and bits, also of PRNG keys."""

    def is_key(x):
        return jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)

    bits = lambda x: jax.random.key_data(x) if is_key(x) else x
    chex.assert_trees_all_equal(*jax.tree.map(bits, (a, b)), strict=True)


@pytest.mark.parametrize("model, recipe", [
    (GRU, RECIPE), (GRU, replace(RECIPE, ema_decay=0.5)),
    *slow((ModelConfig("lstm", 3, 2, 4, 2, final_norm=True), RECIPE),
          (ModelConfig("mlp", 3, 2, 4, 1, context_length=3), RECIPE)),
])  # fmt: skip
def test_what_is_saved_comes_back_bit_for_bit(tmp_path, model, recipe):
    """If the parameters are averaged, the model that is loaded is their average."""
    run, config, state, kept, progress = make_run(tmp_path, model, recipe)
    with open_checkpoints(run) as manager:
        restored, restored_best, restored_progress = restore(manager, run, config)
    assert_same(restored, state)
    assert_same(restored_best, kept)
    assert restored_progress == progress
    params, loaded_config, tokenizer = jaxgru.lm.load(run)
    assert_same(params, state.evaluated)
    assert_same(jaxgru.lm.load(run, "best")[0], kept)
    assert_same(jaxgru.lm.load(run, "last")[0], state.evaluated)
    assert loaded_config == config and tokenizer.vocabulary == "abc"


def test_with_early_stopping_the_best_parameters_are_the_result(tmp_path):
    run, _, state, kept, _ = make_run(tmp_path, recipe=replace(RECIPE, patience=1))
    assert_same(jaxgru.lm.load(run)[0], kept)
    assert_same(jaxgru.lm.load(run, "last")[0], state.evaluated)


def test_what_comes_after_a_failed_read_is_ignored_and_nothing_else(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda late: seen.append(str(late.exc_value)))
    undo = checkpoints.silence_orbax()
    for text in ("Event loop is closed", "Encountered error while reading array index: ()", "x"):
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(text)))
    undo()
    sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError("Event loop is closed")))
    assert seen == ["x", "Event loop is closed"]


def test_no_run_and_no_checkpoint(tmp_path):
    with pytest.raises(jaxgru.UserError, match="there is no model"):
        jaxgru.lm.load(tmp_path / "nothing")
    with pytest.raises(RunError, match="there is no run in"):
        jaxgru.lm.load(tmp_path)
    run = create_run(tmp_path, Config("tiny", GRU), TOKENIZER)
    with pytest.raises(RunError, match="has no finished checkpoint"):
        jaxgru.lm.load(run)


@pytest.mark.parametrize("change", [{"hidden_dim": 5}, {"num_layers": 3}, {"second_bias": False}])
def test_a_config_of_another_model_is_refused(tmp_path, change):
    """Also where the checkpoint does not say what it was made with."""
    run, config, state, *_ = make_run(tmp_path)
    save_config(run, replace(config, model=replace(config.model, **change)))
    [(name, value)] = change.items()
    with pytest.raises(RunError, match=f"was made with model.{name} = .*, and this is {value}"):
        jaxgru.lm.load(run)
    with open_checkpoints(run) as manager:
        save(manager, state.replace(step=jnp.array(3)), None, Progress())
    with pytest.raises(RunError, match="checkpoints/3 cannot be read"):
        jaxgru.lm.load(run)


def test_a_run_whose_files_are_broken(tmp_path):
    run, *_ = make_run(tmp_path)
    (run / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        jaxgru.lm.load(run)
    save_tokenizer(CharacterTokenizer("ab"), run)
    with pytest.raises(jaxgru.UserError, match=f"{run} .*has 2 tokens, but the model has 3 tokens"):
        jaxgru.lm.load(run)
    (run / "config.toml").write_text("[model")
    with pytest.raises(jaxgru.UserError, match="is not a TOML file"):
        jaxgru.lm.load(run)


def test_two_checkpoints_are_kept_and_the_newest_is_used(tmp_path):
    run, config, state, *_ = make_run(tmp_path)
    with open_checkpoints(run) as manager:
        for step in (3, 4, 5):
            params = jax.tree.map(lambda x, step=step: jnp.full_like(x, step), state.params)
            new = state.replace(params=params, step=jnp.array(step))
            save(manager, new, new.params, Progress())
            again = state.replace(step=jnp.array(step))
            save(manager, again, new.params, Progress())  # is not written
    assert sorted(os.listdir(run / "checkpoints")) == ["4", "5"]
    assert (jaxgru.lm.load(run)[0].embedding == 5).all()


def test_reading_a_run_writes_nothing_and_need_not_wait(tmp_path):
    run, *_ = make_run(tmp_path)
    with lock_run(run):
        (run / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir()  # it may be under way
        before = contents(tmp_path)
        jaxgru.lm.load(run)
        assert contents(tmp_path) == before


def make_two(root, recipe=RECIPE):
    """A run with checkpoints of steps 2 and 3; the states of both."""
    run, config, state, *_ = make_run(root, recipe=recipe)
    params = jax.tree.map(lambda leaf: leaf + 1, state.params)
    later = state.replace(params=params, step=jnp.array(3))
    with open_checkpoints(run) as manager:
        save(manager, later, later.params, Progress())
    return run, config, state, later


def restore_from(run, config):
    with lock_run(run), open_checkpoints(run) as manager:
        return restore(manager, run, config)[0]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_one_bit_in_any_file_is_noticed_and_the_checkpoint_before_is_read(every, tmp_path, capfd):
    run, config, state, _ = make_two(tmp_path)
    newest = run / "checkpoints" / "3"
    files = sorted(path for path in newest.rglob("*") if path.is_file())[::every]
    for file in {*files, newest / CHECKSUMS}:
        data = file.read_bytes()
        flip(file)
        before = contents(run)
        params, _, _ = jaxgru.lm.load(run)
        assert_same(params, state.params)
        said = capfd.readouterr().err
        assert said.count("\n") == 1 and f"checkpoint {newest} is broken (" in said
        assert "that of step 2 is used" in said
        if file.name != CHECKSUMS:  # a flipped bit there may name a file that never was
            assert f"({file.relative_to(newest)} differs from what was written)" in said
        assert contents(run) == before  # reading a run writes nothing
        file.write_bytes(data)
    jaxgru.lm.load(run)
    assert capfd.readouterr().err == ""


def _leading_out(step):
    sums = json.loads((step / CHECKSUMS).read_bytes())
    sums["../elsewhere"] = hashes(step.parent)["elsewhere"]
    (step / CHECKSUMS).write_text(json.dumps(sums))


def _linked(step):
    file = step / "params" / "_METADATA"
    file.rename(step.parent / "elsewhere")
    file.symlink_to(step.parent / "elsewhere")


def _without_checksums(change):
    return lambda step: ((step / CHECKSUMS).unlink(), change(step))


DAMAGE = {
    **{text: lambda step, text=text: (step / CHECKSUMS).write_text(text)
       for text in ("{}", "5", '{"params/_METADATA": 5}')},
    "a path that leads out": _leading_out,
    "a file more": lambda step: (step / "params" / "more").touch(),
    "a link": _linked,
    "a link, unverified": _without_checksums(_linked),
    "a folder": lambda step: ((step / CHECKSUMS).unlink(), (step / CHECKSUMS).mkdir()),
    "another type": _without_checksums(
        lambda step: (step / "fingerprint/metadata").write_text("[]")
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_nothing_is_read_but_what_was_written(what, tmp_path, capfd):
    """Whatever a stranger's checksums name, and wherever links lead."""
    run, _, state, _ = make_two(tmp_path)
    (run / "checkpoints" / "elsewhere").write_text("x")
    DAMAGE[what](run / "checkpoints" / "3")
    assert_same(jaxgru.lm.load(run)[0], state.params)
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "3 is broken (" in said and "of step 2 is used" in said


def test_what_a_killed_process_left_undone_is_said_and_done(tmp_path, capfd):
    """The newest checkpoint's checksums; and the end of an old one, of which it had deleted some.

    A reader says that nothing compares the checkpoint, and writes nothing.
    """
    run, config, _, later = make_two(tmp_path)
    folders = run / "checkpoints"
    shutil.copytree(folders / "2", folders / "1", ignore=lambda *_: [CHECKSUMS, "params"])
    written = (folders / "3" / CHECKSUMS).read_bytes()
    (folders / "3" / CHECKSUMS).unlink()
    before = contents(run)
    assert_same(jaxgru.lm.load(run)[0], later.params)
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and f"{folders / '3'} has no checksums" in said
    assert contents(run) == before
    for says in ("had no checksums", ""):
        with lock_run(run), open_checkpoints(run) as manager:
            assert_same(restore(manager, run, config)[0], later)
            finish_writing(manager, run)
        said = capfd.readouterr().err
        assert says in said and said.count("\n") == bool(says)
    assert (folders / "3" / CHECKSUMS).read_bytes() == written
    assert sorted(os.listdir(folders)) == ["2", "3"]


def changed(value, among):
    """Another value of a field's type."""
    if among:
        return next(other for other in among if other != value)
    changes = {bool: lambda: not value, int: lambda: value + 1, float: lambda: value / 2 or 0.5}
    return changes.get(type(value), lambda: "latin-1")()


@pytest.mark.parametrize("section", SECTIONS)
def test_readers_refuse_a_config_of_another_recipe(tmp_path, section):
    """One flipped bit can change any field; placements and settings may differ."""
    run, config, *_ = make_run(tmp_path)
    cls = SECTIONS[section]
    for field in dataclasses.fields(cls):
        values = to_dict(config)
        values[section][field.name] = changed(values[section][field.name], choices(cls, field))
        (run / "config.toml").write_text(tomli_w.dumps(values))
        if field.metadata["role"] == "recipe":
            with pytest.raises(jaxgru.UserError):
                jaxgru.lm.load(run)
        else:
            jaxgru.lm.load(run)


def test_readers_refuse_another_text_and_let_a_lengthened_run_be_longer(tmp_path):
    run, config, state, *_ = make_run(tmp_path)
    save_info(run, RunInfo(text_sha256="12"))
    with pytest.raises(RunError, match="made with text_sha256 = '', and this is '12'"):
        jaxgru.lm.load(run)
    save_info(run, RunInfo(lengthened=1))
    save_config(run, replace(config, training=replace(RECIPE, epochs=9)))
    assert_same(jaxgru.lm.load(run)[0], state.params)


def test_a_broken_checkpoint_is_set_aside_and_its_step_can_be_written_again(tmp_path, capfd):
    run, config, state, later = make_two(tmp_path)
    newest = run / "checkpoints" / "3"
    (newest / "optimizer" / "_METADATA").unlink()
    broken = contents(newest)
    assert_same(restore_from(run, config), state)
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "(optimizer/_METADATA is missing)" in said
    assert "it is kept as 3.broken, and the run resumes from step 2" in said
    assert contents(newest.with_name("3.broken")) == broken
    with open_checkpoints(run) as manager:
        save(manager, later, later.params, Progress())
    assert_same(restore_from(run, config), later)
    assert sorted(os.listdir(run / "checkpoints")) == ["2", "3", "3.broken"]


def test_no_whole_checkpoint_is_one_clear_error_and_nothing_is_moved(tmp_path):
    """And the logging of others is as it was: Orbax's is silenced while they are open."""
    run, config, *_ = make_two(tmp_path)
    flip(run / "checkpoints" / "3" / "progress" / "metadata")
    shutil.rmtree(run / "checkpoints" / "2" / "best")
    before = contents(run)
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [logger.level for logger in loggers]
    says = "no intact checkpoint .*3: progress/metadata differs.*2: best/_METADATA is missing"
    for read in (lambda: restore_from(run, config), lambda: jaxgru.lm.load(run)):
        with pytest.raises(RunError, match=f"{says}.*delete"):
            read()
    assert contents(run) == before and [logger.level for logger in loggers] == levels


@pytest.mark.parametrize("when", ["damage", "read"])
def test_a_run_is_read_while_it_is_trained(tmp_path, monkeypatch, capfd, when):
    """Between the listing of its checkpoints and their reading, two newer ones replace them."""
    run, _, _, later = make_two(tmp_path)
    read = getattr(Checkpoint, when)

    def after_two_epochs(checkpoint, *arguments):
        monkeypatch.undo()
        for old, new in (("3", "5"), ("2", "4")):
            (run / "checkpoints" / old).rename(run / "checkpoints" / new)
        return read(checkpoint, *arguments)

    monkeypatch.setattr(Checkpoint, when, after_two_epochs)
    assert_same(jaxgru.lm.load(run)[0], later.params)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "missing", ["params/manifest.ocdbt", *slow("optimizer", "params", "progress")]
)
def test_a_copy_that_was_cut_off_blocks_no_whole_checkpoint(tmp_path, capfd, missing):
    """Checksums are written last, so that a copy may lack them and more."""
    run, config, state, later = make_two(tmp_path)
    newest = run / "checkpoints" / "3"
    (newest / CHECKSUMS).unlink()
    path = newest / missing
    path.unlink() if path.is_file() else shutil.rmtree(path)
    of_result = missing not in ("optimizer", "progress")  # which alone is loaded
    params = jaxgru.lm.load(run)[0]
    assert_same(params, state.params if of_result else later.params)
    assert capfd.readouterr().err.count(f"{newest} is broken (") == of_result
    assert_same(restore_from(run, config), state)
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and f"{newest} is broken (" in said
    assert sorted(os.listdir(newest.parent)) == ["2", f"{newest.name}.broken"]


def test_best_parameters_that_were_cut_off_are_missed(tmp_path, capfd):
    """Not the last epoch's instead."""
    run, _, state, _ = make_two(tmp_path, replace(RECIPE, patience=2))
    shutil.rmtree(run / "checkpoints" / "3" / "best")
    (run / "checkpoints" / "3" / CHECKSUMS).unlink()
    assert_same(jaxgru.lm.load(run)[0], jax.tree.map(lambda x: x + 1, state.params))
    assert "that of step 2 is used" in capfd.readouterr().err
