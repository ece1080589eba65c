"The environment against python-chess over thousands of moves, and the engine client against engines that misbehave."

import itertools
import logging
import math
import multiprocessing
import os
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import chess
import chess.engine
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookworld_nb import rules
from rookworld_nb.rules import (
    AnalysisCache,
    CacheError,
    Candidate,
    EngineError,
    EngineNotFoundError,
    EnvStep,
    InvalidFenError,
    Stockfish,
    StockfishPool,
    check_cache,
    env_step,
    fen_key,
    find_stockfish,
    legal_moves,
    win_probability,
)

START = chess.STARTING_FEN


def games(n, seed):
    "Boards along random games that are long enough to end in every way."
    rng = random.Random(seed)
    for _ in range(n):
        board = chess.Board()
        while any(board.legal_moves) and len(board.move_stack) < 400:
            yield board
            moves = list(board.legal_moves)
            special = [m for m in moves if board.is_capture(m) or board.is_castling(m) or m.promotion]
            board.push(rng.choice(special if special and rng.random() < 0.4 else moves))


# --- transitions


def reference(fen, uci):
    "The same rules through python-chess's own outcome."
    board = chess.Board(fen)
    move = next((m for m in board.legal_moves if m.uci() == uci), None)
    if move is None:
        return EnvStep(fen, -1.0, False, True)
    board.push(move)
    outcome = board.outcome(claim_draw=False)  # needs two repetitions more than one move can make
    reward = 0.001 if outcome is None else 0.5 if outcome.winner is None else 1.0
    return EnvStep(board.fen(), reward, outcome is not None, False)


def test_thousands_of_transitions():
    rng, kinds = (
        random.Random(1),
        dict.fromkeys(('castle', 'en passant', 'promotion', 'mate', 'draw', 'capture', 'check'), 0),
    )
    total = 0
    for board in games(8, seed=1):
        moves = list(board.legal_moves)
        named = [m for m in moves if board.is_castling(m) or board.is_en_passant(m) or m.promotion]
        for move in rng.sample(moves, min(2, len(moves))) + named:
            step = env_step(board.fen(), move.uci(), [move.uci()])
            assert step == reference(board.fen(), move.uci())
            assert type(step.terminated) is bool and type(step.truncated) is bool and type(step.reward) is float
            kinds['castle'] += board.is_castling(move)
            kinds['en passant'] += board.is_en_passant(move)
            kinds['promotion'] += move.promotion is not None
            kinds['capture'] += board.is_capture(move)
            kinds['check'] += board.gives_check(move)
            kinds['mate'] += step.reward == 1.0
            kinds['draw'] += step.reward == 0.5
            total += 1
    assert total > 2000 and min(kinds.values()) > 0, kinds


