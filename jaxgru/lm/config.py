"""Typed, frozen configuration: one TOML file per model, whose fields can be overridden.

A config has three sections. `model` alone decides the parameters, `data` the tokens, `training` the
optimisation. Each field has a role: `recipe`, `placement` or `setting`. Every value is checked when
it is set, so a bad one is refused before anything slow starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import encodings
import functools
import hashlib
import math
import operator
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import numpy as np

from jaxgru.cells import CELLS
from jaxgru.errors import UserError, shown
from jaxgru.layers.implementations import IMPLEMENTATIONS
from jaxgru.lm.data.tokenizers import TOKENIZERS
from jaxgru.lm.files import read_bytes

MAX_BYTES, MAX_DOTS = 2**16, 2000
"""Limits on a config's TOML. `tomllib` needs memory that grows with the square of a dotted key's
length: 500 MB for a key of 20 kB."""

MAX_NAME = 200  # characters of a config's name, which is also the name of a folder


class ConfigError(UserError):
    """A config, or a value of one, cannot be used; the message says why."""


field_types = functools.cache(get_type_hints)  # of a section's class, by name


Role = Literal["recipe", "placement", "setting"]


def _field(role: Role, default: Any, help: str, known: Iterable[str] = (), **bounds: float) -> Any:
    """Return a dataclass field with a help text.

    Args:
      known: the values that it can have, if they are the names in a registry.
      bounds: `at_least`, `above` or `below`.
    """
    metadata = {"role": role, "help": help, "known": known, "bounds": bounds}
    return dataclasses.field(default=default, metadata=metadata)


recipe = functools.partial(_field, "recipe")
"""A field that is part of the numbers, and must not change within a run."""
placement = functools.partial(_field, "placement")
"""A field that says where and how the numbers are computed. It changes them by rounding at most, as
other hardware does, so it may change within a run."""
setting = functools.partial(_field, "setting")
"""A field that says where something lies or what is kept. It may change within a run."""


@dataclass(frozen=True)
class _Section:
    """A section of a config; checks every field's type and bounds on construction."""

    section: ClassVar[str]

    def __post_init__(self) -> None:
        types = field_types(type(self))
        for field in dataclasses.fields(self):
            name = f"{self.section}.{field.name}"
            value = _as_type(name, getattr(self, field.name), types[field.name])
            _check_bounds(name, value, field.metadata["bounds"])
            if (known := field.metadata["known"]) and value not in known:
                raise ConfigError(
                    f"{name} is {shown(value)}; it must be one of {', '.join(known)}."
                )
            object.__setattr__(self, field.name, value)

    def _check_product(self, *names: str) -> None:
        """Raise ConfigError if a product of sizes, as of a batch or a matrix, exceeds 32 bits."""
        values = [getattr(self, name) for name in names]
        if math.prod(values) >= 2**31:
            product = " × ".join(f"{self.section}.{name}" for name in names)
            raise ConfigError(
                f"{product} is {' × '.join(map(str, values))}; it must be below 2^31: JAX's "
                "integers have 32 bits."
            )


