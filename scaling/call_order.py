"""In which order a `LossScaler` is called: scale, unscale, update; once each, in one place.

A place is a graph, or eager mode, and a replica in it. Tracing runs Python once per graph and
replica, so a wrong order is found when a function is traced, at no cost when it runs.
"""

import weakref
from typing import Any

import tensorflow as tf


class Token:
    """What one call of `LossScaler.scale` hands to the one call of `unscale` that belongs to it.

    Attributes:
        state: the rule's state at the time of the call: the scale that multiplied the loss.
        order: the scaler's record of calls.
        place: where in it the call was made.
        used: whether `unscale` has taken it.

    Example:
        >>> import scaling
        >>> _, token = scaling.LossScaler(scaling.FixedLossScale(8.0)).scale(tf.constant(1.0))
        >>> float(token.loss_scale)
        8.0
    """

    def __init__(self, state: Any, order: "CallOrder", place: "Place") -> None:
        """Made by `CallOrder.opened` alone."""
        self.state = state
        self.order = order
        self.place = place
        self.used = False

    @property
    def loss_scale(self) -> tf.Tensor:
        """The scale that multiplied the loss: shape (), float32."""
        return self.state.loss_scale


class Place:
    """What has happened since the last update in one graph, on one replica."""

    def __init__(self) -> None:
        """Starts as if an update had just been."""
        self.scaled = 0
        self.unscaled = 0


class CallOrder:
    """Tracks one scaler's calls, and refuses those that come out of order."""

    def __init__(self) -> None:
        """Has seen nothing yet."""
        self._eager: dict[int | None, Place] = {}
        self._graphs: weakref.WeakKeyDictionary[Any, dict[int | None, Place]] = (
            weakref.WeakKeyDictionary()
        )

    def opened(self, state: Any) -> Token:
        """Returns a new token: `scale` was called."""
        place = self._places("scale").setdefault(replica(), Place())
        place.scaled += 1
        return Token(state, self, place)

    def closed(self, token: Token) -> Any:
        """Returns the token's state: `unscale` was called.

        Raises:
            TypeError: if it is no token.
            ValueError: if it is another scaler's, another place's, or was used before.
        """
        if not isinstance(token, Token):
            raise TypeError(
                f"`token` must be what `scale` returned; got {type(token).__name__}. It holds the "
                "scale that multiplied the loss. Call `scale` first."
            )
        if token.order is not self:
            raise ValueError(
                "`token` must come from this scaler; got one of another scaler. The two may stand "
                "at different scales. Call `unscale` on the scaler whose `scale` returned it."
            )
        if token.place is not self._places("unscale").get(replica()):
            raise ValueError(
                "`token` must be used where it was made; got one from another graph or replica, "
                "or from before `reset`. The loss scale may have moved in between. Call `scale` "
                "first, in the same function as `unscale`."
            )
        if token.used:
            raise ValueError(
                "`token` must be used once; got one that was used before. Its gradients would be "
                "divided twice. Call `scale` first, for each `unscale`."
            )
        token.used = True
        token.place.unscaled += 1
        return token.state

    def check_complete(self) -> None:
        """Refuses an `update` that comes too early, or twice.

        Raises:
            RuntimeError: if nothing was unscaled since the last update, or not everything.
        """
        place = self._places("update").get(replica())
        if place and place.scaled > place.unscaled:
            raise RuntimeError(
                f"`update` must come after every `unscale`; got {place.scaled} scaled losses and "
                f"{place.unscaled} unscaled. The scale would move under the others. Call `unscale` "
                "first, once for each `scale`; or `reset`, if a step was given up."
            )
        # In a graph that has seen none, an inner function that was traced before may have done
        # both; eager mode sees every call but those inside functions.
        if place is None and not tf.executing_eagerly():
            return
        if place is None or not place.unscaled:
            raise RuntimeError(
                "`update` must come after `scale` and `unscale`; got neither since the last update "
                "in this graph, on this replica. A step moves the scale once. Call `scale` first, "
                "then `unscale`, in the same function as `update`."
            )

    def finished(self) -> None:
        """Starts over: `update` has moved the scale, or a step was given up."""
        places = self._places("update")
        if replica() in places:
            places[replica()].scaled = places[replica()].unscaled = 0

    def reset(self) -> None:
        """Forgets this place, and with it the tokens that were made here."""
        self._places("reset").pop(replica(), None)

    def _places(self, call: str) -> dict[int | None, Place]:
        """Returns the places of the graph that is being traced, or of eager mode."""
        if tf.executing_eagerly():
            return self._eager
        graph = function_graph(tf.compat.v1.get_default_graph(), call)
        return self._graphs.setdefault(graph, {})


def replica() -> int | None:
    """Returns the number of the replica that is calling.

    None in cross-replica context, and where one program serves all replicas.
    """
    context = tf.distribute.get_replica_context()
    number = context and tf.get_static_value(context.replica_id_in_sync_group)
    return None if number is None else int(number)


def function_graph(graph: Any, call: str) -> Any:
    """Returns the outermost function graph: a loop's body is part of its function.

    `outer_graph` is what TensorFlow's function graphs have and plain graphs have not; that a
    graph is a branch, only the name of its class tells.

    Raises:
        RuntimeError: inside a branch.
    """
    while True:
        if type(graph).__name__ == "CondBranchFuncGraph":
            raise RuntimeError(
                f"`{call}` must be called outside a branch; got called inside a tf.cond, or an "
                "`if` on a tensor. Both branches are traced, and only one runs. Call it before or "
                "after the branch; `update` takes the flag itself."
            )
        if not hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
            return graph
        graph = graph.outer_graph
