"""`baton` with places that wait once, for a test of what spans show.

    python -P tests/support/clusters/slow_places.py FOLDER router|prefill|decode FLAGS...

Whoever first comes past a place whose name is a file in FOLDER removes the file and waits WAIT_S.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from shared.config import core_plan

WAIT_S = 0.3
# place -> the span that must show it
SHOWN = {
    "tokenizer": "tokenize",
    "admission": "queue",
    "policy": "placement",
    "prefill forward": "prompt chunk",
    "page copy": "hand-off",
    "admitting": "install",
    "decode forward": "decode",
}


class Places:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def is_due(self, place: str) -> bool:
        try:
            (self._folder / place).unlink()
        except FileNotFoundError:
            return False
        return True

    def slow(self, owner: Any, name: str, place: str, when: Callable[..., bool] = lambda *args: True) -> None:
        inner = getattr(owner, name)

        def slowed(*args: Any, **named: Any) -> Any:
            if when(*args) and self.is_due(place):
                time.sleep(WAIT_S)
            return inner(*args, **named)

        setattr(owner, name, slowed)

    def patch_router(self) -> None:
        from router.policy.placement import Placer
        from router.queue.admission import AdmissionQueue
        from router.text.hashlm import HashTokenizer

        self.slow(HashTokenizer, "encode", "tokenizer")
        self.slow(Placer, "place", "policy")
        inner, closed_until = AdmissionQueue.next, [0.0]

        def closed(queue: AdmissionQueue, now: float) -> Any:
            if len(queue.queue) and self.is_due("admission"):
                closed_until[0] = now + WAIT_S
            return None if now < closed_until[0] else inner(queue, now)

        AdmissionQueue.next = closed  # type: ignore[method-assign]

    def patch_node(self) -> None:
        from shared.engine.worker import Worker
        from shared.sched.loop import EngineLoop
        from shared.transfer.shm import ShmReceiver

        self.slow(Worker, "resolve", "prefill forward", lambda worker, fb: fb.plan.num_prefill > 0)
        self.slow(Worker, "resolve", "decode forward", lambda worker, fb: fb.plan.num_prefill == 0)
        self.slow(ShmReceiver, "pull", "page copy")
        self.slow(EngineLoop, "admit", "admitting")


def main(argv: list[str]) -> int:
    from deploy import cli

    places = Places(Path(argv[0]))
    if argv[1] == "router":
        places.patch_router()
    else:  # a node's modules load only after its cores are set
        apply = core_plan.apply

        def apply_and_patch(*args: Any) -> None:
            apply(*args)
            places.patch_node()

        core_plan.apply = apply_and_patch
    return cli.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
