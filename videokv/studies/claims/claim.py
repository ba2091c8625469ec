"""A claim, and what was found about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from videokv.studies.results import mean_sem_n

if TYPE_CHECKING:
    from videokv.studies.claims.evidence import Evidence

Verdict = Literal["holds", "does not hold here", "cannot be tested here"]
CLEAR_SEMS = 2.0  # a difference counts where it is this many standard errors from its bound
CORRECTION_PAPER = "2605.26266"
QUANTWM_PAPER = "2609.26425"


@dataclass(frozen=True)
class Finding:
    """figure: in words what the number is; value ± sem over n cases (sem None: exact or single).

    holds: the claimed relation, by the claim's own rule. unclear: it does not hold only because
    the value lies within two standard errors of its bound, on whichever side.
    """

    figure: str
    value: float
    sem: float | None
    n: int
    holds: bool
    unit: str = ""
    unclear: bool = False

    @property
    def undecided(self) -> bool:
        """Neither shown to hold nor shown not to."""
        return self.unclear and not self.holds

    @property
    def text(self) -> str:
        error = "" if self.sem is None else f" ± {self.sem:.2g}"
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.figure}: {self.value:+.4g}{error}{unit}"


@dataclass(frozen=True)
class Claim:
    """says: the claim in our words. where: in the paper. command: what measures it here, with
    ``{rolled}``, ``{diagnosed}``, ``{prefilled}`` and ``{claimed}`` for the size of the run.

    rule: when it counts as holding. otherwise: the likely reason where it does not, or what makes
    it from figures of the evidence. judge: None for a claim that cannot be tested here,
    ``otherwise`` then says why.
    """

    key: str
    paper: str
    where: str
    says: str
    command: str
    rule: str
    otherwise: str | Callable[[Evidence], str]
    judge: Callable[[Evidence], Finding] | None

    def __post_init__(self) -> None:
        for name in ("key", "paper", "where", "says", "otherwise"):
            if not getattr(self, name):
                raise ValueError(f"a claim needs {name}, {self.key!r} has none")


class Untestable(ValueError):
    """The evidence cannot be had on this machine; the message says why."""


def above(values: Sequence[float], figure: str, *, bound: float = 0.0, unit: str = "") -> Finding:
    """Holds where the mean is above the bound by two standard errors (or at all, for one case)."""
    mean, sem, n = mean_sem_n(values)
    margin = CLEAR_SEMS * (sem or 0.0)
    return Finding(figure, mean, sem, n, mean - margin > bound, unit, abs(mean - bound) <= margin)


def below(values: Sequence[float], figure: str, *, bound: float = 0.0, unit: str = "") -> Finding:
    """Holds where the mean is below the bound by two standard errors."""
    mean, sem, n = mean_sem_n(values)
    margin = CLEAR_SEMS * (sem or 0.0)
    return Finding(figure, mean, sem, n, mean + margin < bound, unit, abs(mean - bound) <= margin)


def within(values: Sequence[float], figure: str, *, bound: float, unit: str = "") -> Finding:
    """Holds where the mean lies within ± bound by two standard errors: "no difference" is a
    finding, which few cases that scatter must not make."""
    mean, sem, n = mean_sem_n(values)
    margin, off = CLEAR_SEMS * (sem or 0.0), abs(mean)
    return Finding(figure, mean, sem, n, off + margin <= bound, unit, abs(off - bound) < margin)
