"""A GGUF file as a checkpoint: nothing is read before it is asked for, and nothing is kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from blockpilot.targets.checkpoint import Checkpoint, expected_tensors
from blockpilot.targets.config import ModelConfig
from blockpilot.targets.gguf import BLOCK_TYPES, Bytes, GGUFFile, dequantize, find_tensor, read_gguf
from blockpilot.targets.gguf_config import model_config
from blockpilot.targets.stored import CheckpointError, OnDemand, Sample, file_state, fingerprint
from blockpilot_kernels.packed_decoder import Blocks, large_pages

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class StoredTensors:
    """The tensors a config calls for, under HF names and with rows in HF order.

    llama.cpp keeps the rotary rows of Llama models in pairs, (2i, 2i + 1) where HF has (i, i + head_dim / 2).
    """

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.file = file
        self.shapes = dict(expected_tensors(config))
        self.found = {name: find_tensor(file, gguf_name(name), shape) for name, shape in self.shapes.items()}
        if flat := [n for n, t in self.found.items() if len(t.shape) == 1 and t.type.name in BLOCK_TYPES]:
            raise CheckpointError(f"{file.path}: tensor {gguf_name(flat[0])}: expected floats, found blocks")
        self.state = file_state(file.path)
        paired = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        self._paired = paired if config.family == "llama" else {}
        known = {"rope_freqs.weight", *map(gguf_name, self.shapes)}
        if extra := sorted(file.tensors.keys() - known):
            raise CheckpointError(
                f"{file.path}: expected only tensors its metadata describes, found also {extra[:5]}"
            )

    def floats(self, name: str) -> Tensor:
        """A whole tensor as contiguous float32."""
        shape = self.shapes[name]
        rows = self._rows(name, np.arange(shape[0]))
        return torch.from_numpy(dequantize(rows.reshape(-1), self.found[name].type.name).reshape(shape))

    def blocks(self, name: str) -> Blocks:
        """A matrix as the file stores it."""
        rows, columns = self.shapes[name]
        raw = self._rows(name, np.arange(rows))
        return Blocks(self.found[name].type.name, torch.from_numpy(raw.reshape(rows, columns // 32, -1)))

    def sample(self, name: str) -> Sample:
        """Shape and float32 bytes of a tensor, only the rows that are looked at being read."""
        shape = self.shapes[name]
        width = 4 * int(np.prod(shape[1:]))

        def read(start: int, stop: int) -> bytes:
            first, last = start // width, -(-stop // width)
            rows = self._rows(name, np.arange(first, last))
            data = dequantize(rows.reshape(-1), self.found[name].type.name).tobytes()
            return data[start - first * width : stop - first * width]

        return Sample(shape, torch.float32, width * shape[0], read)

    def matrices(self) -> dict[str, int]:
        """Bytes of each matrix that is stored in blocks."""
        found = self.found.items()
        return {n: t.nbytes for n, t in found if t.type.name in BLOCK_TYPES and len(t.shape) == 2}

    def _rows(self, name: str, index: np.ndarray) -> np.ndarray:
        """Stored bytes of HF rows, [rows, bytes]; `index` rises by one from row to row."""
        tensor = self.found[name]
        width = tensor.nbytes // self.shapes[name][0]
        heads = self._paired.get(name.split(".")[-2])
        if heads is not None:
            size = self.shapes[name][0] // heads
            head, half, pair = index // size, index % size // (size // 2), index % (size // 2)
            index = head * size + 2 * pair + half
        first = int(index.min())
        # Read, not mapped: mapped pages would count as memory of the process. And not into malloc's, which once it
        # took back a large block keeps later ones.
        count = (int(index.max()) - first + 1) * width
        near = large_pages(count).numpy()
        unchanged = file_state(self.file.path) == self.state
        if not unchanged or _fill(near, self.file.path, tensor.offset + first * width) != count:
            raise CheckpointError(f"{self.file.path}: changed while it was being loaded; load it again")
        rows = near.reshape(-1, width)
        return rows if heads is None else rows[index - first]  # an embedding need not be there twice


def _fill(memory: Bytes, path: Path, offset: int) -> int:
    """Read a file from an offset on; returns how many bytes there were."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.readinto(memory.data)


def load_gguf(path: Path) -> Checkpoint:
    """Load a `.gguf` file of F32, F16, BF16, Q8_0, Q4_0 or Q4_1 tensors under HF names.

    Raises:
        CheckpointError: a damaged file, another architecture or tensor type, or tensors that do not fit the
            metadata.
    """
    file = read_gguf(path)
    config = model_config(file)
    stored = StoredTensors(file, config)
    vocabulary = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    sizes = stored.matrices()
    return Checkpoint(
        config,
        OnDemand(stored.shapes, stored.floats),
        path,
        "gguf",
        fingerprint(config, {name: stored.sample(name) for name in stored.shapes}),
        vocabulary,
        OnDemand(sizes, stored.blocks),
        sizes,
        () if stored.state is None else (stored.state,),
    )


def gguf_name(name: str) -> str:
    """The llama.cpp name of an HF tensor name."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[part]}.{kind}"
