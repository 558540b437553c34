# SPDX-License-Identifier: Apache-2.0
"""Where the detector's snapshot lies: the choice by what is free, and that every place finds the same changes."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from delta_wire.errors import SetupError
from trl_delta import DeltaSyncConfig, DeltaSyncSession
from trl_delta.detector import Detector
from trl_delta.names import LiveTensor, live_tensors
from trl_delta.snapshot import Free, choose, extract_staged, training_bytes

GB = 10**9


def tensors(device: str, num_elements: int = 1_000_000_000) -> list[LiveTensor]:
    """Of a size that nobody has to allocate."""
    source = SimpleNamespace(device=torch.device(device), shape=(num_elements,))
    return [LiveTensor(("w",), source)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "device_gb", "host_gb", "disk_gb", "to_come_gb", "expected"),
    [
        # the snapshot takes 2 GB
        ("cuda", 8, 0, 0, 0, "device"),
        ("cuda", 7.9, 4, 0, 0, "host"),
        ("cuda", 80, 100, 100, 72, "device"),
        ("cuda", 80, 100, 100, 73, "host"),
        ("cuda", 0, 3.9, 2, 0, "file"),
        ("cuda", 10, 0, 2, 12, "file"),
        ("cpu", None, 4, 0, 0, "device"),
        ("cpu", None, 16, 2, 12, "device"),
        ("cpu", None, 15, 2, 12, "file"),
    ],
)
def test_the_first_place_with_room_is_taken(
    tmp_path: Path, device: str, device_gb, host_gb, disk_gb, to_come_gb, expected: str
):
    free = Free(device_gb and int(device_gb * GB), int(host_gb * GB), int(disk_gb * GB), tmp_path)
    own = tensors(device)
    assert choose("auto", own, to_come_bytes=to_come_gb * GB, free=free) == expected
    for wanted in ("device", "host", "file"):
        assert choose(wanted, own, to_come_bytes=to_come_gb * GB, free=free) == wanted


def test_no_room_anywhere_is_refused_with_what_was_found(tmp_path: Path):
    with pytest.raises(SetupError, match=r"2000000000 bytes.* 1000.* 2000.* 3000 bytes") as refused:
        choose("auto", tensors("cuda"), free=Free(1000, 2000, 3000, tmp_path))
    assert str(tmp_path) in str(refused.value) and "delta_sync_snapshot" in str(refused.value)


def test_what_is_free_is_shared_with_the_other_processes_of_the_machine(monkeypatch: pytest.MonkeyPatch):
    alone = Free.measure(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    one_of_four = Free.measure(torch.device("cpu"))
    assert alone.device_bytes is None and alone.host_bytes > 0
    # other programs take and free memory meanwhile
    assert one_of_four.host_bytes < alone.host_bytes / 2 and one_of_four.disk_bytes < alone.disk_bytes / 2


def test_training_takes_gradients_and_moments_of_what_is_trained():
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    model[1].requires_grad_(False)
    assert training_bytes(live_tensors(model)) == 3 * 4 * 100


def changed_model() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    before = nn.Sequential(nn.Embedding(300, 7), nn.Linear(7, 5), nn.LayerNorm(5))
    after = nn.Sequential(nn.Embedding(300, 7), nn.Linear(7, 5), nn.LayerNorm(5))
    after.load_state_dict(before.state_dict())
    for param in after.parameters():
        param.data.view(-1)[::3] += 1
    return before, after


@pytest.mark.parametrize("placement", ["host", "file"])
def test_every_place_finds_the_same(placement: str):
    before, after = changed_model()
    expected, found = Detector(live_tensors(before)), Detector(live_tensors(before), placement=placement)  # type: ignore[arg-type]
    assert found.num_bytes == expected.num_bytes == 2 * sum(param.numel() for param in before.parameters())
    for model in (before, after, after, before):
        deltas = expected.extract(live_tensors(model)), found.extract(live_tensors(model))
        assert deltas[0].keys() == deltas[1].keys()
        for name, part in deltas[0].items():
            other = deltas[1][name]
            for mine, its in ((part.indices, other.indices), (part.old, other.old), (part.new, other.new)):
                assert mine is not None and its is not None and mine.tolist() == its.tolist()
        assert expected.digest == found.digest


def test_the_file_has_two_bytes_an_element_and_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before, _ = changed_model()
    detector = Detector(live_tensors(before), placement="file")
    assert list(tmp_path.iterdir()) == []
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    ((span, *_),) = mapped
    start, end = (int(address, 16) for address in span.split("-"))
    page = os.sysconf("SC_PAGE_SIZE")
    assert 0 <= end - start - detector.num_bytes < page
    del detector
    assert not any(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_full_disk_is_refused_before_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def full(*args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    before, _ = changed_model()
    with pytest.raises(SetupError, match=r"cannot take the \d+ bytes of delta sync's snapshot: No space left"):
        Detector(live_tensors(before), placement="file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("staged_elements", [1, 7, 1000, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_snapshot_brought_over_in_pieces_finds_the_same(staged_elements: int, dtype: torch.dtype):
    """What a GPU does with a snapshot on the host, here from the host to the host."""
    values = torch.randn(1003).to(dtype)
    held = values.to(torch.bfloat16).view(torch.int16).clone()
    values[::5] += 1
    expected_new = values.to(torch.bfloat16).view(torch.int16)
    differs = torch.nonzero(expected_new != held).flatten()
    before = held.clone()
    indices, old, new = extract_staged(values, held, staged_elements)
    assert indices.tolist() == differs.tolist() and indices.dtype == torch.int32
    assert torch.equal(old, before[differs]) and torch.equal(new, expected_new[differs])
    assert torch.equal(held, expected_new)
    assert extract_staged(torch.empty(0), torch.empty(0, dtype=torch.int16))[0].numel() == 0


def test_a_snapshot_brought_over_stays_as_it_was_if_that_fails(monkeypatch: pytest.MonkeyPatch):
    from delta_wire import kernels

    values, held = torch.ones(10), torch.zeros(10, dtype=torch.int16)
    extract, calls = kernels.extract, []

    def second_fails(*args: torch.Tensor):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return extract(*args)

    monkeypatch.setattr(kernels, "extract", second_fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        extract_staged(values, held, 5)
    assert not held.any()


@pytest.mark.parametrize("placement", ["auto", "file"])
def test_a_session_keeps_its_snapshot_where_it_is_told(tiny_model, tmp_path: Path, placement: str):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32)
    session = DeltaSyncSession(str(tmp_path / "bucket"), DeltaSyncConfig(delta_sync_snapshot=placement))
    session.start(model)
    with torch.no_grad():
        model.model.embed_tokens.weight[0, :5] += 1
    session.step(1)
    assert session.finish() and session.publisher.records[-1].num_changed == 5
