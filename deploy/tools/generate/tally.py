"""Count finished lines, and describe the counts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deploy.tools.generate.line_file import OutputLine

OK = 200


@dataclass(slots=True)
class Tally:
    """`num_before`: the lines that earlier runs answered. The fields below count only this run's lines."""

    num_lines: int
    num_before: int
    num_ok: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def num_now(self) -> int:
        return self.num_ok + self.num_failed

    @property
    def num_left(self) -> int:
        return self.num_lines - self.num_before - self.num_now

    def take_line(self, line: OutputLine) -> bool:
        if line.response is None or line.response.status_code != OK:
            self.num_failed += 1
            return False
        self.num_ok += 1
        usage = part(line.response.body, "usage")
        self.prompt_tokens += whole(usage, "prompt_tokens")
        self.completion_tokens += whole(usage, "completion_tokens")
        self.cached_tokens += whole(part(usage, "prompt_tokens_details"), "cached_tokens")
        return True


def part(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def whole(value: Any, name: str) -> int:
    found = part(value, name)
    return found if isinstance(found, int) else 0


def progress_text(tally: Tally, seconds: float) -> str:
    done = tally.num_before + tally.num_now
    share = done / max(1, tally.num_lines)
    failed = f", {tally.num_failed:,} failed" if tally.num_failed else ""
    rate = tally.completion_tokens / max(seconds, 1e-9)
    left = f"{clock(tally.num_left * seconds / tally.num_now)} left" if tally.num_now else "no answer yet"
    return f"{done:,} of {tally.num_lines:,} lines ({share:.0%}){failed}; {rate:,.0f} tokens/s; {left}"


def summary_text(tally: Tally, seconds: float) -> str:
    before = f" ({tally.num_before:,} by earlier runs)" if tally.num_before else ""
    answered = tally.num_before + tally.num_ok
    cached = f" ({tally.cached_tokens:,} from a cache)" if tally.cached_tokens else ""
    used = f"{tally.prompt_tokens:,} prompt tokens{cached}, {tally.completion_tokens:,} completion tokens"
    rate = tally.completion_tokens / max(seconds, 1e-9)
    lines = f"{answered:,} of {tally.num_lines:,} lines have an answer{before}"
    return f"{lines}; {used} in {clock(seconds)}, {rate:,.0f} tokens/s"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
