"""Saves and restores the position of a run in its training data.

All replicas take their shares of the batches of one iterator (see `strategies/division.py`), so
there is one position for all of them. TensorFlow can save the state of a plain iterator through
shuffle, repeat and prefetch, but not that of a distributed iterator.

One thing is missing from that state. A shuffle counts how often it has been started, and uses
a new order each time. The count is saved with the shuffle's iterator, which no longer exists when
a later stage has read ahead to the end of a pass while the run is still in that pass. A second
iterator over a single pass is therefore saved as well. No element is ever taken from the second
iterator, so it is always at the beginning and holds the counts of all shuffles.

Not every pipeline can be resumed exactly: its graph tells, at the end of this file.
"""

import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import tensorflow as tf

from strategies.division import count_examples
from trainer.data.batches import Batches
from trainer.data.reader import untuned
from trainer.fingerprint import Fingerprint, entries, texts_of_pipeline
from trainer.step.types import Batch

RESUME_MODES = ("exact", "skip", "restart")
OF_A_PASS = "global_batch", "data"  # the entries of `run.json` that say how long a pass is
# The entry of `run.json` that says that no call of `train` was reading its data.
BETWEEN_CALLS = "between_calls"

Node: TypeAlias = tf.compat.v1.NodeDef  # an operation in the graph of a pipeline
SEEDED = ("ShuffleDataset", "ShuffleAndRepeatDataset", "RandomDataset")
ORDERING = (*SEEDED, "RangeDataset", "BatchDataset", "TakeDataset", "SkipDataset", "ShardDataset")
# Attributes of operations that use a new order, or new random numbers, in each pass.
RESHUFFLING = ("reshuffle_each_iteration", "rerandomize_each_iteration")
INTERLEAVE = "DirectedInterleaveDataset"


