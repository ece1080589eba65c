"Every flag of `rookworld train` changes what it names: a short run without it, a short run with it, and what has to differ."
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from rookworld_nb import cli, model
from rookworld_nb.answers import RightAnswers, answer_logprobs
from rookworld_nb.config import BY_SIZE, TrainConfig
from rookworld_nb.positions import by_task, is_rare, shipped, spread, write_lines
from rookworld_nb.records import metric_rows, read_completions
from rookworld_nb.rewards import RewardTerms
from rookworld_nb.rules import legal_moves
from rookworld_nb.tasks import env_prompt, parse_env
from rookworld_nb.weights import load_pretrained
from short_runs import without_clocks

SHORT = {'--steps': 3, '--batch-positions': 2, '--group-size': 4, '--max-new-tokens': 32, '--eval-policy': 0, '--eval-env': 0, '--seed': 37,
         '--mix-env-ratio': .5, '--max-positions': 60, '--warmup-steps': 0, '--device': 'cpu', '--lr': 1e-3, '--replays': 2,
         '--loss-type': 'dapo'}
KL_COEF = BY_SIZE['small']['kl_coef']
RARE = {sample.prompt: is_rare(sample) for sample in by_task(shipped('train'))['A']}


def train(folder, flags, capsys):
    "Run the command; what it wrote and what it said."
    given = SHORT | {'--output-dir': folder} | flags
    words = [str(word) for name, value in given.items() for word in ((name,) if value is True else (name, value))]
    code = cli.main(['train', *words])
    said = capsys.readouterr()
    rows = metric_rows(Path(folder)/'metrics.jsonl')
    tables = [read_completions(path) for path in sorted(Path(folder).glob('completions/*.csv'))]
    return SimpleNamespace(code=code, said=said.out + said.err, rows=rows, tables=tables, folder=Path(folder))


class Silent:
    def readouterr(self): return SimpleNamespace(out='', err='')


def first(tmp_path_factory, flags):
    "A run that others are compared with."
    run = train(tmp_path_factory.mktemp('flags')/'run', flags, Silent())
    assert run.code == 0 and len(run.rows) == flags.get('--steps', 3)
    return run


@pytest.fixture(scope='module')
def plain(tmp_path_factory): return first(tmp_path_factory, {})


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "Paid by whole answers, for flags that want them: that alone changes everything."
    return first(tmp_path_factory, {'--credit': 'answer', '--steps': 2})


@pytest.fixture(scope='module')
def judged(tmp_path_factory): return first(tmp_path_factory, {'--use-gae': True, '--steps': 1})


def column(run, name): return [row.get(name) for row in run.rows]
def differs(name, step): return lambda plain, run: run.rows[step-1][name] != plain.rows[step-1][name]
def same_texts(plain, run): return plain.tables[0]['completion'].equals(run.tables[0]['completion'])
def same_texts_other(what): return lambda plain, run: same_texts(plain, run) and not plain.tables[0][what].equals(run.tables[0][what])
def stops_early(words): return lambda plain, run: len(run.rows) < 3 and words in run.said
def stops_after_one_recovery(plain, run): return len(run.rows) < 9 and column(run, 'recoveries')[-1] == 1 and 'after 1 recoveries' in run.said
def weights(run): return load_file(run.folder/'final_checkpoint'/'model.safetensors')
def rare_prompts(run): return {RARE[prompt] for table in run.tables for prompt in table['prompt'] if prompt.startswith('A:')}
def moves_asked(run): return [len(legal_moves(prompt[3:])) for table in run.tables for prompt in table['prompt'].unique() if prompt.startswith('P:')]
def first_answers(count):
    model, tokenizer = load_pretrained('nano')
    samples = spread(by_task(shipped('train'))['A'], SHORT['--max-positions'])
    with torch.no_grad(): return 1 - answer_logprobs(model, RightAnswers(samples, tokenizer, count, SHORT['--seed'])(1)).exp().mean().item()


def moved(plain, run): return sum((weights(run)[name] - weights(plain)[name]).abs().sum() for name in weights(plain))


