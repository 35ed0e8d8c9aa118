"""What a release consists of: versions, and the files that describe the project."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT
from ruamel.yaml import YAML  # reads `on` as a string, as GitHub does

import jaxgru

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
REPOSITORY = PROJECT["urls"]["Repository"]
ISSUES = ".github/ISSUE_TEMPLATE"


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def yaml_of(name: str):
    return YAML(typ="safe", pure=True).load(text_of(name))


class TestVersions:
    def test_the_version_is_the_same_everywhere(self):
        newest = re.search(
            r"^## \[(\S+)\] - (unreleased|\d{4}-\d\d-\d\d)$", text_of("CHANGELOG.md"), re.M
        )
        citation = yaml_of("CITATION.cff")
        assert newest is not None
        assert jaxgru.__version__ == PROJECT["version"] == newest[1] == str(citation["version"])
        models = tomllib.loads(text_of("models/pyproject.toml"))["project"]
        assert models["version"] == PROJECT["version"]

    def test_the_oldest_versions_are_the_lower_bounds(self):
        """`--resolution lowest-direct` takes them, so each library must have one."""
        extras = [name for extra in EXTRAS.values() for name in extra]
        for requirement in PROJECT["dependencies"] + extras:
            if not requirement.startswith(("jaxgru[", "jax[")):  # other extras; jax has its bound
                assert re.match(r"[\w.-]+(\[[\w,-]+\])?(>=|==)\d", requirement), requirement


class TestDocuments:
    @pytest.mark.parametrize(
        "schema, names",
        [
            ("citation-file-format", ["CITATION.cff"]),
            ("github-issue-config", [f"{ISSUES}/config.yml"]),
            ("github-issue-forms", [f"{ISSUES}/bug.yml", f"{ISSUES}/idea.yml"]),
        ],
    )
    def test_what_others_read_is_valid(self, schema, names):
        """GitHub leaves out a form that is not, without a word."""
        check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
        done = subprocess.run([*check, *names], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr

    @pytest.mark.parametrize(
        "name", ["CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md"]
    )
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
        files = {path.name for path in [*ROOT.iterdir(), *(ROOT / "jaxgru").rglob("*"),
                                        *(ROOT / "scripts").rglob("*")]}  # fmt: skip
        assert {name.rstrip("/") for name in re.findall(r"`(\w+(?:\.py|/))`", text)} <= files

    def test_one_repository(self):
        named = re.findall(r"https://github.com/\S+(?=>|$)", text_of("SECURITY.md"))
        named += [link["url"] for link in yaml_of(f"{ISSUES}/config.yml")["contact_links"]]
        assert yaml_of("CITATION.cff")["repository-code"] == REPOSITORY
        for url in [*PROJECT["urls"].values(), *named]:
            assert url.startswith((REPOSITORY, "https://jaxgru.github.io/")), url