@dataclass(frozen=True)
class ModelConfig(_Section):
    """The model: all that decides its parameters, and nothing else.

    `jaxgru train --help` says what the fields of all three sections mean.

    Raises:
      ConfigError: a value is of another type, out of bounds, unknown, or does not fit the others.
    """

    section = "model"
    cell: str = recipe("gru", "the recurrence", known=CELLS)
    vocab_size: int = recipe(
        65,
        "number of tokens that subwords and sentencepiece learn; other tokenizers count theirs",
        at_least=1,
    )
    embedding_dim: int = recipe(64, "size of an embedding", at_least=1)
    hidden_dim: int = recipe(128, "size of a layer's hidden state", at_least=1)
    num_layers: int = recipe(1, "stacked layers", at_least=1, below=2**10)
    context_length: int = recipe(
        0, "mlp: how many tokens it sees; 0 for all other cells", at_least=0, below=2**10
    )
    num_blocks: int = recipe(
        1,
        "GRU and LSTM: number of diagonal blocks of the recurrent weights, a divisor of hidden_dim",
        at_least=1,
    )
    proj_size: int = recipe(
        0, "projected_lstm: size of a layer's output; 0 for all other cells", at_least=0
    )
    second_bias: bool = recipe(
        False, "GRU: second biases for z and r, as torch.nn.GRU and the study have them"
    )
    reset_gate: Literal["before", "after"] = recipe(
        "after",
        "GRU: apply the reset gate after the candidate's matrix product (torch.nn.GRU), or before",
    )
    final_norm: bool = recipe(False, "LayerNorm on the last layer's output, before the head")

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self):
            owners = [name for name, cell in CELLS.items() if field.name in cell.options]
            value = getattr(self, field.name)
            if owners and self.cell not in owners and value != field.default:
                raise ConfigError(
                    f"model.{field.name} is {value}; it must be {field.default}: only "
                    f"{', '.join(owners)} has this option, and this cell is {self.cell}."
                )
        for name in ("context_length", "proj_size"):
            if name in CELLS[self.cell].options and getattr(self, name) == 0:
                raise ConfigError(
                    f"model.{name} is 0; it must be at least 1: this cell is {self.cell}."
                )
        if self.hidden_dim % self.num_blocks:
            raise ConfigError(
                f"model.num_blocks is {self.num_blocks}; it must be a divisor of "
                f"model.hidden_dim, {self.hidden_dim}."
            )
        self._check_product("vocab_size", "embedding_dim")
        self._check_product("embedding_dim", "hidden_dim")
        self._check_product("hidden_dim", "hidden_dim")
        self._check_product("hidden_dim", "vocab_size")
        if self.context_length:
            self._check_product("context_length", "embedding_dim", "hidden_dim")


