"""Rewards: every setting acts, no text escapes the range, and no shortcut pays."""
import math
import random
import threading
from dataclasses import fields, replace
from typing import get_args

import chess
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rookworld_nb.positions import shipped
from rookworld_nb.rewards import (BadScoresError, BadTargetError, EngineSilentError, Judged, MissingTargetError, PatientEngine, PolicyTruth, RewardConfig, RewardConfigError, RewardScorer,
                                  RunningNorm, Scaling, Scores, Shaping, blend_shares, engine_questions, env_scores, evals_score, candidates_score,
                                  judge_policy, scale_score, shape_reward, stored_truth)
from rookworld_nb.rules import Candidate, EngineError, Stockfish, env_step, legal_moves
from rookworld_nb.tasks import PolicyAnswer, env_prompt, format_env, format_policy, parse_env, parse_policy, policy_prompt, split_line

FEN = 'r1bqkbnr/pppp1ppp/2n5/4p3/4P3/5N2/PPPP1PPP/RNBQKB1R w KQkq - 2 3'
MOVES, EVALS = ('f1b5', 'd2d4', 'f1c4', 'b1c3', 'f1d3'), (.45, .28, .52, .28, .05)
P, TARGET = split_line(format_policy(FEN, MOVES, EVALS))
GOOD = ' M: f1c4 b1c3 f1b5 d2d4 f1d3 E: 0.52 0.28 0.45 0.28 0.05 B: f1c4'
MIDDLING = ' M: f1b5 a2a3 b1c3 h2h4 f1b5 E: 0.1 0.0 0.3 -0.9 0.1 B: b1c3'
BAD = ' M: f1b6 e4e5 a1a5 e1e3 d1d3 E: 9.9 9.9 9.9 9.9 9.9 B: e1e3'
UNLISTED = ' M: f1b5 a2a3 b1c3 E: 0.1 0.0 B: a2a3'
A = env_prompt(FEN, 'f1b5')
NEW = env_step(FEN, 'f1b5').new_fen
RIGHT, COPY, ILLEGAL = f'{NEW}+0.001+0+0', f'{FEN}+0.001+0+0', f'{FEN}+-1.0+0+1'
NEAR = f'{NEW}+0.02+0+0'
TRUTH = PolicyTruth.make(FEN, MOVES, EVALS)
CFG = RewardConfig()
BATTERY = ((P, GOOD), (P, MIDDLING), (P, BAD), (P, UNLISTED), (P, 'x'), (P, ' M: f1b5 E: 3.0 B: f1b5'), (P, ' M: f1b5 d2d4 a1a8 E: 0.1 0.0 0.0 B: d2d4'),
           (A, RIGHT), (A, COPY), (A, ILLEGAL), (A, NEAR), (A, 'x'), (A, f'{NEW}+1.0+1+0'), (A, f'{FEN}+0.001'))


def test_the_share_of_legal_moves_is_shown_and_not_paid():
    texts = [GOOD, BAD, 'x', ' M: a2a3 a2a3 a2a3 E: 0.1 0.1 0.1 B: a2a3', ' M: a2a3 a1a5 a1a5 a1a5 E: 0.1 0.1 0.1 0.1 B: a2a3']
    table = RewardScorer(RewardConfig(illegal_cost=0., repeat_cost=0.))([P]*5 + [A], [*texts, RIGHT], [TARGET]*5 + [None]).components
    assert table['legal_fraction'].tolist()[:5] == [1, 0, 0, 1, .25] and math.isnan(table['legal_fraction'][5])
    assert table['raw'][3] == table['raw'][4]    # as many hits, the same best move


def rewards(cfg: RewardConfig, pairs=BATTERY, calls: int = 1) -> torch.Tensor:
    """The rewards of the last of several identical calls."""
    scorer = RewardScorer(cfg)
    for _ in range(calls):
        found = scorer([p for p, _ in pairs], [c for _, c in pairs], [TARGET if p == P else None for p, _ in pairs]).rewards
    return found


def policy(moves: str, evals: tuple = (), best: str | None = None) -> PolicyAnswer:
    """A parsed answer with these moves."""
    return PolicyAnswer(None, tuple(moves.split()), evals, best)


# ---- every setting reaches the rewards

SMOOTH = RewardConfig(reward_shaping='continuous')
CHANGES = {'reward_shaping': 'binary', 'penalty': -.5, 'illegal_cost': 1., 'repeat_cost': 1., 'legal_credit': .3, 'eval_tolerance': .2, 'best_floor': .5,
           'best_loss_scale': .02, 'unlisted_share': .9, 'reward_tolerance': .1, 'reward_warmup_steps': 10, 'normalize_rewards': True,
           'normalize_momentum': .5, 'normalize_floor': 2.}


@pytest.mark.parametrize('name', [field.name for field in fields(RewardConfig)])
def test_each_field_moves_a_reward(name):
    base = replace(SMOOTH, normalize_rewards=name in ('normalize_momentum', 'normalize_floor'))
    change = CHANGES.get(name, 'quadratic' if name.endswith('_scaling') else 5.)
    pairs = BATTERY
    if name == 'normalize_momentum':  # matters from the second batch on, and where batches differ
        results = []
        for cfg in (base, replace(base, **{name: change})):
            scorer = RewardScorer(cfg)
            scorer([P], [GOOD], [TARGET])
            results.append(scorer([P, P], [BAD, MIDDLING], [TARGET]*2).rewards)
        assert not torch.equal(*results)
    else:
        assert not torch.equal(rewards(base, pairs), rewards(replace(base, **{name: change}), pairs))


