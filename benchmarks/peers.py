"""The same GRPO work through transformers, TRL and this package.

    python benchmarks/peers.py --work nano ragged --rounds 3 --threads 1
    python benchmarks/peers.py --work gpt2 --rounds 3 --json gpt2.json

Every measurement is a fresh process; the peers take turns, forwards and backwards, so that a noisy machine is noisy for all. The same weights, prompts,
numbers of completions and sampling settings go in, through each program's public interface; nothing is compiled. Workloads:

    nano    6 layers, 160 wide, 256 tokens, random weights: 8 prompts of 48 tokens x 8 completions of 96, none ends early; trivial reward
    gpt2    124M parameters, random weights: 4 prompts of 48 tokens x 4 completions of 64; trivial reward
    ragged  the embedded model on 8 real prompts of both tasks x 8 completions that end when they end; real rewards

A step is sampling, reward, reference, loss with KL, backward, AdamW. `floor` is the time of the same operations at the rate of this machine's largest matrix
products, measured in each process: prompts computed once a group, every completion for itself (ours computes equal ones once, so that `ragged` takes less),
forward for the reference, three forwards' worth for the update, no attention.
Needs the extra `parity` (TRL).
"""
import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

PEERS = {'generation': ('transformers', 'transformers bf16', 'ours', 'ours bf16'), 'step': ('trl', 'trl bf16', 'ours', 'ours bf16')}
WORKS = ('nano', 'gpt2', 'ragged')
LR, KL_COEF, CLIP, WARM_UP = 1e-5, .04, 1., 1


@dataclass
class Work:
    "What everybody is given."
    folder: str             # weights and tokenizer, as transformers writes them
    prompts: list[str]      # B texts
    group_size: int         # completions of each
    max_new_tokens: int     # of a completion
    score: object           # (prompts, completions) -> list of rewards


def words_model(folder: Path, layers: int, heads: int, width: int, words: int, positions: int) -> None:
    "Save a GPT-2 over meaningless words that never ends a text: its end token scores far below all others."
    from rookworld_nb.model import GPT, GPTConfig
    from rookworld_nb.weights import END_TOKEN, save_pretrained
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate([END_TOKEN, 'P:'] + [f'w{i}' for i in range(2, words)])}, END_TOKEN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([END_TOKEN])
    torch.manual_seed(0)
    model, end = GPT(GPTConfig(layers, heads, width, words, positions)), tokenizer.token_to_id(END_TOKEN)
    away = torch.nn.functional.normalize(torch.randn(width), dim=0)
    with torch.no_grad():
        model.ln_f.bias += 10*away
        model.wte.weight -= (model.wte.weight @ away)[:, None]*away
        model.wte.weight[end] = -10*away
    save_pretrained(model, tokenizer, folder)


def word_prompts(n: int, words: int, vocabulary: int) -> list[str]:
    "Texts of meaningless words for a model of `words_model`, a token each."
    ids = torch.randint(2, vocabulary, (n, words - 1), generator=torch.Generator().manual_seed(1)).tolist()
    return ['P: ' + ' '.join(f'w{i}' for i in row) for row in ids]


def even_words(prompts: list[str], completions: list[str]) -> list[float]:
    "A trivial reward: the share of words with an even number."
    return [sum(word[-1] in '02468' for word in text.split())/max(1, len(text.split())) for text in completions]


def make_work(name: str, folder: Path) -> Work:
    "Weights on disk, prompts, sizes and the reward."
    if name == 'ragged':
        from rookworld_nb.positions import by_task, shipped
        from rookworld_nb.rewards import RewardScorer
        from rookworld_nb.weights import load_pretrained, save_pretrained
        save_pretrained(*load_pretrained('nano'), folder)
        pools, scorer = by_task(shipped('train')), RewardScorer()
        samples = pools['P'][:5] + pools['A'][:3]
        targets = {sample.prompt: sample.completion for sample in samples}
        return Work(str(folder), [sample.prompt for sample in samples], 8, 110,
                    lambda prompts, texts: scorer(prompts, texts, [targets[prompt] for prompt in prompts]).rewards.tolist())
    small = name == 'nano'
    words_model(folder, *((6, 5, 160, 256, 256) if small else (12, 12, 768, 50257, 1024)))
    n, words = (8, 256) if small else (4, 50257)
    return Work(str(folder), word_prompts(n, 48, words), n, 96 if small else 64, even_words)


def floor_seconds(work: Work, prompt_tokens: int, completion_tokens: int, bf16: bool, part: str) -> float:
    "Time of the matrix products that nobody can leave out."
    from rookworld_nb.hardware import forward_operations, product_rate
    from rookworld_nb.weights import load_config
    forward = forward_operations(load_config(work.folder), prompt_tokens + completion_tokens, 0, completion_tokens)
    return forward*{'generation': 1, 'step': 5}[part]/product_rate(torch.device('cpu'), bf16)


