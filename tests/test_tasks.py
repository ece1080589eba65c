"The task formats: round trips, every way a line can be wrong, and parsers that survive anything."

import math
import random
import re
import subprocess
import sys
import time
from functools import cache

import chess
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rookworld_nb import tasks
from rookworld_nb.tasks import (
    EnvAnswer,
    PolicyAnswer,
    TaskFormatError,
    env_prompt,
    format_env,
    format_policy,
    is_fen,
    is_uci,
    parse_env,
    parse_policy,
    policy_prompt,
    read_prompt,
    split_line,
    task_of,
)

START = chess.STARTING_FEN
UCI = st.from_regex(r'[a-h][1-8][a-h][1-8][qrbn]?', fullmatch=True)
PAWNS = st.floats(-999.99, 999.99).map(lambda x: round(x, 2)) | st.sampled_from([0.0, -0.0, 999.97, -999.79])


@cache
def played_fens(n, seed=0):
    rng, found = random.Random(seed), []
    while len(found) < n:
        board = chess.Board()
        while not board.is_game_over() and len(board.move_stack) < 80:
            board.push(rng.choice(list(board.legal_moves)))
            found.append(board.fen())
    return found


def fens():
    return st.sampled_from(played_fens(500))


@st.composite
def candidates(draw):
    moves = draw(st.lists(UCI, min_size=1, max_size=5, unique=True))
    return moves, draw(st.lists(PAWNS, min_size=len(moves), max_size=len(moves)))


# --- round trips


@given(fens(), candidates(), st.booleans())
def test_policy_round_trip(fen, pair, padded):
    moves, evals = pair
    line = format_policy(fen, moves, evals, padded=padded)
    read = parse_policy(line)
    assert (read.fen, read.moves, read.evals) == (fen, tuple(moves), tuple(evals))
    assert read.best == moves[evals.index(max(evals))]
    assert read.has_form() and read.well_formed == (len(moves) >= 2)
    prompt, completion = split_line(line)
    assert prompt == policy_prompt(fen) and prompt + completion == line
    part = parse_policy(completion)
    assert part == PolicyAnswer(None, read.moves, read.evals, read.best)
    assert '-0.0 ' not in line
    assert all(re.fullmatch(r'-?\d+\.\d{1,2}', word) for word in line.split('E:')[1].split('B:')[0].split())


@given(
    fens(),
    fens(),
    UCI,
    st.lists(UCI, max_size=9),
    st.sampled_from([1.0, 0.5, 0.001, -1.0]),
    st.booleans(),
    st.booleans(),
)
def test_env_round_trip(fen, new_fen, uci, before, reward, terminated, truncated):
    history = (*before, uci)
    line = format_env(fen, uci, history, new_fen, reward, terminated, truncated)
    assert parse_env(line) == EnvAnswer(fen, uci, history, new_fen, reward, terminated, truncated, new_fen)
    assert parse_env(line.removeprefix('A: ')) == parse_env(line)
    prompt, completion = split_line(line)
    assert prompt + completion == line and prompt == env_prompt(fen, uci, history) and prompt.count('+') == 3
    assert split_line(line.removeprefix('A: ')) == (prompt, completion)
    assert parse_env(completion) == EnvAnswer(None, None, (), new_fen, reward, terminated, truncated, new_fen)
    assert type(parse_env(line).terminated) is bool


@given(fens(), candidates())
def test_padded_fields_start_at_fixed_columns(fen, pair):
    line = format_policy(fen, *pair)
    assert line[:3] == 'P: ' and (line[93:96], line[126:129], line[169:172]) == ('M: ', 'E: ', 'B: ')
    assert parse_policy(line) == parse_policy(' '.join(line.split()))  # the amount of white space means nothing


def test_public_layout_literally():
    moves, evals = ['e2e4', 'd2d4'], [0.3, 999.97]
    expected = f"P: {START:90}M: {'e2e4 d2d4':30}E: {'0.3 999.97':40}B: d2d4"
    assert format_policy(START, moves, evals) == expected
    assert format_policy(START, moves, evals, padded=False) == f'P: {START} M: e2e4 d2d4 E: 0.3 999.97 B: d2d4'
    assert format_env(START, 'e2e5', None, START, -1, 0, 1) == f'A: {START}+e2e5+e2e5+{START}+-1.0+0+1'


