"""Counts of experts, groups and choices that do not fit together are refused before any layer is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support_models import byte_tokenizer, edit_config, tiny, tiny_q3

from glm5_quant.calibrate.plan import make_plan
from glm5_quant.calibrate.settings import Settings
from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.families import family_of, model_config
from glm5_quant.model.layers import LayerRunner

GROUPED = ("glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "deepseek_v3")


def plan(folder: Path) -> Any:
    return make_plan(open_checkpoint(folder), Settings(), folder.parent / "work")


@pytest.mark.parametrize("taken", [0, 5])
def test_more_experts_for_a_token_than_there_are_is_a_message(taken: int, tmp_path: Path) -> None:
    edit_config(tiny_q3(tmp_path / "m"), num_experts_per_tok=taken)
    with pytest.raises(UserError, match=rf"config.json: num_experts_per_tok: .*found {taken}.*expected 1 to 4"):
        plan(tmp_path / "m")


@pytest.mark.parametrize("model_type", GROUPED)
@pytest.mark.parametrize(("changes", "message"), [
    ({"n_group": 3}, "n_group: .*found 3; expected a divisor of the 4 experts that leaves 2 or more"),
    ({"n_group": 0}, "n_group: .*found 0; expected a divisor of the 4 experts"),
    ({"n_group": 4}, "n_group: .*found 4; expected a divisor of the 4 experts that leaves 2 or more to a group"),
    ({"n_group": 2, "topk_group": 3}, "topk_group: .*found 3; expected 1 to 2, which is n_group"),
    ({"n_group": 2, "topk_group": 0}, "topk_group: .*found 0; expected 1 to 2"),
    ({"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3},
     "num_experts_per_tok: .*found 3; expected 2 at most, what 1 of 2 groups hold"),
])  # fmt: skip
def test_groups_of_experts_that_cannot_be_are_refused_in_the_plan(
    model_type: str, changes: dict[str, int], message: str, tmp_path: Path
) -> None:
    edit_config(tiny(model_type, tmp_path / "m"), **changes)
    with pytest.raises(UserError, match=f"config.json: {message}"):
        plan(tmp_path / "m")


@pytest.mark.parametrize(("changes", "message"), [
    ({"topk_method": "noaux_tc"}, "topk_method: unknown routing; found 'noaux_tc'; expected greedy or group"),
    ({"topk_method": "group_limited_greedy", "n_group": 3}, "n_group: .*found 3; expected a divisor of the 4 experts"),
    ({"topk_method": "group_limited_greedy", "n_group": None}, "n_group: .*expected a divisor of the 4 experts"),
    ({"num_experts_per_tok": None}, "num_experts_per_tok: .*expected 1 to 4"),
])  # fmt: skip
def test_deepseek_v2_has_ways_of_its_own(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    edit_config(tiny("deepseek_v2", tmp_path / "m"), **changes)
    with pytest.raises(UserError, match=f"config.json: {message}"):
        plan(tmp_path / "m")


@pytest.mark.parametrize("model_type", (*GROUPED, "deepseek_v2"))
def test_what_is_allowed_runs(model_type: str, tmp_path: Path) -> None:
    """The narrowest groups that pass the check are ones the family's own router takes."""
    v2 = model_type == "deepseek_v2"
    groups = {"n_group": 4 if v2 else 2, "topk_group": 2 if v2 else 1, "num_experts_per_tok": 2}
    folder = byte_tokenizer(tiny(model_type, tmp_path / "m"))
    edit_config(folder, **groups, **({"topk_method": "group_limited_greedy"} if v2 else {}))
    assert plan(folder).experts == 4
    checkpoint = open_checkpoint(folder)
    runner = LayerRunner(checkpoint, family_of(checkpoint.config))
    ids = torch.arange(8)[None]
    hidden, side = runner.embed(ids), None
    for layer, kwargs in enumerate(runner.kwargs_for(ids)):
        hidden, side = runner.run_layer(runner.load_layer(layer), hidden, kwargs, side)
    assert bool(torch.isfinite(hidden).all())


def test_deepseek_v2_without_groups_and_dense_models_have_nothing_to_check() -> None:
    model_config({"model_type": "deepseek_v2", "n_group": 5, "topk_method": "greedy", "num_experts_per_tok": 2})
    model_config({"model_type": "llama", "num_experts": 3})
