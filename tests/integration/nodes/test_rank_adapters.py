"""Adapters on node processes of several ranks: the streams of one rank without processes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.kernel.product.product import supports
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from tests.support.clusters.procs import NodeProcess, RouterStub
from tests.support.cores.core_rig import MAX_CONTEXT, CoreKnobs, assert_whole, draw_jobs, make_core, run_local
from tests.support.models.tiny_adapters import adapter
from tests.support.models.tiny_llama import write_tiny_llama


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 2), (1, 4)])
def test_streams_are_those_of_one_rank(sizes: tuple[int, int], tmp_path: Path) -> None:
    if not supports(128, torch.float32):
        pytest.skip("the library's products may sum in another order when they have fewer columns")
    llama = write_tiny_llama(tmp_path / "llama")
    folders = {"a": adapter(llama, tmp_path / "a", 1), "b": adapter(llama, tmp_path / "b", 2, ("q", "o", "down"))}
    paths = {name: str(folder) for name, folder in folders.items()}
    whole = load_model(str(llama), LoadOptions("float32", max_context=MAX_CONTEXT, adapters=paths))
    digests = ["", *(own.digest for own in whole.spec.adapters)]
    jobs = [replace(job, adapter=digests[n % 3]) for n, job in enumerate(draw_jobs(random.Random(5), 9, None, 40))]
    jobs = [replace(job, sampling=replace(job.sampling, stop_token_ids=(1,))) for job in jobs]
    core = make_core(CoreKnobs(chunk_size=16, num_pages=60), model=whole)
    expected = run_local(core, jobs).streams
    assert_whole(core)
    core.close()

    router = RouterStub()
    flags = ["--model", str(llama), "--dtype", "float32", "--max-context", str(MAX_CONTEXT), "--kv-bytes", "16MiB"]
    flags += [word for name, path in paths.items() for word in ("--lora", f"{name}={path}")]
    nodes = [
        NodeProcess(role, role, router, tmp_path, *flags, "--tp", str(size))
        for role, size in zip(("prefill", "decode"), sizes, strict=True)
    ]
    try:
        router.until(lambda: len(router.hellos) == 2, "both nodes say Hello")
        keys = [router.generate("prefill", job, "decode") for job in jobs]
        router.wait_ends(keys)
        assert [router.book.streams[key] for key in keys] == [expected[f"r{job.rid}"] for job in jobs]
    finally:
        for node in nodes:
            node.close()
        router.close()