@dataclass(frozen=True)
class DataConfig(_Section):
    """The data: which tokens a model sees. Raises as `ModelConfig`."""

    section = "data"
    corpus: str = setting(  # a run knows its text by the SHA-256, wherever it lies
        "tiny_shakespeare",
        "tiny_shakespeare, a text file (may be .gz), a folder of files, a pattern such as "
        "src/**/*.py, or - for standard input",
    )
    encoding: str = recipe("utf-8", "the text's encoding, by Python's name for it, such as latin-1")
    tokenizer: str = recipe(
        "characters",
        "; ".join(f"{kind}: {cls.about}" for kind, cls in TOKENIZERS.items()),
        known=TOKENIZERS,
    )
    tokenizer_file: str = recipe(
        "", "a tokenizer to use as it is, such as a .model of SentencePiece; empty: learn one"
    )
    min_count: int = recipe(
        2, "words: how often a word must occur to be a token; rarer ones become <unk>", at_least=1
    )
    batches: Literal["crops", "streams"] = recipe(
        "crops",
        "crops: random pieces of the text, each from a zero state; streams: contiguous ones, which "
        "keep the state",
    )
    validation_fraction: float = recipe(
        0.1,
        "share of the corpus, at its end, that is held out for validation; with 0, its last tenth "
        "is used for training and validation",
        at_least=0,
        below=1,
    )
    validation: str = setting(
        "",
        "another text to validate on, given like data.corpus; all of the corpus is then for "
        "training",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        codec = encodings.search_function(self.encoding.lower())  # one of Python's own
        if codec is None or not codec._is_text_encoding:
            raise ConfigError(
                f"data.encoding is {shown(self.encoding)}; it must be one that Python knows, such "
                "as utf-8, utf-16, latin-1, cp1252, gb18030 or shift_jis."
            )
        if codec.name == "utf-8":
            object.__setattr__(self, "encoding", "utf-8")


@dataclass(frozen=True)
class TrainingConfig(_Section):
    """How a model is trained. Raises as `ModelConfig`."""

    section = "training"
    epochs: int = recipe(10, "number of epochs", at_least=1)
    steps_per_epoch: int = recipe(200, "optimizer steps per epoch", at_least=1)
    batch_size: int = recipe(64, "sequences per batch, shared by all devices", at_least=1)
    gradient_accumulation: int = recipe(
        1, "batches per optimizer step, computed one after another in the memory of one", at_least=1
    )
    sequence_length: int = recipe(128, "tokens per sequence", at_least=1)
    learning_rate: float = recipe(3e-3, "learning rate with which the schedule begins", above=0)
    schedule: Literal["cosine", "cosine_per_step", "linear", "constant"] = recipe(
        "cosine",
        "how the learning rate falls to 0: cosine, once per epoch; cosine_per_step or linear, at "
        "every step; constant, not at all",
    )
    warmup_steps: int = recipe(
        0, "number of steps at the start in which the learning rate grows linearly",
        at_least=0, below=2**31,
    )  # fmt: skip
    weight_decay: float = recipe(0.01, "AdamW's weight decay", at_least=0)
    decay_biases: bool = recipe(
        True, "weight decay on biases and other vectors, too; false: on matrices alone"
    )
    beta1: float = recipe(0.9, "AdamW's first-moment decay", at_least=0, below=1)
    beta2: float = recipe(0.999, "AdamW's second-moment decay", at_least=0, below=1)
    epsilon: float = recipe(1e-8, "AdamW's denominator offset", above=0)
    max_grad_norm: float = recipe(1.0, "gradients are clipped to this global norm", above=0)
    dropout: float = recipe(
        0.0, "probability of dropping a unit at dropout_site", at_least=0, below=1
    )
    dropout_site: Literal["state", "between", "output"] = recipe(
        "state",
        "state: inside the recurrence; between: between layers; output: after the last layer",
    )
    input_dropout: float = recipe(
        0.0,
        "probability of dropping a unit of the embeddings, in addition to dropout",
        at_least=0,
        below=1,
    )
    between_dropout: float = recipe(
        0.0,
        "probability of dropping a unit between layers, in addition to dropout",
        at_least=0,
        below=1,
    )
    output_dropout: float = recipe(
        0.0,
        "probability of dropping a unit of the last layer's output, in addition to dropout",
        at_least=0,
        below=1,
    )
    weight_drop: float = recipe(
        0.0,
        "probability of dropping a weight of the recurrent matrices, drawn once per optimizer step",
        at_least=0,
        below=1,
    )
    ema_decay: float = recipe(
        0.0,
        "decay of a moving average of the parameters, which is then the model; 0: none",
        at_least=0,
        below=1,
    )
    random_offset: bool = recipe(
        False,
        "whether streams begin each pass over the text at a random token, as if it were a ring",
    )
    reset_probability: float = recipe(
        0.0,
        "probability of resetting a row's state before a sequence of a stream",
        at_least=0,
        below=1,
    )
    compute_dtype: Literal["float32", "bfloat16"] = recipe(
        "float32", "type of the operands of matrix products; all else is float32"
    )
    implementation: str = placement(
        "auto",
        "what computes the layers; wavefront is for GPUs but was never timed on one",
        known=IMPLEMENTATIONS,
    )
    remat: bool = placement(
        False, "recompute a sequence's √T segments for the gradient: less memory, more time"
    )
    patience: int = recipe(
        0, "epochs without a better validation loss before stopping early; 0: never", at_least=0
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
    seed: int = recipe(0, "seed of weights, batches and dropout", at_least=0, below=2**32)
    init: str = recipe(
        "", "a pretrained model's name, run folder or .safetensors file to start from; empty: none"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_product("epochs", "steps_per_epoch")
        self._check_product("batch_size", "gradient_accumulation", "sequence_length")

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
      ConfigError: the name cannot be that of a folder, or the sections do not fit together.
    """

    name: str = "custom"
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        name = self.name
        allowed = rf"[A-Za-z0-9_][A-Za-z0-9_.-]{{0,{MAX_NAME - 1}}}"
        if not (isinstance(name, str) and re.fullmatch(allowed, name)):
            raise ConfigError(
                f"name is {shown(name)}; it names a folder, so it must be at most {MAX_NAME} "
                "letters, digits, '_', '-' and '.', and begin with neither '-' nor '.'."
            )
        model, training = self.model, self.training
        self._refuse(
            model.num_layers == 1, "between_dropout", "model.num_layers is 1: nothing is between"
        )
        for site in ("between", "output"):
            twice = training.dropout > 0 and training.dropout_site == site
            reason = "training.dropout drops units there already"
            self._refuse(twice, f"{site}_dropout", reason)
        reason = f"the cell {model.cell} has no recurrent matrices"
        self._refuse(not recurrent_matrices(model.cell), "weight_drop", reason)
        batches = self.data.batches
        for name in ("random_offset", "reset_probability"):
            reason = f"only streams use it, and data.batches is {batches}"
            self._refuse(batches != "streams", name, reason)

    def _refuse(self, senseless: bool, name: str, reason: str) -> None:
        """Raise ConfigError if a field of `training` is set though it makes no sense."""
        value, default = getattr(self.training, name), getattr(TrainingConfig, name)
        if senseless and value != default:
            value, default = (str(x).lower() for x in (value, default))  # true, as TOML has it
            raise ConfigError(f"training.{name} is {value}; it must be {default}: {reason}.")


def recurrent_matrices(cell: str) -> list[str]:
    """Return the names of a cell's recurrent matrices, which all begin with U; of an MLP, none."""
    return [f.name for f in dataclasses.fields(CELLS[cell].params) if f.name.startswith("U")]


SECTIONS = {s.section: s for s in (ModelConfig, DataConfig, TrainingConfig)}


def config_names() -> list[str]:
    """Return the names that `load_config` knows, sorted."""
    return sorted(path.stem for path in config_dir().glob("*.toml"))


def load_config(name_or_path: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """Return a config that comes with the package, by name, or that of a TOML file, by path.

    If the overrides change the corpus, the config is named after both: `astra_alpha-my_text`. The
    tokenizer `sentencepiece` of a config of the package, which loses line breaks, then becomes
    `subwords`, which loses nothing, unless the overrides name one.

    Args:
      name_or_path: one of `config_names()`, or a path that ends in `.toml`.
      overrides: values by dotted name (`{"training.epochs": 5}`); "name" is the config's name.

    Raises:
      ConfigError: the name is unknown; the file is missing, cannot be read or is not TOML; or a
        section, field or value cannot be used.
    """
    path = Path(name_or_path)
    overrides = dict(overrides or {})
    of_study = path.suffix != ".toml"
    if of_study:
        known = config_names()
        if str(name_or_path) not in known:
            meant = nearest(str(name_or_path), known)
            others = f"the known ones are {', '.join(known)}, or give the path of a .toml file"
            raise ConfigError(
                f"there is no config {str(name_or_path)!r}; "
                f"{f'the nearest is {meant}' if meant else others}."
            )
        path = config_dir() / f"{name_or_path}.toml"
    try:
        table = parse_toml(read_bytes(path, at_most=MAX_BYTES))
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except ConfigError as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error
    config = from_dict({"name": path.stem, **table})
    another = overrides.get("data.corpus", config.data.corpus) != config.data.corpus
    if of_study and another and config.data.tokenizer == "sentencepiece":
        overrides.setdefault("data.tokenizer", "subwords")
    return override(config, overrides)


def override(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return the config with these values changed, named as by `load_config`.

    Raises:
      ConfigError: a field is unknown, or a value cannot be used.
    """
    corpus = config.data.corpus
    table = to_dict(config)
    overrides = dict(overrides)
    given_name = overrides.pop("name", None)
    for dotted, value in overrides.items():
        section, _, field = dotted.partition(".")
        if section not in SECTIONS or field not in _field_names(section):
            raise ConfigError(_unknown("field", dotted, dotted_names()))
        table[section][field] = value
    config = from_dict(table)
    if given_name is None and config.data.corpus != corpus:
        stem = Path(config.data.corpus).stem if config.data.corpus != "-" else "stdin"
        text = re.sub(r"[^A-Za-z0-9_.-]+", "_", stem)
        if not stem.isascii() or not text.strip("_"):  # 日本, глава 1 and роман 1: not alike
            digest = hashlib.sha256(stem.encode(errors="surrogatepass")).hexdigest()[:8]
            text = f"{text.strip('_')[:100]}-{digest}".lstrip("-")
        given_name = f"{config.name}-{text}"[:MAX_NAME]
    return config if given_name is None else dataclasses.replace(config, name=given_name)


def field_value(config: Config, dotted: str) -> Any:
    """Return a field's value by its dotted name."""
    section, _, field = dotted.partition(".")
    return getattr(getattr(config, section), field)


def parse_toml(data: bytes) -> dict[str, Any]:
    """Return the nested dictionaries of a config's TOML, in UTF-8 with or without a mark (BOM).

    Raises:
      ConfigError: it is not TOML, or larger than any config.
    """
    if len(data) > MAX_BYTES or data.count(b".") > MAX_DOTS:
        raise ConfigError(
            f"it is too large for a config: {len(data):,} bytes and {data.count(b'.'):,} dots; "
            f"at most {MAX_BYTES:,} and {MAX_DOTS:,} are allowed."
        )
    if b"\0" in data:
        raise ConfigError("it has bytes of 0, as UTF-16 does; save it as UTF-8.")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))  # Windows begins files with a mark
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8; brackets in brackets
        raise ConfigError(f"{error}.") from error


def from_dict(table: Mapping[str, Any]) -> Config:
    """Return a config from nested dictionaries, as `tomllib` and `to_dict` return them.

    Raises:
      ConfigError: a section, field or value cannot be used; if unknown, the nearest one is named.
    """
    for key in table:
        if key not in SECTIONS and key != "name":
            raise ConfigError(_unknown("section", key, SECTIONS))
    sections = {}
    for section, cls in SECTIONS.items():
        fields = table.get(section, {})
        if not isinstance(fields, Mapping):
            raise ConfigError(f"{section} is {shown(fields)}; it must be a table ([{section}]).")
        for field in fields:
            if field not in _field_names(section):
                raise ConfigError(_unknown("field", f"{section}.{field}", dotted_names()))
        sections[section] = cls(**fields)
    return Config(name=table.get("name", "custom"), **sections)


def to_dict(config: Config) -> dict[str, Any]:
    """Return the config as nested dictionaries; `from_dict` is the inverse."""
    return dataclasses.asdict(config)


def about(name: str) -> str:
    """Return what a config that comes with the package is for: the comment that begins its file."""
    first = (config_dir() / f"{name}.toml").read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("# ") if first.startswith("# ") else ""


def dotted_names(*roles: Role) -> list[str]:
    """Return the dotted names of the fields with these roles, by default of all, in order."""
    return [
        f"{section}.{field.name}"
        for section, cls in SECTIONS.items()
        for field in dataclasses.fields(cls)
        if not roles or field.metadata["role"] in roles
    ]


def config_dir() -> Path:
    """Return the folder of the configs: inside an installed wheel, or beside the package."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def _field_names(section: str) -> list[str]:
    return [field.name for field in dataclasses.fields(SECTIONS[section])]


ALSO_CALLED = {
    "model.cell": "rnn_type cell_type model_type arch",
    "model.embedding_dim": "embed_dim embedding_size embed_size emb_size emsize n_embd d_model",
    "model.hidden_dim": "rnn_size hidden_size num_hidden n_hidden nhid units num_units state_size",
    "model.num_layers": "n_layers n_layer nlayers layers depth",
    "data.corpus": "text dataset input file path train_file",
    "data.validation": "val validation_file val_file valid test",
    "data.encoding": "charset codec",
    "data.tokenizer_file": "model_file tokenizer_model spm",
    "data.validation_fraction": "val_fraction val_frac val_split valid_split test_split",
    "training.epochs": "num_epochs n_epochs max_epochs nepoch",
    "training.steps_per_epoch": "steps max_steps num_steps max_iters",
    "training.batch_size": "batch bs bsz minibatch_size",
    "training.gradient_accumulation": "grad_accum accumulation_steps accumulate",
    "training.sequence_length": "seq_len seq_length block_size context bptt",
    "training.learning_rate": "lr step_size rate",
    "training.schedule": "scheduler lr_scheduler lr_schedule",
    "training.warmup_steps": "warmup warmup_iters",
    "training.weight_decay": "wd decay l2",
    "training.beta1": "b1 momentum",
    "training.beta2": "b2",
    "training.epsilon": "eps",
    "training.max_grad_norm": "clip grad_clip clip_norm gradient_clipping",
    "training.dropout": "dropout_rate drop p_drop",
    "training.input_dropout": "dropouti emb_dropout embedding_dropout embd_pdrop",
    "training.between_dropout": "dropouth hidden_dropout",
    "training.output_dropout": "head_dropout",
    "training.weight_drop": "wdrop weight_dropout dropconnect drop_connect",
    "training.ema_decay": "ema ema_rate weight_ema averaging",
    "training.compute_dtype": "precision bf16 dtype amp mixed_precision",
    "training.implementation": "unroll backend",
    "training.remat": "gradient_checkpointing",
    "training.patience": "early_stopping",
    "training.seed": "random_seed",
    "training.init": "pretrained init_from finetune",
}
"""Names of the fields in other programs that are not spelled like ours."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is probably meant, or None.

    Best is the same word in another section, or a field that other programs give that name; then a
    field that begins with it or is spelled much alike, rather in the same section than in another.
    """

    def split(dotted: str) -> tuple[str, str]:
        # a longer one is not a misspelling, and takes seconds
        section, _, word = dotted.strip("-")[:200].replace("-", "_").rpartition(".")
        return section, word

    section, word = split(name)

    def likeness(other: str) -> float:
        theirs, field = split(other)
        if word == field or word in ALSO_CALLED.get(f"{theirs}.{field}", "").split():
            return 3
        alike = difflib.SequenceMatcher(None, word, field).ratio()
        if len(word) >= 3 and field.startswith(word):
            alike = 0.9
        return (alike + (theirs == section)) * (alike >= 0.7)

    best = max(known, key=likeness)
    return best if likeness(best) > 0 else None


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    known = list(known)
    meant = nearest(name, known)
    meant = f"the nearest is {meant!r}" if meant else f"there are {', '.join(known)}"
    return f"there is no {kind} {name!r} in a config; {meant}."


def _as_type(name: str, value: Any, type_: Any) -> Any:
    """Return `value` as the field's type. Raises a ConfigError that says what would be right."""
    if get_origin(type_) is Literal:
        if value not in get_args(type_):
            choices = ", ".join(get_args(type_))
            raise ConfigError(f"{name} is {shown(value)}; it must be one of {choices}.")
        return value
    if (type_, type(value)) == (float, int):
        value = float(value) if abs(value) < 2**1023 else math.inf  # float() would raise
    if not isinstance(value, type_) or (type_, type(value)) == (int, bool):
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
        raise ConfigError(f"{name} is {shown(value)}; it must be {words[type_]}.")
    if type_ is str and re.search("[\ud800-\udfff]", value):  # of a file name
        raise ConfigError(f"{name} is {value!r}, which is not UTF-8.")
    if type_ is int and abs(value) >= 2**40:
        raise ConfigError(f"{name} is too large; it must be below 2^40.")
    if type_ is float and not math.isfinite(value):
        raise ConfigError(f"{name} is {value}; it must be finite.")
    return value


def _in_float32(value: float) -> float:
    """Return the value that a float has on a device: rounded, and 0 below float32's normal ones."""
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(value))
    return rounded if abs(rounded) >= np.finfo(np.float32).tiny else 0.0


_BOUNDS = {"at_least": operator.ge, "above": operator.gt, "below": operator.lt}


def _holds(value: Any, bounds: Mapping[str, float]) -> bool:
    return all(_BOUNDS[bound](value, limit) for bound, limit in bounds.items())


def _check_bounds(name: str, value: Any, bounds: Mapping[str, float]) -> None:
    on_device = _in_float32(value) if isinstance(value, float) else value
    too_large = on_device in (math.inf, -math.inf)
    if too_large or not _holds(on_device, bounds):
        limits = [f"{bound.replace('_', ' ')} {limit}" for bound, limit in bounds.items()]
        wanted = " and ".join(limits + ["below 2^128"] * too_large)
        rounded = f", which is {on_device} in float32" if _holds(value, bounds) else ""
        raise ConfigError(f"{name} is {value}{rounded}; it must be {wanted}.")
