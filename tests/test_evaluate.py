"""Evaluation: metrics by hand, intervals that cover, pairs that match, chance that is exact."""
import math
import os
import random
import subprocess
import sys

import chess
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from rookworld_nb.evaluate import (BOUNDS, CLASSES, HELDOUT_COLUMNS, KEYS, TASK_METRICS, EvaluationError,
                                   bootstrap_interval, by_prompt, chance_line, compare, env_metrics, evaluate, mean_interval,
                                   metrics_table, move_class, paired_difference, policy_metrics, recall_table,
                                   student_t, summarise, wilson_interval)
from rookworld_nb.model import GPT, GPTConfig
from rookworld_nb.positions import OUTCOMES, Sample, shipped
from rookworld_nb.rewards import RewardConfig, RewardScorer
from rookworld_nb.rules import env_step, legal_moves
from rookworld_nb.tasks import format_env, format_policy, split_line

FEN = 'r1bqkbnr/pppp1ppp/2n5/4p3/4P3/5N2/PPPP1PPP/RNBQKB1R w KQkq - 2 3'
RUY = Sample(*split_line(format_policy(FEN, ('f1b5', 'd2d4', 'f1c4', 'b1c3', 'f1d3'), (.45, .28, .52, .28, .05))))


def env_sample(fen: str, uci: str) -> Sample:
    """An A: sample with its right answer."""
    return Sample(*split_line(format_env(fen, uci, None, *env_step(fen, uci))))


FEW = Sample('P: k7/8/8/8/8/8/8/K6r w - - 0 1', ' M: a1b2 a1a2 E: -5.0 -5.1 B: a1b2')  # all the legal moves there are

CASES = {
    'ordinary': (FEN, 'f1b5'), 'illegal': (FEN, 'f1b6'),
    'mate': ('6k1/5ppp/8/8/8/8/8/R6K w - - 0 1', 'a1a8'), 'draw': ('7k/8/6K1/8/8/8/8/5Q2 w - - 0 1', 'f1f7'),
    'castling': ('4k3/8/8/8/8/8/8/4K2R w K - 0 1', 'e1g1'), 'en_passant': ('4k3/8/8/3pP3/8/8/8/4K3 w - d6 0 2', 'e5d6'),
    'promotion': ('8/P6k/8/8/8/8/7K/8 w - - 0 1', 'a7a8q')}
CLASS_SAMPLES = {name: env_sample(*case) for name, case in CASES.items()}


def random_samples(count: int, seed: int = 0) -> list[Sample]:
    """P: samples of random positions with invented evaluations."""
    rng, samples = random.Random(seed), []
    while len(samples) < count:
        board = chess.Board()
        for _ in range(rng.randrange(80)):
            if board.is_game_over():
                break
            board.push(rng.choice(list(board.legal_moves)))
        legal = sorted(legal_moves(board.fen()))
        if len(legal) > 1:
            moves = rng.sample(legal, min(5, len(legal)))
            evals = [round(rng.gauss(0, 1), 1) for _ in moves]
            samples.append(Sample(*split_line(format_policy(board.fen(), moves, evals))))
    return samples


def policy_text(moves: str, evals: str, best: str) -> str:
    """A completion."""
    return f' M: {moves} E: {evals} B: {best}'


# ---- a completion

OPEN = {'mate_recall', 'draw_recall', 'illegal_recall', 'false_alarms'}    # left open where the move is of another kind


@pytest.mark.parametrize('sample', [RUY, FEW, *CLASS_SAMPLES.values(), *random_samples(20)])
def test_a_perfect_answer_is_perfect(sample):
    row = metrics_table([sample], [sample.completion]).iloc[0]
    zero = ('eval_error', 'win_probability_lost', 'false_alarms')
    measured = {name for name in TASK_METRICS[sample.task] if not math.isnan(row[name])}
    for name in measured:
        assert row[name] == (0 if name in zero else 1), name
    own = {f"{row['truth']}_recall"} if row['truth'] in OUTCOMES else {'false_alarms'}
    assert set(TASK_METRICS[sample.task]) - measured == (set() if sample.task == 'P' else OPEN - own)
    assert row[[name for name in HELDOUT_COLUMNS if name not in (*TASK_METRICS[sample.task], *KEYS, 'completion')]].isna().all()


