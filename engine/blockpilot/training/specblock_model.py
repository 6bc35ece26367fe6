"""A trainable SpecBlock drafter: the first blocks of every pair of an answer at once, and blocks that go on from them
(arXiv 2605.07243).

Pair t is the feature of position t and the id of t + 1. Its K slots, of which slot k guesses the id of t + 2 + k, are
the context that later pairs see, so one causal pass over the slots of all pairs is also the first block of every
anchor p = t + 1. Later blocks go on from a slot of the one before, fed its hidden state and the answer's id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockpilot.drafters.specblock_config import PLAIN, RANK_CLASSES, SHIFTED, SpecBlockConfig
from blockpilot.drafters.specblock_rank import rank_features
from blockpilot.targets.checkpoint import EMBEDDING, HEAD
from blockpilot.targets.config import ModelConfig
from blockpilot.targets.rope import rope_tables
from blockpilot.training.draft_model import INIT_STD, Blocks
from blockpilot.training.eagle3_model import eagle3_config

BLOCKS = 3  # that training runs, the first included
_LAYER = {f"self_attn.{k}_proj": k for k in "qkvo"} | {f"mlp.{k}_proj": k for k in ("gate", "up", "down")}
_NORMS = {"input_layernorm": "input", "post_attention_layernorm": "post"}
Keys: TypeAlias = tuple[Tensor, Tensor]  # keys and values [S, K, L, D]


def specblock_config(
    target: ModelConfig,
    layers: int,
    block_size: int,
    feature_layers: Sequence[int] | None,
    draft_ids: int,
    shift: bool = True,
) -> dict[str, Any]:
    """`config.json` of a drafter with the target's sizes; its blocks guess `block_size` − 1 ids.

    Args:
        feature_layers: target layers whose outputs it reads, 0 = the first; None for the published ones.
        shift: whether a layer beyond the first sees the slot before.
    """
    return eagle3_config(target, block_size, feature_layers, draft_ids) | {
        "architectures": [SHIFTED if shift else PLAIN],
        "num_hidden_layers": layers,
        "diffspec_draft_token_num": block_size - 1,
        "rank_classes": RANK_CLASSES,
    }


class SpecBlockModel(nn.Module):
    """The trainable drafter.

    Args:
        config: from `SpecBlockConfig.from_json`. length: positions of the longest answer with a block at its end.
        scale: [n] factors on the features, which bring them to unit size. `tensors` folds them into the condition's
            projection, and the last feature's size into what the layers read.
    """

    mask_token_id = 0  # of columns that it never reads
    weights: Any
    cos: Tensor
    sin: Tensor
    scale: Tensor

    def __init__(self, config: SpecBlockConfig, length: int, scale: Tensor) -> None:
        super().__init__()
        self.config, m = config, config.model
        shapes = config.expected_tensors()
        # By published name; torch allows no full stops in a parameter's own.
        self.names = {name: name.removesuffix(".weight").replace(".", "/") for name in shapes}
        made = {self.names[n]: nn.Parameter(torch.ones(s, dtype=torch.float32)) for n, s in shapes.items()}
        for p in made.values():
            if p.ndim > 1:
                nn.init.normal_(p, std=INIT_STD)
        self.weights = nn.ParameterDict(made)
        cos, sin = rope_tables(m.rope, m.head_dim, length + BLOCKS * config.slots)
        for name, table in (("cos", cos), ("sin", sin), ("scale", scale)):
            self.register_buffer(name, table.float().clone(), persistent=False)

    @property
    def lm_head(self) -> Tensor:
        """[V', H] of its own."""
        return self._weight("lm_head")

    def head_rows(self, head: Tensor, ids: Tensor) -> Tensor:
        """Its own head's, whatever the target's; `ids` are its draft ids."""
        return self.lm_head

    def guesses(self, blocks: Blocks, embedding: Tensor) -> Tensor:
        """Hidden states [S, N, B − 1, H] after the final norm of a chain; embedding [V, H].

        Where K ids are not enough, a second block goes on from the last slot.
        """
        columns, k = blocks.tokens.shape[2] - 1, self.config.slots
        starts = torch.full((*blocks.anchor.shape, (columns - 1) // k), k, device=blocks.anchor.device)
        made = torch.cat(self.drafts(blocks, embedding, starts), 2)
        return self.normed(made[:, :, :columns])

    def normed(self, hidden: Tensor) -> Tensor:
        """What the heads read."""
        return self._rms(hidden, "norm")

    def ranked(self, normed: Tensor, logits: Tensor) -> Tensor:
        """The rank head's scores [M, 4] of rows [M, H] with logits [M, V'] float32, which it teaches nothing."""
        features = torch.cat([normed.detach(), rank_features(logits.detach())], -1)
        return self._linear("rank_head.2", F.silu(self._linear("rank_head.0", features)))

    def drafts(self, blocks: Blocks, embedding: Tensor, starts: Tensor) -> list[Tensor]:
        """Hidden states before the final norm: first blocks [S, N, K, H], and J times [S, N', K, H] those that go on.

        Args:
            starts: [S, N', J] how many of a block's ids, 1 … K, the next one goes on from, which are the answer's; of
                the first N' anchors.
        """
        said, pairs = embedding[blocks.ids].float(), blocks.features.shape[1]
        first, context = self._first(blocks, said[:, 1 : pairs + 1])
        made, k = [first], self.config.slots
        slot = torch.arange(k, device=first.device)
        own: list[list[Keys]] = [[] for _ in context]
        at, many = blocks.anchor[:, : starts.shape[1]], starts.shape[1]
        sees = [self._behind(blocks, at, starts[..., 0])] if starts.shape[2] else []
        for j in range(starts.shape[2]):
            go_on = starts[..., j]
            if j:
                sees.append(_diagonal((slot < go_on[..., None])[:, :, None].expand(-1, -1, k, -1)))
            at = at + go_on
            slot_before = (go_on - 1)[..., None, None].expand(-1, -1, 1, first.shape[3])
            condition = made[-1][:, :many].gather(2, slot_before)[:, :, 0]
            place = at.clamp_max(said.shape[1] - 1)[..., None].expand_as(condition)
            x = self._opened(condition, said.gather(1, place))
            near = _diagonal((slot <= slot[:, None]).expand(*at.shape, k, k))
            mask = torch.cat([*sees, near], -1)[:, None]
            turn = (at[..., None] + slot).flatten(1)
            made.append(self._further(x, context, own, mask, turn))
        return made

    def _first(self, blocks: Blocks, said: Tensor) -> tuple[Tensor, list[Keys]]:
        """First blocks [S, N, K, H] of the anchors, and every layer's keys and values of the slots of all pairs."""
        t = said.shape[1]
        k, pair = self.config.slots, (blocks.anchor - 1).clamp_min(0)
        slot = torch.arange(k, device=pair.device)
        turn = (torch.arange(1, t + 1, device=pair.device)[:, None] + slot).flatten()
        x, keys = self._opened(self._condition(blocks.features), said), []
        last = self.config.model.num_layers - 1
        for i in range(last + 1):
            x = self._shifted(i, x)
            h = self._rms(x, f"layers.{i}.input_layernorm").flatten(1, 2)
            keys.append(self._keys(i, h, turn))
            if i < last:
                x = self._layer(i, x.flatten(1, 2), self._queries(i, h, turn), keys[i], None).view_as(x)
        at = pair[..., None, None].expand(-1, -1, *x.shape[2:])
        x = x.gather(1, at)
        h = self._rms(x, f"layers.{last}.input_layernorm").flatten(1, 2)
        own = (pair[..., None] * k + slot).flatten(1)
        mask = torch.arange(t * k, device=own.device) <= own[..., None]
        q = self._queries(last, h, (pair[..., None] + 1 + slot).flatten(1))
        return self._layer(last, x.flatten(1, 2), q, keys[last], mask[:, None]).view_as(x), keys

    def _behind(self, blocks: Blocks, anchor: Tensor, start: Tensor) -> Tensor:
        """[S, N'·K, T·K] bool: the slots of pairs that a later block sees, up to the one it goes on from."""
        k, places = self.config.slots, blocks.features.shape[1] * self.config.slots
        end = (anchor - 1).clamp_min(0) * k + start
        sees = torch.arange(places, device=end.device) < end[..., None]
        return sees[:, :, None].expand(-1, -1, k, -1).flatten(1, 2)

    def _further(
        self, x: Tensor, context: list[Keys], own: list[list[Keys]], mask: Tensor, turn: Tensor
    ) -> Tensor:
        """Later blocks x [S, N, K, H]; `own`: by layer, keys of the blocks before them, which theirs join."""
        for i, before in enumerate(context):
            x = self._shifted(i, x)
            h = self._rms(x, f"layers.{i}.input_layernorm").flatten(1, 2)
            own[i].append(self._keys(i, h, turn))
            k, v = (torch.cat(parts, 2) for parts in zip(before, *own[i], strict=True))
            x = self._layer(i, x.flatten(1, 2), self._queries(i, h, turn), (k, v), mask).view_as(x)
        return x

    def _condition(self, features: Tensor) -> Tensor:
        """[S, T, n·H] → [S, T, H]."""
        scaled = features.unflatten(-1, (len(self.scale), -1)).float() * self.scale[:, None]
        return self._linear("input_layer.condition_proj", scaled.flatten(2))

    def _opened(self, condition: Tensor, said: Tensor) -> Tensor:
        """[..., H], [..., H] → what the slots of each block read [..., K, H]."""
        h = self.config.model.hidden_size
        w = self._weight("input_layer.fuse") / self.scale[-1]
        both = [self._rms(condition, "input_layer.condition_norm"), self._rms(said, "input_layer.token_norm")]
        queries = self._rms(self._weight("input_layer.position_queries"), "input_layer.query_norm")
        shared = F.linear(torch.cat(both, -1), w[:, : 2 * h])
        return shared.float()[..., None, :] + F.linear(queries, w[:, 2 * h :]).float()

    def _shifted(self, i: int, x: Tensor) -> Tensor:
        """x [S, T, K, H] as layer i reads it."""
        if i == 0 or not self.config.shift:
            return x
        before = torch.cat([x[:, :, :1], x[:, :, :-1]], 2)
        return self._linear(f"shift_proj.{i - 1}", torch.cat([x, before], -1)).float()

    def _layer(self, i: int, x: Tensor, q: Tensor, keys: Keys, mask: Tensor | None) -> Tensor:
        """x [S, L, H], q [S, Q, L, D], mask [S, 1, L, keys] bool, None for causal."""
        y = F.scaled_dot_product_attention(q, *keys, mask, is_causal=mask is None, enable_gqa=True)
        x = x + self._linear(f"layers.{i}.self_attn.o_proj", y.transpose(1, 2).flatten(2))
        y = self._rms(x, f"layers.{i}.post_attention_layernorm")
        gate, up = (self._linear(f"layers.{i}.mlp.{n}_proj", y) for n in ("gate", "up"))
        return x + self._linear(f"layers.{i}.mlp.down_proj", F.silu(gate) * up)

    def _keys(self, i: int, h: Tensor, turn: Tensor) -> Keys:
        v = self._split(self._linear(f"layers.{i}.self_attn.v_proj", h))
        return self._rotated(self._linear(f"layers.{i}.self_attn.k_proj", h), turn), v

    def _queries(self, i: int, h: Tensor, turn: Tensor) -> Tensor:
        return self._rotated(self._linear(f"layers.{i}.self_attn.q_proj", h), turn)

    def _split(self, x: Tensor) -> Tensor:
        """[S, L, K·D] → [S, K, L, D]."""
        return x.unflatten(-1, (-1, self.config.model.head_dim)).transpose(1, 2)

    def _rotated(self, x: Tensor, turn: Tensor) -> Tensor:
        """Split and rotate at `turn` [L] or [S, L]."""
        cos, sin = self.cos[turn], self.sin[turn]
        if cos.ndim == 3:
            cos, sin = cos[:, None], sin[:, None]
        a, b = self._split(x).float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def _weight(self, name: str) -> Tensor:
        weight: Tensor = self.weights[self.names[f"{name}.weight"]]
        return weight

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weight(name))

    def _rms(self, x: Tensor, name: str) -> Tensor:
        weight = self._weight(name)
        return F.rms_norm(x.float(), weight.shape, weight, self.config.model.rms_norm_eps)

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a published drafter's tensors, as `tensors` gives them."""
        for name, key in self.names.items():
            self.weights[key].copy_(tensors[name])
        self._weight("input_layer.condition_proj").div_(self._sizes())
        self._weight("input_layer.fuse").mul_(self.scale[-1])

    def tensors(self) -> dict[str, Tensor]:
        """Weights under published names, float32, `scale` folded in."""
        made = {name: self.weights[key].detach().clone() for name, key in self.names.items()}
        made["input_layer.condition_proj.weight"] *= self._sizes()
        made["input_layer.fuse.weight"] /= self.scale[-1]
        return made

    def _sizes(self) -> Tensor:
        return self.scale.repeat_interleave(self.config.target_hidden_size)


def _diagonal(sees: Tensor) -> Tensor:
    """What the rows of a block see of one of its own, [S, N, K, M] → of those of all blocks, [S, N·K, N·M]."""
    s, n, k, m = sees.shape
    every = sees[:, :, :, None] & torch.eye(n, dtype=torch.bool, device=sees.device)[:, None, :, None]
    return every.reshape(s, n * k, n * m)


@torch.no_grad()
def start_specblock(
    model: SpecBlockModel, tensors: Mapping[str, Tensor], layers: Sequence[int], ids: Tensor
) -> None:
    """Begin as layers of the target over the last feature, each slot as if alone, with its head's rows `ids`.

    Args:
        tensors: the target's, under HF names.
    """
    h = model.config.model.hidden_size
    for i, source in enumerate(layers):
        for name in (*_LAYER, *_NORMS):
            model._weight(f"layers.{i}.{name}").copy_(tensors[f"model.layers.{source}.{name}.weight"])
    # These layers still say the id that is there already: the less sure, the sooner forgotten.
    model._weight("norm").copy_(tensors["model.norm.weight"] / 4)
    model.lm_head.copy_(tensors[HEAD if HEAD in tensors else EMBEDDING][ids])
    condition, eye = model._weight("input_layer.condition_proj"), torch.eye(h, dtype=torch.float32)
    condition.mul_(0.25)
    condition[:, -h:] += eye
    model._weight("input_layer.fuse")[:, :h] = eye
    for i in range(len(layers) - 1 if model.config.shift else 0):
        model._weight(f"shift_proj.{i}").copy_(F.pad(eye, (0, h)))
