"""Typed errors. Each error becomes a 4xx or 5xx for the client, a count in a metric, and one log line."""

from __future__ import annotations


class BatonError(Exception):
    """`code`: a word for metrics and clients, which never changes. `status`: the HTTP status. `subject`: a request key
    or node id."""

    code = "internal_error"
    status = 500
    retry_after_s: float | None = None  # time until a retry may succeed; sent as Retry-After

    def __init__(self, message: str, *, subject: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.subject = subject


class InvalidRequest(BatonError):
    """`param`: the faulty field of the request body."""

    code = "invalid_request_error"
    status = 400

    def __init__(self, message: str, *, param: str | None = None, subject: str | None = None) -> None:
        super().__init__(message, subject=subject)
        self.param = param


class ModelNotFound(InvalidRequest):
    code = "model_not_found"
    status = 404


class TooLarge(InvalidRequest):
    """The request and its answer don't fit even on an empty node."""

    code = "too_large"


class BodyTooLarge(InvalidRequest):
    code = "body_too_large"
    status = 413


class Overloaded(BatonError):
    """The cluster has too much to do: open requests, checks or offers. A tenant's limit is RateLimited."""

    code = "overloaded"
    status = 429


class RateLimited(BatonError):
    code = "rate_limit_exceeded"
    status = 429


class QueueFull(BatonError):
    code = "queue_full"
    status = 503


class DeadlineUnreachable(BatonError):
    code = "deadline_unreachable"
    status = 503


class PartnerOverloaded(Overloaded):
    """A prefill node reports that its decode node is full."""

    code = "partner_overloaded"


class NoNodes(BatonError):
    """No pair of nodes can serve the request."""

    code = "no_nodes"
    status = 503


class AdapterMissing(NoNodes):
    """The chosen node, or every candidate, lacks the request's LoRA adapter."""

    code = "adapter_missing"


class NodeLost(BatonError):
    """The node that served this request died, restarted or fell silent."""

    code = "node_lost"
    status = 502


class PeerUnreachable(NodeLost):
    """A node can't reach the other node of a hand-off."""

    code = "peer_unreachable"


class RequestKillsNodes(BatonError):
    """Two nodes died while they ran this request.

    After a 5xx, clients would retry and kill two more nodes.
    """

    code = "request_kills_nodes"
    status = 422


class NodeDraining(NodeLost):
    code = "node_draining"
    status = 503


class PartnerDraining(NodeDraining):
    """A prefill node reports that its decode node is draining."""

    code = "partner_draining"


class DeadlineExceeded(BatonError):
    code = "deadline_exceeded"
    status = 504


class Aborted(BatonError):
    """An operator ended the request through the admin API."""

    code = "aborted"
    status = 503


class StepFailed(BatonError):
    """A step with this request failed twice, the second time without other requests, or the request's grammar failed.

    Other requests continue.
    """

    code = "step_failed"


class RankLost(BatonError):
    """A process of this node died, or is out of step with the node's others."""

    code = "rank_lost"


class ModelChanged(BatonError):
    """The model's files changed under the node that uses them."""

    code = "model_changed"


class KernelRefused(BatonError):
    """A kernel can't run with these arguments on this device. The message names the kernel and the remedy."""

    code = "kernel_refused"


class DeviceLost(BatonError):
    """The device can't run even an empty step."""

    code = "device_lost"


class HandoffFailed(BatonError):
    code = "handoff_failed"
    status = 502


class WireError(BatonError):
    """An invalid or outdated frame. It is dropped and counted. Each kind is logged once per peer."""

    code = "wire_error"


class ConfigError(BatonError):
    """A flag or file that can't work. The message says what to change."""

    code = "config_error"


class IntegrityError(BatonError):
    """The counts of a pool, cache or lease don't add up. The message names the leaked object and its owner."""

    code = "integrity_error"
