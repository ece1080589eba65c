"""Registry, lights, console lines and pictures."""
import math
import re
import subprocess
import sys
from dataclasses import replace

import matplotlib
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from rookworld_nb import monitor
from rookworld_nb.monitor import (COLOURS, METRICS, PANELS, Curves, MetricError, console_line, health_report, light_of, lights, metric_for, smooth,
                                  overall, plot_curves, range_text, registry, simulated_run, view_limits)


def rows(steps: int = 5, **options) -> list[dict[str, float]]:
    """Rows of a rehearsed run."""
    return list(simulated_run(steps, **options))


# ---- registry

def test_every_metric_says_what_it_is():
    assert all(metric.formula and metric.unit and metric.source for metric in METRICS.values())


def test_the_rehearsal_uses_registered_names_only():
    assert {name for row in rows() for name in row if metric_for(name) is None} == set()


def test_a_judged_metric_says_what_is_wrong_on_each_side_that_can_be_crossed():
    for metric in METRICS.values():
        if metric.healthy is None: continue
        low, high = metric.healthy
        _, above = (metric.watch or metric.healthy)
        assert metric.if_high or high == above or math.isinf(high), metric.name
        assert metric.if_low or low in (0, -math.inf), metric.name    # nothing can be below
        assert metric.if_low or metric.if_high, metric.name


def test_a_name_defined_twice_is_refused():
    with pytest.raises(MetricError, match='defined twice: kl'):
        registry([METRICS['kl'], METRICS['loss']], [METRICS['kl']])


@pytest.mark.parametrize('healthy, watch', [((0, 1), (.5, 2)), ((1, 0), None), ((0, 1), (-1, .5)), ((0, math.nan), None)])
def test_ranges_that_cannot_be_are_refused(healthy, watch):
    with pytest.raises(MetricError, match='kl'):
        replace(METRICS['kl'], healthy=healthy, watch=watch)


def test_look_up_prefers_the_exact_name_then_the_special_pattern():
    assert metric_for('kl') is METRICS['kl']
    assert metric_for('task_sum/reward') is METRICS['task_<task>/reward'] and metric_for('task_P/reward') is METRICS['task_P/reward']
    assert metric_for('rewards/A_format/mean') is METRICS['rewards/<task>_format/mean']
    assert metric_for('rewards/A_fen/mean') is METRICS['rewards/<component>/mean']
    assert metric_for('rewards/A_format/std') is METRICS['rewards/<component>/std']
    assert metric_for('eval/mate/recall') is METRICS['eval/<name>']
    assert metric_for('klx') is metric_for('my/kl') is metric_for('') is None


@pytest.mark.parametrize('name, text', [('kl', '≤ 0.15'), ('entropy', '0.1 to 3'), ('reward', '0 to 1'), ('reward_std', '≥ 0.01'),
                                        ('rewards/<task>_format/mean', '≥ 0.9'), ('skipped_recently', '0'), ('skipped_updates', ''), ('loss', '')])
def test_ranges_in_words(name, text):
    assert range_text(METRICS[name]) == text


# ---- lights

@pytest.mark.parametrize('name', [metric.name for metric in METRICS.values() if metric.healthy])
def test_light_follows_the_ranges_of_each_metric(name):
    metric = METRICS[name]
    (low, high), (watch_low, watch_high) = metric.healthy, metric.watch or metric.healthy
    finite = [(value, colour) for value, colour in [
        (low, 'green'), (high, 'green'), (watch_low, 'yellow' if watch_low < low else 'green'),
        (watch_high, 'yellow' if watch_high > high else 'green'), (watch_low - 1e-3, 'red'), (watch_high + 1e-3, 'red')]
        if math.isfinite(value)]
    concrete = re.sub(r'<\w+>', 'P', name)
    assert [light_of(concrete, value).colour for value, _ in finite] == [colour for _, colour in finite]


def test_rounding_at_an_edge_is_no_alarm():
    assert light_of('kl', -1e-8).colour == 'green'
    assert light_of('rewards/P_format/mean', 1 + 1e-7).colour == 'green'


@pytest.mark.parametrize('name', ['loss', 'grad_norm', 'kl', 'reward', 'learning_rate', 'something_new'])
@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_red(name, value):
    light = light_of(name, value)
    assert light.colour == 'red' and light.metric == name and str(value) in light.reason


