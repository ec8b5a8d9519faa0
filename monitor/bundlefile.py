"""The bundle as a file: a zip archive of fixed names. Nothing in it is ever unpacked under a name it chose.

``manifest.json`` says what it is about, ``evidence.swdump`` is a dump (`stagewatch.agents.dumpfile`) that
`stagewatch replay` opens, ``report.md`` and ``report.html`` are for people, ``settings.json`` is what the ranks said of
their configuration. A bundle comes from strangers: it is read by these names alone, sizes are limited before
memory or disk is taken, and what else is in it is left alone.
"""

import contextlib
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import msgspec

from stagewatch.agents.errors import StagewatchError
from stagewatch.monitor.incidents import Report

SUFFIX: Final = ".zip"
FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
EVIDENCE: Final = "evidence.swdump"
REPORT: Final = "report.md"
PAGE: Final = "report.html"
SETTINGS: Final = "settings.json"
_NEEDED: Final = (MANIFEST, EVIDENCE)
MEMBERS_MAX: Final = 64
MANIFEST_BYTES_MAX: Final = 4 << 20
EVIDENCE_BYTES_MAX: Final = 1 << 30


class BundleError(StagewatchError):
    """A bundle that cannot be made, or a file that is none."""


class Manifest(msgspec.Struct, frozen=True):
    """What a bundle says of itself."""

    format: int
    incident: Report
    made_by: str
    """Name and version of what made it."""
    made_ns: int
    """Wall clock when it was made, nanoseconds since the epoch."""
    first_step: int
    """Steps that the evidence covers; 0 for all that were recorded."""
    last_step: int
    cut: bool
    """Whether earlier or later steps of the engine were left out. Then only `incident` is told whole."""
    raw_tokens: bool
    """Whether it holds token values."""
    versions: dict[str, str]
    """Engine and library versions as the ranks and the maker said them."""


class Bundle:
    """A bundle opened for reading; ``evidence`` is its dump, in a nameless temporary file."""

    def __init__(self, manifest: Manifest, evidence: IO[bytes]) -> None:
        self.manifest: Final = manifest
        self.evidence: Final = evidence

    @classmethod
    def open(cls, path: Path) -> "Bundle":
        """The bundle at ``path``. Raises BundleError."""
        with _errors_told(path), zipfile.ZipFile(path) as archive:
            members = _members(path, archive)
            encoded = _read(path, archive, members[MANIFEST], MANIFEST_BYTES_MAX)
            try:
                manifest = msgspec.json.decode(encoded, type=Manifest)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise BundleError(f"{path}: its manifest cannot be read: {error}") from None
            if manifest.format != FORMAT:
                raise BundleError(
                    f"{path}: a bundle of format {manifest.format}, this build reads {FORMAT}: upgrade stagewatch"
                )
            return cls(manifest, _spooled(path, archive, members[EVIDENCE]))


def is_bundle(path: Path) -> bool:
    """Whether a file is a zip archive, whatever its name."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


@contextlib.contextmanager
def _errors_told(path: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, EOFError) as error:
        raise BundleError(f"{path}: not a bundle, or damaged: {str(error)[:80]}") from None
    except (
        RuntimeError,
        NotImplementedError,
        ValueError,
    ) as error:  # encrypted, packed in another way, odd numbers
        raise BundleError(f"{path}: not a bundle of stagewatch: {str(error)[:80]}") from None


def _members(path: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    infos = archive.infolist()
    if len(infos) > MEMBERS_MAX:
        raise BundleError(f"{path}: {len(infos)} members: not a bundle of stagewatch")
    found: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        if info.filename in found:
            raise BundleError(f"{path}: holds {info.filename!a} twice: not a bundle of stagewatch")
        found[info.filename] = info
    missing = [name for name in _NEEDED if name not in found]
    if missing:
        raise BundleError(f"{path}: holds no {missing[0]}: a zip archive, but no bundle of stagewatch")
    return found


def _read(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, limit: int) -> bytes:
    with archive.open(info) as member:
        content = member.read(limit + 1)
    if len(content) > limit:
        raise BundleError(f"{path}: {info.filename} is longer than {limit} bytes")
    return content


def _spooled(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> IO[bytes]:
    """A member in a nameless temporary file, so that it can be read at any position."""
    if info.file_size > EVIDENCE_BYTES_MAX:
        raise BundleError(
            f"{path}: {info.filename} of {info.file_size} bytes is longer than {EVIDENCE_BYTES_MAX}"
        )
    file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the bundle
    with archive.open(info) as member:
        # No more than announced is ever unpacked: zipfile stops there.
        shutil.copyfileobj(member, file, 1 << 20)
    return file


def write_bundle(path: Path, manifest: Manifest, members: dict[str, bytes], evidence: IO[bytes]) -> int:
    """Write a bundle; it gets its name only once it is complete. Returns its size in bytes. Raises BundleError."""
    part = path.with_name(f".{path.name}.part")
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2))
            for name, content in members.items():
                archive.writestr(name, content)
            with archive.open(zipfile.ZipInfo(EVIDENCE), "w", force_zip64=True) as member:  # packed already
                evidence.seek(0)
                shutil.copyfileobj(evidence, member, 1 << 20)
        part.chmod(0o600)
        part.replace(path)
        return path.stat().st_size
    except OSError as error:
        raise BundleError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
