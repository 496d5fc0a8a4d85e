"""Can the router that a config describes choose experts at all? Asked before any layer is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm5_quant.model.errors import UserError

# How deepseek_v2 chooses; the others with groups of experts know one way.
V2_METHODS = ("greedy", "group_limited_greedy")


def check_routing(config: Any, experts: int, *, file: Path | str | None) -> None:
    """UserError for counts of experts, groups and choices that do not fit together.

    config: the object of `families.model_config`; experts: routed experts of a layer, 0 for dense models.

    With groups, the router ranks `n_group` equal groups of experts by their best two (deepseek_v2: by their best one),
    and takes a token's experts out of the `topk_group` best groups.
    """
    taken = getattr(config, "num_experts_per_tok", None)
    if not experts:
        return
    many = "a token cannot take so many experts"
    _need(isinstance(taken, int) and 1 <= taken <= experts, "num_experts_per_tok", taken, f"1 to {experts}", file, many)
    v2 = config.model_type == "deepseek_v2"
    if v2:
        method = config.topk_method
        _need(method in V2_METHODS, "topk_method", repr(method), " or ".join(V2_METHODS), file, "unknown routing")
    if not hasattr(config, "n_group") or (v2 and config.topk_method == "greedy"):
        return
    groups, kept = config.n_group, config.topk_group
    even = f"a divisor of the {experts} experts" + ("" if v2 else " that leaves 2 or more to a group")
    fits = isinstance(groups, int) and groups >= 1 and experts % groups == 0 and experts // groups >= (1 if v2 else 2)
    _need(fits, "n_group", groups, even, file, "experts cannot be put into so many groups")
    fits = isinstance(kept, int) and 1 <= kept <= groups
    _need(fits, "topk_group", kept, f"1 to {groups}, which is n_group", file, "so many groups cannot be chosen")
    most = kept * (experts // groups)
    held = f"{most} at most, what {kept} of {groups} groups hold"
    _need(taken <= most, "num_experts_per_tok", taken, held, file, many)


def _need(fits: bool, item: str, found: object, expected: str, file: Path | str | None, problem: str) -> None:
    if not fits:
        raise UserError(problem, file=file, item=item, found=str(found), expected=expected)
