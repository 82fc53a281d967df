"""Folders of runs that nobody has written as they are: damaged, huge, of wrong types, or hostile.

`write(folder, number)` writes one of them; the number alone says which. `DAMAGES` holds the kinds.
Texts that would run as code in a browser are in `PAYLOADS`; each of them would leave a mark that
`tests/browser.py` sees.
"""

import copy
import json
import os
import pathlib
import random

import written_run
from written_run import GRADIENTS, SKIP, TRAIN

PAYLOADS = (
    '<script>document.title="owned";window.owned=1</script>',
    "<img src=x onerror=\"document.title='owned';window.owned=1\">",
    '"><svg onload="window.owned=1">',
    "' onmouseover='window.owned=1' autofocus onfocus='window.owned=1",
    "</title><script>window.owned=1</script>",
    "</style><script>window.owned=1</script>",
    '</td></table><iframe src="javascript:parent.owned=1"></iframe>',
    '<a href="javascript:window.owned=1">a</a>',
    '<script>fetch("https://example.com/a")</script>',
    '<img src="https://example.com/a.png">',
    "<link rel=stylesheet href=https://example.com/a.css>",
    "<style>body{background:url(https://example.com/b.png)}</style>",
    '<meta http-equiv="refresh" content="0;url=https://example.com/">',
    "<base href=https://example.com/>",
    "{{ 7 * 7 }}{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "<!-- --><!--><script>window.owned=1</script>",
    "&lt;script&gt;window.owned=1&lt;/script&gt;",
    "\u202e\u2066gnp.exe\u2069\u200f<b>",
    "a\x00b\x07c\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08",
    "\ud800 lone \udfff",
    "$\\frac{1}{0}$ \\includegraphics{/etc/passwd} $\\x$ ^_{%",
    "../../../etc/passwd",
    "\ufeff\u2028\u2029\x85",
    "😀" * 50 + "\u0301" * 100,
    "",
    "__proto__",
)
FLOAT8 = {
    "format": "float8_e4m3fn",
    "amax": 3.0,
    "scale": 0.0078125,
    "saturated": 0.1,
    "flushed": None,
    "saturated_steps": 1,
}
FLOAT8_LINE = {"split": "float8", "step": 7, "float8": {"m/dense/inputs": FLOAT8}}
# What a line may hold where something else belongs.
VALUES = (
    None,
    True,
    False,
    0,
    -1,
    -0.0,
    1.5,
    10**400,
    -(10**400),
    2**53,
    2**63,
    -(2**63),
    1e308,
    -1e308,
    5e-324,
    3.4e38,
    1e-45,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "1",
    "nan",
    "x" * 3000,
    [],
    [[]],
    [None],
    [1.0, "a"],
    {},
    {"": 1},
    {"a": {"b": {"c": []}}},
)
SHORT = 60  # steps of the run to which the damage is done


def text_of(lines):
    """Returns lines as the text of a metrics.jsonl. A string is taken as it is."""
    return "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)


def save(folder, content):
    """Writes the metrics.jsonl of a run: lines, or bytes."""
    content = content if isinstance(content, bytes) else text_of(content).encode()
    (folder / "metrics.jsonl").write_bytes(content)


def sound():
    """Returns the lines of a run as a trainer would have written them."""
    return [*written_run.lines(SHORT), copy.deepcopy(FLOAT8_LINE)]


def float8(*names):
    """Returns what a line says about float8 tensors of these names."""
    return {name: dict(FLOAT8) for name in names}


def sound_bytes():
    """Returns them as the file's bytes."""
    return text_of(sound()).encode()


def cut(chance, folder):
    """The file ends anywhere."""
    content = sound_bytes()
    save(folder, content[: chance.randrange(len(content))])


def flipped(chance, folder):
    """Some bits are others."""
    content = bytearray(sound_bytes())
    for _ in range(chance.choice([1, 10, 300])):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    save(folder, bytes(content))


def binary(chance, folder):
    """Bytes at random: all of the file, or a piece of it."""
    content, size = sound_bytes(), chance.choice([1, 40, 2000])
    start = chance.randrange(len(content))
    noise = chance.choice([chance.randbytes(size), bytes(size), b"\xff" * size, b"\n" * size])
    save(folder, chance.choice([noise, content[:start] + noise + content[start:]]))


