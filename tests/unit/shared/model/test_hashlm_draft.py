"""HashDraft: right about exactly the positions that the hash picks, and only while its draft state is whole."""

from __future__ import annotations

import pytest
import torch

from shared.core.sampling_params import SamplingParams
from shared.kernel.attention.attention import AttentionInputs
from shared.kernel.code.step_layout import Layout
from shared.kv.pool import KVPool
from shared.model.hashlm.draft import DEPTH, HashDraft
from shared.model.hashlm.model import HashLM
from shared.model.math.interface import ModelInputs
from tests.support.oracles.hash_draft import expected_accept_len
from tests.support.oracles.hashlm_reference import reference_stream

WIDTH = 4
HIT_RATE = 70
PROMPT = [5, 17, 40, 2, 80, 33, 61]
STREAM = reference_stream(PROMPT, SamplingParams(max_tokens=60, temperature=0.0), 0, 60)
TOKENS = PROMPT + STREAM
PAGES = [9, 2, 30, 4, 21, 7, 15, 11, 6, 18, 3, 25, 12, 28, 1, 19, 8]


def view_of(positions: range, pages: list[int]) -> AttentionInputs:
    ends, table = torch.tensor([0, len(positions)], dtype=torch.int32), torch.tensor([pages], dtype=torch.int32)
    layout = Layout(ends, (table,), len(positions), positions[-1] + 1)
    return AttentionInputs(torch.tensor(list(positions)), layout)


def aux_of(num_tokens: int) -> torch.Tensor:
    """What HashLM leaves of the true tokens 0 .. num_tokens - 1."""
    model = HashLM()
    kv = KVPool(model.kv_planes(4), 40, 4)
    view = view_of(range(num_tokens), PAGES)
    ids, last = torch.tensor(TOKENS[:num_tokens]), torch.tensor([num_tokens - 1])
    aux = model.forward(ModelInputs(ids, view.positions, view.layout, last), kv).aux
    assert aux is not None and aux.shape == (num_tokens, 3)
    return aux


class Draft:
    """A layer whose slots hold the true tokens 0 .. committed - 1, written `chunk` at a time."""

    def __init__(self, committed: int, hit_rate: int = HIT_RATE, chunk: int = 64) -> None:
        self.committed = committed
        self.head = HashDraft(HashLM(), hit_rate)
        self.kv = KVPool(self.head.kv_planes(4), 40, 4)
        self.pages = list(PAGES)
        self.features = self.head.project(aux_of(committed))
        for begin in range(0, committed, chunk):
            self.hidden = self.extend(range(begin, min(begin + chunk, committed)))

    def extend(self, slots: range, next_ids: list[int] | None = None) -> torch.Tensor:
        ids = TOKENS[slots.start + 1 : slots.stop + 1] if next_ids is None else next_ids
        features = self.features[slots.start : slots.stop]
        return self.head.forward(torch.tensor(ids), features, view_of(slots, self.pages), self.kv).hidden

    def drafts(self, num: int = WIDTH - 1) -> list[int]:
        """Greedy: the first out of the last hidden state, the others by forwards of their own."""
        hidden = self.hidden[-1:]
        drafts = [int(self.head.logits(hidden).argmax())]
        for i in range(num - 1):
            slot = range(self.committed + i, self.committed + i + 1)
            hidden = self.head.forward(torch.tensor(drafts[-1:]), hidden, view_of(slot, self.pages), self.kv).hidden
            drafts.append(int(self.head.logits(hidden).argmax()))
        return drafts

    def accept_len(self, width: int = WIDTH) -> int:
        true_ids = TOKENS[self.committed + 1 : self.committed + width]
        agree = [d == t for d, t in zip(self.drafts(width - 1), true_ids, strict=True)]
        return 1 + (agree.index(False) if False in agree else width - 1)


@pytest.mark.parametrize("width", [2, 4, 6])
@pytest.mark.parametrize("hit_rate", [0, HIT_RATE, 100])
def test_accepted_length_is_the_pure_function(width: int, hit_rate: int) -> None:
    lengths = range(len(PROMPT), 40)  # before that the next token is the prompt's, not the model's
    accepted = [Draft(n, hit_rate).accept_len(width) for n in lengths]
    assert accepted == [expected_accept_len(n, width, hit_rate) for n in lengths]


LUCKY = [n for n in range(len(PROMPT), 50) if expected_accept_len(n, WIDTH, HIT_RATE) == WIDTH][:8]


def break_page(draft: Draft) -> None:
    draft.pages[0] = 39


def break_order(draft: Draft) -> None:
    draft.pages[0], draft.pages[1] = draft.pages[1], draft.pages[0]


def break_token(draft: Draft) -> None:
    wrong = (TOKENS[draft.committed] + 1) % 96
    draft.extend(range(draft.committed - 1, draft.committed), [wrong])


def break_hidden(draft: Draft) -> None:
    draft.hidden = draft.hidden + torch.tensor([1, 0, 0, 0])


def break_age(draft: Draft) -> None:
    """A draft that came true, whose slot was not written again with the target's feature."""
    draft.features[draft.committed - 1, DEPTH] = 1
    draft.hidden = draft.extend(range(draft.committed - 1, draft.committed))
    draft.hidden[:, DEPTH] = 1


FAULTS = [break_page, break_order, break_token, break_hidden, break_age]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_wrong_piece_of_draft_state_lowers_acceptance(fault) -> None:  # noqa: ANN001
    for committed in LUCKY:
        draft = Draft(committed)
        assert draft.accept_len() == WIDTH
        draft = Draft(committed)
        fault(draft)
        assert draft.accept_len() < WIDTH


@pytest.mark.parametrize("layer", [1, 2])
def test_a_layer_above_stands_on_the_one_below(layer: int) -> None:
    """Its slots below `layer` have nothing to stand on; from there on it knows what the target will."""
    num = 12
    below = Draft(num).head.project(aux_of(num))
    kv = KVPool(tuple(HashDraft(HashLM(), 100, i).kv_planes(4)[0] for i in range(layer + 1)), 40, 4)
    next_ids, view = torch.tensor(TOKENS[1 : num + 1]), view_of(range(num), PAGES)
    for i in range(layer + 1):
        head = HashDraft(HashLM(), 100, i)
        hidden = head.forward(next_ids, below, view, kv).hidden
        below = hidden.roll(1, dims=0)
        below[0] = 0
    assert (hidden[:layer, DEPTH] < 0).all() and (hidden[layer:, DEPTH] == layer + 1).all()
    truth = aux_of(num + 1)[1:]
    assert torch.equal(hidden[layer:, :2], truth[layer:, :2])
