"""Where a step's time goes: TensorFlow's operations in ours and by hand, and PyTorch's beside.

    python benchmarks/profile_step.py --model=cnn --dtype=bfloat16

Milliseconds a step by kind of operation, waiting and threads that work side by side included:
columns add up to more than a step takes. TensorFlow's come from its own profiler, without what
an operation's callees take; PyTorch's from torch.profiler.
"""

from contenders import by_hand, ours  # isort: skip  # sets TensorFlow up

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
flags.DEFINE_string("model", "cnn", "Which of step_time.py's.")
flags.DEFINE_enum("dtype", "bfloat16", list(POLICIES), "In which dtype.")
flags.DEFINE_integer("steps", 20, "How many steps are looked at.", lower_bound=1)
flags.DEFINE_integer("kinds", 14, "How many kinds of operations are shown.", lower_bound=1)


def in_tensorflow(take, steps):
    """Returns milliseconds a step by kind of operation."""
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
                if ":" in name and "::" not in name:  # "its/name:ItsKind"
                    found[name.rpartition(":")[2]] += picosecs / 1e9 / steps
    return found


def own_times(plane, line):
    """Yields the events of one thread, each without those that it contains."""
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
    """Returns milliseconds a step of PyTorch's, by kind of operation; and of the whole step."""
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
    """Profiles, and prints a table."""
    cell = (work_of(FLAGS.model), POLICIES[FLAGS.dtype])
    way = FLAGS.dtype == "float16"  # TensorFlow's own kernels are scalar loops then
    columns = {}
    for name, contender in (
        ("ours", ours(*cell, jit_compile=way)),
        ("by hand", by_hand(*cell, jit_compile=way)),
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