class DataPosition:
    """An iterator over the training data whose position can be saved in a checkpoint.

    Args:
        data: the training data.
        resume_mode: how a resumed run continues: "exact" restores the saved position; "skip" reads
            and drops as many batches as were taken; "restart" begins a new pass.

    Attributes:
        taken: number of batches taken since the run began to read this data.
        left_out: how many of these no step has used.
        began: the step of the run at which it began to read this data.
        epochs_before: number of passes over earlier data that the run had ended by then.
        since: the step after which checkpoints hold the position in this data.
    """

    taken = left_out = began = epochs_before = since = 0

    def __init__(self, data: Batches, resume_mode: str) -> None:
        """Creates the iterators, at the beginning of the data."""
        self.data = data
        self.resume_mode = resume_mode
        self._dataset = data.endless()
        # In the pipeline of arrays nothing is counted, and calls with new arrays may be frequent.
        self._shuffle_counts = None if data.arrays else self._uncounted()
        self.iterator = iter(self._dataset)
        self.pipeline = ""  # description of the pipeline, if `check_savable` has been called
        self.content: list[str] = []  # what stands for the values, as far as they are known

    def _uncounted(self) -> tf.data.Iterator:
        """Returns an iterator from which no element is taken; see the module's docstring."""
        return iter(untuned(self.data.dataset))

    def facts(self) -> dict[str, Any]:
        """Returns what `run.json` says about the data, as JSON types."""
        data = self.data
        return {
            "global_batch": data.global_batch,
            "data": f"{data.dataset.element_spec}, {data.steps_per_epoch} steps an epoch",
            "pipeline": self.pipeline,
            "data_resume": self.resume_mode,
        }

    def declared(self) -> Fingerprint:
        """Returns the entries of a fingerprint about the data."""
        facts = self.facts()
        data = {"pipeline": self.pipeline or None, "content": self.content}
        if "data" not in facts:  # `train_on_batch` alone
            return {}
        return entries("global_batch", facts["global_batch"]) | entries(
            "data", {"batch": facts["data"], **data}
        )

    @property
    def used(self) -> int:
        """Number of steps taken with this data."""
        return self.taken - self.left_out

    @property
    def epochs_ended(self) -> int:
        """Number of passes that the run has ended, over earlier data too."""
        length = self.data.steps_per_epoch
        return self.epochs_before + (self.used // length if length else 0)

    def counts(self) -> dict[str, int]:
        """Returns the numbers that `run.json` holds for `go_to`."""
        return {
            "batches_taken": self.taken,
            "batches_left_out": self.left_out,
            "data_began": self.began,
            "epochs_before": self.epochs_before,
            "epochs_ended": self.epochs_ended,
        }

    def begin(self, step: int, epochs_before: int) -> None:
        """Notes that the run begins to read this data."""
        self.began, self.epochs_before = step, epochs_before
        self.since = step

    def begin_late(self, saved: Mapping[str, Any]) -> None:
        """Notes that a resumed run begins to read data, and has read none or other data before.

        Args:
            saved: contents of the checkpoint's `run.json`.
        """
        self.begin(saved["step"], saved["epochs_ended"])
        self._order_from(self.began)

    def _order_from(self, step: int) -> None:
        """Reads the data in the order that it has if the run begins to read it at a step."""
        again = self.data.beginning_with(step)
        if again is not self.data:
            self.data, self._dataset = again, again.endless()
            self.iterator = iter(self._dataset)

    def begin_instead(self, saved: Mapping[str, Any]) -> None:
        """Notes that a resumed run begins to read this data instead of what a checkpoint was in.

        Args:
            saved: contents of the checkpoint's `run.json`.
        """
        used, self.epochs_before = self._counted(saved)
        self.since, self.left_out = saved["step"], self.taken - used

    def _counted(self, saved: Mapping[str, Any]) -> tuple[int, int]:
        """Returns the steps with this data by a checkpoint, and the passes over earlier data.

        A change of the seed or of the values leaves the length of a pass as it is, so the passes
        go on being counted.
        """
        if all(saved.get(name) == self.facts()[name] for name in OF_A_PASS):
            return saved["batches_taken"] - saved["batches_left_out"], saved["epochs_before"]
        return 0, saved["epochs_ended"]

    def go_to(self, folder: pathlib.Path, saved: Mapping[str, Any]) -> None:
        """Moves to the position at which a checkpoint was written.

        Args:
            folder: the checkpoint.
            saved: contents of its `run.json`.

        Raises:
            ValueError: as for `read`.
        """
        taken = saved["batches_taken"]
        self.began = self.since = saved["data_began"]
        self._order_from(self.began)
        self.read(folder, taken)
        self.left_out = saved["batches_left_out"]
        self.epochs_before = saved["epochs_before"]

    def go_back(self, folder: pathlib.Path, saved: Mapping[str, Any]) -> None:
        """Moves to the position of a checkpoint of the same process, maybe with earlier data.

        Args:
            folder: the checkpoint.
            saved: contents of its `run.json`.
        """
        if saved["data_began"] == self.began and saved["step"] > self.since:
            self.go_to(folder, saved)
        else:  # the data of this call comes next
            self._dataset = self.data.endless()
            self.iterator = iter(self._dataset)
            self.taken = self.left_out = 0

    def target(self, epochs: int, step: int, saved: Mapping[str, Any] | None) -> int:
        """Returns the step at which a run has ended so many passes.

        Args:
            epochs: the number of passes, over this data and earlier data.
            step: the step that the run has reached.
            saved: contents of `run.json` of the checkpoint that the run goes on from; None if it
                goes on from here.
        """
        used, before = self._counted(saved) if saved else (self.used, self.epochs_before)
        return step + (epochs - before) * (self.data.steps_per_epoch or 1) - used

    def check_savable(self) -> None:
        """Raises ValueError if the position must be exact but cannot be saved exactly."""
        if self.resume_mode == "exact" and (graph := pipeline_graph(self.data.dataset)):
            self.pipeline = description(graph)
            self.content = texts_of_pipeline(graph)

    def write(self, folder: str) -> None:
        """Writes the position into a folder if the resume mode is "exact".

        Waits as long as the pipeline waits for data: its state cannot be read meanwhile.
        """
        if self.resume_mode != "exact":
            return
        counts = self._shuffle_counts or self._uncounted()
        before, after = None, write_iterator(counts, f"{folder}/counts")
        while before != after:  # repeat if a stage that reads ahead began a new pass meanwhile
            write_iterator(self.iterator, f"{folder}/data")
            before, after = after, write_iterator(counts, f"{folder}/counts")

    def read(self, folder: pathlib.Path, batches_taken: int) -> None:
        """Moves to the position at which a checkpoint was written.

        Args:
            folder: the checkpoint.
            batches_taken: number of batches that had been taken.

        Raises:
            tf.errors.OpError: if no position was saved, or if it was saved in a different pipeline.
        """
        if self.resume_mode == "exact":
            tf.train.Checkpoint(iterator=self.iterator).read(str(folder / "data"))
            # Restored last, because restoring the other iterator starts a pass.
            counts = self._shuffle_counts or self._uncounted()
            tf.train.Checkpoint(iterator=counts).read(str(folder / "counts"))
        elif self.resume_mode == "skip":
            if self.taken:
                self.iterator = iter(self._dataset)
            self.drop(batches_taken)
        self.taken = batches_taken

    def leave_out_one(self) -> None:
        """Notes that a batch was taken which no step has used."""
        self.taken += 1
        self.left_out += 1

    def leave_out(self, count: int) -> None:
        """Takes `count` batches that no step will use."""
        self.drop(count)
        self.left_out += count

    def drop(self, count: int) -> None:
        """Takes `count` batches without using them."""
        for _ in range(count):
            next(self.iterator)
        self.taken += count


def write_iterator(iterator: tf.data.Iterator, prefix: str) -> bytes:
    """Writes the state of an iterator to files, and returns the bytes written."""
    tf.train.Checkpoint(iterator=iterator).write(prefix)
    with tf.io.gfile.GFile(f"{prefix}.data-00000-of-00001", "rb") as file:
        written: bytes = file.read()
    return written


class OnlinePosition(DataPosition):
    """Stands for the position in data while batches are passed one by one, to `train_on_batch`.

    Their source is the program itself, so there is no position to save. The position in the data
    that `train` was reading before is kept, if there is one: checkpoints save it, so that a later
    call of `train` goes on from there, also after a restart.

    Args:
        batch: the first batch.
        before: the position in the data of the last call of `train`; None if there was none.
    """

    def __init__(self, batch: Batch, before: DataPosition | None) -> None:
        """Stores the arguments."""
        examples = int(count_examples(batch))
        self.data = Batches(tf.data.Dataset.from_tensors(batch), batch, examples, None)
        self._before = before
        self.resume_mode = before.resume_mode if before else "restart"
        self.pipeline = before.pipeline if before else ""
        self.content = before.content if before else []

    def facts(self) -> dict[str, Any]:
        """Returns what `run.json` says about the data of `train`; nothing about these batches."""
        if self._before:
            return self._before.facts()
        return {"pipeline": self.pipeline, "data_resume": self.resume_mode}

    def counts(self) -> dict[str, int]:
        """Returns the numbers of the position in the data of `train`; see `DataPosition`."""
        if self._before:  # `train` has read it to the end of its call
            return {**self._before.counts(), BETWEEN_CALLS: True}
        return super().counts()

    def go_to(self, folder: pathlib.Path, saved: Mapping[str, Any]) -> None:
        """Moves the position that is kept."""
        if self._before:
            self._before.go_to(folder, saved)

    def go_back(self, folder: pathlib.Path, saved: Mapping[str, Any]) -> None:
        """Moves the position that is kept."""
        if self._before:
            self._before.go_back(folder, saved)

    def begin_late(self, saved: Mapping[str, Any]) -> None:
        """Notes it of the position that is kept."""
        if self._before:
            self._before.begin_late(saved)

    def begin_instead(self, saved: Mapping[str, Any]) -> None:
        """Notes it of the position that is kept."""
        if self._before:
            self._before.begin_instead(saved)

    def write(self, folder: str) -> None:
        """Writes the position that is kept."""
        if self._before:
            self._before.write(folder)

    def leave_out(self, count: int) -> None:
        """Does nothing: it is up to the program which batches it passes."""


def pipeline_graph(dataset: tf.data.Dataset) -> tf.compat.v1.GraphDef | None:
    """Returns the graph of a pipeline; None if it is too large to serialize.

    Serializing temporarily takes as much additional memory as the tensors that the pipeline holds.

    Raises:
        ValueError: if an operation keeps state outside the pipeline.
    """
    try:
        variant = tf.data.experimental.to_variant(dataset)
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant,
            external_state_policy=2,  # FAIL: a stateful operation is an error
        )
        return tf.compat.v1.GraphDef.FromString(serialized.numpy())
    except tf.errors.FailedPreconditionError as error:
        found = re.search(r"(\w+) is stateful", error.message)
        raise not_exact(f"the stateful operation {found[1] if found else error.message}") from None
    except tf.errors.OpError:
        return None


