"""What is trained is what is served: the network that learns and the head that drafts say the same of one sequence."""

from __future__ import annotations

from pathlib import Path

import torch

from deploy.tools.head.network import HeadNet
from deploy.tools.head.store import FeatureTrace
from deploy.tools.head.target import TargetNet
from shared.kernel.attention import AttentionInputs
from shared.kv.pool import KVPool
from shared.model.eagle_file import HeadFolder
from shared.model.interface import ModelInputs
from shared.model.load import load_eagle_head, load_model
from shared.model.opened import LoadOptions, open_model
from tests.support.draft_head import VOCAB, head_config, head_tensors, save_head, save_target

TOKENS, PROMPT, STEPS = 40, 12, 3
TABLE = torch.tensor([[3, 1, 2]], dtype=torch.int32)


def view(start: int, stop: int) -> AttentionInputs:
    bounds = torch.tensor([0, stop - start], dtype=torch.int32)
    return AttentionInputs(torch.arange(start, stop), bounds, TABLE, stop - start, stop)


def test_chains_of_training_are_drafts_of_serving(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    save_target(tmp_path / "target")
    folder = save_head(tmp_path / "head", head_tensors(), head_config())
    target = load_model(str(tmp_path / "target"), LoadOptions("float32"))
    head = load_eagle_head(str(folder), "tiny", target)
    target.capture_aux(head.aux_layers)
    ids = torch.randint(0, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(2))
    learned = TargetNet(open_model(tmp_path / "target"), torch.float32, torch.device("cpu"), 64)
    traced = learned.features([ids.tolist()])
    layer = HeadFolder(folder, target.config).config.layer
    net = HeadNet(layer, learned.embed, rope_of_head(layer.rope.theta, layer.head_dim), torch.float32)
    outputs = net.unroll(head_tensors(), [FeatureTrace(ids, PROMPT, True, traced.aux, traced.final)], STEPS)

    pool = KVPool(target.kv_planes(16) + head.kv_planes(16), 4, 16)
    with torch.inference_mode():
        whole = view(0, TOKENS)
        inputs = ModelInputs(ids, whole.positions, whole.cu_q_lens, TABLE, torch.arange(TOKENS), TOKENS, TOKENS)
        aux = target.forward(inputs, pool).aux
        torch.testing.assert_close(aux, traced.aux, rtol=1e-4, atol=1e-4)
        for chain, slot in enumerate(range(PROMPT - 1, TOKENS - 1 - STEPS)):
            last = torch.tensor([slot])
            output = head.extend(ids[1 : slot + 2], aux[: slot + 1], view(0, slot + 1), pool, last)
            for step in range(STEPS):
                trained = outputs[step][chain] @ head_tensors()["lm_head.weight"].T
                torch.testing.assert_close(output.logits[0], trained, rtol=1e-3, atol=1e-3)
                after = slot + 1 + step
                output = head.forward(ids[after + 1 : after + 2], output.hidden, view(after, after + 1), pool)


def rope_of_head(theta: float, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(TOKENS).float(), theta ** (-torch.arange(0, head_dim, 2) / head_dim))
    return angles.cos(), angles.sin()