SPECIAL = {
    'castle short': (
        'r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1',
        'e1g1',
        'r3k2r/8/8/8/8/8/8/R4RK1 b kq - 1 1',
        0.001,
        False,
    ),
    'castle long': ('r3k2r/8/8/8/8/8/8/R3K2R b KQkq - 0 1', 'e8c8', '2kr3r/8/8/8/8/8/8/R3K2R w KQ - 1 2', 0.001, False),
    'rook move ends a right': (
        'r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1',
        'a1a8',
        'R3k2r/8/8/8/8/8/8/4K2R b Kk - 0 1',
        0.001,
        False,
    ),
    'double step, nobody near': (
        START,
        'e2e4',
        'rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1',
        0.001,
        False,
    ),
    'double step, capturable': (
        '4k3/8/8/8/3p4/8/4P3/4K3 w - - 0 1',
        'e2e4',
        '4k3/8/8/8/3pP3/8/8/4K3 b - e3 0 1',
        0.001,
        False,
    ),
    'double step, capturer pinned': ('3rk3/8/8/8/4p3/8/3P4/3KR3 w - - 5 9', 'd2d4', None, 0.001, False),
    'en passant': ('4k3/8/8/8/3pP3/8/8/4K3 b - e3 0 1', 'd4e3', '4k3/8/8/8/8/4p3/8/4K3 w - - 0 2', 0.001, False),
    'promotion': ('8/P7/8/8/8/8/k7/4K3 w - - 0 1', 'a7a8n', 'N7/8/8/8/8/8/k7/4K3 b - - 0 1', 0.5, True),
    'promotion with mate': ('7k/P7/6K1/8/8/8/8/8 w - - 0 1', 'a7a8q', 'Q6k/8/6K1/8/8/8/8/8 b - - 0 1', 1.0, True),
    "fool's mate": (
        'rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2',
        'd8h4',
        'rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3',
        1.0,
        True,
    ),
    'stalemate': ('7k/8/5K2/6Q1/8/8/8/8 w - - 0 1', 'g5g6', '7k/8/5KQ1/8/8/8/8/8 b - - 1 1', 0.5, True),
    'last piece taken': ('8/8/8/8/8/8/k7/1rK5 w - - 0 1', 'c1b1', None, -1.0, False),
    'insufficient material': ('8/8/8/8/8/k7/8/1rK5 w - - 0 1', 'c1b1', '8/8/8/8/8/k7/8/1K6 b - - 0 1', 0.5, True),
    'fifty moves are not enough': (
        '4k3/8/8/8/8/8/8/R3K3 w - - 99 80',
        'e1e2',
        '4k3/8/8/8/8/8/4K3/R7 b - - 100 80',
        0.001,
        False,
    ),
    'one ply before the end': (
        '4k3/8/8/8/8/8/8/R3K3 w - - 148 90',
        'e1e2',
        '4k3/8/8/8/8/8/4K3/R7 b - - 149 90',
        0.001,
        False,
    ),
    'seventy-five moves': ('4k3/8/8/8/8/8/8/R3K3 w - - 149 90', 'e1e2', '4k3/8/8/8/8/8/4K3/R7 b - - 150 90', 0.5, True),
    'a pawn move resets the count': (
        '4k3/8/8/8/8/8/P7/R3K3 w - - 149 90',
        'a2a3',
        '4k3/8/8/8/8/P7/8/R3K3 b - - 0 90',
        0.001,
        False,
    ),
    'mate on the last move counts': (
        '7k/8/6K1/8/8/8/8/R7 w - - 149 90',
        'a1a8',
        'R6k/8/6K1/8/8/8/8/8 b - - 150 90',
        1.0,
        True,
    ),
}


@pytest.mark.parametrize('name', SPECIAL)
def test_special_moves(name):
    fen, uci, new_fen, reward, terminated = SPECIAL[name]
    step = env_step(fen, uci, [uci])
    assert (step.reward, step.terminated, step.truncated) == (reward, terminated, reward == -1.0)
    assert step.new_fen == new_fen or new_fen is None
    assert step == reference(fen, uci)


def test_en_passant_square_only_where_a_capture_is_legal():
    seen = 0
    for board in games(4, seed=2):
        for move in board.legal_moves:
            if board.piece_type_at(move.from_square) != chess.PAWN or abs(move.to_square - move.from_square) != 16:
                continue
            after = board.copy(stack=False)
            after.push(move)
            square = env_step(board.fen(), move.uci()).new_fen.split()[3]
            assert (square != '-') == any(after.is_en_passant(m) for m in after.legal_moves)
            seen += square != '-'
    assert seen > 0
    pinned = '8/8/8/8/k2p3R/8/4P3/4K3 w - - 0 1'  # taking e.p. would open the fourth rank
    assert env_step(pinned, 'e2e4').new_fen.split()[3] == '-'


ILLEGAL = {
    'an empty square': 'e4e5',
    'the opponent\'s piece': 'e7e5',
    'blocked': 'a1a5',
    'wrong geometry': 'g1g3',
    'own piece': 'd1d2',
    'pawn too far': 'e2e5',
    'no castling yet': 'e1g1',
    'castling as king takes rook': 'e1h1',
    'promotion of no pawn': 'g1f3q',
    'null move': '0000',
    'same square': 'e2e2',
    'upper case': 'E2E4',
    'san': 'Nf3',
    'long': 'e2e4e5',
    'short': 'e2',
    'empty': '',
    'spaces': ' e2e4',
    'line end': 'e2e4\n',
    'off the board': 'e2e9',
    'words': 'the king wins',
    'a drop': 'P@e4',
    'unicode': 'е2е4',
}


@pytest.mark.parametrize('kind', ILLEGAL)
def test_illegal_moves_change_nothing(kind):
    assert env_step(START, ILLEGAL[kind], []) == EnvStep(START, -1.0, False, True)


