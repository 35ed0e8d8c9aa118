"""docs/study.md: the runs' records as tables, figures and verdicts."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from jaxgru import study
from jaxgru.config import load_config
from jaxgru.plotting import plot_losses, plot_memory, plot_recovery, plot_sensitivity
from jaxgru.reproducing import SEEDS
from jaxgru.study_claims import CLAIMS, PLACEMENT, SIZE_FIELDS

Record = dict[str, Any]

FILLED = 0.01  # nats a token over the stream: below this a state counts as filled


class Page:
    """docs/study.md, part by part; `figures` is where its figures go."""

    def __init__(self, runs: list[Record], ngrams: dict[str, list[float]], figures: Path) -> None:
        self.figures = figures
        self.ngrams = ngrams
        self.all = runs
        self.plain = [run for run in runs if not run["changes"]]
        self.first: dict[str, Record] = {}  # of each config, the run with the lowest seed
        for run in self.plain:
            self.first.setdefault(run["config"], run)
        self.alpha = self.first.get("astra_alpha")

    def write(self) -> str:
        """The whole page."""
        parts = [
            self.opening(), self.models(), self.memory(), self.recovery(), self.sensitivity(),
            self.chain(), self.text(), self.dropout(), self.streams(), self.precision(),
            self.claims(), PLACEMENT, self.epochs(), self.cost(),
        ]  # fmt: skip
        return "\n".join(part for part in parts if part)

    def opening(self) -> str:
        missing = [name for name in SEEDS if name not in self.first]
        machines = sorted({(r["study"]["date"], r["study"]["hardware"]) for r in self.all})
        made = "; ".join(f"{date}, {hardware}" for date, hardware in machines)
        curves = {}
        for name, run in self.first.items():
            points = [(k, self.nats(run, loss)) for k, loss in run["study"]["memory_curve"]]
            curves[name] = points, self.nats(run, run["study"]["stream"])
        plot_memory(self.figures / "memory.png", curves, self.ngrams["astra_alpha"])
        lines = [
            "# The study: what a lost state costs\n",
            "Made by `python scripts/report.py` from the runs of `python scripts/reproduce.py "
            f"--all`, measured {made}. Losses are on the whole validation split (the last tenth "
            "of Tiny Shakespeare, never trained on) and in nats; a bit is 0.6931 of them.\n",
            "![memory curves](figures/memory.png)\n",
        ]
        if self.alpha:
            lines.append(self.three_numbers() + "\n")
        if missing:
            lines.append(
                f"Not trained in full yet, for want of a GPU: {', '.join(missing)}. "
                "Nothing is claimed of them here.\n"
            )
        return "\n".join(lines)

    def three_numbers(self) -> str:
        alpha = self.alpha["study"]
        bigram = self.ngrams["astra_alpha"][1]
        curve = dict(alpha["memory_curve"])
        return (
            f"1. Thrown away before every character, the state costs astra_alpha "
            f"**{alpha['sensitivity']:.2f} nats a character**: {alpha['stateless']:.3f} in place "
            f"of {alpha['stream']:.3f}.\n"
            f"2. Without it the trained GRU is **{alpha['stateless'] - bigram:.2f} nats worse than "
            f"a table of counted bigrams** ({bigram:.3f}).\n"
            f"3. Put back every 16 characters, it still costs "
            f"**{curve[16] - alpha['stream']:.2f}**; a state that was lost is whole again, to "
            f"{FILLED} nats, after **{filled(alpha)} characters**."
        )

    def nats(self, run: Record, loss: float) -> float:
        """Nats a token as nats a character."""
        return loss * run["study"]["num_tokens"] / run["study"]["num_characters"]

    def models(self) -> str:
        rows = []
        for run in self.plain:
            published = load_config(run["config"]).published.train_loss
            best = best_epoch(run)
            theirs = [losses[-1] for losses in published if not math.isnan(losses[-1])]
            s = run["study"]
            rows.append([
                run["config"], run["seed"], f"{run['parameters']:,}",
                ", ".join(f"{x:.4f}" for x in theirs) or "–",
                f"{run['epochs'][-1]['train_loss']:.4f}",
                f"{best} of {len(run['epochs'])}",
                *(f"{s[what]:.4f}" for what in ("windows", "stream", "stateless", "sensitivity")),
                *(f"{self.nats(run, s[what]):.4f}" for what in ("windows", "stream", "stateless")),
            ])  # fmt: skip
        head = ["model", "seed", "parameters", "last training loss, published", "measured",
                "weights of epoch", "windows of 128", "stream", "stateless", "sensitivity",
                "a character: windows", "stream", "stateless"]  # fmt: skip
        return (
            "## Every model\n\n"
            "Nats a token, and in the last three columns a character. *Windows*: the state is put "
            "back every 128 tokens, as in training; *stream*: never; *stateless*: before every "
            "token; *sensitivity*: stateless less stream. The study publishes one random "
            "validation batch an epoch (noise of about ±0.04), shown epoch by epoch below; "
            "models that stop early are measured with their best epoch's weights.\n\n"
            + table(head, rows)
        )

    def memory(self) -> str:
        ks = [k for k, _ in next(iter(self.first.values()))["study"]["memory_curve"]]
        rows = []
        for name, run in self.first.items():
            losses = [loss for _, loss in run["study"]["memory_curve"]] + [run["study"]["stream"]]
            rows.append([name, *(f"{self.nats(run, loss):.3f}" for loss in losses)])
        orders = range(1, 9)
        counted = [
            [name, *(f"{loss:.3f}" for loss in losses)]
            for name, losses in (
                ("characters", self.ngrams["astra_alpha"]),
                ("Scribe's subwords", self.ngrams["scribe_alpha"]),
            )
        ]
        return (
            "## Memory: the state put back every k tokens\n\nNats a character. Scribe's tokens are "
            "2.8 characters long on average, and its tokenizer reads a line's end as a space: its "
            "text is a little easier, so compare its figures with its own n-grams'.\n\n"
            + table(["model", *(f"k = {k}" for k in ks), "never"], rows)
            + "\nThe ladder below: counted n-gram models (Chen & Goodman's modified Kneser–Ney, "
            "interpolated), nats a character by order.\n\n"
            + table(["tokens", *(f"n = {n}" for n in orders)], counted)
        )

    def recovery(self) -> str:
        curves = {name: run["study"]["recovery"] for name, run in self.first.items()}
        zero = self.variant({"model.dropout": 0.0})
        if zero:
            curves["astra_alpha without dropout"] = zero["study"]["recovery"]
        plot_recovery(self.figures / "recovery.png", curves)
        at = (1, 2, 4, 8, 16, 32, 64, 128)
        rows = [
            [name, *(f"{excess[i - 1]:.4f}" for i in at if i <= len(excess)), first_below(excess)]
            for name, excess in curves.items()
        ]
        return (
            "## Recovery: how long a state takes to fill\n\n"
            "The excess over the unbroken stream, nats a token, at the 1st, 2nd, 4th … prediction "
            "after a reset (paired: the same tokens; resets 64 tokens apart), and the number of "
            f"predictions after which it stays below {FILLED}.\n\n"
            "![recovery after a reset](figures/recovery.png)\n\n"
            + table(["model", *(f"{i}" for i in at), f"below {FILLED} after"], rows)
        )

    def sensitivity(self) -> str:
        points, rows = {}, []
        sizes = [run for run in self.all if set(run["changes"]) <= SIZE_FIELDS and run["seed"] == 0]
        for run in sizes:
            config = load_config(run["config"])
            model = dataclasses.replace(config.model, **{
                field.removeprefix("model."): value for field, value in run["changes"].items()
            })  # fmt: skip
            s, name = run["study"], title(run)
            cost, stream = self.nats(run, s["sensitivity"]), self.nats(run, s["stream"])
            points[name] = run["parameters"], stream, cost
            rows.append([name, model.cell, model.num_layers, model.hidden_dim,
                         f"{run['parameters']:,}", f"{stream:.4f}", f"{cost:.4f}",
                         f"{s['sensitivity']:.4f}"])  # fmt: skip
        plot_sensitivity(self.figures / "sensitivity.png", points)
        head = ["model", "cell", "layers", "hidden", "parameters", "stream, a character",
                "sensitivity, a character", "a token"]  # fmt: skip
        return (
            '## Sensitivity: the study\'s "Moderate / High / Extreme" as a number\n\n'
            "Stateless less stream, nats; seed 0. `astra_alpha, …` is astra_alpha with that one "
            "field changed.\n\n![sensitivity against size](figures/sensitivity.png)\n\n"
            + table(head, rows)
        )

    def chain(self) -> str:
        rows = []
        for name, run in self.first.items():
            chain = run["study"]["chain"]
            cycles = ", ".join(
                f"`{json.dumps(c['text'])}` ({c['basin']:.0%})" for c in chain["cycles"][:3]
            )
            rows.append([name, f"{chain['kl_to_bigram']:.4f}", f"{chain['kl_to_frequencies']:.4f}",
                         cycles])  # fmt: skip
        return (
            "## The stateless chain\n\n"
            "Without its state a model is a first-order Markov chain, whose V × V transition "
            "matrix we compute exactly. *From the bigram*: KL(counted bigram ‖ chain), nats, "
            "weighted by how often each context occurs in the training text. *From the text's "
            "frequencies*: KL of the tokens' frequencies there from the chain's stationary "
            "distribution. All greedy stateless text ends in one of a few cycles, whatever the "
            "prompt; in brackets the share of the vocabulary that leads into it.\n\n"
            + table(
                ["model", "from the bigram", "from the text's frequencies", "greedy cycles"], rows
            )  # fmt: skip
        )

    def text(self) -> str:
        if not self.alpha:
            return ""
        record = self.alpha["study"]["text"]
        blocks = []
        for how in ("greedy", "sampled"):
            for name in study.TREATMENTS:
                blocks.append(f"{name}, {how}:\n\n```\n{record[name][how]}\n```\n")
        tables = []
        for name, run in self.first.items():
            text = run["study"]["text"]
            rows = [
                [what, *("–" if (v := text[c].get(m)) is None else f"{v:.3g}" for c in text)]
                for m, what in study.TEXT_MEASURES.items()
            ]
            tables.append(f"**{name}**\n\n" + table(["", *text], rows))
        return (
            "## Text\n\n"
            f"From {study.NUM_PROMPTS} prompts of {study.PROMPT_LENGTH} tokens of the validation "
            f"split: {study.GREEDY_TOKENS:,} greedy tokens each for the loops; else "
            f"{study.SAMPLED_TOKENS} at temperature {study.TEMPERATURE}, top-k {study.TOP_K}. "
            "*Last token only* is the study's stateful sampler, which reads no more of the prompt. "
            "The validation text itself stands beside as the measure of a measure.\n\n"
            + "\n".join(tables)
            + f"\nThe same weights (astra_alpha, seed 0), the same prompt `{study.PROMPT}`, the "
            "same key:\n\n" + "\n".join(blocks)
        )

    def dropout(self) -> str:
        def kind(changes: dict[str, Any]) -> str:
            rate = changes.get("model.dropout", 0.1)
            site = changes.get("model.dropout_site", "state")
            return "no dropout" if rate == 0 else f"{site}, {rate}"

        groups = self.alphas({"model.dropout", "model.dropout_site"}, kind)
        if len(groups) < 2:
            return ""
        rows = []
        for name, runs in groups.items():
            columns = losses(runs, "windows", "stream", "stateless", "sensitivity")
            filled_after = ", ".join(str(filled(run["study"])) for run in runs)
            rows.append([name, len(runs), *columns, filled_after])
        head = ["site and rate", "seeds", "training loss", "windows", "stream", "stateless",
                "sensitivity", f"state filled (to {FILLED}) after"]  # fmt: skip
        said = ""
        if "no dropout" in groups and "state, 0.1" in groups:
            streams = [mean_stream(groups[name]) for name in ("state, 0.1", "no dropout")]
            said = (
                f"\nThe study's dropout inside the recurrence costs astra_alpha "
                f"**{streams[0] - streams[1]:.3f} nats a character** of validation loss on the "
                "stream. It drops a tenth of the state anew at every character, so what was "
                "written into a unit survives 20 characters with probability 0.9²⁰ = 0.12: "
                "the model learns to rely on a shorter memory.\n"
            )
        return (
            "## What dropout inside the recurrence costs\n\n"
            "astra_alpha, mean over seeds (lowest … highest). `between`, the study's prose, is "
            "dropout between layers: with one layer there is no such place, and the run ends with "
            "the same bits as one without dropout.\n\n" + table(head, rows) + said
        )

    def streams(self) -> str:
        """Random crops against contiguous streams, with the study's dropout and without."""
        groups = self.alphas(
            {"data.sampling", "model.dropout"},
            lambda c: (c.get("data.sampling", "crops"), c.get("model.dropout", 0.1)),
        )
        if not any(sampling == "streams" for sampling, _ in groups):
            return ""
        rows = []
        for (sampling, rate), runs in sorted(groups.items(), key=lambda item: -item[0][1]):
            filled_after = ", ".join(str(filled(run["study"])) for run in runs)
            columns = losses(runs, "windows", "stream")
            rows.append([sampling, rate, len(runs), *columns, filled_after])
        said = []
        for rate, with_ in ((0.1, "With the study's dropout"), (0, "Without dropout")):
            if {("streams", rate), ("crops", rate)} <= groups.keys():
                crops, streams = (mean_stream(groups[how, rate]) for how in ("crops", "streams"))
                how = "better" if streams < crops else "worse"
                much = f"{abs(crops - streams):.3f} nats a character {how}"
                said.append(f"{with_} streams are **{much}** on the stream.")
        head = ["sampling", "dropout", "seeds", "training loss", "windows", "stream",
                f"state filled (to {FILLED}) after"]  # fmt: skip
        return (
            "## Random crops, or streams that hand their state on\n\n"
            "The study trains on random crops, each from the zero state. With `--data.sampling "
            "streams` a batch's rows are contiguous streams and the state goes from window to "
            "window (truncated backpropagation through time): the same number of tokens, in "
            "another order. *windows* are evaluated from zeros, the stream with its state. "
            + " ".join(said) + "\n\n" + table(head, rows)
        )  # fmt: skip

    def precision(self) -> str:
        """Products in bfloat16 while training against float32, at equal everything else."""
        field = "model.compute_dtype"
        groups = self.alphas({field}, lambda changes: changes.get(field, "float32"))
        if groups.keys() != {"float32", "bfloat16"}:
            return ""
        rows = [[dtype, len(runs), *losses(runs, "windows", "stream")]
                for dtype, runs in groups.items()]  # fmt: skip
        cost = mean_stream(groups["bfloat16"]) - mean_stream(groups["float32"])
        return (
            "## What products in bfloat16 cost\n\n"
            "astra_alpha trained with `--model.compute_dtype bfloat16`: operands of the "
            "recurrence's and the head's products are rounded to 8 bits of significand; their "
            "sums, the states, the gates, the weights and the optimizer stay float32. Evaluated in "
            f"float32: **{abs(cost):.3f} nats a character {'worse' if cost > 0 else 'better'}** on "
            "the stream, in the mean over seeds.\n\n"
            + table(["products", "seeds", "training loss", "windows", "stream"], rows)
        )

    def alphas(
        self, fields: set[str], kind: Callable[[dict[str, Any]], Hashable]
    ) -> dict[Any, list[Record]]:
        """The runs of astra_alpha with no other fields changed than these, by their kind."""
        groups: dict[Any, list[Record]] = {}
        for run in self.all:
            if run["config"] == "astra_alpha" and run["changes"].keys() <= fields:
                groups.setdefault(kind(run["changes"]), []).append(run)
        return groups

    def claims(self) -> str:
        rows = [[claim, *verdict(self)] for claim, verdict in CLAIMS]
        return "## The study's claims\n\n" + table(["claim", "verdict", "measured"], rows)

    def variant(self, changes: dict[str, Any]) -> Record | None:
        """The first run of astra_alpha with these changes."""
        same = (r for r in self.all if r["config"] == "astra_alpha" and r["changes"] == changes)
        return next(same, None)

    def epochs(self) -> str:
        parts = ["## Epoch by epoch\n\nNats a token; validation is the whole split in windows of "
                 "128, where the study's is one random batch.\n"]  # fmt: skip
        for name in self.first:
            results = [run for run in self.plain if run["config"] == name]
            published = load_config(name).published
            figure = self.figures / f"{name}.png"
            plot_losses(figure, name, [run["epochs"] for run in results], published)
            parts += [
                f"### {name}\n",
                f"![losses of {name}](figures/{figure.name})\n",
                epoch_table(results, published.train_loss, published.val_loss),
            ]
            difference = largest_difference(results, published.train_loss)
            if difference is not None:
                parts.append(
                    "Largest difference of a training loss, from the 2nd epoch on, to the nearer "
                    f"published run: {difference:.4f}.\n"
                )
        return "\n".join(parts)

    def cost(self) -> str:
        rows = []
        for run in self.all:
            tokens = load_config(run["config"]).training.tokens_per_step
            rates = [epoch["tokens_per_second"] / tokens for epoch in run["epochs"]]
            seconds = sum(epoch["seconds"] for epoch in run["epochs"])
            memory = max(epoch["peak_memory_mb"] for epoch in run["epochs"])
            rows.append([title(run), run["seed"], f"{run['epochs'][-1]['step']:,}",
                         f"{statistics.median(rates):.2f}", f"{min(rates):.2f} … {max(rates):.2f}",
                         f"{seconds / 60:.1f}", f"{memory:,.0f}",
                         run["study"]["hardware"]])  # fmt: skip
        head = ["run", "seed", "steps", "steps/s", "spread", "minutes of steps", "peak MB",
                "measured on"]  # fmt: skip
        return (
            "## What the runs took\n\n"
            "Steps a second, median over epochs. The CPU runs shared their two cores with other "
            "work, so these are lower bounds and no benchmark. Peak memory: the process's on a "
            "CPU, the device's on a GPU.\n\n" + table(head, rows)
        )