@pytest.mark.parametrize('name, value', [
    ('reward_shaping', 'stepwise'), ('fen_scaling', 'cubic'), ('best_weight', -1.), ('penalty', -2.), ('penalty', .1),
    ('policy_format_weight', 0.), ('illegal_cost', 1e308), ('repeat_cost', 101.), ('eval_tolerance', 0.), ('best_floor', 1.5), ('evals_weight', math.nan),
    ('reward_warmup_steps', -1), ('normalize_floor', math.inf), ('penalty', None), ('best_weight', 'much'), ('normalize_rewards', 'no')])
def test_bad_settings_are_named(name, value):
    with pytest.raises(RewardConfigError, match=name):
        RewardConfig(**{name: value})


def test_weights_that_cannot_be_added_up_are_refused():
    with pytest.raises(RewardConfigError, match='too large to be added up'): RewardConfig(best_weight=1e308, evals_weight=1e308)


# ---- no text escapes

SCALINGS = [field.name for field in fields(RewardConfig) if field.name.endswith('_scaling')]
PIECES = st.sampled_from(['M:', 'E:', 'B:', 'P:', 'A:', ' ', '  ', '+', '\n', '<|endoftext|>', 'e2e4', 'f1c4', 'f1b5', 'a9a9',
                          GOOD, RIGHT, 'e7e8q',
                          '0.5', '-999.79', '1e9', 'nan', 'inf', '-', '.', '0', '1', NEW, FEN, '/', '♔', '\x00', '9'*30])
TEXTS = st.one_of(st.text(max_size=80), st.lists(PIECES, max_size=16).map(''.join), st.lists(PIECES, max_size=16).map(' '.join))


@settings(max_examples=150)
@given(text=TEXTS, shaping=st.sampled_from(get_args(Shaping)), scaling=st.sampled_from(get_args(Scaling)))
def test_any_text_is_paid_within_range(text, shaping, scaling):
    cfg = RewardConfig(reward_shaping=shaping, **{name: scaling for name in SCALINGS})
    scores = RewardScorer(cfg)([P, A], [text, text], [TARGET, None])
    assert ((scores.rewards >= torch.tensor(-.3)) & (scores.rewards <= 1)).all()
    parts = scores.components.to_numpy()[:, 1:-1].astype(float)
    assert ((parts >= 0) & (parts <= 1) | np.isnan(parts)).all()


def test_numbers_too_large_to_mean_anything():
    huge = ' M: f1b5 f1c4 E: 999999999 -999999999.999999999 B: f1c4'
    assert -.3 <= rewards(SMOOTH, [(P, huge), (A, f'{NEW}+999999999+0+0')]).min()


# ---- what is right, and how much

@pytest.mark.parametrize('shaping', ['graduated', 'continuous', 'linear', 'ladder'])
def test_good_middling_and_bad_differ(shaping):
    policy_rewards = rewards(RewardConfig(reward_shaping=shaping), [(P, GOOD), (P, MIDDLING), (P, BAD), (P, 'x')])
    env_rewards = rewards(RewardConfig(reward_shaping=shaping), [(A, RIGHT), (A, ILLEGAL), (A, f'{FEN}+0.001'), (A, 'x')])
    for found in (policy_rewards, env_rewards[[0, 1, 3]]):
        assert (found.diff() < 0).all()
    assert policy_rewards[0] == env_rewards[0] == 1
    if shaping != 'ladder':
        assert policy_rewards[3] == torch.tensor(-.3)


def test_graduated_steps_and_unreadable():
    assert rewards(CFG, [(P, GOOD), (P, MIDDLING), (P, BAD), (P, ' M: f1c4 f1b5 E: 0.52 0.45'), (P, '')]).tolist() \
        == pytest.approx([1, .6, .2, -.3, -.3])
    assert rewards(CFG, [(A, RIGHT), (A, COPY), (A, ILLEGAL), (A, RIGHT + '+0'), (A, '')]).tolist() \
        == pytest.approx([1, .8, .6, -.3, -.3])


def test_the_ladder_pays_for_beginnings():
    "A third of the way is a third of the way, though nobody could read the whole answer."
    climb = RewardConfig(reward_shaping='ladder')
    moves = GOOD.partition(' E:')[0]
    assert rewards(climb, [(P, 'x'), (P, moves), (P, GOOD.partition(' B:')[0]), (P, GOOD)])[[0, 1, 3]].tolist() == pytest.approx([-.3, .2, 1])
    assert rewards(climb, [(P, GOOD.partition(' B:')[0])]).item() >= .6
    assert rewards(climb, [(P, ' M: a1a8 E: 0.5 B: a1a8')]).item() == 0    # readable, and not one legal move
    assert rewards(climb, [(P, f' M: f1b5 {other} E: 0.4 0.4 B: f1b5') for other in ('a1a8', 'f1b5')]).tolist() == pytest.approx([.4, .4])    # half is no majority
    assert rewards(climb, [(P, GOOD.replace('B: f1c4', 'B: f1d3'))]).item() == pytest.approx(.8)    # more than half of the content, and not all
    assert rewards(climb, [(A, 'x'), (A, NEW), (A, f'{NEW}+0.001+0'), (A, f'{NEW}+0.001+0+0+0'), (A, RIGHT)]).tolist() \
        == pytest.approx([-.3, .2, .2, .4, 1])


def test_a_target_of_more_moves_than_an_answer_may_have_is_refused():
    with pytest.raises(BadTargetError, match='1 to 5 moves'):
        stored_truth(P, ' M: f1b5 f1c4 b1c3 d2d4 f1d3 a2a3 E: 0.5 0.4 0.3 0.2 0.1 0.0 B: f1b5')


