#!/usr/bin/env python3
"""Writes the manual page, the shells' completions and docs/cli.md from the settings that gyre declares.

    scripts/reference.py GYRE [--pages DIR] [--cli FILE]

It asks the program GYRE (`gyre info --commands`) and the tables of docs/running.md and docs/install.md. --pages writes
gyre.1, gyre.bash, _gyre (zsh) and gyre.fish into DIR; --cli writes the page of all options.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[1]
MADE = "Made by scripts/reference.py from `gyre info --commands`; do not edit."


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading of a page."""
    text = (ROOT / "docs" / page).read_text().split(f"\n## {heading}\n", 1)[1]
    rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE).group().splitlines()[2:]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def flag(option: dict) -> str:
    return option["name"].upper() if option["positional"] else f"--{option['name']}"


def flags(option: dict) -> list[str]:
    return ([f"-{option['letter']}"] if option["letter"] else []) + [flag(option)]


def takes_file(option: dict) -> bool:
    return bool(re.search(r"FILE|DIR|PATH", option["type"]))


def choices(option: dict) -> list[str]:
    """The words that an option takes: those of on|off, and `auto` of N|auto."""
    return [word for word in option["type"].split("|") if re.fullmatch(r"[a-z0-9-]+", word)]


def brief(option: dict) -> str:
    """The first clause of the help, for one line beside the option."""
    return re.split(r"[;:\[(.](?: |$)|, (?:or|otherwise|such|where|if) ", option["help"])[0].strip()


def default_and_help(option: dict) -> tuple[str, str]:
    """The default, which the help ends with in brackets if it is not a single value, and the help without it."""
    if option["required"]:
        return "required", option["help"]
    ending = re.search(r" \[([^]]*)\]$", option["help"])
    return (ending.group(1), option["help"][: ending.start()]) if ending else (option["default"], option["help"])


def headings(command: dict) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {}
    for option in command["options"]:
        groups.setdefault(option["heading"] or "Options", []).append(option)
    return groups


# ---- docs/cli.md


def cell(text: str) -> str:
    return re.sub(r"(?<![\w`-])(--?[a-z][\w-]*)", r"`\1`", text).replace("|", "\\|").replace("*", "\\*")


def cli_page(commands: list[dict]) -> str:
    out = ["# Command line", "", f"<!-- {MADE} -->", "",
           "This page lists the options of all subcommands. [Running gyre](running.md) says how they belong together.", ""]  # fmt: skip
    for command in commands:
        out += [f"## gyre {command['name']}", "", command["about"] + ".", ""]
        if command["examples"]:
            title, *lines = command["examples"].splitlines()
            out += [title, "", *("  " + line for line in lines), ""]
        groups = headings(command)
        for heading, options in groups.items():
            if len(groups) > 1:
                out += [f"### {heading}", ""]
            out += ["| option | default | |", "|---|---|---|"]
            for option in options:
                typed = "`" + ", ".join(flags(option)) + (f" {option['type']}" if option["type"] else "") + "`"
                default, text = default_and_help(option)
                if option["excludes"]:
                    text += "; not with " + " or ".join("--" + other for other in option["excludes"])
                out.append(f"| {typed.replace('|', chr(92) + '|')} | {cell(default)} | {cell(text)} |")
            out.append("")
        if command["name"] == "train":
            own = [option for option in command["options"] if not option["all_ranks"] and not option["stands_for"]]
            free = [option for option in command["options"] if option["all_ranks"] and option["may_change_on_resume"]]
            out += ["### Ranks and resumed trainings", "",
                    cell("Ranks may differ in these (what --data and --config contain is compared): "
                         + ", ".join(map(flag, own)) + "."), "",
                    cell("A resumed training may change these as well: " + ", ".join(map(flag, free)) + "."), ""]  # fmt: skip
    return "\n".join(out).rstrip() + "\n"


# ---- The manual page


