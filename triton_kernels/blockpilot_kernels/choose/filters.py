"""Triton side of the filters of `choose`: top_k and top_p as one cut of the order "highest logit first,
lowest id
first among equals", found by bisection on an order-preserving integer key."""

from __future__ import annotations

import triton
import triton.language as tl

from blockpilot_kernels.offsets import row_offsets

LOWEST = tl.constexpr(-3.4028234663852886e38)
MASS_ONE = tl.constexpr(2.0**40)


@triton.jit
def load_row(X, r, m_r, i, V):
    """[ROWS, CHUNK] logits that `row_stats` made safe: finite, or −inf where an id cannot be chosen. r is
    int64."""
    m = m_r[:, None] & (i < V)[None, :]
    return tl.load(X + row_offsets(r, i, V), mask=m, other=-float("inf"))


@triton.jit
def row_best(ROW_BEST, r, m_r, n_chunks, CHUNKS: tl.constexpr):
    """Highest allowed logit of each row from the chunks' [N, n_chunks]; 0 where every id is banned."""
    c = tl.arange(0, CHUNKS)
    m = m_r[:, None] & (c < n_chunks)[None, :]
    best = tl.max(tl.load(ROW_BEST + row_offsets(r, c, n_chunks), mask=m, other=-float("inf")), 1)
    return tl.where(best > -float("inf"), best, 0.0)


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
    X, r, m_r, i, V, best, temperature, cut_key, cut_id, BY_MASS: tl.constexpr
):  # fmt: skip
    """Keys and weights of a chunk: 1 an id, or its mass; 0 outside the cut and for what cannot be chosen."""
    x = load_row(X, r, m_r, i, V)
    key = order_key(x)
    if BY_MASS:
        weight = (tl.exp(scaled(x, best, temperature)) * MASS_ONE).to(tl.int64)
    else:
        weight = tl.full(key.shape, 1, tl.int64)
    kept = inside_cut(key, i, cut_key, cut_id) & (x > -float("inf"))
    return key, tl.where(kept, weight, 0)


@triton.jit
def weights_from(
    X, r, m_r, V, best, temperature, cut_key, cut_id, least, step,
    BY_MASS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Weight of the ids whose key is at least `least`, `least` + step and `least` + 2 step → three [ROWS]
    int64."""
    total0 = tl.zeros([ROWS, CHUNK], tl.int64)
    total1 = tl.zeros([ROWS, CHUNK], tl.int64)
    total2 = tl.zeros([ROWS, CHUNK], tl.int64)
    for start in range(0, V, CHUNK):
        i = start + tl.arange(0, CHUNK)
        key, weight = chunk_weights(X, r, m_r, i, V, best, temperature, cut_key, cut_id, BY_MASS)
        over = key - least[:, None]
        total0 += tl.where(over >= 0, weight, 0)
        total1 += tl.where(over >= step[:, None], weight, 0)
        total2 += tl.where(over >= 2 * step[:, None], weight, 0)
    return tl.sum(total0, 1), tl.sum(total1, 1), tl.sum(total2, 1)


@triton.jit
def last_tie(
    X, r, m_r, V, best, temperature, cut_key, cut_id, found, before, limit,
    BY_MASS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Highest id with key `found` that has less than `limit` of weight before it; `before` is that of higher
    keys."""
    last = tl.full([ROWS], -1, tl.int64)
    for start in range(0, V, CHUNK):
        i = start + tl.arange(0, CHUNK)
        key, weight = chunk_weights(X, r, m_r, i, V, best, temperature, cut_key, cut_id, BY_MASS)
        weight = tl.where(key == found[:, None], weight, 0)
        ahead = before[:, None] + tl.cumsum(weight, 1) - weight
        kept = (weight > 0) & (ahead < limit[:, None])
        last = tl.maximum(last, tl.max(tl.where(kept, i[None, :].to(tl.int64), -1), 1))
        before += tl.sum(weight, 1)
    return last


@triton.jit
def find_cut(
    X, r, m_r, V, best, temperature, cut_key, cut_id, limit, active,
    BY_MASS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Cut [ROWS] that keeps the ids with less than `limit` of weight before them; unchanged where not
    `active`.

    The highest key at which the weight from the top reaches the limit is found two bits at a time; 0 if none
    does.
    """
    found = tl.zeros([ROWS], tl.int64)
    step = tl.full([ROWS], 1 << 30, tl.int64)
    for _ in range(16):
        w1, w2, w3 = weights_from(
            X, r, m_r, V, best, temperature, cut_key, cut_id, found + step, step, BY_MASS, ROWS, CHUNK
        )
        reached = tl.where(w1 >= limit, 1, 0) + tl.where(w2 >= limit, 1, 0) + tl.where(w3 >= limit, 1, 0)
        found += step * reached
        step = step >> 2
    before, _, _ = weights_from(
        X, r, m_r, V, best, temperature, cut_key, cut_id, found + 1, step, BY_MASS, ROWS, CHUNK
    )
    last = last_tie(
        X, r, m_r, V, best, temperature, cut_key, cut_id, found, before, limit,
        BY_MASS, ROWS, CHUNK,
    )  # fmt: skip
    moved = (active != 0) & (found > 0)
    return tl.where(moved, found, cut_key), tl.where(moved, last, cut_id)


@triton.jit
def row_cuts(
    X, TEMPERATURE, TOP_K, TOP_P, ROW_BEST, CUT_KEY, CUT_ID, N, V, n_chunks,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """What top_k and then top_p of the remaining mass keep: CUT_KEY, CUT_ID [N] int64, −1 where all is."""
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
            X, r, m_r, V, best, temperature, cut_key, cut_id, top_k, by_count,
            False, ROWS, CHUNK,
        )  # fmt: skip
    by_mass = tl.where(top_p < 1.0, 1, 0)
    if tl.max(by_mass, 0) > 0:
        nothing = tl.zeros([ROWS], tl.int64)
        total, _, _ = weights_from(
            X, r, m_r, V, best, temperature, cut_key, cut_id, nothing, nothing, True, ROWS, CHUNK
        )
        limit = tl.maximum((top_p * total.to(tl.float32)).to(tl.int64), 1)  # the first id always stays
        cut_key, cut_id = find_cut(
            X, r, m_r, V, best, temperature, cut_key, cut_id, limit, by_mass,
            True, ROWS, CHUNK,
        )  # fmt: skip
    tl.store(CUT_KEY + r, cut_key, mask=m_r)
    tl.store(CUT_ID + r, cut_id, mask=m_r)
