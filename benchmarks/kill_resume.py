"""Kill a run at random moments, resume it, and compare it bit for bit with an undisturbed run.

    python benchmarks/kill_resume.py --kills 25

Every trial starts `rookworld train` on a small configuration, sends it `kill -9` after a random time (which may fall before the first step, in
the middle of one, or into the writing of a checkpoint), resumes it to the end, and compares weights, optimiser, random numbers, buffer, metrics
and completions with the undisturbed run. Prints one line per trial and a summary; the exit code is 1 if any trial differs.
"""
import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

FLAGS = ('--steps 12 --batch-positions 4 --group-size 4 --minibatch-positions 3 --buffer-capacity 2 --replays 2 --mix-env-ratio 0.25 --max-new-tokens 32 '
         '--eval-policy 0 --eval-env 0 --save-every 2 --baseline-type ema --kl-control adaptive').split()
KINDS = [], ['--normalize-rewards']    # credit by part, and by whole answers with a running scale
CLOCKS = 'time', 'seconds', 'step_time', 'gen_seconds', 'perf/'    # what no two runs have in common


def train(folder, flags):
    "Start the command; its output goes to a file beside the run."
    log = open(folder.with_suffix('.log'), 'a')
    return subprocess.Popen([sys.executable, '-m', 'rookworld_nb.cli', 'train', '--output-dir', folder, *flags], stdout=log, stderr=log)


def digest(value):
    "Tensors by their bits, everything else as text; what a clock has written is left out."
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        return {name: digest(item) for name, item in value.items() if not str(name).startswith(CLOCKS)}
    return [digest(item) for item in value] if isinstance(value, list | tuple) else repr(value)


def contents(folder):
    "What a finished run left behind."
    final = folder/'final_checkpoint'
    rows = [json.loads(line) for line in (folder/'metrics.jsonl').read_text().splitlines()]
    return {'weights': hashlib.sha256((final/'model.safetensors').read_bytes()).hexdigest(),
            'state': digest(torch.load(final/'trainer.pt', weights_only=True)),
            'metrics': [{name: value for name, value in row.items() if not name.startswith(CLOCKS)} for row in rows],
            'completions': {path.name: path.read_text() for path in sorted((folder/'completions').iterdir())}}


def undisturbed(folder, flags):
    "Seconds that a run takes, and what it leaves behind."
    start = time.perf_counter()
    if train(folder, flags).wait():
        raise SystemExit(f'the run failed: see {folder.with_suffix(".log")}')
    return time.perf_counter() - start, contents(folder)


def trial(folder, flags, after):
    "Kill a run after so many seconds, resume it; the step it had reached, and what it left behind."
    process = train(folder, flags)
    time.sleep(after)
    process.send_signal(signal.SIGKILL)
    process.wait()
    reached = len((folder/'metrics.jsonl').read_text().splitlines()) if (folder/'metrics.jsonl').exists() else 0
    again = ['--resume'] if (folder/'config.json').exists() else flags    # killed before anything was written: start again
    if train(folder, again).wait():
        raise SystemExit(f'the resumed run failed: see {folder.with_suffix(".log")}')
    return reached, contents(folder)


def main():
    options = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    options.add_argument('--kills', type=int, default=25, help='trials')
    options.add_argument('--seed', type=int, default=0, help='random seed of the moments')
    options = options.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as place:
        kinds = [(FLAGS + more, *undisturbed(Path(place)/f'whole-{number}', FLAGS + more)) for number, more in enumerate(KINDS)]
        equal = 0
        for number in range(options.kills):
            flags, seconds, expected = kinds[number % len(kinds)]
            after = rng.uniform(.2, 1.)*seconds
            reached, found = trial(Path(place)/f'killed-{number}', flags, after)
            differing = [name for name in expected if found[name] != expected[name]]
            equal += not differing
            print(f'kill {number + 1:2d} after {after:5.1f} of {seconds:.1f} s, {reached:2d} of 12 steps logged: '
                  + (f'{", ".join(differing)} differ' if differing else 'equal'), flush=True)
    print(f'{equal} of {options.kills} bit-equal')
    sys.exit(equal < options.kills)


if __name__ == '__main__':
    main()
