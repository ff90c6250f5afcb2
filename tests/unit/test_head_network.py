"""The draft network unrolled, its loss, and the target's features, each against a slow and obvious version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from deploy.tools.head.data import TrainingAnswer, frequent_ids
from deploy.tools.head.evaluate import acceptance, chains, walk
from deploy.tools.head.learner import Learner, goal_of, steps_at
from deploy.tools.head.loss import make_goal, soft_cross_entropy
from deploy.tools.head.network import HeadNet
from deploy.tools.head.settings import Recipe
from deploy.tools.head.start import first_weights, head_config
from deploy.tools.head.store import FeatureTrace
from deploy.tools.head.target import TargetNet
from deploy.tools.head.train import channel_scale, draft_words, head_net
from shared.model.opened import open_model
from shared.model.weights import TensorSource
from tests.support.draft_head import AUX_LAYERS, VOCAB, save_target

LENGTHS = ((3, 9), (1, 6), (7, 12))  # prompt and answer
STEPS = 3
DRAFT_VOCAB = 40


class Small:
    """A tiny target and what a run makes of three answers."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.network = save_target(folder, "odd")
        self.source: TensorSource = open_model(folder)
        self.target = TargetNet(self.source, torch.float32, torch.device("cpu"), 64)
        draw = torch.Generator().manual_seed(3)
        self.answers = [
            TrainingAnswer(tuple(ids[:p].tolist()), tuple(ids[p:].tolist()), 0.0)
            for p, a in LENGTHS
            for ids in [torch.randint(0, VOCAB, (p + a,), generator=draw)]
        ]
        features = self.target.features([one.ids for one in self.answers])
        lengths = [len(one.ids) for one in self.answers]
        self.traces = [
            FeatureTrace(torch.tensor(one.ids), len(one.prompt), True, aux, final)
            for one, aux, final in zip(
                self.answers, features.aux.split(lengths), features.final.split(lengths), strict=True
            )
        ]
        self.config = head_config(self.source.config, DRAFT_VOCAB)
        self.words = draft_words(self.answers, self.source, DRAFT_VOCAB, self.target)
        self.net: HeadNet = head_net(self.config, self.target)
        self.weights = {name: value.clone() for name, value in first_weights(self.source, self.words.ids, 5).items()}

    def learner(self, rate: float = 2e-3) -> Learner:
        recipe = Recipe(steps=STEPS, rate=rate, draft_vocab=DRAFT_VOCAB)
        weights = first_weights(self.source, self.words.ids, 5)
        return Learner(self.net, weights, channel_scale(self.traces), self.words, recipe)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp("target"))


