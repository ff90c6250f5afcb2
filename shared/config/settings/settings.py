"""One frozen dataclass of settings per concern, which checks its values when it is made.

Each field makes a flag (`--page-size`) and a TOML key (`[memory]` / `page_size = 16`), with limits and help.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.machine.gpus import ATTENTION_CHOICES
from shared.config.models import shipped_model
from shared.config.models.model_names import check_names, named_path, names_of
from shared.config.models.model_path import MODEL_CHOICES
from shared.config.settings.endpoints import MAX_PORT, check_bind_host, check_router
from shared.config.settings.options import Settings, check_fields, option
from shared.core.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model, and the name it is served under."""

    model: str = option(shipped_model.NAME, MODEL_CHOICES, metavar="MODEL")
    dtype: str = option(
        "auto",
        "number format of weights and KV; auto: bfloat16; on a CPU a GGUF file's blocks or codes, mostly with int8 KV",
        choices=("auto", "bfloat16", "float32"),
    )
    kv_dtype: str = option(
        "auto",
        "number format of KV; auto: as --dtype, but int8 if --dtype is auto too and a CPU computes with weights in "
        "blocks or int8; int8, fp8: a byte per number, a scale per token and head. On a CPU int8 is faster than "
        "bfloat16 for most models; fp8 is up to 1.5 times slower after long prompts",
        choices=("auto", "int8", "fp8"),
    )
    weight_dtype: str = option(
        "auto",
        "format of weights; auto: as --dtype; file: blocks of a GGUF file, or of a folder of 4-bit (AWQ, GPTQ, W4A16) "
        "or int8 weights, fast with VNNI; codes: these, rounded "
        "for AMX (auto with AMX); int8: a byte per weight (auto with VNNI but no BF16); fp8: one scale per output; "
        "fp8-dynamic, on a GPU: rows of inputs are rounded to fp8 too",
        choices=("auto", "file", "codes", "int8", "fp8", "fp8-dynamic"),
    )
    model_library: str = option(
        "auto",
        "whose layers run the model; auto: Baton's own for the families that it has, and those of the library "
        "transformers (slower) for all others; transformers: for every model",
        choices=("auto", "baton", "transformers"),
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "name that clients use (repeat for several; the first is the default); none: the model's own name",
        metavar="NAME",
    )
    max_context: int = option(0, "longest prompt + answer in tokens; 0: as long as the model was trained for", low=0)
    lora: tuple[str, ...] = option(
        (),
        "LoRA adapter, a PEFT folder, that requests may name as their model (repeat for several)",
        metavar="NAME=PATH",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.adapters) != len(self.lora):
            raise ConfigError("--lora gives two adapters the same name")
        check_names(self.public_names, self.adapters)
        if not self.model:
            raise ConfigError("--model is empty; write smollm2, hashlm, a .gguf file, a folder or org/name")

    @property
    def adapters(self) -> dict[str, str]:
        return dict(map(named_path, self.lora))

    @property
    def public_names(self) -> tuple[str, ...]:
        return names_of(self.model, self.served_model_name)

    @property
    def public_name(self) -> str:
        return self.public_names[0]


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """KV memory of one node."""

    kv_bytes: int = option(
        0, "KV pool size, e.g. 512MiB; 0: set by --mem-fraction", low=0, is_bytes=True, metavar="SIZE"
    )
    mem_fraction: float = option(0.2, "CPU: KV pool's share of the memory that is free at start", low=0.01, high=0.95)
    gpu_mem_fraction: float = option(
        0.9,
        "GPU: share of its memory for weights, steps and KV; nodes of `up` that share it divide this",
        low=0.01,
        high=1.0,
    )
    page_size: int = option(16, "tokens in a KV page (a power of two)", low=1, high=1024)
    max_running: int = option(0, "limit on requests decoded together; 0: 32 on a CPU, 256 on a GPU", low=0, high=4096)
    prefix_cache: bool = option(True, "keep the KV of finished prompts and reuse it")
    max_pinned_fraction: float = option(
        0.5, "prefill node: largest share of its pages that may wait for a decode node", low=0.05, high=1.0
    )
    packed_bytes: int = option(
        20480 * MIB,
        "CPU: size limit of all files with packed weights together (see `baton cache`); this user's nodes on this "
        "machine share these files; the least recently used file is removed first; 0: each node packs its own weights",
        low=0,
        is_bytes=True,
        metavar="SIZE",
    )
    offload_bytes: int = option(
        0,
        "host memory, e.g. 2GiB, for KV pages that leave the pool (of cached prompts and retracted requests); 0: their "
        "KV is computed again",
        low=0,
        is_bytes=True,
        metavar="SIZE",
    )
    offload_disk_bytes: int = option(
        0, "size of a file for pages beyond --offload-bytes; 0: no file", low=0, is_bytes=True, metavar="SIZE"
    )
    offload_dir: str = option(
        "", "folder for the unnamed file of --offload-disk-bytes; empty: the temporary folder", metavar="DIR"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"--page-size is {self.page_size}; it must be a power of two")
        if self.offload_disk_bytes and not self.offload_bytes:
            raise ConfigError("--offload-disk-bytes needs --offload-bytes too, because pages pass through host memory")


