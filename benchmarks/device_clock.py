"""What one call costs on a CUDA device: time, kernel launches, waits of the host, memory. And the device's ceilings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
MEASURED = "the measured call"
SCRATCH_BYTES = 2 << 30
"""Written before every timed call: many times any L2, and so long (0.5 ms) that the host is ahead of the device."""


COST = ("us", "p20", "p80", "launches", "waits", "extra_mb")
COST_LEGEND = (
    "us: median of device events, L2 cold, 10 to 50 repeats after warm-up; p20, p80. launches: kernels. waits: of the "
    "host for the device. extra_mb: the allocator's peak during the call, results included."
)


class DeviceClock:
    """Times with events, a cold L2 and as many repeats as `seconds` allow: at most 50, at least 10."""

    def __init__(self, device: str = "cuda", seconds: float = 0.4):
        self.device, self.seconds = device, seconds
        self.scratch = torch.empty(SCRATCH_BYTES if device == "cuda" else 1024, dtype=torch.uint8, device=device)

    def cost(self, call: Callable[[], Any], prepare: Callable[[], Any] | None = None) -> dict[str, Any]:
        """`COST` and the repeats. `prepare` runs before each call, outside the clock: it undoes what the call did."""
        repeats = self.repeats(call, prepare)
        extra_mb = self.extra_bytes(call, prepare) / 1e6
        launches, waits = self.launches_and_waits(call, prepare)
        times = sorted(self.times_us(call, prepare, repeats))
        columns = (statistics.median(times), times[repeats // 5], times[repeats - 1 - repeats // 5])
        return dict(zip(COST, (*columns, launches, waits, extra_mb), strict=True)) | {"repeats": repeats}

    def repeats(self, call: Callable[[], Any], prepare: Callable[[], Any] | None = None) -> int:
        """Warm a call up and return how often there is time for it."""
        self.times_us(call, prepare, 2)  # compilers and autotuners run here
        once = statistics.median(self.times_us(call, prepare, 3))
        return max(10, min(50, int(self.seconds * 1e6 / max(once, 1.0))))

    def times_us(self, call, prepare, repeats: int) -> list[float]:
        events = []
        for i in range(repeats):
            if prepare is not None:
                prepare()
            self.scratch.fill_(i % 256)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in events]

    def extra_bytes(self, call, prepare=None) -> int:
        """The allocator's peak during the call, results included, above what there was before."""
        if prepare is not None:
            prepare()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before

    def launches_and_waits(self, call, prepare=None) -> tuple[int, int]:
        """Kernels that the call ran (copies and fills by the driver are none), and how often the host waited in it."""
        if prepare is not None:
            prepare()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as trace:
            with torch.profiler.record_function(MEASURED):
                call()
            torch.cuda.synchronize()
        events = list(trace.events())
        on_device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and e.name != MEASURED]
        kernels = [e for e in on_device if not e.name.startswith(("Memcpy", "Memset"))]
        call_span = next(e for e in events if e.name == MEASURED and e not in on_device).time_range
        waits = [e for e in events if e.name in WAITS and call_span.start <= e.time_range.start <= call_span.end]
        return len(kernels), len(waits)

    def host_us(self, call: Callable[[], Any], repeats: int = 100) -> float:
        """Host time of one call when the device is never waited for."""
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        seconds = time.perf_counter() - begin
        torch.cuda.synchronize()
        return seconds / repeats * 1e6

    def replay_us(self, call: Callable[[], Any]) -> float:
        """Median device time of the call replayed as a CUDA graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        return statistics.median(self.times_us(graph.replay, None, 50))

    def ceilings(self, count: int = 1 << 29) -> dict[str, float]:
        """GB/s of a device-to-device copy, bytes read plus written, and of the fastest of three plain reads."""
        source = torch.randn(count, device=self.device)
        target = torch.empty_like(source)
        reads = (lambda: torch.sum(source), lambda: torch.amax(source), lambda: torch.dot(source, source))

        def gb_s(size: int, call: Callable[[], Any]) -> float:
            self.times_us(call, None, 3)
            return size / statistics.median(self.times_us(call, None, 20)) / 1e3

        copy = gb_s(2 * source.nbytes, lambda: target.copy_(source))
        return {"copy": copy, "read": max(gb_s(source.nbytes, read) for read in reads)}
