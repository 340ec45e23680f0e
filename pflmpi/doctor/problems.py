"""A problem with its remedy and ranks, and the ways to look for one: rank by rank, host by host, where ranks differ."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pflmpi.doctor.facts import RankFacts
from pflmpi.text import ranks, some

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Problem:
    """What is wrong, what to do, and on which ranks."""

    what: str
    remedy: str
    ranks: tuple[int, ...]


Check = Callable[[Sequence[RankFacts]], Iterable[Problem]]
Found = Iterator[tuple[str, str]]  # what is wrong, and its remedy


@dataclass(frozen=True)
class Outlier:
    """Ranks whose value is not the usual one."""

    value: str
    ranks: tuple[int, ...]
    usual: str
    others: tuple[int, ...]  # the ranks that have the usual one


def each_rank(check: Callable[[RankFacts], Found]) -> Check:
    """Check of all ranks, from a check of one."""
    return lambda everyone: (Problem(*found, (one.rank,)) for one in everyone for found in check(one))


def each_host(check: Callable[[Sequence[RankFacts]], Found]) -> Check:
    """Check of all ranks, from a check of those of one host."""

    def of_all(everyone: Sequence[RankFacts]) -> Iterator[Problem]:
        for group in by(everyone, lambda one: one.host).values():
            yield from (Problem(*found, numbers(group)) for found in check(group))

    return of_all


def same_for_all(name: str, value: Callable[[RankFacts], str | None], remedy: str, why: str = "") -> Check:
    """Check that a value is the same on all ranks but those where it is None."""

    def check(everyone: Sequence[RankFacts]) -> Iterator[Problem]:
        for outlier in outliers(everyone, value):
            what = f"{name} is {outlier.value} here, and {outlier.usual} on {ranks(outlier.others)}{why}"
            yield Problem(what, remedy, outlier.ranks)

    return check


def outliers(everyone: Sequence[RankFacts], value: Callable[[RankFacts], str | None]) -> list[Outlier]:
    """Groups of ranks whose value differs from the one that most have (of two, that of the lowest rank)."""
    groups = {each: group for each, group in by(everyone, value).items() if each is not None}
    if len(groups) < 2:
        return []
    usual = max(groups, key=lambda each: len(groups[each]))
    others = numbers(groups[usual])
    return [Outlier(each, numbers(group), usual, others) for each, group in groups.items() if each != usual]


def line(problem: Problem, everyone: Sequence[RankFacts]) -> str:
    """A problem in one line, with ranks and hosts."""
    hosts = list(dict.fromkeys(one.host for one in everyone if one.rank in problem.ranks))
    return f"{ranks(problem.ranks)} on {some(hosts)}: {problem.what}; {problem.remedy}".replace("\n", " ")


def by(everyone: Iterable[RankFacts], key: Callable[[RankFacts], T]) -> dict[T, list[RankFacts]]:
    """The ranks in groups of the same key."""
    groups: dict[T, list[RankFacts]] = {}
    for one in everyone:
        groups.setdefault(key(one), []).append(one)
    return groups


def numbers(group: Iterable[RankFacts]) -> tuple[int, ...]:
    """The ranks' numbers."""
    return tuple(one.rank for one in group)