# --- formatting refuses what a line cannot hold


@pytest.mark.parametrize(
    'moves, evals, best, complaint',
    [
        ([], [], None, '1-5 moves, not 0'),
        (['e2e4'] * 6, [0.0] * 6, None, '1-5 moves, not 6'),
        (['e2e4', 'd2d4'], [0.1], None, '1 evaluations for 2 moves'),
        (['e2e4', 'd2d4'], [0.1, 0.2, 0.3], None, '3 evaluations for 2 moves'),
        (['e2e4', 'E7E5'], [0.1, 0.2], None, "'E7E5' is not a UCI move"),
        (['e2e4', 'Nf3'], [0.1, 0.2], None, "'Nf3'"),
        (['e2e4', None], [0.1, 0.2], None, 'None'),
        (['e2e4', 'e2e4'], [0.1, 0.2], None, 'distinct'),
        (['e2e4', 'd2d4'], [0.1, math.nan], None, 'nan'),
        (['e2e4', 'd2d4'], [0.1, 'good'], None, "'good'"),
        (['e2e4', 'd2d4'], [0.1, None], None, 'pawns.*None'),
        (['e2e4', 'd2d4'], [0.1, math.inf], None, 'inf'),
        (['e2e4', 'd2d4'], [0.1, 1e17], None, r'1e\+17'),
        (['e2e4', 'd2d4'], [0.1, 0.2], 'g1f3', "'g1f3' is not one of"),
    ],
)
def test_policy_refusals(moves, evals, best, complaint):
    with pytest.raises(TaskFormatError, match=complaint):
        format_policy(START, moves, evals, best)


BAD_FENS = [
    '',
    'x',
    START.split()[0],
    ' '.join(START.split()[:4]),
    START.replace('8/8', '8/7', 1),
    START.replace('8/8', '44/8', 1),
    START + ' 1',
    START.replace(' w ', ' x '),
    START.replace('/8', '', 1),
    START.replace('KQkq', 'QKqk'),
    START + '\n',
    None,
]


@pytest.mark.parametrize('fen', BAD_FENS)
def test_bad_fens_are_named(fen):
    for call in (
        lambda: policy_prompt(fen),
        lambda: env_prompt(fen, 'e2e4'),
        lambda: format_policy(fen, ['e2e4'], [0.1]),
        lambda: format_env(START, 'e2e4', None, fen, 1.0, 0, 0),
    ):
        with pytest.raises(TaskFormatError) as caught:
            call()
        assert repr(fen) in str(caught.value)


@pytest.mark.parametrize('fen', [START.split()[0], START + ' 1', START.replace(' w ', ' x ')])
def test_a_line_teaches_no_position_that_is_none(fen):
    with pytest.raises(TaskFormatError, match='not a complete A: line.*not a six-field FEN'):
        split_line(f'A: {START}+e2e4+e2e4+{fen}+0.001+0+0')


@pytest.mark.parametrize(
    'change, complaint',
    [
        (dict(uci=''), 'the move'),
        (dict(uci='e2 e4'), "'e2 e4'"),
        (dict(uci='e2+e4'), r"'e2\+e4'"),
        (dict(uci='e2,e4'), 'e2,e4'),
        (dict(history=['e2e4', 'x\n']), 'history'),
        (dict(history='e2e4'), "list of moves, not the text 'e2e4'"),
        (dict(reward='much'), "reward.*'much'"),
        (dict(reward=math.nan), 'nan'),
        (dict(reward=math.inf), 'inf'),
        (dict(reward=1e20), r'1e\+20'),
        (dict(reward=0.1 + 0.2), '0.30000000000000004'),
        (dict(terminated=2), 'terminated'),
        (dict(truncated='1'), 'truncated'),
        (dict(truncated=None), 'truncated'),
    ],
)
def test_env_refusals(change, complaint):
    good = dict(fen=START, uci='e2e4', history=None, new_fen=START, reward=0.001, terminated=False, truncated=False)
    format_env(**good)
    with pytest.raises(TaskFormatError, match=complaint):
        format_env(**{**good, **change})


