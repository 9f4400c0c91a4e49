"""nvcc's PTX of every kernel, run on the CPU by csrc/emulation: tests/gpu as they are, and what must be found."""

import ctypes
import functools
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
from megatron_rl.ops import PpoOptions

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(bool(emulated.missing()), reason=emulated.missing())


LARGE_VOCABULARIES = "128256 or 151936 or 262144"
LARGE = (
    f"{LARGE_VOCABULARIES} or (rows_a_block_has and long) or (advantage and hundred and 0.01)"
    " or (same_bits_alone and 20000 and float32)"
)
"""They take the way of a vocabulary of two tiles, of blocks of two rounds and of a split that another case has, for
half of the time."""


@pytest.mark.slow
@pytest.mark.parametrize("cases", [f"not ({LARGE})", pytest.param(LARGE, marks=pytest.mark.thorough)])
def test_every_case_of_tests_gpu_passes_on_the_compiled_kernels(cases):
    files = [f"tests/gpu/test_{name}_cuda.py" for name in ("kernels", "operators", "publish")]
    command = [sys.executable, "-m", "pytest", "-p", "tests.emulated_device", *files]
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", cases]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed, done.stdout[-8000:] + done.stderr[-4000:]
    assert int(passed[1]) >= (12 if cases == LARGE else 100)


# ---- faults planted in the PTX of the kernels


GUARD = 1 << 16
"""Bytes before and behind each tensor that are no tensor's: an address that is a little out of range is in none."""
FRAMES = []
"""Never freed: a machine still knows of them."""
F32, I64 = ctypes.c_float, ctypes.c_int64


class Machine:
    """The kernels of a PTX text. Tensors are ctypes arrays that the machine knows of."""

    def __init__(self, ptx):
        self.library = ctypes.CDLL(str(emulated.program(ptx)))
        self.library.emulation_launch.restype = ctypes.c_char_p
        self.entry = re.search(r"\.entry\s+(\w+)", ptx)[1]
        self.launches = 0

    def tensor(self, kind, values, written=True):
        shape = kind * len(values)
        FRAMES.append((ctypes.c_char * (ctypes.sizeof(shape) + 2 * GUARD))())
        array = shape.from_buffer(FRAMES[-1], GUARD)
        array[:] = values
        bytes_ = ctypes.c_size_t(ctypes.sizeof(array))
        self.library.emulation_add_memory(ctypes.byref(array), bytes_, ctypes.c_int(written))
        return array

    def scratch(self, kind, count):
        return self.tensor(kind, [0] * count, written=False)

    def slot(self):
        """An argument of two sweeps: counters that no launch has used, for one that failed leaves them as they are."""
        self.launches += 1
        return struct.pack("<I", self.launches)

    def launch(self, kernel, parameters, blocks=1, threads=32, cluster=1, order=0, rows=1):
        """What is wrong, as text; empty where nothing is."""
        self.library.emulation_set_order(ctypes.c_uint64(order))
        buffers = [ctypes.create_string_buffer(value, len(value)) for value in parameters]
        pointers = (ctypes.c_char_p * len(buffers))(*(ctypes.addressof(buffer) for buffer in buffers))
        said = self.library.emulation_launch(kernel.encode(), blocks, rows, threads, cluster, pointers)
        return (said or b"").decode()


def address(array):
    return ctypes.addressof(array) if array is not None else 0


def pointer(array, offset=0):
    return struct.pack("<Q", address(array) + offset)


def pointers(*arrays):
    return b"".join(map(pointer, arrays))


def waves(count, k=1):
    return [math.sin(k * i) for i in range(count)]


