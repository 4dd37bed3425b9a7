"""`rlflow init`: a small project that runs as it is."""

from __future__ import annotations

from pathlib import Path

import click

FLOW = "grpo.rlflow"

_TEMPLATES = {
    FLOW: "grpo.rlflow.tmpl",
    "rewards.py": "rewards.py.tmpl",
    "README.md": "README.md.tmpl",
    ".gitignore": "gitignore.tmpl",
}


@click.command()
@click.argument("folder", metavar="[FOLDER]", type=click.Path(path_type=Path, file_okay=False), default=".")
@click.option("--debug", is_flag=True, hidden=True)
def init(folder: Path, debug: bool) -> None:
    """Write a small project that is ready to run: a flow, its reward, its data. Nothing is overwritten."""
    import shlex

    files = project()
    taken = [name for name in files if (folder / name).exists() or (folder / name).is_symlink()]
    if taken:
        raise click.UsageError(f"nothing is overwritten, and here already: {_listed(folder, taken)}")
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8", newline="\n") as file:  # x: never over a file that came in between
            file.write(text)
        click.echo(f"wrote {path.as_posix()}")
    click.echo("\nnext:")
    if folder != Path("."):
        click.echo(f"  cd {shlex.quote(folder.as_posix())}")
    click.echo(f"  rlflow check {FLOW}")
    click.echo(f"  rlflow run {FLOW} --steps 2")


def project() -> dict[str, str]:
    """Path below the folder to text, in the order of writing."""
    import json
    from importlib import resources

    templates = resources.files("rlflow") / "templates" / "init"
    files = {name: (templates / template).read_text("utf-8") for name, template in _TEMPLATES.items()}
    files["data/arithmetic.jsonl"] = "".join(
        json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a in range(10) for b in range(10)
    )
    return files


def _listed(folder: Path, names: list[str]) -> str:
    return ", ".join(f"`{(folder / name).as_posix()}`" for name in names)
