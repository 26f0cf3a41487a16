"""What a bug report needs: versions, environment, whether the engine is there, caches and free disk space."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from specsel import __version__
from specsel.logs import project_folder

PACKAGES = "numpy pandas scipy scikit-learn altair vl-convert-python papermill jupyter-book torch transformers"
VARIABLES = "OMP_NUM_THREADS SPECSEL_HOME SPECSEL_PROMPTS SPECSEL_VALUES SPECSEL_CHARTS HF_HOME CUDA_VISIBLE_DEVICES"


def examine() -> dict[str, Any]:
    """Facts as plain JSON types; a package that is not installed is None."""
    cache = Path(os.environ.get("SPECSEL_HOME") or user_cache_path("specsel"))
    place = next(p for p in (cache, *cache.parents) if p.exists())
    return {
        "specsel": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "engine": find_spec("torch") is not None and find_spec("transformers") is not None,
        **{f"package {name}": _version(name) for name in PACKAGES.split()},
        "cache": str(cache),
        "cache_exists": cache.exists(),
        "disk_free_gb": round(shutil.disk_usage(place).free / 1e9, 1),
        "folder": str(Path.cwd()),
        "project": (root := project_folder()) and str(root),
        **{f"env {name}": os.environ[name] for name in VARIABLES.split() if name in os.environ},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
