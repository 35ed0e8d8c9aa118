"""The schema of the files of measurements: whatever it accepts makes a page, with its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import slow
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from msgspec import inspect
from test_study_page import NGRAMS, run_json

from bench import benchmark_page
from bench.contestants import CONTESTANTS
from bench.records import Benchmarks, load
from pages import records
from pages.records import RecordError
from study.records import Kept, Run, Study
from study.sentences import expected_sentences
from study.study_page import Page

UNLIKELY = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["|", "$x$", "a\nb", "```", "{{ x }}", r"\frac{", "&<>", "{% if %}"]
)
PHASES = [Phase.explicit, Phase.generate]  # to shrink such a record takes minutes
SOME = {"max_examples": 10, "phases": PHASES, "suppress_health_check": list(HealthCheck)}


def json_of(kind: inspect.Type) -> st.SearchStrategy:
    """JSON of everything that a type of msgspec accepts, but for what `__post_init__` says."""
    match kind:
        case inspect.IntType(ge=low, le=high):
            return st.integers(low, high)
        case inspect.FloatType(ge=low, gt=above, le=high):
            low, exclude = (above, True) if low is None else (low, False)
            return st.floats(low, high, exclude_min=exclude)
        case inspect.StrType(pattern=None):
            return UNLIKELY
        case inspect.StrType(pattern=pattern):
            return st.from_regex(pattern)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.ListType(item_type=item, min_length=least):
            return st.lists(json_of(item), min_size=least or 0, max_size=4)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(json_of, items)).map(list)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(json_of(key), json_of(value), max_size=4)
        case inspect.UnionType(types=types):
            return st.one_of(*(json_of(t) for t in types))
        case inspect.StructType(fields=fields):
            required = {f.encode_name: json_of(f.type) for f in fields if f.required}
            others = {f.encode_name: json_of(f.type) for f in fields if not f.required}
            return st.fixed_dictionaries(required, optional=others)
    raise NotImplementedError(kind)


CONFIGS = st.sampled_from(["astra_alpha", "astra_beta", "scribe_alpha", "leviathan", "elman_alpha"])
CHANGES = st.sampled_from([
    {}, {"training.dropout": 0.0}, {"training.dropout": 0}, {"training.dropout_site": "between"},
    {"model.hidden_dim": 32}, {"model.num_layers": 2, "model.hidden_dim": 3},
    {"data.batches": "streams"}, {"data.batches": "streams", "training.dropout": 0.0},
    {"training.compute_dtype": "bfloat16"},
    {"model.cell": "lstm", "model.second_bias": False, "model.reset_gate": "after"},
])  # fmt: skip
RUNS = st.builds(
    lambda run, config, changes: run | {"config": config, "changes": changes},
    json_of(inspect.type_info(Run)), CONFIGS, CHANGES,
)  # fmt: skip


@st.composite
def benchmarks(draw) -> dict:
    """Measurements of runs that there are, with min ≤ median ≤ max."""
    data = {"records": []} | draw(json_of(inspect.type_info(Benchmarks)))
    runs = data.setdefault("runs", {})
    for record in data["records"] if runs else []:
        record["run"] = draw(st.sampled_from(list(runs)))
        record["contestant"] = draw(st.sampled_from([*CONTESTANTS, "another"]))
        record["kind"] = draw(st.sampled_from(["training", "sampling_1", "layer", "ppo_8", "x"]))
        times = draw(st.lists(st.floats(1e-9, 1e9), min_size=3, max_size=3))
        record |= dict(zip(("min", "median", "max"), sorted(times), strict=True))
    return data if runs else data | {"records": []}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where pages go; figures are made and not drawn, which takes longest."""
    monkeypatch.setattr("pages.figures.save_svg", lambda figure, path: None)
    return tmp_path


def read(folder: Path, data: object, kind: type) -> object:
    """The data as it is read from a file."""
    (folder / "data.json").write_text(json.dumps(data))
    return records.load(folder / "data.json", kind)


def without(run: dict, **measures: object) -> dict:
    """The run with other measures, and epochs as where the operating system tells no memory."""
    epochs = [{k: v for k, v in epoch.items() if k != "peak_memory_mb"} for epoch in run["epochs"]]
    return run | {"epochs": epochs, "study": run["study"] | measures}