def test_a_sum_of_parts_at_a_limit_counts_as_the_limit():
    "The position is right and the mate overlooked: .4 + .3 + .1, which floats make a little less than .8."
    mate = 'rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2'
    answer = env_step(mate, 'd8h4').new_fen
    assert rewards(CFG, [(f'A: {mate}+d8h4+d8h4+', f'{answer}+0.001+0+0'), (f'A: {mate}+d8h4+d8h4+', f'{answer}+1.0+0+1')]).tolist() \
        == pytest.approx([.8, .8])


def random_line(rng: random.Random) -> tuple[str, str, str]:
    """A prompt, a target and the same target in another order, from a random position."""
    board = chess.Board()
    for _ in range(rng.randrange(60)):
        if not (moves := list(board.legal_moves)):
            break
        board.push(rng.choice(moves))
    if not list(board.legal_moves):
        return random_line(rng)
    listed = rng.sample(sorted(legal_moves(board.fen())), min(5, board.legal_moves.count()))
    evals = [rng.choice([round(rng.gauss(0, 3), 2), 999.97, -999.79]) for _ in listed]
    pairs = list(zip(listed, evals))
    best = max(evals)
    rng.shuffle(pairs)
    moves, values = ' '.join(m for m, _ in pairs), ' '.join(str(e) for _, e in pairs)
    other = f' M: {moves} E: {values} B: {[m for m, e in pairs if e == best][0]}'
    return *split_line(format_policy(board.fen(), listed, evals)), other


@pytest.mark.parametrize('shaping', get_args(Shaping))
def test_a_perfect_answer_earns_everything_in_any_order(shaping):
    rng = random.Random(0)
    prompts, targets, others = zip(*(random_line(rng) for _ in range(60)))
    scorer = RewardScorer(RewardConfig(reward_shaping=shaping))
    assert scorer(prompts, targets, targets).rewards.eq(1).all()
    assert scorer(prompts, others, targets).rewards.eq(1).all()


def test_a_position_with_one_legal_move_can_be_answered():
    fen = '7k/8/8/8/8/8/1r6/K7 w - - 0 1'
    assert legal_moves(fen) == {'a1b2'}
    assert RewardScorer(SMOOTH)([policy_prompt(fen)], ['M: a1b2 E: 0.0 B: a1b2'], ['M: a1b2 E: 0.0 B: a1b2']).rewards == 1


def test_the_stored_best_label_is_not_believed():
    wrong = TARGET.replace('B: f1c4', 'B: f1d3')
    table = RewardScorer()([P, P], [GOOD, GOOD.replace('B: f1c4', 'B: f1d3')], [wrong]*2).components
    assert table['best'][0] == 1 > table['best'][1]


def test_best_moves_are_ordered():
    credit = {move: judge_policy(f'B: {move}', TRUTH, CFG).scores[3] for move in sorted(TRUTH.legal) + ['a1a8']}
    unlisted = {value for move, value in credit.items() if move in TRUTH.legal and move not in TRUTH.pawns}
    assert credit['f1c4'] == 1 > credit['f1b5'] > credit['d2d4'] == credit['b1c3'] > credit['f1d3'] > max(unlisted)
    assert len(unlisted) == 1 and min(unlisted) > credit['a1a8'] == 0


def test_a_lost_queen_is_worth_little_but_more_than_an_illegal_move():
    truth = PolicyTruth.make(FEN, ('f1b5', 'd2d4'), (999.99, -999.99))
    thrown, unlisted, illegal = (judge_policy(f'B: {move}', truth, CFG).scores[3] for move in ('d2d4', 'a2a3', 'a1a8'))
    assert .3 > thrown > unlisted > .05 > illegal == 0


def test_equal_evaluations_share_the_best():
    truth = PolicyTruth.make(FEN, MOVES, (.5, .5, .1, .1, .1))
    assert truth.best == {'f1b5', 'd2d4'}


# ---- shortcuts that must not pay

@settings(max_examples=100)
@given(listed=st.lists(st.sampled_from([*MOVES, 'a2a3', 'h2h4', 'a1a8', 'e1e3']), max_size=7),
       extra=st.sampled_from([*MOVES, 'a1a8', 'b1b2']))
def test_no_repeated_or_illegal_move_raises_the_overlap(listed, extra):
    if extra in listed or extra not in TRUTH.legal:
        more = PolicyAnswer(None, (*listed, extra), (), None)
        assert candidates_score(more, TRUTH, CFG) <= candidates_score(PolicyAnswer(None, tuple(listed), (), None), TRUTH, CFG)


@pytest.mark.parametrize('count, form', [(1, .8), (2, 1.), (5, 1.), (6, .8)])
def test_a_list_may_be_neither_a_single_move_nor_of_more_than_five(count, form):
    moves = sorted(TRUTH.legal)[:count]
    assert judge_policy(f' M: {" ".join(moves)} E:{" 0.1"*count} B: {moves[0]}', TRUTH, CFG).scores[0] == pytest.approx(form)


def test_illegal_costs_more_than_legal_and_unlisted():
    assert candidates_score(policy('f1b5 d2d4 a2a3'), TRUTH, CFG) == .4
    assert candidates_score(policy('f1b5 d2d4 a1a8'), TRUTH, CFG) == pytest.approx(.3)
    assert candidates_score(policy('f1b5 d2d4 d2d4'), TRUTH, CFG) == pytest.approx(.3)
    assert candidates_score(policy(' '.join(sorted(TRUTH.legal))), TRUTH, CFG) < 1


