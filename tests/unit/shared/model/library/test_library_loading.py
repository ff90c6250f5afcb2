"""What the library's weights take of memory: they lie in the mapped files, which all nodes of a machine share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from shared.config.models.model_folder import read_folder
from shared.model.formats.quantized_folder import open_tensors
from shared.model.library.loading import checked_config, read_network
from shared.model.library.mapped_tensors import own_mappings
from shared.model.math.interface import StoredWeights
from shared.node.assembly.build_model import Loaded
from tests.support.models.library_families import load, save

MIB = 1 << 20
STATUS, FORGET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def stored(folder: Path, dtype: str = "float32") -> StoredWeights:
    found = load(folder, dtype).spec.stored
    assert found is not None
    return found


def bytes_of(network: transformers.PreTrainedModel, without: str = "no name") -> int:
    return sum(weight.nbytes for name, weight in network.named_parameters() if without not in name)


def num_mappings(folder: Path) -> int:
    return sum(Path(path).parent == folder.resolve() for path, _ in own_mappings())


def test_weights_are_used_where_the_files_are_mapped(tmp_path: Path) -> None:
    network = save("granite", tmp_path)
    model = load(tmp_path)
    assert model.spec.stored is not None and model.spec.stored.mapped_bytes == bytes_of(network)
    assert num_mappings(tmp_path) == 1, "a large folder's tensors have no address space for a mapping each"
    assert Loaded(model, None).mapped_bytes == bytes_of(network), "the pool would take their memory for free"


def test_weights_of_another_dtype_are_copies(tmp_path: Path) -> None:
    save("granite", tmp_path)
    assert stored(tmp_path, "bfloat16").mapped_bytes == 0 == num_mappings(tmp_path)


def test_merged_experts_leave_no_mapping(tmp_path: Path) -> None:
    network = save("mixtral", tmp_path)
    model = load(tmp_path)
    assert model.spec.stored is not None
    assert model.spec.stored.mapped_bytes == bytes_of(network, ".experts.") < bytes_of(network)
    assert num_mappings(tmp_path) == 1


@pytest.mark.skipif(not FORGET_PEAK.exists(), reason="this system tells no peak")
def test_no_expert_is_in_memory_twice(tmp_path: Path) -> None:
    """Eight layers, each with 16 MiB in experts."""
    sizes = {"hidden_size": 256, "intermediate_size": 340, "num_hidden_layers": 8, "num_local_experts": 16}
    network = transformers.AutoModelForCausalLM.from_config(
        transformers.MixtralConfig(**sizes, vocab_size=211, num_attention_heads=4, num_key_value_heads=2)
    )
    network.save_pretrained(tmp_path)
    config, files = checked_config(read_folder(tmp_path)), open_tensors(tmp_path)
    num_bytes = bytes_of(network)
    assert num_bytes > 128 * MIB
    FORGET_PEAK.write_text("5")
    before = resident("VmHWM")
    held = read_network(files, config, torch.float32)
    assert resident("VmHWM") - before < 1.5 * num_bytes
    assert bytes_of(held) == num_bytes


def resident(which: str) -> int:
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(f"{which}:"))
    return int(line.split()[1]) << 10