@settings(max_examples=60)
@given(text=st.text(max_size=60) | st.lists(st.sampled_from(['M:', 'E:', 'B:', 'A:', 'P:', ' ', '+', 'f1b5', 'a9', '0.1', '1', FEN]))
       .map(' '.join), sample=st.sampled_from([RUY, *CLASS_SAMPLES.values()]))
def test_any_text_can_be_measured(text, sample):
    measured = (policy_metrics if sample.task == 'P' else env_metrics)(text, sample)
    assert set(measured) - {'truth', 'predicted'} | {'reward'} == set(TASK_METRICS[sample.task])
    for name, value in measured.items():
        if TASK_METRICS[sample.task].get(name, ('',))[0] == 'share':
            assert 0 <= value <= 1 or math.isnan(value) and name in OPEN, name


def test_policy_metrics_by_hand():
    found = policy_metrics(policy_text('f1b5 a2a3 f1b6 d2d4 f1b5', '0.35 0.0 0.1 0.38 9.0', 'f1b5'), RUY)
    assert found['right_count'] == found['parsed'] == found['best_legal'] == found['best_in_top5'] == 1
    assert found['legal_fraction'] == .8 and found['distinct_legal'] == .6 and found['top5_overlap'] == .4
    assert found['eval_error'] == pytest.approx(.1)  # the first mention of a move counts
    def won(pawns): return 1/(1 + math.exp(-.368208*pawns))
    assert found['win_probability_lost'] == pytest.approx(won(.52) - won(.45))
    assert found['best_move_accuracy'] == 0 and found['best_within_10cp'] == found['best_within_50cp'] == 1
    assert policy_metrics('B: d2d4', RUY)['best_within_10cp'] == 0 and policy_metrics('B: d2d4', RUY)['best_within_50cp'] == 1
    tenths = Sample(*split_line(format_policy(FEN, ('f1b5', 'd2d4', 'f1c4', 'b1c3', 'f1d3'), (1.1, 1., .9, .9, .6))))
    assert policy_metrics('B: d2d4', tenths)['best_within_10cp'] == policy_metrics('B: f1d3', tenths)['best_within_50cp'] == 1    # 1.1 - 1. is above .1, and 1.1 - .6 above .5
    near = Sample(*split_line(format_policy(FEN, ('f1b5', 'd2d4', 'f1c4'), (1.1, .98, .58))))
    assert policy_metrics('B: d2d4', near)['best_within_10cp'] == policy_metrics('B: f1c4', near)['best_within_50cp'] == 0    # .12 and .52 behind
    unlisted = policy_metrics('B: a2a3', RUY)
    assert unlisted['best_legal'] == 1 and unlisted['best_in_top5'] == 0 and math.isnan(unlisted['win_probability_lost'])


def test_listing_everything_is_no_overlap():
    everything = ' '.join(sorted(legal_moves(FEN)))
    found = policy_metrics(f'M: {everything} a1a8 E:{" 0.0"*5} B: f1c4', RUY)
    assert found['top5_overlap'] < 1 == found['distinct_legal'] and found['right_count'] == 0 and found['legal_fraction'] == 27/28


def test_evaluations_are_clipped_on_both_sides():
    mate = Sample(RUY.prompt, ' M: f1b5 d2d4 E: 999.97 -999.97 B: f1b5')
    assert policy_metrics('M: f1b5 d2d4 E: 12.0 -8.0 B: f1b5', mate)['eval_error'] == pytest.approx(1)


def test_ties_all_count_and_the_label_is_kept_apart():
    tied = Sample(RUY.prompt, ' M: f1b5 d2d4 a2a3 E: 0.3 0.3 -1.0 B: a2a3')
    scores = {move: policy_metrics(f'B: {move}', tied) for move in ('f1b5', 'd2d4', 'a2a3')}
    assert [scores[move]['best_move_accuracy'] for move in scores] == [1, 1, 0]
    assert [scores[move]['best_move_accuracy_published_label'] for move in scores] == [0, 0, 1]


@pytest.mark.parametrize('name', CLASSES)
def test_classes(name):
    sample = CLASS_SAMPLES[name]
    assert env_metrics(sample.completion, sample)['truth'] == name
    predicted = env_metrics(sample.completion, sample)['predicted']
    assert predicted == (name if name in ('mate', 'draw', 'illegal') else 'ordinary')
    assert env_metrics('?', sample)['predicted'] == 'unreadable'


