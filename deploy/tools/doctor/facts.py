"""The checks' input: plain values."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.metrics_page import Page
from shared.wire.messages import Hello


@dataclass(frozen=True, slots=True)
class SeenNode:
    """A node in the answer to /admin/status. `known_s`: seconds since the router first heard of the node's latest
    start. `lacks_routers`: routers that do not serve the node, although it lists them."""

    state: str
    last_seen_s: float
    known_s: float
    hello: Hello
    lacks_routers: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.hello.node_id

    @property
    def role(self) -> str:
        return self.hello.role


@dataclass(frozen=True, slots=True)
class SeenPair:
    """Two nodes that can't connect, as failed hand-offs show."""

    prefill: str
    decode: str
    endpoint: str
    since_s: float
    tries: int


@dataclass(frozen=True, slots=True)
class Status:
    """The answer to /admin/status. `time_s`: the router's clock. `asked_s`, `answered_s`: our clock before and after
    the request."""

    time_s: float
    epoch: int
    endpoint: str
    nodes: tuple[SeenNode, ...]
    asked_s: float
    answered_s: float
    unreachable: tuple[SeenPair, ...] = ()


@dataclass(frozen=True, slots=True)
class Misfit:
    a: str
    b: str
    differs: str  # the field


@dataclass(frozen=True, slots=True)
class ForeignNode:
    """A node of another protocol than the router's."""

    node: str
    protocol: int
    ours: int


@dataclass(frozen=True, slots=True)
class ReadyFacts:
    is_ready: bool
    is_pair: bool
    num_nodes: int
    misfits: tuple[Misfit, ...]
    strangers: tuple[ForeignNode, ...] = ()


@dataclass(frozen=True, slots=True)
class Cluster:
    """Two looks at one router, `interval_s` apart. `no_status`: why `status` is None, e.g. no admin key."""

    url: str
    ready: ReadyFacts
    before: Page
    after: Page
    interval_s: float
    status: Status | None
    no_status: str


@dataclass(frozen=True, slots=True)
class DialFacts:
    """`error`: "" after a success."""

    whose: str
    endpoint: str
    seconds: float
    error: str


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """A daemon on this machine. `threads`: 0 if not set. `problem`: why the settings may be incomplete."""

    pid: int
    command: str
    uid: int
    cores: tuple[int, ...]
    threads: int
    spins: bool
    keys: str = ""
    problem: str = ""

    @property
    def num_threads(self) -> int:
        return self.threads or len(self.cores)


@dataclass(frozen=True, slots=True)
class Disk:
    path: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """`steal_share`, `throttled_share`: shares of the time between two looks. `governors`: (driver, governor) pairs.

    `cores`: the usable cores, out of `num_cpus`. `load`: the load average of all cores.
    """

    cores: tuple[int, ...]
    num_cpus: int
    load: float
    steal_share: float
    throttled_share: float
    governors: frozenset[tuple[str, str]]
    daemons: tuple[DaemonFacts, ...]
    memory_bytes: int
    available_bytes: int
    open_files: int
    disks: tuple[Disk, ...]


@dataclass(frozen=True, slots=True)
class Secret:
    """`error`: why the file or folder could not be read."""

    path: str
    is_folder: bool
    uid: int
    mode: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class KeysFolder:
    """A keys folder of user `uid`. `secrets`: the folder and its files.

    `problem`: why that user's node would not start. `is_open`: whether we can read the folder.
    """

    path: str
    uid: int
    secrets: tuple[Secret, ...]
    problem: str
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """Results of a GPU's trials. `problem`: why the trials stopped. `sharing_problem`: why another process can't open
    the GPU's memory. `attention_problem`: why FlashInfer's attention can't be used there; "" also if it is missing.

    `difference`: the largest difference from the host's logits.
    """

    number: int
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    peers: tuple[int, ...] = ()
    free_bytes: int = 0
    total_bytes: int = 0
    to_device_bytes_per_s: float = 0.0
    to_host_bytes_per_s: float = 0.0
    copies_arrive: bool = True
    sharing_problem: str = ""
    attention_problem: str = ""
    difference: float = 0.0
    largest_logit: float = 1.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """`built_for`: torch's CUDA version; "" for none. `driver`: the driver's version; "" if unknown.

    `visible`: the value of CUDA_VISIBLE_DEVICES. `problem`: the reason why torch finds no device. `not_remembered`: why
    the result of sharing memory was not written down. `flashinfer`: its version; "" if it is missing.
    `attention_not_remembered`: as `not_remembered`.
    """

    torch: str
    built_for: str
    has_driver: bool
    driver: str
    visible: str | None
    problem: str
    devices: tuple[GpuDevice, ...]
    not_remembered: str = ""
    flashinfer: str = ""
    attention_not_remembered: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """`no_cluster`: why `cluster` is None."""

    url: str
    cluster: Cluster | None
    no_cluster: str
    must_answer: bool
    dials: tuple[DialFacts, ...]
    machine: MachineFacts
    keys: tuple[KeysFolder, ...] = ()
    gpus: GpuFacts | None = None  # None if not requested
