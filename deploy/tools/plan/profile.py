"""A node's step times by shape, and a request's times outside of the engine, as measured. Values only.

  step = rise(tokens) + per_sample x rows that sample + per_pair x (query, key) pairs of prompts
         + per_key x keys that decode rows read.

`rise` is linear between its knots. As long as reading the weights takes most of a step, another token costs almost
nothing. With more tokens, each further token costs the same time. The split into token, sampling and attention costs
follows Vidur (Agrawal et al., arXiv:2405.05465), but the costs are fitted to steps instead of kernels.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from shared.core.errors import ConfigError

FORMAT = 2
AT_ONCE = 1e15


@dataclass(frozen=True, slots=True)
class StepShape:
    tokens: int  # tokens of chunks and decode rows
    samples: int  # rows that sample a token
    pairs: int = 0  # pairs in chunks: each token with each token that it attends to
    keys: int = 0  # keys that decode rows read


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """What the measuring process writes for its parent, which does not load torch."""

    shapes: list[StepShape]
    seconds: list[float]
    num_pages: int
    max_context: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class ProfiledCosts:
    """Costs in seconds. `knots` ascend. Outside of the knots, the first and the last segment of `rise` continue."""

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
    """A node on `cores` cores. `beside`: its costs beside an equal node on other cores."""

    cores: int
    alone: ProfiledCosts
    beside: ProfiledCosts | None
    error: float  # median of |fitted - measured| / measured
    num_samples: int


@dataclass(frozen=True, slots=True)
class PathProfile:
    """A request's seconds outside of the engine, in a loaded cluster whose processes share cores."""

    to_node: float  # time from client to scheduler, plus time of the first token's way back
    prompt_stretch: float = 1.0  # factor by which other work stretches steps with prompts
    decode_stretch: float = 1.0  # the same factor for the other steps
    handoff: float = 0.0  # time from the last chunk's end until the request joins the decode batch, without page copies
    bytes_per_s: float = AT_ONCE  # rate at which the decode node copies and checks pages


class Versioned(msgspec.Struct):
    """The part of a profile that every format has."""

    format: int = 0


@dataclass(frozen=True, slots=True)
class Profile:
    """`nodes` and `paths`: by the number of cores per node."""

    model: str
    dtype: str
    machine: str
    cores: int  # cores of the machine
    measured: str  # in UTC and ISO 8601
    page_size: int
    num_pages: int
    max_running: int
    max_context: int
    page_bytes: int
    nodes: dict[int, NodeProfile]
    paths: dict[int, PathProfile]
    format: int = FORMAT
    growth_reserve: float = 1.0  # of the nodes

    def node(self, cores: int) -> NodeProfile:
        found = self.nodes.get(cores)
        if found is None:
            known = ", ".join(map(str, sorted(self.nodes)))
            raise ConfigError(
                f"the profile has nodes of {known} cores, none of {cores}; measure one: baton plan measure"
            )
        return found

    def path(self, cores: int) -> PathProfile:
        """Return the path. If `cores` has no measured hand-off, use the one measured at the most cores."""
        own = self.paths[cores]
        measured = [size for size, path in self.paths.items() if path.bytes_per_s < AT_ONCE]
        if not measured or own.bytes_per_s < AT_ONCE:
            return own
        nearest = self.paths[max(measured)]
        return replace(own, handoff=nearest.handoff, bytes_per_s=nearest.bytes_per_s)

    @property
    def has_handoff(self) -> bool:
        """Whether a hand-off was measured. If not (one node per machine), the planner assumes that it takes no time."""
        return any(path.bytes_per_s < AT_ONCE for path in self.paths.values())


def save(profile: Profile, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


def read(path: Path) -> Profile:
    """Raise ConfigError with advice for an invalid file."""
    again = f"make a new one: baton plan measure --out {path}"
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
        raise ConfigError(f"{path} is not a profile of baton plan: {error}; {again}") from None
    wrong = nonsense_of(found)
    if wrong:
        raise ConfigError(f"{path} is damaged: {wrong}; {again}")
    return found


def nonsense_of(profile: Profile) -> str:
    """Return a fault; "" if the profile is valid."""
    for name in ("cores", "page_size", "num_pages", "max_running", "max_context", "page_bytes"):
        if getattr(profile, name) < 1:
            return f"{name} is {getattr(profile, name)}"
    if not profile.nodes or set(profile.nodes) != set(profile.paths):
        return f"nodes of {sorted(profile.nodes)} cores and paths of {sorted(profile.paths)}"
    for cores, node in profile.nodes.items():
        if not 1 <= cores <= profile.cores:
            return f"a node of {cores} cores on a machine of {profile.cores}"
        if not all(are_costs(costs) for costs in (node.alone, node.beside) if costs is not None):
            return f"the step costs of a node of {cores} cores are invalid"
        path = profile.paths[cores]
        if min(path.to_node, path.handoff) < 0 or min(path.prompt_stretch, path.decode_stretch, path.bytes_per_s) <= 0:
            return f"the path of a node of {cores} cores is invalid"
    return ""


def are_costs(costs: ProfiledCosts) -> bool:
    """Return whether each step takes time, and more tokens never take less time."""
    knots, rise = list(costs.knots), list(costs.rise)
    is_rising = knots == sorted(set(knots)) and rise == sorted(rise)
    return len(knots) == len(rise) >= 2 and is_rising and costs.seconds(StepShape(1, 0)) > 0 and rise[0] > 0