def test_a_promotion_that_mates_is_a_mate():
    fen = '7k/P7/6K1/8/8/8/8/8 w - - 0 1'
    assert move_class(fen, 'a7a8q', env_step(fen, 'a7a8q')) == 'mate'


def test_env_metrics_part_by_part():
    sample, new = CLASS_SAMPLES['ordinary'], env_step(*CASES['ordinary']).new_fen
    wrong_clock = env_metrics(f'{new[:-3]}7 3+0.001+0+0', sample)
    assert wrong_clock['board_exact'] == 1 and wrong_clock['state_exact'] == wrong_clock['all_correct'] == 0
    assert .9 < wrong_clock['fen_similarity'] < 1
    assert [env_metrics(f'{new}+{reward}+0+0', sample)['reward_correct'] for reward in (.005, .02)] == [1, 0]
    false_alarm = env_metrics(f'{new}+1.0+1+0', sample)
    assert false_alarm['state_exact'] == 1 and false_alarm['reward_correct'] == false_alarm['flags_correct'] == 0
    assert false_alarm['predicted'] == 'mate'
    behind = env_metrics(f'{sample.completion}+7', sample)
    assert (behind['parsed'], behind['state_exact'], behind['all_correct']) == (0, 1, 0)


# ---- tables

def test_rows_follow_the_samples():
    samples = [RUY, CLASS_SAMPLES['mate'], RUY]
    texts = [RUY.completion, 'x', CLASS_SAMPLES['mate'].completion, 'x', 'x', 'x']
    table = metrics_table(samples, texts, .7)
    assert list(table['task']) == list('PPAAPP') and list(table['prompt_number']) == [0, 0, 1, 1, 2, 2] and list(table['sample']) == [0, 1]*3
    assert table['reward'].tolist() == pytest.approx([1, -.3, 1, -.3, -.3, -.3]) and table['temperature'].eq(.7).all()
    assert tuple(table.columns) == HELDOUT_COLUMNS and list(table['completion']) == texts


def test_rewards_are_measured_without_curriculum_and_leave_the_scorer_alone():
    scorer = RewardScorer(RewardConfig(reward_warmup_steps=50, normalize_rewards=True, reward_shaping='continuous'))
    table = metrics_table([RUY], ['M: a1a8 a1a7 E: 0.0 0.0 B: a1a8'], scorer=scorer)
    assert table['reward'][0] == pytest.approx(-.3 + 1.3*2/8.5) and scorer.step == 0


def test_bad_requests_are_named():
    with pytest.raises(EvaluationError, match='3 texts for 2 samples'):
        metrics_table([RUY, RUY], ['x']*3)
    with pytest.raises(EvaluationError, match='no samples'):
        evaluate(None, None, [])
    with pytest.raises(EvaluationError, match='0 texts for 1 samples'):
        metrics_table([RUY], [])
    with pytest.raises(EvaluationError, match='nonsense'):
        by_prompt(metrics_table([RUY], ['x']), 'nonsense')


def test_samples_of_a_prompt_are_averaged_before_prompts_are_counted():
    table = metrics_table([RUY]*3, [RUY.completion, 'x']*2 + ['x', 'x'])
    summary = summarise(table).loc['P', 0.]
    assert summary.loc['best_move_accuracy', 'mean'] == pytest.approx(1/3) and (summary['n'].drop(['eval_error', 'win_probability_lost']) == 3).all()
    assert summary.loc['eval_error', 'n'] == 2


def test_recall_counts_prompts_and_not_their_samples():
    mate, right = CLASS_SAMPLES['mate'], CLASS_SAMPLES['mate'].completion
    report = recall_table(metrics_table([mate]*2, [right]*8 + [right, 'x']*4))
    assert report.loc['mate', 'n'] == 2 and report.loc['mate', 'recall'] == pytest.approx(.75)
    assert report.loc['mate', ['low', 'high']].tolist() == pytest.approx(wilson_interval(1.5, 2))
    for half in (right.replace('+1.0+1', '+1.0+0'), right.replace('+1.0+1', '+0.001+1')):    # of reward and flags one alone is right
        assert recall_table(metrics_table([mate], [half])).loc['mate', 'recall'] == 0
    with pytest.raises(EvaluationError, match='one temperature, not 2'):
        recall_table(pd.concat([metrics_table([mate], [right], temperature) for temperature in (0., .7)]))