def test_optional_metrics_may_be_absent_but_not_infinite():
    for name in ('task_A/reward', 'perf/mfu', 'value_loss', 'explained_variance'): assert light_of(name, math.nan) is None
    assert light_of('perf/gen_tok_s', math.inf).colour == 'red'


def test_reasons_are_plain_words_with_the_value_and_the_edge():
    assert light_of('kl', .62).reason.startswith('kl 0.62 is above 0.15: the policy runs away')
    assert light_of('entropy', .01).reason.startswith('entropy 0.01 is below 0.1: the policy hardly varies')
    assert light_of('kl', .05).reason == 'kl 0.05 is in its range (≤ 0.15)'


def test_a_value_just_over_its_edge_shows_the_difference():
    assert light_of('ratio_max', 10.002).reason.startswith('ratio_max 10.002 is above 10: ')
    assert light_of('entropy', .09999).reason.startswith('entropy 0.09999 is below 0.1: ')


def test_old_mishaps_leave_the_light_green():
    row = rows(30)[-1] | {'skipped_updates': 5, 'skipped_recently': 0, 'recoveries': 1, 'recoveries_recently': 0}
    assert overall(row).colour == 'green'
    assert [overall(row | {'skipped_recently': n}).colour for n in (1, 4)] == ['yellow', 'red'] and overall(row | {'recoveries_recently': 1}).colour == 'yellow'


def test_a_rehearsed_run_keeps_the_identities():
    for collapse_at in (None, 5):
        run = rows(40, collapse_at=collapse_at)
        assert run[0]['kl'] == 0 and all(row['ratio_max'] == 1 and row['clip_ratio/region_mean'] == 0 for row in run[::2])
        assert all(row['ratio_max'] > 1.2 for row in run[1::2])


def test_lights_are_sorted_by_gravity_then_by_the_registry():
    row = {'frac_reward_zero_std': 1., 'completions/clipped_ratio': .2, 'kl': .9, 'entropy': 1., 'learning_rate': 1e-4}
    assert [(light.metric, light.colour) for light in lights(row)] == [
        ('kl', 'red'), ('frac_reward_zero_std', 'red'), ('completions/clipped_ratio', 'yellow'), ('entropy', 'green')]
    worst = overall(row)
    assert (worst.colour, worst.metric, worst.value) == ('red', 'kl', .9) and worst.reason.endswith('(and 1 more)')


def test_a_row_without_judged_metrics_is_not_called_healthy():
    assert overall({}).colour == overall({'learning_rate': 1.}).colour == 'yellow'


def test_a_good_run_is_green_and_a_collapsing_one_ends_red():
    assert {overall(row).colour for seed in range(5) for row in rows(60, seed=seed)} == {'green'}
    colours = [overall(row).colour for row in rows(60, collapse_at=20)]
    assert set(colours[:20]) == {'green'} and set(colours[-10:]) == {'red'}
    assert [COLOURS.index(c) for c in dict.fromkeys(colours)] == [0, 1, 2]


# ---- console

ROW = {'step': 10, 'loss': 2.34561, 'reward': .2341, 'task_P/fraction': .8, 'step_time': 1.234, 'reward_std': .1, 'kl': .01234,
       'kl_95pct': .0456, 'clip_ratio/region_mean': .0412, 'entropy': 1.2345, 'ratio_max': 1.876}


def test_console_line_is_exact():
    assert console_line(ROW, prompts=10) == 'Step   10 | Loss: 2.3456 | Reward: 0.234 (best: 0.234) | P/E: 8/2 | Time: 1.23s'
    alone = 'Step   10 | Loss: 2.3456 | Reward: 0.234 (best: 0.234) | Time: 1.23s'    # how many there are, or of which task, is not known
    assert console_line(ROW) == console_line({name: value for name, value in ROW.items() if 'task' not in name}, prompts=10) == alone
    late = dict(ROW, step=12345, loss=-.01, reward=-.3, step_time=12.)
    assert console_line(late, best_reward=.5, prompts=16) == \
        'Step 12345 | Loss: -0.0100 | Reward: -0.300 (best: 0.500) | P/E: 13/3 | Time: 12.00s'


def test_health_report_is_exact_and_carries_its_light():
    assert health_report(ROW) == ('Health Report Step 10: KL=0.0123 (95p=0.0456), Reward=0.234±0.100, Clip=4.1%, Entropy=1.234, '
                                  'MaxRatio=1.88 | green: all 7 judged metrics are in their ranges')
    assert ' | red: kl 0.9 is above 0.15: ' in health_report(dict(ROW, kl=.9))


