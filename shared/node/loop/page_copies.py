"""Copy pages that another node has announced into rows of this node.

    Ready -> launch -> num_pulling is 1 -> take_done      a row ends: freed now, or held until its last copy has ended

A copy runs on the transfer stream, after the newest launched step: in that step, a page's previous owner may still
write to the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from shared.core.errors import BatonError
from shared.engine.transfer_jobs import TransferJobs
from shared.node.loop.context import NodeContext
from shared.transfer.interface import Frames, PageReceiver
from shared.wire.messages import Ready


class CopyTarget(Protocol):
    """A hand-off or a pull. `num_pulling`: copies that write to its row's pages."""

    row: int
    num_pulling: int


T = TypeVar("T", bound=CopyTarget)


class PageCopies(Generic[T]):
    """`held`: ended targets whose rows a copy still writes, and since when."""

    def __init__(self, ctx: NodeContext, receivers: Mapping[str, PageReceiver], label: str) -> None:
        self._ctx = ctx
        self._label = label
        self._jobs: TransferJobs[tuple[T, Ready], None] = TransferJobs(ctx.core.engine)
        self._tidying: TransferJobs[str, None] = TransferJobs(ctx.core.engine)
        self.receivers = receivers
        self.held: list[tuple[T, float]] = []

    def launch(self, target: T, transport: str, ready: Ready, frames: Frames) -> None:
        """Copy the pages that `ready` announces. The caller has checked that the row has them."""
        receiver = self.receivers[transport]
        own = self._ctx.core.pages_of(target.row)[ready.first_page :]
        pages = own[own != 0][: len(ready.pages)]  # no page comes for an entry of 0
        target.num_pulling += 1
        self._jobs.launch(
            (target, ready), lambda: receiver.pull(ready, frames, pages), self._label, after_newest_step=True
        )

    def take_done(self) -> Iterator[tuple[T, Ready, BatonError | None]]:
        """Yield the copies that have ended, also of ended targets."""
        for done in self._jobs.take_done():
            target, ready = done.tag
            target.num_pulling -= 1
            yield target, ready, done.error

    def end(self, target: T, now: float) -> bool:
        """Free the target's row, or hold it until no copy writes to its pages. Return whether it is free."""
        if target.num_pulling:
            self.held.append((target, now))
            return False
        self._ctx.core.queues.budget.release_held(target.row)
        return True

    def free_held(self) -> list[float]:
        """Free the rows whose last copy has ended. Return since when each was held."""
        self._tidying.take_done()
        over = [entry for entry in self.held if not entry[0].num_pulling]
        for target, _ in over:
            self._ctx.core.queues.budget.release_held(target.row)
        self.held = [entry for entry in self.held if entry[0].num_pulling]
        return [since for _, since in over]

    def forget_dead(self) -> None:
        """Let the receivers drop what they keep of dead peers."""
        for name, receiver in self.receivers.items():
            self._tidying.launch(name, receiver.forget_dead, "forget_dead")
