"""Every flag of `define_flags`, given one odd text at a time in a run of two steps."""

import collections
import random
import re

from absl import flags
from chaos import odd_inputs, odd_ranges
from conformance import test_errors as errors

import trainer.flags

TEXTS = r"""
||0|1|2|-1|3|7|1.5|0.5|-0.0|nan|inf|-inf|1e400|1e-400|2147483648|9223372036854775808
1,2|2,1|5,9|1,2,3|,|a,b|true|false|TRUE|yes|None|none|null|[]|{}|()|head/|(|*|\|=|:|--steps=3
dynamic|dynamic:|dynamic:growth_interval=3|jmp|headroom:headroom_bits=99|1024|1000|2^20|auto|half
mixed_float16|float32|float64|mixed_bfloat16|mirrored|one_device|tpu|parameter_server|local|x
runs/a|runs/[1]|notes.txt|~|~nobody_here/a|gs://bucket/a|/dev/null|.|/proc/nowhere|model.keras
naïve 日本語|loss|accuracy|highest|retry|raise|skip|quiet|detailed|seed|weights|restart|exact
"""
ALL = [text for line in TEXTS.strip("\n").splitlines() for text in line.split("|")]
# What the flags that are no argument of `Trainer` may be; a count is an int of at least 1.
COUNTS = ["global_batch", "steps", "eval_interval", "eval_steps"]
RANGES = {
    **dict.fromkeys(COUNTS, lambda value: value >= 1),
    "mode": lambda value: value in {"train", "train_and_eval", "dry_run", "overfit"},
    "strategy": lambda value: value in {"default", "one_device", "mirrored", "auto"},
    "tpu": lambda _: False,
    "loss_scale": lambda value: (
        value.strip() in {"auto", "none", "dynamic", "dynamic:growth_interval=3", "jmp", "1024"}
        or value.strip() in {"1", "2", "0.5", "2^20"}
    ),
    "initial_scale": lambda value: value == 2.0**15,  # another one needs a loss scale
    "logical_cpus": lambda _: False,  # needs mirrored
    "max_recoveries": lambda value: value == 3,  # another one needs a loss that diverges
    "jit_compile": lambda value: (
        value in {"auto", "step", "update", "elementwise", "true", "false"}
    ),
    "verbose": lambda value: value in {"quiet", "normal", "detailed"},
    "evaluate_at_start": lambda _: True,
    "continuous": lambda value: value is False,
    "overflow": lambda _: False,
    "timeout_secs": lambda _: False,  # has no effect in a run that trains
    "loss_above": lambda _: False,  # needs a folder
    "max_to_keep": lambda value: value >= 0,
    "init_from": lambda value: value == "",
    "model_dir": lambda value: not re.search(r"[\[\\]|:/|^/|^~n|^notes", value),
    "profile_steps": lambda _: False,  # needs a folder
    "max_overflow_records": lambda value: value == 0,
    "keep_best": lambda value: value == 0,
    "init_from_skip": lambda value: not value,
}
WORDS = collections.defaultdict(set)
for _flag, _, *_word in errors.FLAGS:
    WORDS[_flag].update(word.removeprefix("--") for word in _word)
WORDS["loss_scale"] |= {"growth_interval", "headroom_bits"}  # fields that a text gives


def names():
    """All flags, without aliases."""
    return sorted(set(errors.parse()) - set(errors.new_flags()) - set(trainer.flags.ALIASES))


def drawn(flag, number):
    """Texts for a flag, which depend on the flag alone."""
    return random.Random(flag).sample(ALL, number)  # noqa: S311


def fits(flag, flag_values):
    """Whether a flag may have its value."""
    value = flag_values[flag].value
    if flag in RANGES:
        return bool(RANGES[flag](value))
    place = odd_inputs.Place("trainer", "Trainer", flag)
    return odd_ranges.fits(place, value)


def outcome(flag, text):
    """What becomes of a text: a kind as in `odd_inputs.outcome`, and a text about it."""
    found = None
    try:
        with odd_inputs.elsewhere(), odd_inputs.within(odd_inputs.SECONDS):
            steps = [] if flag == "steps" else ["--steps=2"]
            found = errors.parse(*steps, "--nocheck_gradients", f"--{flag}={text}")
            values = errors.shared_values()
            named = odd_inputs.names("Stopping" if flag == "steps" else "")
            made = trainer.flags.make_trainer(
                named["Stopping"] if flag == "steps" else values["Trainer"], found, verbose=False
            )
            trainer.flags.run_mode(made, values["data"], values["data"], found)
    except odd_inputs.TooLongError:
        return "obscure", "no end"
    except flags.Error as error:
        told = str(error).startswith(f"flag --{flag}=")
        return ("clear" if told else "obscure"), str(error)
    except Exception as error:  # noqa: BLE001  # all kinds are judged
        why = unclear(flag, error)
        return ("obscure", why) if why else ("clear", str(error))
    except SystemExit as error:
        return "obscure", f"SystemExit: {error}"
    return ("documented", "") if fits(flag, found) else ("silent", "")


def unclear(flag, error):
    """What is not clear about an error, or ""."""
    message = str(error)
    text = f"{type(error).__name__}: {message[:300]}"
    rule, _, rest = message.partition("; got ")
    if type(error) not in {TypeError, ValueError, RuntimeError} or not rest:
        return text
    told = {part for name in re.findall(r"`-*([\w.]+)", rule) for part in name.split(".")}
    if not told & {flag, *WORDS[flag]}:
        return f"unnamed: {text}"
    return ""
