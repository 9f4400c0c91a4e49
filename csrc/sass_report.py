"""Predict the speed of the kernels on GPUs from the machine code that ptxas made. Needs no GPU.

Log-probability kernels are predicted as a share of the copy bandwidth. Of all paths through a kernel that load a given
number of 16-byte pieces and take an exponential of each number in them, the model uses the one with the fewest
instructions. Checksums take no exponentials, and the checksum that sums words runs a loop.

The model is a closed queueing network of one multiprocessor. Its customers are the resident blocks, as many as
registers and warps allow. Each block visits three stations in turn:

- Memory: the block's bytes at the bandwidth of a copy.
- Issue: the busiest of the schedulers and of the pipes in RATES. Each quarter of the multiprocessor issues one warp
  instruction per clock, and 92 % of these slots are usable.
- Delay: the latency (LATENCY) of one warp alone. Its path is the shortest that also stores a result, because a block
  ends with its last warp. Other resident blocks work during the delay, so enough of them hide it (Little's law).

Service times are constant, so a block that finds another one in service waits half of that one's time on average. Mean
value analysis with this correction gives the throughput. A launch also takes the delay and the issue of one block, to
fill and drain the queue.

The policy loss and the advantages are predicted in microseconds. Their path is the longest one, with every option on,
but without rare instructions. Each loop runs once, except the search among many sequences and the addition of many
pieces, whose rounds are counted. The queue is the same, with as many blocks as one multiprocessor gets. If there are
fewer blocks than multiprocessors, each block gets more bandwidth, up to 64 bytes per clock. The delay is that of the
block that finishes last and adds up the results of all blocks. If a kernel has two sweeps, the blocks of both start
together, and the second sweep continues after the first is done. If the blocks of both sweeps cannot be resident at
once, the second sweep starts from its beginning. A launch also takes LAUNCH_SECONDS.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

WARP, QUARTERS, WARPS_RESIDENT, BLOCKS_RESIDENT, REGISTERS = 32, 4, 64, 32, 65536
BLOCK_WARPS, PIECES = 8, 8
SLICE_BYTES = WARP * PIECES * 16
TILE_BYTES = BLOCK_WARPS * SLICE_BYTES
"""SLICE_BYTES: bytes of one warp. TILE_BYTES: maximum bytes of one block. Both as in csrc/kernels/logprobs.cu."""

USABLE_SLOTS = 0.92
BLOCK_START_CLOCKS = 200
FINISH_SECONDS = LAUNCH_SECONDS = 2.0e-6
"""LAUNCH_SECONDS: gap between two kernels of a stream.

FINISH_SECONDS: time of finish_kernel, which follows partials_kernel, including that gap.
"""


@dataclass(frozen=True)
class Device:
    """Sizes and rates of a GPU. The bandwidth is what a copy reaches, not the data sheet's."""

    architecture: str
    multiprocessors: int
    clock: float
    copy_bandwidth: float

    @property
    def bytes_per_clock(self) -> float:
        return self.copy_bandwidth / self.clock / self.multiprocessors


DEVICES = {
    "A100": Device("sm_80", 108, 1.41e9, 1.75e12),
    "H100": Device("sm_90a", 132, 1.755e9, 3.0e12),
    "H200": Device("sm_90a", 132, 1.755e9, 4.3e12),
    "B200": Device("sm_100", 148, 1.85e9, 7.0e12),
}

PIPES = {
    "fma": "FADD FMUL FFMA FADD2 FMUL2 FFMA2 HADD2 HMUL2 HFMA2",
    "imad": "IMAD",
    "alu": "FMNMX FMNMX3 FSEL FSETP FSET ISETP LOP3 SHF IADD3 VIADD VIADDMNMX LEA PRMT SEL MOV F2FP HMNMX2 VHMNMX "
    "HSETP2 PLOP3 VIMNMX VIMNMX3 IABS POPC FLO IMNMX P2R R2P CS2R I2FP VOTE",
    "fp64": "DADD DMUL DFMA DSETP",
    "mufu": "MUFU",
    "conversion": "F2F F2I I2F FCHK",
    "lsu": "LDG STG LD ST LDS STS SHFL ATOM ATOMG RED REDG REDUX",
    "uniform": "R2UR S2R S2UR LDC UMOV ULDC LDCU UIADD3 UIMAD ULEA USHF ULOP3 USEL UISETP UPLOP3 UFSETP UFSEL UFMUL "
    "UFADD VOTEU UP2UR",
    "control": "BRA BSSY BSYNC EXIT NOP BAR CALL RET MEMBAR ERRBAR CCTL CGAERRBAR YIELD WARPSYNC LEPC ENDCOLLECTIVE",
}
PIPE_OF = {opcode: pipe for pipe, opcodes in PIPES.items() for opcode in opcodes.split()}