CASES = {
    'seed': ({'--seed': 4}, lambda plain, run: not same_texts(plain, run)),
    'mix_env_ratio': ({'--mix-env-ratio': 0}, lambda plain, run: set(column(run, 'task_P/fraction')) == {1} != set(column(plain, 'task_P/fraction'))),
    'rare_env_ratio': ({'--rare-env-ratio': 1}, lambda plain, run: rare_prompts(run) == {True} and rare_prompts(plain) == {False}),
    'history_plies': ({'--history-plies': 2, '--mix-env-ratio': 1, '--eval-env': 0}, lambda plain, run: {len(p.split('+')[2].split()) for t in run.tables for p in t['prompt']} == {2}),
    'easy_first': ({'--easy-first': 2, '--batch-positions': 4, '--seed': 13}, lambda plain, run: moves_asked(run) == [4, 26, 27, 30]),    # without: 27, 30, 4, 26
    'max_positions': ({'--max-positions': 1}, lambda plain, run: len({p for t in run.tables for p in t['prompt']}) == 2),
    'eval_policy': ({'--eval-policy': 3, '--eval-samples': 1}, lambda plain, run: 'best_move_accuracy' in run.said and summary(run, 'P', 'n') == {3}),
    'eval_env': ({'--eval-env': 2, '--eval-samples': 1}, lambda plain, run: 'state_exact' in run.said and summary(run, 'A', 'n') == {2}),
    'eval_every': ({'--eval-every': 2, '--eval-policy': 3, '--eval-env': 2, '--eval-samples': 1}, lambda plain, run: column(run, 'loss') == column(plain, 'loss')
                   and ['eval/P_reward' in row for row in run.rows] == [False, True, False] and 0 <= run.rows[1]['eval/A_state_exact'] <= 1),
    'save_every': ({'--save-every': 2}, lambda plain, run: (run.folder/'checkpoint-2').is_dir() and not (plain.folder/'checkpoint-2').exists()),
    'keep_checkpoints': ({'--save-every': 1, '--keep-checkpoints': 1}, lambda plain, run: [p.name for p in run.folder.glob('checkpoint-*')] == ['checkpoint-3']),
    'steps': ({'--steps': 2}, lambda plain, run: len(run.rows) == 2),
    'batch_positions': ({'--batch-positions': 4}, lambda plain, run: len(run.tables[0]) == 4*4),
    'group_size': ({'--group-size': 2}, lambda plain, run: len(run.tables[0]) == 2*2),
    'temperature': ({'--temperature': .3}, lambda plain, run: run.rows[0]['entropy'] < .7*plain.rows[0]['entropy']),
    'max_new_tokens': ({'--max-new-tokens': 9}, lambda plain, run: run.rows[0]['completions/max_length'] == 9 < plain.rows[0]['completions/max_length']),
    'reward_shaping': ({'--reward-shaping': 'binary'}, lambda plain, run: same_texts_other('reward')(plain, run)
                       and set(run.tables[0]['reward']) <= {0., 1., -.3}),
    'best_weight': ({'--best-weight': 40, '--steps': 1}, same_texts_other('reward')),
    'fen_scaling': ({'--fen-scaling': 'linear', '--steps': 1}, same_texts_other('fen')),
    'legal_credit': ({'--legal-credit': 0}, same_texts_other('candidates')),
    'illegal_cost': ({'--illegal-cost': .9}, same_texts_other('candidates')),
    'repeat_cost': ({'--repeat-cost': .9}, same_texts_other('candidates')),
    'reward_warmup_steps': ({'--reward-warmup-steps': 9}, same_texts_other('reward')),
    'normalize_rewards': ({'--normalize-rewards': True, '--credit': 'answer'}, same_texts_other('advantage')),
    'baseline_type': ({'--baseline-type': 'leave_one_out'}, same_texts_other('advantage')),
    'scale_rewards': ({'--scale-rewards': 'none'}, same_texts_other('advantage')),
    'credit': ({'--credit': 'answer'}, same_texts_other('advantage')),
    'mask_truncated': ({'--mask-truncated': True}, lambda plain, run: same_texts(plain, run) and differs('grad_norm', 1)(plain, run)),
    'drop_tied': ({'--drop-tied': True, '--reward-shaping': 'binary', '--batch-positions': 12, '--mix-env-ratio': 0}, lambda plain, run:
                  0 < run.rows[0]['rollout_buffer_size'] == round(12*(1 - run.rows[0]['frac_reward_zero_std'])) < 12),
    'buffer_capacity': ({'--buffer-capacity': 2}, lambda plain, run: max(column(run, 'rollout_buffer_size')) == 4 > max(column(plain, 'rollout_buffer_size'))),
    'fresh_share': ({'--buffer-capacity': 2, '--fresh-share': 0}, lambda plain, run: max(column(run, 'rollout_buffer_size')) == 2),
    'max_age': ({'--replays': 9, '--max-age': 1}, lambda plain, run: len(run.tables) == 3 and set(column(run, 'rollout_age')) == {0}),
    'replays': ({'--replays': 1}, lambda plain, run: len(run.tables) == 3 > len(plain.tables)),
    'minibatch_positions': ({'--minibatch-positions': 1}, lambda plain, run: column(run, 'rollout_fresh_share') == [1, .5, 0]),
    'lr': ({'--lr': 2e-3}, lambda plain, run: run.rows[0]['learning_rate'] == 2e-3 and moved(plain, run) > 0),
    'lr_schedule': ({'--lr-schedule': 'constant'}, lambda plain, run: column(run, 'learning_rate') == [1e-3]*3 != column(plain, 'learning_rate')),
    'warmup_steps': ({'--warmup-steps': 2}, lambda plain, run: run.rows[0]['learning_rate'] == 5e-4),
    'weight_decay': ({'--weight-decay': 9}, lambda plain, run: weights(run)['transformer.wte.weight'].norm() < weights(plain)['transformer.wte.weight'].norm()),
    'grad_clip': ({'--grad-clip': 1e-9}, lambda plain, run: column(run, 'grad_norm')[0] == column(plain, 'grad_norm')[0] and moved(plain, run) > 0),
    'clip_range': ({'--clip-range': 1e-4}, lambda plain, run: run.rows[1]['clip_ratio/low_mean'] > plain.rows[1]['clip_ratio/low_mean']),
    'clip_range_high': ({'--clip-range-high': 1e-4}, lambda plain, run: run.rows[1]['clip_ratio/high_mean'] > plain.rows[1]['clip_ratio/high_mean']
                        and run.rows[1]['clip_ratio/low_mean'] == plain.rows[1]['clip_ratio/low_mean']),
    'importance_level': ({'--importance-level': 'sequence', '--credit': 'answer'}, differs('ratio_max', 2)),
    'loss_type': ({'--loss-type': 'dr_grpo'}, differs('grad_norm', 1)),
    'kl_coef': ({'--kl-coef': .5}, lambda plain, run: run.rows[1]['kl_loss'] == pytest.approx(.5/KL_COEF*plain.rows[1]['kl_loss'], rel=1e-3)),
    'kl_estimator': ({'--kl-estimator': 'forward'}, differs('kl_loss', 2)),
    'kl_unbiased': ({'--no-kl-unbiased': True}, differs('kl_loss', 2)),
    'kl_in_reward': ({'--kl-in-reward': True, '--kl-coef': .5, '--replays': 1}, lambda plain, run: 'kl_loss' not in run.rows[1]
                     and column(run, 'kl_penalty')[0] == pytest.approx(0, abs=1e-4) and abs(column(run, 'kl_penalty')[1]) > 1e-4),
    'kl_control': ({'--kl-control': 'adaptive', '--replays': 1, '--seed': 3}, lambda plain, run: column(run, 'kl_coef') == pytest.approx([KL_COEF, KL_COEF, KL_COEF/1.5])),
    'kl_target': ({'--kl-control': 'adaptive', '--kl-target': 1e-9, '--replays': 1}, lambda plain, run: column(run, 'kl_coef')[2] > column(run, 'kl_coef')[1]),
    'kl_warmup_steps': ({'--kl-warmup-steps': 2}, lambda plain, run: column(run, 'kl_coef') == [0, 0, KL_COEF]),
    'kl_warmup_factor': ({'--kl-warmup-steps': 2, '--kl-warmup-factor': .5}, lambda plain, run: column(run, 'kl_coef') == [KL_COEF/2, KL_COEF/2, KL_COEF]),
    'kl_divergence_threshold': ({'--kl-divergence-threshold': 1e-7, '--max-recoveries': 0}, stops_early('above 1e-07')),
    'kl_tail_threshold': ({'--kl-tail-threshold': 1e-7, '--max-recoveries': 0}, stops_early('kl_95pct')),
    'kl_spike_factor': ({'--kl-spike-factor': 1.01, '--kl-target': 1e-9, '--max-recoveries': 0}, stops_early('diverged')),
    'max_recoveries': ({'--kl-divergence-threshold': 1e-7, '--max-recoveries': 1, '--steps': 9}, stops_after_one_recovery),
    'entropy_coef': ({'--entropy-coef': .1}, lambda plain, run: run.rows[0]['entropy_loss'] == pytest.approx(-.1*run.rows[0]['entropy'], rel=1e-4)),
    'answer_coef': ({'--answer-coef': .5}, lambda plain, run: column(run, 'reward')[0] == column(plain, 'reward')[0] and run.rows[0]['answers_wrong'] > 0 and 'answers_wrong' not in plain.rows[0]
                 and 'with each update 64 right A: answers' in run.said and differs('grad_norm', 1)(plain, run)),
    'answer_positions': ({'--answer-coef': .5, '--answer-positions': 3}, lambda plain, run: 'with each update 3 right A: answers' in run.said and run.rows[0]['answers_wrong'] == pytest.approx(first_answers(3), rel=1e-4)),
    'adamw': ({'--adamw': 'loop'}, lambda plain, run: 0 < moved(plain, run) < 1e-2*sum(value.abs().sum() for value in weights(plain).values())),
    'matmul_precision': ({'--matmul-precision': 'medium'}, lambda plain, run: torch.get_float32_matmul_precision() == 'medium'
                         and 'float32 products: medium;' in run.said),
    'bf16': ({'--bf16': True}, lambda plain, run: run.rows[0]['entropy'] != plain.rows[0]['entropy'] and run.rows[0]['ratio_max'] < 1.1
             and 'bf16: on' in run.said),
    'gradient_checkpointing': ({'--gradient-checkpointing': True}, lambda plain, run: column(run, 'loss') == column(plain, 'loss')
                               and recomputed > 0 and 'gradient checkpointing: on' in run.said),
    'cuda_graphs': ({'--no-cuda-graphs': True}, lambda plain, run: not json.loads((run.folder/'config.json').read_text())['cuda_graphs']),  # test_gpu.py
    'cudnn_benchmark': ({'--cudnn-benchmark': True}, lambda plain, run: torch.backends.cudnn.benchmark),
    'cuda_allocator': ({'--cuda-allocator': 'expandable_segments:True'}, lambda plain, run: os.environ['PYTORCH_CUDA_ALLOC_CONF'] == 'expandable_segments:True'),
    'use_gae': ({'--use-gae': True}, lambda plain, run: run.rows[0]['value_loss'] > 0 and 'value_loss' not in plain.rows[0]),
    'data': ({'--data': 'other.txt'}, lambda plain, run: {p for t in run.tables for p in t['prompt']} <= {s.prompt for s in shipped('train')[50:60] + shipped('train')[-9:]}),
    'model': ({'--model': 'folder'}, differs('entropy', 1)),
}


