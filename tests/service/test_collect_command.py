"""What `stagewatch collect` and `stagewatch-agent ship` say to whoever starts them."""

from pathlib import Path

import pytest
from service_processes import BIN, Stage, wait_until


class TestMistakes:
    def test_a_data_directory_that_is_a_file(self, stage: Stage, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        process = stage.process(BIN / "stagewatch", "collect", "--port", "0", "--data-dir", tmp_path / "file")
        assert process.status() == 2
        assert process.output == (
            f"stagewatch: --data-dir {tmp_path}/file cannot take a token: File exists: give another one\n"
        )

    @pytest.mark.parametrize("option", ["--token-file", "--key-file"])
    def test_a_secret_s_file_that_is_not_there(self, stage: Stage, tmp_path: Path, option: str) -> None:
        token = tmp_path / "token"
        token.write_text("0123456789abcdef")
        token.chmod(0o600)
        process = stage.process(
            *(BIN / "stagewatch-agent", "ship", "--ring-dir", tmp_path, "--token-file", token),
            *(option, tmp_path / "nothing"),
        )
        assert process.status() == 2
        what = option.removeprefix("--").replace("-", " ")
        assert process.output.startswith(
            f"stagewatch-agent: {what} {tmp_path}/nothing cannot be read: No such file or directory: make one with "
        )
        assert process.output.count("\n") == 1

    def test_a_ring_directory_that_is_a_file(self, stage: Stage, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        process = stage.process(
            *(BIN / "stagewatch-agent", "ship", "--ring-dir", tmp_path / "file"),
            STAGEWATCH_TOKEN="0123456789abcdef",  # noqa: S106  # nobody's
        )
        assert process.status() == 2
        assert process.output == (
            f"stagewatch-agent: --ring-dir {tmp_path}/file is not a directory: give the engine's ring directory\n"
        )


class TestRefusedSidecar:
    def test_the_collector_s_log_says_so_once_in_words(self, stage: Stage) -> None:
        # GIVEN a sidecar with another token
        collector = stage.collector()
        sidecar = stage.sidecar(collector, token="not-the-token-at-all")  # noqa: S106  # nobody's
        # WHEN it was refused more than once
        refused = "stagewatch_ingest_refused_total"
        wait_until(lambda: collector.metric(refused, reason="unauthenticated") >= 2, "two refusals")
        assert (sidecar.end(), collector.end()) == (0, 0)
        # THEN one line tells
        assert collector.output.count("was refused") == 1
        assert "stagewatch: a sidecar was refused: compare its --token-file with ours" in collector.output
        assert "ASGI" not in collector.output