@pytest.mark.parametrize('moves, illegal, repeated', [('f1b5 d2d4 a1a8', .2, .4), ('f1b5 d2d4 d2d4', .4, .2), ('f1b5 d2d4 a1a8 a1a8', 0., .4)])
def test_illegal_and_repeated_moves_have_costs_of_their_own(moves, illegal, repeated):
    assert candidates_score(policy(moves), TRUTH, RewardConfig(illegal_cost=1., repeat_cost=0.)) == pytest.approx(illegal)
    assert candidates_score(policy(moves), TRUTH, RewardConfig(illegal_cost=0., repeat_cost=1.)) == pytest.approx(repeated)


@settings(max_examples=100)
@given(order=st.permutations(list(zip(MOVES, EVALS))), keep=st.integers(0, 5), noise=st.floats(-5, 5))
def test_listing_fewer_matched_moves_never_raises_the_evaluations(order, keep, noise):
    moves, evals = [m for m, _ in order], tuple(e + noise for _, e in order)
    full = evals_score(policy(' '.join(moves), evals), TRUTH, CFG)
    assert evals_score(policy(' '.join(moves[:keep]), evals[:keep]), TRUTH, CFG) <= full + 1e-12


def test_evaluations_are_compared_as_win_probabilities():
    truth = PolicyTruth.make(FEN, MOVES, (999.97,)*5)
    nine, two = (evals_score(policy(' '.join(MOVES), (value,)*5), truth, CFG) for value in (9., 2.))
    assert nine > .9 > two
    assert evals_score(policy('f1b5 f1b5 f1b5', (.45,)*3), TRUTH, CFG) == pytest.approx(.2)    # a repeated move is paid once


@pytest.mark.parametrize('prompt, text', [(P, f'{P}{TARGET}'), (P, f'P: {NEW} M: a7a6 a7a5 E: 0.0 0.0 B: a7a6'),
                                          (A, f'{A}{RIGHT}'), (A, f'{FEN}+f1b5+f1b5+{RIGHT}')])
def test_an_answer_may_not_bring_its_own_question(prompt, text):
    scores = RewardScorer()([prompt], [text], [TARGET if prompt == P else None])
    assert scores.rewards == torch.tensor(-.3) and scores.components['raw'][0] < .01


@pytest.mark.parametrize('prompt, text', [(P, GOOD), (A, RIGHT), (P, BAD), (A, COPY)])
def test_nothing_behind_the_end_token_counts(prompt, text):
    tails = ['', '<|endoftext|>', '<|endoftext|> M: a1a1+x+<|endoftext|>', '<|endoftext|>A: +++++']
    assert len(rewards(SMOOTH, [(prompt, text + tail) for tail in tails]).unique()) == 1
    assert rewards(SMOOTH, [(prompt, '<|endoftext|>' + text)]) == rewards(SMOOTH, [(prompt, '')])


# ---- task A