def run_gae(machine, fault, order, bounds=(0, 1024, 2500)):
    """In three tiles, of which the first ends as a sequence does: it needs nothing of the others."""
    tokens = bounds[-1]
    columns = [machine.tensor(F32, waves(tokens)) for _ in range(2)]
    columns += [machine.tensor(ctypes.c_bool, [True] * tokens), machine.tensor(I64, bounds)]
    given = struct.pack("<qq", tokens, len(bounds) - 1) + pointers(*columns, None) + struct.pack("<dd", 0.97, 0.9)
    tiles = -(-tokens // 1024)
    maps, *results = machine.scratch(ctypes.c_double, 2 * tiles), *(machine.scratch(F32, tokens) for _ in range(2))
    arguments = [given, struct.pack("<q", tiles), pointer(maps), machine.slot(), *map(pointer, results), fault]
    return machine.launch(machine.entry, arguments, blocks=2 * tiles, threads=256, order=order), list(results[0])


def run_ppo(machine, fault, order, bounds=(0, 520, 520, 521, 621)):
    """By sequence: of 520 tokens, none, one and 100, in 2 + 4 pieces."""
    tokens, pieces = bounds[-1], bounds[-1] // 256 + len(bounds) - 1
    own, proximal, advantages = (machine.tensor(F32, waves(tokens, k)) for k in (1, 2, 3))
    columns = pointers(own, proximal, None, advantages, own, None, None)
    trained = machine.tensor(ctypes.c_bool, [i % 3 > 0 for i in range(tokens)])
    options = struct.pack("<16d", *PpoOptions(sequence_ratio=True).packed(1.0))
    results = [machine.scratch(F32, tokens) for _ in range(2)]
    columns += pointers(trained, machine.tensor(I64, bounds))
    given = struct.pack("<q", tokens) + columns + options + pointers(*results)
    scratch, loss, sums = (machine.scratch(*of) for of in ((F32, pieces * 24), (F32, 1), (ctypes.c_double, 20)))
    counts = [struct.pack("<q", n) for n in (len(bounds) - 1, pieces)]
    arguments = [given, *counts, pointer(scratch), machine.slot(), pointer(loss), pointer(sums), fault]
    return machine.launch(machine.entry, arguments, blocks=2 * pieces, threads=256, order=order), [*results[0], *sums]


run_short_ppo = functools.partial(run_ppo, bounds=(0, 100, 100, 300, 556))
"""No sequence has two pieces: the second sweep waits for nobody, and any block may be the last."""


FAR = (1 << 31) + 64
"""A row's stride: the elements of row 1 lie past what 32 bits can say. Row 0 has no label, and is nowhere."""
WIDTH = 8200  # two tiles, of five warps


def rows_of_logits(machine):
    """The logits' address and their LogitRows."""
    row, labels = machine.tensor(F32, waves(WIDTH)), machine.tensor(I64, [-100, 8195])
    return pointer(row, -4 * FAR), struct.pack("<qqiiqQf4xQ", 2, FAR, WIDTH, WIDTH, 0, address(labels), 0.7, 0)


def run_partials(machine, fault, order):
    found = machine.scratch(F32, 2 * 2 * 4)
    arguments = [*rows_of_logits(machine), pointer(found), fault]
    return machine.launch(machine.entry, arguments, blocks=2, rows=2, threads=160, order=order), list(found)


def run_gradient(machine, fault, order):
    logits, rows = rows_of_logits(machine)
    columns = [machine.tensor(F32, [0.0, value]) for value in (1.0, 8.0, 8.0, 0.5)]
    out, given = machine.scratch(F32, 2 * WIDTH), pointers(*columns, None) + struct.pack("<q", WIDTH)
    arguments = [logits, pointer(out), rows, given, fault]
    return machine.launch(machine.entry, arguments, blocks=2, rows=2, threads=160, order=order), list(out)


def moved(opcode, by):
    """(pattern, replacement): such a statement with its address moved by so many bytes."""
    return rf"({opcode}\s+[^;]*\[%\w+)(?:\+-?\d+)?\]([^;]*;)", rf"\1+{by}]\2"


RACE = r"shared memory that (thread \d+ (wrote|read) with no barrier between|was never written)"
NEVER = "reads shared memory that was never written"
BARRIER, SHUFFLE = r"bar\.sync\s+0;", r"(shfl\.sync\.\w+[^;]*, )%r\d+;"
RELEASE, ACQUIRE, WAIT = r"atom\.acq_rel(\.[^;]*;)", r"ld\.acquire(\.[^;]*;)", r"ld\.acquire\.[^;]* (%rd\d+), [^;]*;"
IN_32_BITS = r"(mul\.lo\.s64\s+(%rd\d+), %rd\d+, %rd\d+;)", r"\1 shl.b64 \2, \2, 32; shr.s64 \2, \2, 32;"
SWEEPS = {
    "what is left is not released": (RELEASE, r"atom.relaxed\1", -2, "which has not fenced since"),
    "what is left is not acquired": (ACQUIRE, r"ld.relaxed\1", 0, "without a fence of its own before"),
    "no wait for the first sweep": (
        WAIT,
        r"mov.u64 \1, 0xffffffff00000000;",
        0,
        "that was never written|without a fence of its own before",
    ),
}
# kernel: what runs it, its entry, and its faults: what is replaced by what, which match of it, what is said
PLANTED = {
    "gae": (run_gae, "gae_kernel", {
        "no barrier after the write": (BARRIER, "", 1, RACE),
        "no barrier before the maps are read": (BARRIER, "", -1, RACE),
        "unaligned load": (*moved(r"ld\.global\.f32", 2), 0, "past a multiple of 4"),
        "load out of range": (*moved(r"ld\.global\.f32", 6000), 1, "reads 4 bytes of global memory"),
        "store out of range": (*moved(r"st\.global\.f32", -6000), -1, "writes 4 bytes of global memory"),
        "shared memory read unwritten": (r"st\.shared\.f64[^;]*;", "", 0, NEVER),
        "shared memory out of range": (*moved(r"st\.shared\.f64", 6000), 1, "of shared memory, of which"),
        "a mask without its own lane": (SHUFFLE, r"\g<1>65535;", 0, "mask"),
        **SWEEPS,
    }),
    "ppo": (run_ppo, "ppo_kernelILb1", {
        "no barrier before the means are read": (BARRIER, "", 4, RACE),
        "no barrier before the sums are read": (BARRIER, "", 5, RACE),
        "no barrier before the statistics are read": (BARRIER, "", -1, RACE),
        "unaligned load": (*moved(r"ld\.global\.f32", 2), 0, "past a multiple of 4"),
        "unaligned store of a vector": (*moved(r"st\.global\.v4\.f32", 8), 0, "past a multiple of 16"),
        "load out of range": (*moved(r"ld\.global\.f32", 6000), 1, "reads 4 bytes of global memory"),
        "mask out of range": (*moved(r"ld\.global\.u8", 6000), 0, "reads 1 bytes of global memory"),
        "store out of range": (*moved(r"st\.global\.f32", 6000), 1, "writes 4 bytes of global memory"),
        "shared memory read unwritten": (r"st\.shared\.f32[^;]*;", "", 0, NEVER),
        "a mask without its own lane": (SHUFFLE, r"\g<1>65535;", -1, "mask"),
        **SWEEPS,
    }),
    "short ppo": (run_short_ppo, "ppo_kernelILb1", {}),
    "partials": (run_partials, "partials_kernelIfLb1ELb1", {
        "no barrier before the warps are merged": (BARRIER, "", 0, RACE),
        "unaligned load": (*moved(r"ld\.global\.v4\.u32", 4), 0, "past a multiple of 16"),
        "load out of range": (*moved(r"ld\.global\.v4\.u32", 40000), 1, "reads 16 bytes of global memory"),
        "a row's place in 32 bits": (*IN_32_BITS, 0, "far from any tensor"),
        "shared memory read unwritten": (r"st\.shared\.f32[^;]*;", "", 0, NEVER),
        "a mask without its own lane": (SHUFFLE, r"\g<1>65535;", 0, "mask"),
    }),
    "gradient": (run_gradient, "gradient_kernelIffLb1ELb0", {
        "unaligned load": (*moved(r"ld\.global\.v4\.u32", 4), 0, "past a multiple of 16"),
        "unaligned store": (*moved(r"st\.global\.v4\.f32", 8), 0, "past a multiple of 16"),
        "a row's place in 32 bits": (*IN_32_BITS, 0, "far from any tensor"),
        "store out of range": (*moved(r"st\.global\.v4\.f32", 40000), 1, "writes 16 bytes of global memory"),
    }),
}  # fmt: skip
SOURCES = {"gae": "gae", "ppo": "ppo", "short ppo": "ppo", "partials": "logprobs", "gradient": "logprobs"}


def only(ptx, name):
    """A module with that kernel alone."""
    head, *entries = re.split(r"^(?=(?:\.visible )?\.entry )", ptx, flags=re.MULTILINE)
    (entry,) = [entry for entry in entries if name in entry.partition("(")[0]]
    files = re.search(r"^\s*\.file.*", entries[-1], flags=re.MULTILINE | re.DOTALL)[0]
    return head + entry.partition("\n\t.file")[0] + "\n" + files


def with_faults(ptx, faults):
    """One program for all: a parameter more says which fault a launch commits, from 1 on; 0 is none."""
    name, count = re.search(r"\.entry\s+(\w+)", ptx)[1], len(faults) + 1
    begin = [
        f".reg .pred %fault<{count}>; .reg .pred %wrong<{count}>; .reg .b32 %fault;",
        f"ld.param.u32 %fault, [{name}_fault];",
    ]
    wrong = {}
    for number, (pattern, replacement, which, _) in enumerate(faults, 1):
        match = list(re.finditer(pattern, ptx))[which]
        begin.append(f"setp.eq.s32 %fault{number}, %fault, {number};")
        wrong.setdefault((match.span(), match[0]), []).append((number, match.expand(replacement).split(";")[:-1]))
    for ((start, end), right), instead in sorted(wrong.items(), reverse=True):
        (first, _), *others = instead
        begin.append(f"mov.pred %wrong{first}, %fault{first};")
        begin += [f"or.pred %wrong{first}, %wrong{first}, %fault{number};" for number, _ in others]
        steps = [f"@%fault{number} {step};" for number, texts in instead for step in texts]
        ptx = ptx[:start] + " ".join([f"@!%wrong{first} {right}", *steps]) + ptx[end:]
    head, mark, entry = ptx.partition(f".entry {name}")
    entry = entry.replace("\n)", f",\n.param .u32 {name}_fault\n)", 1)
    return head + mark + entry.replace("\n{\n", "\n{\n" + "\n".join(begin) + "\n", 1)


def marks_of(kernel):
    """The first and the last have faults of all kinds: two sweeps, shared memory, and rows of vectors far away."""
    is_kept = kernel in ("gae", "short ppo", "gradient")
    return [pytest.mark.slow] if is_kept else [pytest.mark.slow, pytest.mark.thorough]


@functools.cache
def planted(kernel):
    run, name, faults = PLANTED[kernel]
    ptx = (emulated.compile_kernel(ROOT / "csrc" / "kernels" / f"{SOURCES[kernel]}.cu") / "kernel.ptx").read_text()
    machine = Machine(with_faults(only(ptx, name), faults.values()))
    return lambda fault, order: run(machine, struct.pack("<I", fault), order)


@pytest.mark.parametrize("kernel", [pytest.param(kernel, marks=marks_of(kernel)) for kernel in PLANTED])
def test_a_kernel_without_its_faults_is_clean_and_gives_the_same_bits_in_every_order(kernel):
    (said, first), *others = (planted(kernel)(0, order) for order in range(9))
    assert not said and all(other == ("", first) for other in others)


@pytest.mark.slow
def test_the_advantage_kernel_alone_gives_what_its_definition_does():
    found, state = planted("gae")(0, 0)[1], 0.0
    for i in reversed(range(2500)):
        is_last = i in (1023, 2499)
        value, later, state = math.sin(i), 0.0 if is_last else math.sin(i + 1), 0.0 if is_last else state
        state = value + 0.97 * later - value + 0.97 * 0.9 * state
        assert found[i] == pytest.approx(state, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    "kernel,fault",
    [pytest.param(k, f, id=f"{k}, {f}", marks=marks_of(k)) for k, (_, _, faults) in PLANTED.items() for f in faults],
)
def test_a_planted_fault_is_found(kernel, fault):
    faults = PLANTED[kernel][2]
    # where blocks run one after another, those of the first sweep have always left what the second needs
    for order in (2, 3, 4) if fault in SWEEPS else range(3):
        assert re.search(faults[fault][3], planted(kernel)(list(faults).index(fault) + 1, order)[0])


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


@pytest.mark.slow
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