@pytest.mark.parametrize(
    'fen, uci',
    [
        ('4k3/8/8/8/8/8/4r3/R3K2R w KQ - 0 1', 'a1a2'),  # ignores a check
        ('4k3/4r3/8/8/8/8/4N3/4K3 w - - 0 1', 'e2c3'),  # leaves a pin
        ('4kr2/8/8/8/8/8/8/4K2R w K - 0 1', 'e1g1'),  # castles through check
        ('4k1r1/8/8/8/8/8/8/4K2R w K - 0 1', 'e1g1'),  # castles into check
        ('4k3/8/8/8/8/8/8/4K2R w - - 0 1', 'e1g1'),  # has lost the right
        ('8/P7/8/8/8/8/k7/4K3 w - - 0 1', 'a7a8'),  # promotes to nothing
        ('8/P7/8/8/8/8/k7/4K3 w - - 0 1', 'a7a8k'),  # promotes to a king
        ('8/P7/8/8/8/8/k7/4K3 w - - 0 1', 'a7a8Q'),  # capital letter
        ('4k3/8/8/8/3pP3/8/8/4K3 b - - 0 1', 'd4e3'),  # en passant one move late
        ('4k3/8/8/8/3p4/8/8/4K3 b - e3 0 1', 'd4e3'),  # en passant where no pawn stands
        ('R6k/8/6K1/8/8/8/8/8 b - - 1 1', 'h8h7'),  # after mate
    ],
)
def test_illegal_moves_in_special_positions(fen, uci):
    assert env_step(fen, uci) == EnvStep(fen, -1.0, False, True)


def test_random_moves_against_every_from_to_pair():
    squares = [a + b for a in 'abcdefgh' for b in '12345678']
    for board in list(games(1, seed=3))[::100]:
        fen = board.fen()
        for uci in (a + b + p for a in squares for b in squares for p in ('', 'q')):
            assert (uci in legal_moves(fen)) == (uci in {m.uci() for m in board.legal_moves})
        assert not any(env_step(fen, uci).truncated for uci in legal_moves(fen))


@given(st.text(max_size=8))
def test_any_text_is_a_move_or_illegal(uci):
    step = env_step(START, uci)
    assert step.truncated == (uci not in legal_moves(START)) and (step.new_fen == START) == step.truncated


def test_fen_is_unchanged_to_the_letter():
    sloppy = 'rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq e3 0 1'  # an e.p. square that nobody can use
    assert env_step(sloppy, 'e2e4').new_fen == sloppy
    assert env_step(sloppy, 'e7e5').new_fen.split()[3] == '-'


def test_history_decides_nothing():
    back_and_forth = ['g1f3', 'g8f6', 'f3g1', 'f6g8'] * 5
    assert env_step(START, 'g1f3', back_and_forth) == env_step(START, 'g1f3')


@pytest.mark.parametrize(
    'fen',
    [
        '',
        'x',
        START.replace('8/8', '8/7', 1),
        START.replace(' w ', ' white '),
        '8/8/8/8/8/8/8/8 w - - 0 1',
        '4k3/8/8/8/8/8/8/8 w - - 0 1',
        'k6k/8/8/8/8/8/8/K7 w - - 0 1',
        '4k3/8/8/8/8/8/8/K3P3 w - - 0 1',
        'k6R/8/8/8/8/8/8/K7 w - - 0 1',
        START + ' extra',
        None,
        5,
    ],
)
def test_bad_fens_are_named(fen):
    for call in (lambda: env_step(fen, 'e2e4'), lambda: legal_moves(fen)):
        with pytest.raises(InvalidFenError) as caught:
            call()
        assert repr(fen) in str(caught.value) and isinstance(caught.value, ValueError)


def test_shared_boards_are_never_changed():
    before = legal_moves(START)
    for uci in sorted(before):
        env_step(START, uci)
    legal_moves.cache_clear()
    assert legal_moves(START) == before and env_step(START, 'e2e4') == reference(START, 'e2e4')


def test_fen_key():
    assert (
        fen_key(START)
        == fen_key(START.replace('0 1', '7 30'))
        == 'rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq -'
    )
    assert fen_key(START) != fen_key(START.replace(' w ', ' b '))
    pushed = 'rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq '
    assert fen_key(pushed + 'e3 0 1') == fen_key(pushed + '- 0 1') == pushed + '-'  # nobody can take
    assert fen_key('4k3/8/8/8/8/8/8/4K3 w KQkq - 0 1') == '4k3/8/8/8/8/8/8/4K3 w - -'  # no rooks
    assert fen_key('8/8/8/8/8/8/8/8 w KQ - 0 1') == '8/8/8/8/8/8/8/8 w KQ -'  # no position: as it is written
    with pytest.raises(InvalidFenError, match='four fields'):
        fen_key('8/8 w -')


