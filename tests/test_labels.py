"Labelling of files: every position once, whoever is killed and when; refusals; and data sets that are read without being held."
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import chess
import pytest

from rookworld_nb import cli, labels
from rookworld_nb.labels import (
    Labelling, LabelError, countdown, cut_inputs, label_files, label_shard, label_worker, labelled_in, merge_shards, policy_line,
    read_plan, shard_of, shard_totals)
from rookworld_nb.positions import DataError, data_files, lazy_lines, locked, read_lines, shipped
from rookworld_nb.rules import LABEL_NODES, PATIENCE, Candidate, EngineError, legal_moves
from rookworld_nb.tasks import parse_policy
from processes import children_of, is_running

ROOT = Path(__file__).resolve().parent.parent


def games(count, seed=0):
    "Different positions of random games."
    rng, found = random.Random(seed), {}
    while len(found) < count:
        board = chess.Board()
        for _ in range(60):
            moves = list(board.legal_moves)
            if not moves: break
            board.push(rng.choice(moves))
            if board.legal_moves.count() > 1: found[board.fen()] = None
    return list(found)[:count]


def test_the_command_looks_as_deep_as_the_shipped_labels():
    assert signature(cli.label).parameters['nodes'].default == Labelling('out.txt').nodes == LABEL_NODES


class Engine:
    "Stands in for an engine: the first legal moves, each a pawn worse."
    name = 'Engine'

    def __init__(self, path=None, nodes=1000): self.nodes = nodes
    def __enter__(self): return self
    def __exit__(self, *failure): pass
    def close(self): pass

    def analyse(self, fen):
        "Answer without thinking."
        return tuple(Candidate(uci, 1. - i) for i, uci in enumerate(sorted(legal_moves(fen))[:5]))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(labels, 'Stockfish', Engine)

    def in_this_process(job, sources):
        cut_inputs(job, [path for source in sources for path in data_files(source)], Engine.name)
        label_worker(job, 0, 1)
        return merge_shards(job)
    return in_this_process


def test_a_damaged_plan_names_itself(tmp_path):
    (tmp_path/'plan.json').write_text('{"shards"')
    with pytest.raises(LabelError, match='plan.json: damaged .*remove .* to begin anew'): read_plan(tmp_path)


def fen_of(line): return line[3:].partition('M:')[0].strip()


# ---- every position once

def test_a_file_without_a_position_leaves_nothing_behind(quick, tmp_path):
    (tmp_path/'notes.txt').write_text('one\ntwo\n')
    job = Labelling(str(tmp_path/'out.txt'), 2, 10, 0, True, None)
    with pytest.raises(LabelError, match='none of the 2 lines is a position'): quick(job, [str(tmp_path/'notes.txt')])
    assert [path.name for path in tmp_path.iterdir()] == ['notes.txt']
    (tmp_path/'notes.txt').write_text('')
    with pytest.raises(LabelError, match='not written; the input is empty'): quick(job, [str(tmp_path/'notes.txt')])
    (tmp_path/'notes.txt').write_text('\n'.join(json.dumps({'fen': fen, 'kind': 'game'}) for fen in games(3)))
    assert quick(job, [str(tmp_path/'notes.txt')])['lines'] == 3


def test_inputs_of_every_kind_and_positions_that_come_twice(quick, tmp_path):
    fens = games(60)
    (tmp_path/'a.txt').write_text('\n'.join(fens[:40]) + '\n\n  ' + fens[3].replace(' ', '  ') + '\n')
    (tmp_path/'more').mkdir()
    with gzip.open(tmp_path/'more'/'b.gz', 'wt') as file: file.write('\r\n'.join(fens[30:]))
    (tmp_path/'more'/'c.txt').write_text('no position\nR5k1/5ppp/8/8/8/8/8/6K1 b - - 0 1\n4k3/8/8/8/8/8/8/4K2R w K -\n4k2r/8/8/8/8/8/8/4K2R w kK - 0 1\n')
    job = Labelling(str(tmp_path/'out.txt'), shards=7, nodes=1)
    assert quick(job, [str(tmp_path/'a.txt'), str(tmp_path/'more')]) == {'lines': 60, 'single': 1, 'malformed': 3, 'failed': 0}
    lines = (tmp_path/'out.txt').read_text().splitlines()
    assert sorted(map(fen_of, lines)) == sorted(fens) and not job.folder.exists()
    assert [shard_of(fen, 7) for fen in map(fen_of, lines)] == sorted(shard_of(fen, 7) for fen in fens)
    samples, malformed = read_lines(tmp_path/'out.txt')
    assert len(samples) == 60 and not malformed
    packed = Labelling(str(tmp_path/'out.txt.gz'), shards=7, nodes=1)
    quick(packed, [str(tmp_path/'a.txt'), str(tmp_path/'more')])
    assert gzip.decompress((tmp_path/'out.txt.gz').read_bytes()).decode().splitlines() == lines
    assert (tmp_path/'out.txt.gz').read_bytes()[4:8] == bytes(4)    # no time stamp


