"""A pytest plugin that keeps this process cheap to fork, as tests do thousands of times.

A fork copies the page table of all memory that is not a file's. On a virtual machine that takes 90 ms for the 500 MB
that torch, transformers and Megatron-Core have, and 20 ms once these lie in pages of 2 MB. The kernel divides such a
page when one of the two processes writes to it, so they are joined again now and then.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator

import pytest

LARGE_BYTES = 1 << 21
MADV_COLLAPSE = 25
"""Advice to madvise since Linux 6.1. An older kernel refuses it, and the pages stay small."""
FORKS_UNTIL_JOINED = 25

libc = ctypes.CDLL(None)
forks = 0


def count_fork() -> None:
    global forks
    forks += 1


def join_pages() -> None:
    """Let private memory lie in large pages. Nothing but time changes."""
    global forks
    forks = 0
    with open("/proc/self/maps") as file:
        lines = file.read().splitlines()
    for line in lines:
        bounds, access, _, _, inode, *name = line.split()
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, stop = (int(bound, 16) for bound in bounds.split("-"))
            first, last = -(-start // LARGE_BYTES) * LARGE_BYTES, stop // LARGE_BYTES * LARGE_BYTES
            if first < last:
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_COLLAPSE)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    if not session.config.getoption("numprocesses", None):  # a worker, or the only process
        os.register_at_fork(before=count_fork)
        join_pages()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    done = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()  # what is left are mostly modules: later collections pass them by
        libc.malloc_trim(0)  # what a file's tests have freed
    if forks >= FORKS_UNTIL_JOINED:
        join_pages()
    return done