def test_health_report_shows_the_mean_reward_of_each_task_over_its_steps():
    row = dict(ROW, **{'task_P/reward': .5, 'task_A/reward': .9, 'task_P/reward_max': 1.})
    assert 'MaxRatio=1.88 | mean reward of 1 step: P=0.500, A=0.900 | green: ' in health_report(row)
    before = [{'task_P/reward': .25}, {'reward': .1, 'task_P/reward': .45, 'task_A/reward': None}, {'task_A/reward': .8, 'task_write/reward': .1}]
    assert ' | mean reward of 4 steps: P=0.400, write=0.100, A=0.850 | ' in health_report(row, before)
    assert 'mean reward' not in health_report(ROW, [{'reward': .3}])
    assert 'a-b=0.300' in health_report(dict(ROW, **{'task_a-b/reward': .3}))


def test_a_step_without_a_token_has_no_ratio_and_no_entropy():
    row = {name: value for name, value in ROW.items() if not name.startswith(('kl', 'clip_ratio', 'entropy', 'ratio'))}
    assert 'Clip=n/a, Entropy=n/a, MaxRatio=n/a' in health_report(row)


def test_a_run_without_reference_has_no_kl():
    row = {name: value for name, value in ROW.items() if not name.startswith('kl')}
    assert 'KL=n/a (95p=n/a), Reward=0.234' in health_report(row)


def test_a_number_that_was_none_in_its_file_is_written_as_nan():
    assert 'KL=nan (95p=0.0456)' in health_report(ROW | {'kl': None}) and 'Reward=nan' in health_report(ROW | {'reward': None})
    assert 'Loss: nan' in console_line(ROW | {'loss': None})


@pytest.mark.parametrize('write, name', [(console_line, 'loss'), (console_line, 'step_time'), (health_report, 'reward_std')])
def test_a_missing_number_is_named(write, name):
    with pytest.raises(MetricError, match=f'no {name} in the row; it holds step'):
        write({key: value for key, value in ROW.items() if key != name})


def test_numbers_that_are_none_are_printed_and_not_hidden():
    assert 'Loss: nan' in console_line(dict(ROW, loss=math.nan))


# ---- pictures

def png_size(data: bytes) -> tuple[int, int]:
    """Width and height from a PNG's header."""
    assert data.startswith(b'\x89PNG')
    return int.from_bytes(data[16:20], 'big'), int.from_bytes(data[20:24], 'big')


def test_curves_of_a_run():
    figure = plot_curves(pd.DataFrame(rows(30)), kl_target=.05)
    assert plot_curves(pd.DataFrame(rows(30)).set_index('step'), kl_target=.05)._repr_png_() == figure._repr_png_()
    assert isinstance(figure, Figure) and len(figure.axes) == len(PANELS) == 9
    width, height = png_size(figure._repr_png_())
    assert (width, height) == tuple(round(100*inch) for inch in figure.get_size_inches())
    titles = [(ax.get_title('left'), ax.get_title('right')) for ax in figure.axes]
    assert titles[3] == ('KL', 'healthy ≤ 0.15 nats/token') and titles[0] == ('Reward', 'healthy 0 to 1 ')


@pytest.mark.parametrize('table', [
    {'step': []}, {'step': [1.]}, {'step': [1.], 'reward': [math.nan]}, {'step': [1., 2.], 'kl': [math.inf, .1]},
    {'step': [1., 2.], 'reward': [.5, .5], 'entropy': [0., 0.]}, pd.DataFrame(rows(1))], ids=range(6))
def test_curves_of_poor_data(table):
    assert png_size(plot_curves(table, kl_target=.05)._repr_png_())
    assert png_size(Curves(kl_target=.05).update(table).figure._repr_png_())    # all panels, as a dashboard has them


def test_a_finished_picture_leaves_out_what_was_not_measured():
    run = pd.DataFrame(rows(5)).drop(columns=['perf/memory_gb', 'rewards/P_legal_fraction/mean', 'kl', 'kl_95pct'])
    titles = [axes.get_title('left') for axes in plot_curves(run).axes if axes.get_visible()]
    assert titles == [panel.title for panel in PANELS if panel.title not in ('Legal moves', 'KL', 'Memory')]


