"""Open a model's files and settle how to load them.

    name, LoadOptions -> open_named -> OpenedModel -> one model | stages | a rank's part
                                    -> EncoderFolder | LibraryFolder
                                    -> None for HashLM and scripted, which have no files

open_named reads only the headers of model files, but reads whole adapters, so that errors show early.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeGuard

import torch

from shared.config.machine.host_memory import host_memory
from shared.config.models.model_folder import read_folder
from shared.config.models.model_path import resolve_model
from shared.core.errors import ConfigError
from shared.core.overshoot import loop_depth, overshoot
from shared.device.gpu import MemoryInfo, gib
from shared.kernel.attention.attention import page_hadamard
from shared.kernel.attention.flash_infer import LibraryAttention
from shared.kernel.product.block_weights import int8_format
from shared.kernel.product.libraries import has_amx, has_fused_products, multiplies_bytes_best
from shared.kernel.team.team import Team
from shared.model.formats.choice import uses_library
from shared.model.formats.gguf_file import GgufFile
from shared.model.formats.lora_file import LoraFolder
from shared.model.formats.packed_folder import PackedFolder
from shared.model.formats.safetensors_folder import SafetensorsFolder
from shared.model.math.config import LlamaConfig
from shared.model.math.interface import AdapterSpec, ModelSpec, StoredWeights, path_digest
from shared.model.math.kernels import AS_DTYPE, Formats, Kernels, attention_shape, pick_kernels
from shared.model.math.weights import IN_BLOCKS, IN_FP8, OF_FILES, TensorSource, weights_bytes

MOST_WIDTH, MOST_STAGES = 16, 64  # the largest --spec-width and --pp
# number of positions that a step may use past the context
WINDOW_SLACK = overshoot(MOST_WIDTH, loop_depth(True, MOST_STAGES))
# suffixes of the weights' hash: nodes with different formats must not pair
HASH_ENDS = {
    "auto": "", "fp8": " fp8", "fp8-dynamic": " fp8 rows", "int8": " int8 blocks", "file": " file blocks",
    "codes": " file codes",
}  # fmt: skip
# --deterministic adds this suffix, because the flag promises equal KV for equal prompts
FIXED_END = " fixed tiles"
PLAIN_END = ", plain torch"  # on a CPU without compiled products: torch's sums have another order than theirs
AUTO = "auto"
CPU = torch.device("cpu")
COMPILED = ("auto", "separate")  # LoadOptions.kernels
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    dtype: str = "bfloat16"  # or "auto", which `settled` replaces
    max_context: int = 0  # in tokens; 0: the model's maximum
    threads: int = 1  # threads of each stage or model, if `team` is None
    team: Team | None = None
    kernels: str = "auto"  # "separate": each compiled kernel called from Python; "torch": plain torch only;
    # "triton": kernels for a GPU; "fixed": the same in tiles of one size
    adapters: Mapping[str, str] = field(default_factory=dict)  # LoRA folders, by clients' names
    lora_slots: int = 0  # spare slots for adapters that are loaded while the model runs
    formats: Formats = AS_DTYPE
    packed: PackedFolder | None = None  # None: packed weights stay in this process's memory
    library: str = AUTO  # "baton" or "transformers"; "auto": Baton for its own families
    memory: MemoryInfo | None = None  # memory of the weights' device; None: the host's
    attention: LibraryAttention | None = None  # may compute attention on a GPU

    def check_memory(self, need: int) -> None:
        memory = self.memory or _host_memory()
        if need > memory.free_bytes:
            raise ConfigError(
                f"the weights need {gib(need)}, and {gib(memory.free_bytes)} of {gib(memory.total_bytes)} are free: "
                "take a smaller model, --dtype bfloat16, --weight-dtype int8 or fp8, or close other programs"
            )

    def own_team(self) -> Team:
        return self.team or Team(self.threads)

    def path_adapters(self) -> tuple[AdapterSpec, ...]:
        """Return HashLM's adapters, identified by path because no file is read."""
        return tuple(AdapterSpec(name, path_digest(path)) for name, path in self.adapters.items())


def _host_memory() -> MemoryInfo:
    total, available = host_memory()
    return MemoryInfo(available, total)


AS_GIVEN = LoadOptions()


def int8_bytes_per_weight(config: LlamaConfig, plain_bytes: int) -> float:
    experts = [] if config.experts is None else [config.experts.intermediate_size]
    sizes = [config.hidden_size, config.intermediate_size, config.q_size, *experts]
    return max(plain_bytes if form is None else form.bytes_per_weight for form in map(int8_format, sizes))


@dataclass(frozen=True, slots=True)
class EncoderFolder:
    path: Path


@dataclass(frozen=True, slots=True)
class LibraryFolder:
    """A folder that the library transformers runs."""

    path: Path


