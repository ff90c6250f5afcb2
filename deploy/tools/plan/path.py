"""Measure a request's time outside of the engine, with a whole cluster and its simulation.

`alone`     Send requests one after another. The path's time is the requests' times minus the steps' times.
`together`  Send a small load, so that other processes slow steps down. Stretch the simulated steps until the simulation
            shows the measured figures.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.cluster.own_cluster import own_cluster
from deploy.tools.plan.layout import ClusterLayout
from deploy.tools.plan.profile import PathProfile, Profile, ProfiledCosts, StepShape
from deploy.tools.plan.router_load import load_plan, put_load
from deploy.tools.plan.simulate import play_virtual
from deploy.tools.plan.tokens import SimTokens
from deploy.tools.traffic.figures.record import RequestRecord
from deploy.tools.traffic.load_plan import LoadPlan
from router.text.load import load_text_model
from shared.config.flags import to_argv
from shared.config.processes import NodeProcessConfig
from shared.config.settings.router_settings import UNMEASURED_LOCAL_TOKENS
from shared.core.errors import ConfigError

SHORT, LONG = 60, 490  # prompt lengths in words; both prompts are handed over, and their last chunks differ greatly
ANSWER = 24
REQUESTS = 12
LOAD = ("--prompt-tokens", "40-700", "--output-tokens", "30-110", "--seed", "4711")
MEAN_PROMPT = 370
LOAD_SECONDS = 40.0
PREFILL_BUSY = 0.35  # share of the load's time in which the prefill node computes
ROUNDS = 14
DAMPED = 0.3
SETTLED = 2  # number of an answer's first gaps that are left out, because a hand-off may lengthen them


@dataclass(frozen=True, slots=True)
class Seen:
    """A run's figures in seconds, one for each unknown that `calibrated` adjusts."""

    ttft: float  # the median
    gap: float  # mean gap between tokens, long waits included
    second_late: float  # median wait for the second token, minus a typical gap


def measure_path(config: NodeProcessConfig, profile: Profile, cores: int) -> PathProfile:
    """Measure on a prefill and a decode node, or on one node if the cores are too few.

    `profile` has nodes, but no path yet. Raise ConfigError if requests fail.
    """
    is_pair = 2 * cores <= profile.cores
    sched, local = config.parts.sched, UNMEASURED_LOCAL_TOKENS  # SHORT prompts exceed `local`, so they are handed over
    layout = ClusterLayout(int(is_pair), 1, cores, 1 + is_pair, sched.chunk_size, sched.mixed_chunk_size, local)
    costs = profile.node(cores).alone
    load = load_flags(costs, sched.chunk_size)
    plan = load_plan([*load, "--golden", "0"])
    flags = [*to_argv(config), *layout.flags()]
    with tempfile.TemporaryDirectory(prefix="baton-plan-") as folder, own_cluster(flags, Path(folder) / "log") as url:
        ask(url, 2, LONG)  # this compiles kernels and opens links
        short, long = (ask(url, REQUESTS, words) for words in (SHORT, LONG))
        together = put_load(url, load).records
    alone = path_alone(short, long, costs, layout, profile)
    return calibrated(alone, together, plan, layout, profile)


def ask(url: str, num_requests: int, words: int) -> list[RequestRecord]:
    """Send requests one by one, without a chat template, which would lengthen short prompts."""
    load = ["--concurrency", "1", "--requests", str(num_requests), "--duration", "300"]
    seed = ["--seed", str(num_requests)]  # draws prompts that are not cached
    lengths = ["--prompt-tokens", str(words), "--output-tokens", str(ANSWER), *seed]
    records = put_load(url, [*load, *lengths], api="completions").records
    whole = [record for record in records if record.is_whole and len(record.at) == ANSWER]
    if len(whole) < num_requests // 2 + 1:
        raise ConfigError(
            f"the measured cluster answered {len(whole)} of {num_requests} requests of {words} words; does "
            "--max-context leave room for them?"
        )
    return whole


def path_alone(
    short: Sequence[RequestRecord],
    long: Sequence[RequestRecord],
    costs: ProfiledCosts,
    layout: ClusterLayout,
    profile: Profile,
) -> PathProfile:
    chunk = layout.chunk_size
    first = [record.ttft - prompt_seconds(costs, record.prompt_tokens, chunk) for record in short]
    to_node = max(0.0, statistics.median(first))
    if not layout.is_disaggregated:
        return PathProfile(to_node)
    late = [seen(records).second_late for records in (short, long)]
    sizes = [last_chunk(records, chunk) / profile.page_size * profile.page_bytes for records in (short, long)]
    bytes_per_s = max(1.0, sizes[1] - sizes[0]) / max(late[1] - late[0], 1e-6)
    handoff = max(0.0, late[0] - sizes[0] / bytes_per_s)
    return PathProfile(to_node, handoff=handoff, bytes_per_s=bytes_per_s)


def last_chunk(records: Sequence[RequestRecord], chunk_size: int) -> float:
    return statistics.median((record.prompt_tokens - 1) % chunk_size + 1 for record in records)


def prompt_seconds(costs: ProfiledCosts, prompt_tokens: int, chunk_size: int) -> float:
    total = 0.0
    for begin in range(0, prompt_tokens, chunk_size):
        length = min(chunk_size, prompt_tokens - begin)
        pairs = length * begin + length * (length + 1) // 2
        total += costs.seconds(StepShape(length, int(begin + length == prompt_tokens), pairs))
    return total


# ---- under load


def load_flags(costs: ProfiledCosts, chunk_size: int) -> list[str]:
    rate = PREFILL_BUSY / prompt_seconds(costs, MEAN_PROMPT, chunk_size)
    return ["--rate", f"{rate:.3f}", "--duration", f"{LOAD_SECONDS:g}", *LOAD]


def seen(records: Sequence[RequestRecord]) -> Seen:
    whole = [record for record in records if record.is_whole and len(record.at) > SETTLED + 1]
    if not whole:
        raise ConfigError("the cluster answered no request of the load")
    gaps = [gap for record in whole for gap in record.gaps()[SETTLED:]]
    late = statistics.median(record.gaps()[0] for record in whole) - statistics.median(gaps)
    return Seen(statistics.median(record.ttft for record in whole), statistics.fmean(gaps), late)


def calibrated(
    path: PathProfile, together: Sequence[RequestRecord], plan: LoadPlan, layout: ClusterLayout, profile: Profile
) -> PathProfile:
    """In each of ROUNDS rounds, adjust every unknown by the error of its figure.

    Each change is small, because queues turn a small stretch into a large wait.
    """
    real = seen(together)
    tokens = SimTokens(load_text_model(profile.model))
    for _ in range(ROUNDS):
        tried = replace(profile, paths={layout.cores: path})
        virtual = seen(play_virtual(layout, tried, tokens, plan)[0])
        late = max(0.0, path.handoff + DAMPED * (real.second_late - virtual.second_late))
        path = replace(
            path,
            prompt_stretch=path.prompt_stretch * (real.ttft / virtual.ttft) ** DAMPED,
            decode_stretch=path.decode_stretch * (real.gap / virtual.gap) ** DAMPED,
            handoff=late if layout.is_disaggregated else 0.0,
        )
    return path
