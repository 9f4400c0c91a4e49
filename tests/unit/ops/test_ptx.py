"""nvcc's PTX of every kernel, run on the CPU by csrc/emulation: tests/gpu as they are, and what must be found."""

import ctypes
import math
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from csrc.emulation import emulated
from csrc.emulation.ptx import Unsupported
from csrc.emulation.translate import translate

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(bool(emulated.missing()), reason=emulated.missing())


@pytest.mark.slow
@pytest.mark.timeout(900)  # where `make test` has not built the device before, this does
def test_every_case_of_tests_gpu_passes_on_the_compiled_kernels():
    files = [f"tests/gpu/test_{name}_cuda.py" for name in ("kernels", "operators", "publish")]
    command = [sys.executable, "-m", "pytest", "-p", "tests.emulated_device", *files]
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed and int(passed[1]) > 100, done.stdout[-8000:] + done.stderr[-4000:]


# ---- faults planted in the PTX of the advantage kernel, one at a time


GUARD = 1 << 16
"""Bytes before and behind each tensor that are no tensor's: an address that is a little out of range is in none."""
FRAMES = []
"""Never freed: a machine still knows of them."""


class Machine:
    """The kernels of a PTX text. Tensors are ctypes arrays that the machine knows of."""

    def __init__(self, ptx):
        self.library = ctypes.CDLL(str(emulated.program(ptx)))
        self.library.emulation_launch.restype = ctypes.c_char_p

    def tensor(self, kind, values, written=True):
        shape = kind * len(values)
        FRAMES.append((ctypes.c_char * (ctypes.sizeof(shape) + 2 * GUARD))())
        array = shape.from_buffer(FRAMES[-1], GUARD)
        array[:] = values
        bytes_ = ctypes.c_size_t(ctypes.sizeof(array))
        self.library.emulation_add_memory(ctypes.byref(array), bytes_, ctypes.c_int(written))
        return array

    def launch(self, kernel, parameters, blocks=1, threads=32, cluster=1, order=0):
        """What is wrong, as text; empty where nothing is."""
        self.library.emulation_set_order(ctypes.c_uint64(order))
        buffers = [ctypes.create_string_buffer(value, len(value)) for value in parameters]
        pointers = (ctypes.c_char_p * len(buffers))(*(ctypes.addressof(buffer) for buffer in buffers))
        said = self.library.emulation_launch(kernel.encode(), blocks, threads, cluster, pointers)
        return (said or b"").decode()


def pointer(array, offset=0):
    return struct.pack("<Q", ctypes.addressof(array) + offset if array is not None else 0)


@pytest.fixture(scope="module")
def gae_ptx():
    return (emulated.compile_kernel(ROOT / "csrc" / "kernels" / "gae.cu") / "kernel.ptx").read_text()


def run_gae(ptx, tokens=1500, order=0):
    machine = Machine(ptx)
    rewards = [math.sin(i) for i in range(tokens)]
    columns = [machine.tensor(ctypes.c_float, rewards) for _ in range(2)]
    columns += [machine.tensor(ctypes.c_bool, [True] * tokens), machine.tensor(ctypes.c_int64, [0, tokens])]
    given = b"".join(map(pointer, [*columns, None])) + struct.pack("<dd", 0.97, 0.9)
    results = [machine.tensor(ctypes.c_float, [0.0] * tokens, written=False) for _ in range(2)]
    name = re.search(r"\.entry\s+(\w+)", ptx)[1]
    return machine.launch(name, [given, *map(pointer, results)], threads=256, order=order), list(results[0])


def test_the_advantage_kernel_is_clean_and_gives_the_same_bits_in_every_order(gae_ptx):
    (said, first), *others = (run_gae(gae_ptx, order=order) for order in range(4))
    assert not said and all(other == ("", first) for other in others)
    state = 0.0
    for i in reversed(range(1500)):
        value, later = math.sin(i), math.sin(i + 1) if i < 1499 else 0.0
        state = value + 0.97 * later - value + 0.97 * 0.9 * state
        assert first[i] == pytest.approx(state, rel=1e-5, abs=1e-5)


