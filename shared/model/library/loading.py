"""Load a folder through the library, and check that its layers and our attention give the library's own results.

folder -> refused by its files? -> network -> survey (what do its layers ask?) -> LibraryModel -> check
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from shared.config.models.folder_facts import facts_of
from shared.config.models.model_folder import CONFIG, ModelFolder, read_folder
from shared.config.settings.frozen import LIBRARY, LIBRARY_RANKS
from shared.core.errors import BatonError, ConfigError
from shared.device.group import RankGroup
from shared.kernel.product.libraries import has_triton
from shared.model.formats import choice
from shared.model.formats.hf_config import folder_name, vocab_size_of
from shared.model.formats.opened import DTYPES, LoadOptions, context_of, settled
from shared.model.formats.quantized_folder import QuantizedFiles, open_tensors
from shared.model.formats.tensor_files import TensorFiles
from shared.model.library.attend.attention import PagedAttention
from shared.model.library.attend.device_attention import DeviceAttention
from shared.model.library.attend.indexer import keep_index
from shared.model.library.attend.latents import keep_latents
from shared.model.library.attend.layer_places import LayerShape, ModelPlaces
from shared.model.library.attend.rank_attention import RankAttention, share_of
from shared.model.library.check import bytes_difference, check_logits
from shared.model.library.kinds import LIBRARY_VERSION, check_kind, network_kind
from shared.model.library.long_factors import LongFactors, short_context_of
from shared.model.library.mapped_tensors import LateTensor, Own, as_read, mapped_bytes, mapped_tensors
from shared.model.library.model import LibraryModel, LoadedFrom, keep_positions, run, use_attention
from shared.model.library.on_device import has_experts, move_network
from shared.model.library.parts import NetworkParts, with_parts
from shared.model.library.plan import Division, divide
from shared.model.library.survey import LayerSurvey
from shared.model.math.interface import ModelSpec, StoredWeights
from shared.wire.fitting import BY_LIBRARY

if TYPE_CHECKING:
    from shared.model.library.attend.compiled_attention import CompiledAttention

SURVEYED = 8  # tokens of the survey
MOST_BOUND = 0.04  # of the check: four times 1 %
LIKE = {"kimi_k2": "deepseek_v3"}  # published types that the library lacks, and the type that has their layers

logger = logging.getLogger(__name__)


def load_library_model(
    path: Path, options: LoadOptions, group: RankGroup | None = None, device: str = "cpu"
) -> LibraryModel:
    """With `group`, load this rank's part; all ranks call it together.

    Raises ConfigError, in one sentence, for a model that the library or our attention can't run."""
    folder = read_folder(path)
    refuse_flags(folder, options, is_divided=group is not None)
    if reason := choice.why_not_ours(folder):
        logger.info("%s runs %s, because Baton's own program does not: %s", LIBRARY_VERSION, path.name, reason)
    config = checked_config(folder)
    files = open_tensors(path)
    dtype = settled(options).dtype
    with explained(path, "make its network"):
        outline = outline_of(config)
    num_bytes = bytes_in(outline, DTYPES[dtype])
    if group is None or device == "cpu":
        check_memory(files, num_bytes, options)
    limit = max_context_of(folder)
    context = context_of(limit, options.max_context)
    with explained(path, "load it"):
        division = None if group is None else division_of(files, outline, options, group, device)
        network = read_network(files, config, DTYPES[dtype], division)
        mapped = mapped_bytes(network, files) if device == "cpu" else 0
        if device != "cpu":
            move_network(network, torch.device(device))
        parts = None if group is None or division is None else NetworkParts(network, division, group)
        survey = survey_of(network, path, config, limit)
        stored = StoredWeights(files.described(), files.num_bytes, num_bytes, mapped)
        make_attention = attention_maker(survey, parts, options, device)
        attention = make_attention("auto")
        spec = replace(
            spec_of(folder, config, files, dtype, context, stored),
            needs_cpu_seq_lens=attention.needs_cpu_seq_lens,
            has_grouped_experts=device != "cpu" and has_experts(network),
        )
        source = LoadedFrom(path, options, limit, LongFactors(network))
        model = LibraryModel(network, spec, attention, survey.modules, source)
        found = check_logits(network, model, parts)
        report = f"{LIBRARY_VERSION} runs {described(model.layers)}; {found}"
        if options.formats.kv != "auto":
            exact, spec = model, replace(spec, kv_dtype=options.formats.kv)
            model = LibraryModel(network, spec, make_attention(spec.kv_dtype), survey.modules, source)
            report += f"; with KV in {spec.kv_dtype} they differ by {bytes_difference(exact, model):.1e}"
    if group is not None:
        own_bytes = sum(parameter.nbytes for parameter in network.parameters())
        report += f"; each of {group.size} ranks has {own_bytes / num_bytes:.0%} of the weights"
    model.report = report
    model.spec = replace(model.spec, tie=found.tie)
    if group is not None and group.rank:  # rank 0 tells it
        return model
    logger.info("checked against the library: %s", model.report)
    if found.bound > MOST_BOUND:
        logger.warning("the library's own results differ by over 1 %: a wrong mask could pass; try --dtype float32")
    return model