def test_features_are_what_layers_read(small: Small) -> None:
    for one, trace in zip(small.answers, small.traces, strict=True):
        with torch.no_grad():
            seen = small.network(torch.tensor([one.ids]), output_hidden_states=True).hidden_states
        torch.testing.assert_close(trace.aux, torch.cat([seen[n][0] for n in AUX_LAYERS], dim=-1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(trace.final, seen[-1][0], rtol=1e-4, atol=1e-4)


def layer(weights: dict[str, torch.Tensor], net: HeadNet, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """One causal pass over whole slots, as a server runs it: (n, H) features and (n,) tokens -> (n, H)."""
    c = net.layer
    get = {name.removeprefix("midlayer.").removesuffix(".weight"): value for name, value in weights.items()}

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + c.rms_eps) * weight

    def rotated(x: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(
            torch.arange(len(x)).float(), c.rope.theta ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
        )
        cos, sin = (torch.cat([part, part], -1)[:, None] for part in (angles.cos(), angles.sin()))
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    x = torch.cat([norm(net._embed[tokens], get["input_layernorm"]), norm(features, get["hidden_norm"])], -1)
    q, k, v = ((x @ get[f"self_attn.{n}_proj"].T).view(len(x), -1, c.head_dim) for n in "qkv")
    group = c.num_heads // c.num_kv_heads
    q, k, v = rotated(q), rotated(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * c.head_dim**-0.5
    shares = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf")).softmax(-1)
    out = torch.einsum("hij,jhd->ihd", shares, v).reshape(len(x), -1)
    residual = features + out @ get["self_attn.o_proj"].T
    y = norm(residual, get["post_attention_layernorm"])
    return residual + (F.silu(y @ get["mlp.gate_proj"].T) * (y @ get["mlp.up_proj"].T)) @ get["mlp.down_proj"].T


def test_every_chain_is_what_a_server_drafts(small: Small) -> None:
    """The mask of training-time test, by definition: each chain run on its own, slot after slot."""
    outputs = small.net.unroll(small.weights, small.traces, STEPS)
    norm = small.weights["norm.weight"]
    parts = [list(out.split([a - 1 - k for _, a in LENGTHS])) for k, out in enumerate(outputs)]
    for n, trace in enumerate(small.traces):
        fc = trace.aux @ small.weights["fc.weight"].T
        for chain in range(len(trace.ids) - trace.prompt - 1):
            first = trace.prompt - 1 + chain
            features = fc[: first + 1]
            for step in range(min(STEPS, len(trace.ids) - 2 - first)):
                out = layer(small.weights, small.net, features, trace.ids[1 : first + step + 2])[-1]
                normed = out * torch.rsqrt(out.square().mean() + small.net.layer.rms_eps) * norm
                torch.testing.assert_close(parts[step][n][chain], normed, rtol=1e-3, atol=1e-3)
                features = torch.cat([features, out[None]])


def test_the_fused_loss_and_its_gradient_are_the_plain_ones() -> None:
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(300, 16, generator=draw).requires_grad_()
    weight = torch.randn(50, 16, generator=draw).requires_grad_()
    rows, known = torch.randperm(400, generator=draw)[:300], torch.rand(400, generator=draw) > 0.2
    goal = make_goal(torch.randn(400, 16, generator=draw), torch.randn(50, 16, generator=draw), known)
    found = soft_cross_entropy(hidden, weight, goal, rows)
    plain = -(goal.shares[rows] * (hidden @ weight.T).log_softmax(-1)).sum(-1) @ goal.weight[rows]
    torch.testing.assert_close(found.loss, plain)
    grads = torch.autograd.grad(found.loss * 3, (hidden, weight))
    torch.testing.assert_close(grads, torch.autograd.grad(plain * 3, (hidden, weight)))
    assert torch.equal(found.hits, (hidden @ weight.T).argmax(-1) == goal.shares[rows].argmax(-1))


def test_the_goal_of_a_slot_is_the_targets_next_distribution(small: Small) -> None:
    goal = goal_of(small.traces, small.words)
    with torch.no_grad():
        logits = torch.cat(
            [small.network(torch.tensor([t.ids.tolist()])).logits[0, t.prompt : -1] for t in small.traces]
        )
    torch.testing.assert_close(goal.shares, logits[:, small.words.ids].softmax(-1), rtol=1e-3, atol=1e-4)
    came = torch.cat([trace.ids[trace.prompt + 1 :] for trace in small.traces])
    assert torch.equal(goal.weight.bool(), torch.isin(came, small.words.ids))


def test_a_few_updates_lower_the_loss(small: Small) -> None:
    learner = small.learner(rate=1e-2)
    goal = goal_of(small.traces, small.words)
    floor = float(-(goal.shares * goal.shares.log()).sum(-1).mean())  # what a perfect head would have
    losses = [learner.update(small.traces, 0.02).losses for _ in range(12)]
    assert all(last - floor < (first - floor) / 4 for first, last in zip(losses[0], losses[-1], strict=True))


def test_weights_out_undo_the_scale(small: Small) -> None:
    torch.testing.assert_close(small.learner().weights()["fc.weight"], small.weights["fc.weight"])


def test_chains_begin_short_and_end_long() -> None:
    assert [steps_at(share, 4) for share in (0.0, 0.3, 0.4, 0.7, 1.0)] == [2, 2, 3, 4, 4]
    assert [steps_at(share, 1) for share in (0.0, 1.0)] == [1, 1]


def test_a_walk_counts_as_a_server_does() -> None:
    """Ten tokens: the first chain is right twice, the chain after it not at all, then all is right to the end."""
    first = [True, True, True, False, True, True, True, True, True, True]
    second = [True, False, True, True, True, True, True, True, True]
    third = [False] * 8
    assert walk([torch.tensor(first), torch.tensor(second), torch.tensor(third)]) == (10, 4)
    assert walk([torch.tensor([False] * 4)]) == (4, 4)


def test_drafts_are_compared_with_the_tokens_that_came(small: Small) -> None:
    """A head whose only word is the token after next of one answer is right there and nowhere else."""
    trace = small.traces[0]
    wanted = int(trace.ids[trace.prompt + 3])
    head = {**small.weights, "lm_head.weight": torch.zeros_like(small.weights["lm_head.weight"])}
    ids = torch.full((DRAFT_VOCAB,), wanted)
    right = chains(small.net, head, ids, [trace], 2)[0]
    came = trace.ids[trace.prompt + 1 :] == wanted
    assert torch.equal(right[0], came) and torch.equal(right[1], came[1:])
    found = acceptance(small.net, head, ids, small.traces, 2)
    assert found.answers == 3 and found.tokens == sum(a - 1 for _, a in LENGTHS)
    assert 1.0 <= found.tokens_per_verify[0] <= found.tokens_per_verify[1] <= 3.0


def test_the_draft_vocabulary_is_what_answers_use() -> None:
    answers = [TrainingAnswer((1,), (7, 7, 9, 4, 4, 4), 0.0)]
    assert frequent_ids(answers, 3, [2]) == [2, 4, 7]
    assert frequent_ids(answers, 6, [2]) == [0, 1, 2, 4, 7, 9]


def test_a_draft_vocabulary_keeps_all_stop_ids() -> None:
    assert frequent_ids([], 1, [5, 2]) == [2, 5]