def edit_distance(a: str, b: str) -> int:
    """The textbook recurrence."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


@settings(max_examples=50)
@given(text=st.text('rnbqkp/12345678 w-KQ', max_size=70).map(str.strip))
def test_similarity_equals_the_textbook(text):
    answer, truth = parse_env(f'{text}+0.001+0+0'), env_step(FEN, 'f1b5')
    written = ' '.join(text.split())
    expected = 1 - edit_distance(written, NEW)/max(len(written), len(NEW))
    assert env_scores(answer, truth, CFG)[1] == pytest.approx(expected)


@pytest.mark.parametrize('fen, uci', [(FEN, 'f1b5'), (FEN, 'f1b6'), (FEN, 'e4'), ('6k1/5ppp/8/8/8/8/8/R6K w - - 0 1', 'a1a8'),
                                      ('7k/8/6K1/8/8/8/8/5Q2 w - - 0 1', 'f1f7')])
def test_rules_and_stored_targets_agree(fen, uci):
    step = env_step(fen, uci)
    prompt, target = split_line(format_env(fen, uci, None, *step))
    texts = [target, f'{fen}+0.001+0+0', f'{fen}+-1.0+0+1']
    live, stored = RewardScorer()([prompt]*3, texts), RewardScorer()([prompt]*3, texts, [target]*3)
    assert live.components.equals(stored.components) and live.rewards[0] == 1
    assert torch.equal(RewardScorer()([prompt[3:]]*3, texts).rewards, live.rewards)  # a prompt without its prefix


# ---- where the truth comes from

class Oracle:
    """An engine that knows one position and counts the questions."""
    def __init__(self):
        self.asked = []

    def analyse(self, fen):
        self.asked.append(fen)
        return tuple(Candidate(*pair) for pair in zip(MOVES, EVALS)) if fen == FEN else ()


def test_engine_and_stored_target_agree_and_each_position_is_asked_once():
    engine = Oracle()
    live = RewardScorer(engine=engine)([P]*8, [GOOD, MIDDLING, BAD, 'x']*2)
    assert live.components.equals(RewardScorer()([P]*8, [GOOD, MIDDLING, BAD, 'x']*2, [TARGET]*8).components)
    assert engine.asked == [FEN]
    RewardScorer(engine=engine)([P, A], [GOOD, RIGHT], [TARGET, None])
    assert len(engine.asked) == 1


def test_without_any_truth_nothing_is_scored():
    scorer = RewardScorer()
    with pytest.raises(MissingTargetError, match='engine'):
        scorer([A, P], [RIGHT, GOOD])
    with pytest.raises(MissingTargetError, match='engine'):
        scorer([P, P], [GOOD, GOOD], [TARGET, None])
    with pytest.raises(MissingTargetError, match='over'):
        RewardScorer(engine=Oracle())([policy_prompt('7k/5Q2/6K1/8/8/8/8/8 b - - 0 1')], [GOOD])
    assert scorer.step == 0


@pytest.mark.parametrize('prompt, target', [(P, 'M: e2e4 E: B: e2e4'), (P, ''), (A, f'{NEW}+0.001+0'), (A, TARGET), (P, RIGHT),
                                            (P, ' M: e2e4 e1e3 E: 0.3 0.2 B: e2e4'), (P, ' M: e2e4 e2e4 E: 0.3 0.2 B: e2e4')])
def test_unusable_targets_are_named(prompt, target):
    with pytest.raises(BadTargetError):
        RewardScorer()([prompt], [GOOD], [target])


@pytest.mark.parametrize('prompt', ['hello', 'P: hello', 'A: hello', 'A: x+y+z+', 'P: 8/8/8/8/8/8/8/8 w - - 0 1'])
def test_bad_prompts_are_errors(prompt):
    with pytest.raises(ValueError):
        RewardScorer(engine=Oracle())([prompt], [GOOD])


def test_an_engine_is_asked_about_policy_prompts_alone():
    engine = Oracle()
    assert RewardScorer(engine=engine)([A], ['x']).components['reward'].notna().all() and not engine.asked


def test_lengths_must_agree_and_nothing_is_fine():
    with pytest.raises(BadTargetError, match='2 prompts, 1 completions'):
        RewardScorer()([P, P], [GOOD])
    with pytest.raises(BadTargetError, match='3 targets'):
        RewardScorer()([P], [GOOD], [TARGET]*3)
    assert RewardScorer()([], []).rewards.shape == (0,)


@pytest.mark.stockfish
def test_stockfish_agrees_with_itself():
    with Stockfish(nodes=500) as engine:
        lines = engine.analyse(FEN)
        answer = split_line(format_policy(FEN, [c.uci for c in lines], [c.pawns for c in lines]))[1]
        assert RewardScorer(engine=engine)([P, P], [answer, BAD]).rewards.tolist() == pytest.approx([1, .2])


# ---- curriculum, normalisation, state

def test_warmup_blends_content_in():
    cfg = replace(SMOOTH, reward_warmup_steps=4)
    shares = [blend_shares(cfg, step)['P'] for step in range(6)]
    assert shares[0] == (1, 0, 0, 0) and shares[4] == shares[5] == blend_shares(SMOOTH, 0)['P']
    assert all(sum(share) == pytest.approx(1) for share in shares)
    assert shares[2] == pytest.approx([2/5.25, .75/5.25, .5/5.25, 2/5.25])
    seen = [rewards(cfg, [(P, BAD)], calls).item() for calls in range(1, 7)]
    assert seen[0] == 1 and seen[:5] == sorted(seen[:5], reverse=True) and seen[4] == seen[5] and len(set(seen)) == 5


def test_normalisation_by_hand():
    norm = RunningNorm(momentum=.9, floor=.05)
    assert torch.allclose(norm(torch.tensor([0., 1.])), torch.tensor([-1., 1.]))
    second = norm(torch.tensor([.2, .4]))
    mean, std = .9*.5 + .1*.3, .9*.5 + .1*.1
    assert torch.allclose(second, (torch.tensor([.2, .4]) - mean)/std)
    assert RunningNorm()(torch.tensor([.7])) == 0


def test_normalisation_is_per_task_once_per_batch_and_outside_the_table():
    scorer = RewardScorer(replace(SMOOTH, normalize_rewards=True))
    pairs = [(P, GOOD), (P, BAD), (A, RIGHT), (A, COPY)]
    first = scorer([p for p, _ in pairs], [c for _, c in pairs], [TARGET, TARGET, None, None])
    assert torch.allclose(first.rewards, torch.tensor([1., -1, 1, -1]), atol=1e-4)
    assert first.components['reward'].between(-.3, 1).all()
    before = scorer.state_dict()['norms']['A']
    scorer([P], [GOOD], [TARGET])
    assert scorer.state_dict()['norms']['A'] == before != scorer.state_dict()['norms']['P']


def test_a_resumed_scorer_continues():
    cfg = replace(SMOOTH, normalize_rewards=True, reward_warmup_steps=7)
    one, two = RewardScorer(cfg), RewardScorer(cfg)
    batches = [[GOOD, BAD], [MIDDLING, BAD], [MIDDLING, GOOD], [BAD, 'x']]
    def run(scorer, part): return [scorer([P]*2, texts, [TARGET]*2).rewards for texts in part]
    whole = run(one, batches)
    run(two, batches[:2])
    resumed = RewardScorer(cfg)
    resumed.load_state_dict(two.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(whole[2:], run(resumed, batches[2:])))


def test_evaluation_uses_one_yardstick_and_leaves_no_trace():
    scorer = RewardScorer(replace(SMOOTH, normalize_rewards=True, reward_warmup_steps=7), Oracle())
    state = scorer.state_dict()
    yardstick = scorer.for_evaluation()
    first = yardstick([P, P], [MIDDLING, BAD]).rewards
    assert torch.equal(first, yardstick([P, P], [MIDDLING, BAD]).rewards)
    assert torch.equal(first, RewardScorer(SMOOTH)([P, P], [MIDDLING, BAD], [TARGET]*2).rewards)
    assert scorer.state_dict() == state


# ---- the table

def test_components_belong_to_their_task():
    table = RewardScorer()([P, A], [GOOD, RIGHT], [TARGET, None]).components
    assert list(table['task']) == ['P', 'A']
    assert table.loc[0, ['fen', 'flags', 'reward_value']].isna().all()
    assert table.loc[1, ['candidates', 'evals', 'best']].isna().all()
    assert table.drop(columns='task').dtypes.eq('float64').all()


@pytest.mark.parametrize('scaling', get_args(Scaling))
def test_scalings_are_monotone_and_keep_the_ends(scaling):
    values = [scale_score(i/200, scaling) for i in range(201)]
    assert values == sorted(values) and values[0] == pytest.approx(0) and values[-1] == pytest.approx(1)


# an engine that fails

class Failing:
    "Answers like the engine's stored answers, but fails on chosen positions."
    def __init__(self, answers, fails):
        self.answers, self.fails, self.asked = answers, fails, 0

    def analyse(self, fen):
        self.asked += 1
        if self.fails(fen): raise EngineError(f'failed twice on {fen}')
        return self.answers[fen]


def positions_with_answers(count):
    samples = [sample for sample in shipped('train') if sample.task == 'P'][:count]
    answers = {}
    for sample in samples:
        answer = parse_policy(sample.line)
        pairs = sorted(zip(answer.moves, answer.evals), key=lambda pair: -pair[1])
        answers[sample.fen] = tuple(Candidate(uci, pawns) for uci, pawns in pairs)
    return samples, answers


def test_a_question_that_is_no_longer_asked_is_not_thought_about():
    samples, answers = positions_with_answers(4)
    heard, begun, there = [], threading.Event(), threading.Event()

    class Slow(Failing):
        def analyse(self, fen):
            heard.append(fen)
            begun.set()
            there.wait(10)
            return super().analyse(fen)
    patient, fens = PatientEngine(Slow(answers, lambda fen: False)), [sample.fen for sample in samples]
    patient.ask(fens[:3])
    assert begun.wait(10)
    patient.ask(fens[3:])
    there.set()
    assert patient.analyse(fens[3]) == answers[fens[3]] and heard == [fens[0], fens[3]]


@pytest.mark.parametrize('normalize', [False, True])
def test_what_the_engine_fails_on_is_left_unjudged_and_the_rest_is_as_ever(normalize, caplog):
    samples, answers = positions_with_answers(6)
    prompts = [s.prompt for s in samples for _ in range(2)]
    texts = [text for s in samples for text in (s.completion, ' M: a1a1 E: 0.0 B: a1a1')]
    cfg = RewardConfig(normalize_rewards=normalize)
    bad = {samples[1].fen, samples[4].fen}
    broken = RewardScorer(cfg, Failing(answers, bad.__contains__))(prompts, texts)
    kept = [i for i in range(12) if i//2 not in (1, 4)]
    alone = RewardScorer(cfg, Failing(answers, lambda fen: False))([prompts[i] for i in kept], [texts[i] for i in kept])
    assert_close(broken.rewards[kept], alone.rewards, rtol=0, atol=0)
    assert broken.rewards[[2, 3, 8, 9]].eq(0).all()
    assert broken.components['raw'].isna().tolist() == [i not in kept for i in range(12)]
    pd.testing.assert_frame_equal(broken.components.iloc[kept].reset_index(drop=True), alone.components)
    assert caplog.text.count('is not judged') == 2


def prompts_in_batches(engine, samples, size, targets=None):
    "One scorer over batch after batch, as a run asks it."
    scorer = RewardScorer(RewardConfig(), engine)
    return [scorer([s.prompt for s in samples[i:i + size]], ['']*size, targets) for i in range(0, len(samples), size)]


@pytest.mark.parametrize('size', [1, 2, 3, 4, 6, 12])
def test_an_engine_that_never_answers_ends_the_run_whatever_the_batches(size):
    samples, answers = positions_with_answers(12)
    engine = Failing(answers, lambda fen: True)
    with pytest.raises(EngineSilentError, match='8 questions in a row.*failed twice') as caught:
        prompts_in_batches(engine, samples, size)
    assert engine.asked == 8 and isinstance(caught.value, EngineError)


@pytest.mark.parametrize('size', [1, 2, 3, 6, 12])
def test_an_engine_that_dies_after_many_answers_ends_the_run_too(size):
    samples, answers = positions_with_answers(24)
    alive = {s.fen for s in samples[:12]}
    engine = Failing(answers, lambda fen: fen not in alive)
    with pytest.raises(EngineSilentError):
        prompts_in_batches(engine, samples, size)
    assert engine.asked == 20


@pytest.mark.parametrize('size', [1, 3, 12])
def test_any_answer_is_enough_to_go_on(size):
    samples, answers = positions_with_answers(24)
    answered = {samples[7].fen, samples[15].fen, samples[23].fen}
    scores = prompts_in_batches(Failing(answers, lambda fen: fen not in answered), samples, size)
    assert sum(part.components['raw'].isna().sum() for part in scores) == 21


def test_stored_targets_neither_ask_nor_forget():
    samples, answers = positions_with_answers(24)
    engine = Failing(answers, lambda fen: True)
    scorer = RewardScorer(RewardConfig(), engine)
    with pytest.raises(EngineSilentError):
        for i in range(0, 24, 3):
            batch = samples[i:i + 3]
            scorer([s.prompt for s in batch], ['']*3, [batch[0].completion, batch[1].completion, None])
    assert engine.asked == 8 and scorer.step == 7


def test_an_engine_that_is_asked_ahead_has_answered_when_the_scorer_comes():
    samples, answers = positions_with_answers(6)
    thought, there = [], threading.Event()

    class Slow(Failing):
        def analyse(self, fen):
            there.wait(10)
            thought.append((fen, threading.current_thread() is threading.main_thread()))
            return super().analyse(fen)
    engine = Slow(answers, lambda fen: False)
    ahead, plain = RewardScorer(RewardConfig(), engine), RewardScorer(RewardConfig(), Failing(answers, lambda fen: False))
    targets = [None]*5 + [samples[5].completion]
    prompts = [sample.prompt for sample in samples]
    ahead.patient.ask(engine_questions(prompts*2, targets*2))  # returns at once: the engine waits for `there`
    assert not thought
    there.set()
    scores = ahead(prompts, ['']*6, targets)
    assert thought == [(sample.fen, False) for sample in samples[:5]]
    pd.testing.assert_frame_equal(scores.components, plain(prompts, ['']*6, targets).components)


def test_an_engine_that_is_asked_ahead_may_fail_as_ever():
    samples, answers = positions_with_answers(12)
    scorer = RewardScorer(RewardConfig(), Failing(answers, lambda fen: True))
    with pytest.raises(EngineSilentError):
        for i in range(0, 12, 4):
            prompts = [sample.prompt for sample in samples[i:i + 4]]
            scorer.patient.ask(engine_questions(prompts, [None]*4))
            scorer(prompts, ['']*4)
    assert scorer.step == 1  # the eighth question is the second batch's last


def test_who_is_examined_does_not_use_up_the_patience_of_the_run():
    samples, answers = positions_with_answers(8)
    engine = Failing(answers, lambda fen: True)
    scorer = RewardScorer(RewardConfig(), engine)
    for sample in samples[:7]:
        scorer([sample.prompt], [''])
    assert scorer.for_evaluation()([samples[7].prompt], ['']).components['raw'].isna().all()
    with pytest.raises(EngineSilentError):
        scorer([samples[7].prompt], [''])


def test_the_rules_judge_env_answers_whatever_is_stored():
    """Public data call a rook's leap a fine move, and spell en-passant squares that nobody can use."""
    leap = env_prompt(chess.STARTING_FEN, 'a1e7')
    stored = 'rnbqkbnr/ppppRppp/8/8/8/8/PPPPPPPP/1NBQKBNR b Kkq - 0 1+0.001+0+0'
    right = f'{chess.STARTING_FEN}+-1.0+0+1'
    paid = RewardScorer()([leap, leap], [stored, right], [stored, stored]).rewards
    assert paid[1] == 1 > paid[0]
    with pytest.raises(BadTargetError): RewardScorer()([leap], [right], ['no answer'])


