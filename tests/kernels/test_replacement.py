# SPDX-License-Identifier: Apache-2.0
"""Changes of live parameters: prepared, carried out by two threads or on a device, counted, taken back."""

import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from changes import changes_of, check_changes

from delta_wire import kernels
from delta_wire.kernels import cpu_replace, replacement, second


def as_bits(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(torch.int16)


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("form", ["host", "device"])
def test_changes_are_prepared_written_counted_and_taken_back(
    monkeypatch: pytest.MonkeyPatch, threaded: bool, steps: bool, form: str
):
    if threaded:
        monkeypatch.setattr(replacement, "_ALONE", 0)
        monkeypatch.setattr(replacement, "_CHUNK", 100)
    if form == "device":
        monkeypatch.setattr(replacement, "is_on_host", lambda tensor: False)
    check_changes(changes_of((10, 7000, 5000, 3), (1, 6000, 3, 0), steps))
    assert kernels.replacements([]).run() == {}


@pytest.mark.parametrize("chunk", [4, 1 << 15])
@pytest.mark.parametrize(
    "positions",
    [
        [0, 1, 65_536, 131_072, 131_073],
        [65_535, 0, 131_070, 131_070 + 65_536],
        [199_999, 100_000, 1],
        list(range(7)),
        list(range(6, -1, -1)),
    ],
)
def test_elements_are_found_wherever_they_lie(monkeypatch: pytest.MonkeyPatch, positions: list[int], chunk: int):
    monkeypatch.setattr(replacement, "_CHUNK", chunk)
    # two storages, the second in front of the first
    both = torch.randint(-32768, 32768, (400_000,), dtype=torch.int16)
    before, flats, listed = both.clone(), (both[200_000:], both[:200_000]), np.array(positions)
    items = [kernels.Change(flat, listed, flat[listed].numpy().view(np.uint16) ^ 1) for flat in flats]
    changes = kernels.replacements(items)
    assert changes.run() == {}
    for flat, old in zip(flats, (before[200_000:], before[:200_000]), strict=True):
        assert torch.equal(torch.nonzero(flat != old).flatten(), torch.from_numpy(np.sort(listed)))
        assert torch.equal(flat[listed], old[listed] ^ 1)
    assert changes.undo() and torch.equal(both, before)


def all_ones(monkeypatch: pytest.MonkeyPatch, act: Callable[..., int]) -> tuple[torch.Tensor, kernels.Replacements]:
    """A storage that becomes ones, by two threads which call `act`: whether it is the second, what to do, progress."""
    monkeypatch.setattr(replacement, "_ALONE", 0)
    monkeypatch.setattr(replacement, "_CHUNK", 100)
    flat, main = torch.zeros(1000, dtype=torch.int16), threading.current_thread()
    changes = kernels.replacements([kernels.Change(flat, np.arange(1000), np.ones(1000, dtype=np.uint16))])
    real = cpu_replace.replace
    monkeypatch.setattr(
        cpu_replace,
        "replace",
        lambda *args: act(threading.current_thread() is not main, lambda: real(*args), args[-2]),
    )
    return flat, changes


def test_a_thread_beside_that_fails_is_noticed(monkeypatch: pytest.MonkeyPatch):
    taken = threading.Event()

    def act(beside: bool, work: Callable[[], int], progress: np.ndarray) -> int:
        if beside:
            progress[0] += 1
            taken.set()
            raise MemoryError("the thread beside")
        taken.wait()
        return work()

    with monkeypatch.context() as patch:
        flat, changes = all_ones(patch, act)
        with pytest.raises(MemoryError, match="beside"):
            changes.run()
    assert flat.tolist() == [0] * 100 + [1] * 900
    assert changes.undo() and not flat.any()


def test_a_thread_beside_that_comes_late_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    let, over = threading.Event(), threading.Event()

    def act(beside: bool, work: Callable[[], int], progress: np.ndarray) -> int:
        if beside:
            let.wait()
        num_wrong = work()
        if beside:
            over.set()
        return num_wrong

    with monkeypatch.context() as patch:
        flat, changes = all_ones(patch, act)
        assert changes.run() == {} and flat.all()
        flat.zero_()
        let.set()
        assert over.wait(10) and not flat.any()


def test_a_thread_beside_that_comes_late_finds_the_stretches_as_they_were(monkeypatch: pytest.MonkeyPatch):
    handed: list[second.Handed] = []
    monkeypatch.setattr(second, "hand", handed.append)
    flat, changes = all_ones(monkeypatch, lambda beside, work, progress: work())
    assert changes.run() == {} and flat.all()
    called_with: list[tuple] = []
    monkeypatch.setattr(cpu_replace, "replace", lambda *args: called_with.append(args))
    monkeypatch.setattr(replacement, "_CHUNK", 10)
    handed[0].do()
    ((gaps, _, firsts, every, *_),) = called_with
    assert (gaps.size, firsts.size, every) == (1000, 10, 100)


def test_nothing_is_written_any_more_when_a_change_has_failed(monkeypatch: pytest.MonkeyPatch):
    begun = threading.Event()

    def act(beside: bool, work: Callable[[], int], progress: np.ndarray) -> int:
        if not beside:
            begun.wait()
            raise MemoryError("the thread itself")
        begun.set()
        time.sleep(0.1)
        return work()

    with monkeypatch.context() as patch:
        flat, changes = all_ones(patch, act)
        with pytest.raises(MemoryError, match="itself"):
            changes.run()
        assert flat.all()


def test_nothing_is_written_any_more_when_waiting_is_interrupted(monkeypatch: pytest.MonkeyPatch):
    taken, main = threading.Event(), threading.get_ident()

    def act(beside: bool, work: Callable[[], int], progress: np.ndarray) -> int:
        if not beside:
            taken.wait()
            # none is done, and the other thread is at one
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            return -1
        taken.set()
        time.sleep(0.3)
        return work()

    def interrupt(number: int, frame: object) -> None:
        assert threading.get_ident() == main
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with monkeypatch.context() as patch:
            flat, changes = all_ones(patch, act)
            with pytest.raises(KeyboardInterrupt):
                changes.run()
            assert flat.all()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_nothing_is_written_any_more_when_handing_over_is_interrupted(monkeypatch: pytest.MonkeyPatch):
    def act(beside: bool, work: Callable[[], int], progress: np.ndarray) -> int:
        assert beside
        time.sleep(0.1)
        return work()

    def interrupted(handed: second.Handed) -> None:
        hand(handed)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        hand = second.hand
        flat, changes = all_ones(patch, act)
        patch.setattr(second, "hand", interrupted)
        with pytest.raises(KeyboardInterrupt):
            changes.run()
        written = flat.clone()
        # all of it or nothing: what has not begun never does
        assert written.all() or not written.any()
        idle = threading.Event()
        hand(second.Handed(idle.set))
        assert idle.wait(10) and torch.equal(flat, written)


def test_one_thread_does_it_where_no_second_can_be_started(monkeypatch: pytest.MonkeyPatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    second._queue.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        flat, changes = all_ones(patch, lambda beside, work, progress: work())
        assert changes.run() == {} and flat.all()
        assert changes.undo() and not flat.any()
    # it is asked for again the next time
    over = threading.Event()
    second.hand(second.Handed(over.set))
    assert over.wait(10)


def test_the_second_thread_serves_also_where_it_cannot_be_unbound(monkeypatch: pytest.MonkeyPatch):
    def refuse() -> None:
        raise OSError(22, "Invalid argument")

    over = threading.Event()
    second._queue.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(second, "unbind_thread", refuse)
        second.hand(second.Handed(over.set))
        assert over.wait(10)


@pytest.mark.parametrize("form", ["host", "device"])
def test_what_must_be_there_is_counted_if_it_is_not(monkeypatch: pytest.MonkeyPatch, form: str):
    if form == "device":
        monkeypatch.setattr(replacement, "is_on_host", lambda tensor: False)
    flat, zeros = as_bits([0, 5, 0]), np.zeros(3, dtype=np.uint16)
    changes = kernels.replacements([kernels.Change(flat, np.arange(3), zeros, expected=0)])
    assert changes.lanes == [(0, 0)]
    assert changes.run() == {0: (1, 0)} and flat.tolist() == [0, 0, 0]
    assert changes.undo() and flat.tolist() == [0, 5, 0]


@pytest.mark.parametrize("form", ["host", "device"])
@pytest.mark.parametrize("position", [-1, 5, 1 << 62, -(1 << 63)])
def test_positions_outside_are_refused(monkeypatch: pytest.MonkeyPatch, position: int, form: str):
    if form == "device":
        monkeypatch.setattr(replacement, "is_on_host", lambda tensor: False)
    flat, zero = torch.ones(5, dtype=torch.int16), np.zeros(1, dtype=np.uint16)
    inside = kernels.Change(flat, np.array([4]), zero)
    with pytest.raises(kernels.OutsideError) as error:
        kernels.replacements([inside, kernels.Change(flat, np.array([position]), zero)])
    assert error.value.item == 1 and flat.tolist() == [1] * 5
    with pytest.raises(ValueError, match=r"have \[1, 2\] elements"):
        kernels.replacements([kernels.Change(flat, np.array([1, 2]), zero)])


def test_replacing_reads_back_what_it_wrote():
    # two entries for one place: the first does not hold what was written to it
    flat, values = torch.zeros(5, dtype=torch.int16), np.array([1, 2], dtype=np.uint16)
    changes = kernels.replacements([kernels.Change(flat, np.array([3, 3]), values)])
    assert changes.run() == {0: (1, 1)}
