"""Build of the optional C++ extension `blockpilot_kernels._C`, and of the CUDA C++ where nvcc is; everything else is in
pyproject.toml.

A machine without a working C++ compiler gets the PyTorch reference instead, and one line that says so.
BLOCKPILOT_REQUIRE_EXT=1 turns that line into an error.
"""

import os
import platform
import runpy
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

REQUIRED = os.environ.get("BLOCKPILOT_REQUIRE_EXT", "0") == "1"
X86 = platform.machine().lower() in ("x86_64", "amd64")
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []  # at::parallel_for is serial without it

# No contraction into fused multiply-adds: only what asks for one gets one, whatever the compiler.
FLAGS = [
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    *OPENMP,
]

SOURCES = [
    "csrc/module.cpp",
    "csrc/cpu/isa.cpp",
    "csrc/cpu/gumbel_noise.cpp",
    "csrc/cpu/choose.cpp",
    "csrc/cpu/accept_commit.cpp",
    "csrc/cpu/draft_tree.cpp",
    "csrc/cpu/prompt_lookup.cpp",
    "csrc/cpu/rows_default.cpp",
    "csrc/cpu/pool.cpp",
    "csrc/cpu/model.cpp",
    "csrc/cpu/context.cpp",
    "csrc/cpu/decoder.cpp",
    "csrc/cpu/decoder_pass.cpp",
    "csrc/cpu/head_choice.cpp",
    "csrc/cpu/drafting.cpp",
    "csrc/cpu/eagle.cpp",
    "csrc/cpu/eagle_ops.cpp",
    "csrc/cpu/specblock.cpp",
    "csrc/cpu/specblock_ops.cpp",
    "csrc/cpu/step.cpp",
    "csrc/cpu/step_state.cpp",
    "csrc/cpu/step_tree.cpp",
    "csrc/cpu/move_places.cpp",
    "csrc/cpu/model_default.cpp",
]
if X86:
    SOURCES += [f"csrc/cpu/rows_{isa}.cpp" for isa in ("avx2", "avx512")]
    SOURCES += [f"csrc/cpu/model_{isa}.cpp" for isa in ("avx2", "avx512", "vnni", "amx")]


class OptionalBuild(BuildExtension):
    """Compile the extension, or say in one line that the package goes without it."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            if REQUIRED:
                raise
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            print(
                f"blockpilot: the C++ extension was not built ({reason}); CPU ops will use the PyTorch "
                "reference. Set BLOCKPILOT_REQUIRE_EXT=1 to make this an error.",
                file=sys.stderr,
            )
            self.extensions = []
        self._build_cuda()

    def _build_cuda(self) -> None:
        """What nvcc compiles, where there is one: without it the host repeats captured steps."""
        folder = Path(self.get_ext_fullpath("blockpilot_kernels._step_loop")).parent
        folder.mkdir(parents=True, exist_ok=True)
        try:
            runpy.run_path("csrc/cuda/build.py")["build"](folder)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            print(
                f"blockpilot: no loop for CUDA graphs ({next(iter(reason.splitlines()), '')})",
                file=sys.stderr,
            )


extension = CppExtension(
    "blockpilot_kernels._C",
    SOURCES,
    define_macros=[("BLOCKPILOT_X86", None)] if X86 else [],
    extra_compile_args=FLAGS,
    extra_link_args=OPENMP,
)
setup(ext_modules=[extension], cmdclass={"build_ext": OptionalBuild})
