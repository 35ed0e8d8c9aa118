"""docs/benchmarks.json, and the tables and the figure of docs/performance.md, made from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from bench.contestants import CONTESTANTS
from bench.figures import plot_speeds
from bench.records import ONE_DEVICE, BenchmarkRun, Benchmarks, ContestantTime
from jaxgru.lm.files import write_text
from pages.markdown import folded, table, write_page
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
        return f"writing {f'{B} texts' if B > 1 else 'one text'}, {record.precision}"
    if record.kind.startswith("ppo"):
        seeds = record.kind.partition("_")[2]
        whole = f"{seeds} PPO trainings at once" if seeds else "a whole PPO training"
        return f"{whole}, minibatches of {B} × {T}, {record.precision}"
    what = {
        "training": "training step",
        "forward": "forward pass",
        "layer": "one layer, forward and backward",
        "layer_resets": "one layer with resets, forward and backward",
    }[record.kind]
    return f"{what}, {B} × {T}, {record.precision}"


FASTER = "jaxgru is … × as fast"
"""The title of the ratios: the time of a row over jaxgru's."""


def head(kind: str) -> list[str]:
    """Return the column titles of `rows`."""
    return ["contestant", unit(kind), "min … max", FASTER, "of ceiling", "compile", "memory"]


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


# --- The figure

LABELS = {
    "autodiff": "lax.scan",
    "torchref": "PyTorch loop",
    "torch.nn": "torch.nn*",
    "haiku": "dm-haiku*",
    "nnx": "Flax NNX*",
}
"""What contestants are called in figures and in the README; * computes no dropout."""


FIGURE = "jaxgru", "autodiff", "nnx", "haiku", "torch.nn"
"""The contestants of the figure, each as it is fastest on a CPU: JAX splits the batch, PyTorch the
products."""
PANELS = 3  # configs of the figure
ON_A_GPU = "jaxgru", "wavefront", "nnx", "haiku", "torch.nn"


def drawn(data: Benchmarks, precision: str = "float32") -> list[ContestantTime]:
    """Return the training steps in a precision on the machine that measured jaxgru last.

    None if jaxgru took part in none. The figure shows those in float32.
    """
    training = [
        r
        for r in data.records
        if r.kind == "training" and r.precision == precision and r.failed is None
    ]
    ours = [r for r in training if r.contestant == "jaxgru"]
    if not ours:
        return []
    last = max(ours, key=lambda record: record.run)
    hardware, sizes = data.runs[last.run].hardware, (last.batch_size, last.num_tokens)
    return [
        r
        for r in training
        if data.runs[r.run].hardware == hardware and (r.batch_size, r.num_tokens) == sizes
    ]


