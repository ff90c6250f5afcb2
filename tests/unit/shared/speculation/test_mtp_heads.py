"""MTP layers of published families as draft heads. What is right, the library's own candidate generator, its MtpModel
and its `generate` say."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.generation.candidate_generator import MTPCandidateGenerator

from shared.config.settings.settings import SpecConfig
from shared.core.errors import ConfigError
from shared.core.sampling_params import SamplingParams
from shared.engine.drafter import Drafter
from shared.engine.forward_batch import ForwardBatch
from shared.engine.verify import Drafts
from shared.kernel.team.team import Team
from shared.model.hashlm.model import HashLM
from shared.model.library.kinds import LIBRARY_VERSION
from shared.model.library.model import LibraryModel
from shared.model.library.mtp import MtpLayers
from shared.model.library.mtp_loading import load_mtp_heads
from shared.speculation.drafters import make_drafter
from tests.support.cores.core_pair import CorePair, run_pair
from tests.support.cores.core_rig import Job, assert_whole, make_core, run_local
from tests.support.models.library_families import KNOBS, PROMPTS, VOCAB, generate, load, save
from tests.support.models.mtp_folders import FAMILIES, NUM_LAYERS, REFUSED, MtpFolder, candidates, save_with_mtp

NUM_TOKENS = 24
ADVICE = "; use --spec ngram, eagle or none"
LEAST_PER_VERIFY = 1.8


@dataclasses.dataclass(frozen=True)
class Headed:
    own: MtpFolder
    model: LibraryModel

    def drafter(self, width: int) -> Drafter:
        config = SpecConfig(spec="mtp", spec_width=width, spec_copies=0)
        drafter = make_drafter(config, str(self.own.folder), self.model, Team())
        assert drafter is not None
        return drafter


Make = Callable[[str], Headed]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    torch.set_num_threads(1)
    made: dict[str, Headed] = {}

    def folder_of(family: str) -> Headed:
        if family not in made:
            own = save_with_mtp(family, tmp_path_factory.mktemp("mtp") / family)
            made[family] = Headed(own, own.load())
        return made[family]

    return folder_of


def change_folder(folder: Path, copy: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    for path in folder.iterdir():
        copy.joinpath(path.name).write_bytes(path.read_bytes())
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})


def jobs() -> list[Job]:
    """Greedy and seeded, with penalties."""
    seeded = SamplingParams(NUM_TOKENS, temperature=0.7, repetition_penalty=1.1)
    draws = [SamplingParams(NUM_TOKENS, temperature=0.0), seeded]
    return [Job(rid, prompt, draws[rid % 2], seed=rid) for rid, prompt in enumerate(PROMPTS)]


def drafted(
    headed: Headed, prompt: tuple[int, ...], width: int, drafter: Drafter | None = None
) -> tuple[dict[int, list[int]], list[int]]:
    """Return the drafts after each number of tokens, and the greedy answer, in chunks of a prompt."""
    drafter, found = drafter or headed.drafter(width), {}
    propose = drafter.propose

    def note(fb: ForwardBatch, *args: Any) -> Drafts:
        drafts = propose(fb, *args)
        (committed,) = fb.committed[fb.plan.num_prefill :].tolist()
        found[committed + 1] = drafts.ids[0].tolist()
        return drafts

    drafter.propose = note  # type: ignore[method-assign]
    core = make_core(dataclasses.replace(KNOBS, width=width), model=headed.model, drafter=drafter)
    params = SamplingParams(NUM_TOKENS, temperature=0.0)
    stream = run_local(core, [Job(0, prompt, params, seed=0)]).streams["r0"]
    core.close()
    return found, stream


def said_candidates(headed: Headed, prompt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Return what the library's own generator says after each number of tokens at which it is asked."""
    said, get = {}, MTPCandidateGenerator.get_candidates

    def note(own: MTPCandidateGenerator, input_ids: torch.Tensor, **more: Any) -> Any:
        ids, logits = get(own, input_ids, **more)
        if logits is not None:
            said[input_ids.shape[1]] = ids[0, input_ids.shape[1] :].tolist()
        return ids, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", note)
    generate(headed.own.from_folder(monkeypatch), prompt, NUM_TOKENS, use_mtp=True)
    return said