@pytest.mark.parametrize('setting', [{'normalize_rewards': .5}, {'normalize_rewards': 1}, {'reward_warmup_steps': 2.5}, {'penalty': False}, {'best_weight': '4'}])
def test_a_setting_of_another_kind_is_refused(setting):
    with pytest.raises(RewardConfigError, match=f'{next(iter(setting))}={next(iter(setting.values()))!r}'): RewardConfig(**setting)


@pytest.mark.parametrize('name, value, words', [
    ('best_weight', -1., 'a number of at least 0'), ('policy_format_weight', -1., 'a number above 0'), ('policy_format_weight', 0., 'a number above 0'),
    ('reward_tolerance', math.inf, 'a number above 0'), ('penalty', 2., 'a number from -1 to 0'), ('reward_warmup_steps', .5, 'a whole number of at least 0')])
def test_no_value_is_named_valid_that_is_refused(name, value, words):
    with pytest.raises(RewardConfigError) as error: RewardConfig(**{name: value})
    assert str(error.value) == f'{name}={value!r}; it must be {words}'


@pytest.mark.parametrize('restated', [chess.STARTING_FEN, '8/8'])
def test_a_policy_answer_that_restates_a_position_is_unreadable(restated):
    sample, scorer = next(s for s in shipped('heldout') if s.task == 'P'), RewardScorer()
    paid = scorer([sample.prompt]*3, [sample.completion, f'P: {restated} {sample.completion}', ''], [sample.completion]*3).rewards.tolist()
    assert paid[0] == 1 and paid[1] == paid[2]