def encoded(chance, folder):
    """A byte-order mark, or another encoding, or other ends of lines."""
    text = text_of(sound())
    save(
        folder,
        chance.choice(
            [
                text.encode("utf-8-sig"),
                text.encode("utf-16"),
                text.encode("utf-32-be"),
                text.replace("\n", "\r\n").encode(),
                text.replace("\n", "\r").encode(),
                text.replace("\n", "\u2028").encode(),
                text.replace(" ", "\t").encode("utf-7"),
                text.replace("a", "\u00e9").encode("latin-1"),
            ]
        ),
    )


def nothing(chance, folder):
    """No line at all, or none that says anything."""
    texts = [b"", b"\n" * 5000, b"{}", b"[]\n" * 9, b"null", b"\x00" * 4096, b"{" * 9000, b'"']
    save(folder, chance.choice(texts))


def odd_numbers(chance, folder):
    """Numbers that are none, that are huge, or that are tokens which JSON does not have."""
    tokens = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400, "9" * 5000, "-0"]
    tokens += ["1e-400", "0.1e308", "12345678901234567890", "1_000", "0x10", "01", "+1", "."]
    lines = [json.dumps(line) for line in sound()]
    for _ in range(chance.choice([1, 5, 40])):
        place = chance.randrange(len(lines))
        pieces = lines[place].split(" ")
        spots = [n for n, piece in enumerate(pieces) if piece[:1].isdigit()]
        if spots:
            spot = chance.choice(spots)
            ends = pieces[spot][len(pieces[spot].rstrip(",}]")) :]
            pieces[spot] = chance.choice(tokens) + ends
        lines[place] = " ".join(pieces)
    save(folder, lines)


def odd_types(chance, folder):
    """Fields hold values of other types, are missing, or are new."""
    lines = sound()
    kinds = sorted({line["split"] for line in lines})
    chosen = set(chance.sample(kinds, chance.choice([1, 1, 3, len(kinds)])))
    for line in lines:
        if line["split"] in chosen and chance.random() < 0.7:
            for name in chance.sample(sorted(line), chance.choice([1, 1, 2])):
                if name != "split" or chance.random() < 0.2:
                    line[name] = chance.choice(VALUES)
            if chance.random() < 0.2:
                del line[chance.choice(sorted(line))]
    save(folder, lines)


def odd_insides(chance, folder):
    """Values within the lists and objects of a line are of other types."""
    lines = sound()
    for line in lines:
        for value in line.values():
            if isinstance(value, tuple | list | dict) and chance.random() < 0.6:
                spoil(chance, value)
    save(folder, lines)


def spoil(chance, value):
    """Changes something within a list or an object."""
    if isinstance(value, dict) and value:
        value[chance.choice(sorted(value))] = chance.choice(VALUES)
        value[chance.choice(PAYLOADS)] = chance.choice(VALUES)
    elif isinstance(value, list) and value:
        place = chance.randrange(len(value))
        if isinstance(value[place], dict) and chance.random() < 0.8:
            spoil(chance, value[place])
        else:
            value[place] = chance.choice(VALUES)


def odd_record(chance, folder):
    """The recorded gradients are inconsistent."""
    lines = []
    for step in range(3, 60, 3):
        line = GRADIENTS | {"step": step}
        if chance.random() < 0.6:
            name = chance.choice(sorted(GRADIENTS))
            line[name] = chance.choice(
                [
                    *VALUES,
                    [2.0**16] * 9,
                    ["none"] * 3,
                    ["NONE", "Backward", "none"],
                    [None] * 3,
                    [0.0, 1e-45, 1e39],
                    [-1.0, 3.0, 1e-30],
                    [1, True, "1"],
                    [float("nan")] * 3,
                    {"9999": 1, "-9999": 1},
                    {"-600": 3},
                    {"1": -5, "2": 1e300},
                    {"x": 1},
                    chance.choice(PAYLOADS),
                ]
            )
        lines.append(line)
    save(folder, [TRAIN, *lines])


def odd_steps(chance, folder):
    """Steps are negative, huge, repeated or in any order."""
    lines = sound()
    chance.shuffle(lines)
    numbers = [-5, 0, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, 1.0, "7"]
    for line in chance.sample(lines, chance.choice([1, 3, len(lines)])):
        line["step"] = chance.choice(numbers)
    save(folder, lines * chance.choice([1, 3]))


def twice(chance, folder):
    """Keys stand twice in an object."""
    lines = []
    for line in sound():
        again = f'"{chance.choice(sorted(line))}": {json.dumps(chance.choice(VALUES))}'
        text = json.dumps(line)
        lines.append(text[:-1] + ", " + chance.choice([again, text[1:-1]]) + "}")
    save(folder, lines)


