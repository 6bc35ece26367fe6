"""Small checks of values that come from files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def check_number(name: str, value: Any, optional: bool = False) -> None:
    """Refuse anything but a finite number, or None where that is allowed."""
    if optional and value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value!r}")


def refuse_constant(constant: str) -> float:
    """For `json.loads`: NaN and infinities are no JSON."""
    raise ValueError(f"{constant} is no JSON number")


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file; `what` it should be, for the refusal."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)
    except OSError as error:
        raise ValueError(f"{path}: expected a readable {what}, got {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected the JSON of a {what}, got {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected the JSON object of a {what}, got {str(found)[:60]}")
    return found