@dataclass(frozen=True, slots=True)
class SchedConfig(Settings):
    """How a node plans its steps."""

    overlap: bool = option(True, "plan the next step while the current one runs")
    chunk_size: int = option(
        0, "limit on prompt tokens in a step without decode rows; 0: 256 on a CPU, 8192 on a GPU", low=0, high=65536
    )
    mixed_chunk_size: int = option(
        0, "limit on prompt tokens in a step with decode rows; 0: 64 on a CPU, 1024 on a GPU", low=0, high=65536
    )
    itl_budget: float = option(
        0.0,
        "longest step, in milliseconds, that running requests share with prompts: measured step times decide how many "
        "prompt tokens join, from 16 to --mixed-chunk-size. A smaller value makes streams steadier (ITL p99), but "
        "first tokens later (TTFT); 0: always --mixed-chunk-size",
        low=0.0,
        high=60_000.0,
        metavar="MS",
    )
    growth_reserve: float = option(
        1.0,
        "how carefully a node keeps memory for streams that began: new requests wait while less is free than X times "
        "the growth that it foresees for the answers under way, from their lengths and those of recent answers. 0: "
        "first tokens come early, but streams pause when memory is full. 2: hardly any pause, later first tokens",
        low=0.0,
        high=4.0,
        metavar="X",
    )
    max_waiting: int = option(1024, "limit on requests that wait for memory on one node", low=1)
    device: str = option(
        "auto",
        "where forwards run; auto: a GPU if the model can use one; inline: on the loop's thread, without overlap",
        choices=("auto", "cpu", "cuda", "inline"),
    )
    cuda_graphs: str = option(
        "auto",
        "on a GPU a node captures the forwards of its decode and verify steps, for up to 14 batch sizes, and of steps "
        "of up to 512 prompt tokens at start, and launches each as one graph; a prefill node captures prompts only. "
        "The capture takes a few seconds, and uses memory that "
        "--gpu-mem-fraction leaves free. Graphs read the KV pool, so they are captured after it is allocated, and "
        "their size is unknown until then. Steps that don't fit run operator by operator, and the log names them. off: "
        "always operator by operator",
        choices=("auto", "off"),
    )
    attention: str = option("auto", ATTENTION_CHOICES, choices=("auto", "baton", "flashinfer"))
    deterministic: bool = option(
        False,
        "on a GPU, kernels use fixed tiles and splits. A request then gets the same bits whatever runs beside it and "
        "however its prompt is cut into chunks. This is slower. All nodes need the flag. It is refused on CPUs, and "
        "with --lora, experts or draft heads",
    )


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """Speculative decoding: drafts make a step longer, and never change the answer.
    `ngram` copies from the request's tokens, `eagle` runs a draft head, and `mtp` runs the model's own MTP layers."""

    spec: str = option(
        "none",
        "draft algorithm; mtp needs a folder with MTP layers, as DeepSeek-V3's and GLM-4.5's. Give prefill nodes the "
        "decode nodes' algorithm, or else drafts don't know the prompt",
        choices=("none", "ngram", "eagle", "mtp"),
    )
    spec_width: int = option(4, "tokens verified in one step: drafts + 1", low=2, high=16)
    spec_topk: int = option(1, "eagle: number of drafts after each token; 1: a chain, more: a tree", low=1, high=8)
    spec_steps: int = option(3, "eagle with a tree: longest chain of drafts", low=1, high=8)
    spec_copies: int = option(
        2,
        "eagle, mtp: if the last N tokens occur earlier in the request's own text, draft the tokens that followed "
        "there, without the head; 0: never",
        low=0,
        high=3,
    )
    spec_adaptive: bool = option(
        True, "draft less, or not at all, while measured acceptance and step times show no gain"
    )
    spec_head: str = option(
        "auto", "EAGLE-3 head: a folder in the public format; auto: the one shipped for the model", metavar="PATH"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.is_tree:
            self._check_tree()

    def _check_tree(self) -> None:
        topk, inner = self.spec_topk, self.spec_steps - 1
        most = topk + inner * topk**2
        given = f"--spec-topk {topk} --spec-steps {self.spec_steps} --spec-width {self.spec_width}"
        if self.spec != "eagle":
            raise ConfigError(f"{given}: only eagle drafts trees, not {self.spec}")
        if inner * topk > self.spec_width:
            raise ConfigError(f"{given}: the tree needs {inner * topk} slots, more than --spec-width")
        if most < self.spec_width - 1:
            raise ConfigError(f"{given}: the tree has {most} drafts at most, fewer than the window holds")

    @property
    def is_tree(self) -> bool:
        return self.spec_topk > 1

    @property
    def depth(self) -> int:
        return self.spec_steps if self.is_tree and not self.spec_copies else self.spec_width - 1

    @property
    def width(self) -> int:
        """Return the largest number of tokens that a running row adds per step."""
        return 1 if self.spec == "none" else self.spec_width


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Processes, or stages within one process, that share a node's work."""

    tp: int = option(
        1,
        "tensor parallelism: processes of this node, each with a share of the weights and heads; on GPUs, one each",
        low=1,
        high=64,
    )
    dp: int = option(
        1,
        "data parallelism, decode nodes: processes of this node, each with all weights and a share of each step's rows "
        "(CPU only)",
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
            raise ConfigError(f"{' '.join(given)}: a node splits either its model, its rows or its layers")

    def of(self, role: str) -> ParallelConfig:
        return self if role == "decode" else ParallelConfig(tp=self.tp, pp=self.pp)

    @property
    def num_ranks(self) -> int:
        return max(self.tp, self.dp)


@dataclass(frozen=True, slots=True)
class NodeConfig(Settings):
    """A node's identity and connections. The command sets the role."""

    role: str = option("decode", "prefill or decode", choices=("prefill", "decode"))
    node_id: str = option("", "name in logs and metrics; empty: role and process id", metavar="NAME")
    router: tuple[str, ...] = option(
        (),
        "router to dial, e.g. tcp://127.0.0.1:7001 (repeat for several), or dns://NAME:PORT for a name's addresses",
        metavar="ENDPOINT",
    )
    routers_file: str = option(
        "", "file of routers to dial, one tcp:// endpoint per line; read again when it changes", metavar="FILE"
    )
    bind_host: str = option("127.0.0.1", "address at which other nodes reach this one", metavar="HOST")
    bind_port: int = option(0, "port at which other nodes reach this one; 0: any free one", low=0, high=MAX_PORT)
    transport: str = option(
        "auto",
        "how KV pages travel; auto: measure shm (one host), zmq and, with --trust-network, gloo, and take the "
        "fastest; for a GPU's pages zmq, through pinned host memory, and cuda_ipc (one host), if `baton doctor --gpu` "
        "found that it works here. nccl and nixl are used only if named",
        choices=("auto", "shm", "zmq", "gloo", "nccl", "cuda_ipc", "nixl"),
    )
    heartbeat_s: float = option(0.5, "seconds between two load reports", low=0.05, high=10.0)
    silence_s: float = option(
        5.0, "a silent peer counts as lost after this time, a dead link after a third of it", low=0.5, high=600.0
    )
    lease_s: float = option(60.0, "a stalled hand-off ends after this time (equal on all nodes)", low=1.0, high=3600.0)
    drain_s: float = option(10.0, "seconds that requests get to finish after SIGTERM", low=0.0, high=3600.0)

    def check_addresses(self, *, has_keys: bool) -> None:
        """Raise ConfigError if an address needs keys and there are none."""
        check_bind_host(self.bind_host, "--bind-host", has_keys=has_keys)
        for endpoint in self.router:
            check_router(endpoint, "--router", has_keys=has_keys)


@dataclass(frozen=True, slots=True)
class SecurityConfig(Settings):
    """Keys by which routers and nodes identify each other."""

    keys: str = option(
        "", "folder with this cluster's keys (`baton keys --help`); empty: no keys, this machine only", metavar="DIR"
    )

    @property
    def has_keys(self) -> bool:
        return bool(self.keys)


@dataclass(frozen=True, slots=True)
class LimitsConfig(Settings):
    """Limits of requests. A request beyond a limit gets a 4xx that names the field."""

    max_body_bytes: int = option(4 * MIB, "largest request body", low=KIB, is_bytes=True, metavar="SIZE")
    max_prompt_tokens: int = option(0, "longest prompt; 0: the context length", low=0)
    default_max_tokens: int = option(0, "limit without max_tokens; 0: 1024 for the shipped model, else none", low=0)
    max_prompts: int = option(64, "largest number of prompts in one completion request", low=1, high=4096)
    max_n: int = option(16, "largest number of answers to one prompt", low=1, high=128)
    max_scores: int = option(1 << 18, "largest number of log-probabilities of prompt tokens in one answer", low=0)
    max_open_requests: int = option(512, "limit on requests that are open on nodes; others wait", low=1, high=65536)
    max_queued_requests: int = option(512, "limit on requests that wait for nodes; others get 503", low=0, high=65536)


@dataclass(frozen=True, slots=True)
class TimeoutsConfig(Settings):
    """Time limits of the router."""

    request_timeout_s: float = option(600.0, "longest time that one request may take", low=1.0, high=86400.0)
    node_silence_s: float = option(
        5.0, "a silent node counts as lost after this time, a dead link after a third of it", low=0.5, high=600.0
    )
    slow_reader_s: float = option(30.0, "a client that reads nothing for this time is cut off", low=1.0, high=3600.0)
    retry_after_s: int = option(2, "seconds in the header Retry-After of a 503 or 429", low=1, high=3600)
    max_attempts: int = option(3, "limit on a request's failed attempts; 1: a lost node is an error", low=1, high=8)
    resume_wait_s: float = option(10.0, "longest wait of a stream without a node for another", low=0.0, high=600.0)
    move_after_s: float = option(
        30.0, "time that requests of a drained node get to finish before they are moved", low=0.0, high=3600.0
    )
    shutdown_s: float = option(10.0, "seconds that open requests get to finish after SIGTERM", low=0.0, high=3600.0)
