"""Where the time of a step goes: operations of TensorFlow (ours and by hand) and of PyTorch.

    python benchmarks/profile_step.py --model=cnn --dtype=bfloat16

The output is milliseconds per step by kind of operation. Waiting and parallel threads are included,
so columns add up to more than the step time. TensorFlow's times come from its own profiler and
exclude the operations that an operation calls; PyTorch's come from torch.profiler.
"""

from contenders import by_hand, ours  # isort: skip  # configures TensorFlow

import collections
import importlib.util
import pathlib
import tempfile

import tensorflow as tf
from absl import app, flags
from models import POLICIES, WIDTH, WINDOW, WORDS, work_of
from tensorflow.tsl.profiler.protobuf import xplane_pb2
from turns import seconds_of, table

FLAGS = flags.FLAGS
flags.DEFINE_string("model", "cnn", "Model of step_time.py.")
flags.DEFINE_enum("dtype", "bfloat16", list(POLICIES), "Compute dtype.")
flags.DEFINE_integer("steps", 20, "Number of profiled steps.", lower_bound=1)
flags.DEFINE_integer("kinds", 14, "Number of kinds of operations to show.", lower_bound=1)


def in_tensorflow(take, steps):
    """Returns milliseconds per step by kind of operation."""
    take(2)
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        take(steps)
        tf.profiler.experimental.stop()
        [file] = pathlib.Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(file.read_bytes())
    found = collections.Counter()
    for plane in space.planes:
        for line in plane.lines:
            for name, picosecs in own_times(plane, line):
                if ":" in name and "::" not in name:  # "path/of/name:Kind"
                    found[name.rpartition(":")[2]] += picosecs / 1e9 / steps
    return found


def own_times(plane, line):
    """Yields the name and own time of each event in one thread, without the events inside it."""
    open_events = []  # [name, end, own]
    for event in sorted(line.events, key=lambda event: (event.offset_ps, -event.duration_ps)):
        while open_events and open_events[-1][1] <= event.offset_ps:
            yield open_events.pop()[::2]
        if open_events:
            open_events[-1][2] -= event.duration_ps
        name = plane.event_metadata[event.metadata_id].name
        open_events.append([name, event.offset_ps + event.duration_ps, event.duration_ps])
    for event in open_events:
        yield event[::2]


def in_pytorch(steps):
    """Returns milliseconds per step by kind of operation, and in total."""
    import in_pytorch
    import torch

    network = in_pytorch.build(FLAGS.model, WORDS, WINDOW, WIDTH)
    take = in_pytorch.steps_of(network, work_of(FLAGS.model).batch, FLAGS.dtype)
    take(2)
    whole = 1e3 * seconds_of(take, steps)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        take(steps)
    events = profiled.key_averages()
    found = {event.key: event.self_cpu_time_total / 1e3 / steps for event in events}
    return collections.Counter(found), whole


def main(_):
    """Profiles and prints a table."""
    cell = (work_of(FLAGS.model), POLICIES[FLAGS.dtype])
    compiled = FLAGS.dtype == "float16"  # TensorFlow's own float16 kernels are scalar loops
    columns = {}
    for name, contender in (
        ("ours", ours(*cell, jit_compile=compiled)),
        ("by hand", by_hand(*cell, jit_compile=compiled)),
    ):
        contender.take(2)
        whole = 1e3 * seconds_of(contender.take, FLAGS.steps)
        columns[f"{name}: {whole:.3g} ms"] = in_tensorflow(contender.take, FLAGS.steps)
    if importlib.util.find_spec("torch"):
        found, whole = in_pytorch(FLAGS.steps)
        columns[f"PyTorch: {whole:.3g} ms"] = found
    parts = [found.most_common(FLAGS.kinds) for found in columns.values()]
    rows = [[cell for name in columns for cell in (name, "")]]
    for place in range(FLAGS.kinds):
        row = []
        for part in parts:
            row += [part[place][0], f"{part[place][1]:.2f}"] if place < len(part) else ["", ""]
        rows.append(row)
    print(table(rows))


if __name__ == "__main__":
    app.run(main)
