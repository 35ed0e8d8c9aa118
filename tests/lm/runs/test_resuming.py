"""What a resumed run is bound to, what may change, and what must not end a run in training."""

import itertools
import json
import math
import os
import re
import shlex
import signal
import threading

import chex
import jax
import pytest
from conftest import TINY, contents, slow

import jaxgru
from jaxgru.cli.options import config_overrides
from jaxgru.cli.train import make_parser
from jaxgru.lm.config import (
    OWNERS,
    ConfigError,
    default_value,
    field_value,
    load_config,
    override,
)
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.evaluation import window_loss
from jaxgru.lm.runs import checkpoints, folders, lifecycle, terminal
from jaxgru.lm.runs.folders import RunError, RunInfo, load_info, lock_run
from jaxgru.lm.runs.initial import config_from
from jaxgru.lm.runs.lifecycle import resume_run, start_run
from jaxgru.lm.training import Epoch, Progress, loop

FEWER = TINY | {"training.epochs": 1, "training.steps_per_epoch": 1}


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.fixture
def start(tmp_path, tiny_text):
    """Trains one step of a tiny model; returns its folder."""
    options = FEWER | {"data.corpus": str(tiny_text), "name": "tiny"}
    return lambda: start_run(load_config("astra_alpha", options), tmp_path / "runs")


@pytest.fixture
def family(run_copy, tmp_path):
    """The folder of `start`'s runs, with one in it."""
    family = tmp_path / "runs" / "tiny"
    family.mkdir(parents=True)
    (family / "latest").symlink_to("v1")
    run_copy.rename(family / "v1")
    return family


class TestBound:
    """To all that the checkpoint was made with."""

    @pytest.mark.parametrize("old, new, says", [
        ("learning_rate = 0.003", "learning_rate = 0.01", "learning_rate = 0.003, and this is"),
        ("epochs = 2", "epochs = 1", "training.epochs = 2.*resume with --training.epochs 1\\."),
        ("\nseed = 0", "\nseed = 1", "training.seed = 0, and this is 1; set it back, or start"),
        ("batch_size = 4", "batch_size = 8", "training.batch_size = 4, and this is 8"),
        ("state_dropout = 0.1", "state_dropout = 0.2", "state_dropout = 0.1, and this is 0.2"),
    ])  # fmt: skip
    def test_to_its_config(self, run_copy, old, new, says):
        edit(run_copy / "config.toml", old, new)
        before = contents(run_copy)
        with pytest.raises(RunError, match=says):
            resume_run(run_copy)
        assert contents(run_copy) == before

    def test_to_its_tokenizer(self, run_copy):
        """The same characters in another order: every token means another one."""
        path = run_copy / "tokenizer.json"
        characters = json.loads(path.read_text())["characters"]
        path.write_text(json.dumps({"characters": characters[::-1]}))
        for use in (resume_run, jaxgru.lm.load):
            with pytest.raises(RunError, match=r"was made with tokenizer \(SHA-256\) = "):
                use(run_copy)

    @pytest.mark.parametrize("name", ["jax_threefry_partitionable", "jax_enable_x64"])
    def test_to_jaxs_settings(self, run_copy, name):
        value = getattr(jax.config, name)
        jax.config.update(name, not value)
        try:
            with pytest.raises(RunError, match=f"made with {name} = {value}, and this is"):
                resume_run(run_copy)
        finally:
            jax.config.update(name, value)

    def test_but_not_to_who_computes_it_or_the_place_of_its_corpus(
        self, run_copy, tiny_text, tmp_path
    ):
        moved = tmp_path / "elsewhere.txt"
        moved.write_bytes(tiny_text.read_bytes())
        edit(run_copy / "config.toml", str(tiny_text), str(tmp_path / "gone.txt"))
        resume_run(run_copy, {"data.corpus": str(moved), "training.implementation": "scan"})
        _, config, _ = jaxgru.lm.load(run_copy)
        assert (config.data.corpus, config.training.implementation) == (str(moved), "scan")
        assert config.name == "astra_alpha" and len(records(run_copy)) == 2


