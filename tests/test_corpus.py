"The lines that nano learned from: illegal in the way that was asked for, rare in the right numbers, reproducible, apart from what is examined."
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from textwrap import dedent
from types import SimpleNamespace

import chess
import pytest

from rookworld_nb import corpus
from rookworld_nb.corpus import (CorpusError, ENV_SHARES, HELD_SHARDS, ILLEGAL_SHARES, env_sample, exposes_king, find_kind, illegal_move, illegal_sample,
                                 make_env_data, make_policy_data, make_prompts, make_stress, move_kind, policy_sample, verdict, verdicts,
                                 whole_shard, with_rare_outcomes)
from rookworld_nb.positions import Sample, by_task, generate_positions, outcome, read_lines, seen_positions, shipped, write_lines
from rookworld_nb.rules import Candidate, env_step, fen_key, legal_moves
from rookworld_nb.tasks import parse_env, parse_policy
from processes import is_running

FENS = [position.fen for position in generate_positions(60, seed=5)]
#: Middle games in which a move of one's own can leave the king in check.
EXPOSED = [board for board in map(chess.Board, FENS[12:48]) if len([*board.pseudo_legal_moves]) > board.legal_moves.count()]


def soon(happens, seconds=60) -> bool:
    "Wait for something."
    until = time.monotonic() + seconds
    while not (done := happens()) and time.monotonic() < until: time.sleep(.1)
    return done


@pytest.mark.parametrize('fen', FENS[::6])
def test_illegal_moves_are_illegal(fen):
    rng = random.Random(0)
    assert not {illegal_move(chess.Board(fen), rng) for _ in range(40)} & legal_moves(fen)


def why_illegal(board, move):
    "The ways in which a move is illegal, told apart without the generator's own means."
    piece, way = board.piece_at(move.from_square), set()
    if piece is None: return {'nobody'}
    if piece.color != board.turn: return {'opponent'}
    alone = chess.Board(None)
    alone.set_piece_at(move.from_square, piece)
    alone.turn = piece.color
    between = chess.SquareSet.between(move.from_square, move.to_square) & board.occupied
    target = board.piece_at(move.to_square)
    if move in board.pseudo_legal_moves: way.add('king' if piece.piece_type == chess.KING else 'exposed')
    elif move.to_square not in alone.attacks(move.from_square): way.add('reach')
    elif between: way.add('blocked')
    elif target is None or target.color == board.turn: way.add('target')
    return way


@pytest.mark.parametrize('kind', ILLEGAL_SHARES)
def test_a_move_is_illegal_in_the_way_that_was_asked_for(kind, monkeypatch):
    "A draw of any square may hit any way, and a target may be out of bounds for the king or a pinned piece."
    monkeypatch.setattr('rookworld_nb.corpus.ILLEGAL_SHARES', {kind: 1.})
    rng, may_be = random.Random(0), {'reach': set(ILLEGAL_SHARES), 'target': {'target', 'king', 'exposed'}}
    having = [board for board in EXPOSED if kind not in ('king', 'exposed') or any(
        why_illegal(board, move) == {kind} for move in board.pseudo_legal_moves if not board.is_legal(move))]
    found = [why_illegal(board, chess.Move.from_uci(illegal_move(board, rng))) for board in having for _ in range(10)]
    assert all(way and way <= may_be.get(kind, {kind}) for way in found)
    assert sum(kind in way for way in found) > len(found)/2


def test_every_way_to_be_illegal_is_drawn():
    rng = random.Random(0)
    moves = [(board, chess.Move.from_uci(illegal_move(board, rng))) for board in EXPOSED for _ in range(20)]
    assert not any(board.is_legal(move) for board, move in moves)
    shares = {kind: sum(kind in why_illegal(*pair) for pair in moves)/len(moves) for kind in ILLEGAL_SHARES}
    assert min(shares.values()) > .03, shares


