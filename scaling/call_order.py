"""Checks the order in which a `LossScaler` is called: scale, unscale, update.

Calls are tracked separately for each place: one replica in one function, in one branch of a
condition, or in eager mode. Tracing runs Python code once per graph and replica, so a wrong order
is detected when a function is traced, and the check costs nothing when the function runs.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from scaling.base.traced_graphs import BRANCH, FUNCTION, LOOP, current_graph, graphs_around, kind_of
from scaling.base.types import RuleState


class Token:
    """Connects one call of `LossScaler.scale` with the matching call of `unscale`.

    Attributes:
        state: the rule's state at the time of the call, with the scale that multiplied the loss.
        order: the record of the scaler's calls.
        place: the function and replica in which `scale` was called.
        graph: the graph in which it was called, which may be the body of a loop; None eagerly.
        used: whether the token has been passed to `unscale`.

    Example:
        >>> import scaling
        >>> _, token = scaling.LossScaler(scaling.FixedLossScale(8.0)).scale(tf.constant(1.0))
        >>> float(token.loss_scale)
        8.0
    """

    def __init__(self, state: RuleState, order: "CallOrder", place: "Place", graph: Any) -> None:
        """Stores the arguments. Only `CallOrder.record_scale` creates tokens."""
        self.state = state
        self.order = order
        self.place = place
        self.graph = graph
        self.used = False

    @property
    def loss_scale(self) -> tf.Tensor:
        """Shape (), float32: the scale that multiplied the loss."""
        return self.state.loss_scale


class Place:
    """Counts the calls since the last update, in one function or branch and on one replica.

    Attributes:
        scaled: number of calls of `scale`.
        unscaled: number of calls of `unscale`.
    """

    def __init__(self) -> None:
        """Sets both counts to zero, as after an update."""
        self.clear()

    def clear(self) -> None:
        """Forgets the calls."""
        self.scaled = 0
        self.unscaled = 0
        # Weak: a place is kept as long as the graph of its function lives.
        self._around: list[weakref.ref[Any]] = []

    def note_unscale(self) -> None:
        """Counts a call of `unscale`, and remembers in which loops it is."""
        self.unscaled += 1
        self._around = [weakref.ref(graph) for graph in graphs_around(current_graph())]

    def unscaled_in(self, graph: Any) -> bool:
        """Returns whether the last `unscale` was called in a graph, or in a loop of it.

        Args:
            graph: a graph of the same function; None in eager mode.
        """
        return graph is None or any(around() is graph for around in self._around)


class CallOrder:
    """Tracks one scaler's calls and raises an error if they come out of order."""

    def __init__(self) -> None:
        """Creates an empty record of calls."""
        self._eager: dict[int | None, Place] = {}
        self._graphs: weakref.WeakKeyDictionary[Any, dict[int | None, Place]] = (
            weakref.WeakKeyDictionary()
        )

    def record_scale(self, state: RuleState) -> Token:
        """Records a call of `scale` and returns its token."""
        place = self._by_replica().setdefault(replica_id(), Place())
        place.scaled += 1
        return Token(state, self, place, current_graph())

    def record_unscale(self, token: Token) -> RuleState:
        """Records a call of `unscale` and returns the state that the token holds.

        Raises:
            TypeError: if `token` is not a token.
            ValueError: if the token is from another scaler, graph or replica, or was used before,
                or is used in a loop that `scale` was called outside of.
        """
        if not isinstance(token, Token):
            raise TypeError(
                f"`token` must be the token that `scale` returned; got {type(token).__name__}. A "
                "token holds the scale that multiplied the loss. Call `scale` first, and pass its "
                "token."
            )
        if token.order is not self:
            raise ValueError(
                "`token` must come from this scaler; got one from another scaler. The two scalers "
                "may have different scales. Call `unscale` on the scaler whose `scale` returned "
                "the token."
            )
        if token.place is not self._by_replica().get(replica_id()):
            raise ValueError(
                "`token` must be used in the function that called `scale`; got one from another "
                "graph or replica, or from before `reset`. The loss scale may have moved since. "
                "Call `scale` and `unscale` in the same function, and in the same branch of it."
            )
        if token.used:
            raise ValueError(
                "`token` must be used only once; got a token that was used before. Gradients must "
                "not be unscaled twice. Call `scale` once for each `unscale`."
            )
        if token.graph is not current_graph():
            raise ValueError(
                "`token` must be used where `scale` was called; got one from outside of this loop. "
                "The loop would divide gradients by the scale of one loss many times. Call `scale` "
                "and `unscale` together, both inside the loop or both outside."
            )
        token.used = True
        token.place.note_unscale()
        return token.state

    def check_complete(self) -> None:
        """Checks that `update` may be called now.

        Raises:
            RuntimeError: if nothing was unscaled since the last update, if a scaled loss has not
                been unscaled, or in a loop or branch that `unscale` was called outside of.
        """
        graph, places = current_graph(), self._own_places()
        for place in places:
            if place.scaled > place.unscaled:
                raise RuntimeError(
                    f"`update` must come after every `unscale`; got {place.scaled} calls of "
                    f"`scale` and {place.unscaled} of `unscale` since the last update. The scale "
                    "must not move before all gradients are unscaled. Call `unscale` once for each "
                    "`scale`, or call `reset` after a step that was abandoned."
                )
        if self._has_calls_in_branches(graph):
            raise RuntimeError(IN_A_BRANCH.format("`scale` in a branch that `update` comes after"))
        # Do not raise an error in a function without any recorded calls: an inner function may
        # have called both `scale` and `unscale`. In eager mode, every call outside functions is
        # recorded.
        if graph is not None and not places:
            if any(kind_of(each) == BRANCH for each in graphs_around(graph)):
                raise RuntimeError(IN_A_BRANCH.format("`update` alone in a branch"))
            return
        last = [place for place in places if place.unscaled]
        if not last:
            raise RuntimeError(
                "`update` must come after `scale` and `unscale`; got neither since the last update "
                "in this graph and on this replica. Each step moves the scale once. Call `scale`, "
                "`unscale` and `update` in this order, in the same function."
            )
        if not all(place.unscaled_in(graph) for place in last):
            raise RuntimeError(
                "`update` must not be called in a loop if `unscale` was called outside; got such a "
                "call. It would move the scale in every turn, for one step. Call `update` after "
                "the loop, or all three inside."
            )

    def record_update(self) -> None:
        """Records a call of `update`: the counts start again from zero."""
        for place in self._own_places():
            place.clear()

    def reset(self) -> None:
        """Forgets the calls in this graph and on this replica; their tokens become invalid."""
        places = self._by_replica()
        for number in self._own_replicas():
            places.pop(number, None)

    def _by_replica(self) -> dict[int | None, Place]:
        """Returns the places of what is being traced, or of eager mode, by replica."""
        graph = current_graph()
        return self._eager if graph is None else self._graphs.setdefault(around_loops(graph), {})

    def _own_replicas(self) -> list[int | None]:
        """Returns the replicas that a call is about: the calling one, or all outside of them."""
        context = tf.distribute.get_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            return [replica_id()]
        return [*self._by_replica()]

    def _own_places(self) -> list[Place]:
        """Returns the places that a call of `update` is about."""
        places = self._by_replica()
        return [places[number] for number in self._own_replicas() if number in places]

    def _has_calls_in_branches(self, graph: Any) -> bool:
        """Returns whether branches inside a graph have calls that no `update` there has followed.

        Args:
            graph: a graph that is being traced; None in eager mode.
        """
        return graph is not None and any(
            place.scaled
            for inner, places in self._graphs.items()
            if kind_of(inner) == BRANCH and graph in graphs_in_function(inner.outer_graph)
            for place in places.values()
        )


IN_A_BRANCH = (
    "`update` must be in the same branch as `scale` and `unscale`, or all three outside of "
    "branches; got {}. A branch is tf.cond, or an `if` on a tensor: both sides are traced, and "
    "only one runs. Move the calls together; `update` takes the verdict as its argument, so it "
    "needs no branch."
)


def replica_id() -> int | None:
    """Returns the number of the calling replica.

    The result is None in cross-replica context, and on TPUs, where all replicas run one program.
    """
    context = tf.distribute.get_replica_context()
    number = context and tf.get_static_value(context.replica_id_in_sync_group)
    return None if number is None else int(number)


def around_loops(graph: Any) -> Any:
    """Returns the graph of the innermost function or branch, of which a loop's body is a part.

    Whether an inner function is traced at its first call or was traced before must make no
    difference, so its calls are its own.
    """
    return next(each for each in graphs_around(graph) if kind_of(each) != LOOP)


def graphs_in_function(graph: Any) -> Sequence[Any]:
    """Returns a graph, and those around it up to that of the innermost function."""
    found = []
    for each in graphs_around(graph):
        found.append(each)
        if kind_of(each) == FUNCTION:
            break
    return found
