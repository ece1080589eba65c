"The report of a run folder, whatever state the run is in."
import base64
import json
import math
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from rookworld_nb import report as module
from rookworld_nb.monitor import MetricError, lights, overall, simulated_run
from rookworld_nb.records import RunWriter, metric_rows, plain, write_json
from rookworld_nb.report import (ReportError, bin_edges, changed_settings, command_line, comparison, default_words, ending, findings, first_update,
                                 number, pick_samples, plot_distributions, plot_lights, plot_looks, plot_task, ranges, read_run, report)
from rookworld_nb.config import SMALL, TrainConfig
from rookworld_nb.flags import flags_of, parser_of, read_settings
from rookworld_nb.run import write_events

STEPS, START = 12, 1.75e9
CONFIG = TrainConfig(steps=STEPS, lr=2e-3, data='my lines.txt', kl_unbiased=False)
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>\' & &amp; </pre></style>'
PICTURES = {'differences', 'curves', 'bands', 'task_P', 'task_A', 'distributions', 'lights'}


def completions(step: int, count: int = 4) -> list[dict]:
    "A table of both tasks whose rewards and texts tell where they come from."
    return [{'prompt': f'{task}: prompt {step}', 'completion': f'text-{step}-{task}-{i}', 'task': task, 'tokens': 10 + step + i,
             'reward': round(.05*step + .1*i + .001, 4), 'advantage': i - 1.5, 'format': 1., 'candidates' if task == 'P' else 'fen': .25}
            for task in 'PA' for i in range(count)]


def compared(task: str, temperature: float, metric: str, difference: float, z: float | None, error: float = .01) -> dict:
    "A row of summary.json."
    return {'task': task, 'temperature': temperature, 'metric': metric, 'before': .4321, 'after': .4321 + difference,
            'difference': difference, 'standard_error': error, 'z': z, 'n': 48, 'chance': None}


COMPARISON = [compared('A', 0., 'reward', .0123, 1.9), compared('P', 0., 'reward', .0456, 2.1), compared('P', 1., 'eval_error', .2, 5.1),
              compared('P', 1., 'right_count', .03, -.4), compared('P', 1., 'reward', -.0789, -3.3), compared('A', 1., 'reward', .01, None, 0.)]


def write_run(folder: Path, config: object = CONFIG, steps: int = STEPS, tables: tuple = (1, 5, 9), summary: bool = True,
              collapse_at: int = -8) -> Path:
    "A run folder as training leaves it."
    with RunWriter(folder) as writer:
        write_json(folder/'config.json', config)
        write_json(folder/'origin.json', {'reward_fn': 'default_reward'})
        for row in simulated_run(steps, collapse_at=collapse_at):
            first = {'ratio_max': 1., 'kl': 0., 'clip_ratio/region_mean': 0.} if row['step'] == 1 else {}
            writer.log(row | first | {'time': START + 60*row['step'], 'rewards/P_best/mean': .5, 'rewards/A_fen/mean': .25})
        for step in tables:
            writer.table(step, completions(step))
        if summary:
            write_json(folder/'summary.json', {'stop_reason': f'all {steps} steps are done', 'steps': steps, 'comparison': COMPARISON})
    return folder


class Document(HTMLParser):
    "Tags, attributes and text of a page, as a browser would see them."
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags, self.attributes, self.words, self.style, self.inside = [], [], [], '', ''
        self.feed(path.read_text(encoding='utf-8'))
        self.text = ''.join(self.words)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *each) for each in attributes]
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = ''

    def handle_data(self, data):
        if self.inside == 'style':
            self.style += data
        else:
            self.words.append(data)

    def values(self, tag: str, name: str) -> list[str]:
        return [value for t, n, value in self.attributes if (t, n) == (tag, name)]


def page_of(folder: Path) -> Document:
    "The page of a run without its pictures, which take a second."
    (folder/'page').write_text(module.page(read_run(folder), {}), encoding='utf-8')
    return Document(folder/'page')


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
    "A finished run with its report; tests only read it."
    folder = write_run(tmp_path_factory.mktemp('runs')/'finished')
    assert report(folder) == folder/'report.html'
    return folder


# ---- what is on the page

