"""Turns PTX into C++ for machine.h, one statement for an instruction. `translate(text)` is the way in.

Most instructions are a line of FORMS and a function op_NAME of instructions.h: what to add for a new one. Those that
touch memory, jump or wait have a function here. An instruction or modifier that is in neither is refused by name.
A kernel becomes a function that runs until its thread has to wait, keeps the registers that are read later, and goes on
behind that place when it is called again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass

from csrc.emulation.ptx import Instruction, Kernel, Module, Unsupported, Variable, live_after, read, suspends

WORD = {"pred": "bool", "8": "u16", "16": "u16", "32": "u32", "64": "u64"}
TYPES = frozenset("u8 u16 u32 u64 s8 s16 s32 s64 f32 f64 f16 bf16 f16x2 bf16x2".split())
UNTYPED = {"b8": "u8", "b16": "u16", "b32": "u32", "b64": "u64", "pred": "bool"}
BYTES = {name: int(re.sub(r"\D|x2", "", name)) // 8 * (2 if "x2" in name else 1) for name in TYPES}

# For each instruction, with the modifiers that choose among functions: its operands and its result, where t is the type
# in its name, w one twice as wide, u a u32 and p a predicate. After the colon, modifiers that it may have.
FORMS = {
    "add sub": "tt t: rn ftz sat",
    "mul": "tt t: rn ftz sat",
    "mul.lo mul.hi": "tt t:",
    "mul.wide": "tt w:",
    "mad.lo mad.hi": "ttt t:",
    "mad.wide": "ttw w:",
    "fma fma.rm": "ttt t: rn ftz sat",
    "div rem": "tt t: rn ftz",
    "div.approx div.full": "tt t: ftz",
    "min max min.NaN max.NaN": "tt t: ftz",
    "neg abs": "t t: ftz",
    "rcp sqrt": "t t: rn ftz",
    "ex2.approx lg2.approx rcp.approx sqrt.approx rsqrt.approx tanh.approx": "t t: ftz",
    "copysign": "tt t:",
    "and or xor": "tt t:",
    "not": "t t:",
    "shl shr": "tu t:",
    "shf.l.wrap shf.r.wrap shf.l.clamp shf.r.clamp": "ttu t:",
    "popc clz": "t u:",
    "brev": "t t:",
    "bfe": "tuu t:",
    "bfi": "ttuu t:",
    "prmt": "ttu t:",
    "lop3": "tttu t:",
    "selp": "ttp t:",
}
FORM_OF = {name: form for names, form in FORMS.items() for name in names.split()}
CHOOSING = frozenset("lo hi wide rm approx full NaN l r wrap clamp".split())
SPECIAL = {
    **{
        f"%{name}.{axis}": f"{value}.{axis}"
        for axis in "xyz"
        for name, value in (
            ("tid", "t.index"),
            ("ntid", "t.block->launch->block"),
            ("ctaid", "t.block->index"),
            ("nctaid", "t.block->launch->grid"),
        )
    },
    "%laneid": "t.lane",
    "%warpid": "(t.number / WARP_THREADS)",
    "%smid": "0u",
    "%cluster_ctarank": "t.block->rank",
    "%cluster_nctarank": "u32(t.block->launch->cluster.count())",
    "%cluster_ctaid.x": "t.block->rank",
    "%cluster_nctaid.x": "u32(t.block->launch->cluster.count())",
    "%lanemask_lt": "((1u << t.lane) - 1)",
}
CACHING = re.compile(r"ca|cg|cs|lu|cv|wb|wt|nc|weak|cta|cluster|gpu|sys|aligned|entry|func|L[12]::.*|noftz")
STRONG = frozenset("volatile relaxed acquire release acq_rel".split())
SHUFFLES = {"up": "SHUFFLE_UP", "down": "SHUFFLE_DOWN", "bfly": "SHUFFLE_XOR", "idx": "SHUFFLE_INDEX"}
ATOMICS = {
    "add": "op_add(x, {0})", "min": "op_min(x, {0})", "max": "op_max(x, {0})", "exch": "{0}",
    "and": "op_and(x, {0})", "or": "op_or(x, {0})", "xor": "op_xor(x, {0})", "cas": "x == {0} ? {1} : x",
    "inc": "x >= {0} ? 0 : x + 1", "dec": "x == 0 || x > {0} ? {0} : x - 1",
}  # fmt: skip


def translate(text: str, parts: int = 1) -> list[str]:
    """C++ sources that hold a module's kernels, split into at most `parts` of like length."""
    module = read(text)
    functions = [(kernel, Translation(kernel, module).function()) for kernel in module.kernels]
    shares: list[list[tuple[Kernel, str]]] = [[] for _ in range(min(parts, len(functions)))]
    for function in sorted(functions, key=lambda pair: -len(pair[1])):
        min(shares, key=lambda share: sum(len(code) for _, code in share)).append(function)
    return [source(share, module, defines=i == 0) for i, share in enumerate(shares)]


