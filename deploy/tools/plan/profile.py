"""What a node was measured to be: how long a step of a given shape takes, and what surrounds the steps. Pure values.

    step = rise(tokens) + per_sample x rows that sample + per_pair x (query, key) pairs of prompts
           + per_key x keys that decode rows read

`rise` goes in straight lines between its knots: matrix products cost about nothing more per token while the weights'
way from memory is the bottleneck, and a constant each beyond that. The split into token, sampling and attention costs
is that of Vidur (Agrawal et al., arXiv:2405.05465), fitted to this engine's steps instead of to single kernels.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from shared.core.errors import ConfigError

FORMAT = 1
AT_ONCE = 1e15


@dataclass(frozen=True, slots=True)
class StepShape:
    """All that a step's time depends on here."""

    tokens: int  # that go through the layers: of chunks and of decode rows
    samples: int  # rows that sample
    pairs: int = 0  # of chunks: each token with each one that it reads
    keys: int = 0  # that decode rows read


@dataclass(frozen=True, slots=True)
class ProfiledCosts:
    """Seconds. `knots` rise; before the first and after the last one the nearest line goes on."""

    knots: tuple[int, ...]
    rise: tuple[float, ...]
    per_sample: float
    per_pair: float
    per_key: float

    def seconds(self, shape: StepShape) -> float:
        return (
            self._rise(shape.tokens)
            + self.per_sample * shape.samples
            + self.per_pair * shape.pairs
            + self.per_key * shape.keys
        )

    def _rise(self, tokens: int) -> float:
        right = min(max(bisect.bisect_left(self.knots, tokens), 1), len(self.knots) - 1)
        low, high = self.knots[right - 1], self.knots[right]
        share = (tokens - low) / (high - low)
        return max(0.0, self.rise[right - 1] + share * (self.rise[right] - self.rise[right - 1]))


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """A node on `cores` cores of the machine that was measured. `beside` are its steps while the other cores of that
    machine run another such node: they share memory and caches, and often the cores themselves."""

    cores: int
    alone: ProfiledCosts
    beside: ProfiledCosts | None
    error: float  # of the fit: median of |fitted - measured| / measured
    num_samples: int


@dataclass(frozen=True, slots=True)
class PathProfile:
    """What a request meets outside of the engine, in seconds: measured on a whole cluster of nodes of one size, under a
    load. Where nodes, router and client share cores, their work is in it, too."""

    to_node: float  # from the client's first byte to the scheduler, and of the first token back
    prompt_stretch: float = 1.0  # of steps with prompts, by all that goes on beside them
    decode_stretch: float = 1.0  # of the others
    handoff: float = 0.0  # from the last chunk's end to the row's place in the decode node's batch, but for its pages
    bytes_per_s: float = AT_ONCE  # of pages; the decode node copies them and checks their digests


class Versioned(msgspec.Struct):
    """What of a profile can be read whatever its format."""

    format: int = 0


@dataclass(frozen=True, slots=True)
class Profile:
    """`nodes` and `paths` by the nodes' number of cores."""

    model: str
    dtype: str
    machine: str
    cores: int  # of the machine
    measured: str  # UTC, ISO 8601
    page_size: int
    num_pages: int
    max_running: int
    max_context: int
    page_bytes: int
    nodes: dict[int, NodeProfile]
    paths: dict[int, PathProfile]
    format: int = FORMAT

    def node(self, cores: int) -> NodeProfile:
        found = self.nodes.get(cores)
        if found is None:
            known = ", ".join(map(str, sorted(self.nodes)))
            raise ConfigError(
                f"the profile has nodes of {known} cores, none of {cores}; measure one: baton plan measure"
            )
        return found

    def path(self, cores: int) -> PathProfile:
        """Of a node that leaves no room for a partner on its machine no hand-off was measured: it is then that of the
        next smaller nodes, which are no faster."""
        own = self.paths[cores]
        measured = [size for size, path in self.paths.items() if path.bytes_per_s < AT_ONCE]
        if not measured or own.bytes_per_s < AT_ONCE:
            return own
        nearest = self.paths[max(measured)]
        return replace(own, handoff=nearest.handoff, bytes_per_s=nearest.bytes_per_s)

    @property
    def has_handoff(self) -> bool:
        """False: measured on a machine that is one node; hand-offs seem to cost nothing."""
        return any(path.bytes_per_s < AT_ONCE for path in self.paths.values())


def save(profile: Profile, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


def read(path: Path) -> Profile:
    """ConfigError, with the file's name and what to do, for whatever is no profile of this format that makes sense."""
    again = f"make one anew: baton plan measure --out {path}"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such profile; make one: baton plan measure --out {path}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        version = msgspec.json.decode(data, type=Versioned).format
        if version != FORMAT:
            raise ConfigError(f"{path} has format {version}, this baton reads format {FORMAT}; {again}")
        found = msgspec.json.decode(data, type=Profile)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no profile of baton plan: {error}; {again}") from None
    wrong = nonsense_of(found)
    if wrong:
        raise ConfigError(f"{path} is damaged: {wrong}; {again}")
    return found


def nonsense_of(profile: Profile) -> str:
    """What a simulation could not work with; empty where nothing is."""
    for name in ("cores", "page_size", "num_pages", "max_running", "max_context", "page_bytes"):
        if getattr(profile, name) < 1:
            return f"{name} is {getattr(profile, name)}"
    if not profile.nodes or set(profile.nodes) != set(profile.paths):
        return f"nodes of {sorted(profile.nodes)} cores and paths of {sorted(profile.paths)}"
    for cores, node in profile.nodes.items():
        if not 1 <= cores <= profile.cores:
            return f"a node of {cores} cores on a machine of {profile.cores}"
        if not all(are_costs(costs) for costs in (node.alone, node.beside) if costs is not None):
            return f"the step costs of a node of {cores} cores make no sense"
        path = profile.paths[cores]
        if min(path.to_node, path.handoff) < 0 or min(path.prompt_stretch, path.decode_stretch, path.bytes_per_s) <= 0:
            return f"the path of a node of {cores} cores makes no sense"
    return ""


def are_costs(costs: ProfiledCosts) -> bool:
    """Time passes in every step, and no less of it in a larger one."""
    knots, rise = list(costs.knots), list(costs.rise)
    is_rising = knots == sorted(set(knots)) and rise == sorted(rise)
    return len(knots) == len(rise) >= 2 and is_rising and costs.seconds(StepShape(1, 0)) > 0 and rise[0] > 0
