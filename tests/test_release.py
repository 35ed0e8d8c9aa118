"""What a release consists of: versions, workflows, and the files that describe the project."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT
from ruamel.yaml import YAML  # reads `on` as a string, as GitHub does

import jaxgru

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
REPOSITORY = PROJECT["urls"]["Repository"]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def yaml_of(name: str):
    return YAML(typ="safe", pure=True).load(text_of(name))


WORKFLOWS = {path.name: path for path in (ROOT / ".github/workflows").glob("*.yml")}
TESTS, RELEASE = (yaml_of(f".github/workflows/{name}.yml") for name in ("tests", "release"))


def commands(job: dict) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


class TestVersions:
    def test_the_version_is_the_same_everywhere(self):
        newest = re.search(
            r"^## \[(\S+)\] - (unreleased|\d{4}-\d\d-\d\d)$", text_of("CHANGELOG.md"), re.M
        )
        citation = yaml_of("CITATION.cff")
        assert newest is not None
        assert jaxgru.__version__ == PROJECT["version"] == newest[1] == str(citation["version"])

    @pytest.mark.parametrize("tag", ["v{}", "{}", "v{}.1", "v{}rc1", "v9{}"])
    def test_only_the_tag_of_this_version_is_released(self, tag):
        (rule,) = (
            s
            for s in RELEASE["jobs"]["build"]["steps"]
            if s.get("name") == "the tag is the version"
        )
        name = tag.format(PROJECT["version"])
        folder = Path(sys.executable).parent  # its `python` is the one that runs the tests
        environment = {"GITHUB_REF_NAME": name, "PATH": f"{folder}:/usr/bin:/bin"}
        done = subprocess.run(["bash", "-ec", rule["run"]], cwd=ROOT, env=environment)
        assert (done.returncode == 0) == (tag == "v{}")
        assert RELEASE["on"] == {"push": {"tags": ["v*"]}}

    def test_hooks_and_the_extra_lint_have_the_same_versions(self):
        hooks = {
            h["id"]: h for r in yaml_of(".pre-commit-config.yaml")["repos"] for h in r["hooks"]
        }
        (ruff,) = (name for name in EXTRAS["lint"] if name.startswith("ruff"))
        for hook in ("ruff-check", "ruff-format"):
            assert hooks[hook]["additional_dependencies"] == [ruff]
        assert hooks["pyright"]["language"] == "system"  # it needs the libraries' types


class TestWorkflows:
    def test_actionlint_finds_nothing(self):
        program = shutil.which("actionlint", path=Path(sys.executable).parent) or shutil.which(
            "actionlint"
        )
        if program is None:
            pytest.skip("actionlint is not installed")
        done = subprocess.run(
            [program, *WORKFLOWS.values()], capture_output=True, text=True, cwd=ROOT
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_the_suite_runs_on_every_supported_python(self):
        matrix = TESTS["jobs"]["suite"]["strategy"]["matrix"]
        listed = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
        assert matrix["python"] == listed
        assert PROJECT["requires-python"] == f">={listed[0]}"
        assert matrix["include"] == [{"python": listed[0], "versions": "oldest"}]

    def test_the_oldest_versions_are_the_lower_bounds(self):
        """`--resolution lowest-direct` takes them, so each library must have one."""
        assert "--resolution lowest-direct" in commands(TESTS["jobs"]["suite"])
        extras = [name for extra in EXTRAS.values() for name in extra]
        for requirement in PROJECT["dependencies"] + extras:
            if not requirement.startswith(("jaxgru[", "jax[")):  # other extras; jax has its bound
                assert re.match(r"[\w.-]+(\[[\w,-]+\])?(>=|==)\d", requirement), requirement

    @pytest.mark.parametrize("name", WORKFLOWS)
    def test_rights_are_the_least(self, name):
        workflow = yaml_of(f".github/workflows/{name}")
        assert workflow["permissions"] == {"contents": "read"}
        assert "secrets" not in text_of(f".github/workflows/{name}")
        assert workflow["concurrency"]["group"].startswith(f"{Path(name).stem}-")
        for job_name, job in workflow["jobs"].items():
            assert job.get("permissions", {}).get("id-token") in (None, "write")
            assert ("permissions" in job) == (job_name == "publish")
            assert "uses" in job or job["timeout-minutes"] < 360
            for step in job.get("steps", []):
                assert re.search(r"@(v\d+|release/v\d+)$", step.get("uses", "@v1"))

    def test_what_is_released_was_tested(self):
        assert set(RELEASE["jobs"]["publish"]["needs"]) == {"tests", "build"}
        assert RELEASE["jobs"]["tests"]["uses"] == "./.github/workflows/tests.yml"
        assert "workflow_call" in TESTS["on"]

    def test_the_small_jobs_need_no_linux(self):
        small = TESTS["jobs"]["small"]
        matrix = small["strategy"]["matrix"]
        everywhere = commands(small).split()
        macos = [path for job in matrix["include"] for path in job["training"].split()]
        files = [ROOT / path for path in everywhere + macos if "tests/" in path]
        assert len(files) > 10
        for path in files:
            assert path.exists(), path
            for file in path.glob("*.py") if path.is_dir() else [path]:
                assert "/proc/" not in (text := file.read_text(encoding="utf-8")), file
                if str(path.relative_to(ROOT)) in everywhere:  # on Windows, too
                    assert not re.search(
                        r"^\s*import (fcntl|resource|pty)|symlink|start_run", text, re.M
                    )


class TestDocuments:
    def test_the_citation_is_valid(self):
        command = [
            "check_jsonschema",
            "--builtin-schema",
            "vendor.citation-file-format",
            "CITATION.cff",
        ]
        done = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert yaml_of("CITATION.cff")["repository-code"] == REPOSITORY

    @pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
    def test_the_files_that_it_names_exist(self, name):
        text = text_of(name)
        places = {path.name for path in ROOT.iterdir()} - {"runs"}
        named = set(re.findall(r"[\w./-]*[\w/]", text))
        named -= {"playground/node_modules"}  # which `npm ci` makes
        paths = [path for path in named if path.split("/")[0] in places]
        assert paths
        for path in paths:
            assert (ROOT / path).exists(), path

    def test_the_rooms_are_all_described(self):
        text = text_of("CONTRIBUTING.md")
        for path in (ROOT / "jaxgru").iterdir():
            if path.is_dir() and (path / "__init__.py").exists():
                assert f"`jaxgru/{path.name}/`" in text, path
        for name in re.findall(r"`(\w+(?:\.py|/))`", text):  # as seen from the room it is in
            assert (ROOT / name).exists() or [*(ROOT / "jaxgru").rglob(name)] + [
                *(ROOT / "scripts").rglob(name)
            ], name

    def test_one_repository(self):
        for url in [
            *PROJECT["urls"].values(),
            *re.findall(r"https://github.com/\S+(?=>|$)", text_of("SECURITY.md")),
        ]:
            assert url.startswith((REPOSITORY, "https://jaxgru.github.io/")), url