def test_the_page_holds_the_numbers_of_the_folder(folder):
    text, rows = Document(folder/'report.html').text, metric_rows(folder/'metrics.jsonl')
    assert 'nano' in text and '12 of 12' in text and 'all 12 steps are done' in text
    assert '2025-06-15 15:07 UTC' in text and '2025-06-15 15:18 UTC' in text
    rewards = [row['reward'] for row in rows]
    assert f'{rewards[0]:.3f} at first, {max(rewards):.3f} the highest, {rewards[-1]:.3f} at last' in text
    assert f'{sum(row["step_time"] for row in rows)/60:.1f} min' in text and f'{rows[-1]["num_tokens"]:,}' in text
    for row in COMPARISON:
        assert f'{row["after"]:.3f}' in text and f'{row["difference"]:+.3f}' in text
    for task in 'PA':
        for step in (1, 5, 9):
            assert f'text-{step}-{task}-3' in text and f'text-{step}-{task}-0' in text
            assert f'{.05*step + .301:.3f}' in text
    assert 'lr' in text and '0.002' in text and 'my lines.txt' in text


def test_the_table_begins_with_what_matters_and_marks_what_is_significant():
    table = comparison({'comparison': COMPARISON})
    order = list(zip(table['task'], table['temperature'], table['metric'], table['verdict']))
    assert order == [('P', 1., 'reward', 'worse'), ('P', 0., 'reward', 'better'), ('A', 1., 'reward', ''), ('A', 0., 'reward', ''),
                     ('P', 1., 'eval_error', 'worse'), ('P', 1., 'right_count', '')]
    assert math.isnan(table['z'].iloc[2])


def test_the_page_shows_the_table_in_that_order(folder):
    cells = re.findall(r'<tr><td>([PA])</td><td>(.*?)</td>.*?<b>(\w+)</b>.*?</tr>', (folder/'report.html').read_text())
    assert cells == [('P', 'T = 1', 'reward'), ('P', 'greedy', 'reward'), ('A', 'T = 1', 'reward'), ('A', 'greedy', 'reward'),
                     ('P', 'T = 1', 'eval_error'), ('P', 'T = 1', 'right_count')]


def test_a_difference_without_any_spread_is_unmeasured():
    rows = [compared('P', 1., 'reward', .1, None, 0.), compared('P', 1., 'parsed', -.1, None, 0.), compared('P', 1., 'best_legal', 0., None, 0.)]
    table = comparison({'comparison': rows})
    assert table['z'].isna().all() and list(table['verdict']) == ['', '', '']


def test_few_prompts_need_a_larger_z():
    rows = [compared('P', 1., name, .1, 2.2, .045) | {'n': n} for name, n in (('reward', 1000), ('parsed', 8), ('best_legal', 2))]
    table = comparison({'comparison': rows}).set_index('metric')
    assert table['verdict'].to_dict() == {'reward': 'better', 'parsed': '', 'best_legal': ''}


def test_more_false_alarms_are_worse():
    table = comparison({'comparison': [compared('A', 0., 'false_alarms', .1, 4., .025), compared('A', 0., 'state_exact', .1, 4., .025)]})
    assert dict(zip(table['metric'], table['verdict'])) == {'false_alarms': 'worse', 'state_exact': 'better'}


@pytest.mark.parametrize('steps', [40, 300, 450, 1000])
def test_a_light_stands_at_its_step_however_long_the_run(steps):
    red = 2*steps//3
    figure = plot_lights(range(1, steps + 1), [lights({'kl': 9. if step == red else .01}) for step in range(1, steps + 1)], ['kl'])
    image, = figure.axes[0].images
    left, right, *_ = image.get_extent()
    columns = np.flatnonzero(image.get_array()[1] == 2)
    width = (right - left)/image.get_array().shape[1]
    assert len(columns) == 1 and left + width*columns[0] < red < left + width*(columns[0] + 1)
    assert figure.axes[0].get_xlim() == (.5, steps + .5)


def test_only_rows_with_a_z_are_counted_among_those_that_luck_could_mark(tmp_path):
    (tmp_path/'metrics.jsonl').touch()
    write_json(tmp_path/'summary.json', {'comparison': [compared('P', 1., name, .1, z, error) for name, z, error in (('reward', 2., .05), ('parsed', None, 0.))]})
    assert 'about 0.1 of the 1 rows with a z' in page_of(tmp_path).text