@pytest.mark.parametrize('kind', sorted(ENV_SHARES))
def test_find_kind_finds_that_kind(kind):
    sample = find_kind(kind, FENS, random.Random(1))
    asked, answer = parse_env(sample.line), parse_env(sample.completion)
    truth = env_step(asked.fen, asked.uci, asked.history)
    assert (truth.new_fen, truth.reward, truth.terminated, truth.truncated) == (
        answer.new_fen, answer.reward, answer.terminated, answer.truncated)
    if kind == 'illegal':
        assert truth.truncated
        ways = [why_illegal(chess.Board(line.fen), chess.Move.from_uci(line.uci)) for line in
                (parse_env(find_kind(kind, FENS, random.Random(seed)).line) for seed in range(400))]
        assert all(sum(way in found for found in ways)/400 > .5*share for way, share in ILLEGAL_SHARES.items())
    else:
        assert move_kind(chess.Board(asked.fen), chess.Move.from_uci(asked.uci)) == kind


def test_an_illegal_sample_has_one_of_the_positions_and_a_move_that_is_illegal_there():
    pool, rng = by_task(shipped('train'))['A'][::10], random.Random(2)
    made = [illegal_sample(pool, rng) for _ in range(400)]
    asked = [parse_env(sample.line) for sample in made]
    assert {env.fen for env in asked} <= {sample.fen for sample in pool} and len({env.fen for env in asked}) > 200
    assert all(env.uci not in legal_moves(env.fen) and env.history == (env.uci,) and env.truncated and env.new_fen == env.fen for env in asked)
    ways = [why_illegal(chess.Board(env.fen), chess.Move.from_uci(env.uci)) for env in asked]
    assert all(sum(way in found for found in ways)/400 > .6*share for way, share in ILLEGAL_SHARES.items())


def test_an_illegal_sample_keeps_what_was_played_before_and_does_not_look_for_ever():
    prompt = 'A: r1bqkbnr/pppp1ppp/2n5/4p3/4P3/5N2/PPPP1PPP/RNBQKB1R w KQkq - 2 3+f1b5+g1f3 b8c6 f1b5+'
    made = parse_env(illegal_sample([Sample(prompt, '')], random.Random(0)).line)
    assert made.history == ('g1f3', 'b8c6', made.uci) and made.uci not in legal_moves(made.fen)
    bare = [env_sample('8/8/8/8/8/8/8/K6k w - - 0 1', 'a1a2')]    # nothing to take, nothing in the way, no other piece
    assert all(parse_env(illegal_sample(bare, random.Random(seed)).completion).truncated for seed in range(20))


def test_what_the_positions_do_not_hold_is_given_up_and_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr('rookworld_nb.corpus.MOST_LOOKS', 200)
    endgames = [sample for sample in shipped('train') if sample.task == 'P' and sample.fen.split()[2] == '-'][:16]
    assert find_kind('castling', [sample.fen for sample in endgames], random.Random(0)) is None
    files = [tmp_path/f'{number}.txt' for number in range(16)]
    for file, sample in zip(files, endgames): write_lines([sample], file)
    rare = make_stress(files, per_kind=2)
    assert '0 of 2 castling' in caplog.text and len(rare) == len({sample.line for sample in rare}) > 6


def test_verdicts_are_those_of_the_rules():
    said = ''
    for fen in FENS:
        prompt, completion = verdicts(fen, random.Random(fen))
        position = prompt.removeprefix('A: ').removesuffix('+')
        judged = re.findall(r'([a-h][1-8][a-h][1-8][qrbn]?)(.)', completion)
        assert len(judged) == len({uci for uci, _ in judged}) == 24 and ''.join(map(''.join, judged)) == completion
        for uci, word in judged:
            step = env_step(position, uci, [uci])
            check = not step.truncated and chess.Board(step.new_fen).is_check()
            assert word == ('?' if step.truncated else '.!'[check] if not step.terminated else '#' if step.reward == 1 else '=')
        said += ''.join(word for _, word in judged)
    assert .5 < said.count('?')/len(said) < .7 and set(said) >= set('?.!#')


