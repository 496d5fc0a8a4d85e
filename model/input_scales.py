"""The static channel scales of int4-channel activations: are they all there, and one tensor for a stack of experts.

`M.activation_scale` float32 [K] lies in the sidecar for every packed matrix M. Gate and up of an expert read one input,
so they share their scales.

Letters: E experts, K in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from glm5_quant.model.checkpoint import Checkpoint, TensorInfo
from glm5_quant.model.errors import UserError
from glm5_quant.model.families import Linear
from glm5_quant.model.shards import Spec

ENDING = ".activation_scale"


def header_faults(
    tensors: Mapping[str, Spec | TensorInfo], packed: Mapping[str, tuple[int, int]], activations: str
) -> list[str]:
    """What is wrong with the scales, by headers alone: in mode int4-channel each matrix has its own, else none has."""
    found = {name.removesuffix(ENDING): tensor for name, tensor in tensors.items() if name.endswith(ENDING)}
    wanted = packed if activations == "int4-channel" else {}
    faults = [f"{module}{ENDING}: not of a packed matrix in mode int4-channel" for module in found.keys() - wanted]
    for module, (_, k) in wanted.items():
        tensor = found.get(module)
        if tensor is None:
            faults.append(f"{module}{ENDING}: missing, though activations are int4-channel")
        elif (tensor.dtype, tuple(tensor.shape)) != ("F32", (k,)):
            faults.append(f"{module}{ENDING}: {tensor.dtype} {list(tensor.shape)}, expected F32 [{k}]")
    return sorted(faults)


def value_faults(extra: Checkpoint, linears: Iterable[Linear]) -> list[str]:
    """Scales that are not finite or not above zero, and gate and up projections of an expert that do not share them."""
    faults, by_expert = [], defaultdict[tuple[int, int], list[str]](list)
    for linear in linears:
        if linear.expert is not None and linear.role in ("gate", "up") and linear.name + ENDING in extra.tensors:
            by_expert[linear.layer, linear.expert].append(linear.name)
    for name in (name for name in extra.tensors if name.endswith(ENDING)):
        try:
            read_scale(extra, name.removesuffix(ENDING))
        except UserError as error:
            faults.append(str(error))
    for modules in () if faults else by_expert.values():
        try:
            _shared(extra, modules)
        except UserError as error:
            faults.append(str(error))
    return faults


def read_scale(extra: Checkpoint, module: str) -> Tensor:
    """The scales of one matrix, float32 [K]. Raises UserError for values that are not finite or not above zero."""
    scale_K = extra.read(module + ENDING)
    if not bool((scale_K > 0).all()):
        where = torch.nonzero(scale_K <= 0)[0].tolist()
        raise UserError(f"not above zero at {where}", file=extra.info(module + ENDING).file, item=module + ENDING)
    return scale_K


def stacked(extra: Checkpoint, experts: Sequence[Sequence[str]]) -> Tensor:
    """Scales of a stack, each expert given by the matrices that read its input: [K] where all agree, else [E, K]."""
    scale_EK = torch.stack([_shared(extra, modules) for modules in experts])
    return scale_EK[0].clone() if bool((scale_EK == scale_EK[0]).all()) else scale_EK


def _shared(extra: Checkpoint, modules: Sequence[str]) -> Tensor:
    first_K = read_scale(extra, modules[0])
    for other in modules[1:]:
        if not torch.equal(read_scale(extra, other), first_K):
            problem = f"scales differ from those of {modules[0]}, which reads the same input"
            raise UserError(problem, file=extra.info(other + ENDING).file, item=other + ENDING)
    return first_K
