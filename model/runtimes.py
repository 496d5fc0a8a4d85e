"""Which runtimes load an export, and why not: rules drawn from their code, marked as tested where our tests run them.

Rules hold for the versions named. transformers and compressed-tensors are run in this project's tests; vLLM and SGLang
are not, so what is said of them follows from their sources and reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from glm5_quant.model.export_plan import SCALE
from glm5_quant.model.exported import Exported
from glm5_quant.model.families import FAMILIES
from glm5_quant.model.scheme import OWN_FORMAT

VLLM_GROUP_SIZES = (32, 64, 128)
OWN_GROUP_SIZE = 64
OWN_TYPES = ("glm5_ref",)
STACKED_TYPES = ("granitemoe",)
# Servers join these into one matrix. Its class was looked up before the names of its parts (vLLM pull request 49483).
FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_a_proj", "kv_a_proj_with_mqa")
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class RuntimeVerdict:
    """Whether a runtime loads a folder. `how`: what to pass to it; `reason`: why not (or what it ignores)."""

    runtime: str
    loads: bool
    reason: str
    how: str
    basis: Literal["tested", "rule"]


def runtime_verdicts(
    exported: Exported, features: Sequence[str], problems: Sequence[str]
) -> tuple[RuntimeVerdict, ...]:
    """One verdict for each runtime. `features`: what the sidecar adds; `problems`: faults that `verify` found."""
    facts = _Facts.of(exported)
    fault = f"the folder is damaged: {problems[0]}" if problems else ""
    names = [f"{facts.activations} activations" if name == "activations" else name for name in features]
    ignored = f"reads the base only, without {', '.join(names)}" if names else ""
    library = facts.foreign_obstacle() or facts.ragged()
    verdicts = [
        _verdict("glm5-quant", fault or facts.own_obstacle(), "", "glm5_quant.model.load(folder)", "tested"),
        _verdict("compressed-tensors", fault or library, ignored, "PackedQuantizationCompressor", "tested"),
        _verdict("transformers", fault or facts.transformers_obstacle(), ignored, facts.transformers_call(), "tested"),
        _verdict(
            "vLLM", fault or facts.vllm_obstacle(), _joined(facts.vllm_remark(), ignored), "vllm serve FOLDER", "rule"
        ),
        _verdict("SGLang", fault or facts.sglang_obstacle(), ignored, "--model-path FOLDER", "rule"),
    ]
    return tuple(verdicts)


def _verdict(runtime: str, obstacle: str, remark: str, how: str, basis: Literal["tested", "rule"]) -> RuntimeVerdict:
    return RuntimeVerdict(
        runtime=runtime, loads=not obstacle, reason=obstacle or remark, how="" if obstacle else how, basis=basis
    )


def _joined(*remarks: str) -> str:
    return "; ".join(remark for remark in remarks if remark)


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What the rules ask about."""

    model_type: str
    symmetric: bool
    group_size: int
    has_experts: bool
    ragged_modules: list[str]
    scale_dtypes: frozenset[str]
    rotated: bool
    activations: str
    packed_embedding: bool
    packed_head: bool
    fused_in_eight: bool

    @classmethod
    def of(cls, exported: Exported) -> _Facts:
        group, config = exported.scheme.group_size, exported.checkpoint.config
        return cls(
            model_type=str(config.get("model_type")),
            symmetric=exported.scheme.symmetric,
            group_size=group,
            has_experts=any(".experts." in module for module in exported.shapes),
            ragged_modules=[module for module, (_, k) in exported.shapes.items() if k % group],
            scale_dtypes=frozenset(exported.checkpoint.tensors[module + SCALE].dtype for module in exported.shapes),
            rotated=exported.scheme.inputs.rotation == "full",
            activations=exported.scheme.inputs.activations,
            packed_embedding=any(module.endswith("embed_tokens") for module in exported.shapes),
            packed_head=any(module.endswith("lm_head") for module in exported.shapes),
            fused_in_eight=any(module.rpartition(".")[2] in FUSED for module in exported.eight),
        )

    def own_obstacle(self) -> str:
        if self.model_type not in FAMILIES:
            return f"unknown model type {self.model_type}"
        return "" if self.group_size == OWN_GROUP_SIZE else f"blocks of {self.group_size}; our kernels compute 64"

    def foreign_obstacle(self) -> str:
        """Codes that expect rotated or rescaled inputs: other readers stop at the format's name."""
        what = ["the inputs of every packed matrix are rotated at run time"] * self.rotated
        what += ["activation scales are folded into the weights"] * (self.activations == "int4-channel")
        return f"{' and '.join(what)}, which only glm5-quant computes (format {OWN_FORMAT})" if what else ""

    def ragged(self) -> str:
        if not self.ragged_modules:
            return ""
        more = f" and {len(self.ragged_modules) - _SHOWN} more" if len(self.ragged_modules) > _SHOWN else ""
        names = ", ".join(self.ragged_modules[:_SHOWN])
        return (
            f"compressed-tensors takes only whole blocks; inputs are no multiple of {self.group_size} in {names}{more}"
        )

    def transformers_obstacle(self) -> str:
        if obstacle := self.foreign_obstacle() or self.ragged():
            return obstacle
        if self.model_type in OWN_TYPES:
            return f"model type {self.model_type} comes with glm5-quant; load it with glm5_quant.model.load"
        if self.has_experts and self.model_type in STACKED_TYPES:
            return f"transformers 5.24 does not join the stored 2-D experts into the stacks of {self.model_type}"
        if self.has_experts and not self.symmetric:
            return "transformers 5.24 drops the zero-points of routed experts; export a --symmetric calibration"
        return ""

    def transformers_call(self) -> str:
        call = "AutoModelForCausalLM.from_pretrained(folder"
        return call + (")" if self.symmetric else ", quantization_config=CompressedTensorsConfig(dequantize=True))")

    def vllm_obstacle(self) -> str:
        if obstacle := self.foreign_obstacle() or self.ragged():
            return obstacle
        if self.packed_embedding:
            return "vLLM reads no packed embedding"
        if self.model_type in OWN_TYPES:
            return f"no vLLM model for {self.model_type}"
        if self.has_experts and self.model_type in STACKED_TYPES:
            return f"vLLM reads the experts of {self.model_type} from stacks, which this format does not have"
        if self.group_size not in VLLM_GROUP_SIZES:
            return f"blocks of {self.group_size}; vLLM's INT4 kernels take {', '.join(map(str, VLLM_GROUP_SIZES))}"
        if "F32" in self.scale_dtypes:
            return "scales are F32; vLLM's INT4 kernels compute in BF16 or FP16"
        return ""

    def vllm_remark(self) -> str:
        return "its 8-bit parts need a vLLM with pull request 49483 (July 2026)" if self.fused_in_eight else ""

    def sglang_obstacle(self) -> str:
        if obstacle := self.vllm_obstacle():
            return obstacle.replace("vLLM", "SGLang")
        if self.fused_in_eight:
            return "SGLang takes 8-bit matrices that it fuses (q, k, v; gate, up) for 4-bit ones"
        if self.packed_head:
            return "SGLang before August 2026 leaves a packed head unread, without a word: its logits are nonsense"
        if self.has_experts and not self.symmetric:
            return "SGLang 0.5.23 computes asymmetric experts wrongly; export a --symmetric calibration"
        return ""
