#!/usr/bin/env python3
"""The runner behind scripts/gpu-check.sh, on planted steps, and what the check reads from programs."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import signal
import stat
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
import unittest.mock

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
CHECK = SCRIPTS / "gpu_check"
sys.path.insert(0, str(CHECK))
import check as gpu_check  # noqa: E402
import steps as gpu_steps  # noqa: E402
from machine import gpus  # noqa: E402
from step_runner import FAIL, MOST_BYTES, PASS, SKIPPED, Command, Ran  # noqa: E402

# A program that runs the steps given as Python text, in a folder of the test's.
PROGRAM = """
import pathlib, sys
sys.path.insert(0, {scripts!r})
from step_runner import *
folder, archive = pathlib.Path({folder!r}), pathlib.Path({archive!r})
def sh(text, **options):
    return Command(["sh", "-c", text], **options)
runner = Runner(folder, archive, "planted", **dict({options}))
sys.exit(runner.run([{steps}]))
"""


class Planted(unittest.TestCase):
    def setUp(self) -> None:
        self.top = tempfile.TemporaryDirectory(prefix="gpu-check-test-")
        self.addCleanup(self.top.cleanup)
        self.folder = pathlib.Path(self.top.name, "work")
        self.folder.mkdir()
        self.archive = pathlib.Path(self.top.name, "results.tar.gz")

    def start(self, steps: str, options: str = "") -> subprocess.Popen:
        text = PROGRAM.format(scripts=str(CHECK), folder=str(self.folder), archive=str(self.archive),
                              steps=steps, options=options)
        return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True)

    def run_steps(self, steps: str, options: str = "") -> tuple[int, list[str]]:
        process = self.start(steps, options)
        output, _ = process.communicate(timeout=30)
        return process.returncode, output.splitlines()

    def member(self, name: str) -> str:
        with tarfile.open(self.archive) as tar:
            file = tar.extractfile(f"results/{name}")
            assert file
            return file.read().decode()

    def wait_for(self, path: pathlib.Path) -> None:
        end = time.monotonic() + 10
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.02)
        self.assertTrue(path.exists())

    def assert_gone(self, pid: int) -> None:
        for _ in range(100):
            try:
                if pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                    return
            except OSError:
                return
            time.sleep(0.02)
        self.fail(f"process {pid} is still there")

    def test_good_failing_and_hanging_steps(self) -> None:
        child = self.folder / "child"
        code, lines = self.run_steps(
            'Step("good", 5, [sh("echo fine")], lambda ran: (PASS, ran.text.split()[-1])),'
            'Step("bad", 5, [sh("true"), sh("echo reason; exit 7"), sh("echo still done")]),'
            # It ignores SIGTERM, and its child outlives it. It ends with gpu-check, should that be killed.
            f'Step("hangs", 3, [sh("trap : TERM; sleep 600 & echo $! >{child}; while kill -0 $PPID; do sleep 0.1; done")]),'
            'Step("unreadable", 5, [sh("true")], lambda ran: (PASS, {}["key"])),'
            'Step("not there", 5, [Command(["/no/such/program"])]),'
            'Step("left out", 5, [sh("true")], skip="no GPU")')
        self.assertEqual(code, 1)
        self.assertIn("failed steps: 4", lines[-1])
        self.assertIn(str(self.archive), lines[-1])
        verdicts = [line.split()[0] for line in lines[-7:-1]]
        self.assertEqual(verdicts, [PASS, FAIL, FAIL, FAIL, FAIL, SKIPPED])
        self.assertIn("exit code 7 of command 2 of 3", lines[-6])
        self.assertIn("ran out of time", lines[-5])
        self.assertIn("exit code 127", lines[-3])
        self.assertIn("   | reason", lines)  # the end of a failed step's log
        self.assertIn("still done", self.member("bad.log"))
        self.assertIn("failed steps: 4", self.member("summary.txt"))
        self.assert_gone(int(child.read_text()))

    def test_signals_from_outside(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            child = self.folder / f"child-{number}"
            process = self.start('Step("good", 5, [sh("echo fine")]),'
                                 f'Step("long", 60, [sh("echo begun; sleep 600 & echo $! >{child}.part; mv {child}.part {child}; wait")]),'
                                 'Step("later", 5, [sh("true")])')
            self.wait_for(child)
            process.send_signal(number)
            process.send_signal(number)
            output, _ = process.communicate(timeout=10)
            lines = output.splitlines()
            self.assertEqual(process.returncode, 128 + number)
            self.assertIn("failed steps: 2", lines[-1])
            self.assertEqual([line.split()[0] for line in lines[-4:-1]], [PASS, FAIL, FAIL])
            self.assertIn("ended from outside", lines[-3])
            self.assertIn("not done", lines[-2])
            self.assertIn("begun", self.member("long.log"))
            self.assert_gone(int(child.read_text()))

    def test_sigkill_loses_the_step_under_way_only(self) -> None:
        mark = self.folder / "mark"
        process = self.start(f'Step("good", 5, [sh("echo fine")]), Step("long", 60, [sh("touch {mark}; sleep 2")])')
        self.wait_for(mark)
        process.kill()
        process.communicate(timeout=10)
        self.assertIn("fine", self.member("good.log"))
        self.assertIn("PASS", self.member("summary.txt"))

    def test_time_for_all_steps(self) -> None:
        code, lines = self.run_steps(
            'Step("first", 60, [sh("sleep 600")]),'
            'Step("needed", 5, [sh("true")]), Step("extra", 5, [sh("true")], optional=True)',
            "budget=1.2")
        self.assertEqual(code, 1)
        self.assertEqual([line.split()[0] for line in lines[-4:-1]], [FAIL, FAIL, SKIPPED])
        self.assertIn("no time was left", lines[-3])

    def test_what_the_time_sufficed_for_counts_where_the_step_says_so(self) -> None:
        steps = 'Step("{0}", 1, [sh("echo one"), sh("sleep 600"), sh("echo two")], {1})'
        code, lines = self.run_steps(
            steps.format("counts", 'lambda ran: (PASS, str(ran.codes)), judge_failures=True') + ","
            + steps.format("optional", "optional=True"))
        self.assertEqual(code, 0)
        self.assertIn("[0, 124, None]", lines[-3])
        self.assertEqual(lines[-2].split()[0], SKIPPED)

    def test_a_broken_device_ends_the_check_and_what_runs_beside_ends(self) -> None:
        beside = self.folder / "beside"
        code, lines = self.run_steps(
            'Step("breaks", 5, [sh("exit 1")]), Step("after", 5, [sh("true")])',
            f'probe=sh("exit 3"), beside=sh("echo $$ >{beside}; sleep 600")')
        self.assertEqual(code, 1)
        self.assertEqual([line.split()[0] for line in lines[-3:-1]], [FAIL, SKIPPED])
        self.assertIn("has not worked since breaks", lines[-2])
        self.assert_gone(int(beside.read_text()))

    def test_long_files_lose_their_middle(self) -> None:
        code, _ = self.run_steps(
            f'Step("loud", 20, [sh("echo begin; head -c {3 * MOST_BYTES} /dev/zero; echo end")])')
        self.assertEqual(code, 0)
        text = self.member("loud.log")
        self.assertLess(len(text), MOST_BYTES + 200)
        self.assertIn("begin", text[:200])
        self.assertIn("end", text[-200:])
        self.assertIn("bytes left out", text)


# A stand-in for a program of Catch2 tests, of which "a [b], c" fails alone, and "sticky" only after it.
CATCH2 = """#!/bin/sh
case "$*" in
*--list-tests*) exit 1 ;;
*--list-test-names-only)
    printf 'good\\na [b], c < d\\nsticky\\nthe process died in this\\nnever begun\\n'
    exit 5 ;;
