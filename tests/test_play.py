"""The model as an opponent: the UCI engine against python-chess's client, the game, the board that is clicked."""
import random
import subprocess
import sys

import chess
import chess.engine
import pytest

from rookworld_nb.suites import model_player, uci_board, uci_session
from rookworld_nb.tasks import PolicyAnswer
from rookworld_nb.weights import load_pretrained


@pytest.fixture(scope='module')
def nano():
    return load_pretrained('nano')


# ---- UCI

def stubborn(*moves: str):
    "A player that always gives the same answer."
    return lambda fens: [PolicyAnswer(moves=moves, evals=(.5,)*len(moves), best=moves[0] if moves else None)]*len(fens)


def said(player, *lines: str) -> list[str]:
    return list(uci_session(lines, player))


def test_positions_are_set_up_as_described():
    assert uci_board(['startpos']).fen() == chess.STARTING_FEN
    assert uci_board('startpos moves e2e4 e7e5'.split()).fen().startswith('rnbqkbnr/pppp1ppp/8/4p3/4P3/8/PPPP1PPP/RNBQKBNR w')
    fen = 'r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 3 9'
    assert uci_board(f'fen {fen}'.split()).fen() == fen
    assert uci_board(f'fen {fen} moves e1g1'.split()).fen() == 'r3k2r/8/8/8/8/8/8/R4RK1 b kq - 4 9'


def test_the_protocol_is_answered_line_by_line():
    player = stubborn('e2e4', 'd2d4')
    assert said(player, 'uci', '', 'debug on', 'setoption name Hash value 1', 'isready', 'stop') == [
        'id name rookworld_nb', 'id author rookworld_nb', 'uciok', 'readyok']
    assert said(player, 'position startpos\n', 'go wtime 1 btime 1\n') == ['info depth 1 score cp 50 pv e2e4', 'bestmove e2e4']
    assert said(player, 'position startpos moves e2e4', 'quit', 'go') == []


def test_an_illegal_best_move_gives_way_to_a_candidate_and_then_to_chance():
    assert said(stubborn('e7e5', 'd2d4'), 'go')[-1] == 'bestmove d2d4'
    drawn = {said(stubborn('e7e5'), f'position startpos moves {first}', 'go')[-1] for first in ('a2a3', 'b2b3')}
    assert drawn == {'bestmove e7e5'}  # legal now
    lost = [list(uci_session(['go'], stubborn(), seed=seed))[-1] for seed in range(6)]
    assert len({*lost}) > 1 and lost == [list(uci_session(['go'], stubborn(), seed=seed))[-1] for seed in range(6)]
    assert all(chess.Move.from_uci(line.split()[1]) in chess.Board().legal_moves for line in lost)


@pytest.mark.parametrize('position', ['fen rubbish', 'fen 8/8/8/8/8/8/8/8 w - - 0 1', 'startpos moves e2e5', 'startpos moves what', ''])
def test_a_bad_position_is_named_and_the_good_one_stays(position):
    answers = said(stubborn('e7e5'), 'position startpos moves e2e4', f'position {position}', 'go')
    assert answers[0].startswith('info string position left out: ') and answers[-1] == 'bestmove e7e5'


def test_a_finished_game_has_no_move(nano):
    assert said(model_player(*nano), 'position fen 7k/6Q1/6K1/8/8/8/8/8 b - - 0 1', 'go') == ['bestmove (none)']


@pytest.mark.slow
def test_games_against_a_random_mover_by_way_of_the_command():
    rng, plies = random.Random(0), []
    command = [sys.executable, '-m', 'rookworld_nb.cli', 'uci']
    with chess.engine.SimpleEngine.popen_uci(command, timeout=120, stderr=subprocess.DEVNULL) as engine:
        assert engine.id['name'] == 'rookworld_nb nano'
        for number in range(4):
            board = chess.Board()
            while not board.is_game_over(claim_draw=True) and board.ply() < 120:
                own = board.turn == (number % 2 == 0)
                move = engine.play(board, chess.engine.Limit(time=.1), game=number).move if own else rng.choice([*board.legal_moves])
                assert move in board.legal_moves
                board.push(move)
            plies.append(board.ply())
    assert min(plies) > 4
