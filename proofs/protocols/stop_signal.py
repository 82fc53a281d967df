"""A stop signal to one of several workers.

Each worker runs `OuterLoop._run` and, in it, `inner.run_steps`. They meet in the sums of a step,
in the votes on whether to go on, and in saving. The signal's thread sets two flags, one after the
other: one that the vote between two inner loops asks for, one for the votes in the graph. A worker
may wait for a batch that does not come; then, some time after a signal, its process ends.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from proofs.protocols.search import Model

# The parts of a run, in their order; the names are those of the code's functions.
VOTE_OUTSIDE = "_stop_asked"
VOTE_INSIDE = "stop_requested"
STEPS_PER_LOOP, TARGET = 2, 4


class Worker(NamedTuple):
    """One worker."""

    at: str = VOTE_OUTSIDE
    waits: bool = False  # whether it is in a collective
    vote: bool = False  # what it votes there
    step: int = 0
    taken: int = 0  # steps of this inner loop
    saved: int | None = None
    asked: bool = False  # `stop_asked`
    stop: bool = False  # the variable `stop`
    blocked: bool = False  # whether its next batch does not come
    ended: str = ""  # "saved", "finished", "unsaved" or "lost": how its process ended


class World(NamedTuple):
    """All workers."""

    workers: tuple[Worker, ...]
    signals: tuple[int, ...]  # for each worker, how many flags its signal's thread has set
    step: int | None = None  # the largest step when a thread had first set both
    blocks: int = 0  # how many workers' data may stop coming


class Protocol(NamedTuple):
    """How the workers agree. The defaults are the code; anything else is a fault."""

    votes_together: bool = True  # whether a vote asks all workers
    asks_first: bool = True  # whether `stop_asked` is set before the variable `stop`
    leaves_data: bool = True  # whether a worker that waits for data ends some time after a signal
    hears_of_ends: bool = True  # whether a collective fails when a member's process has ended


AS_IS = Protocol()


def model(
    workers: int, protocol: Protocol = AS_IS, *, signalled: int = 1, blocks: int = 0
) -> Model:
    """Returns the model.

    Args:
        workers: number of workers.
        protocol: how they agree.
        signalled: how many of them, from the first on, receive the signal.
        blocks: how many workers may wait for data that does not come.
    """

    def actions(world: World) -> Iterator[tuple[str, World]]:
        for number in range(signalled):
            yield from signal(world, number, protocol)
        yield from met(world, protocol)
        for number, worker in enumerate(world.workers):
            if not worker.ended and not worker.waits:
                yield from alone(world, number, protocol)

    claims = {
        "all that are saved are saved at one step": lambda world: (
            len({each.step for each in world.workers if each.ended in {"saved", "finished"}}) <= 1
        ),
        "a worker leaves only with the others": lambda world: (
            not all(each.ended for each in world.workers)
            or len({each.ended in {"saved", "finished"} for each in world.workers}) == 1
        ),
        "at most one step is taken after the signal": lambda world: (
            world.step is None or max(each.step for each in world.workers) <= world.step + 1
        ),
    }
    start = World((Worker(),) * workers, (0,) * workers, blocks=blocks)
    return Model([start], actions, claims, lambda world: all(each.ended for each in world.workers))


def with_worker(world: World, number: int, worker: Worker) -> World:
    """Returns the world with another state of a worker."""
    workers = (*world.workers[:number], worker, *world.workers[number + 1 :])
    return world._replace(workers=workers)


def signal(world: World, number: int, protocol: Protocol) -> Iterator[tuple[str, World]]:
    """Yields what the signal's thread of a worker does."""
    worker, count = world.workers[number], world.signals[number]
    if count == 2 or worker.ended:
        return
    flag = ("asked", "stop")[count if protocol.asks_first else 1 - count]
    who = f"SIGTERM reaches worker {number}; its" if count == 0 else f"worker {number}'s"
    after = with_worker(world, number, worker._replace(**{flag: True}))
    signals = (*world.signals[:number], count + 1, *world.signals[number + 1 :])
    first = world.step is None and count == 1
    step = max(each.step for each in world.workers) if first else world.step
    told = f"{who} thread sets {'stop_asked' if flag == 'asked' else 'stop'}"
    yield told, after._replace(signals=signals, step=step)


