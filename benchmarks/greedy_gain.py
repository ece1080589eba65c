"""Does a run improve what the policy would play? Greedy answers after it against greedy answers before it.

    rookworld train --seed 1 --output-dir runs/part-1          # and --credit answer, other seeds, other presets
    python benchmarks/greedy_gain.py runs/part-1 runs/part-2 --positions 5000 --csv nbs/results/greedy_gain.csv

P: positions come from the generator of nano's own prompts with another seed and are labelled by Stockfish (1,000 nodes a position); those whose FEN is in
a shipped set, or in --exclude, are left out, and the rest is kept in --cache. A: positions are the shipped held-out ones. Both models answer each prompt once, greedily; the
difference is paired by prompt. A run with the same name in the CSV is replaced.
"""
import argparse
import json
from pathlib import Path

import pandas as pd

from rookworld_nb.evaluate import compare, evaluate
from rookworld_nb.positions import read_lines, seen_positions, shipped
from rookworld_nb.pretrain import SHIPPED, make_policy_data
from rookworld_nb.rewards import RewardScorer
from rookworld_nb.rules import fen_key
from rookworld_nb.run import TrainConfig
from rookworld_nb.weights import load_pretrained

SHARD, NODES, SEED = 2000, 1000, 99


def fresh_positions(count, cache, exclude):
    "P: samples whose positions are in no shipped set."
    files = make_policy_data(cache, -(-count*21//20//SHARD), SHARD, NODES, SEED, 1, 0.)
    taken = {fen_key(fen) for fen in exclude} | seen_positions([sample for name in SHIPPED for sample in shipped(name)])
    samples = {fen_key(sample.fen): sample for file in files for sample in read_lines(file)[0]}
    return [sample for key, sample in samples.items() if key not in taken][:count]


def main():
    options = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    options.add_argument('runs', nargs='+', type=Path, help='finished run folders')
    options.add_argument('--positions', type=int, default=5000, help='P: positions')
    options.add_argument('--cache', type=Path, default=Path('work/heldout'), help='where the positions are kept')
    options.add_argument('--exclude', type=Path, help='file of FENs to leave out as well')
    options.add_argument('--csv', type=Path, help='table to add to')
    options = options.parse_args()
    exclude = options.exclude.read_text(encoding='utf-8').splitlines() if options.exclude else []
    samples = fresh_positions(options.positions, options.cache, exclude) + [s for s in shipped('heldout') if s.task == 'A']
    before, tables = {}, []
    for run in options.runs:
        config = TrainConfig(**json.loads((run/'config.json').read_text(encoding='utf-8')))
        scorer = RewardScorer(config.rewards).for_evaluation()
        start = config.model, config.rewards
        if start not in before: before[start] = evaluate(*load_pretrained(config.model), samples, scorer=scorer)
        after = evaluate(*load_pretrained(run/'final_checkpoint'), samples, scorer=scorer)
        table = compare(before[start], after).reset_index().drop(columns='temperature')
        settings = {'run': run.name, 'credit': config.credit, 'steps': config.steps, 'lr': config.lr, 'seed': config.seed}
        tables.append(table.assign(**settings)[[*settings, *table.columns]])
        print(run.name, ', '.join(f'{row.task}: {row.metric} {row.difference:+.4f} (z {row.z:+.1f})' for row in table.itertuples()
                                  if row.metric in ('reward', 'distinct_legal', 'top5_overlap', 'best_legal', 'best_move_accuracy', 'state_exact')), flush=True)
    if options.csv:
        new = pd.concat(tables)
        old = pd.read_csv(options.csv, dtype={'run': str}) if options.csv.exists() else new[:0]
        pd.concat([old[~old['run'].isin(new['run'])], new]).to_csv(options.csv, index=False, float_format='%.6g')


if __name__ == '__main__':
    main()
