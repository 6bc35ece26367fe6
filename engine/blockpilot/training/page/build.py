"""From inputs to the page: sections in order, pictures embedded and beside it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from blockpilot.policies.atomic import replacing
from blockpilot.training.page import label_parts, measured_parts, training_part
from blockpilot.training.page.drawing import check_matplotlib
from blockpilot.training.page.inputs import PageInputs
from blockpilot.training.page.parts import Part, Picture, Table
from blockpilot.training.page.subject import subject

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem; margin: 0 auto;
  padding: 1rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0.5rem 0; } h2 { font-size: 1.25rem; margin: 2.5rem 0 0.5rem; }
p { max-width: 48rem; } p.subject { font-weight: 600; max-width: none; }
nav a { margin-right: 1rem; white-space: nowrap; } a { color: #0b5394; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; } figcaption, caption {
  color: #555; font-size: 0.875rem; }
div.table { overflow-x: auto; margin: 1rem 0; } table { border-collapse: collapse; font-size: 0.875rem;
  font-variant-numeric: tabular-nums; } caption { text-align: left; padding-bottom: 0.25rem; }
th, td { padding: 0.2rem 0.75rem 0.2rem 0; text-align: right; vertical-align: top; }
th, td { white-space: nowrap; } .name { text-align: left; white-space: normal;
  overflow-wrap: anywhere; } thead th { border-bottom: 1px solid #999; }
tbody tr:nth-child(even) { background: #f6f6f6; }
"""


@dataclass(frozen=True)
class Page:
    """What was written: the HTML file, the PNG files beside it, and the sections in it."""

    html: Path
    images: tuple[Path, ...]
    parts: tuple[Part, ...]


def build_page(inputs: PageInputs, output: str | Path, advance: Callable[[], None] = lambda: None) -> Page:
    """Writes the page and its pictures; each file appears whole or not at all.

    Args:
        output: the HTML file; a picture is named like it, `<stem>-<picture>.png`.
        advance: called after each section that the inputs may have.

    Raises:
        ValueError: matplotlib is missing, or `output` is a folder.
    """
    check_matplotlib()
    output = Path(output)
    if output.is_dir():
        raise ValueError(f"report: expected a file to write, got the folder {output}")
    parts = _parts(inputs, advance)
    images = []
    for picture in (p for part in parts for p in part.pictures):
        images.append(output.with_name(f"{output.stem}-{picture.name}.png"))
        with replacing(images[-1]) as temporary:
            temporary.write_bytes(picture.png)
    with replacing(output) as temporary:
        temporary.write_text(_html(inputs, parts), encoding="utf-8")
    return Page(output, tuple(images), tuple(parts))


def sections(inputs: PageInputs) -> list[Callable[[], Part | None]]:
    """A function for each section that these inputs may have, in the order of the page."""
    found: list[Callable[[], Part | None]] = []
    labels, bench, calibration = inputs.labels, inputs.bench, inputs.calibration
    if labels:
        found += [lambda: label_parts.tau_part(labels), lambda: label_parts.locality_part(labels)]
        found += [lambda: label_parts.accepted_part(labels)]
    if labels or bench:
        found += [lambda: label_parts.offset_part(labels, bench)]
    if calibration is not None:
        if labels:
            found += [lambda: measured_parts.speed_part(labels, calibration)]
        found += [lambda: measured_parts.cost_part(calibration)]
    if bench:
        found += [lambda: measured_parts.bench_part(bench)]
    if (policy := inputs.policy) is not None:
        found += [lambda: measured_parts.policy_part(policy)]
    if (log := inputs.log) is not None:
        found += [lambda: training_part.training_part(log)]
    return found


def _parts(inputs: PageInputs, advance: Callable[[], None]) -> list[Part]:
    parts = []
    for make in sections(inputs):
        part = make()
        parts += [] if part is None else [part]
        advance()
    return parts


def _html(inputs: PageInputs, parts: list[Part]) -> str:
    about = subject(inputs)
    links = "".join(f'<a href="#{part.key}">{escape(part.title)}</a> ' for part in (*parts, about))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>BlockPilot report</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f'<p class="subject">{escape(about.text[0])}</p>\n<h1>BlockPilot report</h1>\n<nav>{links}</nav>\n'
        f"{''.join(map(_section, parts))}{_section(about, skip=1)}</body>\n</html>\n"
    )


def _section(part: Part, skip: int = 0) -> str:
    text = "".join(f"<p>{escape(paragraph)}</p>\n" for paragraph in part.text[skip:])
    pictures, tables = "".join(map(_picture, part.pictures)), "".join(map(_table, part.tables))
    return f'<section id="{part.key}">\n<h2>{escape(part.title)}</h2>\n{text}{pictures}{tables}</section>\n'


def _picture(picture: Picture) -> str:
    data, caption = base64.b64encode(picture.png).decode(), escape(picture.caption)
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{caption}">'
        f"<figcaption>{caption}</figcaption></figure>\n"
    )


def _table(table: Table) -> str:
    head = _row("th", table.header, table.names)
    rows = "".join(f"{_row('td', row, table.names)}\n" for row in table.rows)
    return (
        f'<div class="table"><table><caption>{escape(table.caption)}</caption>\n<thead>{head}</thead>\n'
        f"<tbody>\n{rows}</tbody></table></div>\n"
    )


def _row(tag: str, cells: Sequence[str], names: int) -> str:
    kinds = [f'{tag} class="name"' if i < names else tag for i in range(len(cells))]
    inner = "".join(f"<{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
    return f"<tr>{inner}</tr>"