def plant(ptx, pattern, replacement, which=0):
    """The text with one match of the pattern replaced, counted from the end where `which` is negative."""
    found = list(re.finditer(pattern, ptx))[which]
    return ptx[: found.start()] + found.expand(replacement) + ptx[found.end() :]


GLOBAL_LOAD = r"(ld\.global\.f32\s+%\w+, \[%\w+)(?:\+-?\d+)?\]"
FAULTS = {
    "no barrier after the write": (r"bar\.sync\s+0;", "", 0, "wrote with no barrier between"),
    "no barrier before the next write": (r"bar\.sync\s+0;", "", -1, "read with no barrier between"),
    "unaligned load": (GLOBAL_LOAD, r"\1+2]", -1, "past a multiple of 4"),
    "load out of range": (GLOBAL_LOAD, r"\1+6000]", -1, "reads 4 bytes of global memory"),
    "store out of range": (
        r"(st\.global\.f32\s+\[%\w+)(?:\+-?\d+)?\]",
        r"\1+-6000]",
        0,
        "writes 4 bytes of global memory",
    ),
    "shared memory read unwritten": (r"st\.shared\.f64[^;]*;", "", 0, "reads shared memory that was never written"),
    "shared memory out of range": (
        r"(st\.shared\.f64\s+\[%\w+)(?:\+\d+)?\]",
        r"\1+320]",
        0,
        "of shared memory, of which",
    ),
    "a mask without its own lane": (r"(shfl\.sync\.up[^;]*, )%r\d+;", r"\g<1>65535;", 0, "mask"),
}


