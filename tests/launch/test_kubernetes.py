"""The Kubernetes manifests against the API's published schemas, and against each other's parts."""

from __future__ import annotations

import copy
import functools
import json
import os
import pathlib
import subprocess
from typing import Any

import jsonschema
import pytest
import yaml

from experiments import registry
from xmod_jax.sharding import MeshShape

ROOT = pathlib.Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "launch/k8s").glob("*.yaml"))
_GROUPS = {"v1": "io.k8s.api.core.v1", "batch/v1": "io.k8s.api.batch.v1"}


@functools.cache
def schemas() -> dict[str, Any]:
    return json.loads((pathlib.Path(__file__).parent / "kubernetes_1_33.json").read_text())


def mistakes(document: dict[str, Any]) -> list[str]:
    """What the schema of a document's kind says against it."""
    kind = f"{_GROUPS[document['apiVersion']]}.{document['kind']}"
    schema = schemas() | {"$ref": f"#/$defs/{kind}"}
    return [
        error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(document)
    ]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "launch/k8s" / name).read_text()))


def job(name: str) -> dict[str, Any]:
    return next(document for document in documents(name) if document["kind"] == "Job")


def container(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["template"]["spec"]["containers"][0]


def flags(job: dict[str, Any]) -> dict[str, str]:
    pairs = (argument.removeprefix("--").split("=", 1) for argument in container(job)["args"])
    return {name: value for name, value in pairs}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_document_follows_its_schema(path):
    found = documents(path.name)
    assert found and not [mistake for document in found for mistake in mistakes(document)]


def test_a_misspelt_field_a_wrong_type_and_a_missing_field_are_found():
    whole = job("run.yaml")
    misspelt, wrong, missing = (copy.deepcopy(whole) for _ in range(3))
    misspelt["spec"]["template"]["spec"]["restartpolicy"] = "Never"
    wrong["spec"]["completions"] = "two"
    del missing["spec"]["template"]["spec"]["containers"][0]["name"]
    assert "'restartpolicy' was unexpected" in "".join(mistakes(misspelt))
    assert "'two' is not of type 'integer'" in "".join(mistakes(wrong))
    assert "'name' is a required property" in "".join(mistakes(missing))


@pytest.mark.parametrize("name", ["run.yaml", "sweep.yaml"])
def test_a_saved_run_is_tried_again_and_a_mistake_is_not(name):
    spec = job(name)["spec"]
    assert spec["completionMode"] == "Indexed"
    # What a policy on failures requires.
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    actions: dict[int, str] = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        if codes := rule.get("onExitCodes"):
            assert codes["containerName"] == container(job(name))["name"]
            actions |= dict.fromkeys(codes["values"], rule["action"])
    assert actions[75] == "Ignore" and actions[1] == actions[2] in ("FailJob", "FailIndex")
    assert (actions[2] == "FailIndex") == ("backoffLimitPerIndex" in spec)


@pytest.mark.parametrize("name", ["run.yaml", "sweep.yaml"])
def test_a_pod_that_is_started_again_without_progress_ends_with_a_fault(name, tmp_path):
    """The container's command, with Python's part played by one that is never done."""
    start, *command = container(job(name))["command"]
    assert command[:2] == ["python", "-m"]
    variables = {entry["name"]: entry.get("value") for entry in container(job(name))["env"]}
    assert variables["XMOD_ATTEMPTS"].startswith("/runs/") and "XMOD_JOB" in variables
    known = os.environ | {"XMOD_ATTEMPTS": str(tmp_path), "XMOD_JOB": "a"}
    again = lambda: subprocess.run(
        [ROOT / start, "bash", "-c", "exit 75"], cwd=ROOT, env=known, capture_output=True
    )
    assert [again().returncode for _ in range(2)] == [75, 1]


@pytest.mark.parametrize("name", ["run.yaml", "sweep.yaml"])
def test_a_pod_asks_for_cpus_and_memory_beside_its_gpus(name):
    resources = container(job(name))["resources"]
    gpus = resources["limits"]["nvidia.com/gpu"]
    assert resources["requests"] == {"cpu": 8 * gpus, "memory": f"{60 * gpus}Gi"}


def test_the_pods_of_a_run_find_each_other_and_fill_its_mesh():
    service, run = documents("run.yaml")
    spec, pod = run["spec"], run["spec"]["template"]["spec"]
    variables = {entry["name"]: entry.get("value") for entry in container(run)["env"]}
    name = run["metadata"]["name"]
    assert spec["completions"] == spec["parallelism"] == int(variables["XMOD_PROCESS_COUNT"])
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert variables["XMOD_COORDINATOR"].split(":")[0] == f"{name}-0.{pod['subdomain']}"
    gpus = container(run)["resources"]["limits"]["nvidia.com/gpu"]
    assert MeshShape.parse(flags(run)["mesh"]).size == spec["completions"] * gpus


def test_the_pods_of_a_sweep_share_its_runs_and_each_fills_its_own_mesh():
    sweep = job("sweep.yaml")
    assert flags(sweep)["shard"] == f"$(INDEX)/{sweep['spec']['completions']}"
    gpus = container(sweep)["resources"]["limits"]["nvidia.com/gpu"]
    assert MeshShape.parse(flags(sweep)["mesh"]).size == gpus


@pytest.mark.parametrize("name", ["run.yaml", "sweep.yaml"])
def test_what_the_manifests_train_exists_and_fits_its_mesh(name):
    given = flags(job(name))
    # Without a scale several processes are refused; a path of the image's own is not the volume's.
    mounts = [mount["mountPath"] for mount in container(job(name))["volumeMounts"]]
    for path in (given["data"], given["workdir"]):
        assert any(path.startswith(f"{mount}/") for mount in mounts)
    experiment = registry.get(given["experiment"], given["scale"])
    runs = experiment.select([given["run"]] if "run" in given else [])
    assert [run.name for run in runs] == [given["run"]] if "run" in given else len(runs) > 1
    for run in runs:
        MeshShape.parse(given["mesh"]).check(run)
