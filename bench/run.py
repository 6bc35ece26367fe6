"""Run a benchmark: `python bench/run.py --list`, `python bench/run.py NAME [--json FILE] [--quick]`.

Exit code 1 if what it checks does not hold.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from blockpilot.cli.console import fail, say, write_report
from blockpilot.cli.machine import hardware, versions
from registry import BENCHMARKS, find


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", help="the benchmark")
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    parser.add_argument("--quick", action="store_true", help="fewer prompts, cases or repeats")
    options = parser.parse_args(arguments)
    if options.list or options.name is None:
        for benchmark in BENCHMARKS:
            say(f"{benchmark.name:18}{benchmark.about}")
        return 0
    try:
        module = find(options.name).load()
        report = {"benchmark": options.name, **module.run(options.quick)}
    except (ValueError, OSError) as error:
        fail(str(error))
        return 2
    report |= {"versions": versions(), "hardware": hardware()}
    module.show(report)
    if options.json is not None:
        write_report(options.json, report)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
