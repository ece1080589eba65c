"The main job from configuration to run folder, on the embedded model, very short."
import functools
import gzip
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import chess
import numpy as np
import pandas as pd
import pytest
import torch
import transformers

import rookworld_nb.trainer
from rookworld_nb import buffer, cli
from rookworld_nb.checkpoint import (CheckpointError, checkpoints_of, fingerprint, model_bytes, newest_checkpoint, read_checkpoint,
                                     write_checkpoint)
from rookworld_nb.config import RunError, TrainConfig
from rookworld_nb.hardware import memory_metric
from rookworld_nb.monitor import metric_for
from rookworld_nb.positions import shipped, write_lines
from rookworld_nb.records import read_completions, read_metrics
from rookworld_nb.rewards import RewardScorer, read_policy
from rookworld_nb.rules import AnalysisCache
from rookworld_nb.run import (Run, alone_in, cache_words, closing_table, is_going_on, levers, origin_of, read_events, resumed_config, run_state,
                              run_summary, save_run, steer, train)
from rookworld_nb.setup import examine, planned_work
from rookworld_nb.tasks import read_prompt
from rookworld_nb.weights import load_pretrained, save_pretrained
from short_runs import RATE, SHORT, TINY, without_clocks


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs')/'first'
    return train(replace(SHORT, output_dir=str(folder))), folder


def test_the_run_folder_is_complete(finished):
    table, folder = finished
    names = {path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file()}
    wanted = {'config.json', 'metrics.jsonl', 'train.log', 'summary.json', 'reward.png', 'completions/step-000001.csv',
              'completions/step-000003.csv', 'final_checkpoint/model.safetensors', 'final_checkpoint/config.json',
              'final_checkpoint/tokenizer.json', 'checkpoint-2/model.safetensors', 'checkpoint-4/model.safetensors',
              'checkpoint-2/trainer.pt', 'final_checkpoint/trainer.pt', 'final_checkpoint/SHA256SUMS'}
    assert wanted <= names
    assert json.loads((folder/'config.json').read_text())['steps'] == 4
    assert len((folder/'metrics.jsonl').read_text().splitlines()) == 4
    assert {'rewards/P_legal_fraction/mean', *memory_metric('cpu')} <= {*read_metrics(folder).dropna(axis=1)}
    assert [name for name in read_metrics(folder) if metric_for(name) is None] == []    # each is explained
    assert set(json.loads((folder/'summary.json').read_text())['comparison'][0]) >= {'before', 'after', 'standard_error', 'z'}


def test_the_end_of_a_run_says_what_its_cache_was_worth(tmp_path):
    cache = AnalysisCache(tmp_path/'answers.db')
    cache.put('start', [])
    for key in ('start', 'start', 'other'): cache.get(key)
    run = SimpleNamespace(engine=SimpleNamespace(cache=cache), config=TrainConfig(stockfish_path='x', engine_cache='answers.db'))
    assert cache_words(run) == ', 2 of 3 engine answers of this process from answers.db'
    assert cache_words(SimpleNamespace(engine=None)) == cache_words(SimpleNamespace(engine=SimpleNamespace(cache=None))) == ''


def test_the_table_has_both_tasks_at_both_temperatures(finished):
    table, _ = finished
    assert {(task, temperature) for task, temperature, _ in table.index} == {('P', .7), ('P', 0.), ('A', .7), ('A', 0.)}
    assert 'reward' in closing_table(table) and table.loc[('P', .7, 'reward'), 'n'] == 6


def test_the_first_row_is_the_identity_and_the_second_pass_is_not(finished):
    rows = [json.loads(line) for line in (finished[1]/'metrics.jsonl').read_text().splitlines()]
    assert rows[0]['ratio_max'] == pytest.approx(1, abs=1e-3) and rows[0]['clip_ratio/region_mean'] == 0
    assert rows[0]['kl'] == pytest.approx(0, abs=1e-6) and rows[1]['ratio_max'] > 1.001
    assert [row['step'] for row in rows] == [1, 2, 3, 4] and all('time' in row for row in rows)


def test_the_checkpoint_loads_here_and_in_transformers(finished):
    folder = finished[1]/'final_checkpoint'
    ours, tokenizer = load_pretrained(str(folder))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([tokenizer.encode(shipped('heldout')[0].prompt).ids])
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
    before, _ = load_pretrained('nano')
    assert not torch.equal(before.wte.weight, ours.wte.weight)


def test_completion_tables_hold_every_reward_part(finished):
    table = pd.read_csv(finished[1]/'completions'/'step-000001.csv')
    assert len(table) == 20 and {'prompt', 'completion', 'task', 'advantage', 'format', 'candidates', 'evals', 'best', 'fen', 'flags',
                                 'reward_value', 'raw', 'reward'} <= set(table)
    groups = table.groupby('prompt')    # a mean over an answer's tokens: of those that are equally long the advantages cancel
    assert (groups['advantage'].sum()[groups['tokens'].nunique() == 1].abs() < 1e-3).all() and table['advantage'].abs().max() > .01


def test_nothing_is_written_before_the_first_step(tmp_path):
    run = Run(replace(SHORT, output_dir=str(tmp_path/'later')))
    assert '4 updates' in planned_work(run) and not (tmp_path/'later').exists()


def test_stopping_early_keeps_a_loadable_checkpoint(tmp_path):
    run = Run(replace(SHORT, output_dir=str(tmp_path/'stopped')))
    steps = run.steps()
    next(steps)
    steps.close()
    assert load_pretrained(str(tmp_path/'stopped'/'final_checkpoint'))[0].cfg == run.model.cfg


def test_two_runs_never_share_a_folder(tmp_path):
    first, second = (Run(replace(TINY, output_dir=str(tmp_path/'run'))) for _ in range(2))    # both checked before either has begun
    next(first.steps())
    with pytest.raises(RunError, match='another run has begun'): next(second.steps())
    assert len(rows_of(tmp_path/'run')) == 1


def test_a_run_that_is_going_on_is_left_alone(tmp_path):
    folder = tmp_path/'run'
    going = Run(replace(TINY, output_dir=str(folder))).steps()
    next(going), next(going), next(going)
    other = Run(resumed_config(output_dir=str(folder)))
    for second in (other, Run(resumed_config(output_dir=str(folder)))):
        with pytest.raises(RunError, match='a run is going on there'): next(second.steps())
    assert next(going)['step'] == 4 and len(rows_of(folder)) == 4
    going.close()
    assert next(Run(resumed_config(output_dir=str(folder))).steps())['step'] == 5


def test_a_run_whose_loop_was_not_left_does_not_begin_another(tmp_path):
    run = Run(replace(TINY, output_dir=str(tmp_path/'run')))
    going = run.steps()
    next(going)
    with pytest.raises(RunError, match='in a loop that was not left'): next(run.steps())
    going.close()
    assert next(run.steps())['step'] == 2


def test_a_taken_folder_is_refused_before_anything_is_examined(tmp_path, monkeypatch):
    monkeypatch.setattr('rookworld_nb.run.examine', lambda *given: pytest.fail('examined in vain'))
    def writer(*given): raise AssertionError('opened in vain')
    with alone_in(tmp_path), pytest.raises(RunError, match='a run is going on there'): train(replace(SHORT, output_dir=str(tmp_path)), [writer])


def test_answers_that_had_no_room_are_said_on_the_console(tmp_path, capsys):
    for number, most in enumerate((4, 144)):
        train(replace(TINY, steps=1, eval_policy=0, eval_env=0, max_new_tokens=most, output_dir=str(tmp_path/str(number))))
        assert ('100% of the answers are cut off at --max-new-tokens 4,' in capsys.readouterr().out) == (most == 4)


def test_a_run_that_is_broken_off_while_it_is_examined_is_found_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    list(Run(replace(TINY, steps=1, output_dir='runs/older')).steps())
    def broken(*given): raise KeyboardInterrupt
    monkeypatch.setattr('rookworld_nb.run.examine', broken)
    with pytest.raises(KeyboardInterrupt): train(replace(TINY, eval_policy=2, steps=2, output_dir='runs/newer'))
    assert resumed_config().output_dir == str(Path('runs/newer')) and len(list(Run(resumed_config()).steps())) == 2


