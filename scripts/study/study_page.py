"""docs/study.md: its tables, and the curves of its figures."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgru.analysis import state_cost
from jaxgru.lm.config import Config, load_config
from jaxgru.lm.runs.reports import recipe
from pages.markdown import folded, table
from pages.records import grouped
from study.claims import CLAIMS, SIZE_FIELDS
from study.figures import (
    in_quarter_octaves,
    plot_dynamic,
    plot_epochs,
    plot_memory,
    plot_recovery,
    plot_sensitivity,
)
from study.jobs import SEEDS, all_jobs
from study.published import PublishedResults, load_published
from study.records import Ablation, DynamicEvaluation, EarlyStopping, Plateau, Run

FILLED = 0.01  # nats per token above the stream; a state counts as filled below it
DRAWN_MEMORY = "astra_alpha", "elman_alpha", "astra_gamma"  # with more, the lines overlap
DRAWN_RECOVERY = "astra_alpha", "astra_beta", "astra_gamma"
DRAWN_DYNAMIC = "astra_alpha", "astra_gamma"
POSITIONS = [1, 2, 4, 8, 16, 32, 64, 128]  # after a reset, in the table of recoveries

HOW = {
    "stateless": "reset before every token",
    "last token only": "kept, last token of the prompt only",
    "stateful": "kept",
}
"""What the ways to write a text are called on the page."""

Row = list[Any]


class Page:
    """What the page shows of these runs; a table without runs is empty.

    Args:
      ngrams: by config, the losses of counted n-gram models, orders 1 to 8, nats per character.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        ngrams: Mapping[str, list[float]],
        stopping: EarlyStopping | None = None,
        plateaus: Sequence[Plateau] = (),
        dynamics: Sequence[DynamicEvaluation] = (),
        ablations: Sequence[Ablation] = (),
    ) -> None:
        self.ablations = grouped(ablations, lambda ablation: ablation.title)
        self.runs, self.ngrams, self.stopping = runs, ngrams, stopping
        self.dynamics = sorted(dynamics, key=lambda record: -record.per_character(record.static))
        self.plateaus = grouped(plateaus, lambda plateau: plateau.config)
        self.plain = [run for run in runs if not run.changes]
        self.first: dict[str, Run] = {}  # of each config, the run with the lowest seed
        for run in self.plain:
            self.first.setdefault(run.config, run)
        self.slow = [name for name in self.plateaus if name in self.first]
        self.alpha = self.first.get("astra_alpha")
        self.missing = missing(runs)
        dates = sorted({run.measured.date for run in runs})
        self.made = " to ".join(dates[:1] + dates[1:][-1:])
        self.bigram = ngrams["astra_alpha"][1]
        no_dropout = self.variant({"training.dropout": 0.0})
        self.recoveries = {name: run.measured.recovery for name, run in self.first.items()}
        if no_dropout:
            self.recoveries["astra_alpha without dropout"] = no_dropout.measured.recovery
        sized: dict[str, Run] = {}  # of each size, the run with the lowest seed
        for run in runs:
            if run.changes.keys() <= SIZE_FIELDS:
                sized.setdefault(title(run), run)
        self.sized = list(sized.values())

    def tables(self) -> dict[str, str]:
        """Return the page's tables by name."""
        missing = f"Not trained in full yet, and not on this page: {', '.join(self.missing)}."
        measures = "windows", "stream", "stateless", "sensitivity", "filled"
        over_seeds = ["seeds", "training loss", "windows", "kept", "reset", "cost",
                      "full again after"]  # fmt: skip
        texts = (
            f"**{name}**\n\n{table(['', *map(called, run.measured.text)], self.text_measures(run))}"
            for name, run in self.first.items()
        )
        return {
            "missing": missing if self.missing else "",
            "in short": table(
                ["model", "parameters", "state kept", "reset before every token", "cost"],
                self.in_short(), "lr"),
            "models": table(
                ["model", "seed", "parameters", "last training loss, published", "measured",
                 "weights of epoch", "windows", "kept", "reset", "cost",
                 "per character: windows", "kept", "reset"], self.models()),
            "memory": table(*self.memory()),
            "n-grams": table(["tokens", *(f"n = {n}" for n in range(1, 9))], self.counted()),
            "recovery": table(["model", *POSITIONS, f"below {FILLED} after"], self.recovery()),
            "sensitivity": table(
                ["model", "cell", "layers", "hidden", "parameters", "kept, per character",
                 "cost, per character", "per token"], self.sensitivity()),
            "chains": table(["model", "from bigram counts", "from the text's frequencies",
                             "greedy cycles"], self.chains()),
            "text": "\n".join(texts),
            "samples": "\n\n".join(f"{name}:\n\n```\n{text}\n```" for name, text in self.texts()),
            "dropout": table(["site and rate", *over_seeds],
                             self.over_seeds(self.dropouts(), *measures)),
            "batches": table(["batches", "dropout", *over_seeds],
                              self.over_seeds(self.batches(), *measures)),
            "precision": table(["products", *over_seeds[:4]],
                               self.over_seeds(self.precisions(), *measures[:2])),
            "verdicts": table(["verdict", "the study's claim"],
                              [[in_a_word(verdict(self)[0]), claim] for claim, verdict in CLAIMS]),
            "claims": table(["claim", "verdict", "measured"],
                            [[claim, *verdict(self)] for claim, verdict in CLAIMS]),
            "as nanoGPT": table(["model", "seed", "parameters", "last epoch", "best of all epochs",
                                 "minutes of training"], self.as_nanogpt()),
            "ablation": table(["change", "loss", "difference"], self.ablation()),
            "dynamic": table(["model", "η", "λ", "static", "dynamic", "gain"], self.dynamic()),
            "dynamic resets": table(
                ["model", *(f"every {k}" for k in self.dynamic_resets), "never"],
                self.dynamic_by_reset()),
            "last five": table(["model", "published losses", "their mean and range",
                                "standard error", "measured", "difference", "in standard errors"],
                               self.last_five()),
            "early stopping": table(["epoch", "mean loss of a batch", "share of draws"],
                                    self.stopped()),
            "first steps": table(
                ["trained by", "rows", "learning rate", "seed",
                 "constant units of layer 1, 2, …, after 25 steps", "steps",
                 "constant after all steps", "mean loss of the last 25", "mean loss of epoch 1"],
                self.first_steps("scribe_gamma")),
            "resources": table(["run", "seed", "steps", "steps/s", "spread", "minutes of steps",
                                "peak MB", "measured on", "commit of jaxgru"], self.resources()),
            **{name: epoch_table(runs, load_published(name)) if (runs := self.of(name)) else ""
               for name in SEEDS},
        }  # fmt: skip

    def draw(self, figures: Path) -> None:
        """Draw every figure of the page."""
        curves = {}
        for name in DRAWN_MEMORY:
            if run := self.first.get(name):
                nats = run.measured.per_character
                points = [(k, nats(loss)) for k, loss in run.measured.memory_curve]
                curves[name] = points, nats(run.measured.stream)
        if curves:
            plot_memory(figures / "memory.svg", curves, self.ngrams["astra_alpha"])
        recoveries = {name: (self.recoveries[name], first_below(self.recoveries[name]))
                      for name in DRAWN_RECOVERY if name in self.recoveries}  # fmt: skip
        if recoveries:
            plot_recovery(figures / "recovery.svg", recoveries, FILLED)
        if self.dynamics:
            curves = {r.model: ([*map(r.per_character, r.static_parts)],
                                [*map(r.per_character, r.dynamic_parts)])
                      for r in self.dynamics if r.model in DRAWN_DYNAMIC}  # fmt: skip
            plot_dynamic(figures / "dynamic.svg", curves)
        if self.sized:
            points = {title(run): (run.parameters, per_character(run, "sensitivity")[0])
                      for run in self.sized}  # fmt: skip
            plot_sensitivity(figures / "sensitivity.svg", points)
        losses = {name: [run.epochs for run in self.of(name)] for name in self.first}
        if losses:
            plot_epochs(figures / "epochs.svg", losses)

    # --- Choosing runs

    def of(self, name: str) -> list[Run]:
        """Return the runs of an unchanged config, one per seed."""
        return [run for run in self.plain if run.config == name]

    def variant(self, changes: dict[str, Any]) -> Run | None:
        """Return the first run of astra_alpha with these changes, or None."""
        same = (r for r in self.runs if r.config == "astra_alpha" and r.changes == changes)
        return next(same, None)

    def alphas(self, fields: set[str], kind: Callable[[Config], Hashable]) -> dict[Any, list[Run]]:
        """Return the runs of astra_alpha that differ in these fields at most, by their kind."""
        runs = (r for r in self.runs if r.config == "astra_alpha" and r.changes.keys() <= fields)
        return grouped(runs, lambda run: kind(run.full_config()))

    # --- Rows of tables

    def in_short(self) -> list[Row]:
        """Return a row per model: its losses with and without its state, nats per character."""
        return [
            [name, f"{run.parameters:,}",
             *(f"{loss:.3f}" for loss in per_character(run, "stream", "stateless", "sensitivity"))]
            for name, run in self.first.items()
        ]  # fmt: skip

    def models(self) -> list[Row]:
        """Return a row per run of an unchanged config: training losses and measurements."""
        rows = []
        for run in self.plain:
            theirs = [f"{losses[-1]:.4f}"
                      + f" (epoch {len(losses)})" * (len(losses) != len(run.epochs))
                      for losses in load_published(run.config).train_loss
                      if not math.isnan(losses[-1])]  # fmt: skip
            measures = [run.measured.windows, run.measured.stream, run.measured.stateless]
            nats = [*measures, run.measured.sensitivity, *map(run.measured.per_character, measures)]
            rows.append([
                run.config, run.seed, f"{run.parameters:,}",
                ", ".join(theirs) or "–",
                f"{run.epochs[-1].train_loss:.4f}", f"{run.result_epoch} of {len(run.epochs)}",
                *(f"{loss:.4f}" for loss in nats),
            ])  # fmt: skip
        return rows

    def memory(self) -> tuple[Row, list[Row]]:
        """Return the head, and a row per model: the loss by number of tokens between resets."""
        curves = {
            name: dict(run.measured.memory_curve) | {math.inf: run.measured.stream}
            for name, run in self.first.items()
        }
        every = sorted(set().union(*curves.values()))
        rows = [
            [name, *(number(curve.get(k), self.first[name].measured.per_character) for k in every)]
            for name, curve in curves.items()
        ]
        return ["model", *(f"k = {k}" for k in every[:-1]), "never"], rows

    def counted(self) -> list[Row]:
        """Return a row per vocabulary: the loss of each order of n-grams."""
        names = {"astra_alpha": "characters", "scribe_alpha": "Scribe's subwords"}
        return [[what, *(f"{loss:.3f}" for loss in self.ngrams[name])]
                for name, what in names.items()]  # fmt: skip

    def recovery(self) -> list[Row]:
        """Return a row per model: the excess at each of POSITIONS, and where it ends."""
        return [
            [name, *(f"{excess[i - 1]:.4f}" if i <= len(excess) else "–" for i in POSITIONS),
             first_below(excess)]
            for name, excess in self.recoveries.items()
        ]  # fmt: skip

    def sensitivity(self) -> list[Row]:
        """Return a row per size of model."""
        rows = []
        for run in self.sized:
            model = run.full_config().model
            losses = *per_character(run, "stream", "sensitivity"), run.measured.sensitivity
            rows.append([title(run), model.cell, model.num_layers, model.hidden_dim,
                         f"{run.parameters:,}", *(f"{loss:.4f}" for loss in losses)])  # fmt: skip
        return rows

    def chains(self) -> list[Row]:
        """Return a row per model: its chain without state."""
        rows = []
        for name, run in self.first.items():
            if chain := run.measured.chain:
                cycles = (f"`{json.dumps(c.text)}` ({c.basin:.0%})" for c in chain.cycles)
                losses = chain.kl_to_bigram, chain.kl_to_frequencies
                rows.append([name, *(number(x, spec=".4f") for x in losses), ", ".join(cycles)])
        return rows

    def text_measures(self, run: Run) -> list[Row]:
        """Return a row per measure, with a column for each way to sample."""
        texts = run.measured.text.values()
        return [[what, *(number(getattr(text, name), spec=".3g") for text in texts)]
                for name, what in state_cost.TEXT_MEASURES.items()]  # fmt: skip

    def texts(self) -> list[tuple[str, str]]:
        """Return astra_alpha's sample texts with their names."""
        found = self.alpha.measured.text if self.alpha else {}
        return [
            (f"{called(name)}, {how}", text)
            for how in ("sampled", "greedy")
            for name in state_cost.TREATMENTS
            if name in found and (text := getattr(found[name], how)) is not None
        ]

    def dropouts(self) -> dict[str, list[Run]]:
        """Return the runs of astra_alpha by the site and rate of dropout."""

        def kind(config: Config) -> str:
            rate, site = config.training.dropout, config.training.dropout_site
            return f"{site}, {rate}" if rate else "no dropout"

        return self.alphas({"training.dropout", "training.dropout_site"}, kind)

    def batches(self) -> dict[tuple[str, float], list[Run]]:
        """Return the runs of astra_alpha by batches and rate of dropout, more dropout first."""
        kind = lambda config: (config.data.batches, config.training.dropout)
        groups = self.alphas({"data.batches", "training.dropout"}, kind)
        return dict(sorted(groups.items(), key=lambda item: -item[0][1]))

    def precisions(self) -> dict[str, list[Run]]:
        """Return the runs of astra_alpha by the dtype of their matrix products."""
        return self.alphas({"training.compute_dtype"}, lambda config: config.training.compute_dtype)

    def over_seeds(self, groups: Mapping[Any, list[Run]], *measures: str) -> list[Row]:
        """Return a row per group: its kind, number of runs, last training loss and these measures.

        Losses are means and ranges; "filled" is a number per run: see `filled`.
        """
        rows = []
        for kind, runs in groups.items():
            row = [*([kind] if isinstance(kind, str) else kind), len(runs)]
            row.append(mean_and_range([run.epochs[-1].train_loss for run in runs]))
            for measure in measures:
                values = [getattr(run.measured, measure, math.nan) for run in runs]
                row.append(self.filled(runs) if measure == "filled" else mean_and_range(values))
            rows.append(row)
        return rows

    def filled(self, runs: Sequence[Run]) -> str:
        """Return for each run after how many predictions a state is full again."""
        return ", ".join(str(first_below(run.measured.recovery)) for run in runs)

    def last_five(self) -> list[Row]:
        """Return a row per Astra model: validation losses of the last five epochs, theirs and ours.

        In the few epochs of the other models they fall or rise, so a mean says little. The standard
        error takes the published losses, each of one random batch, as independent.
        """
        rows = []
        for name in self.first:
            theirs = [loss for run in load_published(name).val_loss for loss in _last(run)]
            if not name.startswith("astra"):
                continue
            mean = statistics.mean(theirs)
            error = statistics.stdev(theirs) / len(theirs) ** 0.5
            ours = [statistics.mean(_last([epoch.val_loss for epoch in run.epochs]))
                    for run in self.of(name)]  # fmt: skip
            above = statistics.mean(ours) - mean
            difference = f"{above:+.4f}", f"{above / error:+.1f}"
            rows.append([name, len(theirs), mean_and_range(theirs), f"{error:.4f}",
                         mean_and_range(ours), *difference])  # fmt: skip
        return rows

    def as_nanogpt(self) -> list[Row]:
        """Return a row per run that was evaluated on nanoGPT's protocol."""
        return [
            [title(run), run.seed, f"{run.parameters:,}", with_error(loss),
             f"{with_error(loss.best)}, epoch {loss.best.epoch}" if loss.best else "–",
             f"{minutes(run):.0f}"]
            for run in self.plain
            if (loss := run.measured.random_batches)
        ]  # fmt: skip

    def losses_as_nanogpt(self, name: str) -> list[float]:
        """Return the losses of a model's seeds on nanoGPT's protocol."""
        return [loss.mean for run in self.of(name) if (loss := run.measured.random_batches)]

    def ablation(self) -> list[Row]:
        """Return a row per change of best_gru's recipe with GRU layers: the mean of all seeds."""
        losses = {title: statistics.mean(run.loss for run in runs)
                  for title, runs in self.ablations.items()}  # fmt: skip
        change = {title: round(loss - losses["none"], 3) + 0.0 for title, loss in losses.items()}
        return [[title, f"{loss:.3f}", f"{change[title]:+.3f}" if change[title] else "0"]
                for title, loss in losses.items()]  # fmt: skip

    def dynamic(self) -> list[Row]:
        """Return a row per model whose weights went on learning, nats per character."""
        return [
            [record.model, f"{record.learning_rate:g}", f"{record.decay:g}",
             *(f"{record.per_character(loss):.3f}"
               for loss in (record.static, record.dynamic, record.static - record.dynamic))]
            for record in self.dynamics
        ]  # fmt: skip

    @property
    def dynamic_resets(self) -> list[int]:
        """The numbers of tokens between two resets of the state with which weights learned."""
        return [every for every, *_ in self.dynamics[0].resets] if self.dynamics else []

    def dynamic_by_reset(self) -> list[Row]:
        """Return a row per such model: static → dynamic loss by the tokens between two resets."""
        return [
            [record.model,
             *(f"{record.per_character(static):.3f} → {record.per_character(dynamic):.3f}"
               for _, static, dynamic in [*record.resets, (0, record.static, record.dynamic)])]
            for record in self.dynamics
        ]  # fmt: skip

    def by_recipe(self, name: str, framework: str) -> list[Plateau]:
        """Return a framework's trainings of a config's first steps by its recipe, one per seed."""
        training = load_config(name).training
        like = framework, training.batch_size, training.learning_rate
        plateaus = self.plateaus[name]
        return [p for p in plateaus if (p.framework, p.batch_size, p.learning_rate) == like]

    def first_steps(self, name: str) -> list[Row]:
        """Return a row per training of a config's first steps: constant units, and losses."""
        rows = []
        for p in self.plateaus.get(name, []):
            shares = [", ".join(f"{share:.0%}" for share in layers) for layers in p.constant]
            first, last = (shares[0], shares[-1]) if shares else ("not measured", "not measured")
            whole = f"{epochs[0]:.3f}" if (epochs := p.epochs) else "–"
            rows += [[p.framework, p.batch_size, f"{p.learning_rate:g}", p.seed, first, p.steps,
                      last, f"{p.losses[-1]:.2f}", whole]]  # fmt: skip
        return rows

    def stopped(self) -> list[Row]:
        """Return a row per epoch of the run that was stopped early many times."""
        if not self.stopping:
            return []
        return [[epoch, f"{loss:.3f}", self.stopping.share(epoch)]
                for epoch, loss in enumerate(self.stopping.losses, 1)]  # fmt: skip

    def resources(self) -> list[Row]:
        """Return a row per run: steps, speed, minutes and memory."""
        rows = []
        for run in self.runs:
            tokens = load_config(run.config).training.tokens_per_step
            rates = [epoch.tokens_per_second / tokens for epoch in run.epochs]
            memory = [m for epoch in run.epochs if (m := epoch.peak_memory_mb) is not None]
            commits = ", ".join(f"`{commit[:7]}`" for commit in run.measured.commits) or "–"
            rows.append([title(run), run.seed, f"{run.epochs[-1].step:,}",
                         f"{statistics.median(rates):.2f}", f"{min(rates):.2f} … {max(rates):.2f}",
                         f"{minutes(run):.1f}", number(max(memory, default=None), spec=",.0f"),
                         run.measured.hardware, commits])  # fmt: skip
        return rows


