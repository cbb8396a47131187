"""The container and the manifests: they are what Kubernetes, torchrun and train.py take; nothing is started here."""

import re
import tomllib

import pytest
import yaml
from torch.distributed.run import get_args_parser

from src.config import ROOT
from src.elastic import processes
from src.run import _check

DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def documents(name):
    return {d["kind"]: d for d in yaml.safe_load_all((DEPLOY / "kubernetes" / f"{name}.yaml").read_text())}


JOB, OPERATED = documents("job"), documents("pytorchjob")["PyTorchJob"]
PODS = {
    "job": JOB["Job"]["spec"]["template"]["spec"],
    "pytorchjob": OPERATED["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"],
}
each_manifest = pytest.mark.parametrize("manifest", PODS)


@pytest.fixture
def launch(monkeypatch):
    """launch(manifest) -> torchrun's options as it reads them in the container, the script and its arguments among
    them."""

    def of(manifest):
        if manifest == "pytorchjob":  # what the operator adds to the environment
            policy = OPERATED["spec"]["elasticPolicy"]
            monkeypatch.setenv("PET_NNODES", f"{policy['minReplicas']}:{policy['maxReplicas']}")
            monkeypatch.setenv("PET_MAX_RESTARTS", str(policy["maxRestarts"]))
            monkeypatch.setenv("PET_RDZV_BACKEND", policy["rdzvBackend"])
            monkeypatch.setenv("PET_RDZV_ID", policy["rdzvId"])
            monkeypatch.setenv("PET_RDZV_ENDPOINT", f"{OPERATED['metadata']['name']}-worker-0:23456")
        (container,) = PODS[manifest]["containers"]
        torchrun, *words = container["command"] + container["args"]
        assert torchrun == "torchrun"
        return get_args_parser().parse_args(words)

    return of


@each_manifest
def test_the_group_is_elastic_and_keeps_no_store_of_an_earlier_start(launch, manifest):
    options = launch(manifest)
    assert (options.nnodes, options.nproc_per_node, options.rdzv_backend) == ("1:2", "4", "c10d")
    assert options.rdzv_id == "fewstep" and options.max_restarts >= 10
    (container,) = PODS[manifest]["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert int(options.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]


@each_manifest
def test_a_pod_that_is_taken_away_has_time_to_save(launch, manifest):
    assert 30 < launch(manifest).shutdown_timeout < PODS[manifest]["terminationGracePeriodSeconds"]


@each_manifest
def test_the_command_composes_to_one_run_whatever_nodes_there_are(launch, composed, monkeypatch, manifest):
    options = launch(manifest)
    assert (ROOT / options.training_script).exists()
    least, most = map(int, options.nnodes.split(":"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "fewstep")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", options.nproc_per_node)
    names = set()
    for nodes in range(least, most + 1):
        monkeypatch.setenv("WORLD_SIZE", str(nodes * int(options.nproc_per_node)))
        config = composed(*options.training_script_args)
        _check(config)
        started = processes(config.trainer.devices, config.trainer.num_nodes)
        assert started == (int(options.nproc_per_node), nodes)
        assert config.batch % (nodes * int(options.nproc_per_node)) == 0
        assert {"checkpoint", "health"} <= set(config.callbacks)
        names.add(config.name)
    assert len(names) == 1  # a node more or less continues the same run


@each_manifest
def test_what_a_run_writes_and_reads_lies_on_the_volume(launch, composed, monkeypatch, manifest):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    config = composed(*launch(manifest).training_script_args)
    pod, claim = PODS[manifest], documents("storage")["PersistentVolumeClaim"]
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    (kept,) = [v["name"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert {v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if v["name"] == kept} == {
        claim["metadata"]["name"]
    }
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    paths = config.paths
    assert all(path.startswith(f"{mounts[kept]}/") for path in (paths.runs, paths.data, paths.cache, paths.run))


def test_both_manifests_start_the_same(launch):
    job, operated = launch("job"), launch("pytorchjob")
    assert job.training_script_args == operated.training_script_args
    for part in ("volumes", "securityContext", "terminationGracePeriodSeconds"):
        assert PODS["job"][part] == PODS["pytorchjob"][part]
    for part in ("image", "env", "resources", "volumeMounts"):
        assert PODS["job"]["containers"][0][part] == PODS["pytorchjob"]["containers"][0][part]


def test_pods_of_the_job_find_the_first_of_them(launch):
    job, service = JOB["Job"], JOB["Service"]
    host, port = launch("job").rdzv_endpoint.split(":")
    assert host == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert PODS["job"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert int(port) in {entry["port"] for entry in service["spec"]["ports"]}
    assert int(port) in {entry["containerPort"] for entry in PODS["job"]["containers"][0]["ports"]}


def test_the_job_starts_pods_again_and_counts_no_preemption(launch):
    job = JOB["Job"]["spec"]
    assert JOB["Job"]["apiVersion"] == "batch/v1" and job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"] == int(launch("job").nnodes.split(":")[1])
    assert PODS["job"]["restartPolicy"] == "Never"  # which podFailurePolicy asks for
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "Ignore"
    assert rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert job["backoffLimit"] >= 10
    assert job["successPolicy"]["rules"] == [{"succeededIndexes": "0"}]


def test_the_operators_job_is_one():
    spec = OPERATED["spec"]
    assert OPERATED["apiVersion"] == "kubeflow.org/v1"
    assert set(spec) == {"elasticPolicy", "runPolicy", "pytorchReplicaSpecs"}
    (worker,) = spec["pytorchReplicaSpecs"].values()
    assert worker["replicas"] == spec["elasticPolicy"]["maxReplicas"]
    assert worker["restartPolicy"] in ("OnFailure", "ExitCode")
    assert PODS["pytorchjob"]["containers"][0]["name"] == "pytorch"


def test_the_container_copies_what_there_is_and_runs_the_training_command():
    lines = [line.split() for line in DOCKERFILE.splitlines()]
    sources = [source for words in lines if words[:1] == ["COPY"] for source in words[1:-1]]
    assert all(list(ROOT.glob(source)) if "*" in source else (ROOT / source).exists() for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {"pyproject.toml", project["readme"], *project["license-files"]}
    assert needed <= set(sources)  # what installing reads, before everything else is copied
    assert set(re.search(r"EXTRAS=(\S+)", DOCKERFILE)[1].split(",")) <= set(project["optional-dependencies"])
    assert 'ENTRYPOINT ["python", "train.py"]' in DOCKERFILE


def test_the_image_leaves_out_what_a_checkout_has_of_its_own():
    left_out = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    own = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
    assert {"runs", "data", "outputs", ".venv", ".cache", "conf/local"} <= own & set(left_out)
    assert not {"src", "conf", "src/data"} & set(left_out)