def test_best_label():
    assert format_policy(START, ['e2e4', 'd2d4', 'c2c4'], [0.1, 0.3, 0.3]).endswith('B: d2d4')  # first of equals
    assert format_policy(START, ['e2e4', 'd2d4'], [0.301, 0.302], padded=False).endswith('E: 0.3 0.3 B: d2d4')
    assert format_policy(START, ['e2e4', 'd2d4'], [0.1, 0.3], best='e2e4').endswith('B: e2e4')  # a published label
    assert format_policy(START, ['e2e4', 'd2d4'], [-999.79, -999.97]).endswith('B: e2e4')  # the later mate
    assert format_policy(START, ['e2e4'], [-0.001], padded=False).endswith('E: 0.0 B: e2e4')  # never -0.0


def test_at_most_ten_plies_are_shown():
    plies = [m for m, _ in zip((f'{a}{i}{b}{i + 1}' for i in (2, 4) for a in 'abcdefgh' for b in 'ab'), range(13))]
    prompt = env_prompt(START, plies[-1], plies)
    assert prompt.split('+')[2].split() == plies[-10:]
    assert (
        env_prompt(START, 'e2e4') == f'A: {START}+e2e4+e2e4+' and env_prompt(START, 'e2e4', ()) == f'A: {START}+e2e4++'
    )


# --- reading: each damage is noticed, the rest is still read

GOOD = 'M: e2e4 d2d4 g1f3 E: 0.3 0.2 -0.1 B: e2e4'


@pytest.mark.parametrize(
    'text, moves, evals, best, formed',
    [
        (GOOD, 3, 3, 'e2e4', True),
        ('   ' + GOOD.replace(' ', '    ') + '   ', 3, 3, 'e2e4', True),
        (GOOD.replace(': ', ':'), 3, 3, 'e2e4', True),
        ('\n' + GOOD, 3, 3, 'e2e4', True),
        (GOOD + '<|endoftext|>P: more M: a1a2', 3, 3, 'e2e4', True),
        (GOOD + '\nM: e2e4', 3, 3, 'e2e4', True),
        (GOOD + ' d2d4', 3, 3, 'e2e4', False),  # something after the answer, in its own line
        (GOOD + ' M: a2a3', 3, 3, 'e2e4', False),  # a second M: does not replace the first
        ('so: ' + GOOD, 3, 3, 'e2e4', False),
        (GOOD.replace('B: e2e4', ''), 3, 3, None, False),
        (GOOD.replace('B: e2e4', 'B:'), 3, 3, None, False),
        (GOOD.replace('B: e2e4', 'B: Nf3'), 3, 3, None, False),
        (GOOD.replace('e2e4 d2d4', 'e2e4 d2d9'), 1, 3, 'e2e4', False),
        (GOOD.replace('0.2', 'good'), 3, 1, 'e2e4', False),
        (GOOD.replace('0.2', 'nan'), 3, 1, 'e2e4', False),
        (GOOD.replace('0.2', '1e9'), 3, 1, 'e2e4', False),
        (GOOD.replace('0.2', '9' * 400), 3, 1, 'e2e4', False),
        (GOOD.replace('0.2', '\u0663.5'), 3, 1, 'e2e4', False),
        (GOOD.replace(' E:', ' Nf3 E:'), 3, 3, 'e2e4', False),  # a surplus unreadable word: complete, but not clean
        (GOOD.replace(' B:', ' ok B:'), 3, 3, 'e2e4', False),
        (GOOD.replace(' -0.1', ''), 3, 2, 'e2e4', False),
        (GOOD.replace('g1f3', ''), 2, 3, 'e2e4', False),
        ('M: e2e4 E: 0.3 B: e2e4', 1, 1, 'e2e4', False),  # one move: only has_form(1)
        ('M: a2a3 b2b3 c2c3 d2d3 e2e3 f2f3 E: 1 1 1 1 1 1 B: a2a3', 6, 6, 'a2a3', False),
        ('E: 0.3 0.2 M: e2e4 d2d4 B: e2e4', 2, 2, 'e2e4', False),  # out of order
        ('M: E: B:', 0, 0, None, False),
        ('', 0, 0, None, False),
    ],
)
def test_policy_damage(text, moves, evals, best, formed):
    read = parse_policy(text)
    assert (len(read.moves), len(read.evals), read.best, read.well_formed) == (moves, evals, best, formed)
    whole = parse_policy(f'P: {START} ' + text.lstrip())
    assert (len(whole.moves), len(whole.evals), whole.best) == (moves, evals, best)


