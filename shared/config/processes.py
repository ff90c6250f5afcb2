"""Define the configuration that each kind of process takes in `app.run(config)`: one settings class per concern."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.config.core_plan import CorePlan
from shared.config.settings.adapter_settings import AdapterConfig
from shared.config.settings.event_settings import EventsConfig
from shared.config.settings.frozen import PIPELINE
from shared.config.settings.http_settings import HttpConfig
from shared.config.settings.hub_settings import HubConfig
from shared.config.settings.local_settings import LocalConfig
from shared.config.settings.log_settings import LogConfig
from shared.config.settings.probe_settings import ProbeConfig
from shared.config.settings.ray_settings import RayConfig, ScalingConfig, ShareConfig
from shared.config.settings.records_settings import RecordsConfig
from shared.config.settings.router_settings import RouterConfig
from shared.config.settings.settings import (
    LimitsConfig,
    MemoryConfig,
    ModelConfig,
    NodeConfig,
    ParallelConfig,
    SchedConfig,
    SecurityConfig,
    SpecConfig,
    TimeoutsConfig,
)
from shared.config.settings.text_settings import TextConfig
from shared.config.settings.trace_settings import TraceConfig
from shared.config.settings.transfer_settings import TransferConfig
from shared.core.errors import ConfigError

ROUTER_ID = "router"  # of `baton up`, unless the user names it
WITHOUT_GPU = ("cpu", "inline")  # values of --device


def check_spec(model: ModelConfig, spec: SpecConfig) -> None:
    if spec.spec == "mtp" and model.model == "hashlm" and spec.spec_width < 3:
        raise ConfigError("--spec mtp: hashlm has two draft layers or more: --spec-width must be at least 3")


def check_scripted(parts: NodeParts) -> None:
    """Raise ConfigError for unsupported flags."""
    asked = {
        f"--tp {parts.parallel.tp}": parts.parallel.tp > 1,
        f"--dp {parts.parallel.dp}": parts.parallel.dp > 1,
        f"--pp {parts.parallel.pp}": parts.parallel.pp > 1,
        f"--spec {parts.spec.spec}": parts.spec.spec not in ("none", "ngram"),
        "--lora": bool(parts.model.adapters),
        "--lora-dir": bool(parts.adapters.lora_dir),
        "--device cuda": parts.sched.device == "cuda",
    }
    refused = [flag for flag, is_asked in asked.items() if is_asked]
    if parts.model.model == "scripted" and refused:
        raise ConfigError(f"--model scripted can't be used with {', '.join(refused)}")


def check_parallel(
    parallel: ParallelConfig, sched: SchedConfig, model: ModelConfig, spec: SpecConfig, adapters: AdapterConfig
) -> None:
    given = f"--tp {parallel.tp}" if parallel.tp > 1 else f"--dp {parallel.dp}"
    if sched.device == "cuda":
        check_parts_on_gpu(parallel, sched.device)
    if parallel.num_ranks > 1 and adapters.lora_dir:
        raise ConfigError(f"{given} --lora-dir: ranks load adapters only at the start; use --lora")
    if parallel.dp > 1 and spec.spec in ("eagle", "mtp") and model.model != "hashlm":
        raise ConfigError(
            f"{given} --spec {spec.spec}: a head needs features that are on other ranks; use --spec ngram or none"
        )


def check_parts_on_gpu(parallel: ParallelConfig, device: str) -> None:
    """Raise ConfigError for data-parallel ranks or stages beside a GPU, which they would leave unused."""
    numbers = {"--dp": parallel.dp, "--pp": parallel.pp}
    given = " ".join(f"{flag} {number}" for flag, number in numbers.items() if number > 1)
    if given:
        raise ConfigError(
            f"{given} --device {device}: such ranks and stages share their KV pages as host memory, so this node would "
            f"compute on the CPU, beside an idle GPU. To use the GPU leave out {given}; else say --device cpu"
        )


def check_pipeline(
    parallel: ParallelConfig, sched: SchedConfig, transfer: TransferConfig, adapters: AdapterConfig
) -> None:
    if parallel.pp > 1:
        asked = {
            "--lora-dir": bool(adapters.lora_dir),
            f"--layer-parts {transfer.layer_parts}": transfer.layer_parts > 1,
            f"--itl-budget {sched.itl_budget:g}": sched.itl_budget > 0,
        }
        PIPELINE.refuse(asked, given=f"--pp {parallel.pp}")


@dataclass(frozen=True, slots=True)
class RouterProcessConfig:
    """The router reads the model's tokenizer and chat template, never its weights."""

    model: ModelConfig = field(default_factory=ModelConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    records: RecordsConfig = field(default_factory=RecordsConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    text: TextConfig = field(default_factory=TextConfig)
    cores: CorePlan = field(default_factory=CorePlan)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    log: LogConfig = field(default_factory=LogConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)

    def __post_init__(self) -> None:
        self.router.check_addresses(self.http, has_keys=self.security.has_keys)


@dataclass(frozen=True, slots=True)
class NodeParts:
    """Settings of one node, or of all nodes of a cluster. The core plan is separate."""

    model: ModelConfig = field(default_factory=ModelConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    sched: SchedConfig = field(default_factory=SchedConfig)
    spec: SpecConfig = field(default_factory=SpecConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    node: NodeConfig = field(default_factory=NodeConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    events: EventsConfig = field(default_factory=EventsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)

    def __post_init__(self) -> None:
        check_scripted(self)
        check_spec(self.model, self.spec)
        check_parallel(self.parallel, self.sched, self.model, self.spec, self.adapters)
        check_pipeline(self.parallel, self.sched, self.transfer, self.adapters)
        self.node.check_addresses(has_keys=self.security.has_keys)
        self.transfer.check_transport(self.node)
        self.events.check_reach(trusts_network=self.transfer.trust_network)


@dataclass(frozen=True, slots=True)
class NodeProcessConfig:
    parts: NodeParts = field(default_factory=NodeParts)
    cores: CorePlan = field(default_factory=CorePlan)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The settings of `baton up`. The launcher assigns identities, ports and cores."""

    local: LocalConfig = field(default_factory=LocalConfig)
    nodes: NodeParts = field(default_factory=NodeParts)
    router: RouterConfig = field(default_factory=RouterConfig)
    records: RecordsConfig = field(default_factory=RecordsConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    text: TextConfig = field(default_factory=TextConfig)

    def __post_init__(self) -> None:
        self.router.check_addresses(self.http, has_keys=self.nodes.security.has_keys)
        if self.local.devices and (device := self.nodes.sched.device) in WITHOUT_GPU:
            raise ConfigError(f"--devices {self.local.named_devices} --device {device}: leave out one of them")

    @property
    def router_names(self) -> tuple[str, ...]:
        """The same at every start."""
        name, number = self.router.router_id or ROUTER_ID, self.local.routers
        return (name,) if number == 1 else tuple(f"{name}-{index}" for index in range(number))


@dataclass(frozen=True, slots=True)
class RayClusterConfig:
    """The settings of `baton ray up`. Nodes get addresses when they are placed."""

    ray: RayConfig = field(default_factory=RayConfig)
    share: ShareConfig = field(default_factory=ShareConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    nodes: NodeParts = field(default_factory=NodeParts)
    router: RouterConfig = field(default_factory=RouterConfig)
    records: RecordsConfig = field(default_factory=RecordsConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    text: TextConfig = field(default_factory=TextConfig)

    def __post_init__(self) -> None:
        self.router.check_addresses(self.http, has_keys=self.nodes.security.has_keys)
        if self.share.has_gpus and (device := self.nodes.sched.device) in WITHOUT_GPU:
            raise ConfigError(
                f"[share] prefill_gpus or decode_gpus beside [sched] device = {device!r}: leave out one of them"
            )


def router_process(
    config: ClusterConfig | RayClusterConfig, router: RouterConfig, cores: CorePlan
) -> RouterProcessConfig:
    """Return the settings of one of the cluster's routers."""
    return RouterProcessConfig(
        model=config.nodes.model,
        hub=config.nodes.hub,
        router=router,
        records=config.records,
        http=config.http,
        limits=config.limits,
        timeouts=config.timeouts,
        text=config.text,
        cores=cores,
        security=config.nodes.security,
        log=config.nodes.log,
        trace=config.nodes.trace,
    )
