"""Random lives of a whole core: whatever is submitted, granted, installed, retracted and aborted in whatever order,
every stream is a prefix of the reference's after every step, the books add up, and in the end all has come back."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from shared.core.errors import NodeLost
from shared.core.request import Request, RequestState
from shared.core.states import FinishReason
from shared.engine.transfer_jobs import TransferJobs
from shared.sched.steps.events import Emitted, Ended, GrantRevoked
from shared.sched.steps.prebuilt import Arrival
from tests.support.cores.core_rig import CoreKnobs, Job, make_core
from tests.support.cores.scripted_core import Script, job

PAGE_SIZE, WIDTH = 4, 4
PROMPTS = (5, 12, 13, 17, 30, 31)
MAX_TOKENS = (1, 3, 9, 25)


@cache
def job_of(shape: int, stop: bool) -> Job:
    """A few prompts, two of which begin alike, so that the prefix cache matters."""
    one = job(shape, PROMPTS[shape % 6], MAX_TOKENS[shape % 4], repetition_penalty=1.2 if shape % 3 == 0 else 1.0)
    prompt = job(2, 30).prompt[: len(one.prompt)] if shape % 2 else one.prompt
    stops = (job_of(shape, False).expected()[-1],) if stop else ()
    return replace(one, prompt=prompt, sampling=replace(one.sampling, stop_token_ids=stops))


@cache
def computed(shape: int, stop: bool) -> tuple[tuple[bytes, ...], int, int, np.ndarray]:
    """Pages, first token and draft state that a prefill node leaves for this job."""
    one = job_of(shape, stop)
    far = Script(width=WIDTH, page_size=PAGE_SIZE)
    long = replace(one, sampling=replace(one.sampling, max_tokens=9, stop_token_ids=()))
    sent = long.request(handoff_to="here")
    far.core.scheduler.intake.submit(sent)
    done = None
    while done is None:
        far.world.run_until_idle()
        far.core.loop.step()
        done = next((e for e in far.core.queues.take_events() if type(e).__name__ == "PrefillDone"), None)
    pages = far.core.kv.rows.pages_of(sent.row).tolist()
    content = tuple(far.core.pool.page_view(page).tobytes() for page in pages)
    return content, done.token, done.committed, done.draft_state


class Life(RuleBasedStateMachine):
    """One core on a simulated world. `open` are the requests that nobody has ended yet."""

    @initialize(seed=st.integers(0, 2**16), overlap=st.booleans(), host=st.booleans(), pages=st.sampled_from((22, 40)))
    def begin(self, seed: int, overlap: bool, host: bool, pages: int) -> None:
        self.core = make_core(
            CoreKnobs(
                "simulated",
                overlap=overlap,
                needs_cpu_seq_lens=host,
                num_pages=pages,
                page_size=PAGE_SIZE,
                width=WIDTH,
                chunk_size=8,
                max_running=4,
                seed=seed,
            )
        )
        self.core.kv.allocator.on_free = self.poison
        self.pulls: TransferJobs[Request, None] = TransferJobs(self.core.engine)
        self.jobs: dict[str, tuple[int, bool]] = {}
        self.streams: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.pulling: set[int] = set()  # rows with a pull in flight
        self.held: set[int] = set()

    def poison(self, pages: np.ndarray) -> None:
        for page in pages.tolist():
            self.core.pool.page_view(page)[:] = 0xA5

    def new_request(self, shape: int, stop: bool) -> Request:
        rid = len(self.jobs)
        request = replace(job_of(shape, stop), rid=rid).request()
        self.jobs[f"r{rid}"] = (shape, stop)
        self.streams[f"r{rid}"] = []
        return request

    @rule(shape=st.integers(0, 11), stop=st.booleans())
    def submit(self, shape: int, stop: bool) -> None:
        self.core.scheduler.intake.submit(self.new_request(shape, stop))
        self.take_events()

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.core.loop.step(block=True)
            self.take_events()

    @rule(shape=st.integers(0, 11), stop=st.booleans())
    def grant(self, shape: int, stop: bool) -> None:
        if len(self.core.queues.granted) < 3:
            request = self.new_request(shape, stop)
            if self.core.scheduler.grants.grant(request, "p") is None:
                self.ends[request.key.rid] = FinishReason.ABORT  # never began

    @precondition(lambda self: self.core.queues.granted)
    @rule(data=st.data())
    def pull(self, data: st.DataObject) -> None:
        waiting = [req for req in self.core.queues.granted.values() if req.row not in self.pulling]
        if not waiting:
            return
        request = data.draw(st.sampled_from(waiting))
        content = computed(*self.jobs[request.key.rid])[0]
        target = self.core.kv.rows.pages_of(request.row).tolist()
        first = request.cached_tokens // PAGE_SIZE
        row = request.row

        def copy() -> None:
            for mine, theirs in list(zip(target, content, strict=False))[first:]:
                self.core.pool.page_view(mine)[:] = np.frombuffer(theirs, np.uint8)

        self.pulling.add(row)
        self.pulls.launch((request, row), copy, "pull", after_newest_step=True)  # type: ignore[arg-type]

    @rule()
    def land(self) -> None:
        """Finished pulls: install, or give back what was held for them."""
        arrivals = []
        for done in self.pulls.take_done():
            request, row = done.tag  # type: ignore[misc]
            assert done.error is None
            self.pulling.discard(row)
            if row in self.held:
                self.held.discard(row)
                self.core.queues.budget.release_held(row)
            elif request.state is RequestState.GRANTED:
                _, token, committed, draft_state = computed(*self.jobs[request.key.rid])
                arrivals.append(Arrival(request, token, committed, (), draft_state))  # type: ignore[arg-type]
        self.core.loop.admit(arrivals)
        self.take_events()

    @precondition(lambda self: self.core.queues.requests)
    @rule(data=st.data(), how=st.sampled_from(("abort", "abort", "retract", "retract", "retract", "fail", "deadline")))
    def disturb(self, data: st.DataObject, how: str) -> None:
        scheduler = self.core.scheduler
        request = data.draw(st.sampled_from(sorted(scheduler.queues.requests.values(), key=lambda req: req.arrival)))
        if how == "abort":
            scheduler.queues.abort(request.key)
        elif how == "deadline":
            request.deadline = 1.0
            scheduler.queues.expire(2.0)
        elif how == "fail":
            scheduler.queues.fail(request.key, NodeLost("so the test says"))
        elif request.state in (RequestState.RUNNING, RequestState.PREFILLING, RequestState.GRANTED):
            scheduler.queues.retract(request)
        self.take_events()

    def take_events(self) -> None:
        for event in self.core.queues.take_events():
            if isinstance(event, Emitted):
                stream = self.streams[event.key.rid]
                assert event.first_pos == len(stream), f"{event.key} left a gap or said it twice"
                stream.extend(event.ids)
            elif isinstance(event, Ended):
                assert event.key.rid not in self.ends, f"{event.key} ended twice"
                self.ends[event.key.rid] = event.reason
                assert event.num_output_tokens == len(self.streams[event.key.rid])
            elif isinstance(event, GrantRevoked):
                if event.row in self.pulling:
                    self.held.add(event.row)
                else:
                    self.core.queues.budget.release_held(event.row)

    @invariant()
    def books_add_up(self) -> None:
        if hasattr(self, "core"):
            self.core.check_integrity()

    @invariant()
    def streams_are_prefixes(self) -> None:
        for rid, stream in getattr(self, "streams", {}).items():
            expected = job_of(*self.jobs[rid]).expected()
            assert stream == expected[: len(stream)], rid
            if self.ends.get(rid) in (FinishReason.STOP, FinishReason.LENGTH):
                assert stream == expected, rid

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(3000):
            if not self.core.queues.requests and self.core.loop.idle and not len(self.pulls):
                break
            for request in list(self.core.queues.granted.values()):
                if request.row not in self.pulling:
                    self.core.queues.abort(request.key)
            self.core.loop.step(block=True)
            self.land()
        else:
            raise AssertionError(f"no end within 3000 steps: {len(self.core.queues.requests)} requests are open")
        assert set(self.ends) == set(self.jobs), "every request ended, once"
        self.streams_are_prefixes()
        self.core.check_integrity(idle=True)
        self.core.kv.flush_cache()
        assert self.core.kv.allocator.num_free == self.core.kv.allocator.num_total
        self.core.close()


@pytest.mark.rule("I7")
@pytest.mark.parametrize("examples", [40, pytest.param(250, marks=pytest.mark.long)])
def test_random_lives(examples: int) -> None:
    run_machine(Life, settings=settings(max_examples=examples, stateful_step_count=60, deadline=None))
