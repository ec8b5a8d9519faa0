"""`stagewatch export parquet`: every row is there, under a documented schema, with token values only where asked."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import Command
from recorded import TRACES, Recorded
from simulated import Run

from stagewatch.agents.record import Inputs, Mask, Payload
from stagewatch.monitor.exports import tablefile
from stagewatch.monitor.exports.columns import SCHEMA_VERSION, TABLES


@pytest.fixture
def tables(export: Command, faulty: Recorded, tmp_path: Path) -> dict[str, Any]:
    assert export("parquet", faulty.journal, "-o", tmp_path / "out").status == 0
    return {path.stem: pq.read_table(path) for path in (tmp_path / "out").iterdir()}


def bodies(run: Run, kind: type[Inputs] | type[Mask] | type[Payload]) -> list[Any]:
    return [record for own in run.records.values() for record in own if isinstance(record.body, kind)]


class TestContent:
    def test_every_row_that_was_recorded_is_there_as_it_was(
        self, tables: dict[str, Any], faulty_run: Run
    ) -> None:
        recorded = sorted(
            (faulty_run.number(rank), r.step, row, faulty_run.names[key], position, scheduled)
            for rank, own in faulty_run.records.items()
            for r in own
            if isinstance(r.body, Inputs)
            for row, (key, scheduled) in enumerate(
                zip(r.body.request.tolist(), r.body.scheduled.tolist(), strict=True)
            )
            for position in [int(r.body.positions[int(r.body.scheduled[:row].sum())]) if scheduled else 0]
        )
        rows = tables["inputs"].select(["rank", "step", "row", "request", "position", "scheduled"])
        assert sorted(zip(*rows.to_pydict().values(), strict=True)) == recorded

    def test_masks_and_payloads_match_row_by_row(self, tables: dict[str, Any], faulty_run: Run) -> None:
        masks = sum(len(r.body.engine) for r in bodies(faulty_run, Mask))
        payloads = sum(len(r.body.request) for r in bodies(faulty_run, Payload))
        assert (tables["masks"].num_rows, tables["payloads"].num_rows) == (masks, payloads)
        kept = sum(
            int(r.body.engine.astype(bool).sum()) for r in bodies(faulty_run, Mask) if not r.body.engine_none
        )
        assert sum(tables["masks"]["engine"].to_pylist()) == kept

    def test_every_record_is_listed(self, tables: dict[str, Any], faulty: Recorded, faulty_run: Run) -> None:
        listed = tables["records"].filter(pa.compute.not_equal(tables["records"]["kind"], "heartbeat"))
        assert listed.num_rows == sum(len(own) for own in faulty_run.records.values())
        assert tables["ranks"]["lost_records"].to_pylist() == [0] * len(faulty_run.records)

    def test_incidents_are_those_of_the_live_watch(self, tables: dict[str, Any], faulty: Recorded) -> None:
        found = [
            (
                i["id"],
                i["severity"],
                i["request"] or "",
                i["first_bad_step"],
                i["blamed"],
                i["chain"][0]["text"],
            )
            for i in tables["incidents"].to_pylist()
        ]
        assert found == [
            (i.id, i.severity, i.request, i.first_bad_step, [*i.blamed], i.chain[0].text) for i in faulty.live
        ]
        assert found

    def test_steps_and_engine_narrow_what_is_written(
        self, export: Command, faulty: Recorded, tmp_path: Path
    ) -> None:
        export("parquet", faulty.rings, "-o", tmp_path / "out", "--step", "5:7")
        for name in ("inputs", "masks", "payloads", "records"):
            steps = pq.read_table(tmp_path / "out" / f"{name}.parquet")["step"].to_pylist()
            assert {5, 6, 7} >= set(steps) and steps
        outcome = export("parquet", faulty.rings, "-o", tmp_path / "none", "--engine", "another")
        assert (outcome.status, outcome.err) == (
            2,
            "stagewatch: no step to write: widen --engine or --step\n",
        )


class TestTokens:
    RAW = ("input_ids", "last_sampled", "draft_tokens", "tokens")

    def raw(self, directory: Path) -> list[Any]:
        tables = [pq.read_table(directory / f"{name}.parquet") for name in ("inputs", "payloads")]
        return [v for t in tables for c in self.RAW if c in t.column_names for v in t[c].to_pylist()]

    @pytest.mark.parametrize("source", ["rings", "traces"])
    def test_token_values_are_written_only_where_asked(
        self, source: str, export: Command, faulty: Recorded, tmp_path: Path
    ) -> None:
        """Traces hold token values whatever anybody wants; a file made of them does not."""
        path = faulty.rings if source == "rings" else TRACES
        export("parquet", path, "-o", tmp_path / "without")
        assert set(self.raw(tmp_path / "without")) == {None}
        export("parquet", path, "-o", tmp_path / "with", "--raw-tokens")
        rows = pq.read_table(tmp_path / "with" / "inputs.parquet").to_pylist()
        assert all(len(row["input_ids"]) == row["scheduled"] for row in rows)
        sent = pq.read_table(tmp_path / "with" / "payloads.parquet").to_pylist()
        assert all(len(row["tokens"]) == row["num_sampled"] for row in sent)

    def test_incidents_hold_digests_where_token_values_were_not_asked_for(
        self, export: Command, tmp_path: Path
    ) -> None:
        def last(*more: str) -> set[str]:
            export("parquet", *TRACES.glob("old-mask*"), "-o", tmp_path / "out", "--force", *more)
            values = pq.read_table(tmp_path / "out" / "incidents.parquet")["values"].to_pylist()
            return {v["text"] for each in values for v in each if v["field"] == "last_sampled_tokens"}

        assert "396" in last("--raw-tokens")
        assert all(len(text) == 16 for text in last())


class TestFile:
    def test_the_schema_is_the_documented_one(self, tables: dict[str, Any]) -> None:
        assert set(tables) == {table.name for table in TABLES}
        for table in TABLES:
            schema = tables[table.name].schema
            assert schema.names == [column.name for column in table.columns]
            assert schema.metadata[b"stagewatch.schema"].decode() == SCHEMA_VERSION

    def test_row_groups_are_written_while_the_recording_is_read(
        self, export: Command, faulty: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tablefile, "GROUP_ROWS", 64)
        export("parquet", faulty.rings, "-o", tmp_path / "out")
        file = pq.ParquetFile(tmp_path / "out" / "inputs.parquet")
        assert file.num_row_groups > 4
        assert max(file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)) <= 64

    def test_files_are_for_their_owner_alone(self, export: Command, faulty: Recorded, tmp_path: Path) -> None:
        export("parquet", faulty.rings, "-o", tmp_path / "out")
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o600}

    def test_what_exists_is_replaced_only_by_force(
        self, export: Command, faulty: Recorded, tmp_path: Path
    ) -> None:
        export("parquet", faulty.rings, "-o", tmp_path / "out")
        outcome = export("parquet", faulty.rings, "-o", tmp_path / "out")
        assert outcome.status == 2
        assert outcome.err.endswith("out exists: name another with --output, or replace it with --force\n")
        assert export("parquet", faulty.rings, "-o", tmp_path / "out", "--force").status == 0

    def test_a_missing_extra_is_told_with_the_way_out(
        self, export: Command, faulty: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
        outcome = export("parquet", faulty.rings, "-o", tmp_path / "out")
        assert outcome.status == 2
        assert outcome.err == (
            "stagewatch: a Parquet export needs pyarrow, which is not installed: pip install 'stagewatch[export]'\n"
        )


def test_unknown_numbers_are_null() -> None:
    column = tablefile.known(np.array([3, -1, 0], np.int32))
    assert [*column.mask] == [False, True, False]
