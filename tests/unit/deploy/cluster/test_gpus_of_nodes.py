"""`baton up` deals the GPUs of a machine, of eight or of one: which process sees which, what is shared, and what is
refused before anything starts. The machine is made up where the launcher asks a process with torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from deploy import cli
from deploy.cluster import facts, gpus, local
from deploy.cluster.child import Child, ChildSpec
from deploy.cluster.gpus import GpusHere, deal_gpus, find_gpus, seen_gpus, with_gpu
from deploy.cluster.restart_policy import RestartPolicy
from shared.config.processes import ClusterConfig, NodeParts
from shared.config.settings.local_settings import LocalConfig
from shared.config.settings.log_settings import LogConfig
from shared.config.settings.settings import ModelConfig, SchedConfig
from shared.core import short_process
from shared.core.errors import ConfigError
from shared.device.gpu import MIB
from shared.node.assembly.build_model import NO_GPU
from shared.node.assembly.gpu_probe import probe
from tests.support.cores.changed_config import replaced
from tests.support.gpus import cuda_node
from tests.support.gpus.cuda_core import folder_of
from tests.support.virtual_gpu.device import make_device

EIGHT = tuple(f"H100 number {number}" for number in range(8))


def dealt(num_gpus: int, visible: str | None = None, tp: int = 1, **nodes: object) -> list[tuple[int, str, int]]:
    """(number, visible, how many share it) of each node. Of a node with several, the first number."""
    found = GpusHere(seen_gpus(EIGHT[:num_gpus], visible))
    made = LocalConfig(**nodes).on_gpus(len(nodes.get("devices", ())) or len(found.gpus), tp)
    given = deal_gpus(made, found, tp)
    assert all(len(gpu.numbers) == tp for gpu in given)
    return [(gpu.numbers[0], gpu.visible, gpu.num_nodes) for gpu in given]


def test_each_node_gets_a_gpu_and_sees_it_first():
    own = dealt(8, prefill=3, decode=5)
    assert [number for number, _, _ in own] == list(range(8)) and {num for *_, num in own} == {1}
    assert own[0][1] == "0,1,2,3,4,5,6,7" and own[3][1] == "3,0,1,2,4,5,6,7"


def test_a_node_sees_no_gpu_that_belongs_to_nobody():
    """Other users' programs run there."""
    assert dealt(8, prefill=1, decode=1) == [(0, "0,1", 1), (1, "1,0", 1)]
    assert dealt(8, prefill=1, decode=2, devices=(6, 2, 7)) == [(6, "6,2,7", 1), (2, "2,6,7", 1), (7, "7,2,6", 1)]


def test_numbers_count_within_cuda_visible_devices():
    assert dealt(2, "5, GPU-ab", prefill=1, decode=1) == [(0, "5,GPU-ab", 1), (1, "GPU-ab,5", 1)]
    assert dealt(3, "4,5,6,-1,7", prefill=0, decode=1, devices=(2,)) == [(2, "6", 1)]


def test_slices_of_a_gpu_are_gpus_though_torch_counts_one():
    assert dealt(1, "MIG-a,MIG-b", prefill=1, decode=1) == [(0, "MIG-a,MIG-b", 1), (1, "MIG-b,MIG-a", 1)]
    assert dealt(1, "MIG-a,MIG-b") == dealt(1, "MIG-a,MIG-b", prefill=1, decode=1)


def test_one_gpu_has_one_node_unless_two_are_asked_for():
    assert LocalConfig().on_gpus(1).named_nodes == "--prefill 0 --decode 1"
    assert dealt(1) == dealt(8, devices=(0,)) == [(0, "0", 1)]
    assert LocalConfig(decode=0).on_gpus(1).named_nodes == "--prefill 1 --decode 0"
    assert LocalConfig().on_gpus(0) == LocalConfig().on_gpus(8) == LocalConfig(prefill=1)
    assert dealt(1, prefill=1) == [(0, "0", 2)] * 2
    assert dealt(8, prefill=1, decode=2, devices=(3, 3, 1)) == [(3, "3,1", 2), (3, "3,1", 2), (1, "1,3", 1)]