def test_a_key_claims_the_castling_rights_that_there_are():
    rights = [''.join(itertools.compress('KQkq', kept)) for kept in itertools.product((0, 1), repeat=4)]
    for there, claimed in itertools.product(rights, rights[1:]):
        K, Q, k, q = (rook if right in there else knight for right, rook, knight in zip('KQkq', 'RRrr', 'NNnn'))
        board, kept = f'{q}3k2{k}/8/8/8/8/8/8/{Q}3K2{K}', ''.join(right for right in claimed if right in there)
        assert fen_key(f'{board} w {claimed} - 0 1') == f'{board} w {kept or "-"} -'


# --- evaluation as a probability


@given(st.floats(-1000, 1000), st.floats(-1000, 1000))
def test_win_probability(a, b):
    assert 0 <= win_probability(a) <= 1
    assert win_probability(a) + win_probability(-a) == pytest.approx(1, abs=1e-12)
    if a < b:
        assert win_probability(a) <= win_probability(b)
    if abs(a) < 100:
        assert win_probability(a) == pytest.approx(1 / (1 + math.exp(-0.00368208 * 100 * a)), rel=1e-9)


def test_win_probability_never_overflows():
    assert win_probability(1e300) == 1 and win_probability(-1e300) == 0 and win_probability(0) == 0.5
    assert win_probability(999.97) > win_probability(9) > win_probability(1) > 0.5


# --- engines that misbehave

FAKE = '''
    import sys, time
    state = {state!r}
    def runs():
        with open(state, 'a') as f: f.write('x')
        return len(open(state).read())
    run, mode, bad_runs = runs(), {mode!r}, {bad_runs}
    def say(text): print(text, flush=True)
    if mode == 'mute': time.sleep(60)
    if mode == 'exits': sys.exit(3)
    for line in sys.stdin:
        words = line.split()
        if not words: continue
        if words[0] == 'uci': say('id name Fake 1\\nuciok')
        elif words[0] == 'isready': say('readyok')
        elif words[0] == 'quit': break
        elif words[0] == 'go':
            if run <= bad_runs:
                if mode == 'hangs': time.sleep(60)
                if mode == 'dies': sys.exit(1)
                if mode == 'chatters':
                    while True: say('info string thinking')
                if mode == 'huge':
                    say('info depth 1 multipv 1 score cp ' + '9'*401 + ' pv e2e4\\nbestmove e2e4')
                    continue
                if mode == 'garbage':
                    say('\\x00 info multipv pv score ?\\ninfo depth 1 multipv 1 score cp many pv e2e4\\nbestmove x')
                    continue
                if mode in ('illegal', 'repeats'):
                    moves = ['e2e4', 'd2d4', 'g1f3', 'c2c4', 'e2e5' if mode == 'illegal' else 'e2e4']
                    for i, move in enumerate(moves, 1): say(f'info depth 1 multipv {{i}} score cp 5 pv {{move}}')
                    say('bestmove e2e4'); continue
                if mode == 'few': say('bestmove e2e4'); continue
            for i, (move, score) in enumerate({lines!r}, 1):
                say(f'info depth 3 multipv {{i}} score {{score}} nodes 9 pv {{move}} a7a6')
            say('bestmove e2e4')
'''
LINES = [('e2e4', 'cp 31'), ('d2d4', 'cp 31'), ('g1f3', 'mate 3'), ('c2c4', 'cp -7 lowerbound'), ('b1c3', 'mate -21')]


@pytest.fixture
def fake(tmp_path):
    def make(mode='good', bad_runs=99, lines=LINES):
        state, path = tmp_path / 'state', tmp_path / 'engine'
        body = textwrap.dedent(FAKE).format(mode=mode, bad_runs=bad_runs, lines=lines, state=str(state))
        path.write_text(f'#!{sys.executable}\n{body}')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path, lambda: len(state.read_text()) if state.exists() else 0

    return make


def children():
    "Direct child processes that are not zombies."
    out = subprocess.run(
        ['ps', '--ppid', str(os.getpid()), '-o', 'pid=,stat=,args='], capture_output=True, text=True
    ).stdout
    return [row for row in out.splitlines() if ' Z' not in row and 'ps --ppid' not in row]


