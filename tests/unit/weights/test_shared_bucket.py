"""Memory of a bucket that other processes can open, whatever the allocator's settings are."""

import pytest
import torch

from megatron_rl.weights.shared_bucket import SharedBucket

get, put = torch._C._accelerator_getAllocatorSettings, torch._C._accelerator_setAllocatorSettings


@pytest.mark.parametrize("given", ["max_split_size_mb:64,expandable_segments:True", "expandable_segments:False", ""])
def test_a_bucket_is_allocated_without_expandable_segments_and_the_settings_come_back(given, monkeypatch):
    before, seen = get(), []
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: seen.append(get()))
    put(given)
    try:
        SharedBucket(64, torch.device("cuda"))
        assert get() == given
    finally:
        put(before)
    assert seen == [given.replace("True", "False")]
