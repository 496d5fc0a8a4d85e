"""What calibration holds in memory: freed tensors go back to the system, files count only while they are touched."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from glm5_quant.calibrate.evidence import Evidence
from glm5_quant.calibrate.ffn import Streams
from glm5_quant.calibrate.memory import bound_kernel_caches, cut
from glm5_quant.calibrate.settings import Settings
from glm5_quant.calibrate.stream import make_writable, release_pages, scratch, windows
from glm5_quant.model.families import Linear, family_of

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of a process's memory")
MIB = 2**20


def resident(*kinds: str) -> int:
    """Bytes of this process's resident memory of these kinds: RssAnon, RssFile, RssShmem (files of a tmpfs)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(int(kb) for kb in re.findall(rf"(?:{'|'.join(kinds)}):\s+(\d+) kB", status))


@linux
def test_pages_of_scratch_files_leave_the_process_and_their_values_come_back(tmp_path: Path) -> None:
    buffer = scratch(tmp_path, (64, MIB // 4))
    expected = torch.arange(MIB // 4, dtype=torch.float32)
    buffer[:] = expected
    before = resident("RssFile", "RssShmem")
    release_pages()
    assert before - resident("RssFile", "RssShmem") > 60 * MIB
    assert torch.equal(buffer[63], expected)
    buffer[0, 0] = 7.0
    release_pages()
    assert buffer[0, :2].tolist() == [7.0, 1.0]


@linux
def test_streams_gone_through_window_by_window_are_never_all_in_memory(tmp_path: Path) -> None:
    streams = [scratch(tmp_path, (64, MIB // 4)) for _ in range(2)]
    release_pages()
    before, most = resident("RssFile", "RssShmem"), 0
    for number, (one, other) in enumerate(windows(*streams)):
        one.fill_(number)
        other.fill_(-number)
        most = max(most, resident("RssFile", "RssShmem"))
    assert most - before < 40 * MIB  # of 128
    assert torch.equal(streams[0][:, 0], -streams[1][:, -1])
    assert streams[0][:, 0].tolist() == list(range(64))


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@linux
@pytest.mark.skipif(tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (5, 14), reason="Linux before 5.14")
def test_rows_that_are_added_to_fault_once_and_no_others_come_in(tmp_path: Path) -> None:
    buffer, row = scratch(tmp_path, (64, MIB // 4)), torch.ones(MIB // 4)
    buffer.fill_(1.0)
    release_pages()
    before = resident("RssFile", "RssShmem")
    make_writable(buffer[16:32])
    assert 15 * MIB < resident("RssFile", "RssShmem") - before < 20 * MIB
    start = faults()
    buffer[16:32] += row
    assert faults() - start < 100  # of 4,096 pages
    make_writable(row)  # in no file
    assert buffer[:, 0].tolist() == [1.0] * 16 + [2.0] * 16 + [1.0] * 32


@linux
@pytest.mark.parametrize("step", [1, 2, 9], ids=["all", "every other", "few"])
def test_outputs_of_experts_are_added_in_files_as_in_memory(step: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(step)
    index = torch.arange(3, 4000, step)
    y, scale = torch.randn(len(index), 640, generator=generator), torch.rand(len(index), generator=generator)
    in_file, in_memory = scratch(tmp_path, (4096, 640)), torch.zeros(4096, 640)
    for out in (in_file, in_memory):
        release_pages()
        streams = Streams(x=out, out=out, added=True)
        streams.write(out, index, y, scale)
        streams.write(out, index[:0], y[:0], scale[:0])
        streams.write(out, 4000, y[:96], None)
    assert torch.equal(in_file, in_memory)
    assert torch.equal(in_file[index], y * scale[:, None])


@linux
@pytest.mark.slow
def test_peak_memory_hardly_follows_the_number_of_windows(tmp_path: Path) -> None:
    """Peaks of two processes. With all windows of a layer in memory, the one with 128 more took 185 MB more."""
    code = """
import sys, torch
torch.set_num_threads(1)
from pathlib import Path
from support_calibrate import sample_text, small
from support_models import tiny
from glm5_quant.calibrate.run import peak_memory_bytes
folder, count = Path(sys.argv[1]), int(sys.argv[2])
folder.mkdir()
text = sample_text(folder, repeat=2000)
report = small(tiny("llama", folder / "m"), folder / "w", dataset=text, num_samples=count, seqlen=512)
assert report.tokens == count * 512
print(peak_memory_bytes())
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    peaks = []
    for count in (32, 160):
        command = [sys.executable, "-c", code, str(tmp_path / str(count)), str(count)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        peaks.append(int(done.stdout.splitlines()[-1]))
    assert peaks[1] - peaks[0] < 60 * MIB


def test_kernels_are_kept_for_few_shapes_unless_the_caller_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the rest of the session keeps its own
    bound_kernel_caches()
    assert os.environ["LRU_CACHE_CAPACITY"] == "64"
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"


@linux
def test_moments_of_tokens_that_never_come_take_no_memory() -> None:
    before = resident("RssAnon")
    evidence = Evidence.empty(4096, tokens=64, held_from=64, gap=False, device="cpu")
    evidence.add(torch.randn(64, 4096), None, 0)
    part = evidence.parts[0]
    total = part.total()
    assert total.tokens == 64
    assert resident("RssAnon") - before < 1.5 * 64 * MIB  # H of those that came is 64 MiB; of those held out, as much


@linux
def test_holes_between_tensors_that_stay_are_given_back() -> None:
    """In a process of its own: what is set holds for the rest of it."""
    code = """
import re, torch
from pathlib import Path
from glm5_quant.calibrate.memory import give_freed_memory_back
give_freed_memory_back()
def anonymous(): return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
torch.ones(24 << 18)  # glibc's own limit would follow this size once it is freed
before, small = anonymous(), []
for _ in range(20):
    large = torch.ones(20 << 18)
    small.append(torch.ones(1 << 18))
    more = torch.ones(20 << 18)
    small.append(torch.ones(1 << 18))
    del large, more
print(anonymous() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 60  # MiB: 40 small ones


def test_fewer_windows_pass_an_indexer_together_the_longer_they_are() -> None:
    plain = SimpleNamespace(hidden_size=1024)
    indexed = SimpleNamespace(hidden_size=1024, index_head_dim=128, index_n_heads=32)
    name = "model.layers.0.self_attn.o_proj"
    items = [
        Linear(
            name=name, module="self_attn.o_proj", layer=0, role="o_proj", expert=None, shared=False, n=1024, k=1024,
            source=f"{name}.weight", slice=(None, 0, 1024), group="o",
        )
    ]  # fmt: skip
    family, settings = (
        family_of({"model_type": "llama"}, file=Path("config.json")),
        Settings(num_samples=128, seqlen=2048),
    )
    cap = 4 * 2**30
    without, with_indexer = (cut(items, settings, config, family, torch.bfloat16, cap) for config in (plain, indexed))
    assert with_indexer.chunk_windows < without.chunk_windows
    assert with_indexer.peak_bytes <= cap