def test_one_move_has_form_where_one_is_accepted():
    read = parse_policy('M: e2e4 E: 0.3 B: e2e4')
    assert read.has_form() and read.has_form(1) and not read.has_form(2) and not read.well_formed


def test_a_completion_that_repeats_the_prompt_is_malformed_behind_its_prompt():
    line = format_policy(START, ['e2e4', 'd2d4'], [0.1, 0.2])
    assert not parse_policy(policy_prompt(START) + ' ' + line).well_formed
    env = format_env(START, 'e2e4', None, START, 0.001, 0, 0)
    assert not parse_env(env_prompt(START, 'e2e4') + env).well_formed


ENV = f'{START}+0.001+0+0'


@pytest.mark.parametrize(
    'text, unread',
    [
        (ENV, ()),
        (f'  {ENV}  ', ()),
        (ENV.replace('+', ' + '), ()),
        (ENV + '<|endoftext|>A: x', ()),
        (ENV + '\nmore', ()),
        (ENV.replace('0.001', '1'), ()),
        (ENV.replace('0.001', '-1.0'), ()),
        (ENV.replace('0.001', 'win'), ('reward',)),
        (ENV.replace('0.001', 'inf'), ('reward',)),
        (ENV.replace('0.001', '1_0'), ('reward',)),
        (ENV.replace('+0+0', '+2+0'), ('terminated',)),
        (ENV[:-1] + 'x', ('truncated',)),
        (ENV + ' 0', ('truncated',)),
        (ENV[:-2], ('truncated',)),
        (START, ('reward', 'terminated', 'truncated')),
        ('', ('new_fen', 'reward', 'terminated', 'truncated')),
        (ENV.replace('8/8', '8/7', 1), ('new_fen',)),
        (ENV.replace('8/8', '8', 1), ('new_fen',)),
        (ENV.replace('8/8', '9/8', 1), ('new_fen',)),
        (ENV.replace('rnbq', 'rnxq'), ('new_fen',)),
        (ENV.replace('8/8', '53/8', 1), ('new_fen',)),
    ],
)
def test_env_damage(text, unread):
    read = parse_env(text)
    names = ('new_fen', 'reward', 'terminated', 'truncated')
    assert tuple(n for n in names if getattr(read, n) is None) == unread
    assert read.well_formed == (not unread)
    assert read.new_fen_text == ' '.join(text.split('<|')[0].split('\n')[0].split('+')[0].split())


def test_surplus_env_fields():
    for surplus in ('+0', '+0+0', '+a+b+c'):
        assert not parse_env(ENV + surplus).well_formed
    assert not parse_env(f'A: {START}+e2e4+e2e4+{ENV}+0').well_formed
    assert parse_env(f'A: {START}+e2e4+e2e4+{ENV}+0').new_fen == START
    assert not parse_env(f'A: {START}++e2e4+{ENV}').well_formed


def test_history_is_read_with_spaces_or_commas():
    for separated in ('e7e5 g1f3', 'e7e5,g1f3', 'e7e5, g1f3', ' e7e5  g1f3 '):
        line = f'{START}+g1f3+{separated}+{ENV}'
        assert parse_env(line).history == ('e7e5', 'g1f3')
        assert split_line(line)[0] == f'A: {START}+g1f3+e7e5 g1f3+'
    assert parse_env(f'{START}+zz+,+{ENV}').history == ()


# --- any string at all

