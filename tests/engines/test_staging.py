"""Copies of tensors: the host's path here, the device's by tests/gpu/staging.py, which is run here where it can be."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stagewatch.agents.engines.staging import Gather, Head, HostStaging, Values, staging_for

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
