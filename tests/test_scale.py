"""The study of settings: spaces that say what they mean, every point once whoever dies, verdicts by hand, reports that hide nothing."""
import errno
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from rookworld_nb import cli, scale
from rookworld_nb.checkpoint import CheckpointError
from rookworld_nb.config import RunError, TrainConfig
from rookworld_nb.evaluate import evaluate, wilson_interval
from rookworld_nb.records import MissingExtraError, metric_rows
from rookworld_nb.positions import shipped
from rookworld_nb.rewards import RewardScorer
from rookworld_nb.scale import (Choices, Search, SearchError, Span, TakenTwice, Verdict, best_trial, by_ticket, claim, deal, hopeless,
                                importance, labels_of, open_study, read_space, reissue, run_search, search_report, settings_at, study_facts, success_rates,
                                trial_config, trial_table, trials_of, verdict_of, why_failed, work)
from rookworld_nb.weights import load_pretrained, save_pretrained
from short_runs import without_clocks

optuna = pytest.importorskip('optuna')


def tiny(tmp_path, lines, **more):
    "Settings of a trial of a second or two."
    return {'steps': 3, 'batch_positions': 2, 'group_size': 2, 'max_new_tokens': 16, 'eval_policy': 4, 'eval_env': 0, 'eval_samples': 2,
            'mix_env_ratio': 0., 'data': lines, 'seed': 3, 'max_recoveries': 0, 'output_dir': str(tmp_path/'study')} | more


# ---- spaces

def test_words_become_dimensions():
    assert read_space(['lr=1e-5|1e-4|1e-05', 'kl-coef=0..0.5', 'steps=10..100:log', 'normalize_rewards=true|false', 'max_age=none|4', 'batch=1x2|2x4']) == {
        'lr': Choices((1e-5, 1e-4)), 'kl_coef': Span(0., .5, False), 'steps': Span(10, 100, True), 'normalize_rewards': Choices((True, False)),
        'max_age': Choices((None, 4)), 'batch': Choices(('1x2', '2x4'))}
    assert read_space(['grid', 'lr=1']) == read_space(['grid']) | {'lr': Choices((1.,))}
    assert read_space(['data=../a|..']) == {'data': Choices(('../a', '..'))}


@pytest.mark.parametrize('word, said', [
    ('gird', 'grid'), ('lr', 'SETTING=VALUES'), ('lr=', 'SETTING=VALUES'), ('learning=1', 'learning'), ('output_dir=a|b', 'output_dir'), ('eval_policy=1', 'eval_policy'),
    ('lr=fast', "'fast' is not a number"), ('steps=1.5', "'1.5' is not a whole number"), ('use_gae=yes', 'true, false'), ('batch=2', '2x4'), ('batch=0x2', '2x4'),
    ('lr=1e-3..1e-5', 'LOW'), ('lr=0..1:log', 'LOW above 0'), ('lr=0..1:lin', 'LOW..HIGH:log'), ('lr=0..nan', "'nan' is not a number"), ('use_gae=false..true', 'true, false'),
    ('lr=none..1', 'LOW'), ('batch=1x2..2x4', '2x4'), ('lr=..1', 'LOW..HIGH of numbers')])
def test_what_is_wrong_with_a_space_is_said(word, said):
    with pytest.raises(SearchError, match='--space') as error: read_space([word])
    assert said in str(error.value) and word.partition('=')[0] in str(error.value)


def test_the_grid_is_the_one_of_432_points():
    search = Search(space=('grid',))
    points = search.points
    assert search.size == len(points) == len({json.dumps(point, sort_keys=True) for point in points}) == 432
    count = {name: Counter(map(repr, (point[name] for point in points))) for name in points[0]}
    assert {name: len(values) for name, values in count.items()} == {
        'lr': 3, 'kl_coef': 3, 'clip_range': 2, 'temperature': 3, 'mix_env_ratio': 2, 'kl_estimator': 2, 'batch': 2}
    assert all(len(set(values.values())) == 1 for values in count.values())
    config = trial_config(search, dict(lr=5e-5, kl_coef=.2, clip_range=.1, temperature=1., mix_env_ratio=0., kl_estimator='kl1', batch='2x4'))
    assert (config.lr, config.batch_positions, config.group_size, config.kl_estimator) == (5e-5, 2, 4, 'kl1')


def test_each_model_has_its_own_space():
    assert Search().dimensions == Search(space=('nano',)).dimensions != Search({'model': 'somewhere'}).dimensions == read_space(['grid'])
    assert Search().size == 108 and Search().dimensions['lr'] == (1e-4, 2e-4, 4e-4)
    assert trial_config(Search(), Search().points[0]).batch_positions == 16


def test_a_part_of_a_grid_is_a_random_part():
    first, other = Search({}, ('grid',), 40), Search({'seed': 1}, ('grid',), 40)
    assert first.size == 40 and first.points == Search(space=('grid',)).points != other.points
    assert {point['lr'] for point in first.points[:40]} == {1e-5, 2e-5, 5e-5} and len({point['batch'] for point in first.points[:40]}) == 2


