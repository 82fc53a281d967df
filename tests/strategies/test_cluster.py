"""A process finds its job: by TF_CONFIG, by Slurm, by Kubernetes."""

import http.server
import json
import threading

import pytest
import tensorflow as tf

import strategies
from strategies import cluster

PODS = ["10.0.0.2", "10.0.0.1", "10.0.0.3"]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No job around, and no job left."""
    for name in ("TF_CONFIG", "SLURM_STEP_NUM_TASKS", "HALFSTEP_WORKER_PODS", "NODE_IP"):
        monkeypatch.delenv(name, raising=False)


def config(cluster, kind="worker", index=0):
    """A TF_CONFIG."""
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


def test_a_process_alone_has_no_job():
    """Nothing is made up."""
    assert strategies.find_cluster() is None


def test_tf_config_comes_first(monkeypatch):
    """It is what users and TensorFlow's own tools set."""
    jobs = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    monkeypatch.setenv("TF_CONFIG", config(jobs, index=1))
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    found = strategies.find_cluster()

    assert found.cluster_spec().as_dict() == jobs
    assert (found.task_type, found.task_id) == ("worker", 1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[]", "list indices must be integers or slices, not str"),
        ('{"task": {"type": "worker", "index": 0}}', "there is no 'cluster'"),
        ('{"cluster": {"worker": ["a:1"]}}', "there is no 'task'"),
        (config({"worker": ["a:1"]}, "chief"), "there is no 'chief'"),
        (config({"worker": ["a:1"]}, index=1), "list index out of range"),
        (config({"worker": ["a:1", "a:1"]}), "a:1 stands there twice"),
        (config({"worker": ["a:1", "b"]}), "'b' is no HOST:PORT"),
    ],
)
def test_a_tf_config_that_makes_no_job(monkeypatch, text, reason):
    """It is refused at once, where TensorFlow would wait for processes that never come."""
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match="TF_CONFIG") as error:
        strategies.create("multi_worker_mirrored")

    assert str(error.value) == (
        "`TF_CONFIG` must name the processes of the job, and which one this is; got "
        f"{text}: {reason}. Without it they cannot find each other. Set it to for instance "
        '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", '
        '"index": 0}}, or unset it for one process.'
    )


@pytest.mark.parametrize("rank", [0, 2])
def test_the_tasks_of_a_slurm_step_are_workers(monkeypatch, rank):
    """Of all its nodes, in order; TensorFlow's resolver, which divides by the number of GPUs, is kept
    from dividing by zero.
    """
    for name, value in {
        "SLURM_PROCID": rank,
        "SLURM_STEP_NUM_TASKS": 3,
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
    }.items():
        monkeypatch.setenv(name, str(value))
    found = strategies.find_cluster()

    assert found.cluster_spec().as_dict() == {"worker": ["n1:8888", "n1:8889", "n2:8888"]}
    assert (found.task_type, found.task_id, found.rpc_layer) == ("worker", rank, "grpc")
    assert found.num_accelerators() == {}


def test_a_slurm_step_that_says_too_little(monkeypatch):
    """The error has what it says."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")
    monkeypatch.setenv("SLURM_PROCID", "0")
    with pytest.raises(ValueError, match="SLURM") as error:
        strategies.find_cluster()

    assert str(error.value) == (
        "`SLURM_STEP_...` must describe a step of several tasks; got {'SLURM_STEP_NUM_TASKS': '3'}: "
        "SLURM_STEP_NODELIST not found in environment. Not running inside a SLURM step? Without it "
        "they cannot find each other. Start them with srun, or set TF_CONFIG."
    )


@pytest.fixture
def kubernetes(monkeypatch, tmp_path):
    """A server that answers as Kubernetes's does when it is asked for pods; what it was asked."""
    pytest.importorskip("kubernetes", reason="halfstep[kubernetes] is not installed")
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            pods = [
                {"metadata": {"name": f"digits-{ip}"}, "status": {"phase": "Running", "hostIP": ip}}
                for ip in PODS
            ]
            text = json.dumps({"kind": "PodList", "apiVersion": "v1", "items": pods}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *words):
            """Says nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    names = {"cluster": "here", "user": "me"}
    settings = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [
            {"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        ],
        "users": [{"name": "me", "user": {}}],
        "contexts": [{"name": "here", "context": names}],
    }
    (tmp_path / "config").write_text(json.dumps(settings))
    from kubernetes.config import kube_config  # noqa: PLC0415  # an extra

    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    monkeypatch.setenv("HALFSTEP_WORKER_PODS", "job-name=digits")
    yield asked
    server.shutdown()
    server.server_close()


def test_the_pods_of_kubernetes_are_workers(kubernetes, monkeypatch):
    """Found by their label, ordered by their names; a pod finds itself by its node's address."""
    monkeypatch.setenv("NODE_IP", "10.0.0.2")
    found = strategies.find_cluster()

    workers = ["10.0.0.1:8470", "10.0.0.2:8470", "10.0.0.3:8470"]
    assert found.cluster_spec().as_dict() == {"worker": workers}
    assert (found.task_type, found.task_id) == ("worker", 1)
    assert kubernetes == ["/api/v1/pods?labelSelector=job-name%3Ddigits"]


def test_a_pod_must_be_among_them(kubernetes):
    """Or it would take steps as another."""
    del kubernetes
    with pytest.raises(ValueError, match="HALFSTEP_WORKER_PODS") as error:
        strategies.find_cluster()

    assert str(error.value) == (
        "`HALFSTEP_WORKER_PODS` must find the pods of all workers, each on a node of its own; got "
        "'job-name=digits', which gives ['10.0.0.1:8470', '10.0.0.2:8470', '10.0.0.3:8470'], and "
        "NODE_IP None. Without it they cannot find each other. Set NODE_IP to status.hostIP, and "
        "hostNetwork: true."
    )


def test_without_the_client_the_error_names_the_extra(monkeypatch):
    """Nobody else needs it."""
    monkeypatch.setitem(__import__("sys").modules, "kubernetes", None)
    with pytest.raises(ImportError, match="HALFSTEP_WORKER_PODS") as error:
        cluster.from_kubernetes("job-name=digits")

    assert str(error.value) == (
        "`HALFSTEP_WORKER_PODS` must be unset without Kubernetes's client; got 'job-name=digits'. It "
        "asks for the workers' addresses. Install halfstep[kubernetes], or set TF_CONFIG."
    )


@pytest.mark.parametrize("name", ["multi_worker_mirrored", "parameter_server"])
def test_a_job_there_must_be(monkeypatch, name):
    """A process alone is told how to start one."""
    kinds = "none" if name == "parameter_server" else "no TF_CONFIG"
    with pytest.raises(ValueError, match=kinds) as error:
        strategies.create(name)

    assert f"`strategy` must not be {name} without a job" in str(error.value)
    assert "python -m strategies.launch --workers=2" in str(error.value)
    with pytest.raises(ValueError, match="`devices` must be None"):
        strategies.create(name, ["CPU:0"])
    if name == "parameter_server":
        monkeypatch.setenv("TF_CONFIG", config({"worker": ["a:1"]}))
        with pytest.raises(ValueError, match="got worker"):
            strategies.create(name)
    assert tf.distribute.has_strategy() is False
