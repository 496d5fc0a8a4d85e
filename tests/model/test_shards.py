"""Shard writing: our bytes read back by the safetensors library itself."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from glm5_quant.model import atomic, shards
from glm5_quant.model.errors import UserError
from glm5_quant.model.journal import shard_digest
from glm5_quant.model.shards import Spec


def spec_of(name, tensor):
    return Spec(name, shards.DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


def mixed_tensors():
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    stack = torch.arange(60, dtype=torch.bfloat16).reshape(3, 4, 5)
    return {
        "transposed": base.T,
        "same.storage.a": base[:2],
        "same.storage.b": base[:2],
        "slice.of.stack": stack[1],
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0, 3, dtype=torch.float16),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "fp8": torch.ones(3, 3).to(torch.float8_e4m3fn),
        "naïve": torch.tensor([True, False]),
    }


def write(path, tensors):
    return shards.write_shard(path, [spec_of(n, t) for n, t in tensors.items()], lambda name: tensors[name])


def test_o22_views_and_shared_storage_are_saved_contiguous_and_read_back_equal(tmp_path):
    tensors = mixed_tensors()
    written = write(tmp_path / "a.safetensors", tensors)
    back = load_file(tmp_path / "a.safetensors")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name].float(), tensor.float())
    assert written.size_bytes == (tmp_path / "a.safetensors").stat().st_size
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_o17_every_header_says_pt_and_holds_only_strings(tmp_path):
    write(tmp_path / "a.safetensors", mixed_tensors())
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_bytes_follow_from_content_alone(tmp_path):
    tensors = mixed_tensors()
    first = write(tmp_path / "a.safetensors", tensors)
    second = write(tmp_path / "b.safetensors", dict(reversed(tensors.items())))
    assert first.sha256 == second.sha256
    head = (tmp_path / "a.safetensors").read_bytes()
    length = int.from_bytes(head[:8], "little")
    assert length % 8 == 0
    offsets = [v["data_offsets"] for k, v in json.loads(head[8 : 8 + length]).items() if k != "__metadata__"]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(offsets))


def test_golden_bytes_of_a_tiny_shard(tmp_path):
    write(tmp_path / "a.safetensors", {"w": torch.tensor([1, -2], dtype=torch.int32)})
    text = b'{"__metadata__":{"format":"pt"},"w":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}'
    text += b" " * (-len(text) % 8)
    want = len(text).to_bytes(8, "little") + text + b"\x01\0\0\0\xfe\xff\xff\xff"
    assert (tmp_path / "a.safetensors").read_bytes() == want


def test_o22_no_shard_above_the_limit_unless_one_tensor_alone_is():
    groups = [[Spec(f"m{i}.a", "F32", (10,)), Spec(f"m{i}.b", "F32", (5,))] for i in range(4)]
    groups.insert(2, [Spec("big.a", "F32", (100,)), Spec("big.b", "F32", (1,))])
    plan = shards.split_into_shards(groups, 130)
    assert [[s.name for s in shard] for shard in plan] == [
        ["m0.a", "m0.b", "m1.a", "m1.b"],
        ["big.a"],
        ["big.b", "m2.a", "m2.b", "m3.a", "m3.b"],
    ]
    assert shards.shard_names(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_a_tensor_that_changed_since_planning_stops_the_write_and_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="w: tensor changed"):
        shards.write_shard(tmp_path / "a.safetensors", [Spec("w", "F32", (2,))], lambda name: torch.zeros(3))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_and_says_so(tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.HashingFile, "write", full)
    with pytest.raises(UserError, match=r"a\.json: cannot be written \(No space left on device\)"):
        atomic.write_bytes(tmp_path / "a.json", b"{}")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_body_removes_its_part_file(tmp_path):
    with pytest.raises(KeyError), atomic.atomic_file(tmp_path / "a") as file:
        file.write(b"half")
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_half_written_files_are_told_from_whole_ones(tmp_path):
    assert atomic.is_part(atomic.part_name(tmp_path / "model.safetensors"))
    assert not atomic.is_part(tmp_path / "model.safetensors")


def test_space_and_rights_are_checked_with_numbers(tmp_path):
    with pytest.raises(UserError, match=r"not enough free disk space; found [\d,]+ bytes; expected 4,611"):
        atomic.check_free_space(tmp_path, 1 << 62)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="cannot be written"):
        atomic.make_folder(tmp_path / "file")
    with pytest.raises(UserError, match="cannot be written"):
        atomic.check_writable(tmp_path / "missing")


def test_links_are_removed_and_never_followed(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "precious").write_bytes(b"1")
    (tmp_path / "link").symlink_to(kept)
    atomic.remove(tmp_path / "link")
    assert (kept / "precious").exists()
    atomic.remove(kept)
    assert not kept.exists()


def test_copies_keep_every_byte(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(256)) * 9000)
    digest = atomic.copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    assert len(digest) == 64


@pytest.mark.parametrize(("size", "seen"), [(32, range(32)), (33, (0, 7, 8, 15, 16, 23, 25, 32))])
def test_a_shard_digest_sees_all_of_a_small_file_and_both_ends_of_a_large_one(
    size: int, seen: Sequence[int], tmp_path: Path
) -> None:
    path, data = tmp_path / "shard", bytes(range(size))
    path.write_bytes(data)
    whole = shard_digest(path, 4, 8)
    assert shard_digest(path, 4, 8) == whole
    for at in seen:
        path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
        assert shard_digest(path, 4, 8) != whole, at
    path.write_bytes(data + b"\0")
    assert shard_digest(path, 4, 8) != whole
