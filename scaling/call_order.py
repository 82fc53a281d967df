"""Checks the order in which a `LossScaler` is called: scale, unscale, update.

Calls are tracked separately for each place: one replica in one graph, or in eager mode. Tracing
runs Python code once per graph and replica, so a wrong order is detected when a function is
traced, and the check costs nothing when the function runs.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

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
    """Counts the calls since the last update, in one function and on one replica.

    Attributes:
        scaled: number of calls of `scale`.
        unscaled: number of calls of `unscale`.
        graph: the graph of the last call of `unscale` since the last update; None eagerly.
    """

    def __init__(self) -> None:
        """Sets both counts to zero, as after an update."""
        self.scaled = 0
        self.unscaled = 0
        self.graph: Any = None


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
        if token.graph is not current_graph():
            raise ValueError(
                "`token` must be used where `scale` was called; got one from outside of this loop. "
                "The loop would divide gradients by the scale of one loss many times. Call `scale` "
                "and `unscale` together, both inside the loop or both outside."
            )
        token.used = True
        token.place.unscaled += 1
        token.place.graph = token.graph
        return token.state

    def check_complete(self) -> None:
        """Checks that `update` may be called now.

        Raises:
            RuntimeError: if nothing was unscaled since the last update, if a scaled loss has not
                been unscaled, or in a loop that `unscale` was called outside of.
        """
        place = self._places("update").get(replica_id())
        if place and place.scaled > place.unscaled:
            raise RuntimeError(
                f"`update` must come after every `unscale`; got {place.scaled} calls of `scale` "
                f"and {place.unscaled} of `unscale` since the last update. The scale must not move "
                "before all gradients are unscaled. Call `unscale` once for each `scale`, or call "
                "`reset` after a step that was abandoned."
            )
        # Do not raise an error in a function without any recorded calls: an inner function may
        # have called both `scale` and `unscale`. In eager mode, every call outside functions is
        # recorded.
        if place is None and not tf.executing_eagerly():
            return
        if place is None or not place.unscaled:
            raise RuntimeError(
                "`update` must come after `scale` and `unscale`; got neither since the last update "
                "in this graph and on this replica. Each step moves the scale once. Call `scale`, "
                "`unscale` and `update` in this order, in the same function."
            )

        if not encloses(current_graph(), place.graph):
            raise RuntimeError(
                "`update` must not be called in a loop if `unscale` was called outside; got such a "
                "call. It would move the scale in every turn, for one step. Call `update` after "
                "the loop, or all three inside."
            )

    def record_update(self) -> None:
        """Records a call of `update`: the counts start again from zero."""
        places = self._places("update")
        place = places.get(replica_id())
        if place:
            place.scaled = place.unscaled = 0
            place.graph = None  # it would keep its own key in `_graphs` alive

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


LOOPS = "WhileBodyFuncGraph", "WhileCondFuncGraph"  # the classes of a loop's graphs
BRANCH = "CondBranchFuncGraph"  # the class of a branch's graph


def function_graph(graph: Any, call: str) -> Any:
    """Returns the graph of the innermost function, of which a loop's body is a part.

    Whether an inner function is traced at its first call or was traced before must make no
    difference, so its calls are its own. Loops and branches can be recognized only by the names of
    their graphs' classes.

    Args:
        graph: the graph that is being traced.
        call: the name of the method that was called, for errors.

    Raises:
        RuntimeError: inside a branch.
    """
    function = graph
    while type(function).__name__ in LOOPS:
        function = function.outer_graph
    for outer in graphs_around(graph):
        if type(outer).__name__ == BRANCH:
            raise RuntimeError(
                f"`{call}` must be called outside a branch; got a call inside tf.cond, or inside "
                "an `if` on a tensor. Both branches are traced, but only one runs. Call it before "
                "or after the branch; `update` takes the flag as its argument. In a Keras model, "
                "leave steps_per_execution at 1: otherwise Keras calls train_step in a branch."
            )
    return function


def current_graph() -> Any:
    """Returns the graph that is being traced; None in eager mode."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def encloses(graph: Any, inner: Any) -> bool:
    """Returns whether a graph is another one, or a loop in the former has the latter as its body.

    Args:
        graph: the graph in which `update` is called; None in eager mode.
        inner: the graph in which `unscale` was called, in the same function.
    """
    return inner is graph or (graph is not None and any(g is graph for g in graphs_around(inner)))


def graphs_around(graph: Any) -> Iterator[Any]:
    """Yields a graph, and the graphs around it. Only graphs of functions have an `outer_graph`."""
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)
