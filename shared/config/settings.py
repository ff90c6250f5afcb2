"""Every setting there is, one frozen dataclass per concern. Checked when made, never changed afterwards.

Flags (`max_context` -> `--max-context`) and TOML keys (`[memory]` / `page_size = 16`) are made from these fields, so
a field's name, help text and limits are written here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.endpoints import check_bind_host, check_endpoint
from shared.config.model_path import MODEL_CHOICES
from shared.config.options import check_fields, option
from shared.core.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20
MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and under which name it is served."""

    model: str = option("smollm2", MODEL_CHOICES, metavar="MODEL")
    dtype: str = option(
        "auto",
        "number format of weights and KV; auto: bfloat16, and on a CPU a GGUF file's products in its own blocks",
        choices=("auto", "bfloat16", "float32"),
    )
    kv_dtype: str = option(
        "auto",
        "number format of KV in pages; int8, fp8: a byte per number and a scale per token and head, about half "
        "the memory; on a CPU int8 is as fast as bfloat16, fp8 up to 1.5 times slower behind long prompts",
        choices=("auto", "int8", "fp8"),
    )
    weight_dtype: str = option(
        "auto",
        "auto: as --dtype; file: a GGUF file's own blocks; int8: blocks of 32 (both fast with AVX-512 VNNI); fp8: a "
        "scale per output",
        choices=("auto", "file", "int8", "fp8"),
    )
    served_model_name: str = option("", "name clients use; empty: the model's own name", metavar="NAME")
    max_context: int = option(0, "longest prompt + answer in tokens; 0: what the model was trained for", low=0)
    lora: tuple[str, ...] = option(
        (),
        "LoRA adapter that requests may name as their model: a PEFT folder (repeat for several)",
        metavar="NAME=PATH",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.adapters) != len(self.lora):
            raise ConfigError("--lora gives two adapters one name")
        if self.public_name in self.adapters:
            raise ConfigError(f"--lora {self.public_name}=...: that is the model's own name")
        if not self.model:
            raise ConfigError("--model is empty; write smollm2, hashlm, a .gguf file, a folder or org/name")

    @property
    def adapters(self) -> dict[str, str]:
        """Folders by name."""
        return dict(map(named_path, self.lora))

    @property
    def public_name(self) -> str:
        """The name in /v1/models: the given one, else the model's short name."""
        stem = self.model.rstrip("/").rsplit("/", 1)[-1]
        return self.served_model_name or stem.removesuffix(".gguf")


def named_path(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name or not path or len(name) > 256:
        raise ConfigError(f"--lora is {text!r}; write NAME=PATH")
    return name, path


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """KV memory of one node."""

    kv_bytes: int = option(0, "KV pool size, as 512MiB; 0: by --mem-fraction", low=0, is_bytes=True, metavar="SIZE")
    mem_fraction: float = option(0.2, "CPU: share of the memory free at start for the KV pool", low=0.01, high=0.95)
    gpu_mem_fraction: float = option(0.9, "GPU: share of its memory for weights, steps and KV", low=0.01, high=1.0)
    page_size: int = option(16, "tokens in a KV page (a power of two)", low=1, high=1024)
    max_running: int = option(0, "most requests decoded together; 0: 32, on a GPU 256", low=0, high=4096)
    prefix_cache: bool = option(True, "keep the KV of finished prompts and reuse it")
    max_pinned_fraction: float = option(
        0.5, "prefill node: most of its pages that may wait for a decode node", low=0.05, high=1.0
    )
    packed_bytes: int = option(
        20480 * MIB,
        "CPU: weights are packed once, into a file that all nodes of this user on this machine map; most bytes of "
        "such files (see `baton cache`), the one used longest ago goes first; 0: each node packs its own",
        low=0,
        is_bytes=True,
        metavar="SIZE",
    )
    offload_bytes: int = option(
        0,
        "host memory for KV pages that leave the pool, as 2GiB: cached prompts, and requests that gave their memory "
        "back; 0: such KV is computed again",
        low=0,
        is_bytes=True,
        metavar="SIZE",
    )
    offload_disk_bytes: int = option(
        0,
        "size of a file for pages that --offload-bytes has no room for; 0: none",
        low=0,
        is_bytes=True,
        metavar="SIZE",
    )
    offload_dir: str = option("", "folder of that file, which has no name there; empty: a temporary one", metavar="DIR")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"--page-size is {self.page_size}; it must be a power of two")
        if self.offload_disk_bytes and not self.offload_bytes:
            raise ConfigError("--offload-disk-bytes needs --offload-bytes too: pages pass through host memory")


