"""`glm5-quant plan`: what a calibration would cost, from headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import typer

from glm5_quant.cli import options as opt
from glm5_quant.cli.defaults import given, is_packaged, needed_data, packaged_model, unless_default
from glm5_quant.cli.failures import guarded
from glm5_quant.cli.terminal import facts, human_bytes, json_text, say, say_next, warn

if TYPE_CHECKING:
    from glm5_quant.calibrate.plan import Plan
    from glm5_quant.calibrate.settings import Settings


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


@guarded
def plan(
    model: opt.Model = None,
    num_samples: opt.NumSamples = None,
    seqlen: opt.SeqLen = 512,
    preset: opt.PresetOption = "default",
    symmetric: opt.Symmetric = False,
    work_dir: opt.WorkDir = opt.WORK_DIR,
    device: opt.Device = "cpu",
    max_memory: opt.MaxMemory = None,
    json: opt.Json = False,
) -> None:
    """Say what `calibrate` would cost: sizes, peak memory, disk, coverage. Reads headers only."""
    model = packaged_model() if model is None else model
    from glm5_quant.calibrate.presets import make_settings

    settings = make_settings(
        preset,
        quant={"symmetric": symmetric or None},
        num_samples=num_samples or 0,
        seqlen=seqlen,
        device=device,
        max_memory_bytes=opt.size(max_memory, "--max-memory"),
    )
    repeated = given(
        plan,
        num_samples=num_samples,
        seqlen=seqlen,
        preset=preset,
        symmetric=symmetric,
        device=device,
        max_memory=max_memory,
    )
    show_plan(model, settings, work_dir, json, repeated)


def show_plan(model: str, settings: Settings, work_dir: str, json: bool, repeated: Mapping[str, Any]) -> None:
    """Make and print the plan; shared with `calibrate --dry-run`. `repeated`: options that `calibrate` needs again.

    Raises UserError for what cannot work, after the plan was printed.
    """
    from glm5_quant.calibrate.plan import make_plan
    from glm5_quant.model.checkpoint import open_checkpoint

    found = make_plan(open_checkpoint(model), settings, work_dir)
    warn(found.warnings)
    print(json_text(_as_dict(found)) if json else _as_text(found))
    found.refuse_impossible()
    named = None if is_packaged(model) else model
    needed: dict[str, Any] = {"model": named, "dataset": needed_data(model), "work_dir": unless_default(work_dir)}
    say_next("calibrate", **(needed | dict(repeated)))


def announce(model: str, settings: Settings, work_dir: str) -> list[str]:
    """Say in one line what a calibration will need, and its warnings, before it starts; returns the warnings."""
    from glm5_quant.calibrate.plan import make_plan
    from glm5_quant.model.checkpoint import open_checkpoint

    found = make_plan(open_checkpoint(model), settings, work_dir)
    say(
        f"{found.family.model_type}, {found.layers} layers, {found.tokens:,} tokens: about "
        f"{human_bytes(found.peak_memory_bytes)} of memory and {human_bytes(found.disk_needed_bytes)} of disk"
    )
    warn(found.warnings)
    return found.warnings


def _as_dict(plan: Plan) -> dict[str, Any]:
    """The figures without the list of every matrix, of which a large model has 59,000."""
    left_out = {"family", "by_layer"}
    figures = {item.name: getattr(plan, item.name) for item in fields(plan) if item.name not in left_out}
    matrices = sum(map(len, plan.by_layer.values()))
    return {"model_type": plan.family.model_type, "matrices": matrices, **figures}


def _as_text(plan: Plan) -> str:
    matrices = sum(map(len, plan.by_layer.values()))
    fits = "fits" if plan.peak_memory_bytes <= plan.memory_cap_bytes else "does not fit"
    even = "" if plan.tokens_per_expert is None else f", {plan.tokens_per_expert:,.0f} an expert if shared evenly"
    return facts(
        ("model", f"{plan.family.model_type}, {plan.layers} layers, {human_bytes(plan.source_bytes)}"),
        ("quantized", f"{matrices:,} matrices, {plan.quantized_weights:,} weights"),
        ("export", human_bytes(plan.export_bytes)),
        ("tokens", f"{plan.tokens:,} in {plan.windows} windows of {plan.seqlen}{even}"),
        ("coverage", f"target {plan.coverage_target:,} tokens an expert" if plan.experts else None),
        ("memory", f"peak {human_bytes(plan.peak_memory_bytes)}, allowed {human_bytes(plan.memory_cap_bytes)}: {fits}"),
        ("disk", f"{human_bytes(plan.disk_needed_bytes)} in {plan.work_dir}, {human_bytes(plan.disk_free_bytes)} free"),
    )
