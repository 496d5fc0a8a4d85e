"""Values and sidecar tensors that no reader can take: `verify` reports them all, and `load` refuses them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support_journal import export_of, sealed
from support_models import rewrite, tiny_q3

from glm5_quant.model import load, verify
from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.errors import UserError

Q = "model.layers.0.self_attn.q_proj"
WEIGHT, I32 = torch.ones(128, 1).half(), torch.int32


@pytest.fixture(scope="module")
def q3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(source, its export) of TINY-Q3."""
    root = tmp_path_factory.mktemp("values")
    source = tiny_q3(root / "source")
    return source, export_of(source, root)


@pytest.mark.parametrize("name", ["model.norm.weight", f"{Q}.weight_scale"])
def test_o04_a_value_that_is_not_finite_is_one_problem_with_and_without_the_source(
    q3: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    copy = Path(shutil.copytree(q3[1], tmp_path / "copy"))
    file = copy / json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(file)
    tensors[name].view(-1)[5] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    sealed(copy)
    for source in (None, q3[0]):
        report = verify(copy, source)
        assert len(report.problems) == 1
        assert f"{name}: a weight is not finite; found nan" in report.problems[0]
    assert report.compared_tensors > 1


@pytest.mark.parametrize(("extra", "message"), [
    ({f"{Q}.shadow_index": torch.tensor([10**8], dtype=I32), f"{Q}.shadow_weight": WEIGHT},
     "points outside its matrix; found 100000000 to 100000000; expected 0 to 127"),
    ({f"{Q}.shadow_index": torch.tensor([-1], dtype=I32), f"{Q}.shadow_weight": WEIGHT},
     "points outside its matrix; found -1 to -1"),
    ({f"{Q}.shadow_index": torch.tensor([1], dtype=I32), f"{Q}.shadow_weight": WEIGHT[:64]},
     "F16 [64, 1], expected F16 [128, 1]"),
    ({f"{Q}.shadow_index": torch.tensor([1]), f"{Q}.shadow_weight": WEIGHT}, "I64 [1], expected I32 [1]"),
    ({f"{Q}.shadow_index": torch.tensor([1], dtype=I32), f"{Q}.shadow_weight": WEIGHT.to(torch.int8)},
     "shadow_weight: stored without shadow_scale"),
    ({f"{Q}.shadow_index": torch.tensor([1], dtype=I32)}, "shadow_index: stored without shadow_weight"),
    ({"model.layers.9.shadow_index": torch.tensor([1], dtype=I32), "model.layers.9.shadow_weight": WEIGHT},
     "nothing in this export that it could be for"),
    ({f"{Q}.row_index": torch.tensor([1], dtype=I32), f"{Q}.row_weight": torch.ones(1, 128)},
     "nothing in this export that it could be for"),
    ({"model.layers.0.compensation": torch.ones(1), "model.layers.0.compensation_gain": torch.ones(())},
     "compensation: F32 [1], expected F32 [128]"),
    ({"model.layers.9.compensation": torch.ones(128), "model.layers.9.compensation_gain": torch.ones(())},
     "nothing in this export that it could be for"),
    ({"model.layers.0.compensation": torch.ones(128)}, "compensation: stored without compensation_gain"),
])  # fmt: skip
def test_sidecar_tensors_that_do_not_fit_are_named_and_never_computed_with(
    q3: tuple[Path, Path], tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    out = export_of(q3[0], tmp_path, extra={f"eampq/{name}": value for name, value in extra.items()})
    assert any(message in problem for problem in verify(out).problems)
    with pytest.raises(UserError) as caught:
        load(out)
    assert message in str(caught.value)


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale", "weight_zero_point"])
def test_one_flipped_bit_in_a_packed_matrix_is_found_without_the_source(
    q3: tuple[Path, Path], tmp_path: Path, part: str
) -> None:
    copy = Path(shutil.copytree(q3[1], tmp_path / "copy"))
    info = open_checkpoint(copy).tensors[f"{Q}.{part}"]
    flip(info.file, info.offset + info.nbytes // 2)
    steps: list[tuple[int, int, str]] = []
    name, size = info.file.name, info.file.stat().st_size
    report = verify(copy, progress=lambda *step: steps.append(step))
    assert report.problems == (f"{name}: its SHA-256 is not that of the file that was exported",)
    assert steps == [(0, size, name)]


def test_one_flipped_bit_in_the_sidecar_is_found(q3: tuple[Path, Path], tmp_path: Path) -> None:
    extra = {f"eampq/{Q}.shadow_index": torch.tensor([1], dtype=I32), f"eampq/{Q}.shadow_weight": WEIGHT}
    out = export_of(q3[0], tmp_path, extra=extra)
    name = "eampq/eampq-00001-of-00001.safetensors"
    flip(out / name, (out / name).stat().st_size - 1)
    assert verify(out).problems == (f"{name}: its SHA-256 is not that of the file that was exported",)


def test_the_sign_of_a_zero_and_another_dtype_differ_from_the_source(tmp_path: Path) -> None:
    source = rewrite(tiny_q3(tmp_path / "source"), "model.norm.weight", torch.zeros_like)
    out = export_of(source, tmp_path)
    info = open_checkpoint(out).tensors["model.norm.weight"]
    flip(info.file, info.offset + 1, 0x80)
    assert verify(sealed(out), source).problems == ("model.norm.weight: differs from the source",)
    tensors = load_file(info.file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, info.file, {"format": "pt"})
    assert "model.norm.weight: F32, expected BF16" in verify(sealed(out), source).problems


def test_an_export_that_recorded_no_digests_is_read_as_before(q3: tuple[Path, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(q3[1], tmp_path / "copy"))
    file = copy / "eampq" / "eampq.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "sha256"}))
    assert verify(copy, q3[0]).problems == ()


def flip(file: Path, offset: int, mask: int = 1) -> None:
    """Change bits of one byte of a file."""
    data = bytearray(file.read_bytes())
    data[offset] ^= mask
    file.write_bytes(data)


def test_a_sidecar_value_that_is_not_finite_is_named(q3: tuple[Path, Path], tmp_path: Path) -> None:
    extra = {f"eampq/{Q}.shadow_index": torch.tensor([1], dtype=I32), f"eampq/{Q}.shadow_weight": WEIGHT}
    out = export_of(q3[0], tmp_path, extra=extra)
    file = out / "eampq" / "eampq-00001-of-00001.safetensors"
    tensors = load_file(file)
    tensors[f"{Q}.shadow_weight"][7, 0] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    assert f"{Q}.shadow_weight: a weight is not finite; found nan at [7, 0]" in verify(out).problems[0]