def test_samples_are_as_many_from_each_table_and_the_extremes_are_extreme():
    tables = {1: pd.DataFrame(completions(1, 9)), 2: pd.DataFrame(completions(2, 2)), 3: pd.DataFrame(completions(3, 5))}
    chosen = pick_samples(tables, 'P')
    assert {step: len(part) for step, part in chosen.items()} == {1: 2, 2: 2, 3: 2}
    assert [part['completion'].tolist() for part in chosen.values()] == [[f'text-{s}-P-{best}', f'text-{s}-P-0'] for s, best in ((1, 8), (2, 1), (3, 4))]
    del tables[2]
    assert [part['completion'].iloc[1] for part in pick_samples(tables, 'A').values()] == ['text-1-A-4', 'text-3-A-2']
    tables[3] = tables[3][tables[3]['task'] == 'P']
    assert list(pick_samples(tables, 'A')) == [1] and pick_samples({}, 'P') == {}


def test_the_lights_are_those_of_the_monitor(folder):
    rows = [{name: math.nan if value is None else value for name, value in row.items()} for row in metric_rows(folder/'metrics.jsonl')]
    colours = [overall(row).colour for row in rows]
    assert colours.count('green') not in (0, len(rows))
    text = Document(folder/'report.html').text
    assert f'{colours.count("green")} green, {colours.count("yellow")} yellow, {colours.count("red")} red' in text
    found = findings([row['step'] for row in rows], map(lights, rows))
    assert {step for each in found for step in each.steps} == {row['step'] for row, colour in zip(rows, colours) if colour != 'green'}
    assert all(each.words in text and ranges(each.steps) in text for each in found)


def test_findings_keep_the_two_sides_of_a_metric_and_numbers_that_are_none_apart():
    judged = [lights({'entropy': value}) for value in (.05, 5., math.nan, .01, 1.)]
    found = {each.edge: (each.colour, each.steps, each.worst) for each in findings(range(1, 6), judged)}
    assert found['below 0.1'] == ('red', [1, 4], .01) and found['above 3'] == ('yellow', [2], 5.)
    assert found['nan'][:2] == ('red', [3]) and len(found) == 3


def test_a_single_red_step_is_seen_among_thousands():
    judged = [lights({'kl': 9. if step == 777 else .01}) for step in range(1, 2001)]
    image, = plot_lights(range(1, 2001), judged, ['kl']).axes[0].images
    assert image.get_array().shape == (2, 286) and (image.get_array() == 2).sum() == 2


def test_histograms_are_shares_of_each_batch():
    tables = {1: pd.DataFrame(completions(1, 3)), 9: pd.DataFrame(completions(9, 40))}
    for axes in plot_distributions(tables).axes:
        outlines = [patch.get_data().values for patch in axes.patches]
        assert len(outlines) == 4 and np.allclose([values.sum() for values in outlines], 100)
    assert plot_distributions({}) is None and plot_distributions({1: tables[1].iloc[:0]}) is None


def test_bins_of_whole_numbers_are_equally_wide_for_each_of_them():
    values = np.arange(10., 93.)
    edges = bin_edges(values)
    counts = np.histogram(values, edges)[0]
    assert len(counts) <= 24 and counts.sum() == len(values) and set(counts[:-1]) == {4} and np.all(edges % 1 == .5)


def test_a_failed_start_is_called_failed(tmp_path, folder):
    assert 'failed' not in Document(folder/'report.html').text and Document(folder/'report.html').text.count('passed') == 3
    with RunWriter(tmp_path/'run') as writer:
        writer.log(next(simulated_run(1)) | {'ratio_max': 1.0005, 'kl': 19., 'clip_ratio/region_mean': 0.})
    assert [passed for *_, passed in first_update(read_run(tmp_path/'run'))] == [True, True, False]
    text = page_of(tmp_path/'run').text
    assert text.count('failed') == 1 and '19' in text
    assert first_update(replace(read_run(tmp_path/'run'), rows=[{'step': 2, 'kl': 0.}])) is None
    late = [{'step': 1, 'skipped_updates': 1}, {'step': 2, 'skipped_updates': 1, 'kl': 1.}, {'step': 3, 'skipped_updates': 2, 'kl': 0.}]
    assert [(name, passed) for name, *_, passed in first_update(replace(read_run(tmp_path/'run'), rows=late))] == [('kl', False)]


