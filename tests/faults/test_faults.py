"""Harm done to real training processes: each run is resumed and ends with the same bits.

Nearly every kind once, by `python -m pytest tests/faults -m slow`; `campaign.py` does all of them
often, at random. The suite has one kill of a whole run, in tests/lm/runs/test_lifecycle.py; damaged
checkpoints, signals and full disks are tested where they are handled. It also tests, here, that a
process is struck at its n-th change.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("limits on processes and mounts are Linux's", allow_module_level=True)

import strikes
from fault_kinds import ALL, can_mount
from fault_lab import STEPS_PER_EPOCH, Lab
from strikes import How, Plan, Strike

KINDS = [name for name in ALL if name != "SIGTERM once"]  # tests/lm/runs/test_lifecycle.py

# Three times an opening, a write and a renaming; then a removal, and two other openings
CHANGES = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import strikes
strikes.arm(Path(sys.argv[2]))
here = os.getcwd()
for number in range(3):
    try:
        with open("part", "w") as file:
            file.write("0123456789")
        os.rename("part", f"{here}/{number}")
    except OSError as error:
        print(error.errno)
try:
    folder = os.open(here, os.O_RDONLY)
    os.unlink("2", dir_fd=folder)
    os.listdir()
except OSError as error:
    print(error.errno)
"""
LEFT = {"0": 10, "1": 10}  # the files' sizes


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    library = strikes.compiled(tmp_path_factory.mktemp("library"))
    return library or pytest.skip("needs a C compiler")


@pytest.mark.parametrize(
    "plan, struck, code, left, said",
    [
        (Plan(), "", 0, LEFT, []),
        (Plan(6, How.BEFORE, signal.SIGKILL), "rename /1", -9, {"0": 10, "part": 10}, []),
        (Plan(6, How.AFTER, signal.SIGKILL), "rename /1", -9, LEFT, []),
        (Plan(5, How.HALF, signal.SIGTERM), "write /part", -15, {"0": 10, "part": 5}, []),
        (Plan(3, How.FAILS, errno.ESTALE), "rename /0", 0, {"1": 10}, [errno.ESTALE]),
        (Plan(4, How.FAILS, errno.EROFS, times=9), "open64 /part", 0, {"0": 10}, 3 * [errno.EROFS]),
        (Plan(2, How.FAILS, errno.EMFILE, reads=True), "opendir ", 0, LEFT, [errno.EMFILE]),
    ],
)
def test_a_process_is_struck_at_its_nth_change(library, tmp_path, plan, struck, code, left, said):
    folder = tmp_path / "folder"
    folder.mkdir()
    strike = Strike(tmp_path / "strike", folder, plan)
    ended = subprocess.run(
        [sys.executable, "-c", CHANGES, Path(__file__).parent, strike.path],
        env=os.environ | {"LD_PRELOAD": str(library)},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (code, "")
    assert strike.struck.startswith(struck) and bool(strike.struck) == bool(struck)
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == left
    assert [int(line) for line in ended.stdout.split()] == said
    assert struck or strike.counts == (10, 2)


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def outcomes(lab, tmp_path_factory, request) -> dict[str, Future]:
    """Those that are selected, two at a time: they wait for a disk as often as for a core."""
    chosen = {getattr(item, "callspec", None) and item.callspec.params.get("name")
              for item in request.session.items}  # fmt: skip
    mounts = can_mount(tmp_path_factory.mktemp("mount"))
    pool, work = ThreadPoolExecutor(2), {}
    for name in ALL:
        able = lab.can_strike if "n-th" in name else mounts or not needs_mount(name)
        if able and name in chosen:
            work[name] = pool.submit(ALL[name], lab, random.Random(name))
    yield work
    pool.shutdown(cancel_futures=True)


def needs_mount(name: str) -> bool:
    """To root no folder is read-only but by a mount, and only root makes a disk so small."""
    return "ENOSPC" in name or ("read-only" in name and os.geteuid() == 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_run_recovers_and_loses_no_more_than_an_epoch(outcomes, name):
    if name not in outcomes:
        pytest.skip("needs a C compiler, or the right to mount file systems")
    outcome = outcomes[name].result()
    assert outcome.problems == [] and outcome.files_lost == []
    assert outcome.steps_lost <= (160 if name == "every checkpoint broken" else STEPS_PER_EPOCH)
