"""The commands on a real tiny model, one after the other as a user types them, and in the wrong order."""

from __future__ import annotations

import json
import re
import shutil
import signal
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support_models import byte_tokenizer, edit_config, rewrite, tiny_glm
from typer.testing import CliRunner

import glm5_quant.cli.main as main
from glm5_quant.eval.config import EvalConfig
from glm5_quant.eval.result import EvalResult, GateResult, LayerTrace, RoutingTrace, Settings

TEXT = "The limit of account {0} is {1}.50 EUR, not more than 12.5% above last year's.\n"
CALIBRATE = ["calibrate", "--num-samples", "8", "--seqlen", "32"]


def _run(*arguments: str) -> Any:
    return CliRunner().invoke(main.build(), list(map(str, arguments)), catch_exceptions=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tiny_glm(tmp_path_factory.mktemp("cli") / "source"))


@pytest.fixture(scope="module")
def text(model: Path) -> Path:
    path = model.parent / "text.jsonl"
    rows = ({"text": TEXT.format(number, 100 * number)} for number in range(20))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def work(model: Path, text: Path) -> Path:
    """A work folder after `calibrate` and `export`."""
    folder = model.parent / "work"
    done = _run(*CALIBRATE, "--model", str(model), "--dataset", str(text), "--work-dir", str(folder))
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[-1] == f"Next: glm5-quant export --work-dir {folder}"
    done = _run("export", "--work-dir", str(folder))
    assert done.exit_code == 0, done.output
    return folder


def test_calibrate_prints_the_report_and_reuses_a_finished_journal(model: Path, text: Path, work: Path) -> None:
    again = _run(*CALIBRATE, "--model", str(model), "--dataset", str(text), "--work-dir", str(work))
    assert again.exit_code == 0
    assert "(2 from an earlier run)" in again.stdout
    assert "round-to-nearest" in again.stdout
    assert "of memory and" in again.stderr
    assert "layer 1/2" not in again.stderr


def test_a_gain_that_no_held_out_token_judged_is_not_told_as_none(model: Path, text: Path, tmp_path: Path) -> None:
    command = [*CALIBRATE, "--model", str(model), "--dataset", str(text)]
    preset = tmp_path / "p.toml"
    preset.write_text("held_out = 0.0\nshadow_budget = 0.1\n")
    done = _run(*command, "--preset", str(preset), "--work-dir", str(tmp_path / "w"))
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("shadows  "))
    assert line.endswith("% less error, no held-out token could judge it")


def test_calibrate_as_json_puts_nothing_else_on_stdout(model: Path, text: Path, work: Path) -> None:
    done = _run(*CALIBRATE, "--model", str(model), "--dataset", str(text), "--work-dir", str(work), "--json")
    report = json.loads(done.stdout)
    assert report["layers"] == 2
    assert report["coverage"]["experts"] == 4


def test_other_settings_in_the_same_work_folder_are_refused_by_name(model: Path, text: Path, work: Path) -> None:
    arguments = ["--model", str(model), "--dataset", str(text), "--work-dir", str(work)]
    refused = _run(*CALIBRATE, *arguments, "--symmetric")
    assert refused.exit_code == 1
    assert "symmetric" in refused.stderr
    assert "Traceback" not in refused.output
    assert refused.stdout == ""


@pytest.mark.parametrize("command", [["inspect"], ["export"], ["eval"], ["plan"], ["verify"]])
def test_a_work_folder_in_nobodys_home_is_one_message(command: list[str]) -> None:
    done = _run(*command, "--work-dir", "~nosuchuser/work")
    assert done.exit_code == 1
    assert "~nosuchuser is nobody's home folder here" in done.stderr


def test_inspect_of_a_layer_before_any_is_finished_names_no_range(work: Path, tmp_path: Path) -> None:
    (tmp_path / "calibration").mkdir()
    shutil.copy(work / "calibration" / "manifest.json", tmp_path / "calibration")
    done = _run("inspect", "--layer", "0", "--work-dir", str(tmp_path))
    assert "found 0; expected a later look: no layer is finished yet" in done.stderr


@pytest.mark.parametrize("dry_run", [False, True])
def test_plan_and_dry_run_say_what_it_would_cost_and_write_nothing(
    model: Path, text: Path, tmp_path: Path, dry_run: bool
) -> None:
    folder, data = tmp_path / "work", text if dry_run else "TEXT.jsonl"
    command = ["calibrate", "--dry-run", "--dataset", str(text)] if dry_run else ["plan"]
    done = _run(*command, "--model", str(model), "--work-dir", str(folder))
    assert done.exit_code == 0
    assert "peak" in done.stdout
    assert f"Next: glm5-quant calibrate --model {model} --dataset {data} --work-dir {folder}" in done.stderr
    assert not folder.exists()


