"""The study of what matters: cells that say what they change, runs that go on where they were, effects by hand."""
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd
import pytest

from rookworld_nb import ablations, cli
from rookworld_nb.ablations import (DEFAULT, KEPT, REFERENCES, SHARED, STUDIES, UNTRAINED, AblationError, cells_of, effects, keep, planned_runs,
                                    read_results, run_cell, run_place, run_study, settings_of)
from rookworld_nb.config import BY_SIZE, SMALL, RunError, TrainConfig, repeated_settings
from rookworld_nb.evaluate import evaluate, select_rows
from rookworld_nb.grpo import BASELINES, REWARD_SCALES
from rookworld_nb.kl import KL_ESTIMATORS
from rookworld_nb.records import read_completions
from rookworld_nb.rewards import RewardScorer, Shaping
from rookworld_nb.run import Run, resumed_config
from rookworld_nb.weights import ModelNameError
from processes import children_of, is_running

TINY = {'steps': 2, 'batch_positions': 2, 'group_size': 2, 'max_new_tokens': 16, 'eval_policy': 2, 'eval_env': 2, 'eval_samples': 1}
TEMPERATURES = TrainConfig().for_size(SMALL).temperature, 0.
N_ROWS = 2*sum(map(len, KEPT.values()))    # of a cell with a seed


@pytest.fixture
def tiny(monkeypatch, lines):
    "Three small cells in two studies; what they share."
    shared = TINY | {'data': lines}
    monkeypatch.setattr(ablations, 'SHARED', shared)
    monkeypatch.setattr(ablations, 'STUDIES', {'kl': {'no KL': {'kl_coef': 0.}}, 'losses': {'dapo': {'loss_type': 'dapo'}}})
    monkeypatch.setattr(ablations, 'REFERENCES', dict.fromkeys(ablations.STUDIES, DEFAULT))
    return shared


@pytest.mark.parametrize('cell', cells_of(()))
def test_a_cell_changes_what_it_says_and_is_a_valid_run(cell):
    default, changes = asdict(TrainConfig(**SHARED)), cells_of(())[cell]
    config = asdict(TrainConfig(**SHARED | changes))
    assert {name: config[name] for name in config if config[name] != default[name]} == changes


STUDY = """
from pathlib import Path
from rookworld_nb import ablations
ablations.SHARED, ablations.STUDIES = {shared!r} | dict(steps=10**6), {{}}
for table in ablations.run_study(Path({folder!r}), seeds=1): pass
"""


