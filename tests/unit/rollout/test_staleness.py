from megatron_rl.rollout.staleness import AdmissionGate


def test_synchronous_training_admits_exactly_one_step():
    gate = AdmissionGate(max_concurrent=100, max_staleness=0, groups_per_step=4)
    assert gate.capacity(version=0) == 4  # (0 + 0 + 1) * 4
    for _ in range(4):
        gate.start()
    assert gate.capacity(version=0) == 0
    for _ in range(4):
        gate.finish(accepted=True)
    assert gate.capacity(version=0) == 0  # the step is sampled; the next one needs new weights
    assert gate.capacity(version=1) == 4  # (0 + 1 + 1) * 4 - 4


def test_capacity_follows_the_formula_with_two_versions_of_staleness():
    # min(10 - 3, (2 + 5 + 1) * 4 - (25 + 3)) = min(7, 32 - 28) = 4
    gate = AdmissionGate(max_concurrent=10, max_staleness=2, groups_per_step=4, accepted=25, running=3)
    assert gate.capacity(version=5) == 4
    # At version 6 four more groups fit the bound, and concurrency is the tighter one: min(7, 36 - 28) = 7
    assert gate.capacity(version=6) == 7


def test_rejected_episode_makes_room_for_another():
    gate = AdmissionGate(max_concurrent=100, max_staleness=0, groups_per_step=2)
    gate.start()
    gate.start()
    gate.finish(accepted=False)
    assert (gate.accepted, gate.running) == (0, 1)
    assert gate.capacity(version=0) == 1


def test_resumed_run_counts_the_groups_of_earlier_steps():
    gate = AdmissionGate(max_concurrent=100, max_staleness=1)
    gate.begin_step(groups=8, version=7, waiting=0)
    assert gate.accepted == 56
    assert gate.capacity(version=7) == 16  # (1 + 7 + 1) * 8 - 56: this step and one ahead
    gate.begin_step(groups=8, version=7, waiting=5)
    assert gate.capacity(version=7) == 11  # five of them are there


def test_skipped_update_takes_no_room():
    gate = AdmissionGate(max_concurrent=100, max_staleness=0)
    gate.begin_step(groups=2, version=4, waiting=0)
    for _ in range(2):
        gate.start()
        gate.finish(accepted=True)
    assert gate.capacity(version=4) == 0
    gate.begin_step(groups=2, version=4, waiting=0)  # the step was trained, its gradient was not finite
    assert gate.capacity(version=4) == 2


def test_without_a_step_size_only_concurrency_bounds():
    gate = AdmissionGate(max_concurrent=3, max_staleness=0)
    gate.start()
    assert gate.capacity(version=0) == 2
