"""Position logs: schema, reading, writing, and what other tools export."""

from specsel.logs.log import (
    CONTEXT,
    STATS,
    BlockLog,
    LogWarning,
    PositionLog,
    block_view,
    convert,
    read_log,
    read_logs,
    require_complete,
    summary,
    validate,
    write_log,
)
from specsel.logs.records import Fault, LogError, SpecselError, located

__all__ = [
    "CONTEXT",
    "STATS",
    "BlockLog",
    "Fault",
    "LogError",
    "LogWarning",
    "PositionLog",
    "SpecselError",
    "block_view",
    "convert",
    "located",
    "read_log",
    "read_logs",
    "require_complete",
    "summary",
    "validate",
    "write_log",
]