def timed(function, repeats: int) -> list[float]:
    "Seconds of each call after the warm-up."
    seconds = []
    for _ in range(WARM_UP + repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]


def transformers_generation(work: Work, bf16: bool, repeats: int) -> tuple[list[float], list[int]]:
    "model.generate with its dynamic cache, all completions in one call."
    import transformers
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(work.folder, eos_token='<|endoftext|>', pad_token='<|endoftext|>', padding_side='left')
    model = transformers.GPT2LMHeadModel.from_pretrained(work.folder, dtype=torch.bfloat16 if bf16 else torch.float32).eval()
    batch = tokenizer(work.prompts, return_tensors='pt', padding=True)
    made = []

    def call():
        with torch.no_grad():
            made.append(model.generate(input_ids=batch['input_ids'], attention_mask=batch['attention_mask'], do_sample=True, temperature=1., top_k=0,
                                       max_new_tokens=work.max_new_tokens, num_return_sequences=work.group_size,
                                       pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id))
    seconds, width = timed(call, repeats), batch['input_ids'].shape[1]
    return seconds, [completion_tokens(out[:, width:], tokenizer.eos_token_id) for out in made[WARM_UP:]]


def completion_tokens(ids: torch.Tensor, end: int) -> int:
    "Tokens up to and including each row's first end token."
    is_end = ids == end
    return int((is_end.cumsum(1) - is_end.long() == 0).sum())


def our_generation(work: Work, bf16: bool, repeats: int) -> tuple[list[float], list[int]]:
    "`sample`."
    from rookworld_nb.sampling import sample
    from rookworld_nb.weights import load_pretrained
    model, tokenizer = load_pretrained(work.folder)
    model.bf16, made = bf16, []
    seconds = timed(lambda: made.append(sample(model, tokenizer, work.prompts, work.group_size, work.max_new_tokens, 1.)), repeats)
    return seconds, [int(rollouts.completion_mask.sum()) for rollouts in made[WARM_UP:]]


def trl_step(work: Work, bf16: bool, repeats: int) -> tuple[list[float], list[int]]:
    "GRPOTrainer, without gradient checkpointing, which only costs time at this size."
    import datasets
    import transformers
    import trl
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(work.folder, eos_token='<|endoftext|>', pad_token='<|endoftext|>')
    starts, tokens = [], []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *args, **kwargs): starts.append(time.perf_counter())
        def on_train_end(self, *args, **kwargs): starts.append(time.perf_counter())

    def reward(prompts, completions, completion_ids, **columns):
        tokens.append(sum(map(len, completion_ids)))
        return work.score(prompts, completions)
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            folder, max_steps=WARM_UP + repeats, per_device_train_batch_size=len(work.prompts)*work.group_size, num_generations=work.group_size,
            max_completion_length=work.max_new_tokens, temperature=1., beta=KL_COEF, learning_rate=LR, max_grad_norm=CLIP, bf16=bf16,
            gradient_checkpointing=False, report_to='none', save_strategy='no', logging_strategy='no', use_cpu=True, shuffle_dataset=False,
            disable_tqdm=True)
        trl.GRPOTrainer(transformers.GPT2LMHeadModel.from_pretrained(work.folder, dtype=torch.float32), reward, config,
                        train_dataset=datasets.Dataset.from_dict({'prompt': work.prompts*(WARM_UP + repeats)}),
                        processing_class=tokenizer, callbacks=[Clock()]).train()
    return [b - a for a, b in zip(starts, starts[1:])][WARM_UP:], tokens[WARM_UP:]


def our_run(work: Work, hardware, device: str = 'cpu', **settings) -> tuple:
    "Collector and Trainer under a HardwareConfig, set as TRL is: whole answers are paid, each divided by the spread of its group."
    import pandas as pd
    from rookworld_nb.buffer import Collector, CollectorConfig
    from rookworld_nb.hardware import prepare_model
    from rookworld_nb.kl import KLConfig
    from rookworld_nb.positions import Sample
    from rookworld_nb.rewards import Scores
    from rookworld_nb.trainer import Trainer, TrainerConfig
    from rookworld_nb.weights import load_pretrained
    (model, tokenizer), (reference, _) = (load_pretrained(work.folder, device) for _ in range(2))
    for network in (model, reference): prepare_model(network, hardware)

    def scorer(prompts, texts, targets):
        rewards = torch.tensor(work.score(prompts, texts))
        return Scores(rewards, pd.DataFrame({'task': [prompt[0] for prompt in prompts], 'raw': rewards.tolist(), 'reward': rewards.tolist()}))
    collector = Collector(model, reference, tokenizer, cycle([[Sample(prompt, '') for prompt in work.prompts]]), scorer,
                          CollectorConfig(work.group_size, 1., work.max_new_tokens, work.max_new_tokens))
    config = TrainerConfig(lr=LR, grad_clip=CLIP, kl=KLConfig(kl_coef=KL_COEF), kl_divergence_threshold=None, **settings)
    return collector, Trainer(model, config)