def test_a_node_of_ranks_sees_its_own_gpus_first():
    assert dealt(8, tp=2, prefill=1, decode=2) == [(0, "0,1,2,3,4,5", 1), (2, "2,3,0,1,4,5", 1), (4, "4,5,0,1,2,3", 1)]
    assert dealt(8, "7,6,5,4", tp=2, devices=(3, 1)) == [(3, "4,6", 1)], "one node, as on one GPU"
    assert dealt(4, tp=4) == [(0, "0,1,2,3", 1)] and dealt(3, tp=2) == [(0, "0,1", 1)]
    assert dealt(4, tp=2) == [(0, "0,1,2,3", 1), (2, "2,3,0,1", 1)]
    shared = dealt(8, tp=2, prefill=0, decode=2, devices=(0, 1, 1, 2))
    assert shared == [(0, "0,1,2", 2), (1, "1,2,0", 2)], "memory is divided as on the GPU that two nodes share"


@pytest.mark.parametrize(
    ("num_gpus", "visible", "nodes", "message"),
    [
        (1, None, {"tp": 2}, "--tp 2: a node needs 2 GPUs, and nodes may use 1 GPU"),
        (4, None, {"tp": 2, "prefill": 1, "decode": 2}, "each of 3 nodes needs 2 GPUs .--tp.*--devices 0,1,2,3,0,1:"),
        (8, None, {"tp": 2, "prefill": 0, "devices": (0, 1, 2)}, "3 GPUs for 1 nodes .*: name 2 .--tp. for each node"),
        (8, None, {"tp": 2, "prefill": 0, "devices": (5, 5)}, "--devices 5,5: the ranks of a node.*has 5,5"),
        (8, None, {"prefill": 4, "decode": 5}, "--prefill 4 --decode 5: .*8 GPUs.*--devices 0,1,2,3,4,5,6,7,0:.*MPS"),
        (1, None, {"prefill": 1, "decode": 2}, "may use 1 GPU.*--devices 0,0,0"),
        (2, None, {"prefill": 1, "decode": 2}, "may use 2 GPUs.*--devices 0,1,0"),
        (8, None, {"devices": (0, 9)}, "--devices 0,9: there is no GPU 9; nodes may use 8 GPUs, from 0 to 7"),
        (1, "3", {"devices": (3,)}, "there is no GPU 3; nodes may use 1 GPU, number 0 .CUDA_VISIBLE_DEVICES counts"),
        (8, None, {"devices": (0, 1, 2)}, "names 3 GPUs for 2 nodes .--prefill 1 --decode 1.: name one for each"),
        (0, None, {"devices": (0,)}, "--devices 0: "),
    ],
)
def test_what_does_not_fit_is_refused(num_gpus, visible, nodes, message):
    with pytest.raises(ConfigError, match=message):
        dealt(num_gpus, visible, **nodes)


def test_a_gpu_that_is_not_there_is_told_first():
    with pytest.raises(ConfigError, match="--devices 9: there is no GPU 9"):
        dealt(8, prefill=1, decode=1, devices=(9,))


def test_devices_are_numbers_and_go_with_a_gpu():
    with pytest.raises(ConfigError, match="--devices is 0,-1; GPUs are numbered from 0"):
        LocalConfig(devices=(0, -1))
    for device in ("cpu", "inline"):
        with pytest.raises(ConfigError, match=f"--devices 0,1 --device {device}: leave out one"):
            replaced(ClusterConfig(local=LocalConfig(devices=(0, 1))), sched={"device": device})


# A made-up machine