@pytest.mark.parametrize('config, passes', [({}, False), ({'bf16': True}, True), ({'matmul_precision': 'high'}, True), ({'matmul_precision': 'highest'}, False)])
def test_the_start_is_judged_by_the_tolerance_that_the_trainer_of_the_run_had(tmp_path, config, passes):
    row = next(simulated_run(1)) | {'ratio_max': 1.02, 'kl': 1e-4, 'clip_ratio/region_mean': 0.}
    with RunWriter(tmp_path/'run') as writer: writer.log(row)
    write_json(tmp_path/'run'/'config.json', config)
    room = TrainConfig(**config).for_size(SMALL).trainer.identity_tolerance
    assert (row['ratio_max'] - 1 <= room) == passes
    assert [passed for *_, passed in first_update(read_run(tmp_path/'run'))] == [passes, True, passes]
    assert ('failed' in page_of(tmp_path/'run').text) != passes


def test_a_batch_of_one_length_is_a_bar_among_empty_places():
    counts, edges = np.histogram([85., 85.], bin_edges(np.array([85., 85.])))
    assert counts.tolist() == [0, 0, 2, 0, 0] and edges[2:4].tolist() == [84.5, 85.5]


def test_numbers():
    assert number(-1e-9, '+z.3f') == '+0.000' and number(12345, ',.0f') == '12,345'
    assert [number(value) for value in (1, .12345, math.nan, None, math.inf, -math.inf, 'x', True)] == \
        ['1.000', '0.123', '-', '-', '∞', '-∞', 'x', 'True']


def test_each_row_is_judged_once(tmp_path, monkeypatch):
    seen, folder = [], write_run(tmp_path/'run', tables=())
    monkeypatch.setattr(module, 'lights', lambda row: seen.append(row['step']) or lights(row))
    report(folder)
    assert seen == list(range(1, STEPS + 1))


def test_a_title_is_escaped_once_in_its_link_and_above_its_part():
    link, body = module.section('Wins & losses', module.element('p', '<'))
    assert link == '<a href="#wins-losses">Wins &amp; losses</a>'
    assert body == '<section id="wins-losses"><h2>Wins &amp; losses</h2><p>&lt;</p></section>'
    assert module.section('Wins & losses', None) is None


# ---- settings and command

def test_changed_settings_come_with_their_defaults(folder):
    assert changed_settings(plain(CONFIG)) == {'data': 'my lines.txt', 'steps': STEPS, 'lr': 2e-3, 'kl_unbiased': False}
    rows = re.findall(r'<tr><td><b>(\w+)</b></td><td.*?>(.*?)</td><td.*?>(.*?)</td></tr>', (folder/'report.html').read_text())
    assert rows[-4:] == [('data', 'my lines.txt', 'none'), ('steps', '12', str(TrainConfig().steps)), ('lr', '0.002', '0.00015 for a small model, 1e-05 for a large one'), ('kl_unbiased', 'false', 'true')]
    assert changed_settings({'steps': TrainConfig().steps, 'of_another_version': 1}) == {'of_another_version': 1}
    assert default_words('of_another_version') == '-' and default_words('max_positions') == 'none'


@pytest.mark.parametrize('changes', [{}, {'steps': 3, 'lr': 1e-6}, {'kl_divergence_threshold': None}, {'data': "it's -here; $x"},
                                     {'data': '-x'}, {'use_gae': True, 'kl_unbiased': False}, {'entropy_coef': -.01, 'seed': 3}])
def test_the_command_line_starts_the_same_run(changes):
    import shlex
    config = replace(TrainConfig(), **changes)
    words = shlex.split(command_line(json.loads(json.dumps(plain(replace(config, output_dir='elsewhere'))))))
    flags = flags_of(TrainConfig)
    assert words[:2] == ['rookworld', 'train'] and TrainConfig(**read_settings(parser_of('train', '', flags), flags, words[2:])) == config


# ---- the page alone

def test_the_page_needs_nothing_but_itself(folder):
    page = Document(folder/'report.html')
    assert not {'script', 'link', 'iframe', 'object', 'embed', 'base', 'form', 'svg'} & set(page.tags)
    sources = page.values('img', 'src')
    assert len(sources) == len(PICTURES) and all(source.startswith('data:image/png;base64,') for source in sources)
    assert {name for _, name, _ in page.attributes if name in ('href', 'src', 'srcset', 'action', 'data', 'background')} == {'href', 'src'}
    places = [value for name in ('section', 'div', 'h2') for value in page.values(name, 'id')]
    assert page.values('a', 'href') and all(link[0] == '#' and link[1:] in places for link in page.values('a', 'href'))
    assert not re.search(r'url\(|@import|expression', page.style) and page.style.count('{') == page.style.count('}') > 10
    assert not re.search(r'https?:|//[a-z]', re.sub(r'data:image/png;base64,[\w+/=]+', '', (folder/'report.html').read_text()))
    policy = page.values('meta', 'content')[page.values('meta', 'http-equiv').index('Content-Security-Policy')]
    assert policy.startswith("default-src 'none'") and 'script-src' not in policy
    assert all(page.values('img', 'alt'))


