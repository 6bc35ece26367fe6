"""The engine suite runs once per backend; the interpreter is slow, so its run is a smaller version."""

from __future__ import annotations

import pytest

from tests.engine.pair import INTERPRETED


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "many_steps: too many steps for Triton's interpreter")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INTERPRETED:
        reason = "needs thousands of steps, at 0.2 s each in Triton's interpreter; runs on the other backends"
        for item in items:
            if item.get_closest_marker("many_steps"):
                item.add_marker(pytest.mark.skip(reason=reason))