def source(share: list[tuple[Kernel, str]], module: Module, defines: bool) -> str:
    """One file; the first of a module defines its variables."""
    variables = [variable for variable in module.variables if variable.space != "shared"]
    added = [f"  add_kernel({symbol(kernel.name)}_kernel);" for kernel, _ in share]
    if defines:
        added += [f"  emulation_add_memory({symbol(v.name)}, {v.bytes}, true);" for v in variables]
    return "\n".join(
        [
            '#include "machine.h"',
            f"namespace module_{hashlib.sha256(module.kernels[0].name.encode()).hexdigest()[:16]} {{",
            *(global_variable(variable, defines) for variable in variables),
            *(code for _, code in share),
            *("static const bool added = [] {", *added, "  return true;", "}();", "}", ""),
        ]
    )


def symbol(name: str) -> str:
    """A C++ name: of a register v_NAME, for one may be spelled like a type."""
    return re.sub(r"\W", "_", name.replace("%", "v_"))


def global_variable(variable: Variable, defines: bool) -> str:
    declaration = f"unsigned char {symbol(variable.name)}[{variable.bytes}]"
    return f"alignas(16) {declaration} = {variable.initial or '{}'};" if defines else f"extern {declaration};"


@dataclass
class Place:
    """An operand's address: a C++ value, and the offset in bytes that is added to it."""

    base: str
    offset: int

    def __str__(self) -> str:
        return f"u64({self.base}) + {self.offset}ll" if self.offset else f"u64({self.base})"


