"""Writes a made-up `metrics.jsonl` with every kind of line that a run logs, and hostile names.

`write_lines` writes single lines instead, such as `TRAIN`, `GRADIENTS` and `SKIP`.
"""

import json
import math
import pathlib

import numpy as np

SCRIPT = '<script>document.title="owned"</script>'
METRIC = "top-1 & \"best\" 'of' <b>two</b> $\\x$"  # Markdown, HTML and TeX
SETTING = "<img src=x onerror=\"document.title='owned'\">"
MODEL = [
    ("conv2d/kernel", [3, 3, 1, 32]),
    ("batch_normalization/gamma", [32]),
    ("conv2d_1/kernel", [3, 3, 32, 64]),
    ("conv2d_1/bias $\\x$", [64]),
    ("functional/encoder/block_11/attention/query/kernel", [64, 64]),
    ("dense/kernel", [1024, 128]),
    (SCRIPT, [128]),
    ("dense_1/kernel", [128, 10]),
]
LOG = 20  # steps between log lines
# The share of steps that each cause skips. Overflows in the backward pass come on top.
CAUSES = {
    "forward": 0.004,
    "reduction": 0.003,
    "unscaling": 0.003,
    "weights": 0.003,
    "model": 0.003,
}
# Single lines of a short run.
TRAIN = {
    "split": "train",
    "step": 10,
    "loss": 0.5,
    "loss_scale": 2.0**15,
    "gradient_norm": 2.0,
    "applied": 9,
    "skipped": 1,
}
GRADIENTS = {
    "split": "gradients",
    "step": 3,
    "precision": "mixed_float16",
    "shares": 1,
    "loss_scale": [2.0**16, 2.0**15, 2.0**15],
    "cause": ["backward", "none", "none"],
    "max_magnitude": [None, 65504 / 2**17, 65504 / 2**20],
    "zeros": 0,
    "exponents": {"-1": 3, "-40": 1},
}
SKIP = {
    "split": "skip",
    "step": 1,
    "loss_scale": 2.0**16,
    "cause": "backward",
    "variable": "a/kernel",
    "replica": 0,
    "inf_count": 3,
    "nan_count": 0,
}


def start(step, time, **settings):
    """Returns the line that a run logs at its start."""
    model = [
        {
            "name": name,
            "shape": shape,
            "dtype": "float32",
            "compute_dtype": "float16",
            "parameters": int(np.prod(shape)),
            "bytes": 4 * int(np.prod(shape)),
        }
        for name, shape in MODEL
    ]
    settings = {
        "precision": "mixed_float16",
        "loss_scale": "DynamicLossScale(initial_scale=16777216.0, growth_interval=150)",
        "optimizer": "Adam",
        "global_batch": 64,
        "seed": 0,
        "note": SETTING,
        "global_clipnorm": None,
    } | settings
    return {"split": "run", "step": step, "time": time, "settings": settings, "model": model}


def history(steps, rng):
    """Yields (loss scale, cause, largest magnitude) for each step: a dynamic scale over gradients
    that shrink, with random jumps.
    """
    scale, good = 2.0**24, 0
    factor = min(1, 600 / steps)  # so that a longer run does not have more of the other causes
    magnitudes = 0.9 * np.exp(-2.0 * np.arange(steps) / steps + 0.35 * rng.normal(size=steps))
    for step in range(steps):
        draw = rng.random()
        cause = "backward" if magnitudes[step] * scale > 65504 else "none"
        for name, chance in CAUSES.items():
            cause = name if 0 <= draw < chance * factor else cause
            draw -= chance * factor
        yield scale, cause, float(magnitudes[step])
        good = 0 if cause != "none" else good + 1
        if cause in ("backward", "reduction"):
            scale = max(scale / 2, 1.0)
        elif good == 150:
            scale, good = scale * 2, 0


def lines(steps=600):
    """Yields every line of a run that was resumed once and finished."""
    rng = np.random.default_rng(1)
    yield start(0, "2026-11-22T02:30:00+00:00", seed=1)
    all_steps = list(history(steps, rng))
    applied, last_scale = 0, None
    for step, (scale, cause, _) in enumerate(all_steps, start=1):
        if scale != last_scale:
            yield {"split": "scale", "step": step, "loss_scale": scale}
            last_scale = scale
        if cause == "none":
            applied += 1
        else:
            yield skip(step, scale, cause)
        if step % LOG == 0:
            yield from log_lines(step, steps, all_steps[step - LOG : step], applied, rng)
        if step == steps // 2:
            recovery = {"split": "recovery", "what": "a loss of 1e+04, above 100"}
            yield recovery | {"step": step + 7, "restored": step, "batches_left_out": 3}
            yield start(step, "2026-11-22T03:10:00+00:00")
    yield {"split": "end", "step": steps, "seconds": 754.2, "stopped": False}


def skip(step, scale, cause):
    """Returns the line of a skipped step."""
    return {
        "split": "skip",
        "step": step,
        "loss_scale": scale,
        "cause": cause,
        "variable": MODEL[step % len(MODEL)][0] if cause != "forward" else None,
        "replica": step % 2 if cause != "reduction" else None,
        "inf_count": 12 * step,
        "nan_count": step % 3,
    }


def log_lines(step, steps, interval, applied, rng):
    """Yields the lines of one log interval; `interval` holds the last `LOG` steps of `history`."""
    loss = 2.3 * np.exp(-5 * step / steps) + 0.03 + 0.02 * rng.random()
    yield {
        "split": "train",
        "step": step,
        "loss": loss,
        "regularization_loss": 0.01,
        "gradient_norm": 4 * loss**0.5,
        "loss_scale": interval[-1][0],
        "applied": applied,
        "skipped": step - applied,
        "examples_per_second": None if step == LOG else 2500 + 200 * rng.random(),
        "data_wait": None if step == LOG else 0.03,
        "learning_rate": 1e-3 * (1 + math.cos(math.pi * step / steps)),
        "accuracy": 1 - 0.4 * loss,
        METRIC: 1 - 0.2 * loss,
    }
    shares = {
        name: float(np.clip(0.02 * 3.0**row * step / steps * (0.8 + 0.4 * rng.random()), 0, 0.9))
        for row, (name, _) in enumerate(MODEL[:6])
    }
    yield {"split": "underflow", "step": step, "share": shares | {SCRIPT: None}}
    scales, causes, magnitudes = zip(*interval, strict=True)
    yield {
        "split": "gradients",
        "step": step,
        "precision": "mixed_float16",
        "shares": 2,
        "loss_scale": scales,
        "cause": causes,
        "max_magnitude": [
            m if cause == "none" else None for m, cause in zip(magnitudes, causes, strict=True)
        ],
        "zeros": 1000,
        "exponents": {"-30": 200, "-20": 4000, "-8": 90000, "-1": 12},
    }
    if step % (5 * LOG) == 0:
        result = {"loss": 1.2 * loss, "accuracy": 0.99 - 0.4 * loss, METRIC: 0.98 - 0.2 * loss}
        yield {"split": "validation", "step": step, **result}


def write(folder, steps=600):
    """Writes the run into a folder, with an incomplete last line as after a kill; returns it."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines(steps))
    (folder / "metrics.jsonl").write_text(text + '{"split": "tr')
    return folder


def write_lines(folder, *lines):
    """Writes a metrics.jsonl with these lines and returns its folder. A string is written as is."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(text + "\n" for text in texts))
    return folder
