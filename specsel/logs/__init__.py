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
from specsel.logs.log import PositionLog, block_rows, block_view, require_complete, summary, walk
from specsel.logs.read import LogWarning, beside, grouped, read_log, read_logs, validate
from specsel.logs.schema import CONTEXT, STATS
from specsel.logs.write import convert, encode_rows, log_rows, write_log