@pytest.mark.parametrize("family", [*FAMILIES])
def test_drafts_are_the_library_s_candidates(family: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every prefix at which the library's generator makes candidates, one for each MTP layer."""
    headed = make(family)
    said = said_candidates(headed, PROMPTS[1], monkeypatch)
    found, stream = drafted(headed, PROMPTS[1], 1 + NUM_LAYERS[family])
    found.pop(len(PROMPTS[1]) + NUM_TOKENS, None)  # behind the last token nobody asks the library
    assert generate(headed.own.network, PROMPTS[1], NUM_TOKENS).tie(stream) is None
    assert found.keys() <= said.keys() and len(found) > 5
    assert found == {length: said[length] for length in found}


@pytest.mark.parametrize("family", ["glm4_moe", "mellum"])
def test_one_layer_is_applied_again(family: str, make: Make) -> None:
    headed = make(family)
    found, stream = drafted(headed, PROMPTS[1], 4)
    text = [*PROMPTS[1], *stream]
    assert len(found) > 5
    for length, drafts in found.items():
        assert drafts == candidates(headed.own, text[:length], 3)


@pytest.mark.parametrize("family", ["glm4_moe", "mellum", "step3p7"])
def test_drafts_change_no_stream_in_a_hand_off(family: str, make: Make) -> None:
    headed = make(family)
    plain = run_local(make_core(KNOBS, model=headed.model), jobs()).streams
    for rid in (0, 2, 4):
        generate(headed.own.network, PROMPTS[rid], NUM_TOKENS).tie(plain[f"r{rid}"])
    knobs = dataclasses.replace(KNOBS, width=4)
    cores = [make_core(knobs, model=headed.model, drafter=headed.drafter(4)) for _ in range(2)]
    pair = CorePair(*cores)
    assert run_pair(pair, jobs(), retract_every=9, rng=random.Random(1)).streams == plain
    counts = [core.queues.counters for core in cores]
    verified = sum(one.spec_steps for one in counts)
    assert 1 + sum(one.spec_accepted_tokens for one in counts) / verified >= LEAST_PER_VERIFY
    first, second, third = counts[1].spec_accepted_at
    assert counts[1].spec_steps > first > second > third > 0  # each draft is the first to fail somewhere
    for core in cores:
        assert_whole(core)
    pair.close()


@pytest.mark.parametrize("family", ["mellum", "step3p7"])
def test_draft_state_is_handed_over(family: str, make: Make) -> None:
    """The decode core's drafts are those of a core that read the prompt itself."""
    headed, knobs = make(family), dataclasses.replace(KNOBS, width=4)
    alone, _ = drafted(headed, PROMPTS[1], 4)
    drafter, found = headed.drafter(4), []
    propose = drafter.propose

    def note(fb: ForwardBatch, *args: Any) -> Drafts:
        drafts = propose(fb, *args)
        found.append(drafts.ids[0].tolist())
        return drafts

    drafter.propose = note  # type: ignore[method-assign]
    cores = [make_core(knobs, model=headed.model, drafter=one) for one in (headed.drafter(4), drafter)]
    pair = CorePair(*cores)
    run_pair(pair, [Job(0, PROMPTS[1], SamplingParams(NUM_TOKENS, temperature=0.0), seed=0)])
    pair.close()
    assert found == list(alone.values()) and len(found) > 5


@pytest.mark.parametrize(("family", "is_known"), [("glm4_moe", True), ("step3p7", True), ("glm4_moe_lite", False)])
def test_our_kernels_attend_in_mtp_layers(family: str, is_known: bool, make: Make) -> None:
    """Also in a third layer, which reads no key of the first two slots; but not where pages hold latents."""
    headed = make(family)
    heads = load_mtp_heads(headed.model)
    assert len(heads) == NUM_LAYERS[family]
    for head in heads:
        assert head._layers.attention.needs_cpu_seq_lens is not is_known


def test_layers_may_have_output_rows_of_their_own(make: Make, tmp_path: Path) -> None:
    """Step 3.7 publishes some for each layer. Here they are the target's, one id further."""
    own = make("step3p7").own
    rows = own.mtp.shared_head.weight.detach().roll(1, 0)
    added = {f"model.layers.{number}.transformer.shared_head.output.weight": rows.clone() for number in (4, 5, 6)}
    change_folder(own.folder, tmp_path, lambda tensors: tensors.update(added))
    headed = Headed(own, load(tmp_path))
    drafter = make_drafter(SpecConfig(spec="mtp", spec_copies=0), "", headed.model, Team())
    found, stream = drafted(headed, PROMPTS[1], 4, drafter)
    assert len(found) == NUM_TOKENS - 1  # no draft is right
    for length, drafts in found.items():
        assert drafts[:1] == [1 + id for id in candidates(own, [*PROMPTS[1], *stream][:length], 1)]


# Refusals


def refused(folder: Path, width: int = 4) -> str:
    model = load(folder)
    with pytest.raises(ConfigError) as refusal:
        make_drafter(SpecConfig(spec="mtp", spec_width=width), str(folder), model, Team())
    return refusal.value.message


def test_a_folder_without_mtp_layers_is_refused(tmp_path: Path) -> None:
    sentence = f"--spec mtp: {tmp_path} has no tensors of MTP layers{ADVICE}"
    save("glm4_moe", tmp_path)  # the library's patterns are for other numbers of layers
    assert refused(tmp_path) == sentence
    save("llama", tmp_path)  # the library knows no patterns
    assert refused(tmp_path) == sentence


@pytest.mark.parametrize("family", REFUSED)
def test_mtp_layers_that_the_library_can_t_run(family: str, tmp_path: Path) -> None:
    save(family, tmp_path / "target")
    (tmp_path / "own").mkdir()
    added = {REFUSED[family]: torch.ones(64)}
    change_folder(tmp_path / "target", tmp_path / "own", lambda tensors: tensors.update(added))
    assert refused(tmp_path / "own") == (
        f"--spec mtp: {LIBRARY_VERSION} can't run the MTP layers of {tmp_path / 'own'} ({family}){ADVICE}"
    )


def test_models_of_our_own_programs_are_refused(tmp_path: Path) -> None:
    class Plain:
        spec = HashLM(max_context=64).spec

    with pytest.raises(ConfigError, match="--spec mtp: Plain has no MTP layers; models that the library"):
        make_drafter(SpecConfig(spec="mtp"), "Plain", Plain(), Team())  # type: ignore[arg-type]


def test_incomplete_mtp_layers_are_refused_by_name(make: Make, tmp_path: Path) -> None:
    own = make("mellum").own
    change_folder(own.folder, tmp_path, lambda tensors: tensors.pop("mtp.fc.weight"))
    assert "doesn't find all of" in refused(tmp_path) and "eh_proj" in refused(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.update({"mtp.fc.weight": tensors["mtp.fc.weight"][:, 1:].clone()}), "eh_proj"),
        (lambda tensors: tensors.pop("mtp.layers.0.mlp.experts.3.down_proj.weight"), "experts.down_proj"),
    ],
)
def test_mtp_layers_of_another_size_are_refused_by_name(change: Any, named: str, make: Make, tmp_path: Path) -> None:
    """The library alone would draft with what lies in memory."""
    change_folder(make("mellum").own.folder, tmp_path, change)
    assert "in the config's sizes" in refused(tmp_path) and named in refused(tmp_path)


