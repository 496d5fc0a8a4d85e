"""A pretend GPU for tests: tensors that say they lie on another device, whose values lie on the CPU.

Operations that mix the two raise, as CUDA's do, except those that may: copies, numbers of no dimensions, and indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

NAME = "gpu"
_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default, _aten.copy.default}
_INDEXED = {_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default, _aten.index_put.default}


class There(torch.Tensor):
    """A tensor on the pretend GPU; `here` holds its values."""

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> There:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            here.size(),
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            layout=here.layout,
            device=torch.device(f"{NAME}:0"),
        )
        made.here = here
        return made

    def __init__(self, here: torch.Tensor) -> None:
        pass

    def __repr__(self, **_: Any) -> str:
        return f"There({self.here!r})"

    def data_ptr(self) -> int:
        return self.here.data_ptr()

    def tolist(self) -> Any:
        return self.here.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _is_there(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _refuse_mixed(func: Any, args: Sequence[Any], tensors: list[torch.Tensor]) -> None:
    there = [tensor for tensor in tensors if isinstance(tensor, There)]
    here = [tensor for tensor in tensors if not isinstance(tensor, There) and tensor.dim() > 0]
    if func in _INDEXED:  # indices of a tensor there may lie here, but not the other way round
        values = [one for one in args[2:3] if isinstance(one, torch.Tensor)]
        here = [one for one in (args[0], *values) if not isinstance(one, There) and one.dim() > 0]
    if there and here and func not in _COPIES:
        shapes = [tuple(one.shape) for one in there], [tuple(one.shape) for one in here]
        raise RuntimeError(f"{func} mixes tensors of the GPU {shapes[0]} and of the CPU {shapes[1]}")


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
    _refuse_mixed(func, args, tensors)
    wanted = kwargs.get("device")
    plain_args, plain_kwargs = tree_map(lambda one: one.here if isinstance(one, There) else one, (args, kwargs))
    if _is_there(wanted):
        plain_kwargs["device"] = torch.device("cpu")
    out = func(*plain_args, **plain_kwargs)
    if func is _aten.copy_.default:
        return args[0]
    if func is _aten._local_scalar_dense.default:
        return out
    if not (_is_there(wanted) if wanted is not None else any(isinstance(one, There) for one in tensors)):
        return out
    name = func._schema.name.split("::")[1]
    if name.endswith("_") and not name.endswith("__") and args and isinstance(args[0], There):
        return args[0]
    if kwargs.get("out") is not None:
        return kwargs["out"]
    return tree_map(_there, out)


def _there(one: Any) -> Any:
    return There(one) if isinstance(one, torch.Tensor) and not isinstance(one, There) else one


def _made_there(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.tensor and torch.as_tensor know nothing of devices that are no backend's."""

    def made(data: Any, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> torch.Tensor:
        if isinstance(data, There):
            return data if dtype is None else data.to(dtype)
        out = make(data, dtype=dtype, **options)
        return out if device is None else out.to(device)

    return made


@contextmanager
def pretend_gpu() -> Iterator[str]:
    """Make the device; its name is given."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        backend_registration._setup_privateuseone_for_python_backend(NAME)
    tensor, as_tensor = torch.tensor, torch.as_tensor
    torch.tensor, torch.as_tensor = _made_there(tensor), _made_there(as_tensor)
    try:
        with _Mode():
            yield NAME
    finally:
        torch.tensor, torch.as_tensor = tensor, as_tensor
