"""A process finds its job from TF_CONFIG, Slurm or Kubernetes."""

import http.server
import json
import threading

import pytest

import strategies

PODS = ["10.0.0.2", "10.0.0.1", "10.0.0.3"]


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    """Removes the variables of any job from the environment, before and after each test."""
    for name in ("TF_CONFIG", "SLURM_STEP_NUM_TASKS", "HALFSTEP_WORKER_PODS", "NODE_IP"):
        monkeypatch.delenv(name, raising=False)


def config(cluster, kind="worker", index=0):
    """Returns the text of a TF_CONFIG."""
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


def test_tf_config_comes_first(monkeypatch):
    """TF_CONFIG is used even if Slurm's variables are set as well."""
    jobs = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    monkeypatch.setenv("TF_CONFIG", config(jobs, index=1))
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    found = strategies.find_cluster()

    assert found.cluster_spec().as_dict() == jobs
    assert (found.task_type, found.task_id) == ("worker", 1)


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
    with pytest.raises(ValueError, match=r"^`NODE_IP`"):
        strategies.find_cluster()
