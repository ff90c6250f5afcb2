"""Which transports a node offers on which device, and which of them two nodes take."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from shared.config.settings.endpoints import same_host
from shared.core.errors import ConfigError
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.transfer.transports import (
    about_transports,
    available_transports,
    choose_transport,
    host_id,
    make_receiver,
    make_sender,
)

PLANES = (PlaneSpec("kv", (2, 2, 16, 20), torch.float32),)


def test_the_first_common_transport_of_the_offer_is_chosen() -> None:
    both, only_zmq = ("shm", "zmq"), ("zmq",)
    assert choose_transport("a", both, "a", ("zmq", "shm")) == "zmq"
    assert choose_transport("a", both, "a", both) == "shm"
    assert choose_transport("a", both, "b", both) == "zmq"
    assert choose_transport("a", both, "a", only_zmq) == "zmq"
    assert choose_transport("a", ("shm",), "a", only_zmq) is None
    assert choose_transport("a", ("shm",), "b", ("shm",)) is None
    assert choose_transport("a", both, "a", ("rdma",)) is None
    on_gpus, seen = ("cuda_ipc", "shm", "zmq"), "a.gpus01"
    assert choose_transport(seen, on_gpus, seen, on_gpus) == "cuda_ipc"
    assert choose_transport(seen, on_gpus, "a.gpus23", on_gpus) == "shm", "neither can open the other's GPU"
    assert choose_transport(seen, on_gpus, "a", on_gpus) == "shm"


def test_settings_name_what_is_there() -> None:
    assert available_transports("auto") == ("shm", "zmq")
    assert available_transports("auto", trusts_network=True) == ("shm", "zmq", "gloo")
    assert available_transports("cuda_ipc", "cuda") == ("cuda_ipc",)
    assert available_transports("zmq") == ("zmq",) and available_transports("gloo") == ("gloo",)
    for setting, device in (("carrier-pigeon", "cpu"), ("nccl", "cpu"), ("shm", "cuda")):
        with pytest.raises(ConfigError, match=f"--transport {setting}"):
            available_transports(setting, device)
    for make in (make_sender, make_receiver):
        with pytest.raises(ConfigError):
            make("carrier-pigeon", KVPool(PLANES, 2, 16))


@pytest.mark.parametrize("receives", [True, False])
@pytest.mark.parametrize("trusts_network", [True, False])
def test_auto_is_never_empty_and_nothing_that_has_never_run(receives: bool, trusts_network: bool) -> None:
    given = {"receives": receives, "trusts_network": trusts_network}
    on_gpu = available_transports("auto", "cuda", **given)
    assert on_gpu == (("shm", "zmq") if receives else ("zmq",)), "a GPU has no memory file to map, and can read one"
    assert available_transports("shm", "cuda", receives=True) == ("shm",)
    checked = available_transports("auto", "cuda", checked=True, **given)
    assert checked == ("cuda_ipc", *on_gpu), "the check has passed on this machine"
    for name in (on_gpu, available_transports("auto", **given)):
        assert choose_transport("a", available_transports("auto", "cuda", receives=True), "b", name) == "zmq"


def test_what_auto_leaves_out_is_said() -> None:
    assert about_transports("cpu") == ""
    said = about_transports("cuda")
    assert said.startswith("zmq through pinned host memory; cuda_ipc after `baton doctor --gpu`")
    assert "cuda_ipc" not in about_transports("cuda", checked=True)


def test_the_host_id_is_the_same_in_another_process() -> None:
    code = "from shared.transfer.transports import host_id; print(host_id())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == host_id() and len(host_id()) == 16
    assert host_id("gpus01") == f"{host_id()}.gpus01" and same_host(host_id(), host_id("gpus01"))
