"""Does a run improve what the policy would play? Greedy answers after it against greedy answers before it.

    rookworld train --seed 1 --output-dir runs/mine-1          # ... to --seed 5; and other settings, each under a name of its own
    python benchmarks/greedy_gain.py runs/mine-* --positions 5000 --exclude nbs/results/fresh_learned.txt --csv mine.csv

P: positions come from the shards that nano's fourth pre-training kept apart from what it learned from, and that its fifth left out; they are made again, labelled by Stockfish (10,000 nodes a
position) and kept in --cache. Those that the package ships, or --exclude names, are left out. With --undrawn they are instead the training prompts whose position the run did not meet (a run that drew all has none). `--positions 0` leaves
P: out. A: positions are the shipped held-out ones. Task `A natural`: --moves moves as games have them (seven in ten are one of the engine's five), one on each of the fresh positions (`--moves 0`: none). Task
`A rare`: how many of the mates, draws and illegal moves are recognised, of the shipped held-out and stress sets together, and how many other moves are taken for one of these. Task `A rare, fresh`: the
same of --rare moves from the `A:` shards beside those of the P: positions (`--rare 0`: none). Tasks
`P held-out` and `P held-out, sampled`: the policy rows of the run's own closing table. Both models answer each prompt once, greedily; the difference is paired by prompt. `--share 0.6` evaluates the model six tenths of the way along
the line from the start to the run's end (it has no closing table). Figures of the same
run, task and metric in the CSV are replaced, if that run had the same settings.
"""
import argparse
import json
import random
import sys
from pathlib import Path

import pandas as pd

from rookworld_nb.checkpoint import newest_checkpoint
from rookworld_nb.config import TrainConfig
from rookworld_nb.corpus import labelled_again, make_env_data, make_policy_data, natural_env_sample
from rookworld_nb.evaluate import compare, evaluate, select_rows
from rookworld_nb.positions import OUTCOMES, PromptMix, apart_from, by_task, read_lines, seen_positions, shipped, shipped_positions, write_lines
from rookworld_nb.pretrain import read_excluded
from rookworld_nb.rewards import RewardScorer
from rookworld_nb.rules import LABEL_NODES, fen_key
from rookworld_nb.setup import training_samples
from rookworld_nb.weights import interpolate, load_pretrained

SHARD, ENV_SHARD, NODES, SEED = 2000, 1000, 2000, 10    # the prompts of nano's fourth pre-training, which had seed 9
RARE = [*(f'{name}_recall' for name in OUTCOMES), 'false_alarms']
SETTINGS = ('mix_env_ratio', 'rare_env_ratio', 'kl_coef', 'credit', 'illegal_cost', 'repeat_cost', 'answer_coef', 'steps', 'lr', 'seed')


def unseen(files, count, exclude):
    "Samples of some files, one a position, and none that the package ships."
    taken = {*exclude} | shipped_positions()
    samples = {fen_key(sample.fen): sample for file in files for sample in read_lines(file)[0]}
    return [sample for key, sample in samples.items() if key not in taken][:count]


def policy_shards(shards, cache):
    "Files of P: samples, labelled where they are not there yet."
    return make_policy_data(cache, shards, SHARD, NODES, SEED, 1, 0.)


