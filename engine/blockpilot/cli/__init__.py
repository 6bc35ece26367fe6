"""The `blockpilot` command: every subcommand is a thin layer over the library."""

from __future__ import annotations


def main() -> None:
    """Console entry point."""
    from blockpilot.cli.app import app

    app(prog_name="blockpilot")
