"""Settings every test shares: one thread (two stall on barriers here), no network, helpers on the path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent / "support"))

import torch

torch.set_num_threads(1)
