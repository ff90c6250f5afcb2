"""Typed errors. Every one ends as a 4xx or 5xx for the client, a metric and one log line."""

from __future__ import annotations


class BatonError(Exception):
    """Base of all errors we raise on purpose.

    `code` is stable and goes to metrics and clients; `status` is the HTTP status the router answers with;
    `subject` is the request key or node id the error belongs to, when there is one.
    """

    code = "internal_error"
    status = 500

    def __init__(self, message: str, *, subject: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.subject = subject


class InvalidRequest(BatonError):
    """The client's fault; `param` names the field of the request body."""

    code = "invalid_request_error"
    status = 400

    def __init__(self, message: str, *, param: str | None = None, subject: str | None = None) -> None:
        super().__init__(message, subject=subject)
        self.param = param


class ModelNotFound(InvalidRequest):
    code = "model_not_found"
    status = 404


class TooLarge(InvalidRequest):
    """The request and its answer can never fit the node that got it, not even an empty one."""

    code = "too_large"


class BodyTooLarge(InvalidRequest):
    code = "body_too_large"
    status = 413


class Overloaded(BatonError):
    """Too many open requests; the client may retry."""

    code = "overloaded"
    status = 429


class PartnerOverloaded(Overloaded):
    """A prefill node's word that its decode node is full; clients get Overloaded."""

    code = "partner_overloaded"


class NoNodes(BatonError):
    """No prefill/decode pair can serve; answered with Retry-After."""

    code = "no_nodes"
    status = 503


class AdapterMissing(NoNodes):
    """No node that could run the request, or not the one that got it, holds its LoRA adapter."""

    code = "adapter_missing"


class NodeLost(BatonError):
    """The node that served this request died, restarted or fell silent."""

    code = "node_lost"
    status = 502


class PeerUnreachable(NodeLost):
    """A node's word that the other node of a hand-off can't be reached, or not any more. The way between the two may be
    broken, or one of them gone: neither is blamed for it. Clients get NodeLost."""

    code = "peer_unreachable"


class RequestKillsNodes(BatonError):
    """Two nodes have died while they ran this request, the second one with no other suspect. A client that tried again
    would cost two more: so no 5xx, which clients repeat by themselves."""

    code = "request_kills_nodes"
    status = 422


class NodeDraining(NodeLost):
    """The node takes nothing new, or gives up what it did not finish in time: any other one may go on with it."""

    code = "node_draining"
    status = 503


class PartnerDraining(NodeDraining):
    """A prefill node's word that its decode node takes nothing new; clients get NodeDraining."""

    code = "partner_draining"


class DeadlineExceeded(BatonError):
    code = "deadline_exceeded"
    status = 504


class Aborted(BatonError):
    """Somebody who may ended the request from outside."""

    code = "aborted"
    status = 503


class StepFailed(BatonError):
    """A launched closure raised, and raised again for this request alone; all others go on."""

    code = "step_failed"


class RankLost(BatonError):
    """One of the processes that make up this node is gone or out of step: the node ends, and others go on with its
    requests."""

    code = "rank_lost"


class KernelRefused(BatonError):
    """A kernel can't be launched so on this device; the message names it and says what to change in the code."""

    code = "kernel_refused"


class DeviceLost(BatonError):
    """The device runs no step any more, not even one of nobody's: the node ends, and others go on with its requests."""

    code = "device_lost"


class HandoffFailed(BatonError):
    code = "handoff_failed"
    status = 502


class WireError(BatonError):
    """A frame that is malformed, truncated, oversized, unknown or of an old epoch. Dropped, counted, logged once."""

    code = "wire_error"


class ConfigError(BatonError):
    """A flag or file that can't work; the message says what to change."""

    code = "config_error"


class IntegrityError(BatonError):
    """A pool, a cache or a lease does not add up. Names the leaked thing and its owner."""

    code = "integrity_error"
