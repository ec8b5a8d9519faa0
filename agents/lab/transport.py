"""What a lab rank says to the other ranks: gloo groups, and a recorded call before each of theirs."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from stagewatch.agents.identity import Rank, Sizes
from stagewatch.agents.lab.batch import InputBatch
from stagewatch.agents.lab.messages import I32
from stagewatch.agents.lab.model import DIM, DTYPE
from stagewatch.agents.lab.stage import Recorder, Sampled


class Transport:
    """One rank's groups: its pipeline, a sibling of that for the broadcast, its stage's tensor-parallel ranks.

    Raises RuntimeError, as gloo does, where a peer is gone or ``timeout_s`` passes in a call.
    """

    def __init__(
        self, store: Path, rank: Rank, sizes: Sizes, recorder: Recorder | None, timeout_s: float
    ) -> None:
        world = sizes.pp * sizes.tp
        self._rank, self._sizes = rank, sizes
        self.recorder = recorder
        """None while calls are not to be recorded."""
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            "gloo",
            store=FileStore(str(store), world),
            rank=rank.pp * sizes.tp + rank.tp,
            world_size=world,
            timeout=timeout,
        )
        # Every rank takes part in making every group, in one order. A group does not inherit the world's timeout.
        columns = [[pp * sizes.tp + tp for pp in range(sizes.pp)] for tp in range(sizes.tp)]
        stages = [[pp * sizes.tp + tp for tp in range(sizes.tp)] for pp in range(sizes.pp)]
        self._pp = [dist.new_group(column, timeout) for column in columns][rank.tp]
        self._broadcast = [dist.new_group(column, timeout) for column in columns][rank.tp]
        self._tp = [dist.new_group(stage, timeout) for stage in stages][rank.pp]
        self._column = columns[rank.tp]

    def receive_hidden(self, batch: InputBatch) -> Tensor:
        """Hidden state of ``batch`` from the stage before, [tokens, DIM]."""
        hidden = torch.empty(batch.tokens, DIM, dtype=DTYPE)
        self._enter("pp", "recv", "float64", hidden.numel(), self._sizes.pp)
        dist.recv(hidden, self._column[self._rank.pp - 1], group=self._pp)
        return hidden

    def send_hidden(self, hidden: Tensor) -> None:
        """Pass the hidden state on to the next stage."""
        self._enter("pp", "send", "float64", hidden.numel(), self._sizes.pp)
        dist.send(hidden.contiguous(), self._column[self._rank.pp + 1], group=self._pp)

    def reduce(self, part: Tensor) -> None:
        """Sum over the stage's tensor-parallel ranks, in place."""
        if self._sizes.tp > 1:
            self._enter("tp", "all_reduce", "float64", part.numel(), self._sizes.tp)
            dist.all_reduce(part, group=self._tp)

    def gather(self, part: Tensor) -> Tensor:
        """Join the slices of the stage's tensor-parallel ranks along the last axis."""
        if self._sizes.tp == 1:
            return part
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self._sizes.tp)]
        self._enter("tp", "all_gather", "float64", part.numel() * self._sizes.tp, self._sizes.tp)
        dist.all_gather(parts, part, group=self._tp)
        return torch.cat(parts, dim=-1)

    def broadcast(self, sampled: Sampled) -> None:
        """Last stage: send to all stages of the column."""
        counts = np.stack([sampled.num_sampled[0], sampled.num_rejected[0]])
        tensors = [torch.from_numpy(sampled.tokens[0].astype(np.int64)), torch.from_numpy(counts)]
        if sampled.drafts.shape[2]:
            tensors.append(torch.from_numpy(sampled.drafts[0].astype(np.int64)))
        for tensor in tensors:
            self._enter_broadcast(tensor)
            dist.broadcast(tensor, self._column[-1], group=self._broadcast)

    def receive_broadcast(self, rows: int, width: int, drafts: int) -> Callable[[], Sampled]:
        """Earlier stages: post the receives; the function returned waits for them."""
        tokens = torch.zeros(rows, width, dtype=torch.int64)
        counts = torch.zeros(2, rows, dtype=torch.int32)
        block = torch.zeros(rows, drafts, dtype=torch.int64)
        works = []
        for tensor in (tokens, counts, block)[: 3 if drafts else 2]:
            self._enter_broadcast(tensor)
            works.append(dist.broadcast(tensor, self._column[-1], group=self._broadcast, async_op=True))

        def wait() -> Sampled:
            for work in works:
                if work is not None:
                    work.wait()
            num_sampled, num_rejected = counts.numpy()
            return Sampled(
                _narrow(tokens), num_sampled[None].copy(), num_rejected[None].copy(), _narrow(block)
            )

        return wait

    def close(self) -> None:
        """Leave all groups."""
        dist.destroy_process_group()

    def _enter_broadcast(self, tensor: Tensor) -> None:
        dtype = "int32" if tensor.dtype is torch.int32 else "int64"
        self._enter("pp_broadcast", "broadcast", dtype, tensor.numel(), self._sizes.pp)

    def _enter(self, group: str, op: str, dtype: str, numel: int, size: int) -> None:
        if self.recorder:
            self.recorder.collective(0, group, op, dtype, numel, size)


def _narrow(tensor: Tensor) -> I32:
    return tensor.numpy().astype(np.int32)[None]
