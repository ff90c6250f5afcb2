"""Models for the explorer: HashLM, or a tiny one with three MTP layers of floats. The right answers and drafts of the
second one come from the library's own `generate` and MtpModel."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from shared.core.request import Request
from shared.core.sampling_params import SamplingParams
from shared.model.library.mtp_loading import load_mtp_heads
from shared.node.records.core import NodeCore
from shared.speculation.multi_layer_eagle import MultiLayerEagleWorkerV2
from tests.support.cores.core_rig import CoreKnobs, Job, make_core
from tests.support.cores.equivalence_cells import AcceptRule, by_hash
from tests.support.models.library_families import PROMPTS, generate
from tests.support.models.mtp_folders import MtpFolder, save_with_mtp

FAMILY = "step3p7"
# The hazard detector knows pools of one page group, so all layers attend to all tokens.
CHANGES = {"layer_types": ["full_attention"] * 7}
NUM_DRAFTS = 3
LENGTHS = (1, 2, 7, 12)  # of answers


@dataclass(frozen=True)
class Subject:
    """`accepts`: what each verify must accept."""

    make: Callable[[CoreKnobs], NodeCore]
    accepts: AcceptRule


HASHED = Subject(make_core, by_hash)


@dataclass(frozen=True)
class Right:
    """A prompt with its greedy answer, and the drafts after each number of tokens in the answer."""

    text: tuple[int, ...]
    drafts: dict[int, list[int]]

    def accept_len(self, committed: int, width: int) -> int:
        """Return what a verify accepts: the bonus token, then drafts as far as they are the answer's tokens."""
        length, accepted = committed + 1, 1
        for draft, token in zip(self.drafts[length][: width - 1], self.text[length:], strict=False):
            if draft != token:
                break
            accepted += 1
        return accepted


@dataclass(frozen=True)
class GreedyJob(Job):
    def expected_of(self, seed: int) -> list[int]:
        begin = len(self.prompt)
        return list(right_of(self.prompt).text[begin : begin + self.sampling.max_tokens])


@functools.cache
def real_heads() -> tuple[MtpFolder, Subject]:
    with TemporaryDirectory() as folder:
        own = save_with_mtp(FAMILY, Path(folder), **CHANGES)
        model = own.load()
        heads = load_mtp_heads(model)

    def accept_len(request: Request, committed: int, width: int) -> int:
        return right_of(tuple(request.ask.prompt_ids.tolist())).accept_len(committed, width)

    def make(knobs: CoreKnobs) -> NodeCore:
        """Cores get copies, whose methods may be wrapped. The weights are shared."""
        drafter = MultiLayerEagleWorkerV2(heads, model.spec.vocab_size)
        return make_core(knobs, model=copy.copy(model), drafter=drafter)

    return own, Subject(make, accept_len)


@functools.cache
def right_of(prompt: tuple[int, ...]) -> Right:
    own, _ = real_heads()
    answer = generate(own.network, prompt, max(LENGTHS) + NUM_DRAFTS + 1).ids
    text, drafts = (*prompt, *answer), {}
    with torch.inference_mode():
        states = own.network.get_decoder()(torch.tensor([text])).last_hidden_state
        for length in range(len(prompt) + 1, len(prompt) + max(LENGTHS) + 1):
            ids, positions = torch.tensor([text[1:length]]), torch.arange(1, length)[None]
            found, _, _ = own.mtp(ids, states[:, : length - 1], None, positions, None)
            drafts[length] = found[0].tolist()
    return Right(text, drafts)


def greedy_jobs(rng: random.Random, count: int) -> list[Job]:
    """Draw jobs, and ask the library now: later the explorer watches all operators."""
    jobs: list[Job] = []
    for rid in range(count):
        params = SamplingParams(rng.choice(LENGTHS), temperature=0.0)
        jobs.append(GreedyJob(rid, rng.choice(PROMPTS), params, seed=rid))
        right_of(jobs[-1].prompt)
    return jobs
