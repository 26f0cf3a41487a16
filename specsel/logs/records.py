"""Names that moved: read them from ``specsel.logs``."""

from specsel.logs.files import SpecselError, located, project_folder, readable, write_bytes_atomically

__all__ = ["SpecselError", "located", "project_folder", "readable", "write_bytes_atomically"]
