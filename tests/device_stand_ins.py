"""Stands in for torch.cuda's clock, graphs and memory counts, so that a GPU's benchmarks run through on a CPU."""

import contextlib
import time

import torch


class HostEvent:
    """Takes the host's time where a device's event would its own."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


class HostGraph:
    def replay(self):
        pass


class HostStream:
    def wait_stream(self, other):
        pass


class HostGenerator:
    """Makes the host's generator: an emulated device has none, and its numbers are drawn on the host."""

    made = torch.Generator

    def __new__(cls, device=None):
        return cls.made()


def stand_in(patch):
    """Replace what the benchmarks ask of torch.cuda, by `patch(object, name, value)`."""
    nothing = {"synchronize": None, "reset_peak_memory_stats": None, "memory_allocated": 0, "max_memory_allocated": 64}
    nothing |= {"get_device_name": "a stand-in", "set_sync_debug_mode": None, "empty_cache": None}
    for name, value in nothing.items():
        patch(torch.cuda, name, lambda *_, value=value: value)
    for name, value in {"Event": HostEvent, "CUDAGraph": HostGraph, "Stream": HostStream}.items():
        patch(torch.cuda, name, value)
    patch(torch.cuda, "current_stream", HostStream)
    patch(torch, "Generator", HostGenerator)
    for name in ("stream", "graph"):
        patch(torch.cuda, name, lambda _: contextlib.nullcontext())
