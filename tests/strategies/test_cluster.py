"""A process finds its job from TF_CONFIG, Slurm or Kubernetes."""

import http.server
import json
import threading

import pytest

import strategies
from strategies import cluster

PODS = ["10.0.0.2", "10.0.0.1", "10.0.0.3"]


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    """Removes the variables of any job from the environment, before and after each test."""
    for name in ("TF_CONFIG", "SLURM_STEP_NUM_TASKS", "HALFSTEP_WORKER_PODS", "NODE_IP"):
        monkeypatch.delenv(name, raising=False)


def config(cluster, kind="worker", index=0):
    """Returns the text of a TF_CONFIG."""
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


def test_a_single_process_has_no_job():
    """Without any of the variables there is no job."""
    assert strategies.find_cluster() is None


def test_tf_config_comes_first(monkeypatch):
    """TF_CONFIG is used even if Slurm's variables are set as well."""
    jobs = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    monkeypatch.setenv("TF_CONFIG", config(jobs, index=1))
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    found = strategies.find_cluster()

    assert found.cluster_spec().as_dict() == jobs
    assert (found.task_type, found.task_id) == ("worker", 1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "{",
            "not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 "
            "(char 1)",
        ),
        ("[]", "not in the form of the example"),
        (config({"worker": ["a:1"]}, index="first"), "not in the form of the example"),
        ('{"task": {"type": "worker", "index": 0}}', "'cluster' is missing"),
        ('{"cluster": {"worker": ["a:1"]}}', "'task' is missing"),
        (config({"worker": ["a:1"]}, "chief"), "'chief' is missing"),
        (config({"worker": ["a:1"]}, index=1), "there is no worker 1"),
        (config({"worker": ["a:1", "a:1"]}), "a:1 is listed twice"),
        (config({"worker": ["a:1", "b"]}), "'b' is not HOST:PORT"),
    ],
)
def test_a_bad_tf_config_is_refused(monkeypatch, text, reason):
    """A TF_CONFIG that cannot work is refused at once; TensorFlow alone would wait forever."""
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match="TF_CONFIG") as error:
        strategies.create("multi_worker_mirrored")

    assert str(error.value) == (
        "`TF_CONFIG` must list all processes of the job and say which one this is; got "
        f"{text} ({reason}). The processes find each other through this variable. Set it, for example, "
        'to {"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", '
        '"index": 0}}, or unset it to run a single process.'
    )


def test_the_example_in_the_error_is_a_job():
    """The TF_CONFIG that the error suggests is accepted."""
    text = config({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]})

    assert cluster.find_problem(text) is None


@pytest.mark.parametrize("rank", [0, 2])
def test_the_tasks_of_a_slurm_step_are_workers(monkeypatch, rank):
    """The tasks of all nodes are workers, in order, also on nodes without GPUs."""
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


def test_an_incomplete_slurm_step_is_an_error(monkeypatch):
    """The error shows the variables that Slurm has set."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")
    monkeypatch.setenv("SLURM_PROCID", "0")
    with pytest.raises(ValueError, match="SLURM") as error:
        strategies.find_cluster()

    assert str(error.value) == (
        "Cannot find the other tasks of this Slurm step: SLURM_STEP_NODELIST not found in "
        "environment. Not running inside a SLURM step? The environment has "
        "{'SLURM_STEP_NUM_TASKS': '3'}. Start the tasks with srun, or set TF_CONFIG."
    )


@pytest.fixture
def kubernetes(monkeypatch, tmp_path):
    """Runs a server that lists pods as Kubernetes does; returns the paths that were requested."""
    pytest.importorskip("kubernetes", reason="halfstep[kubernetes] is not installed")
    requested = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requested.append(self.path)
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
            """Prints nothing."""

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
    yield requested
    server.shutdown()
    server.server_close()


def test_the_pods_of_kubernetes_are_workers(kubernetes, monkeypatch):
    """Pods are found by label and sorted; a pod recognizes itself by the address of its node."""
    monkeypatch.setenv("NODE_IP", "10.0.0.2")
    found = strategies.find_cluster()

    workers = ["10.0.0.1:8470", "10.0.0.2:8470", "10.0.0.3:8470"]
    assert found.cluster_spec().as_dict() == {"worker": workers}
    assert (found.task_type, found.task_id) == ("worker", 1)
    assert kubernetes == ["/api/v1/pods?labelSelector=job-name%3Ddigits"]


def test_a_pod_that_is_not_a_worker_is_an_error(kubernetes):
    """A pod whose node is not in the list does not take another worker's place."""
    del kubernetes
    with pytest.raises(ValueError, match="HALFSTEP_WORKER_PODS") as error:
        strategies.find_cluster()

    assert str(error.value) == (
        "Cannot tell which worker this pod is: HALFSTEP_WORKER_PODS='job-name=digits' finds the "
        "workers ['10.0.0.1:8470', '10.0.0.2:8470', '10.0.0.3:8470'], and NODE_IP is None. Every "
        "worker needs its own node, and NODE_IP must be the address of this pod's node. In the pod "
        "template, set NODE_IP from the field status.hostIP, set hostNetwork: true, and keep pods "
        "of the job off each other's nodes with podAntiAffinity."
    )


def test_without_the_client_the_error_names_the_extra(monkeypatch):
    """Without the optional Kubernetes client, the error says how to install it."""
    monkeypatch.setitem(__import__("sys").modules, "kubernetes", None)
    with pytest.raises(ImportError, match="HALFSTEP_WORKER_PODS") as error:
        cluster.from_kubernetes("job-name=digits")

    assert str(error.value) == (
        "Cannot look up the workers of HALFSTEP_WORKER_PODS='job-name=digits': the Kubernetes client "
        "is not installed. Run pip install 'halfstep[kubernetes]', or set TF_CONFIG, which is used "
        "instead."
    )
