"""What csrc/sass_report.py predicts of the kernels: the recorded predictions hold, and its counts are right by hand."""

import json
import math
import re
import runpy
from pathlib import Path

import pytest

from megatron_rl.ops import head

CSRC = Path(__file__).parents[3] / "csrc"
build = runpy.run_path(str(CSRC / "build.py"))
sass = build["sass_report"]()
RECORDED = json.loads((CSRC / "resources.json").read_text())
PERCENT, MICROSECONDS, HEADS = sass["PERCENT"], sass["MICROSECONDS"], sass["HEADS"]


@pytest.mark.thorough
@pytest.mark.skipif(build["nvcc"]() is None, reason="needs nvcc")
@pytest.mark.parametrize("architecture", build["ARCHITECTURES"])
def test_no_kernel_spills_or_takes_more_registers_or_is_predicted_slower_than_recorded(architecture):
    registers = build["resources"]((architecture,))  # a spill is an error here, whatever the compiler
    if build["nvcc_version"]() != RECORDED["nvcc"]:
        pytest.skip(f"no kernel spills; resources.json is of nvcc {RECORDED['nvcc']}, not {build['nvcc_version']()}")
    recorded = RECORDED["kernels"]
    grown = {
        f"{architecture} {kernel}": (count, recorded[architecture].get(kernel))
        for architecture, kernels in registers.items()
        for kernel, count in kernels.items()
        if count > recorded[architecture].get(kernel, {"registers": 0})["registers"]
    }
    assert not grown, "registers found and recorded; python csrc/build.py --report records them anew"
    if build["nvdisasm"]() is None:
        pytest.skip("registers are as recorded; predictions need nvdisasm: pip install nvidia-cuda-nvdisasm")
    found = build["report"]((architecture,))
    devices = [name for name, device in sass["DEVICES"].items() if device.architecture == f"sm_{architecture}"]
    # (what, which sign makes less of it better, how much worse is still as recorded)
    for what, sign, tolerance in ((PERCENT, -1, 1.0), (MICROSECONDS, 1, 0.1), (HEADS, 1, 0.01)):
        worse = {
            f"{device}, {case}": (found[what][device].get(case), recorded)
            for device in devices
            for case, recorded in RECORDED[what].get(device, {}).items()
            if not sign * (found[what][device].get(case, math.inf) - recorded) <= tolerance + 1e-9
        }
        assert not worse, f"{what}: found and recorded; python csrc/build.py --report records them anew"


def test_the_readme_shows_the_recorded_predictions():
    assert (CSRC / "README.md").read_text().endswith("\n" + sass["tables"](RECORDED))


def test_the_targets_are_met_by_the_recorded_predictions():
    """Of the policy loss and the advantages of 32,768 tokens, in microseconds on an H200."""
    found = RECORDED[MICROSECONDS]["H200"]
    assert found["policy loss, by token"] <= 8
    assert max(us for case, us in found.items() if "policy loss" in case) <= 20
    assert max(us for case, us in found.items() if "advantages" in case) <= 10


def test_the_model_counts_blocks_as_the_kernels_cut_tokens():
    sources = "".join((CSRC / name).read_text() for name in ("math/ppo.h", "kernels/gae.cuh", "kernels/sweeps.cuh"))
    for name in ("PPO_PIECE", "GAE_TILE"):
        assert re.search(rf"constexpr \w+ {name} = (\d+);", sources)[1] == str(sass[name])
    assert f"compares {sass['SEARCHED_AT_ONCE']} bounds at a time" in sources
    assert f"{sass['ADDED_AT_ONCE']} pieces at a time" in (CSRC / "kernels/ppo.cu").read_text()


# A block that returns early, one that loads a piece or fills it slowly, and one warp that stores the result.
LISTING = """
	.section	.text._ZN12_GLOBAL__N_16kernelEv,"ax",@progbits
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   ISETP.NE.AND P0, PT, R0, RZ, PT ;
        /*0020*/               @P1 EXIT ;
        /*0030*/               @P2 BRA `(.L_x_0) ;
        /*0040*/                   LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*0050*/                   LDG.E.U16 R5, desc[UR4][R2.64+0x2] ;
        /*0060*/                   BRA `(.L_x_1) ;
.L_x_0:
        /*0070*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_1:
        /*0080*/                   FADD R8, R4, R7 ;
        /*0090*/                   MUFU.EX2 R9, R8 ;
        /*00a0*/               @P0 EXIT ;
        /*00b0*/                   STG.E desc[UR4][R2.64], R9 ;
        /*00c0*/                   EXIT ;
.L_x_2:
        /*00d0*/                   BRA `(.L_x_2);
"""