esac
if [ "$2" = -r ]; then
    echo "part: $1"
    cat >"$5" <<END
<TestCase name="good"><OverallResult success="true"/></TestCase>
<TestCase name="a [b], c &lt; d"><OverallResult success="false"/></TestCase>
<TestCase name="sticky"><OverallResult success="false"/></TestCase>
<TestCase name="the process died in this">
END
    exit 3
fi
echo "chosen: $1"
case $1 in a*) exit 1 ;; esac
"""


class Helpers(unittest.TestCase):
    def test_failed_unit_cases_run_again_alone(self) -> None:
        with tempfile.TemporaryDirectory() as top:
            program = pathlib.Path(top, "tests")
            program.write_text(CATCH2)
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
            run = subprocess.run([sys.executable, CHECK / "programs.py", "isolate", f"{top}/report", "2",
                                  program, "*"], capture_output=True, text=True, timeout=20)
        self.assertEqual(run.returncode, 1, run.stdout + run.stderr)
        self.assertIn("5 cases, 4 failed", run.stdout)
        self.assertIn(r"part: good,sticky,never begun", run.stdout)
        self.assertIn(r"part: a \[b\]\, c < d,the process died in this", run.stdout)
        self.assertIn("chosen: never begun", run.stdout)
        self.assertIn(r"chosen: a \[b\]\, c < d", run.stdout)
        self.assertIn("chosen: the process died in this", run.stdout)
        self.assertIn("FAILED ALONE: a [b], c < d", run.stdout)
        self.assertIn("failed alone: 1 of 5", run.stdout)

    def test_losses_are_compared(self) -> None:
        with tempfile.TemporaryDirectory() as top:
            def write(name: str, *values: str) -> pathlib.Path:
                path = pathlib.Path(top, name)
                path.write_text("".join(f'{{"event":"step","loss":{value}}}\n' for value in values))
                return path

            a = write("a", "2.0", "1.0")
            self.assertEqual(gpu_check.difference(a, a), 0.0)
            self.assertAlmostEqual(gpu_check.difference(a, write("b", "2.2", "1.0")), 0.1)
            self.assertEqual(gpu_check.difference(a, write("c", "2.0")), float("inf"))
            for bad in (write("d"), write("e", "null"), write("f", "NaN")):
                with self.assertRaises(ValueError):
                    gpu_check.losses(bad)

    def test_steps_of_a_real_check_fit_its_time(self) -> None:
        with tempfile.TemporaryDirectory() as top:
            check = gpu_check.Check(pathlib.Path(top), pathlib.Path(top), "", "cuda")
            try:
                steps = gpu_steps.make_steps(check)
            finally:
                check.close()
            self.assertLess(gpu_steps.BUDGET, 10 * 60)
            needed = [step for step in steps if not step.optional]
            self.assertLessEqual(sum(step.seconds for step in needed), gpu_steps.BUDGET)
            self.assertEqual(len({step.name for step in steps}), len(steps))
            # Bits are compared where algorithms are chosen by timing never, except with --deterministic.
            for step in steps:
                for command in step.commands if isinstance(step.commands, list) else []:
                    if "cudnn" in command.words:
                        self.assertTrue("--deterministic" in command.words or step.name == "accuracy")

    def test_every_case_of_use_on_a_gpu_is_chosen_there(self) -> None:
        found = 0
        for path in sorted((SCRIPTS.parent / "tests").rglob("*_test.cpp")):
            for case in path.read_text().split("\nTEST_CASE(")[1:]:
                head, body = case.split("{", 1)
                if any(f"{call}(" in body.split("\n}\n")[0]
                       for call in ("on_every_backend", "on_tensor_cores", "gpu_wanted", "check_narrow")):
                    found += 1
                    self.assertIn("[gpu]", head, f"{path.name}: {head}")
        self.assertGreater(found, 30)

    def test_goals_are_met_or_missed(self) -> None:
        self.assertEqual(gpu_steps.goal("a step", 14.96, 15.0, "us"), "a step 15.0 us, goal 15: met")
        self.assertIn("MISSED", gpu_steps.goal("a step", 15.04, 15.0, "us"))
        text = ("estimates: median error 41 % of 118 times; with constants fitted to every second, 12 % over these and "
                "17 % over the others: gap 1.90 us, issue x 1.10\n")
        self.assertIn("off at the median by 41.0 %, goal 30: MISSED (17 % with", gpu_steps.judged_estimates(text))
        self.assertEqual(gpu_steps.judged_estimates("no such line"), "no estimates")

    def test_a_sanitizer_without_errors_does_not_excuse_a_program_that_fails(self) -> None:
        clean, errors = "========= ERROR SUMMARY: 0 errors\n", "========= ERROR SUMMARY: 2 errors\n"
        tests, trains = ["memcheck", "build/unit_tests", "a case"], ["memcheck", "build/gyre", "train"]
        for commands, text, expected in (([(tests, 1), (trains, 0)], clean + clean, PASS),
                                         ([(tests, 1), (trains, 124)], clean, PASS),
                                         ([(trains, 0), (trains, None)], clean, PASS),
                                         ([(trains, 99)], errors, FAIL), ([(trains, 0)], "", FAIL),
                                         ([(trains, None)], "", FAIL), ([(trains, 1)], clean, FAIL),
                                         ([(tests, 139)], clean, FAIL)):
            with self.subTest(commands=commands, text=text), tempfile.TemporaryDirectory() as top:
                log = pathlib.Path(top, "log")
                log.write_text(text)
                self.assertEqual(gpu_steps.judge_sanitizer(Ran("memcheck", log, commands))[0], expected)

    def test_the_speed_of_steps_is_judged_by_estimates_for_this_gpu(self) -> None:
        for gpu, model in (("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA H200", "h200"),
                           ("NVIDIA GeForce RTX 4090", "")):
            with self.subTest(gpu), tempfile.TemporaryDirectory() as top:
                self.judge_speed(pathlib.Path(top), gpu, model)

    def judge_speed(self, top: pathlib.Path, gpu: str, model: str) -> None:
        smi = top / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\n[ \"$*\" = -L ] && echo 'GPU 0: {gpu} (UUID: GPU-a1002000)'\n")
        smi.chmod(0o755)
        check = gpu_check.Check(top, top, "data", "cuda")
        try:
            pathlib.Path(top, "bench-kernels").touch(0o755)
            with unittest.mock.patch.dict(os.environ, PATH=f"{top}:{os.environ['PATH']}"):
                step = gpu_steps.speed(check)
        finally:
            check.close()
        self.assertEqual(step.skip, "")
        asked = [word for command in step.commands for word in command.words if word.startswith("--gpu=")]
        self.assertEqual(asked, [f"--gpu={model}"] * 2 if model else [])
        for net, us in (("net", 12.0), ("wide", 500.0)):
            check.out(f"speed-{net}").write_text("".join(
                json.dumps({"event": "epoch", "images_per_second": 64e6 / each}) + "\n" for each in (9e9, us, us)))
        log = pathlib.Path(top, "log")
        log.write_text("2 launches, and in a graph of several steps 1 copy, 12.6 us by estimate\n"
                       "14 launches, and in a graph of several steps 1 copy, 250.0 us by estimate\n" if model else "")
        verdict, text = step.judge(Ran("speed", log, [(command.words, 0) for command in step.commands]))
        self.assertEqual(verdict, PASS)
        if not model:
            self.assertIn("net with 64 images 12.0 us, goal 15: met; no estimates for this GPU", text)
            self.assertIn("wide with 64 images 500.0 us, goal 400: MISSED; no estimates for this GPU", text)
            return
        self.assertIn("net with 64 images 12.0 us, goal 15: met; by estimate 12.6 us, off by 5.0 %, goal 30: met", text)
        self.assertIn("wide with 64 images 500.0 us, goal 400: MISSED; by estimate 250.0 us, off by 50.0 %", text)

    def test_wrong_use_and_no_gpu(self) -> None:
        def check(*words: str) -> subprocess.CompletedProcess:
            return subprocess.run([SCRIPTS / "gpu-check.sh", *words], capture_output=True, text=True,
                                  timeout=30, env=os.environ | {"PATH": os.environ["PATH"]})

        self.assertEqual(check("a", "b.tar.gz", "c").returncode, 2)
        self.assertEqual(check("--nonsense").returncode, 2)
        self.assertIn(".tar.gz", check("build", "results").stderr)
        if "GPU " not in gpus():
            found = check("build", f"{tempfile.gettempdir()}/never-written.tar.gz")
            self.assertEqual(found.returncode, 77)
            self.assertIn("no GPU", found.stderr)


class Pack(unittest.TestCase):
    def test_a_pack_is_small_complete_and_runs(self) -> None:
        build = os.environ.get("GYRE_BUILD")  # set by ctest
        if not build:
            self.skipTest("GYRE_BUILD names no build")
        with tempfile.TemporaryDirectory() as top:
            found = subprocess.run([SCRIPTS / "pack.sh", build, f"{top}/pack.tar.xz"], capture_output=True,
                                   text=True, timeout=100, env=os.environ | {"GYRE_PACK_MOST_KIB": "100"})
            self.assertEqual(found.returncode, 1)
            self.assertIn("more than 100", found.stderr)
            self.assertLess(os.path.getsize(f"{top}/pack.tar.xz"), 20 << 20)
            with tarfile.open(f"{top}/pack.tar.xz") as tar:
                tar.extractall(f"{top}/unpacked")
            for program in ("gyre", "unit_tests", "bench-kernels", "bench-allreduce"):
                self.assertTrue(os.access(f"{top}/unpacked/{program}", os.X_OK))
            run = subprocess.run([f"{top}/unpacked/gyre", "info"], capture_output=True, timeout=30,
                                 env=os.environ | {"LD_LIBRARY_PATH": f"{top}/unpacked/lib"})
            self.assertEqual(run.returncode, 0)
            # What estimates need is in it, too.
            run = subprocess.run([f"{top}/unpacked/bench-kernels", "--device=emulated", "--step=net", "--profile"],
                                 capture_output=True, text=True, timeout=60,
                                 env=os.environ | {"LD_LIBRARY_PATH": f"{top}/unpacked/lib"})
            self.assertEqual(run.returncode, 0, run.stderr)
            self.assertNotIn("profiler:", run.stderr)
            self.assertIn("training_pass_kernel", run.stdout)


class TorchPeer(unittest.TestCase):
    """bench/peers/torch_eager.py, as far as a CPU goes."""

    PEER = SCRIPTS.parent / "bench" / "peers" / "torch_eager.py"

    def call(self, python: str, *words: str) -> subprocess.CompletedProcess:
        return subprocess.run([python, str(self.PEER), *words], capture_output=True, text=True, timeout=200)

    def test_wrong_use_and_no_torch(self) -> None:
        found = self.call(sys.executable, "--forms", "eager,wrong")
        self.assertEqual(found.returncode, 2)
        self.assertIn("eager,fused,graph,compile", found.stderr)
        found = self.call(sys.executable, "--compare", "--gyre", "/bin/true", "--python", "/bin/false")
        self.assertEqual(found.returncode, 77)

    def test_all_forms_train_alike(self) -> None:
        # GYRE_TORCH_PYTHON may name an interpreter with torch.
        python = os.environ.get("GYRE_TORCH_PYTHON", sys.executable)
        if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode != 0:
            self.skipTest("no torch")
        with tempfile.TemporaryDirectory() as top:
            for name, header, item in (("images-idx3", [0x803, 40, 28, 28], 784), ("labels-idx1", [0x801, 40], 1)):
                data = bytes((7 * i * i) % (256 if item > 1 else 10) for i in range(40 * item))
                with gzip.open(f"{top}/train-{name}-ubyte.gz", "wb") as file:
                    file.write(struct.pack(f">{len(header)}I", *header) + data)
            for optimizer in ("sgd", "adam"):
                run = self.call(python, "--device", "cpu", "--data", top, "--batch-size", "8", "--steps", "4",
                                "--warmup", "4", "--repeats", "1", "--forms", "eager,fused,graph",
                                "--optimizer", optimizer)
                self.assertEqual(run.returncode, 0, run.stderr)
                lines = [json.loads(line) for line in run.stdout.splitlines()]
                self.assertEqual([line["form"] for line in lines], ["eager", "fused", "graph"])
                for line in lines[1:]:
                    self.assertAlmostEqual(line["mean_loss"], lines[0]["mean_loss"], places=5)


if __name__ == "__main__":
    unittest.main()
