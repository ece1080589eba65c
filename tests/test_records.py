"""What a run leaves behind: files under crashes, tables of completions, the picture, TensorBoard and Weights & Biases."""
import ast
import dataclasses
import errno
import importlib
import json
import math
import os
import re
import stat
import subprocess
import sys
import types
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rookworld_nb import records
from rookworld_nb.config import TrainConfig
from rookworld_nb.monitor import MetricError, lights, simulated_run
from rookworld_nb.records import (MetricWriter, MissingExtraError, RunWriter, TensorBoardWriter, WandbWriter, mend_tail, metric_rows, plain,
                                  read_completions, read_metrics, save_reward_curve, write_atomic, write_json)

ROW = {'step': 10, 'loss': 2.34561, 'reward': .2341, 'task_P/fraction': .8, 'step_time': 1.234, 'reward_std': .1, 'kl': .01234,
       'kl_95pct': .0456, 'clip_ratio/region_mean': .0412, 'entropy': 1.2345, 'ratio_max': 1.876}
START = 1.75e9
CONFIG = TrainConfig(steps=12, lr=2e-3, data='my lines.txt', kl_unbiased=False)


def rows(steps: int = 5, **options) -> list[dict[str, float]]:
    """Rows of a rehearsed run."""
    return list(simulated_run(steps, **options))



# ---- the run folder

def test_folder_has_everything_and_every_row_is_on_disk_at_once(tmp_path):
    writer = RunWriter(tmp_path/'deep'/'run', report_every=2)
    for number, row in enumerate(rows(4), 1):
        shown = writer.log(row)
        assert len(read_metrics(writer.folder)) == number  # read while the writer is open
        assert (writer.folder/'train.log').read_text(encoding='utf-8').endswith(shown + '\n')
        assert ('Health Report' in shown) == (number % 2 == 0)
    writer.table(4, [dict(prompt='P: x', completion='y', task='P', reward=.1, advantage=0., format=1.)])
    writer.table(4, [dict(prompt='P: x', completion='?', task='P', reward=.1, advantage=0.)], 'skipped')
    writer.close()
    assert sorted(path.name for path in writer.folder.rglob('*')) == [
        'completions', 'metrics.jsonl', 'skipped', 'step-000004.csv', 'step-000004.csv', 'train.log']


def test_a_report_means_the_steps_since_the_last_one_and_those_before_a_kill_too(tmp_path):
    def row(step, reward): return dict(ROW, step=step, reward=reward, **{'task_P/reward': reward})
    with RunWriter(tmp_path, report_every=3) as writer:
        shown = [writer.log(row(step, step/10)) for step in range(1, 6)]
    assert 'mean reward of 3 steps: P=0.200 |' in shown[2]
    with RunWriter(tmp_path, report_every=3) as writer:    # from the checkpoint of step 4: step 5 is done again
        assert [writer.log(row(step, reward)).count('3 steps: P=0.600 |') for step, reward in ((5, .5), (6, .9))] == [0, 1]
        assert '(best: 0.900)' in writer.log(row(7, .1)) and '3 steps: P=0.100' in [writer.log(row(step, .1)) for step in (7, 8, 9)][-1]
        assert '(best: 0.500)' in writer.log(row(6, .2))    # what was undone is forgotten


def test_log_keeps_names_order_and_numbers(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.log(dict(ROW, time=7.5, tensor=torch.tensor(.25), array=np.float32(.5), count=np.int64(3)))
    row = json.loads((tmp_path/'metrics.jsonl').read_text())
    assert list(row)[:2] == ['step', 'time'] and row['time'] == 7.5
    assert (row['tensor'], row['array'], row['count']) == (.25, .5, 3)


def test_time_is_added(tmp_path):
    with RunWriter(tmp_path) as writer: writer.log(ROW)
    assert 1.6e9 < read_metrics(tmp_path).time[0] < 1e10


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf, np.float64('nan')])
def test_numbers_that_are_none_are_null(tmp_path, value):
    with RunWriter(tmp_path, report_every=0) as writer: writer.log(dict(ROW, kl=value))
    text = (tmp_path/'metrics.jsonl').read_text()
    assert '"kl": null' in text and 'NaN' not in text and 'Infinity' not in text
    assert math.isnan(read_metrics(tmp_path).kl[0]) and read_metrics(tmp_path).kl.dtype == float


def test_a_stored_null_is_no_number(tmp_path):
    with RunWriter(tmp_path) as writer: writer.log(rows(2)[1] | {'grad_norm': math.inf, 'kl_loss': math.nan})
    row, = metric_rows(tmp_path/'metrics.jsonl')
    assert row['grad_norm'] is None and [light.metric for light in lights(row) if light.colour != 'green'] == ['grad_norm']


