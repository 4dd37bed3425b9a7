"""From a plan to the texts of its launch files. Pure: reads the files that are shipped, writes nothing."""

from __future__ import annotations

import base64
import hashlib
import io
import posixpath
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rlflow import __version__
from rlflow.backends.codegen import quoting
from rlflow.backends.codegen.bundle import Bundle, collect, too_large
from rlflow.backends.codegen.machines import SHARE, HostGroup, host_groups
from rlflow.backends.codegen.names import job_name
from rlflow.backends.codegen.settings import EmitSettings, check_settings
from rlflow.backends.codegen.variables import variables
from rlflow.cluster.spec import Cluster
from rlflow.diagnostics import RunFailure
from rlflow.plan import Plan

Files = dict[str, bytes | Path]
"""Path below the output folder to what is written there, or to the file that is copied there."""

JOB: Final = "job"
"""The working directory of the run, below the output folder."""
_CONFIG_MAP_BYTES: Final = 1_000_000
"""A ConfigMap holds 1 MiB at most, names and the rest of it included."""
_ZIP_DATE = (1980, 1, 1, 0, 0, 0)
_HEAD_CPUS = 4
_HEAD_GIB = 16
_KUBERNETES: Final = {"npu": "huawei.com/Ascend910", "cuda": "nvidia.com/gpu"}
_GRES: Final = {"npu": "npu", "cuda": "gpu"}


def render_files(plan: Plan, cluster: Cluster, base_dir: Path, settings: EmitSettings) -> Files:
    """Everything that goes into the output folder. Raises RunFailure RLF4008, RLF4010, RLF4011, RLF4012, RLF1012."""
    check_settings(settings)
    bundle = collect(plan, base_dir, settings.include)
    plan_text = bundle.plan.to_json()
    groups = host_groups(plan, cluster)
    kinds = {group.kind for group in groups}
    name = settings.name or job_name(plan.flow, hashlib.sha256(plan_text.encode()).hexdigest())
    common: dict[str, Any] = {
        "settings": settings,
        "plan": bundle.plan,
        "version": __version__,
        "name": name,
        "groups": groups,
        "kinds": kinds,
        "hosts": sum(group.hosts for group in groups),
        "variables": variables(plan, kinds, settings.interface),
        "elsewhere": bundle.elsewhere,
        "hub": bundle.hub,
        "job": JOB,
    }
    shipped: Files = {f"{JOB}/plan.json": plan_text.encode()}
    shipped |= {f"{JOB}/{path}": file for path, file in bundle.files.items()}
    target: Callable[[dict[str, Any], Bundle, Files], Files] = {
        "ray-job": _ray_job,
        "kuberay": _kuberay,
        "slurm": _slurm,
    }[settings.target]
    files = target(common, bundle, shipped)
    files["README.md"] = _text("README.md.j2", common | {"files": sorted(files)})
    return dict(sorted(files.items()))


def _ray_job(common: dict[str, Any], bundle: Bundle, shipped: Files) -> Files:
    common["run_dir"] = common["settings"].run_dir
    common["default_dir"] = f"$HOME/rlflow-runs/{common['name']}"
    return {
        **shipped,
        f"{JOB}/run.sh": _text("run.sh.j2", common),
        "runtime_env.yaml": _text("ray_job/runtime_env.yaml.j2", common),
        "submit.sh": _text("ray_job/submit.sh.j2", common),
    }