def test_the_path_is_the_shortest_that_loads_a_piece_and_takes_its_exponentials():
    ((name, blocks),) = sass["kernels_in"](LISTING).items()
    assert name == "kernel"
    common = sass["paths"](blocks, 1, False)
    opcodes = [instruction.opcode for instruction in common[1]]
    assert opcodes == ["S2R", "ISETP.NE.AND", "EXIT", "BRA", "LDG.E.128", "FADD", "MUFU.EX2", "EXIT"]
    assert len(common[0]) == 3  # the early return
    assert [instruction.name for instruction in sass["paths"](blocks, 1, True)[1]][-2:] == ["STG", "EXIT"]
    assert sass["paths"](blocks, 2, False).keys() == {0}  # nowhere are there two exponentials
    assert sass["pipes_used"](common[1]) == {"alu": 1, "fma": 1, "mufu": 1, "lsu": 1, "uniform": 1, "control": 3}


LOOP = """
	.section	.text._ZN12_GLOBAL__N_16kernelEv,"ax",@progbits
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_0:
        /*0010*/               @P1 BRA `(.L_x_1) ;
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_1:
        /*0030*/                   IADD3 R3, R3, 0x1, RZ ;
.L_x_2:
LOADS   /*0050*/                   IADD3 R3, R3, 0x1, RZ ;
        /*0060*/               @P0 BRA `(.L_x_2) ;
        /*0070*/                   STG.E desc[UR4][R2.64], R3 ;
        /*0080*/               @P2 BRA `(.L_x_0) ;
        /*0090*/                   EXIT ;
""".replace("LOADS", "        /*0040*/                   LDG.E.128 R4, desc[UR4][R2.64] ;\n" * 8)


def test_the_loop_is_the_one_that_loads_eight_pieces_in_each_turn():
    ((_, blocks),) = sass["kernels_in"](LOOP).items()
    assert [i.name for i in sass["loop_in"](blocks)] == ["LDG"] * 8 + ["IADD3", "BRA"]


def test_a_kernel_that_loops_is_bound_by_memory_where_it_has_much_to_read():
    device, ((_, blocks),) = sass["DEVICES"]["H200"], sass["kernels_in"](LOOP).items()
    looping = sass["Looping"](64, sass["loop_in"](blocks), sass["paths"](blocks, 0, must_store=True)[8])
    seconds = [looping.seconds(nbytes, device) for nbytes in (1 << 34, 1 << 35)]
    assert (1 << 34) / device.copy_bandwidth == pytest.approx(seconds[1] - seconds[0], rel=0.02)
    assert looping.seconds(1 << 20, device) > 2 * (1 << 20) / device.copy_bandwidth


def test_a_warp_alone_waits_for_what_it_reads():
    ((_, blocks),) = sass["kernels_in"](LISTING).items()
    path = sass["paths"](blocks, 1, True)[1]
    # S2R at 1, ISETP after its 12 clocks, two branches, the load at 16, its last register 650 later, then the sum's 5
    # and the exponential's 20 clocks
    clocks = [sass["clocks_alone"](path[:length]) for length in range(1, len(path) + 1)]
    assert clocks == [1, 13, 14, 15, 16, 666, 671, 672, 691, 692]


# Registers are given in units of 8 a thread: by hand 65536 / 4 / (32 x 80) = 6 warps in each quarter
@pytest.mark.parametrize(
    ("registers", "blocks"), [(80, 3), (64, 4), (63, 4), (56, 4), (48, 5), (40, 6), (32, 8), (16, 8)]
)
def test_blocks_resident_by_registers(registers, blocks):
    assert sass["blocks_resident"](registers) == blocks


def test_the_queue_is_bound_by_its_latency_with_one_block_and_by_its_slowest_station_with_many():
    rate = sass["blocks_per_clock"]
    assert rate(1, (1000.0, 500.0), 500.0) == pytest.approx(1 / 2000)
    # the second finds the first in memory half of the time, half done, and at issue a quarter of it, half done
    assert rate(2, (1000.0, 500.0), 500.0) == pytest.approx(2 / (500 + 1000 * 1.25 + 500 * 1.125))
    assert rate(32, (1000.0, 500.0), 500.0) == pytest.approx(1 / 1000)


def test_issue_is_that_of_the_busiest_pipe():
    load, exponential = (sass["Instruction"](opcode, None, "R0, R1") for opcode in ("FADD", "MUFU.EX2"))
    assert sass["issue_clocks"]([load] * 100, "sm_90a") == pytest.approx(100 * 8 / 4 / 0.92)
    assert sass["issue_clocks"]([load] * 100, "sm_80") == pytest.approx(100 * 8 * 32 / 64)  # half as many FP32 lanes
    assert sass["issue_clocks"]([exponential] * 100, "sm_90a") == pytest.approx(100 * 8 * 32 / 16)


