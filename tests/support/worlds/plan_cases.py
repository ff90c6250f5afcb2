"""A made-up profile and loads for the planner's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deploy.tools.plan.layout import ClusterLayout
from deploy.tools.plan.profile import NodeProfile, PathProfile, Profile, ProfiledCosts
from deploy.tools.plan.router_load import load_plan
from deploy.tools.plan.tokens import SimTokens
from deploy.tools.traffic.load_plan import LoadPlan
from router.text.load import load_text_model

STEP_S, TOKEN_S = 0.010, 0.001
LINEAR = ProfiledCosts((1, 1001), (STEP_S + TOKEN_S, STEP_S + 1001 * TOKEN_S), 0.0, 0.0, 0.0)  # 10 ms + 1 ms a token
HALF_AS_FAST = replace(LINEAR, rise=(2 * LINEAR.rise[0], 2 * LINEAR.rise[1]))
FAST = replace(LINEAR, rise=(LINEAR.rise[0] / 2, LINEAR.rise[1] / 2))


def profile(num_pages: int = 1000, max_running: int = 32, path: PathProfile | None = None) -> Profile:
    """Two cores; hashlm, whose tokenizer needs no download: a byte is a token."""
    return Profile(
        model="hashlm",
        dtype="float32",
        machine="made up",
        cores=2,
        measured="2026-01-01T00:00:00+00:00",
        page_size=16,
        num_pages=num_pages,
        max_running=max_running,
        max_context=4096,
        page_bytes=1600,
        nodes={
            2: NodeProfile(2, FAST, None, 0.01, 100),
            1: NodeProfile(1, LINEAR, HALF_AS_FAST, 0.01, 100),
        },
        paths=dict.fromkeys((1, 2), path or PathProfile(0.0)),
    )


def layout(prefill: int = 1, decode: int = 1, cores: int = 1, per_host: int = 1, **settings: int) -> ClusterLayout:
    chosen = {"chunk_size": 256, "mixed_chunk_size": 64, "local_tokens": 0} | settings
    return ClusterLayout(prefill, decode, cores, per_host, **chosen)


def plan(*flags: str) -> LoadPlan:
    return load_plan(["--golden", "0", *flags])


def tokens() -> SimTokens:
    return SimTokens(load_text_model("hashlm"))


def one_request(prompt: str = "20", answer: int = 4, more: Sequence[str] = ()) -> LoadPlan:
    lengths = ("--prompt-tokens", prompt, "--output-tokens", str(answer))
    return plan("--arrivals", "constant", "--rate", "1", "--requests", "1", *lengths, *more)
