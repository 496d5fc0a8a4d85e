"""Run the model over sample data, one layer at a time, and decide every scale and code.

`calibrate` and `plan` are the Python twins of the commands; they load torch when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm5_quant.calibrate.report import CalibrationReport as CalibrationReport
    from glm5_quant.calibrate.run import LayerDone as LayerDone
    from glm5_quant.calibrate.run import StoppedSafely as StoppedSafely
    from glm5_quant.calibrate.run import calibrate as calibrate
    from glm5_quant.calibrate.settings import Settings as Settings
    from glm5_quant.calibrate.settings import quant_config as quant_config

_HOMES = {
    "CalibrationReport": "report",
    "LayerDone": "run",
    "StoppedSafely": "run",
    "calibrate": "run",
    "Settings": "settings",
    "quant_config": "settings",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
