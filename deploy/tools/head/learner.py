"""One training update and its state, which one safetensors file saves exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from deploy.tools.head.loss import Goal, make_goal, soft_cross_entropy
from deploy.tools.head.network import HeadNet, drop_firsts, rows_of
from deploy.tools.head.settings import Recipe
from deploy.tools.head.store import FeatureTrace
from shared.core.errors import ConfigError

Tensor = torch.Tensor
WARM_UP = 0.03  # share of the run in which the learning rate rises
FIXED = ("batch_tokens", "draft_vocab", "max_tokens", "seed")  # settings that may not change when a run resumes
RATES = {"muon": 1.0, "adam": 0.5}  # learning rates, as multiples of the recipe's rate


@dataclass(frozen=True, slots=True)
class DraftWords:
    ids: Tensor  # (draft vocab,) int64, ascending: target ids
    of_target: Tensor  # (V,) int64: the draft id of each target id; -1 for none
    rows: Tensor  # (draft vocab, H): the target's output rows


@dataclass(slots=True)
class Position:
    updates: int = 0
    tokens: int = 0  # answer tokens trained on so far
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class UpdateResult:
    losses: tuple[float, ...]  # by step of the chain: mean loss over answer tokens that have a draft id
    # by step: of all answer tokens, the share that have a draft id and on which head and target agree
    hits: tuple[float, ...]
    tokens: int


class Learner:
    """Train inner matrices with Muon, and output rows and norms with AdamW.

    `scale` (3H,): the size of each channel of the target's hidden states. Some models have channels a thousand times as
    large as others. So training multiplies the weight of `fc` by `scale`, and the method `weights` divides the trained
    weight by `scale` again.
    """

    def __init__(
        self, net: HeadNet, weights: Mapping[str, Tensor], scale: Tensor, words: DraftWords, recipe: Recipe
    ) -> None:
        self.net = net
        self.words = words
        self.recipe = recipe
        self.position = Position()
        self.scale = scale
        self.masters = dict(weights)
        self.masters["fc.weight"] = weights["fc.weight"] * scale
        for one in self.masters.values():
            one.requires_grad_(True)
        inner = [n for n, w in self.masters.items() if w.dim() == 2 and n != "lm_head.weight"]
        self._parts = {"muon": inner, "adam": [n for n in self.masters if n not in inner]}
        self._optimizers: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(
                [self.masters[n] for n in inner],
                lr=recipe.rate,
                weight_decay=recipe.decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            "adam": torch.optim.AdamW(
                [self.masters[n] for n in self._parts["adam"]], lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.0
            ),
        }

    def weights(self) -> dict[str, Tensor]:
        """Return the weights in the public format, as part of the autograd graph."""
        return {**self.masters, "fc.weight": self.masters["fc.weight"] / self.scale}

    def update(self, traces: Sequence[FeatureTrace], share_done: float) -> UpdateResult:
        """`share_done` (0 to 1) sets the learning rate and the number of drafts."""
        rate = self.recipe.rate * min(share_done / WARM_UP, 1.0) * (1.0 - share_done)
        for kind, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = rate * RATES[kind]
            optimizer.zero_grad(set_to_none=True)
        loss, result = self._loss(traces, steps_at(share_done, self.recipe.steps))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_([self.masters[n] for n in self._parts["adam"]], 1.0)
        for optimizer in self._optimizers.values():
            optimizer.step()
        self.position.updates += 1
        self.position.tokens += result.tokens
        return result

    def _loss(self, traces: Sequence[FeatureTrace], steps: int) -> tuple[Tensor, UpdateResult]:
        rows = rows_of(traces)
        weights = self.weights()
        goal = goal_of(traces, self.words)
        outputs = self.net.unroll(weights, traces, steps)
        total, losses, hits = torch.zeros(()), [], []
        wanted = torch.arange(len(rows.starts))
        for step, hidden in enumerate(outputs):
            found = soft_cross_entropy(hidden, weights["lm_head.weight"], goal, wanted)
            size = max(1.0, float(goal.weight[wanted].sum()))
            total = total + found.loss * (self.recipe.step_weight**step / size)
            losses.append(float(found.loss.detach()) / size)
            hits.append(float((found.hits * goal.weight[wanted]).mean()))
            wanted = drop_firsts(wanted, rows.counts(step))
        return total, UpdateResult(tuple(losses), tuple(hits), len(rows.starts))

    def save(self, path: Path) -> None:
        tensors = {f"weight.{name}": value.detach() for name, value in self.masters.items()}
        tensors |= {"scale": self.scale, "draft_ids": self.words.ids}
        for kind, optimizer in self._optimizers.items():
            for name in self._parts[kind]:
                for key, value in optimizer.state[self.masters[name]].items():
                    tensors[f"{kind}.{name}.{key}"] = value
        part = path.with_suffix(".part")
        said = {"position": json.dumps(asdict(self.position)), "recipe": json.dumps(asdict(self.recipe))}
        save_file(tensors, part, said)
        part.rename(path)

    def load(self, path: Path) -> None:
        """Raise ConfigError if the file is from a run with other FIXED settings or other answers."""
        with safe_open(path, "pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            said = file.metadata()
        then, now = json.loads(said["recipe"]), asdict(self.recipe)
        other = [name for name in FIXED if then[name] != now[name]]
        if other or not torch.equal(found["draft_ids"], self.words.ids):
            named = ", ".join(f"{name} {then[name]}" for name in other) or "other answers"
            raise ConfigError(f"{path} is from a run with {named}; use these, or begin in another folder")
        self.position = Position(**json.loads(said["position"]))
        self.scale = found["scale"].to(self.scale.device)
        with torch.no_grad():
            for name, value in self.masters.items():
                value.copy_(found[f"weight.{name}"])
        for kind, optimizer in self._optimizers.items():
            for name in self._parts[kind]:
                lead = f"{kind}.{name}."
                master = self.masters[name]
                state = {key.removeprefix(lead): value for key, value in found.items() if key.startswith(lead)}
                # Scalars are the optimizers' counters, which belong on the host.
                optimizer.state[master] = {key: v.to(master.device) if v.dim() else v for key, v in state.items()}


def steps_at(share_done: float, steps: int) -> int:
    """Return the number of drafts to train, which grows during the run, up to `steps`."""
    return min(steps, 2 + int(share_done * max(1, steps - 1)))


def goal_of(traces: Sequence[FeatureTrace], words: DraftWords) -> Goal:
    """Return step 0's goal: the output of slot j predicts the target's choice after position j + 1."""
    final = torch.cat([one.final[one.prompt : -1] for one in traces])
    known = torch.cat([words.of_target[one.ids[one.prompt + 1 :]] >= 0 for one in traces])
    return make_goal(final.to(words.rows.device), words.rows, known)
