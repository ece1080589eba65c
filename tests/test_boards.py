"""What an answer looks like on a board: arrows, squares and words, and which rows of a batch are drawn."""
import re

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookworld_nb.boards import (
    GREEN, RED, boards_html, diagram_html, env_diagrams, pick_rows, policy_diagram, ranked, row_diagrams, wrong_squares)
from rookworld_nb.tasks import parse_env, parse_policy

FEN = 'r1bqkbnr/pppp1ppp/2n5/4p3/4P3/5N2/PPPP1PPP/RNBQKB1R w KQkq - 2 3'
AFTER = 'r1bqkbnr/pppp1ppp/2n5/1B2p3/4P3/5N2/PPPP1PPP/RNBQK2R b KQkq - 3 3'  # f1b5
P_ROW = {'task': 'P', 'prompt': f'P: {FEN}', 'reward': .5}
A_ROW = {'task': 'A', 'prompt': f'A: {FEN}+f1b5+f1b5+', 'reward': .5}
IMPOSSIBLE = [dict(task='P', prompt='P: fen', completion='M: e2e4', reward=.8), dict(task='A', prompt='A: fen+e2e4+e2e4+', completion='', reward=-.3)]


def test_candidates_are_ranked_by_the_models_own_evaluations():
    answer = parse_policy('M: a2a3 f1b5 d2d4 b1c3 E: -1.0 0.4 0.9 B: f1b5')
    assert ranked(answer) == [('d2d4', .9), ('f1b5', .4), ('a2a3', -1.), ('b1c3', None)]
    assert ranked(parse_policy('M: a2a3 E: 0.1 0.2 B: a2a3')) == [('a2a3', .1)]


def test_policy_diagram_says_what_is_played_illegal_and_the_engines():
    answer, target = parse_policy('M: a2a3 f1b5 a1a5 E: -1.0 0.4 0.9 B: f1b5'), parse_policy('M: d2d4 E: 0.5 B: d2d4')
    diagram = policy_diagram(FEN, answer, target)
    assert diagram.arrows == (('a1a5', RED + 'ff'), ('f1b5', GREEN + 'c0'), ('a2a3', GREEN + '90')) and diagram.white_below
    assert [square for square, _ in diagram.squares] == ['d2', 'd4']
    assert diagram.lines == (('1. a1a5 · +0.90 · illegal', True), ('2. f1b5 · +0.40 · its best', False), ('3. a2a3 · -1.00', False),
                             ("d2d4 engine's best", False))
    assert policy_diagram(AFTER, parse_policy('nothing')).lines == (('no best move', True),) and not policy_diagram(AFTER, answer).white_below
    assert policy_diagram(FEN, parse_policy('M: a2a3 E: 0.0 B: e2e2'), target).lines[1] == ('2. e2e2 · its best · illegal', True)


def test_the_engines_best_is_read_from_the_evaluations_and_not_from_the_label():
    black = parse_policy(' M: a7a6 g8f6 d7d6 f8c5 h7h5 E: 0.1 0.3 0.3 0.0 -2.0 B: h7h5')    # as in the public data: the worst of the five
    diagram = policy_diagram(AFTER, parse_policy('M: h7h5 g8f6 E: 0.1 0.0 B: h7h5'), black)
    assert [square for square, _ in diagram.squares] == ['d6', 'd7', 'f6', 'g8']
    assert [text for text, _ in diagram.lines] == ['1. h7h5 · +0.10 · its best', "2. g8f6 · +0.00 · engine's best", "d7d6 engine's best"]
    assert policy_diagram(FEN, parse_policy('M: a2a3 E: 0.0 B: a2a3'), parse_policy('M: d2d4 B: d2d4')).squares == ()    # nothing to compare


def test_what_was_played_instead_is_said():
    listed = policy_diagram(FEN, parse_policy('M: a1a5 d2d4 E: 0.2 0.1 B: a1a5'), played='d2d4')
    assert [text for text, _ in listed.lines] == ['1. a1a5 · +0.20 · its best · illegal', '2. d2d4 · +0.10 · played']
    drawn = policy_diagram(FEN, parse_policy('nothing'), played='a2a3')
    assert drawn.lines == (('no best move', True), ('a2a3 · played', False)) and drawn.arrows == ()


def test_a_completion_with_a_position_of_its_own_is_drawn_as_unreadable():
    policy, = row_diagrams({'task': 'P', 'prompt': f'P: {FEN}', 'completion': f'P: {AFTER} M: a7a6 E: 0.0 B: a7a6', 'reward': -.3})
    assert policy.arrows == () and policy.lines == (('no best move', True),)
    step, = row_diagrams(A_ROW | {'completion': f'A: {FEN}+f1b5+f1b5+{AFTER}+0.001+0+0'})
    assert 'unreadable' in step.title