def test_an_env_answer_that_restates_a_move_is_unreadable():
    prompt, answer = split_line(format_env(chess.STARTING_FEN, 'e2e4', None, *env_step(chess.STARTING_FEN, 'e2e4')))
    texts = [answer, '', f'x+y+z+{answer}', f'+++{answer}', f'A: +++{answer}', f'A: {prompt}{answer}']
    right, *others = RewardScorer()([prompt]*len(texts), texts).rewards.tolist()
    assert right == 1 and {*others} == {others[0]} and others[0] < 0


def test_an_env_target_is_an_answer_and_no_whole_line():
    line = format_env(chess.STARTING_FEN, 'e2e4', None, *env_step(chess.STARTING_FEN, 'e2e4'))
    prompt, answer = split_line(line)
    with pytest.raises(BadTargetError, match='must be new_fen'): RewardScorer()([prompt], [answer], [line])


@pytest.mark.parametrize(('shaping', 'raw', 'reward'), [
    ('graduated', .399, .2), ('graduated', .4, .4), ('graduated', .599, .4), ('graduated', .6, .6), ('graduated', .799, .6), ('graduated', .8, .8),
    ('graduated', .949, .8), ('graduated', .95, 1.), ('binary', .5, 0.), ('binary', .501, 1.)])
def test_the_borders_of_the_steps(shaping, raw, reward):
    judged = Judged('P', (raw,)*4, True, (True,)*3)
    assert shape_reward(judged, raw, RewardConfig(reward_shaping=shaping)) == reward