def division_of(
    files: TensorFiles, outline: PreTrainedModel, options: LoadOptions, group: RankGroup, device: str
) -> Division:
    """Raise ConfigError for a network that can't be divided, and for a part that doesn't fit on this rank's GPU."""
    division = divide(outline, files.names(), group.rank, group.size)
    if device != "cpu":
        check_memory(files, division.num_numbers(outline) * DTYPES[settled(options).dtype].itemsize, options)
    return division


def check_memory(files: TensorFiles, num_bytes: int, options: LoadOptions) -> None:
    """Raise ConfigError if weights of `num_bytes` don't fit, on the device or on their way there."""
    is_widened = isinstance(files, QuantizedFiles)
    # the library merges experts' tensors, so that widened ones are there twice for a while
    is_twice = is_widened and any(".experts." in name for name in files.names())
    on_host = 2 * num_bytes if is_twice else num_bytes
    if options.memory is None:
        options.check_memory(on_host)
        return
    options.check_memory(num_bytes)
    if is_widened:  # in the host's memory, while plain tensors come from the mapped files
        replace(options, memory=None).check_memory(on_host)


@contextlib.contextmanager
def explained(folder: Path, task: str) -> Iterator[None]:
    """Turn any error of the library into one sentence, because a folder can be wrong in many ways."""
    try:
        yield
    except (BatonError, torch.OutOfMemoryError):  # who loads it says what to do about memory
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{folder}: {LIBRARY_VERSION} can't {task}: {type(error).__name__}: {first}") from error


def described(layers: Sequence[LayerShape]) -> str:
    """Describe the layers, equal ones together."""
    kinds = Counter(layers).items()
    return ", ".join(f"{count} layers with {kind}" for kind, count in kinds)


def refuse_flags(folder: ModelFolder, options: LoadOptions, *, is_divided: bool) -> None:
    formats, of = options.formats, choice.described(folder)
    asked = {
        "--lora": bool(options.adapters),
        "--lora-dir": bool(options.lora_slots),
        "--weight-dtype": formats.weights != "auto",
        "--deterministic": options.kernels == "fixed",
    }
    LIBRARY.refuse(asked, of=of)
    LIBRARY_RANKS.refuse({"--kv-dtype": is_divided and formats.kv != "auto"}, given="--tp with", of=of)


def checked_config(folder: ModelFolder) -> PreTrainedConfig:
    """Raise ConfigError for what can be refused without weights. Code in the folder (auto_map) is never run."""
    path = folder.path
    with explained(path, "read its config.json"):
        config = read_config(folder)
        check_kind(path, config)
    max_context_of(folder)
    short_context_of(config)
    return config


def read_config(folder: ModelFolder) -> PreTrainedConfig:
    like = LIKE.get(str(folder.config.get("model_type")))
    if like is not None:
        return CONFIG_MAPPING[like].from_dict({**folder.config, "model_type": like})
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder.path, trust_remote_code=False, local_files_only=True)
    return config


def max_context_of(folder: ModelFolder) -> int:
    """Return the number of positions that the network was made for."""
    limit = facts_of(folder).context_length
    if limit < SURVEYED:
        raise ConfigError(f"{folder.path / CONFIG}: max_position_embeddings is {limit}, and {SURVEYED} is the least")
    return limit


def spec_of(
    folder: ModelFolder,
    config: PreTrainedConfig,
    files: TensorFiles,
    dtype: str,
    max_context: int,
    stored: StoredWeights,
) -> ModelSpec:
    path, facts, short_context = folder.path, facts_of(folder), short_context_of(config)
    size, librarys = vocab_size_of(path, facts), config.get_text_config().vocab_size
    if size != librarys:  # then the router would take other ids for tokens than this node
        raise ConfigError(f"{path / CONFIG}: {LIBRARY_VERSION} reads a vocab_size of {librarys}, and Baton {size}")
    return ModelSpec(
        name=folder_name(path),
        vocab_size=size,
        max_context=max_context,
        dtype=dtype,
        weights_hash=f"{files.content_hash()}{BY_LIBRARY}{LIBRARY_VERSION}",  # another version may round in another way
        eos_ids=facts.eos_ids,
        stored=stored,
        library=LIBRARY_VERSION,
        short_context=short_context if short_context < max_context else 0,
    )


def outline_of(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the network without numbers."""
    with torch.device("meta"):
        outline: PreTrainedModel = network_kind(config)._from_config(config)
    return outline


def bytes_in(outline: PreTrainedModel, dtype: torch.dtype) -> int:
    """Return what the network's weights take in memory."""
    return sum(parameter.numel() for parameter in outline.parameters()) * dtype.itemsize


def read_network(
    files: TensorFiles, config: PreTrainedConfig, dtype: torch.dtype, division: Division | None = None
) -> PreTrainedModel:
    """The tensors come from the files that are hashed, whatever files an index or config.json names.

    With `division`, only this rank's part of a tensor stays in memory."""
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()  # it warns of each tensor that is not read
    own = as_read if division is None else functools.partial(division.own, copied=isinstance(files, QuantizedFiles))
    tensors = tensors_of(files, files.names(), dtype, own)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):  # NVIDIA's folders may have it in a file of its own
            del part.quantization_config
    whole_kind = network_kind(config)
    kind: Any = whole_kind if division is None else with_parts(whole_kind, division)
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
    unread = [name for name, tensor in tensors.items() if not tensor.is_read]
    if unread:
        parts = ", ".join(left_out(unread, tensors.keys() - {*unread}))
        logger.info("not read: %.1f MiB (%s)", files.num_numbers(unread) * dtype.itemsize / 2**20, parts)
    network.eval()
    keep_own(network)
    return network


