"""Harm done to real training processes: each run is resumed and ends with the same bits.

Nearly every kind once, by `python -m pytest tests/faults -m slow`; `campaign.py` does all of them
often, at random. The suite has one kill of a whole run, in tests/runs/test_lifecycle.py; damaged
checkpoints, signals and full disks are tested where they are handled.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

if sys.platform != "linux":
    pytest.skip("limits on processes and mounts are Linux's", allow_module_level=True)

import fault_kinds
from fault_kinds import ALL, NEVER, Outcome, can_mount
from fault_lab import STEPS_PER_EPOCH, Lab

pytestmark = pytest.mark.slow
ELSEWHERE = {"SIGTERM once", "its holder killed"}  # tests/runs/test_lifecycle.py; kills
KINDS = [name for name in ALL if name not in ELSEWHERE]
KILLS = {"at random": fault_kinds.at_random, "in a write": fault_kinds.in_a_write}


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def outcomes(lab, tmp_path_factory, request) -> dict[str, Future]:
    """Those that are selected, two at a time: they wait for a disk as often as for a core."""
    chosen = {getattr(item, "callspec", None) and item.callspec.params.get("name")
              for item in request.session.items}  # fmt: skip
    wanted = [name for name in ALL if name in chosen]
    mounts = can_mount(tmp_path_factory.mktemp("mount"))
    pool, work = ThreadPoolExecutor(2), {}
    for name, moment in ((name, KILLS[name]) for name in KILLS if name in chosen):
        work[name] = pool.submit(killed, lab, random.Random(name), moment)
    for name in wanted:
        if mounts or not needs_mount(name):
            work[name] = pool.submit(ALL[name], lab, random.Random(name))
    yield work
    pool.shutdown(cancel_futures=True)


def killed(lab: Lab, rng: random.Random, moment: Callable) -> list[Outcome]:
    """One kill; a run may be quicker than its killer, and then it is another's turn."""
    done = []
    while not done:
        done = fault_kinds.kills(lab, rng, 1, moment)
    return done


def needs_mount(name: str) -> bool:
    """To root no folder is read-only but by a mount, and only root makes a disk so small."""
    return "ENOSPC" in name or ("read-only" in name and os.geteuid() == 0)


@pytest.mark.parametrize("name", KILLS)
def test_a_killed_run_ends_with_the_same_bits(outcomes, name):
    for outcome in outcomes[name].result():
        assert outcome.problems == [] and outcome.files_lost == []
        assert outcome.steps_lost <= STEPS_PER_EPOCH
        assert outcome.note != NEVER or outcome.steps_lost == 0


@pytest.mark.parametrize("name", KINDS)
def test_a_run_recovers_and_loses_no_more_than_an_epoch(outcomes, name):
    if name not in outcomes:
        pytest.skip("needs the right to mount file systems")
    outcome = outcomes[name].result()
    assert outcome.problems == [] and outcome.files_lost == []
    assert outcome.steps_lost <= (160 if name == "every checkpoint broken" else STEPS_PER_EPOCH)
