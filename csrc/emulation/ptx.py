"""Reads PTX, the assembly that nvcc makes of a kernel: its registers and instructions, and which registers live where.

Only reads. `translate.py` says what an instruction does. Names keep their spelling, but a register that is declared in
an inner scope (inline assembly has those) gets its scope's number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

REGISTER = re.compile(r"%?[A-Za-z_$][\w$]*(?:\.[xyz])?")
DECLARATION = re.compile(
    r"(?:\.(?:visible|extern|weak)\s+)*\.(?P<space>param|shared|local|global|const|reg)\s+(?:\.align\s+(?P<align>\d+)\s+)?"
    r"(?:\.v[24]\s+)?\.(?P<type>\w+)\s+(?P<name>[\w$%]+)(?:<(?P<copies>\d+)>|\[(?P<count>\d*)\])?\s*(?:=\s*(?P<initial>.*))?$",
    re.DOTALL,
)
NO_RESULT = frozenset("st red bra bar barrier ret exit membar fence call trap prefetch nanosleep cp mbarrier".split())
JUMPS = frozenset(("bra", "ret", "exit", "trap"))


class Unsupported(ValueError):
    """An instruction or a form of one that the translator does not know: which, and where it came from."""


@dataclass(frozen=True)
class Variable:
    """A named piece of memory; `bytes` is 0 for shared memory whose size the launch gives."""

    name: str
    space: str
    bytes: int
    align: int
    initial: str = ""


@dataclass
class Instruction:
    opcode: str
    operands: list[str]
    guard: str = ""  # the predicate under which it is executed, with a ! before it if that is negated
    where: str = ""  # its source line, or its place in a kernel that was made without lines

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    @property
    def name(self) -> str:
        return self.parts[0]

    @property
    def written(self) -> set[str]:
        if self.name in NO_RESULT or not self.operands:
            return set()
        return set(REGISTER.findall(self.operands[0])) - {"_"}

    @property
    def read(self) -> set[str]:
        first = 0 if self.name in NO_RESULT else 1
        text = " ".join([*self.operands[first:], self.guard])
        return {name for name in REGISTER.findall(text)}


@dataclass
class Kernel:
    name: str
    parameters: list[Variable]
    variables: list[Variable] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    code: list[Instruction | str] = field(default_factory=list)  # a string is a label


@dataclass
class Module:
    kernels: list[Kernel]
    variables: list[Variable]


def read(text: str) -> Module:
    files = {number: path.rpartition("/")[2] for number, path in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"\n\s*\.section.*", "", text, flags=re.DOTALL)  # tables for debuggers, at the end
    text = re.sub(r"^\.(version|target|address_size)[^\n]*|^\s*\.file[^\n]*", "", text, flags=re.MULTILINE)
    module = Module([], [])
    for declaration, body in top_level(text):
        header = re.match(r"(?:\.(?:visible|weak)\s+)*\.(entry|func)\s+([\w$]+)\s*\((.*?)\)", declaration, re.DOTALL)
        if header and header[1] == "entry":
            parameters = [variable(part) for part in header[3].split(",") if part.strip()]
            module.kernels.append(read_body(Kernel(header[2], parameters), body, files))
        elif body:
            raise Unsupported(f"{' '.join(declaration.split())[:200]}: a function that was not inlined")
        elif DECLARATION.match(declaration):
            module.variables.append(variable(declaration))
    return module


def top_level(text: str) -> Iterator[tuple[str, str]]:
    """Declarations, and the body of those that have one in braces; initial values belong to the declaration."""
    start = position = 0
    while position < len(text):
        if text[position] == ";":
            yield text[start:position].strip(), ""
            start = position + 1
        elif text[position] == "{" and "=" not in text[start:position]:
            depth, begin = 1, position + 1
            while depth:
                position += 1
                depth += {"{": 1, "}": -1}.get(text[position], 0)
            yield text[start : begin - 1].strip(), text[begin:position]
            start = position + 1
        position += 1


def variable(declaration: str) -> Variable:
    found = DECLARATION.match(declaration.strip())
    if found is None:
        raise Unsupported(f"declaration {' '.join(declaration.split())}")
    bits = 8 if found["type"] == "pred" else int(re.sub(r"\D", "", found["type"]))
    count = 1 if found["count"] is None else int(found["count"] or 0)
    align = int(found["align"] or bits // 8)
    return Variable(found["name"], found["space"], bits // 8 * count, align, (found["initial"] or "").strip())


def read_body(kernel: Kernel, body: str, files: dict[str, str]) -> Kernel:
    where, scopes, opened = "", [{}], 0
    for statement in statements(body):
        if statement == "{":
            opened += 1
            scopes.append({"": f"__{opened}"})
        elif statement == "}":
            scopes.pop()
        elif statement.endswith(":"):
            kernel.code.append(statement[:-1])
        elif statement.startswith(".loc"):
            where = source_line(statement, files)
        elif statement.startswith("."):
            declare(kernel, statement, scopes)
        else:
            kernel.code.append(instruction(statement, scopes, where or f"statement {len(kernel.code)}"))
    return kernel


def source_line(statement: str, files: dict[str, str]) -> str:
    """File and line; of what comes from CUDA's own headers, the line that called it."""
    found = re.search(r"^\.loc\s+(\d+)\s+(\d+)", statement)
    caller = re.search(r"inlined_at\s+(\d+)\s+(\d+)", statement)
    if caller and files.get(found[1], "").endswith(".hpp"):
        found = caller
    return f"{files.get(found[1], found[1])}:{found[2]}"