@pytest.mark.parametrize(('fen', 'uci', 'word'), [
    ('k7/8/1K6/8/8/8/8/7R w - - 0 1', 'h1h8', '#'), ('k7/8/1K6/8/8/8/8/7R w - - 0 1', 'h1a1', '!'), ('k7/8/1K6/8/8/8/8/7R w - - 0 1', 'h1b1', '.'),
    ('k7/8/2K5/8/8/8/8/7Q w - - 0 1', 'c6c7', '!'), ('7k/8/5KQ1/8/8/8/8/8 w - - 0 1', 'f6f7', '='), ('k7/8/1K6/8/8/8/8/7R w - - 0 1', 'b6a7', '?'),
    ('7k/P7/8/8/8/8/8/K7 w - - 0 1', 'a7a8q', '!'),
    ('r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1', 'e1h1', '?'), ('r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1', 'e1g1', '.')])
def test_a_verdict(fen, uci, word):
    board = chess.Board(fen)
    assert verdict(board, chess.Move.from_uci(uci)) == word and board.fen() == fen


@pytest.mark.parametrize(('fen', 'exposed'), [
    ('4r2k/8/8/8/8/8/4R3/4K3 w - - 0 1', True), ('4r2k/8/8/8/8/8/4P3/4K3 w - - 0 1', False), ('4r2k/8/8/8/8/8/3R4/4K3 w - - 0 1', True),
    ('3r3k/8/8/8/8/8/4R3/4K3 w - - 0 1', False)])    # pinned; pinned but it has no other way to go; in check; only the king is held
def test_a_position_exposes_its_king(fen, exposed):
    assert exposes_king(fen) == exposed


def test_a_killed_maker_of_data_ends_the_command(tmp_path):
    with pytest.raises(CorpusError, match='was killed.*the same command goes on'):
        corpus._make_shards([tmp_path/'a', tmp_path/'b'], os._exit, 1)


def test_no_maker_of_data_outlives_its_command(tmp_path):
    (tmp_path/'command.py').write_text(dedent("""
        import os, time
        from pathlib import Path
        from rookworld_nb.corpus import _make_shards

        def make(number):
            Path(f'{number}.pid').write_text(str(os.getpid()))
            time.sleep(600)

        if __name__ == '__main__': _make_shards([Path('a'), Path('b')], make, 2)
        """))
    with subprocess.Popen([sys.executable, 'command.py'], cwd=tmp_path) as command:
        pids = [tmp_path/'0.pid', tmp_path/'1.pid']
        assert soon(lambda: all(path.exists() and path.read_text() for path in pids))
        command.kill()
    assert soon(lambda: not any(is_running(int(path.read_text())) for path in pids))


def test_prompts_show_no_position_of_the_evaluation(tmp_path, monkeypatch):
    class Engine:
        def __init__(self, path=None, nodes=0): self.nodes = nodes
        def __enter__(self): return self
        def __exit__(self, *_): pass
        def analyse(self, fen): return tuple(Candidate(uci, self.nodes/10_000) for uci in sorted(legal_moves(fen))[:5])
    monkeypatch.setattr('rookworld_nb.corpus.Stockfish', Engine)
    rng, start = random.Random(0), chess.Board()
    after = []
    for move in start.legal_moves:
        start.push(move)
        after.append(start.fen())
        start.pop()
    (tmp_path/'prompts').mkdir()
    policy = {False: [chess.STARTING_FEN], True: after[:-1]}
    env = {False: [env_sample(chess.STARTING_FEN, move.uci()) for move in start.legal_moves], True: [env_sample(after[0], 'a7a6')]}
    for number in range(HELD_SHARDS):
        held = number >= HELD_SHARDS - 2
        write_lines([policy_sample(fen, Engine().analyse(fen), rng) for fen in policy[held]], tmp_path/'prompts'/f'policy-{number:04d}.txt')
        write_lines(env[held], tmp_path/'prompts'/f'env-{number:04d}.txt')
    rare = [env_sample(after[-1], 'a7a6')]
    train, held = make_prompts(tmp_path, rare)
    shown = seen_positions(held + rare)
    assert train and held and shown & {fen_key(fen) for fen in after} and not seen_positions(train) & shown
    labels = [parse_policy(sample.completion) for sample in train + held if sample.task == 'P']
    assert len(labels) > 10 and all(set(label.evals) == {1.} for label in labels)    # made anew; those of the shards are 0


