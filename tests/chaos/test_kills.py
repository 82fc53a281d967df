"""Runs are killed at random and started again: they end as runs that nobody has killed.

Each case starts one of eleven kinds of runs, kills it, starts the same command again, kills it again,
and lets it come to its end. Most runs die by SIGKILL at an operation on a file that was drawn at random,
or in the middle of a text that they write; some die a random time after it, or after their first step,
wherever C++ may be then. What is left must be what a run without interruption leaves: every bit of
every variable, and of the next batches; lines, tables and curves; best models and records.

To see one case again: the numbers of a case depend on its kind and its seed alone.
"""

import collections
import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
from chaos import left_behind, runs_to_kill

from strategies.launch import free_ports
from trainer.checkpoint.folder import committed

SCRIPT = pathlib.Path(runs_to_kill.__file__)
ROOT = SCRIPT.parents[2]
PATIENCE = 300  # seconds; a run takes a few
KILLS = 25  # of each kind of run
MOST = 4  # deaths in a case


class Home:
    """The process from which runs are forked, and what its runs without a kill have left.

    Args:
        folder: for all runs.
    """

    def __init__(self, folder):
        """Starts the process, in a group that can be ended together."""
        self.folder = folder
        self._known = {}
        self._errors = (folder / "home.txt").open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        )

    def ask(self, request):
        """Returns the answer to a request."""
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, (self.folder / "home.txt").read_text()
        return json.loads(answer)

    def code(self, pid, seconds):
        """Waits for a run; returns its exit code, or None if it still runs."""
        return self.ask({"wait": pid, "seconds": seconds})["code"]

    def end(self):
        """Ends the process and all runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._errors.close()

    def whole(self, kind, **arguments):
        """Returns what a run without a kill has left, and its facts; runs it once."""
        key = f"whole-{kind}" + "".join(f"-{value}" for value in arguments.values())
        if key not in self._known:
            case = Case(self, kind, self.folder / key, **arguments)
            assert case.live() == [0] * case.members, case.printed()
            self._known[key] = case.result(), case.facts()
        return self._known[key]


class Case:
    """One run, in all of its lives.

    Args:
        home: where its processes come from.
        kind: a key of `runs_to_kill.KINDS`.
        folder: for this case.
        **arguments: for the trainer.
    """

    def __init__(self, home, kind, folder, **arguments):
        """Creates the folder."""
        self._home, self.kind, self._folder, self._arguments = home, kind, folder, arguments
        strategy = runs_to_kill.KINDS[kind].get("strategy")
        self.members = 2 if strategy == "multi_worker_mirrored" else 1
        self.run = folder / "run"
        folder.mkdir()

    def live(self, victim=0, delay=None, *, together=True, **moment):
        """Starts the run and waits for its end.

        Args:
            victim: the worker that dies.
            delay: seconds of training until it is killed from here; None if it is not.
            together: whether the other worker is killed at once. Otherwise it must end by itself.
            **moment: of `runs_to_kill.run`.

        Returns:
            The exit codes.
        """
        pids = self._start(victim, moment)
        if delay is not None:
            self._wait_for_training(pids[victim], victim)
            time.sleep(delay)
            self._kill(pids[victim])
        codes = {victim: self._ended(pids[victim])}
        for other in set(range(self.members)) - {victim}:
            if codes[victim] and together:
                self._kill(pids[other])
            codes[other] = self._ended(pids[other])
            # It says in an error which worker it has lost, or had nothing left to do.
            assert codes[other] in {0, 1} or together, self.printed()
        return [codes[member] for member in range(self.members)]

    def _start(self, victim, moment):
        """Starts all workers; returns their process ids."""
        addresses = [f"127.0.0.1:{port}" for port in free_ports(self.members)]
        pids = []
        for member in range(self.members):
            self._file("final", member).unlink(missing_ok=True)
            request = {
                "kind": self.kind,
                "folder": str(self.run),
                "final": str(self._file("final", member)),
                "output": str(self._file("output", member)),
                **self._arguments,
                **(moment if member == victim else {}),
            }
            if self.members > 1:
                task = {"type": "worker", "index": member}
                config = {"cluster": {"worker": addresses}, "task": task}
                request["environment"] = {"TF_CONFIG": json.dumps(config)}
            pids.append(self._home.ask({"start": request})["pid"])
        return pids

    def _file(self, name, member):
        return self._folder / f"{name}-{member}.txt"

    def _wait_for_training(self, pid, member):
        """Waits until a process is about to train."""
        end = time.monotonic() + PATIENCE
        while not self._file("final", member).exists() and self._home.code(pid, 0.005) is None:
            assert time.monotonic() < end, self.printed()

    def _kill(self, pid):
        """Kills a process, unless it has ended: its number may then be that of another."""
        if self._home.code(pid, 0) is None:
            os.kill(pid, signal.SIGKILL)

    def _ended(self, pid):
        """Waits for the end of a process; returns its exit code."""
        code = self._home.code(pid, PATIENCE)
        assert code is not None, f"{self.kind} does not end:\n{self.printed()}"
        return code

    def printed(self):
        """What the processes printed."""
        found = sorted(self._folder.glob("output-*.txt"))
        return "\n".join(path.read_text() for path in found)

    def facts(self):
        """What each process wrote at its end."""
        paths = [self._file("final", member) for member in range(self.members)]
        return [json.loads(path.read_text()) for path in paths]

    def result(self):
        """What is left, with the digests of all processes."""
        tensors = {
            f"{name} of worker {member}": value
            for member, facts in enumerate(self.facts())
            for name, value in facts["digests"].items()
        }
        return {"tensors": tensors, **left_behind.everything(self.run)}


def last_saved(folder):
    """The step of the newest checkpoint, or 0."""
    return max(committed(folder, "ckpt"), default=0)


def moment_of_death(chance, facts, step):
    """Draws when a run dies: arguments of `Case.live`, for one worker.

    Args:
        chance: a source of random numbers.
        facts: of the same worker in a run without a kill.
        step: the step from which the run goes on.
    """
    if chance.random() < 0.15:
        return {"delay": chance.uniform(0, facts["seconds"])}
    later = chance.uniform(0, 0.05) if chance.random() < 0.25 else 0.0
    rest = facts["events"] * (runs_to_kill.STEPS - step) // runs_to_kill.STEPS
    at = chance.randint(1, max(rest, 20))  # a run that has come to its end also writes a little
    return {"at": at, "later": later, "written": chance.random()}


def kill_and_compare(home, kind, seed, kills):
    """Kills a run up to `kills` times; returns where it died, and what was compared and differs."""
    chance = random.Random(f"{kind} {seed}")  # noqa: S311
    _, facts = home.whole(kind)
    case = Case(home, kind, home.folder / f"{kind}-{seed}")
    deaths = []
    for _ in range(kills):
        victim = chance.randrange(case.members)
        moment = moment_of_death(chance, facts[victim], last_saved(case.run))
        codes = case.live(victim, together=chance.random() < 0.5, **moment)
        if codes[victim] != -signal.SIGKILL:  # it came to its end before
            assert codes == [0] * case.members, case.printed()
            break
        deaths.append(left_behind.place_of_death(case.run))
    else:
        saved = last_saved(case.run)
        codes = case.live()
        assert codes == [0] * case.members, f"{kind} {seed}: {case.printed()}"
        assert not saved or f"going on from step {saved} (" in case.printed(), case.printed()
    return deaths, *compared(home, case, f"{kind} {seed}")


def compared(home, case, name):
    """Returns the number of values that were compared with a run without a kill; what differs."""
    expected, _ = home.whole(case.kind)
    found = case.result()
    counts = {group: len(values) for group, values in found.items()}
    differing = [
        f"{name}: {group}: {place}"
        for group, values in expected.items()
        for place in left_behind.differences(values, found[group])
    ]
    return counts, [
        *differing,
        *(f"{name}: {each}" for each in left_behind.unfinished_in(case.run)),
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Where runs come from; nothing is left running."""
    made = Home(tmp_path_factory.mktemp("kills"))
    yield made
    made.end()


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        pytest.param("replicas", 1, marks=pytest.mark.thorough),
        *(pytest.param(kind, KILLS, marks=pytest.mark.slow) for kind in runs_to_kill.KINDS),
    ],
)
def test_a_run_that_is_killed_ends_as_one_that_is_not(home, kind, kills, record_property):
    """L12: a run that is killed at random moments, also inside a save, and started again goes on from
    its last committed step and ends with the bits of one that was not killed.
    """
    deaths, counts, wrong = collections.Counter(), collections.Counter(), []
    for seed in range(10 * kills):
        missing = kills - deaths.total()
        if not missing:
            break
        died, compared_here, differing = kill_and_compare(home, kind, seed, min(missing, MOST))
        deaths.update(died)
        counts.update(compared_here)
        wrong += differing
    print(f"{kind}: {deaths.total()} kills in {seed} runs, {dict(deaths)}")  # noqa: T201
    print(f"{kind}: compared {dict(counts)}; {len(wrong)} differences")  # noqa: T201
    record_property("kills", dict(deaths))
    record_property("compared", dict(counts))
    assert not wrong, "\n".join(wrong)
    assert deaths.total() == kills
