"""The launch table: checked settings, a rule for shapes it lacks, and a tuner that writes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glm5_quant.kernels import table, tune
from glm5_quant.kernels.layout import to_codes
from glm5_quant.kernels.table import Config, config_for

CONFIG = Config(block_r=64, block_t=8, warps=2, stages=4, split_k=2)


def test_a_setting_that_no_kernel_takes_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="block_r must be a power of two, found 48"):
        Config(block_r=48, block_t=8, warps=2, stages=3)
    with pytest.raises(ValueError, match="block_r >= 16"):
        Config(block_r=8, block_t=8, warps=2, stages=3)


@pytest.mark.parametrize(("tokens", "tile"), [(1, 8), (8, 8), (9, 16), (17, 64), (64, 64), (65, 128), (5000, 128)])
def test_tokens_pick_the_tile(tokens: int, tile: int) -> None:
    assert table.tile_for(tokens) == config_for("linear", tokens, 2048, 6144).block_t == tile


def test_few_tokens_split_k_until_the_device_has_work_and_experts_never_do() -> None:
    assert config_for("linear", 1, 2048, 6144).split_k == 12
    assert config_for("linear", 4096, 6144, 6144).split_k == 1
    assert config_for("gate_up", 1, 4096, 6144).split_k == 1
    assert config_for("int8", 200, 48, 6144).block_r == 64


def test_what_was_measured_goes_before_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.TABLE, "linear 8 2048 6144", CONFIG)
    assert config_for("linear", 3, 2048, 6144) is CONFIG
    assert config_for("linear", 9, 2048, 6144) is not CONFIG


def test_a_split_measured_with_few_tokens_is_not_kept_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Config(block_r=128, block_t=128, warps=8, stages=3, split_k=16)
    monkeypatch.setitem(table.TABLE, "linear 128 2048 6144", measured)
    assert config_for("linear", 256, 2048, 6144) is measured
    assert config_for("linear", 2048, 2048, 6144) == replace(measured, split_k=2)
    assert config_for("linear", 65536, 2048, 6144) == replace(measured, split_k=1)


def test_the_tuner_keeps_the_fastest_setting_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def run(config: Config) -> float:
        if config.stages == 5:
            raise RuntimeError("out of shared memory")
        return config.split_k + config.warps + config.stages / 10

    config, time_ms = tune.best(run, tune.candidates(1))
    assert (config.split_k, config.warps, config.stages, time_ms) == (1, 1, 2, 2.2)
    assert "RuntimeError" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no setting ran"):
        tune.best(run, iter(()))


def test_the_written_table_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "table.py"
    path.write_text(Path(table.__file__).read_text())
    tune.write({"linear 8 2048 6144": CONFIG}, path)
    namespace: dict[str, object] = {}
    exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), namespace)
    assert str(namespace["TABLE"]) == str({"linear 8 2048 6144": CONFIG})
    assert "def tile_for" in path.read_text()


def test_without_a_gpu_the_tuner_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a GPU"):
        tune.main([])


def test_a_random_matrix_is_a_valid_one() -> None:
    assert to_codes(tune.random_matrix(8, 100, "cpu")).shape == (8, 100)
