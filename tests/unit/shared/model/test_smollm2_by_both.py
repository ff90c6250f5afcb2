"""SmolLM2 as Baton's own program and as the library's layers: the same weights give the same greedy answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from shared.core.sampling_params import SamplingParams
from shared.model.formats.opened import LoadOptions
from shared.model.library.model import LibraryModel
from shared.model.loading.load import load_model
from tests.support.cores.core_pair import make_pair, run_pair
from tests.support.cores.core_rig import CoreKnobs, Job, assert_whole
from tests.support.models.transformers_model import default_model_in_transformers

NUM_PROMPTS, NEW_TOKENS, TIE = 32, 32, 1e-4
KNOBS = CoreKnobs("inline", chunk_size=64, page_size=16, num_pages=400)


@pytest.fixture(scope="module")
def network() -> PreTrainedModel:
    return default_model_in_transformers()


def test_thirty_two_prompts_have_the_same_answers(network: PreTrainedModel, tmp_path: Path) -> None:
    """Handed over. Where answers part, the two tokens must be a tie in the library's own logits."""
    network.save_pretrained(tmp_path)
    draw = torch.Generator().manual_seed(2)
    prompts = [tuple(torch.randint(1000, 40000, (4 + 3 * n,), generator=draw).tolist()) for n in range(NUM_PROMPTS)]
    ours, theirs = (answers(tmp_path, library, prompts) for library in ("baton", "transformers"))
    ties = [tie(network, *three) for three in zip(prompts, ours, theirs, strict=True) if three[1] != three[2]]
    assert max(ties, default=0.0) < TIE
    assert len(ties) < 3, "ties are rare"


def answers(folder: Path, library: str, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    model = load_model(str(folder), LoadOptions("float32", max_context=512, library=library))
    assert isinstance(model, LibraryModel) == (library == "transformers")
    pair = make_pair(KNOBS, model=model)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
    run_pair(pair, [Job(rid, prompt, params, seed=rid) for rid, prompt in enumerate(prompts)])
    for core in (pair.prefill, pair.decode):
        assert_whole(core)
    pair.close()
    return [pair.outcome.streams[f"r{rid}"] for rid in range(len(prompts))]


def tie(network: PreTrainedModel, prompt: tuple[int, ...], ours: list[int], theirs: list[int]) -> float:
    """Return how far apart the first two unlike tokens are for the library, as a share of the largest logit."""
    at = next(place for place, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    with torch.inference_mode():
        logits = network(torch.tensor([[*prompt, *theirs[:at]]])).logits[0, -1]
    return float((logits[theirs[at]] - logits[ours[at]]).abs() / logits.abs().max())