def deep(chance, folder):
    """Objects and lists are nested deeply."""
    depth = chance.choice([30, 200, 900, 1100, 100_000])
    opened, closed = chance.choice([("[", "]"), ('{"a": ', "}"), ('[{"a": ', "}]")])
    nested = opened * depth + "1" + closed * depth
    split = chance.choice(
        ["train", "run", "skip", "gradients", "underflow", "float8", "validation"]
    )
    field = {"run": "settings", "skip": "cause", "gradients": "exponents", "underflow": "share"}
    field["float8"] = "float8"
    line = json.dumps({"split": split, "step": 5, "time": "2026", "model": []})
    lines = [f'{line[:-1]}, "{field.get(split, "loss")}": {nested}}}', nested]
    save(folder, [*sound(), *lines])


def hostile(chance, folder):
    """Every text that a run can hold is one that would run as code, or confuse a terminal."""
    lines = [line | hostile_fields(chance, line) for line in sound()]
    escaped = chance.random() < 0.5  # as json.dumps writes it, or as it is
    text = text_of(json.dumps(line, ensure_ascii=escaped) for line in lines)
    save(folder, text.encode("utf-8", "surrogatepass"))


def hostile_fields(chance, line):
    """Returns fields for a line, with hostile names and texts."""

    def some():
        return chance.choice(PAYLOADS)

    curves = {some(): chance.random() for _ in range(3)}
    curves |= {f"learning_rate/{some()}": 1.0, f"{some()}/loss": 2.0}
    settings = {some(): some() for _ in range(9)} | {
        "best_metric": some(),
        some(): {some(): [some()]},
    }
    named = {"name": some(), "dtype": some(), "compute_dtype": some()}
    precision = some() if chance.random() < 0.1 else "mixed_float16"
    return {
        "run": {
            "settings": settings,
            "time": chance.choice([some(), "2026-11-22T02:30:00+00:00"]),
            "model": [row | named for row in line.get("model", [])],
        },
        "train": curves,
        "validation": curves,
        "underflow": {"share": {some(): chance.random() for _ in range(5)}},
        "float8": {"float8": {f"{some()}/{some()}": dict(FLOAT8) for _ in range(5)}},
        "skip": {"cause": some(), "variable": some()},
        "recovery": {"what": some()},
        "gradients": {"precision": precision},
    }.get(line["split"], {})


def many(chance, folder):
    """Thousands of names, causes, starts, rollbacks, settings or variables."""
    count = chance.choice([300, 3000, 10_000])
    numbers = range(1, count + 1)
    row = {"shape": [1], "dtype": "float32", "compute_dtype": "float16"}
    row |= {"parameters": 1, "bytes": 4}
    start = {"split": "run", "step": 0, "time": "2026", "settings": {}, "model": []}
    recovery = {"split": "recovery", "what": "x", "restored": 1, "batches_left_out": 1}
    made = {
        "causes": [SKIP | {"step": n, "cause": f"cause {n}"} for n in numbers],
        "metrics": [TRAIN | {f"metric {n}": n for n in numbers}],
        "metrics on many lines": [TRAIN | {"step": n, f"metric {n}": n} for n in numbers],
        "data sets": [
            TRAIN,
            {"split": "validation", "step": 1} | {f"set {n}/loss": n for n in numbers},
        ],
        "rates": [TRAIN | {f"learning_rate/{n}": n for n in numbers}],
        "starts": [TRAIN, *(start | {"step": n} for n in numbers)],
        "rollbacks": [TRAIN, *(recovery | {"step": n} for n in numbers)],
        "settings": [start | {"settings": {f"setting {n}": n for n in numbers}}],
        "variables": [start | {"model": [row | {"name": f"variable {n}"} for n in numbers]}],
        "shares": [{"split": "underflow", "step": 1, "share": {f"v {n}": 0.5 for n in numbers}}],
        "float8": [FLOAT8_LINE | {"float8": {f"l {n}/k {n % 5}": FLOAT8 for n in numbers}}],
        "float8 on many lines": [
            FLOAT8_LINE | {"step": n, "float8": {f"l {n}/inputs": FLOAT8}} for n in numbers
        ],
        "shares on many lines": [
            {"split": "underflow", "step": n, "share": {f"v {n}": 0.5}} for n in numbers
        ],
        "splits": [{"split": f"split {n}", "step": n} for n in numbers],
        "scales": [{"split": "scale", "step": n, "loss_scale": 2.0 ** (n % 200)} for n in numbers],
        "records": [GRADIENTS | {"step": 3 * n, "loss_scale": [1.0 + n] * 3} for n in numbers],
        "unlike scales": [
            GRADIENTS
            | {
                "step": count,
                "loss_scale": [1.0 + n for n in numbers],
                "cause": ["none"] * count,
                "max_magnitude": [1.0] * count,
            }
        ],
        "float8 tensors": [TRAIN | {"float8": float8(*(f"t {n}" for n in numbers))}],
        "float8 tensors on many lines": [
            TRAIN | {"step": n, "float8": float8(f"t {n}")} for n in numbers
        ],
        "float8 lines": [TRAIN | {"step": n, "float8": float8("t")} for n in numbers],
        "bad lines": ["{"] * count + [json.dumps(TRAIN)],
    }
    save(folder, made[chance.choice(sorted(made))])