def test_scores_and_order(fake):
    path, _ = fake()
    with Stockfish(path) as engine:
        assert engine.name == 'Fake 1'
        assert engine.analyse(START) == (
            ('g1f3', 999.97),
            ('e2e4', 0.31),
            ('d2d4', 0.31),
            ('c2c4', -0.07),
            ('b1c3', -999.79),
        )


@pytest.mark.parametrize('mode', ['hangs', 'dies', 'chatters', 'garbage', 'huge', 'illegal', 'repeats', 'few'])
def test_one_failure_is_repaired(fake, mode, caplog):
    path, runs = fake(mode, bad_runs=1)
    with caplog.at_level(logging.WARNING), Stockfish(path, timeout=1.0, nodes=10**7) as engine:
        assert engine.analyse(START)[0] == Candidate('g1f3', 999.97)
        assert (engine.restarts, runs()) == (1, 2)
        engine.analyse(START)
        assert runs() == 2
    assert START in caplog.text and 'attempt 1' in caplog.text


@pytest.mark.parametrize('mode', ['hangs', 'dies', 'garbage', 'illegal', 'repeats', 'few', 'mute', 'exits'])
def test_two_failures_are_an_error_that_names_the_position(fake, mode, monkeypatch):
    path, runs = fake(mode)
    if mode == 'mute':
        monkeypatch.setattr(rules, '_START_SECONDS', .3)
    started = time.monotonic()
    with Stockfish(path, timeout=0.6, nodes=10**7) as engine:
        with pytest.raises(EngineError) as caught:
            engine.analyse(START)
        assert START in str(caught.value) and 'engine' in str(caught.value)
        assert engine.restarts == 2 and (mode == 'mute' or runs() == 2)  # a mute one may end before it counts
    assert time.monotonic() - started < 100  # 'mute' and 'hangs' sleep for a minute each time
    assert not [c for c in children() if str(path) in c]


def test_an_engine_behind_a_script_is_ended_in_time_too(fake, tmp_path):
    engine, script = fake('hangs')[0], tmp_path / 'script'
    script.write_text(f'#!/bin/sh\n{engine}\nexit 0\n')    # the shell waits for the engine, which holds the pipe
    script.chmod(0o755)
    started = time.monotonic()
    with Stockfish(script, timeout=.6, nodes=10**7) as asked, pytest.raises(EngineError):
        asked.analyse(START)
    assert time.monotonic() - started < 50  # it sleeps for a minute
    assert not [c for c in children() if str(engine) in c]


def test_an_engine_that_cannot_start(tmp_path):
    path = tmp_path / 'engine'
    path.write_text('not a program')
    path.chmod(0o755)
    with Stockfish(path, timeout=1) as engine, pytest.raises(EngineError, match='failed twice'):
        engine.analyse(START)


def test_a_longer_search_has_more_time(fake):
    path, _ = fake()
    assert [Stockfish(path, nodes=nodes)._timeout for nodes in (1000, 10**6)] == [10, 20] and Stockfish(path, nodes=10**6, timeout=3)._timeout == 3


def test_too_few_lines_means_more_nodes(fake):
    path, _ = fake(lines=LINES[:4])
    with Stockfish(path, nodes=500_000) as engine, pytest.raises(EngineError, match='not 5 distinct'):
        engine.analyse(START)


