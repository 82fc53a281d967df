"""Several workers, as processes on this machine that communicate over gRPC."""

import json
import signal
import time

import jobs
import numpy as np
import pytest
import tensorflow as tf
import worker_run

STEPS = 12


def lines(out, kind, index):
    """The lines that a worker has written, one per inner loop."""
    return [
        json.loads(line) for line in (out / f"{kind}-{index}.jsonl").read_text().split("\n")[:-1]
    ]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def undisturbed(request, tmp_path_factory):
    """A run of each kind; returns the number of workers and the folder of their output."""
    count = request.param
    out = tmp_path_factory.mktemp("undisturbed")
    with jobs.workers(
        out, count, "worker_run.py", out, "plain", "coupled", "noisy", f"--steps={STEPS}"
    ) as job:
        assert job.wait(240) == [0] * count, job.output()
    return count, out


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["plain", "coupled", "noisy"])
def test_all_workers_have_the_same_bits_after_every_step(undisturbed, kind):
    """Every copy of the weights, BatchNorm's statistics, slots, averages, loss scale and counts has
    the same bits on all workers after every step.
    """
    count, out = undisturbed
    first = lines(out, kind, 0)

    assert [line["step"] for line in first] == [*range(1, STEPS + 1)]
    assert len({line["digest"] for line in first}) == STEPS
    for index in range(1, count):
        assert lines(out, kind, index) == first


@pytest.mark.thorough
def test_an_overflow_on_the_last_worker_skips_on_all(undisturbed):
    """L5: an overflow in the last worker's last example skips the step on all workers and moves
    only the scale.
    """
    count, out = undisturbed
    for index in range(count):
        before, planted, after = lines(out, "noisy", index)[worker_run.PLANTED - 2 :][:3]

        assert planted["weights"] == before["weights"] != after["weights"]
        assert [line["applied"] for line in (before, planted, after)] == [2, 2, 3]
        assert [line["scale"] for line in (before, planted)] == [256.0, 128.0]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["plain", "coupled"])