def test_the_curves_go_through_their_points():
    assert scale_score(.25, 'sigmoid') == pytest.approx(.5 - .5*math.tanh(1.25)/math.tanh(2.5)) and scale_score(.5, 'quadratic') == .25
    assert scale_score(.5, 'exponential') == pytest.approx((math.exp(1.5) - 1)/(math.exp(3) - 1)) and scale_score(.3, 'linear') == .3


@pytest.mark.parametrize('target', [TARGET.replace('f1b5', 'F1B5'), TARGET.replace('0.28', '+0.28', 1), 'garbage' + TARGET, TARGET.rpartition(' B:')[0],
                                    format_policy('8/8/8/8/8/4k3/8/K6R w - - 0 1', ['h1h2'], [1.]), format_policy(FEN, MOVES, EVALS)])
def test_a_target_that_is_partly_unreadable_or_of_a_position_is_refused(target):
    with pytest.raises(BadTargetError, match='must be M: 1 to 5 moves'): stored_truth(P, target)


def test_a_target_is_refused_with_the_part_that_is_wrong():
    with pytest.raises(BadTargetError, match=r"B: a move \(move 1 'f1b9' is no UCI move such as e2e4\)"): stored_truth(P, TARGET.replace('f1b5', 'f1b9', 1))
    with pytest.raises(BadTargetError, match=r"\('foo' stands between the FEN and M:\)"): stored_truth(P, f' foo{TARGET}')
    with pytest.raises(BadTargetError, match=r'\(no B: after the evaluations\)'): stored_truth(P, TARGET.rpartition(' B:')[0])
    with pytest.raises(BadTargetError, match=r'\(no B: after the evaluations\)'): stored_truth(P, '\n' + TARGET.replace(' B:', '\nB:'))    # of another line


def test_a_single_answer_goes_in_as_lists():
    with pytest.raises(BadTargetError, match='are lists; of a single answer lists of one text'): RewardScorer()(P, TARGET, TARGET)
    assert RewardScorer()([P], [TARGET], [TARGET]).rewards.tolist() == [1.]


@pytest.mark.parametrize('rewards, columns, words', [
    (torch.zeros(3), ('task', 'raw', 'reward'), r'\(3,\) rewards for 2 rows'), ([1., 2.], ('task', 'reward'), 'lacks raw; it has task, reward'),
    (torch.zeros(2, 1), ('task', 'raw', 'reward'), r'\(2, 1\) rewards')])
def test_scores_of_ones_own_that_do_not_fit_say_so(rewards, columns, words):
    with pytest.raises(BadScoresError, match=words): Scores(rewards, pd.DataFrame({name: [0, 1] for name in columns}))


def test_scores_may_be_whole_numbers():
    scores = Scores([0, 1], pd.DataFrame({'task': 'P', 'raw': [0., 1.], 'reward': [0., 1.]}))
    assert scores.rewards.dtype == torch.float32 and scores.rewards.tolist() == [0, 1]


@pytest.mark.parametrize('prompt, completion, target, said', [
    (P, GOOD, math.nan, 'the target of row 1 is nan, not a text or None'), (P, math.nan, TARGET, 'the completion of row 1 is nan, not a text$'),
    (None, GOOD, TARGET, 'the prompt of row 1 is None, not a text$')])
def test_what_pandas_has_where_nothing_is_gets_a_sentence(prompt, completion, target, said):
    with pytest.raises(BadTargetError, match=said): RewardScorer()([P, prompt], [GOOD, completion], [TARGET, target])
    table = pd.DataFrame({'prompt': [P, A], 'completion': [GOOD, RIGHT], 'target': [TARGET, None]}, dtype=object)
    assert RewardScorer()(table['prompt'], table['completion'], table['target']).rewards[1] == 1


def test_an_answer_that_nobody_could_judge_earns_nothing_from_a_reward_of_ones_own():
    samples, answers = positions_with_answers(4)
    scorer = RewardScorer(RewardConfig(), Failing(answers, lambda fen: fen == samples[1].fen), reward_fn=lambda prompts, completions, table: table['best'])
    scores = scorer([sample.prompt for sample in samples], [GOOD]*4)
    assert scores.components['raw'].isna().tolist() == [False, True, False, False] and scores.rewards[1] == 0 and scores.rewards.isfinite().all()


def test_a_reward_of_ones_own_may_spoil_its_table():
    def spoil(prompts, completions, table):
        table['raw'] = math.nan
        return [.5]*len(table)
    scores = RewardScorer(reward_fn=spoil)([P], [GOOD], [TARGET])
    assert scores.rewards.tolist() == [.5] and scores.components['raw'].tolist() == [1.]


def test_an_examination_is_paid_by_a_scorer_of_ones_own_class():
    class Own(RewardScorer):
        def __call__(self, *columns):
            scores = super().__call__(*columns)
            return replace(scores, rewards=scores.rewards + 1)
    own = Own(RewardConfig(normalize_rewards=True))
    own([P], [BAD], [TARGET])
    other = own.for_evaluation()
    assert other([P], [GOOD], [TARGET]).rewards.item() == RewardScorer()([P], [GOOD], [TARGET]).rewards.item() + 1
    assert not other.cfg.normalize_rewards and other.step == 1 and own.step == 1 and own.cfg.normalize_rewards
