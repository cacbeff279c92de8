#!/usr/bin/env python3
"""docs/cli.md is what scripts/reference.py makes of this program; the manual page formats; the completions complete.

    tests/repository/reference_test.py BUILD_DIR

A shell or a formatter that is not installed is named and left out; bash must be there.
"""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What is typed before TAB, and some of the words that are offered.
CASES = {
    "gyre tr": {"train"},
    "gyre train --opti": {"--optimizer"},
    "gyre train --optimizer ": {"sgd", "adam", "adamw"},
    "gyre train --optimizer=ad": {"adam", "adamw"},
    "gyre eval --wei": {"--weights"},
    "gyre launch --npr": {"--nproc-per-node"},
    "gyre launch -n 2 -- train --lr-sche": {"--lr-schedule"},
    "gyre train --lr-schedule one": {"one-cycle"},
    "gyre predict --weights pic": {"picture.safetensors"},
    "gyre predict pic": {"picture.safetensors"},
}
BASH = """source "$1"; read -ra COMP_WORDS <<<"${2//=/ = }"; [[ $2 != *' ' ]] || COMP_WORDS+=('')
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _gyre; printf '%s\\n' "${COMPREPLY[@]}" """
FISH = 'source $argv[1]; complete -C $argv[2] | string replace -r "\\t.*" ""; true'
# zsh completes only in its line editor: one in a pseudo-terminal, in which every word offered goes to a file as well.
ZSH_LINE = """PS1=; autoload -Uz compinit; compinit -u -D
compadd() {
    if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\\ * ]]; then builtin compadd "$@"; return; fi
    local -a words; builtin compadd -A words "$@"; print -rl -- $words >> offered; builtin compadd "$@"
}
finish() { touch finished }; comppostfuncs=(finish); touch started
"""
ZSH = """rm -f offered started finished; zmodload zsh/zpty zsh/zselect
zpty z "TERM=dumb FPATH=${1:h}:$FPATH zsh -f -i"
zpty -w z "source ./line"
while [[ ! -e started ]] { zselect -t 5 }
zpty -n -w z "$2"$'\\t'
while [[ ! -e finished ]] { zselect -t 5 }
zpty -d z; cat offered"""


def run(command: list[str], cwd: pathlib.Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60)
    if done.returncode != 0:
        sys.exit(f"{command[0]} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def main() -> None:
    gyre = pathlib.Path(sys.argv[1]).resolve() / "gyre"
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        run([str(ROOT / "scripts/reference.py"), str(gyre), "--pages", "pages", "--cli", "cli.md"], work)
        if (work / "cli.md").read_text() != (ROOT / "docs/cli.md").read_text():
            sys.exit("docs/cli.md is not of this program: run scripts/reference.py build/gyre --cli docs/cli.md")
        for command in json.loads(run([str(gyre), "info", "--commands"], work)):
            printed = re.findall(r"^  (?:-\w,)?--([\w-]+)", run([str(gyre), command["name"], "--help"], work), re.MULTILINE)
            declared = [option["name"] for option in command["options"] if not option["positional"]]
            if sorted(printed) != sorted([*declared, "help"]):
                sys.exit(f"gyre {command['name']} --help has other options than gyre info --commands")
        (work / "picture.safetensors").touch()
        (work / "line").write_text(ZSH_LINE)
        pages = work / "pages"
        if shutil.which("groff"):
            done = subprocess.run(["groff", "-man", "-ww", "-z", pages / "gyre.1"], capture_output=True, text=True)
            if done.returncode or done.stderr:
                sys.exit(f"the manual page: {done.stderr}")
        else:
            print("no groff: the manual page was not formatted")
        for shell, command in (("bash", ["bash", "-c", BASH, "-", "pages/gyre.bash"]),
                               ("fish", ["fish", "--no-config", "-c", FISH, "pages/gyre.fish"]),
                               ("zsh", ["zsh", "-f", "-c", ZSH, "-", str(pages / "_gyre")])):  # fmt: skip
            if shell != "bash" and shutil.which(shell) is None:
                print(f"no {shell}: its completion was not tried")
                continue
            for typed, expected in CASES.items():
                offered = set(run([*command, typed], work).replace("--optimizer=", "").split())
                if not expected <= offered:
                    sys.exit(f"{shell} offers {sorted(offered)} after {typed!r}, not {sorted(expected)}")
            print(f"{shell}: {len(CASES)} cases")


if __name__ == "__main__":
    main()
