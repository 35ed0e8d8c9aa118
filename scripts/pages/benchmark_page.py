"""What was measured: docs/benchmarks.json, and docs/performance.md and its figure made from it.

The JSON holds runs of the script (date, command, hardware, versions, the machine's ceilings), each
by its date, and records: one a task and contestant, with the date of the run that it is of.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxgru.benchmarking import Started, Task, Timing
from jaxgru.errors import UserError
from jaxgru.files import write_text
from jaxgru.plotting import save_figure

Record = dict[str, Any]
Data = dict[str, Any]

CONTESTANTS = {
    "jaxgru": "this library: `train_step`, `apply` and `generate`",
    "wavefront": "this library with its layers at once, for GPUs (`JAXGRU_UNROLL=wavefront`)",
    "hopper": "this library with its kernel for Hopper GPUs (`JAXGRU_UNROLL=hopper`)",
    "plain_scan": "this library with `JAXGRU_UNROLL=plain`: the cell in a `lax.scan`, "
    "differentiated by JAX (sampling one token at a time unrolls nothing: not measured there)",
    "torchref": "the same model in plain PyTorch, a Python loop over time",
    "torch.nn": "`torch.nn.GRU` (`LSTM`, `RNN`) of the same sizes, through oneDNN or cuDNN, "
    "without dropout: not the same equations, the same work",
    "haiku": "dm-haiku: `hk.GRU` (`LSTM`, `VanillaRNN`) under `hk.dynamic_unroll`, without dropout",
    "nnx": "Flax: `nnx.RNN` of `nnx.GRUCell` (`LSTMCell`, `SimpleCell`), without dropout; its GRU "
    "resets after the product, which is cheaper",
    "torch.compile": "torchref's step with its model under `torch.compile`",
}
"""Who is compared, in order; the last one takes minutes to build."""

METHOD = """\
All contestants of a table were measured side by side in one process, in turn, round by round, after
two calls to warm up; the figure is the median of the rounds, each the mean of as many calls as take
50 ms. A row marked † is of another run of the script than jaxgru's. Weights and tokens are random;
batches are drawn on the device and are part of a training step, and so are clipping and AdamW.
Dropout is as configured in jaxgru, plain_scan, torchref and torch.compile. PyTorch uses as many
threads as it takes by itself. A training step of jaxgru and plain_scan spreads the batch's rows
over a CPU's cores as train.py does (`hardware.share_cpu`), and jaxgru's sampling of many rows, too,
with up to 256 hidden units. All JAX contestants choose their tokens with jaxgru's sampler.

- **× jaxgru**: the time, as a multiple of jaxgru's.
- **of ceiling**: operations counted, a second, as a share of the fastest large matrix product of
  the same precision on the same machine. Counted are the matrix products alone, 2 operations a
  multiply-add: a forward pass takes 2·(Σ over layers (input + H)·G·H + H·V) a token, with G = 3
  gates in a GRU and 4 in an LSTM; a training step 3 times that. The count is of the task: it is
  the same for a contestant that finds a way to do with fewer.
- **compile**: tracing and compiling ahead of time; else the first call less the next one.
- **memory**: on a GPU what the program allocates or, in JAX, plans to; on a CPU the peak resident
  memory of a process that does this alone, imports and compiling included (`--memory`).
