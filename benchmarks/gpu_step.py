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
from itertools import cycle
from pathlib import Path

import pandas as pd
import torch

from peers import KL_COEF, LR, even_words, words_model
from rookworld_nb.buffer import Collector, CollectorConfig
from rookworld_nb.hardware import HardwareConfig, forward_operations, machine_name, prepare_model, product_rate, reset_peak, use_hardware
from rookworld_nb.kl import KLConfig
from rookworld_nb.positions import Sample
from rookworld_nb.rewards import Scores
from rookworld_nb.trainer import Trainer, TrainerConfig
from rookworld_nb.weights import load_pretrained

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 32, 8, 48, 100
PLAIN = {'matmul_precision': 'highest', 'cuda_graphs': False}
FAST = {'matmul_precision': 'high', 'bf16': True}
SETTINGS = {
    'plain': PLAIN, 'graphs': {**PLAIN, 'cuda_graphs': True}, 'TF32': {**PLAIN, 'matmul_precision': 'high'}, 'bf16': {**PLAIN, 'bf16': True},
    'graphs, TF32, bf16': FAST, 'all': {**FAST, 'compile': 'default'},
    'fast, no graphs': {**FAST, 'cuda_graphs': False}, 'fast, checkpointing': {**FAST, 'gradient_checkpointing': True},
    'fast, cudnn benchmark': {**FAST, 'cudnn_benchmark': True}, 'fast, AdamW foreach': FAST, 'fast, AdamW loop': FAST, 'fast, pieces of 64': FAST}


def set_up(name: str, folder: Path, device: str, sizes: tuple[int, ...]) -> tuple[Collector, Trainer]:
    "Models, collector and trainer under a setting."
    prompts, group, width, new = sizes
    hardware = HardwareConfig(**SETTINGS[name])
    (model, tokenizer), (reference, _) = (load_pretrained(folder, device) for _ in range(2))
    for network in (model, reference): prepare_model(network, hardware)
    ids = torch.randint(2, model.cfg.vocab_size, (prompts, width-1), generator=torch.Generator().manual_seed(1)).tolist()
    samples = [Sample('P: ' + ' '.join(f'w{i}' for i in row), '') for row in ids]

    def scorer(prompts, texts, targets):
        rewards = torch.tensor(even_words(prompts, texts))
        return Scores(rewards, pd.DataFrame({'task': [prompt[0] for prompt in prompts], 'raw': rewards.tolist(), 'reward': rewards.tolist()}))
    kind = name.rpartition('AdamW ')[2] if 'AdamW' in name else 'fused'
    config = TrainerConfig(steps=10**6, lr=LR, kl=KLConfig(kl_coef=KL_COEF), kl_divergence_threshold=None, adamw=kind,
                           micro_batch_size=64 if 'pieces' in name else None, identity_tolerance=.1)
    return Collector(model, reference, tokenizer, cycle([samples]), scorer, CollectorConfig(group, 1., new, new)), Trainer(model, config)


def measure(name: str, folder: Path, device: str, sizes: tuple[int, ...], repeats: int, trace: bool) -> dict:
    "One setting: seconds of sampling, of the step; memory."
    print(use_hardware(HardwareConfig(**SETTINGS[name]), device))
    collector, trainer = set_up(name, folder, device, sizes)
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
    options.add_argument('--device', default='cuda', help='where')
    options.add_argument('--tiny', action='store_true', help='a model of two layers and a few tokens, to try the script')
    options.add_argument('--profile', action='store_true', help='list the operations of one more step')
    options.add_argument('--json', type=Path, help='file for every timing')
    options = options.parse_args()
    sizes, runs = (4, 4, 8, 8) if options.tiny else (PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS), []
    with tempfile.TemporaryDirectory() as folder:
        words_model(Path(folder), *((2, 2, 128, 503, 64) if options.tiny else (12, 12, 768, 50257, 1024)))
        for _ in range(options.rounds):
            for name in options.settings:
                runs.append(measure(name, folder, options.device, sizes, options.repeats, options.profile))
                step, own = runs[-1]['step'], runs[-1]['sampling']
                print(f'{name:24} step {1000*statistics.median(step):8.1f} ms ({1000*min(step):.1f}-{1000*max(step):.1f}), sampling {1000*statistics.median(own):8.1f}; '
                      f'warm-up {runs[-1]["warm_up"]:.0f} s; {runs[-1]["peak_gb"] or 0:.1f} GB; KL {runs[-1]["kl"]:.4f}', flush=True)
                if options.json: options.json.write_text(json.dumps(runs, indent=1) + '\n', encoding='utf-8')
        cfg, device = load_pretrained(folder)[0].cfg, torch.device(options.device)
        tokens, scored = sizes[0]*sizes[2] + sizes[0]*sizes[1]*sizes[3], sizes[0]*sizes[1]*sizes[3]
        forward = forward_operations(cfg, tokens, 0, scored)
        print(f'five passes at the rate of the largest products in bfloat16: {5*forward/product_rate(device, True)*1000:.1f} ms')


if __name__ == '__main__':
    main()