def test_no_interval_of_few_answers_claims_certainty():
    samples = [Sample(RUY.prompt[:-1] + str(i), RUY.completion) for i in range(1, 10)]
    for text, mean in ((RUY.completion, 1), ('x', 0)):
        row = summarise(metrics_table(samples, [text]*9)).loc['P', 0.].loc['parsed']
        low, high = wilson_interval(9*mean, 9)
        assert row['mean'] == mean and (row['low'], row['high']) == (low, high) and high - low > .29


def test_an_error_in_pawns_is_no_share():
    rows = summarise(metrics_table([Sample(RUY.prompt[:-1] + str(i), RUY.completion) for i in range(1, 10)], [RUY.completion]*9)).loc['P', 0.]
    assert rows.loc['eval_error', 'mean'] == 0 and rows.loc['eval_error', ['low', 'high']].isna().all() and rows.loc['parsed', 'low'] < .8


def test_recall_exposes_the_majority_answer():
    samples = [CLASS_SAMPLES['ordinary']]*18 + [CLASS_SAMPLES['mate'], CLASS_SAMPLES['castling']]
    texts = [f'{env_step(*CASES["ordinary"]).new_fen}+0.001+0+0']*20
    texts[3] = texts[3].replace('+0.001+0', '+1.0+1')
    report = recall_table(metrics_table(samples, texts))
    assert report.loc['ordinary', 'recall'] == pytest.approx(17/18) and report.loc['mate', 'recall'] == 0
    assert report.loc['ordinary', 'false_alarms'] == pytest.approx(1/18) and math.isnan(report.loc['mate', 'false_alarms'])
    assert report.loc['castling', 'recall'] == 1 and report.loc['castling', 'state_exact'] == 0
    assert report['n'].to_dict() == {'ordinary': 18, 'mate': 1, 'castling': 1}
    summary = summarise(metrics_table(samples, texts)).loc['A', 0.]    # the same, as metrics among the others
    assert summary.loc['mate_recall', ['mean', 'n']].tolist() == [0, 1] and 'draw_recall' not in summary.index
    assert summary.loc['false_alarms', ['mean', 'n']].tolist() == pytest.approx([1/19, 19])


def test_samples_of_another_task_cannot_be_measured(monkeypatch):
    own = Sample('sum 3 4', '7', task='sum')
    monkeypatch.setattr('rookworld_nb.evaluate.completions', lambda *args: pytest.fail('sampled before it was refused'))
    for function in (lambda: metrics_table([RUY, own], ['', '']), lambda: evaluate(None, None, [RUY, own])):
        with pytest.raises(EvaluationError, match='samples of task sum: only P and A can be measured'): function()


# ---- chance

def test_chance_line_agrees_with_a_random_player():
    samples, rng = random_samples(120), random.Random(1)
    texts = []
    for sample in samples:
        legal = sorted(legal_moves(sample.fen))
        for _ in range(8):
            moves = rng.sample(legal, min(5, len(legal)))
            texts.append(policy_text(' '.join(moves), ' '.join('0.0' for _ in moves), rng.choice(legal)))
    table, chance = metrics_table(samples, texts), chance_line(samples)['P']
    each = pd.DataFrame([chance_line([sample])['P'] for sample in samples])
    lawful = {'right_count', 'legal_fraction', 'distinct_legal', 'best_legal'}
    assert len(chance) == 10 and (chance[[*lawful]] == 1).all()
    for metric, expected in chance.items():
        values = by_prompt(table, metric)
        exact = each[metric]
        gaps = values.to_numpy() - exact.to_numpy()
        assert (gaps == 0).all() if metric in lawful else abs(gaps.mean()) < 4*gaps.std()/math.sqrt(len(gaps)), metric
        assert exact.mean() == pytest.approx(expected)


def test_chance_where_few_moves_are_legal():
    chance = chance_line([FEW])['P']
    assert chance['best_move_accuracy'] == .5 and chance['best_in_top5'] == chance['top5_overlap'] == 1
    assert chance['best_within_10cp'] == 1 and chance_line([RUY])['P', 'best_within_10cp'] == 2/27


