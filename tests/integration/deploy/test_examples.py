"""Every program under examples/ does what its head says, on real processes. Four of them share one cluster."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from router.policy.interface import Wanted
from shared.core.sampling_params import SamplingParams
from tests.support.clusters.chaos_cluster import Endpoint, ready_nodes
from tests.support.clusters.cluster import ROOT, Cluster, baton_up
from tests.support.clusters.procs import NodeProcess
from tests.support.clusters.router_process import RouterProcess, eventually
from tests.support.machine.patience import HANDS_OVER, HANG_GUARD_S, PATIENT_UP
from tests.support.machine.ports import free_port
from tests.support.oracles.hashlm_reference import reference_stream
from tests.support.web.mixed_clients import text_of
from tests.support.worlds.router_rig import RouterRig

EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))
TRIED = {
    "load_test.py",
    "my_policy.py",
    "openai_sdk.py",
    "resuming_client.py",
    "tiny_model.py",
    "tools.py",
    "two_machines.py",
}
PATIENCE_S = "300"  # no node is lost because the machine is busy
NODES = (("prefill", "p0"), ("decode", "small-0"), ("decode", "big-0"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    log = tmp_path_factory.mktemp("examples") / "up.log"
    with baton_up(log, "--model", "hashlm", "--tool-format", "hermes") as cluster:
        yield cluster


def start(name: str, *words: str, out: int | IO[bytes] = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """Start a program in a process group of its own, so that all it starts can end with it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLES / name), *words]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(name: str, *words: str) -> tuple[int, str]:
    """Run a program to its end, and return its status and what it printed."""
    process = start(name, *words)
    try:
        printed, _ = process.communicate(timeout=HANG_GUARD_S)
    finally:
        end(process)
    return process.returncode, printed.decode()


