"""What a checkpoint is: open, read, run one layer, write an export, load it back.

`export`, `load` and `verify` are here under their own names; they are imported when first used, so that importing the
package never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm5_quant.model.exporting import ExportReport as ExportReport
    from glm5_quant.model.exporting import export as export
    from glm5_quant.model.loading import load as load
    from glm5_quant.model.verifying import VerifyReport as VerifyReport
    from glm5_quant.model.verifying import verify as verify

_HOMES = {
    "export": "exporting",
    "ExportReport": "exporting",
    "load": "loading",
    "verify": "verifying",
    "VerifyReport": "verifying",
}
__all__ = ["ExportReport", "VerifyReport", "export", "load", "verify"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
