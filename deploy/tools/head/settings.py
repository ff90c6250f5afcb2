"""Options of `baton head`. The classes' fields define flags, limits and help texts."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.hub_settings import OFFLINE_HELP
from shared.config.options import check_fields, option
from shared.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Recipe:
    """the recipe of a training run; every field affects the result"""

    steps: int = option(
        4,
        "drafts of a chain to train (training-time test): two at first, N at the end",
        low=1,
        high=8,
    )
    step_weight: float = option(0.8, "weight of a draft's loss relative to the draft before it", low=0.0, high=1.0)
    rate: float = option(2e-3, "highest learning rate: a short warm-up, then a linear fall to zero", low=0.0)
    decay: float = option(0.01, "weight decay of the inner matrices", low=0.0)
    epochs: float = option(2.0, "passes over the answers", low=0.0)
    batch_tokens: int = option(2048, "answer tokens per update, at most", low=1)
    draft_vocab: int = option(6144, "ids that the head can draft", low=1)
    max_tokens: int = option(1024, "tokens of a sequence, at most; longer sequences are cut", low=16)
    seed: int = option(0, "seed of the answers' order and of random weights")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """how a run proceeds, without effect on its result"""

    answers: tuple[str, ...] = option(
        ("answers.jsonl",), "file that `baton head answers` wrote; the flag may be repeated", metavar="FILE"
    )
    work: str = option("head-work", "folder of features, checkpoint and curve; a run resumes from it", metavar="DIR")
    save_every: float = option(180.0, "seconds between checkpoints", low=0.0)
    check_every: int = option(100, "updates between evaluations on held-out answers", low=1)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class TrainingMachine:
    """the model, and where it runs"""

    model: str = option(
        "smollm2", "the target: smollm2, a .gguf file, a Hugging Face folder, or the hub's org/name", metavar="MODEL"
    )
    offline: bool = option(False, OFFLINE_HELP)
    device: str = option("cpu", "torch device; only cpu has been tried", metavar="NAME")
    threads: int = option(1, "threads of torch", low=1)
    dtype: str = option("bfloat16", "number format of weights in matrix products", choices=("float32", "bfloat16"))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class DataSettings:
    """the prompts to read, and the answers to write"""

    out: str = option("answers.jsonl", "file for the answers; a restarted run adds the missing ones", metavar="FILE")
    prompts: str = option("", 'file with one prompt per line: plain text, or {"prompt": ...}', metavar="FILE")
    invent: int = option(0, "prompts that the model invents, kept beside --out in *.invented.jsonl", low=0)
    temperatures: str = option("0,0.8", "temperatures of the answers, used in turn", metavar="LIST")
    max_new: int = option(256, "ids of an answer, at most", low=1)
    rows: int = option(32, "answers made at a time", low=1)
    data_seed: int = option(0, "seed of the random draws")

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.prompts and not self.invent:
            raise ConfigError("no prompts: give --prompts FILE, --invent N, or both")
        self.temperature_list()

    def temperature_list(self) -> tuple[float, ...]:
        try:
            values = tuple(float(part) for part in self.temperatures.split(","))
        except ValueError:
            values = ()
        if not values or not all(0 <= value <= 2 for value in values):
            raise ConfigError(f"--temperatures is {self.temperatures!r}; it must be numbers from 0 to 2, as in 0,0.8")
        return values


@dataclass(frozen=True, slots=True)
class AcceptanceSettings:
    """the prompts and draft chains for measuring acceptance"""

    head: str = option("auto", "folder of the head; auto: the head shipped for the model", metavar="DIR")
    prompts: str = option("", "one {kind, prompt} per line; empty: our own file, with five kinds", metavar="FILE")
    max_new: int = option(128, "ids of an answer, at most", low=8)
    chain: int = option(5, "drafts in a row, at most", low=1, high=16)
    rows: int = option(12, "answers made at a time", low=1)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class AnswersConfig:
    data: DataSettings
    machine: TrainingMachine


@dataclass(frozen=True, slots=True)
class TrainConfig:
    run: RunSettings
    recipe: Recipe
    machine: TrainingMachine


@dataclass(frozen=True, slots=True)
class EvaluateConfig:
    test: AcceptanceSettings
    machine: TrainingMachine


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """the run, and the folder for its head"""

    work: str = option("head-work", "the run's folder", metavar="DIR")
    out: str = option("head", "folder for config.json, model.safetensors and recipe.json", metavar="DIR")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class ImportSettings:
    """the head to import, and the folder for its copy"""

    source: str = option("", "folder with config.json and *.safetensors of a head", metavar="DIR")
    out: str = option("head", "folder for the same head under the canonical tensor names", metavar="DIR")

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.source:
            raise ConfigError("no head to import: give --source DIR")


@dataclass(frozen=True, slots=True)
class ExportConfig:
    export: ExportSettings
    machine: TrainingMachine


@dataclass(frozen=True, slots=True)
class ImportConfig:
    source: ImportSettings
    machine: TrainingMachine