def title(run: Record) -> str:
    """A run's name: the config's, and what is changed."""
    changes = (f"{k.removeprefix('model.')} {v}" for k, v in run["changes"].items())
    return ", ".join([run["config"], *changes])


def best_epoch(run: Record) -> int:
    """The epoch whose weights are the run's result."""
    if not load_config(run["config"]).training.patience:
        return len(run["epochs"])
    return min(run["epochs"], key=lambda epoch: epoch["val_loss"])["epoch"]


def first_below(excess: list[float]) -> int | str:
    """After how many predictions the excess stays below FILLED."""
    above = [i for i, nats in enumerate(excess, 1) if abs(nats) >= FILLED]
    last = above[-1] if above else 0
    return last if last < len(excess) else f"more than {len(excess)}"


def filled(record: Record) -> int | str:
    """The same, of a run's record."""
    return first_below(record["recovery"])


def losses(runs: list[Record], *measures: str) -> list[str]:
    """For a table: the last training loss and what was measured, over seeds."""
    columns = [[run["epochs"][-1]["train_loss"] for run in runs]]
    columns += [[run["study"][measure] for run in runs] for measure in measures]
    return [mean_and_range(column) for column in columns]


def mean_stream(runs: list[Record]) -> float:
    """Nats a token over one stream, the mean of seeds."""
    return statistics.mean(run["study"]["stream"] for run in runs)


