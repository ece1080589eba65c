"""The dashboard without a browser: what it says, when it draws, what Stop does, and that model text stays text."""
import asyncio
import html
import math
import queue
import re

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip('ipywidgets', reason='ipywidgets is not installed')
from rookworld_nb import dashboard  # noqa: E402
from rookworld_nb.dashboard import (  # noqa: E402
    Dashboard, Progress, Throttle, columns_of, duration, hear_clicks, histogram_svg, reward_bins, samples_html)
from rookworld_nb.monitor import LIGHT_COLOURS, MUTED, simulated_run  # noqa: E402

ROWS = [dict(prompt='P: fen', completion='M: e2e4', task='P', format=1., best=.5, raw=.7, reward=.8, advantage=.4, tokens=9),
        dict(prompt='A: fen+e2e4+e2e4+', completion='', task='A', format=0., fen=.2, raw=.1, reward=-.3, advantage=-.4, tokens=2)]


class Clock:
    """Time that passes when it is told to."""
    def __init__(self) -> None: self.now = 100.
    def __call__(self) -> float: return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pictures(monkeypatch, clock):
    """Moments at which the dashboard drew; each picture takes 0.02 s of the clock."""
    drawn = []

    def draw(dash):
        drawn.append(clock.now)
        clock.now += .02
    monkeypatch.setattr(Dashboard, '_draw', draw)
    return drawn


@pytest.fixture
def undrawn(monkeypatch):
    """No pictures, which cost half a second a dashboard."""
    monkeypatch.setattr(Dashboard, '_draw', lambda dash: None)


# ---- when to draw

@pytest.mark.parametrize('cost, pause', [(.01, .5), (.05, .5), (.2, 2.), (3., 30.)])
def test_throttle_waits_ten_times_the_cost_but_half_a_second_at_least(clock, cost, pause):
    def costly(): clock.now += cost
    throttle = Throttle(.5, clock=clock)
    assert throttle.run(costly)
    end = clock.now
    clock.now = end + pause - 1e-6
    assert not throttle.run(costly) and throttle.run(costly, force=True)
    clock.now += pause + 1e-6
    assert throttle.run(costly)


def test_an_action_that_fails_is_not_hidden():
    def broken(): raise RuntimeError('no fonts')
    with pytest.raises(RuntimeError, match='no fonts'): Throttle(.5).run(broken)


def test_pictures_come_no_oftener_than_allowed(pictures, clock):
    dash = Dashboard(total_steps=1000, clock=clock)
    for row in simulated_run(300):
        clock.now += .01
        dash.update(row)
    gaps = [later - earlier for earlier, later in zip(pictures[1:], pictures[2:])]
    assert 4 <= len(pictures) <= 8 and min(gaps) >= .5 + .02 - 1e-9


def test_first_row_is_drawn_at_once_and_the_last_in_any_case(pictures, clock):
    dash = Dashboard(total_steps=3, clock=clock)
    assert len(pictures) == 1  # empty charts
    run = list(simulated_run(3))
    dash.update(run[0])
    assert len(pictures) == 2
    dash.update(run[1])
    assert len(pictures) == 2  # too soon
    dash.update(run[2])
    assert len(pictures) == 3  # done


def test_words_are_refreshed_ten_times_a_second(pictures, clock):
    dash = Dashboard(total_steps=1000, clock=clock)
    said = []
    dash.status.observe(said.append, 'value')
    for row in simulated_run(200):
        clock.now += .005
        dash.update(row)
    assert 8 <= len(said) <= 14


# ---- Stop

def test_stop_is_heard_shown_and_final(clock):
    dash = Dashboard(total_steps=60, clock=clock)
    for row in simulated_run(12):
        clock.now += .9
        dash.update(row)
    assert not dash.stopped and not dash.stop.disabled
    clock.now += .1
    dash.stop.click()
    assert dash.stopped and dash.stop.disabled and dash.stop.description == 'Stopped'
    assert re.fullmatch(r'Stopped after step 12 of 60 · reward 0\.\d{3} \(best 0\.\d{3}\) · 0:11', dash.status.value)
    assert dash.bar.value == 12 and dash.bar.style.bar_color == MUTED
    dash.update(next(simulated_run(60)) | {'step': 13})
    assert dash.status.value.startswith('Stopped after step 13')


