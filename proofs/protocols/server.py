"""Workers that move one loss scale on parameter servers, without waiting for each other.

Each worker reads the scale, computes gradients at it, and merges its verdict into a state that
others may have changed meanwhile. Between any two of its accesses to the servers there may be
others. What a worker does, and in which order, is read from the graph that TensorFlow traces of
`LossScaler.merge`: accesses that the graph does not order happen in any order.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

import scaling
from proofs.protocols.search import Model

FIELDS = ("loss_scale", "finite_steps", "overflows_left")
# Of the rule. The scale is a power of two, of which the exponent is kept.
INTERVAL, HYSTERESIS = 2, 2
START = (4, 0, HYSTERESIS)
NOBODY = -1


class Access(NamedTuple):
    """Something that a worker does in a step."""

    kind: str  # "read", "judge", "lock", "again" (reads while merging), "write", "unlock"
    field: int  # index in FIELDS; -1 if it is not about one
    after: frozenset[int]  # the accesses of the step, by index, that come before it


class Worker(NamedTuple):
    """A worker in the middle of a step."""

    steps: int = 0  # steps finished
    done: frozenset[int] = frozenset()  # the accesses of this step
    used: int | None = None  # the scale's exponent at which it computes gradients
    finite: bool | None = None
    found: tuple[int | None, ...] = (None, None, None)  # the state that it merges into


class World(NamedTuple):
    """The servers and the workers."""

    state: tuple[int, int, int]
    holder: int  # the worker that holds the lock, or NOBODY
    workers: tuple[Worker, ...]
    due: tuple[int, int, int]  # the state if the steps so far had been merged one at a time


def advanced(state: tuple[int, ...], *, finite: bool) -> tuple[int, int, int]:
    """Returns the rule's state after a step: `DynamicLossScale.advance` in small numbers.

    Example:
        >>> advanced((4, 1, 2), finite=True), advanced((4, 1, 1), finite=False)
        ((5, 0, 2), (3, 0, 0))
    """
    scale, steps, left = state
    if not finite:
        return (scale - 1 if left <= 1 else scale), 0, max(left - 1, 0)
    return (scale + 1, 0, HYSTERESIS) if steps + 1 >= INTERVAL else (scale, steps + 1, left)


def traced() -> list[Access]:
    """Returns what a worker's step does, as TensorFlow traces it, in an order that is possible."""
    scaler = scaling.LossScaler(rule())
    scaler._lock = tf.CriticalSection()  # noqa: SLF001  # as in the scope of parameter servers

    @tf.function(autograph=False)
    def step(gradient: tf.Tensor) -> None:
        used = scaler.state
        finite = tf.math.is_finite(gradient * used.loss_scale)
        scaler.merge(used, scaler.rule.advance(used, finite), finite)

    return accesses(step.get_concrete_function(tf.TensorSpec([], tf.float32)).graph, scaler)


def rule() -> scaling.DynamicLossScale:
    """Returns the rule with the constants of the model."""
    return scaling.DynamicLossScale(
        initial_scale=2.0 ** START[0], growth_interval=INTERVAL, hysteresis=HYSTERESIS
    )


def accesses(graph: Any, scaler: scaling.LossScaler) -> list[Access]:
    """Returns the accesses of a traced step; see `traced`. Reads that nothing uses are left out."""
    variables = {id(scaler._variables[field].handle): at for at, field in enumerate(FIELDS)}  # noqa: SLF001
    fields = {inner.name: variables.get(id(outer), -1) for outer, inner in graph.captures}
    judge = next(each for each in graph.get_operations() if each.type == "IsFinite")
    found = [
        (kind, field, each)
        for each in graph.get_operations()
        for kind, field in kinds(each, fields, judge)
    ]
    earlier = [before(each) for _, _, each in found]
    return [
        Access(
            kind,
            field,
            frozenset(at for at, (_, _, other) in enumerate(found) if other in earlier[index]),
        )
        for index, (kind, field, _) in enumerate(found)
    ]


def kinds(each: Any, fields: dict[str, int], judge: Any) -> Iterator[tuple[str, int]]:
    """Yields what an operation of the graph is to the model: the kinds and fields of accesses."""
    if each.type == "ReadVariableOp":
        field = fields[each.inputs[0].name]
        if judge in before(each):
            yield "again", field
        elif each in before(judge):
            yield "read", field
    elif each.type == "If":  # in its branch, the fields are written in any order
        yield from (("write", fields[one.name]) for one in each.inputs if one.name in fields)
    elif each is judge:
        yield "judge", -1
    elif each.type in {"MutexLock", "ConsumeMutexLock"}:
        yield {"MutexLock": "lock", "ConsumeMutexLock": "unlock"}[each.type], -1


def before(operation: Any) -> set[Any]:
    """Returns the operations of a graph that come before one, whatever the order of the others."""
    found: set[Any] = set()
    waiting = [operation]
    while waiting:
        each = waiting.pop()
        entering = {*each.control_inputs, *(one.op for one in each.inputs)} - found
        found |= entering
        waiting += entering
    return found


