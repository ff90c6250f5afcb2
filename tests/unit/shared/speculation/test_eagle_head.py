"""The draft head over paged KV against a plain causal pass, and what the target gives it to read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from shared.core.errors import ConfigError
from shared.kernel.attention.attention import AttentionInputs
from shared.kernel.code.step_layout import Layout
from shared.kernel.product.product import supports
from shared.kernel.team.team import Team
from shared.kv.pool import KVPool
from shared.model.formats.opened import LoadOptions
from shared.model.llama.eagle_compiled import CompiledHead
from shared.model.llama.eagle_head import DraftTarget, EagleHead
from shared.model.loading.load import load_eagle_head, load_model
from shared.model.math.draft_head import DraftOutput
from shared.model.math.interface import Model, ModelInputs, ModelOutput
from tests.support.models.draft_head import (
    AUX_LAYERS,
    DRAFT_VOCAB,
    HEAD,
    LAYERS,
    VOCAB,
    PlainHead,
    head_config,
    head_tensors,
    save_head,
    save_target,
)

KERNELS = ["torch", "separate", "auto"]
needs_program = pytest.mark.skipif(
    not supports(128, torch.float32), reason="our float32 products don't run on this processor"
)
SLOTS = 40


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Case:
    """One kind of sizes on disk, and a teacher-forced sequence of it."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self._heads: dict[tuple[str, str, int], EagleHead] = {}
        self.network = save_target(folder / "target", kind)
        save_head(folder / "head", head_tensors(kind), head_config(kind))
        embed = self.network.get_input_embeddings().weight.detach()
        self.plain = PlainHead(head_tensors(kind), head_config(kind), embed)
        draw = torch.Generator().manual_seed(3)
        self.next_ids = torch.randint(0, VOCAB, (SLOTS,), generator=draw)
        self.aux = torch.randn(SLOTS, 3 * embed.shape[1], generator=draw) * 2

    def target(self, kernels: str = "torch", dtype: str = "float32") -> DraftTarget:
        return load_model(str(self.folder / "target"), LoadOptions(dtype, kernels=kernels))

    def head(self, kernels: str, dtype: str = "float32", threads: int = 1) -> EagleHead:
        key = (kernels, dtype, threads)
        if key not in self._heads:
            folder, target = str(self.folder / "head"), self.target("torch", dtype)
            self._heads[key] = load_eagle_head(folder, "tiny", target, team=Team(threads), kernels=kernels)
        return self._heads[key]