def test_chance_of_the_majority_answer():
    chance = chance_line([CLASS_SAMPLES['ordinary']]*3 + [CLASS_SAMPLES['mate']])
    assert chance['A', 'reward_correct'] == chance['A', 'flags_correct'] == .75


# ---- intervals and differences

def test_bootstrap_interval_covers_and_is_seeded():
    rng, covered = np.random.default_rng(0), 0
    for i in range(200):
        low, high = bootstrap_interval(rng.normal(.5, .2, size=60), resamples=300, seed=i)
        covered += low <= .5 <= high
    assert .88 <= covered/200 <= .99
    values = rng.normal(size=50)
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)
    half = np.diff(bootstrap_interval(values, 4000))[0]/2
    assert half == pytest.approx(1.96*values.std()/math.sqrt(50), rel=.1)


@pytest.mark.parametrize(('n', 'least'), [(3, .84), (5, .88), (20, .89)])
def test_the_interval_of_few_values_covers_as_that_of_many(n, least):
    rng = np.random.default_rng(1)
    for draw, mean in ((lambda: rng.normal(size=n), 0), (lambda: rng.geometric(.05, size=n).astype(float), 20)):
        found = [mean_interval(draw(), False, 200) for _ in range(300)]
        assert least <= sum(each['low'] <= mean <= each['high'] for each in found)/300    # the bootstrap alone: .72, .81 and .91


def test_figures_do_not_depend_on_the_order_of_a_set():
    code = """
import re
from rookworld_nb.evaluate import policy_metrics
from rookworld_nb.positions import by_task, shipped
samples = by_task(shipped('heldout'))['P'][:200]
told = [policy_metrics(re.sub(r'-?\\d+\\.\\d+', lambda m: f'{float(m.group())/3:.2f}', s.completion), s)['eval_error'].hex() for s in samples]"""
    here, seed = {}, '1' if os.environ.get('PYTHONHASHSEED') == '0' else '0'
    exec(code, here)
    there = subprocess.run([sys.executable, '-c', f'{code}\nprint(told)'], env={**os.environ, 'PYTHONHASHSEED': seed}, capture_output=True, text=True, check=True).stdout
    assert there.count('0x') > 150 and there == f'{here["told"]}\n'


def test_student_t():
    table = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 11: 2.228, 31: 2.042, 1001: 1.962}    # of any book
    assert all(student_t(n) == pytest.approx(value, rel=.008 if n == 4 else .003) for n, value in table.items())


def test_wilson_interval():
    assert wilson_interval(0, 78) == (0, pytest.approx(.04694, abs=1e-4))
    assert wilson_interval(5, 10) == (pytest.approx(.2366, abs=1e-4), pytest.approx(.7634, abs=1e-4))
    assert wilson_interval(0, 0) == (0, 1) and wilson_interval(10, 10)[1] == wilson_interval(5, 5)[1] == 1    # of 5, rounding would make a little more


def scored(values: list[list[float]], temperature: float = 1.) -> pd.DataFrame:
    """A table with given rewards, one inner list a prompt."""
    rows = [('P', i, j, temperature, value) for i, group in enumerate(values) for j, value in enumerate(group)]
    return pd.DataFrame(rows, columns=['task', 'prompt_number', 'sample', 'temperature', 'reward']).reindex(columns=HELDOUT_COLUMNS)


def test_paired_difference_by_hand():
    change = paired_difference(scored([[0, 0], [.5, .7], [1, 1]]), scored([[.1, .3], [.8, .6], [1, .8]]), 'reward')
    gaps = np.array([.2, .1, -.1])
    assert change.mean == pytest.approx(gaps.mean()) and change.n == 3
    assert change.standard_error == pytest.approx(gaps.std(ddof=1)/math.sqrt(3)) and change.z == pytest.approx(change.mean/change.standard_error)


def test_pairing_uses_the_prompt_not_the_row():
    before, after = scored([[0.], [1.], [.5]]), scored([[.1], [1.1], [.6]])
    assert paired_difference(before, after.sample(frac=1, random_state=0), 'reward').mean == pytest.approx(.1)
    noisy = paired_difference(before, after, 'reward')
    assert 0 < noisy.standard_error < 1e-9 and math.isnan(noisy.z)    # .1 three times but for rounding: nothing is measured
    assert math.isnan(mean_interval(np.array([.3, .1 + .2, .3]), shares=False)['low'])