@pytest.mark.parametrize('torn', [0, 1, 7, 60, 128])
def test_a_torn_shard_goes_on_where_it_was(quick, torn, tmp_path, caplog):
    (tmp_path/'in.txt').write_text('\n'.join(games(20)))
    jobs = [Labelling(str(tmp_path/name), shards=1) for name in ('whole.txt', 'torn.txt')]
    quick(jobs[0], [str(tmp_path/'in.txt')])
    whole = (tmp_path/'whole.txt').read_bytes()
    cut_inputs(jobs[1], [tmp_path/'in.txt'], Engine.name)
    kept = b''.join(whole.splitlines(keepends=True)[:9]) + whole.splitlines()[9][:torn]
    jobs[1].place('part', 0).write_bytes(kept)
    caplog.set_level('WARNING')
    assert len(labelled_in(jobs[1].place('part', 0))) == 9 and ('the last line is torn, and cut off' in caplog.text) == (torn > 0)
    quick(jobs[1], [str(tmp_path/'in.txt')])
    assert (tmp_path/'torn.txt').read_bytes() == whole


def test_a_reason_is_told_of_each_kind(tmp_path, caplog):
    for number, (bad, failed) in enumerate([([], []), (['bad A'], []), (['bad B'], ['the engine died'])]):
        note = {'lines': 1, 'single': 0, 'malformed': len(bad), 'failed': len(failed), 'first': [bad, failed]}
        (tmp_path/f'note-{number}').write_text(json.dumps(note))
    assert shard_totals(tmp_path) == {'lines': 3, 'single': 0, 'malformed': 2, 'failed': 1}
    assert '3 lines are left out: bad A; the engine died' in caplog.text


def test_a_position_is_labelled_once_however_it_is_spelt(quick, tmp_path):
    board = chess.Board()
    board.push_uci('e2e4')
    fields = board.fen().split()
    (tmp_path/'in.txt').write_text('\n'.join(' '.join((*fields[:3], square, *fields[4:])) for square in ('-', 'e3')))
    quick(Labelling(str(tmp_path/'out.txt'), shards=2), [str(tmp_path/'in.txt')])
    assert [fen_of(line) for line in (tmp_path/'out.txt').read_text().splitlines()] == [board.fen()]


def test_where_files_cannot_be_locked_it_is_said_and_work_goes_on(tmp_path, monkeypatch, caplog):
    fcntl = pytest.importorskip('fcntl')
    def refuse(*what): raise OSError(37, 'No locks available')
    monkeypatch.setattr(fcntl, 'flock', refuse)
    with locked(tmp_path/'lock') as mine: assert mine
    assert 'lock: cannot be locked ([Errno 37] No locks available); see to it that no other process' in caplog.text
    monkeypatch.setitem(sys.modules, 'fcntl', None)    # Windows
    with locked(tmp_path/'lock') as mine: assert mine


def test_where_nothing_can_be_locked_each_process_keeps_to_shards_of_its_own(quick, tmp_path, monkeypatch):
    (tmp_path/'in.txt').write_text('\n'.join(games(9)))
    job = Labelling(str(tmp_path/'out.txt'), shards=5)
    cut_inputs(job, [tmp_path/'in.txt'], Engine.name)
    monkeypatch.setitem(sys.modules, 'fcntl', None)
    done = lambda: {n for n in range(5) if job.place('done', n).exists()}
    label_worker(job, 0, 2)
    assert done() == {0, 1}
    label_worker(job, 1, 2)
    assert done() == {0, 1, 2, 3, 4} and merge_shards(job)['lines'] == 9


