"""Where a run stands in its data: the position of one plain iterator.

Every replica takes its share of the batches of one iterator (see `strategies/division.py`),
so one position is everybody's. TensorFlow can save that of a plain iterator, through
shuffle, repeat and prefetch; it cannot save that of a distributed one.

One thing is missing in what it saves. A shuffle counts how often it was begun, and shuffles in
another order each time. That count is part of the position of its iterator; and of that there
is none left when a stage above, which fetches ahead, has come to the end of a pass that the
run is still in. So a second iterator over one pass is saved beside it, from which nothing was
ever taken: it is always at the beginning, and has the counts of all shuffles.
"""

import pathlib
import re
from typing import Any

import tensorflow as tf

from trainer.data.batches import Batches, untuned, without_end

RESUME_MODES = ("exact", "skip", "restart")


class DataPosition:
    """An iterator over a run's data that a checkpoint can hold.

    Args:
        data: what is trained on.
        way: how it is taken up again: "exact" saves the position; "skip" reads and drops as
            many batches as were taken; "restart" begins a new pass.
    """

    def __init__(self, data: Batches, way: str) -> None:
        """Starts at the beginning."""
        self.data = data
        self.way = way
        self._dataset = without_end(data)
        self._counts = iter(untuned(data.dataset))  # see above
        self.iterator = iter(self._dataset)
        self.taken = 0  # batches, since the run began
        self.pipeline = ""  # what it is made of, if that has been looked at

    def check_savable(self) -> None:
        """Raises ValueError if the position cannot be saved, or would not be exact."""
        if self.way == "exact":
            self.pipeline = check_savable(self.data.dataset)

    def write(self, folder: str) -> None:
        """Writes the position into a folder, if it is to be saved."""
        if self.way != "exact":
            return
        before, after = None, write_iterator(self._counts, f"{folder}/counts")
        while before != after:  # a stage that fetches ahead has begun a pass meanwhile
            write_iterator(self.iterator, f"{folder}/data")
            before, after = after, write_iterator(self._counts, f"{folder}/counts")

    def read(self, folder: pathlib.Path, batches_taken: int) -> None:
        """Goes to where a checkpoint was written.

        Args:
            folder: the checkpoint's.
            batches_taken: how many batches had been taken by then.

        Raises:
            ValueError: if there is no position, or one of another pipeline.
        """
        if self.way == "exact":
            try:
                tf.train.Checkpoint(iterator=self.iterator).read(str(folder / "data"))
                # Last: to read the other has begun a pass.
                tf.train.Checkpoint(iterator=self._counts).read(str(folder / "counts"))
            except tf.errors.OpError as error:
                raise no_position(folder, error) from error
        elif self.way == "skip":
            if self.taken:
                self.iterator = iter(self._dataset)
            self.drop(batches_taken)
        self.taken = batches_taken

    def drop(self, count: int) -> None:
        """Takes batches and leaves them unused."""
        for _ in range(count):
            next(self.iterator)
        self.taken += count


def write_iterator(iterator: Any, prefix: str) -> bytes:
    """Writes where an iterator stands; returns what was written."""
    tf.train.Checkpoint(iterator=iterator).write(prefix)
    with tf.io.gfile.GFile(f"{prefix}.data-00000-of-00001", "rb") as written:
        return written.read()


def check_savable(dataset: tf.data.Dataset) -> str:
    """Raises ValueError if a pipeline cannot go on exactly where it was.

    Its graph is looked at, which holds a copy of what the pipeline holds in memory, for a
    moment.

    Returns:
        What the pipeline is made of, seeds included; "" if it is too large to look at.

    Raises:
        ValueError: it names the operation that keeps a state, or draws without a seed.
    """
    try:
        variant = tf.data.experimental.to_variant(dataset)
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant,
            external_state_policy=2,  # FAIL: an operation with a state is an error
        )
        graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    except tf.errors.FailedPreconditionError as error:
        found = re.search(r"(\w+) is stateful", error.message)
        name = found[1] if found else error.message
        raise not_exact(f"the stateful operation {name}", SOURCES.get(name, "")) from error
    except tf.errors.OpError:
        return ""
    for nodes in [graph.node, *(function.node_def for function in graph.library.function)]:
        if name := drawn_without_seed(nodes):
            raise not_exact(f"{name} without a seed", "Give it seed=. ")
    check_passes(graph.node)
    return f": {' '.join(made_of(graph.node))}"


def made_of(nodes: Any) -> list[str]:
    """Returns the transformations of a pipeline, with the sizes and seeds that order its data."""
    numbers = whole_numbers(nodes)
    found = []
    for node in nodes:
        if node.op.startswith(ORDERING):
            known = [str(numbers[name]) for name in node.input if name in numbers]
            found.append(f"{node.op}({', '.join(known)})")
        elif "Dataset" in node.op:
            found.append(node.op)
    return found


