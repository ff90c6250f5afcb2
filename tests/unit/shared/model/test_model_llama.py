"""Steps of every kind over paged KV against transformers, and one compiled program against kernels of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from shared.core.held_result import hold, release
from shared.kernel.product.product import supports
from shared.kernel.team.team import Team
from shared.model.formats.opened import LoadOptions
from shared.model.llama.llama_compiled import CompiledLlama
from shared.model.loading.load import load_model
from shared.model.math.interface import LayerMarks
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
FAMILIES = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, head_dim=16)),
    "llama-whole": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**WHOLE, head_dim=16)),
    "qwen2-whole": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**WHOLE)),
    "qwen3-whole": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**WHOLE, head_dim=32)),
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


@pytest.mark.parametrize("family", ["qwen2-whole", "qwen3-whole"])
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    """Every family kernel by kernel: test_model_families.py."""
    network = save(family, tmp_path)
    ids = prompt(41)
    rows = Rows(load(tmp_path, "auto"), 1, page_size=16)
    ours = torch.cat([rows.step({0: ids[:33]}), *(rows.step({0: [i]}) for i in ids[33:])])
    torch.testing.assert_close(ours, reference(network, ids), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("kernels", "page_size"), [("torch", 16), ("auto", 1), ("auto", 64)])
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
def test_only_the_logits_asked_for(llama: tuple[transformers.PreTrainedModel, Path], kernels: str) -> None:
    model = load(llama[1], kernels)
    ids = prompt(20)
    whole = Rows(model, 1, 16).step({0: ids})
    some = Rows(model, 1, 16).step({0: ids}, wanted=[19, 3])
    torch.testing.assert_close(some, whole[[19, 3]], atol=1e-5, rtol=1e-5)
    silent = Rows(model, 1, 16)
    assert silent.step({0: ids[:-1]}, wanted=[]).shape == (0, VOCAB)
    torch.testing.assert_close(silent.step({0: ids[-1:]}), whole[-1:], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kv", "threads", "dtype"),
    [("auto", 1, "float32"), ("auto", 3, "bfloat16"), ("int8", 3, "float32"), ("fp8", 1, "bfloat16")],
)
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
@pytest.mark.parametrize(("family", "wanted"), [("llama-whole", [39]), ("qwen3-whole", [])])
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