recomputed = 0


@pytest.fixture(autouse=True)
def counted(put_back, monkeypatch):
    "Count the blocks that backward has to compute again."
    global recomputed
    recomputed, once = 0, model.checkpoint

    def counting(*inputs, **options):
        global recomputed
        recomputed += 1
        return once(*inputs, **options)
    monkeypatch.setattr(model, 'checkpoint', counting)


def summary(run, task, name):
    rows = json.loads((run.folder/'summary.json').read_text())['comparison']
    return {row[name] for row in rows if (row['task'], row['metric']) == (task, 'reward')}


#: Where the first step tells all, or the first two, there are no others.
STEPS = dict.fromkeys((
    'seed', 'eval_policy', 'eval_env', 'batch_positions', 'group_size', 'temperature', 'max_new_tokens', 'reward_shaping', 'legal_credit', 'illegal_cost',
    'repeat_cost', 'reward_warmup_steps', 'normalize_rewards', 'baseline_type', 'scale_rewards', 'credit', 'mask_truncated', 'drop_tied', 'loss_type',
    'entropy_coef', 'answer_coef', 'answer_positions', 'matmul_precision', 'bf16', 'cuda_graphs', 'cudnn_benchmark', 'cuda_allocator', 'use_gae', 'model'), 1)
STEPS |= dict.fromkeys(('clip_range', 'clip_range_high', 'importance_level', 'kl_coef', 'kl_estimator', 'kl_unbiased'), 2)


