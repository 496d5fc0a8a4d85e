"""Where real data lies when it is there: `shared("data/...")` gives a path or skips the test with a reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def shared(relative: str) -> Path:
    """Path of a file of the shared folder beside the checkout (GLM5_QUANT_SHARED overrides where that is)."""
    folder = Path(os.environ.get("GLM5_QUANT_SHARED", ROOT.parent / "shared"))
    path = folder / relative
    if not path.exists():
        pytest.skip(f"needs {relative} of the shared data folder, which is not beside this checkout")
    return path
