"""Analyses nvdisasm's listing of a compiled kernel: its loops, their instructions, the widths of its
accesses and its divisions. For tests/kernels/sass_gate.py."""

import re
from collections import Counter, OrderedDict

# There is no instruction for an integer division by a value unknown at compile time. 32 bits: a
# reciprocal (I2F.RP, MUFU.RCP, F2I), often hoisted out of the loop, and within it an estimate of the
# quotient, q = IMAD.HI.U32(n, reciprocal), its remainder r = n - q d, and a correction,
# ISETP.GE.U32(r, d) with a subtraction under that predicate. A division by a constant multiplies by
# an immediate, and one through a multiplier from the host has no correction, so neither is counted.
# 64 bits: a call of __cuda_sm20_div_s64 and the like (with a 32-bit division as a short cut, which
# is counted too). An IEEE division of floats has one FCHK.
CORRECTION_WINDOW = 60  # instructions, because the scheduler interleaves others
WIDE_DIVISION = re.compile(r"__cuda_sm\d+x?_(div|rem)_[su]64")

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
REGISTER = re.compile(r"\bU?R\d+\b")
TARGETS = re.compile(r'"BRANCH_TARGETS ([^"]+)"')  # of an indirect jump
LABEL = re.compile(r"`\((\.L_x_\d+)\)")
ACCESSES = ("LDG", "STG", "LDGSTS", "RED", "ATOMG", "LDS", "STS", "LDSM", "LDL", "STL")
ENDS = ("EXIT", "RET", "BRX", "JMX", "KILL")
# Instructions that compute a remainder from the estimated quotient.
CARRIES = ("MOV", "IMAD", "IADD3", "IADD", "VIADD")


class Instruction:
    def __init__(self, predicate, opcode, operands):
        self.predicate = predicate or ""
        self.opcode = opcode
        # Treat an instruction's uniform variant like the instruction itself.
        self.base = re.sub(r"^U(?=I|MOV|LOP|SEL|SHF|LEA)", "", opcode)
        self.family = self.base.split(".")[0]
        self.text = operands.strip()
        self.operands = [part.strip() for part in self.text.split(",")]

    def destination(self):
        found = REGISTER.search(self.operands[0])
        return found.group(0) if found else None

    def sources(self):
        return set(REGISTER.findall(",".join(self.operands[1:])))


class Kernel:
    def __init__(self, name, arch):
        self.name, self.arch = name, arch
        self.registers = None
        self.code = []
        self.labels = {}

    def trim(self):
        """Removes the padding after the last instruction."""
        while self.code and self.code[-1].family == "NOP":
            self.code.pop()
        last = self.code[-1] if self.code else None
        if last and last.family == "BRA" and self.target(last) == len(self.code) - 1:
            self.code.pop()

    def target(self, instruction):
        found = LABEL.search(instruction.text)
        return self.labels.get(found.group(1)) if found else None


def parse(listing, arch):
    """Returns the kernels of an image by mangled name."""
    kernels = OrderedDict()
    kernel = None
    for line in listing.splitlines():
        section = re.match(r"^\.text\.(\S+):", line)
        if section:
            kernel = kernels.setdefault(section.group(1), Kernel(section.group(1), arch))
        elif kernel is not None:
            label = re.match(r"^(\.L_x_\d+):", line)
            found = INSTRUCTION.match(line)
            if label:
                kernel.labels[label.group(1)] = len(kernel.code)
            elif found:
                kernel.code.append(Instruction(*found.groups()[1:]))
    for kernel in kernels.values():
        kernel.trim()
    return kernels


def basic_blocks(kernel):
    """Returns [(begin, end)] and, for each block, its possible successors. Calls return."""
    starts = {0} | set(kernel.labels.values())
    jumps = {}
    for i, instruction in enumerate(kernel.code):
        target = kernel.target(instruction)
        # BSSY only marks the point where threads reconverge.
        jumps_away = target is not None and instruction.family in ("BRA", "JMP", "WARPSYNC")
        if jumps_away:
            jumps[i] = target
        if jumps_away or instruction.family in ENDS:
            starts.add(i + 1)
    starts = sorted(start for start in starts if start < len(kernel.code))
    blocks = list(zip(starts, starts[1:] + [len(kernel.code)]))
    at = {begin: index for index, (begin, _) in enumerate(blocks)}
    following = []
    for index, (_, end) in enumerate(blocks):
        last = kernel.code[end - 1]
        listed = TARGETS.search(last.text)
        labels = listed.group(1).split(",") if listed else []
        nexts = {at[kernel.labels[label]] for label in labels if kernel.labels.get(label) in at}
        if end - 1 in jumps and jumps[end - 1] in at:
            nexts.add(at[jumps[end - 1]])
        always = not last.predicate and (
            last.family in ENDS
            or (end - 1 in jumps and last.opcode == "BRA" and len(last.operands) == 1))
        if not always and index + 1 < len(blocks):
            nexts.add(index + 1)
        following.append(nexts)
    return blocks, following


def dominators(following):
    """For each reachable block, the set of its dominators, as bits."""
    order, seen, stack = [], {0}, [(0, iter(following[0]))]
    while stack:
        block, rest = stack[-1]
        for successor in rest:
            if successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(following[successor])))
                break
        else:
            order.append(block)
            stack.pop()
    order.reverse()
    before = {block: [] for block in order}
    for block in order:
        for successor in following[block]:
            before[successor].append(block)
    everything = (1 << len(following)) - 1
    above = {block: everything for block in order}
    above[0] = 1
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            common = everything
            for predecessor in before[block]:
                common &= above[predecessor]
            common |= 1 << block
            if common != above[block]:
                above[block], changed = common, True
    return above, before


