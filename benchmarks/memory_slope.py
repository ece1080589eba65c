"""Does a run need more memory the longer it lasts?

    python benchmarks/memory_slope.py --steps 300

Trains nano on prompts of both tasks, reads the resident memory after every step, once the C library has handed freed pages back (otherwise one would
measure its own reserve), and fits a line to the second half of the readings (the first half fills caches). Prints the slope with its standard
error, from the means of ten blocks, which are nearly independent. Linux.
"""
import argparse
import tempfile

import numpy as np
from rookworld_nb.config import TrainConfig
from rookworld_nb.hardware import proc_bytes, trim_memory
from rookworld_nb.run import Run


def resident():
    "MB that this process holds in memory now, freed pages handed back."
    trim_memory()
    return proc_bytes('VmRSS')/1e6


def main():
    options = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    options.add_argument('--steps', type=int, default=300, help='optimiser steps')
    options.add_argument('--buffer-capacity', type=int, default=2, help='batches in the rollout buffer')
    options = options.parse_args()
    if options.steps < 40: raise SystemExit(f'--steps {options.steps}: at least 40 are needed for a slope')
    with tempfile.TemporaryDirectory() as place:
        config = TrainConfig(steps=options.steps, buffer_capacity=options.buffer_capacity, batch_positions=8, group_size=8,
                             eval_policy=0, eval_env=0, save_every=25, output_dir=f'{place}/run')
        memory = np.array([resident() for _ in Run(config).steps()])
    blocks = np.array_split(np.arange(len(memory)//2, len(memory)), 10)
    (slope, _), covariance = np.polyfit([block.mean() for block in blocks], [memory[block].mean() for block in blocks], 1, cov=True)
    print('MB at every tenth of the run:', *(f'{memory[at]:.0f}' for at in np.linspace(0, len(memory)-1, 11).astype(int)))
    print(f'{len(memory)} steps: {memory[0]:.0f} MB after the first, {memory.max():.0f} MB at most, {memory[-1]:.0f} MB at the end; '
          f'second half {100*slope:+.2f} +- {100*covariance[0, 0]**.5:.2f} MB per 100 steps')


if __name__ == '__main__':
    main()