class TestLength:
    """--resume RUN --training.epochs N."""

    def test_a_finished_run_is_lengthened_with_the_schedule_of_a_longer_one(
        self, run_copy, capfd, monkeypatch
    ):
        """lr·(1 + cos(πe/E))/2: the first two epochs as they were, with E = 2, then with E = 4.

        It names each commit that has trained it.
        """
        before = records(run_copy)
        commits = load_info(run_copy).commits
        monkeypatch.setattr(folders, "current_commit", lambda: "a" * 40)
        samples = (run_copy / "samples.txt").read_bytes()
        resume_run(run_copy, {"training.epochs": 4})
        after = records(run_copy)
        assert after[:2] == before
        rates = [3e-3 * (1 + math.cos(math.pi * e / E)) / 2 for e, E in [(0, 2), (1, 2), (2, 4)]]
        rates.append(3e-3 * (1 + math.cos(math.pi * 3 / 4)) / 2)
        assert [record["learning_rate"] for record in after] == pytest.approx(rates, rel=1e-5)
        out = " ".join(capfd.readouterr().out.split())
        assert "The run now has 4 epochs; from here on its learning rates are those" in out
        assert (run_copy / "samples-2-epochs.txt").read_bytes() == samples
        _, config, _ = jaxgru.lm.load(run_copy)
        assert config.training.epochs == 4 and load_info(run_copy).lengthened == 1
        monkeypatch.setattr(folders, "current_commit", lambda: "b" * 40)
        resume_run(run_copy)  # as it is now, it needs no option
        assert records(run_copy) == after
        assert load_info(run_copy).commits == [*commits, "a" * 40]

    def test_a_plateau_goes_on_to_the_same_bits(self, tmp_path, tiny_text, monkeypatch):
        """Two epochs and two more are the four, with the best loss and the scale so far.

        The validation losses are written here, for those of a training depend on rounding. The
        third is lower than the second, but not than the best, which is the first.
        """
        options = TINY | {"training.schedule": "plateau"}
        losses = itertools.cycle([1.0, 2.0, 1.5, 1.75])
        monkeypatch.setattr(loop, "window_loss", lambda *_: next(losses))

        def start(epochs):
            own = {"data.corpus": str(tiny_text), "training.epochs": epochs, "name": "x"}
            return start_run(load_config("astra_alpha", options | own), tmp_path)

        whole = start(4)
        run = start(2)
        resume_run(run, {"training.epochs": 4})
        chex.assert_trees_all_equal(jaxgru.lm.load(run)[0], jaxgru.lm.load(whole)[0])
        expected = pytest.approx([3e-3, 3e-3, 3e-3 / 4, 3e-3 / 16], rel=1e-5)
        assert [record["learning_rate"] for record in records(whole)] == expected
        assert [record["learning_rate"] for record in records(run)] == expected

    @pytest.mark.slow
    def test_twice_before_a_step_is_done(self, run_copy, monkeypatch, capfd):
        """The checkpoint is as it was, finished, and is resumed with what was given last."""
        with monkeypatch.context() as patch:
            patch.setattr(lifecycle._Run, "train", lambda *_: None)
            resume_run(run_copy, {"training.epochs": 3})
            resume_run(run_copy, {"training.epochs": 4})
        resume_run(run_copy)
        assert len(records(run_copy)) == 4
        assert "is finished" not in capfd.readouterr().out

    @pytest.mark.slow
    def test_killed_between_run_json_and_the_config_it_is_as_long_as_before(
        self, run_copy, monkeypatch
    ):
        monkeypatch.setattr(folders, "save_config", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            resume_run(run_copy, {"training.epochs": 4})
        monkeypatch.undo()
        resume_run(run_copy)
        assert len(records(run_copy)) == 2
        resume_run(run_copy, {"training.epochs": 3})
        assert len(records(run_copy)) == 3

    @pytest.mark.parametrize("overrides, says", [
        ({"training.epochs": 1}, "training.epochs is 1, but .* has begun 2 epochs"),
        ({"training.patience": 9}, "training.patience cannot change within a run"),
        ({"training.learning_rate": 1}, "training.learning_rate cannot change within a run"),
        ({"training.epochs": "many"}, "training.epochs is 'many'"),
    ])  # fmt: skip
    def test_what_cannot_be_is_refused_and_nothing_changes(self, run_copy, overrides, says):
        before = contents(run_copy)
        with pytest.raises(jaxgru.UserError, match=says):
            resume_run(run_copy, overrides)
        assert contents(run_copy) == before

    @pytest.mark.parametrize("name", OWNERS)
    def test_the_command_that_a_refusal_names_can_be_run(self, run_copy, name):
        """What is only for the old value of another field is left out, and nothing is given."""
        owner, value = OWNERS[name]
        other = {"plateau": "constant", "streams": "crops"}[value]
        own = {"training.reset_probability": 0.2, "training.random_offset": True}
        own = {owner: value, name: own.get(name, 3 if name.endswith("patience") else 0.5)}
        usual = load_config(run_copy / "config.toml")
        folders.save_config(run_copy, override(usual, own))
        assert field_value(self.named(run_copy, {owner: other}), name) == default_value(name)
        folders.save_config(run_copy, usual)
        assert field_value(self.named(run_copy, own), name) == own[name]
        with pytest.raises(ConfigError, match=f"{name} is .*, but it is only for {value}"):
            resume_run(run_copy, {name: own[name]})

    def named(self, run, overrides):
        """The config of the command that a refused resume names."""
        with pytest.raises(RunError, match="cannot change within a run") as refusal:
            resume_run(run, overrides)
        command = shlex.split(str(refusal.value).partition("from its weights: ")[2])
        given = config_overrides(make_parser().parse_args(command[2:]))
        return config_from(given.pop("training.init_from"), given)

    def test_a_run_that_stopped_early_cannot_go_on_by_more_epochs(self, run_copy, capfd):
        """Its best epoch is the first of three, and it waits for two."""
        progress = Progress([Epoch(1, 1, 0.1, 2.0, 2.0, 1.0, 1.0)] * 3, best_epoch=1, finished=True)
        before = contents(run_copy)
        for patience, says in ((2, "training.patience = 2 permits no more"), (3, "--training.ep")):
            config = load_config("astra_alpha", {"training.patience": patience})
            run = lifecycle._Run(run_copy, config, RunInfo(), *[None] * 3)
            assert f"is finished, with 3 epochs; {says}" in run.finished(progress)
            if patience == 2:
                run.change({"training.epochs": 10}, progress)
                assert says in " ".join(capfd.readouterr().out.split())
        assert contents(run_copy) == before

    @pytest.mark.slow
    def test_the_same_command_twice_is_no_error(self, run_copy, capfd):
        """It is what the refusal of an edited config advises."""
        edit(run_copy / "config.toml", "epochs = 2", "epochs = 3")
        with pytest.raises(RunError, match="resume with --training.epochs 3"):
            resume_run(run_copy)
        resume_run(run_copy, {"training.epochs": 3})
        before = records(run_copy)
        resume_run(run_copy, {"training.epochs": 3})
        assert "is finished, with 3 epochs;" in capfd.readouterr().out
        assert len(before) == 3 and records(run_copy) == before
        assert load_info(run_copy).lengthened == 1

    def test_a_finished_run_says_how_it_could_be_longer(self, run_copy, tmp_path, capfd):
        """Also one whose folder is named like a file: --name gru.onnx is allowed.

        What else is given is kept.
        """
        run = run_copy.rename(tmp_path / "gru.onnx")
        resume_run(run, {"training.epochs": 2, "training.keep_epochs": True})
        assert "is finished, with 2 epochs; --training.epochs N" in capfd.readouterr().out
        config = jaxgru.lm.load(run)[1]
        assert config.training.keep_epochs and load_info(run).lengthened == 0

    def test_a_run_killed_before_its_reports_gets_them(self, run_copy):
        """As it would be between the last checkpoint and the end."""
        names = ("metrics.jsonl", "samples.txt")
        before = [(run_copy / name).read_bytes() for name in names]
        for name in (*names, "loss.png"):
            (run_copy / name).unlink()
        resume_run(run_copy)
        assert [(run_copy / name).read_bytes() for name in names] == before
        assert (run_copy / "loss.png").exists()


class TestPlaces:
    @pytest.mark.parametrize("name", ["[lab] me", "a*b", "a?b", "back\\slash", "\udcff"])
    def test_a_path_in_which_orbax_finds_nothing_again_is_refused(self, run_copy, tmp_path, name):
        """Before the text is read. A run that was moved there can be read, but for two of them."""
        (tmp_path / name).mkdir()
        run = run_copy.rename(tmp_path / name / "v1")
        with pytest.raises(RunError, match="checkpoints cannot be kept in"):
            resume_run(run)
        with pytest.raises(RunError, match="checkpoints cannot be kept in"):
            start_run(load_config("astra_alpha", {"data.corpus": "none.txt"}), tmp_path / name)
        if name not in ("back\\slash", "\udcff"):
            jaxgru.lm.load(run)

    def test_a_bug_after_a_missing_file_is_no_system_error(self, run_copy):
        with pytest.raises(KeyError), lock_run(run_copy):
            try:
                (run_copy / "nothing").read_bytes()
            except FileNotFoundError:
                {}["x"]

    def test_a_run_that_is_moved_while_it_trains(self, start, monkeypatch, tmp_path):
        fit = lifecycle.fit

        def moved(*arguments):
            (tmp_path / "runs" / "tiny" / "v1").rename(tmp_path / "moved")
            return fit(*arguments)

        monkeypatch.setattr(lifecycle, "fit", moved)
        with pytest.raises(RunError, match="was moved or deleted while it was trained"):
            start()
        assert not list(tmp_path.glob("runs/tiny/v1"))
        assert (tmp_path / "moved" / "run.json").exists()

    def test_an_editor_does_not_take_the_lock_away(self, run_copy):
        """`sed -i` and vim write a new file and rename it."""
        with lock_run(run_copy):
            copy = run_copy / "config.toml~"
            copy.write_bytes((run_copy / "config.toml").read_bytes())
            os.replace(copy, run_copy / "config.toml")
            with pytest.raises(RunError, match="is being trained by another process"):
                resume_run(run_copy)


def test_a_run_is_named_after_its_text():
    """Those whose names have no Latin letter are told apart."""
    texts = ("日本.txt", "中国.txt", "глава 1.txt", "роман 1.txt", f"{'я' * 120}.txt", "((.txt",
             "some/my text (2).txt")  # fmt: skip
    names = [load_config("astra_alpha", {"data.corpus": text}).name for text in texts]
    assert len(set(names)) == len(texts) and names[-1] == "astra_alpha-my_text_2_"
    lengths = [8, 8, len("1-") + 8, len("1-") + 8, 8, 8]
    assert [len(name) - len("astra_alpha-") for name in names[:-1]] == lengths


class TestTraining:
    """What must not end it, and how it ends."""

    @pytest.mark.parametrize("patience", [0, pytest.param(2, marks=pytest.mark.slow)])
    def test_the_announced_loss_is_that_of_the_model_that_is_loaded(
        self, tiny_text, tmp_path, capfd, patience
    ):
        """The rate is far too high, so the first of two epochs is the best.

        Their losses are 15.8 and 22.5; with another rounding, they differ by 0.01.
        """
        options = FEWER | {"data.corpus": str(tiny_text), "name": "tiny", "training.epochs": 2}
        options |= {"training.learning_rate": 3, "training.patience": patience}
        run = start_run(load_config("astra_alpha", options), tmp_path / "my runs")
        said = capfd.readouterr().out
        params, config, tokenizer = jaxgru.lm.load(run)
        _, dataset = load_dataset(config, tokenizer)
        loss = window_loss(params, dataset.validation, config.training.sequence_length)
        first, last = (record["val_loss"] for record in records(run))
        assert first < last and loss == pytest.approx(first if patience else last, rel=1e-6)
        other = "last" if patience else "best"
        if patience:
            epochs = f"after epoch 1; {last:.4f} after the last"
        else:
            epochs = f"after the last epoch; {first:.4f} after epoch 1"
        given = f"{loss:.4f} on the validation text {epochs}, which --epoch {other} gives"
        assert f"\nloss    {given}\ntext    " in said
        assert f"\nfigure  {run / 'loss.png'}\nsample  jaxgru sample '{run}'\n" in said
        shown = re.search(r"\ntext    (.*)\n        (.*)\nfigure", said)
        written = (run / "samples.txt").read_text().partition("--- state reset")[0]
        assert all(line in written and line.strip() for line in shown.groups())
        loss = window_loss(jaxgru.lm.load(run, other)[0], dataset.validation, 16)
        assert loss == pytest.approx(last if patience else first, rel=1e-6)

    @pytest.mark.parametrize("name", ["SIGINT", *slow("SIGTERM", "SIGHUP")])
    def test_a_signal_before_the_first_step_leaves_no_empty_run(
        self, start, monkeypatch, name, family
    ):
        """While it is being compiled, say. `latest` still names the run before."""
        fresh_state = lifecycle._fresh_state
        before = signal.getsignal(getattr(signal, name))

        def interrupted(*arguments):
            signal.raise_signal(getattr(signal, name))
            return fresh_state(*arguments)

        monkeypatch.setattr(lifecycle, "_fresh_state", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start()
        assert sorted(os.listdir(family)) == ["latest", "v1"]
        assert os.readlink(family / "latest") == "v1"
        assert signal.getsignal(getattr(signal, name)) is before

    def test_a_failing_disk_leaves_no_empty_run(self, start, monkeypatch, family, capfd):
        """Nothing could be saved. What was there before is found again."""
        before = contents(family)

        def full(checkpoint, values):
            params = checkpoint.folder.with_suffix(".orbax-checkpoint-tmp") / "params"
            params.mkdir(parents=True)
            late = lambda: params.mkdir(parents=True, exist_ok=True)  # as TensorStore's threads
            threading.Timer(0.3, late).start()
            raise ValueError("No space left on device [os_error_code='28']")

        monkeypatch.setattr(checkpoints.Checkpoint, "write", full)
        says = "v2 stopped: No space left on device; no checkpoint was saved yet"
        with pytest.raises(RunError, match=says):
            start()
        assert contents(family) == before
        assert f"{family / 'v2'} is deleted" in capfd.readouterr().out

    def test_a_signal_that_is_ignored_stays_so(self, start, monkeypatch):
        """`nohup` has SIGHUP ignored."""
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        fresh_state = lifecycle._fresh_state

        def closed(*arguments):
            signal.raise_signal(signal.SIGHUP)
            return fresh_state(*arguments)

        monkeypatch.setattr(lifecycle, "_fresh_state", closed)
        try:
            assert (start() / "samples.txt").exists()
        finally:
            signal.signal(signal.SIGHUP, before)

    def test_a_bar_is_as_wide_as_the_terminal(self, capfd):
        from rich.console import Console

        console = Console(force_terminal=True, width=80, legacy_windows=False)
        with terminal.progress_bar(1200, console) as (bar, task):
            now = {"what": "epoch 4/6", "status": "loss 1.2345", "rate": "9,999 tokens/s"}
            bar.update(task, completed=600, **now)
            line = console.render_lines(bar.get_renderable())[0]
        text = "".join(segment.text for segment in line)
        assert text.count("━") >= 10 and len(text) == 80