def test_an_interrupt_leaves_no_engine_behind(fake, monkeypatch):
    path, runs = fake()
    with Stockfish(path) as engine:
        engine.analyse(START)

        def interrupt(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(rules, '_read_info', interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.analyse(START)
        assert not [c for c in children() if str(path) in c]
        assert engine.analyse(START) and runs() == 2 and engine.restarts == 0


def test_positions_without_moves_need_no_engine(fake):
    path, runs = fake('exits')
    with Stockfish(path) as engine:
        assert (
            engine.analyse('R6k/8/6K1/8/8/8/8/8 b - - 1 1') == ()
            and engine.analyse('7k/8/5KQ1/8/8/8/8/8 b - - 1 1') == ()
        )
        with pytest.raises(InvalidFenError):
            engine.analyse('nonsense')
    assert runs() == 0


@pytest.mark.parametrize('option, value, words', [
    *((option, value, f'{option}={value!r}; it must be a whole number of 1 to ') for option in ('nodes', 'multipv', 'hash_mb') for value in (0, .5, 1.5, '1', None)),
    ('multipv', 501, 'multipv=501; it must be a whole number of 1 to 500'), ('hash_mb', 10**9, 'hash_mb=1000000000'), ('timeout', 0, 'timeout=0; it must be positive')])
def test_bad_options_are_named(fake, option, value, words):
    with pytest.raises(EngineError, match=words): Stockfish(fake()[0], **{option: value})


def test_find_stockfish(tmp_path, monkeypatch, fake):
    path, _ = fake()
    assert find_stockfish(path) == str(path) and find_stockfish(str(path)) == str(path)
    named = tmp_path / 'bin' / 'stockfish'
    named.parent.mkdir()
    shutil.copy(path, named)
    monkeypatch.setenv('PATH', str(named.parent))
    assert find_stockfish() == find_stockfish('stockfish') == str(named)
    for missing in (tmp_path / 'nowhere', tmp_path, 'no-such-engine'):
        with pytest.raises(EngineNotFoundError) as caught:
            find_stockfish(missing)
        assert str(missing) in str(caught.value) and '--stockfish-path' in str(caught.value)
    monkeypatch.setattr(rules.shutil, 'which', lambda place: None)
    with pytest.raises(EngineNotFoundError, match='apt install stockfish'):
        find_stockfish()
    with pytest.raises(EngineNotFoundError):
        Stockfish()
    monkeypatch.setattr(rules.shutil, 'which', lambda place: place if place.startswith('/usr/games') else None)
    assert find_stockfish() == '/usr/games/stockfish'


# --- the cache


def test_cache_answers_without_searching(fake, tmp_path):
    path, runs = fake()
    with Stockfish(path, cache=tmp_path / 'deep' / 'cache.db') as engine:
        first = engine.analyse(START)
    path.write_text(path.read_text().replace("words[0] == 'go'", "words[0] == 'never'"))  # it would hang if asked
    with Stockfish(path, cache=tmp_path / 'deep' / 'cache.db', timeout=.2) as engine:
        again = engine.analyse(START)
        assert again == first and all(type(c) is Candidate for c in again)
        with pytest.raises(EngineError):
            engine.analyse(START.replace('0 1', '5 9'))  # counters belong to the question


@pytest.mark.parametrize('change', [dict(nodes=2000), dict(multipv=4), dict(hash_mb=2), dict(fresh=False)])
def test_cache_key_holds_every_setting(fake, tmp_path, change):
    path, _ = fake()
    with Stockfish(path, cache=tmp_path / 'cache.db') as engine:
        engine.analyse(START)
    fake(lines=[(m, 'cp 1') for m, _ in LINES][: change.get('multipv', 5)])
    with Stockfish(path, cache=tmp_path / 'cache.db', **change) as engine:
        assert {c.pawns for c in engine.analyse(START)} == {0.01}
    with Stockfish(path, cache=tmp_path / 'cache.db') as engine:
        assert engine.analyse(START)[0].pawns == 999.97


def test_cache_key_holds_the_engine(fake, tmp_path):
    path, _ = fake()
    with Stockfish(path, cache=tmp_path / 'cache.db') as engine:
        engine.analyse(START)
    fake(lines=[(m, 'cp 1') for m, _ in LINES])
    path.write_text(path.read_text().replace('Fake 1', 'Fake 2'))
    with Stockfish(path, cache=tmp_path / 'cache.db') as engine:
        assert engine.analyse(START)[0].pawns == 0.01


def test_a_cache_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    AnalysisCache('~/cache.db').put('key', [Candidate('e2e4', .3)])
    assert AnalysisCache(tmp_path/'cache.db').get('key') == (Candidate('e2e4', .3),)


def _fill(path, worker):
    cache = AnalysisCache(path)
    for i in range(200):
        cache.put(f'{worker} {i}', [Candidate('e2e4', float(i))])
        cache.put('shared', [Candidate('d2d4', 0.0)])
        assert cache.get(f'{worker} {i}') == (('e2e4', float(i)),)
    cache.close()


def test_cache_is_safe_for_processes_and_threads(tmp_path):
    path = tmp_path / 'cache.db'
    context = multiprocessing.get_context('spawn')
    workers = [context.Process(target=_fill, args=(path, w)) for w in range(3)]
    for w in workers:
        w.start()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda w: _fill(path, f't{w}'), range(4)))
    for w in workers:
        w.join(60)
        assert w.exitcode == 0
    cache = AnalysisCache(path)
    assert (
        all(cache.get(f'{w} 199') == (('e2e4', 199.0),) for w in (0, 1, 2, 't0', 't3')) and cache.get('absent') is None
    )
    cache.close()
    assert cache.get('shared') == (('d2d4', 0.0),)  # opens again
    cache.close()


