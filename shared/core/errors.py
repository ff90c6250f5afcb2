"""Typed errors. Each error becomes a 4xx or 5xx for the client, a count in a metric, and one log line."""

from __future__ import annotations


class BatonError(Exception):
    """`code`: a word for metrics and clients, which never changes. `status`: the HTTP status. `subject`: a request key
    or node id. A subclass without code or status has its base's."""

    code = "internal_error"
    status = 500
    retry_after_s: float | None = None  # time until a retry may succeed; sent as Retry-After

    def __init__(self, message: str, *, subject: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.subject = subject

    def __init_subclass__(cls, code: str | None = None, status: int | None = None) -> None:
        cls.code, cls.status = code or cls.code, status or cls.status


class InvalidRequest(BatonError, code="invalid_request_error", status=400):
    """`param`: the faulty field of the request body."""

    def __init__(self, message: str, *, param: str | None = None, subject: str | None = None) -> None:
        super().__init__(message, subject=subject)
        self.param = param


class ModelNotFound(InvalidRequest, code="model_not_found", status=404): ...


class TooLarge(InvalidRequest, code="too_large"):
    """The request and its answer don't fit even on an empty node."""


class BodyTooLarge(InvalidRequest, code="body_too_large", status=413): ...


class Overloaded(BatonError, code="overloaded", status=429):
    """The cluster has too much to do: open requests, checks or offers. A tenant's limit is RateLimited."""


class RateLimited(BatonError, code="rate_limit_exceeded", status=429): ...


class QueueFull(BatonError, code="queue_full", status=503): ...


class DeadlineUnreachable(BatonError, code="deadline_unreachable", status=503): ...


class PartnerOverloaded(Overloaded, code="partner_overloaded"):
    """A prefill node reports that its decode node is full."""


class NoNodes(BatonError, code="no_nodes", status=503):
    """No pair of nodes can serve the request."""


class AdapterMissing(NoNodes, code="adapter_missing"):
    """The chosen node, or every candidate, lacks the request's LoRA adapter."""


class NodeLost(BatonError, code="node_lost", status=502):
    """The node that served this request died, restarted or fell silent."""


class PeerUnreachable(NodeLost, code="peer_unreachable"):
    """A node can't reach the other node of a hand-off."""


class RequestKillsNodes(BatonError, code="request_kills_nodes", status=422):
    """Two nodes died while they ran this request.

    After a 5xx, clients would retry and kill two more nodes.
    """


class NodeDraining(NodeLost, code="node_draining", status=503): ...


class PartnerDraining(NodeDraining, code="partner_draining"):
    """A prefill node reports that its decode node is draining."""


class DeadlineExceeded(BatonError, code="deadline_exceeded", status=504): ...


class Aborted(BatonError, code="aborted", status=503):
    """An operator ended the request through the admin API."""


class StepFailed(BatonError, code="step_failed"):
    """A step with this request failed twice, the second time without other requests, or the request's grammar failed.

    Other requests continue.
    """


class RankLost(BatonError, code="rank_lost"):
    """A process of this node died, or is out of step with the node's others."""


class ModelChanged(BatonError, code="model_changed"):
    """The model's files changed under the node that uses them."""


class KernelRefused(BatonError, code="kernel_refused"):
    """A kernel can't run with these arguments on this device. The message names the kernel and the remedy."""


class DeviceLost(BatonError, code="device_lost"):
    """The device can't run even an empty step."""


class HandoffFailed(BatonError, code="handoff_failed", status=502): ...


class WireError(BatonError, code="wire_error"):
    """An invalid or outdated frame. It is dropped and counted. Each kind is logged once per peer."""


class ConfigError(BatonError, code="config_error"):
    """A flag or file that can't work. The message says what to change."""


class IntegrityError(BatonError, code="integrity_error"):
    """The counts of a pool, cache or lease don't add up. The message names the leaked object and its owner."""
