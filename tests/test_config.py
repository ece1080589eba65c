"Beside 27_config: what is refused when a configuration is made, and presets."
import json
import math
import re
from dataclasses import replace
from inspect import signature
from pathlib import Path

import numpy as np
import pytest

from rookworld_nb.buffer import BufferConfig, CollectorConfig
from rookworld_nb.config import PRESETS, RunError, TrainConfig, repeated_settings, warned_flags
from rookworld_nb.credit import gae
from rookworld_nb.grpo import EMATracker, grpo_loss
from rookworld_nb.kl import per_token_kl
from rookworld_nb.records import RunWriter
from rookworld_nb.rewards import RewardTerms, RunningNorm
from rookworld_nb.setup import Setup, planned_work
from rookworld_nb.trainer import TrainerConfig


@pytest.mark.parametrize('changes, message', [
    (dict(steps=0), '--steps 0'), (dict(replays=0), '--replays 0'), (dict(clip_range_high=-1.), '--clip-range-high -1.0'), (dict(clip_range_high=0.), '--clip-range-high 0.0'),
    (dict(kl_spike_factor=.5), 'kl_spike_factor=0.5 must be above 1'), (dict(kl_in_reward=True, kl_unbiased=False), '--no-kl-unbiased: of no use with --kl-in-reward'),
    (dict(kl_control='adaptive', kl_coef=0.), '--kl-coef 0.0'), (dict(use_gae=True, drop_tied=True), '--drop-tied: not with --use-gae'),
    (dict(use_gae=True, importance_level='sequence'), '--importance-level sequence: not with --use-gae'), (dict(kl_coef=0., kl_in_reward=True), '--kl-in-reward: of no use with --kl-coef 0'),
    (dict(kl_coef=0., kl_warmup_steps=2), '--kl-warmup-steps 2: of no use with --kl-coef 0'), (dict(mix_env_ratio=1., stockfish_path='x'), '--stockfish-path x: of no use with --mix-env-ratio 1'),
    (dict(use_gae=True, baseline_type='ema'), '--baseline-type ema: not with --use-gae'), (dict(temperature=0.), 'temperature'),
    (dict(group_size=1), 'group_size'), (dict(group_size=0, micro_batch_size=8), 'group_size'), (dict(lr_schedule='cosin'), 'cosin'),
    (dict(kl_estimator='k3'), 'k3'), (dict(lr=-1.), 'lr'), (dict(max_positions=0), '--max-positions 0'),
    (dict(mix_env_ratio=1.5), '--mix-env-ratio 1.5'), (dict(mix_env_ratio=math.nan), '--mix-env-ratio nan'), (dict(rare_env_ratio=-.1), '--rare-env-ratio -0.1'),
    (dict(rare_env_ratio=math.nan), '--rare-env-ratio nan'), (dict(eval_every=0), '--eval-every 0'), (dict(history_plies=11), '--history-plies 11: a prompt shows 1 to 10'),
    (dict(eval_every=2, eval_policy=0, eval_env=0), '--eval-every 2: .*--eval-policy'), (dict(clip_range=2.), '--clip-range 2.0'),
    (dict(buffer_capacity=0), '--buffer-capacity 0'), (dict(max_new_tokens=0), '--max-new-tokens 0'), (dict(baseline_type='mean'), '--baseline-type mean.*group_mean'),
    (dict(reward_shaping='nice'), '--reward-shaping nice.*ladder'), (dict(micro_batch_size=3), '--micro-batch-size 3'),
    (dict(minibatch_positions=6), 'minibatch_positions=6'), (dict(gae_lambda=.5), '--gae-lambda 0.5: of no use without --use-gae'),
    (dict(normalize_momentum=.5), 'of no use without --normalize-rewards'),
    (dict(fresh_share=.5), '--fresh-share 0.5: of no use without --buffer-capacity'), (dict(rare_env_ratio=.5, mix_env_ratio=0.), '--rare-env-ratio 0.5: of no use with --mix-env-ratio 0'),
    (dict(penalty=-1.), '--penalty -1.0: of no use where the parts of an answer are paid'), (dict(penalty=-1., credit='part'), '--penalty -1.0: of no use'), (dict(penalty=-1., reward_shaping='binary'), '--penalty -1.0: of no use'),
    (dict(kl_unbiased=False, kl_estimator='reverse'), 'of no use with --kl-estimator reverse'), (dict(grad_clip=math.inf), 'grad_clip=inf must be finite'),
    (dict(kl_spike_factor=math.inf), 'kl_spike_factor=inf must be finite and above 0, or none')])
def test_bad_settings_are_refused_at_once(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{'batch_positions': 5, 'group_size': 4, 'replays': 2} | changes)