@pytest.fixture(scope="module", params=list(HEAD))
def case(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Case:
    return Case(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("whole"), "whole")


class Draft:
    """Slots of several rows over one pool that nobody cleared, pages scattered over it."""

    def __init__(self, head: EagleHead, num_rows: int = 1, page_size: int = 16, max_len: int = 48) -> None:
        self.head = head
        per_row = -(-max_len // page_size)
        self.pool = KVPool(head.kv_planes(page_size), 1 + num_rows * per_row, page_size)
        self.pool.plane("eagle").fill_(float("nan"))  # what is read must have been written
        order = torch.randperm(num_rows * per_row, generator=torch.Generator().manual_seed(1)) + 1
        self.table = order.to(torch.int32).view(num_rows, per_row)

    def forward(self, slots: dict[int, range], next_ids: torch.Tensor, features: torch.Tensor) -> DraftOutput:
        """Output at slots[row] of each row, one after another."""
        with torch.inference_mode():
            return self.head.forward(next_ids, features, self._view(slots), self.pool)

    def extend(
        self, slots: dict[int, range], next_ids: torch.Tensor, aux: torch.Tensor, wanted: list[int] | None = None
    ) -> DraftOutput:
        places = None if wanted is None else torch.tensor(wanted, dtype=torch.int64)
        with torch.inference_mode():
            return self.head.extend(next_ids, self._given(aux), self._view(slots), self.pool, places)

    def write(self, slots: dict[int, range], next_ids: torch.Tensor, aux: torch.Tensor) -> None:
        with torch.inference_mode():
            self.head.write(next_ids, self._given(aux), self._view(slots), self.pool)

    def _given(self, aux: torch.Tensor) -> torch.Tensor:
        return aux.to(self.pool.planes[0].dtype)

    def _view(self, slots: dict[int, range]) -> AttentionInputs:
        q_lens = torch.tensor([len(part) for part in slots.values()])
        return AttentionInputs(
            torch.tensor([slot for part in slots.values() for slot in part]),
            Layout(
                torch.cat((torch.zeros(1, dtype=torch.long), q_lens.cumsum(0))).to(torch.int32),
                (self.table[list(slots)],),
                int(q_lens.max()),
                max(part.stop for part in slots.values()),
            ),
        )

    def one(self, case: Case, start: int, stop: int, row: int = 0) -> DraftOutput:
        """Slots start..stop of a row, teacher-forced."""
        return self.extend({row: range(start, stop)}, case.next_ids[start:stop], case.aux[start:stop])


def joined(parts: list[DraftOutput]) -> DraftOutput:
    return DraftOutput(torch.cat([part.hidden for part in parts]), torch.cat([part.logits for part in parts]))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_chunks_and_single_steps_equal_one_causal_pass(case: Case, kernels: str, page_size: int) -> None:
    draft = Draft(case.head(kernels), page_size=page_size)
    cuts = [0, 19, 30, 31, 32, 35, SLOTS]
    got = joined([draft.one(case, *cut) for cut in zip(cuts, cuts[1:], strict=False)])
    want = case.plain.hidden(case.next_ids, case.plain.features(case.aux))
    torch.testing.assert_close(got.hidden, want, atol=2e-4, rtol=1e-4)
    logits = got.logits
    assert (logits.shape, logits.dtype) == ((SLOTS, DRAFT_VOCAB), torch.float32)
    torch.testing.assert_close(logits, case.plain.logits(want), atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_chain_feeds_on_itself_and_leaves_no_trace(case: Case, kernels: str) -> None:
    """Draft steps take the head's own output; their slots are written again once the target has been there."""
    draft, start = Draft(case.head(kernels)), 20
    hidden = draft.one(case, 0, start).hidden[-1:]
    features = case.plain.features(case.aux[:start])
    want = case.plain.hidden(case.next_ids[:start], features)[-1:]
    for step in range(3):
        slots = {0: range(start + step, start + step + 1)}
        hidden = draft.forward(slots, case.next_ids[-1 - step :][:1], hidden).hidden
        features = torch.cat((features, want))
        drafted = torch.cat([case.next_ids[-1 - n :][:1] for n in range(step + 1)])
        want = case.plain.hidden(torch.cat((case.next_ids[:start], drafted)), features)[-1:]
        torch.testing.assert_close(hidden, want, atol=5e-4, rtol=1e-3)
    again = draft.one(case, start, SLOTS).hidden
    want = case.plain.hidden(case.next_ids, case.plain.features(case.aux))[start:]
    torch.testing.assert_close(again, want, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_tree_is_its_paths(whole: Case, kernels: str) -> None:
    """Two tokens after the same one: each sees its own path, as if the other were not in the call."""
    draft, start = Draft(whole.head(kernels), 2), 10
    ids, features = whole.next_ids[start : start + 3], torch.randn(3, draft.head.hidden_size)
    for row in range(2):
        draft.one(whole, 0, start, row)
    slots, positions = torch.tensor([10, 11, 12]), torch.tensor([10, 11, 11])
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    visible = torch.tensor([0b1, 0b11, 0b101])
    view = AttentionInputs(positions, Layout(bounds, (draft.table[:1],), 3, start + 3), slots, visible)
    with torch.inference_mode():
        tree = draft.head.forward(ids, features, view, draft.pool).hidden
    for path in ([0, 1], [0, 2]):
        alone = draft.forward({1: range(start, start + 2)}, ids[path], features[path]).hidden
        torch.testing.assert_close(tree[path], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 3])
def test_one_program_has_the_bits_of_separate_kernels(whole: Case, dtype: str, threads: int) -> None:
    if not supports(128, getattr(torch, dtype)):
        pytest.skip("our products don't run on this processor")
    program, separate = Draft(whole.head("auto", dtype, threads), 2), Draft(whole.head("separate", dtype), 2)
    assert isinstance(program.head.network, CompiledHead)
    features = torch.randn(SLOTS, 128, generator=torch.Generator().manual_seed(5))
    for parts in ({0: range(0, 20)}, {0: range(20, 21), 1: range(0, 9)}, {0: range(21, 22), 1: range(9, 13)}):
        size = sum(len(part) for part in parts.values())
        ids = whole.next_ids[:size]
        for wanted in (None, [size - 1, 0, size // 2], [0]):
            got, want = (draft.extend(parts, ids, whole.aux[:size], wanted) for draft in (program, separate))
            assert torch.equal(got.hidden, want.hidden) and torch.equal(got.logits, want.logits)
        got, want = (draft.forward(parts, ids, features[-size:]) for draft in (program, separate))
        assert torch.equal(got.hidden, want.hidden) and torch.equal(got.logits, want.logits)
    assert torch.equal(program.pool.plane("eagle").nan_to_num(), separate.pool.plane("eagle").nan_to_num())


@needs_program
def test_wrong_ids_and_slots_fail_before_anything_is_read(whole: Case) -> None:
    draft = Draft(whole.head("auto"))
    features = torch.zeros(1, draft.head.hidden_size)
    for wrong in (VOCAB, -1):
        with pytest.raises(IndexError, match="next ids"):
            draft.forward({0: range(1)}, torch.tensor([wrong]), features)
    with pytest.raises(IndexError, match="positions"):
        draft.forward({0: range(48, 49)}, torch.tensor([1]), features)


@pytest.mark.parametrize("kernels", KERNELS)
def test_nothing_in_gives_nothing(whole: Case, kernels: str) -> None:
    head = whole.head(kernels)
    pool = KVPool(head.kv_planes(16), 2, 16)
    none = torch.zeros(0, dtype=torch.int64)
    bounds, table = torch.zeros(1, dtype=torch.int32), torch.zeros(0, 1, dtype=torch.int32)
    view = AttentionInputs(none, Layout(bounds, (table,), 0, 0))
    head.write(none, whole.aux[:0], view, pool)
    features = torch.zeros(0, head.hidden_size)
    for output in (head.extend(none, whole.aux[:0], view, pool), head.forward(none, features, view, pool)):
        assert (output.hidden.shape, output.logits.shape) == ((0, head.hidden_size), (0, DRAFT_VOCAB))


@pytest.mark.parametrize("kernels", KERNELS)
def test_wanted_slots_are_those_of_all(whole: Case, kernels: str) -> None:
    every, some = Draft(whole.head(kernels), 2), Draft(whole.head(kernels), 2)
    parts = {0: range(0, 20), 1: range(0, 9)}
    ids, aux = whole.next_ids[:29], whole.aux[:29]
    want = every.extend(parts, ids, aux)
    for wanted in ([28, 3, 19], [19], []):
        got = some.extend(parts, ids, aux, wanted)
        torch.testing.assert_close(got.hidden, want.hidden[wanted], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got.logits, want.logits[wanted], atol=1e-5, rtol=1e-5)
    planes = [draft.pool.plane("eagle")[draft.table.flatten().long()] for draft in (every, some)]
    assert torch.equal(planes[0].nan_to_num(7.0), planes[1].nan_to_num(7.0))


@needs_program
def test_wrong_wanted_slots_and_dtypes_are_refused(whole: Case) -> None:
    draft = Draft(whole.head("auto"))
    for wrong in (4, -1):
        with pytest.raises(IndexError, match="wanted slots"):
            draft.extend({0: range(4)}, whole.next_ids[:4], whole.aux[:4], [wrong])
    with pytest.raises(TypeError, match="this head is for"):
        draft.head.extend(whole.next_ids[:4], whole.aux[:4].bfloat16(), draft._view({0: range(4)}), draft.pool)


def test_features_are_left_as_they_are(whole: Case) -> None:
    draft = Draft(whole.head("auto"))
    features = torch.randn(4, draft.head.hidden_size)
    before = features.clone()
    draft.extend({0: range(4)}, whole.next_ids[:4], whole.aux[:4])
    output = draft.forward({0: range(4)}, whole.next_ids[:4], features)
    kept = output.hidden.clone(), output.logits.clone()
    draft.forward({0: range(4)}, whole.next_ids[4:8], features * 2)
    draft.extend({0: range(4)}, whole.next_ids[4:8], whole.aux[:4])
    assert torch.equal(features, before)
    assert torch.equal(output.hidden, kept[0]) and torch.equal(output.logits, kept[1])


@pytest.mark.parametrize("kernels", KERNELS)
def test_uneven_inputs_are_refused(whole: Case, kernels: str) -> None:
    draft = Draft(whole.head(kernels))
    with pytest.raises(ValueError, match="3 ids, 4 features, 4 positions"):
        draft.forward({0: range(4)}, whole.next_ids[:3], torch.zeros(4, draft.head.hidden_size))


def step(model: Model, ids: list[int], wanted: list[int]) -> ModelOutput:
    pool = KVPool(model.kv_planes(16), 4, 16)
    inputs = ModelInputs(
        input_ids=torch.tensor(ids),
        positions=torch.arange(len(ids)),
        layout=Layout(
            cu_q_lens=torch.tensor([0, len(ids)], dtype=torch.int32),
            page_tables=(torch.tensor([[2, 1, 3]], dtype=torch.int32),),
            max_q_len=len(ids),
            max_seq_len=len(ids),
        ),
        logits_idx=torch.tensor(wanted, dtype=torch.int64),
    )
    with torch.inference_mode():
        return model.forward(inputs, pool)


def inputs_of_layers(network: transformers.PreTrainedModel, ids: list[int]) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode():
        return network(torch.tensor([ids]), output_hidden_states=True).hidden_states


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layers", [AUX_LAYERS, (0, 1, LAYERS - 1), (3,)])
def test_aux_is_what_layers_read(case: Case, kernels: str, layers: tuple[int, ...]) -> None:
    model, ids = case.target(kernels), torch.arange(40).mul(7).remainder(VOCAB).tolist()
    off = step(model, ids, [39, 5])
    model.capture_aux(layers)
    hidden = inputs_of_layers(case.network, ids)
    want = torch.cat([hidden[layer][0] for layer in layers], dim=-1)
    for wanted in ([39, 5], []):
        output = step(model, ids, wanted)
        torch.testing.assert_close(output.aux, want, atol=2e-4, rtol=1e-4)
        assert torch.equal(output.logits, off.logits[: len(wanted)])  # watching changes nothing
    assert off.aux is None
    model.capture_aux(())
    assert step(model, ids, [39]).aux is None


def test_layers_that_are_not_there_are_refused(whole: Case) -> None:
    for kernels in KERNELS:
        for layers in ((2, LAYERS), (3, 2), (-1,), (2, 2)):
            with pytest.raises(ConfigError, match="auxiliary layers"):
                whole.target(kernels).capture_aux(layers)