PIECES = st.sampled_from(
    [
        'P:',
        'M:',
        'E:',
        'B:',
        'A:',
        '+',
        ' ',
        '\n',
        ',',
        '-',
        '.',
        'e2e4',
        'e7e8q',
        '0.3',
        '-1.0',
        '0',
        '1',
        START,
        '<|endoftext|>',
        '\x00',
        '\ud800',
        '\u2028',
        '\u0661',
        '9' * 500,
        'nan',
        '1e400',
        '/' * 7,
        '8/' * 7 + '8',
    ]
)


WHOLE = st.tuples(st.sampled_from([f'P: {START} ', f'A: {START}+e2e4+e2e4+', f'{START}+e2e4++']), st.sampled_from([GOOD, ENV]),
                  PIECES | st.text(max_size=3)).map(''.join)


@given(st.text() | st.lists(PIECES | st.text(max_size=3), max_size=30).map(''.join) | WHOLE)
@example('A:')
@example('P:')
@example('+' * 10)
@example('P:M:E:B:')
def test_parsers_survive_anything(text):
    policy, env = parse_policy(text), parse_env(text)
    assert all(map(is_uci, policy.moves)) and all(map(math.isfinite, policy.evals))
    assert policy.best is None or is_uci(policy.best)
    assert policy.fen is None or is_fen(policy.fen)
    assert env.new_fen is None or is_fen(env.new_fen)
    assert env.reward is None or math.isfinite(env.reward)
    assert env.terminated in (None, True, False) and env.truncated in (None, True, False)
    if policy.well_formed:
        assert 2 <= len(policy.moves) == len(policy.evals) <= 5
    try:
        prompt, completion = split_line(text)
    except TaskFormatError:
        return
    assert parse_policy(prompt + completion).has_form() or parse_env(prompt + completion).well_formed
    assert task_of(prompt) in 'PA'


@given(st.binary(max_size=200))
def test_parsers_survive_decoded_bytes(data):
    for codec in ('latin-1', 'utf-16-le'):
        parse_policy(data.decode(codec, 'replace')), parse_env(data.decode(codec, 'replace'))


def test_reading_time_grows_gently():
    for text in (
        'M: ' + 'e2e4 ' * 50_000,
        '+' * 100_000,
        'P:M:' * 50_000,
        '8/' * 100_000,
        ' ' * 200_000 + 'x',
        '1' * 200_000,
    ):
        start = time.process_time()
        parse_policy(text), parse_env(text)
        assert time.process_time() - start < 5, text[:10]    # a quadratic pattern would take minutes


# --- boards by shape agree with python-chess


@given(fens())
def test_is_fen_accepts_what_python_chess_writes(fen):
    assert is_fen(fen) and is_fen(fen, strict=True)


RANKS = st.sampled_from(['8', 'p7', '3q4', 'RNBQKBNR', '1p1p1p1P'])
NEARLY = st.tuples(st.lists(RANKS, min_size=7, max_size=9), st.integers(0, 6), RANKS | st.sampled_from(['7', '44', '9', 'p8', '71', '7x', ''])).map(
    lambda drawn: '/'.join([*drawn[0][:drawn[1]], drawn[2], *drawn[0][drawn[1]+1:]]))


@given(NEARLY | st.lists(st.text('12345678pnbrqkPNBRQK9x ', min_size=0, max_size=9), min_size=7, max_size=9).map('/'.join))
@example('/'.join(['8']*9))
@example('8/8/8/8/8/8/8/8')
@example('44/8/8/8/8/8/8/8')
@example('8/8/8/8/8/8/8/7')
@example('8/8/8/8/8/8/8/p7p')
def test_board_shape_agrees_with_python_chess(board_fen):
    try:
        chess.Board(None).set_board_fen(board_fen)
    except ValueError:
        expected = False
    else:
        expected = ' ' not in board_fen
    if ' ' not in board_fen:
        assert is_fen(board_fen) == expected


# --- which task, and cutting lines


def test_task_of():
    assert task_of('P: x') == task_of('  P: x') == 'P' and task_of('A: x') == task_of(f'{START}+e2e4+e2e4+') == 'A'
    for text in ('', 'hello', START, 'B: e2e4', 'e2+e4'):
        with pytest.raises(TaskFormatError, match='starts with'):
            task_of(text)