def test_a_damaged_evaluation_of_the_start_is_made_again(tmp_path, caplog):
    folder = tmp_path/'run'
    train(replace(TINY, steps=1, eval_policy=2, eval_env=1, eval_samples=1, output_dir=str(folder)))
    path = folder/'evaluation'/'before.csv.gz'
    whole = path.read_bytes()
    for steps, damaged in enumerate((whole[:100], b'hello', b'', gzip.compress(b'')), 2):
        path.write_bytes(damaged)
        train(resumed_config(output_dir=str(folder), steps=steps))
        assert path.read_bytes() == whole
    assert caplog.text.count('before.csv.gz: damaged') == 4


def test_a_run_keeps_its_folder_from_the_examination_before_to_the_one_after(tmp_path, monkeypatch):
    config, seen = replace(TINY, steps=1, eval_policy=2, eval_samples=1, output_dir=str(tmp_path)), []
    def examined(*given):
        with pytest.raises(RunError, match='a run is going on there'), alone_in(tmp_path): pass
        seen.append(given)
        return examine(*given)
    monkeypatch.setattr('rookworld_nb.run.examine', examined)
    train(config)
    assert len(seen) == 2
    with alone_in(tmp_path): pass


def test_a_lock_that_cannot_be_opened_is_said_and_the_run_goes_on(tmp_path, caplog):
    (tmp_path/'run'/'.lock').mkdir(parents=True)    # stands for what a file system refuses
    with closing(Run(replace(TINY, output_dir=str(tmp_path/'run'))).steps()) as steps:
        assert next(steps)['step'] == 1
    assert 'run: cannot be locked (' in caplog.text and 'no other run goes on there' in caplog.text and not is_going_on(tmp_path/'run')
    with pytest.raises(IsADirectoryError, match='of the block'), alone_in(tmp_path/'run'): raise IsADirectoryError('of the block')


def test_a_folder_that_is_no_run_is_not_gone_on_with(finished, tmp_path):
    folder = shutil.copytree(finished[1]/'final_checkpoint', tmp_path/'model')
    with pytest.raises(RunError, match='config.json is not of a run, .*architectures'): resumed_config(output_dir=str(folder))
    (folder/'config.json').write_text('{}')
    with pytest.raises(RunError, match='config.json is not of a run, which has model, seed, steps'): resumed_config(output_dir=str(folder))
    (tmp_path/'old').mkdir()
    (tmp_path/'old'/'metrics.jsonl').write_text('{"step": 1}\n')
    with pytest.raises(RunError, match='holds a run already'): Run(replace(TINY, output_dir=str(tmp_path/'old')))


def test_a_folder_with_a_run_is_refused(finished):
    with pytest.raises(RunError, match='holds a run already'):
        Run(replace(SHORT, output_dir=str(finished[1])))


# killed and gone on with

def rows_of(folder):
    return [without_clocks(json.loads(line)) for line in (folder/'metrics.jsonl').read_text().splitlines()]


def digest(value):
    "A value that can be compared, tensors by their bits."
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        return {name: digest(item) for name, item in value.items()}
    return [digest(item) for item in value] if isinstance(value, list | tuple) else repr(value)


def contents(folder):
    "Everything that a run leaves behind, but for clocks: metrics, completions, weights, and what trainer.pt holds."
    final = folder/'final_checkpoint'
    state = read_checkpoint(final) | {'seconds': None}
    for experience in state['buffer']['experiences']:
        experience['gen_seconds'] = None
    return {'metrics': rows_of(folder), 'weights': (final/'model.safetensors').read_bytes(), 'state': digest(state),
            'completions': {path.name: path.read_text() for path in (folder/'completions').iterdir()}}


RESUMED = replace(TINY, model='nano')    # whose answers differ: all those of a random model are worth the same


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp('whole')/'run'
    for row in Run(replace(RESUMED, output_dir=str(folder))).steps():
        if row['step'] < 6: shutil.copytree(folder, folder.with_name(f'killed-{row["step"]}'))
    assert len(rows_of(folder)) == 6 and min(row['frac_reward_zero_std'] for row in rows_of(folder)) < 1
    return folder


@pytest.fixture(scope='module')
def ending(whole): return contents(whole)


@pytest.mark.parametrize('steps', [1, 2, 3, 4, 5])
def test_a_killed_run_ends_as_if_it_had_not_been(whole, ending, tmp_path, steps):
    folder = shutil.copytree(whole.with_name(f'killed-{steps}'), tmp_path/'run')
    assert len(rows_of(folder)) == steps and not (folder/'final_checkpoint').exists()
    run = Run(resumed_config(output_dir=str(folder)))
    assert run.trainer.step == steps//2*2
    list(run.steps())
    assert contents(folder) == ending


