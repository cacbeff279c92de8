#!/usr/bin/env python3
"""Checks the instructions of the compiled CUDA kernels against tests/kernels/sass_budget.txt.

    tests/kernels/sass_gate.py BUILD_DIR                   runs the gate, after a self-test
    tests/kernels/sass_gate.py BUILD_DIR --report          prints what each kernel consists of
    tests/kernels/sass_gate.py BUILD_DIR --write-budget    writes the budget from the current kernels
    tests/kernels/sass_gate.py BUILD_DIR --loops FILE      writes the figures of hot loops that bench-kernels
                                                   --resources reads for its estimates, in the
                                                   build's kernels/loops.txt

Needs nvdisasm and cuobjdump from the CUDA toolkit, or from PyPI without a GPU or a driver:
    python3 -m venv ~/cuda-tools && ~/cuda-tools/bin/pip install nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump
They are looked for in GYRE_NVDISASM (a path of nvdisasm), in PATH, next to nvcc, in this Python's
packages and where `scripts/setup.sh --all` installs them.
Exit codes: 0: all is well; 1: a kernel exceeds its budget, or the gate misses planted faults;
2: usage error; 77: skipped, as nvdisasm is missing.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile

import sass_listing

TESTS = pathlib.Path(__file__).resolve().parent
BUDGET = TESTS / "sass_budget.txt"
PLANTED = TESTS / "sass_planted.cu"
# Forbidden in every kernel unless an `allow` line of the budget gives the reason.
RULES = {"local": "accesses of local memory",
         "int_divisions": "integer divisions in loops",
         "float_divisions": "float divisions in loops"}
# Figures with a bound for each kernel, and how bounds are rounded when they are written.
BOUNDS = {
    "instructions": ("<=", lambda x: math.ceil(x * 1.03 / 10) * 10),
    "registers": ("<=", lambda x: math.ceil(x / 8) * 8),  # the hardware's unit of allocation
    "per_hmma": ("<=", lambda x: math.ceil(x * 10.2) / 10),
    "ffma_per_word": (">=", lambda x: math.floor(x * 9.8) / 10),
    "narrow_global": ("<=", lambda x: x),
    "fences": (">=", lambda x: x),  # the emulator does not notice missing ones
    "int_divisions": ("<=", lambda x: x),
    "float_divisions": ("<=", lambda x: x),
}
UNITS = {"per_hmma": "instructions per HMMA", "ffma_per_word": "FFMA per shared word",
         "narrow_global": "global accesses of less than 128 bits",
         "fences": "fences of global memory", **RULES}


class Refusal(Exception):
    """A message for the user, and the exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def run(*command: object, **options) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise Refusal(f"{' '.join(map(str, command))} failed:\n{done.stderr}", 1)
    return done.stdout


class Tools:
    def __init__(self, build: pathlib.Path) -> None:
        said = "".join(path.read_text() for path in build.glob("CMakeFiles/*/CMakeCUDACompiler.cmake"))
        found = re.search(r'set\(CMAKE_CUDA_COMPILER "(.+)"\)', said)
        if not found:
            raise Refusal(f"{build} is not a build with CUDA")
        self.nvcc = found.group(1)
        folders = [pathlib.Path(self.nvcc).parent]
        for packages in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            folders += sorted(pathlib.Path(packages).glob("nvidia/*/bin"), reverse=True)
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        folders += cache.glob("gyre/cuda-tools/lib/python3*/site-packages/nvidia/*/bin")
        given = os.environ.get("GYRE_NVDISASM")
        path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)])
        self.nvdisasm = shutil.which(given or "nvdisasm", path=path)
        if self.nvdisasm is None:
            raise Refusal("skipped: nvdisasm was not found; tests/kernels/sass_gate.py --help says how to "
                          "install it", 77)
        beside = str(pathlib.Path(self.nvdisasm).parent)
        self.cuobjdump = shutil.which("cuobjdump", path=beside + os.pathsep + path)
        if self.cuobjdump is None:
            raise Refusal("skipped: cuobjdump was not found next to nvdisasm or elsewhere; "
                          "tests/kernels/sass_gate.py --help says how to install it", 77)

    def versions(self) -> dict[str, str]:
        return {name: re.search(r"V(\d[\d.]*)", run(tool, "--version")).group(1)
                for name, tool in (("nvcc", self.nvcc), ("nvdisasm", self.nvdisasm))}

    def disassemble(self, object_file: pathlib.Path) -> list[sass_listing.Kernel]:
        """The kernels of all architectures that an object contains code for."""
        kernels: list[sass_listing.Kernel] = []
        with tempfile.TemporaryDirectory() as folder:
            run(self.cuobjdump, "-xelf", "all", object_file.resolve(), cwd=folder)
            for image in sorted(pathlib.Path(folder).glob("*.cubin")):
                arch = re.search(r"sm_\w+", image.name).group(0)
                listing = run(self.nvdisasm, "-c", image)
                kernels += sass_listing.parse(listing, arch).values()
        return kernels


