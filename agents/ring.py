"""The ring: one file per rank in shared memory that keeps the newest records, whatever happens to the engine.

A header page, then a data area that is written round and round. Positions are counts of bytes ever
written, so they only grow; a position's place in the file is its remainder by the capacity. A record is
never split: where it does not fit before the end of the area, the writer skips to the start, leaving
a gap that begins with a zero word.

One writer, any number of readers, no locks. The writer first raises ``tail`` past what it is about to
overwrite, then writes, then raises ``head``. A reader copies a record and looks at ``tail`` again: if it
passed, the copy may be torn and the records are counted as lost. The checksum catches the rest, a
reader on another core that saw the stores in another order included. A writer killed between the two
raises leaves an unpublished record that nobody reads. Each cursor is stored and loaded as one aligned
word, so that none is ever seen half written.

Neither end believes the other: the writer never reads the area back, and the reader takes nothing from it
but records whose checksum and number fit. Whatever a ring holds, the numbers of the records read and of those
counted as lost add up without a gap.

The writer holds a shared lock on the file for as long as it lives, through SIGKILL and across PID
namespaces, so that a ring without one belongs to an engine that ended.
"""

from stagewatch.agents.record import RecordTooLongError
from stagewatch.agents.ringfile import (
    CAPACITY_MAX,
    CAPACITY_MIN,
    HEADER_SIZE,
    check_directory,
    is_held,
)
from stagewatch.agents.ringreader import Margin, RingReader
from stagewatch.agents.ringwriter import RingWriter

__all__ = [
    "CAPACITY_MAX",
    "CAPACITY_MIN",
    "HEADER_SIZE",
    "Margin",
    "RecordTooLongError",
    "RingReader",
    "RingWriter",
    "check_directory",
    "is_held",
]
