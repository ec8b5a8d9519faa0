"""The predicate that decides which batch rows a pipeline step broadcasts.

The last stage samples; a row takes part in the step's broadcast when it *may* have produced a
token. Only a prefill chunk that is not the request's last provably yields none. The faulty
predicate of vLLM 0.23 to 0.29 also dropped rows it predicted to finish; under speculation the
mirror of ``num_computed`` runs ahead, so it dropped rows that went on decoding (vLLM PR 54436).

All arrays are one-dimensional, one entry per batch row, any integer dtype. A mask is a bool
array of that shape, or None when no row takes part and the step broadcasts nothing.
"""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer]
BoolArray = NDArray[np.bool_]


def fixed_rows(num_computed: IntArray, num_scheduled: IntArray, prefill_len: IntArray) -> BoolArray:
    """Rows of the fixed predicate (vLLM 0.30): every row but a prefill chunk that is not the last."""
    return np.asarray(num_computed + num_scheduled >= prefill_len, dtype=np.bool_)


def finished_prefill_rows(
    is_prefilling: BoolArray, prefill_len: IntArray, max_seq_len: IntArray
) -> BoolArray:
    """Rows whose final prefill chunk yields the only token their cap allows (vLLM 0.31 and later).

    Such a row finishes with that token, so no stage will ever need it.
    """
    return np.asarray(is_prefilling & (prefill_len + 1 >= max_seq_len), dtype=np.bool_)


def fixed_mask(
    num_computed: IntArray,
    num_scheduled: IntArray,
    prefill_len: IntArray,
    *,
    is_prefilling: BoolArray | None = None,
    max_seq_len: IntArray | None = None,
) -> BoolArray | None:
    """Mask of a sound engine.

    With ``is_prefilling`` and ``max_seq_len`` (both or neither) the 0.31 refinement applies, too.
    Raises ValueError if only one of the two is given.
    """
    if (is_prefilling is None) != (max_seq_len is None):
        raise ValueError("is_prefilling and max_seq_len go together: give both or neither")
    rows = fixed_rows(num_computed, num_scheduled, prefill_len)
    if is_prefilling is not None and max_seq_len is not None:
        rows &= ~finished_prefill_rows(is_prefilling, prefill_len, max_seq_len)
    return rows if has_any(rows) else None


def has_any(rows: BoolArray) -> bool:
    """Whether any row is set. Several times cheaper than a reduction, and asked for at every step of an engine."""
    return b"\1" in rows.tobytes()


def faulty_rows(
    num_computed: IntArray, num_scheduled: IntArray, prefill_len: IntArray, max_seq_len: IntArray
) -> BoolArray:
    """Rows of the faulty predicate (vLLM 0.23 to 0.29), which drops those predicted to finish."""
    predicted_to_finish = np.maximum(num_computed, prefill_len) + 1 >= max_seq_len
    return fixed_rows(num_computed, num_scheduled, prefill_len) & ~predicted_to_finish


def faulty_mask(
    num_computed: IntArray, num_scheduled: IntArray, prefill_len: IntArray, max_seq_len: IntArray
) -> BoolArray | None:
    """Mask of vLLM 0.23 to 0.29. For the lab, the doctor, and for telling what the fixed one costs."""
    rows = faulty_rows(num_computed, num_scheduled, prefill_len, max_seq_len)
    return rows if rows.any() else None
