"""The benchmarks are scripts, not a package: their folder is put on the path, as running one does."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