@pytest.mark.parametrize('prompt', [f'P: {START}', f'P: {START} M: e2e4', f' P: {START}', f'A: {START}+e2e4+e2e4+', f'{START}+e2e4++', f'A: {START}+e2e4+e2e4+{START}'])
def test_prompts_of_both_tasks_pass(prompt):
    asked = read_prompt(prompt)
    assert asked.fen == START and (task_of(prompt) == 'P' or asked.uci == 'e2e4')


@pytest.mark.parametrize('prompt, said', [
    ('P: hello', 'P: and a FEN'), ('P: 9/8 w - - 0 1', 'P: and a FEN'), ('P:', 'P: and a FEN'), (f'A: {START}+e2e4+', 'fen.uci.history'), (f'A: {START}+e2e4', 'fen.uci'),
    (f'A: {START}+++', 'fen.uci'), ('A: x+y+z+', 'fen.uci'), ('A: ', 'fen.uci'), ('hello', 'starts with')])
def test_what_no_task_asks_is_refused_by_name(prompt, said):
    with pytest.raises(TaskFormatError, match=said) as caught: read_prompt(prompt)
    assert prompt[:20] in str(caught.value)


@pytest.mark.parametrize(
    'line',
    [
        '',
        'nonsense',
        f'P: {START}',
        f'P: {START} M: e2e4 E: 0.1 0.2 B: e2e4',
        f'A: {START}+e2e4+e2e4+{START}+0.001+0',
        f'{START}+e2e4+e2e4+{START}+0.001+0+x',
        f'P: {START[5:]} M: e2e4 E: 0.1 B: e2e4',
        'P: M: e2e4 E: 0.1 B: e2e4',
        f'P: {START} x M: e2e4 E: 0.1 B: e2e4',
    ],
)
def test_incomplete_lines_are_named(line):
    with pytest.raises(TaskFormatError) as caught:
        split_line(line)
    assert line[:60] in str(caught.value)


FIVE = 'M: e2e4 d2d4 g1f3 c2c4 b1c3 E: 0.3 0.3 0.2 0.1 0.0 B: e2e4'


@pytest.mark.parametrize(
    'line, said',
    [
        ('P:', "the FEN is unreadable: ''; it needs six fields, and 8 ranks of 8 squares"),
        (f"P: {START.replace('rnbqkbnr', 'rnbqkbnr9')} {FIVE}", f"the FEN is unreadable: '{START.replace('rnbqkbnr', 'rnbqkbnr9')}'; it needs six fields"),
        (f'P: {START[:-4]}', f"the FEN is unreadable: '{START[:-4]}'; it needs six fields"),
        (f'P: {START} {FIVE[3:]}', 'no M: after the FEN'),
        (f"P: {START} {FIVE.replace('M:', 'X:')}", 'no M: after the FEN'),
        (f'P: {START} X: e2e4', 'no M: after the FEN'),
        (f"P: {START} {FIVE.replace('E:', '')}", 'no E: after the moves'),
        (f"P: {START} {FIVE.replace('B:', 'b:')}", 'no B: after the evaluations'),
        (f'P: {START} {FIVE} {FIVE}', 'the labels are P: M: E: B: M: E: B:, not P: M: E: B:'),
        (f'P: {START} B: e2e4 M: e2e4 E: 0.3', 'the labels are P: B: M: E:, not P: M: E: B:'),
        (f"P: {START} {FIVE.replace('d2d4', 'f1b9')}", "move 2 'f1b9' is no UCI move such as e2e4"),
        (f"P: {START} {FIVE.replace('0.3 0.3', 'zero 0.3')}", "evaluation 1 'zero' is no number such as 0.35"),
        (f"P: {START} {FIVE.replace(' 0.0', '')}", '5 moves and 4 evaluations'),
        (f'P: {START} M: E: B: e2e4', '0 moves, not 1 to 5'),
        (f"P: {START} {FIVE.replace(' E:', ' a2a3 E:')}", '6 moves, not 1 to 5'),
        (f'P: {START} {FIVE[:-5]}', '0 best moves, not 1'),
        (f'P: {START} {FIVE} d2d4', '2 best moves, not 1'),
        (f'P: {START} {FIVE[:-4]}Nf3', "best move 'Nf3' is no UCI move such as e2e4"),
        (f'A: {START}+e2e4', '2 fields, not the 7 of fen+uci+history+new_fen+reward+terminated+truncated'),
        (f'A: {START}+e2e4+e2e4+{ENV}+0', '8 fields, not the 7 of fen'),
        (f'{START}+0.001+0+0', '4 fields, not the 7 of fen'),
        (f'A: {START[5:]}+e2e4+e2e4+{ENV}', f"fen is unreadable: '{START[5:]}'"),
        (f'A: {START}++e2e4+{ENV}', 'uci is missing'),
        (f'A: {START}+e2e4+e2e4++0.001+0+0', 'new_fen is missing'),
        (f"A: {START}+e2e4+e2e4+{ENV.replace('8/8', '8/9', 1)}", f"new_fen is unreadable: '{START.replace('8/8', '8/9', 1)}'"),
        (f"{START}+e2e4++{ENV.replace('0.001', 'win')}", "reward is unreadable: 'win'"),
        (f'A: {START}+e2e4+e2e4+{ENV[:-3]}2+0', "terminated is unreadable: '2'"),
        (f'A: {START}+e2e4+e2e4+{ENV[:-1]}', 'truncated is missing'),
    ],
)
def test_the_part_that_is_wrong_is_named(line, said):
    with pytest.raises(TaskFormatError) as caught: split_line(line)
    assert str(caught.value).startswith(f"not a complete {task_of(line)}: line: {line!r} ({said}")


