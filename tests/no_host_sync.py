"""A mode under which no op may read a device value on the host or have a shape that depends on data.

On CUDA such an op would stall the stream and could not be captured in a graph. The mode sees PyTorch's ops on
any device but is blind inside custom ops; a run on `meta` tensors catches what converts values behind its
back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Reads of values that carry no tag saying so.
READS = {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::allclose"}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
COPIES = {"aten::copy_", "aten::_to_copy", "aten::to"}


class NoHostSync(TorchDispatchMode):
    """Raises RuntimeError at the first op that would synchronise host and device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        problem = _problem(func, args, kwargs)
        if problem:
            raise RuntimeError(f"host sync inside a step: {func}: {problem}")
        return func(*args, **kwargs)


def _problem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    name = func._schema.name
    if name in READS or torch.Tag.data_dependent_output in func.tags:
        return "a value is read on the host"
    if name in INDEXING:
        masks = any(
            t.dtype in (torch.bool, torch.uint8) for t in tree_leaves(args[1]) if isinstance(t, torch.Tensor)
        )
        return "an index mask gives a shape that the host has to read" if masks else None
    if torch.Tag.dynamic_output_shape in func.tags:
        return "the shape of the result depends on data, so the host has to read it"
    if name in COPIES:
        devices = {t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        if kwargs.get("device") is not None:
            devices.add(torch.device(kwargs["device"]).type)
        return (
            f"a copy between {' and '.join(sorted(devices))} waits on the host" if len(devices) > 1 else None
        )
    return None