def test_the_pictures_are_valid_and_the_same_in_both_places(folder):
    files = {path.stem: path.read_bytes() for path in (folder/'figures').iterdir()}
    assert set(files) == PICTURES
    for name, png in files.items():
        with Image.open(BytesIO(png)) as image:
            image.verify()
        with Image.open(BytesIO(png)) as image:
            assert image.format == 'PNG' and image.width > 900 and image.height > 80
            assert len(set(image.convert('L').resize((200, 60)).tobytes())) > 8, f'{name} is blank'
    inside = [base64.b64decode(source.partition(',')[2]) for source in Document(folder/'report.html').values('img', 'src')]
    assert sorted(inside) == sorted(files.values())


def test_the_page_is_small_and_the_same_every_time(folder):
    before = (folder/'report.html').read_bytes()
    assert len(before) < 1e6
    report(str(folder))
    assert (folder/'report.html').read_bytes() == before
    assert not list(folder.rglob('*.part'))


DRAWN = ('metric', 'compared metric')  # names that pictures show


def hostile_run(folder: Path, place: str) -> Path:
    "A run in which one place says something hostile."
    config, table = asdict(CONFIG), completions(1)
    row = next(simulated_run(1)) | ({HOSTILE: math.nan} if place == 'metric' else {})
    table[0] |= {place: HOSTILE} if place in ('prompt', 'completion') else {}
    table[0] |= {HOSTILE: .5} if place == 'reward part' else {'note': HOSTILE} if place == 'column' else {}
    config |= {place: HOSTILE} if place in ('model', 'data') else {HOSTILE: 1} if place == 'setting' else {}
    summary = {'stop_reason': HOSTILE if place == 'reason' else 'done', 'comparison': [dict(COMPARISON[0])]}
    summary['comparison'][0] |= {place.split()[-1]: HOSTILE} if place.startswith('compared') else {}
    with RunWriter(folder) as writer:
        writer.log(row)
        writer.table(1, table)
    write_json(folder/'config.json', config)
    write_json(folder/'summary.json', summary)
    return folder


@pytest.mark.parametrize('place', ['prompt', 'completion', 'reward part', 'column', 'model', 'data', 'setting', 'reason', 'metric',
                                   'compared metric', 'compared task'])
def test_hostile_text_stays_text(tmp_path, place):
    run = read_run(hostile_run(tmp_path/'run', place))
    (tmp_path/'page').write_text(module.page(run, module.draw(run) if place in DRAWN else {}), encoding='utf-8')
    page = Document(tmp_path/'page')
    assert HOSTILE in page.text
    assert 'script' not in page.tags and not [name for _, name, _ in page.attributes if name.startswith('on')]
    assert all(source.startswith('data:') for source in page.values('img', 'src')) and ('img' in page.tags) == (place in DRAWN)


def test_a_dollar_in_a_name_is_no_formula(tmp_path):
    with RunWriter(tmp_path/'run') as writer:
        writer.log(next(simulated_run(1)) | {'rewards/P_$\\frac$/mean': .5, '$\\nothing$': math.nan})
    report(tmp_path/'run')


def test_text_that_cannot_be_encoded_is_still_shown(tmp_path):
    with RunWriter(tmp_path/'run') as writer:
        writer.log(next(simulated_run(1)))
    (tmp_path/'run'/'config.json').write_text('{"model": "half \\ud800 \\u0000 character"}')
    assert 'character' in Document(report(tmp_path/'run')).text


# ---- runs that did not end well

def test_a_run_killed_before_its_first_step(tmp_path):
    RunWriter(tmp_path/'run').close()
    write_json(tmp_path/'run'/'config.json', {'model': 'nano', 'steps': 9})
    page = Document(report(tmp_path/'run'))
    assert '0 of 9' in page.text and 'no step was logged' in page.text and 'img' not in page.tags