def test_of_a_bare_fen_is_said_what_makes_lines_of_it():
    with pytest.raises(TaskFormatError) as caught: split_line(START)
    assert str(caught.value) == f"a line starts with 'P: ' or 'A: ', not '{START}'; `rookworld label` makes P: lines of FENs"
    with pytest.raises(TaskFormatError, match="not 'hello'$"): split_line('hello')


def test_answers_are_read_up_to_the_end_token_of_the_tokenizer():
    weights = pytest.importorskip('rookworld_nb.weights')
    assert (
        parse_policy(GOOD + weights.END_TOKEN + 'x').well_formed
        and parse_env(ENV + weights.END_TOKEN + 'x').well_formed
    )


def test_tasks_needs_the_standard_library_only():
    code = (
        "import sys, rookworld_nb.tasks; print([m for m in ('torch', 'numpy', 'chess', 'pandas') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip() == '[]'
    )


def test_constants():
    assert (tasks.MAX_MOVES, tasks.HISTORY_PLIES, sum(tasks.FIELD_WIDTHS.values())) == (5, 10, 160)


def test_a_prompt_without_its_answer_is_told_where_answers_come_from():
    with pytest.raises(TaskFormatError, match='a prompt without its answer, which `rookworld label` writes'): split_line('P: 8/8/8/8/8/k7/1r6/7K w - - 35 41')


def test_a_history_ends_with_the_move():
    told = START, 1., False, False
    assert format_env(START, 'e2e4', ['a7a6', 'e2e4'], *told) and format_env(START, 'e2e4', [], *told)
    with pytest.raises(TaskFormatError, match='must end with e2e4, not with a7a6'): format_env(START, 'e2e4', ['e2e4', 'a7a6'], *told)
    with pytest.raises(TaskFormatError, match='must end with e2e4, not with a7a6'): env_prompt(START, 'e2e4', ['a7a6'])
    line = format_env(START, 'e2e4', None, *told)
    with pytest.raises(TaskFormatError, match='not a complete A: line.*must end with e2e4'): split_line(line.replace('+e2e4+e2e4+', '+e2e4+a7a6+'))


def test_a_number_that_no_float_can_hold_is_a_format_error():
    with pytest.raises(TaskFormatError, match='an evaluation must be pawns'): format_policy(chess.STARTING_FEN, ['e2e4'], [10**400])
    with pytest.raises(TaskFormatError, match='the reward must be a finite number'): format_env(chess.STARTING_FEN, 'e2e4', None, chess.STARTING_FEN, -10**400, 0, 0)
