"""The bundle as a file: a zip archive of fixed names, which any tool opens and `stagewatch replay` replays.

``report.html`` and ``report.txt`` are for people, ``incident.json`` is the incident as replay prints it,
``settings.json`` what the ranks said of themselves, ``evidence.journal`` one segment of a journal
(`stagewatch.monitor.journal`), and ``manifest.json`` says what it is about, with a checksum of each of the others. A
bundle may come from a stranger: it is read by these names alone, nothing is ever unpacked under a name it chose, the
directory is judged before it is parsed, and every size is limited before memory or disk is taken.
"""

import contextlib
import hashlib
import os
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import msgspec

from stagewatch.agents.errors import FrameError, StagewatchError
from stagewatch.monitor.identities import fault_of
from stagewatch.monitor.incidents import Window
from stagewatch.monitor.journal import EntryKind, SegmentReader
from stagewatch.monitor.newfile import new_private_file
from stagewatch.monitor.restoring import identity_of

SUFFIX: Final = ".zip"
FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
EVIDENCE: Final = "evidence.journal"
INCIDENT: Final = "incident.json"
SETTINGS: Final = "settings.json"
REPORT: Final = "report.txt"
PAGE: Final = "report.html"
EVIDENCE_BYTES_MAX: Final = 256 << 20
TEXT_BYTES_MAX: Final = 4 << 20
"""Each of the other members, and the manifest."""
MEMBERS: Final = {PAGE: TEXT_BYTES_MAX, REPORT: TEXT_BYTES_MAX, INCIDENT: TEXT_BYTES_MAX,
                  SETTINGS: TEXT_BYTES_MAX, EVIDENCE: EVIDENCE_BYTES_MAX}  # fmt: skip
"""Every member but the manifest, and how many bytes it may unpack to."""
BUNDLE_BYTES_MAX: Final = EVIDENCE_BYTES_MAX + (32 << 20)
_DIRECTORY_BYTES_MAX: Final = 64 << 10
_MAGIC: Final = b"PK\x03\x04"
_END: Final = struct.Struct("<4s4H2LH")
"""The record that ends a zip archive without comment (APPNOTE.TXT 4.3.16)."""
_ZIP64_LOCATOR: Final = b"PK\x06\x07"
_LOCATOR_SIZE: Final = 20


class BundleError(StagewatchError):
    """A bundle that cannot be made, or a file that is none."""


class Member(msgspec.Struct, frozen=True):
    """What the manifest says of another member."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a bundle says of itself."""

    format: int
    incident: str
    """Its id."""
    deployment: str
    instance: str
    made_by: str
    made_ns: int
    """Wall clock when it was made, nanoseconds since the epoch."""
    first_step: int
    last_step: int
    """Steps of which it holds everything that was journalled."""
    whole: bool
    """Whether that is all there was of the engine. If not, only this incident is told as it was."""
    reproduces: bool
    """Whether its evidence, replayed, says of the incident what was said before it was packed."""
    raw_tokens: bool
    """Whether it holds token values."""
    raw_left_out: bool
    """Whether token values were recorded and left out."""
    versions: dict[str, str]
    windows: tuple[Window, ...]
    members: dict[str, Member]


class Bundle:
    """A bundle opened for reading; ``evidence`` is a segment of a journal, in a file without a name."""

    def __init__(self, manifest: Manifest, evidence: IO[bytes]) -> None:
        self.manifest: Final = manifest
        self._evidence: Final = evidence
        self.evidence: Final = path_of(evidence)
        """Good as long as this object lives."""

    @classmethod
    def open(cls, path: Path) -> "Bundle":
        """The bundle at ``path``, checked through and through. Raises BundleError."""
        with _errors_told(path), path.open("rb") as file:
            _check_end(path, file)
            with zipfile.ZipFile(file) as archive:
                found = _members(path, archive)
                manifest = _manifest(path, _read(path, archive, found[MANIFEST], TEXT_BYTES_MAX))
                if manifest.members.keys() != MEMBERS.keys():
                    raise BundleError(f"{path}: its manifest names other members than a bundle has")
                for name, limit in MEMBERS.items():
                    if name != EVIDENCE:
                        _check(path, name, manifest, _read(path, archive, found[name], limit))
                evidence = _spooled(path, archive, found[EVIDENCE], manifest)
        _check_entries(path, evidence)
        return cls(manifest, evidence)


def path_of(file: IO[bytes]) -> Path:
    """A path by which an open file without a name can be opened again (proc(5)), while it is open."""
    return Path(f"/proc/self/fd/{file.fileno()}")


