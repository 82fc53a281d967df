"""The verdict of several replicas, in both places where it may be decided.

A step attempts its update groups in turn. Each replica computes its part, meets the others in one
sum, unscales and judges what came out, and then applies the group or does not. On most strategies,
the decision stands between two programs of the replicas (`attempt.py`); on a TPU, each replica
decides inside of its program (`update_in_replicas`). Applying meets the others again, because
statistics are averaged. A fault, which is a value that is not finite, may arise once, anywhere.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from proofs.protocols.search import Model

GROUPS = 2
PASSES = ("run_model", "sum_over_replicas", "unscale_gradients", "judge")  # of `replica_step`
PLACES = ("forward", "backward", "sum", "unscaling")
BARRIERS = {"sum_over_replicas", "average"}


class Fault(NamedTuple):
    """Where a value that is not finite arises, if it does."""

    place: str = "nowhere"
    group: int = 0
    replica: int = 0


class Replica(NamedTuple):
    """One replica."""

    at: str = PASSES[0]  # what it does next: one of PASSES, "decide", "apply", "average", "done"
    group: int = 0
    waits: bool = False  # whether it is in a collective
    loss: bool = True  # whether its loss is finite; after the sum, whether all are
    gradients: bool = True  # the same of its gradients
    verdict: bool = True
    applied: int = 0  # groups


class World(NamedTuple):
    """All replicas, and the fault."""

    replicas: tuple[Replica, ...]
    fault: Fault


class Protocol(NamedTuple):
    """How the replicas agree. The defaults are the code; anything else is a fault."""

    inside: bool = False  # whether each replica decides for itself
    judges: str = "sums"  # "own": what it computed itself, before the sum
    loss_counts: bool = True  # whether the losses are summed, too
    same_bits: bool = True  # whether equal values are unscaled to equal values on all replicas


AS_IS = Protocol()


def model(replicas: int, protocol: Protocol = AS_IS) -> Model:
    """Returns the model for a number of replicas."""
    faults = [
        Fault(place, group, replica)
        for place in PLACES
        for group in range(GROUPS)
        for replica in range(replicas)
    ]
    starts = [World((Replica(),) * replicas, fault) for fault in [Fault(), *faults]]

    def actions(world: World) -> Iterator[tuple[str, World]]:
        yield from together(world, protocol)
        for number, replica in enumerate(world.replicas):
            if not replica.waits and replica.at not in {"done", "waits for the verdict"}:
                yield alone(world, number, protocol)

    claims = {
        "no replica applies alone": lambda world: (
            not finished(world) or len({each.applied for each in world.replicas}) == 1
        ),
        "nothing that is not finite is applied": lambda world: (
            world.fault.place == "nowhere"
            or all(each.applied <= world.fault.group for each in world.replicas)
        ),
        "a step without a fault is applied": lambda world: (
            not finished(world)
            or world.fault.place != "nowhere"
            or all(each.applied == GROUPS for each in world.replicas)
        ),
    }
    return Model(starts, actions, claims, finished)


def finished(world: World) -> bool:
    """Returns whether every replica has ended the step."""
    return all(each.at == "done" for each in world.replicas)


def with_replica(world: World, number: int, replica: Replica) -> World:
    """Returns the world with another state of a replica."""
    replicas = (*world.replicas[:number], replica, *world.replicas[number + 1 :])
    return world._replace(replicas=replicas)


def alone(world: World, number: int, protocol: Protocol) -> tuple[str, World]:
    """Returns what a replica does by itself: a sentence, and the world after it."""
    replica, fault = world.replicas[number], world.fault
    hit = fault.group == replica.group and fault.replica == number
    who = f"replica {number}"
    if replica.at in BARRIERS:
        told, after = f"{who} waits in {replica.at}", replica._replace(waits=True)
    elif replica.at == "run_model":
        loss = not (hit and fault.place == "forward")
        gradients = not (hit and fault.place == "backward")
        found = "finds finite values" if loss and gradients else f"finds an inf, {fault.place}"
        told = f"{who} {found}"
        after = replica._replace(at="sum_over_replicas", loss=loss, gradients=gradients)
    elif replica.at == "unscale_gradients":
        here = fault.place == "unscaling" and fault.group == replica.group
        fine = replica.gradients and not (here and (protocol.same_bits or hit))
        told = f"{who} unscales" + ("" if fine else ", and has an inf")
        after = replica._replace(at="judge", gradients=fine)
    elif replica.at == "judge":
        verdict = (
            replica.verdict if protocol.judges == "own" else replica.loss and replica.gradients
        )
        told = f"{who} judges: {'finite' if verdict else 'not finite'}"
        place = "decide" if protocol.inside else "waits for the verdict"
        after = replica._replace(at=place, verdict=verdict)
    elif replica.at == "decide":
        told = f"{who} {'will apply' if replica.verdict else 'skips'} group {replica.group}"
        after = replica._replace(at="apply" if replica.verdict else "done")
    else:
        told = f"{who} applies group {replica.group}"
        after = replica._replace(at="average", applied=replica.applied + 1)
    return told, with_replica(world, number, after)


def together(world: World, protocol: Protocol) -> Iterator[tuple[str, World]]:
    """Yields what happens to all replicas at once: a collective, or a decision outside of them."""
    places = {each.at for each in world.replicas}
    if all(each.waits for each in world.replicas) and len(places) == 1:
        if places == {"sum_over_replicas"}:
            yield "all meet in the sum", summed(world, protocol)
        else:
            yield "all meet in the average", world._replace(replicas=averaged(world))
    if places == {"waits for the verdict"}:
        verdict = world.replicas[0].verdict
        told = f"the verdict of replica 0 counts: all {'apply' if verdict else 'skip'}"
        place = "apply" if verdict else "done"
        replicas = tuple(each._replace(at=place) for each in world.replicas)
        yield told, world._replace(replicas=replicas)


def summed(world: World, protocol: Protocol) -> World:
    """Returns the world after the sum, which is finite only if all that was added is."""
    loss = all(each.loss for each in world.replicas)
    overflows = world.fault.place == "sum" and world.fault.group == world.replicas[0].group
    gradients = all(each.gradients for each in world.replicas) and not overflows

    def after(own: Replica) -> Replica:
        return own._replace(
            at="unscale_gradients",
            waits=False,
            verdict=own.loss and own.gradients,  # before the sum; see `judges`
            loss=loss if protocol.loss_counts else own.loss,
            gradients=gradients,
        )

    return world._replace(replicas=tuple(after(each) for each in world.replicas))


def averaged(world: World) -> tuple[Replica, ...]:
    """Returns the replicas at the next group, or at the end."""
    return tuple(
        each._replace(at=PASSES[0], waits=False, group=each.group + 1, loss=True, gradients=True)
        if each.group + 1 < GROUPS
        else each._replace(at="done", waits=False)
        for each in world.replicas
    )


def searched(replicas: int, *, inside: bool) -> Callable[[], Model]:
    """Returns a function that returns the model of the code."""
    return lambda: model(replicas, Protocol(inside=inside))


BOUNDS = {
    f"{replicas} replicas, {'inside' if inside else 'outside'}": searched(replicas, inside=inside)
    for inside in (False, True)
    for replicas in (1, 2, 3)
}
FAULTS: dict[str, Callable[[], Model]] = {
    "the verdict is from before the sum": lambda: model(2, Protocol(judges="own")),
    "each replica follows a verdict from before the sum": lambda: model(
        2, Protocol(judges="own", inside=True)
    ),
    "the losses are not summed": lambda: model(2, Protocol(loss_counts=False)),
    "each replica follows its own loss": lambda: model(2, Protocol(loss_counts=False, inside=True)),
    "replicas unscale to different bits": lambda: model(2, Protocol(same_bits=False)),
    "replicas unscale to different bits, and decide": lambda: model(
        2, Protocol(same_bits=False, inside=True)
    ),
}
