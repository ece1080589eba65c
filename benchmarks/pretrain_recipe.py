"""What is each part of nano's pre-training worth? Short runs, each with one part left out or changed.

    python benchmarks/pretrain_recipe.py --folder work/recipe --csv nbs/results/pretrain_recipe.csv
    python benchmarks/pretrain_recipe.py recipe "no probes" "no verdicts" --model V3 --steps 6000 --lr 0.004 --seeds 1 --folder work/sight --csv nbs/results/pretrain_sight.csv

The runs of a study begin with random weights, or those of --model, and see the same number of tokens of the same data (made once, in --folder, with the settings of `rookworld pretrain`; none of the positions that the package
ships). Two runs go side by side, on one thread each. Each ends with greedy answers to the shipped held-out positions, to the shipped rare moves (task `A rare`) and to --moves others that were kept apart (`A mix`: rare
kinds as frequent as in pre-training), and with the loss on 200 rows of each kind (`P rows` ...). If it is killed and started again, it resumes each run from its last checkpoint. The CSV has a row for each run and metric: the mean
over the answers, and their number.
"""
import argparse
import dataclasses
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import torch
from rookworld_nb import pretrain
from rookworld_nb.evaluate import evaluate, summarise
from rookworld_nb.labels import end_with_starter
from rookworld_nb.positions import read_lines, shipped
from rookworld_nb.pretrain import PretrainConfig, board_tokenizer, prepare
from rookworld_nb.weights import load_pretrained

weighted = pretrain.token_weights


def alike(kind, ids, mask, tokenizer):
    "Weights of tokens without a preference: 1 where anything is to be learned."
    return (weighted(kind, ids, mask, tokenizer) > 0).float()


def adamw(matrices, lr, **ignored):
    "AdamW where the recipe has Muon; the same weight decay, step by step."
    return torch.optim.AdamW(matrices, lr=lr, betas=(.9, .98), weight_decay=.05)


#: What is changed: settings of the run, and names of `rookworld_nb.pretrain` (or of PyTorch) that mean something else.
NO_PROBES = {'rookworld_nb.pretrain.PROBE_WEIGHT': 0.}
ADAMW = {'torch.optim.Muon': adamw}
ARMS = {
    'recipe': ({}, {}),
    'no probes': ({}, NO_PROBES),
    'no verdicts': ({'verdict_share': 0.}, {}),
    'neither': ({'verdict_share': 0.}, NO_PROBES),
    'plain start': ({}, {'rookworld_nb.pretrain.board_init_': lambda *ignored: None}),
    'all tokens alike': ({}, {'rookworld_nb.pretrain.token_weights': alike}),
    'AdamW': ({}, ADAMW),
    'AdamW, lr 0.0015': ({'lr': .0015}, ADAMW),
    'moves in random order': ({'best_first': False}, {}),
    '0.9 M parameters': ({'n_layer': 4, 'n_head': 4, 'n_embd': 128}, {}),
    '3.8 M parameters': ({'n_layer': 8, 'n_head': 6, 'n_embd': 192}, {}),
}


def with_rows(config, folder):
    "The settings with the folder of the rows that a run learns from; their order of moves decides which."
    place = folder/('best first' if config.best_first else 'random order')
    place.mkdir(parents=True, exist_ok=True)
    for name in ('data', 'prompts'):    # the shards are the same
        (folder/name).mkdir(exist_ok=True)
        if not (place/name).exists(): (place/name).symlink_to(Path('..')/name)
    return dataclasses.replace(config, output_dir=str(place))


def measured(model, tokenizer, held, moves):
    "Rows of task, metric, mean and n: greedy answers to positions, and the loss on rows."
    tables = []
    for task, samples in {None: shipped('heldout'), 'A rare': shipped('stress'), 'A mix': moves}.items():
        table = summarise(evaluate(model, tokenizer, samples)).reset_index()
        tables.append(table.assign(task=task or table['task'])[['task', 'metric', 'mean', 'n']])
    figures = pretrain.validate(model, held, tokenizer)
    rows = [(f'{kind} rows', metric, value, len(held[kind])) for _, kind, metric, value in
            ((*name.split('/'), value) for name, value in figures.items())]
    return pd.concat([*tables, pd.DataFrame(rows, columns=['task', 'metric', 'mean', 'n'])])