def test_plan_as_json_has_figures_without_the_list_of_matrices(model: Path, tmp_path: Path) -> None:
    done = _run("plan", "--model", str(model), "--work-dir", str(tmp_path), "--max-memory", "8GiB", "--json")
    figures = json.loads(done.stdout)
    assert figures["model_type"] == "glm4_moe"
    assert figures["memory_cap_bytes"] == 8 * 2**30
    assert "by_layer" not in figures


def test_plan_refuses_what_cannot_work_after_showing_why(model: Path, tmp_path: Path) -> None:
    done = _run("plan", "--model", str(model), "--work-dir", str(tmp_path), "--max-memory", "64MiB")
    assert done.exit_code == 1
    assert "does not fit" in done.stdout
    assert "--max-memory" in done.stderr


def test_export_names_the_folder_as_it_was_given(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = _run("export", "--work-dir", str(work), "--output-dir", "here/out")
    assert done.exit_code == 0, done.output
    assert "written      here/out\n" in done.stdout
    assert (tmp_path / "here" / "out" / "config.json").exists()


def test_export_says_what_it_wrote_and_what_to_type_next(work: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    done = _run("export", "--work-dir", str(work), "--output-dir", str(target), "--max-shard-size", "64KiB")
    assert done.exit_code == 0
    assert f"written      {target}\n" in done.stdout
    assert "of MTP layers" in done.stdout
    assert done.stderr.splitlines()[-2:] == [
        f"Next: glm5-quant verify {target}",
        f"Next: glm5-quant eval --quantized {target} --dataset TEXT.jsonl --work-dir {work}",
    ]
    again = _run("export", "--work-dir", str(work), "--output-dir", str(target))
    assert again.exit_code == 1
    assert "Traceback" not in again.output
    replaced = _run("export", "--work-dir", str(work), "--output-dir", str(target), "--overwrite", "--json")
    assert json.loads(replaced.stdout)["packed_linears"] > 0


def test_the_same_commands_give_the_same_bytes_in_another_folder(
    model: Path, text: Path, work: Path, tmp_path: Path
) -> None:
    """Field case O-41."""
    _run(*CALIBRATE, "--model", str(model), "--dataset", str(text), "--work-dir", str(tmp_path))
    _run("export", "--work-dir", str(tmp_path))

    def bytes_below(folder: Path) -> dict[str, bytes]:
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.safetensors")}

    assert bytes_below(tmp_path / "calibration") == bytes_below(work / "calibration") != {}
    assert bytes_below(tmp_path / "export") == bytes_below(work / "export") != {}


def test_export_twice_renews_its_own_folder_but_no_other(work: Path, tmp_path: Path) -> None:
    (tmp_path / "calibration").symlink_to(work / "calibration")
    assert _run("export", "--work-dir", str(tmp_path)).exit_code == 0
    config = (tmp_path / "export" / "config.json").read_bytes()
    again = _run("export", "--work-dir", str(tmp_path))
    assert again.exit_code == 0
    assert "Renewing the export" in again.stderr
    assert (tmp_path / "export" / "config.json").read_bytes() == config
    (tmp_path / "export" / "eampq" / "eampq.json").unlink()
    assert _run("export", "--work-dir", str(tmp_path)).exit_code == 1


def test_verify_compares_with_the_source_that_was_calibrated(work: Path) -> None:
    done = _run("verify", "--work-dir", str(work))
    assert done.exit_code == 0, done.output
    assert "whole and readable" in done.stdout
    assert "bit for bit" in done.stdout
    assert "vLLM" in done.stdout
    assert json.loads(_run("verify", "--work-dir", str(work), "--json").stdout)["problems"] == []


def test_what_verify_says_to_type_next_names_a_source_as_eval_needs_one(work: Path, model: Path) -> None:
    export = str(work / "export")
    bare = _run("verify", export).stderr.splitlines()[-1]
    assert bare == f"Next: glm5-quant eval --quantized {export} --model SOURCE --dataset TEXT.jsonl"
    named = _run("verify", export, "--model", str(model)).stderr.splitlines()[-1]
    assert named == f"Next: glm5-quant eval --quantized {export} --model {model} --dataset TEXT.jsonl"


def test_verify_of_a_damaged_export_names_the_problem_and_fails(work: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert _run("export", "--work-dir", str(work), "--output-dir", str(target)).exit_code == 0
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"]["ignore"].pop()
    (target / "config.json").write_text(json.dumps(config))
    done = _run("verify", str(target))
    assert done.exit_code == 1
    assert "problem: " in done.stderr
    assert "Not compared with the source" in done.stderr
    assert "1 problems" in done.stdout


def test_inspect_shows_journal_layer_export_and_source(work: Path, model: Path) -> None:
    journal = _run("inspect", "--work-dir", str(work))
    assert "2 of 2 finished" in journal.stdout
    assert _run("inspect", str(work)).stdout == journal.stdout
    assert "mlp.experts.3.down_proj" in _run("inspect", "--work-dir", str(work), "--layer", "1").stdout
    assert "pack-quantized" in _run("inspect", str(work / "export")).stdout
    assert "mlp.gate.weight" in _run("inspect", str(model), "--layer", "1").stdout
    assert "not quantized" in _run("inspect", str(model)).stdout


def test_inspect_names_any_format_and_a_layer_that_is_not_there(model: Path, tmp_path: Path) -> None:
    for settings, shown in ((None, "not quantized"), ("odd", "not quantized"), ({"quant_method": "fp8"}, "fp8")):
        copy = Path(shutil.copytree(model, tmp_path / shown, dirs_exist_ok=True))
        edit_config(copy, quantization_config=settings)
        assert re.search(rf"format +{shown}", _run("inspect", str(copy)).stdout)
    done = _run("inspect", str(model), "--layer", "99")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "no tensor of this layer; found 99" in done.stderr


def test_inspect_as_json_has_every_record(work: Path, model: Path) -> None:
    journal = json.loads(_run("inspect", "--work-dir", str(work), "--json").stdout)
    assert [layer["layer"] for layer in journal["layers"]] == [0, 1]
    tensors = json.loads(_run("inspect", str(model), "--layer", "0", "--json").stdout)["tensors"]
    assert tensors and all("layers.0." in tensor["name"] for tensor in tensors)


def test_inspect_of_a_layer_that_is_not_there_says_which_are(work: Path) -> None:
    done = _run("inspect", "--work-dir", str(work), "--layer", "7")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "found 7; expected 0 to 1" in done.stderr


@pytest.mark.parametrize(
    ("command", "first"),
    [
        (["export"], "Run `glm5-quant calibrate` first"),
        (["verify"], "Run `glm5-quant calibrate`, then `glm5-quant export`, first"),
        (["eval"], "Run `glm5-quant calibrate`, then `glm5-quant export`, first"),
        (["inspect"], "Run `glm5-quant calibrate` first"),
    ],
)
def test_a_command_typed_too_early_says_what_to_run_first(tmp_path: Path, command: list[str], first: str) -> None:
    done = _run(*command, "--work-dir", str(tmp_path))
    assert (done.exit_code, done.stdout) == (1, "")
    assert first in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_eval_after_calibrate_alone_asks_for_export(work: Path, tmp_path: Path) -> None:
    (tmp_path / "calibration").symlink_to(work / "calibration")
    done = _run("eval", "--work-dir", str(tmp_path))
    assert "Run `glm5-quant export` first" in done.stderr


def test_eval_of_a_model_of_ones_own_needs_a_dataset(work: Path) -> None:
    done = _run("eval", "--work-dir", str(work))
    assert done.exit_code == 2
    assert "--dataset" in done.stderr


BAD_INPUTS: dict[str, list[str]] = {
    "missing model folder": ["--model", "/no/such/folder"],
    "missing data": ["--dataset", "missing.jsonl"],
    "missing hub data": ["--dataset", "nobody/nothing"],
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_gives_one_message_and_leaves_nothing(case: str, model: Path, text: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(model), "--dataset", str(text), *BAD_INPUTS[case], "--work-dir", str(tmp_path / "work")]
    done = _run(*CALIBRATE, *arguments)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.count("error:") == 1
    assert not (tmp_path / "work").exists()


def test_sigterm_stops_after_a_layer_and_the_next_run_goes_on(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from glm5_quant.calibrate import run

    arguments = [*CALIBRATE, "--model", str(model), "--dataset", str(text), "--work-dir", str(tmp_path)]
    solve_layer = run._Run._layer

    def signalled(self: Any, *where: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return solve_layer(self, *where)

    with monkeypatch.context() as patch:
        patch.setattr(run._Run, "_layer", signalled)
        stopped = _run(*arguments)
    assert stopped.exit_code == 75
    assert "Stopping after the layer in work" in stopped.stderr
    assert "1 of 2 layers are finished" in stopped.stderr
    done = _run(*arguments)
    assert done.exit_code == 0
    assert "(1 from an earlier run)" in done.stdout


def _result(*, status: str = "ok", passed: bool = True, traces: tuple[RoutingTrace, ...] = ()) -> EvalResult:
    plain = {item.name: "x" if item.type == "str" else 1 for item in fields(Settings)}
    gates = () if passed else (GateResult(gate="kl<0", export="export", value=0.1, passed=False),)
    settings = Settings(**plain)  # type: ignore[arg-type]
    return EvalResult(schema_version=1, status=status, settings=settings, exports=(), gates=gates, traces=traces)


def _eval(monkeypatch: pytest.MonkeyPatch, work: Path, text: Path, *more: str, **outcome: Any) -> tuple[Any, Any]:
    """Run `eval` with a measuring function that only remembers what it was asked."""
    import glm5_quant.eval as room

    asked: dict[str, Any] = {}

    def evaluate(source: Any, exports: Any, texts: Any, *, progress: Any, **settings: Any) -> EvalResult:
        progress("windows", 1, 1)
        asked.update(settings, source=source, exports=exports, texts=texts)
        return _result(**outcome)

    monkeypatch.setitem(vars(room), "evaluate", evaluate)
    return _run("eval", "--work-dir", str(work), "--dataset", str(text), *more), asked


def test_eval_takes_source_and_export_from_the_work_folder(
    monkeypatch: pytest.MonkeyPatch, work: Path, text: Path, model: Path
) -> None:
    done, asked = _eval(monkeypatch, work, text, "--window", "64", "--num-windows", "3", "--gate", "kl<1")
    assert done.exit_code == 0
    assert asked["source"] == str(model)
    assert asked["exports"] == [str(work / "export")]
    assert (asked["window"], asked["num_windows"], asked["gates"]) == (64, 3, "kl<1")
    assert "long-dialogue 200" in done.stderr


def test_eval_over_long_dialogues_takes_dialogues_and_texts_of_one_dataset_apart(
    monkeypatch: pytest.MonkeyPatch, work: Path, tmp_path: Path
) -> None:
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text('{"text": "plain"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    _, asked = _eval(monkeypatch, work, mixed, "--long-dialogue", "200")
    assert [row.text for row in asked["texts"].rows] == ["plain"]
    assert [row.plain for row in asked["dialogues"].rows] == ["hi"]
    _, asked = _eval(monkeypatch, work, mixed)
    assert (len(asked["texts"].rows), asked["dialogues"]) == (2, None)


def test_eval_writes_reports_whole_and_names_them(
    monkeypatch: pytest.MonkeyPatch, work: Path, text: Path, tmp_path: Path
) -> None:
    page = tmp_path / "report.md"
    done, _ = _eval(monkeypatch, work, text, "--report", str(page), "--json", "--long-dialogue", "200")
    assert json.loads(done.stdout)["status"] == "ok"
    assert page.read_text().startswith("# Evaluation")
    assert f"Report: {page}" in done.stderr


def test_every_setting_of_an_evaluation_can_be_reached_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, work: Path, text: Path
) -> None:
    wanted = ["stride=7", "decode-steps", "stress=on", "sequential=no", "source-cache=kept", "kv_feedback=0.3"]
    more = (word for pair in wanted for word in ("--set", pair))
    _, asked = _eval(monkeypatch, work, text, "--kv-cache", "int4", *more)
    assert (asked["stride"], asked["decode_steps"], asked["stress"], asked["sequential"]) == (7, True, True, False)
    assert (asked["source_cache"], asked["kv_feedback"]) == ("kept", 0.3)
    listed = _run("eval", "--set", "help").stdout
    assert all(re.search(rf"^{found.name} ", listed, re.MULTILINE) for found in fields(EvalConfig))


@pytest.mark.parametrize(
    ("pair", "said"),
    [("nope=1", "no such setting"), ("stress=maybe", "on or off"), ("chunk=much", "int"), ("window=9", "of its own")],
)
def test_a_setting_that_cannot_be_is_wrong_usage(work: Path, pair: str, said: str) -> None:
    done = _run("eval", "--work-dir", str(work), "--set", pair)
    assert done.exit_code == 2
    assert said in re.sub(r"[\s│]+", " ", done.output)


def test_eval_writes_reports_by_their_endings_and_routing_traces(
    monkeypatch: pytest.MonkeyPatch, model: Path, text: Path, tmp_path: Path
) -> None:
    page, plain, where = tmp_path / "r.html", tmp_path / "r.json", tmp_path / "w"
    layer = LayerTrace(layer=1, experts=((3, 0),), weights=((0.6, 0.4),))
    found = RoutingTrace(model="source", prompt="hi", tokens=("hi",), layers=(layer,))
    more = ["--model", str(model), "--quantized", "export", "--report", str(page), "--report", str(plain)]
    done, asked = _eval(monkeypatch, where, text, *more, "--trace", "hi", traces=(found,))
    assert done.exit_code == 0, done.output
    assert asked["prompts"] == ["hi"]
    assert page.read_text().startswith("<!doctype html")
    assert "traces" not in json.loads(plain.read_text())
    traced = json.loads((where / "routing_trace.json").read_text())["traces"]
    assert traced[0]["layers"] == [{"layer": 1, "experts": [[3, 0]], "weights": [[0.6, 0.4]]}]
    for bad in ("page.doc", str(tmp_path / "nowhere" / "page.html")):
        assert _run("eval", "--work-dir", str(where), "--report", bad).exit_code == 2


def test_eval_ends_with_3_when_a_gate_fails_and_with_1_when_figures_are_not_finite(
    monkeypatch: pytest.MonkeyPatch, work: Path, text: Path
) -> None:
    failed, _ = _eval(monkeypatch, work, text, passed=False)
    assert failed.exit_code == 3
    invalid, _ = _eval(monkeypatch, work, text, status="invalid", passed=False)
    assert invalid.exit_code == 1


def test_eval_measures_the_export_and_gates_decide_the_exit_code(work: Path, text: Path) -> None:
    arguments = ["eval", "--work-dir", str(work), "--dataset", str(text), "--window", "48", "--num-windows", "3"]
    done = _run(*arguments, "--gate", "kl<5")
    assert done.exit_code == 0, done.output
    assert "KL(source || export)" in done.stdout
    assert "glm5-quant" not in done.stdout
    assert "warning:" not in done.stderr
    assert re.search(r"export +status +packed linears +drift\n.*\n +export +ok +[1-9]\d* ", done.stdout)
    failed = _run(*arguments, "--gate", "kl<0", "--json")
    assert failed.exit_code == 3
    assert json.loads(failed.stdout)["gates_passed"] is False


def test_eval_names_the_expert_of_an_export_whose_scales_are_four_times_too_large(
    work: Path, text: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    assert _run("export", "--work-dir", str(work), "--output-dir", str(target)).exit_code == 0
    rewrite(target, "model.layers.1.mlp.experts.1.down_proj.weight_scale", lambda scale: scale.mul_(4))
    arguments = ["eval", "--work-dir", str(work), "--dataset", str(text), "--window", "48", "--num-windows", "2"]
    done = _run(*arguments, "--quantized", str(target), "--set", "draws=50", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["exports"][0]["findings"]
    assert [(one["kind"], one["where"]) for one in found if one["kind"] == "expert"] == [("expert", "layer 1 expert 1")]


def test_eval_of_an_export_with_a_nan_scale_fails_and_prints_no_nan(work: Path, text: Path, tmp_path: Path) -> None:
    """Field case O-36."""
    target = tmp_path / "out"
    assert _run("export", "--work-dir", str(work), "--output-dir", str(target)).exit_code == 0
    rewrite(target, "model.layers.1.self_attn.o_proj.weight_scale", lambda scale: scale.fill_(float("nan")))
    arguments = [
        "eval",
        "--work-dir",
        str(work),
        "--dataset",
        str(text),
        "--window",
        "48",
        "--num-windows",
        "2",
        "--json",
    ]
    done = _run(*arguments, "--quantized", str(target), "--gate", "kl<100")
    assert done.exit_code == 1
    assert "NaN" not in done.stdout
    assert "Traceback" not in done.output


def test_a_bare_name_is_a_folder_here(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case O-27: hours were lost because an output named `out` has no folder above it."""
    monkeypatch.chdir(tmp_path)
    assert _run("export", "--work-dir", str(work), "--output-dir", "out").exit_code == 0
    assert (tmp_path / "out" / "config.json").exists()
