"""The forward over paged KV against transformers, on tiny random networks of every family we support."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from shared.core.held_result import hold, release
from shared.kernel.code.step_layout import Layout
from shared.kernel.product.product import supports
from shared.kernel.team.team import Team
from shared.model.formats.opened import LoadOptions
from shared.model.llama.llama_compiled import CompiledLlama
from shared.model.loading.load import load_model
from shared.model.math.interface import LayerMarks, ModelInputs
from shared.model.math.kernels import Formats
from tests.support.models.tiny_models import VOCAB, Rows, load, prompt, reference, save_random

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Every product has whole tiles of 64 columns, so that a step is one program of compiled tasks.
WHOLE = SIZES | {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, head_dim=16)),
    "llama-tied": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=True)
    ),
    "llama-bias": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, head_dim=16, attention_bias=True)
    ),
    "llama3-rope": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, head_dim=16, rope_parameters=LLAMA3_ROPE)
    ),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, head_dim=32)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**(SIZES | {"num_attention_heads": 4}))),
    "llama-whole": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**WHOLE, head_dim=16)),
    "qwen2-whole": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**WHOLE)),
    "qwen3-whole": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**WHOLE, head_dim=32)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=16)),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def save(family: str, folder: Path) -> transformers.PreTrainedModel:
    torch.manual_seed(7)
    return save_random(FAMILIES[family](), folder)


@pytest.fixture(scope="module", params=["llama", "llama-whole"])
def llama(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[transformers.PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("llama")
    return save(request.param, folder), folder


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, kernels: str, tmp_path: Path) -> None:
    network = save(family, tmp_path)
    ids = prompt(41)
    rows = Rows(load(tmp_path, kernels), 1, page_size=16)
    ours = torch.cat([rows.step({0: ids[:33]}), *(rows.step({0: [i]}) for i in ids[33:])])
    torch.testing.assert_close(ours, reference(network, ids), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_ragged_steps_equal_transformers(
    llama: tuple[transformers.PreTrainedModel, Path], kernels: str, page_size: int
) -> None:
    """Prefill chunks, decode rows and verify windows in one step, on pages that nobody cleared."""
    network, folder = llama
    rows = Rows(load(folder, kernels), 3, page_size)
    texts = [prompt(60, seed=row) for row in range(3)]
    steps: list[dict[int, int]] = [{0: 5}, {0: 1, 1: 20}, {0: 1, 1: 17, 2: 3}, {2: 30, 0: 4, 1: 1}, {0: 1, 1: 1, 2: 1}]
    wanted = [reference(network, text) for text in texts]
    for step in steps:
        starts = {row: rows.lens[row] for row in step}
        got = rows.step({row: texts[row][starts[row] : starts[row] + n] for row, n in step.items()})
        want = torch.cat([wanted[row][starts[row] : starts[row] + n] for row, n in step.items()])
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_chunks_equal_whole_prompt(llama: tuple[transformers.PreTrainedModel, Path], kernels: str) -> None:
    model = load(llama[1], kernels)
    ids = prompt(50)
    whole = Rows(model, 1, 16).step({0: ids})
    for sizes in ([1] * 50, [7] * 7 + [1], [16, 16, 16, 2], [49, 1]):
        rows, parts, at = Rows(model, 1, 16), [], 0
        for size in sizes:
            parts.append(rows.step({0: ids[at : at + size]}))
            at += size
        torch.testing.assert_close(torch.cat(parts), whole, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_only_the_logits_asked_for(llama: tuple[transformers.PreTrainedModel, Path], kernels: str) -> None:
    model = load(llama[1], kernels)
    ids = prompt(20)
    whole = Rows(model, 1, 16).step({0: ids})
    some = Rows(model, 1, 16).step({0: ids}, wanted=[19, 3])
    torch.testing.assert_close(some, whole[[19, 3]], atol=1e-5, rtol=1e-5)
    silent = Rows(model, 1, 16)
    assert silent.step({0: ids[:-1]}, wanted=[]).shape == (0, VOCAB)
    torch.testing.assert_close(silent.step({0: ids[-1:]}), whole[-1:], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_bfloat16_stays_near_float32(llama: tuple[transformers.PreTrainedModel, Path], kernels: str) -> None:
    ids = prompt(40)
    exact = Rows(load(llama[1]), 1, 16).step({0: ids})
    rows = Rows(load(llama[1], kernels, dtype="bfloat16"), 1, 16)
    ours = torch.cat([rows.step({0: ids[:30]}), *(rows.step({0: [i]}) for i in ids[30:])])
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() < 0.03 * exact.abs().mean()


def test_spec_and_planes(llama: tuple[transformers.PreTrainedModel, Path]) -> None:
    model = load(llama[1])
    assert (model.spec.vocab_size, model.spec.max_context, model.spec.dtype) == (VOCAB, 256, "float32")
    assert model.spec.eos_ids == (2,)
    (plane,) = model.kv_planes(16)
    num_kv_heads = model.config.num_kv_heads
    assert (plane.name, plane.shape, plane.dtype) == ("kv", (3, 2, num_kv_heads, 16, 16), torch.float32)


def test_hidden_is_what_the_head_reads(llama: tuple[transformers.PreTrainedModel, Path]) -> None:
    network, folder = llama
    rows = Rows(load(folder), 1, 16)
    ids = prompt(9)
    inputs = ModelInputs(
        input_ids=torch.tensor(ids),
        positions=torch.arange(9),
        layout=Layout(
            cu_q_lens=torch.tensor([0, 9], dtype=torch.int32), page_tables=(rows.table,), max_q_len=9, max_seq_len=9
        ),
        logits_idx=torch.tensor([8]),
    )
    with torch.inference_mode():
        out = rows.model.forward(inputs, rows.pool)
        torch.testing.assert_close(network.lm_head(out.hidden), out.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kv", ["auto", "int8", "fp8"])
def test_one_program_has_the_bits_of_separate_kernels(kv: str, dtype: str, threads: int, tmp_path: Path) -> None:
    save("qwen3-whole", tmp_path)
    model = load_model(str(tmp_path), LoadOptions(dtype, threads=threads, formats=Formats(kv)))
    if not supports(128, getattr(torch, dtype)):
        pytest.skip("our products don't run on this processor")
    assert isinstance(model, CompiledLlama)
    program = Rows(model, 2, 16)
    separate = Rows(load_model(str(tmp_path), LoadOptions(dtype, kernels="separate", formats=Formats(kv))), 2, 16)
    ids = prompt(60)
    for chunks, wanted in (
        ({0: ids[:40]}, [39]),
        ({0: ids[40:41], 1: ids[:9]}, [9, 0, 0]),
        ({1: ids[9:30]}, []),
        ({0: ids[41:42], 1: ids[30:31]}, None),
    ):
        assert torch.equal(program.step(chunks, wanted), separate.step(chunks, wanted))
    for plane in program.pool.planes:
        got, want = (rows.pool.plane(plane.name).float().nan_to_num() for rows in (program, separate))
        assert torch.equal(got, want)


def test_one_program_releases_results_when_it_is_prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save("qwen3-whole", tmp_path)
    model = load_model(str(tmp_path), LoadOptions("float32"))
    if not isinstance(model, CompiledLlama):
        pytest.skip("our products don't run on this processor")
    rows, given = Rows(model, 1, 16), list[str]()
    monkeypatch.setattr(Team, "run", lambda *_: given.append("computed"))
    hold(lambda: given.append("released"))
    rows.step({0: prompt(5)})
    release()
    assert given == ["released", "computed"]


class Watch(LayerMarks):
    """Keeps what the first layers hold when they are said to be written."""

    def __init__(self, kv: torch.Tensor, ends: tuple[int, ...]) -> None:
        super().__init__(ends)
        self._kv = kv
        self.seen: dict[int, torch.Tensor] = {}

    def reached(self, num_layers: int) -> None:
        super().reached(num_layers)
        if num_layers in self.ends:
            self.seen[num_layers] = self._kv[:, :num_layers].clone()


@pytest.mark.parametrize("kernels", ["torch", "separate", "auto"])
@pytest.mark.parametrize("family", ["llama-whole", "qwen3-whole"])
@pytest.mark.parametrize("wanted", [[39], []])
def test_marked_layers_are_written_and_change_nothing(
    family: str, kernels: str, wanted: list[int], tmp_path: Path
) -> None:
    save(family, tmp_path)
    plain, marked = (Rows(load(tmp_path, kernels), 2, 16) for _ in range(2))
    for ends in ((1,), (1, 2), (2,)):
        watch = Watch(marked.pool.plane("kv"), ends)
        chunks = {0: prompt(40)} if ends == (1,) else {0: prompt(1), 1: prompt(7)}
        asked = wanted if ends == (1,) else [7]
        assert torch.equal(plain.step(chunks, asked), marked.step(chunks, asked, layers=watch))
        assert sorted(watch.seen) == list(ends) and all(event.query() for event in watch.events)
        for end, seen in watch.seen.items():
            assert torch.equal(seen.nan_to_num(), marked.pool.plane("kv")[:, :end].nan_to_num())
    assert torch.equal(plain.pool.plane("kv").nan_to_num(), marked.pool.plane("kv").nan_to_num())


def test_wrong_ids_fail_before_anything_is_read(tmp_path: Path) -> None:
    save("llama-whole", tmp_path)
    rows = Rows(load_model(str(tmp_path), LoadOptions("float32")), 1, 16)
    for chunk, wanted in (([VOCAB], None), ([-1], None), ([1], [1]), ([1], [-1])):
        with pytest.raises(IndexError):
            rows.step({0: chunk}, wanted)
