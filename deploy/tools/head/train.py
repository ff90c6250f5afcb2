"""Train on shards of answers in a fixed order.

A restart with the same work folder resumes at the last checkpoint, and yields the weights of an unbroken run.

  WORK/features/*.safetensors:  the target's hidden states, one file per shard.
  WORK/checkpoint.safetensors:  weights, optimizer state and progress.
  WORK/curve.jsonl:             one line per update, and one per evaluation on held-out answers.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from deploy.tools.head.data import TrainingAnswer, frequent_ids, read_answers, shards, split
from deploy.tools.head.evaluate import HeadAcceptance, acceptance
from deploy.tools.head.learner import DraftWords, Learner
from deploy.tools.head.network import HeadNet
from deploy.tools.head.settings import Recipe, RunSettings
from deploy.tools.head.start import first_weights, head_config
from deploy.tools.head.store import FeatureStore, FeatureTrace
from deploy.tools.head.target import TargetNet
from shared.core.errors import ConfigError
from shared.model.eagle_file import HeadConfig
from shared.model.weights import TensorSource, rope_tables_of

Tensor = torch.Tensor
SHARD = 100
HELD_OUT_ANSWERS = 48  # number of greedy answers that the curve's evaluations use
CHAIN = 5


@dataclass(frozen=True, slots=True)
class Progress:
    tokens: int
    total: int
    losses: tuple[float, ...]  # mean loss of each draft of the chain
    hits: tuple[float, ...]
    seconds: float


class Run:
    def __init__(self, source: TensorSource, recipe: Recipe, settings: RunSettings, target: TargetNet) -> None:
        self.settings = settings
        self.recipe = recipe
        self.work = Path(settings.work)
        self.parts = split(
            (one for file in settings.answers for one in read_answers(Path(file))), recipe.seed, recipe.max_tokens
        )
        if not self.parts.training:
            raise ConfigError(f"{', '.join(settings.answers)}: no answer to train on")
        self.store = FeatureStore(self.work / "features", target)
        self.config = head_config(source.config, recipe.draft_vocab)
        words = draft_words(self.parts.training, source, recipe.draft_vocab, target)
        self._shards = shards(self.parts.training, SHARD)
        scale = channel_scale(self.store.get(self._shards[0])).to(target.device)
        weights = {
            name: value.to(target.device) for name, value in first_weights(source, words.ids, recipe.seed).items()
        }
        self.learner = Learner(head_net(self.config, target), weights, scale, words, recipe)
        if self._checkpoint.exists():
            self.learner.load(self._checkpoint)
        self._forget_after(self.learner.position.tokens)

    @property
    def _checkpoint(self) -> Path:
        return self.work / "checkpoint.safetensors"

    @property
    def _curve(self) -> Path:
        return self.work / "curve.jsonl"

    @property
    def total(self) -> int:
        """Answer tokens in the whole run."""
        return int(self.recipe.epochs * sum(len(one.answer) - 1 for one in self.parts.training))

    def go(self, told: Callable[[Progress], None]) -> None:
        position = self.learner.position
        saved, began, before = time.monotonic(), time.monotonic(), position.seconds
        for batch in self._batches(position.updates):
            result = self.learner.update(batch, position.tokens / self.total)
            position.seconds = before + time.monotonic() - began
            line = Progress(position.tokens, self.total, result.losses, result.hits, position.seconds)
            self._note(asdict(line))
            told(line)
            if position.updates % self.settings.check_every == 0:
                self._note({"tokens": position.tokens, "held_out": asdict(self.check())})
            if time.monotonic() - saved > self.settings.save_every:
                self.learner.save(self._checkpoint)
                saved = time.monotonic()
        self.learner.save(self._checkpoint)

    def check(self) -> HeadAcceptance:
        greedy = [one for one in self.parts.held_out if one.temperature == 0][:HELD_OUT_ANSWERS]
        with torch.no_grad():
            weights = self.learner.weights()
        return acceptance(self.learner.net, weights, self.learner.words.ids, self.store.get(greedy), CHAIN)

    def _batches(self, skip: int) -> Iterator[list[FeatureTrace]]:
        """Yield batches after the first `skip`, in an order drawn by seed and epoch."""
        seen, number, epoch = 0, 0, 0
        while True:
            order = list(range(len(self._shards)))
            if epoch:
                random.Random(f"{self.recipe.seed} {epoch}").shuffle(order)
            for index in order:
                traces: list[FeatureTrace] = []
                for batch in self._batched(self._shards[index], f"{self.recipe.seed} {epoch} {index}"):
                    if seen >= self.total:
                        return
                    if number >= skip:
                        traces = traces or self.store.get(self._shards[index])
                        yield [traces[i] for i in batch]
                    seen += sum(len(self._shards[index][i].answer) - 1 for i in batch)
                    number += 1
            epoch += 1

    def _batched(self, shard: Sequence[TrainingAnswer], seed: str) -> list[list[int]]:
        """Return shuffled indices, in batches of at most `batch_tokens` answer tokens, or of one longer answer."""
        order = list(range(len(shard)))
        random.Random(seed).shuffle(order)
        made: list[list[int]] = []
        room = 0
        for index in order:
            size = len(shard[index].answer)
            if size > room:
                made.append([])
                room = self.recipe.batch_tokens
            made[-1].append(index)
            room -= size
        return made

    def _note(self, line: dict[str, object]) -> None:
        with self._curve.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _forget_after(self, tokens: int) -> None:
        """Drop the curve's lines after the last checkpoint: the run repeats these updates."""
        if self._curve.exists():
            lines = self._curve.read_text("utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["tokens"] <= tokens]
            self._curve.write_text("".join(kept), encoding="utf-8")


def head_net(config: HeadConfig, target: TargetNet) -> HeadNet:
    cos, sin = rope_tables_of(config.layer.head_dim, config.layer.rope, len(target.rope[0]))
    return HeadNet(config.layer, target.embed, (cos.to(target.device), sin.to(target.device)), target.dtype)


def draft_words(answers: Sequence[TrainingAnswer], source: TensorSource, count: int, target: TargetNet) -> DraftWords:
    """Return the most frequent ids, and the end ids. Raise ConfigError if `count` exceeds the vocabulary."""
    if count > source.config.vocab_size:
        raise ConfigError(f"--draft-vocab is {count}; the model has {source.config.vocab_size} ids")
    ids = torch.tensor(frequent_ids(answers, count, source.config.eos_ids))
    of_target = torch.full((source.config.vocab_size,), -1)
    of_target[ids] = torch.arange(len(ids))
    return DraftWords(ids, of_target, target.head[ids.to(target.device)])


def channel_scale(traces: Sequence[FeatureTrace]) -> Tensor:
    """Return (3H,) float32: the root mean square of each channel.

    First tokens are left out: some models give them hidden states a thousand times as large.
    """
    squares = torch.cat([one.aux[1:] for one in traces]).float().square().mean(dim=0)
    return squares.sqrt().clamp_min(1e-6)
