"""`rookworld uci` in games against Stockfish at its lowest level, driven by python-chess's engine client.

    python benchmarks/uci_match.py --games 50

Every opening is played twice with the colours changed. If an engine answers with an illegal move, or not in time, python-chess raises an error and the script
ends with it. Prints how the games ended, and the score and the Elo difference with their 95 % intervals (Wilson).
"""
import argparse
import sys
import time

import chess
import chess.engine

from rookworld_nb.evaluate import wilson_interval
from rookworld_nb.positions import opening_positions
from rookworld_nb.suites import match_scores, play_match, stockfish_opponent
from rookworld_nb.tasks import PolicyAnswer


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    options.add_argument('--games', type=int, default=50, help='number of games, even')
    options.add_argument('--model', default='nano', help='as for rookworld uci')
    options.add_argument('--level', default='skill=0', help='skill=N, elo=N or nodes=N')
    options = options.parse_args()
    if options.games < 2 or options.games % 2: sys.exit(f'--games {options.games}: must be even, and at least 2')
    openings, start = [position.fen for position in opening_positions()], time.perf_counter()
    if options.games > 2*len(openings): sys.exit(f'--games {options.games}: at most {2*len(openings)}, two for each opening')
    openings = openings[:options.games//2]
    command = [sys.executable, '-m', 'rookworld_nb.cli', 'uci', '--model', options.model]
    with chess.engine.SimpleEngine.popen_uci(command, timeout=120) as model, stockfish_opponent(options.level, nodes=1000) as stockfish:
        table = play_match(lambda fens: [PolicyAnswer(best=stockfish(chess.Board(fen)).uci()) for fen in fens],
                           lambda board: model.play(board, chess.engine.Limit(time=10), game=object()).move, openings)
    moves, scores = table['plies'].sum() - table['best'].sum(), match_scores(table.assign(result=1 - table['result']))
    low, high = wilson_interval(scores['wins'] + scores['draws']/2, scores['games'])
    print(f'{scores["games"]} games against {options.level}, {moves} moves of the model, all legal, {time.perf_counter() - start:.0f} s; '
          f'ends: {table["end"].value_counts().to_dict()}')
    print(f'{scores["wins"]} wins, {scores["draws"]} draws, {scores["losses"]} losses: '
          f'score {scores["score"]:.3f} ({low:.3f} to {high:.3f}), Elo {scores["elo"]}')


if __name__ == '__main__':
    main()
