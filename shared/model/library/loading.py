"""Load a folder through the library, and check that its layers and our attention give the library's own results.

folder -> refused by its files? -> network -> survey (what do its layers ask?) -> LibraryModel -> check
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from shared.config.frozen import LIBRARY
from shared.core.errors import BatonError, ConfigError
from shared.model.hf_config import eos_ids_of, folder_name
from shared.model.interface import ModelSpec, StoredWeights
from shared.model.library.attention import LayerShape, PagedAttention
from shared.model.library.check import bytes_difference, check_logits
from shared.model.library.model import LibraryModel, run, use_attention
from shared.model.library.survey import LayerSurvey
from shared.model.opened import DTYPES, LoadOptions, settled
from shared.model.quantized_folder import QuantizedFiles, open_tensors
from shared.model.tensor_files import TensorFiles

SURVEYED = 8  # tokens of the survey
MOST_POSITIONS = 1 << 26
MOST_BOUND = 0.04  # of the check: four times 1 %
LONGROPE = "longrope"
LIBRARY_VERSION = f"transformers {transformers.__version__}"

logger = logging.getLogger(__name__)


def load_library_model(folder: Path, options: LoadOptions) -> LibraryModel:
    """Raises ConfigError, in one sentence, for a model that the library or our attention can't run."""
    refuse_flags(folder, options)
    config = checked_config(folder)
    files = open_tensors(folder)
    dtype = settled(options).dtype
    num_bytes = files.num_numbers() * DTYPES[dtype].itemsize
    options.check_memory(2 * num_bytes if isinstance(files, QuantizedFiles) and has_experts(files) else num_bytes)
    limit = max_context_of(folder, config)
    spec = spec_of(folder, config, files, dtype, context_of(options, limit), num_bytes)
    with explained(folder, "load it"):
        network = read_network(files, config, DTYPES[dtype])
        survey = survey_of(network, folder, config, limit)
        model = LibraryModel(network, spec, survey, limit)
        found = check_logits(network, model)
        report = f"{LIBRARY_VERSION} runs {described(model.layers)}; {found}"
        if options.formats.kv != "auto":
            exact, model = model, LibraryModel(network, replace(spec, kv_dtype=options.formats.kv), survey, limit)
            report += f"; with KV in {options.formats.kv} they differ by {bytes_difference(exact, model):.1e}"
    model.report = report
    logger.info("checked against the library: %s", model.report)
    if found.bound > MOST_BOUND:
        logger.warning("the library's own results differ by over 1 %: a wrong mask could pass; try --dtype float32")
    return model


def has_experts(files: TensorFiles) -> bool:
    """Return whether the library merges tensors, so that widened ones are there twice for a while."""
    return any(".experts." in name for name in files.names())


@contextlib.contextmanager
def explained(folder: Path, task: str) -> Iterator[None]:
    """Turn any error of the library into one sentence, because a folder can be wrong in many ways."""
    try:
        yield
    except BatonError:
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{folder}: {LIBRARY_VERSION} can't {task}: {type(error).__name__}: {first}") from error


def described(layers: Sequence[LayerShape]) -> str:
    """Describe the layers, equal ones together."""
    kinds = Counter(layers).items()
    return ", ".join(f"{count} layers with {kind}" for kind, count in kinds)


def refuse_flags(folder: Path, options: LoadOptions) -> None:
    formats = options.formats
    asked = {
        "--lora": bool(options.adapters),
        "--lora-dir": bool(options.lora_slots),
        "--weight-dtype": formats.weights != "auto",
        "--deterministic": options.kernels == "fixed",
    }
    LIBRARY.refuse(asked, of=folder.name)


def checked_config(folder: Path) -> PreTrainedConfig:
    """Raise ConfigError for what can be refused without weights. Code in the folder (auto_map) is never run."""
    with explained(folder, "read its config.json"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"{folder}: {LIBRARY_VERSION} has no text model of type {config.model_type}")
    if getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_is_stateful", False):
        raise ConfigError(f"{folder}: {config.model_type} keeps a state beside keys and values, which pages can't hold")
    max_context_of(folder, config)
    return config


def max_context_of(folder: Path, config: PreTrainedConfig) -> int:
    """Return the number of positions that the network was made for."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or not SURVEYED <= limit <= MOST_POSITIONS:
        raise ConfigError(f"{folder / 'config.json'} has no max_position_embeddings, or one that can't be")
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):  # one, or one for each kind of layer
        if isinstance(rope, dict) and rope.get("rope_type") == LONGROPE:
            # Longer texts have other frequencies, which the library takes for the whole step, and for all rows in it.
            limit = min(limit, int(rope.get("original_max_position_embeddings") or limit))
    return limit


def context_of(options: LoadOptions, limit: int) -> int:
    if options.max_context > limit:
        raise ConfigError(f"--max-context is {options.max_context}; this model was made for at most {limit}")
    return options.max_context or limit


def spec_of(
    folder: Path, config: PreTrainedConfig, files: TensorFiles, dtype: str, max_context: int, num_bytes: int
) -> ModelSpec:
    """`num_bytes`: of the weights in memory."""
    text = config.get_text_config()
    return ModelSpec(
        name=folder_name(folder),
        vocab_size=text.vocab_size,
        max_context=max_context,
        dtype=dtype,
        weights_hash=f"{files.content_hash()} by {LIBRARY_VERSION}",  # another version may round in another way
        eos_ids=eos_ids_of(folder, text.eos_token_id),
        stored=StoredWeights(files.described(), files.num_bytes, num_bytes),
        needs_cpu_seq_lens=PagedAttention.needs_cpu_seq_lens,
        library=LIBRARY_VERSION,
    )


def read_network(files: TensorFiles, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The tensors come from the files that are hashed, whatever files an index or config.json names."""
    transformers.logging.disable_progress_bar()
    files.check_scales(files.names())
    if isinstance(files, QuantizedFiles):
        del config.quantization_config
        tensors = {name: files.tensor(name, dtype) for name in files.names()}
    else:
        tensors = {name: files.tensor(name) for name in files.names()}  # in the mapped files, which nodes share
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    loaded = kind.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=dtype,
        attn_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
    )
    network: PreTrainedModel = loaded[0]
    missing = loaded[1]["missing_keys"]
    if missing:  # the library would make them up
        raise ConfigError(f"{files.path} lacks tensors: {', '.join(sorted(missing)[:4])}")
    network.eval()
    return network


def survey_of(network: PreTrainedModel, folder: Path, config: PreTrainedConfig, limit: int) -> LayerSurvey:
    """Raise ConfigError for what our attention can't do."""
    survey = LayerSurvey(limit)
    use_attention(network, survey, survey.mask)
    ids = torch.arange(SURVEYED)[None]
    task = f"run {config.model_type} from token ids and positions alone"
    with explained(folder, task), torch.inference_mode():
        run(network, ids, ids, torch.tensor([SURVEYED - 1]))
    survey.check_layers(config.get_text_config().num_hidden_layers)
    if survey.problems:
        raise ConfigError(f"{folder}: {config.model_type} can't be served: {survey.problems[0]}")
    return survey
