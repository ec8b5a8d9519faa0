"""The programs as they will be run: installed afresh, on a read-only root, and under systemd with all restrictions.

No image can be built here and this machine's systemd is not ours to use, so both are made of namespaces: the same steps
as in the container files, and a systemd 252 or later of our own with the units as they are.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from launches import CONTAINERS, ROOT, UNITS, container_launch, instructions
from rendering import missing
from service_processes import wait_until

HERE = Path(__file__).parent
PYTHON = Path("/usr/bin/python3")
"""One that every user may run: the test's own may be in somebody's home, which units cannot see."""

pytestmark = pytest.mark.slow


def lacking() -> str:
    if os.geteuid() != 0:
        return "mount namespaces need root"
    for name in ("unshare", "setpriv", "ip", "systemctl", "/usr/bin/python3"):
        if shutil.which(name) is None:
            return f"{name} is missing"
    version = subprocess.run(
        [PYTHON, "-c", "import ensurepip, sys; print(sys.version_info >= (3, 11))"], capture_output=True
    )
    return "" if version.stdout.strip() == b"True" else f"{PYTHON} is too old or cannot make environments"


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the container files install, made at the path where it will be."""
    if why := lacking():
        missing(why)
    directory = tmp_path_factory.mktemp("installed")
    wheels, made = directory / "wheels", directory / "venv"
    made.mkdir()
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", wheels, ROOT]
    subprocess.run(pip, check=True, capture_output=True)
    [wheel] = wheels.iterdir()
    script = f"""set -e
        mount --make-rprivate /; mount -t tmpfs tmpfs /opt; mkdir /opt/stagewatch
        mount --bind {made} /opt/stagewatch
        {PYTHON} -m venv /opt/stagewatch
        /opt/stagewatch/bin/pip install -q --disable-pip-version-check '{wheel}[monitor,sidecar]'"""
    subprocess.run(["unshare", "--mount", "bash", "-c", script], check=True, capture_output=True, timeout=600)
    return made


class ReadOnly:
    """One program of ours in a namespace with a read-only root."""

    def __init__(self, venv: Path, work: Path, user: str, environment: dict[str, str]) -> None:
        self._start = [
            "unshare",
            "--mount",
            "bash",
            str(HERE / "readonly_root.sh"),
            str(venv),
            str(work),
            user,
        ]
        self._environment = {"PATH": "/opt/stagewatch/bin:/usr/sbin:/usr/bin:/sbin:/bin", **environment}
        self._running: list[subprocess.Popen[bytes]] = []

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self._start, *command], env=self._environment, capture_output=True, text=True)

    def start(self, *command: str, log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*self._start, *command],
                env=self._environment,
                stderr=output,
                stdout=output,
                start_new_session=True,
            )
        self._running.append(process)
        return process

    def end(self) -> None:
        for process in self._running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """What is mounted into the container; all that can be written."""
    made = tmp_path / "work"
    made.mkdir()
    return made


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def ends() -> Iterator[list[ReadOnly]]:
    found: list[ReadOnly] = []
    yield found
    for each in found:
        each.end()


def file_of(path: Path) -> Path:
    return CONTAINERS / f"{path}.Dockerfile"


def user_of(name: Path | str) -> str:
    return next(rest for word, rest in instructions(file_of(Path(name))) if word == "USER")


def health_check_of(name: str) -> list[str]:
    [rest] = [rest for word, rest in instructions(file_of(Path(name))) if word == "HEALTHCHECK"]
    found: list[str] = yaml.safe_load(rest.partition(" CMD ")[2])
    return found


def give(path: Path, user: str, text: str = "") -> None:
    """Make a file, or a directory where there is no text, for one user alone."""
    if text:
        path.write_text(text)
    else:
        path.mkdir()
    path.chmod(0o400 if text else 0o700)
    os.chown(path, *(int(part) for part in user.split(":")))


def test_the_root_is_read_only(venv: Path, work: Path, ends: list[ReadOnly]) -> None:
    """The two tests below would prove nothing otherwise."""
    contained = ReadOnly(venv, work, user_of("collector"), {})
    for path in ("/", "/tmp", "/opt/stagewatch", "/var/tmp", "/dev/shm"):  # noqa: S108  # none of it is ours
        assert contained.run("touch", f"{path}/probe").returncode != 0
    assert contained.run("id", "-u").stdout.strip() == user_of("collector").partition(":")[0]