@pytest.mark.parametrize('name', CASES)
def test_the_flag_changes_what_it_names(name, plain, whole, tmp_path, capsys):
    flags, shown = CASES[name]
    if name == 'data':
        write_lines(shipped('train')[50:60] + shipped('train')[-9:], tmp_path/'other.txt')
        flags = {'--data': tmp_path/'other.txt'}
    if name == 'history_plies':
        asked = [(sample, parse_env(sample.line)) for sample in shipped('train')[-40:]]
        write_lines([replace(sample, prompt=env_prompt(env.fen, env.uci, ['a2a3', 'a7a6', env.uci])) for sample, env in asked], tmp_path/'long.txt')
        flags = flags | {'--data': tmp_path/'long.txt'}
    if name == 'model':
        flags = {'--model': plain.folder/'final_checkpoint'}
    run = train(tmp_path/'run', ({'--steps': STEPS[name]} if name in STEPS else {}) | flags, capsys)
    assert run.code == 0, run.said
    assert shown(whole if '--credit' in flags and name != 'credit' else plain, run), run.said
    stored = json.loads((run.folder/'config.json').read_text())
    for flag, value in flags.items():
        if value is not True:
            assert stored[flag[2:].replace('-', '_')] == (str(value) if isinstance(value, Path) else value)


