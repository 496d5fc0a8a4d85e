"""The reference GLM-5 (`glm5_ref`): the architecture of the project's source documents as a transformers model.

Call `register()` once before the Auto classes are asked for it; nothing happens at import.
"""

from __future__ import annotations


def register() -> None:
    """Make AutoConfig, AutoModel and AutoModelForCausalLM know `glm5_ref`. Calling it again changes nothing."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from glm5_quant.model.glm5.configuration import Glm5RefConfig
    from glm5_quant.model.glm5.modeling import Glm5RefForCausalLM, Glm5RefModel

    AutoConfig.register("glm5_ref", Glm5RefConfig, exist_ok=True)
    AutoModel.register(Glm5RefConfig, Glm5RefModel, exist_ok=True)
    AutoModelForCausalLM.register(Glm5RefConfig, Glm5RefForCausalLM, exist_ok=True)
