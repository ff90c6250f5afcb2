"""Asks for all lines, a bounded number at a time, and writes each as it is finished. Reads only as far as it asks."""

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
    """Where finished lines go. Owned by the run; the files are whole after each line."""

    answers: LineFile
    errors: LineFile
    tally: Tally

    def take(self, line: OutputLine) -> None:
        (self.answers if self.tally.take(line) else self.errors).append(line)


async def run_all(lines: Iterator[BatchRequest | BadLine], asker: Asker, results: Results, concurrency: int) -> None:
    """Every worker takes the next line when it is free. The first one that can't go on ends all."""

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