#: With a critic: these three change how the advantages or the loss are made of the same completions.
@pytest.mark.parametrize(('flag', 'value'), [('--gamma', .5), ('--gae-lambda', .2), ('--value-loss-coef', 3.)])
def test_the_flags_of_the_critic(flag, value, judged, tmp_path, capsys):
    other = train(tmp_path/'other', {'--use-gae': True, '--steps': 1, flag: value}, capsys)
    assert judged.rows[0]['reward'] == other.rows[0]['reward'] and judged.rows[0]['grad_norm'] != other.rows[0]['grad_norm']


def test_pieces_leave_the_update_alone(plain, tmp_path, capsys):
    run = train(tmp_path/'run', {'--micro-batch-size': 2}, capsys)
    assert column(run, 'loss') == pytest.approx(column(plain, 'loss'), rel=1e-3, abs=1e-5) and column(run, 'grad_norm') == pytest.approx(column(plain, 'grad_norm'), rel=1e-2)
    assert column(run, 'loss') != column(plain, 'loss')
    assert train(tmp_path/'refused', {'--micro-batch-size': 3}, capsys).code == 2


def test_the_same_flags_give_the_same_run(plain, tmp_path, capsys):
    run = train(tmp_path/'run', {}, capsys)
    assert all(torch.equal(value, weights(plain)[name]) for name, value in weights(run).items())
    assert [*map(without_clocks, run.rows)] == [*map(without_clocks, plain.rows)]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which('g++'), reason='torch.compile needs a C++ compiler')
def test_compiled_blocks_train_the_same(plain, tmp_path, capsys):
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters['frames']['ok']
    run = train(tmp_path/'run', {'--compile': 'default'}, capsys)
    assert torch._dynamo.utils.counters['frames']['ok'] > before and 'compile: default' in run.said
    assert column(run, 'loss') == pytest.approx(column(plain, 'loss'), rel=1e-3, abs=1e-5)


@pytest.fixture
def few_sizes(monkeypatch):
    monkeypatch.setattr('rookworld_nb.setup.SIZES', ((2, 4), (3, 4)))