def test_the_command_goes_on_after_kill_9(ending, tmp_path, capsys):
    folder, command = tmp_path/'run', [sys.executable, '-m', 'rookworld_nb.cli', 'train']
    flags = [word for name, value in asdict(RESUMED).items() if value != getattr(TrainConfig, name)
             for word in ([f'--{name.replace("_", "-")}'] if value is True else [f'--{name.replace("_", "-")}', str(value)])]
    environment = {**os.environ, 'OMP_NUM_THREADS': str(torch.get_num_threads())}
    process = subprocess.Popen([*command, *flags, '--output-dir', folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    for _ in range(6000):
        if (folder/'checkpoint-2').exists() or process.poll() is not None:
            break
        time.sleep(.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL and not (folder/'final_checkpoint').exists()
    assert cli.main(['train', '--resume', '--output-dir', str(folder)]) == 0 and '%|' not in capsys.readouterr().err    # no progress bar in a file
    assert contents(folder) == ending


def test_rows_have_the_time_and_the_reference_stays_as_it_was(tmp_path):
    run = Run(replace(TINY, steps=2, output_dir=str(tmp_path/'run')))
    start, before = time.time(), run.origin['reference']
    rows, read = list(run.steps()), [json.loads(line) for line in (tmp_path/'run'/'metrics.jsonl').read_text().splitlines()]
    assert [row['time'] for row in rows] == [row['time'] for row in read] and start < rows[0]['time'] < rows[1]['time'] < time.time()
    assert origin_of(run)['reference'] == before != fingerprint(model_bytes(run.model))
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in run.reference.parameters())


def test_memory_that_runs_out_is_said_with_what_takes_less(tmp_path, monkeypatch):
    steps, take_step = [], rookworld_nb.trainer.take_step

    def fail(*given):
        if len(steps) == 3: raise error
        steps.append(take_step(*given))
    monkeypatch.setattr('rookworld_nb.trainer.take_step', fail)
    error = torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.\nMore')
    with pytest.raises(RunError, match=r'memory ran out \(CUDA out of memory. Tried to allocate 2.00 GiB.\): .*--micro-batch-size .*--resume goes on after step 2'):
        train(replace(TINY, output_dir=str(tmp_path/'run')))
    steps, error = [0]*3, CheckpointError('final_checkpoint: cannot be written: Cannot allocate memory')    # no fault of the disk
    with pytest.raises(RunError, match='memory ran out .*--micro-batch-size'): train(replace(TINY, output_dir=str(tmp_path/'written')))
    steps, error = [0]*3, RuntimeError('ours')
    with pytest.raises(RuntimeError, match='^ours$'): train(replace(TINY, output_dir=str(tmp_path/'other')))


def test_more_steps_can_be_added(tmp_path):
    folder = tmp_path/'run'
    list(Run(replace(TINY, steps=2, output_dir=str(folder))).steps())
    run = Run(resumed_config(output_dir=str(folder), steps=3))
    assert [row['step'] for row in run.steps()] == [3] and len(rows_of(folder)) == 3


def test_a_run_that_another_has_overtaken_is_not_gone_on_with(tmp_path):
    config = replace(TINY, output_dir=str(tmp_path/'run'))
    first = Run(config)
    steps = first.steps()
    for _ in range(3): next(steps)
    second = Run(resumed_config(output_dir=config.output_dir))
    assert second.trainer.step == 2 and [row['step'] for row in steps] == [4, 5, 6]
    with pytest.raises(RunError, match=f'--output-dir {first.folder}: its checkpoints are others.*another run has gone on'): next(second.steps())
    assert [row['step'] for row in rows_of(first.folder)] == [1, 2, 3, 4, 5, 6] and newest_checkpoint(first.folder)[1]['trainer']['step'] == 6
    third = Run(resumed_config(output_dir=config.output_dir, steps=7))
    assert [row['step'] for row in third.steps()] == [7]
    first.trainer.stop_reason = None
    with pytest.raises(RunError, match='another run has gone on'): list(first.steps())
    save_run(third, 'checkpoint-7')
    assert list(third.steps()) == [] and [row['step'] for row in rows_of(first.folder)] == [1, 2, 3, 4, 5, 6, 7]    # its own are no others'


def test_as_many_steps_as_the_default_can_be_asked_for(whole):
    steps = TrainConfig().steps
    assert resumed_config(output_dir=str(whole)).steps == 6 and resumed_config(output_dir=str(whole), steps=steps).steps == steps


def test_a_configuration_made_by_hand_does_not_know_the_run_that_is_to_go_on(tmp_path):
    folder = tmp_path/'run'
    list(Run(replace(TINY, steps=2, kl_coef=.05, output_dir=str(folder))).steps())
    own = resumed_config(output_dir=str(folder))
    for settings in ({}, {'group_size': TrainConfig.group_size}, {'steps': 3}):    # nobody can say which of its settings were asked for
        with pytest.raises(RunError, match='resume=True: make the configuration with resumed_config'):
            Run(TrainConfig(output_dir=str(folder), resume=True, **settings))
    assert Run(own).config == own
    assert Run(resumed_config(output_dir=str(folder), steps=100)).config.steps == 100 == TrainConfig().steps    # asked for, though a default
    with pytest.raises(RunError, match='--kl-coef 0.07'): Run(replace(own, kl_coef=.07))


def test_a_program_that_came_with_a_run_is_not_started(tmp_path):
    folder = tmp_path/'run'
    list(Run(replace(TINY, steps=1, output_dir=str(folder))).steps())
    config = json.loads((folder/'config.json').read_text())
    for engine in (str(folder/'engine'), 'run/engine', './engine'):
        (folder/'config.json').write_text(json.dumps(config | {'stockfish_path': engine}))
        with pytest.raises(RunError, match='names a program beside it'): resumed_config(output_dir=str(folder))
        assert resumed_config(output_dir=str(folder), stockfish_path=engine).stockfish_path == engine    # trusted
    (folder/'config.json').write_text(json.dumps(config | {'stockfish_path': sys.executable}))
    assert resumed_config(output_dir=str(folder)).stockfish_path == sys.executable


def test_a_run_from_before_there_was_a_setting_is_gone_on_with(tmp_path):
    folder = tmp_path/'run'
    list(Run(replace(TINY, steps=1, output_dir=str(folder))).steps())
    config = json.loads((folder/'config.json').read_text())
    (folder/'config.json').write_text(json.dumps({name: value for name, value in config.items() if name not in ('drop_tied', 'eval_every')}))
    resumed = Run(resumed_config(output_dir=str(folder), steps=2)).config
    assert not resumed.drop_tied and resumed.eval_every is None
    with pytest.raises(RunError, match='--drop-tied: the run in .* has false'): resumed_config(output_dir=str(folder), drop_tied=True)


def test_a_run_that_goes_on_does_not_examine_its_start_again(tmp_path, monkeypatch):
    folder, asked = tmp_path/'run', []
    def remembered(run, model=None):
        asked.append(model is run.reference)
        return examine(run, model).assign(completion=' M:\rNA')    # a model may write any line end
    monkeypatch.setattr('rookworld_nb.run.examine', remembered)
    first = train(replace(TINY, model='nano', steps=1, eval_policy=3, eval_env=2, output_dir=str(folder)))
    again = train(resumed_config(output_dir=str(folder), steps=2))
    assert asked == [True, False, False]
    pd.testing.assert_series_equal(first['before'], again['before'])
    before, after = (read_completions(folder/'evaluation'/f'{when}.csv.gz') for when in ('before', 'after'))
    assert len(before) == len(after) == 5*(TINY.eval_samples + 1) and not before['reward'].equals(after['reward'])
    assert {*before['completion'], *after['completion']} == {' M:\rNA'}


def test_a_run_without_held_out_positions_says_how_it_ended_and_what_it_took(tmp_path, capsys):
    config = replace(TINY, steps=2, output_dir=str(tmp_path/'run'))
    assert train(config).empty
    assert re.search(r'all 2 steps are done; 9 completions, \d+ tokens, 0\.\d minutes; run folder: ', capsys.readouterr().out)
    summary = json.loads((tmp_path/'run'/'summary.json').read_text())
    assert summary['stop_reason'] == 'all 2 steps are done' and summary['comparison'] == [] and 0 < summary['seconds'] < 600
    state = read_checkpoint(tmp_path/'run'/'final_checkpoint')
    assert 0 < state['seconds'] <= summary['seconds']
    again = Run(resumed_config(output_dir=str(tmp_path/'run'), steps=3))
    assert run_state(again)['seconds'] > state['seconds']
    again.started -= 1000
    save_run(again, 'final_checkpoint')
    assert run_state(Run(resumed_config(output_dir=str(tmp_path/'run'), steps=3)))['seconds'] > 1000


def test_checkpoints_that_cannot_be_read_are_no_reason_to_start_again(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path/'run')
    for path in folder.glob('*/SHA256SUMS'): path.unlink()
    with pytest.raises(CheckpointError, match='no checkpoint'): Run(resumed_config(output_dir=str(folder)))
    assert len(rows_of(folder)) == 6 and list((folder/'completions').iterdir())


def test_a_finished_run_resumes_to_nothing_more(whole, ending, tmp_path):
    folder = shutil.copytree(whole, tmp_path/'run')
    assert list(Run(resumed_config(output_dir=str(folder))).steps()) == [] and contents(folder) == ending
    with pytest.raises(RunError, match='--steps 5: .* has done 6'): Run(resumed_config(output_dir=str(folder), steps=5))
    assert contents(folder) == ending


def test_a_run_goes_on_from_the_checkpoint_before_a_corrupt_one(whole, ending, tmp_path, caplog):
    folder = shutil.copytree(whole, tmp_path/'run')
    shutil.rmtree(folder/'final_checkpoint')
    path = folder/'checkpoint-6'/'trainer.pt'
    path.write_bytes(path.read_bytes()[:path.stat().st_size//2])
    run = Run(resumed_config(output_dir=str(folder)))
    assert run.trainer.step == 4 and 'checkpoint-6' in caplog.text
    list(run.steps())
    assert contents(folder) == ending


def test_a_look_at_the_last_step_is_what_the_closing_table_says(tmp_path):
    run = Run(replace(TINY, steps=2, eval_every=2, eval_policy=3, eval_env=2, eval_samples=1, output_dir=str(tmp_path/'run')))
    first, last = run.steps()
    table = examine(run)
    greedy = table[table['temperature'] == 0].groupby('task').mean(numeric_only=True)
    looked = {name: value for name, value in last.items() if name.startswith('eval/')}
    assert looked == {f'eval/{task}_{name}': pytest.approx(greedy.loc[task, name]) for task, name in (
        ('P', 'reward'), ('P', 'legal_fraction'), ('P', 'best_move_accuracy'), ('A', 'reward'), ('A', 'state_exact'))}
    assert not any(name.startswith('eval/') for name in first) and rows_of(tmp_path/'run')[1]['eval/P_reward'] == looked['eval/P_reward']


def test_what_a_run_that_is_going_on_has_put_aside_is_left_there(tmp_path):
    folder = tmp_path/'run'
    going = Run(replace(TINY, save_every=1, output_dir=str(folder))).steps()
    next(going), next(going)
    (folder/'checkpoint-2').rename(folder/'.checkpoint-2.old')    # between its two renamings
    assert Run(resumed_config(output_dir=str(folder))).trainer.step == 1 and (folder/'.checkpoint-2.old').exists()
    going.close()
    assert Run(resumed_config(output_dir=str(folder))).trainer.step == 2 and not (folder/'.checkpoint-2.old').exists()


def test_every_collection_of_a_step_is_in_its_table(tmp_path):
    run = Run(replace(TINY, steps=3, batch_positions=3, minibatch_positions=5, buffer_capacity=2, replays=1, output_dir=str(tmp_path/'run')))
    list(run.steps())
    sizes = [len(pd.read_csv(path)) for path in sorted((tmp_path/'run'/'completions').glob('step-*.csv'))]
    assert run.collector.collected*9 == sum(sizes) and max(sizes) == 18


def test_only_the_newest_checkpoints_are_kept(whole):
    assert [path.name for path in checkpoints_of(whole)] == ['checkpoint-4', 'checkpoint-6'] and [path.name for path in whole.glob('.*')] == ['.lock']


def test_a_lever_moved_after_the_last_checkpoint_is_not_forgotten(tmp_path):
    folder = tmp_path/'run'
    for metrics in (run := Run(replace(TINY, output_dir=str(folder)))).steps():
        if metrics['step'] == 2:    # checkpoint-2 is written, with the old weight
            steer(run, 'kl_coef', .3)
            steer(run, 'stop')
    found, state = newest_checkpoint(folder)
    assert found.name == 'final_checkpoint' and [event['event'] for event in state['events']] == ['kl_coef', 'stop']
    resumed = Run(resumed_config(output_dir=str(folder)))
    assert levers(resumed)['kl_coef'] == .3 and next(resumed.steps())['step'] == 3
    assert [event['event'] for event in read_events(folder)] == ['kl_coef', 'stop']


def test_a_checkpoint_asked_for_after_the_end_is_newer_than_the_final_one(tmp_path):
    run = Run(replace(TINY, steps=2, output_dir=str(tmp_path/'run')))
    list(run.steps())
    steer(run, 'checkpoint')
    assert newest_checkpoint(run.folder)[0].name == 'checkpoint-2'


def test_the_checkpoint_just_written_outlives_a_broken_one_with_a_higher_number(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path/'run')
    shutil.rmtree(folder/'final_checkpoint')
    (folder/'checkpoint-6'/'trainer.pt').write_bytes(b'')
    run = Run(replace(resumed_config(output_dir=str(folder)), keep_checkpoints=1))
    generator = run.steps()
    assert next(generator)['step'] == 5
    steer(run, 'checkpoint')
    assert newest_checkpoint(folder)[0].name == 'checkpoint-5'


def test_a_checkpoint_half_written_is_no_checkpoint(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path/'run')
    shutil.rmtree(folder/'final_checkpoint')
    (folder/'checkpoint-6').rename(folder/'.checkpoint-6.part')
    assert newest_checkpoint(folder)[0].name == 'checkpoint-4'


def test_an_interrupted_step_is_not_gone_on_with(ending, tmp_path, monkeypatch):
    folder = tmp_path/'run'
    run = Run(replace(RESUMED, output_dir=str(folder)))
    generator = run.steps()
    for _ in range(3):
        next(generator)
    monkeypatch.setattr('rookworld_nb.trainer.take_step', lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        next(generator)
    monkeypatch.undo()
    assert (folder/'final_checkpoint'/'model.safetensors').exists() and not (folder/'final_checkpoint'/'trainer.pt').exists()
    with pytest.raises(RunError, match='a step was broken off'): steer(run, 'checkpoint')    # it would take the place of one that is whole
    assert [path.name for path in checkpoints_of(folder)] == ['checkpoint-2']
    list(Run(resumed_config(output_dir=str(folder))).steps())
    assert contents(folder) == ending


@pytest.fixture
def interruptible():
    "The usual answers to Ctrl-C, SIGTERM and SIGHUP, also where the tests run in the background or in a worker that has its own."
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, answer) for number, answer in usual.items()}
    yield
    for number, answer in before.items(): signal.signal(number, answer)


SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.usefixtures('interruptible')
def test_who_is_told_to_end_finishes_the_step_and_loses_nothing(ending, tmp_path, monkeypatch):
    folder, take_step, steps = tmp_path/'run', rookworld_nb.trainer.take_step, []
    for done, number in enumerate(SIGNALS, 3):    # each in the first step after the first two
        before = signal.getsignal(number)
        monkeypatch.setattr('rookworld_nb.trainer.take_step', lambda *rest: (take_step(*rest), os.kill(os.getpid(), number) if len(steps) == 2 else None))
        config = resumed_config(output_dir=str(folder)) if steps else replace(RESUMED, output_dir=str(folder))
        with pytest.raises(KeyboardInterrupt):
            for row in Run(config).steps(): steps.append(row)
        assert len(steps) == 2 and len(rows_of(folder)) == done == newest_checkpoint(folder)[1]['trainer']['step'], number
        assert signal.getsignal(number) is before
    monkeypatch.undo()
    list(Run(resumed_config(output_dir=str(folder))).steps())
    assert contents(folder) == ending


@pytest.mark.usefixtures('interruptible')
def test_who_is_told_to_end_between_two_steps_saves_too(tmp_path):
    folder = tmp_path/'run'
    for done, number in enumerate(SIGNALS, 1):    # after the steps 1 and 3 nothing would be saved otherwise
        before, config = signal.getsignal(number), resumed_config(output_dir=str(folder)) if folder.exists() else replace(TINY, output_dir=str(folder))
        with pytest.raises(KeyboardInterrupt), closing(Run(config).steps()) as steps:
            for row in steps: os.kill(os.getpid(), number)
        assert newest_checkpoint(folder)[1]['trainer']['step'] == done and signal.getsignal(number) is before, number
        (folder/'reward.png').unlink()    # written each time


@pytest.mark.usefixtures('interruptible')
def test_ctrl_c_waits_for_the_final_checkpoint(tmp_path, monkeypatch):
    def press(*rest):
        os.kill(os.getpid(), signal.SIGINT)
        write_checkpoint(*rest)
    monkeypatch.setattr('rookworld_nb.run.write_checkpoint', press)
    with pytest.raises(KeyboardInterrupt): list(Run(replace(TINY, steps=1, output_dir=str(tmp_path/'run'))).steps())
    assert newest_checkpoint(tmp_path/'run')[1]['trainer']['step'] == 1 and (tmp_path/'run'/'reward.png').exists()


def test_a_full_disk_says_what_is_saved(tmp_path, monkeypatch):
    def full(folder, *rest):
        if folder.name != 'checkpoint-2': raise CheckpointError(f'{folder}: cannot be written: no space')
        write_checkpoint(folder, *rest)
    monkeypatch.setattr('rookworld_nb.run.write_checkpoint', full)
    with pytest.raises(CheckpointError, match='cannot be written: no space; --resume goes on after step 2$'): train(replace(TINY, output_dir=str(tmp_path/'run')))
    with pytest.raises(CheckpointError, match='cannot be written: no space$'): train(replace(TINY, steps=1, output_dir=str(tmp_path/'other')))


def test_a_look_that_fails_costs_no_step(tmp_path, monkeypatch):
    config = replace(TINY, output_dir=str(tmp_path/'run'), eval_policy=2, eval_every=1, save_every=1)
    run = Run(config)
    def fail(run):
        run.trainer.failed = run.model.state_dict()
        return 1/0
    monkeypatch.setattr('rookworld_nb.run.glance', fail)
    with pytest.raises(ZeroDivisionError): next(run.steps())
    state = newest_checkpoint(run.folder)[1]['trainer']
    assert run.settled and len(rows_of(run.folder)) == 1 and state['step'] == 1 and state['proposed']
    assert [path.name for path in (run.folder/'completions').iterdir()] == ['step-000001.csv'] and (run.folder/'failed'/'model.safetensors').exists()


@pytest.mark.usefixtures('interruptible')
def test_where_a_broken_run_goes_on_is_said(tmp_path, monkeypatch, capsys, caplog):
    def twice(*rest):
        for _ in range(2): os.kill(os.getpid(), signal.SIGINT)
    monkeypatch.setattr('rookworld_nb.trainer.take_step', twice)
    with pytest.raises(KeyboardInterrupt): train(replace(TINY, output_dir=str(tmp_path/'run')))
    assert 'stopped in the middle of a step' in (said := capsys.readouterr().out) and 'goes on after step 0' in said
    again = Run(resumed_config(output_dir=str(tmp_path/'run')))
    with alone_in(again.folder), pytest.raises(RunError, match='a run is going on there'): next(again.steps())
    assert 'begins again' not in caplog.text
    with pytest.raises(KeyboardInterrupt): next(again.steps())
    assert 'no step is saved' in caplog.text and 'begins again' in caplog.text
    monkeypatch.undo()
    list(Run(replace(TINY, steps=3, save_every=2, output_dir=str(tmp_path/'other'))).steps())    # the final checkpoint is newer than the numbered one
    monkeypatch.setattr('rookworld_nb.trainer.take_step', twice)
    with pytest.raises(KeyboardInterrupt): train(resumed_config(output_dir=str(tmp_path/'other'), steps=5))
    assert 'goes on after step 3' in capsys.readouterr().out and Run(resumed_config(output_dir=str(tmp_path/'other'))).trainer.step == 3


@pytest.mark.usefixtures('interruptible')
def test_a_run_that_breaks_off_after_a_resume_can_still_be_gone_on_with(whole, tmp_path, monkeypatch):
    folder = shutil.copytree(whole, tmp_path/'run')
    for path in checkpoints_of(folder): shutil.rmtree(path)
    def twice(*rest):
        for _ in range(2): os.kill(os.getpid(), signal.SIGINT)    # the second one acts at once
    monkeypatch.setattr('rookworld_nb.trainer.take_step', twice)
    with pytest.raises(KeyboardInterrupt): list(Run(resumed_config(output_dir=str(folder), steps=9)).steps())
    assert newest_checkpoint(folder)[1]['trainer']['step'] == 6 and len(rows_of(folder)) == 6


@pytest.mark.parametrize('asked, message', [
    (dict(lr=1e-3), f'--lr 0.001: the run in .* has {RATE}'), (dict(group_size=8), '--group-size 8: .* has 3'), (dict(seed=5), '--seed 5: .* has 0')])
def test_another_run_is_not_a_continuation(whole, asked, message):
    with pytest.raises(RunError, match=message):
        resumed_config(output_dir=str(whole), **asked)
    with pytest.raises(RunError, match=message):
        Run(replace(resumed_config(output_dir=str(whole)), **asked))


@pytest.mark.parametrize('before, after', [(None, 'stockfish'), ('stockfish', None)])
def test_the_judge_of_a_run_stays(whole, tmp_path, before, after):
    folder = shutil.copytree(whole, tmp_path/'run')
    config = json.loads((folder/'config.json').read_text())
    (folder/'config.json').write_text(json.dumps(config | {'stockfish_path': before}))
    with pytest.raises(RunError, match=f'--stockfish-path {after or "none"}: .* with{"" if before else "out"} an engine'):
        resumed_config(output_dir=str(folder), stockfish_path=after)


@pytest.mark.parametrize('name', ['output_dir', 'data', 'stockfish_path'])
def test_what_lies_at_home_is_found(name):
    assert getattr(TrainConfig(**{name: '~/here'}), name) == os.path.expanduser('~/here')


def test_files_of_others_among_the_completions_stay(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path/'run')
    (folder/'completions'/'step-10 copy.csv').write_text('mine')
    next(Run(resumed_config(output_dir=str(folder), steps=9)).steps())
    assert (folder/'completions'/'step-10 copy.csv').read_text() == 'mine'


def test_other_data_are_noticed(tmp_path):
    write_lines(shipped('train')[:20] + shipped('train')[-20:], tmp_path/'data.txt')
    list(Run(replace(TINY, steps=2, output_dir=str(tmp_path/'run'), data=str(tmp_path/'data.txt'))).steps())
    write_lines(shipped('train')[:21] + shipped('train')[-20:], tmp_path/'data.txt')
    with pytest.raises(RunError, match='--data .*data.txt: not what the run'):
        Run(resumed_config(output_dir=str(tmp_path/'run')))


def test_data_and_model_may_have_moved(tmp_path):
    write_lines(shipped('train')[:20] + shipped('train')[-20:], tmp_path/'data.txt')
    list(Run(replace(TINY, model='nano', steps=2, output_dir=str(tmp_path/'run'), data=str(tmp_path/'data.txt'))).steps())
    (tmp_path/'data.txt').rename(tmp_path/'moved.txt')
    with pytest.raises(RunError, match='not what the run'): Run(resumed_config(output_dir=str(tmp_path/'run'), data=None))
    model = shutil.copytree(files('rookworld_nb')/'assets'/'nano', tmp_path/'nano')
    config = resumed_config(output_dir=str(tmp_path/'run'), data=str(tmp_path/'moved.txt'), model=str(model), steps=3)
    assert [row['step'] for row in Run(config).steps()] == [3]


def test_without_a_folder_the_newest_run_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match='--resume: no run in runs'):
        Run(resumed_config())
    for name in ('one', 'two'):
        next(Run(replace(TINY, output_dir=f'runs/{name}')).steps())
    for path in Path('runs/one').glob('*.json*'): os.utime(path, (0, 0))
    os.utime('runs/one')    # a report that is written there does not make it newer
    save_pretrained(*load_pretrained('nano'), 'runs/model')    # newer, and no run
    assert Run(resumed_config()).folder.name == 'two'


# numbers that are none

def test_a_step_that_cannot_be_taken_is_saved_and_the_run_goes_on(tmp_path, monkeypatch):
    run, calls = Run(replace(TINY, output_dir=str(tmp_path/'run'), normalize_rewards=False)), itertools.count()
    compared = buffer.advantages_of

    def spoiled(*args):
        parts = compared(*args)
        if next(calls) == 1: parts[0][1] = math.nan
        return parts
    monkeypatch.setattr(buffer, 'advantages_of', spoiled)
    rows = list(run.steps())
    assert len(rows) == 6 and rows[-1]['skipped_updates'] >= 1
    saved = list((tmp_path/'run'/'skipped').iterdir())
    assert len(saved) == rows[-1]['skipped_updates'] and pd.read_csv(saved[0])['broken'].any()
    assert all(p.isfinite().all() for p in run.model.parameters())


# ---- steered by hand

@pytest.fixture(scope='module')
def steered(tmp_path_factory):
    "A run of four steps: after step 1 more KL, after step 2 half the rate, a checkpoint and a pause, after step 3 the end."
    run = Run(replace(SHORT, output_dir=str(tmp_path_factory.mktemp('steered')/'run'), replays=1, lr_schedule='constant',
                      max_new_tokens=20))
    wishes = {1: [('kl_coef', .1)], 2: [('lr_scale', .5), ('checkpoint', None), ('pause', None), ('resume', None)], 3: [('stop', None)]}
    said = []
    for metrics in run.steps():
        if metrics['step'] == 2: shutil.rmtree(run.folder/'checkpoint-2')
        said += [steer(run, *wish) for wish in wishes[metrics['step']]]
    return run, said


def test_a_lever_acts_from_the_next_step_on_and_is_written_down(steered):
    run, said = steered
    rows, events = read_metrics(run.folder), read_events(run.folder)
    assert rows['kl_coef'].tolist() == [.02, .1, .1] and rows['learning_rate'].tolist() == [RATE, RATE, RATE/2]
    assert [(event['step'], event['event']) for event in events] == [
        (1, 'kl_coef'), (2, 'lr_scale'), (2, 'checkpoint'), (2, 'pause'), (2, 'resume'), (3, 'stop')]
    assert [(event.get('before'), event.get('value')) for event in events[:3]] == [(.02, .1), (1., .5), (None, None)]
    assert said[:3] == ['After step 1: kl_coef from 0.02 to 0.1', 'After step 2: lr_scale from 1 to 0.5', 'After step 2: checkpoint']
    assert run.trainer.stop_reason == 'stopped by hand after step 3' and levers(run) == {'kl_coef': .1, 'lr_scale': .5}


def test_a_checkpoint_on_demand_knows_the_levers_and_the_past(steered):
    run, _ = steered
    state = read_checkpoint(run.folder/'checkpoint-2')
    assert (state['trainer']['kl'], state['trainer']['health']['lr_scale']) == ({'kl_coef': .1}, .5)
    assert [event['event'] for event in state['events']] == ['kl_coef', 'lr_scale', 'checkpoint']


def test_a_resumed_run_has_the_levers_and_only_the_events_that_it_knows(steered, tmp_path):
    copy = shutil.copytree(steered[0].folder, tmp_path/'copy')
    shutil.rmtree(copy/'final_checkpoint')    # killed before the end: checkpoint-2 is the newest
    run = Run(resumed_config(output_dir=str(copy)))
    rows = list(run.steps())
    assert [(row['step'], row['kl_coef'], row['learning_rate']) for row in rows] == [(3, .1, RATE/2), (4, .1, RATE/2)]
    assert [event['event'] for event in read_events(copy)] == ['kl_coef', 'lr_scale', 'checkpoint']


def test_what_is_left_of_a_run_that_another_went_on_with_is_not_steered(tmp_path):
    run = Run(replace(TINY, output_dir=str(tmp_path/'run')))
    steps = run.steps()
    for _ in range(2): next(steps)
    steps.close()    # a notebook stops; its run is gone on with elsewhere
    other = Run(resumed_config(output_dir=str(run.folder)))
    going_on = other.steps()
    next(going_on)
    with pytest.raises(RunError, match='a run is going on there'): steer(run, 'checkpoint')
    steer(other, 'kl_coef', .1)
    going_on.close()
    before = levers(run)
    for wish in ('checkpoint', 'stop', 'kl_coef'):
        with pytest.raises(RunError, match='another run has gone on there'): steer(run, wish, .7)
    assert levers(run) == before and run.events == [] and 'by hand' not in run.trainer.stop_reason
    assert [event['event'] for event in read_events(run.folder)] == ['kl_coef']
    assert 'kl_coef' in steer(other, 'kl_coef', .2)    # alone, and as it left the folder


def test_a_run_that_was_stopped_before_its_first_step_can_be_started(tmp_path):
    run = Run(replace(TINY, output_dir=str(tmp_path/'run')))
    steer(run, 'stop')
    assert not list(run.steps()) and not list(run.steps())


def test_a_guest_that_fails_costs_the_run_nothing_of_its_own(tmp_path):
    class Guest:
        def log(self, row):
            if row['step'] == 2: raise OSError('no network')
    run = Run(replace(TINY, output_dir=str(tmp_path/'run')))
    with pytest.raises(OSError, match='no network'): list(run.steps([Guest()]))
    assert read_metrics(run.folder)['step'].tolist() == [1, 2] and read_checkpoint(run.folder/'checkpoint-2')['trainer']['proposed']
    whole = Run(replace(TINY, output_dir=str(tmp_path/'whole')))
    for _ in zip(range(2), whole.steps()): pass
    assert sorted(path.name for path in (run.folder/'completions').iterdir()) == sorted(path.name for path in (whole.folder/'completions').iterdir())


def test_a_run_that_nobody_touched_has_no_events(finished, tmp_path):
    assert not (finished[1]/'events.jsonl').exists() and read_events(finished[1]) == []
    (tmp_path/'events.jsonl').write_text('{"step": 1}\n{torn')
    with pytest.raises(RunError, match='events.jsonl, line 1: no record of something done by hand'): read_events(tmp_path)
    good = '{"step": 1, "time": 2.5, "event": "stop"}\n'
    for bad in ('{torn', '3', '[]', '{}', '{"step": "1", "time": 2.5, "event": "stop"}', '{"step": 1, "time": 2.5, "event": "kl_coef", "before": 0.1, "value": null}',
                '{"step": 1, "time": 2.5, "event": "kl_coef", "value": 0.1}'):
        (tmp_path/'events.jsonl').write_text(good + bad)
        with pytest.raises(RunError, match='events.jsonl, line 2'): read_events(tmp_path)
    (tmp_path/'events.jsonl').write_text(2*good)
    assert [event['event'] for event in read_events(tmp_path)] == ['stop', 'stop']


@pytest.mark.parametrize('wish, value, said', [
    ('kl_coef', -.1, 'at least 0'), ('kl_coef', math.inf, 'finite'), ('kl_coef', None, 'finite'), ('lr_scale', 0., 'above 0'),
    ('lr_scale', math.nan, 'finite'), ('temperature', 1., 'valid: kl_coef, lr_scale, checkpoint')])
def test_impossible_wishes_change_nothing(wish, value, said, tmp_path):
    run = Run(replace(SHORT, output_dir=str(tmp_path/'run')))
    with pytest.raises(RunError, match=said): steer(run, wish, value)
    assert run.events == [] and levers(run) == {'kl_coef': .02, 'lr_scale': 1.} and not run.folder.exists()


def test_the_adaptive_control_is_not_given_a_weight_that_it_cannot_move(tmp_path):
    run = Run(replace(SHORT, kl_control='adaptive', output_dir=str(tmp_path/'run')))
    for value in (0., 5.):
        with pytest.raises(RunError, match=f'kl_coef={value} must lie in'): steer(run, 'kl_coef', value)
    assert levers(run)['kl_coef'] == .02 and not run.folder.exists()
    steer(Run(replace(SHORT, output_dir=str(tmp_path/'other'))), 'kl_coef', 0.)


def test_a_folder_that_holds_the_leavings_of_another_run_is_refused(tmp_path):
    config = replace(SHORT, output_dir=str(tmp_path/'run'))
    steer(Run(config), 'kl_coef', .1)    # before its first step
    with pytest.raises(RunError, match='holds a run already'): Run(config)


def test_a_diverged_run_that_is_given_more_steps_does_not_learn_from_the_failed_policy(tmp_path):
    config = replace(TINY, steps=6, lr=1., warmup_steps=0, replays=2, max_recoveries=0, output_dir=str(tmp_path/'run'))
    run = Run(config)
    assert list(run.steps()) and run.trainer.diverged and run.trainer.step < 6
    failed, good = (load_pretrained(str(tmp_path/'run'/name))[0].wte.weight for name in ('failed', 'final_checkpoint'))
    assert good.equal(run.reference.wte.weight) and not failed.isclose(good, atol=.1).all()    # a step of 1 is what it was thrown off by
    same = Run(resumed_config(output_dir=str(tmp_path/'run')))    # to be examined, say: the end stays the end
    assert not list(same.steps()) and same.trainer.diverged and same.trainer.step == run.trainer.step
    assert same.trainer.stop_reason == run.trainer.stop_reason and 'diverged at step' in same.trainer.stop_reason
    again = Run(resumed_config(output_dir=str(tmp_path/'run'), steps=7))
    row = next(again.steps())
    assert not again.trainer.diverged and row['rollout_age'] == 0 and row['ratio_max'] == pytest.approx(1, abs=1e-3)


def test_a_policy_that_became_nan_is_recovered_from_and_not_kept(tmp_path, monkeypatch):
    run, take_step, ruined = Run(replace(TINY, output_dir=str(tmp_path/'run'))), rookworld_nb.trainer.take_step, []

    def ruin(*given):
        take_step(*given)
        if run.trainer.step == 3 and not ruined: ruined.append(run.model.wte.weight.data.fill_(math.nan))
    monkeypatch.setattr('rookworld_nb.trainer.take_step', ruin)
    assert [row['recoveries'] for row in run.steps()][-1] == 1 and run.trainer.step == 6 and ruined
    assert not (tmp_path/'run'/'failed').exists() and load_pretrained(str(tmp_path/'run'/'final_checkpoint'))


def test_a_run_whose_step_was_broken_off_is_not_gone_on_with_as_it_is(tmp_path, monkeypatch):
    run = Run(replace(TINY, output_dir=str(tmp_path/'run')))
    steps = run.steps()
    next(steps)
    monkeypatch.setattr('rookworld_nb.trainer.take_step', lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt): next(steps)
    monkeypatch.undo()
    with pytest.raises(RunError, match='a step was broken off.*--resume'): next(run.steps())
    assert not (run.folder/'final_checkpoint'/'trainer.pt').exists()


def test_a_lever_moved_by_a_number_of_numpy_can_be_gone_on_with(tmp_path):
    run = Run(replace(TINY, steps=2, save_every=1, kl_control='fixed', output_dir=str(tmp_path/'run')))
    for _ in run.steps(): steer(run, 'lr_scale', np.float64(.5))
    assert Run(resumed_config(output_dir=str(tmp_path/'run'))).events[0]['value'] == .5


def test_a_stop_by_hand_does_not_change_what_a_recovery_goes_back_to(tmp_path):
    run = Run(replace(TINY, save_every=2, output_dir=str(tmp_path/'run')))
    steps = run.steps()
    for _ in range(3): next(steps)
    proposed = run.trainer.proposed
    steer(run, 'checkpoint')
    steps.close()
    assert run.trainer.proposed == proposed == read_checkpoint(run.folder/'final_checkpoint')['trainer']['proposed']


@pytest.mark.parametrize(('content', 'words'), [
    ('[1]', 'must hold a JSON object, not list'), ('"text"', 'must hold a JSON object, not str'), ('{', 'cannot be read as JSON')])
def test_a_config_that_is_no_object_is_named(tmp_path, content, words):
    (tmp_path/'config.json').write_text(content)
    with pytest.raises(RunError, match=f'config.json: {words}'): resumed_config(output_dir=str(tmp_path))


def test_a_config_that_somebody_spoilt_is_named(tmp_path):
    (tmp_path/'config.json').write_text(json.dumps(asdict(TINY) | {'lr': '1e-4'}))
    with pytest.raises(RunError, match=r"config.json was changed: --lr '1e-4'"): resumed_config(output_dir=str(tmp_path))


def test_what_is_no_setting_is_named(whole):
    with pytest.raises(RunError, match='foo: no such setting'): resumed_config(output_dir=str(whole), foo=3)


# ---- a reward of one's own

def best_move(prompts, completions, components):
    return components['best'].fillna(components['reward'])


def test_a_reward_of_ones_own_is_learned_from_shown_and_examined_with(tmp_path):
    config = replace(SHORT, steps=2, eval_policy=4, eval_env=0)
    own = train(replace(config, output_dir=str(tmp_path/'own')), reward_fn=best_move)
    list(Run(replace(config, credit='answer', output_dir=str(tmp_path/'usual'))).steps())
    shown = pd.read_csv(tmp_path/'own'/'completions'/'step-000001.csv')
    policy = shown[shown['task'] == 'P']
    assert len(policy) and (policy['reward'] == policy['best']).all() and shown['reward'].notna().all()
    groups = policy.groupby('prompt')
    assert np.allclose(groups['advantage'].sum(), 0, atol=1e-4) and (groups['advantage'].idxmax() == groups['reward'].idxmax()).all()
    first, other = (rows_of(tmp_path/name)[0] for name in ('own', 'usual'))
    assert first['reward'] == pytest.approx(shown['reward'].mean()) and first['reward'] != pytest.approx(other['reward'])
    assert load_pretrained(str(tmp_path/'own'/'final_checkpoint'))[0].wte.weight.ne(load_pretrained(str(tmp_path/'usual'/'final_checkpoint'))[0].wte.weight).any()
    greedy = own.loc[('P', 0., 'reward'), 'before']
    run = Run(replace(config, output_dir=str(tmp_path/'third')), reward_fn=best_move)
    assert greedy == pytest.approx(examine(run).query('temperature == 0')['reward'].mean())
    assert greedy != pytest.approx(examine(Run(replace(config, output_dir=str(tmp_path/'fourth')))).query('temperature == 0')['reward'].mean())
    assert 'whole answers are paid, because of reward_fn=best_move' in planned_work(run) and run.config.credit == 'answer'


@pytest.mark.parametrize('changes', [{'mix_env_ratio': 0.}, {}])
def test_a_reward_is_tried_on_the_tasks_that_it_will_be_asked_about(tmp_path, changes):
    def of_moves(prompts, completions, components):
        if not all(prompt.startswith('P:') for prompt in prompts): raise ValueError('only moves')
        return [1.]*len(prompts)

    class LateError(Exception): pass
    def loaded(*args): raise LateError
    config = replace(TINY, rare_env_ratio=.15, answer_coef=0., answer_positions=64, output_dir=str(tmp_path/'run'), **changes)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(LateError if changes else ValueError, match=None if changes else 'only moves'):
        patch.setattr('rookworld_nb.setup.load_pretrained', loaded)
        Run(config, reward_fn=of_moves)


def test_a_reward_that_takes_the_table_for_targets_is_refused_at_once(tmp_path):
    def exact(prompts, completions, targets): return [float(a == b) for a, b in zip(completions, targets)]
    with pytest.raises(ValueError, match='a number for each of 48 answers is needed'):
        Run(replace(TINY, mix_env_ratio=0., answer_coef=0., answer_positions=64, model='none', output_dir=str(tmp_path/'run')), reward_fn=exact)


def test_a_reward_is_tried_on_a_move_that_no_board_allows(tmp_path):
    def captures(prompts, completions, components):
        best = [read_policy(text).best for text in completions]
        return [float(move is not None and chess.Board(read_prompt(prompt).fen).is_capture(chess.Move.from_uci(move))) for prompt, move in zip(prompts, best)]
    with pytest.raises(ValueError, match='a1a1'):
        Run(replace(TINY, mix_env_ratio=0., answer_coef=0., answer_positions=64, model='none', output_dir=str(tmp_path/'run')), reward_fn=captures)
    assert not (tmp_path/'run').exists()


def test_a_run_with_a_reward_of_its_own_goes_on_with_nothing_else(tmp_path):
    folder = tmp_path/'run'
    list(Run(replace(TINY, steps=2, output_dir=str(folder)), reward_fn=best_move).steps())
    with pytest.raises(RunError, match='reward_fn=default_reward: the run in .* is paid by best_move'): Run(resumed_config(output_dir=str(folder), steps=3))
    list(Run(resumed_config(output_dir=str(folder), steps=3), reward_fn=best_move).steps())
    assert [row['step'] for row in rows_of(folder)] == [1, 2, 3]
    with pytest.raises(RunError, match='--credit part: best_move pays whole answers'): Run(replace(SHORT, credit='part', output_dir=str(tmp_path/'x')), reward_fn=best_move)


class Half:
    def __call__(self, prompts, completions, components):
        components['remark'] = 'mine'    # a table of its own
        return components['reward']/2


def test_what_pays_may_be_any_callable_and_is_known_from_the_start(tmp_path):
    paid = {}
    for name, reward_fn in (('partial', functools.partial(best_move)), ('Half', Half())):
        run = Run(replace(TINY, output_dir=str(tmp_path/name)), reward_fn=reward_fn)
        paid[name] = next(run.steps())['reward']
        assert not list((tmp_path/name).glob('checkpoint-*')) and run.scorer.reward_fn is reward_fn
        shutil.rmtree(tmp_path/name/'final_checkpoint')    # as if it had been killed
        with pytest.raises(RunError, match=f'reward_fn=default_reward: .* is paid by {"best_move" if name == "partial" else name}'):
            Run(resumed_config(output_dir=str(tmp_path/name)))
    assert Run(resumed_config(output_dir=str(tmp_path/'Half')), reward_fn=Half()).trainer.step == 0
    assert paid['Half'] == pytest.approx(next(Run(replace(TINY, credit='answer', output_dir=str(tmp_path/'usual'))).steps())['reward']/2)


@pytest.mark.parametrize(('given', 'shown'), [(None, 'it gave None'), (1., 'it gave 1.0'), ([1.], r'it gave \[1.0\]'), (['much']*9, "it gave .*'much'")])
def test_what_is_no_number_for_each_answer_is_refused_by_name(tmp_path, given, shown):
    def mine(prompts, completions, components): return given
    with pytest.raises(ValueError, match=f'reward_fn=.*mine: a number for each of .* answers is needed; {shown}'):
        Run(replace(TINY, output_dir=str(tmp_path/'run')), reward_fn=mine)
    assert not (tmp_path/'run').exists()


@pytest.mark.parametrize(('of_answers', 'shown'), [
    (lambda n: dict.fromkeys(range(n), 1.), r'\{0: 1\.0'), (lambda n: set(map(float, range(n))), r'\{0\.0, 1\.0'), (lambda n: bytes(range(n)), r"b'\\x00"),
    (lambda n: '1'*n, "'1"), (lambda n: pd.DataFrame([[.5]*n]), '.*0.5 0.5'), (lambda n: [10**400]*n, r'\[10000')])
def test_as_many_elements_are_not_yet_rewards(tmp_path, of_answers, shown):
    "The keys of a mapping, the members of a set, the letters of a text, the columns of a table; and a number no float can be."
    reward_fn = lambda prompts, completions, components: of_answers(len(completions))
    with pytest.raises(ValueError, match=f'reward_fn=.*: a number for each of .* answers is needed; it gave {shown}'):
        Run(replace(TINY, output_dir=str(tmp_path/'run')), reward_fn=reward_fn)
    assert not (tmp_path/'run').exists()


def test_before_the_first_checkpoint_too_a_run_goes_on_with_its_own_prompts(tmp_path):
    folder = tmp_path/'run'
    next(Run(replace(TINY, output_dir=str(folder))).steps())
    shutil.rmtree(folder/'final_checkpoint')
    origin = json.loads((folder/'origin.json').read_text())
    (folder/'origin.json').write_text(json.dumps(origin | {'data': 'other'}))
    with pytest.raises(RunError, match='--data none: not what the run in .* began with'): Run(resumed_config(output_dir=str(folder)))
    for damaged, words in (('{', 'cannot be read as JSON'), ('[1]', 'must hold a JSON object, not list')):
        (folder/'origin.json').write_text(damaged)
        with pytest.raises(RunError, match=f'origin.json: {words}'): Run(resumed_config(output_dir=str(folder)))
    (folder/'origin.json').unlink()    # whoever removes it is trusted
    assert Run(resumed_config(output_dir=str(folder))).trainer.step == 0


def test_there_is_no_checkpoint_of_a_run_that_has_not_begun(tmp_path):
    run = Run(replace(TINY, output_dir=str(tmp_path/'run')))
    with pytest.raises(RunError, match='checkpoint: the run has not begun'): steer(run, 'checkpoint')
    assert not (tmp_path/'run').exists()


def test_a_reward_that_is_no_number_is_refused_before_anything_is_learned(tmp_path):
    """What is seen at right answers of each task, at empty ones and at an impossible move is said before the model is loaded; the rest before it is learned from."""
    config = replace(TINY, mix_env_ratio=.5, model=str(tmp_path/'none'), output_dir=str(tmp_path/'run'))
    with pytest.raises(ValueError, match=r'of 48 of 96 answers is not finite \(in float32\), the first is nan for an answer to A:'):
        Run(config, reward_fn=lambda prompts, texts, components: components['best'])
    with pytest.raises(ValueError, match=r'of 96 of 96 answers is not finite \(in float32\), the first is 1e\+39'):
        Run(config, reward_fn=lambda prompts, texts, components: [1e39]*len(texts))
    rows = []
    def late(prompts, texts, components):
        rows.extend(texts)
        return [math.nan if len(rows) > 96 else 1.]*len(texts)
    run = Run(replace(config, model='nano'), reward_fn=late)
    with pytest.raises(ValueError, match=r'is not finite \(in float32\), the first is nan for an answer to P:'): next(run.steps())
    assert run.trainer.step == 0


@pytest.mark.parametrize('reward_fn, told', [(lambda prompts, texts: [1.]*len(texts), 'too many positional arguments'), (lambda **named: [], 'too many positional arguments'),
                                             (lambda prompts, texts, components, extra: [], "missing a required argument: 'extra'")])
def test_a_reward_of_another_shape_is_refused_before_the_model_is_loaded(tmp_path, reward_fn, told):
    with pytest.raises(RunError, match=f'reward_fn=.*lambda.*: is called with prompts, completions, components .{told}'):
        Run(replace(TINY, model=str(tmp_path/'none'), output_dir=str(tmp_path/'run')), reward_fn=reward_fn)


def test_a_scorer_is_no_reward_function(tmp_path):
    with pytest.raises(RunError, match='reward_fn=RewardScorer: is called with prompts, completions, components .a scorer has targets'):
        Run(replace(TINY, output_dir=str(tmp_path/'run')), reward_fn=RewardScorer())


def test_a_reward_that_fails_for_an_unreadable_answer_fails_before_the_model_is_loaded(tmp_path):
    def captures(prompts, completions, components):
        return [float(chess.Board(read_prompt(prompt).fen).is_capture(chess.Move.from_uci(read_policy(text).best))) if task == 'P' else usual
                for prompt, text, task, usual in zip(prompts, completions, components['task'], components['reward'])]
    with pytest.raises(TypeError, match='NoneType'):
        Run(replace(TINY, model=str(tmp_path/'none'), output_dir=str(tmp_path/'run')), reward_fn=captures)
    assert not (tmp_path/'run').exists()


def test_a_run_killed_in_its_first_examination_goes_on_with_its_own_reward(tmp_path, monkeypatch):
    config = replace(TINY, eval_policy=2, output_dir=str(tmp_path/'run'))
    def killed(*given): raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr('rookworld_nb.run.examine', killed)
        train(config, reward_fn=best_move)
    with pytest.raises(RunError, match='reward_fn=default_reward: the run in .* is paid by best_move'): Run(resumed_config(output_dir=config.output_dir))
    assert Run(resumed_config(output_dir=config.output_dir), reward_fn=best_move).trainer.step == 0


def test_each_guest_has_a_row_of_its_own(tmp_path):
    class Guest:
        def log(self, row): self.steps = [*getattr(self, 'steps', []), row.pop('step')]
    guests = Guest(), Guest()
    rows = [row['step'] for _, row in zip(range(2), Run(replace(TINY, output_dir=str(tmp_path/'run'))).steps(guests))]
    assert rows == guests[0].steps == guests[1].steps == [1, 2]


def test_a_writer_that_is_none_is_found_before_the_first_step(tmp_path):
    class Half:
        def log(self, row): raise AssertionError('never reached')
    for maker, why in ((Half(), 'Half: cannot be called'), (Half, 'Half: too many positional arguments')):
        with pytest.raises(RunError, match=f'writers: .*{why}; each is called with the run folder'):
            train(replace(SHORT, output_dir=str(tmp_path/'run')), [maker])
    assert not (tmp_path/'run').exists()
    with pytest.raises(RunError, match='writers: Half has no method close; each is called with'):
        train(replace(SHORT, output_dir=str(tmp_path/'run')), [lambda folder, settings: Half()])
    assert not (tmp_path/'run'/'metrics.jsonl').exists()


def test_a_guest_is_closed_however_the_run_ends(tmp_path):
    class Guest:
        closed = 0
        def log(self, row): raise OSError('no network')
        def close(self): self.closed += 1
    guest = Guest()
    with pytest.raises(OSError, match='no network'): train(replace(TINY, output_dir=str(tmp_path/'run')), [lambda *_: guest])
    assert guest.closed == 1


def test_the_summary_tells_before_from_after(monkeypatch):
    for name, stub in (('select_rows', lambda part, temperature: part), ('recall_table', lambda part: part), ('cost_of', lambda run: {})):
        monkeypatch.setattr(f'rookworld_nb.run.{name}', stub)
    trainer = SimpleNamespace(stop_reason='', step=1, health=SimpleNamespace(skipped=0, recoveries=0))
    before, after = (pd.DataFrame({'recall': [value]}, ['mate']) for value in (.1, .9))
    summary = run_summary(SimpleNamespace(trainer=trainer), [before, after], pd.DataFrame())
    assert (summary['recall_before'], summary['recall_after']) == ({'mate': {'recall': .1}}, {'mate': {'recall': .9}})