def called(how: str) -> str:
    """Return what a way to write a text is called on the page."""
    return HOW.get(how, how)


def in_a_word(verdict: str) -> str:
    """Return a verdict without its reasons; * where a model that learned slowly may decide it."""
    return re.split("[:;]", verdict)[0] + " *" * ("learns slowly" in verdict)


def missing(runs: Sequence[Run]) -> list[str]:
    """Return the runs of `reproduce.py --all` that are not among these."""
    done = [(recipe(run.full_config()), run.seed) for run in runs]
    texts = []
    for job in all_jobs():
        config = job.config
        if (recipe(config), config.training.seed) not in done:
            changes = [f"{name.partition('.')[2]} {value}" for name, value in job.overrides]
            texts.append(f"{job.name} ({', '.join(changes)})" if changes else job.name)
    return texts


def _last(losses: Sequence[float]) -> list[float]:
    """Return the last five of the losses that are known."""
    return [loss for loss in losses if not math.isnan(loss)][-5:]


def title(run: Run) -> str:
    """Return the config's name and the changes."""
    changes = (f"{name.partition('.')[2]} {value}" for name, value in run.changes.items())
    return ", ".join([run.config, *changes])


def minutes(run: Run) -> float:
    """Return the minutes of the run's steps if each epoch had taken the median one's time.

    So a run that was suspended for a while has the minutes of one that was not.
    """
    return len(run.epochs) * statistics.median(epoch.seconds for epoch in run.epochs) / 60