def test_more_trials_than_points_are_said_to_be_no_more(caplog):
    assert Search({}, ('grid',), 433).size == 432 and '--trials 433: the grid has 432 points' in caplog.text
    Search({'kl_target': .1}, ('lr=1e-4|1e-5',))
    assert '--kl-target 0.1: acts only with --kl-control adaptive' in caplog.text
    caplog.clear()
    assert Search({}, ('grid',), 432).size == 432 and not caplog.text


@pytest.mark.parametrize('arguments, said', [
    (({}, ('lr=0..1',)), '--trials'), (({}, ('grid',), 0), '--trials 0'), (({'lr': 1e-4},), '--lr'), (({'group_size': 2},), '--group-size'), (({'auto_batch_size': True},), '--auto-batch-size'),
    (({'resume': True},), '--resume'), (({}, ('batch=1x2', 'group_size=2')), 'group_size'), (({}, ('kl_estimator=kl4',)), 'kl4'),
    (({}, ('temperature=-1..1',), 3), 'temperature'), (({'eval_policy': 0, 'eval_env': 0},), '--eval-policy'), (({'eval_policy': 1},), 'two held-out positions'),
    (({}, ('auto_batch_size=true|false',)), '--space auto_batch_size')])
def test_a_study_that_cannot_be_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said): Search(*arguments)


# ---- verdicts

def test_the_rule_against_hopeless_curves():
    high, low = [.6, .4]*8, [.3, .1]*8
    assert 'fell from 0.500 to 0.200' in hopeless(high + low, 64)
    assert 'fell from 0.500 to 0.200' in hopeless(high + high + low, 64) and not hopeless(high + high, 64)
    assert not any(hopeless((high + low)[:step], 64) for step in range(1, 32)) and not hopeless(high + low + low[:1], 64)
    assert not hopeless(low + high, 64) and not hopeless([.5]*32, 64) and not hopeless(high[:7] + low[:7], 28)
    error = math.sqrt(2*np.var(high, ddof=1)/16)
    for replays in (1, 2):
        edge = 3*error*math.sqrt(replays)
        assert hopeless(high + [each - 1.01*edge for each in high], 64, replays) and not hopeless(high + [each - .99*edge for each in high], 64, replays)
    assert not hopeless(high + low, 64, replays=3)


def test_success_is_an_interval_above_zero():
    assert verdict_of(.0197, .01, 1000)[0] == 'success' and verdict_of(.0195, .01, 1000)[0] == 'no gain' and verdict_of(-.0195, .01, 1000)[0] == 'no gain' and verdict_of(-.0197, .01, 1000)[0] == 'worse'
    assert verdict_of(math.nan, math.nan, 1000)[0] == 'no gain'
    assert verdict_of(.0227, .01, 10)[0] == 'success' and verdict_of(.0225, .01, 10)[0] == 'no gain'    # of ten prompts: Student's t, 2.262
    assert verdict_of(0., 0., 1000)[:2] == ('no gain', '+0.0000, the same for every prompt') and verdict_of(.1, 6e-18, 1000)[:2] == ('no gain', '+0.1000, the same for every prompt')


# ---- a study

@pytest.fixture(scope='module')
def done(tmp_path_factory, lines):
    "A whole study: a learning rate that trains, one that diverges; one pair of settings that cannot be."
    folder = tmp_path_factory.mktemp('done')
    search = Search(tiny(folder, lines), ('lr=3e-4|1', 'credit=part|answer', 'kl_in_reward=true|false'))
    tables = list(run_search(search, workers=2))
    return search, tables[-1], [len(table) for table in tables]


@pytest.mark.slow
def test_every_point_is_tried_once_and_every_failure_has_its_reason(done):
    search, table, counts = done
    assert counts[0] == 0 and counts[-1] == 8 and counts == sorted(counts)
    tried = [tuple(row) for row in table[['lr', 'credit', 'kl_in_reward']].itertuples(index=False)]
    assert len(set(tried)) == 8 and [dict(zip(search.dimensions, each)) for each in tried] == search.points
    impossible = (table['credit'] == 'part') & table['kl_in_reward'].astype(bool)
    assert table[impossible]['outcome'].eq('error').all() and table[impossible]['reason'].str.contains('whole answers are needed').all()
    wild = (table['lr'] == 1) & ~impossible
    assert table[wild]['outcome'].eq('diverged').all() and table[wild]['reason'].str.contains('diverged at step .* nats').all()
    assert table[~impossible & ~wild]['outcome'].isin(['success', 'no gain', 'worse']).all() and table[impossible | wild]['gain'].isna().all()
    study = open_study(search)
    assert Counter(trial.state.name for trial in study.trials if 'ticket' in trial.user_attrs) == {
        'COMPLETE': int((~impossible & ~wild).sum()), 'PRUNED': int(wild.sum()), 'FAIL': int(impossible.sum())}
    assert all('RunError' in trial.user_attrs['traceback'] for trial in study.trials if trial.user_attrs['ended']['outcome'] == 'error')


