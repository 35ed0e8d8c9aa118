"""Which runs make the study, which are done, and how reproduce.py does the others."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from jaxgru.cli.options import parse_fields
from jaxgru.lm.config import load_config
from jaxgru.lm.runs.folders import RunInfo, is_finished, save_config, save_info
from jaxgru.lm.runs.published import recipe
from study.jobs import Job, all_jobs, find_job, is_measured

PUBLISHED = ["astra_alpha", "astra_beta", "astra_gamma", "scribe_alpha", "scribe_beta",
             "scribe_gamma", "leviathan"]  # fmt: skip


def make_run(folder: Path, job: Job, trained: bool = False, measured: bool = False) -> Path:
    """A run folder as far as reproduce.py looks into it."""
    folder.mkdir(parents=True)
    save_info(folder, RunInfo("0" * 64))
    save_config(folder, job.config)
    if trained:
        (folder / "samples.txt").touch()
    if measured:
        (folder / "study.json").write_text("{}")
    return folder


class TestJobs:
    def test_the_published_models_come_first_and_each_astra_has_three_seeds(self):
        jobs = all_jobs()
        assert [job.name for job in jobs[:7]] == PUBLISHED
        assert all(job.config.training.seed == 0 for job in jobs[:7])
        for name in PUBLISHED[:3]:
            published = load_config(name)
            plain = [j.config for j in jobs if recipe(j.config) == recipe(published)]
            assert sorted(config.training.seed for config in plain) == [0, 1, 2]

    def test_dropout_without_and_between_is_tried_on_astra_alpha(self):
        tried = {(j.config.training.dropout, j.config.training.dropout_site) for j in all_jobs()
                 if j.name == "astra_alpha"}  # fmt: skip
        assert {(0.1, "state"), (0.0, "state"), (0.1, "between")} <= tried

    def test_no_two_are_the_same_run(self):
        configs = [(j.name, j.config.model, j.config.training, j.config.data) for j in all_jobs()]
        assert len(set(configs)) == len(configs)


class TestFindJob:
    def test_the_newest_of_the_same_config_and_no_other(self, tmp_path):
        plain, seed_1 = Job("elman_alpha", ()), Job("elman_alpha", (("training.seed", 1),))
        family = tmp_path / "elman_alpha"
        assert find_job(tmp_path, plain) is None
        make_run(family / "v2", plain)
        make_run(family / "v10", Job("elman_alpha", (("training.keep_epochs", True),)))
        make_run(family / "v11", seed_1)
        make_run(family / "v12", Job("elman_alpha", (("training.epochs", 1),)))
        make_run(family / "v13", Job("elman_alpha", (("data.corpus", "mine.txt"),)))
        make_run(family / "v15-copy", plain)  # the user's own
        make_run(family / "v16", Job("elman_alpha", (("data.batches", "streams"),)))
        (family / "v14").mkdir()  # its process was killed before it wrote a config
        assert find_job(tmp_path, plain) == family / "v10"
        assert find_job(tmp_path, seed_1) == family / "v11"

    def test_a_real_run_is_finished(self, tiny_run):
        assert is_finished(tiny_run) and not is_measured(tiny_run)


class FakeProcess:
    """Stands in for train.py and evaluate.py: notes its command and leaves what they leave."""

    commands: list[list[str]] = []
    signals: list[int] = []
    fails = times_out = False

    def __init__(self, command):
        _, script, *options = command
        self.command = [Path(script).stem, *options]
        type(self).commands.append(self.command)

    def wait(self, timeout=None):
        if self.times_out and timeout is not None:
            raise subprocess.TimeoutExpired(self.command, timeout)
        name, option, value, *rest = self.command
        if self.fails:
            return 2
        if name == "evaluate":
            Path(value, "study.json").write_text("{}")
        elif option == "--resume":
            Path(value, "samples.txt").touch()
        else:
            runs, *changes = rest[1:]
            given = {n[2:]: text for n, text in zip(changes[::2], changes[1::2], strict=True)}
            fields = tuple(parse_fields(given).items())
            family = Path(runs, value)
            number = 1 + len(list(family.glob("v*")))
            make_run(family / f"v{number}", Job(value, fields), trained=True)
        return 0

    def send_signal(self, number):
        self.signals.append(number)


@pytest.fixture
def fake(monkeypatch):
    kind = type("Fake", (FakeProcess,), {"commands": [], "signals": []})
    monkeypatch.setattr(subprocess, "Popen", kind)
    before = signal.getsignal(signal.SIGTERM)
    yield kind
    signal.signal(signal.SIGTERM, before)


class TestScript:
    def test_trains_then_measures_each_and_does_nothing_twice(self, script, fake, tmp_path):
        done = script("reproduce", "--only", "elman_alpha", "--runs", tmp_path)
        assert done.code == 0, done.err
        runs = tmp_path / "elman_alpha"
        expected = []
        for i in range(3):
            seed = ["--training.seed", str(i)] if i else []
            expected += [
                ["train", "--config", "elman_alpha", "--runs", str(tmp_path), *seed],
                ["evaluate", "--run", str(runs / f"v{i + 1}"), "--save"],
            ]
        assert fake.commands == expected
        assert script("reproduce", "--only", "elman_alpha", "--runs", tmp_path).code == 0
        assert len(fake.commands) == 6

    def test_goes_on_with_what_is_begun_and_measures_what_is_finished(self, script, fake, tmp_path):
        first, second, third = (j for j in all_jobs() if j.name == "bengio_mlp")
        begun = make_run(tmp_path / "bengio_mlp" / "v1", first)
        trained = make_run(tmp_path / "bengio_mlp" / "v2", second, trained=True)
        make_run(tmp_path / "bengio_mlp" / "v3", third, trained=True, measured=True)
        done = script("reproduce", "--only", "bengio_mlp", "--runs", tmp_path)
        assert done.code == 0
        assert fake.commands == [
            ["train", "--resume", str(begun)],
            ["evaluate", "--run", str(begun), "--save"],
            ["evaluate", "--run", str(trained), "--save"],
        ]

    def test_out_of_time_it_stops_the_script_and_exits_3(self, script, fake, tmp_path):
        fake.times_out = True
        options = ["--only", "elman_alpha", "--runs", tmp_path, "--minutes", "5"]
        done = script("reproduce", *options)
        assert done.code == 3
        assert "0 of 3 done. The same command continues." in done.out
        assert fake.signals == [signal.SIGTERM] and len(fake.commands) == 1

    def test_a_failure_does_not_keep_the_others_from_their_turn(self, script, fake, tmp_path):
        fake.fails = True
        done = script("reproduce", "--only", "elman_alpha", "--runs", tmp_path)
        assert done.code == 1 and len(fake.commands) == 3
        assert "Failed: elman_alpha; elman_alpha --training.seed 1" in done.out

    def test_list_says_how_far_it_is_and_starts_nothing(self, script, fake, tmp_path):
        first, second, _ = (j for j in all_jobs() if j.name == "bengio_mlp")
        make_run(tmp_path / "bengio_mlp" / "v1", first, trained=True, measured=True)
        make_run(tmp_path / "bengio_mlp" / "v2", second)
        done = script("reproduce", "--all", "--list", "--runs", tmp_path)
        assert done.code == 0 and fake.commands == []
        assert "bengio_mlp: done" in done.out
        assert "bengio_mlp --training.seed 1: begun in" in done.out
        assert "leviathan: to do" in done.out
        assert script("reproduce", "--list", "--runs", tmp_path).out == done.out

    @pytest.mark.parametrize(
        "options, says",
        [
            ([], "give one of --all and --only"),
            (["--all", "--only", "leviathan"], "give one of --all and --only"),
            (["--only", "astra_delta"], "the study has no 'astra_delta'"),
            (["--all", "--minutes", "0"], "--minutes is 0; it must be above 0."),
            (["--all", "--minutes", "nan"], "--minutes is nan; it must be above 0."),
        ],
    )
    def test_refusals(self, script, fake, options, says):
        done = script("reproduce", *options)
        assert done.code == 2 and says in done.err and done.err.count("\n") == 1
        assert fake.commands == []


def test_saving_belongs_to_a_run(script, tmp_path):
    (tmp_path / "a.safetensors").touch()
    for options in (["--pretrained", "astra_alpha"], ["--run", tmp_path / "a.safetensors"]):
        done = script("evaluate", *options, "--save")
        assert done.code == 2 and "--save writes into a run folder" in done.err