RATES = {"fma": 128, "imad": 64, "alu": 64, "fp64": 64, "mufu": 16, "lsu": 32}
"""Threads per clock on one multiprocessor. Conversions share the pipe of mufu; other pipes cost only issue slots."""
RATES_OF = {"sm_80": RATES | {"fma": 64, "fp64": 32}, "sm_90a": RATES, "sm_100": RATES}

LATENCY = {
    "fma": 5, "imad": 5, "alu": 5, "fp64": 9, "mufu": 20, "conversion": 20, "lsu": 30, "uniform": 12, "control": 1,
}  # fmt: skip
DRAM_CLOCKS, CACHE_CLOCKS, BARRIER_CLOCKS, FENCE_CLOCKS = 650, 280, 30, 500
"""Clocks of a load from memory, a load from the cache, a barrier and a fence.

16-byte loads come from memory. Narrower loads come from the cache, because other blocks have fetched that row. In the
policy loss and the advantages, narrower loads come from memory too, except loads of other blocks' results. A fence
waits until the stores of its block have arrived.
"""

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?(U?P[\dT]))?\s*([A-Z][\w.]*)\s*(.*?)\s*;")
LABEL = re.compile(r"(\.L_x_\d+)")


@dataclass(frozen=True)
class Instruction:
    opcode: str  # with its suffixes
    guard: str | None
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def pipe(self) -> str:
        if self.name not in PIPE_OF:
            raise ValueError(f"{self.name}: its pipe is not known; add it to PIPES in csrc/sass_report.py")
        return PIPE_OF[self.name]

    @property
    def loads_piece(self) -> bool:
        return self.name == "LDG" and ".128" in self.opcode

    @property
    def is_exponential(self) -> bool:
        return self.opcode == "MUFU.EX2"

    @property
    def is_conditional(self) -> bool:
        return self.guard is not None or (self.name == "BRA" and "," in self.operands)

    @property
    def turns(self) -> int:
        """How often the instruction passes through its pipe. The load-store unit moves 4 bytes per thread at a time."""
        return 4 if self.pipe == "lsu" and ".128" in self.opcode else 1

    @property
    def latency(self) -> int:
        if self.name in ("LDG", "LD", "ATOMG", "ATOM"):
            return DRAM_CLOCKS if self.loads_piece and self.loads_column else CACHE_CLOCKS
        return BARRIER_CLOCKS if self.name == "BAR" else LATENCY[self.pipe]

    @property
    def loads_column(self) -> bool:
        """True if it loads an input of the launch. Strong loads read what other blocks of the launch have written."""
        return self.name == "LDG" and ".STRONG" not in self.opcode

    @cached_property
    def registers(self) -> tuple[list[str], list[str]]:
        """Names of the registers that are written and of those that are read, including predicates."""
        parts = [part.strip() for part in self.operands.split(",")]
        predicate = len(parts) > 1 and any(re.fullmatch(r"U?P[\dT]", part) for part in parts[:2])
        targets = 2 if predicate else 1  # as in `IADD3 R5, P0, R6, R7` and `SHFL.BFLY PT, R5, R6, 0x1`
        if self.pipe == "control" or self.name in ("STG", "ST", "STS", "RED", "REDG"):
            targets = 0
        is_pair = ".64" in self.opcode or ".WIDE" in self.opcode or self.pipe == "fp64"
        written = [r for part in parts[:targets] for r in adjacent(part, 4 if ".128" in self.opcode else 1 + is_pair)]
        read = [r for part in parts[targets:] for r in adjacent(part, 1 + (".64" in part))]
        return written, read + ([self.guard] if self.guard else [])


def adjacent(operand: str, width: int) -> Iterator[str]:
    for kind, number in re.findall(r"\b(U?[RP])(\d+)", operand):
        yield from (f"{kind}{int(number) + i}" for i in range(width if kind in ("R", "UR") else 1))


@dataclass
class Block:
    """A basic block: instructions that run in sequence, and the numbers of the blocks that may follow."""

    instructions: list[Instruction]
    following: list[int]