def roff(text: str) -> str:
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text).replace("\\", "\\e").replace("-", "\\-")
    text = re.sub(r"`([^`]+)`", r"\\fB\1\\fR", text)
    return "\\&" + text if text[:1] in (".", "'") else text


def manual(commands: list[dict], version: str) -> str:
    out = [f'.\\" {MADE}', f'.TH GYRE 1 "" "gyre {version}" "User Commands"', ".SH NAME",
           "gyre \\- a data\\-parallel trainer for convolutional nets", ".SH SYNOPSIS"]  # fmt: skip
    for command in commands:
        rest = " \\-\\- \\fICOMMAND\\fR" if command["name"] == "launch" else ""
        out += [".B gyre " + command["name"], f"[\\fIOPTIONS\\fR]{rest}", ".br"]
    for command in commands:
        out += [f".SH GYRE {command['name'].upper()}", roff(command["about"]) + "."]
        groups = headings(command)
        for heading, options in groups.items():
            if len(groups) > 1:
                out.append(f".SS {heading}")
            for option in options:
                default, text = default_and_help(option)
                names = ", ".join(f"\\fB{roff(name)}\\fR" for name in flags(option))
                out += [".TP", names + (f" \\fI{roff(option['type'])}\\fR" if option["type"] else ""),
                        roff(text) + "."]  # fmt: skip
                if default:
                    out.append("Required." if option["required"] else f"Default: {roff(default)}.")
        if command["examples"]:
            title, *lines = command["examples"].splitlines()
            out += [".PP", roff(title), ".PP", ".nf", *map(roff, lines), ".fi"]
    for title, page, heading in (("EXIT STATUS", "running.md", "Exit codes"), ("ENVIRONMENT", "install.md", "Environment")):
        out.append(f".SH {title}")
        for name, meaning in table(page, heading):
            out += [".TP", f"\\fB{roff(name.replace('`', ''))}\\fR", roff(meaning)]
    return "\n".join(out) + "\n"


# ---- Completions


def bash(commands: list[dict]) -> str:
    names = " ".join(command["name"] for command in commands)
    values, words = [], []
    for command in commands:
        every = [name for option in command["options"] if not option["positional"] for name in flags(option)]
        words.append(f'        {command["name"]}) words="{" ".join([*every, "--help"])}" ;;')
        for option in command["options"]:
            if option["type"] and not option["positional"]:
                pattern = "|".join(f"{command['name']}:{name}" for name in flags(option))
                what = f'words="{" ".join(choices(option))}"' + ("; files=1" if takes_file(option) else "")
                values.append(f"    {pattern}) {what} ;;")
    positional = "|".join(c["name"] for c in commands if any(o["positional"] for o in c["options"]))
    return f"""# bash completion for gyre. {MADE}
_gyre() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} command='' words='' files='' i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${{COMP_WORDS[i]}} in
        {names.replace(" ", " | ")}) [ -n "$command" ] || command=${{COMP_WORDS[i]}} ;;
        --) command='' ;; # gyre launch -- COMMAND
        esac
    done
    if [ "$word" = = ]; then # --option=
        word=''
    elif [ "$before" = = ]; then
        before=${{COMP_WORDS[COMP_CWORD - 2]}}
    fi
    case $command:$before in
{chr(10).join(values)}
    *)
        case $command in
        '') words="{names} --help --version" ;;
{chr(10).join(words)}
        esac
        [[ $word = -* || ! $command =~ ^({positional})$ ]] || files=1
        ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word"; [ -z "$files" ] || compgen -f -- "$word")
    [ -z "$files" ] || compopt -o filenames 2>/dev/null
}}
complete -F _gyre gyre
"""


