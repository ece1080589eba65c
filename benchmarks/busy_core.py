"""How much does a run slow down where another program wants its cores?

    python benchmarks/busy_core.py --spins 300000 3000 --rounds 2

Starts `rookworld train` in fresh processes on all cores: alone, beside a program that only loops, and beside another run (whose steps count too), with each number of rounds that a waiting thread spins before
it sleeps (GOMP_SPINCOUNT: 300000 is the default of GNU's OpenMP, 3000 what the package sets). The settings take turns. Printed: seconds of a step, the first of a process left out; a process that takes longer than
--limit is ended, and the steps that it has done count.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ALONE, LOOP, RUN = 'alone', 'beside a program that loops', 'beside another run'
COMMAND = [Path(sys.executable).with_name('rookworld'), 'train', '--seed', '1', '--eval-policy', '0', '--eval-env', '0']


def step_times(spins, beside, steps, limit):
    "Seconds of the steps of one process, or of two side by side."
    own = os.environ | {'GOMP_SPINCOUNT': str(spins)}
    with tempfile.TemporaryDirectory() as root:
        folders, end = [Path(root, str(number)) for number in range(1 + (beside == RUN))], time.monotonic() + limit
        started = [subprocess.Popen([*COMMAND, '--steps', str(steps), '--output-dir', folder], env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                   for folder in folders]
        others = [subprocess.Popen([sys.executable, '-c', 'while True: pass']) for _ in range(beside == LOOP)]
        try:
            for run in started: run.wait(max(0, end - time.monotonic()))
        except subprocess.TimeoutExpired: pass
        finally:
            for process in started + others:
                process.kill()
                process.wait()
        logs = [folder/'metrics.jsonl' for folder in folders]
        return [json.loads(row)['step_time'] for log in logs if log.exists() for row in log.read_text(encoding='utf-8').splitlines()[1:]]


def main():
    options = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    options.add_argument('--spins', type=int, nargs='+', default=[300_000, 3000], help='values of GOMP_SPINCOUNT')
    options.add_argument('--rounds', type=int, default=2, help='processes of each kind')
    options.add_argument('--steps', type=int, default=5, help='steps of each process')
    options.add_argument('--limit', type=float, default=300, help='seconds that a process may take')
    options = options.parse_args()
    kinds = [(spins, beside) for beside in (ALONE, LOOP, RUN) for spins in options.spins]
    found = {kind: [] for kind in kinds}
    for number in range(options.rounds):
        for spins, beside in kinds[::-1] if number % 2 else kinds:
            found[spins, beside] += (seconds := step_times(spins, beside, options.steps, options.limit))
            print(f'round {number + 1}: {beside}, {spins}:', *(f'{each:.1f}' for each in seconds), flush=True)
    for (spins, beside), seconds in found.items():
        figures = f'{median(seconds):6.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), {len(seconds)} steps' if seconds else f'no second step in {options.limit:g} s'
        print(f'{beside:27} GOMP_SPINCOUNT={spins:<7} {figures}')


if __name__ == '__main__':
    main()