def _kuberay(common: dict[str, Any], bundle: Bundle, shipped: Files) -> Files:
    settings: EmitSettings = common["settings"]
    common["run_dir"] = settings.run_dir or f"/rlflow/runs/{common['name']}"
    common["mount"] = _mount(common["run_dir"])
    common["default_dir"] = ""
    shipped[f"{JOB}/run.sh"] = _text("run.sh.j2", common)
    archive = _zipped(shipped)
    if len(archive) > _CONFIG_MAP_BYTES and not settings.working_dir:
        sizes = {name: len(_bytes(content)) for name, content in shipped.items()}
        help = "put job.zip where the cluster can fetch it, and say where: `--working-dir https://HOST/job.zip`"
        raise too_large(len(archive), _CONFIG_MAP_BYTES, sizes, help)
    common |= {
        "archive": "" if settings.working_dir else base64.b64encode(archive).decode("ascii"),
        "claim": settings.claim or f"{common['name']}-runs",
        "pods": [_pod(group, settings) for group in common["groups"]],
        "head": {"cpus": _HEAD_CPUS, "memory": f"{_HEAD_GIB}Gi"},
    }
    files: Files = {**shipped, "job.zip": archive, "rayjob.yaml": _text("kuberay/rayjob.yaml.j2", common)}
    if not settings.claim:
        files["storage.yaml"] = _text("kuberay/storage.yaml.j2", common)
    return files


def _mount(run_dir: str) -> str:
    """Where the volume is mounted: the folder of the run folder, so that the run folder is on the volume. RLF4010."""
    normal = posixpath.normpath(run_dir)
    mount = posixpath.dirname(normal)
    if mount in ("/", "//") or normal != run_dir.rstrip("/"):
        raise RunFailure(
            "RLF4010",
            f"--run-dir `{run_dir}` is not legal for the target `kuberay`: its folder is where the volume is mounted",
            help=(f"name a folder in a folder, without `..`: `/rlflow/runs/{posixpath.basename(normal) or 'run'}`",),
        )
    return mount


def _pod(group: HostGroup, settings: EmitSettings) -> dict[str, Any]:
    """What the pod of one host asks for."""
    cpus = max(group.processes, int((group.cpus or 0) * SHARE))
    memory = None if group.memory_bytes is None else int(group.memory_bytes * SHARE) // 2**30
    return {
        "group": group,
        "cpus": cpus,
        "memory_gib": memory,
        "shm_gib": None if memory is None else max(1, int(memory * 0.3)),
        "device_resource": settings.device_resource or _KUBERNETES.get(group.kind, ""),
    }


def _slurm(common: dict[str, Any], bundle: Bundle, shipped: Files) -> Files:
    settings: EmitSettings = common["settings"]
    groups: tuple[HostGroup, ...] = common["groups"]
    if len({group.device for group in groups}) > 1:
        raise RunFailure(
            "RLF4012",
            f"the plan runs on hosts of {len({group.device for group in groups})} types, and a Slurm job asks for one",
            notes=tuple(f"{group.hosts} hosts with {group.devices} x {group.device}" for group in groups),
            help=("compile for a cluster of one type of host, or use `--target kuberay` or `--target ray-job`",),
        )
    fullest = max(groups, key=lambda group: (group.devices, group.ray_cpus))
    common |= {
        "run_dir": settings.run_dir,
        "default_dir": f"$SLURM_SUBMIT_DIR/runs/{common['name']}",
        "group": fullest,
        "cpus": max((group.cpus or 0) for group in groups) if all(group.cpus for group in groups) else None,
        "processes": max(group.processes for group in groups),
        "gres": settings.device_resource or _GRES.get(fullest.kind, ""),
    }
    return {
        **shipped,
        f"{JOB}/run.sh": _text("run.sh.j2", common),
        "job.sbatch": _text("slurm/job.sbatch.j2", common),
    }


def _zipped(files: Files) -> bytes:
    """The same bytes for the same files. Ray takes the one folder at the top off."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _ZIP_DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, _bytes(content))
    return buffer.getvalue()


def _bytes(content: bytes | Path) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def _text(template: str, values: dict[str, Any]) -> bytes:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # No autoescape: it is for HTML. Every value goes through one of the filters, or is checked by `check_settings`.
    environment = Environment(
        loader=PackageLoader("rlflow.backends.codegen"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        comment_start_string="{##",  # `{#` is the length of an array in a shell
        comment_end_string="##}",
    )
    environment.filters |= {
        "sh": quoting.shell,
        "yaml": quoting.yaml,
        "comment": quoting.comment,
        "md": quoting.markdown,
    }
    return environment.get_template(template).render(values).encode()
