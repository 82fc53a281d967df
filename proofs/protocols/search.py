"""A search through every state that a small model can reach, breadth first.

The first state that breaks a claim is then one with the fewest actions before it, so its story is
as short as a story of this fault can be.
"""

import collections
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

State = Any  # hashable: a NamedTuple of numbers, strings, tuples and frozensets


class Model(NamedTuple):
    """A protocol with small constants.

    Example:
        >>> count = Model(
        ...     starts=[0],
        ...     actions=lambda state: [(f"{state} becomes {state + 1}", state + 1)][state // 3 :],
        ...     claims={"stays below 3": lambda state: state < 3},
        ...     may_end=lambda state: state == 3)
        >>> found = search(count)
        >>> found.broken, found.story
        ('stays below 3', ('0 becomes 1', '1 becomes 2', '2 becomes 3'))
    """

    starts: Iterable[State]
    # What may happen next: sentences, each with the state after it.
    actions: Callable[[State], Iterable[tuple[str, State]]]
    claims: dict[str, Callable[[State], bool]]  # must be true of every state
    may_end: Callable[[State], bool]  # whether nothing needs to happen any more


class Found(NamedTuple):
    """The result of a search."""

    states: int  # the number of different states
    depth: int  # the largest number of actions before any of them
    secs: float
    broken: str  # the first claim that a state breaks; "" if all hold
    story: tuple[str, ...]  # the actions that lead to that state


STUCK = "everybody can go on until all is done"
CIRCLE = "nothing goes on for ever"


def search(model: Model) -> Found:
    """Visits every state that a model can reach, until one breaks a claim.

    Two more claims are made of every model: a state from which nothing can happen is one that may
    end, and no sequence of actions leads back to a state. So every run ends.
    """
    began = time.perf_counter()
    before: dict[Hashable, tuple[State, str]] = {}  # how each state was reached
    depths: dict[Hashable, int] = dict.fromkeys(model.starts, 0)
    waiting = collections.deque(depths)
    arrows: dict[Hashable, list[tuple[str, State]]] = {}

    def result(broken: str = "", state: State = None, then: tuple[str, ...] = ()) -> Found:
        secs, story = time.perf_counter() - began, story_of(state, before) + then
        return Found(len(depths), max(depths.values()), secs, broken, story)

    while waiting:
        state = waiting.popleft()
        for claim, holds in model.claims.items():
            if not holds(state):
                return result(claim, state)
        following = list(model.actions(state))
        if not following and not model.may_end(state):
            return result(STUCK, state)
        arrows[state] = following
        for told, after in following:
            if after not in depths:
                depths[after], before[after] = depths[state] + 1, (state, told)
                waiting.append(after)
    circle = circle_in(arrows)
    return result(CIRCLE, *circle) if circle else result()


def story_of(state: State, before: dict[Hashable, tuple[State, str]]) -> tuple[str, ...]:
    """Returns the actions that led to a state."""
    story: list[str] = []
    while state in before:
        state, told = before[state]
        story.append(told)
    return tuple(reversed(story))


def circle_in(
    arrows: dict[Hashable, list[tuple[str, State]]],
) -> tuple[State, tuple[str, ...]] | None:
    """Returns a state and actions that lead from it back to it; None if there are none."""
    entering: dict[Hashable, list[tuple[str, State]]] = {state: [] for state in arrows}
    for state, following in arrows.items():
        for told, after in following:
            entering[after].append((told, state))
    counts = {state: len(each) for state, each in entering.items()}
    free = [state for state, count in counts.items() if not count]
    while free:  # what no circle leads to
        state = free.pop()
        del counts[state]
        for _, after in arrows[state]:
            counts[after] -= 1
            if not counts[after]:
                free.append(after)
    if not counts:
        return None
    path, state = [], next(iter(counts))
    visited: dict[Hashable, int] = {}
    while state not in visited:  # backwards: what is left has something left before it
        visited[state] = len(path)
        told, state = next(each for each in entering[state] if each[1] in counts)
        path.append(told)
    return state, tuple(reversed(path[visited[state] :]))