def test_a_cache_file_that_is_something_else(fake, tmp_path):
    other = tmp_path / 'cache.db'
    other.write_text('these are my notes, not a database ' * 100)
    with Stockfish(fake()[0], cache=other) as engine, pytest.raises(CacheError, match='cache.db'):
        engine.analyse(START)
    assert other.read_text().startswith('these are my notes')


def test_a_cache_that_cannot_be_written_costs_time_and_not_the_run(fake, tmp_path, caplog, monkeypatch):
    with Stockfish(fake()[0], cache=tmp_path / 'cache.db') as engine:

        def full(key, answer):
            raise CacheError("engine cache 'cache.db': database or disk is full")

        monkeypatch.setattr(engine.cache, 'put', full)
        assert engine.analyse(START) and engine.cache is None
        assert 'disk is full; answers are no longer kept' in caplog.text and engine.analyse(START)


# --- the pool


def test_pool_keeps_order_and_analyses_repeats_once(fake):
    path, runs = fake()
    fens = [board.fen() for board in games(1, seed=4)][:1] * 3 + ['R6k/8/6K1/8/8/8/8/8 b - - 1 1'] + [START] * 3
    with StockfishPool(3, path=path) as pool:
        answers = pool.analyse_many(iter(fens))
        assert [len(a) for a in answers] == [5, 5, 5, 0, 5, 5, 5] and runs() == 1
        assert pool.analyse_many([]) == []
        with pytest.raises(InvalidFenError):
            pool.analyse_many([START, 'nonsense'])
        assert pool.analyse(START) == answers[-1]
    assert not [c for c in children() if str(path) in c]
    for workers in (0, 2.5):
        with pytest.raises(EngineError, match=f'workers .* not {workers}'):
            StockfishPool(workers, path=path)


def test_pool_failure_names_the_position_and_the_pool_survives(fake):
    path, _ = fake('dies', bad_runs=2)
    with StockfishPool(1, path=path, timeout=2) as pool:
        with pytest.raises(EngineError) as caught:
            pool.analyse_many([START])
        assert START in str(caught.value)
        assert len(pool.analyse_many([START])[0]) == 5


def test_one_engine_may_be_shared_by_threads(fake):
    path, runs = fake()
    with Stockfish(path) as engine, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: engine.analyse(START), range(40)))
    assert len(set(answers)) == 1 and runs() == 1


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='there is no fork here')
@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
def test_a_forked_child_starts_its_own_engine(fake):
    path, runs = fake()
    with Stockfish(path) as engine:
        engine.analyse(START)
        child = multiprocessing.get_context('fork').Process(target=engine.analyse, args=(START,))
        child.start()
        child.join(20)
        assert child.exitcode == 0 and runs() == 2
        assert len(engine.analyse(START)) == 5 and engine.restarts == 0 and runs() == 2


def test_a_forgotten_engine_does_not_keep_python_alive(fake):
    code = f'from rookworld_nb.rules import Stockfish\nengine = Stockfish({str(fake()[0])!r})\nprint(len(engine.analyse({START!r})))'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == '5' and done.returncode == 0


def test_import_has_no_side_effects():
    code = 'import sys, threading, rookworld_nb.rules; print(threading.active_count(), "torch" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.split() == [
        '1',
        'False',
    ]


# --- the real engine


@pytest.fixture(scope='module')
def positions():
    return [board.fen() for board in games(4, seed=5)][::40][:24]


@pytest.mark.stockfish
def test_the_same_position_gets_the_same_answer(positions):
    with Stockfish() as engine, StockfishPool(2) as pool:
        first = [engine.analyse(f) for f in positions]
        assert [engine.analyse(f) for f in reversed(positions)][::-1] == first
        assert pool.analyse_many(positions) == first
    with Stockfish(hash_mb=16) as bigger:
        assert [bigger.analyse(f) for f in positions[:20]] == first[:20]