@pytest.mark.parametrize('prompts, samples, share', [(31, 2, .95), (38, 2, .05), (100, 2, .97), (300, 4, .2)])
def test_the_interval_of_a_share_covers(prompts, samples, share):
    rng, covered = np.random.default_rng(0), 0
    for _ in range(200):
        found = mean_interval((rng.random((prompts, samples)) < share).mean(1), resamples=200)
        covered += found['low'] <= share <= found['high']
    assert covered >= 182    # the bootstrap alone: 170 to 185 of the first three


def test_one_success_more_makes_no_interval_smaller():
    none, half = (mean_interval(values) for values in (np.zeros(20), np.eye(20)[0]/2))
    assert half['high'] > none['high'] > .1 and half['low'] > none['low'] == 0
    mirror = mean_interval(1 - np.eye(20)[0]/2)
    assert (1 - mirror['high'], 1 - mirror['low']) == pytest.approx((half['low'], half['high']))
    for successes in (-1, 4, math.nan):
        with pytest.raises(EvaluationError, match=f'{successes} successes in 3 trials'): wilson_interval(successes, 3)


def test_each_prompt_counts_once():
    table = pd.concat([scored([[0.], [1.]], .7), scored([[0.], [1.]], 0.)])
    with pytest.raises(EvaluationError, match='needs one temperature of 0.7, 0'): paired_difference(table, table, 'reward')
    assert paired_difference(table, table, 'reward', temperature=0.).n == 2
    with pytest.raises(EvaluationError, match='0 prompts before and 2 after'): compare(scored([[0.], [1.]], .7), table)
    with pytest.raises(EvaluationError, match='0 prompts after|and 0 after'): compare(table, scored([[0.], [1.]], .7))
    with pytest.raises(EvaluationError, match="not the text 'M: e2e4'"): metrics_table(shipped('heldout')[:2], 'M: e2e4')


def test_pairs_must_match():
    with pytest.raises(EvaluationError, match='2 prompts before and 1 after'):
        paired_difference(scored([[0.], [1.]]), scored([[0.]]), 'reward')
    with pytest.raises(EvaluationError, match='same prompts'):
        paired_difference(scored([[0.]], .7), scored([[0.]], 1.), 'reward')
    with pytest.raises(EvaluationError):
        paired_difference(scored([[0.]]), scored([[0.]]), 'reward', task='A')


def test_differences_without_information():
    for after, mean in ((.5, 0), (.7, .2)):    # no spread: nothing is measured
        found = paired_difference(scored([[.5]]*4), scored([[after]]*4), 'reward')
        assert (found.mean, found.standard_error) == (pytest.approx(mean), pytest.approx(0)) and math.isnan(found.z)
    lonely = paired_difference(scored([[.5]]), scored([[.7]]), 'reward')
    assert lonely.mean == pytest.approx(.2) and math.isnan(lonely.standard_error) and lonely.n == 1
    missing = paired_difference(scored([[.5]]), scored([[math.nan]]), 'reward')
    assert math.isnan(missing.mean) and missing.n == 0


def test_before_and_after_are_means_over_the_prompts_of_the_difference():
    unlisted = policy_text('a2a3', '0.0', 'a2a3')    # no evaluation to compare
    before, after = metrics_table([RUY]*3, [RUY.completion, unlisted, unlisted]), metrics_table([RUY]*3, [RUY.completion.replace('0.45', '2.45'), RUY.completion, unlisted])
    row = compare(before, after).loc['P', 0., 'eval_error']
    assert row['n'] == 1 and row['before'] == 0 and row['difference'] == pytest.approx(row['after'])
    table = compare(before, after)
    pd.testing.assert_series_equal(table['after'] - table['before'], table['difference'], check_names=False)


