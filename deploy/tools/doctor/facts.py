"""What the checks judge: plain values, gathered elsewhere. Knows neither sockets nor files."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.metrics_page import Page
from shared.wire.messages import Hello


@dataclass(frozen=True, slots=True)
class SeenNode:
    """A row of /admin/status. `known_s`: since the router first heard of this life of the node."""

    state: str
    last_seen_s: float
    known_s: float
    hello: Hello

    @property
    def name(self) -> str:
        return self.hello.node_id

    @property
    def role(self) -> str:
        return self.hello.role


@dataclass(frozen=True, slots=True)
class SeenPair:
    """Two nodes that can't reach each other, as their router has learnt from hand-offs."""

    prefill: str
    decode: str
    endpoint: str
    since_s: float
    tries: int


@dataclass(frozen=True, slots=True)
class Status:
    """/admin/status. `time_s` is the router's clock, `asked_s` and `answered_s` ours, before and after."""

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
    field: str


@dataclass(frozen=True, slots=True)
class ReadyFacts:
    """/ready, as it is with a key of the router's, where it has one."""

    is_ready: bool
    is_pair: bool
    num_nodes: int
    misfits: tuple[Misfit, ...]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Two looks at one router, `interval_s` apart. Without its admin key `status` is None, and `no_status` says why."""

    url: str
    ready: ReadyFacts
    before: Page
    after: Page
    interval_s: float
    status: Status | None
    no_status: str


@dataclass(frozen=True, slots=True)
class DialFacts:
    """One attempt to connect from here. `error` is empty when it worked."""

    whose: str
    endpoint: str
    seconds: float
    error: str


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """A Baton process of this machine, by its flags and its file. `threads`: 0 when it was not told how many.

    `problem`: why that may not be all that it was told.
    """

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
    """Shares are of the time between the two looks. `governors`: (driver, governor) of the cores that have one.

    `cores`: those that we may run on, of `num_cpus`, whose processes `load` counts.
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
    """A file or folder that is to be one user's own. `error`: why nothing is known of it."""

    path: str
    is_folder: bool
    uid: int
    mode: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class KeysFolder:
    """`uid`: who is to use it. `secrets`: the folder and its files. `problem`: the words that a node of that user would
    refuse to start with. `is_open`: whether we could look inside."""

    path: str
    uid: int
    secrets: tuple[Secret, ...]
    problem: str
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """What one GPU has, and did when it was tried. `problem`: why it was not tried any further. `sharing_problem`: why
    another process can't open its memory. `difference`: between its logits and the host's, at most."""

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
    difference: float = 0.0
    largest_logit: float = 1.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """`built_for`: CUDA's version, "" of a torch without it. `driver`: "" where it is not known. `visible`: what
    CUDA_VISIBLE_DEVICES says. `problem`: why torch has no device."""

    torch: str
    built_for: str
    has_driver: bool
    driver: str
    visible: str | None
    problem: str
    devices: tuple[GpuDevice, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is judged. `cluster` is None, and `no_cluster` says why, where no router answered."""

    url: str
    cluster: Cluster | None
    no_cluster: str
    must_answer: bool
    dials: tuple[DialFacts, ...]
    machine: MachineFacts
    keys: tuple[KeysFolder, ...] = ()
    gpus: GpuFacts | None = None  # None: nobody asked