def test_rare_outcomes_come_in_equal_numbers():
    line = lambda number, end: Sample(f'A: {chess.STARTING_FEN[:-1]}{number}+e2e4+e2e4+', f'{chess.STARTING_FEN}+{end}')
    ends = ['0.001+0+0']*60 + ['1.0+1+0']*20 + ['0.5+1+0']*9 + ['-1.0+0+1']*3
    mix = [line(number, end) for number, end in enumerate(ends, 1)]
    random.Random(0).shuffle(mix)
    for count, expected in ((50, (5, 5, 3, 37)), (10, (1, 1, 1, 7)), (200, (20, 9, 3, 60)), (0, (0, 0, 0, 0))):
        chosen = with_rare_outcomes(mix, count)
        names = [outcome(parse_env(sample.completion)) for sample in chosen]
        assert tuple(map(names.count, ('mate', 'draw', 'illegal', 'ordinary'))) == expected
        for name in set(names):    # the first of each, in their order
            ours = [sample for sample in chosen if outcome(parse_env(sample.completion)) == name]
            assert ours == [sample for sample in mix if outcome(parse_env(sample.completion)) == name][:len(ours)]


def test_the_shipped_prompts_have_as_many_draws_as_mates_and_illegal_moves():
    names = [outcome(parse_env(sample.completion)) for sample in by_task(shipped('train'))['A'][-1800:]]
    assert names.count('mate') == names.count('draw') == names.count('illegal') == 180 and 'unreadable' not in names


def test_near_misses_of_en_passant_are_dealt_out():
    rng, fens, found = random.Random(0), [sample.fen for sample in shipped('train') if sample.task == 'P'], dict.fromkeys(('declined', 'one', 'two'), 0)
    for _ in range(1000):
        answer = parse_env(corpus._ordinary(rng.choice(fens), rng).line)
        board, move = chess.Board(answer.fen), chess.Move.from_uci(answer.uci)
        assert not board.is_en_passant(move)
        steps = abs(move.to_square - move.from_square)//8 if board.piece_type_at(move.from_square) == chess.PAWN else 0
        beside = [s for s in board.pieces(chess.PAWN, not board.turn) if chess.square_rank(s) == (3 if board.turn else 4)
                  and abs(chess.square_file(s) - chess.square_file(move.to_square)) == 1]
        found['declined'] += board.ep_square is not None
        if steps and beside and not board.is_capture(move): found['one' if steps == 1 else 'two'] += 1
    assert min(found.values()) >= 8, found


def test_env_shards_are_reproducible_and_kept(tmp_path, caplog):
    caplog.set_level('INFO')
    policy = [sample for sample in shipped('train') if sample.task == 'P'][:50]
    for folder in (tmp_path/'a', tmp_path/'b'):
        folder.mkdir()
        write_lines(policy, folder/'policy-0000.txt')
        make_env_data(folder, 1, size=30, seed=3, workers=1)
    made = (tmp_path/'a'/'env-0000.txt').read_bytes()
    assert made == (tmp_path/'b'/'env-0000.txt').read_bytes() and len(read_lines(tmp_path/'a'/'env-0000.txt')[0]) > 25
    assert [text for text in caplog.messages if 'to go' in text] == [f'{name}: 1 of 1, 0 minutes to go' for name in 'ab']
    (tmp_path/'a'/'env-0000.txt').write_text('kept')
    make_env_data(tmp_path/'a', 1, size=30, seed=3, workers=1)
    assert (tmp_path/'a'/'env-0000.txt').read_text() == 'kept'