def test_workers_take_the_steps_of_one_process(undisturbed, tmp_path, kind):
    """L8: one process with the whole batch has the same weights after every step, to 1e-6 (SGD), also
    with a loss of the whole batch.
    """
    _, out = undisturbed
    single = worker_run.make(
        tmp_path / f"{kind}-0.jsonl", kind, tf.distribute.get_strategy(), steps_per_loop=1
    )
    single.train(worker_run.data(STEPS), steps=STEPS)
    start = np.concatenate([np.ravel(w) for w in lines(tmp_path, kind, 0)[0]["weights"]])

    for expected, line in zip(lines(tmp_path, kind, 0), lines(out, kind, 0), strict=True):
        for ours, theirs in zip(line["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    end = np.concatenate([np.ravel(w) for w in line["weights"]])
    assert np.abs(end - start).max() > 1e-2


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["plain", "noisy"])
def test_every_worker_predicts_the_whole(undisturbed, kind):
    """Every worker returns all predictions in the order of the data, although it computes only its
    own shares.
    """
    count, out = undisturbed
    first, *others = (np.load(out / f"{kind}-{index}.npy") for index in range(count))
    weights = lines(out, kind, 0)[-1]["weights"]
    x, _ = worker_run.examples(worker_run.PLANTED)

    assert first.shape == (worker_run.PLANTED * worker_run.BATCH, 1)
    for other in others:
        assert other.tobytes() == first.tobytes()
    if kind == "plain":
        hidden = np.tanh(x @ weights[0] + weights[1])
        np.testing.assert_allclose(first, hidden @ weights[2] + weights[3], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_job_that_loses_a_worker_resumes_from_its_checkpoint(undisturbed, tmp_path, victim):
    """L12: when one worker is killed, the other ends within 30 s with an error that names it.
    Restarted, the job ends with the bits of an undisturbed one. Only the chief leaves files.
    """
    count, reference = undisturbed
    if count > 2:
        pytest.skip("needs two workers")
    model_dir = tmp_path / "run"
    command = (tmp_path, "noisy", f"--steps={STEPS}", f"--model_dir={model_dir}")
    with jobs.workers(tmp_path, 2, "worker_run.py", *command, "--pause=0.3") as job:
        job.wait_until((model_dir / "ckpt-4").exists)
        job.processes[victim].kill()
        began = time.monotonic()
        left = job.processes[1 - victim].wait(60)
        seconds = time.monotonic() - began
        printed = job.output_files[1 - victim].read_text()
        address = job.addresses[victim]
    print(f"worker {victim} killed: the other ended after {seconds:.1f} s")  # noqa: T201
    assert left == 1
    assert seconds < 30
    assert f"WorkerLostError: lost worker {victim} ({address}) after step " in printed
    assert not (model_dir / f"ckpt-{STEPS}").exists()

    (tmp_path / "noisy-0.jsonl").unlink()
    with jobs.workers(tmp_path, 2, "worker_run.py", *command) as job:
        assert job.wait() == [0, 0], job.output()
        assert "going on from step" in job.output_files[0].read_text()
        assert "step" not in job.output_files[1].read_text()
    expected = {line["step"]: line for line in lines(reference, "noisy", 0)}
    found = lines(tmp_path, "noisy", 0)
    assert 4 < found[0]["step"] <= STEPS
    assert found == [expected[line["step"]] for line in found]
    assert lines(tmp_path, "noisy", 1)[-1] == expected[STEPS]

    kept = [path.name for path in job.work_dirs[1].iterdir()]
    assert [name for name in kept if not name.startswith("__autograph")] == []
    assert {path.name for path in model_dir.iterdir()} == {
        *("ckpt-4", "ckpt-8", "ckpt-12"),
        *("metrics.jsonl", "train", "validation", "writer.lock"),
    }
    logged = map(json.loads, (model_dir / "metrics.jsonl").read_text().splitlines())
    steps = [line["step"] for line in logged if line["split"] in {"skip", "train", "validation"}]
    assert sorted(steps) == [3, 6, 6, 12, 12]  # a skip; twice a log line and an evaluation


@pytest.mark.slow
def test_data_that_only_one_worker_cannot_read_end_the_job(tmp_path):
    """The worker that cannot read its data says why, the other says which worker it lost, and
    neither waits forever.
    """
    arguments = (tmp_path, "plain", f"--steps={STEPS}", "--raise_at=4")
    with jobs.workers(tmp_path, 2, "worker_run.py", *arguments) as job:
        codes = job.wait(90)
        chief, worker = (path.read_text() for path in job.output_files)

    assert codes == [1, 1]
    assert "DataError: The training data raised InvalidArgumentError after step 4" in worker
    assert "lost worker 1 (" in chief


@pytest.mark.slow
def test_an_evaluation_that_only_one_worker_can_end_is_refused(tmp_path):
    """Evaluation data of different lengths is refused by all workers together, each with an error,
    and the training so far is saved.
    """
    model_dir = tmp_path / "run"
    arguments = (tmp_path, "plain", f"--steps={STEPS}", "--uneven", f"--model_dir={model_dir}")
    with jobs.workers(tmp_path, 2, "worker_run.py", *arguments) as job:
        codes = job.wait(90)
        chief, worker = (path.read_text() for path in job.output_files)

    assert codes == [1, 1]
    assert "UnequalLengthsError: `eval_data`" in chief
    assert "UnequalLengthsError: `eval_data`" in worker
    assert (model_dir / "ckpt-6").exists()


@pytest.mark.slow
def test_a_signal_to_one_worker_stops_all_at_the_same_step(tmp_path):
    """A signal to one worker stops all of them within two steps, however long the inner loop is;
    that step is saved, and all exit with code 75.
    """
    model_dir = tmp_path / "run"
    arguments = (f"--model_dir={model_dir}", "--steps=1000000", "--steps_per_loop=1000000")
    with jobs.workers(tmp_path, 2, "worker_run.py", tmp_path, "plain", *arguments) as job:
        job.wait_until((model_dir / "ckpt-4").exists)
        job.processes[1].send_signal(signal.SIGTERM)
        assert job.wait() == [75, 75], job.output()

    [first], [second] = lines(tmp_path, "plain", 0)[-1:], lines(tmp_path, "plain", 1)[-1:]
    assert first == second
    assert (model_dir / f"ckpt-{first['step']}").exists()