def test_a_torn_last_line_is_left_out(tmp_path):
    folder = write_run(tmp_path/'run', summary=False, tables=())
    whole = (folder/'metrics.jsonl').read_bytes()
    (folder/'metrics.jsonl').write_bytes(whole[:-40])
    page = Document(report(folder))
    assert '11 of 12' in page.text and 'the log ends at step 11' in page.text
    assert {path.stem for path in (folder/'figures').iterdir()} == PICTURES - {'differences', 'distributions'}


@pytest.mark.parametrize('missing', ['config.json', 'summary.json', 'completions'])
def test_what_may_be_missing(tmp_path, missing):
    folder = write_run(tmp_path/'run')
    path = folder/missing
    if path.is_dir():
        for table in path.iterdir():
            table.unlink()
        path.rmdir()
    else:
        path.unlink()
    headings = re.findall('<h2>(.*?)</h2>', report(folder).read_text())
    gone = {'config.json': 'Settings', 'summary.json': 'Before and after', 'completions': 'What the model wrote'}[missing]
    every = ['Before and after', 'How it went', 'What the lights said', 'What the model wrote', 'The first update', 'Settings']
    assert headings == [heading for heading in every if heading != gone]


def test_a_single_step_and_rows_without_a_task(tmp_path):
    with RunWriter(tmp_path/'run') as writer:
        row = next(simulated_run(1))
        writer.log({name: value for name, value in row.items() if not name.startswith(('task_A', 'kl')) or name == 'kl_coef'} | {'loss': math.nan})
        writer.table(1, [row for row in completions(1, 1) if row['task'] == 'P'])
    page = Document(report(tmp_path/'run'))
    assert 'loss' in page.text and 'text-1-P-0' in page.text and 'A: environment' not in page.text


def test_a_loop_of_ones_own_has_its_report_with_nothing_but_a_writer(tmp_path):
    with RunWriter(tmp_path/'run') as writer:
        for step in (1, 2, 3):
            writer.log({'step': step, 'loss': .1, 'reward': step/10, 'reward_std': .2, 'task_P/fraction': 1., 'step_time': 1.})
            writer.table(step, [dict(prompt='write cat', completion='a cat', task='letters', reward=step/10, advantage=0.)])
    page = Document(report(tmp_path/'run'))
    assert '0.100 at first, 0.300 the highest, 0.300 at last' in page.text and 'Steps by their gravest light: 3 green' in page.text


def test_looks_at_held_out_positions_are_drawn_from_where_they_started(tmp_path):
    with RunWriter(tmp_path/'run') as writer:
        for row in simulated_run(6):
            looked = {'eval/A_state_exact': .5 + .1*row['step'], 'eval/P_reward': .4 + .01*row['step']} if row['step'] % 2 == 0 else {}
            writer.log(row | looked)
    write_json(tmp_path/'run'/'summary.json', {'stop_reason': 'done', 'steps': 6, 'comparison': [
        compared('P', 0., 'reward', .06, 2.), compared('P', 1., 'reward', -.2, -2.), compared('P', 0., 'top5_overlap', .1, 2.)]})
    run = read_run(tmp_path/'run')
    policy, env = plot_looks(run.metrics, run.changes).axes[:2]
    assert [axes.get_title('left') for axes in (policy, env)] == ['P: reward', 'A: state_exact']
    drawn = {axes.get_title('left'): [line.get_xydata() for line in axes.lines if len(line.get_xydata())] for axes in (policy, env)}
    np.testing.assert_allclose(drawn['P: reward'][0], [[2, .42], [4, .44], [6, .46]])
    assert [.4321]*2 in [line[:, 1].tolist() for line in drawn['P: reward']] and policy.get_ylim()[1] > .46 > .42 > policy.get_ylim()[0]
    assert all(line[:, 1].min() > .6 for line in drawn['A: state_exact'])            # nothing is known of its start
    assert 'looks' in module.draw(run)
    assert plot_looks(run.metrics.drop(columns=['eval/A_state_exact', 'eval/P_reward']), comparison({})) is None
    assert plot_looks(run.metrics[:1], comparison({})) is None
    assert plot_looks(run.metrics, comparison({})) is not None


