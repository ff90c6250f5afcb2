"""Quantised folders: tensors equal each format's definition, to the bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from compressed_tensors import compressors
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from shared.core.errors import ConfigError
from shared.model.formats import quantized_numbers
from shared.model.formats.opened import LoadOptions, open_model
from shared.model.formats.quantized_folder import open_tensors
from shared.model.formats.quantized_numbers import add_one, fields
from shared.model.formats.quantized_scheme import scheme_of
from shared.model.formats.tensor_files import TensorFiles
from shared.model.loading.load import load_model
from shared.model.math.kernels import Formats
from tests.support.models.tiny_families import save
from tests.support.models.tiny_quantized import (
    E2M1,
    FORMATS,
    Made,
    code_value,
    fp8,
    group_config,
    nvfp4_compressed,
    write_quantised,
)

FAMILY = {"fp8, ragged blocks": "qwen3-moe", "GPTQ, act order": "qwen3-moe", "AWQ": "llama, llama3 rope"}


@dataclass
class Case:
    form: str
    folder: Path
    meant: dict[str, torch.Tensor]  # the weights by the definition


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    folders = {family: tmp_path_factory.mktemp("plain") for family in ("qwen3", *FAMILY.values())}
    for family, folder in folders.items():
        save(family, folder)
    return folders


@pytest.fixture(scope="module", params=FORMATS)
def case(request: pytest.FixtureRequest, plain: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Case:
    form, folder = request.param, tmp_path_factory.mktemp("quantised") / "model"
    return Case(form, folder, write_quantised(plain[FAMILY.get(form, "qwen3")], folder, form))


@pytest.fixture(scope="module")
def words(plain: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words") / "model"
    write_quantised(plain["qwen3"], folder, "W4A16")
    return folder


@pytest.fixture
def copy(words: Path, tmp_path: Path) -> Path:
    """A folder of 4-bit words, which a test may change."""
    return Path(shutil.copytree(words, tmp_path / "model"))


def test_tensors_equal_the_definition(case: Case) -> None:
    files = open_tensors(case.folder)
    assert files.names() == case.meant.keys()
    for name, meant in case.meant.items():
        assert files.shape(name) == tuple(meant.shape)
        assert torch.equal(files.tensor(name).float(), meant.float()), name
    widened = [name for name in files.names() if name.endswith("_proj.weight")]
    for name in widened[:3]:
        narrow = files.tensor(name, torch.bfloat16)
        assert narrow.dtype == torch.bfloat16 and torch.equal(narrow, case.meant[name].bfloat16())


def test_blocks_of_128_are_cut_off_at_the_edges(tmp_path: Path) -> None:
    """The block that DeepSeek and Qwen use, on a matrix that it does not divide."""
    made = fp8(torch.randn(200, 300), 128, 128, "weight_scale_inv")
    assert made.parts["weight_scale_inv"].shape == (2, 3)
    files = open_matrix(tmp_path, made, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert torch.equal(files.tensor("m.weight"), made.weight)


def open_matrix(folder: Path, made: Made, scheme: dict[str, object], **changed: torch.Tensor) -> TensorFiles:
    parts = made.parts | changed
    save_file({f"m.{name}": part.contiguous() for name, part in parts.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": scheme}))
    return open_tensors(folder)


@pytest.mark.parametrize("stored", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_may_be_powers_of_two(stored: torch.dtype, tmp_path: Path) -> None:
    made = fp8(torch.randn(40, 64), 1, 32, "weight_scale")
    exponents = torch.randint(90, 160, made.parts["weight_scale"].shape, dtype=torch.uint8)
    scheme = group_config("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32)
    files = open_matrix(tmp_path, made, scheme, weight_scale=exponents.view(stored))
    numbers, scales = made.parts["weight"].double(), 2.0 ** (exponents.double() - 127)
    assert torch.equal(files.tensor("m.weight"), (numbers * scales.repeat_interleave(32, 1)).float())


def test_experts_in_mxfp4_equal_transformers(tmp_path: Path) -> None:
    """gpt-oss: three dimensions, pairs of FP4 in 16 bytes for each scale, and the outputs become the last dimension."""
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 2), dtype=torch.uint8)
    made = Made({"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales}, torch.empty(0))
    files = open_matrix(tmp_path, made, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert files.names() == {"m.gate_up_proj"} and files.shape("m.gate_up_proj") == (3, 64, 10)
    found = files.tensor("m.gate_up_proj")
    assert torch.equal(found.bfloat16(), convert_moe_packed_tensors(blocks, scales))
    for expert, output, k in ((0, 0, 0), (2, 9, 63), (1, 4, 33)):
        code = int(blocks[expert, output, k // 32, k % 32 // 2]) >> 4 * (k % 2) & 15
        meant = code_value(E2M1, code) * 2.0 ** (int(scales[expert, output, k // 32]) - 127)
        assert found[expert, k, output] == meant


def test_gptq_s_zero_points_wrap_with_a_carry() -> None:
    """A zero point of 0 is stored as -1 in its whole word, so that its neighbour loses 1 as well."""
    zeros = [0, 3, 15, 0, 0, 7, 1, 15]
    word = sum(zero << 4 * i for i, zero in enumerate(zeros)) - 0x11111111
    stored = torch.tensor([[word % (1 << 32)]], dtype=torch.int64).to(torch.uint32).view(torch.int32)
    assert fields(add_one(stored, 4), 4, 8).tolist() == [zeros]


# its versions from 0.20 on read no act order
@pytest.mark.parametrize("form", [form for form in FORMATS if form[0] in "Wc" and "act order" not in form])
def test_compressed_tensors_itself_agrees(form: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    made, scheme = FORMATS[form].make(torch.randn(48, 64)), FORMATS[form].config
    compressor = compressors.BaseCompressor.get_value_from_registry(scheme["format"])
    group = QuantizationScheme(**scheme["config_groups"]["group_0"])
    theirs = compressor.decompress(dict(made.parts), group)["weight"]
    ours = open_matrix(tmp_path, made, scheme).tensor("m.weight")
    assert torch.equal(ours.to(theirs.dtype), theirs)


def test_copies_of_a_folder_pair_and_other_numerics_do_not(copy: Path, tmp_path: Path) -> None:
    other = shutil.copytree(copy, tmp_path / "elsewhere" / "model")
    one, two = (load_model(str(folder), LoadOptions("bfloat16")).spec for folder in (copy, other))
    assert one == two and one.weight_dtype == "auto"
    packed = load_model(str(copy), LoadOptions("bfloat16", formats=Formats(weights="int8"))).spec
    assert packed.weights_hash == one.weights_hash + " int8 blocks"


def test_the_spec_says_what_the_file_holds_and_what_memory(case: Case) -> None:
    stored = load_model(str(case.folder), LoadOptions("bfloat16", max_context=64)).spec.stored
    assert stored is not None and stored.format == FORMATS[case.form].name
    assert stored.file_bytes == (case.folder / "model.safetensors").stat().st_size
    weights = sum(meant.numel() for meant in case.meant.values())
    assert 2 * weights < stored.memory_bytes < 5 * weights


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported, only fp8, fbgemm_fp8, comp"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "only load_in_4bit of bitsandbytes"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}, "quant_storage"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo 'MIXED_PRECISION'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size 32"),
        ({"bits": 4}, "quant_method 'None' is not supported"),
        ("gptq", "missing or wrong field"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported, only e4m3"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "a block of 0 x 128"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' is not supported, only gemm"),
        ({"quant_method": "awq", "bits": 8}, "bits 8 is not supported, only 4"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point False"),
        ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "backend 'llm-awq'"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 is not supported, only 2, 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format True"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*up": {"bits": 8}}}, "dynamic {'[+]:.*up'"),
        ({"quant_method": "compressed-tensors"}, "missing or wrong field: 'config_groups'"),
        (group_config("nvfp4-pack-quantized", num_bits=4, type="float", strategy="group"), "strategy 'group'"),
        (group_config("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group"), "group_size None"),
        (group_config("marlin-24", num_bits=4), "format 'marlin-24'"),
        (group_config("pack-quantized", num_bits=3), "num_bits 3 is not supported, only 2, 4, 8"),
        (group_config("float-quantized", num_bits=4, type="float"), "num_bits 4"),
        (group_config("mxfp8-quantized", num_bits=8, type="float", group_size=16), "group_size 16"),
        (group_config("int-quantized", num_bits=8, strategy="tensor_group"), "strategy 'tensor_group'"),
        (group_config("int-quantized", num_bits=8, dynamic=True), "dynamic True"),
        (group_config("int-quantized") | {"transform_config": {"config_groups": {"a": 1}}}, "transform_config"),
        (group_config("int-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format 'sparse-24"),
        (group_config("int-quantized") | {"config_groups": {"W8A8": ["Linear"]}}, "only written-out ones"),
    ],
)
def test_schemes_that_are_not_read_are_refused(scheme: object, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path}: quantization_config.*{reason}"):
        scheme_of({"quantization_config": scheme}, tmp_path)


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*lm_head": {}}, "meta": {"damp": 1}}, "GPTQ 4 bits"),
        (group_config("int-quantized") | {"sparsity_config": {"format": "dense"}}, "W8A16"),
        (group_config("int-quantized") | {"kv_cache_scheme": {"num_bits": 8}, "ignore": ["re:.*gate"]}, "W8A16"),
        (group_config("float-quantized", num_bits=8, type="float", block_structure="128x64"), "W8A16"),
    ],
)
def test_notes_of_those_who_quantised_are_no_obstacle(scheme: dict[str, object], name: str, tmp_path: Path) -> None:
    found = scheme_of({"quantization_config": scheme}, tmp_path)
    assert found is not None and name in found.name
    assert scheme_of({"quantization_config": {}}, tmp_path) is scheme_of({}, tmp_path) is None
    assert scheme_of({"text_config": {"quantization_config": scheme}}, tmp_path) == found, "as Kimi K2.5 has it"


def test_minimax_s_spelling_of_fp8_is_fp8(tmp_path: Path) -> None:
    """The published folders of MiniMax-M2 write the number format as torch does."""
    made = fp8(torch.randn(40, 64), 32, 32, "weight_scale_inv")
    scheme = {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [32, 32]}
    assert torch.equal(open_matrix(tmp_path, made, scheme).tensor("m.weight"), made.weight)


@pytest.mark.parametrize("form", ["FP8, modelopt", "NVFP4, modelopt"])
def test_nvidia_s_scheme_may_have_a_file_of_its_own(form: str, tmp_path: Path) -> None:
    """Also with scales of keys and values, which are not used, and the file counts for the model's identity."""
    made, algorithm = FORMATS[form].make(torch.randn(48, 64)), FORMATS[form].config["quant_algo"]
    scheme = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"], "group_size": 16}
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps({"producer": {"name": "modelopt", "version": "0.29"}, "quantization": scheme}))
    files = open_matrix(tmp_path, made, {}, k_scale=torch.tensor(0.5), v_scale=torch.tensor(0.25))
    assert files.names() == {"m.weight"} and torch.equal(files.tensor("m.weight"), made.weight)
    before = files.content_hash()
    path.write_text(json.dumps({"quantization": scheme}))
    assert files.content_hash() != before