def is_bundle(path: Path) -> bool:
    """Whether a file is a zip archive, whatever its name."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


@contextlib.contextmanager
def _errors_told(path: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, EOFError, struct.error) as error:
        raise BundleError(f"{path}: not a bundle, or damaged: {_short(error)}") from None
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror or _short(error)}") from None
    except (RuntimeError, ValueError, IndexError) as error:  # odd numbers and names in its directory
        raise BundleError(f"{path}: not a bundle of stagewatch: {_short(error)}") from None


def _short(error: BaseException) -> str:
    return ascii(str(error))[1:81]


def _check_end(path: Path, file: IO[bytes]) -> None:
    """Judge the directory by the record that ends the file: its parser takes as much memory as it is told."""
    size = file.seek(0, os.SEEK_END)
    if size > BUNDLE_BYTES_MAX:
        raise BundleError(f"{path}: {size} bytes exceed the {BUNDLE_BYTES_MAX} of a bundle")
    at = max(size - _END.size - _LOCATOR_SIZE, 0)
    file.seek(at)
    tail = file.read()
    if len(tail) < _END.size:
        raise BundleError(f"{path}: not a bundle, or cut off")
    magic, disk, first_disk, here, entries, directory_bytes, _, comment = _END.unpack(tail[-_END.size :])
    if magic != b"PK\x05\x06":
        raise BundleError(f"{path}: not a bundle, or cut off: it does not end as one")
    if disk or first_disk or comment or here != entries or tail.startswith(_ZIP64_LOCATOR):
        raise BundleError(f"{path}: a zip archive, but no bundle of stagewatch: its end is of another kind")
    if entries != len(MEMBERS) + 1 or directory_bytes > _DIRECTORY_BYTES_MAX:
        raise BundleError(f"{path}: {entries} members in {directory_bytes} bytes: no bundle of stagewatch")
    file.seek(0)


def _members(path: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    found: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        if info.filename in found or info.filename not in (MANIFEST, *MEMBERS):
            raise BundleError(f"{path}: holds {info.filename[:40]!a}, which no bundle of stagewatch does")
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BundleError(f"{path}: {info.filename} is encrypted or packed in another way than ours")
        found[info.filename] = info
    missing = [name for name in (MANIFEST, *MEMBERS) if name not in found]
    if missing:
        raise BundleError(f"{path}: holds no {missing[0]}: a zip archive, but no bundle of stagewatch")
    return found


def _manifest(path: Path, encoded: bytes) -> Manifest:
    try:
        manifest = msgspec.json.decode(encoded, type=Manifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BundleError(f"{path}: its manifest cannot be read: {_short(error)}") from None
    if manifest.format != FORMAT:
        raise BundleError(
            f"{path}: a bundle of format {manifest.format}, this build reads {FORMAT}: upgrade stagewatch"
        )
    return manifest


def _read(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, limit: int) -> bytes:
    with archive.open(info) as member:
        content = member.read(limit + 1)
    if len(content) > limit:
        raise BundleError(f"{path}: {info.filename} is longer than {limit} bytes")
    return content


def _check(path: Path, name: str, manifest: Manifest, content: bytes) -> None:
    if manifest.members[name] != Member(len(content), hashlib.sha256(content).hexdigest()):
        raise BundleError(f"{path}: {name} is not what the manifest says: damaged, or changed since")


def _spooled(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, manifest: Manifest) -> IO[bytes]:
    """The evidence in a file without a name, so that it can be read at any position."""
    file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the bundle
    digest, left = hashlib.sha256(), EVIDENCE_BYTES_MAX
    with archive.open(info) as member:
        while piece := member.read(1 << 20):
            left -= len(piece)
            if left < 0:
                raise BundleError(f"{path}: {info.filename} is longer than {EVIDENCE_BYTES_MAX} bytes")
            digest.update(piece)
            file.write(piece)
    file.flush()
    if manifest.members[EVIDENCE] != Member(EVIDENCE_BYTES_MAX - left, digest.hexdigest()):
        raise BundleError(f"{path}: {EVIDENCE} is not what the manifest says: damaged, or changed since")
    return file


def _check_entries(path: Path, evidence: IO[bytes]) -> None:
    """Checksums can be made by anybody: what the ranks say of themselves is judged as the collector judges it."""
    reader = SegmentReader(path_of(evidence))
    for entry in reader:
        if entry.kind is EntryKind.BATCH:
            continue
        try:
            fault = fault_of(identity_of(entry))
        except FrameError as error:
            fault = str(error)
        if fault:
            raise BundleError(f"{path}: its evidence cannot be used: {fault}")
    if reader.damaged_bytes:
        raise BundleError(f"{path}: {reader.damaged_bytes} bytes of its evidence are damaged")


def write_bundle(
    path: Path, manifest: Manifest, members: dict[str, bytes], evidence: IO[bytes], *, replace: bool
) -> int:
    """Write a bundle, mode 0600; it gets its name only once it is complete. Returns its size in bytes.

    ``members`` are all but manifest and evidence; what ``manifest`` says of members is filled in. Raises BundleError.
    """
    if path.exists() and not replace:
        raise BundleError(f"{path} exists: choose another --output, or give --force")
    told = {
        name: Member(len(content), hashlib.sha256(content).hexdigest()) for name, content in members.items()
    }
    told[EVIDENCE] = _member_of(evidence)
    finished = msgspec.structs.replace(manifest, members={name: told[name] for name in MEMBERS})
    try:
        with new_private_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_info(MANIFEST), json_of(finished))
            for name in members:
                archive.writestr(_info(name), members[name])
            evidence.seek(0)
            with archive.open(_info(EVIDENCE), "w") as member:
                shutil.copyfileobj(evidence, member, 1 << 20)
        return path.stat().st_size
    except OSError as error:
        raise BundleError(f"{path}: cannot be written: {error.strerror}") from None


def _member_of(file: IO[bytes]) -> Member:
    digest = hashlib.sha256()
    file.seek(0)
    while piece := file.read(1 << 20):
        digest.update(piece)
    return Member(file.tell(), digest.hexdigest())


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = 0o600 << 16
    return info


def json_of(value: object) -> bytes:
    """A member that people may read."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
