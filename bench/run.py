"""Run a benchmark: `python bench/run.py --list`, `python bench/run.py NAME [--json FILE] [--quick]`.

`python bench/run.py NAME --help` shows the options a benchmark has of its own. Exit code 1 if what it checks
does not hold.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType

from blockpilot.cli.console import fail, say, write_report
from blockpilot.cli.machine import hardware, versions
from registry import BENCHMARKS, find


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, report."""
    base = _base_parser()
    known, _ = base.parse_known_args(arguments)
    try:
        module = find(known.name).load() if known.name and not known.list else None
        options = _parser(base, module).parse_args(arguments)
        if module is None:
            for benchmark in BENCHMARKS:
                say(f"{benchmark.name:18}{benchmark.about}")
            return 0
        own = {name: value for name, value in vars(options).items() if name not in vars(known)}
        report = {"benchmark": options.name, **module.run(options.quick, **own)}
    except (ValueError, OSError) as error:
        fail(str(error))
        return 2
    report |= {"versions": versions(), "hardware": hardware()}
    module.show(report)
    if options.json is not None:
        write_report(options.json, report)
        if hasattr(module, "plot"):
            module.plot(report, options.json.with_suffix(".png"))
    return 0 if report["ok"] else 1


def _base_parser() -> argparse.ArgumentParser:
    base = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    base.add_argument("name", nargs="?", help="the benchmark")
    base.add_argument("--list", action="store_true", help="list the benchmarks")
    base.add_argument("--json", type=Path, metavar="FILE", help="write the report here, a plot beside it")
    base.add_argument("--quick", action="store_true", help="fewer prompts, cases or repeats")
    return base


def _parser(base: argparse.ArgumentParser, module: ModuleType | None) -> argparse.ArgumentParser:
    """The options of every benchmark with those of this one."""
    parser = argparse.ArgumentParser(
        parents=[base], description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if module is not None and hasattr(module, "add_options"):
        module.add_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
