"""The RayJob: fields that KubeRay knows, names that Kubernetes takes, resources that the plan needs."""

from __future__ import annotations

import base64
import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlflow.backends.codegen import quoting
from rlflow.diagnostics import RunFailure

yaml = pytest.importorskip("yaml")  # comes with Ray
jsonschema = pytest.importorskip("jsonschema")


def fields() -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location("kuberay_fields", Path(__file__).with_name("kuberay_fields.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def validated(files: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The objects of rayjob.yaml and storage.yaml by kind, each checked; and the pods by the name of their container."""
    schemas = fields()
    known = {"RayJob": schemas.RAY_JOB, "ConfigMap": schemas.CONFIG_MAP, "PersistentVolumeClaim": schemas.CLAIM}
    objects = {}
    for name in ("rayjob.yaml", "storage.yaml"):
        for document in yaml.safe_load_all(files.get(name, b"")):
            jsonschema.validate(document, known[document["kind"]])
            objects[document["kind"]] = document
    cluster = objects["RayJob"]["spec"]["rayClusterSpec"]
    groups = {"head": cluster["headGroupSpec"]} | {g["groupName"]: g for g in cluster["workerGroupSpecs"]}
    for group in groups.values():
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    return objects, groups


def test_npu_hosts(project: Any, emitted: Any) -> None:
    objects, groups = validated(emitted(project("ascend_910b"), "kuberay"))
    worker = groups["hosts-0"]
    assert (worker["replicas"], worker["minReplicas"], worker["maxReplicas"]) == (4, 4, 4)
    (container,) = worker["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "172", "memory": "1382Gi", "huawei.com/Ascend910": "8"}
    assert container["resources"]["limits"] == container["resources"]["requests"]
    # KubeRay puts the text behind `--resources=` in a shell, which must leave JSON.
    (word,) = shlex.split(worker["rayStartParams"]["resources"])
    assert json.loads(word) == {"NPU": 8}
    assert "gpu" not in json.dumps(objects["RayJob"]).lower(), "a plan for NPUs asks for no GPU"
    assert groups["head"]["rayStartParams"]["num-cpus"] == "0"
    names = {variable["name"] for variable in container["env"]}
    assert {"HCCL_EXEC_TIMEOUT", "HCCL_CONNECT_TIMEOUT", "PYTORCH_NPU_ALLOC_CONF"} <= names
    claim = objects["PersistentVolumeClaim"]["metadata"]["name"]
    for group in groups.values():
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim
        assert volumes["job"]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]


def test_gpu_hosts_and_other_names_of_devices(project: Any, emitted: Any) -> None:
    _, groups = validated(emitted(project("h100"), "kuberay"))
    worker = groups["hosts-0"]
    limits = worker["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "8"
    assert worker["rayStartParams"]["num-gpus"] == "8"
    assert "resources" not in worker["rayStartParams"]
    _, groups = validated(emitted(project("h100"), "kuberay", device_resource="nvidia.com/mig-1g.10gb"))
    limits = groups["hosts-0"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/mig-1g.10gb"] == "8"


MIXED = """
schedule Async_GRPO on pod {
  pool rollout = 4 devices { device = h100 }
  pool learner = 16 devices { device = ascend_910b }
  place actor.generate         on rollout
  place actor.train, reference on learner
}
cluster pod {
  small = 8 * h100 { memory = 1 TiB, cpus = 64 }
  large = 8 * ascend_910b { memory = 1.5 TiB, cpus = 192 }
  hosts = 2 * large
}
"""


def test_two_types_of_hosts_are_two_groups(project: Any, emitted: Any) -> None:
    """A host of which half is used asks for half."""
    path = project("", schedule=MIXED)
    _, groups = validated(emitted(path, "kuberay"))
    asked = {
        name: (group["replicas"], group["template"]["spec"]["containers"][0]["resources"]["limits"])
        for name, group in groups.items()
        if name != "head"
    }
    assert sorted((n, r.get("nvidia.com/gpu"), r.get("huawei.com/Ascend910")) for n, r in asked.values()) == [
        (1, "4", None),
        (2, None, "8"),
    ]


def test_the_names_are_those_of_the_flow_made_legal(project: Any, emitted: Any) -> None:
    path = project()
    objects, _ = validated(emitted(path, "kuberay"))
    name = objects["RayJob"]["metadata"]["name"]
    assert name.startswith("async-grpo-")
    assert objects["RayJob"]["metadata"]["annotations"]["rlflow/flow"] == "Async_GRPO"
    path.write_text(path.read_text("utf-8").replace("Async_GRPO", "A" * 200), "utf-8")
    validated(emitted(path, "kuberay"))
    objects, _ = validated(emitted(path, "kuberay", name="mine", namespace="team-a", claim="runs.v1"))
    assert objects["RayJob"]["metadata"]["name"] == "mine"
    assert {o["metadata"]["namespace"] for o in objects.values()} == {"team-a"}
    assert "PersistentVolumeClaim" not in objects, "one that is there is used"


def test_the_run_folder_is_on_the_volume(project: Any, emitted: Any) -> None:
    path = project()
    files = emitted(path, "kuberay", run_dir='/data/it\'s $HOME/run "1"')
    _, groups = validated(files)
    for group in groups.values():
        mounts = {m["name"]: m["mountPath"] for m in group["template"]["spec"]["containers"][0]["volumeMounts"]}
        assert mounts["runs"] == "/data/it's $HOME"
    for wrong in ("/run", "/", "/data/../run"):
        with pytest.raises(RunFailure, match="not legal for the target `kuberay`"):
            emitted(path, "kuberay", run_dir=wrong)


def test_the_working_directory(project: Any, emitted: Any) -> None:
    path = project()
    files = emitted(path, "kuberay")
    objects, _ = validated(files)
    assert base64.b64decode(objects["ConfigMap"]["binaryData"]["job.zip"]) == files["job.zip"]
    environment = yaml.safe_load(objects["RayJob"]["spec"]["runtimeEnvYAML"])
    assert environment == {"working_dir": "file:///rlflow/job/job.zip"}
    objects, _ = validated(emitted(path, "kuberay", working_dir="https://host/path/job.zip"))
    assert "ConfigMap" not in objects
    assert yaml.safe_load(objects["RayJob"]["spec"]["runtimeEnvYAML"]) == {"working_dir": "https://host/path/job.zip"}


def test_more_than_a_config_map_holds(project: Any, emitted: Any) -> None:
    path = project()
    Path("flow/noise").write_bytes(random.Random(0).randbytes(1_100_000))
    with pytest.raises(RunFailure) as caught:
        emitted(path, "kuberay", include=(Path("noise"),))
    assert caught.value.code == "RLF4011"
    assert caught.value.notes[0].startswith("`job/noise`")
    assert "--working-dir" in caught.value.help[0]
    validated(emitted(path, "kuberay", include=(Path("noise"),), working_dir="s3://bucket/job.zip"))


@pytest.mark.parametrize(
    "text",
    ["plain", "yes", "1e3", "~", "- x", "a: b", "# c", "it's", '"', "\\", "${HOME}", "a\nkind: Pod", "\x00\x85\u2028\ufeff", "日本 😀", ""],
)  # fmt: skip
def test_text_stays_text(text: str) -> None:
    assert yaml.safe_load(f"key: {quoting.yaml(text)}\nnext: 1") == {"key": text, "next": 1}
    assert "\n" not in quoting.comment(text)
    if "\x00" not in text:
        assert shlex.split(f"echo {quoting.shell(text)}") == ["echo", text]
