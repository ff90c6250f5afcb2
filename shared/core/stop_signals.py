"""The signals at which a process ends in order."""

from __future__ import annotations

import signal


def stop_signals() -> list[signal.Signals]:
    """Return SIGINT, SIGTERM and, unless this process was started to ignore it (nohup), SIGHUP."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]