def test_endings(tmp_path):
    rows = [{'step': 1.}, {'step': 2.}]
    run = lambda rows=rows, **files: module.RunData(tmp_path, rows, files.get('config', {'steps': 2}), files.get('summary', {}), {}, [], {})
    assert 'no evaluation followed' in ending(run())
    assert 'was killed' in ending(run(config={'steps': 3})) and 'was killed' in ending(run(config={}))
    assert 'no step was logged' in ending(run([], summary={'stop_reason': 'done'}))
    assert ending(run(summary={'stop_reason': 'diverged at step 2', 'steps': 2})) == 'diverged at step 2'
    assert 'was killed' in ending(run(config={'steps': 9}, summary={'stop_reason': 'all 1 steps are done', 'steps': 1}))
    assert 'was killed' in ending(run(config={'steps': 9}, summary={'stop_reason': 'all 9 steps are done', 'steps': 9}))    # and gone back
    assert ending(run(config={'steps': 9}, summary={'stop_reason': '', 'steps': 2})) == 'the loop was left after step 2'


def test_an_evaluation_that_the_run_has_left_behind_says_so(tmp_path):
    folder = write_run(tmp_path/'run', tables=())
    write_json(folder/'summary.json', {'stop_reason': 'all 8 steps are done', 'steps': 8, 'comparison': COMPARISON})
    assert 'Evaluated after step 8; the log ends at step 12' in page_of(folder).text


def test_what_an_earlier_run_left_in_the_folder_is_not_shown(tmp_path):
    folder = write_run(tmp_path/'run', tables=(1, 5, 9, 13, 40))
    assert STEPS == 12 and list(read_run(folder).tables) == [1, 5, 9]
    (folder/'metrics.jsonl').write_text('')
    assert list(read_run(folder).tables) == [1, 5, 9, 13, 40]


def test_a_run_that_train_has_not_made_has_no_command_of_train(tmp_path):
    folder = write_run(tmp_path/'run', {'lr': 1e-3, 'model': 'sorter'}, tables=())
    assert 'rookworld train' in page_of(folder).text
    (folder/'origin.json').unlink()
    text = page_of(folder).text
    assert 'rookworld train' not in text and 'sorter' in text and 'default' not in text.partition('Settings')[2]


def test_updates_that_were_left_out_are_counted(tmp_path):
    folder = write_run(tmp_path/'run', tables=())
    (folder/'skipped').mkdir()
    for step in (3, 4):
        (folder/'skipped'/f'step-{step:06d}.csv').write_text('')
    assert '2 updates were left out' in page_of(folder).text


# ---- what is no run folder

def test_no_folder_and_no_run_folder(tmp_path):
    for path, words in ((tmp_path/'nowhere', 'no such folder'), (tmp_path, 'no metrics.jsonl')):
        with pytest.raises(ReportError) as failed:
            report(path)
        assert str(path) in str(failed.value) and words in str(failed.value) and isinstance(failed.value, ValueError)
    (tmp_path/'metrics.jsonl').write_text('{"step": 1, "lr": 0.005, "P/loss": 1.2}\n')    # of `rookworld pretrain`
    with pytest.raises(ReportError, match='is not the run folder of a training with GRPO'): report(tmp_path)
    (tmp_path/'file').write_text('')
    with pytest.raises(ReportError, match='a file; name the run folder'):
        report(tmp_path/'file')


@pytest.mark.parametrize('name, content, words', [
    ('config.json', '{"model": ', 'cannot be read as JSON'), ('config.json', '[1]', 'JSON object, not list'), ('summary.json', '\0', 'cannot be read as JSON'),
    ('completions/step-000005.csv', '', 'is not a table'), ('completions/step-000005.csv', 'prompt,task\na,b\n', 'no completion, reward, advantage'),
    ('completions/step-000005.csv', 'prompt,completion,task,reward,advantage\na,b,P,much,0\n', 'is not a table'),
    ('metrics.jsonl', '{"step": 1, "kl": "low"}\n', 'no number'),
    ('config.json', '{"kl_control": "adaptive", "kl_target": "low"}', "kl_target is 'low', not a number"),
    ('summary.json', '{"stop_reason": "done", "steps": "7"}', "steps is '7', not a number"),
    ('summary.json', '{"comparison": [{"task": "P", "metric": "reward", "before": "low"}]}', 'no table of numbers'),
    ('config.json', '{"temperature": -1}', 'temperature=-1 must be finite')])
def test_a_damaged_file_is_named_and_nothing_is_written(tmp_path, name, content, words):
    folder = write_run(tmp_path/'run')
    (folder/name).write_text(content)
    with pytest.raises(ReportError) as failed:
        report(folder)
    assert str(folder/name) in str(failed.value) and words in str(failed.value)
    assert not (folder/'report.html').exists() and not (folder/'figures').exists()