def test_curves_are_updated_in_place():
    curves = Curves(kl_target=.05).update(pd.DataFrame(rows(5)))
    artists = [len(chart.axes.get_children()) for chart in curves.charts]
    before = curves.figure._repr_png_()
    table = pd.DataFrame(rows(50, collapse_at=10))
    for _ in range(3): curves.update(table)
    assert [len(chart.axes.get_children()) for chart in curves.charts] == artists
    assert curves.charts[0].raw[0].get_xydata().tolist() == table[['step', 'reward']].to_numpy().tolist()
    assert curves.figure._repr_png_() != before


def test_last_point_wears_the_colour_of_its_light():
    for at, colour in ((None, 'green'), (10, 'red')):
        chart = plot_last(rows(40, collapse_at=at))
        assert chart.last.get_color() == monitor.LIGHT_COLOURS[colour]


def test_the_most_so_far_is_drawn_as_it_is_and_a_reward_as_a_trend():
    run = pd.DataFrame(rows(40)).assign(**{'perf/memory_gb': [1.]*39 + [1.5]})
    charts = {chart.panel.title: chart for chart in Curves().update(run).charts}
    assert charts['Memory'].trend[0].get_ydata()[-1] == 1.5 and charts['Reward'].trend[0].get_ydata()[-1] != run['reward'].iloc[-1]


def test_a_line_of_one_point_is_a_dot():
    curves = Curves()
    def dots(run): return [line.get_marker() for chart in curves.update(pd.DataFrame(run)).charts for line in chart.trend]
    assert {*dots(rows(1))} == {'o'} and not {*dots(rows(2))} & {'o'}    # the dot goes with the second point


def test_a_line_without_values_has_no_name():
    def names(run): return [label.get_text() for label in Curves().update(pd.DataFrame(run)).charts[0].labels if label.get_visible()]
    assert names(rows(5)) == ['mean', 'environment', 'middle half']
    assert names([{name: value for name, value in row.items() if 'task_A' not in name} for row in rows(5)]) == ['mean', 'middle half']


def test_a_gap_at_the_end_of_a_curve_has_no_light():
    run = rows(40)
    assert plot_last(run).last.get_xydata().shape == (1, 2)
    assert plot_last(run + [{name: value for name, value in run[-1].items() if not name.startswith('kl')} | {'step': 41}]).last.get_xydata().shape == (0, 2)


def plot_last(run):
    """The KL chart of a run."""
    return Curves().update(pd.DataFrame(run)).charts[3]


@settings(max_examples=60)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=20))
def test_view_holds_all_finite_values(values):
    low, high = view_limits([np.array(values, float)], (0, .1))
    assert low < high and all(low <= value <= high for value in [0, .1, *filter(math.isfinite, values)])


def test_pictures_leave_global_state_alone():
    before = dict(matplotlib.rcParams)
    picture = plot_curves(pd.DataFrame(rows(20)))._repr_png_()
    assert dict(matplotlib.rcParams) == before and png_size(picture) == (990, 625)
    code = 'import rookworld_nb.monitor as m, sys; m.plot_curves({"step": []}); print("matplotlib.pyplot" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=120).stdout == 'False\n'


def test_a_changed_range_is_in_force_at_once(monkeypatch):
    assert light_of('kl', .3).colour == 'yellow'
    monkeypatch.setitem(METRICS, 'kl', replace(METRICS['kl'], healthy=(0, .5), watch=(-.01, 1)))
    assert light_of('kl', .3).colour == 'green'


def test_the_target_of_the_kl_is_drawn_in_its_panel_and_in_view():
    curves = Curves(kl_target=.9).update(pd.DataFrame(rows(5)))
    levels = [[list(line.get_ydata()) for line in chart.axes.lines] for chart in curves.charts]
    assert [[.9, .9] in found for found in levels] == [panel.judged == 'kl' for panel in PANELS]
    assert curves.charts[3].axes.get_ylim()[1] > .9 > Curves().update(pd.DataFrame(rows(5))).charts[3].axes.get_ylim()[1]


def test_the_trend_is_a_mean_that_forgets_and_leaves_gaps_out():
    values, seen = np.random.default_rng(0).normal(size=100), []
    values[50] = math.nan
    for value, trend in zip(values, smooth(values)):
        if not math.isnan(value): seen.append(value)
        weights = (9/11)**np.arange(len(seen))[::-1]    # a span of 100/10 steps
        assert trend == pytest.approx(weights @ seen/weights.sum())
    assert smooth(values[:19]).tolist() == pytest.approx(values[:19].tolist())
