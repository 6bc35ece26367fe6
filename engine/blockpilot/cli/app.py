"""Assembles the command line. Commands import torch and the engine only once they run."""

from __future__ import annotations

from typing import Annotated

import typer

from blockpilot import __version__
from blockpilot.cli import (
    analyze,
    bench,
    calibrate,
    demo,
    doctor,
    generate,
    label,
    make_data,
    report,
    train_draft,
    train_policy,
)
from blockpilot.cli.console import json_help, say
from blockpilot.cli.group import CommandGroup

app = typer.Typer(
    name="blockpilot",
    cls=CommandGroup,
    help="Exact block-diffusion speculative decoding with a block width chosen per request.",
    epilog="BLOCKPILOT_DEBUG=1 shows tracebacks; BLOCKPILOT_BACKEND forces a kernel backend.",
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"blockpilot {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Show the help when no command is named."""
    if context.invoked_subcommand is None:
        say(context.get_help())


for module, name in (
    (demo, "demo"),
    (generate, "generate"),
    (bench, "bench"),
    (calibrate, "calibrate"),
    (label, "label"),
    (make_data, "make-data"),
    (train_draft, "train-draft"),
    (train_policy, "train-policy"),
    (analyze, "analyze"),
    (report, "report"),
    (doctor, "doctor"),
):
    app.command(name, epilog=json_help(module.JSON_KEYS))(module.run)
