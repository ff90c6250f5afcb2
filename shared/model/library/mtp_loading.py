"""Load the MTP layers in a folder as draft heads, and check them against the library's own MtpModel.

names of tensors -> fields of the config -> MtpModel -> survey (what do its layers ask?) -> MtpHeads -> check
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.generic import ContextManagers

from shared.core.errors import ConfigError
from shared.kernel.attention.attention import AttentionInputs
from shared.kernel.code.step_layout import HostLengths, Layout
from shared.kv.pool import KVPool
from shared.model.formats.quantized_folder import open_tensors
from shared.model.formats.tensor_files import TensorFiles
from shared.model.library.attend.latents import keep_latents
from shared.model.library.attend.layer_places import LayerShape, in_first_group
from shared.model.library.check import MOST_NOISE, difference, least_noise, use_other_attention
from shared.model.library.kinds import LIBRARY_VERSION
from shared.model.library.loading import (
    SURVEYED,
    compiled_attention,
    described,
    explained,
    tensors_of,
    whole_attention,
)
from shared.model.library.model import LibraryModel, use_attention
from shared.model.library.mtp import MtpHead, MtpLayers
from shared.model.library.on_device import GROUPED, has_experts
from shared.model.library.survey import LayerSurvey

PLANES = "mtp"  # beginning of the planes' names
# the library lacks their MTP layers' names or shape, or the mask that indexers read
NOT_KNOWN = ("deepseek_v32", "ernie4_5_moe", "glm_moe_dsa", "hy_v4", "longcat_flash", "mimo_v2_flash")
ATTENTION = {"exaone_moe": "full_attention"}  # of MTP layers of families whose config.json may leave it out
OTHERS = "use --spec ngram, eagle or none"
OWN_ROWS = ".transformer.shared_head.output.weight"  # end of a tensor's name, of Step 3.7
PAGE = 16
BOUNDS = (0, 13, 14, 21)  # of the check's chunks; they cross the border of a page

logger = logging.getLogger(__name__)


def load_mtp_heads(model: LibraryModel) -> list[MtpHead]:
    """Return one head per MTP layer in the model's folder, and let the model store what they read.

    Raises ConfigError, in one sentence, for a folder without MTP layers, or with layers that can't be served."""
    folder = model.source.folder
    model.capture_final()
    files = open_tensors(folder)
    names = mtp_names(model.network, files.names(), folder)
    num_layers = complete_config(model.network, names, folder)
    with explained(folder, "load its MTP layers"):
        network, own_rows = read_layers(model, files, names, num_layers)
        shapes = survey_layers(network, model)
        places = in_first_group(shapes, PLANES)
        options, device = model.source.options, model.device.type
        compiled = compiled_attention(shapes, options, device)
        attention = whole_attention(shapes, options.kernels, device, places=places, compiled=compiled)
        layers = MtpLayers(network, attention, model.source.limit, own_rows)
        report = check_layers(layers, num_layers, folder)
    logger.info("MTP layers of the library: %s; %s", described(shapes), report)
    return [MtpHead(layers, layer, f"{model.spec.weights_hash}, MTP layer {layer}") for layer in range(num_layers)]


def mtp_names(network: PreTrainedModel, names: frozenset[str], folder: Path) -> frozenset[str]:
    """Return the names of the tensors of MTP layers. Raise ConfigError if there are none."""
    found: frozenset[str] = frozenset()
    if network._keys_to_ignore_on_load_unexpected:  # the library's patterns for such names
        try:
            pattern = MtpModel.get_mtp_weights_regex(network)
        except ValueError:  # they are for networks with more layers
            pattern = None
        if pattern is not None:
            found = frozenset(name for name in names if pattern.search(name))
    if not found:
        raise ConfigError(f"--spec mtp: {folder} has no tensors of MTP layers; {OTHERS}")
    family = network.config.get_text_config().model_type
    if family in NOT_KNOWN:
        raise ConfigError(f"--spec mtp: {LIBRARY_VERSION} can't run the MTP layers of {folder} ({family}); {OTHERS}")
    return found