def statements(body: str) -> Iterator[str]:
    """Labels end in a colon, braces stand alone where they open or close a scope."""
    body = re.sub(r"(\n\s*\.loc[^\n]*)", r"\1;", body)
    pending, depth = "", 0
    for character in body:
        if not pending.strip() and character in "{}":
            yield character
            pending = ""
        elif character == ";" and not depth:
            yield " ".join(pending.split())
            pending = ""
        elif character == ":" and re.fullmatch(r"\s*[\w$]+", pending):
            yield pending.strip() + ":"
            pending = ""
        else:
            depth += {"{": 1, "}": -1}.get(character, 0)
            pending += character


def declare(kernel: Kernel, statement: str, scopes: list[dict[str, str]]) -> None:
    found = DECLARATION.match(statement)
    if found and found["space"] == "reg":
        bare, scope = found["name"], scopes[-1]
        names = [f"{bare}{i}" for i in range(int(found["copies"]))] if found["copies"] else [bare]
        for name in names:
            unique = name + scope.get("", "")
            kernel.registers[unique] = found["type"]
            scope[name] = unique
    elif found:
        kernel.variables.append(variable(statement))
    elif not statement.startswith((".pragma", ".maxntid", ".minnctapersm", ".reqntid")):
        raise Unsupported(f"{statement} in {kernel.name}")


def instruction(statement: str, scopes: list[dict[str, str]], where: str) -> Instruction:
    guarded = re.match(r"@(!?%?[\w$]+)\s+(.*)", statement)
    guard, statement = guarded.groups() if guarded else ("", statement)

    def resolve(text: str) -> str:
        if len(scopes) == 1:
            return text
        names = {name: unique for scope in scopes[1:] for name, unique in scope.items() if name}
        return re.sub(REGISTER, lambda found: names.get(found[0], found[0]), text)

    opcode, _, rest = statement.partition(" ")
    return Instruction(opcode, [resolve(part) for part in split_operands(rest)], resolve(guard), where)


def split_operands(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += {"{": 1, "[": 1, "(": 1, "}": -1, "]": -1, ")": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def live_after(kernel: Kernel) -> dict[int, set[str]]:
    """For each place in the code, the registers whose values are still read after it."""
    code, names = kernel.code, {name: 1 << i for i, name in enumerate(kernel.registers)}

    def bits(found: set[str]) -> int:
        return sum(names[name] for name in found if name in names)

    places = {label: i for i, label in enumerate(code) if isinstance(label, str)}
    reads = [0 if isinstance(step, str) else bits(step.read) for step in code]
    writes = [0 if isinstance(step, str) or step.guard else bits(step.written) for step in code]
    after, changed = [0] * (len(code) + 1), True
    before = [0] * (len(code) + 1)
    while changed:
        changed = False
        for i in range(len(code) - 1, -1, -1):
            step, out = code[i], before[i + 1]
            if isinstance(step, Instruction) and step.name in JUMPS:
                target = before[places[step.operands[0]]] if step.name == "bra" else 0
                out = (out if step.guard else 0) | target
            needed = reads[i] | (out & ~writes[i])
            if needed != before[i] or out != after[i]:
                before[i], after[i], changed = needed, out, True
    return {i: {name for name, bit in names.items() if after[i] & bit} for i, step in enumerate(code) if suspends(step)}


def suspends(step: Instruction | str) -> bool:
    """True where other threads run before the instruction is done."""
    if isinstance(step, str):
        return False
    strong = {"volatile", "acquire", "relaxed"} & set(step.parts)
    return (
        step.name in ("bar", "barrier", "shfl", "vote", "redux", "elect", "atom", "red", "nanosleep")
        or (step.name == "ld" and bool(strong))
    ) and "arrive" not in step.parts
