"""How often each oracle finds a mutant: with the detector, and with the streams alone. A weak adversary shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from tests.support.explorer.cases import Case, run_case
from tests.support.explorer.isolate import Outcome, in_child
from tests.support.explorer.mutants import Broken
from tests.support.explorer.scripted import SCRIPTS


@dataclass
class Rate:
    """Counts of oracles over the same seeds, with detector and without; '' is a run that found nothing."""

    mutant: Broken
    watched: Counter[str] = field(default_factory=Counter)
    alone: Counter[str] = field(default_factory=Counter)
    first: str = ""
    script: str = ""  # what its hand-written schedule says of it; '' when it has none or that does not notice

    @property
    def num_seeds(self) -> int:
        return sum(self.watched.values())

    @property
    def killed(self) -> bool:
        """Whether an oracle that must find this mutant, or its script, found it."""
        return bool(self.script) or any(self.watched[oracle] or self.alone[oracle] for oracle in self.mutant.found_by)

    def summary(self) -> str:
        """One line, machine readable enough."""
        counts = f"watched {dict(self.watched)} alone {dict(self.alone)}"
        return f"{self.mutant.name}: {counts} script {bool(self.script)} killed {self.killed}"

    def found(self, counts: Counter[str]) -> str:
        return f"{sum(counts.values()) - counts['']}/{sum(counts.values())}"


def measure(mutant: Broken, seeds: Iterable[int]) -> Rate:
    rate = Rate(mutant, script=scripted(mutant))
    for seed in seeds:
        case = Case(mutant.scenarios[seed % len(mutant.scenarios)], seed)
        watched = run_apart(case, mutant, detect=True)
        rate.watched[watched.oracle] += 1
        rate.alone[run_apart(case, mutant, detect=False).oracle] += 1
        if watched.oracle and not rate.first:
            rate.first = f"{case.scenario} seed {seed}: {watched.message}"
    return rate


def scripted(mutant: Broken) -> str:
    """What the mutant's own schedule says."""
    if not mutant.script:
        return ""
    try:
        SCRIPTS[mutant.script](mutant)
    except AssertionError as error:
        return str(error)
    return ""


def run_apart(case: Case, mutant: Broken, detect: bool) -> Outcome:
    def run() -> tuple[str, str]:
        verdict = run_case(case, mutant, detect)
        return verdict.oracle, verdict.message[:4000]

    return in_child(run)


def print_rates(rates: Sequence[Rate]) -> None:
    table = Table("mutant", "takes away", "detector", "streams alone", "by", "script", title="mutants found / seeds")
    for rate in rates:
        by = ", ".join(f"{name or 'nobody'} {count}" for name, count in rate.alone.most_common())
        name = rate.mutant.name if rate.killed else f"[red]{rate.mutant.name} SURVIVES[/red]"
        detector = f"{rate.watched['detector']}/{rate.num_seeds}"
        table.add_row(name, rate.mutant.takes_away, detector, rate.found(rate.alone), by, "red" if rate.script else "")
    Console(width=150).print(table)
