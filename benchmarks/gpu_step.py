"""What each setting for a GPU is worth, and how far a whole GRPO step is from what the card could do.

    python benchmarks/gpu_step.py --json nbs/results/gpu_step.json
    python benchmarks/gpu_step.py --settings plain all --profile

124M parameters with random weights, 32 prompts of 48 tokens x 8 completions of 100, none of which ends early; trivial reward, reference with KL, AdamW: the work of
one step is 6.6e12 operations for every pass over all tokens. Settings take turns in rounds in one process; each round warms up until nothing is left to compile
or record. Printed are medians of sampling (with rewards and reference) and of the whole step, their range, and the most memory that PyTorch had reserved.
"""
import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from peers import Work, even_words, our_run, word_prompts, words_model
from rookworld_nb.hardware import HardwareConfig, forward_operations, machine_name, product_rate, reset_peak, use_hardware
from rookworld_nb.weights import load_config

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 32, 8, 48, 100
PLAIN = {'matmul_precision': 'highest', 'cuda_graphs': False}
FAST = {'matmul_precision': 'high', 'bf16': True}
SETTINGS = {
    'plain': PLAIN, 'graphs': {**PLAIN, 'cuda_graphs': True}, 'TF32': {**PLAIN, 'matmul_precision': 'high'}, 'bf16': {**PLAIN, 'bf16': True},
    'graphs, TF32, bf16': FAST, 'all': {**FAST, 'compile': 'default'},
    'fast, no graphs': {**FAST, 'cuda_graphs': False}, 'fast, checkpointing': {**FAST, 'gradient_checkpointing': True},
    'fast, cudnn benchmark': {**FAST, 'cudnn_benchmark': True}, 'fast, AdamW foreach': {**FAST, 'adamw': 'foreach'},
    'fast, AdamW loop': {**FAST, 'adamw': 'loop'}, 'fast, pieces of 64': {**FAST, 'micro_batch_size': 64}}
OF_TRAINER = ('adamw', 'micro_batch_size')    # the others are of the hardware


def measure(name: str, work: Work, device: str, repeats: int, trace: bool) -> dict:
    "One setting: seconds of sampling, of the step; memory."
    learning = {key: value for key, value in SETTINGS[name].items() if key in OF_TRAINER}
    hardware = HardwareConfig(**{key: value for key, value in SETTINGS[name].items() if key not in OF_TRAINER})
    print(use_hardware(hardware, device))
    collector, trainer = our_run(work, hardware, device, steps=10**6, identity_tolerance=.1, **learning)
    cuda = device.startswith('cuda')
    if cuda: reset_peak(device)
    sampled = []

    def timed():
        for experience in collector:
            sampled.append(time.perf_counter() - start)
            yield experience
    steps, seconds, begun = trainer.run(timed()), [], time.perf_counter()
    for number in range(repeats + 3):
        start = time.perf_counter()
        row = next(steps)
        if cuda: torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if number == 2: warm = time.perf_counter() - begun
    if trace:
        activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA]*cuda
        with torch.profiler.profile(activities=activities) as profile: next(steps)
        print(profile.key_averages().table(sort_by='self_cuda_time_total' if cuda else 'self_cpu_time_total', row_limit=40, max_name_column_width=60))
    return {'setting': name, 'device': machine_name(device), 'torch': torch.__version__, 'sampling': sampled[3:repeats + 3], 'step': seconds[3:],
            'warm_up': warm, 'kl': row['kl'], 'mfu': row['perf/mfu'], 'peak_gb': torch.cuda.max_memory_reserved()/1e9 if cuda else None}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    options.add_argument('--settings', nargs='+', choices=tuple(SETTINGS), default=list(SETTINGS), help='what to measure')
    options.add_argument('--rounds', type=int, default=1, help='how often each setting has its turn')
    options.add_argument('--repeats', type=int, default=5, help='steps that count, after three that do not')
    options.add_argument('--device', default='cuda', help='device to measure on')
    options.add_argument('--tiny', action='store_true', help='a model of two layers and a few tokens, to try the script')
    options.add_argument('--profile', action='store_true', help='list the operations of one more step')
    options.add_argument('--json', type=Path, help='file for every timing')
    options = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prompts, group, width, new = (4, 4, 8, 8) if options.tiny else (PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS)
        shape = (2, 2, 128, 503, 64) if options.tiny else (12, 12, 768, 50257, 1024)
        words_model(Path(folder), *shape)
        work, runs = Work(folder, word_prompts(prompts, width, shape[3]), group, new, even_words), []
        for _ in range(options.rounds):
            for name in options.settings:
                runs.append(measure(name, work, options.device, options.repeats, options.profile))
                step, own = runs[-1]['step'], runs[-1]['sampling']
                print(f'{name:24} step {1000*statistics.median(step):8.1f} ms ({1000*min(step):.1f}-{1000*max(step):.1f}), sampling {1000*statistics.median(own):8.1f}; '
                      f'warm-up {runs[-1]["warm_up"]:.0f} s; {runs[-1]["peak_gb"] or 0:.1f} GB; KL {runs[-1]["kl"]:.4f}', flush=True)
                if options.json: options.json.write_text(json.dumps(runs, indent=1) + '\n', encoding='utf-8')
        scored = prompts*group*new
        forward = forward_operations(load_config(folder), prompts*width + scored, 0, scored)
        print(f'five passes at the rate of the largest products in bfloat16: {5*forward/product_rate(torch.device(options.device), True)*1000:.1f} ms')


if __name__ == '__main__':
    main()