def test_output_rows_of_another_size_are_refused(make: Make, tmp_path: Path) -> None:
    """With more rows than the target's, a draft could be a token that the target doesn't know."""
    own = make("step3p7").own
    name, rows = "model.layers.5.transformer.shared_head.output.weight", torch.zeros(VOCAB + 5, 32)
    change_folder(own.folder, tmp_path, lambda tensors: tensors.update({name: rows}))
    assert f"{name} is ({VOCAB + 5}, 32), the target's output rows ({VOCAB}, 32){ADVICE}" in refused(tmp_path)


def test_more_drafts_than_layers_are_refused(make: Make) -> None:
    sentence = "--spec mtp --spec-width 5: 3 MTP layers make 3 drafts; use --spec-width 4 or less"
    assert refused(make("step3p7").own.folder, 5) == sentence


def test_a_layer_that_differs_from_the_library_s_is_refused(make: Make, monkeypatch: Any) -> None:
    run = MtpLayers.run
    monkeypatch.setattr(MtpLayers, "run", lambda own, *args: run(own, *args) * 1.001)
    with pytest.raises(ConfigError, match=f"MTP layer 0 of .* differs from the library's by .*{ADVICE}$"):
        make("mellum").drafter(2)


def test_layers_that_ask_what_attention_lacks_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    headed = make("glm4_moe")
    monkeypatch.setattr("shared.model.library.survey.window_of", lambda mask, context: None)
    problem = "its MTP layers: a layer's mask is neither causal nor a sliding window, nor chunks"
    with pytest.raises(ConfigError, match=f"^--spec mtp: {headed.own.folder}: {problem}{ADVICE}$"):
        headed.drafter(2)