"""


# --- Records


def make_record(
    run: str,
    task: Task,
    precision: str,
    contestant: str,
    result: tuple[Started, Timing] | str,
    memory: int | None,
) -> Record:
    """One contestant at one task; the result is its timing, or why it failed."""
    record = {
        "run": run,
        "config": task.config.name,
        "kind": task.kind,
        "batch_size": task.batch_size,
        "num_tokens": task.num_tokens,
        "precision": precision,
        "contestant": contestant,
        "operations": task.operations,
    }
    if task.what == "training":
        record["steps_of_a_run"] = (
            task.config.training.epochs * task.config.training.steps_per_epoch
        )
    if isinstance(result, str):
        return record | {"failed": result}
    started, timing = result
    return record | {
        "median": timing.median,
        "min": timing.min,
        "max": timing.max,
        "repeats": len(timing.seconds),
        "calls": timing.calls,
        "compile_seconds": started.compile_seconds,
        "memory_bytes": memory,
    }


def load(path: Path) -> Data:
    """The file's runs and records; none where there is no file.

    Raises:
      UserError: it is not a file that `save` wrote.
    """
    if not path.exists():
        return {"runs": {}, "records": []}
    try:
        data = json.loads(path.read_text())
        [data["runs"][record["run"]] for record in data["records"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a file of benchmarks: {error!r}.") from error
    return data


def save(path: Path, data: Data) -> None:
    """Writes the data, a run or record a line."""
    runs = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(run)}" for name, run in data["runs"].items()
    )
    records = ",\n".join(map(json.dumps, data["records"]))
    write_text(path, f'{{"runs": {{\n{runs}\n}},\n"records": [\n{records}\n]}}\n')


def merge(data: Data, run: str, about: Record, records: Iterable[Record]) -> Data:
    """The data with a run's records, which take the place of older ones of the same thing.

    The same: hardware, precision, config, kind, sizes and contestant. Runs without records go.
    """
    runs = data["runs"] | {run: about}

    def same(record: Record) -> tuple:
        names = ("precision", "config", "kind", "batch_size", "num_tokens", "contestant")
        return (runs[record["run"]]["hardware"], *(record[name] for name in names))

    merged = list({same(record): record for record in [*data["records"], *records]}.values())
    used = {record["run"] for record in merged}
    return {"runs": {name: runs[name] for name in sorted(used)}, "records": merged}


# --- Tables


def unit(kind: str) -> str:
    """What a kind's figures are in."""
    if not kind.startswith("sampling"):
        return "ms"
    return "µs a token" if kind == "sampling_1" else "tokens/s"


def title(record: Record) -> str:
    """What was done, in words."""
    B, T = record["batch_size"], record["num_tokens"]
    if record["kind"].startswith("sampling"):
        return f"sampling, {B} {'rows' if B > 1 else 'row'}, {record['precision']}"
    what = {"training": "training step", "forward": "forward pass"}[record["kind"]]
    return f"{what}, {B} × {T}, {record['precision']}"


def head(kind: str) -> list[str]:
    """The columns' titles of `rows`."""
    return ["contestant", unit(kind), "min … max", "× jaxgru", "of ceiling", "compile", "memory"]


def rows(records: Sequence[Record], runs: dict[str, Record]) -> list[list[str]]:
    """One line a contestant; the records are of one task, precision and machine."""
    order = list(CONTESTANTS)
    ours = next((r for r in records if r["contestant"] == "jaxgru" and "median" in r), None)
    lines = []
    for record in sorted(records, key=lambda r: order.index(r["contestant"])):
        name = record["contestant"]
        if ours and record["run"] != ours["run"]:
            name += " †"
        if "failed" in record:
            lines.append([name, "failed", *["–"] * 5])
            continue
        ceiling = runs[record["run"]]["ceilings"].get(record["precision"])
        spread = sorted(_value(record, record[end]) for end in ("min", "max"))
        memory = record["memory_bytes"]
        lines.append(
            [
                name,
                _number(_value(record, record["median"])),
                " … ".join(map(_number, spread)),
                f"{record['median'] / ours['median']:.2f}" if ours else "–",
                f"{_share(record, ceiling):.1%}" if ceiling else "–",
                f"{record['compile_seconds']:.1f} s",
                "–" if memory is None else f"{memory / 2**20:,.0f} MiB",
            ]
        )
    return lines


def failures(records: Iterable[Record]) -> list[str]:
    """A sentence for each contestant that failed."""
    return [
        f"{r['config']}: {r['contestant']} failed: {r['failed']}." for r in records if "failed" in r
    ]


def _value(record: Record, seconds: float) -> float:
    """Seconds a call in the kind's unit."""
    B, T = record["batch_size"], record["num_tokens"]
    per_unit = {"ms": seconds * 1e3, "µs a token": seconds / T * 1e6, "tokens/s": B * T / seconds}
    return per_unit[unit(record["kind"])]


def _share(record: Record, ceiling: float) -> float:
    return record["operations"] / record["median"] / ceiling


