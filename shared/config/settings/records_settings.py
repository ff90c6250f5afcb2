"""Settings of what a router records of its answers."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.settings.options import Settings, option


@dataclass(frozen=True, slots=True)
class RecordsConfig(Settings):
    """Records of answers: certificates for clients, spans for operators."""

    certificate_key: str = option(
        "",
        "file with the key that signs certificates of answers (made by `baton keys certificate`), read again when it "
        "changes; empty: requests for a certificate are refused",
        metavar="FILE",
    )
    trace_sample: float = option(
        0.01,
        "with --otlp-endpoint: share of requests that get spans, besides those whose client's traceparent asks for "
        "them; nodes follow",
        low=0.0,
        high=1.0,
        metavar="SHARE",
    )
