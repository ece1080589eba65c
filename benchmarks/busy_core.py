"""What does a run lose where another program keeps a core busy?

    python benchmarks/busy_core.py --spins 300000 1000 --rounds 3

Starts `rookworld train` in fresh processes on all cores, alone and beside a program that does nothing but count, with each number of rounds for which a waiting thread asks before it sleeps (GOMP_SPINCOUNT:
300000 is what GNU OpenMP takes by itself, 1000 the package). The settings take turns. Printed: seconds of a step, the first of a process left out; a process that takes longer than --limit is ended, and what it has counts.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

COMMAND = ['train', '--seed', '1', '--eval-policy', '0', '--eval-env', '0', '--steps']


def step_times(spins, busy, steps, limit):
    "Seconds of the steps of one process."
    others = [subprocess.Popen([sys.executable, '-c', 'while True: pass']) for _ in range(busy)]
    with tempfile.TemporaryDirectory() as folder:
        command = [Path(sys.executable).with_name('rookworld'), *COMMAND, str(steps), '--output-dir', f'{folder}/run']
        try: subprocess.run(command, env=os.environ | {'GOMP_SPINCOUNT': str(spins)}, capture_output=True, timeout=limit, check=True)
        except subprocess.TimeoutExpired: pass
        finally:
            for other in others: other.kill()
        rows = Path(folder, 'run', 'metrics.jsonl').read_text(encoding='utf-8').splitlines()
    return [json.loads(row)['step_time'] for row in rows][1:]


def main():
    options = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    options.add_argument('--spins', type=int, nargs='+', default=[300_000, 1000], help='values of GOMP_SPINCOUNT')
    options.add_argument('--rounds', type=int, default=3, help='processes of each kind')
    options.add_argument('--steps', type=int, default=5, help='of a process')
    options.add_argument('--limit', type=float, default=300, help='seconds that a process may take')
    options = options.parse_args()
    kinds = [(spins, busy) for busy in (0, 1) for spins in options.spins]
    found = {kind: [] for kind in kinds}
    for number in range(options.rounds):
        for spins, busy in kinds[::-1] if number % 2 else kinds:
            found[spins, busy] += step_times(spins, busy, options.steps, options.limit)
    for (spins, busy), seconds in found.items():
        figures = f'{median(seconds):6.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), {len(seconds)} steps' if seconds else f'none in {options.limit:g} s'
        print(f'{"beside a busy program" if busy else "alone":22} GOMP_SPINCOUNT={spins:<7} {figures}')


if __name__ == '__main__':
    main()