def test_stop_draws_because_no_update_follows(pictures, clock):
    dash = Dashboard(total_steps=60, clock=clock)
    for row in simulated_run(3): dash.update(row)
    drawn = len(pictures)
    dash.stop.click()
    assert len(pictures) == drawn + 1


def test_stop_before_the_first_step():
    dash = Dashboard(total_steps=60)
    dash.stop.click()
    assert dash.stopped and dash.status.value == 'Stopped without a step'


def test_loop_with_a_pause_ends_within_two_steps():
    async def train(dash):
        for row in simulated_run(40):
            dash.update(row)
            if row['step'] == 7: asyncio.get_running_loop().call_later(0, dash.stop.click)
            await asyncio.sleep(.001)
            if dash.stopped: break
    dash = Dashboard(total_steps=40)
    asyncio.run(train(dash))
    assert 7 <= dash.progress.step <= 9


def test_run_to_the_end_is_done_and_not_stopped():
    dash = Dashboard(total_steps=5)
    for row in simulated_run(5): dash.update(row)
    assert dash.status.value.startswith('Done: 5 steps · reward') and not dash.stopped
    assert dash.stop.disabled and dash.stop.description == 'Done' and dash.bar.value == 5
    assert dash.bar.style.bar_color == LIGHT_COLOURS['green']


# ---- what it says

def test_a_run_that_ends_by_itself_is_drawn_to_its_last_row(pictures, clock):
    dash = Dashboard(total_steps=50)
    dash.update({'step': 1, 'reward': .5})
    clock.now += .01
    dash.update({'step': 2, 'reward': .1})    # too soon for a picture
    drawn = len(pictures)
    dash.end('diverged at step 2: <b>KL</b>')
    assert len(pictures) == drawn + 1 and dash.stop.disabled and dash.pause.disabled and dash.stop.description == 'Ended'
    assert dash.status.value.startswith('Ended after step 2 of 50') and 'left' not in dash.status.value
    assert 'diverged at step 2: &lt;b&gt;KL' in dash.news.value and not dash.stopped


def test_the_end_of_a_run_that_was_stopped_or_is_done_stays_what_it_was(undrawn):
    stopped, done = Dashboard(total_steps=5), Dashboard(total_steps=1)
    for dash in (stopped, done): dash.update({'step': 1, 'reward': .5})
    stopped.stop.click()
    for dash in (stopped, done): dash.end('because')
    assert stopped.status.value.startswith('Stopped after step 1') and done.status.value.startswith('Done: 1 steps')


def test_a_run_that_fails_in_its_last_step_is_not_done(undrawn):
    dash = Dashboard(total_steps=2)
    for step in (1, 2): dash.update({'step': step, 'reward': .5})
    dash.end('diverged at step 2', failed=True)
    assert dash.status.value.startswith('Failed after step 2 of 2') and dash.stop.description == 'Failed'
    assert dash.bar.style.bar_color == MUTED and dash.news.value == 'diverged at step 2'


@pytest.mark.parametrize('steps', [2, 5])
def test_a_stopped_run_that_cannot_be_saved_has_failed(undrawn, steps):
    dash = Dashboard(total_steps=steps)
    for step in (1, 2): dash.update({'step': step, 'reward': .5})
    dash.stop.click()
    dash.end('CheckpointError: disk full', failed=True)
    assert dash.status.value.startswith(f'Failed after step 2 of {steps}') and dash.stop.description == 'Failed' and dash.bar.style.bar_color == MUTED


def test_waiting_then_pace_and_time_left(clock):
    progress = Progress(100, clock)
    assert progress.text() == 'Waiting for the first step' and progress.step == 0
    for row in simulated_run(30):
        clock.now += 10. if row['step'] <= 5 else 2.  # a slow start leaves the average after twenty steps
        progress.add(row)
    assert progress.text().endswith('2.00 s a step · 2:20 left')