def zsh(commands: list[dict]) -> str:
    def text(words: str) -> str:
        return re.sub(r"([\[\]:\\])", r"\\\1", words).replace("'", "'\\''")

    out = ["#compdef gyre", f"# {MADE}", "_gyre() {", "    local -a commands", "    local state line", "    commands=("]  # fmt: skip
    out += [f"        '{command['name']}:{text(command['about'])}'" for command in commands]
    out += ["    )", "    _arguments -C '(- *)'{-h,--help}'[Print help]' '(- *)--version[Print the version]' \\",
            "        '1:command:->command' '*::argument:->argument'", "    case $state in",
            "    command) _describe command commands ;;", "    argument)", "        case $words[1] in"]  # fmt: skip
    for command in commands:
        lines = ["'(- *)'{-h,--help}'[Print help]'"]
        for option in command["options"]:
            action = f":{text(option['type'])}:" + ("_files" if takes_file(option) else f"({' '.join(choices(option))})")
            if option["positional"]:
                lines.append(f"'*{action}'")
                continue
            for name in flags(option):
                joined = "=" if option["type"] and name.startswith("--") else ""
                lines.append(f"'{name}{joined}[{text(brief(option))}]{action if option['type'] else ''}'")
        if command["name"] == "launch":
            lines.append("'*:: :_gyre'")
        out += [f"        {command['name']})", "            _arguments \\", " \\\n".join(" " * 16 + line for line in lines),
                "            ;;"]  # fmt: skip
    return "\n".join([*out, "        esac", "        ;;", "    esac", "}", '_gyre "$@"', ""])


def fish(commands: list[dict]) -> str:
    def text(words: str) -> str:
        return words.replace("\\", "\\\\").replace("'", "\\'")

    out = [f"# fish completion for gyre. {MADE}", "complete -c gyre -f", "complete -c gyre -l version -d 'Print the version'",
           "complete -c gyre -s h -l help -d 'Print help'"]  # fmt: skip
    every = " ".join(command["name"] for command in commands)
    for command in commands:
        out.append(f"complete -c gyre -n 'not __fish_seen_subcommand_from {every}' -a {command['name']} -d '{text(command['about'])}'")
    out.append(f"complete -c gyre -n '__fish_seen_subcommand_from launch; and not __fish_seen_subcommand_from "
               f"{every.replace(' launch', '')}' -a '{every.replace(' launch', '')}'")  # fmt: skip
    for command in commands:
        # Behind `gyre launch --` fish takes all words for arguments.
        words = " ".join(flag(option) for option in command["options"] if not option["positional"])
        out.append(f"complete -c gyre -n '__fish_seen_subcommand_from {command['name']}; "
                   f"and contains -- -- (commandline -opc)' -a '{words}'")  # fmt: skip
        for option in command["options"]:
            line = f"complete -c gyre -n '__fish_seen_subcommand_from {command['name']}'"
            if option["positional"]:
                out.append(f"{line} -F")
                continue
            line += f" -l {option['name']}" + (f" -s {option['letter']}" if option["letter"] else "")
            if option["type"]:
                line += " -r -F" if takes_file(option) else f" -x -a '{' '.join(choices(option))}'"
            out.append(f"{line} -d '{text(brief(option))}'")
    return "\n".join(out) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gyre", type=pathlib.Path)
    parser.add_argument("--pages", type=pathlib.Path)
    parser.add_argument("--cli", type=pathlib.Path)
    arguments = parser.parse_args()

    def ask(*words: str) -> str:
        return subprocess.run([arguments.gyre, *words], capture_output=True, text=True, check=True).stdout

    commands = json.loads(ask("info", "--commands"))
    if arguments.cli:
        arguments.cli.write_text(cli_page(commands))
    if arguments.pages:
        arguments.pages.mkdir(parents=True, exist_ok=True)
        version = re.match(r"gyre (\S+)", ask("--version")).group(1)
        for name, text in (("gyre.1", manual(commands, version)), ("gyre.bash", bash(commands)),
                           ("_gyre", zsh(commands)), ("gyre.fish", fish(commands))):  # fmt: skip
            (arguments.pages / name).write_text(text)


if __name__ == "__main__":
    main()