@pytest.mark.slow
def test_a_trial_is_an_ordinary_run_and_its_verdict_can_be_recomputed(done, tmp_path):
    search, table, _ = done
    ticket = table.index[(table['lr'] == 3e-4) & (table['credit'] == 'answer') & ~table['kl_in_reward'].astype(bool)][0]
    folder, row = search.folder/f'trial-{ticket:04d}', table.loc[ticket]
    means = []
    for place in ('nano', str(folder/'final_checkpoint')):
        model, tokenizer = load_pretrained(place)
        heldout = [sample for sample in shipped('heldout') if sample.task == 'P'][:4]
        means.append(evaluate(model, tokenizer, heldout, .9, 3, RewardScorer(TrainConfig().rewards), 2, search.given['max_new_tokens'])['reward'].mean())
    assert row['gain'] == pytest.approx(means[1] - means[0], abs=1e-6) and row['gain'] != 0
    torch.set_num_threads(max(1, torch.get_num_threads()//2))    # as each of the two workers had: other sums have other roundings
    assert cli.main([*shlex.split(row['command'])[1:], '--output-dir', str(tmp_path/'again')]) == 0
    again, was = ([*map(without_clocks, metric_rows(place/'metrics.jsonl'))] for place in (tmp_path/'again', folder))
    assert again == was and len(was) == 3


@pytest.mark.slow
def test_the_report_counts_everything(done):
    search, table, _ = done
    text = search_report(table, search)
    for words in ('8 of 8 trials', 'error: 2 of 8', 'diverged: 3 of 8', 'whole answers are needed', 'trial '): assert words in text
    assert (search.folder/'report.txt').read_text() == text + '\n' and len(pd.read_csv(search.folder/'results.csv')) == 8
    assert all((search.folder/name).read_bytes().startswith(b'\x89PNG') for name in ('success.png', 'slices.png'))


@pytest.mark.slow
def test_a_finished_study_is_not_repeated_and_not_mixed_with_another(done):
    search, table, _ = done
    was = {path: path.stat().st_mtime_ns for path in search.folder.rglob('metrics.jsonl')}
    *_, again = run_search(search)
    pd.testing.assert_frame_equal(again, table)
    assert {path: path.stat().st_mtime_ns for path in search.folder.rglob('metrics.jsonl')} == was
    for changed, said in ((Search(dict(search.given) | {'steps': 4}, search.space), '--steps 4'), (Search(search.given, search.space[1:]), '--space'),
                          (Search(search.given, search.space, prune=False), '--no-prune: the study in')):
        with pytest.raises(SearchError, match=said): next(run_search(changed))
    assert study_facts(Search(dict(search.given) | {'save_every': 7}, search.space)) == study_facts(search)


# ---- who works on it: a stub in the place of training shows what the database hands out

STUB = '''
import os, random, sys, time
from types import SimpleNamespace
from rookworld_nb import scale
def stub(trial, search, place):
    point = {name: scale.suggest(trial, name, part) for name, part in search.dimensions.items()}
    with open(search.folder/'tried.txt', 'a') as file: file.write(f"{sorted(point.items())}\\n")
    %s
    time.sleep(random.random()/20)
    return scale.verdict_of(.1, .01, 1000)
scale.run_trial, scale.BEAT, scale.POLL = stub, 1, .1
scale.Setup = lambda config: SimpleNamespace(close=lambda: None)    # the settings are good
if __name__ == '__main__':
    for table in scale.run_search(scale.Search({'output_dir': sys.argv[1], 'seed': 2**32 - 1}, (%r,), %s), %d): pass
    print(len(table), table['outcome'].value_counts().to_dict())
'''


def start(tmp_path, name, event='pass', space='', trials='None', workers=1):
    "A study in a process group of its own."
    (tmp_path/f'{name}.py').write_text(STUB % (event, space, trials, workers))
    return subprocess.Popen([sys.executable, tmp_path/f'{name}.py', tmp_path/'study'], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            start_new_session=True)


@pytest.mark.slow
def test_two_commands_share_a_study(tmp_path):
    "Started at the same moment: everything is done once, whoever wrote the tickets."
    (tmp_path/'study').mkdir()
    both = [start(tmp_path, name, space='kl_coef=0..1', trials='8') for name in 'ab']
    said = [process.communicate(timeout=900) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert all(out.startswith('8 ') for out, _ in said)
    tried = (tmp_path/'study'/'tried.txt').read_text().splitlines()
    assert len(tried) == len(set(tried)) == 8


@pytest.mark.slow
def test_a_ticket_whose_workers_die_is_given_up(tmp_path, monkeypatch):
    "One point kills its worker each time; all others are done by those who are left, and by the next start."
    event, space = "if point['kl_coef'] == .3: os.kill(os.getpid(), 9)", 'kl_coef=.1|.2|.3|.4'
    (tmp_path/'study').mkdir()
    first = start(tmp_path, 'a', event, space, workers=2)
    out, err = first.communicate(timeout=900)
    assert first.returncode == 1 and 'the same command goes on' in err and '-9' in err
    second = start(tmp_path, 'a', event, space)    # does the work itself
    assert second.communicate(timeout=900) and second.returncode == -signal.SIGKILL
    monkeypatch.setattr(scale, 'run_trial', lambda *given: pytest.fail('tried a fourth time'))
    monkeypatch.setattr(scale, 'BEAT', .2)
    monkeypatch.setattr(scale, 'POLL', .1)
    *_, table = run_search(Search({'output_dir': str(tmp_path/'study'), 'seed': 2**32 - 1}, (space,)))
    assert table['outcome'].value_counts().to_dict() == {'success': 3, 'error': 1}
    tried = Counter((tmp_path/'study'/'tried.txt').read_text().splitlines())
    assert sorted(tried.values()) == [1, 1, 1, 3]
    assert table.loc[table['outcome'] == 'error', 'reason'].tolist() == ['the worker was killed, 3 times']


def test_a_mistake_of_our_own_ends_a_study_with_its_traceback(tmp_path, monkeypatch):
    "It is not tried three times and called a killed worker."
    monkeypatch.setattr(scale, 'outcome_of', lambda *given: 1/0)
    with pytest.raises(ZeroDivisionError): list(run_search(Search({'output_dir': str(tmp_path/'study')}, ('kl_coef=.1',))))


@pytest.mark.slow
def test_a_study_that_is_killed_and_interrupted_goes_on_inside_the_trial(tmp_path, lines, monkeypatch, capsys):
    given = tiny(tmp_path, lines, steps=12, save_every=1)
    (tmp_path/'study.py').write_text(f'import sys\nfrom rookworld_nb import cli, scale\nscale.BEAT, scale.POLL = 1, .1\n'
                                     f'if __name__ == "__main__": sys.exit(cli.main({cli_words(given, "lr=1e-4|2e-4")}))')
    metrics = [tmp_path/'study'/f'trial-000{i}'/'metrics.jsonl' for i in range(2)]
    for blow, rows in ((signal.SIGINT, 3), (signal.SIGKILL, 6)):
        process = subprocess.Popen([sys.executable, tmp_path/'study.py'], stderr=subprocess.PIPE, text=True, start_new_session=True,
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))    # a test run in the background ignores it
        while not metrics[0].exists() or len(metrics[0].read_text().splitlines()) < rows:
            assert process.poll() is None, process.stderr.read()
            time.sleep(.05)
        os.killpg(process.pid, blow)
        process.communicate(timeout=60)
        assert process.returncode == (130 if blow == signal.SIGINT else -blow)
        assert rows <= len(metrics[0].read_text().splitlines()) < 12
        assert blow == signal.SIGKILL or not metrics[1].exists()    # an interrupted study begins no other trial
    monkeypatch.setattr(scale, 'BEAT', .2)    # nobody else is at work: the killed trial is missed after a second or two
    monkeypatch.setattr(scale, 'POLL', .1)
    assert cli.main(cli_words(given, 'lr=1e-4|2e-4')) == 0
    for path in metrics:
        assert [row['step'] for row in metric_rows(path)] == [*range(1, 13)]
        assert (path.parent/'train.log').read_text().count('Step    1 |') == 1
    trials = by_ticket(open_study(Search(given, ('lr=1e-4|2e-4',))))
    assert [len(each) for each in trials.values()] == [3, 1] and '2 of 2 trials' in capsys.readouterr().out


def cli_words(given, space):
    "The command of a study."
    return ['search', '--space', space, *(word for name, value in given.items() for word in (f'--{name.replace("_", "-")}', str(value)))]


# ---- in this process

@pytest.fixture
def stubbed(tmp_path, monkeypatch):
    "A study of three points whose trials end as told."
    endings = iter([Verdict('hopeless', 'hopeless: it fell'), verdict_of(.1, .01, 1000), KeyboardInterrupt(), verdict_of(0., .01, 1000)])

    def stub(trial, search, place):
        scale.suggest(trial, 'lr', search.dimensions['lr'])
        if isinstance(ending := next(endings), BaseException): raise ending
        return ending
    monkeypatch.setattr(scale, 'run_trial', stub)
    search = Search({'output_dir': str(tmp_path/'study')}, ('lr=1e-5|1e-4|1e-3',))
    study = open_study(search)
    deal(study, search)
    return search, study


def test_a_worker_does_not_leave_a_ticket_that_is_lost_and_not_yet_issued_again(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, 'run_trial', lambda *_: verdict_of(.1, .01, 1000))
    monkeypatch.setattr(scale, 'POLL', .01)
    study = open_study(search := Search({'output_dir': str(tmp_path/'study')}, ('lr=1e-5',)))
    deal(study, search)
    study.tell(study.ask(), state=optuna.trial.TrialState.FAIL)    # its worker was killed, and another one has just seen it
    for _ in trials_of(search, study): pass
    assert trial_table(study, search)['outcome'].tolist() == ['success']


def test_an_interrupted_ticket_is_issued_again(stubbed):
    search, study = stubbed
    work(search, 1)
    assert trial_table(study, search)['outcome'].tolist() == ['hopeless', 'success'] and [t.state.name for t in study.trials] == ['PRUNED', 'COMPLETE', 'FAIL']
    reissue(study)
    work(search, 1)
    table = trial_table(study, search)
    assert table['outcome'].tolist() == ['hopeless', 'success', 'no gain'] and table['lr'].tolist() == [point['lr'] for point in search.points]


def test_a_full_disk_is_no_outcome(stubbed, monkeypatch):
    search, study = stubbed
    tries = []
    def full(trial, search, place):
        tries.append(place)
        raise CheckpointError('checkpoint-3: cannot be written') from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(scale, 'run_trial', full)
    for _ in range(scale.TRIES + 1):
        with pytest.raises(SearchError, match='checkpoint-3: cannot be written; once that is mended, the same command goes on'):
            for _ in run_search(search): pass
    assert len(tries) == scale.TRIES + 1 and trial_table(study, search).empty    # no other trial was begun, and none is given up
    monkeypatch.setattr(scale, 'run_trial', lambda *_: verdict_of(.1, .01, 1000))
    *_, table = run_search(search)
    assert table['outcome'].tolist() == ['success']*3


def test_a_worker_whose_disk_is_full_says_so_and_stops(stubbed, monkeypatch, caplog):
    monkeypatch.setattr(scale, 'run_trial', lambda *_: write_nothing())
    def write_nothing(): raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    with pytest.raises(SystemExit) as left: work(stubbed[0], 2)
    assert left.value.code == scale.STOPPED and os.strerror(errno.EDQUOT) in caplog.text
    monkeypatch.setattr(scale, 'get_context', lambda _: SimpleNamespace(Process=lambda **_: SimpleNamespace(
        start=lambda: None, is_alive=lambda: False, pid=None, exitcode=scale.STOPPED)))
    with pytest.raises(SearchError, match='said above why'): list(scale.tables_of(*stubbed, 2))


def test_a_database_that_takes_nothing_is_said_in_words(stubbed, monkeypatch):
    def broken(*_): raise optuna.exceptions.StorageInternalError('see below') from OSError('database or disk is full')
    monkeypatch.setattr(scale, 'deal', broken)
    with pytest.raises(SearchError, match='study: the study cannot be written: database or disk is full; once that is mended'):
        next(run_search(stubbed[0]))


@pytest.mark.parametrize('space, said', [('model=nano|fooo', 'fooo'), ('data=none|no.txt', 'no.txt'), ('stockfish_path=no/engine', 'no/engine')])
def test_what_a_space_names_is_there_before_anything_is_made(space, said, tmp_path, lines):
    given = {name: value for name, value in tiny(tmp_path, lines).items() if name not in space}
    with pytest.raises(ValueError, match=said): next(run_search(Search(given, (space,))))
    assert not (tmp_path/'study').exists()


def test_a_worker_hears_ctrl_c_from_its_starter_alone(stubbed, monkeypatch):
    groups = []
    monkeypatch.setattr(scale.os, 'setpgid', lambda *who: groups.append(who))
    monkeypatch.setattr(scale, 'trials_of', lambda *_: iter(()))
    work(stubbed[0], 1)
    assert groups == []    # this process is nobody's worker
    monkeypatch.setattr(scale, 'parent_process', lambda: 'starter')
    work(stubbed[0], 1)
    assert groups == [(0, 0)]


def test_a_study_is_checked_where_it_will_be_written(tmp_path, lines, monkeypatch):
    (tmp_path/'here').mkdir()
    monkeypatch.chdir(tmp_path/'here')
    Path('runs').write_text('no folder')
    monkeypatch.setattr(scale, 'tables_of', lambda *_: iter(()))
    assert len(next(run_search(Search(tiny(tmp_path, lines), ('lr=1e-4|1e-3',))))) == 0
    with pytest.raises(ValueError, match='--output-dir .*no folder that can be written to'):
        next(run_search(Search(tiny(tmp_path, lines, output_dir='runs/study'), ('lr=1e-4|1e-3',))))


def test_a_second_copy_of_a_ticket_is_torn_up(stubbed):
    search, study = stubbed
    study.enqueue_trial(search.points[0], {'ticket': 0})
    work(search, 1)
    reissue(study)
    work(search, 1)
    assert [t.user_attrs.get('ended') for t in study.trials].count({'outcome': 'torn up'}) == 1
    assert trial_table(study, search)['outcome'].tolist() == ['hopeless', 'success', 'no gain']


def test_a_hopeless_trial_ends_early(tmp_path, lines, monkeypatch):
    monkeypatch.setattr(scale, 'hopeless', lambda rewards, steps, replays: 'hopeless: told so' if len(rewards) == 2 else '')
    for prune, outcome, steps in ((True, 'hopeless', 2), (False, None, 3)):
        search = Search(tiny(tmp_path/str(prune), lines), ('lr=1e-4',), prune=prune)
        study = open_study(search)
        deal(study, search)
        work(search, 1)
        row = trial_table(study, search).iloc[0]
        assert len(metric_rows(search.folder/'trial-0000'/'metrics.jsonl')) == steps and (row['outcome'] == 'hopeless') == prune
        assert [*study.trials[0].intermediate_values] == [*range(1, steps + 1)]


def test_the_untrained_model_is_examined_once_for_all_trials(tmp_path, lines, monkeypatch):
    examined, evaluate = [], scale.evaluate
    monkeypatch.setattr(scale, 'evaluate', lambda model, **options: (examined.append(model), evaluate(model, **options))[1])
    search = Search(tiny(tmp_path, lines, steps=1), ('kl_coef=.1|.2',))
    *_, table = run_search(search)
    assert len(table) == 2 and len(examined) == 3 and table['gain'].notna().all()
    *_, table = run_search(Search(tiny(tmp_path/'bf16', lines, steps=1), ('bf16=true|false',)))
    assert len(table) == 2 and len(examined) == 7    # other arithmetic, another table


def test_free_trials_differ_and_come_out_the_same_again(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, 'run_trial', lambda trial, search, place: verdict_of(-(scale.suggest(trial, 'kl_coef', search.dimensions['kl_coef']) - .3)**2, .01, 1000))
    found = []
    for name, seed, trials in (('a', 0, 25), ('b', 0, 25), ('c', 1, 3)):
        search = Search({'output_dir': str(tmp_path/name), 'seed': seed}, ('kl_coef=0..1',), trials)
        deal(open_study(search), search)
        work(search, 1)
        found.append(trial_table(open_study(search), search)['kl_coef'])
    assert found[0].tolist() == found[1].tolist() and found[0][:3].tolist() != found[2].tolist() and found[0].nunique() == 25
    assert (found[0][15:] - .3).abs().mean() < (found[0][:10] - .3).abs().mean()    # it learns where to look


# ---- reports

def table_of(rows):
    "A table of trials: (lr, shape, outcome, gain)."
    table = pd.DataFrame(rows, columns=['lr', 'shape', 'outcome', 'gain'])
    return table.assign(reason='because', standard_error=.01, seconds=1., command='rookworld train --lr 1')


def test_success_rates_count_all_trials():
    rows = [(i/10, 'ab'[i % 2], 'success' if i < 3 else 'diverged' if i < 6 else 'no gain', .1 if i < 3 or i > 5 else np.nan) for i in range(9)]
    rates = success_rates(table_of(rows), ['lr', 'shape'])
    assert rates['n'].tolist() == [9, 3, 3, 3, 5, 4] and rates['successes'].tolist() == [3, 3, 0, 0, 2, 1]
    assert rates.index.get_level_values('setting').tolist() == ['all', 'lr', 'lr', 'lr', 'shape', 'shape']
    for row in rates.itertuples(): assert (row.low, row.high) == wilson_interval(row.successes, row.n) and row.rate == row.successes/row.n


MIXED = {'batch': [f'{i}x4' for i in range(1, 9)], 'clip_range_high': [None, .2, .3, .4, .5, .6, .7, .8], 'max_age': [None, 2, 5],
         'use_gae': [True, False], 'steps': list(range(10, 90, 10))}


def test_settings_of_any_kind_are_reported():
    "Texts, nothing, whole numbers, truth values: each by its own name, however many there are."
    rows = [{name: values[i % len(values)] for name, values in MIXED.items()} for i in range(48)]
    table = pd.DataFrame(rows, dtype=object).assign(outcome='success', reason='', gain=np.linspace(-.1, .1, 48), standard_error=.01)
    rates = success_rates(table, [*MIXED])
    labels = {name: rates.loc[name].index.tolist() for name in MIXED}
    assert labels['batch'] == MIXED['batch'] and labels['max_age'] == ['2', '5', 'none'] and labels['use_gae'] == ['false', 'true']
    assert labels['clip_range_high'] == ['0.2', '0.3', '0.4', '0.5', '0.6', '0.7', '0.8', 'none'] and labels['steps'] == ['10 to 30', '40 to 60', '70 to 80']
    weights = importance(table, {name: Choices(values) for name, values in MIXED.items()})
    assert {*weights.index} == {*MIXED} and weights.sum() == pytest.approx(1)
    scale.plot_slices(table, [*MIXED])


def test_a_table_of_trials_keeps_what_a_setting_is(tmp_path, monkeypatch):
    def tried(trial, search, place):
        for name, part in search.dimensions.items(): scale.suggest(trial, name, part)
        return verdict_of(.1, .01, 1000)
    monkeypatch.setattr(scale, 'run_trial', tried)
    search = Search({'output_dir': str(tmp_path/'study')}, ('max_age=none|2', 'normalize_rewards=true|false'))
    *_, table = run_search(search)
    assert sorted(map(str, table['max_age'])) == ['2', '2', 'None', 'None'] and {*map(type, table['normalize_rewards'])} == {bool}
    assert table[['gain', 'standard_error']].dtypes.eq(float).all()


def test_a_study_does_not_shrink(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, 'run_trial', lambda trial, search, place: verdict_of(.1, .01, 1000))
    given = {'output_dir': str(tmp_path/'study')}
    list(run_search(Search(given, ('lr=1e-4|2e-4|3e-4',), trials=3)))
    with pytest.raises(SearchError, match='--trials 2: .* has 3 already'): list(run_search(Search(given, ('lr=1e-4|2e-4|3e-4',), trials=2)))


def test_importance_finds_what_matters():
    rng = np.random.default_rng(0)
    rows = [(x, shape, 'no gain', x) for x, shape in zip(rng.random(60), rng.choice(['a', 'b'], 60))]
    space = {'lr': Span(0., 1., False), 'shape': Choices('ab')}
    weights = importance(table_of(rows), space)
    assert weights.index[0] == 'lr' and weights['lr'] > .8 and weights.sum() == pytest.approx(1)
    assert importance(table_of(rows[:39]), space).empty and importance(table_of([(1., 'a', 'no gain', 0.)]*60), space).empty


def test_importance_looks_at_a_logarithmic_range_on_a_logarithmic_axis():
    "A learning rate that does nothing: on a linear axis all trials lie in one corner, which looks like a sharp optimum."
    rng = np.random.default_rng(0)
    rows = [(lr, shape, 'no gain', (shape == 'a') + rng.normal()/5) for lr, shape in zip(10**rng.uniform(-5, -1, 200), rng.choice(['a', 'b'], 200))]
    linear, logarithmic = (importance(table_of(rows), {'lr': Span(1e-5, .1, log), 'shape': Choices('ab')}) for log in (False, True))
    assert logarithmic['lr'] < .2 < .4 < linear['lr']


def test_the_report_of_a_range_says_that_its_rates_are_no_fair_sample(tmp_path):
    table = pd.DataFrame({'lr': [1., 2.], 'outcome': 'no gain', 'reason': 'x', 'gain': [.1, .2], 'standard_error': .2, 'command': ''}).rename_axis('ticket')
    said = ['no fair sample' in search_report(table, Search({'output_dir': str(tmp_path)}, (space,), 2)) for space in ('lr=1|2', 'lr=1..2')]
    assert said == [False, True]


def test_failures_are_quoted_and_the_best_is_a_success():
    table = table_of([(1., 'a', 'error', np.nan)]*5 + [(1., 'a', 'no gain', .9), (1., 'a', 'success', .2), (2., 'a', 'success', .3)])
    text = why_failed(table)
    assert text.startswith('error: 5 of 8\n  trial 0: because') and text.count('because') == 4 and 'and 2 more' in text and 'no gain: 1 of 8' in text and 'success' not in text
    assert 'Best of 8' in best_trial(table) and 'trial 7' in best_trial(table) and 'No trial succeeded' in best_trial(table[:6])


def test_a_study_without_any_gain_has_a_report(tmp_path):
    search = Search({'output_dir': str(tmp_path)}, ('lr=1|2', 'use_gae=true|false'))
    table = pd.DataFrame({'lr': [1., 2.], 'use_gae': [True, False], 'outcome': 'error', 'reason': 'x', 'gain': np.nan, 'standard_error': np.nan, 'command': ''})
    assert 'error: 2 of 2' in search_report(table, search) and (tmp_path/'slices.png').exists()


@pytest.mark.parametrize('words, names', [
    ('--space lr=1', ['--lr', 'space']), ('--space kl_coef=0..1', ['--trials']), ('--workers 0', ['--workers 0']), ('--model no/such', ['no/such']),
    ('--storage nosuch://x:secret@y', ['--storage nosuch://'])])
def test_what_is_wrong_is_said(words, names, tmp_path, capsys):
    extra = ['--lr', '1e-4'] if 'lr=1' in words else []
    assert cli.main(['search', *words.split(), *extra, '--output-dir', str(tmp_path/'study')]) == 2
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1 and all(name in said for name in names) and 'secret' not in said and not (tmp_path/'study').exists()


def test_without_optuna_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'optuna', None)
    with pytest.raises(MissingExtraError, match=r"rookworld_nb\[search\]"): open_study(Search({'output_dir': str(tmp_path/'study')}))
    assert not (tmp_path/'study').exists()


def test_settings_of_a_point():
    assert settings_at({'batch': '3x16', 'kl_coef': 0.}) == {'batch_positions': 3, 'group_size': 16, 'kl_coef': 0.}
    assert TrainConfig(**settings_at({'batch': '3x16'})).group_size == 16


def test_a_trial_that_two_processes_took_is_done_by_one(tmp_path, monkeypatch):
    "What SQLite lets through: the second leaves without a word to the study."
    claim(tmp_path, 'a', 3), claim(tmp_path, 'a', 4), claim(tmp_path, 'b', 3)    # b: another database, for the same folder
    with pytest.raises(TakenTwice, match='trial 3'):
        claim(tmp_path, 'a', 3)
    monkeypatch.setattr(scale, 'reissue', lambda study: None)
    waiting = SimpleNamespace(state=SimpleNamespace(name='WAITING'), user_attrs={'ticket': 0})
    study = SimpleNamespace(get_trials=lambda **_: [waiting],    # until the other one has done it
                            optimize=lambda *_, **__: waiting.user_attrs.update(ended={}) or claim(tmp_path, 'a', 4))
    assert list(trials_of(SimpleNamespace(), study)) == []    # not an error, and no trial of this worker's


def test_bins_of_a_range_with_many_equal_values_have_names_of_their_own():
    labels, order = labels_of(pd.Series([2, 3, 4, 6, 6, 6, 6, 8, 9, 10, 11]))
    assert set(labels) == set(order) and len(set(order)) == len(order) == 2
    labels, order = labels_of(pd.Series(range(10000, 10011)))
    assert len(set(order)) == 3 and sum(label == order[0] for label in labels) == 4


def test_a_value_that_goes_with_some_of_the_others_is_fine(tmp_path):
    given = {'output_dir': str(tmp_path/'study'), 'steps': 20}
    for space in (('kl_warmup_steps=5|10', 'kl_warmup_factor=.25|.5'), ('use_gae=true', 'gamma=.9|.95'), ('buffer_capacity=2|4', 'fresh_share=.1|.5'),
                  ('penalty=-.5|-.2', 'credit=none|part|answer')):
        assert len(Search(given, space).points) in (2, 4, 6)
    with pytest.raises(RunError, match='--kl-warmup-factor 0.25: acts only with'): Search(given, ('kl_warmup_factor=.25|.5', 'lr=1e-4|1e-5'))


@pytest.mark.parametrize('name', ['a?b', 'a%41b', 'a b ü'])
def test_the_database_lies_in_the_folder_whatever_its_name(tmp_path, name):
    search = Search({'output_dir': str(tmp_path/name)}, ('lr=1e-5|1e-4',))
    open_study(search)
    assert (tmp_path/name/'study.db').stat().st_size and [path.name for path in tmp_path.iterdir()] == [name]


def test_the_folder_of_a_study_is_made_wherever_its_database_is(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, 'run_trial', lambda *_: verdict_of(.1, .01, 1000))
    search = Search({'output_dir': str(tmp_path/'not'/'there')}, ('lr=1e-5|1e-4',), storage=f'sqlite:///{tmp_path}/my.db')
    *_, table = run_search(search)
    assert table['outcome'].tolist() == ['success']*2
    (tmp_path/'file').write_text('')
    with pytest.raises(RunError, match='--output-dir .*cannot be made'): open_study(Search({'output_dir': str(tmp_path/'file'/'x')}, ('lr=1e-5',)))


def test_a_folder_that_takes_no_file_kills_no_worker(stubbed, monkeypatch):
    search, study = stubbed
    monkeypatch.setattr(scale, 'run_trial', lambda *_: verdict_of(.1, .01, 1000))
    touch = Path.touch
    def full(path, **how):
        if path.parent.name == 'taken': raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        touch(path, **how)
    with monkeypatch.context() as short:
        short.setattr(Path, 'touch', full)
        for _ in range(scale.TRIES + 1):
            with pytest.raises(SearchError, match='No space left.*once that is mended'):
                for _ in run_search(search): pass
    *_, table = run_search(search)
    assert table['outcome'].tolist() == ['success']*3


def test_a_trial_that_was_written_off_while_its_worker_slept_has_no_outcome(stubbed, monkeypatch):
    search, study = stubbed
    def sleep(trial, *_):
        if slept: return verdict_of(.2, .01, 1000)
        slept.append(trial.number)
        study._storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.FAIL)    # by another worker
        trial.report(.5, 1)
    slept = []
    monkeypatch.setattr(scale, 'run_trial', sleep)
    work(search, 1)
    assert trial_table(study, search)['outcome'].tolist() == ['success']*3 and slept == [0]


