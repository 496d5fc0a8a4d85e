"""`glm5-quant calibrate`: run the model over sample data and decide every scale and code."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glm5_quant.cli import options as opt
from glm5_quant.cli.defaults import calibration_data, given, packaged_model, unless_default
from glm5_quant.cli.failures import StoppedSafely, guarded, stop_at_safe_points
from glm5_quant.cli.plan import announce, show_plan
from glm5_quant.cli.progress import LayerProgress
from glm5_quant.cli.terminal import (
    ablation,
    errors,
    facts,
    histogram,
    human_bytes,
    human_time,
    json_text,
    say,
    say_next,
    table,
    warn,
)

if TYPE_CHECKING:
    from glm5_quant.calibrate.report import CalibrationReport
    from glm5_quant.calibrate.settings import Settings

RotationOption = Annotated[
    opt.Rotation | None,
    typer.Option(
        help="64-point Hadamard on inputs; only this package loads full.",
        show_default=opt.AS_PRESET,
        rich_help_panel=opt.SETTINGS,
    ),
]
ActivationsOption = Annotated[
    opt.Activations | None,
    typer.Option(
        help="Format of activations in this package's runtime.",
        show_default=opt.AS_PRESET,
        rich_help_panel=opt.SETTINGS,
    ),
]
ShadowBudget = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        metavar="SHARE",
        help="Bytes of shadows (columns of the error), as a share of the experts' FP16 bytes.",
        show_default=opt.AS_PRESET,
        rich_help_panel=opt.SETTINGS,
    ),
]
AllExperts = Annotated[
    bool,
    typer.Option(
        "--all-experts",
        metavar="",
        help="Show every expert all tokens, not only its own.",
        rich_help_panel=opt.SETTINGS,
    ),
]
ResumeOption = Annotated[
    opt.Resume, typer.Option(help="Go on with a stopped run, insist on one, or start again.", rich_help_panel=opt.RUN)
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", metavar="", help="Only say what it would cost, like `plan`.", rich_help_panel=opt.OUTPUT),
]


def register(app: typer.Typer) -> None:
    app.command("calibrate")(calibrate)


@guarded
def calibrate(
    model: opt.Model = None,
    dataset: opt.Dataset = None,
    num_samples: opt.NumSamples = None,
    seqlen: opt.SeqLen = 512,
    preset: opt.PresetOption = "default",
    symmetric: opt.Symmetric = False,
    rotation: RotationOption = None,
    activations: ActivationsOption = None,
    shadow_budget: ShadowBudget = None,
    all_experts: AllExperts = False,
    work_dir: opt.WorkDir = opt.WORK_DIR,
    device: opt.Device = "cpu",
    max_memory: opt.MaxMemory = None,
    seed: opt.Seed = 0,
    resume: ResumeOption = opt.Resume.auto,
    dry_run: DryRun = False,
    overwrite: opt.Overwrite = False,
    json: opt.Json = False,
) -> None:
    """Run the model over sample data, layer by layer, and decide every scale and code.

    A stopped run goes on where it stopped when the same command is given again.
    """
    from glm5_quant.calibrate.presets import make_settings

    settings = make_settings(
        preset,
        quant={
            "symmetric": symmetric or None,
            "rotation": rotation and rotation.value,
            "activations": activations and activations.value,
            "shadow_budget": shadow_budget,
        },
        num_samples=num_samples or 0,
        seqlen=seqlen,
        seed=seed,
        all_experts=all_experts,
        device=device,
        max_memory_bytes=opt.size(max_memory, "--max-memory"),
    )
    # After the settings: a wrong one leaves nothing behind.
    model = packaged_model() if model is None else model
    data = calibration_data(dataset, model, work_dir, dry=dry_run)
    if data is None or dry_run:
        repeated = given(
            calibrate,
            dataset=dataset,
            num_samples=num_samples,
            seqlen=seqlen,
            preset=preset,
            symmetric=symmetric,
            rotation=rotation,
            activations=activations,
            shadow_budget=shadow_budget,
            all_experts=all_experts,
            device=device,
            max_memory=max_memory,
            seed=seed,
            resume=resume,
            overwrite=overwrite,
        )
        show_plan(model, settings, work_dir, json, repeated)
        return
    foreseen = announce(model, settings, work_dir)
    report = _run(model, data, work_dir, settings, resume=resume.value, overwrite=overwrite)
    warn(message for message in report.warnings if message not in foreseen)
    show_report(report, json)
    say_next("export", work_dir=unless_default(work_dir))


def _run(model: str, dataset: str, work_dir: str, settings: Settings, **how: Any) -> CalibrationReport:
    """Calibrate under a bar; SIGTERM stops it between layers."""
    from glm5_quant.calibrate import run

    with stop_at_safe_points() as stop, LayerProgress() as bar:

        def progress(done: run.LayerDone) -> None:
            bar.layer_done(done.layer, done.layers, seconds=done.seconds, error=done.worst, where=done.worst_name)

        try:
            return run.calibrate(
                model,
                dataset,
                work_dir=work_dir,
                settings=settings,
                progress=progress,
                should_stop=lambda: stop.requested,
                **how,
            )
        except run.StoppedSafely as error:
            say(f"{error}.")
            raise StoppedSafely from error


def show_report(report: CalibrationReport, json: bool) -> None:
    """Print the report: the table or JSON as data, notes as talk."""
    if json:
        print(json_text(report))
        return
    print(_roles(report))
    if report.ablation:
        print()
        print(ablation(report.ablation))
    if report.coverage.histogram:
        print()
        print(histogram(report.coverage.histogram))
    print()
    print(facts(*_facts(report)))
    for note in report.notes:
        say(f"note: {note}")


def _roles(report: CalibrationReport) -> str:
    """Errors by role: held out, against the source stream, where there are such figures; else on calibration tokens."""
    if any(role.judged for role in report.roles):
        judged = [(r.role, r.count, r.judged, *errors(r.held_out, r.held_out_rtn)) for r in report.roles]
        return table(("matrices", "count", "judged", "held-out error", "round-to-nearest", "ratio"), judged)
    seen = [(r.role, r.count, *errors(r.error, r.error_rtn)) for r in report.roles]
    return table(("matrices", "count", "calibration error", "round-to-nearest", "ratio"), seen)


def _facts(report: CalibrationReport) -> list[tuple[str, object]]:
    from glm5_quant.calibrate.markdown import routers

    reused = f" ({report.layers_reused} from an earlier run)" if report.layers_reused else ""
    return [
        ("model", report.model),
        ("layers", f"{report.layers}{reused}"),
        ("tokens", f"{report.tokens:,}"),
        ("coverage", report.coverage.line),
        ("samples", _samples(report)),
        ("starved", _starved(report)),
        ("routers", routers(report)),
        ("shadows", _shadows(report)),
        ("compensation", _compensation(report)),
        ("worst", ", ".join(f"{name} {error:.4f}" for name, error in report.worst[:3])),
        ("zero blocks", sum(report.zero_blocks.values())),
        ("fallbacks", len(report.fallbacks)),
        ("time", human_time(report.seconds)),
        ("peak memory", human_bytes(report.peak_memory_bytes)),
        ("journal", report.journal),
    ]


def _samples(report: CalibrationReport) -> str | None:
    """What choosing windows by coverage changed; None where they were not chosen."""
    if report.samples is None:
        return None
    before, after = report.samples.before, report.samples.after
    return (
        f"chosen out of {report.samples.candidates}: least {before.least} -> {after.least} tokens, "
        f"below target {before.below_target} -> {after.below_target} experts"
    )


def _starved(report: CalibrationReport) -> str | None:
    """What was done for experts below the coverage target, most common first; None where there are none."""
    if not report.starved:
        return None
    kinds = Counter(one.kind for one in report.starved)
    return f"{len(report.starved)} experts: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())


def _shadows(report: CalibrationReport) -> str:
    bought = report.shadows
    if not bought.spent_bytes:
        return "none"
    whole = f"{len(bought.experts)} whole experts and " if bought.experts else ""
    count = len(bought.refused_layers)
    refused = f"; {count} layer{'' if count == 1 else 's'} refused" if count else ""
    held = f"{bought.held_out_gain:.1%} held out" if bought.held_out_gain else "no held-out token could judge it"
    return (
        f"{whole}{bought.columns} columns, {human_bytes(bought.spent_bytes)} "
        f"({bought.spent_bytes / bought.expert_fp16_bytes:.2%} of FP16, "
        f"{bought.spent_bytes / bought.expert_int4_bytes:.2%} of INT4), "
        f"about {bought.gain:.1%} less error, {held}{refused}"
    )


def _compensation(report: CalibrationReport) -> str:
    gains = report.compensation.values()
    if not gains or report.compensation_left is None:
        return "none"
    less = f"{1 - report.compensation_left:.1%} less error held out"
    return f"{len(gains)} of {report.layers} layers, gains {min(gains):.2f} to {max(gains):.2f}, {less}"
