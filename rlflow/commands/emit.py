"""`rlflow emit PLAN --target TARGET -o DIR`: launch files for clusters."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rlflow.cluster.spec import Cluster
    from rlflow.plan import Plan


@click.command()
@click.argument("path", metavar="FILE|PLAN", type=click.Path(path_type=Path))
@click.option("--target", required=True, metavar="TARGET", help="ray-job, kuberay or slurm.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder that is written.")
@click.option("--name", default="", help="Of the job; default: the flow's name and a digest of the plan.")
@click.option("--run-dir", default="", metavar="DIR", help="The run folder, on storage that all hosts see.")
@click.option("--interface", default="", metavar="NAME", help="The network interface between hosts, as in eth0.")
@click.option("--include", multiple=True, type=click.Path(path_type=Path), help="Ship this too; as often as needed.")
@click.option("--device-resource", default="", metavar="NAME", help="kuberay, slurm: what devices are called there.")
@click.option("--image", default="", help="kuberay: the image of the pods, with rlflow, Ray and torch.")
@click.option("--namespace", default="", help="kuberay: where the objects are made.")
@click.option("--claim", default="", metavar="NAME", help="kuberay: a volume claim that is there, for the run folder.")
@click.option("--working-dir", default="", metavar="URI", help="kuberay: where job.zip will be fetched from.")
@click.option("--partition", default="", help="slurm.")
@click.option("--account", default="", help="slurm.")
@click.option("--time", default="", help="slurm: the longest that the job may take, as in 1-12 or 90.")
@click.option("--set", "-D", "overrides", multiple=True, metavar="PATH=VALUE", help="Replace an argument.")
@click.option("--flow", metavar="NAME", help="Which flow, when the file has several.")
@click.option("--cluster", metavar="NAME", help="Which cluster's schedule.")
@click.option(
    "--profile", metavar="FILE", type=click.Path(path_type=Path), help="Estimate from what `rlflow profile` measured."
)
@click.option("--format", "format_", type=click.Choice(("text", "json")), default="text")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def emit(
    path: Path,
    output: Path,
    overrides: tuple[str, ...],
    flow: str | None,
    cluster: str | None,
    profile: Path | None,
    format_: str,
    debug: bool,
    **chosen: Any,
) -> None:
    """Write what starts the run of a plan on a cluster, with the plan and the files that it needs.

    Targets: ray-job (a job for a Ray cluster that is there), kuberay (a RayJob for Kubernetes) and slurm (a batch
    script). Files that were edited since are never overwritten.
    """
    from rlflow.backends.codegen.render import render_files
    from rlflow.backends.codegen.settings import EmitSettings, check_settings
    from rlflow.backends.codegen.write import write_files
    from rlflow.driver import Options

    settings = EmitSettings(**chosen)
    check_settings(settings)
    if settings.target == "kuberay":
        settings = replace(settings, ray_version=_ray_version())
    plan, machines, base_dir = _plan(path, Options(flow, cluster, overrides, profile))
    files = render_files(plan, machines, base_dir, settings)
    write_files(output, files)
    if format_ == "json":
        click.echo(json.dumps({"folder": output.as_posix(), "target": settings.target, "files": list(files)}, indent=2))
        return
    click.echo(
        f"wrote {len(files)} files for {settings.target} to {output}; {output / 'README.md'} says how to start it"
    )


def _plan(path: Path, options: Any) -> tuple[Plan, Cluster, Path]:
    """The plan with its cluster and the folder of its .rlflow file. The plan itself has only the cluster's name."""
    from rlflow import driver, runs
    from rlflow.diagnostics.render import render

    if path.suffix != ".json":
        checked = driver.check(path, options)
        if checked.warnings:
            click.echo(render(list(checked.warnings), "full", color=sys.stderr.isatty()), err=True)
        return driver.plan_of(checked, options), checked.lowered.cluster, path.parent
    if options != driver.Options():
        raise click.UsageError("--set, --flow, --cluster, --profile apply to a .rlflow file; this is a plan already")
    plan = driver.load_plan(path)
    base_dir = driver.find_base_dir(plan, path)
    runs.check_sources(plan, base_dir, allow_changed=False)
    # The sources are those of the plan, so the same names and replaced arguments give the cluster that it was made for.
    again = driver.Options(plan.flow, plan.cluster, plan.overrides)
    return plan, driver.lowered(base_dir / Path(plan.sources[0].path).name, again).cluster, base_dir


def _ray_version() -> str:
    """The Ray that is installed here, which the image should have too; "" where there is none."""
    from importlib import metadata

    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        return ""
