"""`rookworld uci` in games against Stockfish at its lowest level, driven by python-chess's engine client.

    python benchmarks/uci_match.py --games 50

Every opening is played twice with the colours changed. python-chess raises where an engine answers with an illegal move, or not in time: the script then ends with an
error. Prints how the games ended, and the score and the Elo difference with their 95 % intervals (Wilson).
"""
import argparse
import sys
import time
from collections import Counter

import chess
import chess.engine

from rookworld_nb.evaluate import wilson_interval
from rookworld_nb.positions import generate_positions
from rookworld_nb.suites import game_end, match_elo, stockfish_opponent

LONGEST = 200    # half-moves of a game; a longer one is a draw


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    options.add_argument('--games', type=int, default=50, help='even')
    options.add_argument('--model', default='nano', help='as for rookworld uci')
    options.add_argument('--level', default='skill=0', help='skill=N, elo=N or nodes=N')
    options = options.parse_args()
    openings = [position.fen for position in generate_positions(5*(options.games//2), seed=1) if position.phase == 'opening']
    results, ends, moves, start = Counter(), Counter(), 0, time.perf_counter()
    command = [sys.executable, '-m', 'rookworld_nb.cli', 'uci', '--model', options.model]
    with chess.engine.SimpleEngine.popen_uci(command, timeout=120) as model, stockfish_opponent(options.level, nodes=1000) as stockfish:
        for number, (fen, colour) in enumerate((fen, colour) for fen in openings for colour in chess.COLORS):
            board = chess.Board(fen)
            while not game_end(board) and len(board.move_stack) < LONGEST:
                own = board.turn == colour
                board.push(model.play(board, chess.engine.Limit(time=10), game=number).move if own else stockfish(board))
                moves += own
            outcome = board.outcome()
            results['draw' if outcome is None or outcome.winner is None else 'win' if outcome.winner == colour else 'loss'] += 1
            ends[game_end(board) or 'longest'] += 1
    games, elo = sum(results.values()), match_elo(results['win'], results['draw'], results['loss'])
    low, high = wilson_interval(results['win'] + results['draw']/2, games)
    print(f'{games} games against {options.level}, {moves} moves of the model, all legal, {time.perf_counter() - start:.0f} s; ends: {dict(ends)}')
    print(f'{results["win"]} wins, {results["draw"]} draws, {results["loss"]} losses: score {elo.score:.3f} ({low:.3f} to {high:.3f}), Elo {elo}')


if __name__ == '__main__':
    main()