def complete_config(network: PreTrainedModel, names: frozenset[str], folder: Path) -> int:
    """Return the number of MTP layers. Add the fields that the library's MtpModel reads, and some configs lack."""
    config: Any = network.config.get_text_config()
    num_layers = getattr(config, "num_mtp_layers", None) or getattr(config, "num_nextn_predict_layers", None)
    if not isinstance(num_layers, int) or num_layers < 1:
        raise ConfigError(
            f"--spec mtp: {folder} has tensors of MTP layers, but its config.json doesn't say how many; {OTHERS}"
        )
    config.num_mtp_layers = num_layers
    if getattr(config, "mlp_layer_types", None) and not getattr(config, "mtp_mlp_layer_types", None):
        kind = "sparse" if any(".experts." in name for name in names) else "dense"
        config.mtp_mlp_layer_types = [kind] * num_layers
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds and not getattr(config, "mtp_layer_types", None):
        told = ATTENTION.get(config.model_type)
        if told is None and len(kinds) > 1:
            raise ConfigError(
                f"--spec mtp: {LIBRARY_VERSION} doesn't know which attention the MTP layers of {folder} have; {OTHERS}"
            )
        config.mtp_layer_types = [told or kinds.pop()] * num_layers
    return num_layers


def read_layers(
    model: LibraryModel, files: TensorFiles, names: frozenset[str], num_layers: int
) -> tuple[MtpModel, dict[int, torch.Tensor]]:
    """Return the layers, and by layer the output rows that the folder has for it alone."""
    target, dtype = model.network, model.network.dtype
    with ContextManagers(MtpModel.get_init_context(dtype, False, False, None)):
        network = MtpModel(target, num_layers)
    renames: Any = network.get_weight_conversions(target)  # the library's own types for them differ
    asked = LoadStateDictConfig(weight_mapping=renames, device_map={"": model.device}, dtype=dtype)
    tensors = tensors_of(files, names, dtype)
    own_rows = take_rows(tensors, target, model.device)
    found, _ = convert_and_load_state_dict_in_model(
        network, {library_name(name): tensors[name] for name in tensors}, asked
    )
    network._adjust_missing_and_unexpected_keys(found)
    unread = found.missing_and_mismatched()  # the library leaves such tensors as they lie in memory
    if unread:
        named = ", ".join(sorted(unread)[:4])
        raise ConfigError(
            f"--spec mtp: {LIBRARY_VERSION} doesn't find all of {files.path}'s MTP layers, in the config's sizes: "
            f"{named}; {OTHERS}"
        )
    network.tie_with_main_model(target)
    keep_latents(network)
    network.eval()
    if model.device.type != "cpu" and has_experts(network):
        network.set_experts_implementation(GROUPED)
    return network, own_rows


def library_name(name: str) -> str:
    """Step 3.7's folders have one more level in the names of a layer's last norm, which the library doesn't know."""
    return name.replace(".transformer.shared_head.", ".shared_head.")


def take_rows(tensors: dict[str, Any], target: PreTrainedModel, device: torch.device) -> dict[int, torch.Tensor]:
    """Take each layer's own output rows (vocab, H) out of the tensors. The library has only the target's."""
    own, wanted = {}, target.get_output_embeddings().weight.shape
    for name in [name for name in tensors if name.endswith(OWN_ROWS)]:
        number = int(name.removesuffix(OWN_ROWS).rpartition(".")[2])
        rows = tensors.pop(name)[...].to(device, target.dtype)
        if rows.shape != wanted:
            raise ConfigError(
                f"--spec mtp: {name} is {tuple(rows.shape)}, the target's output rows {tuple(wanted)}; {OTHERS}"
            )
        own[number - target.config.get_text_config().num_hidden_layers] = rows
    return own