SEEDED = ("ShuffleDataset", "ShuffleAndRepeatDataset", "RandomDataset")
ORDERING = (*SEEDED, "RangeDataset", "BatchDataset", "TakeDataset", "SkipDataset", "ShardDataset")

SOURCES = {
    "PyFunc": "It comes with from_generator or numpy_function. ",
    "EagerPyFunc": "It comes with py_function. ",
    "DummySeedGenerator": "It comes with shuffle within interleave or flat_map. ",
}


def not_exact(what: str, hint: str) -> ValueError:
    """Returns the error for a pipeline whose position cannot be kept."""
    return ValueError(
        f"`train_data` must be a pipeline whose position can be saved; got one with {what}. A run "
        f'that is taken up again would see other data. {hint}Pass data_resume="skip", which reads '
        'as many batches as were taken and drops them, or "restart", which begins a new pass.'
    )


def no_position(folder: pathlib.Path, error: tf.errors.OpError) -> ValueError:
    """Returns the error for a position that cannot be gone to."""
    if not (folder / "data.index").exists():
        return ValueError(
            f"`data_resume` must be that of the run in {folder} to go on where its data were; got "
            "'exact', and no position was saved there. The run would see other data. Pass "
            'data_resume="skip" or "restart", as before.'
        )
    return ValueError(
        f"`train_data` must be that of the run in {folder} to go on where its data were; got "
        f"another pipeline: {error.message.splitlines()[0]} The run would see other data. Make "
        'the pipeline as it was, or pass data_resume="skip" or "restart".'
    )


def drawn_without_seed(nodes: Any) -> str | None:
    """Returns the first operation of a graph that takes a new seed in every process, or None."""
    numbers = whole_numbers(nodes)
    for node in nodes:
        if node.op.startswith(SEEDED):
            known = [numbers.get(name.split(":")[0]) for name in node.input]
            if known.count(0) >= 2:  # both seeds
                return node.op
    return None


def check_passes(nodes: Any) -> None:
    """Raises ValueError for what would be taken up again in one pass, but not in those after it.

    That is an operation that draws anew in each pass, but whose count is not in `DataPosition`'s
    second iterator, since it is not begun with the pass; and, in TensorFlow 2.21, several data
    sets in turn: where one has ended, the end of the others would not be noticed.
    """
    by_name = {node.name: node for node in nodes}
    [last] = [node.input[0] for node in nodes if node.op == "_Retval"]
    begun = begun_with(last, by_name, shuffles=False)
    for node in nodes:
        if any(node.attr[name].b for name in ANEW if name in node.attr) and node.name not in begun:
            if node.name in begun_with(last, by_name, shuffles=True):
                raise not_exact(
                    f"{node.op} before another shuffle",
                    "Shuffle once, or all but the last with reshuffle_each_iteration=False. ",
                )
            raise not_exact(
                f"{node.op} in a part that is begun in the middle of a pass",
                "Shuffle what concatenate or flat_map returns, not what they are given. ",
            )
        if node.op == IN_TURN and not node.attr["stop_on_empty_dataset"].b:
            parts = [by_name[name.split(":")[0]] for name in node.input[1:]]
            if any(may_end(part, by_name) for part in parts):
                raise not_exact(
                    f"{IN_TURN} of data that end",
                    "It comes with sample_from_datasets and choose_from_datasets: repeat() what "
                    "they are given, or pass stop_on_empty_dataset=True. ",
                )


ANEW = ("reshuffle_each_iteration", "rerandomize_each_iteration")
IN_TURN = "DirectedInterleaveDataset"


def begun_with(name: str, by_name: dict[str, Any], *, shuffles: bool) -> set[str]:
    """Returns which nodes' iterators are made as soon as that of one node is.

    Args:
        name: that node's.
        by_name: all of them.
        shuffles: whether to count what is made when a shuffle fills its buffer.
    """
    node = by_name[name.partition(":")[0]]
    inputs = node.input if node.op in ("ZipDataset", IN_TURN) else node.input[:1]
    if node.op.startswith("Shuffle") and not shuffles:
        inputs = []
    return {node.name}.union(*(begun_with(one, by_name, shuffles=shuffles) for one in inputs))


def may_end(node: Any, by_name: dict[str, Any]) -> bool:
    """Returns whether a part of a pipeline may come to an end, as far as can be seen."""
    inputs = [by_name[name.partition(":")[0]] for name in node.input]
    if node.op.startswith("Repeat"):
        return inputs[1].attr["value"].tensor.int64_val[:] != [-1]
    if node.op.startswith("Random"):
        return False
    return not inputs or node.op.startswith("Take") or may_end(inputs[0], by_name)


def whole_numbers(nodes: Any) -> dict[str, int]:
    """Returns the constants among some nodes that are single int64 numbers, by name."""
    tensors = {node.name: node.attr["value"].tensor for node in nodes if node.op == "Const"}
    return {
        name: int(tf.make_ndarray(tensor))
        for name, tensor in tensors.items()
        if tensor.dtype == tf.int64.as_datatype_enum and not tensor.tensor_shape.dim
    }
