"""Look at this machine's GPUs, and try the functions that Baton needs.

The trials load torch, and use a few hundred MB of each GPU. If FlashInfer is installed, it may compile for minutes.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from deploy.tools.doctor.facts import GpuDevice, GpuFacts
from deploy.tools.doctor.read_shared import check_sharing
from shared.config.machine.gpus import has_driver, visible_gpus
from shared.core.short_process import run_short
from shared.device.gpu import Gpu, devices
from shared.device.passed_checks import remember
from shared.kernel.attention import flash_check
from shared.kernel.attention.flash_infer import full_name, installed_version
from shared.kernel.code.step_layout import Layout
from shared.kv.pool import KVPool
from shared.model.loading.made_up import made_up
from shared.model.math.config import LlamaConfig, RopeConfig
from shared.model.math.interface import ModelInputs
from shared.transfer.transports import CHECKED

COPIED_BYTES = 64 << 20
COPIES = 4
TOOL_TIMEOUT_S = 30.0
SEED, PAGE_SIZE = 1, 16
SPANS = ((0, 20), (20, 21), (21, 25))  # token positions of a prompt, a decode step, and a window of drafts
Trial = Callable[[Gpu, torch.device], dict[str, Any]]
CONFIG = LlamaConfig("trial", "qwen3", 256, 64, 96, 2, 4, 2, 16, 1e-5, RopeConfig(10_000.0), 64, True, ())


def look_at_gpus(gpu: Gpu) -> GpuFacts:
    available = gpu.is_available()
    found = tuple(look_at(gpu, where) for where in devices(gpu)) if available else ()
    version = installed_version()
    return GpuFacts(
        torch=torch.__version__,
        built_for=gpu.built_for(),
        has_driver=has_driver(),
        driver=driver_version(),
        visible=visible_gpus(),
        problem="" if available else problem_of(gpu.current_device),
        devices=found,
        not_remembered=remember_sharing(gpu, found),
        flashinfer=version,
        attention_not_remembered=remember_attention(gpu, found, version),
    )


def driver_version() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = run_short(command, TOOL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.strip().split("\n")[0]


def problem_of(ask: Callable[[], object]) -> str:
    """Return the first line of the error that `ask` raises; "" for none."""
    try:
        ask()
    except Exception as error:  # drivers and libraries raise errors of any type
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    return ""


def look_at(gpu: Gpu, where: torch.device) -> GpuDevice:
    found: dict[str, Any] = {"number": where.index}
    problem = ""
    with gpu.use_device(where):
        for what, trial in TRIALS.items():
            said = problem_of(partial(take_trial, found, trial, gpu, where))
            if said:
                problem = f"{what}: {said}"
                break
    return GpuDevice(**found, problem=problem)


def remember_sharing(gpu: Gpu, found: tuple[GpuDevice, ...]) -> str:
    """Let `--transport auto` take cuda_ipc if it passed on all GPUs. Return why that could not be written down."""
    passed = not any(device.problem or device.sharing_problem for device in found)
    return problem_of(lambda: remember(CHECKED, gpu, passed))


def remember_attention(gpu: Gpu, found: tuple[GpuDevice, ...], version: str) -> str:
    """Let `--attention auto` take FlashInfer if it passed on all GPUs. Return why that could not be written down."""
    if not version:
        return ""
    passed = not any(device.problem or device.attention_problem for device in found)
    return problem_of(lambda: remember(full_name(version), gpu, passed))


def take_trial(found: dict[str, Any], trial: Trial, gpu: Gpu, where: torch.device) -> None:
    found.update(trial(gpu, where))


def describe(gpu: Gpu, where: torch.device) -> dict[str, Any]:
    info, memory = gpu.describe(where), gpu.memory_info(where)
    return {
        "name": info.name,
        "capability": info.capability,
        "peers": info.peers,
        "free_bytes": memory.free_bytes,
        "total_bytes": memory.total_bytes,
    }


def try_copies(gpu: Gpu, where: torch.device) -> dict[str, Any]:
    """Measure copies both ways through pinned memory, with the device's timer."""
    host, device = gpu.pinned((COPIED_BYTES,), torch.uint8), torch.empty(COPIED_BYTES, dtype=torch.uint8, device=where)
    host.fill_(7)
    to_device = best_rate(gpu, where, lambda: device.copy_(host, non_blocking=True))
    host.fill_(0)
    to_host = best_rate(gpu, where, lambda: host.copy_(device, non_blocking=True))
    return {
        "to_device_bytes_per_s": to_device,
        "to_host_bytes_per_s": to_host,
        "copies_arrive": bool((host == 7).all()),
    }


def best_rate(gpu: Gpu, where: torch.device, copy: Callable[[], object]) -> float:
    """Return the fastest copy's bytes per second. Slower copies may have had to wake the device."""
    seconds = []
    for _ in range(COPIES):
        begin, end = gpu.new_event(timing=True), gpu.new_event(timing=True)
        begin.record()
        copy()
        end.record()
        gpu.synchronize(where)
        seconds.append(begin.elapsed_time(end) / 1000)
    return COPIED_BYTES / max(min(seconds), 1e-9)


def try_sharing(gpu: Gpu, where: torch.device) -> dict[str, Any]:
    """Find out whether another process can read our memory, as the transport cuda_ipc needs."""
    return {"sharing_problem": problem_of(lambda: check_sharing(gpu, where))}


def try_attention(gpu: Gpu, where: torch.device) -> dict[str, Any]:
    """Compare FlashInfer's attention, if it is installed, with the reference."""
    return {"attention_problem": problem_of(lambda: check_attention(gpu, where)) if installed_version() else ""}


def check_attention(gpu: Gpu, where: torch.device) -> None:
    difference = flash_check.compare_attention(gpu, where)
    if difference > flash_check.MOST_DIFFERENCE:
        raise ValueError(f"its results differ from the reference by {difference:.1e}")


def try_model(gpu: Gpu, where: torch.device) -> dict[str, Any]:
    device, host = (logits_on(place) for place in (where, torch.device("cpu")))
    return {"difference": float((device - host).abs().max()), "largest_logit": float(host.abs().max())}


def logits_on(device: torch.device) -> torch.Tensor:
    """Return the logits of the tokens in SPANS: (25, vocab) float32, on the host."""
    model = made_up(CONFIG, "float32", device, seed=SEED)
    pool = KVPool(model.kv_planes(PAGE_SIZE), 3, PAGE_SIZE, device)
    with torch.inference_mode():
        return torch.cat([model.forward(inputs_of(*span, device), pool).logits.cpu() for span in SPANS])


def inputs_of(begin: int, end: int, device: torch.device) -> ModelInputs:
    """Make the inputs of tokens [begin, end). Earlier tokens' KV is in the pool."""
    count = end - begin
    ids = torch.randint(0, CONFIG.vocab_size, (SPANS[-1][1],), generator=torch.Generator().manual_seed(SEED))
    return ModelInputs(
        input_ids=ids[begin:end].to(device),
        positions=torch.arange(begin, end).to(device),
        layout=Layout(
            cu_q_lens=torch.tensor([0, count], dtype=torch.int32).to(device),
            page_tables=(torch.tensor([[1, 2]], dtype=torch.int32).to(device),),
            max_q_len=count,
            max_seq_len=end,
        ),
        logits_idx=torch.arange(count).to(device),
    )


TRIALS: dict[str, Trial] = {
    "asking for its name and memory": describe,
    "copying through pinned memory": try_copies,
    "sharing memory": try_sharing,
    "computing a tiny network": try_model,
    "comparing FlashInfer's attention": try_attention,  # last: what a library does to a GPU outlives its trial
}
