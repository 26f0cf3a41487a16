"""Position logs: schema, reading, writing, and what other tools export."""

from specsel.logs.files import (
    Fault,
    LogError,
    SpecselError,
    drafter_sha256,
    file_entry,
    gzip_bytes,
    home,
    located,
    project_folder,
    read_text,
    readable,
    refuse_existing,
    sha256_of,
    write_bytes_atomically,
)
from specsel.logs.log import BlockLog, PositionLog, block_view, require_complete, summary, walk
from specsel.logs.read import LogWarning, beside, grouped, read_log, read_logs, validate
from specsel.logs.schema import CONTEXT, STATS
from specsel.logs.write import convert, encode_rows, log_rows, write_log

__all__ = [
    "CONTEXT",
    "STATS",
    "BlockLog",
    "Fault",
    "LogError",
    "LogWarning",
    "PositionLog",
    "SpecselError",
    "beside",
    "block_view",
    "convert",
    "drafter_sha256",
    "encode_rows",
    "file_entry",
    "grouped",
    "gzip_bytes",
    "home",
    "located",
    "log_rows",
    "project_folder",
    "read_log",
    "read_logs",
    "read_text",
    "readable",
    "refuse_existing",
    "require_complete",
    "sha256_of",
    "summary",
    "validate",
    "walk",
    "write_bytes_atomically",
    "write_log",
]