def read_registers(kernels: list[sass_listing.Kernel], report: pathlib.Path) -> None:
    """Reads the output of ptxas from the build, if it was kept (scripts/ptxas-report.sh)."""
    used, current = {}, None
    for line in report.read_text().splitlines() if report.exists() else []:
        entry = re.search(r"Compiling entry function '(.+)' for '(.+)'", line)
        count = re.search(r"Used (\d+) registers", line)
        if entry:
            current = entry.groups()
        elif count:
            used[current] = int(count.group(1))
    for kernel in kernels:
        kernel.registers = used.get((kernel.name, kernel.arch))


def readable(mangled: list[str]) -> list[str]:
    """Demangles the names, without parameters and without the prefixes that all kernels share."""
    names = []
    for name in run("c++filt", input="\n".join(mangled)).splitlines():
        name = re.sub(r"\(anonymous namespace\)::|gyre::cuda::|^void ", "", name)
        depth, at = 0, len(name)
        while name.endswith(")"):
            at -= 1
            depth += {")": 1, "(": -1}.get(name[at], 0)
            if depth == 0:
                name = name[:at]
        names.append(name)
    return names


Kernels = dict[tuple[str, str], sass_listing.Analysis]  # by architecture and name


def analyse(tools: Tools, objects: list[pathlib.Path]) -> Kernels:
    """Names begin with the source's name, because several sources instantiate the same template."""
    result: Kernels = {}
    for object_file in objects:
        kernels = tools.disassemble(object_file)
        read_registers(kernels, object_file.with_name(object_file.name + ".resources"))
        source = object_file.name.split(".")[0]
        for kernel, name in zip(kernels, readable([kernel.name for kernel in kernels])):
            key = (kernel.arch, f"{source}/{name}")
            if key in result:
                raise Refusal(f"two kernels are called {key[1]}: rename one, so that budgets can "
                              "tell them apart", 1)
            result[key] = sass_listing.Analysis(kernel)
    return dict(sorted(result.items()))