def one_run(config, arm, seed, folder, moves):
    "Train as an arm says, and measure the model; the table of a finished run is kept."
    place = folder/f'{arm}, seed {seed}'
    place.mkdir(exist_ok=True)
    settings, changed = ARMS[arm]
    study, tokenizer = dataclasses.replace(config, **settings), board_tokenizer()
    config = dataclasses.replace(study, output_dir=str(place), seed=seed)
    if (file := place/'figures.csv').exists() and pretrain._load_checkpoint(place/'checkpoint.pt', config)['step'] == config.steps:
        return pd.read_csv(file)
    rows, held = prepare(with_rows(study, folder), tokenizer)
    with ExitStack() as stack:
        for name, value in changed.items(): stack.enter_context(patch(name, value))
        seconds = [row['seconds'] for row in pretrain.train(config, rows, tokenizer, held)]
    model, tokenizer = load_pretrained(str(place/'model'))
    kept = [sample for path in sorted((folder/'prompts').glob('env-*.txt')) for sample in read_lines(path)[0]]
    table = measured(model, tokenizer, held, kept[:moves])
    about = {'arm': arm, 'seed': seed, 'steps': config.steps, 'batch_tokens': config.batch_tokens,
             'parameters': sum(p.numel() for p in model.parameters()), 'seconds_a_step': pd.Series(seconds).median()}
    table = table.assign(**about)[[*about, *table.columns]]
    table.to_csv(file, index=False, float_format='%.6g')
    return table


def main():
    options = argparse.ArgumentParser(description=__doc__.partition('\n')[0], epilog='parts: ' + ', '.join(ARMS))
    options.add_argument('arms', nargs='*', metavar='PART', help='all, if none is named')
    options.add_argument('--folder', type=Path, default=Path('work/recipe'), help='data and runs')
    options.add_argument('--model', help='start from its weights; random ones, if not given')
    options.add_argument('--steps', type=int, default=2000, help='of each run')
    options.add_argument('--lr', type=float, default=PretrainConfig.lr, help='peak learning rate')
    options.add_argument('--seeds', type=int, default=2, help='runs of each arm')
    options.add_argument('--moves', type=int, default=3000, help='A: moves kept apart')
    options.add_argument('--workers', type=int, default=2, help='runs side by side')
    options.add_argument('--csv', type=Path, help='table to write')
    options = options.parse_args()
    if unknown := set(options.arms) - set(ARMS): raise SystemExit(f'{", ".join(unknown)}: valid are {", ".join(ARMS)}')
    config = PretrainConfig(steps=options.steps, lr=options.lr, model=options.model, shards=60, seed=12, threads=1, bf16=True, workers=options.workers)
    arms = options.arms or [*ARMS]
    for best_first in {ARMS[arm][0].get('best_first', True) for arm in arms}:    # before anybody works side by side
        prepare(with_rows(dataclasses.replace(config, best_first=best_first), options.folder), board_tokenizer())
    jobs = [(arm, seed) for seed in range(1, options.seeds + 1) for arm in arms]
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context('spawn'), end_with_starter) as pool:
        futures = [pool.submit(one_run, config, arm, seed, options.folder, options.moves) for arm, seed in jobs]
        for future in futures:
            table = future.result()
            print(time.strftime('%H:%M'), *table.iloc[0][['arm', 'seed']], table.set_index(['task', 'metric'])['mean'].round(3).to_dict(), flush=True)
    if options.csv: pd.concat(map(pd.read_csv, sorted(options.folder.glob('*/figures.csv')))).to_csv(options.csv, index=False)


if __name__ == '__main__':
    main()
