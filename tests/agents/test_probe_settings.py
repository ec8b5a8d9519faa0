"""Settings of the probe: each variable, its default, and its bad values, which are named."""

from pathlib import Path

import pytest

from stagewatch.agents.errors import SettingsError
from stagewatch.agents.settings import RING_DIR, VARIABLES, ProbeSettings

ASKED = {RING_DIR: "/dev/shm/rings"}  # noqa: S108  # named, never made


def test_without_a_directory_stagewatch_is_not_asked_for() -> None:
    others = {variable.name: "nonsense" for variable in VARIABLES if variable.name != RING_DIR}
    assert ProbeSettings.from_environment(others) is None
    assert ProbeSettings.from_environment({RING_DIR: ""}) is None


def test_the_defaults_are_those_that_the_table_lists() -> None:
    assert ProbeSettings.from_environment(ASKED) == ProbeSettings(
        ring_dir=Path(ASKED[RING_DIR]),
        deployment="default",
        ring_bytes=64 << 20,
        heartbeat_s=1.0,
        budget_share=0.05,
        rings_kept=2,
        fixed_mask=False,
    )
    listed = {variable.name: variable.default for variable in VARIABLES if variable.default}
    assert ProbeSettings.from_environment(ASKED) == ProbeSettings.from_environment(listed | ASKED)


def test_an_empty_variable_is_as_good_as_none() -> None:
    empty = {variable.name: "" for variable in VARIABLES}
    assert ProbeSettings.from_environment(empty | ASKED) == ProbeSettings.from_environment(ASKED)


@pytest.mark.parametrize(
    ("variable", "value", "field", "expected"),
    [
        ("STAGEWATCH_DEPLOYMENT", "a-b_c.9", "deployment", "a-b_c.9"),
        ("STAGEWATCH_DEPLOYMENT", "x" * 64, "deployment", "x" * 64),
        ("STAGEWATCH_RING_BYTES", "65536", "ring_bytes", 65536),
        ("STAGEWATCH_RING_BYTES", "4294967296", "ring_bytes", 1 << 32),
        ("STAGEWATCH_HEARTBEAT_S", "0.5", "heartbeat_s", 0.5),
        ("STAGEWATCH_BUDGET_SHARE", "0", "budget_share", 0.0),
        ("STAGEWATCH_RINGS_KEPT", "0", "rings_kept", 0),
        ("STAGEWATCH_FIXED_MASK", "1", "fixed_mask", True),
    ],
)
def test_each_variable_reaches_its_field(variable: str, value: str, field: str, expected: object) -> None:
    found = ProbeSettings.from_environment(ASKED | {variable: value})
    assert getattr(found, field) == expected


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("STAGEWATCH_DEPLOYMENT", "a b"),
        ("STAGEWATCH_DEPLOYMENT", "../up"),
        ("STAGEWATCH_DEPLOYMENT", "é"),
        ("STAGEWATCH_DEPLOYMENT", "x" * 65),
        ("STAGEWATCH_RING_BYTES", "64MB"),
        ("STAGEWATCH_RING_BYTES", "65535"),
        ("STAGEWATCH_RING_BYTES", "4294967297"),
        ("STAGEWATCH_RING_BYTES", "70000.5"),
        ("STAGEWATCH_RING_BYTES", "nan"),
        ("STAGEWATCH_HEARTBEAT_S", "0"),
        ("STAGEWATCH_HEARTBEAT_S", "inf"),
        ("STAGEWATCH_HEARTBEAT_S", "often"),
        ("STAGEWATCH_BUDGET_SHARE", "-0.1"),
        ("STAGEWATCH_BUDGET_SHARE", "5%"),
        ("STAGEWATCH_BUDGET_SHARE", "1.1"),
        ("STAGEWATCH_RINGS_KEPT", "-1"),
        ("STAGEWATCH_RINGS_KEPT", "1.5"),
        ("STAGEWATCH_RINGS_KEPT", "1001"),
        ("STAGEWATCH_FIXED_MASK", "yes"),
        ("STAGEWATCH_FIXED_MASK", "2"),
    ],
)
def test_a_bad_value_is_named_with_its_variable_in_one_line(variable: str, value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        ProbeSettings.from_environment(ASKED | {variable: value})
    message = str(caught.value)
    assert message.startswith(f"{variable}=")
    assert value in message
    assert len(message.splitlines()) == 1