@dataclass(frozen=True, slots=True)
class OpenedModel:
    source: TensorSource
    options: LoadOptions
    context: int
    folders: Mapping[str, LoraFolder]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.options.dtype]

    @property
    def num_positions(self) -> int:
        return self.context + WINDOW_SLACK

    def check_memory(self, config: LlamaConfig) -> None:
        """Raise ConfigError if the weights of the part that `config` describes exceed free memory."""
        self.options.check_memory(self.weights_bytes(config))

    def weights_bytes(self, config: LlamaConfig) -> int:
        item, head_item = self._bytes_per_weight()
        return weights_bytes(config, self.dtype, self.context, item, head_item)

    def _bytes_per_weight(self) -> tuple[float | None, float]:
        """Return bytes per weight in the layers (None: the dtype's) and in the head."""
        form = self.options.formats.weights
        if form == "auto":
            return None, 4
        if form in IN_FP8:
            return 1, 4
        if form in OF_FILES and in_blocks(self.source):
            mean = self.source.bytes_per_weight(self.dtype.itemsize, in_codes=form == "codes")
        else:
            mean = int8_bytes_per_weight(self.source.config, self.dtype.itemsize)
        return mean, mean

    def pick_kernels(self, config: LlamaConfig, device: torch.device) -> Kernels:
        asked = self.options
        team, formats = asked.own_team(), asked.formats
        return pick_kernels(config, self.dtype, device, team, asked.kernels, formats, asked.attention)

    def spec(self, attention: str = "", device: torch.device = CPU) -> ModelSpec:
        """Reads all files for their hash. `attention`: the library that attends, which needs exact lengths on the host,
        or "" for our own kernels. `device`: the weights'. Nodes with different ones must not pair."""
        config, formats = self.source.config, self.options.formats
        narrow = HASH_ENDS[formats.weights] + (FIXED_END if self.options.kernels == "fixed" else "")
        narrow += f", attention of {attention}" if attention else ""
        narrow += PLAIN_END if device.type == "cpu" and not has_fused_products() else ""
        return ModelSpec(
            name=config.name,
            vocab_size=config.vocab_size,
            max_context=self.context,
            dtype=self.options.dtype,
            weights_hash=self.source.content_hash() + narrow,
            eos_ids=config.eos_ids,
            adapters=tuple(AdapterSpec(name, folder.digest) for name, folder in self.folders.items()),
            kv_dtype=formats.kv,
            weight_dtype=formats.weights,
            stored=StoredWeights(*self.source.stored(), self.weights_bytes(config)),
            needs_cpu_seq_lens=bool(attention),
        )


def open_named(
    name: str, options: LoadOptions, device: str = "cpu"
) -> OpenedModel | EncoderFolder | LibraryFolder | None:
    """Open smollm2, a .gguf file or a Hugging Face folder; return None for hashlm and scripted. Raises ConfigError."""
    path = resolve_model(name).path
    if path is None:
        if options.formats != AS_DTYPE:
            raise ConfigError(f"--kv-dtype and --weight-dtype are for models with weights, not {name}")
        return None
    if options.dtype != AUTO and options.dtype not in DTYPES:
        raise ConfigError(f"--dtype is {options.dtype!r}; it must be one of {', '.join((AUTO, *DTYPES))}")
    folder = read_folder(path)
    if folder.has_encoder:
        return EncoderFolder(path)
    if uses_library(folder, options.library):
        return LibraryFolder(path)
    source = open_model(path, options.max_context)
    options = settled(options, source, device)
    if options.formats.weights in OF_FILES and not in_blocks(source):
        raise ConfigError(f"--weight-dtype {options.formats.weights}: {path} has plain numbers: take auto or int8")
    context = context_of(source.config.max_context, options.max_context)
    folders = {name: LoraFolder(Path(own).expanduser(), source.config) for name, own in options.adapters.items()}
    return OpenedModel(source, options, context, folders)


def settled(options: LoadOptions, source: TensorSource | None = None, device: str = "cpu") -> LoadOptions:
    """Replace dtype "auto" by bfloat16. On a CPU a GGUF file then keeps its blocks, or becomes codes or int8; so does a
    quantised folder that would not fit. With weights in blocks, KV becomes int8 if attention multiplies integers.

    Machines with other instructions then disagree.
    """
    if options.dtype != AUTO:
        return options
    formats = options.formats
    if device == "cpu" and source is not None:
        if formats.weights == "auto":
            formats = replace(formats, weights=_own_choice(source, options))
        if formats.kv == "auto" and formats.weights in IN_BLOCKS and keeps_integers(source.config):
            formats = replace(formats, kv="int8")
    return replace(options, dtype="bfloat16", formats=formats)


def _own_choice(source: TensorSource, options: LoadOptions) -> str:
    if isinstance(source, SafetensorsFolder) and not _is_too_large(source, options):
        return "auto"
    if in_blocks(source):
        return _best_of_blocks(source, options)
    return "int8" if isinstance(source, SafetensorsFolder) else "auto"


def _is_too_large(source: SafetensorsFolder, options: LoadOptions) -> bool:
    """Return whether a quantised folder's widened weights need more than the machine has. With its free memory instead,
    two nodes of one machine could decide differently."""
    if source.quantised is None:
        return False
    context = context_of(source.config.max_context, options.max_context)
    memory = options.memory or _host_memory()
    return weights_bytes(source.config, torch.bfloat16, context) > memory.total_bytes


def _best_of_blocks(source: GgufFile | SafetensorsFolder, options: LoadOptions) -> str:
    if options.kernels in COMPILED and source.has_codes and has_amx():
        return "codes"
    return "int8" if options.kernels in COMPILED and multiplies_bytes_best() else "file"


def keeps_integers(config: LlamaConfig) -> bool:
    return page_hadamard(attention_shape(config), torch.int8) > 1


def in_blocks(source: TensorSource | None) -> TypeGuard[GgufFile | SafetensorsFolder]:
    return isinstance(source, (GgufFile, SafetensorsFolder)) and source.has_blocks


def open_model(path: Path, max_context: int = 0) -> TensorSource:
    return SafetensorsFolder(path) if path.is_dir() else GgufFile(path, max_context)


def context_of(limit: int, asked: int) -> int:
    if asked > limit:
        raise ConfigError(f"--max-context is {asked}; this model was made for at most {limit}")
    return asked or limit
