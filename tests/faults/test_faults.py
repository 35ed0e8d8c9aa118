"""Runs that are killed or stopped anywhere, or whose disk is full, end with the same bits."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

if sys.platform != "linux":
    pytest.skip("Python forks no server elsewhere", allow_module_level=True)

from conftest import slow
from trainers import NO_HARM, Ended, Harm, start_server, train

import jaxgru
from jaxgru.lm.runs import checkpoints, folders

OPTIONS = {
    "model.hidden_dim": 32,  # so that a checkpoint has files larger than trainers.FULL
    "model.embedding_dim": 4, "training.epochs": 3, "training.steps_per_epoch": 4,
    "training.batch_size": 4, "training.sequence_length": 16, "training.patience": 3,
    "training.keep_epochs": "true",
}  # fmt: skip


@dataclass
class Lab:
    """A text, and what a run that nothing happened to made of it."""

    folder: Path
    result: dict[str, Any]
    changes: int

    def place(self) -> Path:
        """A new folder for runs."""
        path = self.folder / f"runs{len(list(self.folder.iterdir()))}"
        path.mkdir()
        return path

    def go_on(self, runs: Path, harm: Harm = NO_HARM) -> Ended:
        """Start a run, or resume the one that is there."""
        run = runs / "tiny" / "v1"
        if (run / "config.toml").exists():
            return train(runs, ["--resume", str(run)], harm)
        shutil.rmtree(runs / "tiny", ignore_errors=True)  # its start was killed before its config
        options = [f"--{name}={value}" for name, value in OPTIONS.items()]
        start = ["--config", "astra_alpha", "--name", "tiny", "--runs", str(runs)]
        return train(runs, [*start, f"--data.corpus={self.folder / 'text.txt'}", *options], harm)


def result_of(runs: Path) -> dict[str, Any]:
    """All that a run leaves, but for its times; every array as bytes."""
    run = folders.find_run(runs / "tiny")
    config = jaxgru.lm.load_config(run / "config.toml")
    with checkpoints.open_checkpoints(run) as manager:
        state, best, _ = checkpoints.restore(manager, run, config)
    state = state.replace(key=jax.random.key_data(state.key))
    epochs = [jaxgru.lm.load(path)[0] for path in sorted((run / "epochs").iterdir())]
    arrays = jax.tree.leaves((state, best, jaxgru.lm.load(run)[0], epochs))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("epoch", "step", "learning_rate", "train_loss", "val_loss")
    parts = (runs.glob("tiny/*"), run.iterdir(), run.glob("checkpoints/*"), run.glob("epochs/*"))
    return {
        "arrays": [np.asarray(array).tobytes() for array in arrays],
        "losses": [[record[name] for name in names] for record in records],
        "samples": (run / "samples.txt").read_text(),
        "files": sorted(str(path.relative_to(runs)) for part in parts for path in part),
        "latest": (runs / "tiny" / "latest").resolve() == run,
    }


def epochs_done(ended: Ended) -> list[int]:
    """The epochs that a process has finished, as it said."""
    return [int(epoch) for epoch in re.findall(r"^epoch +(\d+) ", ended.output, re.MULTILINE)]


def unexpected(ended: Ended) -> list[str]:
    """What a process said, but that the one before was killed before it wrote the checksums."""
    says = r"checkpoint .* had no checksums, so damage .* noticed; it has them now\."
    return [line for line in ended.errors.splitlines() if not re.fullmatch(says, line)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Lab:
    start_server()
    lab = Lab(tmp_path_factory.mktemp("lab"), {}, 0)
    (lab.folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 20)
    runs = lab.place()
    ended = lab.go_on(runs)
    assert ended.code == 0 and ended.errors == "", ended
    lab.result = result_of(runs)
    lab.changes = ended.changes
    return lab


KILL = (signal.SIGKILL,)
STOP = (signal.SIGINT,)
FULL = (0,)
MORE = [KILL, 2 * KILL, STOP + KILL, (signal.SIGTERM,), (signal.SIGHUP,), FULL, FULL + KILL]


@pytest.mark.parametrize(
    "harms, seed",
    [(KILL, 0), *slow((STOP + KILL, 1), (FULL, 2), *((h, s) for h in MORE for s in range(3, 9)))],
)
def test_a_run_ends_with_the_same_bits_and_does_no_finished_epoch_again(lab, harms, seed):
    """It is killed or stopped, or its disk is full, at any change; then while it is resumed."""
    rng = random.Random(seed)
    runs = lab.place()
    done = []
    run = runs / "tiny" / "v1"
    for most, number in zip((lab.changes, 40), harms, strict=False):
        delay = rng.choice([0, 0, rng.uniform(1e-4, 0.02)]) * (number == signal.SIGKILL)
        ended = lab.go_on(runs, Harm(rng.randint(1, most), number, delay))
        done += epochs_done(ended)
        if number == 0:
            assert ended.code == 2 and len(ended.errors.splitlines()) == 1, ended
            assert " stopped: File too large" in ended.errors
            steps = folders.saved_steps(run)
            if steps:
                assert f"the checkpoint of step {steps[-1]} is intact" in ended.errors
        elif number == signal.SIGKILL:
            assert ended.code in (-signal.SIGKILL, -signal.SIGALRM, 0), ended
            assert not unexpected(ended), ended
        else:
            assert ended.code in (130, 0) and not unexpected(ended), ended
            if ended.code and run.exists():
                assert f"--resume {run}" in ended.output
                step = int(re.findall(r"saved after step (\d+)", ended.output)[0])
                assert step == folders.saved_steps(run)[-1]
    ended = lab.go_on(runs)
    done += epochs_done(ended)
    assert ended.code == 0 and not unexpected(ended), ended
    assert result_of(runs) == lab.result and len(set(done)) == len(done)
