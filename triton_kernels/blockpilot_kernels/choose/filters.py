"""Triton side of the filters of `choose`: top_k and top_p as one cut of the order "highest logit first, lowest id
first among equals", found by bisection on an order-preserving integer key."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
MASS_ONE = tl.constexpr(2.0**40)


@triton.jit
def load_row(LOGITS, BANNED, r, m_r, i, V, S):
    """[ROWS, CHUNK] logits as stored (0 outside), and with −inf at banned ids and outside, −0 as 0. r is int64."""
    inside = m_r[:, None] & (i < V)[None, :]
    raw = tl.load(LOGITS + r[:, None] * V + i[None, :], mask=inside, other=0.0)
    barred = tl.where(inside, 0, 1)
    for s in range(S):
        banned = tl.load(BANNED + r * S + s, mask=m_r, other=-1)
        barred = tl.where(i[None, :] == banned[:, None], 1, barred)
    return raw, tl.where(barred != 0, -float("inf"), tl.where(raw == 0.0, 0.0, raw))


@triton.jit
def row_best(ROW_BEST, r, m_r, n_chunks, CHUNKS: tl.constexpr):
    """Highest allowed logit of each row from the chunks' [N, n_chunks]."""
    c = tl.arange(0, CHUNKS)
    m = m_r[:, None] & (c < n_chunks)[None, :]
    return tl.max(tl.load(ROW_BEST + r[:, None] * n_chunks + c[None, :], mask=m, other=-float("inf")), 1)


@triton.jit
def scaled(x, best, temperature):
    """(x − best) / temperature, never below the lowest finite float32; greedy rows count as temperature 1."""
    divisor = tl.where(temperature > 0, temperature, 1.0)
    return tl.maximum((x - best[:, None]) / divisor[:, None], LOWEST)


@triton.jit
def order_key(x):
    """float32 → int64 in [0, 2³²) in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ordered.to(tl.int64) + 2147483648


@triton.jit
def inside_cut(key, i, cut_key, cut_id):
    """Above the cut's key, or equal to it with an id up to the cut's."""
    at = cut_key[:, None]
    return (key > at) | ((key == at) & (i[None, :] <= cut_id[:, None]))


@triton.jit
def chunk_weights(
    LOGITS, BANNED, r, m_r, i, V, S, best, temperature, cut_key, cut_id, BY_MASS: tl.constexpr
):  # fmt: skip
    """Keys and weights of a chunk: 1 an id, or its mass; 0 outside the cut and for what cannot be chosen."""
    _, x = load_row(LOGITS, BANNED, r, m_r, i, V, S)
    key = order_key(x)
    if BY_MASS:
        weight = (tl.exp(scaled(x, best, temperature)) * MASS_ONE).to(tl.int64)
    else:
        weight = tl.full(key.shape, 1, tl.int64)
    kept = inside_cut(key, i, cut_key, cut_id) & (x > -float("inf"))
    return key, tl.where(kept, weight, 0)


@triton.jit
def weight_from(
    LOGITS, BANNED, r, m_r, V, S, best, temperature, cut_key, cut_id, least,
    BY_MASS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Weight of the ids whose key is at least `least` [ROWS] → [ROWS] int64."""
    total = tl.zeros([ROWS, CHUNK], tl.int64)
    for start in range(0, V, CHUNK):
        i = start + tl.arange(0, CHUNK)
        key, weight = chunk_weights(
            LOGITS, BANNED, r, m_r, i, V, S, best, temperature, cut_key, cut_id, BY_MASS
        )
        total += tl.where(key >= least[:, None], weight, 0)
    return tl.sum(total, 1)