def shards_for(count, size):
    "How many files give so many samples, with a twentieth to spare for those left out."
    return -(-count*21//20//size)


def fresh_positions(count, cache, exclude):
    "P: samples, labelled by a deeper search than when their games were played."
    if not count: return []
    samples, file = unseen(policy_shards(shards_for(count, SHARD), cache), count, exclude), cache/'judged.txt'
    judged = {sample.fen: sample for sample in (read_lines(file)[0] if file.exists() else [])}
    if missing := [sample for sample in samples if sample.fen not in judged]:
        judged |= {sample.fen: sample for sample in labelled_again(missing, LABEL_NODES)}
        write_lines(judged.values(), file)
    return [judged[sample.fen] for sample in samples]


def rare_moves(count, cache, exclude):
    "A: samples in which rare kinds of move are as frequent as in pre-training."
    if not count: return []
    shards = shards_for(count, ENV_SHARD)
    policy_shards(shards, cache)    # a part of the moves is made on their positions
    return unseen(make_env_data(cache, shards, ENV_SHARD, SEED, 1), count, exclude)


def undrawn_positions(run, config):
    "P: samples that a finished run could have drawn and did not; nor did one of its A: prompts or answers show their position."
    samples, (_, state) = training_samples(config), newest_checkpoint(run)
    mix = PromptMix(samples, config.batch_positions, config.mix_env_ratio, config.seed, config.rare_env_ratio, config.easy_first)
    drawn = [sample for number in range(state['prompts']['drawn']) for sample in mix.batch(number)]
    return apart_from(by_task(samples)['P'], seen_positions(drawn))


def moves_in(samples):
    "A: samples, a natural move on each position."
    rng = random.Random(f'{SEED} moves')
    return [natural_env_sample(sample, rng) for sample in samples]


def env_moves(before, after, task):
    "Rows of `compare` on the A: answers in two tables, under a name of their own."
    return compare(select_rows(before, 'A'), select_rows(after, 'A')).reset_index().assign(task=task)


def closing_rows(run):
    "Rows of the policy from the table that the run ended with."
    table = pd.DataFrame(json.loads((run/'summary.json').read_text(encoding='utf-8'))['comparison'])
    policy = table[table['task'] == 'P'].drop(columns='chance')
    return policy.assign(task=policy['temperature'].map(lambda temperature: 'P held-out, sampled' if temperature else 'P held-out'))


def settings_of(run, config, share):
    "Name and settings of a run, as the CSV has them."
    settings = {'run': run.name, **{name: getattr(config, name) for name in SETTINGS}, 'share': share}
    return {name: float(f'{value:.6g}') if isinstance(value, float) else value for name, value in settings.items()}


def earlier_rows(csv, settings):
    "The CSV so far; ends the program where it holds other runs of these names."
    if not csv or not csv.exists(): return pd.DataFrame()
    old = pd.read_csv(csv, dtype={'run': str})
    for now in settings:
        rows = old.loc[old['run'] == now['run'], [*now]].astype(object)
        if len(rows) and (was := rows.where(rows.notna(), None).iloc[0].to_dict()) != now:
            sys.exit(f'{csv}: its {now["run"]} had {was}, not {now}; rename one of the two')
    return old


def main():
    options = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    options.add_argument('runs', nargs='+', type=Path, help='finished run folders')
    options.add_argument('--positions', type=int, default=5000, help='P: positions')
    options.add_argument('--moves', type=int, default=5000, help='A: moves on fresh positions')
    options.add_argument('--rare', type=int, default=2800, help='A: moves of which many are rare')
    options.add_argument('--cache', type=Path, default=Path('work/heldout'), help='where the positions are kept')
    options.add_argument('--exclude', type=Path, help='file of FENs to leave out as well')
    options.add_argument('--share', type=float, default=1., help='of the way from the start to the end, 0 to 1')
    options.add_argument('--undrawn', action='store_true', help='take prompts that the run did not draw')
    options.add_argument('--csv', type=Path, help='table to add to')
    options = options.parse_args()
    configs = [TrainConfig(**json.loads((run/'config.json').read_text(encoding='utf-8'))) for run in options.runs]
    described = [settings_of(run, config, options.share) for run, config in zip(options.runs, configs)]
    exclude, old = read_excluded(options.exclude), earlier_rows(options.csv, described)
    fresh = fresh_positions(max(options.moves, 0 if options.undrawn else options.positions), options.cache, exclude)
    moves, scarce = moves_in(fresh[:options.moves]), rare_moves(options.rare, options.cache, exclude)
    held, stress = by_task(shipped('heldout'))['A'], shipped('stress')
    before, tables = {}, []
    for run, config, settings in zip(options.runs, configs, described):
        samples = (undrawn_positions(run, config) if options.undrawn else fresh)[:options.positions] + held
        scorer = RewardScorer(config.rewards).for_evaluation()
        parts = ['usual']*len(samples) + ['stress']*len(stress) + ['moves']*len(moves) + ['scarce']*len(scarce)
        examine = lambda model, tokenizer: evaluate(model, tokenizer, samples + stress + moves + scarce, scorer=scorer)
        first, tokenizer = load_pretrained(config.model)
        start = config.model, config.rewards, options.undrawn and run
        if start not in before: before[start] = examine(first, tokenizer)
        last, _ = load_pretrained(run/'final_checkpoint')
        both = before[start], examine(interpolate(first, last, options.share), tokenizer)
        of = lambda *chosen: [table[table['prompt_number'].map(parts.__getitem__).isin(chosen)] for table in both]
        rare = env_moves(*of('usual', 'stress'), 'A rare')
        found = [compare(*of('usual')).reset_index(), rare[rare['metric'].isin(RARE)]]
        if options.share == 1: found.append(closing_rows(run))
        if moves: found.append(env_moves(*of('moves'), 'A natural'))
        if scarce: found.append(env_moves(*of('scarce'), 'A rare, fresh'))
        table = pd.concat(found).drop(columns='temperature')
        tables.append(table.assign(**settings)[[*settings, *table.columns]])
        print(run.name, ', '.join(f'{row.task}: {row.metric} {row.difference:+.4f} (z {row.z:+.1f})' for row in table.itertuples()
                                  if row.task in ('A rare', 'A rare, fresh', 'A natural') or row.metric in ('reward', 'distinct_legal', 'top5_overlap', 'best_legal', 'best_move_accuracy', 'state_exact')),
              flush=True)
    if options.csv:
        rows = pd.concat([old, *tables]).drop_duplicates(['run', 'task', 'metric'], keep='last')
        rows.to_csv(options.csv, index=False, float_format='%.6g')


if __name__ == '__main__':
    main()
