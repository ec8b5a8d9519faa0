"""Hostile bytes: nothing but our own errors comes of them, in the fuzzer's hands as in hypothesis's."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from targets import TARGETS

SEEDS = {name: target.seeds() for name, target in TARGETS.items()}
EDGES = (b"\xff" * 8, bytes(8), b"\xff" * 7 + b"\x7f", b"\xff\xff\xff\x7f", bytes(7) + b"\x80")


@st.composite
def damaged(draw: st.DrawFn, name: str) -> bytes:
    """A sound input with bytes replaced, put in, taken out, or cut off."""
    content = bytearray(draw(st.sampled_from(SEEDS[name])))
    # Most of what can be broken lies in front.
    places = st.integers(0, min(len(content), 1024) - 1) | st.integers(0, len(content) - 1)
    for _ in range(draw(st.integers(1, 6))):
        at = min(draw(places), len(content))
        new = draw(st.sampled_from(EDGES) | st.binary(max_size=16))
        content[at : at + draw(st.sampled_from((0, len(new), 64)))] = new
    return bytes(content[: draw(st.just(len(content)) | st.integers(0, len(content)))])


@pytest.mark.parametrize("name", TARGETS)
def test_sound_input_is_taken(name: str) -> None:
    for seed in SEEDS[name]:
        TARGETS[name].run(seed)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("traces", b'{"kind":"received","step":0}\n'),
        ("traces", b'{"kind":"sent","step":0,"tokens":[],"num_sampled":[],"num_rejected":[]}\n'),
    ],
)
def test_what_once_broke_a_decoder_does_so_no_more(name: str, data: bytes) -> None:
    TARGETS[name].run(data)


@pytest.mark.parametrize("name", TARGETS)
def test_damage_raises_nothing_of_its_own(name: str) -> None:
    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(damaged(name) | st.binary(max_size=256))
    @example(b"")
    def run(data: bytes) -> None:
        TARGETS[name].run(data)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_the_fuzzer_finds_nothing(name: str) -> None:
    pytest.importorskip("atheris", reason="there are wheels for x86_64 only")
    script = Path(__file__).parent / f"fuzz_{name}.py"
    done = subprocess.run(
        [sys.executable, script, "--seconds", "30"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "stat::number_of_executed_units" in done.stderr
