"""The pages of the documentation: their code prints what they show, and they leave nothing out."""

import inspect
import re
import textwrap
import tomllib
from pathlib import Path
from pydoc_data.topics import topics
from typing import get_args

import jax
import nbformat
import pytest
from conftest import ROOT
from matplotlib import pyplot

import jaxgru
from bench import benchmark_page
from bench.benchmark_records import Benchmarks
from jaxgru import cells
from jaxgru.cells.contract import CellName
from jaxgru.layers.implementations import IMPLEMENTATIONS
from jaxgru.lm.evaluation import stream_nll, window_nll
from pages import notebooks
from pages.figures import for_both_schemes
from pages.markdown import CODE, fill
from pages.measurements import load
from pages.tutorials import DOCS, FIGURES, PAGES, run
from study import recurrences
from study.study_page import Page
from study.study_records import Study

pytestmark = pytest.mark.usefixtures("drawn")

YOUR_OWN_TEXT = DOCS / "tutorials" / "your_own_text.md"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.(\d+))?")


def alike(ours: str, theirs: str, units: float = 1) -> bool:
    """Whether two texts are the same, but for so many units of the last digit of decimal numbers.

    The width of spaces and lines, the number of devices, and the tokens per second may differ, too.
    """

    def parts(text):
        text = re.sub(r"[\d,]+ tokens/s|\d+ × cpu|  +|[━─]+", " ", text)
        numbers = [(float(m[0].replace(",", "")), m[1]) for m in NUMBER.finditer(text)]
        return NUMBER.sub("#", text).split(), numbers

    words, numbers = parts(ours)
    their_words, their_numbers = parts(theirs)
    return words == their_words and all(
        a == b if digits is None else abs(a - b) < (units + 0.1) * 10 ** -len(digits)
        for (a, digits), (b, _) in zip(numbers, their_numbers, strict=True)
    )


@pytest.fixture
def corpus(shakespeare, tmp_path_factory, monkeypatch):
    """Tiny Shakespeare, where `load_corpus` finds it."""
    path = tmp_path_factory.mktemp("corpus") / "tiny_shakespeare.txt"
    path.write_text(shakespeare, newline="")
    monkeypatch.setenv("JAXGRU_CORPUS", str(path))


def check(page: Path, folder: Path, units: float = 1, without: str = "$^") -> None:
    """Run a page; compare the printed text but that of blocks whose code matches `without`."""

    def lines(text):
        text = re.sub(r"^text {4}.*\n {8}.*", "text", text, flags=re.M)  # as a run writes it

        def choose_output(block):
            return block[1] if re.search(without, block["code"]) else block[0]

        return CODE.sub(choose_output, text).splitlines()

    shown = page.read_text()
    again = run(page, folder)
    pyplot.close("all")
    for ours, theirs in zip(lines(again), lines(shown), strict=True):
        assert alike(ours, theirs, units)
    figures = set(re.findall(r"figures/tutorials/(\S+\.svg)", shown))
    assert figures == {path.name for path in folder.glob("*.svg")}
    for name in figures:
        drawn = for_both_schemes((folder / name).read_text())
        assert alike(drawn, (FIGURES / name).read_text(), 1e6)  # a pixel


# PyTorch warns that this exporter is its older one, and of its own tracing
OLDER_EXPORTER = pytest.mark.filterwarnings(
    "ignore:You are using the legacy TorchScript", "ignore::Warning:torch"
)
LONG = {
    DOCS / "tutorials" / "gru_by_hand.md": pytest.mark.slow,
    DOCS / "tutorials" / "layer_in_your_model.md": pytest.mark.slow,
    # The tests of its library show the same
    DOCS / "from_pytorch.md": [pytest.mark.slow, OLDER_EXPORTER],
}
RUN = [
    pytest.param(page, id=page.stem, marks=LONG.get(page, ()))
    for page in PAGES
    if page != YOUR_OWN_TEXT
]


@pytest.mark.parametrize("page", RUN)
def test_the_code_prints_what_the_page_shows(page, corpus, tmp_path):
    check(page, tmp_path)


@pytest.mark.slow
def test_the_commands_print_what_the_page_shows(tmp_path, monkeypatch):
    """Programs are compiled as for users. What a model writes depends on every bit of it."""
    size = len("\n".join([*topics.values(), ""]).encode())
    if f"{size} python.txt" not in YOUR_OWN_TEXT.read_text():
        pytest.skip("this version of Python has another text")
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
    monkeypatch.delenv("XLA_FLAGS")
    check(YOUR_OWN_TEXT, tmp_path, units=100, without="sample|generate")


@pytest.mark.parametrize(
    "ours, theirs, same",
    [
        ("loss 1.25, 12 steps", "loss  1.26, 12 steps", True),
        ("loss 1.25  1,000 tokens/s", "loss 1.25  990 tokens/s", True),
        ("loss 1.25", "loss 1.27", False),
        ("12 steps", "13 steps", False),
        ("loss 1.25", "lost 1.25", False),
    ],
)
def test_only_the_last_printed_digit_may_differ(ours, theirs, same):
    assert alike(ours, theirs) == same


STUDY = load(DOCS / "study.json", Study)
RECURRENCES = load(DOCS / "recurrences.json", recurrences.Measured)


@pytest.mark.parametrize(
    "name, tables",
    [
        ("study", Page(STUDY.runs, STUDY.ngrams).tables()),
        ("performance", benchmark_page.tables(load(DOCS / "benchmarks.json", Benchmarks))),
        (
            "guide/choosing",
            recurrences.tables(RECURRENCES),
        ),
    ],
    ids=["study", "performance", "choosing"],
)
def test_tables_are_what_the_records_make(name, tables):
    page = (DOCS / f"{name}.md").read_text()
    assert fill(page, tables.pop) == page and tables == {}


