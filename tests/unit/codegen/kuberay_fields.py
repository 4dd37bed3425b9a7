"""The fields of the objects in rayjob.yaml, as JSON Schemas: those of KubeRay's RayJob and RayCluster (ray.io/v1, the JSON
names in ray-operator/apis/ray/v1), and of Kubernetes' own objects those that the launch files use, with their rules for names."""

from __future__ import annotations

from typing import Any

INTEGER = {"type": "integer", "minimum": 0}
TEXT = {"type": "string", "minLength": 1}
BOOLEAN = {"type": "boolean"}
LABEL = {"type": "string", "maxLength": 63, "pattern": r"^([A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)?$"}
DNS_LABEL = {"type": "string", "maxLength": 63, "pattern": r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"}
DNS_NAME = {"type": "string", "maxLength": 253, "pattern": r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"}
RAY_JOB_NAME = {"type": "string", "maxLength": 47, "pattern": r"^[a-z]([a-z0-9-]*[a-z0-9])?$"}
QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?$"}
KEY = r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"


def closed(required: str = "", **fields: Any) -> dict[str, Any]:
    """An object of these fields and no others."""
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def of(value: Any, keys: str = KEY) -> dict[str, Any]:
    """A map with keys of that pattern."""
    return {"type": "object", "patternProperties": {keys: value}, "additionalProperties": False}


def listed(item: Any) -> dict[str, Any]:
    return {"type": "array", "items": item}


def metadata(name: Any) -> dict[str, Any]:
    return closed("name", name=name, namespace=DNS_LABEL, labels=of(LABEL), annotations=of({"type": "string"}))


RESOURCES = closed(requests=of(QUANTITY), limits=of(QUANTITY))
CONTAINER = closed(
    "name image",
    name=DNS_LABEL,
    image=TEXT,
    ports=listed(closed("containerPort", containerPort=INTEGER, name=DNS_LABEL | {"maxLength": 15})),
    resources=RESOURCES,
    env=listed(closed("name value", name={"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}, value={"type": "string"})),
    volumeMounts=listed(
        closed("name mountPath", name=DNS_LABEL, mountPath={"type": "string", "pattern": "^/[^:]+$"}, readOnly=BOOLEAN)
    ),
)  # fmt: skip
VOLUME = closed(
    "name",
    name=DNS_LABEL,
    persistentVolumeClaim=closed("claimName", claimName=DNS_NAME),
    configMap=closed("name", name=DNS_NAME),
    emptyDir=closed(medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
)
POD = closed(
    "spec",
    metadata=closed(labels=of(LABEL), annotations=of({"type": "string"})),
    spec=closed("containers", containers=listed(CONTAINER) | {"minItems": 1}, volumes=listed(VOLUME)),
)
RAY_START = of({"type": "string"}, "^[a-z]+(-[a-z]+)*$")
"""Parameters of `ray start`: all of them text."""
RAY_CLUSTER = closed(
    "headGroupSpec",
    headGroupSpec=closed(
        "rayStartParams template",
        serviceType=TEXT,
        headService={"type": "object"},
        enableIngress=BOOLEAN,
        rayStartParams=RAY_START,
        template=POD,
    ),
    workerGroupSpecs=listed(
        closed(
            "groupName minReplicas maxReplicas rayStartParams template",
            groupName=DNS_LABEL,
            replicas=INTEGER,
            minReplicas=INTEGER,
            maxReplicas=INTEGER,
            numOfHosts=INTEGER,
            rayStartParams=RAY_START,
            template=POD,
            scaleStrategy={"type": "object"},
        )
    ),
    rayVersion=TEXT,
    enableInTreeAutoscaling=BOOLEAN,
    autoscalerOptions={"type": "object"},
    headServiceAnnotations=of({"type": "string"}),
    suspend=BOOLEAN,
)
RAY_JOB = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=metadata(RAY_JOB_NAME),
    spec=closed(
        "entrypoint rayClusterSpec",
        activeDeadlineSeconds=INTEGER,
        backoffLimit=INTEGER,
        rayClusterSpec=RAY_CLUSTER,
        submitterPodTemplate=POD,
        metadata=of({"type": "string"}),
        clusterSelector=of({"type": "string"}),
        submitterConfig=closed(backoffLimit=INTEGER),
        managedBy=TEXT,
        deletionStrategy={"type": "object"},
        entrypoint=TEXT,
        runtimeEnvYAML=TEXT,
        jobId=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        entrypointResources=TEXT,
        entrypointNumCpus={"type": "number"},
        entrypointNumGpus={"type": "number"},
        ttlSecondsAfterFinished=INTEGER,
        shutdownAfterJobFinishes=BOOLEAN,
        suspend=BOOLEAN,
    ),
)
CONFIG_MAP = closed(
    "apiVersion kind metadata binaryData",
    apiVersion={"const": "v1"},
    kind={"const": "ConfigMap"},
    metadata=metadata(DNS_NAME),
    binaryData=of({"type": "string", "pattern": "^[A-Za-z0-9+/]*={0,2}$"}, r"^[A-Za-z0-9._-]+$"),
)
CLAIM = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "v1"},
    kind={"const": "PersistentVolumeClaim"},
    metadata=metadata(DNS_NAME),
    spec=closed("accessModes resources", accessModes=listed(TEXT), resources=RESOURCES, storageClassName=TEXT),
)
