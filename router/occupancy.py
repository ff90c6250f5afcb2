"""Books the work of a request with the nodes that have it before them; the policies choose by these counts."""

from __future__ import annotations

from router.journal import OpenRequest


def occupy(request: OpenRequest) -> None:
    prefiller, runner = request.prefiller, request.runner
    assert prefiller is not None and runner is not None
    prefiller.open_prompt_tokens += len(request.prompt_ids)
    runner.open_sequences += len(request.sequences)
    request.waits_for_prefill = True
    for node in request.nodes:
        node.dispatched += 1
        node.breaker.sent()


def release(request: OpenRequest) -> None:
    """The nodes are done with it, or no longer wanted."""
    prompt_done(request)
    if request.runner is not None:
        request.runner.open_sequences -= len(request.sequences)
    request.prefill = request.decode = None


def prompt_done(request: OpenRequest) -> None:
    if request.waits_for_prefill and request.prefiller is not None:
        request.prefiller.open_prompt_tokens -= len(request.prompt_ids)
    request.waits_for_prefill = False
