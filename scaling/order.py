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

    @property
    def loss_scale(self) -> tf.Tensor:
        """The scale that multiplied the loss: shape (), float32."""
        return self.state.loss_scale


class Place:
    """What has happened since the last update in one graph, on one replica."""

    def __init__(self) -> None:
        """Starts as if an update had just been."""
        # Weakly: a token that nobody holds any more belongs to an attempt that was given up.
        self.waiting: weakref.WeakSet[Token] = weakref.WeakSet()
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
        place = self._here()
        token = Token(state, self, place)
        place.waiting.add(token)
        return token

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
        place = self._here()
        if token.order is not self:
            raise ValueError(
                "`token` must come from this scaler; got one of another scaler. The two may stand "
                "at different scales. Call `unscale` on the scaler whose `scale` returned it."
            )
        if token.place is not place:
            raise ValueError(
                "`token` must be used where it was made; got one from another graph or replica. "
                "The loss scale may have moved in between. Call `scale` first, in the same "
                "function as `unscale`."
            )
        if token not in place.waiting:
            raise ValueError(
                "`token` must be used once; got one that was used before. Its gradients would be "
                "divided twice. Call `scale` first, for each `unscale`."
            )
        place.waiting.discard(token)
        place.unscaled += 1
        return token.state

    def finished(self) -> None:
        """Starts over: `update` was called.

        Raises:
            RuntimeError: if nothing was unscaled since the last update, or not everything.
        """
        place = self._here()
        if place.waiting:
            raise RuntimeError(
                f"`update` must come after every `unscale`; got {len(place.waiting)} scaled losses "
                "whose gradients were not unscaled. The scale would move under them. Call "
                "`unscale` first, once for each `scale`."
            )
        if not place.unscaled:
            raise RuntimeError(
                "`update` must come after `scale` and `unscale`; got neither since the last update "
                "in this graph, on this replica. A step moves the scale once. Call `scale` first, "
                "then `unscale`, in the same function as `update`."
            )
        place.unscaled = 0

    def _here(self) -> Place:
        """Returns the place of the call that is being made."""
        places = self._eager
        if not tf.executing_eagerly():
            graph = outermost(tf.compat.v1.get_default_graph())
            places = self._graphs.setdefault(graph, {})
        return places.setdefault(replica(), Place())


def replica() -> int | None:
    """Returns the number of the replica that is calling.

    None in cross-replica context, and where one program serves all replicas.
    """
    context = tf.distribute.get_replica_context()
    number = context and tf.get_static_value(context.replica_id_in_sync_group)
    return None if number is None else int(number)


def outermost(graph: Any) -> Any:
    """Returns the function graph that a graph is nested in: a loop's body is part of its function.

    `outer_graph` is what TensorFlow's function graphs have and plain graphs have not.
    """
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    return graph
