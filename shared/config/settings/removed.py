"""Flags and keys of files that are gone, and what holds instead. Who still uses one is told."""

from __future__ import annotations

from shared.core.sampling_params import MAX_LOGIT_BIAS

REMOVED = {
    "log_color": "levels have no colours",
    "max_logit_bias": f"logit_bias may hold {MAX_LOGIT_BIAS} tokens",
    "max_message_bytes": "a KV page that travels as a message may have 64 MiB; choose a smaller --page-size",
    "max_stop_chars": "a stop string may have 256 characters",
    "max_stop_strings": "a request may have 16 stop strings",
}