@dataclass(frozen=True, slots=True)
class SchedConfig:
    """How a node plans its steps."""

    overlap: bool = option(True, "plan the next step while the current one runs")
    chunk_size: int = option(
        0, "most prompt tokens in one step when nothing is being decoded; 0: 256, on a GPU 8192", low=0, high=65536
    )
    mixed_chunk_size: int = option(
        0, "most prompt tokens in a step of running requests; 0: 64, on a GPU 1024", low=0, high=65536
    )
    itl_budget: float = option(
        0.0,
        "most milliseconds of a step that running requests share with prompts: as many prompt tokens join as measured "
        "steps leave room for, 16 at least, --mixed-chunk-size at most. A small one: steadier streams (lower ITL p99), "
        "later first tokens; 0: always --mixed-chunk-size",
        low=0.0,
        high=60_000.0,
        metavar="MS",
    )
    max_waiting: int = option(1024, "most requests that wait for memory on one node", low=1)
    device: str = option(
        "auto",
        "where forwards run; auto: a GPU that the model can use, if any; inline: on the loop's thread, no overlap",
        choices=("auto", "cpu", "cuda", "inline"),
    )
    cuda_graphs: str = option(
        "auto",
        "on a GPU a decode node captures its decode and verify steps at start, for up to 14 batch sizes, and launches "
        "each as two graphs; the capture takes seconds and memory. off: operator by operator, always",
        choices=("auto", "off"),
    )
    deterministic: bool = option(
        False,
        "on a GPU kernels take fixed tiles and splits: a request gets the same bits whatever runs beside it and "
        "however its prompt is cut into chunks; slower. Prefill and decode nodes both need it. Refused on CPUs, with "
        "--lora, fp8 weights, experts and draft heads",
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """Speculative decoding: drafts make a step longer, and never change what is said.

    ngram copies from the request's own tokens, eagle runs a draft head, mtp one draft layer per draft.
    """

    spec: str = option(
        "none",
        "draft algorithm; prefill nodes have the decode nodes', or none: drafts then know nothing of the prompt",
        choices=("none", "ngram", "eagle", "mtp"),
    )
    spec_width: int = option(4, "tokens verified in one step: drafts + 1", low=2, high=16)
    spec_topk: int = option(1, "eagle: drafts after each token; 1 is a chain, more a tree", low=1, high=8)
    spec_steps: int = option(3, "eagle with a tree: how many drafts may follow one another", low=1, high=8)
    spec_copies: int = option(
        2,
        "eagle, mtp: where the last so many tokens stood before in the request's own text, its drafts are what "
        "followed there, and the head is not asked; 0: never",
        low=0,
        high=3,
    )
    spec_adaptive: bool = option(
        True, "draft less, or not at all, while measured acceptance and step times say that it does not pay"
    )
    spec_head: str = option(
        "auto", "EAGLE-3 head: a folder in the public format, or auto: the one shipped for the model", metavar="PATH"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.spec == "mtp" and self.spec_width < 3:
            raise ConfigError("--spec mtp has two draft layers or more: --spec-width must be at least 3")
        if self.is_tree:
            self._check_tree()

    def _check_tree(self) -> None:
        """Levels but the last are computed at slots of the window, and the tree fills it."""
        topk, inner = self.spec_topk, self.spec_steps - 1
        most = topk + inner * topk**2
        given = f"--spec-topk {topk} --spec-steps {self.spec_steps} --spec-width {self.spec_width}"
        if self.spec != "eagle":
            raise ConfigError(f"{given}: only eagle drafts trees, not {self.spec}")
        if inner * topk > self.spec_width:
            raise ConfigError(f"{given}: the tree needs {inner * topk} slots of its window")
        if most < self.spec_width - 1:
            raise ConfigError(f"{given}: the tree has {most} drafts at most, fewer than the window holds")

    @property
    def is_tree(self) -> bool:
        return self.spec_topk > 1

    @property
    def depth(self) -> int:
        """Most drafts that a verify can accept."""
        return self.spec_steps if self.is_tree and not self.spec_copies else self.spec_width - 1

    @property
    def width(self) -> int:
        """Tokens a running row adds at most per step: 1 without a draft."""
        return 1 if self.spec == "none" else self.spec_width


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How many processes, or stages within one, share the work of one node."""

    tp: int = option(
        1,
        "tensor parallelism: processes of this node that have a share of the weights and heads each (CPU only)",
        low=1,
        high=64,
    )
    dp: int = option(
        1,
        "data parallelism, decode nodes: processes of this node that have all the weights and a share of each step's "
        "rows (CPU only)",
        low=1,
        high=64,
    )
    pp: int = option(
        1,
        "pipeline parallelism: stages of layers within the node's process, which share its threads (CPU only)",
        low=1,
        high=64,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        sizes = {"--tp": self.tp, "--dp": self.dp, "--pp": self.pp}
        given = [f"{flag} {size}" for flag, size in sizes.items() if size > 1]
        if len(given) > 1:
            raise ConfigError(f"{' '.join(given)}: a node shares out its model, its rows or its layers, one of them")

    def of(self, role: str) -> ParallelConfig:
        """What a node of this role takes of a whole cluster's."""
        return self if role == "decode" else ParallelConfig(tp=self.tp, pp=self.pp)

    @property
    def num_ranks(self) -> int:
        """Processes of one node."""
        return max(self.tp, self.dp)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Who a node is and how it talks. The command sets the role."""

    role: str = option("decode", "prefill or decode", choices=("prefill", "decode"))
    node_id: str = option("", "name in logs and metrics; empty: role and process id", metavar="NAME")
    router: tuple[str, ...] = option(
        (), "router to dial, as tcp://127.0.0.1:7001 (repeat for several)", metavar="ENDPOINT"
    )
    bind_host: str = option("127.0.0.1", "address other nodes reach this one at", metavar="HOST")
    bind_port: int = option(0, "port other nodes reach this one at; 0: any free one", low=0, high=MAX_PORT)
    transport: str = option(
        "auto",
        "how KV pages come; auto: what was measured to be fastest of shm (one host), zmq and, with --trust-network, "
        "gloo; those of a GPU by zmq, through pinned host memory. Never run on hardware, only by name: nccl, cuda_ipc "
        "(one host) and nixl",
        choices=("auto", "shm", "zmq", "gloo", "nccl", "cuda_ipc", "nixl"),
    )
    heartbeat_s: float = option(0.5, "seconds between two load reports", low=0.05, high=10.0)
    silence_s: float = option(5.0, "a peer is lost after this silence; a mute host: a third", low=0.5, high=600.0)
    lease_s: float = option(60.0, "a hand-off that stalls is given up; alike on all nodes", low=1.0, high=3600.0)
    drain_s: float = option(10.0, "seconds running requests get to finish after SIGTERM", low=0.0, high=3600.0)
    max_message_bytes: int = option(
        64 * MIB, "largest message taken from a peer", low=MIB, is_bytes=True, metavar="SIZE"
    )

    def __post_init__(self) -> None:
        check_fields(self)

    def check_addresses(self, *, has_keys: bool) -> None:
        """ConfigError for those that need keys, where there are none."""
        check_bind_host(self.bind_host, "--bind-host", has_keys=has_keys)
        for endpoint in self.router:
            check_endpoint(endpoint, "--router", has_keys=has_keys)


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """How routers and nodes prove to each other who they are."""

    keys: str = option(
        "", "folder with this cluster's keys (`baton keys --help`); empty: no keys, this machine only", metavar="DIR"
    )

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def has_keys(self) -> bool:
        return bool(self.keys)


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """What one client may ask for. Beyond each limit there is a 4xx that names the field."""

    max_body_bytes: int = option(4 * MIB, "largest request body", low=KIB, is_bytes=True, metavar="SIZE")
    max_prompt_tokens: int = option(0, "longest prompt; 0: the context length", low=0)
    max_prompts: int = option(64, "prompts in one completion request", low=1, high=4096)
    max_n: int = option(16, "answers to one prompt", low=1, high=128)
    max_stop_strings: int = option(16, "stop strings in one request", low=1, high=256)
    max_stop_chars: int = option(256, "characters in one stop string", low=1, high=65536)
    max_logit_bias: int = option(300, "tokens in logit_bias", low=0, high=300)
    max_scores: int = option(1 << 18, "log-probabilities of prompt tokens in one answer", low=0)
    max_open_requests: int = option(512, "requests open at a time; beyond it 429", low=1, high=65536)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class TimeoutsConfig:
    """How long the router waits for what."""

    request_timeout_s: float = option(600.0, "longest time one request may take", low=1.0, high=86400.0)
    node_silence_s: float = option(5.0, "a node is lost after this silence; a mute host: a third", low=0.5, high=600.0)
    slow_reader_s: float = option(30.0, "a client that reads nothing for so long is cut off", low=1.0, high=3600.0)
    retry_after_s: int = option(2, "Retry-After of a 503 or 429", low=1, high=3600)
    max_attempts: int = option(3, "attempts at one request; 1: a lost node is an error for the client", low=1, high=8)
    resume_wait_s: float = option(10.0, "a stream whose node is gone waits so long for another", low=0.0, high=600.0)
    move_after_s: float = option(
        30.0, "requests of a drained node get so long to finish before they are moved", low=0.0, high=3600.0
    )
    shutdown_s: float = option(10.0, "seconds open requests get to finish after SIGTERM", low=0.0, high=3600.0)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Where records go is fixed (stderr, one line each); how many is not. Prompts and answers are never logged."""

    log_level: str = option("info", "least important level shown", choices=("debug", "info", "warning", "error"))
    log_color: bool = option(False, "colour levels and node names")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """How many nodes `baton up` starts on this machine, and how it watches them."""

    prefill: int = option(1, "prefill nodes; 0: decode nodes prefill on their own", low=0, high=64)
    decode: int = option(1, "decode nodes; 0: prefill nodes decode on their own", low=0, high=64)
    decode_tp: int = option(0, "--tp of the decode nodes, where it is another than the prefill nodes'", low=0, high=64)
    decode_pp: int = option(0, "--pp of the decode nodes, where it is another than the prefill nodes'", low=0, high=64)
    start_timeout_s: float = option(300.0, "longest time until all of it is ready", low=1.0, high=3600.0)
    stop_timeout_s: float = option(15.0, "seconds processes get to stop before they are killed", low=0.5, high=3600.0)
    share_cores: bool = option(True, "a node computes on the cores of nodes that have no work, too")
    max_restarts: int = option(5, "restarts of one node within a minute before it is left down", low=0, high=100)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.prefill + self.decode == 0:
            raise ConfigError("--prefill 0 --decode 0 leaves no node; start at least one")