@pytest.mark.parametrize('wrong', ['high', None, [1.], torch.ones(2), np.ones(1)])
def test_what_is_no_number_is_refused_and_nothing_is_written(tmp_path, wrong):
    with RunWriter(tmp_path) as writer, pytest.raises(MetricError, match='metrics are numbers, but got.*colour'):
        writer.log(dict(ROW, colour=wrong))
    assert (tmp_path/'metrics.jsonl').read_text() == (tmp_path/'train.log').read_text() == ''


@pytest.mark.parametrize('row, words', [({'step': math.nan}, 'step nan'), ({'step': math.inf}, 'step inf'), ({'step': 1.5}, 'step 1.5: must be a whole number')])
def test_a_step_that_is_no_number_would_make_the_folder_unreadable(tmp_path, row, words):
    with RunWriter(tmp_path) as writer:
        with pytest.raises(MetricError, match=words): writer.log(ROW | row)
        with pytest.raises(MetricError, match='no reward_std in the row'): writer.log({name: value for name, value in ROW.items() if name != 'reward_std'})
        writer.log(ROW)
    assert len(metric_rows(tmp_path/'metrics.jsonl')) == 1


@pytest.mark.parametrize('cut', range(1, 60, 7))
def test_a_torn_last_line_costs_only_itself(tmp_path, cut):
    with RunWriter(tmp_path) as writer:
        for row in rows(3): writer.log(row)
    path = tmp_path/'metrics.jsonl'
    path.write_bytes(path.read_bytes()[:-1 - cut])  # the crash
    assert read_metrics(tmp_path).step.tolist() == [1, 2]
    with RunWriter(tmp_path) as writer: writer.log(rows(3)[2])
    assert read_metrics(tmp_path).step.tolist() == [1, 2, 3]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_step_that_is_no_number_is_an_error(tmp_path):
    (tmp_path/'metrics.jsonl').write_text('{"step": 1}\n{"step": null}\n{"step": 2}\n')
    with pytest.raises(MetricError, match='line 2'): metric_rows(tmp_path/'metrics.jsonl')


def test_a_line_torn_inside_a_character_is_left_out_too(tmp_path):
    path = tmp_path/'metrics.jsonl'
    path.write_bytes(b'{"step": 1}\n{"step": 2, "\xc3')
    assert read_metrics(tmp_path).step.tolist() == [1]
    assert mend_tail(path) == 14 and path.read_bytes() == b'{"step": 1}\n'


def test_a_whole_last_line_without_line_feed_is_kept(tmp_path):
    path = tmp_path/'metrics.jsonl'
    path.write_text('{"step": 1}\n{"step": 2}')
    assert read_metrics(tmp_path).step.tolist() == [1, 2]
    assert mend_tail(path) == 0 and path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert mend_tail(path) == 0 and mend_tail(tmp_path/'absent') == 0


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path):
    (tmp_path/'metrics.jsonl').write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(MetricError, match='line 2'): read_metrics(tmp_path)
    with pytest.raises(MetricError, match='line 2'): RunWriter(tmp_path)


def test_a_resumed_run_replaces_what_it_repeats(tmp_path):
    run = rows(6)
    with RunWriter(tmp_path) as writer:
        for row in run[:5]: writer.log(row)
    with RunWriter(tmp_path) as writer: writer.log(dict(run[2], reward=.111))  # back at step 3
    table = read_metrics(tmp_path)
    assert table.step.tolist() == [1, 2, 3] and table.reward.iloc[-1] == .111
    assert len((tmp_path/'metrics.jsonl').read_text().splitlines()) == 6  # nothing was erased


def test_best_reward_survives_reopening_and_forgets_what_was_undone(tmp_path):
    with RunWriter(tmp_path) as writer:
        for step, reward in enumerate([.1, .6, .2, .9], 1): shown = writer.log(dict(ROW, step=step, reward=reward))
    assert '(best: 0.900)' in shown
    with RunWriter(tmp_path) as writer: assert '(best: 0.600)' in writer.log(dict(ROW, step=3, reward=.3))
    with RunWriter(tmp_path) as writer: assert '(best: 0.600)' in writer.log(dict(ROW, step=4, reward=math.nan))


