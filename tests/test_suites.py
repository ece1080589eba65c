"""Suites: every reader against the board, every score against brute force, players whose result is known beforehand."""
import gzip
import itertools
import json
import math
import random
import zlib
from types import SimpleNamespace

import chess
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rookworld_nb.evaluate import mean_interval, wilson_interval
from rookworld_nb.play import play_game
from rookworld_nb.positions import SHIPPED, opening_positions, random_endgame, random_play, seen_positions, shipped, shipped_positions
from rookworld_nb.rules import EngineNotFoundError, Stockfish, env_step, fen_key, legal_moves
from rookworld_nb.suites import (Puzzle, Question, SuiteError, bigbench_puzzle, elo_difference, epd_puzzle,
                                 legal_choice, level_options, lichess_puzzle, match_elo, match_scores, mate_puzzles,
                                 mating_moves, model_player, model_simulator, model_world, parse_puzzles, pass_at_k, play_match,
                                 read_puzzles, rules_world, self_play, self_play_scores, shipped_puzzles, solve,
                                 stands_out, stockfish_opponent, suite_format, suite_scores, tactic_puzzles, to_epd, uci_board, uci_session)
from rookworld_nb.tasks import ANSWER_TOKENS, PolicyAnswer, parse_env
from rookworld_nb.weights import load_pretrained

START = chess.STARTING_FEN
KQK = '7k/5Q2/8/6K1/8/8/8/8 w - - 0 1'
LICHESS = 'toy,7k/5ppp/8/8/8/8/8/R2Q2K1 b - - 0 1,h8g8 a1a8,400,80,90,1,mateIn1,url,'
SCHOLAR = '1. e4 e5 2. Bc4 Nc6 3. Qh5 Nf6 4.'
SCHOLAR_FEN = 'r1bqkb1r/pppp1ppp/2n2n2/4p2Q/2B1P3/8/PPPP1PPP/RNB1K1NR w KQkq - 4 4'


def answering(choose):
    """A player that picks a move for each FEN."""
    return lambda fens: [PolicyAnswer(best=choose(fen)) for fen in fens]


def random_mover(seed: int):
    """A uniformly random legal mover."""
    rng = random.Random(seed)
    return answering(lambda fen: rng.choice(sorted(legal_moves(fen))))


def scripted(*moves: str):
    """A player that plays a list of moves, one a call."""
    script = iter(moves)
    return lambda fens: [PolicyAnswer(best=next(script)) for _ in fens]


def scripted_list(*moves: str):
    """A player that gives a list of answers, one a question."""
    return lambda fens: [PolicyAnswer(best=move) for move in moves]