@pytest.mark.slow
@settings(**SOME)
@given(st.lists(RUNS, min_size=1, max_size=5))
@example([without(run_json(changes={"training.dropout": 0.0}))])  # variants alone: ValueError
@example([without(run_json())])  # KeyError
@example([without(run_json(), memory_curve=[[1, 2.5]], recovery=[0.5])])  # KeyError
@example([without(run_json(), text={}), run_json("scribe_alpha")])  # KeyError
@example([without(run_json(), text={"stateless": {"median_period": None}})])  # KeyError
def test_runs_make_a_page(folder, runs):
    kept = read(folder, {"runs": runs}, Kept)
    page = Page(kept.runs, NGRAMS)
    page.draw(folder)
    assert expected_sentences(page) and all(
        f"| {run.config}" in page.tables()["resources"] for run in kept.runs
    )
    assert json.loads(records.dumps(kept)) == json.loads(records.dumps(read(
        folder, json.loads(records.dumps(kept)), Kept)))  # fmt: skip


@pytest.mark.parametrize("number", [0, *slow(-1e9, 1e9)])
def test_figures_of_extreme_numbers_are_drawn(tmp_path, number, drawn):
    measures = dict.fromkeys(("windows", "stream", "stateless", "sensitivity"), number)
    run = without(run_json(losses=(number / 2,)), memory_curve=[[2**31, number]], recovery=[number],
                  num_tokens=2**53, **measures)  # fmt: skip
    kept = read(tmp_path, {"runs": [run | {"parameters": 2**53}]}, Kept)
    Page(kept.runs, NGRAMS).draw(tmp_path)
    for figure in ("memory", "recovery", "sensitivity", "epochs"):
        assert (tmp_path / f"{figure}.svg").stat().st_size > 5000


@settings(**SOME)
@given(benchmarks())
def test_measurements_make_a_page(folder, data):
    data = read(folder, data, Benchmarks)
    (folder / "figures").mkdir(exist_ok=True)
    benchmark_page.write(folder, data)
    assert load(folder / "benchmarks.json") == data


@pytest.mark.parametrize(
    "kind, data, says",
    [
        (Kept, {"runs": [run_json("astra_omega")]}, "there is no config 'astra_omega'"),
        (
            Kept,
            {"runs": [run_json(changes={"model.dropot": 0})]},
            "the nearest is 'training.dropout'",
        ),
        (Kept, {"runs": [run_json(changes={"training.dropout": 2})]}, "training.dropout is 2"),
        (Kept, {"runs": [run_json(changes={"training.seed": 2})]}, "does not change 'training.se"),
        (Kept, {"runs": [run_json(losses=())]}, "of length >= 1 - at `$.runs[0].epochs`"),
        (Kept, {"runs": [without(run_json(), num_characters=0)]}, "`int` >= 1"),
        (Kept, {"runs": [without(run_json(), memory_curve=[])]}, "of length >= 1"),
        (Study, {"runs": [], "ngrams": {"astra_alpha": [1.0] * 8}}, "of length >= 2"),
        (Study, {"runs": [], "ngrams": NGRAMS | {"scribe_alpha": [1.0]}}, "of length >= 8"),
        (Benchmarks, {"runs": {"yesterday": {}}}, "missing required field `hardware`"),
    ],
)
def test_what_is_refused_is_said(tmp_path, kind, data, says):
    with pytest.raises(RecordError) as refused:
        read(tmp_path, data, kind)
    assert says in str(refused.value) and str(refused.value).count(". ") == 0


@pytest.mark.parametrize("name, kind", [("study", Kept), ("benchmarks", Benchmarks)])
def test_what_is_committed_is_kept(name, kind):
    """Written again, each line is the same."""
    path = Path(__file__).resolve().parents[2] / "docs" / f"{name}.json"
    lines = {line.removesuffix(",") for line in path.read_text().splitlines()}
    data = records.load(path, kind)
    made = [records.dumps(record) for record in getattr(data, {Kept: "runs"}.get(kind, "records"))]
    assert made and set(made) <= lines