def test_first_step_uses_its_own_time(clock):
    progress = Progress(11, clock)
    progress.add({'step': 1, 'reward': .5, 'step_time': 6.})
    assert progress.text() == 'Step 1 of 11 · reward 0.500 (best 0.500) · 6.00 s a step · 1:00 left'
    bare = Progress(11, clock)
    bare.add({'reward': .5})
    assert bare.text().endswith('nan s a step · ? left')


def test_a_resumed_run_counts_from_its_step(clock):
    dash = Dashboard(total_steps=100, clock=clock)
    for step in (51, 52, 53):
        clock.now += 1.
        dash.update({'step': step, 'reward': .1})
    assert 'Step 53 of 100' in dash.progress.text() and dash.progress.text().endswith('1.00 s a step · 0:47 left')


def test_light_names_its_reason_and_escapes_it():
    dash = Dashboard(total_steps=1)  # every step is the last, so every row is shown
    dash.update({'step': 1, 'reward': .5, 'kl': math.nan})
    assert LIGHT_COLOURS['red'] in dash.light.value and '<b>red</b>' in dash.light.value and 'kl is nan' in dash.light.value
    dash.update({'step': 2, '<script>': math.inf})
    assert '&lt;script&gt; is inf' in dash.light.value and '<script>' not in dash.light.value
    with pytest.raises((TypeError, ValueError)): dash.update({'step': 3, 'reward': 'high'})


@settings(max_examples=60)
@given(st.floats(0, 1e7))
def test_durations_read_back(seconds):
    parts = [int(part) for part in duration(seconds).split(':')]
    assert all(part < 60 for part in parts[1:])
    assert abs(sum(part*60**i for i, part in enumerate(reversed(parts))) - seconds) <= .5


@settings(max_examples=60)
@given(st.lists(st.dictionaries(st.sampled_from(['reward', 'kl', 'eval/x']), st.floats(-1, 1)), max_size=8))
def test_columns_are_the_rows(rows):
    progress = Progress(100)
    with pytest.raises((TypeError, ValueError)): progress.add({'step': 1, 'reward': .5, 'kl': 'high'})
    assert columns_of(progress.rows) == {'step': []}    # a row that is refused leaves nothing
    progress.add({'step': 1, 'reward': None})    # as a log holds what was not measured
    assert math.isnan(progress.rows[-1]['reward'])
    progress = Progress(100)
    for row in rows: progress.add(row)
    columns = columns_of(progress.rows)
    assert {len(values) for values in columns.values()} == {len(rows)}
    for i, row in enumerate(rows):
        for name, values in columns.items():
            expected = i + 1 if name == 'step' else row.get(name, math.nan)
            assert values[i] == expected or (math.isnan(values[i]) and math.isnan(expected))


# ---- completions

@settings(max_examples=60)
@given(st.text(st.characters(exclude_categories=['Cs', 'Cc']), max_size=60))
def test_model_text_is_never_markup(text):
    page = samples_html([dict(prompt=text, completion=text, task=text, reward=.5, advantage=0.)])
    cells = re.findall(r'<td class="rw-(?:task|prompt|completion)">(.*?)</td>', page)
    assert [html.unescape(cell) for cell in cells] == [text]*3 and not any('<' in cell or '>' in cell for cell in cells)


def test_table_columns_are_ordered_and_gaps_stay_empty():
    page = samples_html(pd.DataFrame(ROWS))
    names = re.findall(r'<th(?: class=rw-number)?>(.*?)</th>', page)
    assert names == ['task', 'reward', 'advantage', 'prompt', 'completion', 'format', 'best', 'fen']    # what is off the page may be cut
    first, second = re.findall('<tr>(<td.*?)</tr>', page)
    assert first.count('<td></td>') == 1 and '>P<' in first and '>0.50<' in first
    assert second.count('<td></td>') == 1 and '>-0.30<' in second
    assert samples_html(ROWS) == samples_html([row | {'legal_fraction': .8, 'raw': .7} for row in ROWS]) == page    # which widen it
    assert '<td class="rw-engine">a &amp; b</td>' in samples_html([row | {'engine': 'a & b'} for row in ROWS])    # no number
    assert samples_html([]) == histogram_svg([]) == ''