def test_an_interruption_of_a_trial_that_was_written_off_stops_the_worker(stubbed, monkeypatch):
    search, study = stubbed
    def press(trial, *_):
        study._storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.FAIL)
        raise KeyboardInterrupt
    monkeypatch.setattr(scale, 'run_trial', press)
    with pytest.raises(KeyboardInterrupt): list(trials_of(search, study))


def test_a_ticket_waits_for_the_worker_that_still_writes(tmp_path, lines, monkeypatch):
    search = Search(tiny(tmp_path, lines), ('lr=1e-4',))
    (search.folder/'trial-0000').mkdir(parents=True)
    looks = iter([True, True, False])
    monkeypatch.setattr(scale, 'POLL', 0.)
    monkeypatch.setattr(scale, 'is_going_on', lambda place: next(looks))
    study = open_study(search)
    deal(study, search)
    work(search, 1)
    assert next(looks, None) is None and trial_table(study, search)['outcome'].tolist() != ['error']


def test_a_trial_is_judged_though_it_was_broken_off_in_the_step_that_is_judged(tmp_path, lines, monkeypatch):
    monkeypatch.setattr(scale, 'hopeless', lambda rewards, steps, replays: 'hopeless: told so' if len(rewards) == 2 else '')
    for more, why, steps in (({}, 'hopeless: told so', 2), ({'easy_first': 1}, '', 3)):
        search = Search(tiny(tmp_path/str(steps), lines, **more), ('lr=1e-4',))
        run = scale.Run(trial_config(search, {'lr': 1e-4}, output_dir=str(search.folder/'trial')))
        rows = run.steps()
        for _ in range(2): next(rows)
        rows.close()
        assert scale.train_trial(run, SimpleNamespace(report=lambda *_: None), search) == why and run.trainer.step == steps


def test_the_order_of_a_space_decides_nothing(tmp_path):
    words = ['kl_control=fixed|adaptive', 'grid', 'kl_target=.05|.1', 'replays=1|2']
    assert {len(Search({'output_dir': str(tmp_path/'study')}, tuple(order)).dimensions) for order in (words, words[::-1])} == {10}


def test_all_trials_are_examined_alike(tmp_path, lines, monkeypatch):
    asked = []
    monkeypatch.setattr(scale, 'evaluate', lambda model, **options: (asked.append((options['temperature'], options['scorer'].cfg)), evaluate(model, **options))[1])
    *_, table = run_search(Search(tiny(tmp_path, lines, steps=1), ('temperature=.5|1', 'legal_credit=.1')))
    assert len(table) == 2 and len(asked) == 3 and set(asked) == {(.9, TrainConfig().rewards)}


def test_each_model_that_is_started_from_is_examined(tmp_path, lines):
    save_pretrained(*load_pretrained('nano'), tmp_path/'mine')
    search = Search(tiny(tmp_path, lines, steps=1), (f'model=nano|{tmp_path/"mine"}',))
    *_, table = run_search(search)
    assert len(search.untrained) == 2 and table['gain'].notna().all()