def test_shards_of_other_settings_are_refused(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr('rookworld_nb.corpus.Stockfish', lambda path, nodes: nullcontext(SimpleNamespace(name='Stockfish 2')))
    policy = [sample for sample in shipped('train') if sample.task == 'P'][:20]
    write_lines(policy, tmp_path/'policy-0000.txt')     # made before settings were kept
    make = lambda **changes: make_policy_data(tmp_path, **{'n_shards': 1, 'size': 20, 'nodes': 50, 'workers': 1} | changes)
    assert make() == [tmp_path/'policy-0000.txt'] and "'nodes': 50" in caplog.text
    caplog.clear()
    make(workers=2)
    assert not caplog.records
    for change, words in (({'nodes': 60}, '--nodes 50, not 60'), ({'size': 21}, '--policy-shard 20, not 21'),
                          ({'seed': 1}, '--seed 0, not 1'), ({'mate_share': .1}, '--mate-share 0.0, not 0.1')):
        with pytest.raises(CorpusError, match=words):
            make(n_shards=2, **change)
    notes = json.loads((tmp_path/'policy.json').read_text())
    (tmp_path/'policy.json').write_text(json.dumps(notes | {'engine': 'Stockfish 1'}))
    assert make() == [tmp_path/'policy-0000.txt']    # nothing is left to ask an engine
    with pytest.raises(CorpusError, match='engine Stockfish 1, not Stockfish 2'): make(n_shards=2)
    (tmp_path/'policy.json').write_text(json.dumps({name: value for name, value in notes.items() if name != 'mate_share'}))
    with pytest.raises(CorpusError, match='--mate-share None, not 0.0'): make()    # who wrote it did not know of it
    make_env_data(tmp_path, 1, size=5, seed=3, workers=1)
    with pytest.raises(CorpusError, match='--env-shard 5, not 6'):
        make_env_data(tmp_path, 2, size=6, seed=3, workers=1)
    assert not (tmp_path/'policy-0001.txt').exists() and not (tmp_path/'env-0001.txt').exists()


def test_a_damaged_shard_is_named(tmp_path):
    good = shipped('heldout')[0].line
    (tmp_path/'policy-0000.txt').write_text(f'{good}\n{good[:40]}\n')
    with pytest.raises(CorpusError, match='policy-0000.txt, line 2'): whole_shard(tmp_path/'policy-0000.txt')


@pytest.mark.parametrize('fen, uci', [('7k/8/8/8/3n4/2B5/8/K7 w - - 0 1', 'c3d4'), ('8/4P3/2k5/8/8/8/8/K7 w - - 0 1', 'e7e8b')])
def test_a_draw_is_a_draw_though_the_move_gives_check(fen, uci):
    step = env_step(fen, uci, [uci])
    assert step.terminated and step.reward == .5 and move_kind(chess.Board(fen), chess.Move.from_uci(uci)) == 'draw'


def test_what_is_looked_for_in_vain_is_said():
    for kind, fens in (('mates', FENS), ('mate', [])):
        with pytest.raises(CorpusError, match='valid kinds'): find_kind(kind, fens, random.Random(0))


def test_rare_moves_are_apart_from_the_prompts_and_no_position_comes_twice(tmp_path, monkeypatch):
    monkeypatch.setattr('rookworld_nb.corpus.MOST_LOOKS', 200)
    monkeypatch.setattr('rookworld_nb.corpus.ENV_SHARES', {'castling': 1.})
    castles, files = ['4k3/8/8/8/8/8/8/4K2R w K - 0 1', 'r3k3/8/8/8/8/8/8/4K3 b q - 0 1'], [tmp_path/f'{number}.txt' for number in range(2*HELD_SHARDS)]
    for number, file in enumerate(files):    # the first is among the prompts
        fens = castles[:1] if number%HELD_SHARDS < HELD_SHARDS - 2 else castles
        write_lines([policy_sample(fen, tuple(Candidate(uci, 0.) for uci in sorted(legal_moves(fen))[:5]), random.Random(0)) for fen in fens], file)
    assert [sample.fen for sample in make_stress(files, per_kind=3)] == castles[1:]


def test_a_mate_keeps_its_distance():
    sample = policy_sample(chess.STARTING_FEN, (Candidate('e2e4', -.01), Candidate('d2d4', -999.97)), random.Random(0))
    assert '-0.0' not in sample.completion and '-999.97' in sample.completion


@pytest.mark.parametrize('best, least, most', [(.6, 2, 4), (999.97, 20, 1000)])
def test_the_better_a_move_is_the_likelier_it_is_played(best, least, most):
    rng, candidates = random.Random(0), (Candidate('e2e4', best), Candidate('d2d4', 0.))
    played = Counter(corpus._next_move(chess.Board(), candidates, rng) for _ in range(400))
    assert least < played['e2e4']/played['d2d4'] < most and len(played) > 10    # e = 2.7 times as often as one that is .6 pawns worse; some at random
    assert corpus._next_move(chess.Board(), candidates[:1], random.Random(0)) == 'e2e4'
