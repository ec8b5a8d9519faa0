"""``python -m stagewatch.agents.lab``: run the lab or the simulator from the command line."""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from stagewatch.agents.errors import StagewatchError
from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.config import LabConfig
from stagewatch.agents.lab.engine import Hand, start_lab
from stagewatch.agents.lab.fault import Plan
from stagewatch.agents.lab.faults import REGISTRY
from stagewatch.agents.lab.faults_process import PROCESS_REGISTRY, Part, ProcessFault
from stagewatch.agents.lab.messages import Output
from stagewatch.agents.lab.nodes import Nodes
from stagewatch.agents.lab.recording import TraceWriter
from stagewatch.agents.lab.scheduler import LabError
from stagewatch.agents.lab.simulator import SimConfig, SimResult, Simulator
from stagewatch.agents.lab.text import text
from stagewatch.agents.lab.workload import Workload
from stagewatch.agents.settings import ProbeSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """0: the run came to its end; 1: it did not; 2: it could not be started."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except StagewatchError as error:
        print(f"stagewatch lab: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stagewatch.agents.lab",
        description="A small real pipeline-parallel engine with speculative decoding, as processes over gloo.",
        epilog="Also: `simulate` (the same engine in one process, fast), `faults` (what can be put into either). "
        "Each has its own --help.",
    )
    commands = parser.add_subparsers(metavar="COMMAND")
    _add_common(parser, [*REGISTRY, *PROCESS_REGISTRY])
    parser.add_argument(
        "--ring-dir", type=Path, help="directory of the rings; without it nothing is recorded"
    )
    parser.add_argument(
        "--deployment", default="lab", help="name in the rings' headers (default: %(default)s)"
    )
    parser.add_argument(
        "--ring-bytes", type=int, default=1 << 24, help="bytes per ring (default: %(default)s)"
    )
    parser.add_argument(
        "--step-sleep-ms", type=float, default=0.0, help="pause after each iteration (default: none)"
    )
    parser.add_argument(
        "--collector",
        help="ws://HOST:PORT: let each stage be a node with a sidecar of its own, which ships there; faults of "
        "sidecars need it",
    )
    parser.add_argument("--token-file", type=Path, help="file of the collector's token, for those sidecars")
    parser.add_argument("--json", action="store_true", help="print outputs as JSON lines instead of words")
    parser.set_defaults(run=_run_lab)
    simulate = commands.add_parser("simulate", help="run the simulator", description=_simulate.__doc__)
    _add_common(simulate, [*REGISTRY])
    simulate.add_argument("--dp", type=int, default=1, help="data-parallel replicas (default: %(default)s)")
    simulate.add_argument(
        "--benign", action="store_true", help="aborts, preemption, chunks, variable K: all at once"
    )
    simulate.add_argument(
        "--config",
        help="what is not as in a plain run, or with --benign in a benign one, as JSON; excludes all other options",
    )
    simulate.add_argument(
        "--trace", type=Path, metavar="NAME", help="write NAME.rankN.jsonl for `stagewatch replay`"
    )
    simulate.set_defaults(run=_simulate)
    faults = commands.add_parser("faults", help="list the faults", description=_list_faults.__doc__)
    faults.set_defaults(run=_list_faults)
    return parser


def _add_common(parser: argparse.ArgumentParser, faults: list[str]) -> None:
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages (default: %(default)s)")
    parser.add_argument(
        "--tp", type=int, default=1, help="tensor-parallel ranks per stage (default: %(default)s)"
    )
    parser.add_argument(
        "--k", type=int, default=7, help="draft tokens per row, 0 for none (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="determines everything (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=8, help="requests to serve (default: %(default)s)")
    parser.add_argument(
        "--prompt", type=int, nargs=2, default=(8, 40), metavar=("MIN", "MAX"), help="prompt tokens"
    )
    parser.add_argument(
        "--max-tokens", type=int, nargs=2, default=(8, 48), metavar=("MIN", "MAX"), help="output tokens"
    )
    parser.add_argument("--fault", choices=faults, metavar="NAME", help="fault to put in; see `faults`")
    parser.add_argument(
        "--fault-rank", type=_rank, metavar="dpD.ppP.tpT", help="rank it strikes (default: its own)"
    )
    parser.add_argument(
        "--fault-step", type=int, default=1, help="first step it may strike (default: %(default)s)"
    )
    parser.add_argument("--fault-times", type=int, help="steps it strikes at most (default: all)")


def _rank(name: str) -> Rank:
    try:
        dp, pp, tp = (
            int(part.removeprefix(key)) for part, key in zip(name.split("."), ("dp", "pp", "tp"), strict=True)
        )
    except ValueError:
        raise argparse.ArgumentTypeError(f"{name!r} is not of the form dp0.pp1.tp0") from None
    return Rank(dp, pp, tp)


def _plan(options: argparse.Namespace) -> Plan | None:
    if options.fault is None:
        return None
    return Plan(options.fault, options.fault_rank, options.fault_step, options.fault_times)


def _workload(options: argparse.Namespace) -> Workload:
    return Workload(
        requests=options.requests, prompt_len=tuple(options.prompt), max_tokens=tuple(options.max_tokens)
    )


def _run_lab(options: argparse.Namespace) -> int:
    if options.collector is not None and (options.ring_dir is None or options.token_file is None):
        raise LabError("--collector needs --ring-dir and --token-file: sidecars ship what lies in rings")
    probe = None
    if options.ring_dir is not None:
        probe = ProbeSettings(options.ring_dir, options.deployment, options.ring_bytes, 1.0, 0.0, 2, False)
    longest = options.prompt[1] + options.max_tokens[1]
    config = LabConfig(
        seed=options.seed,
        pp=options.pp,
        tp=options.tp,
        spec_tokens=options.k,
        workload=_workload(options),
        fault=_plan(options),
        probe=probe,
        max_model_len=max(longest, 64),
        step_sleep_ms=options.step_sleep_ms,
        nodes=options.collector is not None,
    )

    def show(tick: int, output: Output) -> None:
        if options.json:
            print(msgspec.json.encode(output).decode(), flush=True)
        else:
            print(f"{tick:5d} {output.request_id} ({output.reason}): {text(output.tokens)}", flush=True)

    with ExitStack() as running:
        hands: dict[Part, Hand] = {}
        if options.collector is not None:
            to = ("--collector", options.collector, "--token-file", options.token_file)
            hands[Part.SIDECAR] = running.enter_context(Nodes(options.ring_dir, config.pp, to)).do
        result = running.enter_context(start_lab(config, show, hands)).wait()
    if result.error:
        print(f"stagewatch lab: {result.error}", file=sys.stderr)
        return 1
    print(f"{result.instance}: {len(result.outputs)} requests in {result.steps} steps", file=sys.stderr)
    return 0


def _simulate(options: argparse.Namespace) -> int:
    """Run the engine in one process, with an integer model; print what came of it and the line that repeats it."""
    config = _sim_config(options)
    print(f"{config.line}   # at {_commit()}", file=sys.stderr)
    simulator = Simulator(config, record=options.trace is not None)
    if isinstance(simulator.fault, ProcessFault):
        raise LabError(
            f"fault {simulator.fault.NAME} strikes processes, of which a simulation has none: run the lab"
        )
    result = simulator.run()
    if options.trace is not None:
        for number, (_, records) in enumerate(sorted(result.records.items())):
            writer = TraceWriter(Path(f"{options.trace}.rank{number}.jsonl"))
            writer.write(records)
            writer.close()
    print(json.dumps(_summary(result)))
    return 1 if result.wedged else 0


def _sim_config(options: argparse.Namespace) -> SimConfig:
    if options.config is not None:
        return SimConfig.decode(options.config, benign=options.benign)
    sizes = {"pp": options.pp, "tp": options.tp, "dp": options.dp, "spec_tokens": options.k}
    if options.benign:
        return replace(
            SimConfig.benign(options.seed, requests=options.requests, **sizes), fault=_plan(options)
        )
    return SimConfig(seed=options.seed, workload=_workload(options), fault=_plan(options), **sizes)


def _summary(result: SimResult) -> dict[str, object]:
    return {
        "request_steps": result.request_steps,
        "steps": result.steps,
        "finished": len(result.outputs),
        "preemptions": result.preemptions,
        "injections": len(result.injections),
        "wedged": result.wedged,
        "request_steps_per_s": round(result.request_steps / result.seconds) if result.seconds else 0,
    }


def _commit() -> str:
    try:
        found = subprocess.run(  # noqa: S603  # nothing in it comes from outside
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return "an unknown commit"
    return f"commit {found.stdout.strip()}"


def _list_faults(options: argparse.Namespace) -> int:
    """List every fault: its name, where it strikes, the public cases it was seen in, the invariants it breaks."""
    for name, fault in {**REGISTRY, **PROCESS_REGISTRY}.items():
        cases = ", ".join(map(str, fault.CASES)) or "-"
        invariants = ", ".join(fault.INVARIANTS) or "none: ranks agree"
        print(f"{name}\n    {fault.DESCRIPTION}\n    {fault.WHERE}; cases {cases}; breaks {invariants}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
