"""The pages of the documentation: their code prints what they show, and they leave nothing out."""

import contextlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT
from matplotlib import pyplot
from matplotlib.testing.compare import compare_images

import jaxgru
from pages.tutorials import DOCS, FIGURES, PAGES, blocks, run

YOUR_OWN_TEXT = DOCS / "tutorials" / "your_own_text.md"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.(\d+))?")


def alike(ours: str, theirs: str) -> bool:
    """Whether two texts differ only in the last printed digit of numbers, and in spaces."""

    def parts(text):
        return [" ".join(part.split()) for part in NUMBER.sub("#", text).splitlines()]

    def numbers(text):
        return [(float(m[0].replace(",", "")), len(m[1] or "")) for m in NUMBER.finditer(text)]

    if parts(ours) != parts(theirs):
        return False
    pairs = zip(numbers(ours), numbers(theirs), strict=True)
    return all(
        abs(a - b) < 1.1 * 10**-digits * (digits > 0) + 1e-9 for (a, digits), (b, _) in pairs
    )


@pytest.fixture
def corpus(shakespeare, tmp_path_factory, monkeypatch):
    """Tiny Shakespeare, where `load_corpus` finds it."""
    path = tmp_path_factory.mktemp("corpus") / "tiny_shakespeare.txt"
    path.write_text(shakespeare, newline="")
    monkeypatch.setenv("JAXGRU_CORPUS", str(path))


def check(page: Path, folder: Path) -> None:
    shown, figures = (
        page.read_text(),
        set(re.findall(r"figures/tutorials/(\S+\.png)", page.read_text())),
    )
    again = run(page, folder)
    pyplot.close("all")
    for ours, theirs in zip(again.splitlines(), shown.splitlines(), strict=True):
        assert alike(ours, theirs)
    assert figures == {path.name for path in folder.glob("*.png")}
    for name in figures:
        assert compare_images(FIGURES / name, folder / name, tol=10) is None


@pytest.mark.parametrize("page", [p for p in PAGES if p != YOUR_OWN_TEXT], ids=lambda p: p.stem)
def test_the_code_prints_what_the_page_shows(page, corpus, tmp_path):
    check(page, tmp_path)


@pytest.mark.slow
def test_the_commands_print_what_the_page_shows(tmp_path):
    check(YOUR_OWN_TEXT, tmp_path)


SMALL = {"steps-per-epoch": 2, "batch-size": 4, "sequence-length": 16}


def test_the_commands_in_small(script, tmp_path):
    """The commands of "Your own text", with a short text and training of a few steps."""
    namespace = {}
    for block in blocks(YOUR_OWN_TEXT.read_text()):
        if block.language == "python":
            exec(block.code, namespace)
            continue
        for line in block.code.splitlines():
            if not line.startswith("jaxgru "):
                subprocess.run(line, shell=True, check=True, stdout=subprocess.DEVNULL)
                continue
            command, _, target = line.partition(" > ")
            _, name, *arguments = shlex.split(command)
            if name == "train" and "--resume" not in arguments:
                arguments += [f"--training.{field}={value}" for field, value in SMALL.items()]
            done = script(name, *arguments)
            assert done.code == 0, done.err
            if target:
                Path(target).write_text(done.out)
        with contextlib.suppress(FileNotFoundError):
            text = Path("python.txt").read_text()
            Path("python.txt").write_text(text[:4000])
    assert len(namespace["tokens"][0]) == 80


@pytest.mark.parametrize(
    "ours, theirs, same",
    [
        ("loss 1.25, 12 steps", "loss  1.26, 12 steps", True),
        ("loss 1.25", "loss 1.27", False),
        ("12 steps", "13 steps", False),
        ("loss 1.25", "lost 1.25", False),
    ],
)
def test_only_the_last_printed_digit_may_differ(ours, theirs, same):
    assert alike(ours, theirs) == same


class TestTheSite:
    def test_the_reference_has_every_public_name(self):
        reference = "".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
        documented = set(re.findall(r"^::: jaxgru\.(\w+)$", reference, re.MULTILINE)) - {
            "evaluation"
        }
        assert documented == set(jaxgru.__all__)
        overview = (DOCS / "api" / "index.md").read_text()
        assert set(re.findall(r"\[jaxgru\.(\w+)\]", overview)) == set(jaxgru.__all__)

    def test_every_page_is_in_the_navigation(self):
        navigation = (
            (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].partition("\nhooks:")[0]
        )
        pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
        assert set(re.findall(r"\S+\.md", navigation)) == pages

    def test_the_numbers_of_the_home_page_are_those_of_the_study(self):
        home, study = (
            " ".join((DOCS / f"{name}.md").read_text().split()) for name in ("index", "study")
        )
        claims = re.findall(r"\d\. (.*?\*\*.*?\.) (?=\d\. |##)", home)
        assert len(claims) == 3
        for claim in claims:
            assert claim in study
