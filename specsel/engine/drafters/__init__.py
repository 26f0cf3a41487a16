"""The drafters: a module each, named in the registry of `specsel.engine.pool`."""