def test_the_longest_way_takes_each_loop_once_and_passes_what_it_must_and_must_not():
    ((_, blocks),) = sass["kernels_in"](LISTING).items()
    names = [i.name for i in sass["longest"](blocks, "STG", "CALL")]
    assert names.count("LDG") == 2 and names[-2:] == ["STG", "EXIT"]  # the slow arm is the longer one
    assert [i.name for i in sass["longest"](blocks, "MUFU", r"LDG.*U16|STG")][-3:] == ["FADD", "MUFU", "EXIT"]
    with pytest.raises(ValueError, match="no way meets an instruction like ATOMG"):
        sass["longest"](blocks, "ATOMG", "CALL")
    looping = LISTING.replace("@P0 EXIT", "@P0 BRA `(.L_x_1)")
    ((_, blocks),) = sass["kernels_in"](looping).items()
    assert [i.opcode for i in sass["round_of_loop"](blocks, "MUFU")] == ["FADD", "MUFU.EX2", "BRA"]


def test_two_sweeps_take_the_first_and_what_the_second_does_behind_its_wait():
    """Loads come from memory, what others have left from the cache; blocks that are not resident begin anew."""
    column, left, add = (sass["Instruction"](*i) for i in (
        ("LDG.E", None, "R4, desc[UR4][R2.64]"),
        ("LDG.E.STRONG.GPU", None, "R5, desc[UR4][R6.64]"),
        ("FADD", None, "R6, R4, R5"),
    ))  # fmt: skip
    assert [sass["clocks_alone"]([load, add], 650) for load in (column, left)] == [651, 281]
    kernel = sass["TokenKernel"](40, 6400, [column, add], [column, left, add], [column, add], [])
    device = sass["Device"]("sm_90a", 100, 1e9, 6.4e12)  # 64 bytes a clock: 100 clocks of memory for a block
    issue = sass["issue_clocks"]([left, add], "sm_90a")
    start, launch = sass["BLOCK_START_CLOCKS"], sass["LAUNCH_SECONDS"]
    first, behind = start + 651 - 2 + 100 + issue, 281 - 2 + 100 + issue
    assert kernel.seconds(50, 1, device) == pytest.approx(launch + (first + behind) * 1e-9)
    assert kernel.seconds(50, 65, device) == pytest.approx(launch + (first + 651 + behind) * 1e-9)  # a second search
    clocks = [kernel.clocks(path, 400, device) for path in (kernel.first, kernel.second)]
    assert kernel.seconds(400, 1, device) == pytest.approx(launch + sum(clocks) * 1e-9)  # 6 of 8 blocks are resident


class Instant:
    """A kernel that takes no time."""

    def seconds(self, *_):
        return 0.0


def test_the_head_is_its_products_and_what_they_do_not_hide():
    hidden, vocab = sass["HEAD"]
    assert sass["HEAD_ROWS"] == head.rows_of_gradient(vocab) and sass["HEAD_PARTS"] == head.PARTS
    device, kernels = sass["DEVICES"]["H200"], {}
    for name in ("partials_kernel<float, true, true>", "gradient_kernel<float, BF16, true, false>"):
        kernels[name] = Instant()
    rows, bare = sass["HEAD_ROWS"], 6.0 * sass["HEAD_ROWS"] * hidden * vocab / 7e14
    small = 4 * (2e-6 + 25e-6)
    over = sass["head_over_products"]
    assert over(rows, True, True, kernels, device, 7e14) == pytest.approx(1 + small / bare)
    written = (2 * rows * vocab + 8 * hidden * vocab) / 4.3e12  # logits of four bytes and not of two; sums
    assert over(rows, True, False, kernels, device, 7e14) == pytest.approx(1 + (small + written) / bare)
    cast = 6 * hidden * vocab / 4.3e12
    assert over(rows, False, True, kernels, device, 7e14) == pytest.approx(1 + (small + cast) / bare)


def test_a_tile_has_as_many_warps_as_a_row_fills():
    load = sass["Instruction"]("LDG.E.128", None, "R4, [R2]")
    kernel = sass["Kernel"](64, {n: [load] * n for n in range(9)}, {n: [load] * n for n in range(9)}, 1)
    found, device = [], sass["DEVICES"]["H200"]
    tile = lambda kernel, size, warps, device: found.append((size, warps)) or (1.0, 1.0, 1.0)  # noqa: E731
    counted = type("Counted", (), {"tile": tile, "registers": 64})()
    for row_bytes in (8000, 37984, 64000):  # one tile of two warps, two of five, two of eight
        type(kernel).seconds(counted, 1, row_bytes, device)
    assert found == [(8000, 2), (20480, 5), (17504, 5), (32768, 8), (31232, 8)]
    assert sass["blocks_resident"](64, 5) == 6 and sass["blocks_resident"](16, 1) == 32
    memory, issue, _ = kernel.tile(17504, 5, device)  # four warps and a quarter: 8 loads each, then 3
    assert memory == pytest.approx(17504 / device.bytes_per_clock)
    assert issue == pytest.approx((4 * 8 + 3) * 4)  # a load of 16 bytes is four turns of a clock each