@pytest.mark.parametrize(('changes', 'said'), [
    ({'steps': True}, '--steps True: must be int'), ({'lr': np.float64(1e-4)}, 'must be float | None'), ({'seed': -1}, '--seed -1'), ({'seed': 2**32}, '--seed 4294967296'),
    ({'batch_positions': 0}, '--batch-positions 0: must be at least 1'), ({'steps': 2.5}, '--steps 2.5: must be int'), ({'seed': 1.5}, '--seed 1.5: must be int'),
    ({'rank_timeout': '600'}, "--rank-timeout '600': must be float"), ({'clip_range': None}, '--clip-range None: must be float'), ({'lr': '1e-4'}, "--lr '1e-4': must be float | None"), ({'bf16': 'no'}, "--bf16 'no': must be bool")])
def test_values_of_another_kind_are_refused_when_the_configuration_is_made(changes, said):
    with pytest.raises(RunError, match=re.escape(said)): TrainConfig(**changes)
    assert TrainConfig(lr=1, kl_coef=0).lr == 1    # a whole number is a number


@pytest.mark.parametrize(('changes', 'said'), [
    ({'kl_target': .01}, '--kl-target 0.01: acts only with --kl-control adaptive or --kl-spike-factor'),
    ({'kl_warmup_factor': .5}, '--kl-warmup-factor 0.5: acts only with --kl-warmup-steps'),
    ({'steps': 9, 'kl_warmup_steps': 9}, '--kl-warmup-steps 9: the KL weighs nothing in all of --steps 9')])
def test_settings_of_the_kl_that_change_nothing_here_are_spoken_of_in_the_plan(changes, said):
    config = TrainConfig(eval_policy=0, eval_env=0, **changes)
    assert said in planned_work(Setup(config)) and list(warned_flags(config)) == [name for name in changes if name != 'steps']
    acting = {'kl_control': 'adaptive'} | ({'kl_warmup_factor': .1, 'kl_warmup_steps': 9} if 'kl_target' not in changes else {})
    assert not warned_flags(replace(config, **acting))


def test_paths_are_kept_as_texts():
    assert TrainConfig(output_dir=Path('a')/'b', data=Path('c')) == TrainConfig(output_dir='a/b', data='c')


def test_presets_are_functions_that_can_be_changed():
    assert TrainConfig(kl_target=.01, kl_spike_factor=4.).kl_target == .01 and TrainConfig(steps=9, kl_warmup_steps=9, kl_warmup_factor=.1).steps == 9
    assert PRESETS['nano'](steps=3) == TrainConfig(steps=3)
    assert all(preset(steps=3, seed=1).steps == 3 for preset in PRESETS.values())
    calm, usual = PRESETS['emergency'](), TrainConfig().for_size(1)
    assert calm.lr == usual.lr/10 and calm.clip_range < usual.clip_range and calm.kl_coef > usual.kl_coef
    assert PRESETS['emergency'](model='jrahn/RookWorld-LM-124M').lr == TrainConfig().for_size(10**9).lr/10
    for parameters, model in ((1, 'nano'), (1, 'a/folder'), (10**9, 'a/folder')):
        calm, usual = PRESETS['emergency'](model=model).for_size(parameters), TrainConfig().for_size(parameters)
        assert calm.kl_coef >= 5*usual.kl_coef and calm.lr <= usual.lr/10 and calm.kl_control == 'fixed'    # an adaptive one would fall
    assert PRESETS['rtx4090']().batch_positions*PRESETS['rtx4090']().group_size == 256


@pytest.mark.parametrize('name', RewardTerms.__dataclass_fields__)
def test_each_term_of_the_reward_can_be_set_for_a_run(name):
    default = getattr(TrainConfig(), name)
    value = {str: 'quadratic', int: 3}.get(type(default)) or default/2 or .1
    company = {'normalize_rewards': True} if name in ('normalize_momentum', 'normalize_floor') else {}
    if name == 'penalty': company = {'credit': 'answer'}
    changed = TrainConfig(**company, **{name: value}).for_size(1)
    assert getattr(changed.rewards, name) == value != getattr(TrainConfig().rewards, name)
    whole = company or name in ('reward_warmup_steps', 'candidates_scaling', 'evals_scaling', 'flags_scaling')
    assert changed.credit == ('answer' if whole else 'part')


@pytest.mark.parametrize('part', ['trainer', 'buffer', 'collector'])
def test_a_part_of_a_configuration_whose_model_is_not_known_is_refused(part):
    with pytest.raises(RunError, match=r'left to the size of the model; for_size\(parameters\) fills them in'): getattr(TrainConfig(), part)
    assert getattr(TrainConfig().for_size(1), part)


