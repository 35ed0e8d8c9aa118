"""docs/benchmarks.json, and the tables and figures of docs/performance.md, made from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench.contestants import CONTESTANTS
from bench.figures import plot_ratios
from bench.records import ONE_DEVICE, BenchmarkRun, Benchmarks, ContestantTime
from jaxgru.lm.files import write_text
from pages.markdown import table, write_page
from pages.records import dumps, grouped, load_or


def load(path: Path) -> Benchmarks:
    """Read the file's runs and records; none if there is no file. Raises RecordError."""
    return load_or(Benchmarks(), path, Benchmarks)


def save(path: Path, data: Benchmarks) -> None:
    """Write the data, one run or record per line."""
    runs = ",\n".join(f"{dumps(name)}: {dumps(run)}" for name, run in data.runs.items())
    records = ",\n".join(map(dumps, data.records))
    write_text(path, f'{{"runs": {{\n{runs}\n}},\n"records": [\n{records}\n]}}\n')


def merge(
    data: Benchmarks, name: str, run: BenchmarkRun, records: Iterable[ContestantTime]
) -> Benchmarks:
    """Add a run's records, which replace older ones of the same task on the same hardware.

    Runs without any records left are dropped.
    """
    runs = data.runs | {name: run}
    merged = list({(runs[r.run].hardware, r.task): r for r in [*data.records, *records]}.values())
    used = {record.run for record in merged}
    return Benchmarks({name: runs[name] for name in sorted(used)}, merged)


# --- Tables


def unit(kind: str) -> str:
    """Return the unit in which a kind's times are given."""
    if not kind.startswith("sampling"):
        return "ms"
    return "µs per token" if kind == "sampling_1" else "tokens/s"


def title(record: ContestantTime) -> str:
    """Return the task in words."""
    B, T = record.batch_size, record.num_tokens
    if record.kind.startswith("sampling"):
        return f"sampling, {B} {'rows' if B > 1 else 'row'}, {record.precision}"
    what = {
        "training": "training step",
        "forward": "forward pass",
        "layer": "one layer, forward and backward",
        "layer_resets": "one layer with resets, forward and backward",
    }[record.kind]
    return f"{what}, {B} × {T}, {record.precision}"


def head(kind: str) -> list[str]:
    """Return the column titles of `rows`."""
    return ["contestant", unit(kind), "min … max", "× jaxgru", "of ceiling", "compile", "memory"]


def in_order(records: Iterable[ContestantTime]) -> list[ContestantTime]:
    """Return the records in the order of CONTESTANTS; other names come last."""
    order = {name: i for i, name in enumerate(CONTESTANTS)}
    return sorted(records, key=lambda record: order.get(record.contestant, len(order)))


def rows(records: Sequence[ContestantTime], runs: dict[str, BenchmarkRun]) -> list[list[str]]:
    """Return a row per contestant, from records of one task, precision and machine."""
    ours = next((r for r in records if r.contestant == "jaxgru" and r.failed is None), None)
    lines = []
    for record in in_order(records):
        name = record.contestant
        if ours and record.run != ours.run:
            name += " †"
        if record.failed is not None:
            lines.append([name, "failed", *["–"] * 5])
            continue
        ceiling = runs[record.run].ceilings.get(record.precision)
        ends = sorted(_value(record, end) for end in (record.min, record.max))
        memory = record.memory_bytes
        lines.append([
            name,
            _number(_value(record, record.median)),
            " … ".join(map(_number, ends)),
            f"{record.median / ours.median:.2f}" if ours else "–",
            f"{record.operations / record.median / ceiling:.1%}" if ceiling else "–",
            f"{record.compile_seconds:.1f} s",
            f"{memory / 2**20:,.0f} MiB" if isinstance(memory, int) else "–",
        ])  # fmt: skip
    return lines


def failures(records: Iterable[ContestantTime]) -> list[str]:
    """Return a sentence for each contestant that failed."""
    failed = (r for r in records if r.failed is not None)
    return [f"{r.config}: {r.contestant} failed: {r.failed}." for r in failed]


def ceiling_text(what: str, much: float) -> str:
    """Return a ceiling in words."""
    if what == "copy":
        return f"copy {much / 1e12:.2f} TB/s, reading and writing counted"
    return f"{what} product {much / 1e9:,.0f} GFLOP/s"


def _value(record: ContestantTime, seconds: float) -> float:
    """Convert seconds per call to the kind's unit."""
    B, T = record.batch_size, record.num_tokens
    per_unit = {"ms": seconds * 1e3, "µs per token": seconds / T * 1e6, "tokens/s": B * T / seconds}
    return per_unit[unit(record.kind)]