def test_completions_stay_until_new_ones_come_and_are_worth_the_time(clock):
    dash = Dashboard(total_steps=9, shown=1, clock=clock)
    run = list(simulated_run(4))
    dash.update(run[0], ROWS)
    shown = dash.samples.value
    clock.now += 1
    dash.update(run[1])
    assert dash.samples.value == shown and shown.count('<tr>') == 2  # head and one row
    dash.update(run[2], ROWS[1:])
    assert dash.samples.value == shown  # too soon
    clock.now += 1
    dash.update(run[3])
    assert dash.samples.value != shown


def test_histogram_counts_every_reward_once():
    rewards = pd.Series([-.3, -.26, 0, .05, .5, .99, 1, 1, math.nan])
    counts = reward_bins(rewards)
    assert sum(counts) == 8 and (counts[0], counts[6], counts[7], counts[25]) == (2, 1, 1, 3)
    page = histogram_svg(pd.DataFrame({'task': ['P']*6 + ['<A>']*3, 'reward': rewards}))
    assert 'P: 6' in page and '&lt;A&gt;: 2' in page and '<A>' not in page
    heights = [float(height) for height in re.findall(r'<rect [^>]*height="([0-9.]+)"', page)]
    assert sum(heights) == pytest.approx(150/3*8, abs=.5) and len(heights) == 6  # three in the fullest bin
    assert histogram_svg([dict(task='P', reward=math.nan)]).count('<rect') == 0


def test_completions_are_drawn_once(clock):
    dash = Dashboard(total_steps=9, clock=clock)
    dash.update({'step': 1, 'reward': .5}, [ROWS[0] | {'prompt': 'P: 4k3/8/8/8/8/8/4P3/4K3 w - - 0 1'}])
    assert '<svg' in dash.pictures.value
    dash.pictures.value = ''
    clock.now += 60
    dash.update({'step': 2, 'reward': .5})
    assert dash.pictures.value == ''


# ---- wishes

def test_buttons_ask_in_order_and_do_nothing_themselves(undrawn):
    dash = Dashboard(total_steps=50)
    for button in (dash.checkpoint, dash.pause, dash.checkpoint, dash.pause, dash.stop): button.click()
    assert [name for name, value in dash.wishes] == ['checkpoint', 'pause', 'checkpoint', 'resume', 'stop']
    assert dash.stopped and not dash.paused


def moved(lever, clicks):
    """The lever after some clicks on its + (or on its −, where they are negative)."""
    for _ in range(abs(clicks)): (lever.more if clicks > 0 else lever.less).click()
    return lever


@pytest.mark.parametrize('moves, left', [([4], [('kl_coef', .05)]), ([4, 3], [('kl_coef', .1)]), ([-3], [('kl_coef', .01)]), ([4, -4], []),
                                         ([99], [('kl_coef', 1.)]), ([99, -1], [('kl_coef', .79)]), ([-99], [('kl_coef', 1e-4)])])
def test_a_lever_leaves_its_last_wish_or_none(moves, left, undrawn):
    dash = Dashboard(total_steps=50, levers={'kl_coef': .02, 'lr_scale': 1.})
    for clicks in moves: moved(dash.levers['kl_coef'], clicks)
    assert list(dash.wishes) == left


def test_a_lever_moves_by_equal_ratios_from_wherever_the_run_is(undrawn):
    lever, tens = Dashboard(total_steps=50, levers={'lr_scale': 1.}).levers['lr_scale'], []
    for _ in range(10):
        lever.follow(moved(lever, 1).wish)    # fulfilled between two clicks
        tens.append(lever.value)
    assert tens == [1.3, 1.6, 2, 2.5, 3.2, 4, 5, 6.3, 7.9, 10] and moved(lever, 1).wish is None    # the end of its range
    for value in (.0281, .0283, .0316, .03162, .099, .1001):
        lever.follow(value)
        assert moved(lever, 1).wish > value and moved(lever, -1).wish is None and moved(lever, -1).wish < value


