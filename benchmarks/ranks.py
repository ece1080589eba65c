"""What does it cost to train together on several processes? Weak and strong scaling of a GRPO step of nano.

    python benchmarks/ranks.py --processes 2 --prompts 16 --rounds 5

Every measurement is a fresh start of torchrun with one thread a process; four kinds take turns. `alone`: one process, with --prompts prompts a batch. `apart`: --processes
processes at once, each alone with its own batch, which is what the machine can do. `weak`: they train together, each with as many prompts as `alone`. `strong`: they
share the prompts of `alone`. Printed: the median step of each round, and the ratios to `alone` of the same round.
The results are in nbs/processes.ipynb.
"""
import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd

KINDS = ('alone', 'apart', 'weak', 'strong')


def one(kind, prompts, steps, file):
    "Train in this process and write the seconds of every step but the first."
    from rookworld_nb.config import TrainConfig
    from rookworld_nb.ranks import ALONE, torchrun
    from rookworld_nb.setup import Setup
    with torchrun(300., 'cpu') as ranks:
        size = prompts*(ranks.size if kind == 'weak' else 1)
        config = TrainConfig(steps=steps + 1, batch_positions=size, eval_policy=0, eval_env=0, device='cpu', output_dir='none', seed=ranks.rank*(kind == 'apart'))
        setup, times = Setup(config, ALONE if kind == 'apart' else ranks), [time.perf_counter()]
        ranks.gather(None)    # everybody has loaded
        for _ in setup.trainer.run(setup.buffer): times.append(time.perf_counter())
        seconds = [later - earlier for earlier, later in zip(times[1:], times[2:])]
        if ranks.first: Path(file).write_text('\n'.join(map(str, seconds)), encoding='utf-8')
        ranks.gather(None)


def measure(kind, options, file):
    "Median seconds of a step."
    count = 1 if kind == 'alone' else options.processes
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(count), __file__, '--one', kind, str(file)]
    done = subprocess.run(command + ['--prompts', str(options.prompts), '--steps', str(options.steps)], env=os.environ | {'OMP_NUM_THREADS': '1'},
                          capture_output=True, text=True)
    if done.returncode: sys.exit(done.stderr)
    return statistics.median(map(float, file.read_text(encoding='utf-8').split()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--processes', type=int, default=2)
    parser.add_argument('--prompts', type=int, default=16, help='prompts in a batch of one process, with 8 completions each')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--steps', type=int, default=6, help='steps of a measurement, after one that does not count')
    parser.add_argument('--one', nargs=2, metavar=('KIND', 'FILE'), help='measure in this process')
    options = parser.parse_args()
    if options.one:
        one(options.one[0], options.prompts, options.steps, options.one[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for n in range(options.rounds):
            order = KINDS if n % 2 == 0 else KINDS[::-1]
            rows.append({kind: measure(kind, options, Path(folder, 'times')) for kind in order})
            print(', '.join(f'{kind} {rows[-1][kind]:.3f} s' for kind in KINDS), flush=True)
    table = pd.DataFrame(rows)
    for name, ratio in (('apart', table.alone/table.apart), ('weak scaling', table.alone/table.weak), ('weak, against apart', table.apart/table.weak),
                        ('strong scaling, speed-up', table.alone/table.strong)):
        print(f'{name}: {ratio.median():.2f} ({ratio.min():.2f} to {ratio.max():.2f})')


if __name__ == '__main__': main()