@pytest.mark.stockfish
def test_answers_equal_those_of_another_client(positions):
    with Stockfish(nodes=1500) as ours, chess.engine.SimpleEngine.popen_uci(find_stockfish(), timeout=120) as theirs:
        theirs.configure({'Threads': 1, 'Hash': 1})
        for fen in positions[:10]:
            infos = theirs.analyse(chess.Board(fen), chess.engine.Limit(nodes=1500), multipv=5, game=object())
            expected = [(i['pv'][0].uci(), i['score'].relative.score(mate_score=100_000) / 100) for i in infos]
            assert list(ours.analyse(fen)) == sorted(expected, key=lambda c: -c[1])


@pytest.mark.stockfish
def test_answers_are_legal_distinct_and_sorted(positions):
    with Stockfish(nodes=300) as engine:
        for fen in positions:
            answer = engine.analyse(fen)
            assert len({c.uci for c in answer}) == len(answer) == min(5, len(legal_moves(fen)))
            assert {c.uci for c in answer} <= legal_moves(fen)
            assert [c.pawns for c in answer] == sorted((c.pawns for c in answer), reverse=True)
            assert all(str(round(c.pawns, 2)) == str(c.pawns) != '-0.0' for c in answer)


@pytest.mark.stockfish
def test_mates_and_the_side_to_move():
    with Stockfish() as engine:
        assert engine.analyse('6k1/5ppp/8/8/8/8/8/R3K3 w Q - 0 1')[0] == ('a1a8', 999.99)
        assert engine.analyse('r3k3/8/8/8/8/8/5PPP/6K1 b - - 0 1')[0] == (
            'a8a1',
            999.99,
        )  # Black's own good is positive
        mated = engine.analyse('7k/8/5QK1/8/8/8/8/8 b - - 0 1')
        assert mated == (('h8g8', -999.99),)  # one legal move, mated in one
        assert len(engine.analyse('3Q4/1Q4Q1/4Q3/2Q4R/Q4Q2/3Q4/1Q4Rp/1K1BBNNk w - - 0 1')) == 5


@pytest.mark.stockfish
def test_few_nodes_still_give_five_moves(positions):
    with Stockfish(nodes=1) as engine:
        for fen in positions[:20]:
            assert len(engine.analyse(fen)) == min(5, len(legal_moves(fen)))
        assert engine.restarts == 0


@pytest.mark.stockfish
def test_a_killed_engine_comes_back():
    with Stockfish() as engine:
        first = engine.analyse(START)
        engine._process._popen.kill()
        assert engine.analyse(START) == first and engine.restarts == 1


def test_an_engine_in_this_folder_is_found_and_one_that_may_not_run_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = tmp_path/'my-stockfish'
    engine.write_text('#!/bin/sh\n')
    with pytest.raises(EngineNotFoundError, match=r"a file that may not be executed \(chmod \+x\) at 'my-stockfish'"): find_stockfish('my-stockfish')
    engine.chmod(0o755)
    assert find_stockfish('my-stockfish') == str(engine)


def test_a_damaged_answer_in_the_cache_is_named(tmp_path):
    cache = AnalysisCache(tmp_path/'cache.db')
    for damaged in ('{torn', '3', '[[1]]'):
        cache._execute('INSERT OR REPLACE INTO analysis VALUES (?, ?)', ('key', damaged))
        with pytest.raises(CacheError, match="cache.db.*damaged at 'key'"): cache.get('key')


def test_a_cache_is_looked_at_before_it_is_needed(tmp_path):
    (tmp_path/'notes.txt').write_text('no database, but a text of more than a hundred letters, as a database has a header of a hundred bytes at its start')
    (tmp_path/'folder').mkdir()
    for place in ('notes.txt', 'folder', 'notes.txt/answers.db', 300*'x'):
        with pytest.raises(CacheError, match=f"engine cache '.*{place}': "): check_cache(tmp_path/place)
    check_cache(tmp_path/'new'/'answers.db')
    assert not (tmp_path/'new').exists()
    with AnalysisCache(tmp_path/'answers.db') as cache: cache.put('key', [Candidate('e2e4', .3)])
    check_cache(tmp_path/'answers.db')
    with closing(sqlite3.connect(tmp_path/'other.db')) as db: db.execute('CREATE TABLE games (moves TEXT)')
    before = (tmp_path/'other.db').read_bytes()
    check_cache(tmp_path/'other.db')
    assert (tmp_path/'other.db').read_bytes() == before
