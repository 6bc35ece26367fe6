"""One self-contained HTML page of everything measured on a pair, with its pictures beside it."""

from blockpilot.training.page.build import Page, build_page
from blockpilot.training.page.inputs import PageInputs, read_inputs

__all__ = ["Page", "PageInputs", "build_page", "read_inputs"]