def model(step: list[Access], workers: int, steps: int, *, compares_scales: bool = True) -> Model:
    """Returns the model.

    Args:
        step: what a worker does in a step, from `traced`.
        workers: number of workers.
        steps: number of steps that each takes.
        compares_scales: whether a step at a scale that is not in use any more is ignored. False is
            a fault.
    """

    def actions(world: World) -> Iterator[tuple[str, World]]:
        for number, worker in enumerate(world.workers):
            if worker.steps == steps:
                continue
            for at, access in enumerate(step):
                if at not in worker.done and access.after <= worker.done:
                    yield from performed(world, number, at, step, compares_scales=compares_scales)

    claims = {
        "a scale is halved once for the overflows at it": lambda world: (
            not at_rest(world, step) or world.state[0] >= world.due[0]
        ),
        "it grows from steps at that scale alone": lambda world: (
            not at_rest(world, step) or world.state[0] <= world.due[0]
        ),
        "no step is lost from the counts": lambda world: (
            not at_rest(world, step) or world.state == world.due
        ),
    }
    start = World(START, NOBODY, (Worker(),) * workers, START)
    return Model(
        [start], actions, claims, lambda world: all(each.steps == steps for each in world.workers)
    )


def performed(
    world: World, number: int, at: int, step: list[Access], *, compares_scales: bool
) -> Iterator[tuple[str, World]]:
    """Yields what can come of a worker's access: a sentence, and the world after it."""
    worker, access = world.workers[number], step[at]
    kind, field, who = access.kind, access.field, f"worker {number}"
    name = FIELDS[field]
    done = worker._replace(done=worker.done | {at})
    shown = f"2^{world.state[0]}" if field == 0 else str(world.state[field])
    if kind == "read":
        used = done._replace(used=world.state[field])
        yield f"{who} reads {name} {shown}", replaced(world, number, used, step)
    elif kind == "judge":
        for finite in (True, False):
            told = "finds finite gradients" if finite else "finds an inf"
            judged = done._replace(finite=finite)
            yield f"{who} {told} at 2^{worker.used}", replaced(world, number, judged, step)
    elif kind == "lock" and world.holder == NOBODY:
        yield f"{who} takes the lock", replaced(world._replace(holder=number), number, done, step)
    elif kind == "again":
        found = (*worker.found[:field], world.state[field], *worker.found[field + 1 :])
        known = world._replace(due=due(world, worker)) if field == 0 else world
        read = done._replace(found=found)
        yield f"{who} reads {name} {shown}, to merge", replaced(known, number, read, step)
    elif kind == "write":
        outdated = compares_scales and worker.found[0] != worker.used
        yield written(world, number, done, field, step, outdated=outdated)
    elif kind == "unlock":
        free = world._replace(holder=NOBODY)
        yield f"{who} gives the lock back", replaced(free, number, done, step)


def due(world: World, worker: Worker) -> tuple[int, int, int]:
    """Returns the state that is due once a worker begins to merge its step."""
    if world.due[0] != worker.used:
        return world.due
    return advanced(world.due, finite=bool(worker.finite))


def written(
    world: World, number: int, worker: Worker, field: int, step: list[Access], *, outdated: bool
) -> tuple[str, World]:
    """Returns what comes of writing a field; nothing is written at an outdated scale."""
    if outdated:
        told = f"worker {number} leaves {FIELDS[field]}: its step was at another scale"
        return told, replaced(world, number, worker, step)
    new = advanced(worker.found, finite=bool(worker.finite))[field]  # type: ignore[arg-type]
    state = (*world.state[:field], new, *world.state[field + 1 :])
    shown = f"2^{new}" if field == 0 else str(new)
    told = f"worker {number} writes {FIELDS[field]} {shown}"
    return told, replaced(world._replace(state=state), number, worker, step)


def replaced(world: World, number: int, worker: Worker, step: list[Access]) -> World:
    """Returns the world with another state of a worker, who begins the next step after the last."""
    if len(worker.done) == len(step):
        worker = Worker(worker.steps + 1)
    workers = (*world.workers[:number], worker, *world.workers[number + 1 :])
    return world._replace(workers=workers)


def at_rest(world: World, step: list[Access]) -> bool:
    """Returns whether no worker is merging."""
    merging = {at for at, access in enumerate(step) if access.kind in {"again", "write"}}
    return all(not worker.done & merging or merging <= worker.done for worker in world.workers)


def without(step: list[Access], *kinds: str) -> list[Access]:
    """Returns a step that leaves accesses out: a fault."""
    kept = [at for at, access in enumerate(step) if access.kind not in kinds]
    return [
        step[at]._replace(after=frozenset(kept.index(each) for each in step[at].after & {*kept}))
        for at in kept
    ]


def reading_before_the_lock(step: list[Access]) -> list[Access]:
    """Returns a step that takes the lock only to write: a fault."""
    lock = next(at for at, access in enumerate(step) if access.kind == "lock")
    again = {at for at, access in enumerate(step) if access.kind == "again"}

    def order(at: int, access: Access) -> frozenset[int]:
        if at == lock:
            return access.after | again
        return access.after - {lock} if at in again else access.after

    return [access._replace(after=order(at, access)) for at, access in enumerate(step)]


def searched(workers: int, steps: int) -> Callable[[], Model]:
    """Returns a function that returns the model of the code."""
    return lambda: model(traced(), workers, steps)


BOUNDS = {
    f"{workers} workers, {steps} steps each": searched(workers, steps)
    for workers, steps in ((2, 2), (2, 3), (3, 2))
}
FAULTS: dict[str, Callable[[], Model]] = {
    "nobody takes the lock": lambda: model(without(traced(), "lock", "unlock"), 2, 2),
    "the lock is taken only to write": lambda: model(reading_before_the_lock(traced()), 2, 2),
    "nobody gives the lock back": lambda: model(without(traced(), "unlock"), 2, 2),
    "a step at an outdated scale counts": lambda: model(traced(), 2, 2, compares_scales=False),
}