def our_step(work: Work, bf16: bool, repeats: int) -> tuple[list[float], list[int]]:
    "Collector and Trainer, step by step."
    from rookworld_nb.hardware import HardwareConfig, use_hardware
    hardware = HardwareConfig(bf16=bf16)
    use_hardware(hardware, 'cpu')
    collector, trainer = our_run(work, hardware, steps=WARM_UP + repeats, identity_tolerance=.1 if bf16 else 1e-3)
    rows = list(trainer.run(collector))
    completions = len(work.prompts)*work.group_size
    return [row['step_time'] for row in rows][WARM_UP:], [round(row['completions/mean_length']*completions) for row in rows][WARM_UP:]


MEASURES = {('generation', 'transformers'): transformers_generation, ('generation', 'ours'): our_generation, ('step', 'trl'): trl_step, ('step', 'ours'): our_step}


def measure(part: str, peer: str, name: str, threads: int, repeats: int) -> dict:
    "One peer in this process."
    torch.set_num_threads(threads)
    kind, bf16 = peer.split()[0], peer.endswith('bf16')
    with tempfile.TemporaryDirectory() as folder:
        work = make_work(name, Path(folder)/'model')
        torch.manual_seed(0)
        seconds, tokens = MEASURES[part, kind](work, bf16, repeats)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/1024
        from rookworld_nb.weights import load_pretrained
        _, tokenizer = load_pretrained(work.folder)
        read = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(work.prompts))
        mean_tokens = sum(tokens)/len(tokens)
        return {'part': part, 'peer': peer, 'work': name, 'seconds': seconds, 'tokens': mean_tokens, 'peak_mb': peak,
                'floor': floor_seconds(work, read, mean_tokens, bf16, part)}


def elsewhere(part: str, peer: str, work: str, threads: int, repeats: int) -> dict:
    "One peer in a process of its own."
    command = [sys.executable, __file__, '--one', part, peer, work, '--threads', str(threads), '--repeats', str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, 'OMP_NUM_THREADS': str(threads), 'HF_HUB_OFFLINE': '1'})
    if done.returncode: raise SystemExit(f'{part}, {peer}, {work} failed:\n{done.stderr[-3000:]}')
    return json.loads(done.stdout.splitlines()[-1])


def show(part: str, work: str, found: dict[str, list[dict]]) -> None:
    "A table of one part of one work; seconds are per token of the completions times the mean number of them, so that ragged work compares."
    tokens = statistics.mean(run['tokens'] for runs in found.values() for run in runs)
    print(f'\n{part}, {work}: {tokens:.0f} tokens of completions')
    print(f'{"":20} {"seconds":>8} {"min-max":>14} {"tok/s":>8} {"peak MB":>8} {"of floor":>8}')
    medians = {}
    for peer, runs in found.items():
        seconds = sorted(s/run['tokens']*tokens for run in runs for s in run['seconds'])
        medians[peer] = statistics.median(seconds)
        floor = statistics.median(run['floor']/run['tokens']*tokens for run in runs)
        print(f'{peer:20} {medians[peer]:8.3f} {seconds[0]:6.3f}-{seconds[-1]:.3f} {tokens/medians[peer]:8.0f} '
              f'{statistics.median(run["peak_mb"] for run in runs):8.0f} {floor/medians[peer]:8.0%}')
    others = [peer for peer in medians if not peer.startswith('ours')]
    for ours in (peer for peer in medians if peer.startswith('ours')):
        print(f'{ours} against:', ', '.join(f'{peer} {medians[peer]/medians[ours]:.1f}x' for peer in others))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    options.add_argument('--work', nargs='+', choices=WORKS, default=['nano'], help='workloads')
    options.add_argument('--part', nargs='+', choices=tuple(PEERS), default=list(PEERS), help='what to time')
    options.add_argument('--rounds', type=int, default=3, help='processes of each peer')
    options.add_argument('--repeats', type=int, default=3, help='timings in a process, after one that does not count')
    options.add_argument('--threads', type=int, default=1, help='of each process')
    options.add_argument('--json', type=Path, help='file for every timing')
    options.add_argument('--one', nargs=3, metavar=('PART', 'PEER', 'WORK'), help='measure one peer in this process and print JSON')
    options = options.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one, options.threads, options.repeats)))
        return
    everything = []
    for work in options.work:
        for part in options.part:
            found = {peer: [] for peer in PEERS[part]}
            for number in range(options.rounds):
                for peer in PEERS[part][::-1 if number % 2 else 1]:
                    found[peer].append(elsewhere(part, peer, work, options.threads, options.repeats))
            show(part, work, found)
            everything += [run for runs in found.values() for run in runs]
    if options.json: options.json.write_text(json.dumps(everything, indent=1) + '\n', encoding='utf-8')


if __name__ == '__main__':
    main()