def machine(monkeypatch: pytest.MonkeyPatch, names: Sequence[str], visible: str | None = None) -> list[Sequence[str]]:
    """With a driver and these GPUs. Returns the flags with which torch was asked."""
    asked: list[Sequence[str]] = []

    def ask_torch(flags: Sequence[str]) -> dict[str, object]:
        asked.append(flags)
        return {"names": list(names)} if names else {"why": NO_GPU}

    monkeypatch.setattr(gpus, "ask_torch", ask_torch)
    for module in (gpus, facts):
        monkeypatch.setattr(module, "has_driver", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return asked


def started(
    monkeypatch: pytest.MonkeyPatch,
    device: str = "auto",
    parallel: dict[str, int] | None = None,
    security: dict[str, str] | None = None,
    **nodes: object,
) -> list[ChildSpec]:
    """What `baton up` starts: the nodes, without the router."""
    specs: list[ChildSpec] = []

    def supervisor(given: list[ChildSpec], *_: object, **__: object) -> SimpleNamespace:
        specs.extend(given)
        return SimpleNamespace(run=lambda: 0)

    monkeypatch.setattr(local, "Supervisor", supervisor)
    parts = NodeParts(model=ModelConfig(model="hashlm"), sched=SchedConfig(device=device), log=LogConfig("info"))
    config = replaced(ClusterConfig(local=LocalConfig(**nodes), nodes=parts), router={"port": 0})
    config = replaced(config, **{"parallel": parallel or {}, "security": security or {}})
    assert local.run(config, os.getpid()) == 0
    return specs[1:]


def flags_of(spec: ChildSpec) -> set[str]:
    return {word for word in spec.argv if re.match("--(device|gpu-mem-fraction)=", word)}


def test_eight_gpus_are_dealt_to_four_nodes(monkeypatch, capsys):
    machine(monkeypatch, EIGHT, "0,1,2,3,7,6,5,4")
    nodes = started(monkeypatch, prefill=2, decode=2, devices=(4, 5, 6, 7))
    assert [spec.name for spec in nodes] == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert [spec.gpus for spec in nodes] == ["7,6,5,4", "6,7,5,4", "5,7,6,4", "4,7,6,5"]
    assert [flags_of(spec) for spec in nodes] == [{"--device=cuda"}] * 4, "each has its GPU's whole share of memory"
    said = capsys.readouterr().err
    assert 'id=decode-1 gpu=7 name="H100 number 7"' in said and "gpus=0,1,2,3" in said


def test_one_gpu_is_explained(monkeypatch, capsys):
    machine(monkeypatch, EIGHT[:1])
    nodes = started(monkeypatch)
    assert [(node.name, node.gpus, flags_of(node)) for node in nodes] == [("decode-0", "0", {"--device=cuda"})]
    said = capsys.readouterr().err
    assert "one node computes prompts and answers" in said and "--prefill 1 starts two" in said
    for asked in ({"prefill": 0}, {"decode": 0}, {"decode": 2}):  # nothing was decided for the user
        started(monkeypatch, **asked)
        assert "one node computes" not in capsys.readouterr().err


def test_nodes_that_share_a_gpu_share_its_memory(monkeypatch, capsys):
    machine(monkeypatch, EIGHT[:1])
    nodes = started(monkeypatch, prefill=1)
    assert [flags_of(spec) for spec in nodes] == [{"--device=cuda", "--gpu-mem-fraction=0.45"}] * 2
    said = capsys.readouterr().err
    assert "share a GPU" in said and "MPS" in said and "one node computes" not in said


def test_without_a_gpu_nothing_changes(monkeypatch, capsys):
    machine(monkeypatch, ())
    nodes = started(monkeypatch)
    assert [(spec.name, spec.gpus, flags_of(spec)) for spec in nodes] == [
        ("prefill-0", "", set()),
        ("decode-0", "", set()),
    ]
    assert "nodes compute on the CPU" in capsys.readouterr().err


def test_ranks_of_one_node_have_a_gpu_each(monkeypatch, capsys):
    machine(monkeypatch, EIGHT)
    nodes = started(monkeypatch, parallel={"tp": 4})
    assert [(spec.name, spec.gpus) for spec in nodes] == [
        ("prefill-0", "0,1,2,3,4,5,6,7"),
        ("decode-0", "4,5,6,7,0,1,2,3"),
    ]
    assert all("--tp=4" in spec.argv and "--device=cuda" in spec.argv for spec in nodes)
    assert "id=decode-0 gpu=4,5,6,7" in capsys.readouterr().err
    assert started(monkeypatch, parallel={"tp": 4}, decode_tp=4)[1].gpus == nodes[1].gpus
    nodes = started(monkeypatch, parallel={"tp": 8})
    assert [(spec.name, spec.gpus) for spec in nodes] == [("decode-0", "0,1,2,3,4,5,6,7")]
    said = capsys.readouterr().err
    assert "one node computes prompts and answers; two would need more GPUs" in said and "gpus=8" in said


@pytest.mark.parametrize(
    ("nodes", "flag"),
    [
        ({"parallel": {"dp": 2}}, "--dp 2"),
        ({"decode_tp": 2}, "--decode-tp 2"),
        ({"decode_pp": 2}, "--decode-pp 2"),
        ({"parallel": {"tp": 2}, "decode_tp": 1}, "--decode-tp 1"),
    ],
)
def test_ranks_and_stages_are_refused_beside_a_gpu(monkeypatch, nodes, flag):
    machine(monkeypatch, EIGHT)
    with pytest.raises(ConfigError, match=f"^{flag} --device cuda: .*leave out {flag}; else say --device cpu"):
        started(monkeypatch, device="cuda", **nodes)
    started(monkeypatch, device="cpu", **nodes)


def test_keys_are_asked_for_just_the_nodes_that_start(monkeypatch, tmp_path):
    """One GPU has one node, unless two are asked for."""
    assert cli.main(["keys", "create", str(tmp_path / "k"), "--router", "router", "--node", "decode-0"]) == 0
    security = {"keys": str(tmp_path / "k")}
    machine(monkeypatch, EIGHT[:1])
    try:
        names = [spec.name for spec in started(monkeypatch, security=security)]
    except ConfigError as error:
        names = [error.message]
    assert names == ["decode-0"]
    with pytest.raises(ConfigError, match="--node prefill-0 decode-0"):
        started(monkeypatch, security=security, prefill=1)
    for names, has_driver in ((EIGHT[:2], True), ((), False)):
        machine(monkeypatch, names)
        monkeypatch.setattr(facts, "has_driver", lambda own=has_driver: own)
        with pytest.raises(ConfigError, match="--node prefill-0 decode-0"):
            started(monkeypatch, security=security)


# Who asks, and what if the answer is none


def parts_of(device: str = "auto") -> NodeParts:
    return NodeParts(model=ModelConfig(model="hashlm"), sched=SchedConfig(device=device))


def test_torch_is_asked_only_where_there_may_be_a_gpu(monkeypatch):
    asked = machine(monkeypatch, EIGHT[:2])
    for device in ("cpu", "inline"):
        assert find_gpus(parts_of(device), is_asked=False) == GpusHere()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        said = f"CUDA_VISIBLE_DEVICES={hidden} hides all GPUs"
        assert find_gpus(parts_of(), is_asked=False) == GpusHere(why=said)
    monkeypatch.setattr(gpus, "has_driver", lambda: False)
    assert find_gpus(parts_of(), is_asked=False) == GpusHere() and asked == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for parts, is_asked in ((parts_of("cuda"), False), (parts_of(), True)):
        assert len(find_gpus(parts, is_asked=is_asked).gpus) == 2
    assert len(asked) == 2 and "--device=cuda" in asked[0]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('a library speaks'); print('{\"refused\": \"a sentence\"}')", "^a sentence$"),
        ("raise RuntimeError('the driver is too old')", "GPUs: RuntimeError: the driver is too old; .*doctor --gpu"),
        ("import os; os.kill(os.getpid(), 11)", "GPUs: the process that asks was killed by SIGSEGV"),
        ("import time; time.sleep(600)", "the process that asks did not end in 0.5 s;"),
    ],
)
def test_a_driver_that_fails_has_a_sentence(monkeypatch, code, message):
    monkeypatch.setattr(gpus.launcher, "command", lambda *_: [sys.executable, "-I", "-S", "-c", code])
    if "sleep" in code:
        monkeypatch.setattr(gpus, "PROBE_TIMEOUT_S", 0.5)
    with pytest.raises(ConfigError, match=message):
        find_gpus(parts_of("cuda"), is_asked=False)