def _number(value: float) -> str:
    """Format a number with three significant digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# --- The figures

LABELS = {
    "autodiff": "plain lax.scan",
    "torchref": "PyTorch loop",
    "torch.nn": "torch.nn*",
    "haiku": "dm-haiku*",
    "nnx": "flax.nnx*",
}
"""What contestants are called in figures and in the README; * computes no dropout."""


def figures(data: Benchmarks) -> dict[str, list[ContestantTime]]:
    """Return the training steps that a figure shows, by the figure's file name.

    There is a figure per machine, sizes and precision, the last measured in float32 first; none
    where jaxgru, with which all others are compared, was not measured.
    """

    def name(record: ContestantTime) -> str:
        sizes = f"{record.batch_size}x{record.num_tokens}"
        words = f"speed {sizes} {record.precision} {data.runs[record.run].hardware}"
        return re.sub(r"\W+", "_", words).strip("_").lower() + ".png"

    training = [r for r in data.records if r.kind == "training" and r.failed is None]
    found = grouped(training, name)
    last = sorted(found, key=lambda n: (found[n][0].precision == "float32", found[n][0].run))
    return {name: found[name] for name in reversed(last) if ratios(found[name])}


def ratios(records: Iterable[ContestantTime]) -> dict[str, dict[str, dict[str, tuple]]]:
    """Return minimum, median and maximum over jaxgru's median, by config, way and contestant.

    Contestants that split the batch over a CPU's cores are compared with jaxgru as it does so;
    PyTorch and those on one device with jaxgru on one device. Where that was not measured, the way
    says so.
    """
    found: dict[str, dict[str, dict[str, tuple]]] = {}
    for config, same in grouped(records, lambda r: r.config).items():
        medians = {r.contestant: r.median for r in same}
        one = "jaxgru" + ONE_DEVICE if "jaxgru" + ONE_DEVICE in medians else "jaxgru"
        both = any(name.endswith(ONE_DEVICE) for name in medians)
        for r in in_order(same):
            way, base = ("split over cores" if both else ""), "jaxgru"
            if both and (r.contestant.endswith(ONE_DEVICE) or r.contestant.startswith("torch")):
                way, base = "one device" + ", jaxgru split" * (one == "jaxgru"), one
            if base in medians:
                name = r.contestant.removesuffix(ONE_DEVICE)
                times = tuple(time / medians[base] for time in (r.min, r.median, r.max))
                found.setdefault(config, {}).setdefault(way, {})[LABELS.get(name, name)] = times
    return found


# --- The page


def write(docs: Path, data: Benchmarks) -> None:
    """Write benchmarks.json, performance.md and its figures into the folder.

    Raises:
      OSError: the folder cannot be written.
    """
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    save(docs / "benchmarks.json", data)
    for name, records in figures(data).items():
        heading = f"{title(records[0])}; {data.runs[records[0].run].hardware}"
        plot_ratios(docs / "figures" / name, heading, ratios(records))
    write_page(docs / "performance.md", tables(data))


def tables(data: Benchmarks) -> dict[str, str]:
    """Return the page's newest figure, its list of contestants, and what was measured."""
    drawn = figures(data)
    machines = grouped(data.runs, lambda name: data.runs[name].hardware)
    contestants = (f"- **{name}**: {entry.text}" for name, entry in CONTESTANTS.items())
    parts = (part for machine in machines.items() for part in _machine(*machine, data, drawn))
    return {
        "figure": _figure(next(iter(drawn))) if drawn else "",
        "contestants": "\n".join(contestants),
        "measurements": "\n".join(parts),
    }


def _machine(
    hardware: str, names: list[str], data: Benchmarks, drawn: dict[str, list[ContestantTime]]
) -> Iterator[str]:
    """Yield what was measured on a machine: its runs, and a table per task."""
    yield f"## {hardware}\n"
    for name in names:
        yield f"- {name[:16].replace('T', ' ')}: {_run_text(data.runs[name])}\n"
    for what, records in grouped([r for r in data.records if r.run in names], title).items():
        yield f"### {what[0].upper()}{what[1:]}\n"
        yield from (f"{_figure(name)}\n" for name in list(drawn)[1:] if drawn[name][0] in records)
        yield section_table(records, data.runs)
        if failed := failures(records):
            yield "".join(f"- {line}\n" for line in failed)
        whole = [
            f"{r.config} {r.median * r.steps_of_a_run:,.0f} s ({r.steps_of_a_run:,} steps)"
            for r in records
            if r.contestant == "jaxgru" and r.steps_of_a_run and r.failed is None
        ]
        if whole:
            yield f"All training steps of a run at jaxgru's speed: {'; '.join(whole)}.\n"


def _run_text(run: BenchmarkRun) -> str:
    """Say with what a run was made, and on which ceiling."""
    versions = ", ".join(" ".join(item) for item in run.versions.items())
    ceilings = "; ".join(ceiling_text(*item) for item in run.ceilings.items())
    ceiling = f" Ceiling: {ceilings}." if ceilings else ""
    return f"`{run.command}`, rounds: {run.rounds}, with {versions}.{ceiling} {run.note}"


def _figure(name: str) -> str:
    return f"![training steps as multiples of jaxgru's](figures/{name})"


def section_table(records: Sequence[ContestantTime], runs: dict[str, BenchmarkRun]) -> str:
    """Return the table of one task: a row per config and contestant."""
    lines = []
    for config, of_config in grouped(records, lambda r: r.config).items():
        for i, line in enumerate(rows(of_config, runs)):
            lines.append(["" if i else config, *line])
    return table(["config", *head(records[0].kind)], lines, "lr")