def alone(world: World, number: int, protocol: Protocol) -> Iterator[tuple[str, World]]:
    """Yields what a worker does by itself."""
    worker, who = world.workers[number], f"worker {number}"
    if worker.at == "next":
        if worker.blocked:
            if protocol.leaves_data and world.signals[number] == 2:
                told = f"{who} has waited for data too long since the signal, and ends"
                yield told, with_worker(world, number, worker._replace(ended="unsaved"))
            elif ended_elsewhere(world, number) and protocol.hears_of_ends:
                told = f"{who} hears that another worker has ended, and ends"
                yield told, with_worker(world, number, worker._replace(ended="lost"))
            return
        if world.blocks:
            after = world._replace(blocks=world.blocks - 1)
            told = f"the data of {who} stops coming"
            yield told, with_worker(after, number, worker._replace(blocked=True))
        told = f"{who} has a batch"
        yield told, with_worker(world, number, worker._replace(at="train_step"))
    elif worker.at in {VOTE_INSIDE, VOTE_OUTSIDE}:
        vote = worker.stop if worker.at == VOTE_INSIDE else worker.asked
        told = f"{who} votes to {'stop' if vote else 'go on'} in {worker.at}"
        yield told, with_worker(world, number, worker._replace(waits=True, vote=vote))
    else:
        told = f"{who} reaches {worker.at}"
        yield told, with_worker(world, number, worker._replace(waits=True))


def ended_elsewhere(world: World, number: int) -> bool:
    """Returns whether another worker's process has ended without the others."""
    others = [each for at, each in enumerate(world.workers) if at != number]
    return any(each.ended in {"unsaved", "lost"} for each in others)


def met(world: World, protocol: Protocol) -> Iterator[tuple[str, World]]:
    """Yields what comes of a collective: all are in it, or a member has ended."""
    waiting = [each for each in world.workers if each.waits]
    if len(waiting) == len(world.workers) and len({each.at for each in waiting}) == 1:
        place = waiting[0].at
        stop = any(each.vote for each in waiting)
        workers = tuple(
            passed(each, stop=stop if protocol.votes_together else each.vote)
            for each in world.workers
        )
        yield f"all meet in {place}", world._replace(workers=workers)
    elif waiting and protocol.hears_of_ends:
        for number, worker in enumerate(world.workers):
            if worker.waits and any(each.ended for each in world.workers):
                told = f"worker {number} hears that another worker has ended, and ends"
                yield told, with_worker(world, number, worker._replace(waits=False, ended="lost"))


def passed(worker: Worker, *, stop: bool) -> Worker:
    """Returns a worker after a collective: what `_run` and `run_steps` do next."""
    worker = worker._replace(waits=False, vote=False)
    if worker.at == VOTE_OUTSIDE:
        done = stop or worker.step == TARGET
        return worker._replace(at="save" if done else VOTE_INSIDE, taken=0)
    if worker.at == VOTE_INSIDE:
        over = stop or worker.taken == STEPS_PER_LOOP or worker.step == TARGET
        return worker._replace(at=VOTE_OUTSIDE if over else "next")
    if worker.at == "train_step":
        return worker._replace(at=VOTE_INSIDE, step=worker.step + 1, taken=worker.taken + 1)
    ended = "finished" if worker.step == TARGET else "saved"
    return worker._replace(saved=worker.step, ended=ended)


def searched(workers: int, signalled: int, blocks: int) -> Callable[[], Model]:
    """Returns a function that returns the model of the code."""
    return lambda: model(workers, signalled=signalled, blocks=blocks)


BOUNDS = {
    f"{workers} workers, {signalled} signalled, {blocks} without data": searched(
        workers, signalled, blocks
    )
    for workers, signalled, blocks in ((2, 1, 0), (2, 2, 2), (3, 1, 0), (3, 3, 3))
}
FAULTS: dict[str, Callable[[], Model]] = {
    "each worker votes alone": lambda: model(2, Protocol(votes_together=False)),
    "the graph hears of the stop first": lambda: model(2, Protocol(asks_first=False)),
    "data that stops is waited for": lambda: model(
        2, Protocol(leaves_data=False), signalled=2, blocks=1
    ),
    "nobody hears that another has ended": lambda: model(
        2, Protocol(hears_of_ends=False), signalled=2, blocks=1
    ),
}