def test_the_search_chooses_the_batch_and_leaves_no_trace(few_sizes, tmp_path, capsys):
    auto = {name: value for name, value in SHORT.items() if name != '--batch-positions'} | {'--save-every': 1}
    given = train(tmp_path/'given', {'--batch-positions': 3}, capsys)
    words = [str(word) for name, value in (auto | {'--output-dir': tmp_path/'auto'}).items() for word in (name, value)]
    assert cli.main(['train', '--auto-batch-size', *words]) == 0
    said = capsys.readouterr().err
    assert 'Memory profile: 2 positions x 4 completions' in said and 'Optimal batch configuration found: 3 positions x 4 completions = 12' in said
    assert cli.main(['train', '--config', str(tmp_path/'auto'/'config.json'), '--plan']) == 0 and '3 prompts x 4 completions' in capsys.readouterr().out
    found, wanted = (load_file(tmp_path/name/'final_checkpoint'/'model.safetensors') for name in ('auto', 'given'))
    assert given.rows and all(torch.equal(value, wanted[name]) for name, value in found.items())
    for folder in ('checkpoint-2', 'checkpoint-3', 'final_checkpoint'):
        record = json.loads((tmp_path/'auto'/folder/'memory_profiles.json').read_text())
        assert [(row['batch_positions'], row['effective_batch_size']) for row in record['profiles']] == [(2, 8), (3, 12)]
        assert record['optimal'] == record['profiles'][1] and all(size > 0 for size in record['components_gb'].values())
    own, = json.loads((given.folder/'final_checkpoint'/'memory_profiles.json').read_text())['profiles']    # without a search: what was taken
    assert own['effective_batch_size'] == 12 and 0 < own['peak_gb'] < own['total_gb'] and own['utilization'] == own['peak_gb']/own['total_gb']
    assert cli.main(['train', '--resume', '--auto-batch-size', '--output-dir', str(tmp_path/'auto'), '--steps', '4']) == 0
    assert 'Memory profile' not in capsys.readouterr().err and (tmp_path/'auto'/'checkpoint-4'/'memory_profiles.json').exists()


def test_two_ways_to_choose_the_batch_are_one_too_many(tmp_path, capsys):
    run = train(tmp_path/'run', {'--auto-batch-size': True}, capsys)
    assert run.code == 2 and '--batch-positions 2: not with --auto-batch-size' in run.said and not run.folder.exists()


def test_no_flag_is_forgotten():
    elsewhere = {'compile', 'auto_batch_size', 'rank_timeout', 'output_dir', 'device', 'reference_device', 'resume', 'stockfish_path', 'engine_cache', 'eval_samples', 'micro_batch_size', 'gamma', 'gae_lambda', 'value_loss_coef'}
    rewards = {*RewardTerms.__dataclass_fields__} - {*CASES}    # tests/test_config.py
    assert {*CASES} | elsewhere | rewards == {*TrainConfig.__dataclass_fields__} and not elsewhere & {*CASES}


def test_more_evaluation_samples_make_no_more_prompts_but_other_means(tmp_path, capsys):
    runs = [train(tmp_path/str(n), {'--eval-policy': 3, '--eval-samples': n, '--steps': 1}, capsys) for n in (1, 3)]
    before = [pd.DataFrame(json.loads((run.folder/'summary.json').read_text())['comparison']).query('temperature > 0')['before'] for run in runs]
    assert [summary(run, 'P', 'n') for run in runs] == [{3}, {3}] and not before[0].equals(before[1])


def test_metrics_go_to_tensorboard_too(plain, tmp_path, capsys):
    accumulators = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
    run = train(tmp_path/'run', {'--tensorboard': True}, capsys)
    events = accumulators.EventAccumulator(str(run.folder/'tensorboard')).Reload()
    assert [event.step for event in events.Scalars('reward')] == [1, 2, 3]
    assert [event.value for event in events.Scalars('reward')] == pytest.approx(column(run, 'reward'))
    assert not (plain.folder/'tensorboard').exists()


def test_metrics_go_to_wandb_too(tmp_path, capsys, monkeypatch):
    logged = []
    fake = SimpleNamespace(init=lambda **options: SimpleNamespace(log=lambda row, **_: logged.append((options, row)), finish=lambda: None))
    monkeypatch.setitem(sys.modules, 'wandb', fake)
    run = train(tmp_path/'run', {'--wandb': 'chess'}, capsys)
    assert run.code == 0 and len(logged) == 3 and logged[0][0]['project'] == 'chess' and logged[0][0]['config']['steps'] == 3
    assert [row['reward'] for _, row in logged] == column(run, 'reward')