@pytest.mark.slow
def test_nothing_is_left_of_a_study_that_is_killed(tiny, tmp_path):
    log = run_place(tmp_path, DEFAULT, 1)/'metrics.jsonl'
    study = subprocess.Popen([sys.executable, '-c', STUDY.format(shared=tiny, folder=str(tmp_path))], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(1200):
        if log.exists() and log.stat().st_size: break
        time.sleep(.1)
    left = children_of(study.pid)
    study.kill()
    study.wait()
    assert left and log.stat().st_size
    for _ in range(600):
        if not any(map(is_running, left)): break
        time.sleep(.1)
    assert not any(map(is_running, left))


@pytest.mark.slow
def test_a_killed_worker_is_named(tiny, tmp_path):
    log = run_place(tmp_path, DEFAULT, 1)/'metrics.jsonl'
    study = subprocess.Popen([sys.executable, '-c', STUDY.format(shared=tiny, folder=str(tmp_path))], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for _ in range(1200):
        if log.exists() and log.stat().st_size: break
        time.sleep(.1)
    worker, = (child for child in children_of(study.pid) if b'spawn_main' in Path(f'/proc/{child}/cmdline').read_bytes())    # the other keeps its semaphores
    os.kill(worker, signal.SIGKILL)
    said = study.communicate(timeout=60)[1]
    assert said.splitlines()[-1].endswith("AblationError: the process of 'default' with seed 1 was killed, perhaps for its memory; the same command goes on from here, "
                                          'with fewer --workers if that happens again'), said


@pytest.mark.parametrize('text', ['', 'ticket,outcome\n0,success\n', 'cell,seed\n"'])
def test_a_table_of_something_else_is_refused(text, tmp_path):
    (tmp_path/'results.csv').write_text(text)
    with pytest.raises(AblationError, match='results.csv: no results of such a study'): read_results(tmp_path)


def test_the_help_names_all_studies(capsys):
    cli.main(['ablate', '--help'])
    assert set(STUDIES) <= set(re.findall(r'[a-z]+', capsys.readouterr().out))


def test_a_study_brings_the_cell_that_it_is_compared_with():
    assert [*cells_of(['rewards'])] == [DEFAULT, 'whole answers', 'graduated', 'binary', 'ladder', 'curriculum']
    assert [*cells_of(['credit'])] == [DEFAULT, 'whole answers'] and [*cells_of(['kl', 'price'])][-2:] == ['whole answers', 'kl1 in the reward']
    assert REFERENCES.keys() == STUDIES.keys() and {*REFERENCES.values()} <= {*cells_of(())}


def test_no_two_cells_are_the_same():
    assert sum(len(study) for study in STUDIES.values()) + 1 == len(cells_of(()))
    assert len({json.dumps(changes, sort_keys=True) for changes in cells_of(()).values()}) == len(cells_of(()))


@pytest.mark.parametrize('study, reached, values', [
    ('kl', lambda config: config.trainer.kl_estimator, KL_ESTIMATORS),
    ('advantages', lambda config: config.collector.baseline, BASELINES),
    ('advantages', lambda config: config.collector.scale_rewards, REWARD_SCALES),
    ('rewards', lambda config: config.reward_shaping, set(get_args(Shaping)) - {'linear'})])    # linear is continuous by another name
def test_every_choice_is_in_its_study(study, reached, values):
    assert {reached(TrainConfig(**SHARED | changes).for_size(SMALL)) for changes in cells_of([study]).values()} == set(values)


def means_of(run, model):
    "What a table of results should hold of a model, recomputed from its completions."
    scorer = RewardScorer(TrainConfig().rewards)
    table = pd.concat([evaluate(model, run.tokenizer, run.heldout, temperature, run.config.seed, scorer,
                               max_new_tokens=run.config.max_new_tokens) for temperature in TEMPERATURES])
    return {(task, 'sampled' if temperature else 'greedy', metric): select_rows(table, task, temperature)[metric].mean()
            for task, metrics in KEPT.items() for temperature in TEMPERATURES for metric in metrics}


@pytest.mark.slow
def test_runs_are_kept_and_not_repeated(tiny, tmp_path, capsys):
    for cell, changes in cells_of(['kl']).items(): keep(tmp_path, run_here(tmp_path, cell, **changes))
    first, = run_study(tmp_path, ['kl'], seeds=1)    # nothing is left to run
    assert first.groupby(['cell', 'seed'], sort=False).size().to_dict() == dict.fromkeys([(UNTRAINED, 1), (DEFAULT, 1), ('no KL', 1)], N_ROWS)
    stored = json.loads((run_place(tmp_path, 'no KL', 1)/'config.json').read_text())
    assert {name: stored[name] for name in TINY} == TINY and stored['kl_coef'] == 0 and stored['seed'] == 1
    run = Run(resumed_config(output_dir=str(run_place(tmp_path, 'no KL', 1))))
    for cell, model in (('no KL', run.model), (UNTRAINED, run.reference)):
        for (task, decoding, metric), value in means_of(run, model).items():
            row = first.query('cell == @cell and task == @task and decoding == @decoding and metric == @metric')
            assert row['value'].item() == pytest.approx(value, rel=1e-5)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob('metrics.jsonl')}
    assert cli.main(['ablate', 'kl', '--seeds', '1', '--output-dir', str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("kl: gain of the held-out reward of sampled P: answers; effect against 'default'") and 'no KL' in said
    *_, both = run_study(tmp_path, seeds=1, workers=2)
    assert both['cell'].unique().tolist() == [UNTRAINED, DEFAULT, 'no KL', 'dapo'] and all(path.stat().st_mtime_ns == was for path, was in times.items())
    pd.testing.assert_frame_equal(both[both['cell'] != 'dapo'].reset_index(drop=True), first, check_dtype=False)


def run_here(folder, cell, **changes):
    "One run of a study, in this process: its rows."
    return run_cell(run_place(folder, cell, 1), cell, TrainConfig(**ablations.SHARED | changes, seed=1).for_size(SMALL), threads=1)


def test_every_run_is_examined_by_the_default_reward(tiny, tmp_path):
    "Two cells that learn nothing differ in what they are paid, and not in the results."
    binary, ladder = ([row['value'] for row in run_here(tmp_path, shaping, lr=1e-12, steps=1, reward_shaping=shaping)] for shaping in ('binary', 'ladder'))
    untrained = [row['value'] for row in run_here(tmp_path, DEFAULT, lr=1e-12, steps=1) if row['cell'] == UNTRAINED]
    assert binary == ladder == untrained and len(untrained) == N_ROWS
    paid = [read_completions(run_place(tmp_path, shaping, 1)/'completions'/'step-000001.csv')['reward'].tolist() for shaping in ('binary', 'ladder')]
    assert paid[0] != paid[1]


@pytest.mark.slow
def test_a_study_that_is_interrupted_goes_on(tiny, tmp_path, monkeypatch):
    script = ("import sys; from rookworld_nb import ablations, cli\n"
              f"ablations.SHARED, ablations.STUDIES = {tiny | {'steps': 8}}, {{'kl': {{'no KL': {{'kl_coef': 0.}}}}}}; ablations.REFERENCES = {{'kl': 'default'}}\n"
              "if __name__ == '__main__': sys.exit(cli.main(['ablate', '--seeds', '1', '--output-dir', sys.argv[1]]))")
    (tmp_path/'study.py').write_text(script)
    metrics = run_place(tmp_path/'study', DEFAULT, 1)/'metrics.jsonl'
    process = subprocess.Popen([sys.executable, tmp_path/'study.py', tmp_path/'study'], stderr=subprocess.DEVNULL,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))    # a test run in the background ignores it
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert process.poll() is None
        time.sleep(.02)
    process.send_signal(signal.SIGINT)    # to the starter alone: it tells its workers
    assert process.wait(timeout=120) == 130
    assert 2 <= len(metrics.read_text().splitlines()) < 8 and not (tmp_path/'study'/'results.csv').exists()
    assert not run_place(tmp_path/'study', 'no KL', 1).exists()    # it does not go on with the next run
    monkeypatch.setattr(ablations, 'SHARED', tiny | {'steps': 8})
    assert [*planned_runs(tmp_path/'study', ['kl'], 1)] == [(DEFAULT, 1), ('no KL', 1)]    # both are still to be run, the first where it was left
    keep(tmp_path/'study', run_here(tmp_path/'study', DEFAULT))
    assert read_results(tmp_path/'study')['steps'].tolist() == [0]*N_ROWS + [8]*N_ROWS
    assert [json.loads(line)['step'] for line in metrics.read_text().splitlines()] == [*range(1, 9)]
    assert (metrics.parent/'train.log').read_text().count('Step    1 |') == 1


def test_a_study_may_move(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(ablations, 'SHARED', tiny)
    config = planned_runs(tmp_path/'study', ['kl'], 1)[DEFAULT, 1]
    place = run_place(tmp_path/'study', DEFAULT, 1)
    place.mkdir(parents=True)
    (place/'config.json').write_text(json.dumps(repeated_settings(replace(config, output_dir=str(place)))))
    (tmp_path/'study').rename(tmp_path/'moved')
    assert (DEFAULT, 1) in planned_runs(tmp_path/'moved', ['kl'], 1)


def test_results_of_other_settings_are_refused(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(ablations, 'STUDIES', {})
    keep(tmp_path, run_here(tmp_path, DEFAULT))
    assert len(list(run_study(tmp_path, seeds=1))) == 1    # nothing is left to run
    monkeypatch.setattr(ablations, 'SHARED', tiny | {'lr': 1e-3})
    for gone in ('results.csv', 'default'):
        with pytest.raises(AblationError, match='other settings'): list(run_study(tmp_path, seeds=1))
        path = tmp_path/gone
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_results_may_hold_cells_that_no_longer_exist(tiny, tmp_path):
    rows = [{'cell': 'forgotten', 'seed': 1, 'settings': 'x', 'value': 0.}]
    assert keep(tmp_path, rows)['cell'].tolist() == ['forgotten']
    assert keep(tmp_path, [{'cell': DEFAULT, 'seed': 1, 'settings': 'x', 'value': 0.}])['cell'].tolist() == [DEFAULT, 'forgotten']


def test_a_change_of_a_default_changes_the_fingerprint(monkeypatch):
    print_of = lambda **settings: settings_of(TrainConfig(**settings).for_size(SMALL))
    before = print_of()
    assert print_of(seed=1) != before == print_of(keep_checkpoints=7, rank_timeout=1., micro_batch_size=4)
    assert print_of(steps=7) != before
    with monkeypatch.context() as other:  # other weights to start from
        other.setattr(ablations, 'untrained_print', lambda: 'x')
        assert print_of() != before
    monkeypatch.setitem(BY_SIZE['small'], 'temperature', .5)
    assert print_of() != before


def test_a_run_that_fails_is_named_and_the_study_stops(tiny, monkeypatch, tmp_path):
    monkeypatch.setitem(ablations.STUDIES['kl'], 'no KL', {'kl_coef': 0., 'model': str(tmp_path/'nowhere')})
    keep(tmp_path/'study', run_here(tmp_path/'study', DEFAULT))
    with pytest.raises(ModelNameError, match='nowhere') as caught: list(run_study(tmp_path/'study', ['kl'], seeds=1))
    assert caught.value.__notes__ == ["in the run 'no KL' with seed 1"]
    assert read_results(tmp_path/'study')['cell'].unique().tolist() == [UNTRAINED, DEFAULT]


def results_of(gains):
    before = {seed: .4 + seed/10 for seed in (1, 2, 3)}
    return pd.DataFrame([dict(cell=cell, seed=seed, task='P', decoding='sampled', metric='reward', value=before[seed] + gain)
                         for cell, values in ({UNTRAINED: dict.fromkeys(before, 0.)} | gains).items() for seed, gain in values.items()])


def test_effects_equal_plain_loops():
    rng = np.random.default_rng(0)
    gains = {cell: {seed: rng.normal() for seed in (1, 2, 3)} for cell in (DEFAULT, 'a', 'b', 'c')}
    whole = effects(results_of(gains))
    by_cell = {cell: sum(values.values())/3 for cell, values in gains.items()}
    by_seed = {seed: sum(values[seed] for values in gains.values())/4 for seed in (1, 2, 3)}
    total = sum(by_cell.values())/4
    squares = sum((gain - by_cell[cell] - by_seed[seed] + total)**2 for cell, values in gains.items() for seed, gain in values.items())
    for cell in 'abc':
        assert whole.loc[cell, 'standard_error'] == pytest.approx(math.sqrt(squares/(3*2)*2/3))
        assert whole.loc[cell, 'effect'] == pytest.approx(by_cell[cell] - by_cell[DEFAULT]) and whole.loc[cell, 'gain'] == pytest.approx(by_cell[cell])
    assert UNTRAINED not in whole.index and whole.loc[DEFAULT, 'effect'] == 0 and math.isnan(whole.loc[DEFAULT, 'standard_error'])
    assert effects(results_of(gains), reference='a').loc['b', 'effect'] == pytest.approx(by_cell['b'] - by_cell['a'])


def test_effects_of_an_unfinished_study():
    rng = np.random.default_rng(1)
    gains = {cell: {seed: rng.normal() for seed in (1, 2, 3)} for cell in (DEFAULT, 'a', 'b', 'c')}
    del gains['b'][2], gains['c'][3]
    table = effects(results_of(gains))
    runs = [(cell, seed, gain) for cell, values in gains.items() for seed, gain in values.items()]
    design = np.array([[1., *(cell == each for each in 'abc'), *(seed == each for each in (2, 3))] for cell, seed, _ in runs])
    target = np.array([gain for *_, gain in runs])
    residuals = target - design @ np.linalg.solve(design.T @ design, design.T @ target)
    sigma = math.sqrt((residuals**2).sum()/(len(runs) - 6))
    for cell, count in (('a', 3), ('b', 2), ('c', 2)):
        assert table.loc[cell, 'seeds'] == count and table.loc[cell, 'standard_error'] == pytest.approx(sigma*math.sqrt(2/count))    # pairs of one seed
        both = [seed for seed in gains[cell]]
        assert table.loc[cell, 'effect'] == pytest.approx(np.mean([gains[cell][seed] - gains[DEFAULT][seed] for seed in both]))
    nothing_shared = effects(results_of(gains | {'d': {1: .1}, 'e': {1: .2, 2: .1}, 'b': gains['b'], DEFAULT: {2: .1, 3: .2}})).loc['d']
    assert nothing_shared[['effect', 'standard_error']].isna().all() and nothing_shared['seeds'] == 1


def test_the_error_of_pairs_is_the_one_that_is_seen_in_repetitions():
    "One shared seed of three: the effect is a single difference, and scatters like one."
    rng, effect, error = np.random.default_rng(0), [], []
    for _ in range(300):
        gains = {cell: {seed: rng.normal() for seed in (1, 2, 3)} for cell in (DEFAULT, 'a', 'b', 'c')} | {'d': {1: rng.normal()}}
        found = effects(results_of(gains)).loc['d']
        effect.append(found['effect'])
        error.append(found['standard_error']**2)
    assert np.std(effect)/math.sqrt(np.mean(error)) == pytest.approx(1, abs=.08)


def test_one_seed_has_no_error_and_no_default_no_effect():
    assert effects(results_of({DEFAULT: {1: .1}, 'a': {1: .2}}))['standard_error'].isna().all()
    with pytest.raises(AblationError, match='no cell .default.*untrained, a'): effects(results_of({'a': {1: .2}}))


def test_one_study_at_a_time_in_a_folder(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(ablations, 'STUDIES', {})
    config, = planned_runs(tmp_path, (), 1).values()
    keep(tmp_path, [{'cell': DEFAULT, 'seed': 1, 'settings': settings_of(config), 'value': 0.}])    # nothing is left to run
    first = run_study(tmp_path, seeds=1)
    next(first)
    with pytest.raises(RunError, match='a run is going on there'): next(run_study(tmp_path, seeds=1))
    first.close()
    assert len(list(run_study(tmp_path, seeds=1))) == 1
