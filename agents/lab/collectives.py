"""The calls a rank makes in a step, and how far ranks get when their calls do not match."""

from collections.abc import Sequence

from stagewatch.agents.identity import Rank, Sizes
from stagewatch.agents.lab.batch import InputBatch
from stagewatch.agents.lab.fault import Call
from stagewatch.agents.lab.faults_group import DRAFTER_OP

HIDDEN = 64
"""Width of the hidden state that the simulator's calls speak of."""


def step_calls(
    rank: Rank, sizes: Sizes, batch: InputBatch, width: int, drafts: int, vocab_size: int, *, broadcasts: bool
) -> list[Call]:
    """The calls of one executed batch on ``rank``, in order. ``width`` and ``drafts`` are those of the broadcast."""
    last = rank.pp == sizes.pp - 1
    rows, hidden = batch.rows, batch.tokens * HIDDEN
    calls: list[Call] = []
    if rank.pp:
        calls.append(Call("pp", "recv", "float32", hidden, sizes.pp))
    if sizes.tp > 1:
        calls.append(Call("tp", "all_reduce", "float32", hidden, sizes.tp))
    if not last:
        calls.append(Call("pp", "send", "float32", hidden, sizes.pp))
    elif sizes.tp > 1:
        calls.append(Call("tp", "all_gather", "float32", rows * vocab_size, sizes.tp))
        if batch.spec_tokens:
            calls.append(Call("tp", DRAFTER_OP, "float32", rows * HIDDEN, sizes.tp))
    if broadcasts and sizes.pp > 1:
        calls += broadcast_calls(rows, width, drafts, sizes.pp)
    return calls


def broadcast_calls(rows: int, width: int, drafts: int, pp: int) -> list[Call]:
    """The broadcast's calls on every stage."""
    calls = [
        Call("pp_broadcast", "broadcast", "int64", rows * width, pp),
        Call("pp_broadcast", "broadcast", "int32", 2 * rows, pp),
    ]
    if drafts:
        calls.append(Call("pp_broadcast", "broadcast", "int64", rows * drafts, pp))
    return calls


def entered(ranks: Sequence[Rank], calls: Sequence[list[Call]]) -> tuple[list[list[Call]], bool]:
    """(calls each rank gets to enter, whether all of them complete).

    A call completes once every member of its group has entered one of the same operation, size and dtype; a
    point-to-point call needs its neighbour only. Ranks that cannot go on stay in the call they entered last.
    """
    done = [0] * len(ranks)

    def current(index: int) -> Call | None:
        return calls[index][done[index]] if done[index] < len(calls[index]) else None

    def partners(index: int, call: Call) -> list[tuple[int, Call]]:
        rank = ranks[index]
        if call.op == "send":
            return [
                (i, _opposite(call)) for i, r in enumerate(ranks) if r == Rank(rank.dp, rank.pp + 1, rank.tp)
            ]
        if call.op == "recv":
            return [
                (i, _opposite(call)) for i, r in enumerate(ranks) if r == Rank(rank.dp, rank.pp - 1, rank.tp)
            ]
        group = [i for i, r in enumerate(ranks) if _same_group(call.group, rank, r)]
        return [(i, call) for i in group if i != index]

    moved = True
    while moved:
        moved = False
        for index in range(len(ranks)):
            call = current(index)
            if call is None:
                continue
            others = partners(index, call)
            if all(current(i) == expected for i, expected in others):
                for i in (index, *(i for i, _ in others)):
                    done[i] += 1
                moved = True
    complete = all(done[i] == len(calls[i]) for i in range(len(ranks)))
    return [calls[i][: done[i] + 1] for i in range(len(ranks))], complete


def _opposite(call: Call) -> Call:
    op = "recv" if call.op == "send" else "send"
    return Call(call.group, op, call.dtype, call.numel, call.group_size)


def _same_group(group: str, one: Rank, other: Rank) -> bool:
    if group == "tp":
        return (one.dp, one.pp) == (other.dp, other.pp)
    if group == "dp":
        return (one.pp, one.tp) == (other.pp, other.tp)
    return (one.dp, one.tp) == (other.dp, other.tp)
