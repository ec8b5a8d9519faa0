"""Copies of tensors: the host's path here, the device's by tests/gpu/staging.py, which is run here where it can be."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stagewatch.agents.engines.staging import TABLES_MAX, Gather, Head, HostStaging, Values, staging_for

SCRIPT = Path(__file__).parents[1] / "gpu" / "staging.py"


class TestHostStaging:
    def test_publishes_before_it_returns_in_the_pieces_order(self) -> None:
        table = torch.arange(12).reshape(4, 3)
        rows = torch.tensor([2, 0])
        found: list[Values] = []
        HostStaging().take(
            [Gather(table, rows, rows.numpy()), torch.tensor([7, 8]), Head(table, 1)], found.extend
        )
        assert [values.tolist() for values in found] == [[[6, 7, 8], [0, 1, 2]], [7, 8], [[0, 1, 2]]]

    def test_gathered_rows_are_a_copy(self) -> None:
        table = torch.zeros(4, 1, dtype=torch.int64)
        rows = torch.tensor([1])
        found: list[Values] = []
        HostStaging().take([Gather(table, rows, rows.numpy())], found.extend)
        table[1] = 9
        assert found[0].tolist() == [[0]]

    def test_a_table_whose_memory_has_moved_is_seen_anew(self) -> None:
        """GIVEN an engine that slept and woke in other memory THEN what is there now is read."""
        staging, table, rows = HostStaging(), torch.zeros(4, 1), torch.tensor([1])
        found: list[Values] = []
        piece = Gather(table, rows, rows.numpy())
        staging.take([piece], found.extend)
        table.data = torch.full((4, 1), 7.0)
        staging.take([piece], found.extend)
        assert [values.tolist() for values in found] == [[[0]], [[7]]]

    def test_tables_are_kept_in_a_bounded_number_and_let_go(self) -> None:
        staging, rows = HostStaging(), torch.tensor([1])
        for _ in range(5 * TABLES_MAX):
            staging.take([Gather(torch.zeros(4, 1), rows, rows.numpy())], lambda values: None)
            assert len(staging._tables) <= TABLES_MAX
        staging.forget()
        assert staging._tables == {}

    def test_serves_the_cpu_and_refuses_what_it_cannot_order(self) -> None:
        assert isinstance(staging_for(torch.device("cpu"), 8, lambda count: None), HostStaging)
        with pytest.raises(ValueError, match="device type meta is not supported"):
            staging_for(torch.device("meta"), 8, lambda count: None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the device's path was not run")
def test_the_device_path_gives_the_values_of_the_synchronous_one() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    figures = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert figures["wrong"] == []
    assert figures["order_kept"]
    assert figures["starved"]["published"] + figures["starved"]["dropped"] == 50


def test_the_device_script_says_so_where_there_is_no_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == {"skipped": "no CUDA device"}
    assert np.size(done.stdout.splitlines()) == 1