def description(graph: tf.compat.v1.GraphDef) -> str:
    """Returns a description of a pipeline, including seeds.

    Raises:
        ValueError: if an operation draws random numbers without a seed, or if the pipeline could
            be resumed exactly in one pass only.
    """
    for nodes in [graph.node, *(function.node_def for function in graph.library.function)]:
        if name := first_unseeded(nodes):
            raise not_exact(f"{name} without a seed")
    check_later_passes(graph.node)
    return f": {' '.join(transformations(graph.node))}"


def transformations(nodes: Iterable[Node]) -> list[str]:
    """Returns the transformations of a pipeline, with the sizes and seeds that order its data."""
    numbers = int64_constants(nodes)
    found = []
    for node in nodes:
        if node.op.startswith(ORDERING):
            known = [str(numbers[name]) for name in node.input if name in numbers]
            found.append(f"{node.op}({', '.join(known)})")
        elif "Dataset" in node.op:
            found.append(node.op)
    return found


def not_exact(what: str) -> ValueError:
    """Returns the error for a pipeline whose position cannot be saved."""
    return ValueError(
        f"`train_data` must have a position that can be saved; got a pipeline with {what}. Pass "
        'data_resume="skip" or "restart" for it.'
    )


def first_unseeded(nodes: Iterable[Node]) -> str | None:
    """Returns the name of the first operation that draws a new seed in every process, or None."""
    numbers = int64_constants(nodes)
    for node in nodes:
        if node.op.startswith(SEEDED):
            known = [numbers.get(name.split(":")[0]) for name in node.input]
            if known.count(0) >= 2:  # both seeds are 0, which means "none"
                return str(node.op)
    return None


