"""What is done around a CUDA graph's recording and replay. Stand-ins for streams, devices and graphs write down what happens; test_cuda.py has real ones."""

import contextlib
import gc
import threading

import pytest
import torch

from clipwise.compiled import recording

DEVICE = torch.device("cuda", 1)
begin_with_libraries = recording.begin_with_libraries


class Stream:
    """One that writes down what it waits for."""

    def __init__(self, name, happened):
        self.name, self._happened = name, happened

    def wait_stream(self, other):
        self._happened.append(f"{self.name} waits for {other.name}")


class Gpu:
    """`happened`, in order; `current` device and stream."""

    breaks_off = False  # whether CUDA ends a recording with an error

    def __init__(self):
        self.happened = []
        self.device = 0
        self.caller, self.own = Stream("caller", self.happened), Stream("recording", self.happened)
        self.stream = self.caller
        self.capturing = self.allocates = False

    @contextlib.contextmanager
    def on(self, name, value):
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

    def close(self, *pool):
        if not self.allocates:
            raise RuntimeError("not currently recording to mempool_id")
        self.happened.append(("close", *pool))
        self.allocates = False

    def graph(self):
        gpu = self

        class Graph:
            def register_generator_state(self, generator):
                gpu.happened.append(f"seed of {generator} on device {gpu.device}")

            def capture_begin(self, **options):
                assert options["capture_error_mode"] == "thread_local" and gpu.stream is gpu.own and gpu.device == DEVICE.index
                gpu.happened.append("begin")
                gpu.capturing = gpu.allocates = True

            def capture_end(self):
                if gpu.breaks_off:
                    gpu.breaks_off = False  # CUDA says so once: torch still takes its generator for one that records
                    raise RuntimeError("operation failed due to a previous error during capture")
                gpu.happened.append("end")
                gpu.capturing = gpu.allocates = False

            def replay(self):
                gpu.happened.append(f"replay on {gpu.stream.name}")

        return Graph()


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", gpu.graph)
    monkeypatch.setattr(torch.cuda, "device", lambda device: gpu.on("device", device.index))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: gpu.on("stream", stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu.stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: gpu.happened.append("wait for the device"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: gpu.happened.append("give memory back"))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: id(gpu.stream), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", gpu.close, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *args: gpu.happened.append(("release", *args)), raising=False)
    monkeypatch.setattr(recording, "_broken_off", [])
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: torch.ones(()))  # for the recording that mends
    monkeypatch.setattr(recording, "recording_stream", lambda device: gpu.own)
    monkeypatch.setattr(recording, "begin_with_libraries", lambda device: gpu.happened.append(f"libraries on {gpu.stream.name}"))
    monkeypatch.setattr(recording, "_last", {})
    return gpu


def test_a_recording_comes_after_its_caller_and_before_its_replays(gpu):
    replay = recording.captured_in_passing(lambda: gpu.happened.append("run"), DEVICE, ["noise"])
    assert gpu.happened == [
        "seed of noise on device 1",
        "recording waits for caller",  # torch writes to memory that the caller's stream may just have let go of
        "libraries on recording",
        "begin",
        "run",
        "end",
        "caller waits for recording",  # where torch has put a seed that replays overwrite
    ]
    assert gpu.stream is gpu.caller and gpu.device == 0
    replay()
    assert gpu.happened[-1] == "replay on caller"


def test_outside_a_step_torch_gives_back_what_it_keeps(gpu):
    recording.captured(lambda: None, DEVICE)
    assert gpu.happened[:2] == ["wait for the device", "give memory back"] and gpu.happened.count("begin") == 1