def boards(count: int, seed: int = 0) -> list[chess.Board]:
    """Positions with legal moves, from games and set up."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        board = random_play(rng, rng.randrange(80)) if rng.random() < .5 else random_endgame(rng)
        if any(board.legal_moves):
            found.append(board)
    return found


# ---- readers

@pytest.mark.parametrize('seed', range(8))
def test_a_lichess_line_asks_every_second_position(seed):
    rng = random.Random(seed)
    board, fens, moves = random_play(rng, 20), [], []
    start = board.fen()
    while len(moves) < 8:
        move = rng.choice(list(board.legal_moves))
        fens.append(board.fen())
        moves.append(move.uci())
        board.push(move)
    puzzle = lichess_puzzle({'PuzzleId': 'x', 'FEN': start, 'Moves': ' '.join(moves), 'Rating': '1500.0'})
    assert [question.fen for question in puzzle.questions] == fens[1::2] and puzzle.rating == 1500
    for question, move in zip(puzzle.questions, moves[1::2]):
        assert question.right == {move} | {m for m in legal_moves(question.fen) if env_step(question.fen, m).reward == 1}


def test_mating_moves_leave_the_board_alone():
    for board in [*boards(60), chess.Board(LICHESS.split(',')[1])]:
        before = board.fen(), len(board.move_stack)
        assert mating_moves(board) == {m for m in legal_moves(board.fen()) if env_step(board.fen(), m).reward == 1}
        assert (board.fen(), len(board.move_stack)) == before


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), graded=st.booleans(), data=st.data())
def test_epd_round_trip(seed, graded, data):
    fen = boards(1, seed)[0].fen()
    legal = sorted(legal_moves(fen))
    right = data.draw(st.sets(st.sampled_from(legal), min_size=1, max_size=6))
    points = data.draw(st.dictionaries(st.sampled_from(legal), st.integers(1, 100).map(float), min_size=1)) if graded else {}
    puzzle = Puzzle(data.draw(st.sampled_from(['a', 'STS(v1.0) Undermine.001', 'with; semicolon', '7'])), 'epd',
                    (Question(fen, frozenset(right), points),))
    assert parse_puzzles([to_epd(puzzle)]) == [puzzle]


def test_epd_operations():
    def right(line): return epd_puzzle(line).questions[0].right
    assert right(f'{KQK[:-4]} bm Kg6 Kh6;') == right(f'{KQK[:-4]} bm g5g6 g5h6') == {'g5g6', 'g5h6'}
    assert right(f'{KQK[:-4]} am Kg6;') == legal_moves(KQK) - {'g5g6'}
    assert right(f'{KQK[:-4]} bm Kg6 Kh6; am Kh6;') == {'g5g6'}
    assert right(f'{KQK[:-4]} c8 "3 9 9"; c9 "f7f6 g5g6 g5h6";') == {'g5g6', 'g5h6'}
    assert right('4k3/P7/8/8/8/8/8/4K2R w K - bm O-O a8=Q+; id "x";') == {'e1g1', 'a7a8q'}
    assert epd_puzzle(f'{KQK[:-4]} 7 33 bm Kg6;').questions[0].fen == f'{KQK[:-4]} 7 33'
    assert epd_puzzle(f'{KQK[:-4]} bm Kg6; hmvc 7; fmvn 33; id "n.1";') == Puzzle('n.1', 'epd', (
        Question(f'{KQK[:-4]} 7 33', frozenset({'g5g6'}), {}),))
    assert epd_puzzle(f'{KQK[:-4]} bm Kg6;', 'line 4').id == 'line 4'


@pytest.mark.parametrize('row', [
    {'input': SCHOLAR, 'target_scores': {'Qxf7#': 1, 'Qxe5+': 0}}, {'input': SCHOLAR, 'target': 'Qxf7#'},
    {'inputs': f'In the following chess position, find a checkmate-in-one move.\n\n{SCHOLAR}', 'targets': ['Qxf7#']},
    {'input': SCHOLAR.removesuffix(' 4.'), 'target': ['Qxf7']}])
def test_bigbench_forms(row):
    puzzle = bigbench_puzzle(json.dumps(row), '5')
    assert puzzle == Puzzle('5', 'bigbench', (Question(SCHOLAR_FEN, frozenset({'h5f7'}), {}),))
    whole = json.dumps({'name': 'checkmate_in_one', 'examples': [row, row]}, indent=2)
    lines = '\n'.join([json.dumps(row)]*2)
    assert parse_puzzles(whole.splitlines()) == parse_puzzles(lines.splitlines()) == [Puzzle(n, 'bigbench', puzzle.questions) for n in '12']


def test_bigbench_with_black_to_move():
    assert bigbench_puzzle(json.dumps({'input': '1. f3 e5 2. g4', 'target': 'Qh4#'})).questions[0].right == {'d8h4'}


def test_the_content_decides(tmp_path):
    header = 'PuzzleId,FEN,Moves,Rating\n'
    shuffled = 'Moves,Rating,FEN,PuzzleId\nh8g8 a1a8,400,7k/5ppp/8/8/8/8/8/R2Q2K1 b - - 0 1,toy\n'
    for number, text in enumerate((LICHESS, header + LICHESS, shuffled, '\n' + header + LICHESS + '\n\n')):
        path = tmp_path/f'{number}.epd'
        path.write_text(text, encoding='utf-8')
        puzzle, = read_puzzles(path)
        assert (puzzle.id, puzzle.kind, puzzle.rating) == ('toy', 'lichess', 400) and puzzle.questions[0].right == {'a1a8', 'd1d8'}
    path = tmp_path/'suite.csv.gz'
    path.write_bytes(gzip.compress(f'# comment\n{KQK[:-4]} bm Kg6;\r\n'.encode()))
    assert read_puzzles(path)[0].kind == 'epd'
    assert suite_format('P: 8/8') is None and suite_format('') is None


def test_no_more_is_read_than_asked_for():
    def lines():
        yield from (line + '\n' for line in ('# comment', 'PuzzleId,FEN,Moves,Rating', LICHESS, LICHESS))
        pytest.fail('a line too many')
    assert len(parse_puzzles(lines(), limit=2)) == 2


@pytest.mark.parametrize(('text', 'message'), [
    ('', 'x.epd is no suite'), ('P: 7k/8 M: e2e4', "x.epd is no suite.*'P: 7k/8"),
    (f'{KQK[:-4]} bm Kg6;\n{KQK[:-4]} bm Ra1;', "x.epd, line 2: .*'Ra1'.*bm Ra1"),
    (f'{KQK[:-4]} id "nothing to find";', 'line 1: no right move'),
    (f'{KQK[:-4]} bm Kg6; am Kg6;', 'line 1: no right move'),
    (f'{KQK[:-4]} c8 "1 2"; c9 "g5g6";', "line 1: c8 '1 2' and c9 'g5g6'"),
    (f'{KQK[:-4]} c8 "1"; c9 "a1a8";', "line 1: .*'a1a8'"),
    (f'{KQK[:-4]} c8 "one"; c9 "g5g6";', "line 1: .*'one'"),
    (f'{KQK[:-4]} c8 "5 -1"; c9 "g5g6 g5h6";', 'line 1: .*none below 0'), (f'{KQK[:-4]} bm Kg6; hmvc 99999;', 'line 1: .*99999'),
    ('{"input": ' + '['*100_000, 'line 1: maximum recursion'),
    (f'{KQK[:-4]} c8 "0 0"; c9 "g5g6 g5h6";', 'line 1: .*none below 0 and some above'), (f'{KQK[:-4]} bm;', 'line 1'),
    (f'{KQK[:-4]} bm "Kg6";', "line 1: bm and am must be moves, without quotation marks, not 'Kg6'"), (f'{KQK[:-4]} bm Kg6; am 3;', 'line 1: bm and am .*not 3'),
    ('7k/5Q2/8/8/8/8/8/8 w - - bm Qf8;', 'line 1: .*impossible position'),
    (LICHESS.replace('a1a8', 'a1b8'), "x.epd, line 1: .*a1b8"),
    (LICHESS.replace(' a1a8', ''), "line 1: 'h8g8': the opponent"),
    (LICHESS.replace('R2Q2K1', 'R2Q4'), 'line 1: impossible position'),
    (LICHESS.replace(' b - ', ' w - '), 'line 1: .*h8g8'),
    ('PuzzleId,FEN,Moves\n' + LICHESS + '\nb,,e2e4', 'line 3: a Lichess puzzle needs FEN'),
    ('PuzzleId,FEN,Moves\nb', 'line 2: a Lichess puzzle needs FEN, Moves'),
    (LICHESS.replace(',400,', ',high,'), "line 1: .*'high'"), (LICHESS.replace(',400,', ',inf,'), 'line 1: .*infinity'),
    ('{"input": "1. e4"}', 'line 1: a BIG-bench example'), ('{"input": 3, "target": "e4"}', 'line 1: a BIG-bench example'),
    (json.dumps({'input': SCHOLAR, 'target': 'Qxh8#'}), 'line 1: .*Qxh8#'),
    (json.dumps({'input': '1. e4 e4', 'target': 'e5'}), "line 1: .*'e4'"),
    ('{"input": "1. e4", ', 'line 1'), ('{"input": "1. e4", "target": 5}', 'line 1'), ('{"input": "1. e4", "target_scores": 5}', 'line 1')])
def test_errors_name_file_line_and_value(text, message, tmp_path):
    path = tmp_path/'x.epd'
    path.write_text(text, encoding='utf-8')
    with pytest.raises(SuiteError, match=message):
        read_puzzles(path)


@settings(max_examples=150)
@given(st.lists(st.sampled_from([KQK, KQK[:-4], 'bm', ' am ', 'Kg6', ';', '"', 'c8 "1 2";', 'c9', ',', '\n', '{', '}', '"input":', '"1. e4"', '[1]',
                                 LICHESS, SCHOLAR, '"target"', ' ', 'id', '\\', 'e2e4', '5']) | st.text(max_size=4), max_size=12).map(''.join))
def test_any_text_is_a_suite_or_refused(text):
    try:
        puzzles = parse_puzzles(text.splitlines())
    except SuiteError:
        return
    assert puzzles and all(q.right and q.right <= legal_moves(q.fen) for puzzle in puzzles for q in puzzle.questions)


def test_no_file():
    with pytest.raises(SuiteError, match='nowhere'):
        read_puzzles('nowhere.epd')


# ---- solving

def test_chance_is_the_share_of_all_ways_to_play():
    row = {'PuzzleId': 'x', 'FEN': '3r2k1/5ppp/8/8/8/8/4RPPP/4R1K1 b - - 0 1', 'Moves': 'h7h6 e2e8 d8e8 e1e8'}
    puzzles = [lichess_puzzle(row), epd_puzzle(f'{KQK[:-4]} bm Kg6 Kh6;')]
    shares = []
    for puzzle in puzzles:
        ways = list(itertools.product(*(sorted(legal_moves(question.fen)) for question in puzzle.questions)))
        tables = [all(move in q.right for move, q in zip(way, puzzle.questions)) for way in ways]
        shares.append(sum(tables)/len(ways))
    scores = suite_scores(solve(random_mover(0), puzzles))
    assert scores.loc['solved', 'chance'] == pytest.approx(sum(shares)/2)
    first = [len(p.questions[0].right)/len(legal_moves(p.questions[0].fen)) for p in puzzles]
    assert scores.loc['first_move', 'chance'] == pytest.approx(sum(first)/2)


def test_random_movers_meet_the_chance_line():
    puzzles = [epd_puzzle(to_epd(Puzzle(str(i), 'epd', (Question(b.fen(), frozenset(sorted(legal_moves(b.fen()))[:3]),
               {move: 5. for move in sorted(legal_moves(b.fen()))[:2]} | {sorted(legal_moves(b.fen()))[-1]: 2.}),)))) for i, b in enumerate(boards(80))]
    repeats = 60
    table = solve(random_mover(1), puzzles, repeats)
    scores, by_puzzle = suite_scores(table), table.groupby('puzzle')
    for metric, column in (('solved', 'right'), ('points', 'points')):
        error = math.sqrt((by_puzzle[column].apply(lambda x: x.astype(float).var(ddof=0))/repeats).sum())/len(puzzles)
        assert abs(scores.loc[metric, 'mean'] - scores.loc[metric, 'chance']) < 4*error, metric
    for k in (2, 4, 8, 16, 32):
        assert abs(scores.loc[f'pass@{k}', 'mean'] - scores.loc[f'pass@{k}', 'chance']) < .05
    assert scores.loc['legal', 'mean'] == scores.loc['legal', 'chance'] == 1 and 'first_move' not in scores.index


def test_a_puzzle_needs_all_its_moves_in_one_sample():
    row = {'PuzzleId': 'x', 'FEN': '3r2k1/5ppp/8/8/8/8/4RPPP/4R1K1 b - - 0 1', 'Moves': 'h7h6 e2e8 d8e8 e1e8'}
    puzzle = lichess_puzzle(row)
    table = solve(scripted('e2e8', 'a1a1', 'e2e8', 'e1e8', 'e1e8', 'e1e2'), [puzzle], 3)  # three answers a step
    assert table.loc[0, 'step'] == 0 and table['right'].tolist() == [True, False, True, True, True, False]
    assert table['legal'].tolist() == [True, False, True, True, True, True]
    scores = suite_scores(table)
    assert scores.loc['solved', 'mean'] == pytest.approx(1/3) and scores.loc['first_move', 'mean'] == pytest.approx(2/3)
    assert scores.loc['pass@2', 'mean'] == pytest.approx(2/3) and scores.loc['legal', 'mean'] == pytest.approx(5/6)


def test_points_are_shares_of_the_best_moves():
    puzzles = [epd_puzzle(f'{KQK[:-4]} bm Kg6; c8 "50 20"; c9 "g5g6 f7f6";'), epd_puzzle(f'{KQK[:-4]} bm Kg6;')]
    by_move = {move: suite_scores(solve(answering(lambda fen, move=move: move), puzzles)) for move in ('g5g6', 'f7f6', 'g5h6', None)}
    assert [by_move[move].loc['points', 'mean'] for move in by_move] == [1, .4, 0, 0]
    assert all(by_move[move].loc['points', 'n'] == 1 for move in by_move) and by_move['f7f6'].loc['solved', 'mean'] == 0
    assert by_move[None].loc['legal', 'mean'] == 0


@pytest.mark.parametrize(('n', 'c', 'k'), [(n, c, k) for n in range(1, 7) for c in range(n + 1) for k in range(1, n + 1)])
def test_pass_at_k_counts_sets(n, c, k):
    sets = list(itertools.combinations([True]*c + [False]*(n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, sets))/len(sets))


@pytest.mark.parametrize('numbers', [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_refuses(numbers):
    with pytest.raises(SuiteError, match='pass@'):
        pass_at_k(*numbers)


def test_intervals():
    assert mean_interval(np.array([1., 0, 0, np.nan])) == {'mean': 1/3, 'low': wilson_interval(1, 3)[0], 'high': wilson_interval(1, 3)[1], 'n': 3}
    half = mean_interval(np.array([.5]*9), shares=False)
    assert half['mean'] == .5 and math.isnan(half['low']) and math.isnan(half['high']) and math.isnan(mean_interval(np.array([np.nan]))['mean'])
    with pytest.raises(SuiteError, match='at least one'):
        solve(random_mover(0), [])
    with pytest.raises(ValueError, match='zip'):
        solve(lambda fens: [], [epd_puzzle(f'{KQK[:-4]} bm Kg6;')])  # a player that swallows questions


EARLY = {'PuzzleId': 'early', 'FEN': '7k/5ppp/8/8/8/8/8/R2Q2K1 b - - 0 1', 'Moves': 'h8g8 a1a7 h7h6 a7a8'}  # d1d8 mates at once


def test_an_early_mate_wins_a_lichess_puzzle():
    puzzle = lichess_puzzle(EARLY)
    first, last = puzzle.questions
    assert first.right == {'a1a7', 'a1a8', 'd1d8'}
    def play(*moves): return suite_scores(solve(scripted_list(*moves), [puzzle])).loc['solved', 'mean']
    assert play('d1d8', 'g1h1') == play('a1a7', 'a7a8') == 1
    assert play('a1a7', 'g1h1') == play('g1h1', 'a7a8') == 0
    wins = sum(move in ('d1d8', 'a1a8') for move in legal_moves(first.fen))/len(legal_moves(first.fen))
    on = 1/len(legal_moves(first.fen))*len(last.right)/len(legal_moves(last.fen))
    scores = suite_scores(solve(scripted_list('d1d8', 'g1h1'), [puzzle]))
    assert scores.loc['solved', 'chance'] == pytest.approx(wins + on)
    simulated = suite_scores(solve(random_mover(0), [puzzle], samples=2000)).loc['solved', 'mean']
    assert abs(simulated - wins - on) < 4*math.sqrt((wins + on)/2000)


def test_counts_of_half_moves_are_no_shares():
    assert mean_interval(np.array([0., 1, 1]), shares=False) != mean_interval(np.array([0., 1, 1]))
    games = pd.DataFrame({'legal': [1, 0, 1, 1], 'exact': [0, 0, 0, 0], 'end': 'illegal'})
    low, high = wilson_interval(3, 4)
    assert self_play_scores(games).loc['legal', 'low'] != low and math.isnan(self_play_scores(games).loc['exact', 'high'])


# ---- mates

def test_mates_are_seeded_distinct_and_complete():
    first = mate_puzzles(8, seed=5)
    assert first == mate_puzzles(8, seed=5) != mate_puzzles(8, seed=6)
    keys = [fen_key(puzzle.questions[0].fen) for puzzle in first]
    others = mate_puzzles(8, seed=5, exclude=set(keys[:3]))
    assert len(set(keys)) == 8 and not set(keys[:3]) & {fen_key(puzzle.questions[0].fen) for puzzle in others}
    for (question,) in (puzzle.questions for puzzle in first):
        assert question.right == {m for m in legal_moves(question.fen) if env_step(question.fen, m).reward == 1} != set()


def test_a_position_that_comes_again_is_left_out(monkeypatch):
    found = [chess.Board(puzzle.questions[0].fen) for puzzle in mate_puzzles(3, seed=5)]
    again = found[0].copy()
    again.fullmove_number += 1  # another FEN, the same position
    tries = iter([found[0], again, None, found[1], found[1], found[2]])
    monkeypatch.setattr('rookworld_nb.suites.mate_candidates', lambda rng, from_game: next(tries))
    puzzles = mate_puzzles(3)
    assert [puzzle.questions[0].fen for puzzle in puzzles] == [board.fen() for board in found]
    assert [puzzle.id for puzzle in puzzles] == ['mate.001', 'mate.002', 'mate.003']


def test_shipped_mates_are_mates():
    mates = shipped_puzzles('mates')
    assert len({puzzle.id for puzzle in mates}) == 300 and sum(len(chess.Board(p.questions[0].fen).piece_map()) > 9 for p in mates) > 120
    for (question,) in (puzzle.questions for puzzle in mates):
        assert question.right == {m for m in legal_moves(question.fen) if env_step(question.fen, m).reward == 1} != set()


@pytest.mark.stockfish
def test_the_engine_finds_the_shipped_mates():
    with Stockfish(nodes=2000, multipv=1) as engine:
        for (question,) in (puzzle.questions for puzzle in shipped_puzzles('mates')[::6]):
            best, = engine.analyse(question.fen)
            assert best.pawns == 999.99 and best.uci in question.right


# ---- tactics

@pytest.mark.parametrize('pawns, does', [((3., 1., .5), True), ((2., 0.), True), ((0., -2., -9.), True), ((1.9, 0.), False), ((9., 3.1), False),
                                         ((-3.2, -9.), False), ((5., 3.), True), ((4.,), False), ((), False), ((-1., 2.5, .2), True)])
def test_a_move_stands_out_by_two_pawns_in_an_open_game(pawns, does):
    assert stands_out(pawns) == does


@pytest.mark.parametrize('name', ['mates', 'tactics'])
def test_shipped_puzzles_are_new_positions_and_read_back(name):
    puzzles = shipped_puzzles(name)
    keys = {fen_key(puzzle.questions[0].fen) for puzzle in puzzles}
    assert len(keys) == len({puzzle.id for puzzle in puzzles}) == len(puzzles) == 300
    assert not keys & seen_positions(sample for shipped_set in SHIPPED for sample in shipped(shipped_set))
    assert keys <= shipped_positions()
    assert parse_puzzles(map(to_epd, puzzles)) == puzzles
    for (question,) in (puzzle.questions for puzzle in puzzles):
        assert question.right and question.right <= legal_moves(question.fen)


def test_tactics_are_no_mates_and_have_one_right_move():
    tactics = [puzzle.questions[0] for puzzle in shipped_puzzles('tactics')]
    assert all(len(question.right) == 1 and not mating_moves(chess.Board(question.fen)) for question in tactics)
    assert not {fen_key(question.fen) for question in tactics} & {fen_key(puzzle.questions[0].fen) for puzzle in shipped_puzzles('mates')}


def test_an_unknown_suite_is_named():
    with pytest.raises(SuiteError, match="'mate'.*mates, tactics"):
        shipped_puzzles('mate')


@pytest.mark.stockfish
def test_the_engine_agrees_with_the_shipped_tactics():
    with Stockfish(nodes=20_000) as engine:
        for (question,) in (puzzle.questions for puzzle in shipped_puzzles('tactics')[::60]):
            lines = engine.analyse(question.fen)
            if engine.name == 'Stockfish 15.1': assert stands_out([line.pawns for line in lines])
            assert lines[0].uci in question.right


@pytest.mark.stockfish
def test_the_first_tactics_are_made_again():
    seen = seen_positions(sample for name in SHIPPED for sample in shipped(name))
    with Stockfish() as engine:
        if engine.name != 'Stockfish 15.1': pytest.skip(f'made with Stockfish 15.1, here is {engine.name}')
    first = tactic_puzzles(3, exclude=seen)
    assert first == shipped_puzzles('tactics')[:3]
    others = tactic_puzzles(2, exclude=seen | {fen_key(first[0].questions[0].fen)})
    assert first[0].questions not in [puzzle.questions for puzzle in others]


def test_seen_positions_hold_both_sides_of_a_step():
    samples = shipped('heldout')
    env = next(sample for sample in samples if sample.task == 'A')
    policy = next(sample for sample in samples if sample.task == 'P')
    seen = seen_positions([env, policy])
    assert seen == {fen_key(env.fen), fen_key(parse_env(env.line).new_fen), fen_key(policy.fen)} and len(seen) == 3


def test_only_one_question_fits_a_line():
    question = Question(KQK, frozenset({'g5g6'}), {})
    with pytest.raises(SuiteError, match='2 questions'):
        to_epd(Puzzle('x', 'lichess', (question, question)))


# ---- self-play

def test_legal_games_end_by_rule_or_limit():
    fens = [position.fen for position in opening_positions()[:6]]
    table = self_play(random_mover(0), rules_world, fens, 30)
    assert (table['legal'] == table['exact']).all() and table['opening'].tolist() == fens
    for fen, moves, legal, end in table[['opening', 'moves', 'legal', 'end']].itertuples(index=False):
        board = chess.Board(fen)
        for uci in moves.split():
            board.push(chess.Move.from_uci(uci) if uci in legal_moves(board.fen()) else None)
        assert legal == len(moves.split()) and end == ('over' if board.is_game_over() else 'limit') and (legal == 30) >= (end == 'limit')
    mate = self_play(scripted('f2f3', 'e7e5', 'g2g4', 'd8h4'), rules_world, [START]).iloc[0]
    shuffled = self_play(scripted(*['g1f3', 'g8f6', 'f3g1', 'f6g8']*3), rules_world, [START]).iloc[0]
    assert (shuffled['legal'], shuffled['end']) == (8, 'over')    # the initial position for the third time
    assert (mate['legal'], mate['exact'], mate['end']) == (4, 4, 'over')


@pytest.mark.parametrize('wrong_at', [1, 2, 4])
@pytest.mark.parametrize('illegal_at', [2, 3, 6])
def test_two_clocks_of_self_play(wrong_at, illegal_at):
    moves = ['e2e4', 'e7e5', 'g1f3', 'b8c6', 'f1b5', 'a7a6']
    moves[illegal_at - 1] = 'a1a8'
    shown = []

    def world(steps):  # two wrong positions, in their counters only; the rest right
        answers = []
        for fen, plies in steps:
            shown.append((fen, len(plies)))
            right = chess.Board()
            for uci in plies:
                right.push_uci(uci)
            answers.append(right.fen()[:-1] + '9' if len(plies) in (wrong_at, wrong_at + 1) else right.fen())
        return answers

    game = self_play(scripted(*moves), world, [START]).iloc[0]
    assert game['legal'] == illegal_at - 1 and game['end'] == 'illegal'
    assert game['exact'] == min(wrong_at, illegal_at) - 1
    assert shown[0] == (START, 1) and [plies for _, plies in shown] == list(range(1, illegal_at))


def test_the_player_sees_its_own_world_and_the_rules_judge():
    seen = []
    def player(fens):
        seen.extend(fens)
        return [PolicyAnswer(best=('e2e4', 'd2d4')[len(seen) - 1])]
    world = lambda steps: [START]*len(steps)  # nothing ever moves: legal there, illegal in truth
    game = self_play(player, world, [START]).iloc[0]
    assert seen == [START, START] and (game['legal'], game['exact'], game['end']) == (1, 0, 'illegal')
    game = self_play(scripted('e2e4'), lambda steps: [None], [START]).iloc[0]
    assert (game['legal'], game['exact'], game['end']) == (1, 0, 'unreadable')
    assert self_play(answering(lambda fen: None), rules_world, [START]).iloc[0]['legal'] == 0
    mate = '6k1/5ppp/8/8/8/8/8/4R2K w - - 0 1'
    game = self_play(scripted('e1e8'), lambda steps: [None], [mate]).iloc[0]    # ended by the rules, whatever the world says of it
    assert (game['legal'], game['exact'], game['end']) == (1, 0, 'over')


def test_an_opening_that_is_over_is_nobodys_mistake():
    mated = 'rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3'
    games = self_play(scripted('e2e4'), rules_world, [mated, START], 1)
    assert games[['legal', 'end']].values.tolist() == [[0, 'over'], [1, 'limit']]


@pytest.mark.parametrize('moves', ['e2e4 0000', 'e2e4 e7e6 0000 a7a6', 'e7e5 e2e4'])
def test_a_lichess_line_holds_legal_moves(moves):
    with pytest.raises(SuiteError, match='is not legal'): lichess_puzzle({'PuzzleId': 'x', 'FEN': START, 'Moves': moves})


@pytest.mark.parametrize('points, moves', [('10 nan', 'e2e4 d2d4'), ('inf 5', 'e2e4 d2d4'), ('10 5', 'e2e4 e2e4'), ('10', 'e2e4 d2d4')])
def test_grades_are_numbers_of_different_moves(points, moves):
    with pytest.raises(SuiteError, match='none below 0 and some above'): epd_puzzle(f'{START.rsplit(" ", 2)[0]} c8 "{points}"; c9 "{moves}";')


def test_games_do_not_touch_each_other():
    player = answering(lambda fen: sorted(legal_moves(fen))[sum(map(ord, fen)) % len(legal_moves(fen))] if sum(map(ord, fen)) % 11 else 'a1a1')
    fens = [position.fen for position in opening_positions()[:10]]
    together = self_play(player, rules_world, fens, 40)
    alone = pd.concat([self_play(player, rules_world, [fen], 40) for fen in fens], ignore_index=True)
    assert together.equals(alone) and together['legal'].nunique() > 3


def test_self_play_scores_by_hand():
    table = pd.DataFrame({'legal': [2, 4, 12], 'exact': [1, 4, 4], 'end': ['over', 'limit', 'unreadable']})
    scores = self_play_scores(table)
    assert scores.loc['legal', 'mean'] == 6 and scores.loc['legal', 'median'] == 4 and scores.loc['exact', 'mean'] == 3
    assert scores['unfinished'].tolist() == pytest.approx([1/3, 1/3]) and scores.loc['legal', 'low'] < 6 < scores.loc['legal', 'high']


# ---- matches

def engine_like(seed: int):
    """An opponent that depends on the position alone."""
    return lambda board: min(board.legal_moves, key=lambda move: zlib.crc32(f'{seed} {board.board_fen()} {move}'.encode()))


def test_a_match_gives_each_opening_both_colours():
    fens = [position.fen for position in opening_positions()[:5]]
    table = play_match(random_mover(0), engine_like(0), fens, 30)
    assert table.groupby('opening')['colour'].apply(set).eq({'white', 'black'}).all() and len(table) == 10
    assert (table['plies'] <= 30).all() and (table['best'] + table['listed'] + table['random'] <= 16).all() and (table['best'] >= 14).all()
    assert table['listed'].sum() == table['random'].sum() == 0 and set(table['end']) == {'limit'} and (table['result'] == .5).all()


def test_the_winner_gets_the_point():
    black = {'f2f3': 'e7e5', 'g2g4': 'd8h4'}
    white = iter(['f2f3', 'g2g4'])
    fool = lambda board: chess.Move.from_uci(next(white) if board.turn else black[board.peek().uci()])
    after = {START: 'f2f3', 'rnbqkbnr/pppp1ppp/8/4p3/8/5P2/PPPPP1PP/RNBQKBNR w KQkq - 0 2': 'g2g4',
             'rnbqkbnr/pppppppp/8/8/8/5P2/PPPPP1PP/RNBQKBNR b KQkq - 0 1': 'e7e5',
             'rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2': 'd8h4'}
    table = play_match(answering(lambda fen: after[fen]), fool, [START]).set_index('colour')
    assert table.loc['white', 'result'] == 0 and table.loc['black', 'result'] == 1 and (table['end'] == 'checkmate').all()
    assert (table['plies'] == 4).all() and (table['best'] == 2).all()


def test_draws():
    shuffle = {True: ('g1f3', 'f3g1'), False: ('g8f6', 'f6g8')}
    there_and_back = lambda fen: next(m for m in shuffle[chess.Board(fen).turn] if m in legal_moves(fen))
    table = play_match(answering(there_and_back), lambda board: chess.Move.from_uci(there_and_back(board.fen())), [START])
    assert (table['result'] == .5).all() and (table['end'] == 'threefold_repetition').all() and (table['plies'] == 8).all()
    bare = play_match(random_mover(0), engine_like(0), ['8/8/4k3/8/8/4K3/8/8 w - - 0 1'])
    assert (bare['end'] == 'insufficient_material').all() and (bare['plies'] == 0).all() and (bare['result'] == .5).all()
    tired = play_match(random_mover(0), engine_like(0), ['8/8/2r1k3/8/8/4K1R1/8/8 w - - 99 80'], 4)
    assert set(tired['end']) <= {'fifty_moves', 'limit', 'insufficient_material'} and (tired['end'] == 'fifty_moves').any()


def test_illegal_answers_are_replaced_and_counted():
    rng, legal = random.Random(0), legal_moves(START)
    assert legal_choice(PolicyAnswer(moves=('d2d4',), best='e2e4'), legal, rng) == ('e2e4', 'best')
    assert legal_choice(PolicyAnswer(moves=('e2e5', 'd2d4', 'c2c4'), best='e2e5'), legal, rng) == ('d2d4', 'listed')
    drawn = {legal_choice(PolicyAnswer(), legal, rng) for _ in range(400)}
    assert drawn == {(move, 'random') for move in legal}
    player = lambda fens: [PolicyAnswer(moves=('a1a1', sorted(legal_moves(fen))[0]) if chess.Board(fen).fullmove_number == 1 else (), best='x')
                           for fen in fens]
    table = play_match(player, engine_like(0), [START], 8)
    assert table['best'].eq(0).all() and table['listed'].eq(1).all() and table['random'].eq(3).all()
    scores = match_scores(table)
    assert (scores['best'], scores['listed'], scores['random'], scores['at_limit'], scores['draws']) == (0, .25, .75, 1, 2)
    json.dumps(scores)
    assert table.equals(play_match(player, engine_like(0), [START], 8)) and not table.empty


def test_elo_by_hand():
    assert elo_difference(.75) == pytest.approx(190.85, abs=.01) and elo_difference(1/11) == pytest.approx(-400) and str(elo_difference(.5)) == '0.0'
    even = match_elo(5, 0, 5)
    assert even.low == pytest.approx(-203.5, abs=.1) and even.high == pytest.approx(203.5, abs=.1) and str(even) == '+0 (-204 to +204)'
    assert match_elo(0, 0, 20) == (0, -math.inf, -math.inf, pytest.approx(-400*math.log10(20/1.96**2)))
    assert str(match_elo(0, 0, 20)) == 'below -287' and str(match_elo(20, 0, 0)) == 'above +287'
    assert match_elo(1, 2, 1).score == .5 and match_elo(0, 1, 0).low == pytest.approx(-match_elo(0, 1, 0).high)


@pytest.mark.parametrize('games', [1, 11, 12, 44, 200])  # with 11 and 12 rounding leaves Wilson's ends off 0 and 1
def test_one_end_is_open(games):
    lost, won = match_elo(0, 0, games), match_elo(games, 0, 0)
    assert lost.low == -math.inf < lost.high < math.inf and -math.inf < won.low < won.high == math.inf


@settings(max_examples=100)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_elo_properties(wins, draws, losses):
    if wins + draws + losses == 0:
        with pytest.raises(SuiteError, match='at least one game'):
            match_elo(wins, draws, losses)
        return
    elo, mirrored = match_elo(wins, draws, losses), match_elo(losses, draws, wins)
    assert elo.low <= elo.elo <= elo.high and elo.low < elo.high and not math.isnan(elo.low + elo.high)
    assert (elo.elo, elo.low, elo.high) == pytest.approx((-mirrored.elo, -mirrored.high, -mirrored.low), abs=1e-6)
    assert match_elo(wins + 1, draws, losses).elo >= elo.elo and match_elo(10*wins, 10*draws, 10*losses).score == pytest.approx(elo.score)
    assert math.isinf(elo.low) == (wins + draws == 0) and math.isinf(elo.high) == (losses + draws == 0)


def test_elo_refuses():
    with pytest.raises(SuiteError, match='-1 wins'):
        match_elo(-1, 0, 3)


def test_levels():
    assert level_options('skill=0') == ({'Skill Level': 0}, None) and level_options('nodes=50') == ({}, 50)
    assert level_options('elo=1500') == ({'UCI_LimitStrength': True, 'UCI_Elo': 1500}, None)
    for bad in ('skill', 'skill=', 'skill=-1', 'depth=3', 'nodes=0', '5', ''):
        with pytest.raises(SuiteError, match='valid are skill=0'):
            level_options(bad)


@pytest.mark.stockfish
def test_stockfish_as_an_opponent():
    with stockfish_opponent('nodes=200') as engine:
        tables = [play_match(random_mover(0), engine, [START], 24) for _ in range(2)]
    assert tables[0].equals(tables[1]) and tables[0]['result'].le(.5).all()
    rng = random.Random(0)
    positions = [random_play(rng, 24) for _ in range(8)]
    with stockfish_opponent('nodes=1500') as engine:  # what it was asked before does not matter
        first, again = [engine(board) for board in positions], [engine(board) for board in reversed(positions)]
        assert first == again[::-1] == [engine(board) for board in positions for _ in range(3)][2::3]
    with stockfish_opponent('elo=1500', nodes=50) as engine:
        assert engine(chess.Board()) in chess.Board().legal_moves
    for level in ('skill=21', 'elo=3'):
        with pytest.raises(SuiteError, match=level):
            with stockfish_opponent(level):
                pass


@pytest.mark.stockfish
def test_stockfish_is_not_blamed_for_what_others_do():
    for error in (chess.engine.EngineError('illegal uci'), TimeoutError('of the database')):
        with pytest.raises(type(error)) as caught, stockfish_opponent('nodes=1'): raise error
        assert caught.value is error


def test_a_first_line_with_an_endless_field_is_no_suite():
    assert suite_format('x'*200_000) is None
    with pytest.raises(SuiteError, match='long is no suite'): parse_puzzles(['x'*200_000], 'long')


def test_no_stockfish():
    with pytest.raises(EngineNotFoundError):
        with stockfish_opponent('skill=0', path='no/such/engine'):
            pass


# ---- the model

@pytest.fixture(scope='module')
def nano():
    """The embedded model."""
    return load_pretrained('nano')


def test_the_model_plays_and_batches_do_not_matter(nano):
    fens = [position.fen for position in opening_positions()[:5]]
    answers = model_player(*nano)(fens)
    assert [a.best in a.moves for a in answers] == [True]*5 and model_player(*nano, batch_size=2)(fens) == answers
    assert [model_player(*nano)([fen])[0] for fen in fens] == answers and model_player(*nano)([]) == []
    hot = [model_player(*nano, temperature=1.5, seed=seed) for seed in (0, 0, 1)]
    first, again, other = (player(fens) for player in hot)
    assert first == again != other and hot[0](fens) != first  # the noise runs on


def test_the_model_is_a_world(nano):
    steps = [(START, ['e2e4']), ('rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1', ['e2e4', 'e7e5'])]
    assert model_world(model_simulator(*nano))(steps) == rules_world(steps) == model_world(model_simulator(*nano, batch_size=1))(steps)
    with pytest.raises(SuiteError, match='history_plies=0'):
        model_simulator(*nano, history_plies=0)


def test_prompts_are_those_of_the_tasks(nano, monkeypatch):
    asked = []
    def record(model, tokenizer, prompts, group, budget, temperature, generator, share):
        asked.append((list(prompts), group, budget, temperature))
        return type('Drawn', (), {'texts': ['k7/8/8/8/8/8/8/K7 w+0.001+0+0']*len(prompts)})
    monkeypatch.setattr('rookworld_nb.evaluate.sample_group', record)
    assert model_player(*nano, temperature=.3)([START])[0].best is None
    plies = [f'a{i}a{i + 1}' for i in range(1, 6)]
    assert model_world(model_simulator(*nano, history_plies=3))([(START, plies)]) == [None]
    (policy, *_), (env, *_) = asked
    assert policy == [f'P: {START}'] and env == [f'A: {START}+a5a6+a3a4 a4a5 a5a6+'] and asked[0][1:4:2] == (1, .3)
    assert {budget for _, _, budget, _ in asked} == {ANSWER_TOKENS}


def test_no_torch_state_is_left_behind(nano):
    before = torch.get_rng_state()
    model_player(*nano, temperature=1.)([START])
    assert torch.equal(before, torch.get_rng_state())


def test_a_search_may_be_held_to_some_moves():
    player = answering(lambda fen: 'e2e4')
    assert list(uci_session(['position fen nonsense', 'ucinewgame', 'go'], player))[-1] != 'bestmove (none)'    # a new game begins at the start
    said = list(uci_session(['go', 'go searchmoves a2a3 movetime 9', 'go searchmoves e2e4 a2a3', 'go searchmoves a9a9'], player))
    assert [line for line in said if line.startswith('bestmove')] == [f'bestmove {move}' for move in ('e2e4', 'a2a3', 'e2e4', 'e2e4')]


@pytest.mark.parametrize('ask', [
    lambda: self_play(None, None, []), lambda: self_play(None, None, [START], max_plies=0), lambda: play_match(None, None, []),
    lambda: parse_puzzles(['4k3/8/4K3/8/8/8/8/7R w - - bm Rh8#;'], limit=-1),
    lambda: suite_scores(solve(lambda fens: [PolicyAnswer() for _ in fens], shipped_puzzles('mates')[:1])[:0])])
def test_nothing_to_play_to_read_or_to_score_is_said(ask):
    with pytest.raises(SuiteError, match='at least|no answer'): ask()


NOBODY = '4k3/8/8/8/4p3/8/8/4K3 b - d3'    # en passant, of a pawn that is not there


def test_a_capture_of_nothing_is_no_right_move():
    with pytest.raises(SuiteError, match='the move e4d3 is not legal'): parse_puzzles([f'{NOBODY} bm exd3; id "x";'])
    [puzzle] = parse_puzzles([f'{NOBODY} am Kd8; id "x";'])
    assert puzzle.questions[0].fen.split()[3] == '-' and puzzle.questions[0].right == legal_moves(puzzle.questions[0].fen) - {'e8d8'}


def test_games_begin_without_a_capture_of_nothing():
    with pytest.raises(ValueError, match='e4d3'): uci_board(f'fen {NOBODY} 0 1 moves e4d3'.split())
    assert uci_board(f'fen {NOBODY} 0 1 moves e8d8'.split()).fen() == '3k4/8/8/8/4p3/8/8/4K3 w - - 1 2'
    shown = []
    def player(fens):
        shown.extend(fens)
        return [PolicyAnswer(best='e4d3') for _ in fens]
    for play in (lambda: self_play(player, rules_world, [f'{NOBODY} 0 1']), lambda: play_match(player, lambda board: min(board.legal_moves, key=str), [f'{NOBODY} 0 1'], 1),
                 lambda: play_game(player, player, f'{NOBODY} 0 1', 1)):
        play()
        assert shown == ['4k3/8/8/8/4p3/8/8/4K3 b - - 0 1']
        shown.clear()


def test_a_side_may_not_pass():
    with pytest.raises(SuiteError, match='0000 is no move'): uci_board('startpos moves e2e4 0000'.split())


def test_a_level_of_nodes_is_the_limit_of_each_move(monkeypatch):
    class Engine:
        limits, configure = [], lambda *_: None
        def __enter__(self): return self
        def __exit__(self, *failure): pass
        def play(self, board, limit, game): return SimpleNamespace(move=self.limits.append(limit.nodes))
    monkeypatch.setattr('rookworld_nb.suites.find_stockfish', lambda path: 'x')
    monkeypatch.setattr(chess.engine.SimpleEngine, 'popen_uci', lambda *given, **options: Engine())
    for level in ('nodes=50', 'skill=3'):
        with stockfish_opponent(level, nodes=7) as play: play(chess.Board())
    assert Engine.limits == [50, 7]