@triton.jit
def last_tie(
    LOGITS, BANNED, r, m_r, V, S, best, temperature, cut_key, cut_id, found, before, limit,
    BY_MASS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Highest id with key `found` that has less than `limit` of weight before it; `before` is that of higher keys."""
    last = tl.full([ROWS], -1, tl.int64)
    for start in range(0, V, CHUNK):
        i = start + tl.arange(0, CHUNK)
        key, weight = chunk_weights(
            LOGITS, BANNED, r, m_r, i, V, S, best, temperature, cut_key, cut_id, BY_MASS
        )
        weight = tl.where(key == found[:, None], weight, 0)
        ahead = before[:, None] + tl.cumsum(weight, 1) - weight
        kept = (weight > 0) & (ahead < limit[:, None])
        last = tl.maximum(last, tl.max(tl.where(kept, i[None, :].to(tl.int64), -1), 1))
        before += tl.sum(weight, 1)
    return last


@triton.jit
def find_cut(
    LOGITS, BANNED, r, m_r, V, S, best, temperature, cut_key, cut_id, limit, active,
    BY_MASS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Cut [ROWS] that keeps the ids with less than `limit` of weight before them; unchanged where not `active`.

    Bisection: the highest key at which the weight from the top reaches the limit, bit by bit. 0 if none does.
    """
    found = tl.zeros([ROWS], tl.int64)
    step = tl.full([ROWS], 1 << 31, tl.int64)
    for _ in range(32):
        candidate = found + step
        reached = weight_from(
            LOGITS, BANNED, r, m_r, V, S, best, temperature, cut_key, cut_id, candidate, BY_MASS, ROWS, CHUNK
        )
        found = tl.where(reached >= limit, candidate, found)
        step = step >> 1
    before = weight_from(
        LOGITS, BANNED, r, m_r, V, S, best, temperature, cut_key, cut_id, found + 1, BY_MASS, ROWS, CHUNK
    )
    last = last_tie(
        LOGITS, BANNED, r, m_r, V, S, best, temperature, cut_key, cut_id, found, before, limit,
        BY_MASS, ROWS, CHUNK,
    )  # fmt: skip
    moved = (active != 0) & (found > 0)
    return tl.where(moved, found, cut_key), tl.where(moved, last, cut_id)


@triton.jit
def row_cuts(
    LOGITS, BANNED, TEMPERATURE, TOP_K, TOP_P, ROW_BEST, CUT_KEY, CUT_ID, N, V, S, n_chunks,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """What top_k and then top_p of the remaining mass keep: CUT_KEY, CUT_ID [N] int64, −1 where all is kept."""
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    m_r = r < N
    best = row_best(ROW_BEST, r, m_r, n_chunks, CHUNKS)
    temperature = tl.load(TEMPERATURE + r, mask=m_r, other=0.0)
    top_k = tl.load(TOP_K + r, mask=m_r, other=0)
    top_p = tl.load(TOP_P + r, mask=m_r, other=1.0)
    cut_key = tl.full([ROWS], -1, tl.int64)
    cut_id = tl.full([ROWS], -1, tl.int64)
    by_count = tl.where((top_k > 0) & (top_k < V), 1, 0)
    if tl.max(by_count, 0) > 0:
        cut_key, cut_id = find_cut(
            LOGITS, BANNED, r, m_r, V, S, best, temperature, cut_key, cut_id, top_k, by_count,
            False, ROWS, CHUNK,
        )  # fmt: skip
    by_mass = tl.where(top_p < 1.0, 1, 0)
    if tl.max(by_mass, 0) > 0:
        all_of_it = tl.zeros([ROWS], tl.int64)
        total = weight_from(
            LOGITS, BANNED, r, m_r, V, S, best, temperature, cut_key, cut_id, all_of_it, True, ROWS, CHUNK
        )
        limit = tl.maximum((top_p * total.to(tl.float32)).to(tl.int64), 1)  # the first id always stays
        cut_key, cut_id = find_cut(
            LOGITS, BANNED, r, m_r, V, S, best, temperature, cut_key, cut_id, limit, by_mass,
            True, ROWS, CHUNK,
        )  # fmt: skip
    tl.store(CUT_KEY + r, cut_key, mask=m_r)
    tl.store(CUT_ID + r, cut_id, mask=m_r)
