"""Explain failures of a hub or a download, each in a ConfigError of one sentence."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path

from deploy.hub.hub import Hub
from deploy.hub.name import HubName
from shared.core.errors import ConfigError

UNAUTHORIZED, FORBIDDEN, TOO_MANY, SERVER_ERRORS = 401, 403, 429, 500
LONGEST_REASON = 200
NOT_WRITTEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
AGAIN = "run it again: whole files are kept"


@contextlib.contextmanager
def explained(name: HubName, hub: Hub) -> Iterator[None]:
    import httpx2
    from huggingface_hub.errors import RevisionResolutionError

    try:
        yield
    except (OSError, ValueError, RuntimeError, LookupError, httpx2.HTTPError, RevisionResolutionError) as error:
        raise ConfigError(f"--model {name}: {reason_of(error, name, hub)}") from error


def causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def unreachable(error: BaseException) -> str:
    """Return why the hub could not be reached: a status 5xx, or a transport error. Return "" for other errors."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    for cause in causes(error):
        if isinstance(cause, HfHubHTTPError):
            status = int(cause.response.status_code)
            return f"it answers {status}" if status >= SERVER_ERRORS else ""
        if isinstance(cause, httpx2.TransportError):
            return first_line(cause)
    return ""


def reason_of(error: BaseException, name: HubName, hub: Hub) -> str:
    from huggingface_hub.errors import HfHubHTTPError

    if hub.offline:
        again = "run it once without --offline and HF_HUB_OFFLINE"
        return f"offline, and the cache {hub.cache} lacks it or a part of it; {again}"
    if lost := unreachable(error):
        return f"can't reach {hub.endpoint} ({lost}), and it is not whole in the cache {hub.cache}; {AGAIN}"
    answered = next((cause for cause in causes(error) if isinstance(cause, HfHubHTTPError)), None)
    if answered is not None:
        return refusal(answered, name, hub)
    return trouble_here(error, hub)


def refusal(error: Exception, name: HubName, hub: Hub) -> str:
    """Explain the hub's refusal. Check each error class before its base classes."""
    from huggingface_hub import errors

    page = f"{hub.endpoint}/{name.repo}"
    sentences: list[tuple[type[Exception], Callable[[], str]]] = [
        (errors.RevisionNotFoundError, lambda: f"the model has no revision {name.revision or 'main'!r}"),
        (errors.RemoteEntryNotFoundError, lambda: f"one of its files no longer exists; {AGAIN}"),
        (errors.DisabledRepoError, lambda: f"its owner or the hub has disabled it ({page})"),
        (errors.GatedRepoError, lambda: gated(page, hub)),
        (errors.RepositoryNotFoundError, lambda: not_there(name, hub)),
    ]
    for kind, sentence in sentences:
        if isinstance(error, kind):
            return sentence()
    return refused_with(error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0, hub)


def gated(page: str, hub: Hub) -> str:
    if hub.has_token:
        return f"it is gated, and the account of this token has no access: accept its terms at {page}"
    return f"it is gated: accept its terms at {page} and set HF_TOKEN to a token of that account"


def not_there(name: HubName, hub: Hub) -> str:
    private = "or this token may not read it" if hub.has_token else "or it is private and needs HF_TOKEN"
    here = Path(str(name)).absolute()
    return f"there is no such file or folder (looked at {here}), and no such model at {hub.endpoint}, {private}"


def refused_with(status: int, hub: Hub) -> str:
    if status in (UNAUTHORIZED, FORBIDDEN):
        which = "the token is wrong or may not read it" if hub.has_token else "it needs a token: set HF_TOKEN"
        return f"{hub.endpoint} refuses it ({status}): {which}"
    if status == TOO_MANY:
        return f"{hub.endpoint} has had too many requests from here; wait, or set HF_TOKEN"
    return f"{hub.endpoint} answers {status}"


def trouble_here(error: BaseException, hub: Hub) -> str:
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"the disk of {hub.cache} is full; free some, or set HF_HOME to a larger disk"
        if isinstance(cause, OSError) and cause.errno is not None:
            remedy = "; set HF_HOME to a folder that can be written" if cause.errno in NOT_WRITTEN else ""
            return f"{cause.strerror}: {cause.filename or hub.cache}{remedy}"
    return f"the download failed ({first_line(error)}); {AGAIN}"


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:LONGEST_REASON]