def test_levers_follow_the_run_but_not_against_a_wish(undrawn):
    dash = Dashboard(total_steps=50, levers={'kl_coef': .02})
    lever = dash.levers['kl_coef']
    dash.update({'step': 1, 'reward': .5, 'kl_coef': .03})
    assert lever.value == .03 and lever.said.value == '0.03' and not dash.wishes
    moved(lever, 8)
    dash.update({'step': 2, 'reward': .5, 'kl_coef': .045})
    assert lever.said.value == '0.03 → 0.2' and list(dash.wishes) == [('kl_coef', .2)]


@pytest.mark.parametrize('value, inward, wish', [(0., 1, 1.3e-4), (5., -1, .79)])
def test_a_value_off_the_scale_is_said_and_not_wished_away(value, inward, wish, undrawn):
    dash = Dashboard(total_steps=50, levers={'kl_coef': value})
    lever = moved(dash.levers['kl_coef'], -inward)
    assert lever.said.value == f'{value:g}' and not dash.wishes
    assert moved(lever, inward).wish == wish


def test_without_levers_there_is_none_to_see_and_the_end_disables_what_there_is(undrawn):
    assert Dashboard(total_steps=50).moves.children == ()
    dash = Dashboard(total_steps=1, levers={'lr_scale': 1.})
    dash.update(next(simulated_run(1)))
    assert all(each.disabled for each in (dash.pause, dash.checkpoint, dash.stop, *dash.levers['lr_scale'].buttons))


def test_listen_hands_wishes_on_and_shows_the_answers(undrawn):
    dash, heard = Dashboard(total_steps=50, levers={'kl_coef': .02}), []
    moved(dash.levers['kl_coef'], 4)
    dash.checkpoint.click()
    assert asyncio.run(dash.listen(lambda *wish: heard.append(wish) or f'<done> {wish[0]}'))
    assert heard == [('kl_coef', .05), ('checkpoint', None)] and not dash.wishes
    assert dash.news.value == '&lt;done&gt; kl_coef<br>&lt;done&gt; checkpoint'
    assert dash.levers['kl_coef'].said.value == '0.05'
    dash.stop.click()
    assert asyncio.run(dash.listen(lambda *wish: '')) is False


def test_an_unfulfillable_wish_is_not_swallowed(undrawn):
    def refuse(name, value): raise ValueError(f'no {name}')
    dash = Dashboard(total_steps=50)
    dash.checkpoint.click()
    with pytest.raises(ValueError, match='no checkpoint'): asyncio.run(dash.listen(refuse))


def test_a_pause_holds_the_loop_hears_wishes_and_is_left_out_of_the_pace(clock, undrawn):
    async def visit(dash, seen, held):
        dash.pause.click()
        await asyncio.sleep(.1)
        seen.append((dash.status.value, dash.pause.description, held.done()))
        dash.checkpoint.click()
        await asyncio.sleep(.1)
        seen.append(list(heard))
        clock.now += 3600.
        dash.pause.click()
        assert await held
    dash, heard, seen = Dashboard(total_steps=60, clock=clock), [], []
    for row in simulated_run(12):
        clock.now += 2.
        dash.update(row)

    async def both():
        held = asyncio.ensure_future(dash.listen(lambda *wish: heard.append(wish[0]) or ''))
        await visit(dash, seen, held)
    asyncio.run(both())
    assert seen[0][0].startswith('Paused after step 12 of 60') and seen[0][1:] == ('Resume', False) and seen[1] == ['pause', 'checkpoint']
    assert heard == ['pause', 'checkpoint', 'resume'] and dash.pause.description == 'Pause'
    clock.now += 4.
    dash.update({'step': 13, 'reward': .5})
    assert dash.progress.text().endswith('4.00 s a step · 3:08 left')


def test_stop_ends_a_pause(undrawn):
    async def both(dash):
        dash.pause.click()
        asyncio.get_running_loop().call_later(.1, dash.stop.click)
        return await dash.listen(lambda *wish: '')
    dash = Dashboard(total_steps=60)
    assert asyncio.run(both(dash)) is False and dash.status.value.startswith('Stopped without a step')


# ---- how it shows itself

