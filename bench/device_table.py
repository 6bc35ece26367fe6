"""The device check's results for people, in plain text: nothing that has to be installed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def show(report: dict[str, Any]) -> None:
    """A line a section, a table of kernels, a table of steps."""
    print(f"\n{report['label']}: {report.get('gpu', 'unknown GPU')}, commit {report['commit']}")
    found = {name: section["results"] for name, section in report["sections"].items()}
    for name, section in report["sections"].items():
        if section["status"] not in ("ok", "skipped"):
            print(f"{name}: {section['status']}: {section.get('reason', '')}")
    if speed := found.get("probe", {}).get("copy_bytes_per_s"):
        print(
            f"copy {speed / 1e9:.0f} GB/s, bf16 product {found['probe'].get('bf16_flops', 0) / 1e12:.0f} TFLOP/s"
        )
    kernels = found.get("kernels", {}).get("kernels", [])
    if kernels:
        _print_rows(("kernel", "MB", "us", "% of copy"), [_kernel(row) for row in kernels])
    entries = [entry for results in found.values() for entry in results.get("entries", [])]
    if entries:
        times = ("step ms", "limit ms", "% of copy", "draft ms", "verify ms", "commit us")
        heads = ("model", "width", *times, "projected tok/s")
        _print_rows(heads, [_step(entry) for entry in entries])


def _kernel(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["name"], f"{row['bytes'] / 1e6:.2f}", "failed", row["error"][:40]]
    share = 100 * row["share_of_copy"]
    return [row["name"], f"{row['bytes'] / 1e6:.2f}", f"{row['ms'] * 1e3:.1f}", f"{share:.0f}"]


def _step(entry: dict[str, Any]) -> list[str]:
    def shown(key: str, scale: float = 1.0, digits: int = 3) -> str:
        value = entry.get(key)
        return "-" if value is None else f"{value * scale:.{digits}f}"

    return [
        entry["model"],
        str(entry["width"]),
        shown("step_ms"),
        shown("limit_ms"),
        shown("share_of_copy", 100, 0),
        shown("draft_ms"),
        shown("verify_ms"),
        shown("accept_commit_ms", 1e3, 1),
        shown("projected_tokens_per_s", digits=0),
    ]


def _print_rows(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    listed = [list(heads), *map(list, rows)]
    widths = [max(len(row[i]) for row in listed) for i in range(len(heads))]
    print()
    for row in listed:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)),
        ]
        print("  ".join(cells))