@pytest.mark.parametrize("how", [recording.captured, recording.captured_in_passing], ids=lambda how: how.__name__)
@pytest.mark.parametrize("fault", ["CUDA", "Python"])
def test_a_recording_that_is_broken_off_leaves_nothing_behind(gpu, how, fault):
    """Its stream was current from then on, torch allocated for it and kept its memory, and no number could be drawn on the device outside a graph."""
    gpu.breaks_off = fault == "CUDA"
    with pytest.raises((RuntimeError, ZeroDivisionError), match="previous error" if fault == "CUDA" else "division"):
        how(lambda: None if fault == "CUDA" else 1 / 0, DEVICE)
    assert gpu.stream is gpu.caller and gpu.device == 0 and not gpu.capturing
    closed = [happened for happened in gpu.happened if isinstance(happened, tuple)]
    assert closed == ([("close", 1, (0, 7)), ("release", 1, (0, 7))] if fault == "CUDA" else []) and gpu.happened[-3:] == [
        "begin",
        "end",
        "caller waits for recording",
    ]
    recording.captured_in_passing(lambda: None, DEVICE)()
    assert gpu.happened[-1] == "replay on caller"


def test_results_are_those_of_the_run_that_was_recorded(gpu):
    _, (found,) = recording.recorded_in_passing(lambda x: [x + 1], [torch.ones(2)], DEVICE, (0, 7))
    assert torch.equal(found, torch.full((2,), 2.0))


def test_no_graph_dies_while_another_is_recorded(gpu):
    """Collected by Python meanwhile, it would break the recording off."""
    seen = []
    recording.captured_in_passing(lambda: seen.append(gc.isenabled()), DEVICE)
    assert seen == [False] and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        recording.captured_in_passing(lambda: 1 / 0, DEVICE)
    assert gc.isenabled()


def test_replays_of_a_device_come_one_after_the_other(gpu):
    """Their libraries work in one piece of memory, whatever streams they are replayed on."""
    first, second = (recording.captured_in_passing(lambda: None, DEVICE) for _ in range(2))
    side = Stream("side", gpu.happened)
    gpu.happened.clear()
    first()
    second()
    with gpu.on("stream", side):
        first()
        first()
    second()
    assert gpu.happened == [
        *["replay on caller"] * 2,
        "side waits for caller",
        *["replay on side"] * 2,
        "caller waits for side",
        "replay on caller",
    ]


def on_this_computer(monkeypatch, backend="native", use=lambda pool, device: contextlib.nullcontext()):
    """What libraries are called with."""
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(recording, "_room_of_libraries", lambda device: "room")


def test_other_allocators_have_no_pools(gpu, monkeypatch):
    on_this_computer(monkeypatch, "cudaMallocAsync", lambda *_: pytest.fail("which raises there"))
    begin_with_libraries(DEVICE)


def test_libraries_get_room_that_torch_keeps_for_reuse(gpu, monkeypatch):
    """While a pool is in use it does not give that back by itself."""

    @contextlib.contextmanager
    def full(pool, device):
        if "give memory back" not in gpu.happened:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        gpu.happened.append(f"in {pool}")
        yield

    on_this_computer(monkeypatch, use=full)
    begin_with_libraries(DEVICE)
    assert gpu.happened == ["give memory back", "in room"]


def test_a_warm_up_that_fails_is_waited_for(gpu):
    """Its inputs are let go by the caller, while they may still be read."""
    with pytest.raises(ZeroDivisionError):
        recording.recorded(lambda x: 1 / 0, [Placed()])
    assert gpu.happened[-1] == "caller waits for recording" and gpu.stream is gpu.caller


class Placed:
    device = DEVICE


def test_what_is_tried_out_waits_for_replays_on_any_stream(gpu, monkeypatch):
    """cuBLAS, called on the stream of recordings, works where graphs that were recorded there do."""
    replay = recording.captured_in_passing(lambda: None, DEVICE)
    on_this_computer(monkeypatch)
    with gpu.on("stream", Stream("side", gpu.happened)):
        replay()
    gpu.happened.clear()
    with gpu.on("stream", gpu.own):
        begin_with_libraries(DEVICE)
    replay()
    assert gpu.happened == ["recording waits for side", "caller waits for recording", "replay on caller"]


def test_threads_record_one_after_the_other(gpu):
    """Work that another thread puts on the stream of recordings would become part of the graph."""
    inside, most = [], []

    def run():
        inside.append(1)
        most.append(len(inside))
        threading.Event().wait(0.01)
        inside.pop()

    threads = [threading.Thread(target=lambda: recording.captured_in_passing(run, DEVICE)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4 and gpu.happened.count("end") == 4
