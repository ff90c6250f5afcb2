"""The actor that keeps a cluster as configured: it makes the other actors, gives them orders and scales roles.

  [ ask every actor -> take answers -> leader's orders -> routers' pages -> own rules ]  once per tick.

After a restart it finds the actors by name, so it stores nothing. Streams continue without a manager.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from deploy.metrics_page import Page, parse_page
from deploy.ray import launch_plan as plan
from deploy.ray.actors import end_actor, find_actor, find_group, find_or_make, log, names_here
from deploy.ray.fleet import Fleet
from deploy.ray.lead import FleetView, LeadOrder, Lease
from deploy.ray.own_rules import OwnRules
from deploy.ray.report import ROLES, ROUTER, RUNNING, ActorReport, Order, StatusRow, role_of
from shared.config.processes import RayClusterConfig

MANAGER = "manager"
TICK_S = 0.5
PAGES_EVERY_S = 5.0
ANSWERS_WITHIN_S = 2.0


class Manager:
    """Tend the cluster on a thread until `rest` is called."""

    def __init__(self, config: RayClusterConfig) -> None:
        self._config = config
        now = time.monotonic()
        later = [name for name in names_here() if role_of(name) in ROLES]
        self._fleet = Fleet(config, tuple(dict.fromkeys((*plan.names_at_start(config), *later))), now)
        self._rules = OwnRules(config)
        self._lease = Lease()
        self._orders: SimpleQueue[LeadOrder] = SimpleQueue()
        self._view = self._fleet.view()
        self._handles: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}  # actor's name -> reference to the answer of its open call
        self._pages: dict[str, Page] = {}
        self._pages_at = now
        self._rows: list[StatusRow] = self._fleet.rows()
        self._resting = threading.Event()
        self._thread = threading.Thread(target=self._work, name="manager", daemon=True)
        self._thread.start()

    def status(self) -> list[StatusRow]:
        return self._rows

    def view(self) -> FleetView:
        return self._view

    def lead(self, order: LeadOrder) -> FleetView | None:
        """Return the view; None while another caller leads."""
        if not self._lease.take_lease(order.leader, time.monotonic()):
            return None
        if order.grow or order.give:
            self._orders.put(order)
        return self._view

    def release(self, leader: str) -> None:
        self._lease.release(leader)

    def rest(self) -> None:
        """Stop the thread. Afterwards the manager starts nothing more."""
        self._resting.set()
        self._thread.join()

    # ---- the thread

    def _work(self) -> None:
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
        except RayError as error:  # an actor, or Ray itself, is restarting
            log(f"tick failed: {error}")

    def _tick(self, now: float) -> None:
        self._ask(self._fleet.orders(now), now)
        self._listen(now)
        for name in self._fleet.gone(now):
            self._remove(name)
        self._follow(now)
        if now - self._pages_at >= PAGES_EVERY_S:
            self._scale(now)
        self._rows, self._view = self._fleet.rows(), self._fleet.view()

    def _ask(self, orders: dict[str, Order], now: float) -> None:
        """Call each actor without an open call. Lost orders are repeated later."""
        for name in self._fleet.members:
            if name not in self._handles and self._fleet.may_be_made(name, now):
                self._handles[name] = find_or_make(self._config, name)
            if name in self._handles and name not in self._asked:
                self._asked[name] = self._handles[name].tend.remote(orders.get(name))

    def _listen(self, now: float) -> None:
        """Wait at most one tick for answers. Actors that have not answered count as away."""
        waiting = list(self._asked.values())
        ready = ray.wait(waiting, num_returns=len(waiting), timeout=TICK_S)[0] if waiting else []
        for name in list(self._asked):
            if self._asked[name] in ready:
                self._take_answer(name, self._asked.pop(name), now)
            else:
                self._fleet.miss(name, now)

    def _take_answer(self, name: str, answer: Any, now: float) -> None:
        try:
            report: ActorReport = ray.get(answer)
        except RayError as error:
            self._miss(name, error, now)
            return
        self._fleet.hear(report, now)

    def _miss(self, name: str, error: RayError, now: float) -> None:
        """An actor unknown to Ray is dead for good."""
        if not isinstance(error, ActorDiedError) or find_actor(name) is not None:
            self._fleet.miss(name, now, gist(error))
            return
        log(f"the actor of {name} is dead for good: {error}")
        del self._handles[name]
        self._fleet.lose(name, now, gist(error))

    def _remove(self, name: str) -> None:
        log(f"{name} has stopped and leaves")
        self._fleet.forget_member(name)
        self._asked.pop(name, None)
        remove(name, self._handles.pop(name, None))

    # ---- scaling

    def _scale(self, now: float) -> None:
        pages = self._read_pages()
        before = [self._pages[router] for router in pages if router in self._pages]
        after = [page for router, page in pages.items() if router in self._pages]
        for change in self._rules.apply(self._fleet, before, after, now, is_led=self._lease.is_held(now)):
            log(change)
        self._pages, self._pages_at = pages, now

    def _follow(self, now: float) -> None:
        while not self._orders.empty():
            order = self._orders.get()
            log(f"{order}: {'done' if self._fleet.follow(order, now) else 'refused, nodes have changed meanwhile'}")

    def _read_pages(self) -> dict[str, Page]:
        running = [member.name for member in self._fleet.of_role(ROUTER) if member.state == RUNNING]
        texts = answers(lambda name: self._handles[name].page.remote("/metrics"), running)
        return {name: parse_page(text) for name, text in texts.items() if text}


def answers(ask: Callable[[str], Any], names: Iterable[str]) -> dict[str, Any]:
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
    lines = str(error).strip().splitlines()
    return "; ".join(dict.fromkeys(line.strip()[:200] for line in (*lines[:1], *lines[-1:])))


def remove(name: str, handle: Any | None) -> None:
    if handle is not None:
        ray.kill(handle, no_restart=True)
    group = find_group(name)
    if group is not None:
        ray.util.remove_placement_group(group)


def find_manager() -> Any | None:
    return find_actor(MANAGER)


def make_manager(config: RayClusterConfig) -> Any:
    options = ray.remote(Manager).options(name=MANAGER, lifetime="detached", max_restarts=-1, num_cpus=0)
    return options.remote(config)