def mean_and_range(values: list[float]) -> str:
    """For a cell of a table."""
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{statistics.mean(values):.4f} ({min(values):.4f} … {max(values):.4f})"


def epoch_table(results: list[Record], train: tuple, val: tuple) -> str:
    """Published beside measured, a row an epoch."""
    epochs = max(len(runs) for runs in (*train, *(r["epochs"] for r in results)))
    seeds = [r["seed"] for r in results]
    head = ["epoch", *(f"published train {i + 1}" for i in range(len(train)))]
    head += [f"train, seed {seed}" for seed in seeds]
    head += [f"published validation {i + 1}" for i in range(len(val))]
    head += [f"validation, seed {seed}" for seed in seeds]
    columns = [*train, *([x["train_loss"] for x in r["epochs"]] for r in results)]
    columns += [*val, *([x["val_loss"] for x in r["epochs"]] for r in results)]
    rows = []
    for epoch in range(epochs):
        cells = [column[epoch] if epoch < len(column) else math.nan for column in columns]
        rows.append([epoch + 1, *("–" if math.isnan(c) else f"{c:.4f}" for c in cells)])
    return table(head, rows)


def largest_difference(results: list[Record], train: tuple) -> float | None:
    """Of any epoch but the first to the nearer published run; None where none is published."""
    differences = []
    for result in results:
        for i, epoch in enumerate(result["epochs"][1:], start=1):
            published = [run[i] for run in train if i < len(run) and not math.isnan(run[i])]
            if published:
                differences.append(min(abs(epoch["train_loss"] - loss) for loss in published))
    return max(differences, default=None)


def table(head: list, rows: list[list]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    escaped = ("| " + " | ".join(str(c).replace("|", "\\|") for c in line) + " |" for line in lines)
    return "\n".join(escaped) + "\n"
