"""The engine: target, drafters, harness. Needs the extra ``engine`` (torch, transformers)."""