def keep_own(network: PreTrainedModel) -> None:
    """Let layers give Baton's attention what pages keep, instead of what the library's cache keeps."""
    keep_latents(network)
    keep_index(network)
    keep_positions(network)


def left_out(unread: Sequence[str], read: Iterable[str]) -> list[str]:
    """Return the shortest beginnings of the names `unread` that no name of `read` has."""
    taken = {part for name in read for part in itertools.accumulate(name.split("."), "{}.{}".format)}
    begun = ((name, itertools.accumulate(name.split("."), "{}.{}".format)) for name in unread)
    return sorted({next((part for part in parts if part not in taken), name) for name, parts in begun})


def tensors_of(
    files: TensorFiles, names: frozenset[str], dtype: torch.dtype, own: Own = as_read
) -> dict[str, LateTensor]:
    """Return the tensors that the library takes, by name. `own`: returns the part that this process keeps."""
    files.check_scales(names)
    if isinstance(files, QuantizedFiles):
        widened = functools.partial(files.tensor, dtype=dtype)
        return {name: LateTensor(widened, name, own) for name in names}
    return mapped_tensors(files, names, own)


def attention_maker(
    survey: LayerSurvey, parts: NetworkParts | None, options: LoadOptions, device: str
) -> Callable[[str], PagedAttention]:
    """Return what makes the attention for a `kv_dtype` of ModelSpec."""
    if parts is not None and device != "cpu":
        return functools.partial(own_pages_attention, survey, options.kernels, device)
    compiled = compiled_attention(survey.layers, options, device)
    if parts is not None:
        return lambda _: rank_attention(survey, parts, compiled)
    return functools.partial(
        whole_attention, survey.layers, options.kernels, device, compiled=compiled, called=survey.called
    )


def whole_attention(
    layers: Sequence[LayerShape],
    kernels: str,
    device: str,
    kv_dtype: str = "auto",
    places: ModelPlaces | None = None,
    compiled: CompiledAttention | None = None,
    called: Sequence[int] | None = None,
) -> PagedAttention:
    """Make the attention of layers that are not divided. The last four: of PagedAttention."""
    if device == "cpu" and kernels != "triton":
        return PagedAttention(layers, kv_dtype, places, compiled, called)
    use_kernels = kernels == "triton" or (kernels != "torch" and device.startswith("cuda") and has_triton())
    return DeviceAttention(layers, kv_dtype, places, use_kernels=use_kernels, called=called)


def compiled_attention(layers: Sequence[LayerShape], options: LoadOptions, device: str) -> CompiledAttention | None:
    """Return our kernels for a CPU; None if others must attend."""
    if device != "cpu" or options.kernels in ("torch", "triton"):
        return None
    from shared.model.library.attend.compiled_attention import CompiledAttention, kernels_know  # imports numba

    if kernels_know(layers):
        return CompiledAttention(options.own_team(), any(layer.window or layer.num_unread for layer in layers))
    logger.info("attention runs on plain torch: no kernel for %s", layers[0])
    return None


def rank_attention(survey: LayerSurvey, parts: NetworkParts, compiled: CompiledAttention | None) -> RankAttention:
    found = zip(survey.layers, survey.modules, strict=True)
    layers, shares = zip(*(share_of(layer, parts.divides_heads(own), parts.group) for layer, own in found), strict=True)
    return RankAttention(layers, shares, parts.group, compiled, survey.called)


def own_pages_attention(survey: LayerSurvey, kernels: str, device: str, kv_dtype: str = "auto") -> PagedAttention:
    """Make the attention of a rank with own pages: they have the heads that the rank's layers ask for.

    Where the plan doesn't divide the heads, every rank attends with all of them, and nothing is exchanged."""
    attention = whole_attention(survey.layers, kernels, device, kv_dtype, called=survey.called)
    attention.is_divided = True
    return attention


def survey_of(network: PreTrainedModel, folder: Path, config: PreTrainedConfig, limit: int) -> LayerSurvey:
    """Raise ConfigError for what our attention can't do."""
    survey = LayerSurvey(limit)
    use_attention(network, survey, survey.mask)
    ids = torch.arange(SURVEYED, device=network.device)[None]
    task = f"run {config.model_type} from token ids and positions alone"
    with explained(folder, task), torch.inference_mode():
        run(network, ids, ids, ids[0, -1:])
    survey.check_layers(config.get_text_config().num_hidden_layers)
    if survey.problems:
        raise ConfigError(f"{folder}: {config.model_type} can't be served: {survey.problems[0]}")
    return survey