class Budget:
    """`compiler VERSION`, `allow PATTERN: RULE [RULE ...]: REASON` (* in a pattern matches anything)
    and `ARCH NAME: FIGURE<=BOUND ...`."""

    def __init__(self, text: str) -> None:
        self.compiler = ""
        self.allowed: list[tuple[re.Pattern[str], list[str]]] = []
        self.bounds: dict[tuple[str, str], dict[str, float]] = {}
        self.kept: list[str] = []  # lines that --write-budget keeps
        self.lines: dict[tuple[str, str], str] = {}  # of the bounds
        for number, line in enumerate(text.splitlines(), 1):
            word, _, rest = line.partition(" ")
            if word.startswith("sm_"):
                name, _, bounds = rest.rpartition(": ")
                self.lines[word, name] = line
                self.bounds[word, name] = dict(
                    self.parse_bound(bound, number) for bound in bounds.split())
                continue
            if word == "compiler":
                self.compiler = rest
                continue
            self.kept.append(line)
            if word == "allow":
                parts = re.fullmatch(r"(.+?): ([a-z_ ]+): (.+)", rest)
                if not parts or not set(parts.group(2).split()) <= RULES.keys():
                    raise Refusal(f"line {number} of the budget: expected allow PATTERN: RULES: REASON")
                pattern = re.escape(parts.group(1)).replace(r"\*", ".*")
                self.allowed.append((re.compile(pattern), parts.group(2).split()))
            elif line and not line.startswith("#"):
                raise Refusal(f"line {number} of the budget: {line}")

    @staticmethod
    def parse_bound(text: str, number: int) -> tuple[str, float]:
        found = re.fullmatch(r"([a-z_]+)(<=|>=)([\d.]+)", text)
        if not found or BOUNDS.get(found.group(1), ("",))[0] != found.group(2):
            raise Refusal(f"line {number} of the budget: not a bound: {text}")
        return found.group(1), float(found.group(3))

    def allows(self, name: str, rule: str) -> bool:
        return any(rule in rules and pattern.fullmatch(name) for pattern, rules in self.allowed)

    def violations(self, arch: str, name: str, figures: dict[str, float | None],
                   with_bounds: bool = True) -> list[tuple[str, str]]:
        """Returns (figure, sentence) for each violation."""
        found = []
        for rule, what in RULES.items():
            if figures[rule] and not self.allows(name, rule):
                found.append((rule, f"{figures[rule]} {what}"))
        bounds = self.bounds.get((arch, name), {}) if with_bounds else {}
        for figure, bound in bounds.items():
            value, most = figures[figure], BOUNDS[figure][0] == "<="
            what = UNITS.get(figure, figure)
            if value is None:
                # A main loop that is no longer found counts as a violation.
                found.append((figure, f"no {what} found, although the budget has a bound"))
            elif value > bound if most else value < bound:
                found.append((figure, f"{value:.4g} {what}, at {'most' if most else 'least'} "
                                      f"{bound:g} in the budget"))
        return found


def write_budget(budget: Budget, kernels: Kernels, compiler: str) -> None:
    """Replaces the bounds of the architectures that were built."""
    lines = [*budget.kept]
    while lines and not lines[-1]:
        lines.pop()
    lines += ["", f"compiler {compiler}"]
    built = {arch for arch, _ in kernels}
    all_bounds = {key: line for key, line in budget.lines.items() if key[0] not in built}
    for (arch, name), analysis in kernels.items():
        bounds = []
        for figure, value in analysis.figures().items():
            if figure in BOUNDS and value is not None and (value or figure not in {"fences", *RULES}):
                sign, rounded = BOUNDS[figure]
                bounds.append(f"{figure}{sign}{rounded(value):g}")
        all_bounds[arch, name] = f"{arch} {name}: {' '.join(bounds)}"
    BUDGET.write_text("\n".join([*lines, *(all_bounds[key] for key in sorted(all_bounds))]) + "\n")


def by_width(counts: dict) -> str:
    return ", ".join(
        name + " " + " + ".join(f"{count} of {bits}" for bits, count in sorted(widths.items()))
        for name, widths in sorted(counts.items())) or "none"


def report(kernels: Kernels, versions: dict[str, str]) -> None:
    print("Kernels as compiled:", ", ".join(f"{name} {v}" for name, v in versions.items()))
    print("Counts are static instruction counts; widths of accesses are in bits. The hot "
          "loop is the\ninnermost one with the most HMMA, then FFMA, then instructions.")
    for (arch, name), a in kernels.items():
        print(f"\n{arch} {name}")
        print(f"  {a.instructions} instructions, {a.registers or '?'} registers, {a.loops} loops")
        print(f"  accesses: {by_width(a.accesses)}")
        divisions = ", ".join(f"{count} {kind}" for kind, count in sorted(a.divisions.items()))
        print(f"  local memory: {a.local or 'none'}; divisions in loops: {divisions or 'none'}; "
              f"fences: {a.fences or 'none'}")
        if a.hot:
            mix = ", ".join(f"{count} {op}" for op, count in a.mix.most_common(12))
            print(f"  hot loop: {len(a.hot)} instructions: {mix}")
            print(f"    accesses: {by_width(a.hot_accesses)}")
        if a.per_hmma() is not None:
            print(f"    {a.per_hmma():.1f} instructions per HMMA")
        if a.ffma_per_word() is not None:
            print(f"    {a.ffma_per_word():.2f} FFMA per word of shared memory")