def test_a_log_damaged_in_the_middle_is_an_error(tmp_path):
    folder = write_run(tmp_path/'run')
    (folder/'metrics.jsonl').write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(MetricError, match='line 2'):
        report(folder)


def test_a_reward_function_of_its_own_is_named(tmp_path):
    folder = write_run(tmp_path/'run', tables=())
    for name, words in (('default_reward', 'gives the same numbers'), ('best_move', 'train(config, reward_fn=best_move) repeats it')):
        (folder/'origin.json').write_text(json.dumps({'reward_fn': name}))
        said, default = ' '.join(page_of(folder).words), name == 'default_reward'
        assert words in said and ('gives the same numbers' in said) == default
        assert said.count('what best_move pays') == (0 if default else 4) and said.count('what the scorer pays') == (4 if default else 0)


def test_what_was_done_by_hand_is_listed(tmp_path):
    folder = write_run(tmp_path/'run', tables=())
    words = ' '.join(page_of(folder).words)
    assert 'By hand' not in words and 'gives the same numbers' in words
    write_events(folder, [{'step': 3, 'time': START, 'event': 'kl_coef', 'before': .02, 'value': .1}, {'step': 4, 'time': START, 'event': HOSTILE}])
    page = page_of(folder)
    text = ' '.join(page.words)
    assert 'steered by hand, and the command repeats it without that' in text and 'gives the same numbers' not in text
    assert 'By hand' in text and '0.02 → 0.1' in text and '2025-06-15 15:06 UTC' in text and 'alert(1)' in text
    assert 'script' not in page.tags


def test_a_reward_of_ones_own_is_in_view():
    table = pd.DataFrame(simulated_run(8)).assign(**{'task_P/reward': np.linspace(2, 9, 8)})
    reward, *_ = plot_task(table, 'P').axes
    assert reward.get_ylim()[1] > 9 and reward.get_ylim()[0] < 2
    assert plot_task(table, 'X') is plot_task(table.assign(**{'task_X/reward': math.nan}), 'X') is None


def test_a_part_fills_its_panel_and_one_that_hardly_moves_looks_like_it():
    table = pd.DataFrame(simulated_run(8)).assign(**{'task_P/reward': np.linspace(.4, .8, 8), 'rewards/P_best/mean': np.linspace(.5, .51, 8)})
    limits = {axes.get_title('left'): axes.get_ylim() for axes in plot_task(table, 'P').axes if axes.get_visible()}
    assert limits['P: reward'] == pytest.approx((.36, .84)) and limits['P: best'] == pytest.approx((.29, .53))


@pytest.mark.parametrize('ends, judged', [({'clip_range': .1}, False), ({'clip_range': .2, 'clip_range_high': .13}, False), ({'clip_range': .2}, True)])
def test_what_rounding_may_clip_is_no_failed_start(tmp_path, ends, judged):
    config = {'bf16': True, 'temperature': .5} | ends
    row = next(simulated_run(1)) | {'ratio_max': 1.12, 'kl': 1e-4, 'clip_ratio/region_mean': .001}
    with RunWriter(tmp_path/'run') as writer: writer.log(row)
    write_json(tmp_path/'run'/'config.json', config)
    found = {name: passed for name, *_, passed in first_update(read_run(tmp_path/'run'))}
    assert ('clip_ratio/region_mean' in found) == judged and found['ratio_max'] and found['kl']


def test_another_task_is_shown(tmp_path):
    with RunWriter(tmp_path) as writer:
        for step in (1, 2):
            writer.log({'step': step, 'loss': .1, 'reward': .5, 'reward_std': .2, 'task_P/fraction': 0., 'step_time': 1., 'task_my letters/reward': .1*step})
            writer.table(step, [row | {'task': 'my letters'} for row in completions(step) if row['task'] == 'P'])
    text = report(tmp_path).read_text()
    assert '<h3>my letters</h3>' in text and 'text-2-P-0' in text and 'The reward of my letters' in text
    assert {path.stem for path in (tmp_path/'figures').iterdir()} >= {'task_my-letters', 'distributions'}


def test_the_default_of_what_is_compared_is_said():
    assert default_words('credit') == 'part, or answer where a setting needs whole answers' and default_words('lr').endswith('for a large one')