def test_nvfp4_agrees_with_compressed_tensors_itself(tmp_path: Path) -> None:
    """Its own program rounds to bfloat16 on the way, which changes nothing if the global scale is a power of two."""
    torch.manual_seed(1)
    made, scheme = nvfp4_compressed(torch.randn(48, 64), 2048.0), FORMATS["NVFP4, compressed"].config
    compressor = compressors.BaseCompressor.get_value_from_registry(scheme["format"])
    theirs = compressor.decompress(dict(made.parts), QuantizationScheme(**scheme["config_groups"]["group_0"]))["weight"]
    assert torch.equal(open_matrix(tmp_path, made, scheme).tensor("m.weight"), theirs.float())


def test_looked_up_numbers_are_widened_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_numbers, "AT_ONCE", 100)
    form = FORMATS["bitsandbytes NF4, nested"]
    made = form.make(torch.randn(25, 38))
    assert torch.equal(open_matrix(tmp_path, made, form.config).tensor("m.weight"), made.weight)


@pytest.mark.parametrize(
    ("form", "changes", "reason"),
    [
        ("NVFP4, compressed", {"weight_global_scale": None}, "m.weight has no global scale"),
        ("NVFP4, modelopt", {"weight_scale_2": None}, "m.weight has no second scale"),
        ("bitsandbytes NF4", {"weight.quant_map": None}, "m.weight has no quant_map"),
        ("bitsandbytes NF4", {"weight.quant_state.bitsandbytes__nf4": None}, "m.weight has no quant_state"),
        ("bitsandbytes NF4", {"weight.quant_map": torch.ones(8)}, "and 8 values for 3072 weights"),
        ("bitsandbytes NF4", {"weight.absmax": torch.ones(7)}, "7 scales"),
        ("bitsandbytes NF4", {"weight": torch.zeros(3, 1, dtype=torch.uint8)}, "3 bytes"),
        ("bitsandbytes NF4, nested", {"weight.nested_absmax": None}, "m.weight has no nested absmax"),
    ],
)
def test_newer_parts_that_do_not_fit_are_refused(
    form: str, changes: dict[str, torch.Tensor | None], reason: str, tmp_path: Path
) -> None:
    made = FORMATS[form].make(torch.randn(48, 64))
    parts = {name: part for name, part in (made.parts | changes).items() if part is not None}
    with pytest.raises(ConfigError, match=reason):
        open_matrix(tmp_path, Made(parts, made.weight), FORMATS[form].config).tensor("m.weight")


Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight_scale": None}, "q_proj.weight has no scale"),
        ({"weight_packed": None}, "q_proj.weight has no numbers"),
        ({"weight_shape": None}, "q_proj.weight has no shape"),
        ({"weight_scale": torch.ones(64, 3)}, "3 scales for 64"),
        ({"weight_scale": torch.ones(2, 2, 2)}, "scales of shape"),
        ({"weight_packed": torch.zeros(64, 7, dtype=torch.int32)}, "7 words for 64 inputs"),
        ({"weight_packed": torch.zeros(63, 8, dtype=torch.int32)}, "don't fit each other"),
        ({"weight_packed": torch.zeros(64, 8, dtype=torch.int16)}, "the numbers of .* is I16"),
        ({"weight_scale": torch.ones(64, 2, dtype=torch.int64)}, "the scale of .* is I64"),
        ({"weight_shape": torch.tensor([64, 72])}, r"is \(64, 72\), and the configuration says \(64, 64\)"),
        ({"weight_g_idx": torch.full((64,), 2)}, "64 inputs in groups up to 2"),
        ({"weight_g_idx": torch.zeros(63, dtype=torch.int32)}, "63 inputs"),
        (
            {"weight_packed": torch.zeros(1, 8, dtype=torch.int32), "weight_scale": torch.ones(1, 2)},
            "for .64, 64. weights",
        ),
        ({"weight_packed": torch.zeros(9, dtype=torch.uint8), "weight_shape": None}, "the parts of .* don't fit"),
        ({"weight_other": torch.ones(1)}, "has no tensor model.layers.0.self_attn.q_proj.weight_other"),
        ({"weight": torch.ones(64, 64), "weight_packed": None}, "the numbers of .*q_proj.weight is F32"),
        ({"bias": torch.ones(64)}, "has no tensor .*q_proj.bias"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, torch.Tensor | None], reason: str, copy: Path) -> None:
    path = copy / "model.safetensors"
    changed = {Q + name: part for name, part in changes.items()}
    parts = {name: part for name, part in (load_file(path) | changed).items() if part is not None}
    save_file(parts, path)
    with pytest.raises(ConfigError, match=reason):
        open_model(copy).tensor("layers.0.q")


def test_scales_of_inputs_and_biases_of_0_change_nothing(copy: Path) -> None:
    path, before = copy / "model.safetensors", open_model(copy).tensor("layers.0.q")
    more = {"input_scale": torch.ones(1), "k_scale": torch.ones(1), "bias": torch.zeros(64)}
    save_file(load_file(path) | {Q + name: part for name, part in more.items()}, path)
    assert torch.equal(open_model(copy).tensor("layers.0.q"), before)


def test_bytes_without_scales_are_refused(copy: Path) -> None:
    path = copy / "model.safetensors"
    save_file(load_file(path) | {"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}, path)
    with pytest.raises(ConfigError, match=r"model.norm.weight is F8_E4M3, only floats"):
        open_model(copy)