@pytest.mark.parametrize("page", notebooks.PAGES, ids=lambda page: page.stem)
def test_the_notebooks_are_what_their_pages_make(page):
    """With a first cell that installs, all of the page's code, and its output."""
    made = notebooks.notebook(page)
    assert page.with_suffix(".ipynb").read_text(encoding="utf-8") == made
    cells = nbformat.reads(made, 4).cells
    codes = [cell.source.removeprefix("%%bash\n") for cell in cells if cell.cell_type == "code"]
    assert codes[0].startswith('%pip install "../..')
    folded = "".join(cell.source for cell in cells if cell.source.startswith("<details>"))
    for block in CODE.finditer(page.read_text()):
        code = block["code"].strip()
        assert code in codes or code in folded


FUNCTIONS = [jaxgru.unroll, jaxgru.bidirectional, jaxgru.step, jaxgru.initial_carry]
FUNCTIONS += [jaxgru.init_stack, *(getattr(cells, f"init_{name}") for name in get_args(CellName))]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_example_in_a_docstring_runs(function):
    section = inspect.getdoc(function).partition("\nExample:\n")[2]
    [code] = re.findall(r"```python\n(.+?)```", section, re.DOTALL)
    assert f"{function.__name__}(" in code
    exec(textwrap.dedent(code), dict(jax=jax, jnp=jax.numpy, jaxgru=jaxgru))


class TestTheSite:
    def test_the_overview_has_every_name_of_both_doors(self):
        overview = (DOCS / "api" / "index.md").read_text()
        layer = set(jaxgru.__all__) - {"cells", "libraries", "lm"}  # pages of their own
        for door, names in (("jaxgru", layer), ("jaxgru.lm", {*jaxgru.lm.__all__})):
            name = rf"{re.escape(door)}\.(\w+)"
            assert set(re.findall(rf"\]\[{name}\]", overview)) == names

    def test_every_page_is_in_the_navigation(self):
        navigation = (
            (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].partition("\nhooks:")[0]
        )
        pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
        assert set(re.findall(r"\S+\.md", navigation)) == pages

    def test_tables_name_every_implementation_extra_and_example(self):
        def first_cells(page):
            text = (DOCS / f"{page}.md").read_text()
            return "\n".join(re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE))

        named = set(re.findall(r'`"(\w+)"`', first_cells("how_it_works")))
        assert named == set(IMPLEMENTATIONS)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = set(re.findall(r"[\w]+(?=[],])", first_cells("install")))
        assert extras == set(project["optional-dependencies"])
        shown = set(re.findall(r"`(\w+\.py)`", first_cells("examples")))
        assert shown == {path.name for path in (ROOT / "examples").glob("*.py")}


class TestTheLesson:
    """The playground is in TypeScript, so its sources are read."""

    PAGE = (DOCS / "guide" / "teaching.md").read_text()
    SOURCES = ROOT / "playground" / "src"

    def test_the_worksheet_has_the_answers_of_the_tour(self):
        tour = (self.SOURCES / "tour.tsx").read_text()
        answers = re.findall(r"options: \[(.*)\]", tour)
        assert len(answers) == 5
        worksheet = (self.SOURCES.parent / "public" / "worksheet.html").read_text()
        lists = re.findall(r"<ul>(.*?)</ul>", worksheet, re.DOTALL)
        ticked = [", ".join(f'"{a}"' for a in re.findall(r"<li>(.+?)</li>", l)) for l in lists]
        assert ticked == answers

    def test_its_links_set_what_the_playground_knows(self):
        view = (self.SOURCES / "view.ts").read_text()
        known = set(re.findall(r'= parameter(?:<.+?>)?\(\s*"(\w+)"', view))
        links = re.findall(r'playground/#([^"]+)', self.PAGE)
        set_by_them = {name for link in links for name in re.findall(r"(\w+)=", link)}
        assert {"tour", "every", "at", "written"} <= set_by_them <= known

    def test_its_numbers_are_the_models(self):
        params, _, tokenizer = jaxgru.lm.load("astra_beta")
        defaults = (self.SOURCES / "defaults.ts").read_text()
        passage = re.search(r"PASSAGE = `(.*?)`", defaults, re.DOTALL)[1]
        tokens = tokenizer.encode(passage)

        [at] = set(re.findall(r"at=(\d+)", self.PAGE))
        assert passage[: int(at)].endswith("I have done nothi")
        kept, reset = (
            jax.nn.softmax(jaxgru.lm.apply(params, text[None])[0][0, -1])
            for text in (tokens[: int(at)], tokens[int(at) - 1 : int(at)])
        )

        def percent(bets, letter):
            return 100 * float(bets[tokenizer.encode(letter)[0]])

        assert percent(kept, "n") > 99
        n, s, t = (f"{percent(reset, letter):.0f}% on {letter}" for letter in "nst")
        assert f"it bets {n}, {s}, and {t}." in self.shown()

        one, some = (window_nll(params, tokens, every).mean() for every in (1, 32))
        never = stream_nll(params, tokens).mean()
        assert f"costs {one:.2f} nats with a reset before every character" in self.shown()
        assert f"{some:.2f} with one every 32, and {never:.2f} without any" in self.shown()
        assert f"saves {one:.2f} − {never:.2f} = {one - never:.2f} nats in all" in self.shown()
        left = f"{one:.2f} − {some:.2f} = {one - some:.2f} with a reset every 32 characters"
        share = f"which is {100 * (one - some) / (one - never):.0f}%"
        assert f"{left}, {share}." in self.shown()

    def shown(self):
        return " ".join(self.PAGE.split())
