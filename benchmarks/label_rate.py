"""Does `rookworld label` keep engines as busy as they can be?

    python benchmarks/label_rate.py --positions 5000 --nodes 200 --workers 2 --repeats 3

Labels positions of random games with --workers processes, and has the same engine search the same positions with nothing around it: each
process writes `ucinewgame`, `position` and `go nodes` and reads to `bestmove`. The two are interleaved. Printed: positions per second of wall time,
and per second of CPU time of all processes and engines together, which says what the work costs on a machine that has other work too.
"""
import argparse
import random
import resource
import subprocess
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import chess
from rookworld_nb.labels import Labelling, label_files
from rookworld_nb.rules import find_stockfish


def random_games(count):
    "Different positions with a choice of moves."
    rng, found = random.Random(0), {}
    while len(found) < count:
        board = chess.Board()
        while len(found) < count and board.legal_moves.count() > 1 and board.ply() < 60:
            found[board.fen()] = None
            board.push(rng.choice(list(board.legal_moves)))
    return list(found)


def bare(fens, nodes):
    "An engine and nothing else."
    with subprocess.Popen([find_stockfish()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        def ask(words, last):
            engine.stdin.write(words + '\n')
            engine.stdin.flush()
            while not engine.stdout.readline().startswith(last): pass
        ask('uci', 'uciok')
        for name, value in (('Threads', 1), ('Hash', 1), ('MultiPV', 5)): engine.stdin.write(f'setoption name {name} value {value}\n')
        for fen in fens:
            ask('ucinewgame\nisready', 'readyok')
            ask(f'position fen {fen}\ngo nodes {nodes}', 'bestmove')
        engine.stdin.write('quit\n')
    return len(fens)


def timed(work):
    "Wall and CPU seconds, children included."
    def cpu(): return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    start, before = time.perf_counter(), cpu()
    work()
    return time.perf_counter() - start, cpu() - before


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (('positions', 5000), ('nodes', 200), ('workers', 2), ('repeats', 3)): parser.add_argument(f'--{name}', type=int, default=default)
    o = parser.parse_args()
    fens = random_games(o.positions)

    def engines():
        with ProcessPoolExecutor(o.workers, get_context('spawn')) as pool:
            list(pool.map(bare, [fens[n::o.workers] for n in range(o.workers)], [o.nodes]*o.workers))

    def label():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, 'in.txt').write_text('\n'.join(fens))
            assert label_files(Labelling(f'{folder}/out.txt', 8*o.workers, o.nodes), [f'{folder}/in.txt'], o.workers)['lines'] == len(fens)
    found = {'engines': [], 'label': []}
    for _ in range(o.repeats):
        for name, work in (('engines', engines), ('label', label)):
            wall, cpu = timed(work)
            found[name].append((len(fens)/wall, len(fens)/cpu))
            print(f'{name:8} {len(fens)/wall:8.0f} positions/s of wall time {len(fens)/cpu:8.0f} of CPU time', flush=True)
    for at, what in enumerate(('wall', 'CPU')):
        ratios = sorted(mine[at]/bare_[at] for mine, bare_ in zip(found['label'], found['engines']))
        print(f'label / engines, {what} time: {ratios[len(ratios)//2]:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})')


if __name__ == '__main__': main()
