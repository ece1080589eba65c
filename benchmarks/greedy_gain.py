"""Does a run improve what the policy would play? Greedy answers after it against greedy answers before it.

    rookworld train --seed 1 --output-dir runs/rare-1          # ... to --seed 5; and other settings, each under a name of its own
    python benchmarks/greedy_gain.py runs/rare-* --positions 5000 --exclude fens.txt --csv nbs/results/greedy_gain.csv

P: positions come from the generator of nano's own prompts with another seed and are labelled by Stockfish (1,000 nodes a position); those that the package ships, or --exclude names,
are left out, and the rest is kept in --cache. With --undrawn they are instead the training prompts whose position the run did not meet (a run that drew all has none). `--positions 0` leaves
P: out. A: positions are the shipped held-out ones. Task `A rare`: how many of the mates, draws and illegal moves are recognised, of the shipped held-out and stress sets together, and how many
other moves are taken for one of these. Task `P held-out`: the greedy policy rows of the run's own closing table. Both models answer each prompt once, greedily; the difference is paired by
prompt. Figures of the same run, task and metric in the CSV are replaced, if that run had the same settings.
"""
import argparse
import json
import sys
from pathlib import Path

import pandas as pd

from rookworld_nb.checkpoint import newest_checkpoint
from rookworld_nb.config import TrainConfig
from rookworld_nb.evaluate import OUTCOMES, compare, evaluate, select_rows
from rookworld_nb.positions import PromptMix, apart_from, by_task, read_lines, seen_positions, shipped, shipped_positions
from rookworld_nb.pretrain import make_policy_data, read_excluded
from rookworld_nb.rewards import RewardScorer
from rookworld_nb.rules import fen_key
from rookworld_nb.run import training_samples
from rookworld_nb.weights import load_pretrained

SHARD, NODES, SEED = 2000, 1000, 99
RARE = [*(f'{name}_recall' for name in OUTCOMES), 'false_alarms']


def fresh_positions(count, cache, exclude):
    "P: samples whose positions the package does not ship."
    if not count: return []
    files = make_policy_data(cache, -(-count*21//20//SHARD), SHARD, NODES, SEED, 1, 0.)
    taken = {*exclude} | shipped_positions()
    samples = {fen_key(sample.fen): sample for file in files for sample in read_lines(file)[0]}
    return [sample for key, sample in samples.items() if key not in taken][:count]


def undrawn_positions(run, config):
    "P: samples that a finished run could have drawn and did not; nor did one of its A: prompts or answers show their position."
    samples, (_, state) = training_samples(config), newest_checkpoint(run)
    mix = PromptMix(samples, config.batch_positions, config.mix_env_ratio, config.seed, config.rare_env_ratio)
    drawn = [sample for number in range(state['prompts']['drawn']) for sample in mix.batch(number)]
    return apart_from(by_task(samples)['P'], seen_positions(drawn))


def rare_moves(before, after):
    "Rows of `compare`: recall of each outcome, and false alarms."
    table = compare(select_rows(before, 'A'), select_rows(after, 'A')).reset_index()
    return table[table['metric'].isin(RARE)].assign(task='A rare')


def closing_rows(run):
    "Greedy rows of the policy from the table that the run ended with."
    table = pd.DataFrame(json.loads((run/'summary.json').read_text(encoding='utf-8'))['comparison'])
    return table[(table['task'] == 'P') & (table['temperature'] == 0)].assign(task='P held-out')


def main():
    options = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    options.add_argument('runs', nargs='+', type=Path, help='finished run folders')
    options.add_argument('--positions', type=int, default=5000, help='P: positions')
    options.add_argument('--cache', type=Path, default=Path('work/heldout'), help='where the positions are kept')
    options.add_argument('--exclude', type=Path, help='file of FENs to leave out as well')
    options.add_argument('--undrawn', action='store_true', help='take prompts that the run did not draw')
    options.add_argument('--csv', type=Path, help='table to add to')
    options = options.parse_args()
    shared = [] if options.undrawn else fresh_positions(options.positions, options.cache, read_excluded(options.exclude))
    held, stress = by_task(shipped('heldout'))['A'], shipped('stress')
    before, tables = {}, []
    for run in options.runs:
        config = TrainConfig(**json.loads((run/'config.json').read_text(encoding='utf-8')))
        samples = (undrawn_positions(run, config)[:options.positions] if options.undrawn else shared) + held
        scorer = RewardScorer(config.rewards).for_evaluation()
        examine = lambda name: evaluate(*load_pretrained(name), samples + stress, scorer=scorer)
        start = config.model, config.rewards, options.undrawn and run
        if start not in before: before[start] = examine(config.model)
        both = before[start], examine(run/'final_checkpoint')
        natural = [table[table['prompt'] < len(samples)] for table in both]
        table = pd.concat([compare(*natural).reset_index(), rare_moves(*both), closing_rows(run)]).drop(columns=['temperature', 'chance'])
        settings = {'run': run.name, 'rare_env_ratio': config.rare_env_ratio, **{name: getattr(config, name) for name in ('credit', 'steps', 'lr', 'seed')}}
        tables.append(table.assign(**settings)[[*settings, *table.columns]])
        print(run.name, ', '.join(f'{row.task}: {row.metric} {row.difference:+.4f} (z {row.z:+.1f})' for row in table.itertuples()
                                  if row.task == 'A rare' or row.metric in ('reward', 'distinct_legal', 'top5_overlap', 'best_legal', 'best_move_accuracy', 'state_exact')),
              flush=True)
    if options.csv:
        new = pd.concat(tables)
        old = pd.read_csv(options.csv, dtype={'run': str}) if options.csv.exists() else new[:0]
        was, now = ({run: rows[[*settings]].astype(object).fillna('none').iloc[0].tolist() for run, rows in table.groupby('run')} for table in (old, new))
        for run in was.keys() & now.keys():
            if was[run] != now[run]: sys.exit(f'{options.csv}: its {run} had {was[run]}, not {now[run]}; rename one of the two')
        rows = pd.concat([old, new]).drop_duplicates(['run', 'task', 'metric'], keep='last')
        rows.to_csv(options.csv, index=False, float_format='%.6g')


if __name__ == '__main__':
    main()