def test_a_killed_process_loses_nothing_it_logged(tmp_path):
    code = f"""
import os, signal
from rookworld_nb.monitor import simulated_run
from rookworld_nb.records import RunWriter
writer = RunWriter({str(tmp_path)!r})
for row in simulated_run(20): writer.log(row)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, '-c', code], timeout=120).returncode == -9
    assert read_metrics(tmp_path).step.tolist() == list(range(1, 21))
    assert len(re.findall(r'^Step', (tmp_path/'train.log').read_text(), flags=re.M)) == 20


def test_reading_what_is_no_run_folder(tmp_path):
    with pytest.raises(MetricError, match='no such file'): read_metrics(tmp_path)
    with RunWriter(tmp_path): pass
    assert read_metrics(tmp_path).empty


def test_writers_do_not_swallow_errors(tmp_path):
    (tmp_path/'file').write_text('')
    with pytest.raises(OSError): RunWriter(tmp_path/'file'/'run')
    writer = RunWriter(tmp_path/'run')
    writer.close()
    with pytest.raises(ValueError, match='closed'): writer.log(ROW)
    with pytest.raises(TypeError): write_json(tmp_path/'summary.json', {'model': object()})
    assert not (tmp_path/'summary.json').exists()


def test_whole_files_are_replaced_or_left_alone(tmp_path, monkeypatch):
    settings = dataclasses.make_dataclass('Settings', ['lr', 'place'])(1e-4, Path('runs')/'a')
    assert json.loads(write_json(tmp_path/'summary.json', settings).read_text()) == {'lr': 1e-4, 'place': str(Path('runs')/'a')}
    path = write_atomic(tmp_path/'summary.json', 'old')
    assert stat.S_IMODE(path.stat().st_mode) & 0o044 == 0o044

    def full_disk(*_): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(records.os, 'fsync', full_disk)
    with pytest.raises(OSError) as failed: write_atomic(path, 'new')
    assert failed.value.errno == errno.ENOSPC and failed.value.filename == str(path)    # the system names none
    assert path.read_text() == 'old' and [p.name for p in tmp_path.iterdir()] == ['summary.json']
    with pytest.raises(FileNotFoundError) as failed: write_atomic(tmp_path/'nowhere'/'summary.json', 'new')
    assert Path(failed.value.filename).parent == tmp_path/'nowhere'


# ---- completions

TEXT = st.text(st.characters(exclude_categories=['Cs']), max_size=40)
TABLE_ROW = st.fixed_dictionaries(dict(prompt=TEXT, completion=TEXT, task=st.sampled_from('PA'), reward=st.floats(-.3, 1),
                                       advantage=st.floats(-3, 3), format=st.floats(0, 1) | st.just(math.nan)))


@settings(max_examples=60)
@given(st.lists(TABLE_ROW, min_size=1, max_size=4))
def test_any_text_of_a_model_comes_back(tmp_path_factory, table):
    with RunWriter(tmp_path_factory.mktemp('run')) as writer: path = writer.table(1, table)
    back = read_completions(path)
    pd.testing.assert_frame_equal(back, pd.DataFrame(table), check_dtype=False)


@pytest.mark.parametrize('text', ['', 'nan', 'NA', 'null', '1.0', '"', 'a,b', 'a\nb', 'a\r\nb', '\r', ' x ', '#', '=1+1'])
def test_texts_that_readers_of_tables_mistake(tmp_path, text):
    row = dict(prompt=text, completion=text, task='P', reward=.5, advantage=0., clipped=True, tokens=3)
    with RunWriter(tmp_path) as writer: back = read_completions(writer.table(1, [row]))
    assert back.to_dict('records') == [row]


def test_a_table_without_its_columns_is_refused(tmp_path):
    with RunWriter(tmp_path) as writer, pytest.raises(MetricError, match=r'step-000007.csv: no task, advantage in these completions'):
        writer.table(7, [dict(prompt='p', completion='c', reward=0.)])
    assert list((tmp_path/'completions').iterdir()) == []


def test_reading_a_folder_of_tables_names_the_valid_form(tmp_path):
    with pytest.raises(MetricError, match=r'a folder; name one table, like completions/step-000001\.csv'): read_completions(tmp_path)


# ---- the picture

def test_the_picture_leaves_global_state_alone(tmp_path):
    before = dict(matplotlib.rcParams)
    png = save_reward_curve(pd.DataFrame(rows(20)), tmp_path/'reward.png').read_bytes()
    assert dict(matplotlib.rcParams) == before and png.startswith(b'\x89PNG')
    assert (int.from_bytes(png[16:20], 'big'), int.from_bytes(png[20:24], 'big')) == (650, 285)


# ---- TensorBoard

@pytest.fixture
def events():
    "TensorBoard's own reader."
    pytest.importorskip('tensorboard')
    reader = importlib.import_module('tensorboard.backend.event_processing.event_accumulator')
    return lambda folder: reader.EventAccumulator(str(folder), size_guidance={'scalars': 0}).Reload()


def rows_of(steps: int) -> list[dict]:
    "Rows with a metric that is not always measured, once NaN and once null."
    rows = [row | {'time': START + row['step'], 'eval/P_reward': math.nan} for row in simulated_run(steps)]
    rows[1]['eval/P_reward'], rows[2]['eval/P_reward'] = .5, None
    return rows


def test_tensorboard_reads_back_what_was_logged(tmp_path, events):
    rows = rows_of(5)
    with TensorBoardWriter(tmp_path/'board') as writer:
        for row in rows:
            writer.log(row)
    log = events(tmp_path/'board')
    assert set(log.Tags()['scalars']) == set(rows[0]) - {'step', 'time'}
    for name in set(rows[0]) - {'step', 'time', 'eval/P_reward'}:
        read = log.Scalars(name)
        assert [event.step for event in read] == [1, 2, 3, 4, 5] and [event.wall_time for event in read] == [row['time'] for row in rows]
        assert [event.value for event in read] == [float(np.float32(row[name])) for row in rows]
    assert [(event.step, event.value) for event in log.Scalars('eval/P_reward')] == [(2, .5)]


def test_a_resumed_run_replaces_what_it_repeats_in_tensorboard(tmp_path, events):
    for first, last, kl in ((1, 5, .1), (4, 6, .2)):
        with TensorBoardWriter(tmp_path) as writer:
            for step in range(first, last + 1):
                writer.log({'step': step, 'kl': kl, 'time': START + step})
    read = events(tmp_path).Scalars('kl')
    assert [(event.step, round(event.value, 3)) for event in read] == [(1, .1), (2, .1), (3, .1), (4, .2), (5, .2), (6, .2)]


def test_each_row_is_on_the_disk_at_once(tmp_path):
    pytest.importorskip('tensorboard')
    writer = TensorBoardWriter(tmp_path)
    assert list(tmp_path.iterdir()) == []
    writer.log({'step': 1} | {f'metric-{i}': i for i in range(300)})
    written = next(tmp_path.iterdir()).read_bytes()  # nothing may still wait in a queue
    assert b'metric-299' in written and written.count(b'metric-') == 300
    with pytest.raises(MetricError, match='no step'):
        writer.log({'kl': .25})
    writer.close()
    TensorBoardWriter(tmp_path/'unused').close()
    assert not (tmp_path/'unused').exists()


# ---- Weights & Biases, and what is not installed

class FakeWandb(types.ModuleType):
    "Records what a writer does with the package."
    def __init__(self):
        super().__init__('wandb')
        self.calls = []

    def init(self, **options):
        self.calls.append(('init', options))
        return types.SimpleNamespace(log=lambda *values, **options: self.calls.append(('log', values, options)),
                                     finish=lambda: self.calls.append(('finish',)))


def test_wandb_gets_the_rows(monkeypatch):
    fake, rows = FakeWandb(), rows_of(3)
    monkeypatch.setitem(sys.modules, 'wandb', fake)
    with pytest.raises(KeyError), WandbWriter('chess', CONFIG, mode='offline', name='a') as writer:
        for row in rows:
            writer.log(row)
        raise KeyError
    kind, options = fake.calls[0]
    assert kind == 'init' and options == {'project': 'chess', 'config': plain(CONFIG), 'mode': 'offline', 'name': 'a'}
    assert [options for _, _, options in fake.calls[1:-1]] == [{'step': 1}, {'step': 2}, {'step': 3}]
    for (_, (logged,), _), row in zip(fake.calls[1:-1], rows):
        assert logged == {name: value for name, value in row.items() if name not in ('step', 'time') and value is not None and value == value}
    assert fake.calls[-1] == ('finish',)


@pytest.mark.parametrize('package, make', [('wandb', lambda folder: WandbWriter('chess')), ('tensorboard', TensorBoardWriter)])
def test_a_missing_package_names_its_extra(monkeypatch, tmp_path, package, make):
    for name in [name for name in sys.modules if name.startswith('torch.utils.tensorboard')]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError) as failed:
        make(tmp_path/'board')
    assert f"pip install 'rookworld_nb[{package}]'" in str(failed.value) and isinstance(failed.value, ValueError)
    assert not (tmp_path/'board').exists()


def test_optional_packages_are_not_imported_with_the_module():
    tree = ast.parse(Path(records.__file__).read_text(encoding='utf-8'))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or '' for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert names and not [name for name in names if 'tensorboard' in name or 'wandb' in name]


def test_writers_share_one_interface():
    for writer in (TensorBoardWriter, WandbWriter):
        assert issubclass(writer, MetricWriter) and writer.log is not MetricWriter.log and writer.close is not MetricWriter.close
    with pytest.raises(NotImplementedError):
        MetricWriter().log({'step': 1})