def test_before_after_table():
    samples = [RUY, RUY, CLASS_SAMPLES['mate'], CLASS_SAMPLES['ordinary']]
    right, wrong = [s.completion for s in samples], ['x']*4
    before = pd.concat([metrics_table(samples, wrong, t) for t in (.7, 0.)])
    after = pd.concat([metrics_table(samples, right, .7), metrics_table(samples, wrong, 0.)])
    table = compare(before, after, chance_line(samples))
    rows = table.to_dict('index')
    assert rows['P', .7, 'reward']['before'] == pytest.approx(-.3) and rows['P', .7, 'reward']['after'] == 1
    assert rows['P', .7, 'reward']['n'] == 2 and rows['A', 0., 'reward']['difference'] == 0
    assert rows['A', .7, 'reward_correct']['chance'] == .5 and math.isnan(rows['P', .7, 'reward']['chance'])
    assert list(dict.fromkeys(key[:2] for key in rows)) == [('P', .7), ('P', 0.), ('A', .7), ('A', 0.)]
    assert {key for key in rows if key[1] == 0} == {(task, 0., name) for task in TASK_METRICS for name in TASK_METRICS[task]}


# ---- a model

@pytest.fixture(scope='module')
def tiny() -> tuple[GPT, Tokenizer]:
    """A random model over printable characters."""
    words = ['<|endoftext|>', *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split(Regex('.'), 'isolated'), decoders.Fuse()
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=len(words), n_positions=256))
    for weights in model.parameters():
        weights.data += .3*torch.randn_like(weights)  # so that what it writes depends on what it read
    return model, tokenizer


def test_evaluation_is_deterministic_and_depends_on_the_seed(tiny):
    samples = [RUY, CLASS_SAMPLES['mate'], *random_samples(3), CLASS_SAMPLES['ordinary']]
    def run(seed, temperature=1.): return evaluate(*tiny, samples, temperature, seed, samples_per_prompt=2, max_new_tokens=12)
    first = run(0)
    assert first.equals(run(0)) and not first['completion'].equals(run(1)['completion'])
    assert list(first['prompt_number']) == [i for i in range(6) for _ in range(2)] and list(first['task'][::2]) == list('PAPPPA')
    greedy = run(0, 0.)['completion']
    assert greedy[::2].tolist() == greedy[1::2].tolist()


def test_each_completion_belongs_to_its_prompt(tiny):
    samples = [CLASS_SAMPLES['mate'], RUY, *random_samples(3), CLASS_SAMPLES['draw']]
    together = evaluate(*tiny, samples, 0., max_new_tokens=8, batch_size=2)['completion'].tolist()
    alone = [evaluate(*tiny, [sample], 0., max_new_tokens=8)['completion'][0] for sample in samples]
    assert together == alone and len(set(together)) > 3


def test_a_batch_counts_completions(tiny, monkeypatch):
    asked = []
    def record(model, tokenizer, prompts, group, *others):
        asked.append((len(prompts), group))
        assert others[0] == 144    # tokens, for the padding of the public model
        return type('Drawn', (), {'texts': ['']*len(prompts)*group})
    monkeypatch.setattr('rookworld_nb.evaluate.sample_group', record)
    for count, size in ((2, 4), (3, 2)): evaluate(*tiny, random_samples(3), 1., samples_per_prompt=count, batch_size=size)
    assert asked == [(2, 2), (1, 2), (1, 3), (1, 3), (1, 3)]


def test_no_interval_leaves_what_a_measure_can_be():
    near, rare = np.array([1., 1, 1, 1, .5]), np.array([0., 0, 0, 0, .3])
    assert mean_interval(near, False)['high'] > 1 and mean_interval(near, False, bounds=(0, 1))['high'] == 1
    assert mean_interval(rare, False)['low'] < 0 == mean_interval(rare, False, bounds=(0, math.inf))['low']
    table = pd.DataFrame({'task': 'A', 'temperature': 0., 'prompt_number': range(5)} | dict.fromkeys(TASK_METRICS['A'], near))
    assert summarise(table).loc[('A', 0., 'fen_similarity'), 'high'] == 1 < summarise(table).loc[('A', 0., 'reward'), 'high']
    assert {metric.unit for metrics in TASK_METRICS.values() for metric in metrics.values()} == {*BOUNDS, 'share'}


def test_a_stored_column_can_be_measured_again():
    samples = shipped('heldout')[:4]
    table = metrics_table(samples, [sample.completion for sample in samples])
    for texts in (table['completion'], table['completion'].to_numpy()):
        pd.testing.assert_frame_equal(metrics_table(samples, texts), table)
    with pytest.raises(EvaluationError, match='0 texts'): metrics_table(samples, table['completion'][:0])