def test_a_process_that_can_t_be_killed_is_left_behind(monkeypatch):
    """A driver may hold it in the kernel."""
    left: list[subprocess.Popen[str]] = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: left.append(process))
    monkeypatch.setattr(short_process, "REAP_S", 0.1)
    try:
        with pytest.raises(
            subprocess.TimeoutExpired, match=r"^did not end in 0.1 s and can't be killed: .* \(state D\)"
        ):
            short_process.run_short([sys.executable, "-I", "-S", "-c", "import time; time.sleep(30)"], 0.1)
        assert [process.poll() for process in left] == [None]
    finally:
        monkeypatch.undo()
        for process in left:
            process.kill()
            process.wait()


class EightGpus:
    """What the probe asks of torch's CUDA."""

    def __init__(self, num_gpus: int = 8) -> None:
        self._num_gpus = num_gpus

    def is_available(self) -> bool:
        return self._num_gpus > 0

    def device_count(self) -> int:
        return self._num_gpus

    def current_device(self) -> SimpleNamespace:
        return SimpleNamespace(type="cuda")

    def describe(self, device) -> SimpleNamespace:
        return SimpleNamespace(name=EIGHT[device.index])


def test_the_probe_answers_like_a_node():
    llama = ("--model", str(folder_of("draft target")))
    assert probe(llama, EightGpus()) == {"names": list(EIGHT)}
    assert "hashlm computes in the host's memory" in probe(("--model", "hashlm"), EightGpus())["why"]
    assert probe(llama, EightGpus(0)) == {"why": NO_GPU}
    assert probe((*llama, "--device", "cuda"), EightGpus(0))["refused"].startswith("--device cuda: torch sees no GPU")
    assert "--dp 2 --device auto: such ranks" in probe((*llama, "--dp", "2"), EightGpus())["refused"]
    assert "--model-library transformers" in probe((*llama, "--tp", "2"), EightGpus())["refused"]
    ranks = (*llama, "--model-library", "transformers", "--tp", "8")
    assert probe(ranks, EightGpus()) == {"names": list(EIGHT)}
    assert "each rank needs a GPU of its own, and this process sees only 4" in probe(ranks, EightGpus(4))["refused"]