@pytest.mark.parametrize("pattern,replacement,which,says", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(gae_ptx, pattern, replacement, which, says):
    for order in range(3):
        assert says in run_gae(plant(gae_ptx, pattern, replacement, which), order=order)[0]


# ---- small kernels: waiting, and what an instruction computes

HEADER = ".version 9.0\n.target sm_90\n.address_size 64\n"


def entry(name, body):
    return f"""
.visible .entry {name}(.param .u64 {name}_param_0, .param .u64 {name}_param_1)
{{
.reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
.shared .align 16 .b8 {name}_words[512];
ld.param.u64 %rd1, [{name}_param_0]; ld.param.u64 %rd2, [{name}_param_1];
mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 16;
{body}
ret;
}}
"""


SHARE = "mov.u32 %r3, {name}_words; shl.b32 %r4, %r1, 2; add.s32 %r4, %r3, %r4; st.shared.u32 [%r4], %r1;"
WAITING = {
    "two_places": ("@%p1 bra $A; bar.sync 0; bra $B; $A: bar.sync 0; $B:", "waits for ever: thread 16 waits at"),
    "two_barriers": ("@%p1 bra $A; bar.sync 0; bra $B; $A: bar.sync 1; $B:", "waits for ever: thread 16 waits at"),
    "exited_lane": ("@!%p1 ret; shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;", "names lane 16 in its mask, which has ended"),
    "not_in_mask": ("shfl.sync.bfly.b32 %r2, %r1, 1, 31, 65535;", "is not in its own mask"),
    "from_outside": ("@!%p1 ret; shfl.sync.bfly.b32 %r2, %r1, 16, 31, 65535;", "which its mask does not name"),
    "race_in_a_warp": (SHARE + "ld.shared.u32 %r5, [%r3+8];", "reads shared memory that"),
    "never_written": ("ld.global.u32 %r5, [%rd2];", "reads global memory that was never written"),
    "two_blocks_write": ("st.global.u32 [%rd2], %r1; st.global.u32 [%rd2+4], %r1;", "that another block wrote"),
    "no_fence": ("mov.u32 %r5, %ctaid.x; setp.eq.u32 %p2, %r5, 0; @%p2 bra $W; ld.global.u32 %r6, [%rd2]; ret; "
                 "$W: st.global.u32 [%rd2], %r1;", "which has not fenced since"),
    "waits_for_nothing": ("$L: ld.volatile.global.u32 %r5, [%rd1]; setp.ne.u32 %p2, %r5, 77; @%p2 bra $L;", "for ever"),
}  # fmt: skip
CLEAN = {
    "half_mask": "@!%p1 ret; shfl.sync.bfly.b32 %r2, %r1, 8, 31, 65535;",
    "exchange_between": SHARE + "bar.warp.sync -1; ld.shared.u32 %r5, [%r3+8];",
    "ended_threads": "@!%p1 ret; bar.sync 0;",
    "neighbour_in_its_cluster": "mov.u32 %r3, neighbour_in_its_cluster_words; st.shared.u32 [%r3], %r1; "
    "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; mov.u32 %r5, %cluster_ctarank; xor.b32 %r5, %r5, 1; "
    "mapa.shared::cluster.u32 %r6, %r3, %r5; ld.shared::cluster.u32 %r7, [%r6]; "
    "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
}


@pytest.fixture(scope="module")
def small():
    bodies = {**{name: body for name, (body, _) in WAITING.items()}, **CLEAN, **instruction_bodies()}
    return Machine(HEADER + "".join(entry(name, body.replace("{name}", name)) for name, body in bodies.items()))


def launch_small(machine, name, order=0, given=(0,) * 4, threads=32, **sizes):
    first, second = machine.tensor(ctypes.c_uint64, given), machine.tensor(ctypes.c_uint64, [0] * 4, written=False)
    said = machine.launch(name, [pointer(first), pointer(second)], threads=threads, order=order, **sizes)
    return said, second[0]


@pytest.mark.parametrize("name", WAITING)
def test_threads_that_wait_or_race_wrongly_are_found(small, name):
    blocks = 2 if name in ("two_blocks_write", "no_fence") else 1
    for order in (0, 2) if name != "no_fence" else (0,):
        assert WAITING[name][1] in launch_small(small, name, order, blocks=blocks)[0]


@pytest.mark.parametrize("name", CLEAN)
def test_threads_that_wait_rightly_are_not_refused(small, name):
    threads, pair = (1, 2) if "cluster" in name else (32, 1)
    for order in range(3):
        assert not launch_small(small, name, order, threads=threads, blocks=2, cluster=pair)[0]


def f32(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


NAN = f32(math.nan)
# instruction, operands, result: by hand, or from the PTX manual
INSTRUCTIONS = [
    ("cvt.rn.bf16.f32 %rs1, %r2", (0x3F808000,), 0x3F80),  # halfway: to even
    ("cvt.rn.bf16.f32 %rs1, %r2", (0x3F818000,), 0x3F82),
    ("cvt.rn.bf16.f32 %rs1, %r2", (NAN,), 0x7FFF),
    ("cvt.rn.f16.f32 %rs1, %r2", (f32(65520.0),), 0x7C00),  # past the last number: infinity
    ("cvt.rn.bf16x2.f32 %r5, %r2, %r3", (f32(1.0), f32(2.0)), 0x3F804000),
    ("cvt.rzi.s32.f32 %r5, %r2", (f32(-2.7),), 0xFFFFFFFE),
    ("cvt.rni.s32.f32 %r5, %r2", (f32(2.5),), 2),
    ("cvt.rzi.u32.f32 %r5, %r2", (f32(-1.0),), 0),
    ("cvt.sat.f32.f32 %r5, %r2", (NAN,), 0),
    ("max.f32 %r5, %r2, %r3", (NAN, f32(1.0)), f32(1.0)),
    ("max.NaN.f32 %r5, %r2, %r3", (NAN, f32(1.0)), NAN),
    ("min.f32 %r5, %r2, %r3", (0, 0x80000000), 0x80000000),  # -0 is below 0
    ("max.bf16x2 %r5, %r2, %r3", (0x3F80C000, 0x40004000), 0x40004000),
    ("fma.rn.bf16x2 %r5, %r2, %r3, %r4", (0x3F804000, 0x40404040, 0x3F803F80), 0x408040E0),
    ("add.rn.f32 %r5, %r2, %r3", (f32(1.0), 0x33800000), f32(1.0)),  # half a unit: to even
    ("add.ftz.f32 %r5, %r2, %r3", (0x00400000, 0x00000000), 0),
    ("fma.rm.f32 %r5, %r2, %r3, %r4", (f32(1.0), f32(1.0), 0xB3000000), 0x3F7FFFFF),  # down, where rn gives 1
    ("mul.hi.u32 %r5, %r2, %r3", (0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFE),
    ("mad.lo.s32 %r5, %r2, %r3, %r4", (0x7FFFFFFF, 2, 3), 1),
    ("shl.b32 %r5, %r2, %r3", (1, 32), 0),
    ("shr.s32 %r5, %r2, %r3", (0x80000000, 99), 0xFFFFFFFF),
    ("shf.l.wrap.b32 %r5, %r2, %r3, %r4", (0x80000001, 0x2, 1), 0x5),
    ("prmt.b32 %r5, %r2, %r3, %r4", (0x33221180, 0x77665544, 0x8740), 0xFF774480),
    ("bfe.s32 %r5, %r2, 4, 4", (0x000000F0,), 0xFFFFFFFF),
    ("bfi.b32 %r5, %r2, %r3, 8, 8", (0xAB, 0x11111111), 0x1111AB11),
    ("lop3.b32 %r5, %r2, %r3, %r4, 0xE8", (0b1100, 0b1010, 0b0110), 0b1110),
    ("popc.b32 %r5, %r2", (0xF0F0,), 8),
    ("clz.b32 %r5, %r2", (0x00010000,), 15),
    ("setp.neu.f32 %p2, %r2, %r3; selp.b32 %r5, 1, 0, %p2", (NAN, NAN), 1),
    ("setp.ne.f32 %p2, %r2, %r3; selp.b32 %r5, 1, 0, %p2", (NAN, NAN), 0),
    ("setp.lt.s32 %p2, %r2, %r3; selp.b32 %r5, 1, 0, %p2", (0xFFFFFFFF, 0), 1),
    ("setp.lo.u32 %p2, %r2, %r3; selp.b32 %r5, 1, 0, %p2", (0xFFFFFFFF, 0), 0),
    ("mov.b32 {%rs1, %rs2}, %r2; mov.b32 %r5, {%rs2, %rs1}", (0x12345678,), 0x56781234),
    ("vote.sync.ballot.b32 %r5, %p1, -1", (), 0xFFFF),
    ("ex2.approx.ftz.f32 %r5, %r2", (f32(-127.0),), 0),
    ("atom.global.add.u32 %r5, [%rd1], 5", (7,), 7 + 31 * 5),
]


def instruction_bodies():
    """Operands are words of the first tensor; every lane computes, and the last one writes."""
    loads = "".join(f"ld.global.u32 %r{k + 2}, [%rd1+{8 * k}]; " for k in range(3))
    bodies = {}
    for i, (code, _, _) in enumerate(INSTRUCTIONS):
        widen = "cvt.u32.u16 %r5, %rs1; " if code.startswith("cvt") and "%rs1" in code else ""
        bodies[f"instruction_{i}"] = (
            f"{loads}{code}; {widen}setp.ne.u32 %p3, %r1, 31; @%p3 ret; st.global.u32 [%rd2], %r5;"
        )
    return bodies


@pytest.mark.parametrize("i", range(len(INSTRUCTIONS)), ids=[code for code, _, _ in INSTRUCTIONS])
def test_an_instruction_computes_what_the_manual_says(small, i):
    _, operands, expected = INSTRUCTIONS[i]
    said, found = launch_small(small, f"instruction_{i}", given=(*operands, *(0,) * (4 - len(operands))))
    assert not said and found & 0xFFFFFFFF == expected


def test_what_is_not_known_is_refused_by_name():
    for code in ("wgmma.fence.sync.aligned;", "add.rz.f32 %r1, %r1, %r1;", "cvt.rn.tf32.f32 %r1, %r1;"):
        with pytest.raises(Unsupported, match=re.escape(code.split()[0].rstrip(";"))):
            translate(HEADER + entry("one", code))