def survey_layers(network: MtpModel, model: LibraryModel) -> list[LayerShape]:
    """Raise ConfigError for what our attention can't do."""
    survey = LayerSurvey(model.source.limit)
    use_attention(network, survey, survey.mask)
    ids = torch.arange(SURVEYED, device=model.device)[None]
    features = torch.zeros(1, SURVEYED, model.config.hidden_size, dtype=network.dtype, device=model.device)
    with torch.inference_mode():
        for layer in range(network.num_mtp_layers):
            network.forward_layer(layer, features, ids, None, input_ids=ids)
    survey.check_layers(network.num_mtp_layers)
    # Layer n begins with token n + 1, whose slot is n. What lies in the slots before is made of nothing.
    shapes = [replace(layer, num_unread=number) for number, layer in enumerate(survey.layers)]
    if survey.problems:
        raise ConfigError(f"--spec mtp: {model.source.folder}: its MTP layers: {survey.problems[0]}; {OTHERS}")
    return shapes


def check_layers(layers: MtpLayers, num_layers: int, folder: Path) -> str:
    """Raise ConfigError if a layer in chunks over pages differs from the library's own whole forward."""
    network, num_tokens = layers.network, BOUNDS[-1]
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(0, network.config.vocab_size, (num_tokens,), generator=draw).to(network.device)
    features = torch.randn(num_tokens, network.config.hidden_size, generator=draw).to(network.device, network.dtype)
    report = []
    with torch.inference_mode():
        for layer in range(num_layers):
            network.set_attn_implementation("eager")
            right = own_hidden(network, layer, ids, features)
            noise = noise_of(network, layer, ids, features, right)
            layers.attach()
            found = difference(paged_hidden(layers, layer, ids, features)[layer:], right, network.dtype)
            if not found <= MOST_NOISE * noise:
                raise ConfigError(
                    f"--spec mtp: MTP layer {layer} of {folder} differs from the library's by {found:.1e}; {OTHERS}"
                )
            report.append(f"{found:.1e}")
    return f"their hidden states differ by {', '.join(report)} from the library's own"


def noise_of(network: MtpModel, layer: int, ids: torch.Tensor, features: torch.Tensor, right: torch.Tensor) -> float:
    """Return how far the library's results differ from each other: of fewer tokens, and by its other attention."""
    few = BOUNDS[1]
    shorter = difference(own_hidden(network, layer, ids[:few], features[:few]), right[: few - layer], network.dtype)
    has_other = use_other_attention(network)
    other = difference(own_hidden(network, layer, ids, features), right, network.dtype) if has_other else 0.0
    return max(least_noise(network.dtype, has_other), shorter, other)


def own_hidden(network: MtpModel, layer: int, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Return the library's hidden states (T - layer, H) from slot `layer` on, where it begins, in host memory."""
    positions = torch.arange(layer, len(ids), device=ids.device)[None] + 1
    own = (features[None, layer:], positions, None)
    hidden: torch.Tensor = network.forward_layer(layer, *own, input_ids=ids[None, layer:])
    return hidden[0].float().cpu()


def paged_hidden(layers: MtpLayers, layer: int, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Return hidden states (T, H) by steps over pages, which hold NaN at first."""
    most = -(-len(ids) // PAGE)
    pool = KVPool(layers.attention.places.specs(PAGE), 1 + most, PAGE, ids.device)
    for plane in pool.planes:
        pool.plane(plane.name).fill_(float("nan"))
    table = torch.arange(most, 0, -1, dtype=torch.int32, device=ids.device)[None]
    parts = []
    for start, stop in itertools.pairwise(BOUNDS):
        bounds = torch.tensor([0, stop - start], dtype=torch.int32)
        host = HostLengths(bounds.numpy(), None, 0)
        layout = Layout(bounds.to(ids.device), (table,), stop - start, stop, host=host)
        view = AttentionInputs(torch.arange(start, stop, device=ids.device), layout)
        parts.append(layers.run(layer, ids[start:stop], features[start:stop], view, pool).float().cpu())
    pool.close()
    return torch.cat(parts)