def test_a_shard_has_one_owner(quick, tmp_path):
    (tmp_path/'in.txt').write_text('\n'.join(games(5)))
    job = Labelling(str(tmp_path/'out.txt'), shards=1)
    cut_inputs(job, [tmp_path/'in.txt'], Engine.name)
    with locked(job.place('lock', 0)) as mine:
        assert mine and not label_shard(job, 0, Engine()) and not job.place('done', 0).exists()
    assert label_shard(job, 0, Engine()) and label_shard(job, 0, Engine())


@pytest.mark.slow
@pytest.mark.stockfish
def test_killed_three_times_at_any_moment(tmp_path):
    "All its processes; its workers, one after the other, for alone the second would do the rest; the one that was started."
    fens, output, rng = games(2000, 1), tmp_path/'out.txt', random.Random(0)
    (tmp_path/'in.txt').write_text('\n'.join(fens + fens[:100]))
    words = [sys.executable, '-m', 'rookworld_nb.cli', 'label', '--input', tmp_path/'in.txt', '--output', output, '--shards', '8', '--workers', '2',
             '--nodes', '20']
    for whom in ('everybody', 'workers', 'starter'):
        job = subprocess.Popen([*map(str, words)], env=os.environ | {'PYTHONPATH': str(ROOT)}, start_new_session=True, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        before = written(output)
        while job.poll() is None and written(output) <= before: time.sleep(.01)    # it works
        time.sleep(rng.random()/2)
        assert job.poll() is None and not output.exists()
        if whom == 'workers':
            while len(workers := [child for child in children_of(job.pid) if children_of(child)]) < 2: time.sleep(.01)    # each with its engine
            for worker in workers:
                os.kill(worker, signal.SIGKILL)
                time.sleep(rng.random()/4)
            assert job.wait(100) == 2
        else:
            workers = children_of(job.pid)
            left = [*workers, *(engine for worker in workers for engine in children_of(worker))]
            (os.killpg if whom == 'everybody' else os.kill)(job.pid, signal.SIGKILL)
            job.wait(100)
            deadline = time.monotonic() + 20    # nobody outlives the starter
            while any(map(is_running, left)):
                assert time.monotonic() < deadline
                time.sleep(.01)
    done = subprocess.run([*map(str, words)], env=os.environ | {'PYTHONPATH': str(ROOT)}, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0 and json.loads(done.stdout) == {'lines': 2000, 'single': 0, 'malformed': 0, 'failed': 0}, done.stderr
    assert 'shards: 8 of 8, 0 minutes to go' in done.stderr
    counts = Counter(map(fen_of, output.read_text().splitlines()))
    assert set(counts) == set(fens) and set(counts.values()) == {1}
    samples, malformed = read_lines(output)
    assert len(samples) == 2000 and not malformed and [*tmp_path.iterdir()].__len__() == 2


@pytest.mark.parametrize('send', [os.kill, os.killpg])
@pytest.mark.stockfish
def test_ctrl_c_to_the_command_alone_or_to_all_ends_its_workers_too(send, tmp_path):
    fens, output = games(60, 2), tmp_path/'out.txt'
    (tmp_path/'in.txt').write_text('\n'.join(fens))
    words = [sys.executable, '-m', 'rookworld_nb.cli', 'label', '--input', tmp_path/'in.txt', '--output', output, '--shards', '2', '--nodes']
    job = subprocess.Popen([*map(str, words), '200000'], env=os.environ | {'PYTHONPATH': str(ROOT)}, start_new_session=True, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while job.poll() is None and not written(output): time.sleep(.01)
    workers = [child for child in children_of(job.pid) if children_of(child)]
    send(job.pid, signal.SIGINT)
    assert job.wait(100) == 130 and workers and not any(map(is_running, workers))
    said = job.stderr.read()
    assert 'rookworld label: interrupted' in said and 'Traceback' not in said and not output.exists()
    assert sum(len(path.read_text().splitlines()) for kind in ('part-*', 'done-*') for path in Path(f'{output}.shards').glob(kind)) < 50


FAILING = '''#!{python}
import sys
import chess
for line in sys.stdin:
    match line.split():
        case ['uci']: print('id name Failing', 'uciok', sep=chr(10), flush=True)
        case ['isready']: print('readyok', flush=True)
        case ['position', 'fen', *fen]: board = chess.Board(' '.join(fen))
        case ['go', *_]:
            if {fails}: sys.exit(1)
            moves = [move.uci() for move in board.legal_moves][:5]
            for n, move in enumerate(moves, 1): print(f'info depth 1 multipv {{n}} score cp {{50 - n}} pv {{move}}', flush=True)
            print('bestmove', moves[0], flush=True)
'''


def test_a_position_that_the_engine_fails_on_costs_no_other(tmp_path, capsys, caplog):
    fens, engine = games(20, 3), tmp_path/'engine'
    engine.write_text(FAILING.format(python=sys.executable, fails=f'board.fen() == {fens[3]!r}'))
    engine.chmod(0o755)
    output = tmp_path/'out.txt'
    assert cli.main(['label', *fens, '--stockfish-path', str(engine), '--output', str(output)]) == 0
    assert [*map(fen_of, output.read_text().splitlines())] == [fen for fen in fens if fen != fens[3]]
    assert 'left out' in capsys.readouterr().err + caplog.text
    engine.write_text(FAILING.format(python=sys.executable, fails='True'))
    assert cli.main(['label', *fens, '--stockfish-path', str(engine), '--output', str(tmp_path/'other.txt')]) == 2
    assert cli.main(['label', fens[0], '--stockfish-path', str(engine)]) == 2


def written(output):
    "Bytes in the shards so far."
    found = 0
    for kind in ('part-*', 'done-*'):
        for path in Path(f'{output}.shards').glob(kind):
            try: found += path.stat().st_size
            except OSError: pass
    return found


# ---- refusals

@pytest.mark.parametrize('words, names', [
    ('--input in.txt', ['--input', '--output']), ('--input in.txt --output out.txt e4', ['no positions beside it']),
    ('--input nowhere.txt --output out.txt', ['nowhere.txt']), ('--input in.txt --output out.txt --shards 0', ['--shards 0', '1 to 1000']),
    ('--input in.txt --output old.txt', ['--output old.txt', 'new file']), ('--input in.txt --output out.txt --workers 0', ['--workers 0']),
    ('--input in.txt --output out.txt --stockfish-path no/engine', ['no/engine'])])
def test_what_is_wrong_is_said_and_nothing_is_made(words, names, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path/'in.txt').write_text(chess.STARTING_FEN)
    (tmp_path/'old.txt').write_text('P: old')
    if '--stockfish-path' not in words: monkeypatch.setattr(labels, 'Stockfish', Engine)
    before = sorted(tmp_path.iterdir())
    assert cli.main(['label', *words.split()]) == 2
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1 and all(name in said for name in names) and sorted(tmp_path.iterdir()) == before


def test_a_program_that_is_no_engine_is_refused_before_anything_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path/'in.txt').write_text(chess.STARTING_FEN)
    assert cli.main('label --input in.txt --output out.txt --stockfish-path /bin/true'.split()) == 2
    assert "/bin/true failed twice on 'uci'" in capsys.readouterr().err and [*tmp_path.iterdir()] == [tmp_path/'in.txt']


def test_a_job_goes_on_as_it_was_begun(quick, tmp_path):
    (tmp_path/'in.txt').write_text('\n'.join(games(5)))
    cut_inputs(Labelling(str(tmp_path/'out.txt'), nodes=50), [tmp_path/'in.txt'], Engine.name)
    for change, word in (({'nodes': 60}, 'nodes 50'), ({'nodes': 50, 'shards': 3}, 'shards 64')):
        with pytest.raises(LabelError, match=f'was begun with {word}'): cut_inputs(Labelling(str(tmp_path/'out.txt'), **change), [tmp_path/'in.txt'], Engine.name)
    with pytest.raises(LabelError, match='begun with engine Engine, now other'): cut_inputs(Labelling(str(tmp_path/'out.txt'), nodes=50), [tmp_path/'in.txt'], 'other')
    (tmp_path/'in.txt').write_text('other')
    with pytest.raises(LabelError, match='was begun with files'): cut_inputs(Labelling(str(tmp_path/'out.txt'), nodes=50), [tmp_path/'in.txt'], Engine.name)


def test_killed_while_cleaning_up(quick, tmp_path):
    (tmp_path/'in.txt').write_text('\n'.join(games(5)) + '\nnonsense\n')
    job, gone, words = Labelling(str(tmp_path/'out.txt'), shards=2), tmp_path/'out.txt.shards.done', [str(tmp_path/'in.txt')]
    if not (child := os.fork()):
        Path.unlink = lambda path: os._exit(9)    # the kill
        try: quick(job, words)
        finally: os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9 and gone.exists() and (tmp_path/'out.txt').exists()
    with pytest.raises(LabelError, match='is there already'): label_files(replace(job, nodes=7), words)
    assert label_files(job, words) == {'lines': 5, 'single': 0, 'malformed': 1, 'failed': 0} and not gone.exists()
    with pytest.raises(LabelError, match='is there already'): label_files(job, words)


def test_one_command_at_a_time(quick, tmp_path):
    (tmp_path/'in.txt').write_text('\n'.join(games(5)))
    job = Labelling(str(tmp_path/'out.txt'), shards=2)
    job.folder.mkdir()
    with locked(job.folder/'lock'), pytest.raises(LabelError, match='another command'): label_files(job, [str(tmp_path/'in.txt')])


def test_a_position_that_the_engine_fails_on_is_left_out_and_counted(tmp_path):
    fens = games(30)

    class Failing(Engine):
        def analyse(self, fen):
            if fen in bad: raise EngineError(f'no answer to {fen}')
            return super().analyse(fen)
    (tmp_path/'in.txt').write_text('\n'.join(fens))
    job, bad = Labelling(str(tmp_path/'out.txt'), shards=1), {*fens[3:3 + PATIENCE - 1], fens[20]}
    cut_inputs(job, [tmp_path/'in.txt'], Engine.name)
    assert label_shard(job, 0, Failing())
    assert merge_shards(job) == {'lines': 30 - PATIENCE, 'single': 0, 'malformed': 0, 'failed': PATIENCE}
    job, bad = Labelling(str(tmp_path/'dead.txt'), shards=1), set(fens)
    cut_inputs(job, [tmp_path/'in.txt'], Engine.name)
    with pytest.raises(EngineError, match='no answer'): label_shard(job, 0, Failing())


# ---- shards are read one line at a time

def shards_of(folder, count, lines):
    "A folder of shards, with a bad line in each."
    folder.mkdir()
    text = ''.join(sample.line + '\n' for sample in shipped('train')[:lines])
    for n in range(count): (folder/f'{n:03d}.txt').write_text(text + 'nonsense\n')
    return folder


def test_many_shards_are_one_data_set(tmp_path):
    folder, complaints = shards_of(tmp_path/'data', 3, 20), []
    (folder/'.hidden').write_text('x')
    samples = list(lazy_lines(folder, lambda *bad: complaints.append(bad)))
    assert samples == shipped('train')[:20]*3 == read_lines(folder)[0]
    assert [number for number, _ in complaints] == [21]*3 and [reason[:9] for _, reason in complaints] == [f'{n:03d}.txt: ' for n in range(3)]
    (tmp_path/'empty').mkdir()
    for wrong in (tmp_path/'empty', tmp_path/'none'):
        with pytest.raises(DataError, match='no data file'): next(lazy_lines(wrong, print))


def test_memory_does_not_grow_with_the_data(tmp_path):
    peaks = []
    for count in (1, 12):
        folder = shards_of(tmp_path/str(count), count, 100)
        tracemalloc.start()
        seen = sum(1 for _ in lazy_lines(folder, lambda *bad: None))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert seen == 100*count
    assert peaks[1] < 1.2*peaks[0] + 50_000


def test_progress_counts_the_pace_from_where_it_began(monkeypatch):
    clock = [100.]
    monkeypatch.setattr('rookworld_nb.labels.time', SimpleNamespace(monotonic=lambda: clock[0]))
    progress = countdown(12, before=2)
    assert progress(2) == '2 of 12'
    clock[0] += 240.
    assert [progress(3), progress(6), progress(12)] == ['3 of 12, 36 minutes to go', '6 of 12, 6 minutes to go', '12 of 12, 0 minutes to go']


# ---- what is not this job's

def test_a_file_made_meanwhile_is_not_written_over(quick, tmp_path):
    (tmp_path/'in.txt').write_text('\n'.join(games(5)))
    job = Labelling(str(tmp_path/'out.txt'), shards=2)
    cut_inputs(job, [tmp_path/'in.txt'], Engine.name)    # and killed
    assert cli.main(['label', games(1)[0], '--output', job.output]) == 2
    assert not Path(job.output).exists()
    Path(job.output).write_text('of somebody else\n')
    with pytest.raises(LabelError, match='is there already; give a new file'): label_files(job, [str(tmp_path/'in.txt')])
    assert Path(job.output).read_text() == 'of somebody else\n'


def test_a_prompt_is_a_position_too(quick, tmp_path):
    fens = games(3)
    for name, start in (('fens.txt', ''), ('prompts.txt', 'P: '), ('tight.txt', ' P:')):
        (tmp_path/name).write_text('\n\n'.join(start + fen for fen in fens))
        assert quick(Labelling(str(tmp_path/f'labelled-{name}'), shards=2), [str(tmp_path/name)]) == {'lines': 3, 'single': 0, 'malformed': 0, 'failed': 0}
    assert len({path.read_text() for path in tmp_path.glob('labelled-*')}) == 1


def test_a_line_that_no_file_can_hold_is_malformed(quick, tmp_path):
    (tmp_path/'in.txt').write_text('{"fen": "\\ud800"}\n' + '\n'.join(games(3)))
    assert quick(Labelling(str(tmp_path/'out.txt'), shards=2), [str(tmp_path/'in.txt')])['malformed'] == 1


def test_an_interruption_while_workers_start_ends_those_that_run(tmp_path, monkeypatch):
    started = []

    class Worker:
        pid = None
        def __init__(self, **_): pass
        def is_alive(self): return False

        def start(self):
            started.append(self)
            if len(started) == 2: raise KeyboardInterrupt
    stopped = []
    monkeypatch.setattr(labels, 'Stockfish', Engine)
    monkeypatch.setattr(labels, 'get_context', lambda _: SimpleNamespace(Process=Worker))
    monkeypatch.setattr(labels, 'stop', stopped.extend)
    (tmp_path/'in.txt').write_text('\n'.join(games(5)))
    with pytest.raises(KeyboardInterrupt): label_files(Labelling(str(tmp_path/'out.txt'), shards=2), [str(tmp_path/'in.txt')], 3)
    assert len(stopped) == 3


def test_a_job_goes_on_where_it_was_moved_to(quick, tmp_path, monkeypatch):
    (was := tmp_path/'was').mkdir()
    (was/'in.txt').write_text('\n'.join(games(5)))
    monkeypatch.chdir(was)
    cut_inputs(Labelling('out.txt', nodes=50), [Path('in.txt')], Engine.name)
    moved = was.rename(tmp_path/'now')
    monkeypatch.chdir(tmp_path)
    quick(Labelling(str(moved/'out.txt'), nodes=50), [str(moved/'in.txt')])
    assert len((moved/'out.txt').read_text().splitlines()) == 5


def test_a_job_is_done_as_deep_and_as_wide_as_was_asked(quick, tmp_path, monkeypatch):
    class Deep(Engine):
        def analyse(self, fen): return tuple(Candidate(uci, float(self.nodes - i)) for i, (uci, _) in enumerate(super().analyse(fen)))
    monkeypatch.setattr(labels, 'Stockfish', Deep)
    (tmp_path/'in.txt').write_text('\n'.join(games(3)))
    quick(Labelling(str(tmp_path/'out.txt'), shards=2, nodes=7, padded=False), [str(tmp_path/'in.txt')])
    lines = (tmp_path/'out.txt').read_text().splitlines()
    assert [max(parse_policy(line).evals) for line in lines] == [7.]*3 and not any('  ' in line for line in lines)


def test_a_promotion_cut_off_in_its_last_letter_is_torn(tmp_path):
    fen = '8/P6k/8/8/8/8/8/K7 w - - 0 1'
    line = policy_line(fen, [Candidate('a7a8q', 9.), Candidate('a1b1', 0.)])
    for end, done in (('', {fen}), ('q', set())):
        (tmp_path/'part').write_text(line.removesuffix(end))
        assert labelled_in(tmp_path/'part') == done


def test_a_position_with_one_move_has_nothing_to_choose(quick, tmp_path):
    (tmp_path/'in.txt').write_text('\n'.join([*games(2), '8/8/8/8/8/1k6/8/K7 w - - 0 1']))
    assert quick(Labelling(str(tmp_path/'out.txt'), shards=1), [str(tmp_path/'in.txt')]) == {'lines': 2, 'single': 1, 'malformed': 0, 'failed': 0}
