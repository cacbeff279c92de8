"""The learning rates of torch's schedulers, for torch_parity.py.

golden_rates.json, which golden_test.cpp compares gyre with, is written from them, and compared with
them where there is a torch.
"""

from __future__ import annotations

import json
import pathlib

# gyre's flags, and torch's scheduler for (optimiser, steps of an epoch, all steps).
RATE, EPOCHS, STEPS = 0.125, 4, 7
GOLDEN = pathlib.Path(__file__).resolve().parent / "golden_rates.json"
CASES = [
    ("", lambda s, o, epoch, all: s.ConstantLR(o, 1.0)),
    ("--lr-schedule step --lr-step-size 1", lambda s, o, epoch, all: s.StepLR(o, epoch)),
    ("--lr-schedule step --lr-step-size 2 --lr-gamma 0.7 --warmup-steps 3",
     lambda s, o, epoch, all: after_warm_up(s, o, 3, s.StepLR(o, 2 * epoch, 0.7))),
    ("--lr-schedule cosine", lambda s, o, epoch, all: s.CosineAnnealingLR(o, all)),
    ("--lr-schedule cosine --lr-min 0.01 --warmup-epochs 1",
     lambda s, o, epoch, all:
     after_warm_up(s, o, epoch, s.CosineAnnealingLR(o, all - epoch, 0.01))),
    ("--warmup-epochs 2",
     lambda s, o, epoch, all: after_warm_up(s, o, 2 * epoch, s.ConstantLR(o, 1.0))),
    ("--lr-schedule one-cycle",
     lambda s, o, epoch, all: s.OneCycleLR(o, RATE, total_steps=all, cycle_momentum=False)),
]  # fmt: skip


def after_warm_up(schedulers, optimizer, steps: int, scheduler):
    """The scheduler, after as many steps of a rate that rises from a hundredth."""
    rising = schedulers.LinearLR(optimizer, start_factor=0.01, total_iters=steps)
    return schedulers.SequentialLR(optimizer, [rising, scheduler], milestones=[steps])


def rates_of_steps() -> list[dict]:
    """The learning rate of every step, for each of CASES."""
    import warnings

    import torch

    warnings.simplefilter("ignore")  # of SequentialLR about its own use of the schedulers
    found = []
    for flags, make in CASES:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
        scheduler = make(torch.optim.lr_scheduler, optimizer, STEPS, EPOCHS * STEPS)
        rates = []
        for _ in range(EPOCHS * STEPS):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        found.append({"flags": flags, "rates": rates})
    return found


def write(path: pathlib.Path) -> int:
    """Writes rates_of_steps(), a case a line."""
    import torch

    head = {
        "written by": f"tests/train/torch_parity.py --write-rates, torch {torch.__version__.split('+')[0]}",
        "lr": RATE, "epochs": EPOCHS, "steps": STEPS,
    }  # fmt: skip
    lines = ",\n  ".join(json.dumps(case) for case in rates_of_steps())
    path.write_text(json.dumps(head, indent=1)[:-2] + ',\n "series": [\n  ' + lines + "\n ]\n}\n")
    return 0


def hold() -> bool:
    """Whether golden_rates.json is what torch has."""
    golden = json.loads(GOLDEN.read_text())["series"]
    good = True
    for theirs, written in zip(rates_of_steps(), golden, strict=True):
        # Other versions may round otherwise: some roundings a step, in double precision.
        worst = max(abs(a - b) for a, b in zip(theirs["rates"], written["rates"], strict=True))
        same = theirs["flags"] == written["flags"] and worst <= RATE * 2.0**-45
        print(f"{'ok' if same else 'differs':7} rates of '{theirs['flags']}': {worst:.1e}", flush=True)
        good = good and same
    return good