def printed_by(name: str, *words: str) -> str:
    status, printed = run(name, *words)
    assert status == 0, printed
    return printed


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_program_is_tried_and_listed() -> None:
    assert set(PROGRAMS) == TRIED
    listed = re.findall(r"^\| \[(\w+\.py)\]", (EXAMPLES / "README.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == PROGRAMS


def test_openai_sdk(cluster: Cluster) -> None:
    told = dict(re.findall(r"^(answer|stream|json): (.*)$", printed_by("openai_sdk.py", cluster.url), re.MULTILINE))
    assert told["answer"] and told["answer"] == told["stream"]
    assert told["json"] in ("red", "green", "blue")


def test_tools(cluster: Cluster) -> None:
    printed = printed_by("tools.py", cluster.url)
    assert re.search(r"^call: get_weather \{'city': '(Oslo|Rome)'\}$", printed, re.MULTILINE)
    assert re.search(r"^result: \d+ degrees", printed, re.MULTILINE)
    assert re.search(r"^answer: .", printed, re.MULTILINE)


def test_resuming_client(cluster: Cluster) -> None:
    """It prints the whole answer. tests/chaos/test_lost_streams.py kills its router, and it goes on elsewhere."""
    body = {"prompt": "Once upon a time", "max_tokens": 200, "seed": 5}
    chunks = load("resuming_client").stream(f"{cluster.url}/v1/completions", body, {})
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    whole = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=HANG_GUARD_S).json()
    assert text and text == whole["choices"][0]["text"]
    # its answers are drawn without a seed, and one in twenty ends at once
    assert any(printed_by("resuming_client.py", cluster.url, "Once upon a time") for _ in range(10))


def test_load_test_says_whether_the_promise_is_kept(cluster: Cluster) -> None:
    """A short one. Whether a busy machine keeps the promise is not the point: that the figure decides is."""
    short = ("--rate", "20", "--duration", "600", "--requests", "8", "--output-tokens", "4", "--golden", "1")
    patient = (*short, "--slo", "ttft<600s", "--stall", "600")
    status, printed = run("load_test.py", cluster.url, *patient)
    assert "of requests kept" in printed, printed
    assert f"verdict: {('PASS', 'FAIL')[status]}" in printed
    status, printed = run("load_test.py", cluster.url, *short, "--slo", "ttft<0.000001ms")
    assert status == 1 and "0.0% of requests kept" in printed and "verdict: FAIL" in printed
    assert run("load_test.py", "http://127.0.0.1:9")[0] == 2


def test_two_machines() -> None:
    """The answer is the reference's, and the decode node has it from the other machine."""
    printed = printed_by("two_machines.py", "hashlm")
    prompt = [ord(char) - 32 for char in "Two machines, one answer. " * 8]
    expected = reference_stream(prompt, SamplingParams(16, temperature=0.0), 0, 16)
    assert f"answer: {text_of(expected)}\n" in printed
    assert "handed over from A to B: 1\n" in printed


def test_tiny_model(tmp_path: Path) -> None:
    """Greedy answers are those of transformers on the folder that it wrote."""
    port, folder = free_port(), tmp_path / "tiny"
    flags = ("--port", str(port), "--dtype", "float32", "--kv-bytes", "4MiB", *PATIENT_UP, *HANDS_OVER)
    with (tmp_path / "log").open("wb") as log:
        process = start("tiny_model.py", str(folder), *flags, out=log)
    try:
        wait_until_ready(process, tmp_path / "log")
        body = {"prompt": "abc", "max_tokens": 12, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=HANG_GUARD_S).json()
        assert answer["model"] == "tiny"
        assert answer["choices"][0]["token_ids"] == transformers_answer(folder, "abc", 12)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(HANG_GUARD_S)
        end(process)


def wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + HANG_GUARD_S
    while "Baton is ready" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def transformers_answer(folder: Path, prompt: str, count: int) -> list[int]:
    import tokenizers
    import torch
    import transformers

    ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(prompt).ids
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    told = list(ids)
    with torch.no_grad():
        for _ in range(count):
            told.append(int(network(torch.tensor([told])).logits[0, -1].argmax()))
    return told[len(ids) :]


def test_my_policy_sends_long_prompts_to_big_nodes() -> None:
    rig = RouterRig()
    for name in ("small-0", "small-1", "big-0"):
        rig.join("decode", name)
    nodes = list(rig.registry)
    policy = load("my_policy").BigOnesForLong()
    assert policy.pick(nodes, Wanted(1001)).node.node_id == "big-0"
    assert policy.pick(nodes, Wanted(1000)).node.node_id == "small-0"
    assert policy.pick(nodes[2:], Wanted(10)).node.node_id == "big-0"  # any node is better than an error


def test_my_policy_is_that_of_a_running_router(tmp_path: Path) -> None:
    """A long and a short prompt: the counters of the nodes say which one installed which."""
    router = RouterProcess("--node-silence-s", PATIENCE_S, program=(sys.executable, str(EXAMPLES / "my_policy.py")))
    there, calm = Endpoint(router.nodes), ("--silence-s", PATIENCE_S)
    nodes = {name: NodeProcess(role, name, there, tmp_path, *calm) for role, name in NODES}  # type: ignore[arg-type]
    try:
        eventually(lambda: ready_nodes(router.url) == set(nodes))
        ask(router, num_tokens=100)
        eventually(lambda: sum(installed(router)) == 1)
        assert installed(router) == [1, 0]
        ask(router, num_tokens=1500)
        eventually(lambda: sum(installed(router)) == 2)
        assert installed(router) == [1, 1]
    finally:
        for node in nodes.values():
            node.terminate()
        router.stop()


def ask(router: RouterProcess, num_tokens: int) -> None:
    body = {"prompt": "x" * num_tokens, "max_tokens": 5, "ignore_eos": True}
    answer = httpx.post(f"{router.url}/v1/completions", json=body, timeout=HANG_GUARD_S)
    assert answer.json()["usage"]["completion_tokens"] == 5


def installed(router: RouterProcess) -> list[float]:
    """Return how many hand-offs the small and the big decode node have installed."""
    return [router.metric(f'baton_handoffs_total{{node="{name}"}}') for name in ("small-0", "big-0")]
