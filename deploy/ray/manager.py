"""The actor that keeps a cluster as its settings want it: makes the daemons' actors, tends them, scales the roles.

    [ ask every actor -> hear -> orders -> routers' pages -> scale ]  once a tick

It holds nothing that is not written elsewhere: when Ray starts it again, it finds the actors by their names. Requests
do not pass here, so streams never notice that it is gone.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from deploy.metrics_page import Page, parse_page
from deploy.ray import launch_plan as plan
from deploy.ray.actors import end_actor, find, find_group, find_or_make, log, names_here
from deploy.ray.fleet import Fleet
from deploy.ray.report import DECODE, PREFILL, ROLES, ROUTER, RUNNING, ActorReport, Order, StatusRow, role_of
from deploy.ray.scaling import RoleScaler
from deploy.ray.signals import load_of
from shared.config.processes import RayClusterConfig

MANAGER = "manager"
TICK_S = 0.5
PAGES_EVERY_S = 5.0
ANSWERS_WITHIN_S = 2.0


class Manager:
    """Made by `baton ray up`; its thread works until `rest`."""

    def __init__(self, config: RayClusterConfig) -> None:
        self._config = config
        now = time.monotonic()
        later = [name for name in names_here() if role_of(name) in ROLES]
        self._fleet = Fleet(config, tuple(dict.fromkeys((*plan.names_at_start(config), *later))), now)
        self._scalers = make_scalers(config)
        self._handles: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}  # name -> the answer that is awaited
        self._pages: dict[str, Page] = {}
        self._pages_at = now
        self._rows: list[StatusRow] = self._fleet.rows()
        self._resting = threading.Event()
        self._thread = threading.Thread(target=self._work, name="manager", daemon=True)
        self._thread.start()

    def status(self) -> list[StatusRow]:
        return self._rows

    def rest(self) -> None:
        """Returns when nothing will be started any more."""
        self._resting.set()
        self._thread.join()

    # ---- the thread

    def _work(self) -> None:
        """What is not foreseen ends the actor: Ray starts it again, and it finds everybody by name."""
        try:
            while not self._resting.is_set():
                begin = time.monotonic()
                self._tick_or_skip(begin)
                self._resting.wait(max(0.0, begin + TICK_S - time.monotonic()))
        except Exception:
            log(traceback.format_exc())
            end_actor("its thread failed")

    def _tick_or_skip(self, now: float) -> None:
        try:
            self._tick(now)
        except RayError as error:  # one of its actors, or Ray itself, is being started again
            log(f"tick failed: {error}")

    def _tick(self, now: float) -> None:
        self._ask(self._fleet.orders(now), now)
        self._listen(now)
        for name in self._fleet.gone(now):
            self._remove(name)
        if now - self._pages_at >= PAGES_EVERY_S:
            self._scale(now)
        self._rows = self._fleet.rows()

    def _ask(self, orders: dict[str, Order], now: float) -> None:
        """One call at a time to each: an order that gets lost is given again."""
        for name in self._fleet.members:
            if name not in self._handles and self._fleet.may_be_made(name, now):
                self._handles[name] = find_or_make(self._config, name)
            if name in self._handles and name not in self._asked:
                self._asked[name] = self._handles[name].tend.remote(orders.get(name))

    def _listen(self, now: float) -> None:
        """Whoever does not answer in time is away, and its answer is still awaited."""
        waiting = list(self._asked.values())
        ready = ray.wait(waiting, num_returns=len(waiting), timeout=TICK_S)[0] if waiting else []
        for name in list(self._asked):
            if self._asked[name] in ready:
                self._take(name, self._asked.pop(name), now)
            else:
                self._fleet.miss(name, now)

    def _take(self, name: str, answer: Any, now: float) -> None:
        try:
            report: ActorReport = ray.get(answer)
        except RayError as error:
            self._miss(name, error, now)
            return
        self._fleet.hear(report, now)

    def _miss(self, name: str, error: RayError, now: float) -> None:
        """Dead for good is who has no name any more."""
        if not isinstance(error, ActorDiedError) or find(name) is not None:
            self._fleet.miss(name, now, gist(error))
            return
        log(f"the actor of {name} is dead for good: {error}")
        del self._handles[name]
        self._fleet.lose(name, now, gist(error))

    def _remove(self, name: str) -> None:
        log(f"{name} has stopped and leaves")
        self._fleet.forget(name)
        self._asked.pop(name, None)
        remove(name, self._handles.pop(name, None))

    # ---- scaling

    def _scale(self, now: float) -> None:
        pages = self._read_pages()
        before = [self._pages[router] for router in pages if router in self._pages]
        after = [page for router, page in pages.items() if router in self._pages]
        for role, scaler in self._scalers.items():
            load = load_of(role, before, after, self._config.scaling)
            steady = load is not None and self._fleet.is_steady(role, load.nodes)
            step = scaler.decide(now, load if steady else None)
            if step < 0 or (step > 0 and self._fleet.may_grow(role, scaler.most)):
                log(f"{role}: {step:+d} node at {load}")
                self._change(role, step, now)
        self._pages, self._pages_at = pages, now

    def _read_pages(self) -> dict[str, Page]:
        """Of the routers that run and answer."""
        running = [member.name for member in self._fleet.of_role(ROUTER) if member.state == RUNNING]
        texts = answers(lambda name: self._handles[name].page.remote("/metrics"), running)
        return {name: parse_page(text) for name, text in texts.items() if text}

    def _change(self, role: str, step: int, now: float) -> None:
        if step > 0:
            self._fleet.add(self._fleet.next_name(role), now)
        else:
            self._fleet.leave(self._fleet.newest(role))


def make_scalers(config: RayClusterConfig) -> dict[str, RoleScaler]:
    """For the roles that may change."""
    at_start = {PREFILL: config.ray.prefill, DECODE: config.ray.decode}
    limits = {role: (least, plan.most(config, role)) for role, least in at_start.items()}
    return {role: RoleScaler(least, most, config.scaling) for role, (least, most) in limits.items() if most > least}


def answers(ask: Callable[[str], Any], names: Iterable[str]) -> dict[str, Any]:
    """Of those that answer within a moment."""
    asked = {name: ask(name) for name in names}
    if not asked:
        return {}
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWERS_WITHIN_S)
    found = {}
    for name, answer in asked.items():
        if answer in ready:
            try:
                found[name] = ray.get(answer)
            except RayError:
                continue
    return found


def gist(error: RayError) -> str:
    """What happened, and in which way: its first line and its last."""
    lines = str(error).strip().splitlines()
    return "; ".join(dict.fromkeys(line.strip()[:200] for line in (*lines[:1], *lines[-1:])))


def remove(name: str, handle: Any | None) -> None:
    """An actor whose daemon has ended, if it is there, and the group that was made for it alone."""
    if handle is not None:
        ray.kill(handle, no_restart=True)
    group = find_group(name)
    if group is not None:
        ray.util.remove_placement_group(group)


def find_manager() -> Any | None:
    return find(MANAGER)


def make_manager(config: RayClusterConfig) -> Any:
    options = ray.remote(Manager).options(name=MANAGER, lifetime="detached", max_restarts=-1, num_cpus=0)
    return options.remote(config)
