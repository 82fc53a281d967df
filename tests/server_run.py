"""The program that each process of a parameter-server job runs: python server_run.py OUT STEPS.

The run is the noisy one of `worker_run`, in which one batch in ten overflows. At its end the chief
writes `OUT/result.json`.
"""

import json
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import access
import numpy as np
import worker_run
from access import untuned

import strategies


def main(out, steps):
    """Trains in the chief; in the other processes `create` serves the chief and never returns."""
    out, steps = pathlib.Path(out), int(steps)
    strategy = strategies.create("parameter_server")
    run = worker_run.make(
        out / "noisy-0.jsonl",
        "noisy",
        strategy,
        model_dir=out / "run",
        steps_per_loop=50,
        growth_interval=5,
    )
    # With a loss near 1e30, gradients overflow float16 at any loss scale.
    train_data = untuned(worker_run.data(10, planted=1e30))
    summary = run.train(train_data, steps=steps, eval_data=worker_run.data(3))
    state = [*run.model.get_weights(), *(each.numpy() for each in run.optimizer.variables)]
    result = {
        "step": summary.step,
        "steps_run": summary.steps_run,
        "applied": summary.totals.applied,
        "skipped": summary.totals.skipped,
        "iterations": int(run.optimizer.iterations.numpy()),
        "loss_scale": run.loss_scale,
        "finite": bool(all(np.isfinite(each).all() for each in state)),
        "taken": access.position(run).taken,
    }
    (out / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