def test_the_collector_as_its_image_runs_it(
    venv: Path, work: Path, tmp_path: Path, ends: list[ReadOnly], free_port: int
) -> None:
    # GIVEN the image's own settings, its data directory and a token mounted
    launch, user = container_launch(file_of(Path("collector"))), user_of("collector")
    give(work / "data", user)
    give(work / "tokens", user, "t" * 40)
    environment = launch.ours | {
        "STAGEWATCH_DATA_DIR": "/run/work/data",
        "STAGEWATCH_TOKEN_FILE": "/run/work/tokens",
        "STAGEWATCH_HOST": "127.0.0.1",
        "STAGEWATCH_PORT": str(free_port),
    }
    contained = ReadOnly(venv, work, user, environment)
    ends.append(contained)
    # WHEN its command runs THEN it is ready, its health check passes, and it ends in order
    process = contained.start(launch.program, *launch.arguments, log=tmp_path / "log")
    wait_until(lambda: httpx.get(f"http://127.0.0.1:{free_port}/readyz").status_code == 200, "ready")
    assert contained.run(*health_check_of("collector")).returncode == 0
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, (tmp_path / "log").read_text()
    assert contained.run(*health_check_of("collector")).returncode != 0


def test_the_sidecar_as_its_image_runs_it(
    venv: Path, work: Path, tmp_path: Path, ends: list[ReadOnly]
) -> None:
    launch, user = container_launch(file_of(Path("agent"))), user_of("agent")
    give(work / "shared", user)
    give(work / "token", user, "t" * 40)
    environment = launch.ours | {
        "STAGEWATCH_RING_DIR": "/run/work/shared/rings",
        "STAGEWATCH_HEALTH_FILE": "/run/work/shared/sidecar.alive",
        "STAGEWATCH_TOKEN_FILE": "/run/work/token",
        "STAGEWATCH_COLLECTOR": "ws://127.0.0.1:1",
    }
    contained = ReadOnly(venv, work, user, environment)
    ends.append(contained)
    assert contained.run(*health_check_of("agent")).returncode != 0
    process = contained.start(launch.program, *launch.arguments, log=tmp_path / "log")
    wait_until((work / "shared" / "sidecar.alive").exists, "alive")
    assert contained.run(*health_check_of("agent")).returncode == 0
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, (tmp_path / "log").read_text()


def test_units_under_a_real_systemd(venv: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(ROOT / "tests" / "service" / "service_records.py", out)
    namespaces = ["--mount", "--pid", "--ipc", "--uts", "--cgroup", "--net", "--fork", "--kill-child"]
    booted = subprocess.run(
        ["unshare", *namespaces, "bash", HERE / "boot_systemd.sh", venv, out, UNITS, HERE / "run_units.sh"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    logs = "\n".join(path.read_text() for path in sorted(out.glob("*.log")))
    assert booted.returncode == 0, booted.stderr + logs
    told = (out / "script.log").read_text().splitlines()
    restricted = "active NoNewPrivs:1 Seccomp:2 CapBnd:0000000000000000"
    for unit in ("stagewatch-collector", "stagewatch-agent@vllm"):
        [state, ended] = [line.partition(": ")[2].strip() for line in told if line.startswith(f"{unit}: ")]
        assert set(state.split()) == set(restricted.split()), logs
        assert set(ended.split()) == {"success", "0"}, logs
    assert any(line.startswith("alive: ") for line in told), logs
    assert "shipped" in told, logs
    assert "life-1.dp0.pp0.tp0.ring" in told, logs  # the flight recorder outlives its sidecar


def test_the_plugin_is_found_by_an_engine_that_has_it_on_its_path_only(venv: Path, tmp_path: Path) -> None:
    """The agent's container file makes it, an init container copies it, and PYTHONPATH shows it to vLLM."""
    [step] = [
        rest for word, rest in instructions(file_of(Path("agent"))) if word == "RUN" and "--target" in rest
    ]
    words = step.split()
    options = [*words[words.index("install") : words.index("--target")], "--target", str(tmp_path / "plugin")]
    [wheel] = (venv.parent / "wheels").iterdir()
    subprocess.run([sys.executable, "-m", "pip", "-q", *options, wheel], check=True, capture_output=True)
    asked = "from importlib.metadata import entry_points as e; [f] = e(group='vllm.general_plugins'); print(f.load())"
    environment = {"PYTHONPATH": str(tmp_path / "plugin"), "PATH": os.environ["PATH"]}
    done = subprocess.run([PYTHON, "-c", asked], env=environment, capture_output=True, text=True)
    assert "register" in done.stdout, done.stderr
    brought = {path.name for path in (tmp_path / "plugin").iterdir()} - {"bin"}
    assert {name.partition("-")[0] for name in brought} == {
        "stagewatch"
    }  # nothing of the engine's is replaced
