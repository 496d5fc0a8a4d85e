"""Models larger than one device: which part goes where, and accelerate's hooks that bring inputs and weights together.

A device map names a device for parts of the model ("model.layers.0": 0, "lm_head": "cpu", "model.layers.7": "disk"),
as `accelerate` and `transformers` have it. Parts on "cpu" beside a GPU, and parts on "disk", are brought to the
executing device for their own forward and leave it afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glm5_quant.model.checkpoint import Checkpoint
from glm5_quant.model.errors import UserError

DeviceMap = Mapping[str, str | int | torch.device]
_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")
DEVICES = ("cpu", "cuda")
_USABLE = 0.85  # of free memory; the rest is for activations and the cache


@dataclass
class Placement:
    """Where the parts of a model that is being filled go.

    `placed` collects the parts with their devices, none inside another; `index` what was written to disk.
    """

    device_map: DeviceMap
    offload: Path | None = None
    placed: dict[str, Any] = field(default_factory=dict)
    index: dict[str, Any] = field(default_factory=dict)

    def put(self, module: nn.Module, path: str) -> None:
        """Move a filled module to its device, or to disk: its tensors are then files, and only shapes stay here."""
        place = self.placed[path] = self._place(path)
        if place != "disk":
            module.to(place)
            return
        from accelerate.utils import offload_weight, set_module_tensor_to_device

        if self.offload is None:
            raise UserError("a part of the model goes to disk, and no folder was named", item=path, hint="offload=...")
        self.offload.mkdir(parents=True, exist_ok=True)
        for name, value in module.state_dict().items():
            offload_weight(value, f"{path}.{name}", self.offload, self.index)
            set_module_tensor_to_device(module, name, "meta")

    def connect(self, model: Any) -> Any:
        """The model with accelerate's hooks, which bring inputs and weights together."""
        from accelerate import dispatch_model
        from accelerate.utils import save_offload_index

        if self.offload is not None:
            save_offload_index(self.index, self.offload)
        return dispatch_model(model, self.placed, offload_dir=self.offload, offload_buffers=True)

    def _place(self, path: str) -> str | int | torch.device:
        """The device of the longest named part that holds a module."""
        parts = path.split(".")
        for end in range(len(parts), -1, -1):
            found = self.device_map.get(".".join(parts[:end]))
            if found is not None:
                return found
        raise UserError("the device map has no place for a part of the model", item=path, hint='give one for ""')


def check_device(name: str) -> None:
    """Raise UserError where PyTorch knows no such device, or does not find it here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in DEVICES:
        raise UserError("unknown device", item="device", found=name, expected="cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= (torch.cuda.device_count() if torch.cuda.is_available() else 0):
        raise UserError("PyTorch finds no such device here", item="device", found=name, expected="cpu")


def check_map(device_map: DeviceMap, model: Any) -> None:
    """UserError for a name that is no part and holds none: what it asks for would be passed over in silence."""
    parts = [*(f"model.layers.{i}" for i in range(len(model.model.layers))), *outer_parts(model)]
    for name in device_map:
        if name and not any(f"{part}.".startswith(f"{name}.") for part in parts):
            expected = ", ".join(["model.layers.N", *outer_parts(model)])
            raise UserError("the device map names what is not placed by itself", item=name, expected=expected)


def auto_map(model: Any, checkpoint: Checkpoint, budgets: Mapping[str | int, float] | None = None) -> dict[str, Any]:
    """A complete device map: layers in order onto the devices in order, everything else with the first.

    Sizes are those of the tensors on disk, so packed layers count as packed. budgets: bytes each device may take, in
    order of preference; None measures what is free. What fits nowhere goes to "disk".
    """
    left = dict(free_bytes() if budgets is None else budgets)
    count = len(model.model.layers)
    sizes, rest = [0] * count, 0
    for name, info in checkpoint.tensors.items():
        match = _LAYER.match(name)
        if match is None:
            rest += info.nbytes
        elif int(match[1]) < count:
            sizes[int(match[1])] += info.nbytes
    first = _take(left, rest)
    return dict.fromkeys(outer_parts(model), first) | {
        f"model.layers.{i}": _take(left, size) for i, size in enumerate(sizes)
    }


def outer_parts(model: Any) -> list[str]:
    """Paths of everything outside the decoder layers: embedding, norm, rotary frequencies, head."""
    inner = [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
    return inner + [name for name, _ in model.named_children() if name != "model"]


def free_bytes() -> dict[str | int, float]:
    """What may be used of every GPU and of the CPU's memory."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    found: dict[str | int, float] = {i: torch.cuda.mem_get_info(i)[0] * _USABLE for i in gpus}
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []
    kilobytes = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), None)
    found["cpu"] = float("inf") if kilobytes is None else kilobytes * 1024 * _USABLE
    return found


def _take(left: dict[str | int, float], size: float) -> str | int:
    """The first device with room; devices before it are full from then on, so that layers stay in order."""
    while left:
        device = next(iter(left))
        if left[device] >= size:
            left[device] -= size
            return device
        del left[device]
    return "disk"
