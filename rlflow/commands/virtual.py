"""Options of `rlflow run --device virtual`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import click

from rlflow.commands.options import stated_time

P = ParamSpec("P")


def virtual_options(command: Callable[P, None]) -> Callable[P, None]:
    """They reach the command as `virtual`, which is None for other devices."""

    @click.option(
        "--speed-up",
        type=click.FloatRange(min=0, min_open=True),
        metavar="X",
        help="Of a virtual run: its stages sleep for their time divided by X. Default: a step takes about 2 s.",
    )
    @click.option(
        "--ranks-per-worker",
        type=click.IntRange(min=1),
        metavar="N",
        help="Of a virtual run: ranks that a process stands for. Default: at most 16 processes.",
    )
    @click.option(
        "--stage",
        "stated",
        multiple=True,
        metavar="NAME=SECONDS",
        help="Of a virtual run: the time of a stage, of `reshard MODEL` or of `checkpoint`, in place of the estimate.",
    )
    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        speed_up, each, stated = kwargs.pop("speed_up"), kwargs.pop("ranks_per_worker"), kwargs.pop("stated")
        virtual = None
        if kwargs["device"] == "virtual":
            from rlflow.backends.ray_runtime.virtual.settings import VirtualSettings

            times = dict(stated_time(text) for text in stated)
            virtual = VirtualSettings(speed_up=speed_up, ranks_per_worker=each, stated=times)
        else:
            given = {"--speed-up": speed_up, "--ranks-per-worker": each, "--stage": stated}
            name = next((name for name, value in given.items() if value), None)
            if name is not None:
                raise click.UsageError(f"{name} is for virtual devices; add --device virtual")
        command(*args, virtual=virtual, **kwargs)  # type: ignore[arg-type]

    return wrapped
