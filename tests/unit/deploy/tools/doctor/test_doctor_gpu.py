"""`baton doctor --gpu`: facts of GPUs judged one by one, and a look at the virtual one, where things may be wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deploy.cli import main
from deploy.tools.doctor import look_gpu, read_shared
from deploy.tools.doctor.check_gpu import MOST_DIFFERENCE, check_gpus
from deploy.tools.doctor.facts import GpuDevice, GpuFacts
from deploy.tools.doctor.finding import BROKEN, LOOK, OK, Finding
from deploy.tools.doctor.look_gpu import look_at_gpus
from deploy.tools.doctor.read_shared import read_on_each
from shared.core.errors import HandoffFailed
from shared.device import torch_cuda
from shared.device.passed_checks import has_passed, remember
from tests.support.gpus import fake_flashinfer
from tests.support.gpus.fake_flashinfer import VERSION, library_on
from tests.support.virtual_gpu import backend
from tests.support.virtual_gpu.device import VirtualGpu, make_device

GIB = 1 << 30
READ_ELSEWHERE = read_shared.read_elsewhere


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A virtual GPU's memory is its process's own, so this process reads it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(read_shared, "read_elsewhere", lambda handle: read_on_each(handle, backend.GPUS[0]))


WELL = GpuDevice(
    0, "H100", (9, 0), (), 70 * GIB, 80 * GIB, 50e9, 50e9, True, "", difference=1e-6, largest_logit=2.0, problem=""
)
FACTS = GpuFacts("2.13.0+cu130", "13.0", True, "580.1", None, "", (WELL,))


def of_device(**changes: object) -> Finding:
    """What is said first of a GPU with these changes."""
    return check_gpus(replace(FACTS, devices=(replace(WELL, **changes),)))[0]


def test_a_good_gpu_is_ok_and_untried_parts_are_named() -> None:
    well, shared, untried = check_gpus(FACTS)
    assert shared.level == OK and "cuda_ipc under --transport auto" in shared.what
    assert (well.level, well.where) == (OK, "GPU 0 (H100)")
    for told in ("70.0 of 80.0 GiB free", "50.0 GB/s to it", "5e-07", "CUDA 13.0", "driver 580.1"):
        assert told in well.what
    assert untried.level == LOOK and "have run on an H100 only" in untried.what and "make test-gpu" in untried.what


@pytest.mark.parametrize(
    ("changes", "level", "told"),
    [
        ({"problem": "computing a tiny network: CUDA error: an illegal memory access"}, BROKEN, "illegal memory"),
        ({"copies_arrive": False}, BROKEN, "come back changed"),
        ({"difference": 2.1 * MOST_DIFFERENCE}, BROKEN, "differ from the CPU's"),
        ({"difference": float("nan")}, BROKEN, "differ from the CPU's"),
        ({"difference": 1.9 * MOST_DIFFERENCE}, OK, "logits are the CPU's"),
        ({"free_bytes": 7 * GIB}, LOOK, "7.0 of 80.0 GiB are free"),
        ({"to_host_bytes_per_s": 1e9}, LOOK, "1.0 GB/s"),
        ({"capability": (7, 5)}, LOOK, "capability 7.5"),
        ({"sharing_problem": "operation not supported"}, LOOK, "not supported"),
    ],
)
def test_what_is_wrong_with_a_gpu(changes: dict[str, object], level: str, told: str) -> None:
    found = of_device(**changes)
    assert found.level == level and told in found.what and (found.advice or level == OK)


@pytest.mark.parametrize(
    ("changes", "level", "told"),
    [
        ({"has_driver": False}, LOOK, "nodes compute on the CPU"),
        ({"built_for": ""}, BROKEN, "built without CUDA"),
        ({"visible": ""}, BROKEN, "CUDA_VISIBLE_DEVICES=''"),
        ({"problem": "driver too old (found version 12020)"}, BROKEN, "too old"),
    ],
)
def test_a_machine_without_a_gpu_and_one_whose_gpu_can_t_be_used(
    changes: dict[str, object], level: str, told: str
) -> None:
    (found,) = check_gpus(replace(FACTS, devices=(), **changes))
    assert found.level == level and told in found.what and found.advice


def test_gpus_that_can_t_map_each_other_s_memory_are_named() -> None:
    pair = (replace(WELL, peers=(1,)), replace(WELL, number=1, peers=(0,)))
    assert any("map each other" in one.what for one in check_gpus(replace(FACTS, devices=pair)))
    apart = (*pair, replace(WELL, number=2))
    (found,) = (one for one in check_gpus(replace(FACTS, devices=apart)) if "can't map" in one.what)
    assert found.level == LOOK and "GPUs 0, 1, 2" in found.what and "zmq" in found.advice


@pytest.mark.parametrize(
    ("lines", "told"),
    [(["0" * 64], "GPU 0: other bytes arrived"), (["invalid resource handle"], "GPU 0: invalid resource handle")],
)
def test_memory_that_no_other_process_reads_is_not_remembered(
    lines: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = make_device()
    assert check_gpus(look_at_gpus(gpu))[1].what.startswith("processes can read") and has_passed("cuda_ipc", gpu)
    monkeypatch.setattr(read_shared, "read_elsewhere", lambda handle: lines)
    facts = look_at_gpus(gpu)
    assert facts.devices[0].sharing_problem == f"read on {told}" and not has_passed("cuda_ipc", gpu)
    assert not any("processes can read" in found.what for found in check_gpus(facts))


def test_the_process_that_reads_says_why_it_can_t(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process, without a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(HandoffFailed, match="the process that reads ended: .*(?i:cuda|gpu)"):
        READ_ELSEWHERE(b"no handle")


def test_a_result_that_can_t_be_written_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "baton").write_text("a file where the folder should be")
    found = check_gpus(look_at_gpus(make_device()))[1]
    assert found.level == LOOK and "could not be written down" in found.what and "cuda_ipc" in found.advice


class NoPinnedMemory(VirtualGpu):
    def pinned(self, shape: object, dtype: torch.dtype) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore words")


def test_a_gpu_s_first_failed_trial_is_named_and_ends_its_trials() -> None:
    gpu = make_device()
    gpu.__class__ = NoPinnedMemory
    (device,) = look_at_gpus(gpu).devices
    assert device.problem == "copying through pinned memory: CUDA error: out of memory"
    assert device.name == "virtual" and device.difference == 0.0


def test_wrong_copied_bytes_and_differing_logits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_gpu, "best_rate", lambda gpu, where, copy: 1e10)  # nothing is copied
    (device,) = look_at_gpus(make_device()).devices
    assert not device.copies_arrive
    real = look_gpu.logits_on
    monkeypatch.setattr(look_gpu, "logits_on", lambda where: real(where) + (where.type != "cpu"))
    (device,) = look_at_gpus(make_device()).devices
    assert device.difference > 0.9


def test_the_command_reports_gpus_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_cuda, "TorchCuda", make_device)
    words = ["doctor", "--interval", "0.1", "--json"]
    for asked in (False, True):
        main([*words, "--gpu"] if asked else words)
        found = [one for one in json.loads(capsys.readouterr().out)["findings"] if one["check"] == "gpu"]
        assert bool(found) == asked
    assert found[0]["where"] == "GPU 0 (virtual)" and found[0]["level"] != BROKEN


def test_attention_that_passed_is_remembered_for_its_version() -> None:
    gpu = make_device()
    assert look_at_gpus(gpu).flashinfer == ""
    with library_on(gpu):
        facts = look_at_gpus(gpu)
    assert has_passed(f"flashinfer {VERSION}", gpu) and not has_passed("flashinfer 0.6.0", gpu)
    found = check_gpus(facts)[-2]
    assert found.level == OK and f"FlashInfer {VERSION} has the reference's results" in found.what


def test_wrong_attention_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that was remembered is forgotten."""
    gpu, real = make_device(), fake_flashinfer.causal
    remember(f"flashinfer {VERSION}", gpu, True)
    monkeypatch.setattr(fake_flashinfer, "causal", lambda q, k, v, scale: real(q, k, v, scale) + 0.5)
    with library_on(gpu):
        facts = look_at_gpus(gpu)
    assert "differ from the reference by" in facts.devices[0].attention_problem and not facts.devices[0].problem
    assert not has_passed(f"flashinfer {VERSION}", gpu) and has_passed("cuda_ipc", gpu)
    found = check_gpus(facts)
    assert any("FlashInfer's attention can't be used" in one.what and one.level == LOOK for one in found)
    assert not any("under --attention" in one.what for one in found)