def test_a_reward_within_the_scorers_tolerance_is_right():
    told, _ = row_diagrams(A_ROW | {'completion': f'{AFTER}+0.0011+0+0'})
    assert told.lines == (('all right', False),)


@pytest.mark.parametrize('completion, squares, lines', [
    (f'{AFTER}+0.001+0+0', [], [('all right', False)]),
    (f'{AFTER.replace("1B2p3", "4p3")}+0.001+0+1', ['b5'], [('wrong squares: b5', True), ('illegal: True, not False', True)]),
    (f'{AFTER.replace(" b ", " w ")}+0.5+1+0', [], [('rest of the FEN: w KQkq - 3 3, not b KQkq - 3 3', True),
                                                   ('reward: 0.5, not 0.001', True), ('over: True, not False', True)])])
def test_environment_diagrams_mark_what_is_wrong(completion, squares, lines):
    told, true = row_diagrams(A_ROW | {'completion': completion})
    assert [square for square, _ in told.squares] == squares == [square for square, _ in true.squares]
    assert list(told.lines) == lines and true.fen == AFTER and true.lines == (('f1b5 is played, reward 0.001', False),)


def test_an_unreadable_step_shows_the_truth_alone_and_an_illegal_move_says_so():
    only, = row_diagrams(A_ROW | {'completion': 'what?'})
    assert only.fen == AFTER and 'unreadable' in only.title and ('reward: None, not 0.001', True) in only.lines
    _, true = env_diagrams(FEN, 'f1f9', parse_env(f'{FEN}+-1.0+0+1'))
    assert true.fen == FEN and true.lines == (('f1f9 is illegal: the position stays', False),) and true.arrows == ()


def test_wrong_squares_are_those_that_differ():
    assert wrong_squares(FEN, FEN) == [] and wrong_squares(FEN, AFTER) == ['f1', 'b5']


@settings(max_examples=60)
@given(st.text(max_size=40), st.lists(st.sampled_from(['M:', 'E:', 'B:', 'e2e4', 'e2e2', 'a7a8q', '0.3', '-999.97', '+', AFTER, '8/8/8/8/8/8/8/8', '0', '<b>'])),
       st.sampled_from('PA'))
def test_any_completion_can_be_drawn(text, words, task):
    row = (P_ROW if task == 'P' else A_ROW) | {'completion': ' '.join(words) + text, 'target': ' '.join(reversed(words))}
    diagrams = row_diagrams(row)
    assert len(diagrams) == 1 or task == 'A' and len(diagrams) == 2
    assert all('<b>' not in diagram_html(diagram).partition('</b>')[2] for diagram in diagrams)


@pytest.mark.parametrize('prompt', ['P: fen', 'P: 8/8/8/8/8/8/8/8', 'P: 8/8/8/8/8/8/8/8 w - - 0 1', 'A: x+y+z+', 'A: 8/8/8/8/8/8/8/KK6 w - - 0 1+a1a2+a1a2+', ''])
def test_an_impossible_position_is_not_drawn(prompt):
    assert row_diagrams({'task': prompt[:1] or 'P', 'prompt': prompt, 'completion': 'M: e2e4', 'reward': 0.}) == []


@pytest.mark.parametrize('count, kept', [(1, [.9]), (2, [.9, .1]), (3, [.9, .5, .1]), (9, [.9, .7, .5, .3, .1])])
def test_best_middle_and_worst_are_shown(count, kept):
    assert pick_rows(pd.DataFrame({'reward': [.1, .9, .5, .3, .7]}), count).reward.tolist() == kept


def test_boards_show_best_and_worst_policy_and_worst_environment():
    policy = [P_ROW | {'completion': 'M: e2e3', 'reward': reward} for reward in (.2, .9, .5)]
    environment = [A_ROW | {'completion': f'{AFTER}+0.001+0+0', 'reward': reward} for reward in (1., .7)]
    titles = re.findall('<b>(.*?)</b>', boards_html(pd.DataFrame(policy + environment)))
    assert titles == ['policy, reward 0.90', 'policy, reward 0.20', 'environment, reward 0.70', 'the rules']
    assert boards_html(policy[:1]).count('<figure') == 1 and boards_html(IMPOSSIBLE) == boards_html([]) == ''


@pytest.mark.parametrize('row', [{'task': 'P', 'prompt': 'P: 8/8/8/8/8/4k3/8/K6R', 'completion': 'M: h1h2 E: 1.0 B: h1h2'},
                                 {'task': 'A', 'prompt': 'A: 8/8/8/8/8/4k3/8/K6R+h1h2+h1h2+', 'completion': '8/8/8/8/8/4k3/7R/K7 b - - 1 1+0.001+0+0'}])
def test_a_board_alone_is_drawn(row):
    first, *_ = row_diagrams(row | {'reward': 1.})
    assert first.white_below and diagram_html(first)
