"""Run a model one decoder layer at a time: peak memory follows one layer, whatever the size of the model.

The `transformers` model is built empty. Its own forward, with recorders in place of the decoder layers, says what each
layer is called with (masks, rotary embeddings, positions), and how a layer's second output goes into the next
(`prev_topk_indices` of GLM-5.2's shared indexers); so no family needs forward code of ours, and scalings of embedding
and logits stay right.

Dimension letters: B batch, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from glm5_quant.model import families
from glm5_quant.model.build import build_empty, fill, fp32_patterns
from glm5_quant.model.causal import ShortCausal
from glm5_quant.model.checkpoint import Checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.families import Family, Linear

SMALL_TABLE_BYTES = 128 * 2**20  # embeddings up to this size are kept; larger ones are read row by row
SIDE = object()  # stands for a layer's second output while recording


class LayerRunner:
    """Loads and runs decoder layers of a checkpoint, one at a time, in `dtype` on the CPU.

    The model's own modules stay empty; what `load_layer` returns belongs to the caller, who may swap submodules:
    attention at `family.attention_path`, MLP or MoE at `family.block`, inside it `family.experts`, `family.shared`.
    """

    def __init__(self, checkpoint: Checkpoint, family: Family, dtype: torch.dtype = torch.float32) -> None:
        self.checkpoint, self.family, self.dtype = checkpoint, family, dtype
        self.model: Any = build_empty(checkpoint, dtype)
        self.base: Any = self.model.model
        self.config: Any = self.model.config
        self.config.output_router_logits = False  # recorders hand out none to make a loss of
        self._keep_fp32 = fp32_patterns(self.model, dtype)

    @property
    def layer_count(self) -> int:
        return len(self.base.layers)

    @cached_property
    def linears(self) -> list[list[Linear]]:
        """For each layer the linears to quantize, in the order of the computation (experts by number)."""
        by_layer: list[list[Linear]] = [[] for _ in range(self.layer_count)]
        for linear in families.linears(self.checkpoint, self.family):
            by_layer[linear.layer].append(linear)
        return by_layer

    def experts(self, layer: int) -> list[dict[str, Linear]]:
        """For each routed expert of a layer its linears by role ("gate", "up", "down"); [] for a dense layer."""
        found: dict[int, dict[str, Linear]] = {}
        for linear in self.linears[layer]:
            if linear.expert is not None:
                found.setdefault(linear.expert, {})[linear.role] = linear
        return [found[expert] for expert in sorted(found)]

    @torch.no_grad()
    def embed(self, input_ids_BT: Tensor) -> Tensor:
        """What the first decoder layer receives, [B, T, D] in `dtype`: embeddings with the family's own scaling."""
        table = _Rows(self.checkpoint, self._embedding_name(), self.dtype, self._table)
        recorders = self._recorders()
        with self._replaced(recorders, embed_tokens=table):
            self.base(input_ids=input_ids_BT, use_cache=False)
        return recorders[0].hidden

    @torch.no_grad()
    def kwargs_for(self, input_ids_BT: Tensor, attention_mask_BT: Tensor | None = None) -> list[dict[str, Any]]:
        """Keyword arguments of each layer for windows of this shape, without hidden states and side values.

        Only the shape of `input_ids_BT` counts, so the result serves every batch of the same shape (and padding).
        """
        recorders = self._recorders()
        with self._replaced(recorders):
            self.base(
                inputs_embeds=self._no_embeds(input_ids_BT.shape), attention_mask=attention_mask_BT, use_cache=False
            )
        return [recorder.kwargs for recorder in recorders]

    def load_layer(self, layer: int, *, experts: bool = True, without: Collection[str] = ()) -> nn.Module:
        """Decoder layer with its weights. `without` names modules inside the layer whose weight stays empty (on meta),
        for callers that replace them. Without `experts`, so do the routed experts' stacks: replace
        that submodule before running the layer."""
        module: nn.Module = copy.deepcopy(self.base.layers[layer], {id(self.config): self.config})
        routed = f".{self.family.block}.{self.family.experts}."
        empty = {f"model.layers.{layer}.{module}.weight" for module in without}
        fill(
            module,
            f"model.layers.{layer}",
            self.checkpoint,
            self.family,
            self.dtype,
            keep_fp32=self._keep_fp32,
            skip=lambda name: name in empty or (not experts and routed in name),
        )
        return module.eval().requires_grad_(False)

    @torch.no_grad()
    def run_layer(
        self, layer: nn.Module, hidden_BTD: Tensor, kwargs: dict[str, Any], side: Any = None
    ) -> tuple[Tensor, Any]:
        """One layer forward -> (hidden [B, T, D], side value for the next layer; None where the family has none)."""
        extra = {} if self.family.side is None else {self.family.side: side}
        with ShortCausal():
            out = layer(hidden_BTD, **kwargs, **extra)
        if not isinstance(out, tuple):
            return out, None
        return out[0], out[1] if self.family.side is not None else None

    @torch.no_grad()
    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Logits [B, T, V] from the last layer's output: final norm, head and scaling of the model's own forward.

        Loads norm and head on first use and keeps them; `release_head` frees them.
        """
        for module, path in ((self.base.norm, "model.norm"), (self.model.lm_head, "lm_head")):
            if any(tensor.is_meta for tensor in module.state_dict().values()):
                fill(module, path, self.checkpoint, self.family, self.dtype, keep_fp32=self._keep_fp32)
        recorders = self._recorders()
        recorders[-1].answer = hidden_BTD
        with self._replaced(recorders, norm=self.base.norm):
            out = self.model(inputs_embeds=self._no_embeds(hidden_BTD.shape[:2]), use_cache=False)
        result: Tensor = out.logits
        return result

    def release_head(self) -> None:
        """Free the memory of the head and the final norm."""
        self.base.norm.to("meta")
        self.model.lm_head.to("meta")

    def release_embedding(self) -> None:
        """Free the memory of the embedding, which `embed` reads again if it is needed again."""
        self.__dict__.pop("_table", None)

    def _recorders(self) -> list[_Recorder]:
        return [_Recorder(layer, self.family.side, first=i == 0) for i, layer in enumerate(self.base.layers)]

    def _no_embeds(self, shape: Any) -> Tensor:
        """Stand-in for embeddings: right shape and dtype, the memory of one number."""
        return torch.zeros((), dtype=self.dtype).expand(*shape, self.config.hidden_size)

    def _embedding_name(self) -> str:
        name = families.disk_name(self.checkpoint, self.family, "model.embed_tokens.weight")
        if name is None:
            raise UserError("no embedding in this checkpoint", file=self.checkpoint.folder, item="embed_tokens.weight")
        return name

    @cached_property
    def _table(self) -> Tensor | None:
        info = self.checkpoint.info(self._embedding_name())
        return self.checkpoint.read(info.name) if info.nbytes <= SMALL_TABLE_BYTES else None

    @contextmanager
    def _replaced(self, recorders: list[_Recorder], **modules: nn.Module) -> Iterator[None]:
        """The base model with recorders for layers, no final norm, and `modules` in place of its own."""
        new = {"layers": nn.ModuleList(recorders), "norm": nn.Identity(), **modules}
        old = {name: getattr(self.base, name) for name in new}
        try:
            for name, module in new.items():
                setattr(self.base, name, module)
            yield
        finally:
            for name, module in old.items():
                setattr(self.base, name, module)


class _Recorder(nn.Module):
    """Stands where a decoder layer stands: notes how it is called, and passes its input on (or `answer`)."""

    def __init__(self, layer: nn.Module, side: str | None, *, first: bool) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # not a submodule: only asked for attributes
        self.side, self.first = side, first
        self.kwargs: dict[str, Any] = {}
        self.hidden = torch.empty(0)
        self.answer: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """Some models look at attributes of their layers (`attention_type`) before they call them."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        self.hidden = hidden_states
        out = hidden_states if self.answer is None else self.answer
        if self.side is None:
            self.kwargs = kwargs
            return out
        value = kwargs.pop(self.side, None)
        assert value is (None if self.first else SIDE), f"{self.side} does not come from the layer before"
        self.kwargs = kwargs
        return out, SIDE


class _Rows(nn.Module):
    """An embedding that reads only the rows it is asked for (`table` None), or looks them up in `table`."""

    def __init__(self, checkpoint: Checkpoint, name: str, dtype: torch.dtype, table: Tensor | None) -> None:
        super().__init__()
        self.checkpoint, self.name, self.dtype, self.table = checkpoint, name, dtype, table

    def forward(self, ids_BT: Tensor) -> Tensor:
        rows = self.checkpoint.info(self.name).shape[0]
        if int(ids_BT.min()) < 0 or int(ids_BT.max()) >= rows:
            raise UserError(
                "a token id is outside the embedding",
                file=self.checkpoint.folder,
                item=self.name,
                found=f"ids {int(ids_BT.min())} to {int(ids_BT.max())}",
                expected=f"0 to {rows - 1}",
                hint="Tokenizer and model do not belong together",
            )
        if self.table is not None:
            return self.table[ids_BT].to(self.dtype)
        unique, inverse = torch.unique(ids_BT, return_inverse=True)
        return self.checkpoint.read_rows(self.name, unique.tolist(), self.dtype)[inverse]