def kernels_in(disassembly: str) -> dict[str, list[Block]]:
    """Parse the output of `nvdisasm -c` into `{readable kernel name: blocks}`."""
    sections = re.split(r"\.section\s+\.text\.", disassembly)[1:]
    mangled = "\n".join(section.partition(",")[0] for section in sections)
    readable = subprocess.run(
        ["c++filt"], input=mangled, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    names = [name.partition("::")[2].partition("(")[0] for name in readable]
    return {name: blocks_of(section) for name, section in zip(names, sections, strict=True)}


def blocks_of(section: str) -> list[Block]:
    blocks, numbers = [Block([], [])], {}
    for line in section.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            blocks.append(Block([], []))
            numbers[label[1]] = len(blocks) - 1
        elif found := INSTRUCTION.search(line):
            blocks[-1].instructions.append(Instruction(found[2], found[1], found[3]))
            if blocks[-1].instructions[-1].name in ("BRA", "EXIT", "RET"):
                blocks.append(Block([], []))
    for number, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else None
        if last is not None and last.name == "BRA" and (label := LABEL.search(last.operands)):
            block.following.append(numbers[label[1]])
        ends = last is not None and last.name in ("BRA", "EXIT", "RET") and not last.is_conditional
        if not ends and number + 1 < len(blocks):
            block.following.append(number + 1)
    return blocks


def in_order(blocks: list[Block]) -> tuple[list[int], set[tuple[int, int]]]:
    """Return the block numbers in topological order, and the edges that close a loop, which the order ignores."""
    order: list[int] = []
    closing: set[tuple[int, int]] = set()
    state: dict[int, str] = {0: "open"}
    stack = [(0, iter(blocks[0].following))]
    while stack:
        number, rest = stack[-1]
        for after in rest:
            if state.get(after) == "open":
                closing.add((number, after))
            elif after not in state:
                state[after] = "open"
                stack.append((after, iter(blocks[after].following)))
                break
        else:
            state[number] = "done"
            order.append(number)
            stack.pop()
    return order[::-1], closing


Done = tuple[int, int, int, bool]
"""State of a partial path: 16-byte loads, exponentials, shuffles, and whether it has stored to global memory."""
Way = tuple[int, int, Done]
"""A partial path: number of instructions, the previous block, and the state on entering that block."""


def paths(blocks: list[Block], exponentials: int, must_store: bool, shuffles: int = 0) -> dict[int, list[Instruction]]:
    """Return the shortest path for each number of 16-byte loads.

    A path has at least `exponentials` exponentials and `shuffles` shuffles per load and, if must_store, a store to
    global memory.
    """
    most, moved = PIECES * exponentials, PIECES * shuffles
    order, closing = in_order(blocks)
    ways: dict[int, dict[Done, Way]] = {number: {} for number in order}
    ways[0][0, 0, 0, False] = (0, -1, (0, 0, 0, False))
    ends: dict[int, Way] = {}
    for number in order:
        block = blocks[number]
        loads = sum(i.loads_piece for i in block.instructions)
        powers = sum(i.is_exponential for i in block.instructions)
        moves = sum(i.name == "SHFL" for i in block.instructions)
        stores = any(i.name in ("STG", "RED", "REDG") for i in block.instructions)
        may_end = bool(block.instructions) and block.instructions[-1].name == "EXIT"
        for key, (length, _, _) in ways[number].items():
            done = (key[0] + loads, min(most, key[1] + powers), min(moved, key[2] + moves), key[3] or stores)
            way = (length + len(block.instructions), number, key)
            for following in block.following:
                if (number, following) not in closing and done[0] <= PIECES:
                    ways[following][done] = min(ways[following].get(done, way), way)
            enough = done[1] >= done[0] * exponentials and done[2] >= done[0] * shuffles and done[3] >= must_store
            if may_end and enough:
                ends[done[0]] = min(ends.get(done[0], way), way)
    found = {}
    for loads, (_, number, key) in ends.items():
        parts = []
        while number >= 0:
            parts.append(blocks[number].instructions)
            _, number, key = ways[number][key]
        found[loads] = [i for part in reversed(parts) for i in part]
    return found


def longest(blocks: list[Block], through: str, around: str, start: int = 0, end: int = -1) -> list[Instruction]:
    """Return the longest path with an instruction that matches `through` and none that matches `around`.

    It runs each loop once. start, end: first and last block; end -1 is the kernel's end. Raises ValueError if there is
    no such path.
    """
    order, closing = in_order(blocks)
    ways: dict[tuple[int, bool], tuple[int, list[int]]] = {(start, False): (0, [])}
    best: tuple[int, list[int]] = (0, [])
    for number in order:
        instructions = blocks[number].instructions
        if any(re.match(around, i.opcode) for i in instructions):
            continue
        meets = any(re.match(through, i.opcode) for i in instructions)
        for met in (False, True):
            if (number, met) not in ways:
                continue
            length, way = ways[number, met]
            longer = (length + len(instructions), [*way, number])
            ends = number == end or (end < 0 and bool(instructions) and instructions[-1].name == "EXIT")
            if ends and (met or meets):
                best = max(best, longer)
            for following in blocks[number].following:
                if (number, following) not in closing:
                    key = (following, met or meets)
                    ways[key] = max(ways.get(key, longer), longer)
    if not best[1]:
        raise ValueError(f"no way meets an instruction like {through} and none like {around}")
    return [i for number in best[1] for i in blocks[number].instructions]


def round_of_loop(blocks: list[Block], through: str) -> list[Instruction]:
    """Return one round of the shortest loop with an instruction that matches `through`, by the loop's longest path."""
    rounds = []
    for last, first in in_order(blocks)[1]:
        try:
            rounds.append(longest(blocks, through, NOTHING, first, last))
        except ValueError:
            continue
    return min(rounds, key=len)


def clocks_alone(path: list[Instruction], column_clocks: int = CACHE_CLOCKS) -> int:
    """Return the clocks of one warp alone. It issues in order, and waits for the registers that an instruction reads.

    column_clocks: minimum latency of loads of the launch's inputs.
    """
    ready: Counter[str] = Counter()
    clock = 0
    for instruction in path:
        written, read = instruction.registers
        clock = max([clock + 1, *(ready[register] for register in read)])
        latency = max(instruction.latency, column_clocks) if instruction.loads_column else instruction.latency
        ready.update({register: clock + latency - ready[register] for register in written})
        clock += {"BAR": BARRIER_CLOCKS, "MEMBAR": FENCE_CLOCKS}.get(instruction.name, 0)
    return clock


def pipes_used(path: list[Instruction]) -> dict[str, int]:
    counts = Counter(instruction.pipe for instruction in path)
    return {pipe: counts[pipe] for pipe in PIPES if counts[pipe]}


def issue_clocks(path: list[Instruction], architecture: str, warps: int = BLOCK_WARPS) -> float:
    """Return the clocks for which one block keeps the busiest scheduler or pipe busy.

    Its warps are spread evenly over the quarters of the multiprocessor.
    """
    turns: Counter[str] = Counter()
    for instruction in path:
        turns["mufu" if instruction.pipe == "conversion" else instruction.pipe] += instruction.turns
    of_pipes = [turns[pipe] * warps * WARP / rate for pipe, rate in RATES_OF[architecture].items()]
    return max(len(path) * warps / QUARTERS / USABLE_SLOTS, *of_pipes)


def blocks_resident(registers: int, warps: int = BLOCK_WARPS) -> int:
    """Return how many blocks of `warps` warps one multiprocessor holds.

    registers: per thread. A quarter of the multiprocessor allocates registers to its warps in units of 256.
    """
    of_warp = -(-registers * WARP // 256) * 256
    return min(min(REGISTERS // QUARTERS // of_warp * QUARTERS, WARPS_RESIDENT) // warps, BLOCKS_RESIDENT)


def blocks_per_clock(resident: int, services: tuple[float, float], delay: float) -> float:
    """Return the throughput of the closed queue, by mean value analysis, which adds one customer at a time.

    resident: number of blocks. services: clocks of a block at the memory and issue stations.
    """
    waiting, busy, rate = [0.0, 0.0], [0.0, 0.0], 0.0
    for customers in range(1, resident + 1):
        times = [s * (1 + w - b / 2) for s, w, b in zip(services, waiting, busy, strict=True)]
        rate = min(customers / (delay + sum(times)), 1 / max(services))
        waiting, busy = [rate * t for t in times], [rate * s for s in services]
    return rate


@dataclass(frozen=True)
class Kernel:
    """A kernel that streams over rows. A lane loads 16 bytes at a time, a warp a slice of a row, and a block a tile."""

    registers: int
    paths: dict[int, list[Instruction]]  # number of 16-byte loads -> path of most warps
    storing: dict[int, list[Instruction]]  # the same, of a block's last warp
    moves: float  # memory traffic per byte of the tile: 1 if read, 2 if also written, 1.5 if written with half the bits

    @cached_property
    def issue(self) -> Callable[[int, str], float]:
        """Function (number of 16-byte loads, architecture) -> issue clocks of one warp."""
        return cache(lambda loads, architecture: issue_clocks(self.paths[loads], architecture, 1))

    @cached_property
    def delays(self) -> dict[int, int]:
        return {n: clocks_alone(path) - len(path) + BLOCK_START_CLOCKS for n, path in self.storing.items()}

    def tile(self, size: int, warps: int, device: Device) -> tuple[float, float, float]:
        """Return the clocks (memory, issue, delay) of a block with `size` bytes and `warps` warps, full ones first."""
        full, rest = divmod(size, SLICE_BYTES)
        wanted = [PIECES] * full + [-(-rest * PIECES // SLICE_BYTES)] * (rest > 0)
        loads = [min(n for n in self.paths if n >= want) for want in [*wanted, *[0] * (warps - len(wanted))]]
        memory = size * self.moves / device.bytes_per_clock
        return memory, sum(self.issue(n, device.architecture) for n in loads), self.delays[max(loads)]

    def seconds(self, rows: int, row_bytes: int, device: Device) -> float:
        count = -(-row_bytes // TILE_BYTES)
        warps = -(-row_bytes // (count * SLICE_BYTES))
        sizes = [min(warps * SLICE_BYTES, row_bytes - i * warps * SLICE_BYTES) for i in range(count)]
        tiles = [self.tile(size, warps, device) for size in sizes]
        memory, issue, delay = (sum(column) / count for column in zip(*tiles, strict=True))
        rate = blocks_per_clock(blocks_resident(self.registers, warps), (memory, issue), delay)
        return (rows * count / device.multiprocessors / rate + delay + issue) / device.clock

    def described(self, architecture: str) -> dict[str, object]:
        path, resident = self.paths[PIECES], blocks_resident(self.registers)
        return {
            "registers": self.registers,
            "blocks resident": resident,
            "bytes in flight": resident * TILE_BYTES,
            "instructions of a warp": dict(pipes_used(path)),
            "bytes a clock by issue": round(TILE_BYTES * self.moves / issue_clocks(path, architecture), 1),
            "clocks of a warp alone": clocks_alone(self.storing[PIECES]),
        }


STRONG, SLOW, NOTHING = r"LDG.*STRONG", r"CALL|WARPSYNC.COLLECTIVE|ENDCOLLECTIVE", r"$"
"""Patterns of opcodes that distinguish paths.

STRONG: a load of other blocks' results; the second sweep's first such load waits for the first sweep. SLOW: rare
instructions, for divisions by denormal numbers and shuffles of a diverged warp. NOTHING: matches no opcode.
"""
TILE_MAP, PIECE_MEANS, STATISTICS = r"STG\.E\.(64|128)", r"STG\.E\.128", r"STG\.E\.64"
"""Patterns of stores. TILE_MAP, PIECE_MEANS: results of the first sweep, for the advantages and for the policy loss.

STATISTICS: sums of the last block.
"""
SEARCH, ADDITION = r"VOTE", r"DADD"
"""Patterns of instructions in loops: the search for a token's sequence, and the addition of all pieces' results."""
SEARCHED_AT_ONCE, ADDED_AT_ONCE, MOST_BYTES_PER_CLOCK = 64, 128, 64
TOKENS = 32768
PPO_CASES = {"by token": 0, "one sequence": 1, "64 sequences": 64}
GAE_CASES = {"one sequence": 1, "64 sequences": 64, "2048 sequences": 2048}
PPO_PIECE, PPO_BYTES, GAE_TILE, GAE_BYTES = 256, 37, 1024, 17
"""Tokens per block, and bytes read and written per token (csrc/kernels/ppo.cu and gae.cu)."""


@dataclass(frozen=True)
class TokenKernel:
    """A kernel with one number per token. Its blocks of 256 threads mostly wait for memory and for each other."""

    registers: int
    block_bytes: int
    first: list[Instruction]  # path of the first of two sweeps; empty if there is only one sweep
    second: list[Instruction]
    search: list[Instruction]  # one more round of the search
    addition: list[Instruction]  # one more round of the addition

    def clocks(self, path: list[Instruction], blocks: int, device: Device, more: int = 0) -> float:
        on_one = -(-blocks // device.multiprocessors)
        bytes_per_clock = device.bytes_per_clock * max(1.0, device.multiprocessors / blocks)
        memory = self.block_bytes / min(bytes_per_clock, MOST_BYTES_PER_CLOCK)
        services = (memory, issue_clocks(path, device.architecture))
        delay = BLOCK_START_CLOCKS + clocks_alone(path, DRAM_CLOCKS) - len(path) + more
        return on_one / blocks_per_clock(min(on_one, blocks_resident(self.registers)), services, delay)

    def seconds(self, blocks: int, sequences: int, device: Device) -> float:
        """Return the seconds of a launch with `blocks` blocks per sweep."""
        clocks = (blocks - 1) // ADDED_AT_ONCE * clocks_alone(self.addition)
        search = sum(SEARCHED_AT_ONCE**i < sequences for i in range(1, 8)) * clocks_alone(self.search, DRAM_CLOCKS)
        if not self.first:
            clocks += self.clocks(self.second, blocks, device)
        elif 2 * blocks <= blocks_resident(self.registers) * device.multiprocessors:
            wait = next(i for i, step in enumerate(self.second) if re.match(STRONG, step.opcode))
            clocks += self.clocks(self.first, 2 * blocks, device, search)
            clocks += self.clocks(self.second[wait:], blocks, device) - BLOCK_START_CLOCKS
        else:
            clocks += sum(self.clocks(path, blocks, device, search) for path in (self.first, self.second))
        return LAUNCH_SECONDS + clocks / device.clock

    def described(self) -> dict[str, object]:
        return {
            "registers": self.registers,
            "blocks resident": blocks_resident(self.registers),
            "clocks of a warp alone": clocks_alone(self.second, DRAM_CLOCKS),
        }


def token_kernel(name: str, blocks: list[Block], registers: int) -> TokenKernel:
    if name == "gae_kernel":
        first, second = longest(blocks, TILE_MAP, f"{SLOW}|{STRONG}"), longest(blocks, STRONG, SLOW)
        return TokenKernel(registers, GAE_TILE * GAE_BYTES, first, second, round_of_loop(blocks, SEARCH), [])
    last, addition = longest(blocks, STATISTICS, SLOW), round_of_loop(blocks, ADDITION)
    if name == "ppo_kernel<false>":
        return TokenKernel(registers, PPO_PIECE * PPO_BYTES, [], last, [], addition)
    first = longest(blocks, PIECE_MEANS, f"{SLOW}|{STRONG}")
    return TokenKernel(registers, PPO_PIECE * PPO_BYTES, first, last, round_of_loop(blocks, SEARCH), addition)


def microseconds(kernels: dict[str, TokenKernel], device: Device) -> dict[str, float]:
    """Return `{case: microseconds}` for 32,768 tokens. The policy loss by sequence has one more piece per sequence."""
    seconds = {}
    for case, sequences in PPO_CASES.items():
        kernel = kernels["ppo_kernel<true>" if sequences else "ppo_kernel<false>"]
        seconds[f"policy loss, {case}"] = kernel.seconds(TOKENS // PPO_PIECE + sequences, sequences, device)
    for case, sequences in GAE_CASES.items():
        seconds[f"advantages, {case}"] = kernels["gae_kernel"].seconds(TOKENS // GAE_TILE, sequences, device)
    return {case: round(1e6 * found, 1) for case, found in seconds.items()}


STORED = {"bf16": ("BF16", 2), "fp16": ("F16", 2), "fp32": ("float", 4)}
WIDTHS = (32000, 128256, 151936, 18992, 4000, 151935)
"""Vocabulary sizes: three full ones, an eighth of the largest and of the smallest, and one with unaligned rows."""
CASES = [(rows, columns) for rows in (4096, 16384) for columns in WIDTHS]
"""Shapes (T, V) of the logits."""


def predictions(kernels: dict[str, Kernel], device: Device) -> dict[str, float]:
    """Return `{case: per cent of the copy bandwidth}`. The backward pass has no gradient of the entropy."""
    found = {}
    for dtype, (name, size) in STORED.items():
        for rows, columns in CASES:
            aligned = str(columns * size % 16 == 0).lower()
            forward, logprobs, backward = (
                kernels[f"{kernel}, {aligned}, {entropy}>"].seconds(rows, columns * size, device)
                for kernel, entropy in (
                    (f"partials_kernel<{name}", "true"),
                    (f"partials_kernel<{name}", "false"),
                    (f"gradient_kernel<{name}, {name}", "false"),
                )
            )
            read = rows * columns * size / device.copy_bandwidth
            case = f"{dtype} T={rows} V={columns}"
            found[f"log-probs {case}"] = round(100 * read / (logprobs + FINISH_SECONDS), 1)
            found[f"forward {case}"] = round(100 * read / (forward + FINISH_SECONDS), 1)
            found[f"forward and backward {case}"] = round(100 * 3 * read / (forward + FINISH_SECONDS + backward), 1)
    return found


PERCENT, MICROSECONDS = "predicted per cent of the copy bandwidth", "predicted microseconds of 32768 tokens"


def disassemble(nvdisasm: str, cubin: Path) -> dict[str, list[Block]]:
    done = subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True, check=True)
    return kernels_in(done.stdout)


def streaming(name: str, blocks: list[Block], registers: int) -> Kernel:
    exponentials = 4 if "<float" in name else 8  # numbers in 16 bytes
    # For unaligned rows: the path with all moves to the left, because no other path has as many shuffles.
    shuffles = 0 if not re.match(r"partials_kernel<\w+, false", name) else exponentials // 4 + 3
    common, storing = (paths(blocks, exponentials, must_store, shuffles) for must_store in (False, True))
    moves = 1 if name.startswith("partials") else 1.5 if re.search("<float, B?F16", name) else 2
    return Kernel(registers, common, storing, moves)


CHECKSUM_BYTES = (1 << 26, 1 << 30)
"""Bytes summed in one launch."""


def loop_in(blocks: list[Block]) -> list[Instruction]:
    """Return one round of the shortest loop that loads PIECES 16-byte pieces per round."""
    order, closing = in_order(blocks)
    found = []
    for last, first in closing:
        ways = {first: blocks[first].instructions}
        for number in order[order.index(first) :]:
            for after in blocks[number].following if number in ways else ():
                if (number, after) not in closing:
                    way = ways[number] + blocks[after].instructions
                    ways[after] = min(ways.get(after, way), way, key=len)
        found += [ways[last]] if sum(i.loads_piece for i in ways[last]) == PIECES else []
    return min(found, key=len)


@dataclass(frozen=True)
class Looping:
    """A read-only kernel whose blocks loop over tiles.

    The model spreads the time of the code before and after the loop evenly over a block's rounds.
    """

    registers: int
    loop: list[Instruction]
    path: list[Instruction]  # through the kernel, with the loop once

    def seconds(self, nbytes: int, device: Device) -> float:
        rounds, before = nbytes / TILE_BYTES / device.multiprocessors, clocks_alone(self.path) + BLOCK_START_CLOCKS
        turns = min(max(int(rounds / 6), 1), 8)  # rounds per block, as launch_word_sums chooses
        issue = sum(issue_clocks(p, device.architecture) / n for p, n in ((self.loop, 1), (self.path, turns)))
        delay = clocks_alone(self.loop) - len(self.loop) + before / turns
        rate = blocks_per_clock(blocks_resident(self.registers), (TILE_BYTES / device.bytes_per_clock, issue), delay)
        return (rounds / rate + turns * (delay + issue)) / device.clock


def checksum_predictions(code: dict[str, list[Block]], registers: dict[str, int], device: Device) -> dict[str, float]:
    """Return `{case: per cent of the copy bandwidth}`. Assumes that reading is no faster than copying."""
    sums, hashes = "word_sums_kernel", "tile_hash_kernel"
    path = paths(code[sums], 0, must_store=True)[PIECES]
    looping = Looping(registers[sums], loop_in(code[sums]), path)
    tiled = Kernel(registers[hashes], *(paths(code[hashes], 0, store) for store in (False, True)), moves=1)
    found = {}
    for nbytes in CHECKSUM_BYTES:
        # Another launch sets the sums to zero first; FINISH_SECONDS below stands for it.
        times = {sums: looping.seconds(nbytes, device), hashes: tiled.seconds(nbytes // TILE_BYTES, TILE_BYTES, device)}
        for name, seconds in times.items():
            percent = 100 * nbytes / device.copy_bandwidth / (seconds + FINISH_SECONDS)
            found[f"{name} {nbytes >> 20} MB"] = round(percent, 1)
    return found


def checksum_table(predicted: dict[str, dict[str, float]]) -> list[str]:
    lines = ["| prediction, % of a read at the copy's bandwidth | " + " | ".join(DEVICES) + " |"]
    lines.append("|---|" + "---|" * len(DEVICES))
    for name in ("word_sums_kernel", "tile_hash_kernel"):
        for case in [f"{name} {nbytes >> 20} MB" for nbytes in CHECKSUM_BYTES]:
            lines.append(f"| {case} | " + " | ".join(f"{predicted[device][case]:.0f}" for device in DEVICES) + " |")
    return lines


HEAD = (4096, 151936)
"""Hidden size and vocabulary size of an output layer with bfloat16 weights."""
HEAD_ROWS, HEAD_PARTS = 3072, 4
"""Rows per chunk, and parts per chunk, whose logits are formed one part at a time, as in megatron_rl/ops/head.py."""
HEAD_FLOPS = {"H100": 7.0e14, "H200": 7.0e14}
"""Assumed FLOP/s of cuBLAS's matrix products of such sizes: 71 % of the data sheet's."""
SMALL_SECONDS = 25.0e-6
"""Seconds per part in the policy loss and the nine small torch kernels around it."""


def head_over_products(
    rows: int, into_main_grad: bool, is_hidden: bool, kernels: dict[str, Kernel], device: Device, flops: float
) -> float:
    """Return the time of lm_head_loss with a policy loss, divided by that of its three matrix products alone.

    The products alone write bfloat16. into_main_grad: whether the weight's gradient is added to main_grad. is_hidden:
    whether a product's memory traffic overlaps its arithmetic, so that it takes the longer of the two. Otherwise, only
    the traffic of the products alone overlaps, and the rest is added to the time.
    """
    hidden, vocab = HEAD
    forward, gradient = (
        kernels["partials_kernel<float, true, true>"],
        kernels["gradient_kernel<float, BF16, true, false>"],
    )

    def product(count: int, operands: int, result: int, bare_result: int) -> float:
        arithmetic = 2.0 * count * hidden * vocab / flops
        if is_hidden:
            return max(arithmetic, (operands + result) / device.copy_bandwidth)
        return arithmetic + (result - bare_result) / device.copy_bandwidth

    seconds = 0.0 if into_main_grad else 6.0 * hidden * vocab / device.copy_bandwidth  # scale, round the gradient
    for start in range(0, rows, HEAD_ROWS):
        chunk = min(HEAD_ROWS, rows - start)
        for begin in range(0, chunk, HEAD_ROWS // HEAD_PARTS):
            part = min(HEAD_ROWS // HEAD_PARTS, chunk - begin)
            logits = part * vocab
            seconds += product(part, 2 * hidden * (part + vocab), 4 * logits, 2 * logits)
            seconds += sum(kernel.seconds(part, 4 * vocab, device) for kernel in (forward, gradient))
            seconds += FINISH_SECONDS + SMALL_SECONDS
        logits, sums = chunk * vocab, 8 if start or into_main_grad else 4  # bytes: read and written, or written
        seconds += product(chunk, 2 * (logits + hidden * vocab), 2 * chunk * hidden, 2 * chunk * hidden)
        seconds += product(chunk, 2 * (logits + chunk * hidden), sums * hidden * vocab, 0)
    return seconds / (6.0 * rows * hidden * vocab / flops)


HEADS = "predicted time of the head over its three products"
HEAD_CASES = [f"T={rows}, {where}" for rows in (4096, 8192, 16384) for where in ("main_grad", "autograd")]


def head_predictions(kernels: dict[str, Kernel], device: Device, flops: float) -> dict[str, float]:
    """Return `{case: ratio}`, and the same with ", not hidden" for products whose extra traffic overlaps nothing."""
    found = {}
    for case in HEAD_CASES:
        rows, into_main_grad = int(case[2:].split(",")[0]), "main_grad" in case
        for name, is_hidden in ((case, True), (f"{case}, not hidden", False)):
            found[name] = round(head_over_products(rows, into_main_grad, is_hidden, kernels, device, flops), 3)
    return found


def head_table(predicted: dict[str, dict[str, float]]) -> list[str]:
    lines = ["| prediction, head and policy loss over three bare products | " + " | ".join(predicted) + " |"]
    lines.append("|---|" + "---|" * len(predicted))
    for case in HEAD_CASES:
        cells = [f"{found[case]:.2f} ({found[f'{case}, not hidden']:.2f})" for found in predicted.values()]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return lines


def report(nvcc: str, nvdisasm: str, cubins: dict[str, list[Path]], registers: dict[str, dict[str, int]]) -> dict:
    """Return the content of csrc/resources.json. cubins, registers: by architecture, such as sm_90a."""
    described: dict[str, dict] = {}
    predicted: dict[str, dict[str, float]] = {}
    times: dict[str, dict[str, float]] = {}
    heads: dict[str, dict[str, float]] = {}
    for architecture, of_kernels in registers.items():
        described[architecture] = {name: {"registers": count} for name, count in of_kernels.items()}
        code = {name: blocks for cubin in cubins[architecture] for name, blocks in disassemble(nvdisasm, cubin).items()}
        kernels = {
            name: streaming(name, code[name], of_kernels[name])
            for name in of_kernels
            if re.match("partials|gradient", name)
        }
        described[architecture] |= {name: kernel.described(architecture) for name, kernel in kernels.items()}
        by_token = {
            name: token_kernel(name, code[name], of_kernels[name])
            for name in of_kernels
            if re.match(r"(ppo|gae)_kernel", name)
        }
        described[architecture] |= {name: kernel.described() for name, kernel in by_token.items()}
        for name, device in DEVICES.items():
            if device.architecture == architecture:
                predicted[name] = predictions(kernels, device) | checksum_predictions(code, of_kernels, device)
                times[name] = microseconds(by_token, device)
                if name in HEAD_FLOPS:
                    heads[name] = head_predictions(kernels, device, HEAD_FLOPS[name])
    return {"nvcc": nvcc, "kernels": described, PERCENT: predicted, MICROSECONDS: times, HEADS: heads}


def tables(report: dict) -> str:
    """Return the Markdown tables of csrc/README.md."""
    predicted, times = report[PERCENT], report[MICROSECONDS]
    columns = [f"{what}, {device}" for what in ("log-probs", "forward", "both") for device in DEVICES]
    lines = ["| prediction, % of copy | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for case in [f"{dtype} T={rows} V={width}" for dtype in ("bf16", "fp32") for rows, width in CASES]:
        kinds = ("log-probs", "forward", "forward and backward")
        found = [predicted[device][f"{what} {case}"] for what in kinds for device in DEVICES]
        lines.append(f"| {case} | " + " | ".join(f"{percent:.0f}" for percent in found) + " |")
    lines += ["", *checksum_table(predicted), "", *head_table(report[HEADS]), ""]
    lines += ["| prediction, us of 32,768 tokens | " + " | ".join(DEVICES) + " |", "|---|" + "---|" * len(DEVICES)]
    for case in times["H200"]:
        lines.append(f"| {case} | " + " | ".join(f"{times[device][case]:.1f}" for device in DEVICES) + " |")
    lines += [
        "",
        "| sm_90a, rows aligned | registers | blocks resident | instructions of a warp | B a clock by issue |",
    ]
    lines.append("|---|---|---|---|---|")
    for name, kernel in report["kernels"]["sm_90a"].items():
        if "instructions of a warp" in kernel and name.split(", ")[-2] == "true":
            pipes = kernel["instructions of a warp"]
            counts = ", ".join(f"{pipe} {count}" for pipe, count in pipes.items())
            cells = [f"`{name}`", kernel["registers"], kernel["blocks resident"], f"{sum(pipes.values())}: {counts}"]
            lines.append("| " + " | ".join(map(str, [*cells, kernel["bytes a clock by issue"]])) + " |")
    return "\n".join(lines) + "\n"
