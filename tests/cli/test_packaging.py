"""What goes into the wheel, and what must never be in the repository."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support_paths import ROOT

NOT_PACKAGES = {"tests", "benchmarks", "docs", "build", "src"}
LARGEST_BYTES = 20 * 10**6


def _setuptools() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: dict[str, Any] = tomllib.load(file)["tool"]["setuptools"]
    return found


def _package_folders() -> dict[str, str]:
    """Every folder with an `__init__.py`, as `package name: folder`."""
    folders = (path.parent.relative_to(ROOT) for path in ROOT.rglob("__init__.py"))
    inside = (f for f in folders if f.parts[0] not in NOT_PACKAGES and not f.parts[0].startswith("."))
    return {".".join(("glm5_quant", *folder.parts)): folder.as_posix() for folder in inside}


def _tracked() -> list[Path]:
    shown = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if shown.returncode != 0:
        pytest.skip("not a git checkout, so nothing tells which files are tracked")
    return [path for name in shown.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_every_package_folder_is_listed_for_the_wheel() -> None:
    settings = _setuptools()
    found = _package_folders()
    assert set(settings["packages"]) == {"glm5_quant", *found}
    assert {name: folder for name, folder in settings["package-dir"].items() if name} == found


@pytest.mark.slow
def test_the_wheel_holds_every_module_the_type_marker_and_the_packaged_model(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for path in _tracked():
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for package, folder in _package_folders().items():
        expected = {f"{package.replace('.', '/')}/{path.name}" for path in (source / folder).glob("*.py")}
        assert expected <= names
    assert {f"glm5_quant/kernels/{path.name}" for path in (source / "kernels").glob("native*.[ch]")} <= names
    assert "glm5_quant/py.typed" in names
    data = {path.name for path in (source / "model" / "tiny" / "weights").glob("*") if path.is_file()}
    assert {f"glm5_quant/model/tiny/weights/{name}" for name in data} <= names
    assert not [name for name in names if name.startswith(("tests/", "glm5_quant/tests", "benchmarks/"))]


def test_every_package_imports_without_triton_and_without_loading_torch() -> None:
    packages = sorted(["glm5_quant", *_package_folders()])
    code = (
        "import sys, importlib\n"
        "sys.modules['triton'] = None\n"
        f"for name in {packages!r}: importlib.import_module(name)\n"
        "print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == "False\n"


@pytest.mark.slow
def test_every_module_that_is_no_triton_kernel_imports_without_triton() -> None:
    modules = [
        f"{package}.{path.stem}"
        for package, folder in sorted(_package_folders().items())
        for path in sorted((ROOT / folder).glob("*.py"))
        if path.stem != "__init__" and "triton" not in path.stem
    ]
    code = (
        f"import sys, importlib\nsys.modules['triton'] = None\nfor name in {modules!r}: importlib.import_module(name)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr


def test_no_tracked_file_is_over_20_megabytes() -> None:
    assert [path for path in _tracked() if path.stat().st_size > LARGEST_BYTES] == []


def test_no_tracked_text_names_a_path_of_one_machine() -> None:
    own_paths = re.compile(
        "|".join([r"/" + r"work/(main|shared)", r"/" + r"tmp/v\b", r"/" + r"root/", r"/" + r"home/\w+/"])
    )
    found = []
    for path in _tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in own_paths.finditer(text)]
    assert found == []


def test_no_source_file_has_over_500_lines() -> None:
    sources = [path for path in _tracked() if path.suffix == ".py"]
    assert [path.name for path in sources if len(path.read_text(encoding="utf-8").splitlines()) > 500] == []


def test_the_startup_benchmark_tells_what_it_measures_before_it_measures() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/startup.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert "How long `glm5-quant --help` takes" in done.stdout and "median" not in done.stdout
