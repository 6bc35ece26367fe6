"""What the sections of the device check share: the device, shapes that fit it, and times by events."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blockpilot.recorders import Recorder, Ring, Uncaptured, recorder_for, repeating

Put = Callable[[str, Any], None]
SAMPLES, REPLAYS = 5, 4
MOST_REPEATS = 50
BUSY_BYTES = 2e8  # what one captured piece moves at least, so that starting it does not count


class Skip(Exception):
    """Something that is not needed is not here; the message says what."""


@dataclass(frozen=True)
class Setup:
    """Where and at what size to run.

    Attributes:
        dry: tiny shapes on a CPU. seconds: what the section has. began: when it did.
        kernels, models: the backend that is forced for single kernels and for whole models.
    """

    dry: bool
    seconds: float
    began: float
    device: torch.device
    kernels: str
    models: str

    @classmethod
    def of(cls, dry: bool, seconds: float) -> Setup:
        """On CUDA, or a dry run in Triton's interpreter.

        Raises:
            RuntimeError: no CUDA device, and no dry run was asked for.
        """
        began = time.monotonic()
        if dry:
            os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported
            from tests import interp_shim

            interp_shim.install()
            return cls(True, seconds, began, torch.device("cpu"), "triton", "reference")
        if not torch.cuda.is_available():
            raise RuntimeError("expected a CUDA device, got none; --dry-run needs no GPU")
        return cls(False, seconds, began, torch.device("cuda"), "triton", "triton")

    @property
    def left(self) -> float:
        """Seconds until this section is stopped."""
        return self.seconds - (time.monotonic() - self.began)

    @property
    def recorder(self) -> Recorder:
        """CUDA graphs, or what stands for them."""
        return recorder_for(self.device) or Uncaptured()

    def size(self, full: Any, dry: Any) -> Any:
        """A size on a GPU, or that of a dry run."""
        return dry if self.dry else full

    def milliseconds(
        self, calls: Sequence[Callable[[], Any]], moved: float, before: Callable[[], object] | None = None
    ) -> dict[str, Any]:
        """`ms` of one of `calls`, which are equal but for the memory they read, as the median of captured pieces.

        Args:
            moved: bytes of one call. before: done before every piece, untimed.
        """
        repeats = 1 if self.dry else max(1, min(MOST_REPEATS, int(BUSY_BYTES / max(moved * len(calls), 1.0))))

        def piece() -> None:
            for _ in range(repeats):
                for call in calls:
                    call()

        recorder, count = self.recorder, repeats * len(calls)
        none = torch.zeros(1, dtype=torch.int64, device=self.device)
        ring = Ring(none[:, None].expand(REPLAYS, 1), none, none)  # that no piece writes to
        recorder.warm(piece)
        try:
            replay, captured = recorder.record(piece, None), True
        except RuntimeError:
            replay, captured = repeating(piece), False
        samples = []
        for _ in range(self.size(SAMPLES, 1)):
            if before:
                before()
            samples.append(recorder.launch(replay, self.size(REPLAYS, 1), ring)()[1])
        median = statistics.median(samples) / self.size(REPLAYS, 1) / count
        return {"ms": median * 1e3, "captured": captured}

    def wall_ms(self, call: Callable[[], Any], times: int = 5) -> float:
        """Milliseconds of a call that the host waits for, the median."""
        samples = []
        for _ in range(self.size(times, 1) + 1):
            start = time.perf_counter()
            call()
            self.wait()
            samples.append((time.perf_counter() - start) * 1e3)
        return statistics.median(samples[1:])

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def copy_bandwidth(self) -> float:
        """Bytes per second, read and written, of a copy that no cache holds."""
        size = self.size(2**31, 2**16)
        source = torch.empty(size, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        return 2 * size / self.milliseconds([lambda: target.copy_(source)], 2.0 * size)["ms"] * 1e3
