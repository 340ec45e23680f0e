"""A problem with its cure, and the ranks that have it."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pflmpi.doctor.facts import Facts
from pflmpi.text import ranks, some

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Problem:
    """What is wrong, what to do, and where."""

    what: str
    cure: str
    ranks: tuple[int, ...]


Check = Callable[[Sequence[Facts]], Iterable[Problem]]


@dataclass(frozen=True)
class Outlier:
    """Ranks whose value is not the usual one."""

    value: str
    ranks: tuple[int, ...]
    usual: str
    others: tuple[int, ...]


def merged(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems with those that are alike in one, in the order of their first ranks' coming."""
    found: dict[tuple[str, str], set[int]] = {}
    for problem in problems:
        found.setdefault((problem.what, problem.cure), set()).update(problem.ranks)
    return [Problem(what, cure, tuple(sorted(where))) for (what, cure), where in found.items()]


def line(problem: Problem, everyone: Sequence[Facts]) -> str:
    """Return the problem in one line, with ranks and hosts."""
    hosts = list(dict.fromkeys(one.host for one in everyone if one.rank in problem.ranks))
    return f"{ranks(problem.ranks)} on {some(hosts)}: {problem.what}; {problem.cure}".replace("\n", " ")


def by(everyone: Iterable[Facts], key: Callable[[Facts], T]) -> dict[T, list[Facts]]:
    """Return the ranks in groups of the same key."""
    groups: dict[T, list[Facts]] = {}
    for one in everyone:
        groups.setdefault(key(one), []).append(one)
    return groups


def odd(everyone: Sequence[Facts], value: Callable[[Facts], str]) -> list[Outlier]:
    """Return the groups of ranks whose value differs from the one that most have (of two, that of the lowest rank)."""
    groups = by(everyone, value)
    if len(groups) < 2:
        return []
    usual = max(groups, key=lambda each: len(groups[each]))
    others = numbers(groups[usual])
    return [Outlier(each, numbers(group), usual, others) for each, group in groups.items() if each != usual]


def numbers(group: Iterable[Facts]) -> tuple[int, ...]:
    """Return the ranks' numbers."""
    return tuple(one.rank for one in group)


def hosts(everyone: Iterable[Facts]) -> Mapping[str, list[Facts]]:
    """Return the ranks of each host."""
    return by(everyone, lambda one: one.host)