def long(chance, folder):
    """A line, a name or a text is very long."""
    size = chance.choice([10_000, 1_000_000, 5_000_000])
    name = chance.choice(["a", "a/", "\n", " ", "\u202e", "<b>", "😀", "\x1b"]) * size
    name = name[:size]
    start = {"split": "run", "step": 0, "time": name, "settings": {name: name}, "model": []}
    made = [
        [TRAIN | {name: 1.0}, TRAIN | {"step": 20, name: 3.0}],
        [TRAIN, SKIP | {"cause": name, "variable": name}],
        [TRAIN, start, start | {"settings": {"best_metric": name}}],
        [TRAIN, {"split": "underflow", "step": 5, "share": {name: 0.5}}],
        [TRAIN, {"split": "validation", "step": 5, name: 1.0, f"{name}/loss": 0.5}],
        [TRAIN | {f"learning_rate/{name}": 1.0, "learning_rate/b": 2.0}],
        [TRAIN | {"float8": float8(name)}],
        [GRADIENTS | {"precision": name}],
        [TRAIN, name],
        [json.dumps(TRAIN) + " " * size],
        [{"split": name, "step": 1}],
    ]
    save(folder, chance.choice(made))


def extremes(chance, folder):
    """All values are at the ends of what a float can hold."""
    ends = [1e308, -1e308, 5e-324, 1e300, 3.4e38, -3.4e38, 1e-300, 0.0, 1e16, 1e-45]
    lines = sound()
    for line in lines:
        for name, value in line.items():
            if isinstance(value, float):
                line[name] = chance.choice(ends)
            if isinstance(value, tuple | list) and name in {"loss_scale", "max_magnitude"}:
                line[name] = [chance.choice([abs(e) for e in ends]) for _ in value]
            if isinstance(value, dict) and name == "share":
                line[name] = dict.fromkeys(value, chance.choice(ends))
            if name == "float8":
                pairs = {each: (chance.choice(ends), chance.choice(ends)) for each in value}
                for each, (amax, scale) in pairs.items():
                    value[each] |= {"amax": abs(amax), "scale": abs(scale)}
    save(folder, lines)


def times(chance, folder):
    """Times and durations that no clock shows."""
    texts = [
        "0001-01-01T00:00:00+23:59",
        "9999-12-31T23:59:59-23:59",
        "0001-01-01",
        "T",
        "2026-W01",
    ]
    texts += ["2026-11-22T02:30:00+00:00:00.000001", "-1", "1e9", "\u0662\u0660\u0662\u0666-01-01"]
    seconds = [
        0.0,
        -1.0,
        -1e308,
        1e308,
        float("nan"),
        float("inf"),
        10**400,
        "9",
        None,
        True,
        59.99,
    ]
    lines = sound()
    for line in lines:
        if line["split"] == "run":
            line["time"] = chance.choice([*texts, *VALUES])
        if line["split"] == "end":
            line["seconds"] = chance.choice(seconds)
            line["stopped"] = chance.choice(VALUES)
    save(folder, lines)


def no_file(chance, folder):
    """What should be a file is a folder, a link, a pipe or a device."""
    path = folder / "metrics.jsonl"
    sound_file = folder / "elsewhere.jsonl"
    sound_file.write_bytes(sound_bytes())
    chance.choice(
        [
            path.mkdir,
            lambda: path.symlink_to(folder / "missing"),
            lambda: path.symlink_to(path),
            lambda: path.symlink_to("/dev/zero"),
            lambda: path.symlink_to("/dev/null"),
            lambda: path.symlink_to(folder),
            lambda: path.symlink_to(sound_file),
            lambda: path.symlink_to("/proc/self/mem"),
            lambda: os.mkfifo(path),
            lambda: None,
        ]
    )()


