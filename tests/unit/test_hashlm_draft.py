"""HashDraft: the accepted length is a function of (length, width, hit rate), and only bad draft state lowers it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.core.sampling_params import SamplingParams
from shared.kv.pool import KVPool
from shared.model.hash_reference import reference_stream
from shared.model.hashdraft import HashDraft, expected_accept_len
from shared.model.hashlm import HashLM
from shared.model.interface import ModelInputs

WIDTH = 4
HIT_RATE = 70
PROMPT = [5, 17, 40, 2, 80, 33, 61]
STREAM = reference_stream(PROMPT, SamplingParams(max_tokens=60, temperature=0.0), 0, 60)
TOKENS = PROMPT + STREAM
PAGES = [9, 2, 30, 4, 21, 7, 15, 11, 6, 18, 3, 25, 12, 28, 1, 19, 8]


def greedy(logits: torch.Tensor, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=1)


def inputs_of(num_tokens: int) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.tensor(TOKENS[:num_tokens]),
        "next_ids": torch.tensor(TOKENS[1 : num_tokens + 1]),
        "positions": torch.arange(num_tokens),
        "cu_q_lens": torch.tensor([0, num_tokens], dtype=torch.int32),
        "page_table": torch.tensor([PAGES], dtype=torch.int32),
    }


def hidden_at(position: int) -> torch.Tensor:
    """HashLM's state after 0..position of the true tokens."""
    model = HashLM()
    kv = KVPool(model.kv_planes(4), 40, 4)
    fields = inputs_of(position + 1)
    fields.pop("next_ids")
    last = torch.tensor([position])
    inputs = ModelInputs(**fields, logits_idx=last, max_q_len=position + 1, max_seq_len=position + 1)
    return model.forward(inputs, kv).hidden


class Draft:
    """A draft whose state holds the true tokens 0..committed-1."""

    def __init__(self, committed: int) -> None:
        self.committed = committed
        self.draft = HashDraft(HashLM(draft=True), HIT_RATE)
        self.kv = KVPool(self.draft.model.kv_planes(4), 40, 4)
        self.draft.extend(**inputs_of(committed), kv=self.kv)
        self.bonus = TOKENS[committed]
        self.hidden = hidden_at(committed - 1)
        self.pages = list(PAGES)

    def accept_len(self, width: int = WIDTH) -> int:
        table = torch.tensor([self.pages], dtype=torch.int32)
        bonus, committed = torch.tensor([self.bonus]), torch.tensor([self.committed])
        drafts = self.draft.propose(bonus, committed, self.hidden, table, self.kv, width, greedy)
        assert drafts.shape == (1, width - 1) and drafts.dtype == torch.int64
        true_ids = TOKENS[self.committed + 1 : self.committed + width]
        agree = [d == t for d, t in zip(drafts[0].tolist(), true_ids, strict=True)]
        return 1 + (agree.index(False) if False in agree else width - 1)


@pytest.mark.parametrize("width", [2, 4, 6])
def test_accepted_length_is_the_pure_function(width: int) -> None:
    lengths = range(len(PROMPT), 50)  # before that the next token is the prompt's, not the model's
    assert [Draft(n).accept_len(width) for n in lengths] == [expected_accept_len(n, width, HIT_RATE) for n in lengths]


def test_expected_length_is_not_trivial() -> None:
    lengths = [expected_accept_len(n, WIDTH, HIT_RATE) for n in range(1, 4000)]
    assert {1, 2, 3, 4} == set(lengths)
    assert 2.3 < np.mean(lengths) < 2.8  # 1 + .7 + .49 + .343
    assert expected_accept_len(9, WIDTH, 100) == WIDTH and expected_accept_len(9, WIDTH, 0) == 1


LUCKY = [n for n in range(len(PROMPT), 50) if expected_accept_len(n, WIDTH, HIT_RATE) == WIDTH][:8]


@pytest.mark.parametrize("fault", ["hidden", "bonus", "page", "swap", "stale next token"])
def test_each_wrong_piece_of_draft_state_lowers_acceptance(fault: str) -> None:
    for committed in LUCKY:
        draft = Draft(committed)
        assert draft.accept_len() == WIDTH
        if fault == "hidden":
            draft.hidden += 1
        elif fault == "bonus":
            draft.bonus = (draft.bonus + 1) % 96
        elif fault == "page":
            draft.pages[0] = 39
        elif fault == "swap":
            draft.pages[0], draft.pages[1] = draft.pages[1], draft.pages[0]
        else:
            fields = inputs_of(committed)
            fields["next_ids"][-1] = (fields["next_ids"][-1] + 1) % 96
            draft.draft.extend(**fields, kv=draft.kv)
        assert draft.accept_len() < WIDTH


def test_rows_are_independent() -> None:
    committed = LUCKY[0]
    first, second = Draft(committed), Draft(committed)
    pages = torch.tensor([PAGES, PAGES], dtype=torch.int32)
    second.hidden += 1
    drafts = first.draft.propose(
        torch.tensor([first.bonus] * 2),
        torch.tensor([committed] * 2),
        torch.cat([first.hidden, second.hidden]),
        pages,
        first.kv,
        WIDTH,
        greedy,
    )
    alone = first.draft.propose(
        torch.tensor([first.bonus]), torch.tensor([committed]), first.hidden, pages[:1], first.kv, WIDTH, greedy
    )
    assert torch.equal(drafts[:1], alone) and drafts[1, 0] != alone[0, 0]


def test_a_model_without_draft_plane_is_refused() -> None:
    with pytest.raises(ValueError, match="draft"):
        HashDraft(HashLM())