def ratios(records: Iterable[ContestantTime]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the figure's milliseconds by config and contestant, and how much faster jaxgru is."""
    found = {}
    for config, same in grouped(records, lambda r: r.config).items():
        medians = {r.contestant: r.median for r in same}
        if "jaxgru" in medians and len(found) < PANELS:
            found[config] = {
                LABELS.get(name, name): (1e3 * medians[name], medians[name] / medians["jaxgru"])
                for name in FIGURE
                if name in medians
            }
    return found


# --- The page


def write(docs: Path, data: Benchmarks) -> None:
    """Write benchmarks.json, performance.md and its figure into the folder.

    Raises:
      OSError: the folder cannot be written.
    """
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    save(docs / "benchmarks.json", data)
    if found := ratios(drawn(data)):
        plot_speeds(docs / "figures" / "speed.svg", found)
    write_page(docs / "performance.md", tables(data), expected_sentences(data))


def tables(data: Benchmarks) -> dict[str, str]:
    """Return the page's tables: in short, who took part, and all that was measured."""
    machines = grouped(data.runs, lambda name: data.runs[name].hardware)
    contestants = (f"- **{name}**: {entry.text}" for name, entry in CONTESTANTS.items())
    return {
        "figure": figure(data),
        "in short": in_short(of_the_figure(data), FIGURE),
        "on a GPU": in_short(on_a_gpu(data), ON_A_GPU),
        "PPO": ppo(data),
        "contestants": "\n".join(contestants),
        "measurements": "\n".join(_machine(*machine, data) for machine in machines.items()),
    }


def figure(data: Benchmarks) -> str:
    """Return the figure with what it shows in words."""
    found = [ratio for of_config in ratios(drawn(data)).values()
             for name, (_, ratio) in of_config.items() if name != "jaxgru"]  # fmt: skip
    if not found:
        return ""
    said = f"A training step is {span(found)} as fast with jaxgru as with the other libraries."
    return f"![{said}](figures/speed.svg)"


def span(ratios: Sequence[float]) -> str:
    """Return the lowest and the highest ratio, below 1 with one digit more; a dash without any."""
    if not ratios:
        return "–"
    ends = (f"{end:.{2 if end < 1 else 1}f}" for end in (min(ratios), max(ratios)))
    return " to ".join(dict.fromkeys(ends)) + "×"


SHORT = {
    "training": "training step", "forward": "forward pass", "sampling_1": "writing one text",
    "sampling_64": "writing 64 texts",
}  # fmt: skip
"""The kinds of the short table, in its order."""


Measured = dict[tuple[str, str], dict[str, ContestantTime]]
"""Records by kind and config, and by contestant; jaxgru is one of them."""


def of_the_figure(data: Benchmarks) -> Measured:
    """Return what the figure's machine measured in float32."""
    shown = drawn(data)
    hardware = data.runs[shown[0].run].hardware if shown else None
    return _measured(
        r
        for r in data.records
        if data.runs[r.run].hardware == hardware and r.precision == "float32"
    )


def on_a_gpu(data: Benchmarks) -> Measured:
    """Return the training steps in TF32, which only GPUs have."""
    return _measured(drawn(data, "tf32"))


def _measured(records: Iterable[ContestantTime]) -> Measured:
    records = [r for r in records if r.kind in SHORT and r.failed is None]
    records.sort(key=lambda record: list(SHORT).index(record.kind))
    groups = grouped(records, lambda r: (r.kind, r.config)).items()
    found = {key: {record.contestant: record for record in same} for key, same in groups}
    return {key: contestants for key, contestants in found.items() if "jaxgru" in contestants}


def in_short(measured: Measured, names: Sequence[str]) -> str:
    """Return jaxgru's times, and how many times as fast as the other contestants they are."""
    lines = []
    for (kind, config), of in measured.items():
        ours = of["jaxgru"]
        time = f"{_number(_value(ours, ours.median))} {unit(kind)}"
        faster = (f"{of[name].median / ours.median:.2f}×" if name in of else "–"
                  for name in names[1:])  # fmt: skip
        lines.append([f"{SHORT[kind]}, {config}", time, *faster])
    return table(["", *(LABELS.get(name, name) for name in names)], lines, "lr")


def ppo_ratios(data: Benchmarks) -> dict[tuple[str, str, int], float]:
    """Return how many times as fast PPO is with jaxgru as with Flax's cell, where measured last.

    The keys are kind, config and rows of a minibatch.
    """
    trainings = [r for r in data.records if r.kind.startswith("ppo") and r.failed is None]
    if not trainings:
        return {}
    last = data.runs[max(r.run for r in trainings)].hardware
    trainings = [r for r in trainings if data.runs[r.run].hardware == last]
    ratios = {}
    for task, same in grouped(trainings, lambda r: (r.kind, r.config, r.batch_size)).items():
        medians = {r.contestant: r.median for r in same}
        if medians.keys() >= {"jaxgru", "linen"}:
            ratios[task] = medians["linen"] / medians["jaxgru"]
    return ratios


def ppo(data: Benchmarks) -> str:
    """Return the table of `ppo_ratios`: a row per size and number of seeds."""
    ratios = ppo_ratios(data)
    rows = sorted({rows for *_, rows in ratios})
    lines = []
    for kind, config in dict.fromkeys((kind, config) for kind, config, _ in ratios):
        seeds = kind.partition("_")[2]
        cells = (f"{ratios[kind, config, B]:.2f}×" if (kind, config, B) in ratios else "–"
                 for B in rows)  # fmt: skip
        lines.append([config + f", {seeds} seeds at once" * bool(seeds), *cells])
    return table(["rows of a minibatch", *rows], lines, "lr")


def expected_sentences(data: Benchmarks) -> list[str]:
    """Return what the page says of language models, with the records' numbers."""
    measured = of_the_figure(data)
    measured |= {("on a GPU", config): of for (_, config), of in on_a_gpu(data).items()}

    def faster(kind: str, configs: Sequence[str], *names: str, way: str = "") -> str:
        """How many times as fast jaxgru is as these contestants, all `way` on one device."""
        return span(
            [
                of[name + way].median / of["jaxgru" + way].median
                for config in configs
                if "jaxgru" + way in (of := measured.get((kind, config), {}))
                for name in names
                if name + way in of
            ]
        )

    astra, scribe = (
        [f"{family}_{size}" for size in ("alpha", "beta", "gamma")]
        for family in ("astra", "scribe")
    )
    (*grus, largest), lstm = [*astra, *scribe], ["leviathan"]
    gpu = partial(faster, "on a GPU", [*grus, largest, *lstm])
    middle, outer = astra[1:2], astra[::2]
    loops, jax = ("autodiff", "nnx", "haiku"), ("nnx", "haiku")
    unsplit = [
        faster("training", configs, *jax, way=ONE_DEVICE) for configs in ([*grus, largest], lstm)
    ]
    stacked = [
        of["jaxgru"].median / of["wavefront"].median
        for (kind, config), of in measured.items()
        if kind == "on a GPU" and config not in lstm and "wavefront" in of
    ]
    alone, at_once = ([ratio for (kind, *_), ratio in ppo_ratios(data).items()
                       if (kind == "ppo") == one] for one in (True, False))  # fmt: skip
    of_ppo = [f"A whole PPO training is {span(alone)} as fast as with Flax's cell."]
    of_ppo += [f"With 8 seeds in one program, it is {span(at_once)} as fast."]
    return [
        *(of_ppo if alone else []),
        f"For the study's GRUs, jaxgru is {faster('training', [*grus, largest], *loops)} as fast "
        "as plain `lax.scan`, Flax NNX and dm-haiku; for its LSTM, "
        f"{faster('training', lstm, *loops)}.",
        f"{faster('training', grus, 'torch.nn')} as fast as `torch.nn` for all GRUs but the "
        f"largest ({faster('training', [largest], 'torch.nn')}), and "
        f"{faster('training', lstm, 'torch.nn')} for the LSTM.",
        f"A forward pass is {faster('forward', outer, *FIGURE[1:])} as fast as",
        f"{faster('forward', middle, 'nnx')} as fast as Flax NNX and "
        f"{faster('forward', middle, 'torch.nn')} as fast as `torch.nn`.",
        f"jaxgru is {faster('sampling_1', astra, 'nnx')} as fast as Flax NNX, and "
        f"{faster('sampling_1', astra, 'haiku', 'torch.nn')} as fast as dm-haiku and `torch.nn`. "
        f"With 64 texts at once, it is {faster('sampling_64', astra, *FIGURE[1:])} as fast as all "
        "three.",
        f"they are {gpu('nnx')} as fast as with Flax NNX and {gpu('torch.nn')} as fast as with "
        f"`torch.nn`; that of astra_gamma is {gpu('haiku')} as fast as with dm-haiku.",
        f"GRU models {span(stacked)} as fast, but that of leviathan, an LSTM of 1,024 units, takes "
        f"{faster('on a GPU', lstm, 'wavefront')} as long.",
        f"If the batch is not split, jaxgru is {unsplit[0]} as fast as Flax NNX and dm-haiku for "
        f"the GRUs, and {unsplit[1]} for the LSTM.",
    ]


def _machine(hardware: str, names: list[str], data: Benchmarks) -> str:
    """Return what was measured on a machine, a folded table per task, and how."""
    parts = [f"## All times on {hardware}\n"]
    for what, records in grouped([r for r in data.records if r.run in names], title).items():
        parts.append(folded(f"{what[0].upper()}{what[1:]}", _task(records, data.runs)))
    commands = "\n".join(f"- {name[:16].replace('T', ' ')}: {_run_text(data.runs[name])}"
                         for name in names)  # fmt: skip
    return "\n".join([*parts, folded("The commands, and what they ran with", commands)])


def _task(records: Sequence[ContestantTime], runs: dict[str, BenchmarkRun]) -> str:
    """Return the table of a task, who failed, and how long jaxgru takes for a whole run."""
    parts = [section_table(records, runs), *(f"- {line}" for line in failures(records))]
    whole = [
        f"{r.config} {r.median * r.steps_of_a_run:,.0f} s ({r.steps_of_a_run:,} steps)"
        for r in records
        if r.contestant == "jaxgru" and r.steps_of_a_run and r.failed is None
    ]
    if whole:
        parts.append(f"\nAll training steps of a run at jaxgru's speed: {'; '.join(whole)}.")
    return "\n".join(parts)


def _run_text(run: BenchmarkRun) -> str:
    """Say with what a run was made, and on which ceiling."""
    versions = ", ".join(" ".join(item) for item in run.versions.items())
    ceilings = "; ".join(ceiling_text(*item) for item in run.ceilings.items())
    ceiling = f" Ceiling: {ceilings}." if ceilings else ""
    return f"`{run.command}`, rounds: {run.rounds}, with {versions}.{ceiling} {run.note}"


def section_table(records: Sequence[ContestantTime], runs: dict[str, BenchmarkRun]) -> str:
    """Return the table of one task: a row per config and contestant."""
    lines = []
    for config, of_config in grouped(records, lambda r: r.config).items():
        for i, line in enumerate(rows(of_config, runs)):
            lines.append(["" if i else config, *line])
    return table(["config", *head(records[0].kind)], lines, "lr")