class Translation:
    """One kernel."""

    def __init__(self, kernel: Kernel, module: Module) -> None:
        self.kernel = kernel
        self.live = live_after(kernel)
        self.parameters = {parameter.name: i for i, parameter in enumerate(kernel.parameters)}
        self.globals = {variable.name for variable in module.variables if variable.space != "shared"}
        self.shared, self.shared_bytes = self.laid_out("shared", [*module.variables, *kernel.variables])
        self.local, self.local_bytes = self.laid_out("local", kernel.variables)
        self.call_parameters = {variable.name for variable in kernel.variables if variable.space == "param"}
        self.suspensions = 0

    @staticmethod
    def laid_out(space: str, variables: list[Variable]) -> tuple[dict[str, int], int]:
        """Offsets of the variables of a space, and their bytes; those without a size share what lies behind."""
        offsets, end = {}, 0
        for variable in sorted((v for v in variables if v.space == space), key=lambda v: v.bytes == 0):
            end += -end % max(variable.align, 1)
            offsets[variable.name] = end
            end += variable.bytes
        return offsets, end + -end % 16

    def function(self) -> str:
        name, kernel = symbol(self.kernel.name), self.kernel
        lines = [line for i, step in enumerate(kernel.code) for line in self.step(i, step)]
        registers = [f"  {word(kind)} {symbol(register)} = 0;" for register, kind in kernel.registers.items()]
        registers += [f"  u64 {symbol(parameter)} = 0;" for parameter in sorted(self.call_parameters)]
        places = "".join(f" case {i}: goto resume_{i};" for i in range(1, self.suspensions + 1))
        saved = max((len(live) for live in self.live.values()), default=0)
        most = 1024
        return "\n".join(
            [
                f"static void {name}(Thread& t) {{",
                *registers,
                f"  switch (t.at) {{{places} default: break; }}",
                *lines,
                "  t.waiting = ENDED;",
                "}",
                f'static const Kernel {name}_kernel = {{"{kernel.name}", {name}, {saved}, {self.shared_bytes}, '
                f"{self.local_bytes}, {most}}};",
            ]
        )

    def step(self, i: int, step: Instruction | str) -> list[str]:
        if isinstance(step, str):
            return [f"{symbol(step)}:;"]
        lines = self.suspending(i, step) if suspends(step) else [self.plain(step)]
        if step.guard:
            guard = self.guard(step.guard)
            if len(lines) == 1 and not suspends(step):
                return [f"  if ({guard}) {{ {lines[0]} }}"]
            return [f"  if (!({guard})) goto past_{i};", *lines, f"past_{i}:;"]
        return [f"  {line}" for line in lines]

    def guard(self, text: str) -> str:
        return f"!{symbol(text[1:])}" if text.startswith("!") else symbol(text)

    # -- operands ------------------------------------------------------------------------------------------------------

    def value(self, text: str, kind: str, step: Instruction) -> str:
        """An operand, as a value of the instruction's type."""
        if text in self.kernel.registers:
            return f"in<{kind}>({symbol(text)})"
        if text.startswith("!"):
            return f"!{self.value(text[1:], kind, step)}"
        if text in SPECIAL:
            return f"{kind}({SPECIAL[text]})"
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return f"in<{kind}>(u32(0x{text[2:]}u))"
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            return f"in<{kind}>(u64(0x{text[2:]}ull))"
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
            bits = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}[BYTES.get(kind, 4)]
            number = int(text.rstrip("U"), 0)
            return (
                f"{kind}({number}{'ull' if number > 2**63 - 1 else 'll'})"
                if kind[0] in "us" or kind == "bool"
                else (f"in<{kind}>({bits}({number}ll))")
            )
        return f"{kind}({self.address_of(text, step)})"

    def address_of(self, name: str, step: Instruction) -> str:
        if name in self.parameters:
            return f"(u64)t.block->launch->parameters[{self.parameters[name]}]"
        if name in self.shared:
            return f"{self.shared[name]}u"
        if name in self.local:
            return f"((u64)t.local + {self.local[name]})"
        if name in self.globals:
            return f"(u64){symbol(name)}"
        raise Unsupported(f"{step.opcode} with operand {name} ({step.where})")

    def place(self, text: str, step: Instruction) -> Place:
        found = re.fullmatch(r"\[\s*(.+?)\s*(?:\+\s*(-?\w+))?\s*\]", text)
        if found is None:
            raise Unsupported(f"address {text} of {step.opcode} ({step.where})")
        base, offset = found[1], int(found[2] or "0", 0)
        return Place(symbol(base) if base in self.kernel.registers else self.address_of(base, step), offset)

    def assign(self, register: str, value: str) -> str:
        if register == "_":
            return f"(void)({value});"
        if register not in self.kernel.registers:
            raise Unsupported(f"a result in {register} of {self.kernel.name}")
        return f"{symbol(register)} = out<{word(self.kernel.registers[register])}>({value});"

    # -- instructions that only compute --------------------------------------------------------------------------------

    def plain(self, step: Instruction) -> str:
        special: Callable[[Instruction], str] | None = getattr(self, f"ins_{step.name}", None)
        if special:
            return special(step)
        kind = type_of(step)
        chosen = [part for part in step.parts[1:-1] if part in CHOOSING]
        name = ".".join([step.name, *chosen])
        if name not in FORM_OF:
            raise Unsupported(f"{step.opcode} ({step.where})")
        form, _, allowed = FORM_OF[name].partition(":")
        operands, result = form.split()
        rest = set(step.parts[1:-1]) - set(chosen) - set(allowed.split())
        if rest or len(step.operands) != len(operands) + 1:
            raise Unsupported(f"{step.opcode} with {len(step.operands)} operands ({step.where})")
        kinds = {"t": kind, "u": "u32", "p": "bool", "w": kind[0] + str(BYTES.get(kind, 0) * 16)}
        values = [self.value(text, kinds[k], step) for text, k in zip(step.operands[1:], operands, strict=True)]
        if step.name in ("div", "rem"):
            values[1] = f"divisor(t, {values[1]}, {quoted(step)})"
        if "ftz" in step.parts:
            values = [f"flush({value})" for value in values]
        call = f"op_{name.replace('.', '_')}({', '.join(values)})"
        call = f"flush({call})" if "ftz" in step.parts else call
        call = f"saturate({call})" if "sat" in step.parts else call
        return self.assign(step.operands[0], f"{kinds[result]}({call})")

    def ins_mov(self, step: Instruction) -> str:
        to, source, kind = *step.operands, type_of(step)
        if to.startswith("{"):  # a word into its parts
            parts = vector(to)
            bits = BYTES[kind] * 8 // len(parts)
            whole = self.value(source, kind, step)
            return "{ const u64 whole = " + whole + "; " + " ".join(
                self.assign(part, f"u{bits}(whole >> {i * bits})") for i, part in enumerate(parts)
            ) + " }"  # fmt: skip
        if source.startswith("{"):
            parts = vector(source)
            bits = BYTES[kind] * 8 // len(parts)
            joined = " | ".join(
                f"u64({self.value(part, f'u{bits}', step)}) << {i * bits}" for i, part in enumerate(parts)
            )
            return self.assign(to, f"{kind}({joined})")
        return self.assign(to, self.value(source, kind, step))

    def ins_cvt(self, step: Instruction) -> str:
        modifiers, (to, source) = step.parts[1:-2], (UNTYPED.get(p, p) for p in step.parts[-2:])
        rounding = [m for m in modifiers if m in ("rzi", "rni", "rmi", "rpi")]
        if (
            set(modifiers) - {"rn", "ftz", "sat", *rounding}
            or {to, source} - TYPES
            or (to[0] == "u" and "sat" in modifiers)
        ):
            raise Unsupported(f"{step.opcode} ({step.where})")
        values = [self.value(text, source, step) for text in step.operands[1:]]
        values = [f"flush({value})" if "ftz" in modifiers else value for value in values]
        call = f"convert{'_' + rounding[0] if rounding else ''}<{to}>({', '.join(values)})"
        call = f"flush({call})" if "ftz" in modifiers else call
        return self.assign(step.operands[0], f"saturate({call})" if "sat" in modifiers else call)

    def ins_setp(self, step: Instruction) -> str:
        comparison, *modifiers = step.parts[1:-1]
        kind = type_of(step)
        unsigned = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
        values = [self.value(text, kind, step) for text in step.operands[1:3]]
        if "ftz" in modifiers:
            values = [f"flush({value})" for value in values]
        found = f"is_{unsigned.get(comparison, comparison)}({', '.join(values)})"
        other = self.value(step.operands[3], "bool", step) if len(step.operands) > 3 else ""
        joined = {"and": "&&", "or": "||", "xor": "!="}.get(next(iter(set(modifiers) - {"ftz"}), ""), "")
        if set(modifiers) - {"ftz", "and", "or", "xor"} or bool(other) != bool(joined):
            raise Unsupported(f"{step.opcode} ({step.where})")
        first, _, second = step.operands[0].partition("|")
        result = self.assign(first, f"({found}) {joined} ({other})" if joined else found)
        if second:
            result = self.assign(second, f"(!{found}) {joined} ({other})" if joined else f"!{found}") + " " + result
        return "{ " + result + " }"

    # -- memory --------------------------------------------------------------------------------------------------------

    def ins_cvta(self, step: Instruction) -> str:
        to, source = step.operands
        space = next((part for part in step.parts if part in ("shared", "local", "global", "param", "const")), "")
        address = self.value(source, "u64", step)
        if space == "shared":
            base = "(u64)t.block->shared.get()"
            return self.assign(to, f"{address} - {base}" if "to" in step.parts else f"{address} + {base}")
        return self.assign(to, address)

    def ins_mapa(self, step: Instruction) -> str:
        """A block's shared address, seen from its cluster."""
        to, address, rank = step.operands
        if "shared::cluster" not in step.parts:
            raise Unsupported(f"{step.opcode} ({step.where})")
        return self.assign(to, f"{self.value(address, 'u64', step)} % SHARED_WINDOW + "
                               f"SHARED_WINDOW * (u64({self.value(rank, 'u32', step)}) + 1)")  # fmt: skip

    def access(self, step: Instruction, address: str, bytes_: int, kind: str) -> str:
        """C++ that gives the place of an address in the host's memory, or faults."""
        space = next(
            (p.partition("::")[0] for p in step.parts if re.match(r"(global|shared|local|param|const)", p)), ""
        )
        strong = "true" if STRONG & set(step.parts) else "false"
        place = self.place(address, step)
        if space == "param":
            index = self.parameters.get(re.sub(r"[\[\]\s]|\+.*", "", address))
            if index is not None and place.offset + bytes_ > self.kernel.parameters[index].bytes:
                raise Unsupported(f"{step.opcode} {address}: behind the parameter's end ({step.where})")
            return f"(char*)({place})"
        if space == "local":
            return f"local_place(t, {place}, {bytes_}, {quoted(step)})"
        function = {"shared": "shared", "": "generic"}.get(space, "global")
        return f"{function}_place(t, {place}, {bytes_}, {kind}, {strong}, {quoted(step)})"

    def check_modifiers(self, step: Instruction, allowed: set[str]) -> None:
        spaces = {"global", "shared", "local", "param", "const", "shared::cta", "shared::cluster", "param::entry"}
        unknown = [
            part for part in step.parts[1:-1]
            if part not in allowed | spaces | STRONG and not CACHING.fullmatch(part)
        ]  # fmt: skip
        if unknown:
            raise Unsupported(f"{step.opcode} ({step.where})")

    def ins_ld(self, step: Instruction) -> str:
        to, address = step.operands
        kind, names = type_of(step), vector(to) if to.startswith("{") else [to]
        self.check_modifiers(step, {f"v{len(names)}"})
        size = BYTES[kind]
        loads = " ".join(self.assign(n, f"load<{kind}>(place + {i * size})") for i, n in enumerate(names) if n != "_")
        before = "fence(t); " if "acquire" in step.parts else ""
        return f"{{ {before}const char* place = {self.access(step, address, size * len(names), 'LOAD')}; {loads} }}"

    def ins_st(self, step: Instruction) -> str:
        address, source = step.operands
        name = address.strip("[] ").partition("+")[0]
        if name in self.call_parameters:
            return f"{symbol(name)} = u64({self.value(source, type_of(step), step)});"
        kind, names = type_of(step), vector(source) if source.startswith("{") else [source]
        self.check_modifiers(step, {f"v{len(names)}"})
        size = BYTES[kind]
        stores = " ".join(f"store(place + {i * size}, {self.value(n, kind, step)});" for i, n in enumerate(names))
        before = "fence(t); " if "release" in step.parts else ""
        return f"{{ {before}char* place = {self.access(step, address, size * len(names), 'STORE')}; {stores} }}"

    def ins_membar(self, step: Instruction) -> str:
        return "fence(t);"

    ins_fence = ins_membar

    # -- jumps ---------------------------------------------------------------------------------------------------------

    def ins_bra(self, step: Instruction) -> str:
        return f"goto {symbol(step.operands[0])};"

    def ins_ret(self, step: Instruction) -> str:
        return "t.waiting = ENDED; return;"

    ins_exit = ins_ret

    def ins_trap(self, step: Instruction) -> str:
        return f'fault(t, "traps", {quoted(step)});'

    def ins_call(self, step: Instruction) -> str:
        if step.operands[0] != "__assertfail":
            raise Unsupported(f"call of {step.operands[0]} ({step.where})")
        text, file, line, *_ = (symbol(name) for name in vector(step.operands[1]))
        return f"failed_assertion(t, {text}, {file}, {line});"

    # -- instructions at which other threads run -----------------------------------------------------------------------

    def suspending(self, i: int, step: Instruction) -> list[str]:
        before, after = self.waiting(step)
        self.suspensions += 1
        number, live = self.suspensions, sorted(self.live[i] | (step.read if step.name == "ld" else set()))
        later = set() if step.name == "atom" else step.written  # an atomic has its result before others run
        live = [name for name in live if name in self.kernel.registers and name not in later]
        saves = " ".join(f"t.saved[{k}] = {symbol(name)};" for k, name in enumerate(live))
        loads = " ".join(
            f"{symbol(name)} = {word(self.kernel.registers[name])}(t.saved[{k}]);" for k, name in enumerate(live)
        )
        return [f"{before} t.at = {number}; {saves} return;", f"resume_{number}: {loads} {after}"]

    def waiting(self, step: Instruction) -> tuple[str, str]:
        """Return the C++ of an instruction that waits: the part before other threads run, and the part after."""
        where, name, parts = quoted(step), step.name, step.parts
        if name in ("bar", "barrier") and "cluster" in parts:
            return f"wait_for(t, CLUSTER, {where});", "fence(t);"
        if name in ("bar", "barrier") and "warp" in parts:
            return self.collective(step, "SYNC", step.operands[0]), ""
        if name in ("bar", "barrier") and "sync" in parts:
            number = self.value(step.operands[0], "u32", step)
            count = (
                self.value(step.operands[1], "u32", step) if len(step.operands) > 1 else "u32(t.block->threads.size())"
            )
            return f"wait_at_barrier(t, {number}, {count}, {where});", ""
        if name == "shfl" and parts[1] == "sync":
            to, value, source, clamp, members = step.operands
            result, _, inside = to.partition("|")
            after = self.assign(result, "t.value") + (self.assign(inside, "t.holds") if inside else "")
            return self.collective(step, SHUFFLES[parts[2]], members, value, source, clamp), after
        if name == "vote" and parts[1] == "sync" and parts[2] in ("any", "all", "ballot"):
            to, given, members = step.operands
            holds = f"t.holds = {self.value(given, 'bool', step)};"
            kind = f"VOTE_{parts[2].upper()}"
            return f"{holds} {self.collective(step, kind, members)}", self.assign(to, "t.value")
        if name == "redux" and parts[2] in ("add", "min", "max") and type_of(step) == "u32":
            to, value, members = step.operands
            return self.collective(step, parts[2].upper(), members, value), self.assign(to, "t.value")
        if name in ("atom", "red"):
            return f"wait_for(t, TURN, {where}); " + self.atomic(step), ""
        if name == "ld":
            return f"wait_for(t, TURN, {where});", self.ins_ld(step)
        if name == "nanosleep":
            return f"wait_for(t, TURN, {where});", ""
        raise Unsupported(f"{step.opcode} ({step.where})")

    def collective(
        self, step: Instruction, what: str, members: str, value: str = "0", source: str = "0", clamp: str = "0"
    ) -> str:
        values = ", ".join(self.value(text, "u32", step) for text in (members, value, source, clamp))
        return f"wait_in_warp(t, {what}, {values}, {quoted(step)});"

    def atomic(self, step: Instruction) -> str:
        """The update itself, at once; then others may run."""
        operation = next((part for part in step.parts[1:-1] if part in ATOMICS), "")
        self.check_modifiers(step, {operation})
        if not operation:
            raise Unsupported(f"{step.opcode} ({step.where})")
        to, address, *given = step.operands if step.name == "atom" else ["_", *step.operands]
        kind = type_of(step)
        result = ATOMICS[operation].format(*(self.value(text, kind, step) for text in given))
        fenced = "fence(t); " if {"release", "acquire", "acq_rel"} & set(step.parts) else ""
        place = self.access(step, address, BYTES[kind], "ATOMIC")
        call = f"update<{kind}>({place}, [&]({kind} x) {{ return {kind}({result}); }})"
        return f"{fenced}{self.assign(to, call)}"

    def ins_barrier(self, step: Instruction) -> str:
        if step.parts[1:3] == ["cluster", "arrive"]:
            return "fence(t); t.has_arrived = true;"
        raise Unsupported(f"{step.opcode} ({step.where})")


def type_of(step: Instruction) -> str:
    kind = UNTYPED.get(step.parts[-1], step.parts[-1])
    if kind not in TYPES and kind != "bool":
        raise Unsupported(f"{step.opcode} ({step.where})")
    return kind


def word(register_type: str) -> str:
    return WORD.get(register_type) or WORD[re.sub(r"\D", "", register_type)]


def vector(text: str) -> list[str]:
    return [part.strip() for part in text.strip("{}()").split(",")]


def quoted(step: Instruction) -> str:
    return f'"{step.where} {step.opcode}"'
