"""Checks the order in which a `LossScaler` is called: scale, unscale, update.

Calls are tracked separately for each place: one replica in one graph, or in eager mode. Tracing
runs Python code once per graph and replica, so a wrong order is detected when a function is
traced, and the check costs nothing when the function runs.
"""

import weakref
from typing import Any

import tensorflow as tf

from scaling.base.types import RuleState


class Token:
    """Connects one call of `LossScaler.scale` with the matching call of `unscale`.

    Attributes:
        state: the rule's state at the time of the call, with the scale that multiplied the loss.
        order: the record of the scaler's calls.
        place: the graph and replica in which `scale` was called.
        used: whether the token has been passed to `unscale`.

    Example:
        >>> import scaling
        >>> _, token = scaling.LossScaler(scaling.FixedLossScale(8.0)).scale(tf.constant(1.0))
        >>> float(token.loss_scale)
        8.0
    """

    def __init__(self, state: RuleState, order: "CallOrder", place: "Place") -> None:
        """Stores the arguments. Only `CallOrder.record_scale` creates tokens."""
        self.state = state
        self.order = order
        self.place = place
        self.used = False

    @property
    def loss_scale(self) -> tf.Tensor:
        """Shape (), float32: the scale that multiplied the loss."""
        return self.state.loss_scale


class Place:
    """Counts the calls since the last update, in one graph and on one replica."""

    def __init__(self) -> None:
        """Sets both counts to zero, as after an update."""
        self.scaled = 0
        self.unscaled = 0


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
        place = self._places("scale").setdefault(replica_id(), Place())
        place.scaled += 1
        return Token(state, self, place)

    def record_unscale(self, token: Token) -> RuleState:
        """Records a call of `unscale` and returns the state that the token holds.

        Raises:
            TypeError: if `token` is not a token.
            ValueError: if the token is from another scaler, graph or replica, or was used before.
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
        if token.place is not self._places("unscale").get(replica_id()):
            raise ValueError(
                "`token` must be used in the function that called `scale`; got one from another "
                "graph or replica, or from before `reset`. The loss scale may have moved since. "
                "Call `scale` and `unscale` in the same function."
            )
        if token.used:
            raise ValueError(
                "`token` must be used only once; got a token that was used before. Gradients must "
                "not be unscaled twice. Call `scale` once for each `unscale`."
            )
        token.used = True
        token.place.unscaled += 1
        return token.state

    def check_complete(self) -> None:
        """Checks that `update` may be called now.

        Raises:
            RuntimeError: if nothing was unscaled since the last update, or a scaled loss has not
                been unscaled.
        """
        place = self._places("update").get(replica_id())
        if place and place.scaled > place.unscaled:
            raise RuntimeError(
                f"`update` must come after every `unscale`; got {place.scaled} calls of `scale` "
                f"and {place.unscaled} of `unscale` since the last update. The scale must not move "
                "before all gradients are unscaled. Call `unscale` once for each `scale`, or call "
                "`reset` after a step that was abandoned."
            )
        # Do not raise an error in a graph without any recorded calls: an inner function that was
        # traced earlier may have called both `scale` and `unscale`. In eager mode, every call
        # outside functions is recorded.
        if place is None and not tf.executing_eagerly():
            return
        if place is None or not place.unscaled:
            raise RuntimeError(
                "`update` must come after `scale` and `unscale`; got neither since the last update "
                "in this graph and on this replica. Each step moves the scale once. Call `scale`, "
                "`unscale` and `update` in this order, in the same function."
            )

    def record_update(self) -> None:
        """Records a call of `update`: the counts start again from zero."""
        places = self._places("update")
        if replica_id() in places:
            places[replica_id()].scaled = places[replica_id()].unscaled = 0

    def reset(self) -> None:
        """Forgets the calls in this graph and on this replica; their tokens become invalid."""
        self._places("reset").pop(replica_id(), None)

    def _places(self, call: str) -> dict[int | None, Place]:
        """Returns the places of the graph that is being traced, or of eager mode, by replica.

        Args:
            call: the name of the method that was called, for errors.
        """
        if tf.executing_eagerly():
            return self._eager
        graph = function_graph(tf.compat.v1.get_default_graph(), call)
        return self._graphs.setdefault(graph, {})


def replica_id() -> int | None:
    """Returns the number of the calling replica.

    The result is None in cross-replica context, and on TPUs, where all replicas run one program.
    """
    context = tf.distribute.get_replica_context()
    number = context and tf.get_static_value(context.replica_id_in_sync_group)
    return None if number is None else int(number)


def function_graph(graph: Any, call: str) -> Any:
    """Returns the outermost function graph, so that a loop's body counts as part of its function.

    Only function graphs have an `outer_graph`. A branch can be recognized only by the name of
    its graph's class.

    Args:
        graph: the graph that is being traced.
        call: the name of the method that was called, for errors.

    Raises:
        RuntimeError: inside a branch.
    """
    while True:
        if type(graph).__name__ == "CondBranchFuncGraph":
            raise RuntimeError(
                f"`{call}` must be called outside a branch; got a call inside tf.cond, or inside "
                "an `if` on a tensor. Both branches are traced, but only one runs. Call it before "
                "or after the branch; `update` takes the flag as its argument."
            )
        if not hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
            return graph
        graph = graph.outer_graph
