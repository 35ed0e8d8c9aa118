"""The fields of a config. Each says what it is for, and which of three roles it has."""

from __future__ import annotations

import dataclasses
import encodings
import functools
import inspect
import re
from dataclasses import dataclass
from typing import Any, Literal, cast

import jax

from jaxgru.cells import CELLS, AnyCell, Init, options_of_cell, sizes
from jaxgru.errors import UserError
from jaxgru.layers import SITES, Implementation, Site, has_recurrent_weights
from jaxgru.lm.config.fields import (
    ConfigError,
    Role,
    Section,
    from_one,
    from_zero,
    placement,
    recipe,
    setting,
    zero_to_one,
)
from jaxgru.lm.data.tokenizers import TOKENIZERS
from jaxgru.printing import shown

OWNERS = {
    "training.plateau_factor": ("training.schedule", "plateau"),
    "training.plateau_patience": ("training.schedule", "plateau"),
    "training.random_offset": ("data.batches", "streams"),
    "training.reset_probability": ("data.batches", "streams"),
}
"""A field that is only for one value of another field → that field and that value."""

MAX_NAME = 200
"""The most characters of a config's name, which is also the name of a folder."""


@dataclass(frozen=True)
class ModelConfig(Section):
    """The model: all that decides its parameters, and nothing else.

    `jaxgru train --help` says what the fields of all three sections mean.

    Raises:
      ConfigError: a value is of another type, out of bounds, unknown, or does not fit the others.
    """

    section = "model"
    cell: str = recipe("gru", "the recurrence", registry=CELLS)
    vocab_size: int = from_one(
        65, "number of tokens that subwords and sentencepiece learn; other tokenizers count theirs"
    )
    embedding_dim: int = from_one(64, "size of an embedding", below=2**20)
    hidden_dim: int = from_one(128, "size of a layer's hidden state", below=2**20)
    num_layers: int = from_one(1, "stacked layers", below=2**10)
    context_length: int = from_zero("how many tokens it sees; other cells: 0", below=2**10)
    num_rounds: int = recipe(5, "how often input and state are gated", at_least=2)
    rank: int = from_zero("rank of the products that gate; 0: hidden_dim / 8")
    num_blocks: int = from_one(
        1,
        "diagonal blocks of the weights of the state (rg_lru: of its gates'), a divisor of "
        "hidden_dim",
    )
    proj_size: int = from_zero("size of a layer's output, a projection of h; 0: none")
    layer_norm: bool = recipe(False, "layer normalisation within the cell")
    second_bias: bool = recipe(
        False, "second biases for z and r, as torch.nn.GRU and the study have them"
    )
    reset_gate: Literal["before", "after"] = recipe(
        "after",
        "apply the reset gate after the candidate's matrix product (torch.nn.GRU), or before",
    )
    activation: Literal["tanh", "relu"] = recipe("tanh", "the function that is tanh by default")
    init_scheme: Literal["orthogonal", "pytorch"] = recipe(
        "orthogonal",
        "orthogonal recurrent weights, as Flax's; or uniform, as torch.nn.Linear's and the study's",
    )
    final_norm: bool = recipe(False, "LayerNorm on the last layer's output, before the head")
    tied_embedding: bool = recipe(
        False, "the embedding, transposed, is the head's weights; embedding_dim must be hidden_dim"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_foreign_options()
        self._check_required_options()
        try:
            layer = self.layer_shapes()
        except UserError as error:
            # Two options do not go together.
            raise ConfigError(f"model.{error}") from None
        if self.tied_embedding:
            self._check_tied_embedding(layer)

    @classmethod
    def help_of(cls, field: dataclasses.Field[Any]) -> str:
        """Return what a field is for, after the cells that have the option, if not all do."""
        cells = [cell for cell in CELLS if field.name in _fields_of_cell(cell)]
        text = super().help_of(field)
        return f"{', '.join(cells)}: {text}" if cells else text

    def _check_foreign_options(self) -> None:
        """Raise ConfigError where an option is set that only other cells have."""
        fields = {field for cell in CELLS for field in _fields_of_cell(cell)}
        foreign = fields - set(_fields_of_cell(self.cell))
        changed = [
            field
            for field in sorted(foreign)
            if getattr(self, field) != getattr(ModelConfig, field)
        ]
        if not changed:
            return
        values = [f"model.{field} is {shown(getattr(self, field))}" for field in changed]
        remedies = [f"--model.{field} {getattr(ModelConfig, field)}".lower() for field in changed]
        raise ConfigError(
            f"{' and '.join(values)}, but this cell is {self.cell}, which has no such option; "
            f"drop it, or give {' '.join(remedies)}."
        )

    def _check_required_options(self) -> None:
        """Raise ConfigError where an option is 0 for which the cell has no default."""
        parameters = options_of_cell(self.cell)
        options = self.cell_options()
        for field in _fields_of_cell(self.cell):
            is_required = parameters[field].default is inspect.Parameter.empty
            if is_required and field not in options:
                raise ConfigError(
                    f"model.{field} is 0; it must be at least 1, because this cell is {self.cell}."
                )

    def _check_tied_embedding(self, layer: AnyCell) -> None:
        _, H = sizes(layer)
        if self.embedding_dim != H:
            raise ConfigError(
                f"model.tied_embedding is True, so model.embedding_dim must be {H}, the size of a "
                f"layer's output, and not {self.embedding_dim}."
            )

    def cell_options(self) -> dict[str, Any]:
        """Return the keywords for the function that draws the cell; a number 0 is left to it."""
        options = {field: getattr(self, field) for field in _fields_of_cell(self.cell)}
        return {key: value for key, value in options.items() if value or value is False}

    def layer_shapes(self) -> AnyCell:
        """Return a layer of this model as shapes, but for its input's size, which is 1."""
        return _layer_shapes(CELLS[self.cell], self.hidden_dim, *self.cell_options().items())


def _fields_of_cell(cell: str) -> list[str]:
    """Return the fields of `model` that are options of a cell."""
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    return [option for option in options_of_cell(cell) if option in fields]


# Every override makes a config anew.
@functools.cache
def _layer_shapes(init: Init, hidden_dim: int, *options: tuple[str, Any]) -> AnyCell:
    return jax.eval_shape(lambda: init(jax.random.key(0), 1, hidden_dim, **dict(options)))


@dataclass(frozen=True)
class DataConfig(Section):
    """The data: which tokens a model sees.

    Raises:
      ConfigError: as for `ModelConfig`.
    """

    section = "data"
    # A run knows its text by the SHA-256, wherever it lies.
    corpus: str = setting(
        "tiny_shakespeare",
        "tiny_shakespeare, a text file (may be .gz), a folder of files, a pattern such as "
        "src/**/*.py, or - for standard input",
    )
    encoding: str = recipe("utf-8", "the text's encoding, by Python's name for it, such as cp1252")
    line_ends: Literal["newlines", "unchanged"] = recipe(
        "newlines",
        "newlines: \\r\\n and \\r, the line ends of Windows and old Macs, are read as \\n; "
        "unchanged: they stay, as they do in bytes and where a tokenizer has \\r",
    )
    tokenizer: str = recipe(
        "characters",
        "; ".join(f"{kind}: {cls.about}" for kind, cls in TOKENIZERS.items()),
        registry=TOKENIZERS,
    )
    tokenizer_file: str = recipe(
        "", "a tokenizer's file to use, such as a .model of SentencePiece; empty: learn one"
    )
    min_count: int = from_zero(
        "words and characters: how often one must occur to be a token; rarer ones, and those that "
        "only other texts have, become one unknown token; 0: 2 for words, and 1 for characters, "
        "which then have no such token"
    )
    separator: str = recipe(
        "",
        "line, or what stands between two documents of the text, such as \\n\\n: the model reads "
        "each document from a zero state; empty: the text is one",
        escaped=True,
    )
    batches: Literal["crops", "streams"] = recipe(
        "crops",
        "crops: random pieces of the text, each from a zero state; streams: contiguous ones, which "
        "keep the state",
    )
    validation_fraction: float = recipe(
        0.1,
        "share of the corpus that is held out for validation: its end or, of documents, some that "
        "are drawn; with 0, a tenth is used for training and validation",
        at_least=0,
        below=1,
    )
    validation_seed: int = from_zero("seed that draws the documents for validation", below=2**32)
    validation: str = setting(
        "", "another text to validate on, like data.corpus, all of which is then for training"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.corpus:
            raise ConfigError("data.corpus is ''; it must name a text, such as my_text.txt.")
        kinds = [kind for kind, cls in TOKENIZERS.items() if cls.min_count]
        if self.min_count and (self.tokenizer_file or self.tokenizer not in kinds):
            raise ConfigError(
                f"data.min_count is {self.min_count}; only a vocabulary of {' or '.join(kinds)} "
                "that is learned takes one."
            )
        # This finds Python's own codecs, and none that another package registers.
        codec = encodings.search_function(self.encoding.lower())
        if codec is None or not codec._is_text_encoding:
            raise ConfigError(
                f"data.encoding is {shown(self.encoding)}; it must be one of Python's, such as "
                "utf-8 or cp1252."
            )
        if codec.name == "utf-8":
            object.__setattr__(self, "encoding", "utf-8")
        if self.separator != "line" and self.separator.lower() in (
            "line",
            "lines",
            "newline",
            "newlines",
        ):
            raise ConfigError(
                f"data.separator is {shown(self.separator)}; if lines are meant, write line."
            )


@dataclass(frozen=True)
class TrainingConfig(Section):
    """How a model is trained.

    Raises:
      ConfigError: as for `ModelConfig`.
    """

    section = "training"
    epochs: int = from_one(10, "number of epochs, each of steps_per_epoch steps")
    steps_per_epoch: int = from_one(200, "optimizer steps per epoch")
    batch_size: int = from_one(64, "sequences per batch, shared by all devices")
    gradient_accumulation: int = from_one(
        1, "batches per optimizer step, computed one after another in the memory of one"
    )
    sequence_length: int = from_one(128, "tokens per sequence")
    learning_rate: float = recipe(3e-3, "learning rate with which the schedule begins", above=0)
    schedule: Literal["cosine", "cosine_per_step", "linear", "constant", "plateau"] = recipe(
        "cosine",
        "how the learning rate falls to 0: cosine, once per epoch; cosine_per_step or linear, at "
        "every step; plateau, when the validation loss does not improve; constant, not at all",
    )
    plateau_factor: float = recipe(
        0.25, "plateau: what the learning rate is multiplied by", above=0, below=1
    )
    plateau_patience: int = from_one(
        1, "plateau: after how many epochs without a better validation loss"
    )
    warmup_steps: int = from_zero("steps at the start in which the learning rate grows linearly")
    weight_decay: float = recipe(0.01, "AdamW's weight decay", at_least=0)
    decay_biases: bool = recipe(
        True, "weight decay on biases and other vectors, too; false: on matrices alone"
    )
    beta1: float = recipe(0.9, "AdamW's first-moment decay", at_least=0, below=1)
    beta2: float = recipe(0.999, "AdamW's second-moment decay", at_least=0, below=1)
    epsilon: float = recipe(1e-8, "AdamW's denominator offset", above=0)
    max_grad_norm: float = recipe(1.0, "gradients are clipped to this global norm", above=0)
    input_dropout: float = zero_to_one("probability of dropping a unit of the embeddings")
    state_dropout: float = zero_to_one("probability of dropping a unit inside the recurrence")
    between_dropout: float = zero_to_one("probability of dropping a unit between layers")
    output_dropout: float = zero_to_one("probability of dropping a unit of the last layer's output")
    weight_drop: float = zero_to_one(
        "probability of dropping a weight of the recurrent matrices, drawn once per optimizer step"
    )
    ema_decay: float = zero_to_one(
        "decay of a moving average of the parameters, which is then the model; 0: none"
    )
    random_offset: bool = recipe(
        False, "streams begin each pass over the text at a random token, as if it were a ring"
    )
    reset_probability: float = zero_to_one(
        "probability of resetting a row's state before a sequence of a stream"
    )
    compute_dtype: Literal["float32", "bfloat16"] = recipe(
        "float32", "type of the operands of matrix products; all else is float32"
    )
    implementation: Implementation = placement(
        "auto", "what computes the layers; wavefront: stacks, on GPUs"
    )
    remat: bool = placement(
        False, "recompute a sequence's √T segments for the gradient: less memory, more time"
    )
    patience: int = from_zero(
        "epochs without a better validation loss before stopping early; 0: never"
    )
    keep_epochs: bool = setting(
        False, "write each epoch's model to epochs/NNN.safetensors in the run folder"
    )
    tensorboard: bool = setting(
        False, "write the numbers of metrics.jsonl to tensorboard/ in the run folder, too"
    )
    shard_parameters: bool = placement(
        False, "shard parameters and optimizer state over the devices instead of replicating them"
    )
    seed: int = from_zero("seed of weights, batches and dropout", below=2**32)
    init_from: str = recipe(
        "", "a pretrained model's name, a run folder or a model's file to start from; empty: none"
    )

    @property
    def dropouts(self) -> dict[Site, float]:
        """The probability of dropping a unit at each site where some are dropped."""
        rates: dict[Site, float] = {site: getattr(self, f"{site}_dropout") for site in SITES}
        return {site: rate for site, rate in rates.items() if rate}

    @property
    def rows_per_step(self) -> int:
        """Number of sequences per optimizer step."""
        return self.gradient_accumulation * self.batch_size

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens per optimizer step."""
        return self.rows_per_step * self.sequence_length


@dataclass(frozen=True)
class Config:
    """Everything a run needs; `name` is also the name of its run folder.

    Raises:
      ConfigError: the name is none of a folder, or a value does not fit those of other sections.
    """

    name: str = "custom"
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        allowed = rf"[A-Za-z0-9_][A-Za-z0-9_.-]{{0,{MAX_NAME - 1}}}"
        if not isinstance(cast(object, self.name), str) or not re.fullmatch(allowed, self.name):
            raise ConfigError(
                f"name is {shown(self.name)}; it names a folder, so it must be at most {MAX_NAME} "
                "letters, digits, '_', '-' and '.', and begin with neither '-' nor '.'."
            )
        is_stack = self.model.num_layers > 1
        self._check_use("training.between_dropout", is_stack, "more than one layer")
        if self.training.weight_drop:
            has_matrices = has_recurrent_weights(self.model.layer_shapes())
            self._check_use("training.weight_drop", has_matrices, "cells with recurrent matrices")
        for name, (owner, value) in OWNERS.items():
            self._check_use(name, field_value(self, owner) == value, f"{value} ({owner})")

    def _check_use(self, name: str, is_useful: bool, of: str) -> None:
        """Raise ConfigError where a field is set that is only for `of`, which is not there."""
        value = field_value(self, name)
        if not is_useful and value != default_value(name):
            raise ConfigError(f"{name} is {value}, but it is only for {of}.")


SECTIONS = {cls.section: cls for cls in (ModelConfig, DataConfig, TrainingConfig)}
"""The class of each section, by its name in a config."""


def dotted_names(*roles: Role) -> list[str]:
    """Return the dotted names of the fields with these roles, by default of all, in order."""
    return [
        f"{section}.{field.name}"
        for section, cls in SECTIONS.items()
        for field in dataclasses.fields(cls)
        if not roles or field.metadata["role"] in roles
    ]


def default_value(dotted: str) -> Any:
    """Return a field's default by its dotted name."""
    section, _, field = dotted.partition(".")
    return getattr(SECTIONS[section], field)


def field_value(config: Config, dotted: str) -> Any:
    """Return a field's value by its dotted name."""
    section, _, field = dotted.partition(".")
    return getattr(getattr(config, section), field)
