"""Tensors that a layer gathers, moved to disk as they come: memory follows one expert, not 256 of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from glm5_quant.model.errors import UserError

SPILL_BYTES = 64 * 2**20


@dataclass(kw_only=True)
class Spill:
    """`tensors` are in memory, `parts` are files of `folder` with those before. Without a folder all stay in memory."""

    folder: Path | None = None
    stem: str = "solved"
    tensors: dict[str, Tensor] = field(default_factory=dict)
    parts: list[Path] = field(default_factory=list)

    def spill(self) -> None:
        """Move the tensors so far to a file: a layer of 256 experts holds 5 GB of codes, an expert 20 MB."""
        if self.folder is None or sum(tensor.nbytes for tensor in self.tensors.values()) < SPILL_BYTES:
            return
        path = self.folder / f"{self.stem}.{len(self.parts):05d}.part"
        save(self.tensors, path)
        self.parts.append(path)
        self.tensors = {}


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors to a file of this run's own.

    Raises:
        UserError: the system refuses, as a full disk does. Nothing of the file stays.
    """
    try:
        save_file(tensors, path)
    except (SafetensorError, OSError) as error:
        path.unlink(missing_ok=True)
        raise UserError(f"cannot be written ({error})", file=path) from None