def find_loops(kernel):
    """Natural loops as sets of instructions, defined by a branch back to a dominator. Code moved past
    the kernel's end that jumps back is therefore not a loop."""
    if not kernel.code:
        return []
    blocks, following = basic_blocks(kernel)
    above, before = dominators(following)
    bodies = {}
    for block in above:
        for head in following[block]:
            if above[block] >> head & 1:
                body, waiting = bodies.setdefault(head, {head}), [block]
                while waiting:
                    inner = waiting.pop()
                    if inner not in body:
                        body.add(inner)
                        waiting += before[inner]
    return [(head, body, sorted(i for block in body for i in range(*blocks[block])))
            for head, body in bodies.items()]


def innermost(loops):
    return [code for head, body, code in loops
            if not any(other in body for other, _, _ in loops if other != head)]


def own_code(loops):
    """For each loop, its instructions outside inner loops."""
    return [sorted(set(code).difference(*(inner for head_inner, _, inner in loops
                                          if head_inner != head and head_inner in body)))
            for head, body, code in loops]


def corrects(kernel, at):
    """Whether the product at `at` is the estimate of a quotient (see the top of this file)."""
    carried, remainders, checks = {kernel.code[at].destination()}, set(), {}
    for instruction in kernel.code[at + 1:at + CORRECTION_WINDOW]:
        destination, sources = instruction.destination(), instruction.sources()
        if re.match(r"ISETP\.(GE|GT|LE|LT)\.U32", instruction.base):
            compared = sources & remainders
            if compared:
                checks[instruction.operands[0]] = compared
            continue
        predicate = instruction.predicate.lstrip("@!")
        if destination in checks.get(predicate, ()):
            return True
        if instruction.family in CARRIES and sources & carried:
            (remainders if instruction.base == "IMAD" else carried).add(destination)
        elif not instruction.predicate:
            carried.discard(destination)
            remainders.discard(destination)
    return False


def is_division(kernel, at):
    """Returns int32, int64, float or None."""
    instruction = kernel.code[at]
    if instruction.family == "FCHK":
        return "float"
    if instruction.family == "CALL" and WIDE_DIVISION.search(instruction.text):
        return "int64"
    if instruction.base == "IMAD.HI.U32" and instruction.operands[3] in ("RZ", "URZ"):
        if not any(re.match(r"-?0x", factor) for factor in instruction.operands[1:3]):
            return "int32" if corrects(kernel, at) else None
    return None


def width(opcode):
    """The number of bits that one thread accesses."""
    parts = opcode.split(".")
    if parts[0] == "LDSM":
        return 32 * int(parts[-1]) if parts[-1].isdigit() else 32
    for bits in (128, 64):
        if str(bits) in parts:
            return bits
    return 8 if {"U8", "S8"} & set(parts) else 16 if {"U16", "S16"} & set(parts) else 32


def accesses(code):
    """{name: {bits: count}}"""
    counts = {}
    for instruction in code:
        if instruction.family in ACCESSES:
            bits = counts.setdefault(instruction.family, Counter())
            bits[width(instruction.opcode)] += 1
    return counts


class Analysis:
    """A kernel's figures. Counts are static, whatever path a thread takes."""

    def __init__(self, kernel):
        self.kernel = kernel
        loops = find_loops(kernel)
        in_loops = {i for _, _, code in loops for i in code}
        self.loops = len(loops)
        self.instructions = len(kernel.code)
        self.registers = kernel.registers
        self.accesses = accesses(kernel.code)
        self.local = sum(sum(self.accesses.get(name, {}).values()) for name in ("LDL", "STL"))
        kinds = [is_division(kernel, i) for i in sorted(in_loops)]
        self.divisions = Counter(kind for kind in kinds if kind)
        self.fences = sum(instruction.family == "MEMBAR" for instruction in kernel.code)
        self.narrow_global = sum(
            count for name in ("LDG", "STG", "LDGSTS")
            for bits, count in self.accesses.get(name, {}).items() if bits < 128)
        weight = lambda code: (
            sum(kernel.code[i].family == "HMMA" for i in code),
            sum(kernel.code[i].family == "FFMA" for i in code), len(code))
        hot = max(innermost(loops), key=weight, default=[])
        if weight(hot)[:2] == (0, 0):  # inner loops may only compute indices
            hot = max([hot, *(code for code in own_code(loops) if weight(code)[:2] > (0, 0))],
                      key=weight)
        self.hot = [kernel.code[i] for i in hot]
        self.mix = Counter(
            instruction.family for instruction in self.hot)
        self.hot_accesses = accesses(self.hot)

    def per_hmma(self):
        return len(self.hot) / self.mix["HMMA"] if self.mix["HMMA"] else None

    def shared_words(self):
        return sum(bits * count for name in ("LDS", "LDSM")
                   for bits, count in self.hot_accesses.get(name, {}).items()) / 32

    def ffma_per_word(self):
        """None unless the loop multiplies values from shared memory."""
        words = self.shared_words()
        return self.mix["FFMA"] / words if words and self.mix["FFMA"] >= 8 else None

    def per_useful(self):
        """Instructions of the hot loop per instruction that computes in float or accesses memory."""
        useful = sum(self.mix[name] for name in ("FFMA", "FADD", "FMUL", *ACCESSES))
        return len(self.hot) / useful if useful else None

    def figures(self):
        """The figures that a budget bounds, by name."""
        return {
            "instructions": self.instructions,
            "registers": self.registers,
            "per_hmma": self.per_hmma(),
            "ffma_per_word": self.ffma_per_word(),
            "narrow_global": self.narrow_global,
            "fences": self.fences,
            "local": self.local,
            "int_divisions": self.divisions["int32"] + self.divisions["int64"],
            "float_divisions": self.divisions["float"],
        }