def outputs(chance, folder):
    """Where the report and the plot go, something lies already: links to a file that is not ours."""
    save(folder, sound_bytes())
    report, victim = folder / "report", folder.with_name(folder.name + ".victim")
    victims = folder.with_name(folder.name + ".victims")
    victims.mkdir()
    for path in (victim, victims / "report.html", victims / "loss.png", victims / "mine.txt"):
        path.write_text("precious")

    def within(make):
        def prepare():
            report.mkdir()
            make()

        return prepare

    chance.choice(
        [
            lambda: report.symlink_to(victims),
            lambda: report.symlink_to(victim),
            lambda: report.symlink_to(report),
            lambda: report.symlink_to(folder / "missing"),
            lambda: report.write_text("a file"),
            within(lambda: (report / "report.html").symlink_to(victim)),
            within(lambda: (report / "loss.png").symlink_to(victim)),
            within(lambda: (report / "loss.png").hardlink_to(victim)),
            within(lambda: (report / "report.html.tmp").symlink_to(victim)),
            within(lambda: (report / "loss.png.tmp").symlink_to(victim)),
            within((report / "report.html").mkdir),
            within((report / "loss.png").mkdir),
            within(lambda: (report / "report.html").symlink_to(folder)),
            within(lambda: os.mkfifo(report / "report.html")),
        ]
    )()
    scales = folder / "scales.png"
    chance.choice(
        [
            lambda: scales.symlink_to(victim),
            lambda: scales.symlink_to(victims / "mine.txt"),
            lambda: scales.hardlink_to(victim),
            lambda: os.mkfifo(scales),
            scales.mkdir,
        ]
    )()


def beside(chance, folder):
    """The other files of a run are damaged, are folders, or are links in a circle."""
    save(folder, sound_bytes())
    names = [
        "run.json",
        "flags.cfg",
        "train.csv",
        "validation.csv",
        "writer.lock",
    ]
    names += [
        "ckpt-3/run.json",
        "overflow-5/record.json",
        "best/run.json",
        "train/events.out.tfevents.1",
    ]
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        chance.choice(
            [
                lambda path=path: path.write_bytes(chance.randbytes(300)),
                lambda path=path: path.write_text(chance.choice(PAYLOADS[:17])),
                path.mkdir,
                lambda path=path: path.symlink_to(folder),
                lambda path=path: path.symlink_to("/dev/zero"),
                lambda path=path: os.mkfifo(path),
            ]
        )()


def followed(chance, folder):
    """The results of an evaluator process beside the run are damaged."""
    evaluator = folder / "eval"
    evaluator.mkdir()
    damage = chance.choice(
        [cut, flipped, binary, odd_types, odd_steps, hostile, many, no_file, deep]
    )
    damage(chance, evaluator)
    if (evaluator / "metrics.jsonl").is_file() and damage is hostile:
        text = (evaluator / "metrics.jsonl").read_bytes()
        (evaluator / "metrics.jsonl").write_bytes(text.replace(b'"train"', b'"validation"'))
    save(folder, sound_bytes())


def unreadable(chance, folder):
    """The file or the folder may not be read, or not be written to; only `locked` makes it so."""
    save(folder, sound_bytes())
    (folder / "report").mkdir()
    (folder / "locked").write_text(chance.choice(["metrics.jsonl", ".", "report"]))


DAMAGES = (
    cut,
    flipped,
    binary,
    encoded,
    nothing,
    odd_numbers,
    odd_types,
    odd_insides,
    odd_record,
    odd_steps,
    twice,
    deep,
    hostile,
    many,
    long,
    extremes,
    times,
    no_file,
    outputs,
    beside,
    followed,
    unreadable,
)


def write(parent, number):
    """Writes the folder of a malformed run; returns the name of its damage, and the folder."""
    chance = random.Random(number)  # noqa: S311 - no secret
    damage = DAMAGES[number % len(DAMAGES)]
    folder = pathlib.Path(parent) / str(number)
    if damage is hostile:  # the folder's name, too
        name = chance.choice(PAYLOADS).replace("/", "|").replace("\x00", "")
        name = name.encode("utf-8", "surrogateescape" if "lone" not in name else "ignore")
        folder = pathlib.Path(parent) / str(number) / os.fsdecode(name[:200] + b"\xff")
    folder.mkdir(parents=True)
    damage(chance, folder)
    return damage.__name__, folder