def test_a_machine_without_gpus_says_so_by_itself():
    """With torch, in a process of its own."""
    assert find_gpus(parts_of(), is_asked=True) == GpusHere(why=NO_GPU)


def test_a_child_sees_its_gpus():
    code = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), len(os.environ) > 1)"
    said: list[str] = []
    child = Child(ChildSpec("n", (sys.executable, "-I", "-S", "-c", code), gpus="3,0"), RestartPolicy(0), said.append)
    child.start()
    while child.reap() is None:
        pass
    assert said == ["n | 3,0 True"]


def test_two_nodes_of_one_gpu_fit_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the share that `baton up` gives it. With the whole share, the second one finds no memory."""
    size = 24 * MIB
    gpu = make_device("eager", memory_bytes=size)
    built = cuda_node.on_virtual_gpu(gpu, monkeypatch)
    whole = cuda_node.parts_of(memory={"max_running": 10, "gpu_mem_fraction": 0.9})
    shared = deal_gpus(LocalConfig(prefill=1, decode=1), GpusHere(seen_gpus(("virtual",), None)))
    cores = [built.core(replace(whole, memory=with_gpu(whole, own).memory)) for own in shared]
    pools = [core.pool.num_pages * core.pool.page_bytes for core in cores]
    assert min(pools) > size / 16 and gpu.memory_use(gpu.device).allocated_bytes < 0.9 * size
    for core in cores:
        core.close()
    first = built.core(whole)
    with pytest.raises(ConfigError, match="MiB are free"):
        built.core(whole)
    first.close()
