"""Ask for a bounded number of lines at a time, and write answers as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.tools.generate.asker import Asker, line_of_bad
from deploy.tools.generate.line_file import LineFile, OutputLine
from deploy.tools.generate.lines import BadLine, BatchRequest
from deploy.tools.generate.tally import Tally


@dataclass(frozen=True, slots=True)
class Results:
    answers: LineFile
    errors: LineFile
    tally: Tally

    def take(self, line: OutputLine) -> None:
        (self.answers if self.tally.take(line) else self.errors).append(line)


async def run_all(lines: Iterator[BatchRequest | BadLine], asker: Asker, results: Results, concurrency: int) -> None:
    """The first error ends all workers."""

    async def work() -> None:
        for line in lines:
            results.take(line_of_bad(line) if isinstance(line, BadLine) else await asker.answer(line))

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
