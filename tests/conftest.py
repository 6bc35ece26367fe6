"""Set-up shared by every test: Triton's interpreter where no GPU is, no kept weights, hypothesis profiles."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel's module is imported

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests import interp_shim

    interp_shim.install()

os.environ["BLOCKPILOT_CACHE"] = "off"  # tests of the cache have a folder of their own

settings.register_profile("dev", max_examples=30, deadline=None)
settings.register_profile("ci", max_examples=30, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))
