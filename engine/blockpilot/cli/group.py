"""The command group: one place where failures become a line on stderr and an exit code.

Exit codes: 0 done, 1 the work ran and its result is a failure (for example a difference from plain decoding),
2 the command could not be carried out as asked, 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from blockpilot.cli.console import fail
from blockpilot.errors import BlockPilotError

UsageError: Any = typer.BadParameter.__base__

INTERRUPTED = 130
INTERRUPTION = "interrupted; `label`, `make-data`, `train-draft` and `bench --output` go on when run again"


class CommandGroup(TyperGroup):
    """Typer's group with short errors that list the supported names."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except UsageError as error:
            error.message = f"{error.message.rstrip('.')}; commands: {', '.join(self.list_commands(ctx))}"
            raise

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        def run() -> Any:
            return super(CommandGroup, self).main(
                args, prog_name, complete_var, False, windows_expand_args, **extra
            )

        return sys.exit(guarded(run)) if standalone_mode else run()


def debugging() -> bool:
    """Whether `BLOCKPILOT_DEBUG` asks for tracebacks."""
    value = os.environ.get("BLOCKPILOT_DEBUG", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"BLOCKPILOT_DEBUG: expected 0 or 1, got {value!r}")
    return value == "1"


def guarded(run: Callable[[], Any]) -> int:
    """Run a command; return its exit code. User mistakes arrive as `ValueError` or `OSError`."""
    debug = False
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an answer may hold what the terminal's encoding lacks
    try:
        debug = debugging()
        code = run()
        if code == INTERRUPTED:  # typer turns an interrupt into this exit code
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except UsageError as error:
        fail(error.format_message())
        return 2
    except (ValueError, OSError) as error:
        if debug:
            raise
        fail(describe(error))
        return 2
    except BlockPilotError as error:
        if debug:
            raise
        fail(describe(error))
        return 1
    except (KeyboardInterrupt, typer.Abort):
        fail(INTERRUPTION)
        return INTERRUPTED


def describe(error: BaseException) -> str:
    """The message of an error; operating-system errors name the file, an empty one its type."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__
