"""A timeline for ui.perfetto.dev: a track a rank, steps on it, flows from each broadcast to where it was consumed.

Packets are written as steps end. They need not be in the order of time: readers of the format sort them.
"""

from collections.abc import Iterable
from hashlib import blake2b
from typing import IO, Any, Final

from stagewatch.agents.evidence import Evidence
from stagewatch.agents.identity import Identity, Rank
from stagewatch.monitor.exports.exporter import Found, needed
from stagewatch.monitor.exports.timeline import STEP_NS, Flows, Lane, Part, StepSlice, records_of
from stagewatch.monitor.incidents import Incident
from stagewatch.monitor.story.picker import number_of

_SEQUENCE: Final = 1
_PACKET: Final = b"\x0a"
"""What begins each packet in the file: field 1 of a trace, bytes with their length before them."""
_REALTIME, _BOOTTIME = 1, 6
"""Numbers of the format's own clocks."""


class PerfettoExporter:
    """Writes one trace into ``file``."""

    def __init__(self, file: IO[bytes]) -> None:
        self._proto: Final = needed("perfetto.protos.perfetto.trace.perfetto_trace_pb2", "a Perfetto export")
        self._event: Final = self._proto.TrackEvent
        self._file: Final = file
        self._lanes: dict[tuple[str, Rank], tuple[Identity, Lane, int]] = {}
        self._described: set[int] = set()
        self._flows: Final = Flows(self._draw)
        self._began = False
        self.steps = 0
        """Steps drawn, of all ranks."""

    def see(self, identity: Identity, evidence: Evidence) -> None:
        """Draw the steps that end with one batch of a rank."""
        key = identity.instance, identity.rank
        if key not in self._lanes:
            self._lanes[key] = identity, Lane(), self._rank_track(identity)
        _, lane, track = self._lanes[key]
        if evidence.lost:
            self._step(identity, track, lane.close())
        for made in records_of(evidence):
            self._begin(made.t_ns)
            self._step(identity, track, lane.take(made))

    def finish(self, found: Found) -> list[str]:
        """Draw the last steps, the broadcasts nobody consumed, and the incidents."""
        for identity, lane, track in self._lanes.values():
            self._step(identity, track, lane.close())
        self._flows.finish()
        for incident in found.incidents:
            self._incident(incident)
        told = [f"{self.steps} steps of {len(self._lanes)} ranks, {self._flows.paired} flows"]
        if self._flows.unpaired:
            told.append(f"{self._flows.unpaired} payloads have no flow: their broadcast is not on record")
        return told

    # ---- steps and flows

    def _step(self, identity: Identity, track: int, ended: StepSlice | None) -> None:
        if ended is None:
            return
        self.steps += 1
        notes = {"step": ended.step, "rows": ended.rows}
        self._slice(track, f"step {ended.step}", ended.begin_ns, ended.end_ns, notes)
        sizes, rank = identity.sizes, identity.rank
        # Traces do not say when a payload was consumed: their flows end where it was received.
        taken = "received" if identity.engine == "trace" else "consumed"
        for part in ended.parts:
            made = part.made
            key = identity.instance, rank.dp, rank.tp, made.step
            if made.kind == "sent" and not made.skipped:
                self._flows.sent(key, track, part, sizes.pp - 1)
            elif made.kind == taken and not made.skipped:
                self._flows.taken(key, track, part, sizes.pp - 1)
            else:
                self._draw(track, part)

    def _draw(self, track: int, part: Part) -> None:
        made = part.made
        notes = {"rows": made.rows} if made.rows else {}
        self._slice(track, made.name, part.begin_ns, part.end_ns, notes, part.flows, part.ended_flows)

    def _slice(
        self,
        track: int,
        name: str,
        begin_ns: int,
        end_ns: int,
        notes: dict[str, int],
        flows: Iterable[int] = (),
        ended_flows: Iterable[int] = (),
    ) -> None:
        begin = self._track_event(self._event.TYPE_SLICE_BEGIN, track, begin_ns, name, notes)
        begin.track_event.flow_ids.extend(flows)
        begin.track_event.terminating_flow_ids.extend(ended_flows)
        end = self._track_event(self._event.TYPE_SLICE_END, track, end_ns)
        self._write(begin, end)

    # ---- incidents

    def _incident(self, incident: Incident) -> None:
        key = incident.instance, incident.dp
        own = [
            (identity, lane, track)
            for identity, lane, track in self._lanes.values()
            if (identity.instance, identity.rank.dp) == key
        ]
        if not own:
            return
        t_ns = incident.first_bad_ns
        if not t_ns or not any(lane.clock for _, lane, _ in own):
            t_ns = incident.first_bad_step * STEP_NS
        about = incident.request or "the engine"
        name = f"{incident.severity.word}: {incident.check}: {about}, step {incident.first_bad_step}"
        notes: dict[str, str | int] = {
            "incident": incident.id,
            "check": incident.check,
            "severity": incident.severity.word,
            "request": incident.request,
            "first_bad_step": incident.first_bad_step,
            "last_good_step": incident.last_good_step,
            "ranks": ", ".join(map(str, incident.ranks)),
            "blamed": ", ".join(map(str, incident.blamed)) or "undecided",
            "remedy": incident.remedy,
        }
        for place, link in enumerate(incident.chain, 1):
            notes[f"cause {place}"] = f"step {link.step}: {link.text}"
        kind = self._event.TYPE_INSTANT
        self._write(self._track_event(kind, self._incident_track(own[0][0]), t_ns, name, notes))
        marked = incident.blamed or incident.ranks
        for identity, _, track in own:
            if number_of(identity) in marked:
                self._write(self._track_event(kind, track, t_ns, name, {"incident": incident.id}))

    # ---- tracks

    def _engine_track(self, identity: Identity) -> int:
        replica = f", replica {identity.rank.dp}" if identity.sizes.dp > 1 else ""
        clock = ", no clock: 1 ms a step" if identity.engine == "trace" else ""
        name = (
            f"{identity.instance}{replica} ({identity.engine} {identity.engine_version}".rstrip()
            + f"{clock})"
        )
        return self._track((identity.instance, identity.rank.dp), name, explicit=True)

    def _rank_track(self, identity: Identity) -> int:
        rank = identity.rank
        tensor = f", tp {rank.tp}" if identity.sizes.tp > 1 else ""
        name = f"rank {number_of(identity)}: stage {rank.pp}{tensor}"
        parent = self._engine_track(identity)
        return self._track((identity.instance, str(rank)), name, parent, 1 + number_of(identity))

    def _incident_track(self, identity: Identity) -> int:
        parent = self._engine_track(identity)
        return self._track((identity.instance, identity.rank.dp, "incidents"), "incidents", parent)

    def _track(
        self, key: tuple[Any, ...], name: str, parent: int = 0, order: int = 0, *, explicit: bool = False
    ) -> int:
        uuid = int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "little") or 1
        if uuid not in self._described:
            self._described.add(uuid)
            packet = self._proto.TracePacket(trusted_packet_sequence_id=_SEQUENCE)
            found = packet.track_descriptor
            found.uuid, found.name = uuid, name
            if parent:
                found.parent_uuid, found.sibling_order_rank = parent, order
            if explicit:
                found.child_ordering = self._proto.TrackDescriptor.EXPLICIT
            self._write(packet)
        return uuid

    # ---- packets

    def _begin(self, t_ns: int) -> None:
        """Say, once, that the times are wall-clock times."""
        if self._began or not t_ns:
            return
        self._began = True
        packet = self._proto.TracePacket(trusted_packet_sequence_id=_SEQUENCE, timestamp=t_ns)
        for clock in (_BOOTTIME, _REALTIME):
            packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=t_ns)
        self._write(packet)

    def _track_event(
        self, kind: int, track: int, t_ns: int, name: str = "", notes: dict[str, Any] | None = None
    ) -> Any:
        packet = self._proto.TracePacket(timestamp=t_ns, trusted_packet_sequence_id=_SEQUENCE)
        event = packet.track_event
        event.type, event.track_uuid = kind, track
        if name:
            event.name = name
        for key, value in (notes or {}).items():
            note = event.debug_annotations.add(name=key)
            if isinstance(value, int):
                note.int_value = value
            else:
                note.string_value = value
        return packet

    def _write(self, *packets: Any) -> None:
        for packet in packets:
            data = packet.SerializeToString()
            self._file.write(_PACKET + _varint(len(data)) + data)


def _varint(number: int) -> bytes:
    """A length as Protocol Buffers write it: seven bits a byte, the lowest first."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