def test_figure_holds_every_step_even_between_two_pictures():
    dash = Dashboard(total_steps=50, kl_target=.9)
    for row in simulated_run(20): dash.update(row)
    figure = dash.figure
    assert figure.axes[0].get_lines()[0].get_xdata().tolist() == list(range(1, 21))
    assert [.9, .9] in [list(line.get_ydata()) for line in figure.axes[3].lines]
    assert figure._repr_png_().startswith(b'\x89PNG')


def test_shown_as_widgets_or_as_one_line_of_text(monkeypatch, undrawn):
    shown, dash, view = [], Dashboard(total_steps=50), 'application/vnd.jupyter.widget-view+json'
    monkeypatch.setattr(dashboard, 'display', lambda bundle, raw: shown.append(bundle))
    dash._ipython_display_()
    assert shown[0]['text/plain'] == 'Dashboard: Waiting for the first step'
    assert shown[0][view] == dash.box._repr_mimebundle_()[view]    # the same for all versions of the widgets


def test_every_part_has_its_class(undrawn):
    dash = Dashboard(total_steps=50)
    for name in ('status', 'stop', 'pause', 'checkpoint', 'bar', 'light', 'moves', 'news', 'chart', 'curves', 'pictures', 'samples'):
        assert f'rw-{name}' in getattr(dash, name)._dom_classes
    assert 'rw-dashboard' in dash.box._dom_classes


@pytest.mark.slow
def test_in_a_kernel_the_picture_stays(tmp_path):
    nbformat = pytest.importorskip('nbformat', reason='nbformat is not installed')
    nbclient = pytest.importorskip('nbclient', reason='nbclient is not installed')
    code = """
import asyncio
from IPython.display import display
from rookworld_nb.dashboard import Dashboard
from rookworld_nb.monitor import simulated_run
dash = Dashboard(total_steps=1000)
display(dash)
for metrics in simulated_run(1000):
    dash.update(metrics)
    if metrics['step'] == 5: asyncio.get_running_loop().call_later(.01, dash.stop.click)
    await asyncio.sleep(.02)
    if dash.stopped: break
print('ended at', dash.progress.step)
dash.figure
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(notebook, timeout=300, resources={'metadata': {'path': str(tmp_path)}}).execute()
    outputs = notebook.cells[0].outputs
    widgets, text, picture = outputs[0].data, next(o.text for o in outputs if o.output_type == 'stream'), outputs[-1].data
    assert 'application/vnd.jupyter.widget-view+json' in widgets and 'Dashboard: ' in widgets['text/plain']
    assert int(re.search(r'ended at (\d+)', text)[1]) <= 7 and 'image/png' in picture


# ---- older kernels and widgets

class OldKernel:
    """What `hear_clicks` needs of ipykernel 6: a queue of (number, dispatch, args), and a session that reads the wire."""
    def __init__(self):
        self.msg_queue, self.heard, self.session = queue.Queue(), [], self
        self.shell_handlers = {'comm_msg': lambda stream, idents, message: self.heard.append(message['content'])}

    def dispatch_shell(self, parts): pass
    def feed_identities(self, parts, copy): return [], parts
    def deserialize(self, parts, content, copy): return parts


def test_an_older_kernel_hears_clicks_and_keeps_its_cells_in_order():
    kernel = OldKernel()
    waiting = [(1, kernel.dispatch_shell, ({'msg_type': 'execute_request'},)), (2, kernel.dispatch_shell, ({'msg_type': 'comm_msg', 'content': 'stop'},)),
               (3, print, ('a call of its own',)), (4, kernel.dispatch_shell, ({'msg_type': 'comm_msg', 'content': 'pause'},)),
               (5, kernel.dispatch_shell, ({'msg_type': 'execute_request'},))]
    for item in waiting: kernel.msg_queue.put(item)
    hear_clicks(kernel)
    assert kernel.heard == ['stop', 'pause'] and [kernel.msg_queue.get_nowait() for _ in range(3)] == [waiting[i] for i in (0, 2, 4)]
    hear_clicks(kernel)
    hear_clicks(None)
    hear_clicks(object())    # ipykernel 7 has no such queue
    assert kernel.heard == ['stop', 'pause']