def _number(value: float) -> str:
    """Three digits or more, and none that mean nothing."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# --- The page


def write(docs: Path, data: Data) -> None:
    """Writes benchmarks.json, performance.md and figures/benchmark.png into the folder.

    Raises:
      OSError: the folder cannot be written.
    """
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    save(docs / "benchmarks.json", data)
    plot(docs / "figures" / "benchmark.png", data)
    write_text(docs / "performance.md", page(data))


def page(data: Data) -> str:
    """docs/performance.md."""
    parts = [
        "# How fast it is\n",
        "Made by `python scripts/benchmark.py` from benchmarks.json, which holds every number.\n",
        "![training steps](figures/benchmark.png)\n",
        "## How it was measured\n",
        METHOD,
        "Contestants:\n",
        "".join(f"- **{name}**: {what}\n" for name, what in CONTESTANTS.items()),
    ]
    for hardware in dict.fromkeys(run["hardware"] for run in data["runs"].values()):
        parts += _machine(data, hardware)
    return "\n".join(part for part in parts if part)


def _machine(data: Data, hardware: str) -> Iterable[str]:
    """A machine's part of the page."""
    runs = {name: run for name, run in data["runs"].items() if run["hardware"] == hardware}
    yield f"## {hardware}\n"
    for name, run in runs.items():
        date = datetime.datetime.fromisoformat(name).strftime("%Y-%m-%d %H:%M")
        versions = ", ".join(f"{package} {version}" for package, version in run["versions"].items())
        yield (
            f"- {date}: `{run['command']}`, rounds: {run['rounds']}, with {versions}. Ceiling: "
            + "; ".join(ceiling_text(what, much) for what, much in run["ceilings"].items())
            + f". {run['note']}\n"
        )
    records = [record for record in data["records"] if record["run"] in runs]
    for what, of_title in _grouped(records, title):
        yield f"### {what[0].upper()}{what[1:]}\n"
        lines = []
        for config, of_config in _grouped(of_title, lambda r: r["config"]):
            for i, line in enumerate(rows(of_config, data["runs"])):
                lines.append(["" if i else config, *line])
        yield table(["config", *head(of_title[0]["kind"])], lines)
        yield "".join(f"- {line}\n" for line in failures(of_title))
        whole = [
            f"{r['config']} {r['median'] * r['steps_of_a_run']:,.0f} s "
            f"({r['steps_of_a_run']:,} steps)"
            for r in of_title
            if r["contestant"] == "jaxgru" and r["kind"] == "training" and "median" in r
        ]
        if whole:
            yield f"All training steps of a run at jaxgru's speed: {'; '.join(whole)}.\n"


def ceiling_text(what: str, much: float) -> str:
    """A ceiling in words."""
    if what == "copy":
        return f"copy {much / 1e12:.2f} TB/s, reading and writing counted"
    return f"{what} product {much / 1e9:,.0f} GFLOP/s"


def _grouped(records: Iterable[Record], key: Any) -> Iterable[tuple[str, list[Record]]]:
    """Records by key, in the order in which the keys first come."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups.items()


def table(head: list[str], lines: list[list[str]]) -> str:
    """A table in Markdown."""
    cells = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in cells
    )


def plot(path: Path, data: Data) -> None:
    """Draws every machine's training steps, a group of bars a config, as a PNG.

    Raises:
      OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # takes long to import

    training = [r for r in data["records"] if r["kind"] == "training" and "median" in r]
    panels = _grouped(training, lambda r: f"{title(r)}\n{data['runs'][r['run']]['hardware']}")
    figure = Figure(figsize=(9, 4 * max(len(panels), 1)), layout="constrained")
    for i, (name, records) in enumerate(panels):
        axes = figure.add_subplot(len(panels), 1, i + 1)
        configs = list(dict.fromkeys(r["config"] for r in records))
        names = [c for c in CONTESTANTS if any(r["contestant"] == c for r in records)]
        width = 0.8 / len(names)
        for j, contestant in enumerate(names):
            bars = [r for r in records if r["contestant"] == contestant]
            axes.bar(
                [configs.index(r["config"]) + (j - (len(names) - 1) / 2) * width for r in bars],
                [1e3 * r["median"] for r in bars],
                width,
                yerr=[
                    [1e3 * (r["median"] - r["min"]) for r in bars],
                    [1e3 * (r["max"] - r["median"]) for r in bars],
                ],
                error_kw={"lw": 0.6},
                color=f"C{list(CONTESTANTS).index(contestant)}",
                label=contestant,
            )
        axes.set_yscale("log")
        axes.set_xticks(range(len(configs)), configs)
        axes.set_title(name, fontsize=10)
        axes.set_ylabel("ms a step")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.legend(fontsize=8, ncols=2)
    save_figure(figure, path)