def test_minibatches_larger_than_the_usual_batch_wait_for_the_search():
    assert TrainConfig(auto_batch_size=True, minibatch_positions=64).for_size(1).minibatch_positions == 64
    with pytest.raises(ValueError, match='minibatch_positions=200: must be at most 128'): TrainConfig(auto_batch_size=True, minibatch_positions=200)
    assert TrainConfig(auto_batch_size=True, minibatch_positions=200, buffer_capacity=2).for_size(1).minibatch_positions == 200


def test_the_table_from_the_paper_to_a_run_of_nano_shows_the_defaults():
    notebook = json.loads((Path(__file__).parent.parent/'nbs'/'19_trainer.ipynb').read_text(encoding='utf-8'))
    text = next(text for cell in notebook['cells'] if '| the paper |' in (text := ''.join(cell['source'])))
    rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in text.splitlines() if line.startswith('|')][2:]
    shown = {re.search('--([a-z-]+)', row[5])[1].replace('-', '_'): row for row in rows}
    nano, parts = TrainConfig().for_size(1), TrainerConfig()
    for name, part in (('kl_coef', parts.kl.kl_coef), ('lr', parts.lr), ('replays', BufferConfig().replays),
                       ('group_size', CollectorConfig().group_size), ('temperature', CollectorConfig().temperature)):
        assert (float(shown[name][3]), float(shown[name][4])) == (part, getattr(nano, name)), name
    assert nano.scale_rewards in shown['scale_rewards'][4] and CollectorConfig().scale_rewards in shown['scale_rewards'][3]
    assert nano.loss_type in shown['loss_type'][4] and parts.loss_type in shown['loss_type'][3]
    assert nano.credit == 'part' and nano.kl_unbiased and parts.kl_unbiased and len(rows) == 9


#: What a run of the 124M model does unless told otherwise.
LARGE = {'lr': 1e-5, 'lr_schedule': 'cosine', 'batch_positions': 8, 'group_size': 8, 'clip_range': .2, 'clip_range_high': None, 'kl_coef': .02, 'kl_target': .05,
         'kl_estimator': 'kl3', 'kl_divergence_threshold': .5, 'temperature': .7, 'max_new_tokens': 144, 'mix_env_ratio': .2, 'history_plies': 10, 'replays': 2,
         'weight_decay': .01, 'grad_clip': 1., 'max_recoveries': 3, 'keep_checkpoints': 2, 'loss_type': 'dapo', 'gamma': .99, 'gae_lambda': .95, 'value_loss_coef': .1}
SMALL = LARGE | {'lr': 1.5e-4, 'batch_positions': 32, 'kl_coef': .2, 'temperature': .9, 'mix_env_ratio': .35, 'history_plies': 1, 'replays': 1, 'loss_type': 'grpo'}


@pytest.mark.parametrize(('parameters', 'expected'), [(124_000_000, LARGE), (2_000_000, SMALL)])
def test_the_defaults_are_the_documented_ones(parameters, expected):
    config = TrainConfig().for_size(parameters)
    assert {name: getattr(config, name) for name in expected} == expected
    assert (config.trainer.betas, config.trainer.lr_final, config.trainer.weight_decay, config.trainer.max_recoveries) == ((.9, .95), .1, .01, 3)


@pytest.mark.parametrize(('function', 'name', 'value'), [
    (per_token_kl, 'estimator', 'kl3'), (grpo_loss, 'loss_type', 'dapo'), (gae, 'gamma', .99), (gae, 'gae_lambda', .95), (EMATracker, 'momentum', .9),
    (RunningNorm, 'momentum', .99), (BufferConfig, 'replays', 2), (BufferConfig, 'fresh_share', .25), (RunWriter, 'report_every', 10),
    (TrainerConfig, 'max_recoveries', 3), (TrainerConfig, 'value_loss_coef', .1), (TrainerConfig, 'grad_clip', 1.)])
def test_the_parts_have_the_documented_defaults_when_they_are_used_alone(function, name, value):
    assert signature(function).parameters[name].default == value


@pytest.mark.parametrize(('name', 'least'), [*((name, 1) for name in ('save_every', 'keep_checkpoints', 'history_plies', 'eval_samples', 'answer_positions')),
                                             *((name, 0) for name in ('eval_policy', 'eval_env', 'easy_first'))])
def test_what_is_too_small_is_refused_by_its_flag(name, least):
    with pytest.raises(RunError, match=f'--{name.replace("_", "-")} {least - 1}: must be at least {least}'): TrainConfig(**{name: least - 1})


def test_what_a_run_reads_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/'lines.txt').touch()
    for name in ('mine', 'nano'): (tmp_path/name).mkdir()
    stored = repeated_settings(TrainConfig(data='lines.txt', model='mine'))
    assert (stored['data'], stored['model']) == (str(tmp_path/'lines.txt'), str(tmp_path/'mine'))
    assert [repeated_settings(TrainConfig(model=name))['model'] for name in ('nano', 'a/b')] == ['nano', 'a/b']    # names, no folders