def number(value: float | None, convert: Callable = float, spec: str = ".3f") -> str:
    """Format a table's cell; a dash if there is no value."""
    return "–" if value is None else format(convert(value), spec)


def per_character(run: Run, *measures: str) -> list[float]:
    """Return these measures of a run in nats per character."""
    return [run.measured.per_character(getattr(run.measured, measure)) for measure in measures]


def with_error(loss: state_cost.MeanLoss) -> str:
    """Format a mean and its standard error."""
    return f"{loss.mean:.4f} ± {loss.standard_error:.4f}"


def first_below(excess: Sequence[float]) -> int | str:
    """Return after how many predictions the excess, as the figure has it, stays below FILLED."""
    above = [last for _, last, mean in in_quarter_octaves(excess) if abs(mean) >= FILLED]
    last = above[-1] if above else 0
    return last if last < len(excess) else f"more than {len(excess)}"


def mean_and_range(values: Sequence[float]) -> str:
    """Format the mean and the range of values."""
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{statistics.mean(values):.4f} ({min(values):.4f} … {max(values):.4f})"


def lowest_to_highest(values: Sequence[float]) -> str:
    """Format the range of values in words."""
    return " to ".join(dict.fromkeys(f"{end:.3f}" for end in (min(values), max(values))))


def epoch_table(runs: Sequence[Run], published: PublishedResults) -> str:
    """Return a table of losses by epoch, published beside measured, folded below a sentence.

    The sentence says for each run, if any loss is published, the largest difference between a
    training loss, from the 2nd epoch on, and the nearest published one.
    """
    head, columns = ["epoch"], []
    for what, word, theirs, earlier in (
        ("train_loss", "train", published.train_loss, published.earlier_train_loss),
        ("val_loss", "validation", published.val_loss, published.earlier_val_loss),
    ):
        head += [f"published {word} {i + 1}" for i in range(len(theirs))]
        head += [f"earlier {word}"] if earlier else []
        head += [f"{word}, seed {run.seed}" for run in runs]
        columns += [*theirs, *([earlier] if earlier else [])]
        columns += [[getattr(epoch, what) for epoch in run.epochs] for run in runs]
    epochs = itertools.zip_longest(*columns, fillvalue=math.nan)
    rows = [[i, *("–" if math.isnan(loss) else f"{loss:.4f}" for loss in losses)]
            for i, losses in enumerate(epochs, 1)]  # fmt: skip
    said = []
    for run in runs:
        differences = []
        for i, epoch in enumerate(run.epochs[1:], start=1):
            known = [losses[i] for losses in published.train_loss if i < len(losses)]
            beside = [abs(epoch.train_loss - loss) for loss in known if not math.isnan(loss)]
            differences += [min(beside)] if beside else []
        if differences:
            said.append(f"{max(differences):.4f}" + f" (seed {run.seed})" * (len(runs) > 1))
    sentence = (
        "From epoch 2 on, our training loss differs from the published one (the nearer, if there "
        f"are two)\nby at most {', '.join(said)}.\n\n"
    )
    return sentence * bool(said) + folded("The loss of each epoch", table(head, rows))
