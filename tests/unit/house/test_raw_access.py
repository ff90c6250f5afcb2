"""Raw access to tensors is banned where a device tensor could be meant: `.tolist()`, `.item()` and `.numpy()` wait for
the device without saying so, and the hazard detector's second net is blind behind a pointer."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("shared", "prefill_node", "decode_node")
KERNELS = ROOT / "shared" / "kernel"
RAW = {"tolist", "item", "numpy", "data_ptr", "untyped_storage", "__array__"}

KERNEL = "a CPU kernel: declared by the model's or sampler's accessor"
HOST = "host arrays, no tensors"
ALLOWED = {
    "prefill_node/pulls.py": HOST,
    "shared/model/loading/packed_weights.py": "weights on their way to a file, packed for a CPU",
    "shared/model/encoder/t5.py": HOST,
    "shared/model/hashlm/model.py": KERNEL,
    "shared/model/hashlm/layer.py": KERNEL,
    "shared/model/llama/lora.py": KERNEL,
    "shared/model/library/attend/device_attention.py": "bounds and lengths of rows, which are the host's own arrays",
    "shared/model/library/attend/step_rows.py": "bounds of rows, which --dp deals out; ranks are on CPUs",
    "shared/model/library/check.py": HOST,
    "shared/model/library/mtp_loading.py": HOST,
    "shared/model/library/mapped_tensors.py": "addresses of weights, to count those in mapped files",
    "shared/model/formats/quantized_folder.py": "shapes, read from files",
    "shared/model/llama/llama_compiled.py": KERNEL,
    "shared/model/llama/eagle_compiled.py": KERNEL,
    "shared/model/hashlm/draft.py": KERNEL,
    "shared/model/scripted.py": KERNEL,
    "shared/sample/sampler.py": KERNEL,
    "shared/sample/sampler_numba.py": KERNEL,
    "shared/kv/manager.py": HOST,
    "shared/kv/pool.py": HOST,
    "shared/kv/prefix_cache.py": HOST,
    "shared/kv/rows.py": HOST,
    "shared/kv/window_cache.py": HOST,
    "shared/sched/steps/draft_length.py": HOST,
    "shared/sched/memory/offload.py": HOST,
    "shared/sched/requests/output.py": HOST,
    "shared/sched/requests/results.py": HOST,
    "shared/sched/planning/grants.py": HOST,
    "shared/sched/requests/readmissions.py": HOST,
    "prefill_node/bootstrap.py": HOST,
    "shared/engine/stages.py": HOST,
    "shared/engine/results.py": "results that came to the host",
    "shared/engine/scores.py": "the same, of scores",
    "shared/engine/masks.py": "the same, of drafts",
    "shared/engine/forward_batch.py": HOST,
    "shared/engine/future_map.py": "lengths, in resolve_seq_lens_cpu, which has waited for them",
    "shared/sched/steps/masks.py": HOST,
    "shared/ranks/tp.py": "a forward's inputs on their way to other processes; ranks are on CPUs",
    "shared/ranks/dp.py": "bounds of rows to deal out; ranks are on CPUs",
    "shared/sched/steps/freeze.py": HOST,
    "shared/gpu_kernel/launch/launcher.py": "addresses of what a kernel gets, never their contents",
    "shared/gpu_kernel/launch/signatures.py": "the same",
    "shared/gpu_kernel/copy_pages.py": "the same",
    "shared/device/torch_cuda.py": "the pool's memory, for a library that opens it in another process",
    "shared/transfer/nixl.py": "the same",
    "shared/transfer/staged.py": "the whole buffer that a view was cut from; no byte is read",
    "shared/transfer/host_bytes.py": "pinned host memory, never a device's; copies into it are waited for",
    "shared/transfer/digest.py": "digests, which the stream that made them waited for",
    "shared/ranks/on_device.py": "pages on their way to the leader; the copy to the host waits for the device",
    "shared/node/machine/kv_events.py": "tokens of pages' keys, which are the host's bytes",
    "shared/node/records/convert.py": "draft state of a processed result, on the host",
}


def raw_accesses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in RAW:
            yield f"{node.lineno}: .{node.attr}"


def accesses_by_file() -> dict[str, list[str]]:
    """Kernels are given tensors by the models that call them; pointers are their trade."""
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    files = [file for file in files if KERNELS not in file.parents]
    found = {file.relative_to(ROOT).as_posix(): list(raw_accesses(ast.parse(file.read_text()))) for file in files}
    return {name: places for name, places in found.items() if places}


@pytest.mark.parametrize("code", ["x.tolist()", "n = y.sum().item()", "t.cpu().numpy()", "p = kv.data_ptr()"])
def test_the_rule_refuses(code: str) -> None:
    assert list(raw_accesses(ast.parse(code)))


def test_the_rule_lets_pass() -> None:
    assert not list(raw_accesses(ast.parse("numpy.zeros(3); torch.from_numpy(x); item = 3; f(tolist)")))


def test_nobody_reaches_around_the_accessors() -> None:
    bad = {name: places for name, places in accesses_by_file().items() if name not in ALLOWED}
    assert not bad, f"use the accessors (FutureMap, KVPool), or say here why not: {bad}"


def test_every_exception_is_still_needed() -> None:
    assert set(ALLOWED) == set(accesses_by_file())
