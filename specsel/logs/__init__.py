"""Position logs: schema, reading, writing, and what other tools export."""