def check_later_passes(nodes: Iterable[Node]) -> None:
    """Raises ValueError if a pipeline could be resumed exactly in one pass, but not later.

    There are two such cases. First, an operation may use a new order in each pass but not be
    started at the beginning of a pass, so that `DataPosition`'s second iterator does not hold its
    count of starts. Second, a pipeline may take from several datasets in turn: once one of them
    has ended, an iterator restored by TensorFlow 2.21 does not notice the end of the others.
    """
    by_name = {node.name: node for node in nodes}
    [last] = [node.input[0] for node in nodes if node.op == "_Retval"]
    started = started_with(last, by_name)
    for node in nodes:
        reshuffles = any(node.attr[name].b for name in RESHUFFLING if name in node.attr)
        if reshuffles and node.name not in started:
            raise not_exact(f"{node.op} that starts in the middle of a pass")
        if node.op == INTERLEAVE and not node.attr["stop_on_empty_dataset"].b:
            parts = [by_name[name.split(":")[0]] for name in node.input[1:]]
            if any(may_end(part, by_name) for part in parts):
                raise not_exact(f"{INTERLEAVE} of datasets that end")


def started_with(name: str, by_name: Mapping[str, Node]) -> set[str]:
    """Returns the names of the nodes whose iterators are created together with a node's iterator.

    Those before a shuffle are created later, when it fills its buffer.

    Args:
        name: the name of the node whose iterator is created.
        by_name: all nodes of the pipeline, keyed by name.
    """
    node = by_name[name.partition(":")[0]]
    inputs = node.input if node.op in ("ZipDataset", INTERLEAVE) else node.input[:1]
    if node.op.startswith("Shuffle"):
        inputs = []
    return {node.name}.union(*(started_with(one, by_name) for one in inputs))


def may_end(node: Node, by_name: Mapping[str, Node]) -> bool:
    """Returns whether a part of a pipeline may end, judging by its graph."""
    inputs = [by_name[name.partition(":")[0]] for name in node.input]
    if node.op.startswith("Repeat"):
        return bool(inputs[1].attr["value"].tensor.int64_val[:] != [-1])  # -1 repeats forever
    if node.op.startswith("Random"):
        return False
    return not inputs or node.op.startswith("Take") or may_end(inputs[0], by_name)


def int64_constants(nodes: Iterable[Node]) -> dict[str, int]:
    """Returns the values of the scalar int64 constants in a graph, keyed by name."""
    tensors = {node.name: node.attr["value"].tensor for node in nodes if node.op == "Const"}
    return {
        name: int(tf.make_ndarray(tensor))
        for name, tensor in tensors.items()
        if tensor.dtype == tf.int64.as_datatype_enum and not tensor.tensor_shape.dim
    }
