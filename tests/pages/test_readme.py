"""README.md is what the records say; its code runs, as does the guide's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.benchmark_page import in_readme
from bench.benchmark_records import load as load_benchmarks
from pages.markdown import CODE, DOCS, fill
from pages.measurements import load
from study.study_records import Study

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [Path("README.md"), *(p.relative_to(ROOT) for p in (ROOT / "docs/guide").glob("*.md"))]


def test_its_tables_are_those_of_the_records():
    """`python scripts/benchmark.py` remakes them."""
    tables = in_readme(load_benchmarks(DOCS / "benchmarks.json"))
    assert fill(README, tables.pop) == README and tables == {}


def test_its_losses_are_those_of_the_records():
    """Of astra_alpha, its state kept and reset before every character, and of bigram counts."""
    study = load(DOCS / "study.json", Study)
    kept = next(r.measured for r in study.runs if r.title == "astra_alpha" and r.seed == 0)
    losses = kept.stream, kept.stateless, study.ngrams["astra_alpha"][1]
    stated = re.findall(r"\d\.\d{3}", README.partition("## What a reset costs")[2])
    assert stated[:3] == [f"{loss:.3f}" for loss in losses]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_code_runs(page, monkeypatch, tmp_path, tiny_run):
    """The Python of a page, one block after another."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(tiny_run.parents[1])
    text = (ROOT / page).read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for block in CODE.finditer(text):
        assert block["language"] == "python"
        exec(compile(block["code"], str(page), "exec"), names)


def test_links_lead_somewhere():
    """Those of the guide are checked by `mkdocs build --strict`."""
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]*)\)", README)]
    files = [link for link in links if not link.startswith("https://")]
    assert len(files) > 10 and [file for file in files if not (ROOT / file).exists()] == []