def write_loops(kernels: Kernels, path: pathlib.Path) -> None:
    """ARCH, instructions per HMMA and per useful instruction (0: none), and the kernel's name."""
    path.write_text("".join(
        f"{arch} {a.per_hmma() or 0:.2f} {a.per_useful() or 0:.2f} {name.partition('/')[2]}\n"
        for (arch, name), a in kernels.items()))


def self_test(tools: Tools) -> list[str]:
    """Comments of the planted kernels list the expected findings, `// sass NAME: FIGURE ...`, and the
    budget, `// budget LINE`."""
    source = PLANTED.read_text()
    with tempfile.TemporaryDirectory() as folder:
        planted = pathlib.Path(folder) / "planted.o"
        run(tools.nvcc, "-std=c++20", "-O3", "-c", "-gencode", "arch=compute_90,code=sm_90",
            PLANTED, "-o", planted)
        kernels = analyse(tools, [planted])
    budget = Budget("\n".join(re.findall(r"^// budget (.+)$", source, re.M)))
    expected = {"planted/" + name: set(figures.split())
                for name, figures in re.findall(r"^// sass (\w+):(.*)$", source, re.M)}
    wrong = []
    if {name for _, name in kernels} != expected.keys() or not expected:
        wrong.append(f"{PLANTED.name}: its kernels are {sorted(name for _, name in kernels)}")
    for (arch, name), analysis in kernels.items():
        found = {figure for figure, _ in budget.violations(arch, name, analysis.figures())}
        if found != expected.get(name, set()):
            wrong.append(f"planted {name}: flagged for {sorted(found)}, expected "
                         f"{sorted(expected.get(name, set()))}: {analysis.figures()}")
    return wrong


def gate(kernels: Kernels, budget: Budget, compiler: str) -> list[str]:
    # Counts differ between compilers.
    same = budget.compiler == compiler
    if not same:
        print(f"the budget's bounds are for nvcc {budget.compiler}, but these kernels are by nvcc "
              f"{compiler}: only the general rules are checked")
    wrong = []
    for (arch, name), analysis in kernels.items():
        for _, sentence in budget.violations(arch, name, analysis.figures(), same):
            wrong.append(f"{arch} {name}: {sentence}")
    built = {arch for arch, _ in kernels}
    for arch, name in budget.bounds.keys() - kernels.keys() if same else ():
        if arch in built:
            wrong.append(f"{arch} {name}: in the budget but not in the build")
    return sorted(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--write-budget", action="store_true")
    parser.add_argument("--loops", type=pathlib.Path)
    options = parser.parse_args()
    tools = Tools(options.build)
    objects = sorted((options.build / "kernels").rglob("*.cu.o"))
    # The emulator's objects have the same names but contain no image.
    objects = [path for path in objects if "gyre_cuda_kernels.dir" in path.parts]
    if not objects:
        raise Refusal(f"no compiled kernels under {options.build}: build gyre_cuda_kernels first", 1)
    kernels = analyse(tools, objects)
    if not kernels:
        raise Refusal("the objects contain no kernel: did the wording of nvdisasm change?", 1)
    versions = tools.versions()
    compiler = ".".join(versions["nvcc"].split(".")[:2])
    if options.report:
        report(kernels, versions)
        return 0
    if options.loops:
        write_loops(kernels, options.loops)
        return 0
    budget = Budget(BUDGET.read_text())
    if options.write_budget:
        write_budget(budget, kernels, compiler)
        budget = Budget(BUDGET.read_text())
    wrong = self_test(tools) + gate(kernels, budget, compiler)
    for line in wrong:
        print(line)
    if wrong:
        print("If this is intended, run tests/kernels/sass_gate.py BUILD_DIR --write-budget or add an `allow` "
              "line with the reason")
        return 1
    archs = ", ".join(sorted({arch for arch, _ in kernels}))
    print(f"{len(kernels)} kernels ({archs}) are within their budget, and the planted faults are found")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Refusal as refusal:
        print(refusal, file=sys.stderr if refusal.code == 2 else sys.stdout)
        sys.exit(refusal.code)
