"""Does a larger step need more memory, and more CPU time for each completion?

    python benchmarks/batch_memory.py --repeats 3

Trains nano with 64, 256 and 1024 completions a step, in two ways: *pieces* samples 64 completions at a time into the buffer and learns from 64 at a
time, *whole* samples and learns from all of them at once. Each row is a process of its own; the rows are interleaved, one repeat after the other.
Printed: the largest resident memory, and CPU seconds per completion (shortest to longest step, the first of a process left out).
"""
import argparse
import json
import subprocess
import sys
import tempfile
import time
from statistics import median

import torch
from rookworld_nb.config import TrainConfig
from rookworld_nb.hardware import peak_memory, reset_peak
from rookworld_nb.setup import Setup

GROUP, PIECE = 8, 64


def measure(model, completions, pieces, steps):
    "Peak of a process in bytes, and CPU seconds of each step after the first."
    torch.set_num_threads(1)
    prompts = completions//GROUP
    size = {'batch_positions': PIECE//GROUP, 'minibatch_positions': prompts, 'buffer_capacity': completions//PIECE,
            'micro_batch_size': PIECE} if pieces else {'batch_positions': prompts, 'micro_batch_size': completions}
    with tempfile.TemporaryDirectory() as place:
        config = TrainConfig(model=model, steps=steps + 1, group_size=GROUP, replays=1, temperature=.9, loss_type='grpo', mix_env_ratio=0., lr=1e-6,
                             max_new_tokens=96, device='cpu', output_dir=f'{place}/run', eval_policy=0, eval_env=0, **size)
        setup, seconds = Setup(config), []
        reset_peak('cpu')
        start = time.process_time()
        for row in setup.trainer.run(setup.buffer):
            assert row['completions/max_length'] <= 96 and len(setup.buffer.experiences) == (completions//PIECE if pieces else 1)
            seconds.append(time.process_time() - start)
            start = time.process_time()
    return peak_memory('cpu'), seconds[1:]


def main():
    options = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    options.add_argument('--model', default='nano', help='nano, a folder, or a Hugging Face id')
    options.add_argument('--repeats', type=int, default=3, help='processes for each row')
    options.add_argument('--steps', type=int, default=1, help='measured steps of each process, after one that warms up')
    options.add_argument('--one', nargs=2, help=argparse.SUPPRESS)
    options = options.parse_args()
    if options.one:
        return print(json.dumps(measure(options.model, int(options.one[0]), options.one[1] == 'pieces', options.steps)))
    rows = [(str(64*4**power), way) for power in range(3) for way in ('pieces', 'whole')]
    found = {row: ([], []) for row in rows}
    for _ in range(options.repeats):
        for row in rows:
            done = subprocess.run([sys.executable, __file__, '--model', options.model, '--steps', str(options.steps), '--one', *row],
                                  check=True, stdout=subprocess.PIPE, text=True)
            peak, seconds = json.loads(done.stdout.splitlines()[-1])
            found[row][0].append(peak/1e6)
            found[row][1].extend(1000*s/int(row[0]) for s in seconds)
            print(*row, f'{peak/1e6:.0f} MB, ms per completion:', *(f'{1000*s/int(row[0]):.2f}' for s in seconds), file=sys.stderr, flush=True)
    print('completions  way      peak MB (least - most)   CPU ms per completion (least - most)')
    for (completions, way), (peaks, costs) in found.items():
        print(f'{completions:>11}  {way:7} {median(peaks):8.0f} ({min(peaks):.0f} - {max(peaks):.0f})  {median(costs):14.2f} ({min(costs):.2f} - {max(costs):.2f})')


if __name__ == '__main__':
    main()
